//! The results as a table and as JSON.

use std::path::PathBuf;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use super::machine_info::MachineInfo;
use super::metric::{BenchMetric, RunSummary};
use super::placement::{self, PlacementState};
use super::{BenchRun, BenchmarkResult, reference};

/// CPUs used by other processes above which a result is marked as busy.
const OTHERS_MAX: f64 = 0.1;

/// The metrics with rows of their own. CPU times are a column of the first row.
pub(super) const ROWS: [BenchMetric; 67] = [
    BenchMetric::Iops,
    BenchMetric::Gibps,
    BenchMetric::MeanUs,
    BenchMetric::P99Us,
    BenchMetric::Instructions,
    BenchMetric::CpuPercent,
    BenchMetric::RssMib,
    BenchMetric::StartMs,
    BenchMetric::BdevKib,
    BenchMetric::RemoveUs,
    BenchMetric::BareIops,
    BenchMetric::BareRatio,
    BenchMetric::LeastPairRatio,
    BenchMetric::LeastPairBareRatio,
    BenchMetric::QemuNbdRatio,
    BenchMetric::QemuNbdCpuRatio,
    BenchMetric::QemuExportIops,
    BenchMetric::QemuExportRatio,
    BenchMetric::BareDeviceIops,
    BenchMetric::BareDeviceRatio,
    BenchMetric::LeastLayerRatio,
    BenchMetric::BaseIops,
    BenchMetric::BaseRatio,
    BenchMetric::BareQemuRatio,
    BenchMetric::SpdkRatio,
    BenchMetric::OneSessionRatio,
    BenchMetric::AttackRatio,
    BenchMetric::FioRatio,
    BenchMetric::FioCpuRatio,
    BenchMetric::FioSystemShare,
    BenchMetric::FioUserRatio,
    BenchMetric::HostUserNs,
    BenchMetric::FioUserNs,
    BenchMetric::HostSystemNs,
    BenchMetric::FioSystemNs,
    BenchMetric::HostSwitches,
    BenchMetric::FioSwitches,
    BenchMetric::PlainCpuRatio,
    BenchMetric::TlsCpuRatio,
    BenchMetric::TlsAddedUs,
    BenchMetric::PlainLatencyRatio,
    BenchMetric::WriteAmplification,
    BenchMetric::StallMs,
    BenchMetric::RecoveryMs,
    BenchMetric::MovedMs,
    BenchMetric::MoveMedianUs,
    BenchMetric::MoveMaxUs,
    BenchMetric::StayMedianUs,
    BenchMetric::StayMaxUs,
    BenchMetric::EvenRatio,
    BenchMetric::CopyP99Ratio,
    BenchMetric::CephIops,
    BenchMetric::CephCpuNs,
    BenchMetric::CephRatio,
    BenchMetric::CephCpuRatio,
    BenchMetric::ChurnRatio,
    BenchMetric::ChurnP99Ratio,
    BenchMetric::FioMedianRatio,
    BenchMetric::FioP99Ratio,
    BenchMetric::RenderMs,
    BenchMetric::LoadMs,
    BenchMetric::FirstWriteRatio,
    BenchMetric::StoreLoadMs,
    BenchMetric::MetadataReadMs,
    BenchMetric::MetadataReadRatio,
    BenchMetric::MetadataDecodeMs,
    BenchMetric::MetadataDecodeRatio,
];

/// The results of a session, and which of its runs are comparable.
pub(super) struct BenchReport<'a> {
    records: &'a [BenchmarkResult],
    /// SPDK's target was measured too.
    has_spdk: bool,
    /// Where the two cores were in most runs; runs made elsewhere are in the JSON only.
    state: Option<PlacementState>,
    other_states: Vec<PlacementState>,
}

