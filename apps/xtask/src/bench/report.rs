//! The result, for people and for programs.

use std::path::PathBuf;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use super::facts::Facts;
use super::metric::{Metric, Summary};
use super::{Record, reference};

/// Others took more of a processor than this: the number is marked.
const OTHERS_MAX: f64 = 0.1;

/// What gets a row of its own; the rest stands beside it.
const ROWS: [Metric; 12] = [
    Metric::Iops,
    Metric::Gibps,
    Metric::MeanUs,
    Metric::P99Us,
    Metric::Instructions,
    Metric::CpuPercent,
    Metric::RssMib,
    Metric::StartMs,
    Metric::FioRatio,
    Metric::FioCpuRatio,
    Metric::MadeMs,
    Metric::OpenedMs,
];

/// A line a quantity, and below what needs saying.
pub(super) fn table(records: &[Record], compare: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let mut header = vec!["benchmark", "", "ours", "min", "max", "spread", "CPU an I/O"];
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
            let timed = !matches!(metric, Metric::Instructions | Metric::RssMib);
            let busy = timed && record.runs.iter().any(|run| run.others > OTHERS_MAX);
            let mut row = vec![
                name.to_string(),
                metric.to_string(),
                format!("{}{}", metric.show(ours.median), if busy { " *" } else { "" }),
                metric.show(ours.min),
                metric.show(ours.max),
                if record.runs.len() > 1 { format!("{:.0} %", ours.spread_percent()) } else { String::new() },
                if name.is_empty() { String::new() } else { cpu(record) },
            ];
            if compare {
                let against = summary(record, metric, 1);
                row.push(against.map_or(String::new(), |other| metric.show(other.median)));
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
    let others = Summary::of(records.iter().flat_map(|record| &record.runs).map(|run| run.others));
    if let Some(others) = others {
        text += &format!(
            "\nOthers used {:.2} processors in the median run, at most {:.2}.",
            others.median, others.max
        );
        if others.max > OTHERS_MAX {
            text +=
                "\n* The machine was busy: in at least one run others used more than a tenth of a processor.";
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

/// Bandwidth is told where blocks are large, latency where the queue is short.
fn shown(record: &Record, metric: Metric) -> bool {
    let large = record.case.name.ends_with("128k");
    match metric {
        Metric::Gibps => large,
        Metric::Iops => !large,
        Metric::MeanUs | Metric::P99Us => {
            record.case.name.contains("-qd1") && !record.case.name.contains("-qd128")
        }
        _ => true,
    }
}

fn summary(record: &Record, metric: Metric, binary: usize) -> Option<Summary> {
    let runs = record.runs.iter().filter(|run| run.binary == binary);
    Summary::of(runs.filter_map(|run| run.values.get(&metric).copied()))
}

/// Of the load generator, and of the target where there is one.
fn cpu(record: &Record) -> String {
    let of = |metric: Metric| summary(record, metric, 0).map(|summary| metric.show(summary.median));
    match (of(Metric::HostCpuNs), of(Metric::TargetCpuNs)) {
        (Some(host), Some(target)) => format!("{target} + {host}"),
        (Some(host), None) => host,
        _ => String::new(),
    }
}

/// SPDK's figure, the goal, and whether it is met.
fn judge(records: &[Record], record: &Record, metric: Metric, ours: f64) -> [String; 3] {
    let Some(found) = reference::find(record.case.name, metric) else { return Default::default() };
    let spdk = found.spdk.map_or(String::new(), |spdk| metric.show(spdk));
    let Some(limit) = limit(records, found, metric) else { return [spdk, String::new(), String::new()] };
    let sign = if metric.more_is_better() { "≥" } else { "≤" };
    let met = if met(metric, ours, limit) { "yes" } else { "no" };
    [spdk, format!("{sign} {}", metric.show(limit)), met.to_string()]
}

fn limit(records: &[Record], reference: &reference::Reference, metric: Metric) -> Option<f64> {
    let other = |name: &str| {
        let record = records.iter().find(|record| record.case.name == name)?;
        summary(record, metric, 0).map(|summary| summary.median)
    };
    reference.limit(other)
}

fn met(metric: Metric, ours: f64, limit: f64) -> bool {
    if metric.more_is_better() { ours >= limit } else { ours <= limit }
}

/// Everything that was measured.
pub(super) fn json(records: &[Record], facts: &Facts, binaries: &[PathBuf], runs: u32, quick: bool) -> Value {
    let benchmarks: Vec<Value> = records
        .iter()
        .map(|record| {
            let each: Vec<Value> = record.runs.iter().map(one).collect();
            let mut summaries = Map::new();
            for metric in record.runs.first().into_iter().flat_map(|run| run.values.keys()) {
                summaries.insert(metric.key().to_string(), summarised(records, record, *metric));
            }
            json!({
                "name": record.case.name,
                "about": record.case.about,
                "commands": record.commands,
                "skipped": record.skipped,
                "failed": record.failed,
                "summary": summaries,
                "runs": each,
            })
        })
        .collect();
    let binaries: Vec<String> = binaries.iter().map(|path| path.display().to_string()).collect();
    json!({
        "format": "ringbolt-bench-1",
        "machine": facts.json(),
        "programs": binaries,
        "runs": runs,
        "quick": quick,
        "benchmarks": benchmarks,
    })
}

fn one(run: &super::Run) -> Value {
    let values: Map<String, Value> =
        run.values.iter().map(|(metric, value)| (metric.key().to_string(), json!(value))).collect();
    json!({ "program": run.binary, "load_average": run.load, "others_processors": run.others, "values": values })
}

fn summarised(records: &[Record], record: &Record, metric: Metric) -> Value {
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
