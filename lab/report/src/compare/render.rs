//! Renders a comparison as text and as HTML.

use std::fmt::Write as _;

use super::{ChangeVerdict, Comparison, ComparisonRow};
use crate::chart::{escape, format_number};
use crate::metric;
use crate::page;
use crate::stats::ConfidenceInterval;

/// Renders a comparison for a terminal: differences of machine and plan, totals, and up to `rows_max` rows
/// that changed or cannot be compared.
pub fn text(comparison: &Comparison, rows_max: usize) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "A  {}\nB  {}\n", comparison.a, comparison.b);
    for difference in &comparison.differences {
        let _ = writeln!(out, "differs: {difference}");
    }
    if !comparison.differences.is_empty() {
        out.push('\n');
    }
    for one in &comparison.overall {
        let _ = writeln!(
            out,
            "{:<28} B / A = {:<8}{} over {} cells",
            metric::display_name(one.metric),
            format_number(one.ratio),
            bounds(one.interval),
            one.cells
        );
    }
    let counts: Vec<String> = ChangeVerdict::ALL
        .iter()
        .map(|verdict| (comparison.count(*verdict), verdict))
        .filter(|(count, _)| *count > 0)
        .map(|(count, verdict)| format!("{count} {}", verdict.label()))
        .collect();
    let _ = writeln!(
        out,
        "\n{}\n{}\n",
        if counts.is_empty() { "nothing to compare".to_string() } else { counts.join(", ") },
        comparison.intervals
    );
    let rows = ordered(comparison);
    let reported: Vec<&&ComparisonRow> =
        rows.iter().filter(|row| row.verdict != ChangeVerdict::Same).collect();
    for row in reported.iter().take(rows_max) {
        let numbers = match (row.a, row.b, row.ratio) {
            (Some(a), Some(b), Some(ratio)) => {
                let shown = metric::display_unit(row.metric, a.max(b));
                format!(
                    "{} -> {} {}  x{}{}",
                    format_number(a / shown.divisor),
                    format_number(b / shown.divisor),
                    shown.unit,
                    format_number(ratio),
                    interval(row)
                )
            }
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "{:<18} {} [{}] {}  {numbers}{}",
            row.verdict.label(),
            row.experiment,
            row.cell,
            if row.ratio.is_some() { metric::display_name(row.metric) } else { String::new() },
            row.remark
        );
    }
    if reported.len() > rows_max {
        let _ = writeln!(out, "… and {} more: --output-format=json lists all", reported.len() - rows_max);
    }
    out
}

fn interval(row: &ComparisonRow) -> String {
    bounds(row.interval)
}

fn bounds(interval: Option<ConfidenceInterval>) -> String {
    interval.map_or(String::new(), |found| {
        format!(" ({} to {})", format_number(found.low), format_number(found.high))
    })
}

/// Rows sorted from the worst regression to what is not comparable.
fn ordered(comparison: &Comparison) -> Vec<&ComparisonRow> {
    let mut rows: Vec<&ComparisonRow> = comparison.rows.iter().collect();
    let rank = |row: &ComparisonRow| ChangeVerdict::ALL.iter().position(|verdict| *verdict == row.verdict);
    rows.sort_by(|a, b| {
        let worse = |row: &ComparisonRow| row.worse_percent().unwrap_or(0.0);
        rank(a).cmp(&rank(b)).then(worse(b).total_cmp(&worse(a)))
    });
    rows
}

/// Renders a comparison as a self-contained HTML page, with every row.
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
        out.push_str("<div class=\"warn\"><h3>Other differences</h3><ul>");
        for difference in &comparison.differences {
            let _ = write!(out, "<li>{}</li>", escape(difference));
        }
        out.push_str("</ul></div>");
    }
    out.push_str("<h2>All cells</h2><table><thead><tr><th>Metric</th><th class=\"n\">B / A</th><th>95 %</th><th class=\"n\">cells</th></tr></thead><tbody>");
    for one in &comparison.overall {
        let _ = write!(
            out,
            "<tr><td>{}</td><td class=\"n\">{} ×</td><td class=\"fine\">{}</td><td class=\"n\">{}</td></tr>",
            escape(&metric::display_name(one.metric)),
            format_number(one.ratio),
            bounds(one.interval).trim(),
            one.cells
        );
    }
    out.push_str("</tbody></table><p>");
    for verdict in ChangeVerdict::ALL {
        let _ = write!(out, "{} {} ", chip(verdict), comparison.count(verdict));
    }
    let _ = write!(out, "</p><p class=\"fine\">{}</p>", escape(comparison.intervals));
    out.push_str(
        "<h2>Each cell</h2><div class=\"scroll\"><table class=\"values\"><thead><tr><th></th><th>Experiment</th><th>Cell</th>\
         <th>Metric</th><th class=\"n\">A</th><th class=\"n\">B</th><th class=\"n\">B / A</th><th>95 %</th></tr></thead><tbody>",
    );
    for row in ordered(comparison) {
        let shown = metric::display_unit(row.metric, row.a.unwrap_or(0.0).max(row.b.unwrap_or(0.0)));
        let value = |value: Option<f64>| {
            value.map_or("–".to_string(), |value| format_number(value / shown.divisor))
        };
        let what =
            if row.ratio.is_some() { metric::label_with_unit(row.metric, shown) } else { String::new() };
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
            row.ratio.map_or("–".to_string(), |ratio| format!("{} ×", format_number(ratio))),
            escape(if row.remark.is_empty() { interval(row) } else { row.remark.clone() }.trim())
        );
    }
    out.push_str("</tbody></table></div></main></body></html>\n");
    out
}

fn chip(verdict: ChangeVerdict) -> String {
    let class = match verdict {
        ChangeVerdict::Faster => "yes",
        ChangeVerdict::Slower => "no",
        _ => "open",
    };
    format!("<span class=\"chip {class}\">{}</span>", verdict.label())
}
