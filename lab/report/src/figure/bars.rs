//! Bars, heat maps, and columns of shares.

use std::collections::BTreeSet;

use experiments::Value;

use super::{Drawn, Frame, Panel, Sample, Whose, value_words};
use crate::chart::{Bar, Bars, Column, Group, Heat, Stack};
use crate::metric;

/// Bars of one scale; see `curve`.
const LINEAR_TIMES: f64 = 4.0;

/// Bars grouped by what lies along the horizontal axis; what was counted over the whole machine as well
/// has a panel of its own.
pub(super) fn draw(frame: &Frame<'_>) -> Vec<Panel> {
    let role = frame.definition.role.as_str();
    let mut panels = vec![of_role(frame, role)];
    let machine = |sample: &Sample<'_>| sample.cell.median("all", &frame.definition.y).is_some();
    if role != "all" && frame.samples.iter().any(machine) {
        for panel in &mut panels {
            panel.title = joined(&panel.title, "generator only");
        }
        let mut whole = of_role(frame, "all");
        whole.title = joined(&whole.title, "whole machine");
        panels.push(whole);
    }
    panels
}

fn joined(title: &str, more: &str) -> String {
    if title.is_empty() { more.to_string() } else { format!("{title}, {more}") }
}

fn of_role(frame: &Frame<'_>, role: &str) -> Panel {
    let definition = frame.definition;
    let middle = |sample: &Sample<'_>| sample.cell.median(role, &definition.y);
    let mut charts = Vec::new();
    for whose in frame.sides(frame.together(LINEAR_TIMES, middle)) {
        let largest = frame.of(whose).filter_map(middle).fold(0.0, f64::max);
        let shown = metric::shown(&definition.y, largest);
        let mut groups: Vec<Group> = Vec::new();
        for x in group_names(frame) {
            let mut group = Group { name: x.clone(), bars: Vec::new() };
            for name in frame.series() {
                for sample in frame.of(whose).filter(|sample| frame.name(sample) == name) {
                    if group_name(frame, sample) != x {
                        continue;
                    }
                    let Some(value) = middle(sample) else { continue };
                    let interval = sample.cell.interval(role, &definition.y);
                    group.bars.push(Bar {
                        name: name.clone(),
                        value: value / shown.per,
                        interval: interval.map(|found| found.per(shown.per)),
                        published: sample.published,
                    });
                }
            }
            if !group.bars.is_empty() {
                groups.push(group);
            }
        }
        let title = frame.title(&metric::words(&definition.y));
        let svg = Bars { title, label: metric::label(&definition.y, shown), groups }.svg();
        if !svg.is_empty() {
            charts.push(Drawn { whose, svg });
        }
    }
    Panel { title: frame.panel.clone(), charts }
}

fn group_name(frame: &Frame<'_>, sample: &Sample<'_>) -> String {
    let x = &frame.definition.x;
    frame.x(sample).map_or_else(|| frame.name(sample), |value| value_words(x, value))
}

