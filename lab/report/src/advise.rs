//! Which API and which scheduler to use, and how sure that is.
//!
//! The two are decided one after the other: APIs are compared where everything else was the same, the
//! scheduler included, and schedulers likewise. What wins must be ahead by more than chance (the interval
//! of the ratio leaves 1 out) and by more than the generator itself costs; otherwise nobody wins, and the
//! advice says so.

mod recipe;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use experiments::{Parameters, Run, Value};
use serde::Serialize;

use crate::cells::{Cell, cells};
use crate::chart::short;
use crate::metric;
use crate::stats::{Interval, median, ratio_over_situations};

pub use recipe::api_words;

/// What somebody wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// Short tails where nobody disturbs.
    P99,
    /// Most I/Os for the processor time.
    IopsPerCore,
    /// Short tails beside others who do a lot.
    Isolation,
}

impl Goal {
    /// All of them.
    pub const ALL: [Goal; 3] = [Goal::P99, Goal::IopsPerCore, Goal::Isolation];

    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            Goal::P99 => "p99",
            Goal::IopsPerCore => "iops-per-core",
            Goal::Isolation => "isolation",
        }
    }

    /// What it means.
    pub fn words(self) -> &'static str {
        match self {
            Goal::P99 => "shortest tail latency",
            Goal::IopsPerCore => "most I/O for each core",
            Goal::Isolation => "tail latency beside busy neighbours",
        }
    }

    fn metric(self) -> &'static str {
        match self {
            Goal::P99 | Goal::Isolation => "clat_p99_us",
            Goal::IopsPerCore => "iops_per_core",
        }
    }

    /// Whether a cell speaks to it.
    fn concerns(self, parameters: &Parameters) -> bool {
        let number = |name: &str| parameters.get(name).and_then(Value::as_f64);
        let disturbed = number("background").is_some_and(|count| count > 0.0);
        match self {
            Goal::P99 => !disturbed,
            Goal::Isolation => disturbed,
            // With one I/O at a time a core waits, and what it could do is not seen.
            Goal::IopsPerCore => {
                !disturbed && number("iodepth").unwrap_or(1.0) * number("jobs").unwrap_or(1.0) >= 16.0
            }
        }
    }
}

/// What to do for one goal.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// The goal.
    pub goal: Goal,
    /// Which API.
    pub api: Decision,
    /// Which scheduler.
    pub scheduler: Decision,
    /// How to set both; empty where neither is named.
    pub commands: Vec<String>,
    /// What to know before following it.
    pub caveats: Vec<String>,
}

impl Advice {
    /// The advice in a few words, as `io_uring (iou) with kyber`.
    pub fn headline(&self) -> String {
        match (self.api.named(), self.scheduler.named()) {
            (Some(api), Some(scheduler)) => format!("{api} with {scheduler}"),
            (Some(api), None) => format!("{api}, any scheduler"),
            (None, Some(scheduler)) => format!("{scheduler}, any API"),
            (None, None) => "nothing stands out".to_string(),
        }
    }
}

/// Which of several.
#[derive(Clone, Debug, Serialize)]
pub struct Decision {
    /// `api` or `scheduler`.
    pub factor: &'static str,
    /// What was found.
    pub choice: Choice,
    /// The evidence in a sentence.
    pub because: String,
    /// All of them, the best first.
    pub options: Vec<Standing>,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// It is ahead by more than chance and more than the generator's cost.
    Wins(String),
    /// It is ahead, but nothing says how far chance reaches: every cell was measured once.
    Leads(String),
    /// These lie together.
    Tied(Vec<String>),
    /// Fewer than two were measured under the same conditions.
    Untested,
}

impl Decision {
    /// The one that is named, surely or not.
    pub fn named(&self) -> Option<&str> {
        match &self.choice {
            Choice::Wins(name) | Choice::Leads(name) => Some(name),
            Choice::Tied(_) | Choice::Untested => None,
        }
    }
}

/// How one option stands.
#[derive(Clone, Debug, Serialize)]
pub struct Standing {
    /// Its name.
    pub name: String,
    /// The goal's metric, as a factor of the leader's, over the situations that both were measured in.
    pub ratio: f64,
    /// How sure that is.
    pub interval: Option<Interval>,
    /// In how many situations both were measured.
    pub situations: usize,
    /// The middle of its values.
    pub typical: f64,
}

