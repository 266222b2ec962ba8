//! Recommends an API and a scheduler, with the strength of the evidence.
//!
//! The two factors are decided separately. APIs are compared within *matched configurations*: sets of cells
//! that agree in every other parameter, the scheduler included. Schedulers are compared likewise. The winner
//! must lead each other option significantly (the confidence intervals of the ratios, which hold together with 95 %,
//! exclude 1) and by more than the load generator's own cost per I/O. Otherwise the result is a tie, and the advice
//! reports that. There is no advice from cells that were measured once, from stand-ins, and from anything but a real
//! device.

mod setup_commands;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use lab_experiments::{CellParameters, ParameterValue, PlannedDevice, RunDirectory};
use serde::Serialize;

use crate::cells::{ExperimentCell, group_into_cells};
use crate::chart::format_number;
use crate::medium::{Medium, medium};
use crate::metric;
use crate::stats::{ConfidenceInterval, matched_geometric_mean_ratio, median};

pub use setup_commands::api_description;

/// What to optimise for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdviceGoal {
    /// Lowest tail latency without background load.
    P99,
    /// Most I/Os per unit of CPU time.
    IopsPerCore,
    /// Lowest tail latency under heavy background load.
    Isolation,
}

impl AdviceGoal {
    /// All goals, in the order in which reports show them.
    pub const ALL: [AdviceGoal; 3] = [AdviceGoal::P99, AdviceGoal::IopsPerCore, AdviceGoal::Isolation];

    /// The value of the `--goal` option.
    pub fn name(self) -> &'static str {
        match self {
            AdviceGoal::P99 => "p99",
            AdviceGoal::IopsPerCore => "iops-per-core",
            AdviceGoal::Isolation => "isolation",
        }
    }

    /// A noun phrase for reports.
    pub fn description(self) -> &'static str {
        match self {
            AdviceGoal::P99 => "shortest tail latency",
            AdviceGoal::IopsPerCore => "most I/O for each core",
            AdviceGoal::Isolation => "tail latency beside busy neighbours",
        }
    }

    fn metric(self) -> &'static str {
        match self {
            AdviceGoal::P99 | AdviceGoal::Isolation => "clat_p99_us",
            AdviceGoal::IopsPerCore => "iops_per_core",
        }
    }

    /// Whether a cell with these parameters is evidence for this goal.
    fn applies_to(self, parameters: &CellParameters) -> bool {
        let number = |name: &str| parameters.get(name).and_then(ParameterValue::as_f64);
        let disturbed = number("background").is_some_and(|count| count > 0.0);
        match self {
            AdviceGoal::P99 => !disturbed,
            AdviceGoal::Isolation => disturbed,
            // At a low queue depth the core is idle between completions: the cell does not show its capacity.
            AdviceGoal::IopsPerCore => {
                !disturbed && number("iodepth").unwrap_or(1.0) * number("jobs").unwrap_or(1.0) >= 16.0
            }
        }
    }
}

/// The recommendation for one goal.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// The goal that this advice optimises for.
    pub goal: AdviceGoal,
    /// The comparison of APIs.
    pub api: Decision,
    /// The comparison of I/O schedulers.
    pub scheduler: Decision,
    /// Shell commands that apply the recommendation; empty where neither factor has a leader.
    pub commands: Vec<String>,
    /// Limitations of the evidence, one sentence each.
    pub caveats: Vec<String>,
}

impl Advice {
    /// The recommendation in a few words, for example `iou with kyber`.
    pub fn headline(&self) -> String {
        match (self.api.recommended(), self.scheduler.recommended()) {
            (Some(api), Some(scheduler)) => format!("{api} with {scheduler}"),
            (Some(api), None) => format!("{api}, any scheduler"),
            (None, Some(scheduler)) => format!("{scheduler}, any API"),
            (None, None) => "no recommendation".to_string(),
        }
    }
}

/// The comparison of the options of one factor.
#[derive(Clone, Debug, Serialize)]
pub struct Decision {
    /// `api` or `scheduler`.
    pub factor: &'static str,
    /// The result of the comparison.
    pub choice: Choice,
    /// The evidence in one sentence.
    pub because: String,
    /// All options, the best first.
    pub options: Vec<RankedOption>,
}