impl<'a> BenchReport<'a> {
    pub(super) fn new(records: &'a [BenchmarkResult], has_spdk: bool) -> BenchReport<'a> {
        let placements = records.iter().flat_map(|record| &record.runs).filter_map(|run| run.placement);
        let steady: Vec<f64> = placements
            .filter(|placement| placement.is_steady())
            .map(|placement| placement.shortest_ns)
            .collect();
        let mut states = placement::states(&steady);
        let state = (!states.is_empty()).then(|| states.remove(0));
        BenchReport { records, has_spdk, state, other_states: states }
    }

    /// Whether a run counts: its cores were where most runs found them, or it used one core.
    fn counts(&self, run: &BenchRun) -> bool {
        run.placement.is_none_or(|placement| self.state.is_some_and(|state| state.contains(placement)))
    }

    /// The table, a row for each metric, followed by notes.
    pub(super) fn table(&self, compare: bool) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        let mut header = vec!["benchmark", "", "ours", "min", "max", "spread", "CPU per I/O"];
        if compare {
            header.extend(["against", "ratio"]);
        }
        header.extend((!self.has_spdk).then_some("SPDK, another machine"));
        header.extend(["goal", "met"]);
        let columns = header.len();
        table.set_header(header);
        for record in self.records {
            let mut name = record.case.name;
            for metric in ROWS.into_iter().filter(|metric| shown(record, *metric)) {
                let Some(ours) = self.summary(record, metric, 0) else { continue };
                table.add_row(self.row(record, metric, ours, name, compare));
                name = "";
            }
            if record.skipped.is_some() {
                add_note(&mut table, columns, record.case.name, "SKIPPED");
            } else if record.failed.is_some() {
                add_note(&mut table, columns, record.case.name, "FAILED");
            } else if !name.is_empty() {
                add_note(&mut table, columns, record.case.name, "no comparable run");
            }
        }
        for index in 2..columns - 1 {
            if let Some(column) = table.column_mut(index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.to_string() + &self.notes()
    }

    fn row(
        &self,
        record: &BenchmarkResult,
        metric: BenchMetric,
        ours: RunSummary,
        name: &str,
        compare: bool,
    ) -> Vec<String> {
        let timed = !matches!(metric, BenchMetric::Instructions | BenchMetric::RssMib | BenchMetric::BdevKib);
        let busy = timed && record.runs.iter().any(|run| run.other_cpus > OTHERS_MAX);
        let mut row = vec![
            name.to_string(),
            metric.to_string(),
            format!("{}{}", metric.format(ours.median), if busy { " *" } else { "" }),
            metric.format(ours.min),
            metric.format(ours.max),
            if record.runs.len() > 1 { format!("{:.0} %", ours.spread_percent()) } else { String::new() },
            if name.is_empty() { String::new() } else { self.cpu(record) },
        ];
        if compare {
            let against = self.summary(record, metric, 1);
            row.push(against.map_or(String::new(), |other| metric.format(other.median)));
            row.push(against.map_or(String::new(), |other| format!("{:.2}", ours.median / other.median)));
        }
        let [spdk, goal, met] = self.judge(record, metric, ours.median);
        row.extend((!self.has_spdk).then_some(spdk));
        row.extend([goal, met]);
        row
    }

    /// The lines below the table.
    fn notes(&self) -> String {
        let mut text = String::new();
        for record in self.records {
            if let Some(reason) = &record.skipped {
                text += &format!("\n{}: SKIPPED: {reason}", record.case.name);
            } else if let Some(reason) = &record.failed {
                text += &format!("\n{}: FAILED: {reason}", record.case.name);
            }
        }
        let runs = || self.records.iter().flat_map(|record| &record.runs);
        if let Some(others) = RunSummary::of(runs().map(|run| run.other_cpus)) {
            text += &format!(
                "\nOther processes used {:.2} CPUs in the median run, at most {:.2}.",
                others.median, others.max
            );
            if others.max > OTHERS_MAX {
                text +=
                    "\n* The machine was busy: in at least one run other processes used more than 0.1 CPUs.";
            }
        }
        if let Some(state) = self.state {
            text += &format!("\nA cache line took {} from one core to the other and back", describe(&state));
            let moved =
                runs().filter_map(|run| run.placement).filter(|placement| !placement.is_steady()).count();
            let mut others: Vec<String> = self
                .other_states
                .iter()
                .map(|state| format!("{} took {}", runs_text(state.runs), describe(state)))
                .collect();
            others.extend((moved > 0).then(|| format!("in {} it changed", runs_text(moved))));
            match others.is_empty() {
                true => text += ".",
                false => text += &format!(". Not in the table: {}.", others.join("; ")),
            }
        }
        let has_constant = self.records.iter().any(|record| {
            ROWS.iter().any(|metric| {
                shown(record, *metric)
                    && reference::find(record.case.name, *metric).is_some_and(|found| found.spdk.is_some())
            })
        });
        if has_constant && !self.has_spdk {
            text += &format!("\n{}", reference::ORIGIN);
        }
        text
    }

    fn summary(&self, record: &BenchmarkResult, metric: BenchMetric, binary: usize) -> Option<RunSummary> {
        let runs = record.runs.iter().filter(|run| run.binary == binary && self.counts(run));
        RunSummary::of(runs.filter_map(|run| run.values.get(&metric).copied()))
    }

    /// CPU time per I/O: `target + load generator`, or the load generator's alone.
    fn cpu(&self, record: &BenchmarkResult) -> String {
        let of = |metric: BenchMetric| {
            self.summary(record, metric, 0).map(|summary| metric.format(summary.median))
        };
        match (of(BenchMetric::HostCpuNs), of(BenchMetric::TargetCpuNs)) {
            (Some(host), Some(target)) => format!("{target} + {host}"),
            (Some(host), None) => host,
            _ => String::new(),
        }
    }

    /// SPDK's figure, the goal, and whether it is met.
    fn judge(&self, record: &BenchmarkResult, metric: BenchMetric, ours: f64) -> [String; 3] {
        let found = reference::find(record.case.name, metric);
        let spdk = found.and_then(|found| found.spdk).map_or(String::new(), |spdk| metric.format(spdk));
        let Some(limit) = self.limit(record.case.name, metric) else {
            return [spdk, String::new(), String::new()];
        };
        let sign = if metric.more_is_better() { "≥" } else { "≤" };
        let met = if met(metric, ours, limit) { "yes" } else { "no" };
        [spdk, format!("{sign} {}", metric.format(limit)), met.to_string()]
    }

    /// The goal. A multiple of SPDK's rate is the goal of the measured ratio where there is one, and else of
    /// the rate.
    fn limit(&self, case: &str, metric: BenchMetric) -> Option<f64> {
        if metric == BenchMetric::SpdkRatio {
            let rates = [BenchMetric::Iops, BenchMetric::Gibps];
            return rates.iter().find_map(|rate| reference::find(case, *rate)?.times_spdk());
        }
        let found = reference::find(case, metric)?;
        if self.has_spdk && found.times_spdk().is_some() {
            return None;
        }
        found.limit(|name| {
            let record = self.records.iter().find(|record| record.case.name == name)?;
            self.summary(record, metric, 0).map(|summary| summary.median)
        })
    }

    fn summary_json(&self, record: &BenchmarkResult, metric: BenchMetric) -> Value {
        let Some(ours) = self.summary(record, metric, 0) else { return Value::Null };
        let limit = self.limit(record.case.name, metric);
        json!({
            "median": ours.median,
            "min": ours.min,
            "max": ours.max,
            "against_median": self.summary(record, metric, 1).map(|summary| summary.median),
            "spdk": reference::find(record.case.name, metric).and_then(|found| found.spdk),
            "goal": limit,
            "met": limit.map(|limit| met(metric, ours.median, limit)),
        })
    }

    fn run_json(&self, run: &BenchRun) -> Value {
        let values: Map<String, Value> =
            run.values.iter().map(|(metric, value)| (metric.key().to_string(), json!(value))).collect();
        json!({
            "program": run.binary,
            "load_average": run.load,
            "others_processors": run.other_cpus,
            "round_trip_ns": run.placement.map(|placement| [placement.shortest_ns, placement.longest_ns]),
            "counts": self.counts(run),
            "values": values,
        })
    }
}

fn describe(state: &PlacementState) -> String {
    format!("{:.0} to {:.0} ns", state.shortest_ns, state.longest_ns)
}

fn runs_text(count: usize) -> String {
    format!("{count} {}", if count == 1 { "run" } else { "runs" })
}

fn add_note(table: &mut Table, columns: usize, name: &str, word: &str) {
    let mut row = vec![String::new(); columns];
    row[0] = name.to_string();
    row[2] = word.to_string();
    table.add_row(row);
}

/// Whether a metric is shown: bandwidth for large blocks, IOPS for others, latency at queue depth 1.
fn shown(record: &BenchmarkResult, metric: BenchMetric) -> bool {
    let large = record.case.name.ends_with("128k");
    match metric {
        BenchMetric::Gibps => large,
        BenchMetric::Iops => !large,
        BenchMetric::MeanUs | BenchMetric::P99Us => {
            let name = record.case.name;
            name.contains("-qd1") && !name.contains("-qd128") || name.starts_with("attack-")
        }
        _ => true,
    }
}

fn met(metric: BenchMetric, ours: f64, limit: f64) -> bool {
    if metric.more_is_better() { ours >= limit } else { ours <= limit }
}

/// All results as JSON.
pub(super) fn json(
    report: &BenchReport<'_>,
    machine: &MachineInfo,
    binaries: &[PathBuf],
    runs: u32,
    quick: bool,
) -> Value {
    let benchmarks: Vec<Value> = report
        .records
        .iter()
        .map(|record| {
            let runs: Vec<Value> = record.runs.iter().map(|run| report.run_json(run)).collect();
            let mut summaries = Map::new();
            for metric in record.runs.first().into_iter().flat_map(|run| run.values.keys()) {
                summaries.insert(metric.key().to_string(), report.summary_json(record, *metric));
            }
            json!({
                "name": record.case.name,
                "about": record.case.description,
                "commands": record.commands,
                "skipped": record.skipped,
                "failed": record.failed,
                "summary": summaries,
                "runs": runs,
            })
        })
        .collect();
    let binaries: Vec<String> = binaries.iter().map(|path| path.display().to_string()).collect();
    json!({
        "format": "ringbolt-bench-1",
        "machine": machine.json(),
        "programs": binaries,
        "runs": runs,
        "quick": quick,
        "benchmarks": benchmarks,
    })
}

#[cfg(test)]
mod tests {
    use super::super::cases;
    use super::super::placement::RunPlacement;
    use super::*;

    fn run(iops: f64, round_trips_ns: [f64; 2]) -> BenchRun {
        BenchRun {
            binary: 0,
            load: 0.0,
            other_cpus: 0.0,
            placement: RunPlacement::of(round_trips_ns),
            values: [(BenchMetric::Iops, iops), (BenchMetric::SpdkRatio, iops / 400e3)].into(),
        }
    }

    fn results(runs: Vec<BenchRun>) -> Vec<BenchmarkResult> {
        let case = cases::select(&["tcp-null-read-qd32".to_string()]).expect("a benchmark")[0];
        vec![BenchmarkResult { case, runs, commands: Vec::new(), skipped: None, failed: None }]
    }

    #[test]
    fn only_runs_of_the_most_frequent_placement_are_compared() {
        let near = [80.0, 85.0];
        let records = results(vec![
            run(600e3, near),
            run(300e3, [310.0, 300.0]),
            run(610e3, near),
            run(620e3, near),
            run(100e3, [80.0, 310.0]),
        ]);
        let report = BenchReport::new(&records, false);
        let summary = report.summary(&records[0], BenchMetric::Iops, 0).expect("comparable runs");
        assert_eq!((summary.median, summary.min, summary.max), (610e3, 600e3, 620e3));
        let notes = report.notes();
        assert!(notes.contains("took 80 to 80 ns from one core"), "{notes}");
        assert!(
            notes.contains("Not in the table: 1 run took 300 to 300 ns; in 1 run it changed."),
            "{notes}"
        );
        assert!(notes.contains("--spdk DIR"), "{notes}");
    }

    #[test]
    fn a_multiple_of_spdk_is_the_goal_of_the_measured_ratio_if_there_is_one() {
        let records = results(vec![run(600e3, [80.0, 80.0])]);
        let goals = |has_spdk| {
            let report = BenchReport::new(&records, has_spdk);
            let limit = |metric| report.limit("tcp-null-read-qd32", metric);
            (limit(BenchMetric::Iops), limit(BenchMetric::SpdkRatio))
        };
        assert_eq!(goals(false).0, Some(492e3 * 1.5));
        assert_eq!(goals(true), (None, Some(1.5)));
    }
}
