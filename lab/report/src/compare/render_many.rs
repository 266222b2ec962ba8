//! Renders a comparison of many runs as text and as HTML.

use std::fmt::Write as _;

use super::many::ManyRow;
use super::render::{
    HEATMAP_ROWS_MAX, begin_section, bounds, chart_label, chip, common_parameters, commons, ordered,
    page_end, page_start, varying_label,
};
use super::{ChangeVerdict, Comparison, ComparisonRow, METRICS, ManyComparison};
use crate::chart::{Heatmap, escape, format_number};
use crate::metric;

/// The runs with their letters, each with totals and up to `rows_max` rows that changed.
pub fn text_of_many(many: &ManyComparison, rows_max: usize) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "A  {}  (baseline)", many.baseline);
    for (index, comparison) in many.comparisons.iter().enumerate() {
        let _ = writeln!(out, "{}  {}", ManyComparison::letter(index), comparison.b);
    }
    for (index, comparison) in many.comparisons.iter().enumerate() {
        let letter = ManyComparison::letter(index);
        let _ = writeln!(out, "\n{letter}: {}", counts(comparison).join(", "));
        for one in &comparison.overall {
            let _ = writeln!(
                out,
                "  {:<28} {letter} / A = {}{} over {} cells",
                metric::display_name(one.metric),
                format_number(one.ratio),
                bounds(one.interval),
                one.cells
            );
        }
        let changed =
            |row: &&&ComparisonRow| matches!(row.verdict, ChangeVerdict::Faster | ChangeVerdict::Slower);
        let rows = ordered(comparison);
        let shown = || rows.iter().filter(changed).take(rows_max);
        let commons = commons(&mut out, &rows, shown().map(|row| row.experiment.as_str()), "  ");
        for row in shown() {
            let _ = writeln!(
                out,
                "  {:<8} {} [{}] {} x{}{}",
                row.verdict.label(),
                row.experiment,
                varying_label(&row.cell, commons.get(row.experiment.as_str()).map_or(&[], Vec::as_slice)),
                metric::display_name(row.metric),
                row.ratio.map_or(String::new(), format_number),
                bounds(row.interval)
            );
        }
        let more = rows.iter().filter(changed).count().saturating_sub(rows_max);
        if more > 0 {
            let _ = writeln!(out, "  … and {more} more: --output-format=json lists all");
        }
    }
    if let Some(first) = many.comparisons.first() {
        let _ = writeln!(out, "\n{}", first.intervals);
    }
    out
}

/// How many rows have each verdict, for those that occur.
fn counts(comparison: &Comparison) -> Vec<String> {
    let counts = ChangeVerdict::ALL.iter().map(|verdict| (comparison.count(*verdict), verdict));
    let counts: Vec<String> = counts
        .filter(|(count, _)| *count > 0)
        .map(|(count, verdict)| format!("{count} {}", verdict.label()))
        .collect();
    if counts.is_empty() { vec!["nothing to compare".to_string()] } else { counts }
}

/// Renders a comparison of many runs as a self-contained HTML page, with every row that has a ratio.
pub fn html_of_many(many: &ManyComparison) -> String {
    let mut out = page_start("What changed between several runs");
    let _ = write!(out, "<dl><dt>A, baseline</dt><dd>{}</dd>", escape(&many.baseline));
    for (index, comparison) in many.comparisons.iter().enumerate() {
        let letter = ManyComparison::letter(index);
        let _ = write!(out, "<dt>{letter}</dt><dd>{}</dd>", escape(&comparison.b));
    }
    out.push_str("</dl></header>");
    for (index, comparison) in many.comparisons.iter().enumerate() {
        if comparison.differences.is_empty() {
            continue;
        }
        let letter = ManyComparison::letter(index);
        let _ = write!(out, "<div class=\"warn\"><h3>Other differences between A and {letter}</h3><ul>");
        for difference in &comparison.differences {
            let _ = write!(out, "<li>{}</li>", escape(difference));
        }
        out.push_str("</ul></div>");
    }
    overall(&mut out, many);
    out.push_str("<h2>Each cell</h2>");
    let rows = many.rows();
    let mut experiments: Vec<&str> = Vec::new();
    for row in &rows {
        if !experiments.contains(&row.experiment) {
            experiments.push(row.experiment);
        }
    }
    for experiment in experiments {
        let rows: Vec<&ManyRow<'_>> = rows.iter().filter(|row| row.experiment == experiment).collect();
        experiment_section(&mut out, experiment, many, &rows);
    }
    out.push_str(&page_end());
    out
}

fn head(out: &mut String, first: &[&str], many: &ManyComparison) {
    out.push_str("<div class=\"scroll\"><table class=\"compared many\"><thead><tr>");
    for name in first {
        let _ = write!(out, "<th>{name}</th>");
    }
    for index in 0..many.comparisons.len() {
        let _ = write!(out, "<th class=\"n\">{} / A</th>", ManyComparison::letter(index));
    }
    out.push_str("</tr></thead><tbody>");
}

