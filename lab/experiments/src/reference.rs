//! Published results as records, so that figures, comparisons and checks treat them like measured ones.
//!
//! `reference/*.toml` contains the facts and numbers of the texts, the CSV files the raw results of ICPE'24,
//! summarised again. Nothing in them was measured by this program.

use std::collections::BTreeMap;

use crate::definition::{ExperimentDefinition, PublishedTable};
use crate::record::{CellParameters, CellRecord, ParameterValue};

macro_rules! tables {
    ($($study:literal: $($name:literal)*;)*) => {
        /// The CSV files: study, name and text.
        const TABLES: &[(&str, &str, &str)] =
            &[$($(($study, $name, include_str!(concat!("../reference/", $study, "/", $name, ".csv")))),*),*];
    };
}

tables! {
    "icpe24": "fig01a" "fig01b" "fig01c" "fig02" "fig03" "fig04" "fig05" "fig06" "fig07" "fig08" "fig09" "fig10"
        "fig11a" "fig11b" "fig11c" "fig11d" "fig12a" "fig12b" "table2_summary" "table3_4_summary"
        "cdf_percentiles";
}

/// Facts of the studies as TOML: testbeds, methods, stated numbers, discrepancies.
pub const FACTS: [(&str, &str); 3] = [
    ("cheops23", include_str!("../reference/cheops23.toml")),
    ("icpe24", include_str!("../reference/icpe24.toml")),
    ("spdk17", include_str!("../reference/spdk17.toml")),
];

/// Number of cores of a study's testbed, if the study used all of them.
pub fn testbed_cores(study: &str) -> Option<usize> {
    let (_, facts) = FACTS.iter().find(|(name, _)| *name == study)?;
    let facts: toml::Table = facts.parse().ok()?;
    let cores = facts.get("testbed")?.get("cores")?.as_integer()?;
    usize::try_from(cores).ok()
}

/// A CSV file: rows by column name.
pub fn table(study: &str, name: &str) -> Option<Vec<BTreeMap<String, String>>> {
    let (.., text) = TABLES.iter().find(|(of, known, _)| *of == study && *known == name)?;
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next()?.split(',').collect();
    let row =
        |line: &str| columns.iter().map(|c| c.to_string()).zip(line.split(',').map(String::from)).collect();
    Some(lines.map(row).collect())
}

/// Note of a published value that the paper does not print as such.
pub const APPROXIMATE: &str = "rounded, read off a figure, or computed from other numbers";

/// The published results of an experiment, from CSV files and from the text. A derived experiment has none: they
/// belong to its sources.
pub fn published(definition: &ExperimentDefinition) -> Vec<CellRecord> {
    let mut records = Vec::new();
    for reference in &definition.reference {
        for row in table(definition.study(), &reference.csv).unwrap_or_default() {
            if reference.filter.iter().all(|(column, value)| row.get(column) == Some(value)) {
                records.push(record(definition, reference, &row));
            }
        }
    }
    for point in &definition.published {
        let mut record = CellRecord::new(&definition.id, definition.series_of(&point.filter));
        record.parameters = point.filter.clone();
        for (metric, value) in &point.metrics {
            let role = if metric.starts_with("target_") { "all" } else { definition.role.as_str() };
            record.role_mut(role).set(metric, *value);
        }
        if point.approximate {
            record.notes.push(APPROXIMATE.into());
        }
        records.push(record);
    }
    records
}

