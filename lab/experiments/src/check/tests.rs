use super::*;
use crate::record::ParameterValue;

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
    let value = |text: &str| {
        let mut estimates = Estimates::new(&records, Precision::Measured);
        pick(text).select_cells("t.fig", &CellParameters::new(), &mut estimates)?.value(&estimates.means())
    };
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
        .evaluate("t.fig", &records(), Precision::Exact)
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
    let outcome = each.evaluate("t.fig", &records(), Precision::Exact);
    assert_eq!(outcome.verdict, Verdict::Holds);
    assert_eq!(outcome.range, Some((100.0, 100.0)));
    let mut slow = records();
    for record in &mut slow {
        if record.series == "spdk" && record.parameters["iodepth"].same(&ParameterValue::from(8)) {
            record.role_mut("fg").set("iops", 10.0);
        }
    }
    let outcome = each.evaluate("t.fig", &slow, Precision::Exact);
    assert_eq!((outcome.verdict, outcome.remark.as_str()), (Verdict::DoesNotHold, "iodepth 8"));
}

#[test]
fn a_finding_holds_if_all_tested_checks_hold() {
    let holding = "at_least = 1\nof = { experiment = 't.fig', metric = 'iops' }";
    let failing = "at_most = 1\nof = { experiment = 't.fig', metric = 'iops' }";
    let absent = "at_least = 1\nof = { experiment = 't.none', metric = 'iops' }";
    let verdict = |checks: &[&str]| {
        let check = checks.iter().map(|text| check(text)).collect();
        Finding { check, ..Finding::default() }.evaluate(&records(), Precision::Exact).verdict
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
    assert_eq!(needing("cores>=4").evaluate("t.fig", &records, Precision::Exact).verdict, Verdict::Holds);
    let both = needing("cores>=4, devices>=2").evaluate("t.fig", &records, Precision::Exact);
    assert_eq!(both.verdict, Verdict::NotTested);
    assert_eq!(both.remark, "needs devices of at least 2; at most 1 here");
    assert_eq!(needing("cores<=4").evaluate("t.fig", &records, Precision::Exact).verdict, Verdict::Holds);
    let fewer = needing("cores<=3").evaluate("t.fig", &records, Precision::Exact);
    assert_eq!(
        (fewer.verdict, fewer.remark.as_str()),
        (Verdict::NotTested, "needs cores of at most 3; 4 here")
    );
    assert_eq!(needing("cores >= 4").requirement_error(), None);
    for wrong in ["cores>4", "cores>=many", ">=2", "cores>=4,", "<=3", "cores<="] {
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
    assert_eq!(check.evaluate("t.fig", &records, Precision::Exact).verdict, Verdict::NotTested);
}

/// Two schedulers, `factor` apart, at eight depths with three repetitions each that scatter by about 2 %.
fn measured(factor: f64) -> Vec<CellRecord> {
    let mut random = random::WyRand::new(5);
    let mut records = Vec::new();
    for (scheduler, factor) in [("none", 1.0), ("bfq", factor)] {
        for depth in [1, 2, 4, 8, 16, 32, 64, 128] {
            for repetition in 0..3 {
                let mut record = CellRecord::new("t.fig", scheduler);
                record.parameters.insert("scheduler".into(), scheduler.into());
                record.parameters.insert("iodepth".into(), ParameterValue::from(depth));
                record.repetition = repetition;
                let noise = (0.02 * random.normal()).exp();
                record.role_mut("fg").set("iops", depth as f64 * 1e3 * factor * noise);
                records.push(record);
            }
        }
    }
    records
}

const SLOWER: &str = "says = 'BFQ is slower'\nat_most = 0.9\n\
    of = { metric = 'iops', where = { scheduler = 'bfq', iodepth = 8 } }\n\
    against = { metric = 'iops', where = { scheduler = 'none', iodepth = 8 } }";

#[test]
fn a_verdict_needs_the_whole_interval() {
    let verdict = |factor| check(SLOWER).evaluate("t.fig", &measured(factor), Precision::Measured);
    assert_eq!(verdict(0.7).verdict, Verdict::Holds);
    assert_eq!(verdict(1.1).verdict, Verdict::DoesNotHold);
    let close = verdict(0.9);
    assert_eq!(close.verdict, Verdict::Undecided, "{close:?}");
    let (low, high) = close.interval.unwrap();
    assert!(low < 0.9 && 0.9 < high && high - low < 0.25, "{close:?}");
}

#[test]
fn what_was_measured_once_is_undecided() {
    let mut records = measured(0.5);
    records.retain(|record| record.repetition == 0);
    let outcome = check(SLOWER).evaluate("t.fig", &records, Precision::Measured);
    assert_eq!((outcome.verdict, outcome.interval), (Verdict::Undecided, None));
    assert!(outcome.remark.contains("measured once"), "{}", outcome.remark);
    assert!((outcome.measured.unwrap() - 0.5).abs() < 0.1);
}

#[test]
fn a_stand_in_is_not_judged() {
    let mut records = measured(0.5);
    for record in records.iter_mut().filter(|record| record.series == "bfq") {
        record.stand_in = Some("it shares its core".into());
    }
    let outcome = check(SLOWER).evaluate("t.fig", &records, Precision::Measured);
    assert_eq!((outcome.verdict, outcome.remark.as_str()), (Verdict::NotTested, "bfq: it shares its core"));
    let alone = check("at_least = 1\nof = { metric = 'iops', where = { scheduler = 'none' } }");
    assert_eq!(alone.evaluate("t.fig", &records, Precision::Measured).verdict, Verdict::Holds);
}

#[test]
fn many_groups_widen_their_intervals() {
    let each =
        check(&SLOWER.replace(", iodepth = 8", "").replacen("at_most", "for_each = ['iodepth']\nat_most", 1));
    let single = check(SLOWER).evaluate("t.fig", &measured(0.7), Precision::Measured).interval.unwrap();
    let outcome = each.evaluate("t.fig", &measured(0.7), Precision::Measured);
    let several = outcome.interval.unwrap();
    assert_eq!(outcome.verdict, Verdict::Holds);
    assert!(several.1 / several.0 > 1.1 * single.1 / single.0 - 0.1, "{several:?} {single:?}");
    // One group that fails decides, and one that is undecided prevents that the check holds.
    let mut one_off = measured(0.7);
    for record in one_off.iter_mut().filter(|record| record.series == "bfq") {
        if record.parameters["iodepth"].same(&ParameterValue::from(64)) {
            let iops = record.metric("fg", "iops").unwrap() / 0.7;
            record.role_mut("fg").set("iops", iops * 0.9);
        }
    }
    let outcome = each.evaluate("t.fig", &one_off, Precision::Measured);
    assert_eq!((outcome.verdict, outcome.remark.as_str()), (Verdict::Undecided, "iodepth 64"), "{outcome:?}");
}

#[test]
fn a_finding_says_what_was_not_tested() {
    let absent = check("says = 'more cores'\nat_least = 1\nof = { experiment = 't.none', metric = 'iops' }");
    let holds = check("says = 'something'\nat_least = 1\nof = { experiment = 't.fig', metric = 'iops' }");
    let open = check(&SLOWER.replacen("{ metric", "{ experiment = 't.fig', metric", 2));
    let finding = |check: &[&FindingCheck]| Finding {
        check: check.iter().map(|check| (*check).clone()).collect(),
        ..Finding::default()
    };
    let outcome = finding(&[&holds, &absent]).evaluate(&measured(0.9), Precision::Measured);
    assert_eq!(outcome.verdict, Verdict::Holds);
    assert_eq!(outcome.remark, "not tested: more cores (nothing of t.none was measured)");
    let other = check("says = 'and less'\nat_least = 1\nof = { experiment = 't.none', metric = 'iops' }");
    let outcome = finding(&[&absent, &holds, &other]).evaluate(&measured(0.9), Precision::Measured);
    assert_eq!(outcome.remark, "not tested: more cores, and less (nothing of t.none was measured)");
    let unmeasured = check("says = 'power'\nat_least = 1\nof = { experiment = 't.fig', metric = 'watts' }");
    let outcome = finding(&[&unmeasured]).evaluate(&measured(0.9), Precision::Measured);
    assert!(
        outcome.remark.starts_with("not tested: power (t.fig: watts was not measured"),
        "{}",
        outcome.remark
    );
    let outcome = finding(&[&holds, &open]).evaluate(&measured(0.9), Precision::Measured);
    assert_eq!((outcome.verdict, outcome.remark.as_str()), (Verdict::Undecided, ""));
    let impossible = Finding { not_tested: Some("it needs a fabric".into()), ..Finding::default() };
    let outcome = impossible.evaluate(&measured(1.0), Precision::Measured);
    assert_eq!(outcome.verdict, Verdict::NotTested);
    assert_eq!(outcome.remark, "not tested: it needs a fabric");
}
