//! The results as a table and as JSON.

use std::path::PathBuf;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use super::machine_info::MachineInfo;
use super::metric::{BenchMetric, RunSummary};
use super::{BenchmarkResult, reference};

/// CPUs used by other processes above which a result is marked as busy.
const OTHERS_MAX: f64 = 0.1;

/// The metrics with rows of their own. CPU times are a column of the first row.
const ROWS: [BenchMetric; 19] = [
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
    BenchMetric::FioRatio,
    BenchMetric::FioCpuRatio,
    BenchMetric::PlainCpuRatio,
    BenchMetric::PlainLatencyRatio,
    BenchMetric::WriteAmplification,
    BenchMetric::FioMedianRatio,
    BenchMetric::FioP99Ratio,
    BenchMetric::RenderMs,
    BenchMetric::LoadMs,
];

/// The table, a row for each metric, followed by notes.
pub(super) fn table(records: &[BenchmarkResult], compare: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let mut header = vec!["benchmark", "", "ours", "min", "max", "spread", "CPU per I/O"];
    if compare {
        header.extend(["against", "ratio"]);
    }
    header.extend(["SPDK, two cores of the same kind", "goal", "met"]);
    let columns = header.len();
    table.set_header(header);
    for record in records {
        let mut name = record.case.name;
        for metric in ROWS.into_iter().filter(|metric| shown(record, *metric)) {
            let Some(ours) = summary(record, metric, 0) else { continue };
            let timed =
                !matches!(metric, BenchMetric::Instructions | BenchMetric::RssMib | BenchMetric::BdevKib);
            let busy = timed && record.runs.iter().any(|run| run.other_cpus > OTHERS_MAX);
            let mut row = vec![
                name.to_string(),
                metric.to_string(),
                format!("{}{}", metric.format(ours.median), if busy { " *" } else { "" }),
                metric.format(ours.min),
                metric.format(ours.max),
                if record.runs.len() > 1 { format!("{:.0} %", ours.spread_percent()) } else { String::new() },
                if name.is_empty() { String::new() } else { cpu(record) },
            ];
            if compare {
                let against = summary(record, metric, 1);
                row.push(against.map_or(String::new(), |other| metric.format(other.median)));
                row.push(against.map_or(String::new(), |other| format!("{:.2}", ours.median / other.median)));
            }
            row.extend(judge(records, record, metric, ours.median));
            table.add_row(row);
            name = "";
        }
        if record.skipped.is_some() {
            add_note(&mut table, columns, record.case.name, "SKIPPED");
        } else if record.failed.is_some() {
            add_note(&mut table, columns, record.case.name, "FAILED");
        }
    }
    for index in 2..columns - 1 {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text = table.to_string();
    for record in records {
        if let Some(reason) = &record.skipped {
            text += &format!("\n{}: SKIPPED: {reason}", record.case.name);
        } else if let Some(reason) = &record.failed {
            text += &format!("\n{}: FAILED: {reason}", record.case.name);
        }
    }
    let others = RunSummary::of(records.iter().flat_map(|record| &record.runs).map(|run| run.other_cpus));
    if let Some(others) = others {
        text += &format!(
            "\nOther processes used {:.2} CPUs in the median run, at most {:.2}.",
            others.median, others.max
        );
        if others.max > OTHERS_MAX {
            text += "\n* The machine was busy: in at least one run other processes used more than 0.1 CPUs.";
        }
    }
    text
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
            record.case.name.contains("-qd1") && !record.case.name.contains("-qd128")
        }
        _ => true,
    }
}

fn summary(record: &BenchmarkResult, metric: BenchMetric, binary: usize) -> Option<RunSummary> {
    let runs = record.runs.iter().filter(|run| run.binary == binary);
    RunSummary::of(runs.filter_map(|run| run.values.get(&metric).copied()))
}

/// CPU time per I/O: `target + load generator`, or the load generator's alone.
fn cpu(record: &BenchmarkResult) -> String {
    let of = |metric: BenchMetric| summary(record, metric, 0).map(|summary| metric.format(summary.median));
    match (of(BenchMetric::HostCpuNs), of(BenchMetric::TargetCpuNs)) {
        (Some(host), Some(target)) => format!("{target} + {host}"),
        (Some(host), None) => host,
        _ => String::new(),
    }
}

/// SPDK's figure, the goal, and whether it is met.
fn judge(
    records: &[BenchmarkResult],
    record: &BenchmarkResult,
    metric: BenchMetric,
    ours: f64,
) -> [String; 3] {
    let Some(found) = reference::find(record.case.name, metric) else { return Default::default() };
    let spdk = found.spdk.map_or(String::new(), |spdk| metric.format(spdk));
    let Some(limit) = limit(records, found, metric) else { return [spdk, String::new(), String::new()] };
    let sign = if metric.more_is_better() { "≥" } else { "≤" };
    let met = if met(metric, ours, limit) { "yes" } else { "no" };
    [spdk, format!("{sign} {}", metric.format(limit)), met.to_string()]
}

fn limit(
    records: &[BenchmarkResult],
    reference: &reference::ReferenceFigure,
    metric: BenchMetric,
) -> Option<f64> {
    let other = |name: &str| {
        let record = records.iter().find(|record| record.case.name == name)?;
        summary(record, metric, 0).map(|summary| summary.median)
    };
    reference.limit(other)
}

fn met(metric: BenchMetric, ours: f64, limit: f64) -> bool {
    if metric.more_is_better() { ours >= limit } else { ours <= limit }
}

/// All results as JSON.
pub(super) fn json(
    records: &[BenchmarkResult],
    machine: &MachineInfo,
    binaries: &[PathBuf],
    runs: u32,
    quick: bool,
) -> Value {
    let benchmarks: Vec<Value> = records
        .iter()
        .map(|record| {
            let runs: Vec<Value> = record.runs.iter().map(run_json).collect();
            let mut summaries = Map::new();
            for metric in record.runs.first().into_iter().flat_map(|run| run.values.keys()) {
                summaries.insert(metric.key().to_string(), summary_json(records, record, *metric));
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

fn run_json(run: &super::BenchRun) -> Value {
    let values: Map<String, Value> =
        run.values.iter().map(|(metric, value)| (metric.key().to_string(), json!(value))).collect();
    json!({ "program": run.binary, "load_average": run.load, "others_processors": run.other_cpus, "values": values })
}

fn summary_json(records: &[BenchmarkResult], record: &BenchmarkResult, metric: BenchMetric) -> Value {
    let Some(ours) = summary(record, metric, 0) else { return Value::Null };
    let found = reference::find(record.case.name, metric);
    let limit = found.and_then(|found| limit(records, found, metric));
    json!({
        "median": ours.median,
        "min": ours.min,
        "max": ours.max,
        "against_median": summary(record, metric, 1).map(|summary| summary.median),
        "spdk": found.and_then(|found| found.spdk),
        "goal": limit,
        "met": limit.map(|limit| met(metric, ours.median, limit)),
    })
}
