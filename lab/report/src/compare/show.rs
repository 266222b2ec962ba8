//! A comparison as text and as a page.

use std::fmt::Write as _;

use super::{Comparison, Row, Verdict};
use crate::chart::{escape, short};
use crate::metric;
use crate::page;

/// For a terminal: what differs, the sums, and every row that is not the same.
pub fn text(comparison: &Comparison, rows_max: usize) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "A  {}\nB  {}\n", comparison.a, comparison.b);
    for difference in &comparison.differences {
        let _ = writeln!(out, "differs: {difference}");
    }
    if !comparison.differences.is_empty() {
        out.push('\n');
    }
    for (name, ratio, count) in &comparison.overall {
        let _ = writeln!(out, "{:<28} B / A = {:<8} over {count} cells", metric::words(name), short(*ratio));
    }
    let counts: Vec<String> = Verdict::ALL
        .iter()
        .map(|verdict| (comparison.count(*verdict), verdict))
        .filter(|(count, _)| *count > 0)
        .map(|(count, verdict)| format!("{count} {}", verdict.words()))
        .collect();
    let _ = writeln!(
        out,
        "\n{}\n",
        if counts.is_empty() { "nothing to compare".to_string() } else { counts.join(", ") }
    );
    let rows = ordered(comparison);
    let told: Vec<&&Row> = rows.iter().filter(|row| row.verdict != Verdict::Same).collect();
    for row in told.iter().take(rows_max) {
        let numbers = match (row.a, row.b, row.ratio) {
            (Some(a), Some(b), Some(ratio)) => {
                let shown = metric::shown(row.metric, a.max(b));
                format!(
                    "{} -> {} {}  x{}{}",
                    short(a / shown.per),
                    short(b / shown.per),
                    shown.unit,
                    short(ratio),
                    interval(row)
                )
            }
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "{:<18} {} [{}] {}  {numbers}{}",
            row.verdict.words(),
            row.experiment,
            row.cell,
            if row.ratio.is_some() { metric::words(row.metric) } else { String::new() },
            row.remark
        );
    }
    if told.len() > rows_max {
        let _ = writeln!(out, "… and {} more: --output-format=json has them all", told.len() - rows_max);
    }
    out
}

fn interval(row: &Row) -> String {
    row.interval.map_or(String::new(), |found| format!(" ({} to {})", short(found.low), short(found.high)))
}

/// The worst first, and what cannot be compared last.
fn ordered(comparison: &Comparison) -> Vec<&Row> {
    let mut rows: Vec<&Row> = comparison.rows.iter().collect();
    let rank = |row: &Row| Verdict::ALL.iter().position(|verdict| *verdict == row.verdict);
    rows.sort_by(|a, b| {
        let worse = |row: &Row| row.worse_percent().unwrap_or(0.0);
        rank(a).cmp(&rank(b)).then(worse(b).total_cmp(&worse(a)))
    });
    rows
}

/// The same as a page of its own.
pub fn html(comparison: &Comparison) -> String {
    let mut out = String::with_capacity(1 << 16);
    out.push_str(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>Two runs compared · Ringbolt lab</title>\
         <link rel=\"icon\" href=\"data:,\"><style>",
    );
    out.push_str(page::STYLE);
    let _ = write!(
        out,
        "</style></head><body><main><header><p class=\"eyebrow\">Ringbolt lab comparison</p>\
         <h1>What changed between two runs</h1><dl><dt>A</dt><dd>{}</dd><dt>B</dt><dd>{}</dd></dl></header>",
        escape(&comparison.a),
        escape(&comparison.b)
    );
    if !comparison.differences.is_empty() {
        out.push_str("<div class=\"warn\"><h3>What else differs</h3><ul>");
        for difference in &comparison.differences {
            let _ = write!(out, "<li>{}</li>", escape(difference));
        }
        out.push_str("</ul></div>");
    }
    out.push_str("<h2>All cells together</h2><table><thead><tr><th>Metric</th><th class=\"n\">B / A</th><th class=\"n\">cells</th></tr></thead><tbody>");
    for (name, ratio, count) in &comparison.overall {
        let _ = write!(
            out,
            "<tr><td>{}</td><td class=\"n\">{} ×</td><td class=\"n\">{count}</td></tr>",
            escape(&metric::words(name)),
            short(*ratio)
        );
    }
    out.push_str("</tbody></table><p>");
    for verdict in Verdict::ALL {
        let _ = write!(out, "{} {} ", chip(verdict), comparison.count(verdict));
    }
    out.push_str(
        "</p><h2>Each cell</h2><div class=\"scroll\"><table class=\"values\"><thead><tr><th></th><th>Experiment</th><th>Cell</th>\
         <th>Metric</th><th class=\"n\">A</th><th class=\"n\">B</th><th class=\"n\">B / A</th><th>95 %</th></tr></thead><tbody>",
    );
    for row in ordered(comparison) {
        let shown = metric::shown(row.metric, row.a.unwrap_or(0.0).max(row.b.unwrap_or(0.0)));
        let value = |value: Option<f64>| value.map_or("–".to_string(), |value| short(value / shown.per));
        let what = if row.ratio.is_some() { metric::label(row.metric, shown) } else { String::new() };
        let _ = write!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"fine\">{}</td></tr>",
            chip(row.verdict),
            escape(&row.experiment),
            escape(&row.cell),
            escape(&what),
            value(row.a),
            value(row.b),
            row.ratio.map_or("–".to_string(), |ratio| format!("{} ×", short(ratio))),
            escape(if row.remark.is_empty() { interval(row) } else { row.remark.clone() }.trim())
        );
    }
    out.push_str("</tbody></table></div></main></body></html>\n");
    out
}

fn chip(verdict: Verdict) -> String {
    let class = match verdict {
        Verdict::Faster => "yes",
        Verdict::Slower => "no",
        _ => "open",
    };
    format!("<span class=\"chip {class}\">{}</span>", verdict.words())
}
