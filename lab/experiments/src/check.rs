//! Checks of published results against measurements.
//!
//! A [`FindingCheck`] compares a number, or the relation of two, with bounds. A [`MetricQuery`] selects the numbers
//! from records, so that the same check evaluates measured and published data. A [`Finding`] is a statement of a
//! study with the checks that support it. Nothing here reads a file or a clock.

use serde::{Deserialize, Serialize};

use crate::definition::matches;
use crate::record::{CellParameters, CellRecord, ParameterValue};

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
    /// Requirements on the machine, without which the check is not tested: `cores>=10`, or `cores>=4, devices>=2`.
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
    /// The cells that it needs were not measured.
    NotTested,
}

impl Verdict {
    /// The verdict as shown in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::Holds => "holds",
            Verdict::DoesNotHold => "does not hold",
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
    /// Minimum and maximum of the numbers, if `for_each` yields several.
    pub range: Option<(f64, f64)>,
    /// The value in the paper.
    pub published: Option<f64>,
    /// The bounds in words, for example `at least 1.2`.
    pub bound: String,
    /// The group with the worst number, or why the check was not tested.
    pub remark: String,
}

/// A statement of a study, with the checks that support it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// For example `icpe24.o7` or `icpe24.key2`.
    pub id: String,
    /// The statement, in our words.
    pub says: String,
    /// Section of the paper.
    #[serde(default)]
    pub section: String,
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
    /// Holds if at least one check was tested and none of the tested ones failed.
    pub verdict: Verdict,
    /// Results of the checks, in their order.
    pub outcomes: Vec<CheckOutcome>,
}

impl Finding {
    /// Evaluates all checks on the records.
    pub fn evaluate(&self, records: &[CellRecord]) -> FindingOutcome {
        let outcomes: Vec<CheckOutcome> =
            self.check.iter().map(|check| check.evaluate(&self.id, records)).collect();
        let any = |verdict| outcomes.iter().any(|outcome| outcome.verdict == verdict);
        let verdict = if any(Verdict::DoesNotHold) {
            Verdict::DoesNotHold
        } else if any(Verdict::Holds) {
            Verdict::Holds
        } else {
            Verdict::NotTested
        };
        FindingOutcome {
            id: self.id.clone(),
            says: self.says.clone(),
            section: self.section.clone(),
            verdict,
            outcomes,
        }
    }
}

impl FindingCheck {
    /// Evaluates the check on the records. `experiment` is the default of queries that name none.
    pub fn evaluate(&self, experiment: &str, records: &[CellRecord]) -> CheckOutcome {
        let mut numbers: Vec<(f64, String)> = Vec::new();
        let mut missing = self.unmet_requirement(experiment, records).unwrap_or_default();
        let groups = if missing.is_empty() { self.groups(experiment, records) } else { Vec::new() };
        for group in groups {
            match self.compute(experiment, records, &group) {
                Ok(compute) => numbers.push((compute, describe(&group))),
                Err(reason) => missing = reason,
            }
        }
        let outcome = |verdict, measured, remark| CheckOutcome {
            says: self.says.clone(),
            verdict,
            measured,
            range: match (minimum(&numbers), maximum(&numbers)) {
                (Some(minimum), Some(maximum)) if numbers.len() > 1 => Some((minimum.0, maximum.0)),
                _ => None,
            },
            published: self.published,
            bound: self.bound(),
            remark,
        };
        let worst = match (self.at_least, self.at_most) {
            (None, Some(_)) => maximum(&numbers),
            // With two bounds, report a number beyond the upper one first.
            (Some(_), Some(bound)) => maximum(&numbers).filter(|n| n.0 > bound).or(minimum(&numbers)),
            _ => minimum(&numbers),
        };
        let Some((compute, location)) = worst else {
            let reason = if missing.is_empty() { "no required cell was measured".into() } else { missing };
            return outcome(Verdict::NotTested, None, reason);
        };
        let holds = self.at_least.is_none_or(|bound| *compute >= bound)
            && self.at_most.is_none_or(|bound| *compute <= bound);
        let verdict = if holds { Verdict::Holds } else { Verdict::DoesNotHold };
        outcome(verdict, Some(*compute), location.clone())
    }

