//! Checks of published results against measurements.
//!
//! A [`FindingCheck`] compares a number, or the relation of two, with bounds. A [`MetricQuery`] selects the numbers
//! from records, so that the same check evaluates measured and published data. A [`Finding`] is a statement of a
//! study with the checks that support it. A verdict on measurements is one on an interval: a check holds if its whole
//! interval is within the bounds, and is undecided if the interval crosses one. Nothing here reads a file or a clock.

mod estimate;
mod query;

use serde::{Deserialize, Serialize};

pub use estimate::Precision;

use crate::record::{CellParameters, CellRecord};
use estimate::Estimates;
use query::Selection;

/// A statement about a number, with its bounds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FindingCheck {
    /// The statement, as a sentence.
    #[serde(default)]
    pub says: String,
    /// The number to check.
    pub of: MetricQuery,
    /// The number to relate it to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<MetricQuery>,
    /// The relation between `of` and `against`.
    #[serde(default)]
    pub relation: Relation,
    /// Evaluate the check for every combination of these parameters that `of` was measured with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub for_each: Vec<String>,
    /// Lower bound, inclusive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// Upper bound, inclusive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// The value in the paper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<f64>,
    /// Requirements on the machine, without which the check is not tested: `cores<=10`, or `cores>=4, devices>=2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs: Option<String>,
}

/// The relation between two numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Relation {
    /// The first divided by the second, or the first alone.
    #[default]
    Ratio,
    /// The increase from the second to the first, in percent.
    GainPct,
    /// The decrease from the second to the first, in percent.
    LossPct,
    /// The first minus the second.
    Difference,
}

/// Selects one number from records.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricQuery {
    /// Id of the experiment; empty for the experiment of the check.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub experiment: String,
    /// Name of the metric.
    pub metric: String,
    /// Role that was measured.
    #[serde(default = "fg")]
    pub role: String,
    /// Parameters that selected cells must have.
    #[serde(rename = "where", default)]
    pub filter: CellParameters,
    /// How the values of several cells become one.
    #[serde(default)]
    pub take: Aggregation,
    /// The parameter by which `first`, `last`, `knee`, `growth` and `kept` order the cells.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub along: String,
}

fn fg() -> String {
    "fg".to_string()
}

/// How the values of several cells become one. Repetitions are averaged first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// The mean.
    #[default]
    Mean,
    /// The maximum.
    Max,
    /// The minimum.
    Min,
    /// The value at the largest `along`.
    Last,
    /// The value at the smallest `along`.
    First,
    /// The smallest `along` whose value is at least 90 % of the maximum.
    Knee,
    /// The value at the largest `along` divided by the value at the smallest.
    Growth,
    /// The maximum divided by the minimum.
    Spread,
    /// `kept`: the value at the largest `along` divided by the maximum; 1 if the values never fall.
    #[serde(rename = "kept")]
    LastToMax,
}

/// Result of a check or a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The measurements agree.
    Holds,
    /// The measurements disagree.
    DoesNotHold,
    /// The measurements scatter too much, or were not repeated.
    Undecided,
    /// The cells that it needs were not measured, or with a stand-in.
    NotTested,
}

impl Verdict {
    /// The verdict as shown in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::Holds => "holds",
            Verdict::DoesNotHold => "does not hold",
            Verdict::Undecided => "undecided",
            Verdict::NotTested => "not tested",
        }
    }
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckOutcome {
    /// The statement of the check.
    pub says: String,
    /// Whether the statement holds.
    pub verdict: Verdict,
    /// The number; with `for_each`, the one that is furthest from its bound.
    pub measured: Option<f64>,
    /// The 95 % interval of `measured`; with `for_each`, all intervals together cover their numbers with 95 %.
    #[serde(default)]
    pub interval: Option<(f64, f64)>,
    /// Minimum and maximum of the numbers, if `for_each` yields several.
    pub range: Option<(f64, f64)>,
    /// The value in the paper.
    pub published: Option<f64>,
    /// The bounds in words, for example `at least 1.2`.
    pub bound: String,
    /// The group with the worst number, or why the check was not tested or not decided.
    pub remark: String,
}

/// A statement of a study, with the checks that support it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// Study and name in the paper, for example `icpe24.O-7` or `icpe24.KF-2`.
    pub id: String,
    /// The statement, in our words.
    pub says: String,
    /// Section of the paper.
    #[serde(default)]
    pub section: String,
    /// Why no check is possible; then there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_tested: Option<String>,
    /// The checks; all must hold.
    #[serde(default)]
    pub check: Vec<FindingCheck>,
}

/// Result of one finding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FindingOutcome {
    /// Id of the finding.
    pub id: String,
    /// The statement.
    pub says: String,
    /// Section of the paper.
    pub section: String,
    /// Holds if at least one check was tested and all tested ones hold.
    pub verdict: Verdict,
    /// What was not tested and why; empty if everything was.
    pub remark: String,
    /// Results of the checks, in their order.
    pub outcomes: Vec<CheckOutcome>,
}

