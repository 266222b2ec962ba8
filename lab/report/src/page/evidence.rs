//! Findings and checks as the page shows them.

use experiments::{Definition, Outcome, Verdict};
use serde::Serialize;

use super::{study_words, verdict_class};
use crate::chart::short;
use crate::study;

/// A finding with its evidence.
#[derive(Serialize)]
pub(super) struct Finding {
    study: String,
    name: String,
    says: String,
    section: String,
    verdict: &'static str,
    class: &'static str,
    confidence: String,
    checks: Vec<Check>,
}

/// A check, asked.
#[derive(Serialize)]
pub(super) struct Check {
    says: String,
    verdict: &'static str,
    class: &'static str,
    measured: String,
    bound: String,
    published: String,
    remark: String,
}

/// How many findings came out how, by study.
#[derive(Serialize)]
pub(super) struct Tally {
    study: String,
    yes: usize,
    no: usize,
    open: usize,
    all: usize,
}

pub(super) fn findings(asking: &study::Asking) -> Vec<Finding> {
    let show = |asked: study::Asked| {
        let outcome = asked.outcome;
        let (study, name) = outcome.id.split_once('.').unwrap_or(("", &outcome.id));
        let confidence = match (asked.repetitions, asked.agreeing) {
            (0, _) => String::new(),
            (1, _) => "measured once".to_string(),
            (all, same) => format!("so in {same} of {all} repetitions"),
        };
        Finding {
            study: study_words(study),
            name: name_words(name),
            says: outcome.says.clone(),
            section: outcome.section.clone(),
            verdict: outcome.verdict.words(),
            class: verdict_class(outcome.verdict),
            confidence,
            checks: outcome.outcomes.iter().map(check).collect(),
        }
    };
    asking.findings().into_iter().map(show).collect()
}

/// `key1` is the first key finding, `o7` the seventh observation.
fn name_words(name: &str) -> String {
    let number = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit()) && !rest.is_empty();
    match (name.strip_prefix("key"), name.strip_prefix('o')) {
        (Some(rest), _) if number(rest) => format!("Key finding {rest}"),
        (_, Some(rest)) if number(rest) => format!("Observation {rest}"),
        _ => name
            .strip_prefix('f')
            .filter(|rest| number(rest))
            .map_or(name.to_string(), |rest| format!("Finding {rest}")),
    }
}

pub(super) fn tally(findings: &[Finding]) -> Vec<Tally> {
    let mut all: Vec<Tally> = Vec::new();
    for finding in findings {
        if all.last().is_none_or(|tally| tally.study != finding.study) {
            all.push(Tally { study: finding.study.clone(), yes: 0, no: 0, open: 0, all: 0 });
        }
        let Some(tally) = all.last_mut() else { continue };
        tally.all += 1;
        match finding.class {
            "yes" => tally.yes += 1,
            "no" => tally.no += 1,
            _ => tally.open += 1,
        }
    }
    all
}

/// The checks of an experiment.
pub(super) fn checks(asking: &study::Asking, definition: &Definition) -> Vec<Check> {
    asking.checks(definition).iter().map(check).collect()
}

fn check(outcome: &Outcome) -> Check {
    let tested = outcome.verdict != Verdict::NotTested;
    let measured = match (outcome.measured, outcome.range) {
        (Some(_), Some((low, high))) if short(low) != short(high) => {
            format!("{} to {}", short(low), short(high))
        }
        (Some(value), _) => short(value),
        (None, _) => "–".to_string(),
    };
    Check {
        says: outcome.says.clone(),
        verdict: outcome.verdict.words(),
        class: verdict_class(outcome.verdict),
        measured,
        bound: outcome.bound.clone(),
        published: outcome.published.map_or("–".to_string(), short),
        remark: match (tested, outcome.remark.is_empty()) {
            (true, false) if outcome.verdict == Verdict::DoesNotHold => {
                format!("worst at {}", outcome.remark)
            }
            (false, _) => outcome.remark.clone(),
            _ => String::new(),
        },
    }
}
