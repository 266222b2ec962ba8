//! Findings and checks with their evidence, formatted for the page.

use lab_experiments::{CheckOutcome, ExperimentDefinition, FindingOutcome, Verdict};
use serde::Serialize;

use super::{study_name, verdict_class};
use crate::chart::{format_limit, format_number};
use crate::study;

/// A published finding with its result and checks.
#[derive(Serialize)]
pub(super) struct FindingView {
    study: String,
    name: String,
    says: String,
    section: String,
    verdict: &'static str,
    class: &'static str,
    /// What was not tested; empty if everything was.
    remark: String,
    checks: Vec<CheckView>,
}

/// The result of one check.
#[derive(Serialize)]
pub(super) struct CheckView {
    says: String,
    verdict: &'static str,
    class: &'static str,
    measured: String,
    /// The 95 % interval of `measured`; empty without repetitions.
    interval: String,
    bound: String,
    published: String,
    remark: String,
}

/// The number of findings of a study by result.
#[derive(Serialize)]
pub(super) struct Tally {
    study: String,
    yes: usize,
    no: usize,
    undecided: usize,
    open: usize,
    all: usize,
}

pub(super) fn findings(evaluator: &study::FindingEvaluator) -> Vec<FindingView> {
    let show = |outcome: FindingOutcome| {
        let (study, name) = outcome.id.split_once('.').unwrap_or(("", &outcome.id));
        FindingView {
            study: study_name(study),
            name: finding_title(name),
            says: outcome.says.clone(),
            section: outcome.section.clone(),
            verdict: outcome.verdict.as_str(),
            class: verdict_class(outcome.verdict),
            remark: outcome.remark.clone(),
            checks: outcome.outcomes.iter().map(check).collect(),
        }
    };
    evaluator.findings().into_iter().map(show).collect()
}

/// `O-7` and `KF-2` are the names of the paper; a number becomes `Finding 2`.
fn finding_title(name: &str) -> String {
    let number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    if number { format!("Finding {name}") } else { name.to_string() }
}

pub(super) fn tally(findings: &[FindingView]) -> Vec<Tally> {
    let mut all: Vec<Tally> = Vec::new();
    for finding in findings {
        if all.last().is_none_or(|tally| tally.study != finding.study) {
            all.push(Tally { study: finding.study.clone(), yes: 0, no: 0, undecided: 0, open: 0, all: 0 });
        }
        let Some(tally) = all.last_mut() else { continue };
        tally.all += 1;
        match finding.class {
            "yes" => tally.yes += 1,
            "no" => tally.no += 1,
            "undecided" => tally.undecided += 1,
            _ => tally.open += 1,
        }
    }
    all
}

/// Evaluates the checks of an experiment.
pub(super) fn checks(
    evaluator: &study::FindingEvaluator,
    definition: &ExperimentDefinition,
) -> Vec<CheckView> {
    evaluator.checks(definition).iter().map(check).collect()
}

fn check(outcome: &CheckOutcome) -> CheckView {
    let several = match outcome.range {
        Some((low, high)) if format_number(low) != format_number(high) => {
            format!("all from {} to {}", format_limit(low), format_limit(high))
        }
        _ => String::new(),
    };
    let remark = match outcome.verdict {
        Verdict::DoesNotHold | Verdict::Undecided if outcome.interval.is_some() => {
            let place = if outcome.remark.is_empty() {
                String::new()
            } else {
                format!("worst at {}", outcome.remark)
            };
            [place, several].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
        }
        Verdict::Holds => several,
        _ => outcome.remark.clone(),
    };
    CheckView {
        says: outcome.says.clone(),
        verdict: outcome.verdict.as_str(),
        class: verdict_class(outcome.verdict),
        measured: outcome.measured.map_or("–".to_string(), format_number),
        interval: outcome
            .interval
            .map_or(String::new(), |(low, high)| format!("{} to {}", format_limit(low), format_limit(high))),
        bound: outcome.bound.clone(),
        published: outcome.published.map_or("–".to_string(), format_number),
        remark,
    }
}