/// Advice for `goal` from a run.
pub fn advise(run: &Run, goal: Goal) -> Advice {
    let cells = cells(&run.records);
    let concerned: Vec<&Cell<'_>> = cells.iter().filter(|cell| goal.concerns(cell.parameters)).collect();
    let api = decide(&concerned, "api", goal);
    let scheduler = decide(&concerned, "scheduler", goal);
    let mut caveats = Vec::new();
    let by_worker =
        |cell: &&&Cell<'_>| cell.measured().any(|record| record.submission_path.as_deref() == Some("worker"));
    let workers = concerned.iter().filter(by_worker).count();
    if workers > 0 {
        caveats.push(format!(
            "In {workers} of {} cells requests went through a kernel worker, as they do here under a scheduler; the published kernel was patched not to.",
            concerned.len()
        ));
    }
    let mut scaled: Vec<&str> = Vec::new();
    let records = concerned.iter().flat_map(|cell| cell.measured());
    for note in records
        .flat_map(|record| &record.notes)
        .filter(|note| note.contains("device") && note.contains(" instead of "))
    {
        if !scaled.contains(&note.as_str()) {
            scaled.push(note);
        }
    }
    caveats.extend(scaled.iter().map(|note| format!("Not as published: {note}.")));
    if scheduler.named().is_some() && api.named().is_some() {
        let under: Vec<String> = apis_of(&concerned, &scheduler);
        if let [only] = under.as_slice()
            && Some(only.as_str()) != api.named()
        {
            caveats.push(format!("Schedulers were compared under {only} alone."));
        }
    }
    let commands = recipe::commands(&api, &scheduler, &run.plan.targets);
    Advice { goal, api, scheduler, commands, caveats }
}

/// The APIs under which the decision's options were measured.
fn apis_of(cells: &[&Cell<'_>], decision: &Decision) -> Vec<String> {
    let mut apis: Vec<String> = Vec::new();
    for cell in cells {
        let here = cell.parameters.get("scheduler").map(Value::to_string);
        let takes_part =
            here.is_some_and(|name| name != "none" && decision.options.iter().any(|o| o.name == name));
        if let (true, Some(api)) = (takes_part, cell.parameters.get("api").map(Value::to_string))
            && !apis.contains(&api)
        {
            apis.push(api);
        }
    }
    apis
}

/// A situation's values by option.
type Situations = BTreeMap<String, BTreeMap<String, Measured>>;

struct Measured {
    values: Vec<f64>,
    generator_ns: f64,
}

fn decide(cells: &[&Cell<'_>], factor: &'static str, goal: Goal) -> Decision {
    let situations = situations(cells, factor, goal.metric());
    let mut names: Vec<&str> = Vec::new();
    for name in situations.values().flat_map(BTreeMap::keys) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let Some(leader) = leader(&situations, &names, goal) else {
        let because =
            format!("no two {}s were measured under the same conditions", metric::parameter(factor));
        return Decision { factor, choice: Choice::Untested, because, options: Vec::new() };
    };
    let more = metric::better(goal.metric()) == metric::Better::More;
    let mut options: Vec<Standing> =
        names.iter().filter_map(|name| standing(&situations, leader, name)).collect();
    options.sort_by(|a, b| if more { b.ratio.total_cmp(&a.ratio) } else { a.ratio.total_cmp(&b.ratio) });
    // The leader first, whatever rounding or missing pairs do to the order.
    options.sort_by_key(|option| option.name != leader);
    let rivals = &options[1..];
    let unsure = |rival: &&Standing| rival.interval.is_some_and(|interval| interval.contains(1.0));
    let cheap = |rival: &&Standing| within_generator(&situations, leader, &rival.name, goal);
    let tied: Vec<&Standing> = rivals.iter().filter(|rival| unsure(rival) || cheap(rival)).collect();
    let known = rivals.iter().all(|rival| rival.interval.is_some());
    let Some(next) = rivals.first() else {
        let because = format!("only {leader} was measured");
        return Decision { factor, choice: Choice::Untested, because, options };
    };
    let words = metric::words(goal.metric());
    let distance = |rival: &Standing| {
        format!("{} {}", percent(rival.ratio), if rival.ratio > 1.0 { "above" } else { "below" })
    };
    let typical = {
        let shown = metric::shown(goal.metric(), options[0].typical);
        format!("{} {}", short(options[0].typical / shown.per), shown.unit)
    };
    let mut because = format!(
        "{leader}: typically {typical} of {words}; {} lies {} it over {} {}",
        next.name,
        distance(next),
        next.situations,
        if next.situations == 1 { "situation" } else { "situations" },
    );
    if let Some(interval) = next.interval {
        because.push_str(&format!(
            " (95 %: {} to {})",
            percent_signed(interval.low),
            percent_signed(interval.high)
        ));
    }
    let choice = if tied.is_empty() {
        if known { Choice::Wins(leader.to_string()) } else { Choice::Leads(leader.to_string()) }
    } else {
        if tied.iter().any(cheap) {
            because.push_str("; the difference is smaller than what the generator itself costs");
        }
        let mut names = vec![leader.to_string()];
        names.extend(tied.iter().map(|rival| rival.name.clone()));
        Choice::Tied(names)
    };
    if !known && tied.is_empty() {
        because.push_str("; measured once, so nothing says how far chance reaches");
    }
    Decision { factor, choice, because, options }
}

/// Cells that differ in nothing but `factor`, by what they have in common.
fn situations(cells: &[&Cell<'_>], factor: &str, metric: &str) -> Situations {
    let mut situations = Situations::new();
    for cell in cells {
        let Some(name) = cell.parameters.get(factor) else { continue };
        let values = cell.values("fg", metric);
        if values.is_empty() {
            continue;
        }
        let mut key = cell.experiment.to_string();
        for (name, value) in cell.parameters {
            // iou-s has a core more than its neighbours by its nature; its cost is counted with it.
            if name != factor && name != "cores" {
                key.push_str(&format!("; {name} {value}"));
            }
        }
        let costs: Vec<f64> = cell.measured().filter_map(|record| record.generator.cost_ns_per_io).collect();
        let measured = Measured { values, generator_ns: median(&costs).unwrap_or(0.0) };
        situations.entry(key).or_default().insert(name.to_string(), measured);
    }
    situations.retain(|_, options| options.len() > 1);
    situations
}

fn pairs(situations: &Situations, a: &str, b: &str) -> Vec<(Vec<f64>, Vec<f64>)> {
    let both = |options: &BTreeMap<String, Measured>| {
        Some((options.get(a)?.values.clone(), options.get(b)?.values.clone()))
    };
    situations.values().filter_map(both).collect()
}

/// The option that is ahead of most others; of equals, the one that is further ahead.
fn leader<'a>(situations: &Situations, names: &[&'a str], goal: Goal) -> Option<&'a str> {
    let more = metric::better(goal.metric()) == metric::Better::More;
    let score = |name: &str| {
        let mut score = (0i64, 0.0);
        for other in names.iter().filter(|other| **other != name) {
            if let Some((ratio, _)) = ratio_over_situations(&pairs(situations, other, name), 0.95) {
                let ahead = if more { ratio.ln() } else { -ratio.ln() };
                score.0 += if ahead > 0.0 { 1 } else { -1 };
                score.1 += ahead;
            }
        }
        score
    };
    let scored: Vec<(&str, (i64, f64))> = names.iter().map(|name| (*name, score(name))).collect();
    let best = scored.iter().max_by(|a, b| a.1.0.cmp(&b.1.0).then(a.1.1.total_cmp(&b.1.1)))?;
    Some(best.0)
}

