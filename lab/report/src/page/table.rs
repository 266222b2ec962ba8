//! Tables: values, facts, commands.

use std::collections::BTreeSet;

use experiments::{Parameters, Value};
use serde::Serialize;
use serde_json::Value as Json;

use crate::cells::Cell;
use crate::chart::short;
use crate::figure::value_words;
use crate::metric;
use crate::study::Section;

/// A table of cells.
#[derive(Default, Serialize)]
pub(super) struct Values {
    columns: Vec<String>,
    /// How many of the columns are names; the others are numbers.
    names: usize,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    names: Vec<String>,
    values: Vec<(String, String)>,
    reason: String,
    /// How many columns the reason may take.
    span: usize,
}

/// A row for each cell: what varies, the figure's metrics with their intervals, and what was published.
pub(super) fn values(section: &Section<'_>, published: &[Cell<'_>]) -> Values {
    let definition = &section.definition;
    let names = varying(&section.cells);
    let mut metrics: Vec<&str> = vec![&definition.y];
    metrics.extend(definition.x_metric.as_deref());
    for more in ["iops", "clat_p99_us", "cpu_cores"] {
        let any = section.cells.iter().any(|cell| cell.median(&definition.role, more).is_some());
        if any && !metrics.contains(&more) {
            metrics.push(more);
        }
    }
    let role = definition.role.as_str();
    let units: Vec<metric::Shown> = metrics
        .iter()
        .map(|name| {
            let values = section.cells.iter().filter_map(|cell| cell.median(role, name));
            metric::shown(name, values.fold(0.0, f64::max))
        })
        .collect();
    let mut columns: Vec<String> = names.iter().map(|name| metric::parameter(name)).collect();
    let named = columns.len();
    columns.extend(metrics.iter().zip(&units).map(|(name, unit)| metric::label(name, *unit)));
    columns.push(format!("published {}", metric::label(&definition.y, units[0])));
    columns.push("here / published".to_string());
    let mut rows = Vec::with_capacity(section.cells.len());
    for cell in &section.cells {
        let said = |name: &&str| {
            cell.parameters.get(*name).map_or_else(String::new, |value| value_words(name, value))
        };
        let names: Vec<String> = names.iter().map(said).collect();
        if let Some(reason) = cell.absent() {
            let span = metrics.len() + 2;
            rows.push(Row { names, values: Vec::new(), reason: reason.to_string(), span });
            continue;
        }
        let mut values: Vec<(String, String)> = metrics
            .iter()
            .zip(&units)
            .enumerate()
            .map(|(index, (name, unit))| {
                let middle =
                    cell.median(role, name).map_or("–".to_string(), |value| short(value / unit.per));
                // The interval of what the figure shows; more of them would hide the numbers.
                let interval = if index == 0 { cell.interval(role, name) } else { None };
                let interval = interval.map(|found| found.per(unit.per));
                (
                    middle,
                    interval
                        .map_or(String::new(), |found| format!("{}–{}", short(found.low), short(found.high))),
                )
            })
            .collect();
        let here = cell.median(role, &definition.y);
        let there = published
            .iter()
            .find(|other| same_cell(cell, other))
            .and_then(|other| other.median(role, &definition.y));
        let dash = || ("–".to_string(), String::new());
        values.push(there.map_or_else(dash, |value| (short(value / units[0].per), String::new())));
        let ratio = here.zip(there).filter(|(_, there)| *there != 0.0).map(|(here, there)| here / there);
        values.push(ratio.map_or_else(dash, |ratio| (format!("{} ×", short(ratio)), String::new())));
        rows.push(Row { names, values, reason: String::new(), span: 0 });
    }
    Values { columns, names: named, rows }
}

/// Whether a published cell is the same as one here: in all that both say, but for the machine's size.
fn same_cell(here: &Cell<'_>, published: &Cell<'_>) -> bool {
    if here.experiment != published.experiment {
        return false;
    }
    let machine = ["cores", "devices"];
    let known =
        |parameters: &Parameters, name: &str| machine.contains(&name) || parameters.contains_key(name);
    published.parameters.iter().all(|(name, value)| {
        machine.contains(&name.as_str()) || here.parameters.get(name).is_none_or(|found| found.same(value))
    }) && ["scheduler", "iodepth", "jobs", "background", "block_bytes"].iter().all(|name| {
        known(here.parameters, name) == known(published.parameters, name)
            || *name == "iodepth"
            || *name == "jobs"
    })
}

/// The parameters that tell the cells apart.
fn varying<'a>(cells: &[&'a Cell<'a>]) -> Vec<&'a str> {
    let mut first: Option<&Parameters> = None;
    let mut names: BTreeSet<&str> = BTreeSet::new();
    for cell in cells {
        let Some(first) = first else {
            first = Some(cell.parameters);
            continue;
        };
        let differs = |name: &String, value: &Value, other: &Parameters| {
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

/// Every command of an experiment, each preceded by the cell it is of; repetitions of the same one once.
pub(super) fn commands(cells: &[&Cell<'_>]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut job_files: Vec<&str> = Vec::new();
    for cell in cells {
        let mut said: Vec<&str> = Vec::new();
        for record in &cell.records {
            for command in &record.commands {
                if !said.contains(&command.as_str()) {
                    said.push(command);
                }
            }
            // A job file is shown once: its neighbours differ in a number that the cell's name says.
            if !record.job_file.is_empty() && job_files.is_empty() {
                job_files.push(&record.job_file);
            }
        }
        if !said.is_empty() {
            lines.push(format!("# {}", cell.words()));
            lines.extend(said.iter().map(|line| (*line).to_string()));
        }
    }
    if let Some(file) = job_files.first() {
        lines.insert(0, format!("# the job file of the first cell:\n{}\n", file.trim_end()));
    }
    lines
}

/// One section of facts: its name, and names and values.
pub(super) type Facts = (String, Vec<(String, String)>);

/// Facts of the machine.
pub(super) fn facts(facts: &Json) -> Vec<Facts> {
    let Json::Object(sections) = facts else { return Vec::new() };
    let mut out = Vec::new();
    for (name, value) in sections {
        let mut rows = Vec::new();
        flatten(String::new(), value, &mut rows);
        out.push((name.replace('_', " "), rows));
    }
    out
}

/// Most facts of one section that are listed; the data in the page has them all.
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
            for (index, item) in items.iter().enumerate() {
                let named = item.get("name").or_else(|| item.get("path")).and_then(Json::as_str);
                flatten(under(named.unwrap_or(&index.to_string())), item, rows);
            }
        }
        Json::Null => rows.push((name, "unknown".to_string())),
        other => rows.push((name, plain(other))),
    }
}

fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Bool(true) => "yes".to_string(),
        Json::Bool(false) => "no".to_string(),
        other => other.to_string(),
    }
}

/// Milliseconds since 1970 as a date and time of day, UTC.
pub(super) fn utc(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Civil date from days, after the proleptic Gregorian calendar (H. Hinnant's algorithm).
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
    fn dates_are_the_calendars() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_400_000), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_763_730_000_000), "2025-11-21 13:00 UTC");
    }

    #[test]
    fn facts_become_rows() {
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
}
