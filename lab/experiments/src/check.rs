//! Shapes: whether what was published holds in what was measured.
//!
//! A [`Check`] compares a number, or the relation of two, with bounds. The numbers are picked from
//! records, so that the same check is asked of a run here and of the published data. A [`Finding`] is
//! a sentence of a study with the checks that carry it. Nothing here reads a file or a clock.

use serde::{Deserialize, Serialize};

use crate::definition::fits;
use crate::record::{CellRecord, Parameters, Value};

/// A claim about a number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What it says, in a sentence.
    #[serde(default)]
    pub says: String,
    /// The number.
    pub of: Pick,
    /// What it is set against.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<Pick>,
    /// How the two are related.
    #[serde(default)]
    pub relation: Relation,
    /// Asked for each value of these parameters that both sides have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub for_each: Vec<String>,
    /// The least that it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// The most that it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// What the paper says it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<f64>,
    /// Only meaningful where the machine resembles the published one in this: `cores>=10`, say, or
    /// `cores>=4, devices>=2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs: Option<String>,
}

/// How two numbers are related.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Relation {
    /// The first divided by the second, or the first alone.
    #[default]
    Ratio,
    /// By how many percent the first is above the second.
    GainPct,
    /// By how many percent the first is below the second.
    LossPct,
    /// The first less the second.
    Difference,
}

/// A number out of records.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pick {
    /// The experiment; by default the one that the check stands in.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub experiment: String,
    /// The metric.
    pub metric: String,
    /// The role.
    #[serde(default = "fg")]
    pub role: String,
    /// The cells.
    #[serde(rename = "where", default)]
    pub fits: Parameters,
    /// What is made of several.
    #[serde(default)]
    pub take: Take,
    /// The parameter that [`Take`]s with an order go along.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub along: String,
}

fn fg() -> String {
    "fg".to_string()
}

/// What is made of the values of several cells. Repetitions are averaged before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Take {
    /// Their mean; the value, where there is one.
    #[default]
    Mean,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// The one with the largest `along`.
    Last,
    /// The one with the smallest `along`.
    First,
    /// The smallest `along` at which nine tenths of the largest value are reached.
    Knee,
    /// The value with the largest `along`, divided by that with the smallest.
    Growth,
    /// The largest, divided by the smallest.
    Spread,
    /// The value with the largest `along`, divided by the largest of all: 1 where it never falls.
    Kept,
}

/// What became of a check or a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It is so here too.
    Holds,
    /// It is not.
    DoesNotHold,
    /// It was not measured.
    NotTested,
}

impl Verdict {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Holds => "holds",
            Verdict::DoesNotHold => "does not hold",
            Verdict::NotTested => "not tested",
        }
    }
}

/// A check, asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// What the check says.
    pub says: String,
    /// What became of it.
    pub verdict: Verdict,
    /// The number measured: the one that is furthest from its bound, where there are several.
    pub measured: Option<f64>,
    /// The range of the numbers, where the check is asked for each value of something.
    pub range: Option<(f64, f64)>,
    /// What the paper says.
    pub published: Option<f64>,
    /// The bound in words, as `at least 1.2`.
    pub bound: String,
    /// Where it fails worst, or why it was not tested.
    pub remark: String,
}

/// A sentence of a study, with the checks that carry it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// As `icpe24.o7` or `icpe24.key2`.
    pub id: String,
    /// What it says, in our words.
    pub says: String,
    /// Where the paper says it.
    #[serde(default)]
    pub section: String,
    /// All of them must hold.
    #[serde(default)]
    pub check: Vec<Check>,
}

/// A finding, asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FindingOutcome {
    /// The finding.
    pub id: String,
    /// What it says.
    pub says: String,
    /// Where the paper says it.
    pub section: String,
    /// Holds where all checks that were tested hold, and at least one was.
    pub verdict: Verdict,
    /// Each check.
    pub outcomes: Vec<Outcome>,
}

