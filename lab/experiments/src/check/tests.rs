use super::*;

/// Records of two APIs whose IOPS grow with depth up to 8 and then fall slightly.
fn records() -> Vec<CellRecord> {
    let mut records = Vec::new();
    for (api, factor) in [("iou", 1.0), ("spdk", 2.0)] {
        for (depth, iops) in [(1, 100.0), (2, 190.0), (8, 700.0), (32, 720.0), (128, 600.0)] {
            for repetition in 0..2 {
                let mut record = CellRecord::new("t.fig", api);
                record.parameters.insert("api".into(), api.into());
                record.parameters.insert("iodepth".into(), ParameterValue::from(depth));
                record.repetition = repetition;
                let off = if repetition == 0 { -10.0 } else { 10.0 };
                record.role_mut("fg").set("iops", iops * factor + off);
                records.push(record);
            }
        }
    }
    records
}

fn pick(text: &str) -> MetricQuery {
    toml::from_str(text).unwrap()
}

#[test]
fn aggregations_compute_the_documented_numbers() {
    let records = records();
    let value = |text: &str| pick(text).value("t.fig", &records, &CellParameters::new());
    let iou = "metric = 'iops'\nalong = 'iodepth'\nwhere = { api = 'iou' }\n";
    for (take, expected) in [
        ("max", 720.0),
        ("min", 100.0),
        ("mean", 462.0),
        ("first", 100.0),
        ("last", 600.0),
        ("knee", 8.0),
        ("growth", 6.0),
        ("spread", 7.2),
        ("kept", 600.0 / 720.0),
    ] {
        let found = value(&format!("{iou}take = '{take}'")).unwrap();
        assert!((found - expected).abs() < 1e-9, "{take}: {found} is not {expected}");
    }
    assert!(value("metric = 'iops'\nwhere = { api = 'aio' }").unwrap_err().contains("aio"));
    assert!(value("metric = 'ipc'").unwrap_err().contains("ipc"));
    assert!(value(&format!("{iou}take='knee'").replace("along = 'iodepth'", "along = 'jobs'")).is_err());
}

fn check(text: &str) -> FindingCheck {
    toml::from_str(text).unwrap()
}

#[test]
fn a_check_holds_fails_or_is_not_tested() {
    let ratio = |api: &str, bound: &str| {
        check(&format!(
            "of = {{ metric = 'iops', take = 'max', where = {{ api = '{api}' }} }}\n\
             against = {{ metric = 'iops', take = 'max', where = {{ api = 'iou' }} }}\n{bound}"
        ))
        .evaluate("t.fig", &records())
    };
    assert_eq!(ratio("spdk", "at_least = 1.9").verdict, Verdict::Holds);
    let missed = ratio("spdk", "at_least = 2.5");
    assert_eq!((missed.verdict, missed.measured), (Verdict::DoesNotHold, Some(2.0)));
    assert_eq!(ratio("spdk", "at_most = 1.5").verdict, Verdict::DoesNotHold);
    assert_eq!(ratio("spdk", "at_least = 1\nat_most = 1.5").verdict, Verdict::DoesNotHold);
    let untested = ratio("psync", "at_least = 1");
    assert_eq!((untested.verdict, untested.measured), (Verdict::NotTested, None));
    assert!(untested.remark.contains("psync"), "{}", untested.remark);
}

#[test]
fn for_each_reports_the_worst_value() {
    let each = check(
        "for_each = ['iodepth']\nrelation = 'gain-pct'\nat_least = 99.5\n\
         of = { metric = 'iops', where = { api = 'spdk' } }\n\
         against = { metric = 'iops', where = { api = 'iou' } }",
    );
    let outcome = each.evaluate("t.fig", &records());
    assert_eq!(outcome.verdict, Verdict::Holds);
    assert_eq!(outcome.range, Some((100.0, 100.0)));
    let mut slow = records();
    for record in &mut slow {
        if record.series == "spdk" && record.parameters["iodepth"].same(&ParameterValue::from(8)) {
            record.role_mut("fg").set("iops", 10.0);
        }
    }
    let outcome = each.evaluate("t.fig", &slow);
    assert_eq!((outcome.verdict, outcome.remark.as_str()), (Verdict::DoesNotHold, "iodepth 8"));
}

#[test]
fn a_finding_holds_if_all_tested_checks_hold() {
    let holding = "at_least = 1\nof = { experiment = 't.fig', metric = 'iops' }";
    let failing = "at_most = 1\nof = { experiment = 't.fig', metric = 'iops' }";
    let absent = "at_least = 1\nof = { experiment = 't.none', metric = 'iops' }";
    let verdict = |checks: &[&str]| {
        let check = checks.iter().map(|text| check(text)).collect();
        Finding { check, ..Finding::default() }.evaluate(&records()).verdict
    };
    assert_eq!(verdict(&[holding, absent]), Verdict::Holds);
    assert_eq!(verdict(&[holding, failing]), Verdict::DoesNotHold);
    assert_eq!(verdict(&[absent]), Verdict::NotTested);
    assert_eq!(verdict(&[]), Verdict::NotTested);
}

#[test]
fn unmet_requirements_leave_a_check_untested() {
    let mut records = records();
    for record in &mut records {
        record.parameters.insert("cores".into(), ParameterValue::from(4));
        record.parameters.insert("devices".into(), ParameterValue::from(1));
    }
    let needing =
        |needs: &str| check(&format!("at_least = 1\nneeds = '{needs}'\nof = {{ metric = 'iops' }}"));
    assert_eq!(needing("cores>=4").evaluate("t.fig", &records).verdict, Verdict::Holds);
    let both = needing("cores>=4, devices>=2").evaluate("t.fig", &records);
    assert_eq!(both.verdict, Verdict::NotTested);
    assert_eq!(both.remark, "needs devices of at least 2; at most 1 here");
    assert_eq!(needing("cores >= 4").requirement_error(), None);
    for wrong in ["cores>4", "cores>=many", ">=2", "cores>=4,"] {
        assert!(needing(wrong).requirement_error().is_some(), "{wrong}");
    }
}

#[test]
fn skipped_and_failed_cells_are_not_measurements() {
    let mut records = records();
    for record in &mut records {
        record.failed = Some("the device is gone".into());
    }
    let check = check("at_least = 1\nof = { metric = 'iops' }");
    assert_eq!(check.evaluate("t.fig", &records).verdict, Verdict::NotTested);
}
