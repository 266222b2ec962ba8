use super::*;

#[test]
fn shipped_profiles_meet_what_they_were_calibrated_to() {
    // Rows that a profile cannot meet are in docs/MODEL.md; their number may only fall.
    for (name, unmet) in
        [("ideal", 0), ("intel-900p", 0), ("intel-p4800x", 0), ("intel-p3700", 0), ("samsung-980-pro", 10)]
    {
        let report = fit(&Profile::shipped(name).unwrap(), &Effort::QUICK, 3);
        let missed: Vec<&Row> = report.counted().filter(|row| !row.is_met()).collect();
        assert!(missed.len() <= unmet, "{name}: {missed:#?}");
        assert!(report.mean_error_percent() < 7.0, "{name}: {}", report.mean_error_percent());
    }
}

#[test]
fn excluded_figures_are_compared_and_not_counted() {
    let mut profile = Profile::shipped("ideal").unwrap();
    profile.target[0].value *= 2.0;
    profile.target[0].excluded = Some("it is wrong".to_string());
    let report = fit(&profile, &Effort::QUICK, 1);
    assert_eq!((report.rows.len(), report.counted().count(), report.met()), (2, 1, 1));
    assert!(report.rows[0].error_percent < -40.0 && report.mean_error_percent() < 1.0);
}

#[test]
fn a_wrong_model_is_seen() {
    let mut profile = Profile::shipped("intel-p4800x").unwrap();
    profile.read.path_us[0].us *= 2.0;
    let report = fit(&profile, &Effort::QUICK, 3);
    assert!(report.rows[0].error_percent > 20.0);
    assert!(report.met() < report.rows.len());
}
