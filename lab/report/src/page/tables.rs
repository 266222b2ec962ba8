//! Tables of the page: values, machine facts, commands.

use std::collections::BTreeSet;

use lab_experiments::reference::APPROXIMATE;
use lab_experiments::{CellParameters, ParameterValue};
use serde::Serialize;
use serde_json::Value as Json;

use crate::cells::ExperimentCell;
use crate::chart::format_number;
use crate::figure::format_parameter_value;
use crate::metric;
use crate::study::ExperimentData;

/// A table with one row for each cell.
#[derive(Default, Serialize)]
pub(super) struct ValueTable {
    columns: Vec<String>,
    /// Number of leading columns that hold parameter values; the others hold numbers.
    names: usize,
    rows: Vec<ValueRow>,
}

#[derive(Serialize)]
struct ValueRow {
    names: Vec<String>,
    values: Vec<(String, String)>,
    reason: String,
    /// Number of columns that the reason spans.
    span: usize,
}

/// One row for each cell: the varying parameters, the figure's metrics, the confidence interval of the first
/// metric, and the published value.
pub(super) fn values(section: &ExperimentData<'_>, published: &[ExperimentCell<'_>]) -> ValueTable {
    let definition = &section.definition;
    let names = varying_parameters(&section.cells);
    let mut metrics: Vec<&str> = vec![&definition.y];
    metrics.extend(definition.x_metric.as_deref());
    for more in ["iops", "clat_p99_us", "cpu_cores"] {
        let any = section.cells.iter().any(|cell| cell.median(&definition.role, more).is_some());
        if any && !metrics.contains(&more) {
            metrics.push(more);
        }
    }
    let role = definition.role.as_str();
    let units: Vec<metric::DisplayUnit> = metrics
        .iter()
        .map(|name| {
            let values = section.cells.iter().filter_map(|cell| cell.median(role, name));
            metric::display_unit(name, values.fold(0.0, f64::max))
        })
        .collect();
    let mut columns: Vec<String> = names.iter().map(|name| metric::parameter_name(name)).collect();
    let named = columns.len();
    columns.extend(metrics.iter().zip(&units).map(|(name, unit)| metric::label_with_unit(name, *unit)));
    columns.push(format!("published {}", metric::label_with_unit(&definition.y, units[0])));
    columns.push("measured / published".to_string());
    let mut rows = Vec::with_capacity(section.cells.len());
    for cell in &section.cells {
        let shown = |name: &&str| {
            cell.parameters.get(*name).map_or_else(String::new, |value| format_parameter_value(name, value))
        };
        let names: Vec<String> = names.iter().map(shown).collect();
        if let Some(reason) = cell.missing_reason() {
            let span = metrics.len() + 2;
            rows.push(ValueRow { names, values: Vec::new(), reason: reason.to_string(), span });
            continue;
        }
        let mut values: Vec<(String, String)> = metrics
            .iter()
            .zip(&units)
            .enumerate()
            .map(|(index, (name, unit))| {
                let median = cell
                    .median(role, name)
                    .map_or("–".to_string(), |value| format_number(value / unit.divisor));
                // Only the figure's own metric has its interval shown, to keep the table readable.
                let interval = if index == 0 { cell.interval(role, name) } else { None };
                let interval = interval.map(|found| found.divided_by(unit.divisor));
                (
                    median,
                    interval.map_or(String::new(), |found| {
                        format!("{}–{}", format_number(found.low), format_number(found.high))
                    }),
                )
            })
            .collect();
        let here = cell.median(role, &definition.y);
        let published_value = published
            .iter()
            .find(|other| same_cell(cell, other))
            .and_then(|other| other.median(role, &definition.y));
        let dash = || ("–".to_string(), String::new());
        let approximate = published.iter().any(|other| {
            let noted =
                || other.records.iter().flat_map(|record| &record.notes).any(|note| note == APPROXIMATE);
            same_cell(cell, other) && noted()
        });
        let sign = if approximate { "≈ " } else { "" };
        values.push(published_value.map_or_else(dash, |value| {
            (format!("{sign}{}", format_number(value / units[0].divisor)), String::new())
        }));
        let ratio = here
            .zip(published_value)
            .filter(|(_, published)| *published != 0.0)
            .map(|(here, published)| here / published);
        values.push(ratio.map_or_else(dash, |ratio| (format!("{} ×", format_number(ratio)), String::new())));
        rows.push(ValueRow { names, values, reason: String::new(), span: 0 });
    }
    ValueTable { columns, names: named, rows }
}

