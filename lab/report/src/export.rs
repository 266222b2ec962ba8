//! Exports a run as CSV or JSON.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use lab_experiments::{CellRecord, RunDirectory};
use serde_json::{Value as Json, json};

/// Exports one row for each record and role: fixed columns first, then one column for each parameter and each
/// metric that occurs in the run. Missing values are empty. Fields with a comma, quote or line break are
/// quoted according to RFC 4180; text that a spreadsheet would evaluate as a formula gets a leading `'`.
pub fn csv(run: &RunDirectory) -> String {
    let mut parameters: BTreeSet<&str> = BTreeSet::new();
    let mut metrics: BTreeSet<&str> = BTreeSet::new();
    for record in &run.records {
        parameters.extend(record.parameters.keys().map(String::as_str));
        metrics.extend(record.roles.values().flat_map(|role| role.metrics.keys().map(String::as_str)));
    }
    let fixed = ["experiment", "series", "repetition", "role", "submission_path", "skipped", "failed"];
    let mut out = String::new();
    let names: Vec<String> = fixed
        .iter()
        .map(|name| (*name).to_string())
        .chain(parameters.iter().map(|name| field(name)))
        .chain(metrics.iter().map(|name| field(name)))
        .collect();
    let _ = writeln!(out, "{}", names.join(","));
    for record in &run.records {
        // A record without a measurement has a row too, with the reason.
        let roles: Vec<&str> = if record.roles.is_empty() {
            vec![""]
        } else {
            record.roles.keys().map(String::as_str).collect()
        };
        for role in roles {
            row(&mut out, record, role, &parameters, &metrics);
        }
    }
    out
}

fn row(
    out: &mut String,
    record: &CellRecord,
    role: &str,
    parameters: &BTreeSet<&str>,
    metrics: &BTreeSet<&str>,
) {
    let optional = |text: &Option<String>| field(text.as_deref().unwrap_or_default());
    let mut fields = vec![
        field(&record.experiment),
        field(&record.series),
        record.repetition.to_string(),
        field(role),
        optional(&record.submission_path),
        optional(&record.skipped),
        optional(&record.failed),
    ];
    for name in parameters {
        fields.push(record.parameters.get(*name).map_or_else(String::new, |value| match value.as_str() {
            Some(text) => field(text),
            None => value.to_string(),
        }));
    }
    for name in metrics {
        fields.push(record.metric(role, name).map_or_else(String::new, |value| value.to_string()));
    }
    let _ = writeln!(out, "{}", fields.join(","));
}

fn field(text: &str) -> String {
    let formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = if formula { format!("'{text}") } else { text.to_string() };
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

/// Exports the whole run as one object: `schema`, `machine`, `plan`, `records` (the lines of
/// `results.jsonl`), and `dropped` (the lines that could not be read).
///
/// # Errors
/// Never for data that was read from a run directory.
pub fn json(run: &RunDirectory) -> Result<Json, serde_json::Error> {
    Ok(json!({
        "schema": lab_experiments::SCHEMA,
        "machine": serde_json::to_value(&run.machine)?,
        "plan": serde_json::to_value(&run.plan)?,
        "records": serde_json::to_value(&run.records)?,
        "dropped": run.dropped,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> RunDirectory {
        let mut run = RunDirectory::default();
        let mut record = CellRecord::new("t.fig", "a, \"quoted\"");
        record.parameters.insert("scheduler".into(), "=cmd()".into());
        record.role_mut("fg").set("iops", 12.5);
        record.role_mut("bg").set("bw_mib_s", 3.0);
        run.records.push(record);
        let mut skipped = CellRecord::new("t.fig", "b");
        skipped.skipped = Some("two\nlines".into());
        run.records.push(skipped);
        run
    }

    #[test]
    fn csv_fields_are_quoted_according_to_rfc_4180() {
        assert_eq!(
            csv(&run()),
            "experiment,series,repetition,role,submission_path,skipped,failed,scheduler,bw_mib_s,iops\n\
             t.fig,\"a, \"\"quoted\"\"\",0,bg,,,,'=cmd(),3,\n\
             t.fig,\"a, \"\"quoted\"\"\",0,fg,,,,'=cmd(),,12.5\n\
             t.fig,b,0,,,\"two\nlines\",,,,\n"
        );
    }

    #[test]
    fn json_records_round_trip() {
        let run = run();
        let json = json(&run).unwrap();
        let records: Vec<CellRecord> = serde_json::from_value(json["records"].clone()).unwrap();
        assert_eq!(records, run.records);
    }
}