impl Finding {
    /// Evaluates all checks on the records.
    pub fn evaluate(&self, records: &[CellRecord], precision: Precision) -> FindingOutcome {
        let outcomes: Vec<CheckOutcome> =
            self.check.iter().map(|check| check.evaluate(&self.id, records, precision)).collect();
        let untested = outcomes.iter().filter(|outcome| outcome.verdict == Verdict::NotTested);
        // Checks with one reason share it.
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for outcome in untested {
            match reasons.iter_mut().find(|(reason, _)| *reason == outcome.remark) {
                Some((_, says)) => says.push(&outcome.says),
                None => reasons.push((&outcome.remark, vec![&outcome.says])),
            }
        }
        let mut remarks: Vec<String> =
            reasons.iter().map(|(reason, says)| format!("{} ({reason})", says.join(", "))).collect();
        remarks.extend(self.not_tested.clone());
        FindingOutcome {
            id: self.id.clone(),
            says: self.says.clone(),
            section: self.section.clone(),
            verdict: worst_verdict(outcomes.iter().map(|outcome| outcome.verdict)),
            remark: if remarks.is_empty() {
                String::new()
            } else {
                format!("not tested: {}", remarks.join("; "))
            },
            outcomes,
        }
    }
}

/// The verdict on several statements that must all hold, from those that were tested.
fn worst_verdict(verdicts: impl Iterator<Item = Verdict>) -> Verdict {
    let severity = |verdict: &Verdict| match verdict {
        Verdict::DoesNotHold => 3,
        Verdict::Undecided => 2,
        Verdict::Holds => 1,
        Verdict::NotTested => 0,
    };
    verdicts.max_by_key(severity).unwrap_or(Verdict::NotTested)
}

/// The number of one combination of `for_each`.
struct GroupNumber {
    group: String,
    value: f64,
    /// `None` if the cells were measured once.
    interval: Option<(f64, f64)>,
    verdict: Verdict,
}