    /// Which requirement the measured cells do not meet. Published cells have no such parameters and meet all.
    fn unmet_requirement(&self, experiment: &str, records: &[CellRecord]) -> Option<String> {
        let none = CellParameters::new();
        self.needs.as_deref()?.split(',').filter_map(parse_requirement).find_map(|(name, minimum)| {
            let cells = self.of.select(experiment, records, &none);
            let maximum = cells.filter_map(|cell| cell.parameters.get(name)?.as_f64()).reduce(f64::max)?;
            (maximum < minimum).then(|| format!("needs {name} of at least {minimum}; at most {maximum} here"))
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

    fn compute(
        &self,
        experiment: &str,
        records: &[CellRecord],
        group: &CellParameters,
    ) -> Result<f64, String> {
        let of = self.of.value(experiment, records, group)?;
        let Some(against) = &self.against else { return Ok(of) };
        let base = against.value(experiment, records, group)?;
        let ratio = || if base == 0.0 { Err("division by 0".to_string()) } else { Ok(of / base) };
        Ok(match self.relation {
            Relation::Ratio => ratio()?,
            Relation::GainPct => (ratio()? - 1.0) * 100.0,
            Relation::LossPct => (1.0 - ratio()?) * 100.0,
            Relation::Difference => of - base,
        })
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

/// Parses a requirement such as `cores>=4` to name and minimum.
fn parse_requirement(text: &str) -> Option<(&str, f64)> {
    let (name, minimum) = text.split_once(">=")?;
    let (name, minimum) = (name.trim(), minimum.trim().parse().ok()?);
    (!name.is_empty() && f64::is_finite(minimum)).then_some((name, minimum))
}

fn minimum(numbers: &[(f64, String)]) -> Option<&(f64, String)> {
    numbers.iter().min_by(|left, right| left.0.total_cmp(&right.0))
}

fn maximum(numbers: &[(f64, String)]) -> Option<&(f64, String)> {
    numbers.iter().max_by(|left, right| left.0.total_cmp(&right.0))
}

fn describe(group: &CellParameters) -> String {
    let parts: Vec<String> = group.iter().map(|(name, value)| format!("{name} {value}")).collect();
    parts.join(", ")
}

impl MetricQuery {
    fn select<'a>(
        &'a self,
        experiment: &'a str,
        records: &'a [CellRecord],
        group: &'a CellParameters,
    ) -> impl Iterator<Item = &'a CellRecord> {
        let experiment = if self.experiment.is_empty() { experiment } else { self.experiment.as_str() };
        records.iter().filter(move |record| {
            record.experiment == experiment
                && record.is_measured()
                && matches(&record.parameters, &self.filter)
                && matches(&record.parameters, group)
                && record.metric(&self.role, &self.metric).is_some()
        })
    }

    /// The aggregated value, or why it cannot be computed.
    fn value(&self, experiment: &str, records: &[CellRecord], group: &CellParameters) -> Result<f64, String> {
        let cells = average_repetitions(self.select(experiment, records, group), &self.role, &self.metric);
        if cells.is_empty() {
            let mut filter = self.filter.clone();
            filter.extend(group.clone());
            let name = if self.experiment.is_empty() { experiment } else { &self.experiment };
            return Err(format!("{name}: {} was not measured for {}", self.metric, describe(&filter)));
        }
        let values = || cells.iter().map(|(_, value)| *value);
        let (min, max) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        match self.take {
            Aggregation::Mean => Ok(values().sum::<f64>() / cells.len() as f64),
            Aggregation::Max => Ok(max),
            Aggregation::Min => Ok(min),
            Aggregation::Spread if min != 0.0 => Ok(max / min),
            Aggregation::Spread => Err("the smallest is 0".to_string()),
            Aggregation::Last
            | Aggregation::First
            | Aggregation::Knee
            | Aggregation::Growth
            | Aggregation::LastToMax => self.aggregate_ordered(&cells, max),
        }
    }

    fn aggregate_ordered(&self, cells: &[(CellParameters, f64)], max: f64) -> Result<f64, String> {
        let mut order: Vec<(f64, f64)> = cells
            .iter()
            .filter_map(|(cell, value)| {
                Some((cell.get(&self.along).and_then(ParameterValue::as_f64)?, *value))
            })
            .collect();
        order.sort_by(|left, right| left.0.total_cmp(&right.0));
        let (Some(first), Some(last)) = (order.first(), order.last()) else {
            return Err(format!("no cell has {}", self.along));
        };
        match self.take {
            Aggregation::First => Ok(first.1),
            Aggregation::Last => Ok(last.1),
            Aggregation::Growth | Aggregation::LastToMax | Aggregation::Knee if order.len() < 2 => {
                Err(format!("only one value of {} was measured", self.along))
            }
            Aggregation::Knee => {
                let knee = order.iter().find(|(_, value)| *value >= 0.9 * max);
                knee.map(|(at, _)| *at).ok_or_else(|| "no value is near the largest".to_string())
            }
            Aggregation::Growth if first.1 == 0.0 => Err("the first is 0".to_string()),
            Aggregation::Growth => Ok(last.1 / first.1),
            _ if max == 0.0 => Err("the largest is 0".to_string()),
            _ => Ok(last.1 / max),
        }
    }
}

/// One value for each cell: the mean over its repetitions.
fn average_repetitions<'a>(
    records: impl Iterator<Item = &'a CellRecord>,
    role: &str,
    metric: &str,
) -> Vec<(CellParameters, f64)> {
    let mut cells: Vec<(&CellParameters, f64, f64)> = Vec::new();
    for record in records {
        let Some(value) = record.metric(role, metric) else { continue };
        match cells.iter_mut().find(|(cell, ..)| **cell == record.parameters) {
            Some((_, sum, count)) => {
                *sum += value;
                *count += 1.0;
            }
            None => cells.push((&record.parameters, value, 1.0)),
        }
    }
    cells.into_iter().map(|(cell, sum, count)| (cell.clone(), sum / count)).collect()
}

#[cfg(test)]
mod tests;
