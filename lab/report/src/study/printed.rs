//! Printed numbers against the raw files that they were made from.

use std::collections::BTreeMap;

use experiments::reference;

/// Whether a printed number follows from the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// To the digits that are printed.
    Equal,
    /// Within one per cent.
    Near,
    /// Further away.
    Apart,
}

/// A number that a paper prints, and what its raw files give.
#[derive(Clone, Debug)]
pub struct Printed {
    /// The study.
    pub study: String,
    /// The figure or table.
    pub place: String,
    /// What the number is.
    pub what: String,
    /// As printed.
    pub printed: f64,
    /// From the files.
    pub raw: f64,
    /// Of both.
    pub unit: String,
    /// Whether they agree.
    pub agreement: Agreement,
}

type Row = BTreeMap<String, String>;

/// Every printed number that the raw files of its study can confirm.
pub fn printed() -> Vec<Printed> {
    let mut all = Vec::new();
    for (study, text) in reference::FACTS {
        let facts: toml::Table = toml::from_str(text).unwrap_or_default();
        for stated in facts.get("stated").and_then(toml::Value::as_array).into_iter().flatten() {
            let place = word(stated, "exp");
            for item in stated.get("items").and_then(toml::Value::as_array).into_iter().flatten() {
                all.extend(one(study, &place, item));
            }
        }
    }
    all
}

fn one(study: &str, place: &str, item: &toml::Value) -> Option<Printed> {
    let printed = number(item.get("value")?)?;
    let from = cell(study, item.get("from")?)?;
    let raw = match (item.get("over"), word(item, "op").as_str()) {
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
        let said = word(item, name);
        if !said.is_empty() {
            what.push(if name == "panel" { format!("panel {said}") } else { said });
        }
    }
    for name in ["qd", "procs", "devices", "bg"] {
        what.extend(item.get(name).and_then(number).map(|value| format!("{name} {value}")));
    }
    what.push(word(item, "metric"));
    let approximate = item.get("approx").and_then(toml::Value::as_bool).unwrap_or(false);
    let agreement = agreement(printed, raw, &word(item, "bound"), approximate);
    Some(Printed {
        study: study.to_string(),
        place: place.to_string(),
        what: what.join(", "),
        printed,
        raw,
        unit: word(item, "unit"),
        agreement,
    })
}

/// "At least" and "at most" are bounds; "about" is given eight per cent.
fn agreement(printed: f64, raw: f64, bound: &str, approximate: bool) -> Agreement {
    let apart = (raw - printed).abs() / printed.abs();
    let text = format!("{printed}");
    let places = text.split_once('.').map_or(0, |(_, fraction)| fraction.len());
    // 1.90 is kept as 1.9: the digit that is gone was a zero.
    let rounded = (raw - printed).abs() <= 0.5 * 10f64.powi(-(places as i32)) * (1.0 + 1e-9);
    let within = match bound {
        "min" => raw >= printed,
        "max" => raw <= printed,
        _ => rounded || (approximate && apart <= 0.08),
    };
    match (within, apart <= 0.01) {
        (true, _) => Agreement::Equal,
        (false, true) => Agreement::Near,
        (false, false) => Agreement::Apart,
    }
}

/// The number that a `{ csv, where, col, scale, agg }` names.
fn cell(study: &str, of: &toml::Value) -> Option<f64> {
    let rows = reference::table(study, &word(of, "csv"))?;
    let column = word(of, "col");
    let wanted = of.get("where").and_then(toml::Value::as_table);
    let fits = |row: &&Row| {
        wanted.into_iter().flatten().all(|(name, value)| row.get(name).map(String::as_str) == value.as_str())
    };
    let values: Vec<f64> =
        rows.iter().filter(fits).filter_map(|row| row.get(&column)?.parse().ok()).collect();
    let value = match word(of, "agg").as_str() {
        "max" => values.iter().copied().reduce(f64::max)?,
        "min" => values.iter().copied().reduce(f64::min)?,
        _ => *values.first()?,
    };
    Some(value * of.get("scale").and_then(number).unwrap_or(1.0))
}

fn word(of: &toml::Value, name: &str) -> String {
    of.get(name).and_then(toml::Value::as_str).unwrap_or_default().to_string()
}

fn number(value: &toml::Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|value| value as f64))
}
