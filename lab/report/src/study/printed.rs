//! Recomputes numbers that a paper prints from its published raw files.

use std::collections::BTreeMap;

use lab_experiments::reference;

/// How well a printed number matches the recomputed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Equal to the printed precision, or within a stated bound.
    Exact,
    /// Within 1 %.
    WithinOnePercent,
    /// More than 1 % off.
    Differs,
}

/// A number that a paper prints, and the value recomputed from its raw files.
#[derive(Clone, Debug)]
pub struct PrintedNumber {
    /// The study's identifier.
    pub study: String,
    /// The figure or table of the paper.
    pub location: String,
    /// The metric and the parameters that it belongs to.
    pub what: String,
    /// The printed value, in `unit`.
    pub printed: f64,
    /// The value recomputed from the raw files, in `unit`.
    pub recomputed: f64,
    /// The unit of both values, as in the reference data: `kiops`, `pct`, `x`, ….
    pub unit: String,
    /// How well both values match.
    pub agreement: Agreement,
}

type CsvRow = BTreeMap<String, String>;

/// Recomputes every printed number whose study has the raw files for it.
pub fn printed_numbers() -> Vec<PrintedNumber> {
    let mut all = Vec::new();
    for (study, text) in reference::FACTS {
        let facts: toml::Table = toml::from_str(text).unwrap_or_default();
        for stated in facts.get("stated").and_then(toml::Value::as_array).into_iter().flatten() {
            let place = text_field(stated, "exp");
            for item in stated.get("items").and_then(toml::Value::as_array).into_iter().flatten() {
                all.extend(recompute(study, &place, item));
            }
        }
    }
    all
}

fn recompute(study: &str, place: &str, item: &toml::Value) -> Option<PrintedNumber> {
    let printed = number(item.get("value")?)?;
    let from = cell(study, item.get("from")?)?;
    let raw = match (item.get("over"), text_field(item, "op").as_str()) {
        (None, _) => from,
        (Some(over), op) => {
            let ratio = from / cell(study, over)?;
            match op {
                "gain" => 100.0 * (ratio - 1.0),
                "loss" => 100.0 * (1.0 - ratio),
                _ => ratio,
            }
        }
    };
    let mut what: Vec<String> = Vec::new();
    for name in ["panel", "sched", "what"] {
        let text = text_field(item, name);
        if !text.is_empty() {
            what.push(if name == "panel" { format!("panel {text}") } else { text });
        }
    }
    for name in ["qd", "procs", "devices", "bg"] {
        what.extend(item.get(name).and_then(number).map(|value| format!("{name} {value}")));
    }
    what.push(text_field(item, "metric"));
    let approximate = item.get("approx").and_then(toml::Value::as_bool).unwrap_or(false);
    let agreement = agreement(printed, raw, &text_field(item, "bound"), approximate);
    Some(PrintedNumber {
        study: study.to_string(),
        location: place.to_string(),
        what: what.join(", "),
        printed,
        recomputed: raw,
        unit: text_field(item, "unit"),
        agreement,
    })
}

/// A number printed as "at least" or "at most" is a bound; "about" allows 8 %.
fn agreement(printed: f64, raw: f64, bound: &str, approximate: bool) -> Agreement {
    let deviation = (raw - printed).abs() / printed.abs();
    let text = format!("{printed}");
    let places = text.split_once('.').map_or(0, |(_, fraction)| fraction.len());
    // The reference data holds 1.90 as 1.9, so the precision may be underestimated by trailing zeros.
    let rounded = (raw - printed).abs() <= 0.5 * 10f64.powi(-(places as i32)) * (1.0 + 1e-9);
    let within = match bound {
        "min" => raw >= printed,
        "max" => raw <= printed,
        _ => rounded || (approximate && deviation <= 0.08),
    };
    match (within, deviation <= 0.01) {
        (true, _) => Agreement::Exact,
        (false, true) => Agreement::WithinOnePercent,
        (false, false) => Agreement::Differs,
    }
}

/// Looks up the number that `{ csv, where, col, scale, agg }` selects.
fn cell(study: &str, of: &toml::Value) -> Option<f64> {
    let rows = reference::table(study, &text_field(of, "csv"))?;
    let column = text_field(of, "col");
    let wanted = of.get("where").and_then(toml::Value::as_table);
    let fits = |row: &&CsvRow| {
        wanted.into_iter().flatten().all(|(name, value)| row.get(name).map(String::as_str) == value.as_str())
    };
    let values: Vec<f64> =
        rows.iter().filter(fits).filter_map(|row| row.get(&column)?.parse().ok()).collect();
    let value = match text_field(of, "agg").as_str() {
        "max" => values.iter().copied().reduce(f64::max)?,
        "min" => values.iter().copied().reduce(f64::min)?,
        _ => *values.first()?,
    };
    Some(value * of.get("scale").and_then(number).unwrap_or(1.0))
}

fn text_field(of: &toml::Value, name: &str) -> String {
    of.get(name).and_then(toml::Value::as_str).unwrap_or_default().to_string()
}

fn number(value: &toml::Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|value| value as f64))
}
