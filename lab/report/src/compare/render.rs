//! Renders a comparison as text and as HTML.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{ChangeVerdict, Comparison, ComparisonRow, METRICS};
use crate::chart::{Heatmap, escape, format_limit, format_number, name_rank};
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
    let shown = &reported[..reported.len().min(rows_max)];
    let commons = commons(&mut out, &rows, shown.iter().map(|row| row.experiment.as_str()), "");
    for row in shown {
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
            varying_label(&row.cell, commons.get(row.experiment.as_str()).map_or(&[], Vec::as_slice)),
            if row.ratio.is_some() { metric::display_name(row.metric) } else { String::new() },
            row.remark
        );
    }
    if reported.len() > rows_max {
        let _ = writeln!(out, "… and {} more: --output-format=json lists all", reported.len() - rows_max);
    }
    out
}

/// The parameters that all rows of each of `experiments` have, by experiment. Writes a line for each that has any.
pub(super) fn commons<'a>(
    out: &mut String,
    rows: &[&'a ComparisonRow],
    experiments: impl Iterator<Item = &'a str>,
    indent: &str,
) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut commons = BTreeMap::new();
    for experiment in experiments {
        if commons.contains_key(experiment) {
            continue;
        }
        let rows: Vec<&ComparisonRow> =
            rows.iter().copied().filter(|row| row.experiment == experiment).collect();
        let common = common_parameters(&rows);
        if !common.is_empty() {
            let _ = writeln!(out, "{indent}all cells of {experiment}: {}", common.join(", "));
        }
        commons.insert(experiment, common);
    }
    commons
}

/// The order of cells by their parameters: numbers by size, schedulers and stacks as everywhere.
pub(super) fn cell_order(a: &str, b: &str) -> Ordering {
    let pair = |part: &'_ str| -> (String, String) {
        let (name, value) = part.split_once(' ').unwrap_or((part, ""));
        (name.to_string(), value.to_string())
    };
    for (a, b) in a.split(", ").map(pair).zip(b.split(", ").map(pair)) {
        let values = match (a.1.parse::<f64>(), b.1.parse::<f64>()) {
            (Ok(a), Ok(b)) => a.total_cmp(&b),
            _ => name_rank(&a.1).cmp(&name_rank(&b.1)).then_with(|| a.1.cmp(&b.1)),
        };
        let order = a.0.cmp(&b.0).then(values);
        if order.is_ne() {
            return order;
        }
    }
    a.len().cmp(&b.len())
}

/// A cell's label in a chart: schedulers and stacks need no name of the parameter.
pub(super) fn chart_label(label: &str) -> String {
    let parts = label
        .split(", ")
        .map(|part| part.strip_prefix("scheduler ").or_else(|| part.strip_prefix("api ")).unwrap_or(part));
    parts.collect::<Vec<_>>().join(", ")
}

fn interval(row: &ComparisonRow) -> String {
    bounds(row.interval)
}

pub(super) fn bounds(interval: Option<ConfidenceInterval>) -> String {
    interval.map_or(String::new(), |found| {
        format!(" ({} to {})", format_limit(found.low), format_limit(found.high))
    })
}

/// Rows sorted from the worst regression to what is not comparable.
pub(super) fn ordered(comparison: &Comparison) -> Vec<&ComparisonRow> {
    let mut rows: Vec<&ComparisonRow> = comparison.rows.iter().collect();
    let rank = |row: &ComparisonRow| ChangeVerdict::ALL.iter().position(|verdict| *verdict == row.verdict);
    rows.sort_by(|a, b| {
        let worse = |row: &ComparisonRow| row.worse_percent().unwrap_or(0.0);
        rank(a).cmp(&rank(b)).then(worse(b).total_cmp(&worse(a)))
    });
    rows
}

/// The start of a page, up to its heading.
pub(super) fn page_start(title: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{title} · Ringbolt lab</title>\
         <link rel=\"icon\" href=\"data:,\"><style>{}</style></head><body><main><header>\
         <p class=\"eyebrow\">Ringbolt lab comparison</p><h1>{title}</h1>",
        page::STYLE
    )
}

/// The end of a page, with the script that adds tooltips and buttons to the charts.
pub(super) fn page_end() -> String {
    format!("</main><script>{}</script></body></html>\n", page::SCRIPT)
}