impl FindingCheck {
    /// Evaluates the check on the records. `experiment` is the default of queries that name none.
    pub fn evaluate(&self, experiment: &str, records: &[CellRecord], precision: Precision) -> CheckOutcome {
        let mut missing = self.unmet_requirement(experiment, records).unwrap_or_default();
        let absent = if missing.is_empty() { self.absent(experiment, records) } else { Vec::new() };
        let groups = if missing.is_empty() { self.groups(experiment, records) } else { Vec::new() };
        let mut estimates = Estimates::new(records, precision);
        let mut numbers = Vec::new();
        for group in &groups {
            match self.number(experiment, group, &mut estimates, groups.len()) {
                Ok(number) => numbers.push(number),
                Err(reason) => missing = reason,
            }
        }
        let verdict = worst_verdict(numbers.iter().map(|number| number.verdict));
        let worst = numbers
            .iter()
            .filter(|number| number.verdict == verdict)
            .max_by(|left, right| self.excess(left.value).total_cmp(&self.excess(right.value)));
        let values = || numbers.iter().map(|number| number.value);
        let range = (numbers.len() > 1)
            .then(|| (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max)));
        let remark = match worst {
            None if !absent.is_empty() => format!("nothing of {} was measured", absent.join(" and ")),
            None if missing.is_empty() => "no required cell was measured".to_string(),
            None => missing,
            Some(number) if number.interval.is_none() => "measured once: repetitions decide it".to_string(),
            Some(number) => number.group.clone(),
        };
        CheckOutcome {
            says: self.says.clone(),
            verdict,
            measured: worst.map(|number| number.value),
            interval: worst.and_then(|number| number.interval),
            range,
            published: self.published,
            bound: self.bound(),
            remark,
        }
    }

    /// The experiments of which no cell was measured.
    fn absent<'a>(&'a self, experiment: &'a str, records: &[CellRecord]) -> Vec<&'a str> {
        let mut names: Vec<&str> = Vec::new();
        for name in
            std::iter::once(&self.of).chain(&self.against).map(|query| query.experiment_or(experiment))
        {
            let is_measured = |record: &CellRecord| record.experiment == name && record.is_measured();
            if !names.contains(&name) && !records.iter().any(is_measured) {
                names.push(name);
            }
        }
        names
    }

    /// The number of a group with its interval and verdict, or why it cannot be computed.
    fn number(
        &self,
        experiment: &str,
        group: &CellParameters,
        estimates: &mut Estimates<'_>,
        groups: usize,
    ) -> Result<GroupNumber, String> {
        let of = self.of.select_cells(experiment, group, estimates)?;
        let against = self.against.as_ref().map(|query| query.select_cells(experiment, group, estimates));
        let against = against.transpose()?;
        let compute = |values: &[f64]| self.compute(&of, against.as_ref(), values);
        let value = compute(&estimates.means())?;
        let cells: Vec<usize> = of.cells().chain(against.iter().flat_map(Selection::cells)).collect();
        let interval = estimates.interval(&cells, groups, value, |values| compute(values).ok());
        let verdict = interval.map_or(Verdict::Undecided, |(low, high)| self.verdict(low, high));
        Ok(GroupNumber { group: describe(group), value, interval, verdict })
    }

    fn verdict(&self, low: f64, high: f64) -> Verdict {
        let (least, most) =
            (self.at_least.unwrap_or(f64::NEG_INFINITY), self.at_most.unwrap_or(f64::INFINITY));
        if least <= low && high <= most {
            Verdict::Holds
        } else if high < least || low > most {
            Verdict::DoesNotHold
        } else {
            Verdict::Undecided
        }
    }

    /// How far a value is beyond the bounds; negative within them.
    fn excess(&self, value: f64) -> f64 {
        let below = self.at_least.map_or(f64::NEG_INFINITY, |bound| bound - value);
        let above = self.at_most.map_or(f64::NEG_INFINITY, |bound| value - bound);
        below.max(above)
    }

    fn compute(
        &self,
        of: &Selection<'_>,
        against: Option<&Selection<'_>>,
        values: &[f64],
    ) -> Result<f64, String> {
        let of = of.value(values)?;
        let Some(against) = against else { return Ok(of) };
        let base = against.value(values)?;
        let ratio = || if base == 0.0 { Err("division by 0".to_string()) } else { Ok(of / base) };
        Ok(match self.relation {
            Relation::Ratio => ratio()?,
            Relation::GainPct => (ratio()? - 1.0) * 100.0,
            Relation::LossPct => (1.0 - ratio()?) * 100.0,
            Relation::Difference => of - base,
        })
    }

    /// Which requirement the measured cells do not meet. Published cells have no such parameters and meet all.
    fn unmet_requirement(&self, experiment: &str, records: &[CellRecord]) -> Option<String> {
        let none = CellParameters::new();
        self.needs.as_deref()?.split(',').filter_map(parse_requirement).find_map(|(name, bound)| {
            let cells = self.of.select(experiment, records, &none);
            let largest = cells.filter_map(|cell| cell.parameters.get(name)?.as_f64()).reduce(f64::max)?;
            match bound {
                Bound::AtLeast(minimum) if largest < minimum => {
                    Some(format!("needs {name} of at least {minimum}; at most {largest} here"))
                }
                Bound::AtMost(maximum) if largest > maximum => {
                    Some(format!("needs {name} of at most {maximum}; {largest} here"))
                }
                _ => None,
            }
        })
    }

    /// Why `needs` cannot be parsed.
    pub(crate) fn requirement_error(&self) -> Option<String> {
        let wrong = self.needs.as_deref()?.split(',').find(|part| parse_requirement(part).is_none())?;
        Some(format!(
            "check {:?}: needs = {wrong:?} is no requirement such as \"cores>=4\" or \"cores>=4, devices>=2\"",
            self.says
        ))
    }

    /// The parameter combinations of `for_each`; one empty combination without it.
    fn groups(&self, experiment: &str, records: &[CellRecord]) -> Vec<CellParameters> {
        if self.for_each.is_empty() {
            return vec![CellParameters::new()];
        }
        let mut groups: Vec<CellParameters> = Vec::new();
        for record in self.of.select(experiment, records, &CellParameters::new()) {
            let group: CellParameters = self
                .for_each
                .iter()
                .filter_map(|name| Some((name.clone(), record.parameters.get(name)?.clone())))
                .collect();
            if group.len() == self.for_each.len() && !groups.contains(&group) {
                groups.push(group);
            }
        }
        groups
    }

    fn bound(&self) -> String {
        match (self.at_least, self.at_most) {
            (Some(minimum), Some(maximum)) => format!("from {minimum} to {maximum}"),
            (Some(minimum), None) => format!("at least {minimum}"),
            (None, Some(maximum)) => format!("at most {maximum}"),
            (None, None) => "anything".to_string(),
        }
    }
}

/// A bound of the largest value of a parameter among the measured cells.
#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// Parses a requirement such as `cores>=4` or `cores<=10` to name and bound.
fn parse_requirement(text: &str) -> Option<(&str, Bound)> {
    let (name, number, bound): (_, _, fn(f64) -> Bound) = match text.split_once(">=") {
        Some((name, minimum)) => (name.trim(), minimum, Bound::AtLeast),
        None => {
            let (name, maximum) = text.split_once("<=")?;
            (name.trim(), maximum, Bound::AtMost)
        }
    };
    let number: f64 = number.trim().parse().ok()?;
    (!name.is_empty() && number.is_finite()).then(|| (name, bound(number)))
}

fn describe(group: &CellParameters) -> String {
    let parts: Vec<String> = group.iter().map(|(name, value)| format!("{name} {value}")).collect();
    parts.join(", ")
}

#[cfg(test)]
mod every_check;
#[cfg(test)]
mod tests;
