//! Renders a whole run as one HTML file.
//!
//! The file is self-contained: it embeds style, script, charts and data and loads nothing, so it can be
//! mailed and opened from disk years later. It stays readable without the script. The template escapes all
//! untrusted text; charts escape their own.

mod alike;
mod data;
mod evidence;
mod tables;

use std::collections::BTreeSet;

use lab_experiments::{PlannedDevice, RunDirectory, Verdict};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment};
use serde::Serialize;

use crate::advise::{Advice, AdviceGoal, Choice, advise, api_description};
use crate::cells::{ExperimentCell, group_into_cells};
use crate::chart::format_integer;
use crate::figure;
use crate::medium::medium;
use crate::study::{self, Agreement, ExperimentData};

pub use data::{HistogramBudget, embedded_json};

/// Errors of rendering a page.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A built-in template is invalid.
    #[error("the report's template: {0}")]
    Template(#[from] minijinja::Error),
    /// The data cannot be represented as JSON.
    #[error("the report's data: {0}")]
    Data(#[from] serde_json::Error),
}

/// Renders the HTML report of a run.
///
/// # Errors
/// Only for defects of this program: an invalid built-in template, or data that JSON cannot represent.
pub fn render_html(run: &RunDirectory) -> Result<String, ReportError> {
    render_html_on(run, &|_| true)
}

/// As [`render_html`]. Commands are for the measured devices for which `present` returns true.
///
/// # Errors
/// As [`render_html`].
pub fn render_html_on(
    run: &RunDirectory,
    present: &dyn Fn(&PlannedDevice) -> bool,
) -> Result<String, ReportError> {
    let cells = group_into_cells(&run.records);
    let sections = study::group_by_experiment(run, &cells);
    let studies: BTreeSet<String> =
        sections.iter().map(|section| section.definition.study().to_string()).collect();
    let advice: Vec<Advice> = AdviceGoal::ALL.iter().map(|goal| advise(run, *goal, present)).collect();
    let evaluator = study::FindingEvaluator::new(run);
    let findings = evidence::findings(&evaluator);
    let derived: BTreeSet<&str> = sections
        .iter()
        .filter(|section| section.definition.y == "cpu_cores")
        .flat_map(|section| section.definition.derived_from.iter().map(String::as_str))
        .collect();
    let mut timelines_left = TIMELINES_MAX;
    let shown: Vec<ExperimentView> = sections
        .iter()
        .map(|section| {
            let mut view = experiment(&evaluator, section, !derived.contains(section.definition.id.as_str()));
            // A derived figure has the cells of another, which shows them.
            if section.definition.derived_from.is_empty() {
                view.over_time = over_time(section, &mut timelines_left);
            }
            view
        })
        .collect();
    let measured = cells.iter().filter(|cell| cell.missing_reason().is_none()).count();
    let page = ReportContext {
        title: title(run),
        program: &run.plan.program,
        started: started(run),
        scale: &run.plan.scale,
        measured: format_integer(measured as u64),
        cells: format_integer(cells.len() as u64),
        repetitions: repetitions(&cells),
        drift: drift(run),
        medium: medium(run).description(),
        targets: alike::targets(&run.plan.targets),
        advice: folded(advice.iter().map(advice_card)),
        tally: evidence::tally(&findings),
        findings,
        distortions: alike::sentences(&run.machine.distortions),
        dropped: &run.dropped,
        experiments: shown,
        absent: missing_cells(run, &cells),
        disagreements: discrepancy_tables(&studies),
        facts: tables::facts(&run.machine.facts),
        collected_by: &run.machine.collected_by,
        plan: plan_rows(run),
        style: STYLE,
        script: SCRIPT,
        data: embedded_json(run, HistogramBudget::default())?,
    };
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.add_template("report", TEMPLATE)?;
    environment.add_template("parts", PARTS)?;
    Ok(environment.get_template("report")?.render(Serde(&page))?)
}

/// The context of the template `report.html`.
#[derive(Serialize)]
struct ReportContext<'a> {
    title: String,
    program: &'a str,
    started: String,
    scale: &'a str,
    measured: String,
    cells: String,
    repetitions: String,
    drift: Vec<String>,
    medium: &'static str,
    targets: Vec<String>,
    advice: Vec<AdviceCard>,
    tally: Vec<evidence::Tally>,
    findings: Vec<evidence::FindingView>,
    distortions: Vec<String>,
    dropped: &'a [String],
    experiments: Vec<ExperimentView>,
    absent: Vec<MissingCells>,
    disagreements: Discrepancies,
    facts: Vec<tables::FactSection>,
    collected_by: &'a str,
    plan: Vec<(&'static str, String)>,
    style: &'static str,
    script: &'static str,
    data: String,
}

const TEMPLATE: &str = include_str!("page/report.html");
const PARTS: &str = include_str!("page/parts.html");
pub(crate) const STYLE: &str = include_str!("page/style.css");
pub(crate) const SCRIPT: &str = include_str!("page/script.js");

/// The title of the page: the tested devices.
fn title(run: &RunDirectory) -> String {
    let mut names: Vec<&str> = Vec::new();
    for target in &run.plan.targets {
        let name = if target.described.is_empty() { target.path.as_str() } else { target.described.as_str() };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match names.as_slice() {
        [] => "Storage stacks and schedulers".to_string(),
        [one] if run.plan.targets.len() == 1 => format!("Storage stacks and schedulers on {one}"),
        // A line never begins with the sign.
        [one] => format!("Storage stacks and schedulers on {}\u{a0}×\u{a0}{one}", run.plan.targets.len()),
        more => format!("Storage stacks and schedulers on {}", more.join(", ")),
    }
}

/// The start time of the first record, in UTC.
fn started(run: &RunDirectory) -> String {
    let first = run.records.iter().map(|record| record.started_unix_ms).filter(|ms| *ms > 0).min();
    match first.or(Some(run.machine.collected_unix_ms).filter(|ms| *ms > 0)) {
        Some(ms) => tables::format_utc(ms),
        None => "at an unknown time".to_string(),
    }
}

fn repetitions(cells: &[ExperimentCell<'_>]) -> String {
    let counts: BTreeSet<usize> = cells
        .iter()
        .filter(|cell| cell.missing_reason().is_none())
        .map(|cell| cell.measured().count())
        .collect();
    match (counts.first(), counts.last()) {
        (Some(1), Some(1)) => "each measured once".to_string(),
        (Some(least), Some(most)) if least == most => format!("each measured {least} times"),
        (Some(least), Some(most)) => format!("each measured {least} to {most} times"),
        _ => "nothing measured".to_string(),
    }
}

/// How the run was ordered, and whether it drifted, one sentence each.
fn drift(run: &RunDirectory) -> Vec<String> {
    if !run.records.iter().any(|record| record.is_measured()) {
        return Vec::new();
    }
    let shuffled = run.records.iter().any(|record| record.position.is_some());
    let mut lines = vec![if shuffled {
        format!(
            "Repetitions are interleaved: each block measures every cell once, in an order shuffled by seed {}.",
            run.plan.order_seed
        )
    } else {
        "The order was not shuffled: drift of the machine may look like an effect of the parameters."
            .to_string()
    }];
    let found = crate::drift::drift(run);
    if found.is_empty() {
        lines.push("Drift over the run is unknown: it needs repetitions of several cells.".to_string());
    }
    lines.extend(found.iter().map(|drift| format!("{}.", capitalized(&drift.sentence()))));
    lines
}

/// The advice for one goal, or for several that have no result for the same reason.
#[derive(Serialize)]
struct AdviceCard {
    goal: String,
    headline: String,
    certainty: &'static str,
    reasons: Vec<String>,
    commands: Vec<String>,
    caveats: Vec<String>,
}

fn advice_card(advice: &Advice) -> AdviceCard {
    let decisions = [&advice.api, &advice.scheduler];
    let tested: Vec<_> = decisions.iter().filter(|decision| decision.choice != Choice::Untested).collect();
    let wins = tested.iter().any(|decision| matches!(decision.choice, Choice::Wins(_)));
    let certainty = match (tested.is_empty(), wins) {
        // The headline says it.
        (true, _) => "",
        (_, true) => "significant lead",
        _ => "no significant difference",
    };
    let headline = match (advice.api.recommended(), advice.scheduler.recommended()) {
        (Some(api), Some(scheduler)) => format!("{}; scheduler {scheduler}", api_description(api)),
        (Some(api), None) => api_description(api).to_string(),
        (None, Some(scheduler)) => format!("scheduler {scheduler}"),
        (None, None) if tested.is_empty() => "Not tested".to_string(),
        (None, None) => "No winner".to_string(),
    };
    // Without a result, the reason is the same for both factors, or that of the one that was compared.
    let is_untested = tested.is_empty();
    let shown = if is_untested { decisions.iter().collect() } else { tested };
    let reason = |because: &String| if is_untested { capitalized(because) } else { because.clone() };
    let mut reasons: Vec<String> = shown.iter().map(|decision| reason(&decision.because)).collect();
    reasons.dedup();
    AdviceCard {
        goal: advice.goal.description().to_string(),
        headline: capitalized(&headline),
        certainty,
        reasons,
        commands: advice.commands.clone(),
        caveats: advice.caveats.clone(),
    }
}

/// Goals without a result share a card where they share the reasons.
fn folded(cards: impl Iterator<Item = AdviceCard>) -> Vec<AdviceCard> {
    let mut all: Vec<AdviceCard> = Vec::new();
    for card in cards {
        let is_same = |other: &&mut AdviceCard| {
            card.commands.is_empty()
                && (&other.headline, other.certainty, &other.reasons, &other.caveats, &other.commands)
                    == (&card.headline, card.certainty, &card.reasons, &card.caveats, &card.commands)
        };
        match all.iter_mut().find(is_same) {
            Some(other) => other.goal.push_str(&format!(", for the {}", card.goal)),
            None => all.push(card),
        }
    }
    all
}

fn capitalized(text: &str) -> String {
    // Names of schedulers and APIs keep the kernel's spelling.
    let plain = ["none", "bfq", "kyber", "mq-deadline", "io_uring"];
    if plain.iter().any(|name| text.starts_with(name)) {
        return text.to_string();
    }
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// The section of one experiment.
#[derive(Serialize)]
struct ExperimentView {
    id: String,
    anchor: String,
    study: String,
    title: String,
    section: String,
    scaled: Vec<String>,
    traps: Vec<String>,
    notes: Vec<String>,
    /// Experiments whose cells a derived figure shows.
    derived_from: Vec<String>,
    panels: Vec<PanelView>,
    /// Panels without a measurement of this run.
    published_panels: Vec<PanelView>,
    checks: Vec<evidence::CheckView>,
    values: tables::ValueTable,
    commands: Vec<String>,
    measured: usize,
    over_time: OverTimeView,
}

/// The cells of an experiment over the time of their measurements.
#[derive(Default, Serialize)]
struct OverTimeView {
    /// Parameters that vary, role, and chart.
    charts: Vec<(String, String)>,
    /// Charts that are not drawn, because the page has [`TIMELINES_MAX`].
    more: usize,
}

/// Most charts over time on a page: about 10 KB each.
const TIMELINES_MAX: usize = 2000;

fn over_time(section: &ExperimentData<'_>, left: &mut usize) -> OverTimeView {
    let mut view = OverTimeView::default();
    let labels: Vec<String> = section.cells.iter().map(|cell| cell.parameter_label()).collect();
    let in_all = |part: &str| labels.iter().all(|label| label.split(", ").any(|other| other == part));
    for (cell, label) in section.cells.iter().zip(&labels) {
        let varying: Vec<&str> =
            label.split(", ").filter(|part| labels.len() == 1 || !in_all(part)).collect();
        for (role, suffix) in [("fg", ""), ("bg", ", background")] {
            let svg = if *left > 0 { figure::over_time(cell, role) } else { String::new() };
            if !svg.is_empty() {
                *left -= 1;
                view.charts.push((format!("{}{suffix}", varying.join(", ")), svg));
            } else if *left == 0 && has_timeline(cell, role) {
                view.more += 1;
            }
        }
    }
    view
}

fn has_timeline(cell: &ExperimentCell<'_>, role: &str) -> bool {
    cell.measured().any(|record| record.roles.get(role).is_some_and(|role| !role.timeline.is_empty()))
}

#[derive(Serialize)]
struct PanelView {
    title: String,
    charts: Vec<(&'static str, String)>,
}

fn experiment(
    evaluator: &study::FindingEvaluator,
    section: &ExperimentData<'_>,
    with_cpu_use: bool,
) -> ExperimentView {
    let definition = &section.definition;
    let published = study::published_cells(&section.published);
    let figure =
        figure::draw(definition, &section.cells, &published.iter().collect::<Vec<_>>(), with_cpu_use);
    let is_published = |chart: &figure::RenderedChart| chart.source == figure::FigureSource::Published;
    let (published_panels, panels): (Vec<figure::FigurePanel>, Vec<figure::FigurePanel>) =
        figure.panels.into_iter().partition(|panel| panel.charts.iter().all(is_published));
    let panel = |panel: figure::FigurePanel| PanelView {
        title: panel.title,
        charts: panel.charts.into_iter().map(|chart| (chart.source.label(), chart.svg)).collect(),
    };
    let own = definition.derived_from.is_empty();
    ExperimentView {
        anchor: anchor(&definition.id),
        study: study_name(definition.study()),
        id: definition.id.clone(),
        title: definition.title.clone(),
        section: definition.section.clone(),
        scaled: section.scaled.to_vec(),
        traps: definition.traps.clone(),
        notes: figure.notes,
        derived_from: definition.derived_from.clone(),
        panels: panels.into_iter().map(panel).collect(),
        published_panels: published_panels.into_iter().map(panel).collect(),
        checks: evidence::checks(evaluator, definition),
        values: tables::values(section, &published),
        commands: if own { tables::commands(&section.cells) } else { Vec::new() },
        measured: section.cells.iter().filter(|cell| cell.missing_reason().is_none()).count(),
        over_time: OverTimeView::default(),
    }
}

/// A fragment identifier: ASCII letters, digits and dashes.
pub(crate) fn anchor(id: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    format!("x-{}", id.chars().map(plain).collect::<String>())
}

fn study_name(study: &str) -> String {
    match study {
        "cheops23" => "CHEOPS’23".to_string(),
        "icpe24" => "ICPE’24".to_string(),
        "spdk17" => "SPDK (2017)".to_string(),
        other => other.to_string(),
    }
}

/// Cells without a measurement that share a reason.
#[derive(Serialize)]
struct MissingCells {
    reason: String,
    count: usize,
    experiments: Vec<String>,
}

fn missing_cells(run: &RunDirectory, cells: &[ExperimentCell<'_>]) -> Vec<MissingCells> {
    let mut all: Vec<MissingCells> = Vec::new();
    let mut add = |reason: &str, experiment: &str| {
        let index = match all.iter().position(|known| known.reason == reason) {
            Some(index) => index,
            None => {
                all.push(MissingCells { reason: reason.to_string(), count: 0, experiments: Vec::new() });
                all.len() - 1
            }
        };
        all[index].count += 1;
        if !all[index].experiments.iter().any(|known| known == experiment) {
            all[index].experiments.push(experiment.to_string());
        }
    };
    let mut known: BTreeSet<(&str, String)> = BTreeSet::new();
    for cell in cells {
        known.insert((cell.experiment, cell.parameter_label()));
        if let Some(reason) = cell.missing_reason() {
            add(reason, cell.experiment);
        }
    }
    for experiment in &run.plan.experiments {
        for planned in &experiment.cells {
            let words: Vec<String> =
                planned.parameters.iter().map(|(name, value)| format!("{name} {value}")).collect();
            if !known.contains(&(experiment.id.as_str(), words.join(", "))) {
                let reason = planned.skipped.as_deref().unwrap_or("the run ended before this cell");
                add(reason, &experiment.id);
            }
        }
    }
    all.sort_by_key(|one| std::cmp::Reverse(one.count));
    all
}

/// Discrepancies within the published studies.
#[derive(Serialize)]
struct Discrepancies {
    texts: Vec<(String, String, String)>,
    numbers: Vec<PrintedNumberRow>,
    compared: usize,
}

#[derive(Serialize)]
struct PrintedNumberRow {
    study: String,
    location: String,
    what: String,
    printed: String,
    raw: String,
    differs: bool,
}

fn discrepancy_tables(studies: &BTreeSet<String>) -> Discrepancies {
    let texts = study::discrepancies(studies);
    let printed: Vec<study::PrintedNumber> =
        study::printed_numbers().into_iter().filter(|number| studies.contains(&number.study)).collect();
    let number = |number: &study::PrintedNumber| PrintedNumberRow {
        study: study_name(&number.study),
        location: number.location.clone(),
        what: number.what.clone(),
        printed: format!("{} {}", number.printed, unit_symbol(&number.unit)),
        raw: format!("{} {}", format_four_digits(number.recomputed), unit_symbol(&number.unit)),
        differs: number.agreement == Agreement::Differs,
    };
    let mut numbers: Vec<PrintedNumberRow> =
        printed.iter().filter(|number| number.agreement != Agreement::Exact).map(number).collect();
    numbers.sort_by_key(|number| !number.differs);
    Discrepancies {
        texts: texts.into_iter().map(|one| (study_name(&one.study), one.location, one.text)).collect(),
        numbers,
        compared: printed.len(),
    }
}

/// The display form of a unit of the reference data.
fn unit_symbol(unit: &str) -> &str {
    match unit {
        "kiops" => "KIOPS",
        "miops" => "MIOPS",
        "pct" => "%",
        "us" => "µs",
        "x" => "×",
        other => other,
    }
}

/// Four significant digits, so that small deviations stay visible.
fn format_four_digits(value: f64) -> String {
    let digits = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    let places = (3 - digits).clamp(0, 6) as usize;
    format!("{value:.places$}")
}

fn plan_rows(run: &RunDirectory) -> Vec<(&'static str, String)> {
    let plan = &run.plan;
    let mut rows = vec![
        ("Program", plan.program.clone()),
        ("Command", plan.command.join(" ")),
        ("Selection", plan.selection.join(" ")),
        ("Scale", plan.scale.clone()),
        ("Seed", plan.seed.to_string()),
        ("Order seed", plan.order_seed.to_string()),
        ("Generator", plan.generator.clone()),
        ("Cores", plan.cores.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
        ("Directory", run.path.display().to_string()),
    ];
    rows.retain(|(_, value)| !value.is_empty());
    rows
}

/// Facts of the machine as `section · name` and value.
pub(crate) fn machine_facts(run: &RunDirectory) -> Vec<(String, String)> {
    let sections = tables::facts(&run.machine.facts).into_iter();
    sections
        .flat_map(|(section, rows)| {
            rows.into_iter().map(move |(name, value)| (format!("{section} · {name}"), value))
        })
        .collect()
}

/// The CSS class of a verdict.
pub(crate) fn verdict_class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Holds => "yes",
        Verdict::DoesNotHold => "no",
        Verdict::Undecided => "undecided",
        Verdict::NotTested => "open",
    }
}
