use super::*;

#[test]
fn shipped_profiles_meet_what_they_were_calibrated_to() {
    // Rows that a profile cannot meet are in docs/MODEL.md; their number may only fall.
    for (name, unmet) in
        [("ideal", 0), ("intel-900p", 0), ("intel-p4800x", 2), ("intel-p3700", 4), ("samsung-980-pro", 25)]
    {
        let report = fit(&Profile::shipped(name).unwrap(), &Effort::QUICK, 3);
        let missed: Vec<&Row> = report.rows.iter().filter(|row| !row.is_met()).collect();
        assert!(missed.len() <= unmet, "{name}: {missed:#?}");
        assert!(report.mean_error_percent() < 7.0, "{name}: {}", report.mean_error_percent());
    }
}

#[test]
fn a_wrong_model_is_seen() {
    let mut profile = Profile::shipped("intel-p4800x").unwrap();
    profile.read.path_us[0].us *= 2.0;
    let report = fit(&profile, &Effort::QUICK, 3);
    assert!(report.rows[0].error_percent > 20.0);
    assert!(report.met() < report.rows.len());
}