fn standing(situations: &Situations, leader: &str, name: &str) -> Option<Standing> {
    let values: Vec<f64> =
        situations.values().filter_map(|options| median(&options.get(name)?.values)).collect();
    let typical = median(&values)?;
    if name == leader {
        return Some(Standing {
            name: name.into(),
            ratio: 1.0,
            interval: None,
            situations: values.len(),
            typical,
        });
    }
    let pairs = pairs(situations, leader, name);
    let (ratio, interval) = ratio_over_situations(&pairs, 0.95)?;
    Some(Standing { name: name.into(), ratio, interval, situations: pairs.len(), typical })
}

/// Whether the difference an I/O is smaller than what the generator spends on one: then it may be the
/// generator's.
fn within_generator(situations: &Situations, a: &str, b: &str, goal: Goal) -> bool {
    let ns = |value: f64| match goal {
        Goal::P99 | Goal::Isolation => value * 1e3,
        Goal::IopsPerCore => 1e9 / value,
    };
    let mut differences = Vec::new();
    let mut costs = Vec::new();
    for options in situations.values() {
        let (Some(a), Some(b)) = (options.get(a), options.get(b)) else { continue };
        let (Some(one), Some(other)) = (median(&a.values), median(&b.values)) else { continue };
        differences.push((ns(one) - ns(other)).abs());
        costs.push(a.generator_ns.max(b.generator_ns));
    }
    match (median(&differences), median(&costs)) {
        (Some(difference), Some(cost)) => difference < cost,
        _ => false,
    }
}

fn percent(ratio: f64) -> String {
    if ratio >= 3.0 {
        format!("{} times", short(ratio))
    } else {
        format!("{} %", short((ratio - 1.0).abs() * 100.0))
    }
}

fn percent_signed(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    format!("{}{} %", if percent >= 0.0 { "+" } else { "" }, short(percent))
}