/// Each metric over all cells, and the number of rows with each verdict.
fn overall(out: &mut String, many: &ManyComparison) {
    out.push_str("<h2>All cells</h2>");
    head(out, &["Metric"], many);
    for metric in METRICS {
        let _ = write!(out, "<tr><td>{}</td>", escape(&metric::display_name(metric)));
        for comparison in &many.comparisons {
            match comparison.overall.iter().find(|one| one.metric == metric) {
                Some(one) => {
                    let ratio = format_number(one.ratio);
                    let interval = bounds(one.interval);
                    let _ = write!(
                        out,
                        "<td class=\"n\">{ratio} ×<span class=\"iv\">{}</span></td>",
                        interval.trim()
                    );
                }
                None => out.push_str("<td class=\"n\">–</td>"),
            }
        }
        out.push_str("</tr>");
    }
    for verdict in ChangeVerdict::ALL {
        let counts: Vec<usize> =
            many.comparisons.iter().map(|comparison| comparison.count(verdict)).collect();
        if counts.iter().any(|count| *count > 0) {
            let _ = write!(out, "<tr><td>{}</td>", chip(verdict));
            for count in &counts {
                let _ = write!(out, "<td class=\"n\">{count}</td>");
            }
            out.push_str("</tr>");
        }
    }
    out.push_str("</tbody></table></div>");
    if let Some(first) = many.comparisons.first() {
        let _ = write!(
            out,
            "<p class=\"fine\">{} Significance is decided for the rows of all runs together.</p>",
            escape(first.intervals)
        );
    }
}

/// An experiment: what all of its cells have in common, a heat map a metric, and a table of all rows.
fn experiment_section(out: &mut String, experiment: &str, many: &ManyComparison, rows: &[&ManyRow<'_>]) {
    let any: Vec<&ComparisonRow> =
        rows.iter().filter_map(|row| row.rows.iter().flatten().next().copied()).collect();
    let common = common_parameters(&any);
    begin_section(out, experiment, &common);
    out.push_str("<div class=\"panels\">");
    for metric in METRICS {
        let svg = heatmap(experiment, metric, many, rows, &common).svg();
        if !svg.is_empty() {
            let _ = write!(out, "<figure>{svg}</figure>");
        }
    }
    out.push_str("</div>");
    head(out, &["Cell", "Metric", "A"], many);
    for row in rows {
        let values = row.rows.iter().flatten().filter_map(|row| row.a);
        let a = values.clone().next();
        let shown = metric::display_unit(row.metric, values.fold(0.0, f64::max));
        let _ = write!(
            out,
            "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td>",
            escape(&varying_label(row.cell, &common)),
            escape(&metric::label_with_unit(row.metric, shown)),
            a.map_or("–".to_string(), |value| format_number(value / shown.divisor))
        );
        for one in &row.rows {
            let Some((one, ratio)) = one.and_then(|one| Some((one, one.ratio?))) else {
                out.push_str("<td class=\"n\">–</td>");
                continue;
            };
            let below = if one.remark.is_empty() { bounds(one.interval) } else { one.remark.clone() };
            let _ = write!(
                out,
                "<td class=\"n\">{} ×<span class=\"iv\">{}</span>{}</td>",
                format_number(ratio),
                escape(below.trim()),
                chip(one.verdict)
            );
        }
        out.push_str("</tr>");
    }
    out.push_str("</tbody></table></div></section>");
}

/// The ratios of a metric: a row for each cell, a column for each run.
fn heatmap(
    experiment: &str,
    metric: &str,
    many: &ManyComparison,
    rows: &[&ManyRow<'_>],
    common: &[&str],
) -> Heatmap {
    let ratios = |row: &&&ManyRow<'_>| {
        let ratios: Vec<Option<f64>> = row.rows.iter().map(|one| one.and_then(|one| one.ratio)).collect();
        (chart_label(&varying_label(row.cell, common)), ratios)
    };
    let rows: Vec<(String, Vec<Option<f64>>)> = rows
        .iter()
        .filter(|row| row.metric == metric)
        .take(HEATMAP_ROWS_MAX)
        .map(|row| ratios(&row))
        .collect();
    let name = metric::display_name(metric);
    Heatmap {
        title: format!("{experiment}: {name} of each run, A = 1"),
        label: format!("{name}, multiples of A"),
        x_label: "run".into(),
        y_label: "cell".into(),
        columns: (0..many.comparisons.len()).map(ManyComparison::letter).collect(),
        range: Heatmap::range_of(rows.iter().flat_map(|(_, values)| values).flatten().copied()),
        rows,
    }
}
