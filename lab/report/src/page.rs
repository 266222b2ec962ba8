//! One HTML file that holds a whole run.
//!
//! Nothing is fetched: style, script, charts and data are inside, so the file can be mailed and opened
//! from a disk years later. Without the script everything can still be read. All text from outside goes
//! through the template's escaping; charts escape their own.

mod data;
mod evidence;
mod table;

use std::collections::BTreeSet;

use experiments::{Run, Verdict};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment};
use serde::Serialize;

use crate::advise::{Advice, Choice, Goal, advise, api_words};
use crate::cells::{Cell, cells};
use crate::chart::{grouped, short};
use crate::figure;
use crate::study::{self, Agreement, Section};

pub use data::{Budget, embedded};

/// Why a page cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A template that comes with the program is wrong.
    #[error("the report's template: {0}")]
    Template(#[from] minijinja::Error),
    /// Data that JSON has no word for.
    #[error("the report's data: {0}")]
    Data(#[from] serde_json::Error),
}

/// The report of a run.
///
/// # Errors
/// Only what this program itself did wrong.
pub fn report(run: &Run) -> Result<String, Error> {
    let cells = cells(&run.records);
    let sections = study::sections(run, &cells);
    let studies: BTreeSet<String> =
        sections.iter().map(|section| section.definition.study().to_string()).collect();
    let advice: Vec<Advice> = Goal::ALL.iter().map(|goal| advise(run, *goal)).collect();
    let asking = study::Asking::of(run);
    let findings = evidence::findings(&asking);
    let derived: BTreeSet<&str> = sections
        .iter()
        .filter(|section| section.definition.y == "cpu_cores")
        .flat_map(|section| section.definition.derived_from.iter().map(String::as_str))
        .collect();
    let shown: Vec<Experiment> = sections
        .iter()
        .map(|section| experiment(&asking, section, !derived.contains(section.definition.id.as_str())))
        .collect();
    let measured = cells.iter().filter(|cell| cell.absent().is_none()).count();
    let page = Page {
        title: title(run),
        program: &run.plan.program,
        begun: begun(run),
        scale: &run.plan.scale,
        measured: grouped(measured as u64),
        cells: grouped(cells.len() as u64),
        repetitions: repetitions(&cells),
        targets: run.plan.targets.iter().map(target_words).collect(),
        advice: advice.iter().map(summary).collect(),
        tally: evidence::tally(&findings),
        findings,
        distortions: &run.machine.distortions,
        dropped: &run.dropped,
        experiments: shown,
        absent: absent(run, &cells),
        disagreements: disagreements(&studies),
        facts: table::facts(&run.machine.facts),
        collected_by: &run.machine.collected_by,
        plan: plan_rows(run),
        style: STYLE,
        script: SCRIPT,
        data: embedded(run, Budget::default())?,
    };
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.add_template("report", TEMPLATE)?;
    environment.add_template("parts", PARTS)?;
    Ok(environment.get_template("report")?.render(Serde(&page))?)
}

/// What the template is given.
#[derive(Serialize)]
struct Page<'a> {
    title: String,
    program: &'a str,
    begun: String,
    scale: &'a str,
    measured: String,
    cells: String,
    repetitions: String,
    targets: Vec<String>,
    advice: Vec<Card>,
    tally: Vec<evidence::Tally>,
    findings: Vec<evidence::Finding>,
    distortions: &'a [String],
    dropped: &'a [String],
    experiments: Vec<Experiment>,
    absent: Vec<Absent>,
    disagreements: Disagreements,
    facts: Vec<table::Facts>,
    collected_by: &'a str,
    plan: Vec<(&'static str, String)>,
    style: &'static str,
    script: &'static str,
    data: String,
}

const TEMPLATE: &str = include_str!("page/report.html");
const PARTS: &str = include_str!("page/parts.html");
pub(crate) const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/script.js");

/// What the page is about, in a line.
fn title(run: &Run) -> String {
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
        [one] => format!("Storage stacks and schedulers on {} × {one}", run.plan.targets.len()),
        more => format!("Storage stacks and schedulers on {}", more.join(", ")),
    }
}

fn target_words(target: &experiments::Target) -> String {
    let gib = target.size_bytes as f64 / f64::from(1 << 30);
    let mut words = format!("{} {}", target.kind, target.path);
    if target.size_bytes > 0 {
        words.push_str(&format!(", {} GiB", short(gib)));
    }
    if !target.described.is_empty() {
        words.push_str(&format!(", {}", target.described));
    }
    words
}