/// The meaning of a column: a parameter or a role's metric, and the factor to its unit.
enum ColumnMeaning {
    Parameter(&'static str, i64),
    Metric(&'static str, &'static str, f64),
}

fn meaning(column: &str) -> Option<ColumnMeaning> {
    use ColumnMeaning::{Metric, Parameter};
    Some(match column {
        "scheduler" => Parameter("scheduler", 1),
        "procs" => Parameter("jobs", 1),
        "qd" => Parameter("iodepth", 1),
        "bs_kib" => Parameter("block_bytes", 1024),
        "devices" => Parameter("devices", 1),
        "bg_procs" => Parameter("background", 1),
        "iops" => Metric("fg", "iops", 1.0),
        "bw_mib_s" => Metric("fg", "bw_mib_s", 1.0),
        "mean_us" => Metric("fg", "lat_mean_us", 1.0),
        "sd_us" => Metric("fg", "lat_stddev_us", 1.0),
        "clat_mean_us" => Metric("fg", "clat_mean_us", 1.0),
        "slat_mean_us" => Metric("fg", "slat_mean_us", 1.0),
        "p50_us" => Metric("fg", "clat_p50_us", 1.0),
        "p90_us" => Metric("fg", "clat_p90_us", 1.0),
        "p95_us" => Metric("fg", "clat_p95_us", 1.0),
        "p99_us" | "read_p99_us_mean" => Metric("fg", "clat_p99_us", 1.0),
        "p999_us" => Metric("fg", "clat_p999_us", 1.0),
        "max_us" => Metric("fg", "lat_max_us", 1.0),
        "cpu_cores" => Metric("fg", "cpu_cores", 1.0),
        "bg_iops_total" => Metric("bg", "iops", 1.0),
        "bg_cpu_cores" => Metric("bg", "cpu_cores", 1.0),
        "bg_p99_us_median" | "write_p99_us_mean" => Metric("bg", "clat_p99_us", 1.0),
        "lock_pct_script_symbols" => Metric("all", "lock_share_pct", 1.0),
        "read_kiops_mean" => Metric("fg", "iops", 1000.0),
        "read_kiops_sd" => Metric("fg", "iops_stddev", 1000.0),
        "write_kiops_mean" => Metric("bg", "iops", 1000.0),
        "write_kiops_sd" => Metric("bg", "iops_stddev", 1000.0),
        "read_tokens_mean" => Metric("all", "read_tokens", 1.0),
        "write_tokens_mean" => Metric("all", "write_tokens", 1.0),
        _ => return None,
    })
}

fn record(
    definition: &ExperimentDefinition,
    reference: &PublishedTable,
    row: &BTreeMap<String, String>,
) -> CellRecord {
    let mut parameters = CellParameters::new();
    for name in ["api", "rw"] {
        parameters.extend(definition.fixed.get(name).map(|value| (name.to_string(), value.clone())));
    }
    parameters.extend(reference.fixed.clone());
    let mut record = CellRecord::new(&definition.id, "");
    for (column, text) in row {
        if let Some(parameter) = reference.columns.get(column) {
            parameters.insert(parameter.clone(), number(text, 1.0));
            continue;
        }
        match meaning(column) {
            Some(ColumnMeaning::Parameter(..)) if text.is_empty() => {}
            Some(ColumnMeaning::Parameter(name, factor)) => {
                parameters.insert(name.to_string(), number(text, factor as f64));
            }
            Some(ColumnMeaning::Metric(role, metric, factor)) => {
                if let Ok(value) = text.parse::<f64>() {
                    record.role_mut(role).set(metric, value * factor);
                }
            }
            None => {}
        }
    }
    // The CSV files list SPDK as a scheduler.
    if parameters.get("scheduler").and_then(ParameterValue::as_str) == Some("spdk") {
        parameters.insert("api".into(), "spdk".into());
        if definition.series.iter().any(|name| name == "scheduler") {
            parameters.remove("scheduler");
        } else {
            parameters.insert("scheduler".into(), "none".into());
        }
    }
    record.series = definition.series_of(&parameters);
    record.parameters = parameters;
    record
}

fn number(text: &str, factor: f64) -> ParameterValue {
    match text.parse::<f64>().map(|value| value * factor) {
        Ok(value) if value.fract() == 0.0 && value.abs() < 1e15 => ParameterValue::Integer(value as i64),
        Ok(value) => ParameterValue::Number(value),
        Err(_) => ParameterValue::from(text),
    }
}

#[cfg(test)]
mod tests;
