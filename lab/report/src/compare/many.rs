//! Compares many runs with one baseline: kernels, file systems, devices, versions.

use lab_experiments::RunDirectory;
use serde::Serialize;

use super::render::cell_order;
use super::{CompareOptions, Comparison, ComparisonRow, decide, undecided};

/// Several runs, each compared with the same baseline.
#[derive(Clone, Debug, Serialize)]
pub struct ManyComparison {
    /// The directories of the baseline.
    pub baseline: String,
    /// One comparison for each run, in the order in which they were given.
    pub comparisons: Vec<Comparison>,
}

/// One metric of one cell in all comparisons.
pub(super) struct ManyRow<'a> {
    pub(super) experiment: &'a str,
    pub(super) cell: &'a str,
    pub(super) metric: &'static str,
    /// By comparison; `None` if a run lacks the cell.
    pub(super) rows: Vec<Option<&'a ComparisonRow>>,
}

/// Compares each of `runs` with the baseline. Significance is decided for the rows of all comparisons together, so that
/// more runs do not find more differences by chance.
pub fn compare_many(
    baseline: &[RunDirectory],
    runs: &[RunDirectory],
    rules: CompareOptions,
) -> ManyComparison {
    let mut comparisons: Vec<Comparison> =
        runs.iter().map(|run| undecided(baseline, std::slice::from_ref(run), rules)).collect();
    decide(comparisons.iter_mut().flat_map(|comparison| comparison.rows.iter_mut()), rules);
    let baseline = comparisons.first().map_or(String::new(), |comparison| comparison.a.clone());
    ManyComparison { baseline, comparisons }
}

impl ManyComparison {
    /// The cells with a ratio in at least one comparison, in the order of their parameters.
    pub(super) fn rows(&self) -> Vec<ManyRow<'_>> {
        let mut places = std::collections::HashMap::new();
        let mut rows: Vec<ManyRow<'_>> = Vec::new();
        for (index, comparison) in self.comparisons.iter().enumerate() {
            for row in comparison.rows.iter().filter(|row| row.ratio.is_some()) {
                let key = (row.experiment.as_str(), row.cell.as_str(), row.metric);
                let place = *places.entry(key).or_insert(rows.len());
                if place == rows.len() {
                    let (experiment, cell, metric) = key;
                    rows.push(ManyRow { experiment, cell, metric, rows: vec![None; self.comparisons.len()] });
                }
                rows[place].rows[index] = Some(row);
            }
        }
        // A run is measured in a random order.
        rows.sort_by(|a, b| a.experiment.cmp(b.experiment).then_with(|| cell_order(a.cell, b.cell)));
        rows
    }

    /// The letter of a run: B for the first that is compared, AA after Z.
    pub fn letter(index: usize) -> String {
        let (high, low) = ((index + 1) / 26, (index + 1) % 26);
        let letter = |number: usize| char::from(b'A' + (number % 26) as u8);
        if high == 0 { letter(low).to_string() } else { format!("{}{}", letter(high - 1), letter(low)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{ChangeVerdict, html_of_many, text_of_many};
    use lab_experiments::{CellRecord, ParameterValue};

    fn run(name: &str, factor: f64) -> RunDirectory {
        let mut run = RunDirectory { path: name.into(), ..RunDirectory::default() };
        for cell in 0..4 {
            for repetition in 0..4u32 {
                let mut record = CellRecord::new("t.fig", "iou");
                record.parameters.insert("iodepth".into(), ParameterValue::from(cell));
                record.parameters.insert("api".into(), ParameterValue::from("iou"));
                record.repetition = repetition;
                let wobble = 1.0 + 0.001 * f64::from((repetition * 7 + cell as u32 * 3) % 5);
                record.role_mut("fg").set("iops", 1000.0 * factor * wobble);
                run.records.push(record);
            }
        }
        run
    }

    #[test]
    fn each_run_is_compared_with_the_baseline() {
        let runs = [run("same", 1.0), run("half", 0.5), run("<double>", 2.0)];
        let many = compare_many(&[run("base", 1.0)], &runs, CompareOptions::default());
        let verdicts = |index: usize, verdict| many.comparisons[index].count(verdict);
        assert_eq!(verdicts(0, ChangeVerdict::Faster) + verdicts(0, ChangeVerdict::Slower), 0);
        assert_eq!((verdicts(1, ChangeVerdict::Slower), verdicts(2, ChangeVerdict::Faster)), (4, 4));
        let rows = many.rows();
        assert_eq!(rows.len(), 4);
        assert!(rows.iter().all(|row| row.rows.iter().all(Option::is_some)));
        let text = text_of_many(&many, 10);
        for words in ["A  base", "D  <double>", "4 slower", "4 faster", "x0.5"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let page = html_of_many(&many);
        assert!(page.contains("&lt;double&gt;") && !page.contains("<double>"));
        assert!(page.contains("All cells: api iou") && page.matches("<svg class=\"chart\"").count() == 1);
    }

    #[test]
    fn cells_are_in_the_order_of_their_parameters() {
        let labels = |order: [(&str, i64); 4]| {
            let mut run = run("base", 1.0);
            for (record, (scheduler, depth)) in run.records.iter_mut().zip(order.iter().cycle()) {
                record.parameters.insert("scheduler".into(), ParameterValue::from(*scheduler));
                record.parameters.insert("iodepth".into(), ParameterValue::from(*depth));
            }
            let many = compare_many(&[run.clone()], &[run], CompareOptions::default());
            let rows: Vec<String> = many.rows().iter().map(|row| row.cell.to_string()).collect();
            rows
        };
        let sorted = labels([("none", 2), ("bfq", 2), ("mq-deadline", 2), ("none", 16)]);
        assert_eq!(sorted, labels([("none", 16), ("mq-deadline", 2), ("none", 2), ("bfq", 2)]));
        let ends: Vec<&str> = sorted.iter().map(|label| label.split_once("iodepth ").unwrap().1).collect();
        assert_eq!(
            ends,
            ["2, scheduler none", "2, scheduler bfq", "2, scheduler mq-deadline", "16, scheduler none"]
        );
    }

    #[test]
    fn runs_have_letters() {
        assert_eq!([0, 24, 25, 26, 51].map(ManyComparison::letter), ["B", "Z", "AA", "AB", "BA"]);
    }
}
