use experiments::{CellRecord, Value};

use super::*;

fn run(repetitions: u32, values: impl Fn(i64, u32) -> (f64, f64)) -> Run {
    let mut run = Run::default();
    for depth in [1, 8] {
        for repetition in 0..repetitions {
            let mut record = CellRecord::new("t.fig", "none");
            record.parameters.insert("iodepth".into(), Value::from(depth));
            record.repetition = repetition;
            record.generator.name = "fio".into();
            let (iops, tail) = values(depth, repetition);
            record.role_mut("fg").set("iops", iops);
            record.role_mut("fg").set("clat_p99_us", tail);
            run.records.push(record);
        }
    }
    run
}

fn off(repetition: u32) -> f64 {
    1.0 + 0.002 * f64::from(repetition)
}

fn base() -> Run {
    run(3, |depth, repetition| (depth as f64 * 1e4 * off(repetition), 100.0 * off(repetition)))
}

fn verdicts(comparison: &Comparison) -> Vec<(&str, Verdict)> {
    comparison.rows.iter().map(|row| (row.metric, row.verdict)).collect()
}

#[test]
fn a_run_is_the_same_as_itself() {
    let comparison = compare(&base(), &base(), Rules::default());
    assert!(comparison.rows.iter().all(|row| row.verdict == Verdict::Same && row.ratio == Some(1.0)));
    assert_eq!(comparison.rows.len(), 4);
    assert_eq!(comparison.regressions(0.0).count(), 0);
}

#[test]
fn faster_and_slower_follow_the_metric() {
    let other = run(3, |depth, repetition| (depth as f64 * 1.2e4 * off(repetition), 130.0 * off(repetition)));
    let comparison = compare(&base(), &other, Rules::default());
    assert_eq!(verdicts(&comparison)[..2], [("iops", Verdict::Faster), ("clat_p99_us", Verdict::Slower)]);
    assert_eq!(comparison.regressions(25.0).count(), 2, "the tails are 30 % worse");
    assert_eq!(comparison.regressions(35.0).count(), 0);
    let text = text(&comparison, 100);
    assert!(text.contains("2 slower, 2 faster"), "{text}");
}

#[test]
fn one_repetition_has_a_ratio_and_no_interval() {
    let once = run(1, |depth, _| (depth as f64 * 0.5e4, 100.0));
    let comparison = compare(&base(), &once, Rules::default());
    assert!(comparison.rows.iter().all(|row| row.verdict == Verdict::NoInterval && row.interval.is_none()));
    assert_eq!(comparison.regressions(50.0).count(), 2, "half the throughput is 100 % worse");
}

#[test]
fn chance_and_less_than_noise_are_the_same() {
    let wild = [0.7, 1.5, 1.0];
    let other = run(3, |depth, repetition| (depth as f64 * 1.1e4 * wild[repetition as usize], 100.5));
    let comparison = compare(&base(), &other, Rules::default());
    assert!(comparison.rows.iter().all(|row| row.verdict == Verdict::Same), "{:?}", verdicts(&comparison));
}

#[test]
fn what_was_measured_otherwise_is_not_compared() {
    let mut other = base();
    for record in &mut other.records {
        record.generator.name = "ringbolt".into();
    }
    let comparison = compare(&base(), &other, Rules::default());
    assert!(comparison.rows.iter().all(|row| row.verdict == Verdict::NotComparable));
    assert_eq!(comparison.rows[0].remark, "driven by fio and by ringbolt");
    let fewer = run(3, |_, _| (1.0, 1.0));
    let mut fewer = Run { records: fewer.records.into_iter().take(3).collect(), ..Run::default() };
    fewer.records[0].parameters.insert("iodepth".into(), Value::from(99));
    let comparison = compare(&base(), &fewer, Rules::default());
    let remarks: Vec<&str> = comparison.rows.iter().map(|row| row.remark.as_str()).collect();
    assert!(
        remarks.contains(&"only the first run has it") && remarks.contains(&"only the second run has it")
    );
}

#[test]
fn a_page_of_hostile_names_stays_a_page() {
    let mut hostile = base();
    for record in &mut hostile.records {
        record.experiment = "<script>alert(1)</script>".into();
        record.parameters.insert("\"><img src=x>".into(), "<b>&".into());
    }
    let page = html(&compare(&hostile, &hostile, Rules::default()));
    assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("<b>"));
}
