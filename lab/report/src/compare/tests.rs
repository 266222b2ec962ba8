use lab_experiments::{CellRecord, ParameterValue};

use super::*;

fn run(repetitions: u32, values: impl Fn(i64, u32) -> (f64, f64)) -> RunDirectory {
    let mut run = RunDirectory::default();
    for depth in [1, 8] {
        for repetition in 0..repetitions {
            let mut record = CellRecord::new("t.fig", "none");
            record.parameters.insert("iodepth".into(), ParameterValue::from(depth));
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

fn jitter(repetition: u32) -> f64 {
    1.0 + 0.002 * f64::from(repetition)
}

fn base() -> RunDirectory {
    run(3, |depth, repetition| (depth as f64 * 1e4 * jitter(repetition), 100.0 * jitter(repetition)))
}

fn verdicts(comparison: &Comparison) -> Vec<(&str, ChangeVerdict)> {
    comparison.rows.iter().map(|row| (row.metric, row.verdict)).collect()
}

#[test]
fn a_run_compared_with_itself_is_unchanged() {
    let comparison = compare(&[base()], &[base()], CompareOptions::default());
    assert!(comparison.rows.iter().all(|row| row.verdict == ChangeVerdict::Same && row.ratio == Some(1.0)));
    assert_eq!(comparison.rows.len(), 4);
    assert!(matches!(comparison.regression(2.0), RegressionVerdict::None));
    assert!(matches!(comparison.regression(0.0), RegressionVerdict::None), "the rows are the same");
}

#[test]
fn faster_and_slower_follow_the_direction_of_the_metric() {
    let other =
        run(3, |depth, repetition| (depth as f64 * 1.2e4 * jitter(repetition), 130.0 * jitter(repetition)));
    let comparison = compare(&[base()], &[other], CompareOptions::default());
    assert_eq!(
        verdicts(&comparison)[..2],
        [("iops", ChangeVerdict::Faster), ("clat_p99_us", ChangeVerdict::Slower)]
    );
    let RegressionVerdict::Worse(rows) = comparison.regression(25.0) else {
        panic!("the tails are 30 % worse")
    };
    assert_eq!(rows.len(), 2);
    assert!(matches!(comparison.regression(35.0), RegressionVerdict::None));
    let text = text(&comparison, 100);
    assert!(text.contains("2 slower, 2 faster"), "{text}");
}

#[test]
fn a_single_repetition_has_a_ratio_without_interval() {
    let once = run(1, |depth, _| (depth as f64 * 0.5e4, 100.0));
    let comparison = compare(&[base()], &[once], CompareOptions::default());
    assert!(
        comparison.rows.iter().all(|row| row.verdict == ChangeVerdict::NoInterval && row.interval.is_none())
    );
    let RegressionVerdict::Undecided(rows) = comparison.regression(50.0) else { panic!("measured once") };
    assert_eq!(rows.len(), 4);
}

#[test]
fn noise_is_told_from_equality() {
    let noise = [0.7, 1.5, 1.0];
    let other = run(3, |depth, repetition| (depth as f64 * 1.1e4 * noise[repetition as usize], 100.5));
    let comparison = compare(&[base()], &[other], CompareOptions::default());
    let found = verdicts(&comparison);
    assert_eq!(found[..2], [("iops", ChangeVerdict::TooNoisy), ("clat_p99_us", ChangeVerdict::Same)]);
    let RegressionVerdict::Undecided(rows) = comparison.regression(5.0) else { panic!("{found:?}") };
    assert!(rows.iter().all(|row| row.metric == "iops"));
    let page = html(&comparison);
    assert!(page.contains("too noisy to tell") && page.contains("between two successive runs"));
}

#[test]
fn cells_from_different_generators_are_not_comparable() {
    let mut other = base();
    for record in &mut other.records {
        record.generator.name = "ringbolt".into();
    }
    let comparison = compare(&[base()], &[other], CompareOptions::default());
    assert!(comparison.rows.iter().all(|row| row.verdict == ChangeVerdict::NotComparable));
    assert_eq!(comparison.rows[0].remark, "different generators: fio and ringbolt");
    let fewer = run(3, |_, _| (1.0, 1.0));
    let mut fewer =
        RunDirectory { records: fewer.records.into_iter().take(3).collect(), ..RunDirectory::default() };
    fewer.records[0].parameters.insert("iodepth".into(), ParameterValue::from(99));
    let comparison = compare(&[base()], &[fewer], CompareOptions::default());
    let remarks: Vec<&str> = comparison.rows.iter().map(|row| row.remark.as_str()).collect();
    assert!(remarks.contains(&"missing in the second run") && remarks.contains(&"missing in the first run"));
}

#[test]
fn hostile_names_are_escaped_in_html() {
    let mut hostile = base();
    for record in &mut hostile.records {
        record.experiment = "<script>alert(1)</script>".into();
        record.parameters.insert("\"><img src=x>".into(), "<b>&".into());
    }
    let page = html(&compare(&[hostile.clone()], &[hostile], CompareOptions::default()));
    // The only script is the page's own.
    assert!(page.matches("<script").count() == 1 && !page.contains("<script>alert"));
    assert!(!page.contains("<img") && !page.contains("<b>"));
}

#[test]
fn the_page_names_common_parameters_once_and_draws_the_ratios() {
    let with_more = |mut run: RunDirectory| {
        for record in &mut run.records {
            record.parameters.insert("api".into(), "iou".into());
            record.parameters.insert("block_bytes".into(), ParameterValue::from(4096));
        }
        run
    };
    let slower =
        run(3, |depth, repetition| (depth as f64 * 5e3 * jitter(repetition), 100.0 * jitter(repetition)));
    let comparison = compare(&[with_more(base())], &[with_more(slower)], CompareOptions::default());
    let page = html(&comparison);
    assert_eq!(page.matches("api iou").count(), 1, "{page}");
    assert!(page.contains("All cells: api iou, block_bytes 4096."), "{page}");
    assert!(page.contains("<td>iodepth 8</td>"), "{page}");
    let svg = page.split_once("<svg").and_then(|(_, rest)| rest.split_once("</svg>")).unwrap().0;
    assert!(svg.contains("iodepth 8") && svg.contains("throughput · iodepth 1: 0.5<"), "{svg}");
}

#[test]
fn the_values_of_a_row_have_its_ratio() {
    let run = |values: [f64; 2]| {
        let mut run = RunDirectory::default();
        for (cell, factor) in [(1, 1.0), (2, 3.0)] {
            for (repetition, value) in values.iter().enumerate() {
                let mut record = CellRecord::new("t.fig", "iou");
                record.parameters.insert("iodepth".into(), ParameterValue::from(cell));
                record.parameters.insert("api".into(), ParameterValue::from("iou"));
                record.repetition = repetition as u32;
                record.role_mut("fg").set("iops", value * factor);
                run.records.push(record);
            }
        }
        run
    };
    // The arithmetic means are 505 and 110, and would show a loss.
    let comparison = compare(&[run([10.0, 1000.0])], &[run([100.0, 120.0])], CompareOptions::default());
    for row in &comparison.rows {
        let (a, b, ratio) = (row.a.unwrap(), row.b.unwrap(), row.ratio.unwrap());
        assert!((b / a - ratio).abs() < 1e-9 && ratio > 1.0, "{row:?}");
    }
    let text = text(&comparison, 10);
    assert!(text.contains("all cells of t.fig: api iou\n") && text.contains("[iodepth 2]"), "{text}");
}