/// Whether a published cell matches a measured one: equal in every parameter that both have, except those
/// that give the size of the machine.
fn same_cell(here: &ExperimentCell<'_>, published: &ExperimentCell<'_>) -> bool {
    if here.experiment != published.experiment {
        return false;
    }
    let machine = ["cores", "devices"];
    let known =
        |parameters: &CellParameters, name: &str| machine.contains(&name) || parameters.contains_key(name);
    published.parameters.iter().all(|(name, value)| {
        machine.contains(&name.as_str()) || here.parameters.get(name).is_none_or(|found| found.same(value))
    }) && ["scheduler", "iodepth", "jobs", "background", "block_bytes"].iter().all(|name| {
        known(here.parameters, name) == known(published.parameters, name)
            || *name == "iodepth"
            || *name == "jobs"
    })
}

/// Names of the parameters that differ between cells.
fn varying_parameters<'a>(cells: &[&'a ExperimentCell<'a>]) -> Vec<&'a str> {
    let mut first: Option<&CellParameters> = None;
    let mut names: BTreeSet<&str> = BTreeSet::new();
    for cell in cells {
        let Some(first) = first else {
            first = Some(cell.parameters);
            continue;
        };
        let differs = |name: &String, value: &ParameterValue, other: &CellParameters| {
            other.get(name).is_none_or(|found| !found.same(value))
        };
        names.extend(
            cell.parameters.iter().filter(|(n, v)| differs(n, v, first)).map(|(name, _)| name.as_str()),
        );
        names.extend(
            first.iter().filter(|(n, v)| differs(n, v, cell.parameters)).map(|(name, _)| name.as_str()),
        );
    }
    names.into_iter().collect()
}

/// The commands of an experiment by cell, without duplicates from repetitions. The job file of the first cell
/// comes first.
pub(super) fn commands(cells: &[&ExperimentCell<'_>]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut job_files: Vec<&str> = Vec::new();
    for cell in cells {
        let mut shown: Vec<&str> = Vec::new();
        for record in &cell.records {
            for command in &record.commands {
                if !shown.contains(&command.as_str()) {
                    shown.push(command);
                }
            }
            // Only the first job file is shown: the others differ in numbers that the cell's label gives.
            if !record.job_file.is_empty() && job_files.is_empty() {
                job_files.push(&record.job_file);
            }
        }
        if !shown.is_empty() {
            lines.push(format!("# {}", cell.parameter_label()));
            lines.extend(shown.iter().map(|line| (*line).to_string()));
        }
    }
    if let Some(file) = job_files.first() {
        lines.insert(0, format!("# the job file of the first cell:\n{}\n", file.trim_end()));
    }
    lines
}

/// One section of machine facts: its name, and rows of name and value.
pub(super) type FactSection = (String, Vec<(String, String)>);

/// Flattens the JSON facts of the machine into sections.
pub(super) fn facts(facts: &Json) -> Vec<FactSection> {
    let Json::Object(sections) = facts else { return Vec::new() };
    let mut out = Vec::new();
    for (name, value) in sections {
        let mut rows = Vec::new();
        flatten(String::new(), value, &mut rows);
        out.push((name.replace('_', " "), rows));
    }
    out
}

/// Maximum number of facts listed for one section; the embedded data holds all of them.
const FACTS_MAX: usize = 200;

fn flatten(name: String, value: &Json, rows: &mut Vec<(String, String)>) {
    if rows.len() >= FACTS_MAX {
        return;
    }
    let under = |more: &str| if name.is_empty() { more.to_string() } else { format!("{name} · {more}") };
    match value {
        Json::Object(fields) => {
            for (field, value) in fields {
                flatten(under(&field.replace('_', " ")), value, rows);
            }
        }
        Json::Array(items) if items.iter().all(|item| !item.is_object() && !item.is_array()) => {
            let words: Vec<String> = items.iter().map(plain).collect();
            rows.push((name, words.join(", ")));
        }
        Json::Array(items) => {
            for alike in fold_alike(items) {
                flatten(under(&alike.names), &alike.value, rows);
            }
        }
        Json::Null => rows.push((name, "unknown".to_string())),
        other => rows.push((name, plain(other))),
    }
}

/// Items of a list that differ only in what identifies them, as one.
struct AlikeItems {
    /// For example `nvme0n1, nvme1n1 (2 alike)`.
    names: String,
    /// The value of one of them; without its name if there are several.
    value: Json,
}

/// Folds the items of a list that differ only in `name` or `path`, in the order of the first of each kind.
fn fold_alike(items: &[Json]) -> Vec<AlikeItems> {
    const IDENTITY: [&str; 2] = ["name", "path"];
    let without_identity = |item: &Json| {
        let mut value = item.clone();
        if let Json::Object(fields) = &mut value {
            fields.retain(|field, _| !IDENTITY.contains(&field.as_str()));
        }
        value
    };
    let mut kinds: Vec<(Json, Vec<usize>)> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let value = without_identity(item);
        match kinds.iter_mut().find(|(known, _)| *known == value) {
            Some((_, members)) => members.push(index),
            None => kinds.push((value, vec![index])),
        }
    }
    let name = |index: &usize| {
        let named = IDENTITY.iter().find_map(|field| items[*index].get(field)?.as_str());
        named.map_or_else(|| index.to_string(), String::from)
    };
    let folded = |(value, members): (Json, Vec<usize>)| {
        let names: Vec<String> = members.iter().map(name).collect();
        match members.as_slice() {
            [only] => AlikeItems { names: names.concat(), value: items[*only].clone() },
            more => AlikeItems { names: format!("{} ({} alike)", names.join(", "), more.len()), value },
        }
    };
    kinds.into_iter().map(folded).collect()
}

fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Bool(true) => "yes".to_string(),
        Json::Bool(false) => "no".to_string(),
        other => other.to_string(),
    }
}

/// Formats milliseconds since the Unix epoch as a UTC date and time, to the minute.
pub(super) fn format_utc(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days to civil date in the proleptic Gregorian calendar (H. Hinnant's `civil_from_days`).
    let z = days as i64 + 719_468;
    let era = z.div_euclid(146_097);
    let of_era = z.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let day_of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year_of_era + era * 400 + carry;
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", second / 3600, second % 3600 / 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_formatted_as_civil_dates() {
        assert_eq!(format_utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(format_utc(951_782_400_000), "2000-02-29 00:00 UTC");
        assert_eq!(format_utc(1_763_730_000_000), "2025-11-21 13:00 UTC");
    }

    #[test]
    fn nested_facts_are_flattened_into_rows() {
        let json = serde_json::json!({
            "cpu": { "model": "Xeon", "cores": 10, "turbo": false },
            "devices": [{ "name": "nvme0n1", "schedulers": ["none", "bfq"] }],
        });
        let facts = facts(&json);
        assert_eq!(facts[0].0, "cpu");
        assert!(facts[0].1.contains(&("turbo".to_string(), "no".to_string())));
        assert_eq!(
            facts[1].1,
            [
                ("nvme0n1 · name".to_string(), "nvme0n1".to_string()),
                ("nvme0n1 · schedulers".to_string(), "none, bfq".to_string()),
            ]
        );
    }

    #[test]
    fn alike_devices_are_folded_into_one() {
        // In alphabetical order, which members have either way: features decide whether their order is kept.
        let device = |name: &str, model: &str| serde_json::json!({ "model": model, "name": name });
        let mut devices: Vec<Json> = (0..8).map(|index| device(&format!("nvme{index}n1"), "fast")).collect();
        devices.insert(3, device("sda", "slow"));
        let rows = facts(&serde_json::json!({ "devices": devices })).remove(0).1;
        let rows: Vec<(&str, &str)> =
            rows.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let names: Vec<String> = (0..8).map(|index| format!("nvme{index}n1")).collect();
        let folded = format!("{} (8 alike) · model", names.join(", "));
        assert_eq!(rows, [(folded.as_str(), "fast"), ("sda · model", "slow"), ("sda · name", "sda")]);
    }
}