impl Finding {
    /// Asks it of records.
    pub fn evaluate(&self, records: &[CellRecord]) -> FindingOutcome {
        let outcomes: Vec<Outcome> =
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

impl Check {
    /// Asks it of records. `experiment` is the one that its picks mean where they name none.
    pub fn evaluate(&self, experiment: &str, records: &[CellRecord]) -> Outcome {
        let mut numbers: Vec<(f64, String)> = Vec::new();
        let mut missing = self.unmet(experiment, records).unwrap_or_default();
        let groups = if missing.is_empty() { self.groups(experiment, records) } else { Vec::new() };
        for group in groups {
            match self.number(experiment, records, &group) {
                Ok(number) => numbers.push((number, words(&group))),
                Err(reason) => missing = reason,
            }
        }
        let outcome = |verdict, measured, remark| Outcome {
            says: self.says.clone(),
            verdict,
            measured,
            range: match (least(&numbers), most(&numbers)) {
                (Some(least), Some(most)) if numbers.len() > 1 => Some((least.0, most.0)),
                _ => None,
            },
            published: self.published,
            bound: self.bound(),
            remark,
        };
        let worst = match (self.at_least, self.at_most) {
            (None, Some(_)) => most(&numbers),
            // Of two bounds, the one that is missed is told of.
            (Some(_), Some(bound)) => most(&numbers).filter(|n| n.0 > bound).or(least(&numbers)),
            _ => least(&numbers),
        };
        let Some((number, place)) = worst else {
            let reason =
                if missing.is_empty() { "no cell was measured that it needs".into() } else { missing };
            return outcome(Verdict::NotTested, None, reason);
        };
        let holds = self.at_least.is_none_or(|bound| *number >= bound)
            && self.at_most.is_none_or(|bound| *number <= bound);
        let verdict = if holds { Verdict::Holds } else { Verdict::DoesNotHold };
        outcome(verdict, Some(*number), place.clone())
    }

    /// Why the cells do not resemble the published ones enough. Published cells always do.
    fn unmet(&self, experiment: &str, records: &[CellRecord]) -> Option<String> {
        let none = Parameters::new();
        self.needs.as_deref()?.split(',').filter_map(need).find_map(|(name, least)| {
            let cells = self.of.select(experiment, records, &none);
            let most = cells.filter_map(|cell| cell.parameters.get(name)?.as_f64()).reduce(f64::max)?;
            (most < least).then(|| format!("needs {name} of at least {least}; at most {most} here"))
        })
    }

    /// What its author cannot have meant.
    pub(crate) fn misunderstood(&self) -> Option<String> {
        let wrong = self.needs.as_deref()?.split(',').find(|part| need(part).is_none())?;
        Some(format!(
            "check {:?}: needs = {wrong:?} is not as \"cores>=4\" or \"cores>=4, devices>=2\"",
            self.says
        ))
    }

    /// The combinations that it is asked for: one that says nothing where it is asked once.
    fn groups(&self, experiment: &str, records: &[CellRecord]) -> Vec<Parameters> {
        if self.for_each.is_empty() {
            return vec![Parameters::new()];
        }
        let mut groups: Vec<Parameters> = Vec::new();
        for record in self.of.select(experiment, records, &Parameters::new()) {
            let group: Parameters = self
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

    fn number(&self, experiment: &str, records: &[CellRecord], group: &Parameters) -> Result<f64, String> {
        let of = self.of.value(experiment, records, group)?;
        let Some(against) = &self.against else { return Ok(of) };
        let base = against.value(experiment, records, group)?;
        let ratio = || if base == 0.0 { Err("it is set against 0".to_string()) } else { Ok(of / base) };
        Ok(match self.relation {
            Relation::Ratio => ratio()?,
            Relation::GainPct => (ratio()? - 1.0) * 100.0,
            Relation::LossPct => (1.0 - ratio()?) * 100.0,
            Relation::Difference => of - base,
        })
    }

    fn bound(&self) -> String {
        match (self.at_least, self.at_most) {
            (Some(least), Some(most)) => format!("from {least} to {most}"),
            (Some(least), None) => format!("at least {least}"),
            (None, Some(most)) => format!("at most {most}"),
            (None, None) => "anything".to_string(),
        }
    }
}

/// A parameter and the least that it must be, as `cores>=4`.
fn need(text: &str) -> Option<(&str, f64)> {
    let (name, least) = text.split_once(">=")?;
    let (name, least) = (name.trim(), least.trim().parse().ok()?);
    (!name.is_empty() && f64::is_finite(least)).then_some((name, least))
}

fn least(numbers: &[(f64, String)]) -> Option<&(f64, String)> {
    numbers.iter().min_by(|left, right| left.0.total_cmp(&right.0))
}

fn most(numbers: &[(f64, String)]) -> Option<&(f64, String)> {
    numbers.iter().max_by(|left, right| left.0.total_cmp(&right.0))
}

fn words(group: &Parameters) -> String {
    let parts: Vec<String> = group.iter().map(|(name, value)| format!("{name} {value}")).collect();
    parts.join(", ")
}

impl Pick {
    fn select<'a>(
        &'a self,
        experiment: &'a str,
        records: &'a [CellRecord],
        group: &'a Parameters,
    ) -> impl Iterator<Item = &'a CellRecord> {
        let experiment = if self.experiment.is_empty() { experiment } else { self.experiment.as_str() };
        records.iter().filter(move |record| {
            record.experiment == experiment
                && record.is_measured()
                && fits(&record.parameters, &self.fits)
                && fits(&record.parameters, group)
                && record.metric(&self.role, &self.metric).is_some()
        })
    }

    /// The value, or why there is none.
    fn value(&self, experiment: &str, records: &[CellRecord], group: &Parameters) -> Result<f64, String> {
        let cells = averaged(self.select(experiment, records, group), &self.role, &self.metric);
        if cells.is_empty() {
            let mut wanted = self.fits.clone();
            wanted.extend(group.clone());
            let name = if self.experiment.is_empty() { experiment } else { &self.experiment };
            return Err(format!("{name}: {} was not measured for {}", self.metric, words(&wanted)));
        }
        let values = || cells.iter().map(|(_, value)| *value);
        let (min, max) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        match self.take {
            Take::Mean => Ok(values().sum::<f64>() / cells.len() as f64),
            Take::Max => Ok(max),
            Take::Min => Ok(min),
            Take::Spread if min != 0.0 => Ok(max / min),
            Take::Spread => Err("the smallest is 0".to_string()),
            Take::Last | Take::First | Take::Knee | Take::Growth | Take::Kept => self.ordered(&cells, max),
        }
    }

    fn ordered(&self, cells: &[(Parameters, f64)], max: f64) -> Result<f64, String> {
        let mut order: Vec<(f64, f64)> = cells
            .iter()
            .filter_map(|(cell, value)| Some((cell.get(&self.along).and_then(Value::as_f64)?, *value)))
            .collect();
        order.sort_by(|left, right| left.0.total_cmp(&right.0));
        let (Some(first), Some(last)) = (order.first(), order.last()) else {
            return Err(format!("no cell says its {}", self.along));
        };
        match self.take {
            Take::First => Ok(first.1),
            Take::Last => Ok(last.1),
            Take::Growth | Take::Kept | Take::Knee if order.len() < 2 => {
                Err(format!("only one value of {} was measured", self.along))
            }
            Take::Knee => {
                let knee = order.iter().find(|(_, value)| *value >= 0.9 * max);
                knee.map(|(at, _)| *at).ok_or_else(|| "no value is near the largest".to_string())
            }
            Take::Growth if first.1 == 0.0 => Err("the first is 0".to_string()),
            Take::Growth => Ok(last.1 / first.1),
            _ if max == 0.0 => Err("the largest is 0".to_string()),
            _ => Ok(last.1 / max),
        }
    }
}

/// The mean over repetitions of each cell.
fn averaged<'a>(
    records: impl Iterator<Item = &'a CellRecord>,
    role: &str,
    metric: &str,
) -> Vec<(Parameters, f64)> {
    let mut cells: Vec<(&Parameters, f64, f64)> = Vec::new();
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