/// Renders a comparison as a self-contained HTML page, with every row.
pub fn html(comparison: &Comparison) -> String {
    let mut out = page_start("What changed between two runs");
    let _ = write!(
        out,
        "<dl><dt>A</dt><dd>{}</dd><dt>B</dt><dd>{}</dd></dl></header>",
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
    out.push_str("<h2>Each cell</h2>");
    let rows = ordered(comparison);
    let mut experiments: Vec<&str> = Vec::new();
    for row in &rows {
        if !experiments.contains(&row.experiment.as_str()) {
            experiments.push(&row.experiment);
        }
    }
    for experiment in experiments {
        let rows: Vec<&ComparisonRow> =
            rows.iter().copied().filter(|row| row.experiment == experiment).collect();
        experiment_section(&mut out, experiment, &rows);
    }
    out.push_str(&page_end());
    out
}

/// Most rows of a heat map; the table has all.
pub(super) const HEATMAP_ROWS_MAX: usize = 40;

/// The head of an experiment's section, with what all of its cells have in common.
pub(super) fn begin_section(out: &mut String, experiment: &str, common: &[&str]) {
    let _ = write!(
        out,
        "<section class=\"exp\" id=\"{}\"><h3><span class=\"id\">{}</span></h3>",
        page::anchor(experiment),
        escape(experiment)
    );
    if !common.is_empty() {
        let _ = write!(out, "<p class=\"fine\">All cells: {}.</p>", escape(&common.join(", ")));
    }
}

/// An experiment: what all of its cells have in common, a heat map of the ratios, and a table of all rows.
fn experiment_section(out: &mut String, experiment: &str, rows: &[&ComparisonRow]) {
    let common = common_parameters(rows);
    begin_section(out, experiment, &common);
    let map = ratio_heatmap(experiment, rows, &common);
    let svg = map.svg();
    if !svg.is_empty() {
        let _ = write!(out, "<div class=\"panels\"><figure>{svg}</figure></div>");
    }
    out.push_str(
        "<div class=\"scroll\"><table class=\"compared\"><thead><tr><th></th><th>Cell</th><th>Metric</th>\
         <th class=\"n\">A</th><th class=\"n\">B</th><th class=\"n\">B / A</th></tr></thead><tbody>",
    );
    for row in rows {
        let shown = metric::display_unit(row.metric, row.a.unwrap_or(0.0).max(row.b.unwrap_or(0.0)));
        let value = |value: Option<f64>| {
            value.map_or("–".to_string(), |value| format_number(value / shown.divisor))
        };
        let what =
            if row.ratio.is_some() { metric::label_with_unit(row.metric, shown) } else { String::new() };
        let below = if row.remark.is_empty() { interval(row).trim().to_string() } else { String::new() };
        let remark = if row.remark.is_empty() { what } else { row.remark.clone() };
        let _ = write!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}<span class=\"iv\">{}</span></td></tr>",
            chip(row.verdict),
            escape(&varying_label(&row.cell, &common)),
            escape(&remark),
            value(row.a),
            value(row.b),
            row.ratio.map_or("–".to_string(), |ratio| format!("{} ×", format_number(ratio))),
            escape(&below),
        );
    }
    out.push_str("</tbody></table></div></section>");
}

/// The parameters that all rows have, if there are several cells.
pub(super) fn common_parameters<'a>(rows: &[&'a ComparisonRow]) -> Vec<&'a str> {
    let Some(first) = rows.first() else { return Vec::new() };
    if rows.iter().all(|row| row.cell == first.cell) {
        return Vec::new();
    }
    let in_all = |part: &&str| rows.iter().all(|row| row.cell.split(", ").any(|other| other == *part));
    first.cell.split(", ").filter(in_all).collect()
}

/// A cell's label without the parameters that all cells have.
pub(super) fn varying_label(cell: &str, common: &[&str]) -> String {
    cell.split(", ").filter(|part| !common.contains(part)).collect::<Vec<_>>().join(", ")
}

/// The name of a metric as the head of a narrow column; all latencies of a comparison are completion latencies.
fn short_name(metric: &str) -> String {
    metric::display_name(metric).replace("completion latency", "latency")
}

/// B / A of each cell and metric.
fn ratio_heatmap(experiment: &str, rows: &[&ComparisonRow], common: &[&str]) -> Heatmap {
    let mut metrics: Vec<&str> = Vec::new();
    let mut cells: Vec<(String, Vec<&ComparisonRow>)> = Vec::new();
    for row in rows.iter().filter(|row| row.ratio.is_some()) {
        if !metrics.contains(&row.metric) {
            metrics.push(row.metric);
        }
        let name = varying_label(&row.cell, common);
        match cells.iter_mut().find(|(known, _)| *known == name) {
            Some((_, of_cell)) => of_cell.push(row),
            None => cells.push((name, vec![row])),
        }
    }
    // The worst ones are shown, where there are too many, in the order of their parameters.
    cells.truncate(HEATMAP_ROWS_MAX);
    cells.sort_by(|a, b| cell_order(&a.0, &b.0));
    metrics.sort_by_key(|metric| METRICS.iter().position(|known| known == metric));
    let values = |of_cell: &[&ComparisonRow]| {
        let ratio =
            |metric: &&str| of_cell.iter().find(|row| row.metric == *metric).and_then(|row| row.ratio);
        metrics.iter().map(ratio).collect::<Vec<_>>()
    };
    let rows: Vec<(String, Vec<Option<f64>>)> =
        cells.iter().map(|(name, of_cell)| (chart_label(name), values(of_cell))).collect();
    let range = Heatmap::range_of(rows.iter().flat_map(|(_, values)| values).flatten().copied());
    Heatmap {
        title: format!("{experiment}: B / A"),
        label: "B / A, times".into(),
        x_label: "metric".into(),
        y_label: "cell".into(),
        columns: metrics.iter().map(|metric| short_name(metric)).collect(),
        rows,
        range,
    }
}

pub(super) fn chip(verdict: ChangeVerdict) -> String {
    let class = match verdict {
        ChangeVerdict::Faster => "yes",
        ChangeVerdict::Slower => "no",
        _ => "open",
    };
    format!("<span class=\"chip {class}\">{}</span>", verdict.label())
}
