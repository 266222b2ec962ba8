//! The run's data as compact JSON that the page embeds and offers for download.

use lab_experiments::{CellRecord, RunDirectory, TimelineSlice};
use serde_json::{Map, Value as Json, json};

/// The limit on histogram data in the page.
#[derive(Clone, Copy, Debug)]
pub struct HistogramBudget {
    /// Maximum number of (latency, count) pairs in all histograms; above it, adjacent buckets are merged and
    /// the field `merged_buckets` reports the factor.
    pub pairs_max: usize,
}

impl Default for HistogramBudget {
    /// About 12 MB of text, which browsers load without noticeable delay.
    fn default() -> HistogramBudget {
        HistogramBudget { pairs_max: 1_500_000 }
    }
}

/// The run's data as JSON that is safe inside a `<script>` element.
///
/// A histogram is a flat list that alternates between nanoseconds (delta to the previous bucket) and the
/// number of I/Os in the bucket. If the pairs exceed the budget, adjacent buckets are merged;
/// `merged_buckets` is the number of buckets merged into one.
///
/// # Errors
/// Never for data that was read from a run directory.
pub fn embedded_json(run: &RunDirectory, budget: HistogramBudget) -> Result<String, serde_json::Error> {
    let pairs = |record: &CellRecord| {
        record.roles.values().flat_map(|role| role.histograms.values()).map(Vec::len).sum::<usize>()
    };
    let all: usize = run.records.iter().map(pairs).sum();
    let merged = all.div_ceil(budget.pairs_max.max(1)).max(1);
    let records: Vec<Json> = run.records.iter().map(|record| self::record(record, merged)).collect();
    let data = json!({
        "schema": run.plan.schema,
        "histograms": "nanoseconds as differences, and counts, alternately",
        "merged_buckets": merged,
        "machine": run.machine,
        "plan": {
            "program": run.plan.program,
            "command": run.plan.command,
            "selection": run.plan.selection,
            "scale": run.plan.scale,
            "seed": run.plan.seed,
            "order_seed": run.plan.order_seed,
            "generator": run.plan.generator,
            "cores": run.plan.cores,
            "targets": run.plan.targets,
        },
        "records": records,
    });
    // Both `</script>` and `<!--` begin with `<`.
    Ok(serde_json::to_string(&data)?.replace('<', "\\u003c"))
}

fn record(record: &CellRecord, merged: usize) -> Json {
    let mut roles = Map::new();
    for (name, role) in &record.roles {
        let metrics: Map<String, Json> =
            role.metrics.iter().map(|(name, value)| (name.clone(), rounded(*value))).collect();
        let mut entry = Map::new();
        entry.insert("m".to_string(), Json::Object(metrics));
        for (kind, pairs) in &role.histograms {
            entry.insert(kind.clone(), Json::Array(differences(pairs, merged)));
        }
        if !role.timeline.is_empty() {
            let slice = |one: &TimelineSlice| json!([rounded(one.at_ms), one.ios, differences(&one.clat, 1)]);
            entry.insert("timeline".to_string(), role.timeline.iter().map(slice).collect());
        }
        roles.insert(name.clone(), Json::Object(entry));
    }
    let mut out = Map::new();
    out.insert("e".to_string(), json!(record.experiment));
    out.insert("s".to_string(), json!(record.series));
    out.insert("p".to_string(), json!(record.parameters));
    out.insert("r".to_string(), json!(record.repetition));
    if let Some(position) = record.position {
        out.insert("position".to_string(), json!(position));
    }
    out.insert("started_unix_ms".to_string(), json!(record.started_unix_ms));
    if !roles.is_empty() {
        out.insert("roles".to_string(), Json::Object(roles));
    }
    let schedulers: Vec<String> = record
        .schedulers
        .iter()
        .map(|state| {
            let settings: Vec<String> =
                state.settings.iter().map(|(name, value)| format!(" {name}={value}")).collect();
            format!("{}: {}{}", state.device, state.scheduler, settings.concat())
        })
        .collect();
    let more = [
        ("path", json!(record.submission_path)),
        ("schedulers", json!(schedulers)),
        ("notes", json!(record.notes)),
        ("skipped", json!(record.skipped)),
        ("failed", json!(record.failed)),
    ];
    for (name, value) in more {
        if !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty()) {
            out.insert(name.to_string(), value);
        }
    }
    Json::Object(out)
}

/// Rounds to six significant digits; more are noise.
fn rounded(value: f64) -> Json {
    if value == 0.0 || !value.is_finite() {
        return json!(0);
    }
    let digits = value.abs().log10().floor() as i32;
    if digits >= 5 {
        return json!(value.round());
    }
    let unit = 10f64.powi(5 - digits);
    let rounded = (value * unit).round() / unit;
    if rounded.is_finite() { json!(rounded) } else { json!(value) }
}

fn differences(pairs: &[(u64, u64)], merged: usize) -> Vec<Json> {
    let mut out = Vec::with_capacity(pairs.len() / merged * 2 + 2);
    let mut before = 0i128;
    for group in pairs.chunks(merged.max(1)) {
        // A merged bucket is reported at its upper bound, like a single bucket.
        let Some((ns, _)) = group.last() else { continue };
        let count = group.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count));
        let difference = i128::from(*ns) - before;
        before = i128::from(*ns);
        out.push(i64::try_from(difference).map_or(Json::Null, |difference| json!(difference)));
        out.push(json!(count));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_are_delta_encoded() {
        let pairs = [(100, 1), (150, 2), (300, 3), (301, 4)];
        assert_eq!(json!(differences(&pairs, 1)), json!([100, 1, 50, 2, 150, 3, 1, 4]));
        assert_eq!(json!(differences(&pairs, 2)), json!([150, 3, 151, 7]));
    }

    #[test]
    fn data_cannot_close_the_script_element() {
        let mut run = RunDirectory::default();
        run.machine.distortions.push("</script><script>alert(1)</script>".to_string());
        let text = embedded_json(&run, HistogramBudget::default()).unwrap();
        assert!(!text.contains('<'));
        let read: Json = serde_json::from_str(&text).unwrap();
        assert_eq!(read["machine"]["distortions"][0], "</script><script>alert(1)</script>");
    }

    #[test]
    fn histograms_over_budget_merge_buckets() {
        let mut run = RunDirectory::default();
        let mut record = CellRecord::new("t.fig", "a");
        record.role_mut("fg").histograms.insert("clat".into(), (1..=1000).map(|ns| (ns, 1)).collect());
        run.records.push(record);
        let text = embedded_json(&run, HistogramBudget { pairs_max: 100 }).unwrap();
        let read: Json = serde_json::from_str(&text).unwrap();
        assert_eq!(read["merged_buckets"], 10);
        assert_eq!(read["records"][0]["roles"]["fg"]["clat"].as_array().unwrap().len(), 200);
    }
}