/// In the order of the horizontal axis; lines without a place on it stand last, under their own name.
fn group_names(frame: &Frame<'_>) -> Vec<String> {
    let x = &frame.definition.x;
    let mut names: Vec<String> = frame.xs().iter().map(|value| value_words(x, value)).collect();
    for sample in &frame.samples {
        let name = group_name(frame, sample);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// A printed table: the reader's numbers, and beside them the writer's where both were measured.
pub(super) fn table(frame: &Frame<'_>) -> Vec<Panel> {
    let mut panels = vec![heat(frame)];
    let writer = |sample: &Sample<'_>| sample.cell.median("bg", &frame.definition.y).is_some();
    if frame.definition.role == "fg" && frame.samples.iter().any(writer) {
        panels[0].title = joined(&panels[0].title, "the reader");
        let mut other = heat_of(frame, "bg");
        other.title = joined(&other.title, "the writer beside it");
        panels.push(other);
    }
    panels
}

/// A number for each line and each value along the axis, relative to one of them where the definition
/// says so.
pub(super) fn heat(frame: &Frame<'_>) -> Panel {
    heat_of(frame, &frame.definition.role)
}

fn heat_of(frame: &Frame<'_>, role: &str) -> Panel {
    let definition = frame.definition;
    let value = |sample: &Sample<'_>| {
        let base = base(frame, sample.published);
        let found = sample.cell.median(role, &definition.y)?;
        if definition.relative_to.is_empty() { Some(found) } else { base.map(|base| found / base) }
    };
    let sides = match frame.sides(true).first() {
        Some(Whose::Both) => vec![Whose::Here, Whose::Published],
        Some(whose) => vec![*whose],
        None => Vec::new(),
    };
    // Two maps are compared by colour, as long as one would not be all pale beside the other.
    let shared = frame.together(LINEAR_TIMES * 2.0, value);
    let mut charts = Vec::new();
    for whose in sides {
        let largest = frame.of(whose).filter_map(value).fold(0.0, f64::max);
        let relative = !definition.relative_to.is_empty();
        let shown = if relative {
            metric::Shown { per: 1.0, unit: "times" }
        } else {
            metric::shown(&definition.y, largest)
        };
        let range = frame.of(if shared { Whose::Both } else { whose }).filter_map(value);
        let range = Heat::range_of(range.map(|value| value / shown.per));
        let columns = frame.xs();
        let row = |name: &String| {
            let of = |x: &Value| {
                let mut cells = frame.of(whose).filter(|sample| frame.name(sample) == *name);
                cells.find(|sample| frame.x(sample).is_some_and(|found| found.same(x)))
            };
            let values: Vec<Option<f64>> =
                columns.iter().map(|x| of(x).and_then(value).map(|value| value / shown.per)).collect();
            (name.clone(), values)
        };
        let names = frame.series();
        let rows: Vec<_> =
            names.iter().map(row).filter(|(_, values)| values.iter().any(Option::is_some)).collect();
        let x = &definition.x;
        let label = if relative {
            let words: Vec<String> =
                definition.relative_to.iter().map(|(name, value)| format!("{name} {value}")).collect();
            format!(
                "{}, times that of {}; across: {}",
                metric::words(&definition.y),
                words.join(", "),
                metric::parameter(x)
            )
        } else {
            format!("{}; across: {}", metric::label(&definition.y, shown), metric::parameter(x))
        };
        let columns = columns.iter().map(|value| value_words(x, value)).collect();
        let svg =
            Heat { title: frame.title(&metric::words(&definition.y)), label, columns, rows, range }.svg();
        if !svg.is_empty() {
            charts.push(Drawn { whose, svg });
        }
    }
    Panel { title: frame.panel.clone(), charts }
}

/// What the values of one side are relative to.
fn base(frame: &Frame<'_>, published: bool) -> Option<f64> {
    let definition = frame.definition;
    let is_base = |sample: &&Sample<'_>| {
        sample.published == published
            && definition
                .relative_to
                .iter()
                .all(|(name, value)| sample.cell.parameters.get(name).is_some_and(|found| found.same(value)))
    };
    let found = frame.samples.iter().find(is_base)?;
    found.cell.median(&definition.role, &definition.y).filter(|base| *base > 0.0)
}

fn class_words(class: &str) -> String {
    match class {
        "io_library" => "I/O library".to_string(),
        "driver" => "NVMe driver".to_string(),
        other => other.replace('_', " "),
    }
}

/// Whether any cell says where its time goes.
pub(super) fn has_shares(frame: &Frame<'_>) -> bool {
    let records = frame.samples.iter().flat_map(|sample| sample.cell.measured());
    let roles = records.filter_map(|record| record.roles.get(&frame.definition.role));
    roles.flat_map(|role| role.metrics.keys()).any(|name| name.starts_with("share_"))
}

/// Where the instructions go: a column for each line, a part for each class of functions.
pub(super) fn breakdown(frame: &Frame<'_>) -> Panel {
    /// From the bottom up: as a request goes down.
    const ORDER: [&str; 8] =
        ["generator", "io_library", "kernel", "block_layer", "scheduler", "locks", "driver", "idle"];
    let role = &frame.definition.role;
    let mut classes: BTreeSet<String> = BTreeSet::new();
    for record in frame.samples.iter().flat_map(|sample| sample.cell.measured()) {
        let Some(role) = record.roles.get(role) else { continue };
        classes.extend(
            role.metrics
                .keys()
                .filter_map(|name| Some(name.strip_prefix("share_")?.strip_suffix("_pct")?.to_string())),
        );
    }
    let mut classes: Vec<String> = classes.into_iter().collect();
    classes.sort_by_key(|class| ORDER.iter().position(|known| known == class).unwrap_or(ORDER.len()));
    let mut columns = Vec::new();
    for name in frame.series() {
        for sample in frame.samples.iter().filter(|sample| frame.name(sample) == name) {
            let share = |class: &String| {
                let value = sample.cell.median(role, &format!("share_{class}_pct"))?;
                Some((class_words(class), value))
            };
            let parts: Vec<(String, f64)> = classes.iter().filter_map(share).collect();
            if parts.is_empty() {
                continue;
            }
            let label = if sample.published { format!("{name}, publ.") } else { name.clone() };
            columns.push(Column { name: label, published: sample.published, parts });
        }
    }
    let stack = Stack { title: frame.title("shares"), label: "share of samples, %".into(), columns };
    let whose = frame.sides(true).first().copied().unwrap_or_default();
    let charts = if stack.is_empty() { Vec::new() } else { vec![Drawn { whose, svg: stack.svg() }] };
    Panel { title: frame.panel.clone(), charts }
}