/// The result of comparing the options of one factor.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// This option leads significantly, and by more than the generator's cost.
    Wins(String),
    /// These options do not differ significantly.
    Tied(Vec<String>),
    /// Fewer than two options were measured in a matched configuration, or not repeatedly, or not on a real device.
    Untested,
}

impl Decision {
    /// The winner, if there is one.
    pub fn recommended(&self) -> Option<&str> {
        match &self.choice {
            Choice::Wins(name) => Some(name),
            Choice::Tied(_) | Choice::Untested => None,
        }
    }
}

/// One option with its result relative to the leader.
#[derive(Clone, Debug, Serialize)]
pub struct RankedOption {
    /// The value of the factor, for example `iou` or `kyber`.
    pub name: String,
    /// The goal's metric divided by the leader's: geometric mean over the matched configurations of both.
    pub ratio: f64,
    /// The confidence interval of the ratio; those of all options hold together with 95 %.
    pub interval: Option<ConfidenceInterval>,
    /// Number of matched configurations in which both this option and the leader were measured.
    #[serde(rename = "situations")]
    pub matched_configurations: usize,
    /// The median of the option's values over its matched configurations, in the metric's unit.
    pub typical: f64,
}

/// Evaluates the cells of a run that apply to `goal` and recommends an API and a scheduler. Commands are for the
/// measured devices for which `present` returns true.
pub fn advise(run: &RunDirectory, goal: AdviceGoal, present: &dyn Fn(&PlannedDevice) -> bool) -> Advice {
    let medium = medium(run);
    if medium != Medium::RealDevice && !run.records.is_empty() {
        return no_advice(goal, &format!("measured on {}", medium.description()));
    }
    let cells = group_into_cells(&run.records);
    let own = |cell: &&ExperimentCell<'_>| cell.records.iter().all(|record| record.stand_in().is_none());
    let applicable: Vec<&ExperimentCell<'_>> =
        cells.iter().filter(|cell| goal.applies_to(cell.parameters)).filter(own).collect();
    let api = decide(&applicable, "api", goal);
    let scheduler = decide(&applicable, "scheduler", goal);
    let mut caveats = Vec::new();
    let uses_worker = |cell: &&&ExperimentCell<'_>| {
        cell.measured().any(|record| record.submission_path.as_deref() == Some("worker"))
    };
    let workers = applicable.iter().filter(uses_worker).count();
    if workers > 0 {
        caveats.push(format!(
            "In {workers} of {} cells, io_uring submitted requests through kernel worker threads, as this kernel does with a scheduler; the kernel of the published study was patched to submit inline.",
            applicable.len()
        ));
    }
    let mut scaled: Vec<&str> = Vec::new();
    let records = applicable.iter().flat_map(|cell| cell.measured());
    for note in records
        .flat_map(|record| &record.notes)
        .filter(|note| note.contains("device") && note.contains(" instead of "))
    {
        if !scaled.contains(&note.as_str()) {
            scaled.push(note);
        }
    }
    caveats.extend(scaled.iter().map(|note| format!("Not as published: {note}.")));
    if scheduler.recommended().is_some() && api.recommended().is_some() {
        let under: Vec<String> = apis_of(&applicable, &scheduler);
        if let [only] = under.as_slice()
            && Some(only.as_str()) != api.recommended()
        {
            caveats.push(format!("Schedulers were compared under {only} alone."));
        }
    }
    let (here, absent): (Vec<&PlannedDevice>, Vec<&PlannedDevice>) =
        run.plan.targets.iter().partition(|target| present(target));
    if !absent.is_empty() && scheduler.recommended().is_some() {
        let names: Vec<&str> = absent.iter().map(|target| target.path.as_str()).collect();
        caveats.push(format!("No commands for {}: not on this machine.", names.join(", ")));
    }
    let commands = setup_commands::commands(&api, &scheduler, &here, &run.machine.facts);
    Advice { goal, api, scheduler, commands, caveats }
}