/// When it began, in UTC.
fn begun(run: &Run) -> String {
    let first = run.records.iter().map(|record| record.started_unix_ms).filter(|ms| *ms > 0).min();
    match first.or(Some(run.machine.collected_unix_ms).filter(|ms| *ms > 0)) {
        Some(ms) => table::utc(ms),
        None => "at an unknown time".to_string(),
    }
}

fn repetitions(cells: &[Cell<'_>]) -> String {
    let counts: BTreeSet<usize> =
        cells.iter().filter(|cell| cell.absent().is_none()).map(|cell| cell.measured().count()).collect();
    match (counts.first(), counts.last()) {
        (Some(1), Some(1)) => "each measured once".to_string(),
        (Some(least), Some(most)) if least == most => format!("each measured {least} times"),
        (Some(least), Some(most)) => format!("each measured {least} to {most} times"),
        _ => "nothing measured".to_string(),
    }
}

/// One goal's card.
#[derive(Serialize)]
struct Card {
    goal: &'static str,
    headline: String,
    sure: &'static str,
    reasons: Vec<String>,
    commands: Vec<String>,
    caveats: Vec<String>,
}

fn summary(advice: &Advice) -> Card {
    let decisions = [&advice.api, &advice.scheduler];
    let tested: Vec<_> = decisions.iter().filter(|decision| decision.choice != Choice::Untested).collect();
    let leads = tested.iter().any(|decision| matches!(decision.choice, Choice::Leads(_)));
    let wins = tested.iter().any(|decision| matches!(decision.choice, Choice::Wins(_)));
    let sure = match (tested.is_empty(), leads, wins) {
        (true, ..) => "not tested",
        (_, true, _) => "ahead, measured once",
        (_, _, true) => "ahead by more than chance",
        _ => "no difference beyond noise",
    };
    let headline = match (advice.api.named(), advice.scheduler.named()) {
        (Some(api), Some(scheduler)) => format!("{}; scheduler {scheduler}", api_words(api)),
        (Some(api), None) => api_words(api).to_string(),
        (None, Some(scheduler)) => format!("scheduler {scheduler}"),
        (None, None) if tested.is_empty() => "Not tested".to_string(),
        (None, None) => "No winner".to_string(),
    };
    let reasons = tested.iter().map(|decision| decision.because.clone()).collect();
    Card {
        goal: advice.goal.words(),
        headline: capitalised(&headline),
        sure,
        reasons,
        commands: advice.commands.clone(),
        caveats: advice.caveats.clone(),
    }
}

fn capitalised(text: &str) -> String {
    // Names of schedulers and APIs are written as the kernel writes them.
    let plain = ["none", "bfq", "kyber", "mq-deadline", "io_uring"];
    if plain.iter().any(|name| text.starts_with(name)) {
        return text.to_string();
    }
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// One experiment's section.
#[derive(Serialize)]
struct Experiment {
    id: String,
    anchor: String,
    study: String,
    title: String,
    section: String,
    scaled: Vec<String>,
    traps: Vec<String>,
    notes: Vec<String>,
    panels: Vec<Panel>,
    checks: Vec<evidence::Check>,
    values: table::Values,
    commands: Vec<String>,
    measured: usize,
}

#[derive(Serialize)]
struct Panel {
    title: String,
    charts: Vec<(&'static str, String)>,
}

fn experiment(asking: &study::Asking, section: &Section<'_>, beside: bool) -> Experiment {
    let definition = &section.definition;
    let published = study::published_cells(&section.published);
    let figure = figure::draw(definition, &section.cells, &published.iter().collect::<Vec<_>>(), beside);
    let panel = |panel: figure::Panel| Panel {
        title: panel.title,
        charts: panel.charts.into_iter().map(|chart| (chart.whose.words(), chart.svg)).collect(),
    };
    let own = definition.derived_from.is_empty();
    Experiment {
        anchor: anchor(&definition.id),
        study: study_words(definition.study()),
        id: definition.id.clone(),
        title: definition.title.clone(),
        section: definition.section.clone(),
        scaled: section.scaled.to_vec(),
        traps: definition.traps.clone(),
        notes: figure.notes,
        panels: figure.panels.into_iter().map(panel).collect(),
        checks: evidence::checks(asking, definition),
        values: table::values(section, &published),
        commands: if own { table::commands(&section.cells) } else { Vec::new() },
        measured: section.cells.iter().filter(|cell| cell.absent().is_none()).count(),
    }
}

/// A fragment identifier: letters, digits and dashes.
fn anchor(id: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    format!("x-{}", id.chars().map(plain).collect::<String>())
}

fn study_words(study: &str) -> String {
    match study {
        "cheops23" => "CHEOPS’23".to_string(),
        "icpe24" => "ICPE’24".to_string(),
        "spdk17" => "SPDK (2017)".to_string(),
        other => other.to_string(),
    }
}

/// What could not run, by reason.
#[derive(Serialize)]
struct Absent {
    reason: String,
    count: usize,
    experiments: Vec<String>,
}

fn absent(run: &Run, cells: &[Cell<'_>]) -> Vec<Absent> {
    let mut all: Vec<Absent> = Vec::new();
    let mut add = |reason: &str, experiment: &str| {
        let place = match all.iter().position(|known| known.reason == reason) {
            Some(place) => place,
            None => {
                all.push(Absent { reason: reason.to_string(), count: 0, experiments: Vec::new() });
                all.len() - 1
            }
        };
        all[place].count += 1;
        if !all[place].experiments.iter().any(|known| known == experiment) {
            all[place].experiments.push(experiment.to_string());
        }
    };
    let mut known: BTreeSet<(&str, String)> = BTreeSet::new();
    for cell in cells {
        known.insert((cell.experiment, cell.words()));
        if let Some(reason) = cell.absent() {
            add(reason, cell.experiment);
        }
    }
    for experiment in &run.plan.experiments {
        for planned in &experiment.cells {
            let words: Vec<String> =
                planned.parameters.iter().map(|(name, value)| format!("{name} {value}")).collect();
            if !known.contains(&(experiment.id.as_str(), words.join(", "))) {
                let reason = planned.skipped.as_deref().unwrap_or("the run ended before it");
                add(reason, &experiment.id);
            }
        }
    }
    all.sort_by_key(|one| std::cmp::Reverse(one.count));
    all
}

/// What the papers disagree on with themselves, for the template.
#[derive(Serialize)]
struct Disagreements {
    said: Vec<(String, String, String)>,
    numbers: Vec<Number>,
    compared: usize,
}

#[derive(Serialize)]
struct Number {
    study: String,
    place: String,
    what: String,
    printed: String,
    raw: String,
    apart: bool,
}

fn disagreements(studies: &BTreeSet<String>) -> Disagreements {
    let said = study::disagreements(studies);
    let printed: Vec<study::Printed> =
        study::printed().into_iter().filter(|number| studies.contains(&number.study)).collect();
    let number = |number: &study::Printed| Number {
        study: study_words(&number.study),
        place: number.place.clone(),
        what: number.what.clone(),
        printed: format!("{} {}", number.printed, unit_words(&number.unit)),
        raw: format!("{} {}", exact(number.raw), unit_words(&number.unit)),
        apart: number.agreement == Agreement::Apart,
    };
    let mut numbers: Vec<Number> =
        printed.iter().filter(|number| number.agreement != Agreement::Equal).map(number).collect();
    numbers.sort_by_key(|number| !number.apart);
    Disagreements {
        said: said.into_iter().map(|one| (study_words(&one.study), one.place, one.text)).collect(),
        numbers,
        compared: printed.len(),
    }
}

/// The reference data's words for units, as people write them.
fn unit_words(unit: &str) -> &str {
    match unit {
        "kiops" => "KIOPS",
        "miops" => "MIOPS",
        "pct" => "%",
        "x" => "×",
        other => other,
    }
}

/// Four digits: a near miss must show.
fn exact(value: f64) -> String {
    let digits = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    let places = (3 - digits).clamp(0, 6) as usize;
    format!("{value:.places$}")
}

fn plan_rows(run: &Run) -> Vec<(&'static str, String)> {
    let plan = &run.plan;
    let mut rows = vec![
        ("Program", plan.program.clone()),
        ("Command", plan.command.join(" ")),
        ("Asked for", plan.selection.join(" ")),
        ("Scale", plan.scale.clone()),
        ("Seed", plan.seed.to_string()),
        ("Generator", plan.generator.clone()),
        ("Cores", plan.cores.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
        ("Directory", run.path.display().to_string()),
    ];
    rows.retain(|(_, value)| !value.is_empty());
    rows
}

/// The machine's facts, each with its section.
pub(crate) fn facts_of(run: &Run) -> Vec<(String, String)> {
    let sections = table::facts(&run.machine.facts).into_iter();
    sections
        .flat_map(|(section, rows)| {
            rows.into_iter().map(move |(name, value)| (format!("{section} · {name}"), value))
        })
        .collect()
}

/// The word for a verdict's style.
pub(crate) fn verdict_class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Holds => "yes",
        Verdict::DoesNotHold => "no",
        Verdict::NotTested => "open",
    }
}