fn no_advice(goal: AdviceGoal, because: &str) -> Advice {
    let decision = |factor| untested(factor, because.to_string(), Vec::new());
    Advice {
        goal,
        api: decision("api"),
        scheduler: decision("scheduler"),
        commands: Vec::new(),
        caveats: Vec::new(),
    }
}

fn untested(factor: &'static str, because: String, options: Vec<RankedOption>) -> Decision {
    Decision { factor, choice: Choice::Untested, because, options }
}

/// The APIs in use in the cells that compare the schedulers of `decision`.
fn apis_of(cells: &[&ExperimentCell<'_>], decision: &Decision) -> Vec<String> {
    let mut apis: Vec<String> = Vec::new();
    for cell in cells {
        let here = cell.parameters.get("scheduler").map(ParameterValue::to_string);
        let is_option =
            here.is_some_and(|name| name != "none" && decision.options.iter().any(|o| o.name == name));
        if let (true, Some(api)) = (is_option, cell.parameters.get("api").map(ParameterValue::to_string))
            && !apis.contains(&api)
        {
            apis.push(api);
        }
    }
    apis
}

/// Values by matched configuration, then by option.
type MatchedConfigurations = BTreeMap<String, BTreeMap<String, OptionValues>>;

struct OptionValues {
    values: Vec<f64>,
    generator_ns: f64,
}

fn decide(cells: &[&ExperimentCell<'_>], factor: &'static str, goal: AdviceGoal) -> Decision {
    let configurations = matched_configurations(cells, factor, goal.metric());
    let mut names: Vec<&str> = Vec::new();
    for name in configurations.values().flat_map(BTreeMap::keys) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let Some(leader) = leader(&configurations, &names, goal) else {
        let because =
            format!("no two {}s were measured in the same configuration", metric::parameter_name(factor));
        return untested(factor, because, Vec::new());
    };
    let higher_is_better = metric::direction(goal.metric()) == metric::MetricDirection::HigherIsBetter;
    // All intervals together hold with 95 % (Bonferroni).
    let level = 1.0 - 0.05 / (names.len().max(2) - 1) as f64;
    let mut options: Vec<RankedOption> =
        names.iter().filter_map(|name| rank_option(&configurations, leader, name, level)).collect();
    options.sort_by(
        |a, b| if higher_is_better { b.ratio.total_cmp(&a.ratio) } else { a.ratio.total_cmp(&b.ratio) },
    );
    // The leader is first even where rounding or missing pairs would sort another option before it.
    options.sort_by_key(|option| option.name != leader);
    let rivals = &options[1..];
    let insignificant = |rival: &&RankedOption| rival.interval.is_some_and(|interval| interval.contains(1.0));
    let below_cost = |rival: &&RankedOption| below_generator_cost(&configurations, leader, &rival.name, goal);
    let tied: Vec<&RankedOption> =
        rivals.iter().filter(|rival| insignificant(rival) || below_cost(rival)).collect();
    let Some(next) = rivals.first() else {
        let because = format!("only {leader} was measured");
        return untested(factor, because, options);
    };
    if rivals.iter().any(|rival| rival.interval.is_none()) || measured_once(&configurations) {
        let because = "measured once: repetitions (--repetitions 3) decide it".to_string();
        return untested(factor, because, options);
    }
    let metric_name = metric::display_name(goal.metric());
    let distance = |rival: &RankedOption| {
        format!("{} {}", percent(rival.ratio), if rival.ratio > 1.0 { "above" } else { "below" })
    };
    let typical = {
        let shown = metric::display_unit(goal.metric(), options[0].typical);
        format!("{} {}", format_number(options[0].typical / shown.divisor), shown.unit)
    };
    let mut because = format!(
        "{leader}: median {metric_name} {typical}; {} is {} it over {} matched {}",
        next.name,
        distance(next),
        next.matched_configurations,
        if next.matched_configurations == 1 { "configuration" } else { "configurations" },
    );
    if let Some(interval) = next.interval {
        because.push_str(&format!(
            " (95 %: {} to {})",
            percent_signed(interval.low),
            percent_signed(interval.high)
        ));
    }
    let choice = if tied.is_empty() {
        Choice::Wins(leader.to_string())
    } else {
        if tied.iter().any(below_cost) {
            because.push_str("; the difference is smaller than the generator's own cost per I/O");
        }
        let mut names = vec![leader.to_string()];
        names.extend(tied.iter().map(|rival| rival.name.clone()));
        Choice::Tied(names)
    };
    Decision { factor, choice, because, options }
}

/// Groups the cells that differ only in `factor`. Groups with a single option are dropped.
fn matched_configurations(
    cells: &[&ExperimentCell<'_>],
    factor: &str,
    metric: &str,
) -> MatchedConfigurations {
    let mut configurations = MatchedConfigurations::new();
    for cell in cells {
        let Some(name) = cell.parameters.get(factor) else { continue };
        let values = cell.values("fg", metric);
        if values.is_empty() {
            continue;
        }
        let mut key = cell.experiment.to_string();
        for (name, value) in cell.parameters {
            // iou-s needs an extra core for its polling thread; `iops_per_core` includes that cost.
            if name != factor && name != "cores" {
                key.push_str(&format!("; {name} {value}"));
            }
        }
        let costs: Vec<f64> = cell.measured().filter_map(|record| record.generator.cost_ns_per_io).collect();
        let measured = OptionValues { values, generator_ns: median(&costs).unwrap_or(0.0) };
        configurations.entry(key).or_default().insert(name.to_string(), measured);
    }
    configurations.retain(|_, options| options.len() > 1);
    configurations
}

fn pairs(configurations: &MatchedConfigurations, a: &str, b: &str) -> Vec<(Vec<f64>, Vec<f64>)> {
    let both = |options: &BTreeMap<String, OptionValues>| {
        Some((options.get(a)?.values.clone(), options.get(b)?.values.clone()))
    };
    configurations.values().filter_map(both).collect()
}

/// The option that beats the most other options; the sum of log ratios breaks ties.
fn leader<'a>(
    configurations: &MatchedConfigurations,
    names: &[&'a str],
    goal: AdviceGoal,
) -> Option<&'a str> {
    let higher_is_better = metric::direction(goal.metric()) == metric::MetricDirection::HigherIsBetter;
    let score = |name: &str| {
        let mut score = (0i64, 0.0);
        for other in names.iter().filter(|other| **other != name) {
            if let Some((ratio, _)) = matched_geometric_mean_ratio(&pairs(configurations, other, name), 0.95)
            {
                let ahead = if higher_is_better { ratio.ln() } else { -ratio.ln() };
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

/// Whether an option of a configuration was measured only once.
fn measured_once(configurations: &MatchedConfigurations) -> bool {
    configurations.values().flat_map(BTreeMap::values).any(|option| option.values.len() < 2)
}

fn rank_option(
    configurations: &MatchedConfigurations,
    leader: &str,
    name: &str,
    level: f64,
) -> Option<RankedOption> {
    let values: Vec<f64> =
        configurations.values().filter_map(|options| median(&options.get(name)?.values)).collect();
    let typical = median(&values)?;
    if name == leader {
        return Some(RankedOption {
            name: name.into(),
            ratio: 1.0,
            interval: None,
            matched_configurations: values.len(),
            typical,
        });
    }
    let pairs = pairs(configurations, leader, name);
    let (ratio, interval) = matched_geometric_mean_ratio(&pairs, level)?;
    Some(RankedOption { name: name.into(), ratio, interval, matched_configurations: pairs.len(), typical })
}

/// Whether the median difference per I/O is smaller than the generator's own cost per I/O: then the
/// generator may cause it.
fn below_generator_cost(configurations: &MatchedConfigurations, a: &str, b: &str, goal: AdviceGoal) -> bool {
    let ns = |value: f64| match goal {
        AdviceGoal::P99 | AdviceGoal::Isolation => value * 1e3,
        AdviceGoal::IopsPerCore => 1e9 / value,
    };
    let mut differences = Vec::new();
    let mut costs = Vec::new();
    for options in configurations.values() {
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
        format!("{} times", format_number(ratio))
    } else {
        format!("{} %", format_number((ratio - 1.0).abs() * 100.0))
    }
}

fn percent_signed(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    format!("{}{} %", if percent >= 0.0 { "+" } else { "" }, format_number(percent))
}
