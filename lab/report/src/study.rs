//! A run beside the studies: its experiments, their findings, and where the papers disagree with
//! themselves.

mod printed;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use experiments::{
    Catalog, CellRecord, Check, Definition, Finding, FindingOutcome, Outcome, Run, Verdict, reference,
};

use crate::cells::{Cell, cells};

pub use printed::{Agreement, Printed, printed};

/// One experiment of a run.
pub struct Section<'a> {
    /// What it is.
    pub definition: Definition,
    /// What differs from the published method here.
    pub scaled: &'a [String],
    /// Its cells, and those it is derived from.
    pub cells: Vec<&'a Cell<'a>>,
    /// What was published.
    pub published: Vec<CellRecord>,
}

/// A finding, and in how many repetitions it came out the same.
pub struct Asked {
    /// Over all repetitions.
    pub outcome: FindingOutcome,
    /// Repetitions in which it could be asked.
    pub repetitions: usize,
    /// Those of them that agree with the whole.
    pub agreeing: usize,
}

/// A sentence about a paper's disagreement with itself or with its files.
pub struct Disagreement {
    /// The study.
    pub study: String,
    /// The figure or table.
    pub place: String,
    /// What it is.
    pub text: String,
}

/// The experiments of a run in the order of its plan; after them those that can be derived from what was
/// measured, and those that no plan knows.
pub fn sections<'a>(run: &'a Run, cells: &'a [Cell<'a>]) -> Vec<Section<'a>> {
    let catalog = Catalog::built_in();
    let mut by_experiment: BTreeMap<&str, Vec<&Cell<'_>>> = BTreeMap::new();
    for cell in cells {
        by_experiment.entry(cell.experiment).or_default().push(cell);
    }
    let mut definitions: Vec<(Definition, &[String])> = Vec::new();
    for planned in &run.plan.experiments {
        let definition =
            Definition::parse(&planned.definition).ok().or_else(|| catalog.get(&planned.id).cloned());
        // A plan of a newer program may say what this one cannot read; its cells are drawn all the same.
        let definition =
            definition.unwrap_or_else(|| guessed(&planned.id, by_experiment.get(planned.id.as_str())));
        definitions.push((definition, &planned.scaled));
    }
    for definition in catalog.definitions() {
        let derived = !definition.derived_from.is_empty()
            && definition.derived_from.iter().all(|source| by_experiment.contains_key(source.as_str()));
        if derived && !definitions.iter().any(|(known, _)| known.id == definition.id) {
            definitions.push((definition.clone(), &[]));
        }
    }
    for (experiment, cells) in &by_experiment {
        if !definitions.iter().any(|(known, _)| known.id == *experiment) {
            let known = catalog.get(experiment).cloned();
            definitions.push((known.unwrap_or_else(|| guessed(experiment, Some(cells))), &[]));
        }
    }
    // As the papers count, whatever order the plan took.
    let place =
        |definition: &Definition| catalog.definitions().iter().position(|known| known.id == definition.id);
    definitions.sort_by_key(|(definition, _)| place(definition).unwrap_or(usize::MAX));
    let of = |definition: &Definition| {
        let names = if definition.derived_from.is_empty() {
            std::slice::from_ref(&definition.id)
        } else {
            &definition.derived_from
        };
        let cells = names.iter().filter_map(|name| by_experiment.get(name.as_str()));
        cells.flatten().copied().collect()
    };
    definitions
        .into_iter()
        .map(|(definition, scaled)| Section {
            cells: of(&definition),
            published: published(&catalog, &definition),
            definition,
            scaled,
        })
        .collect()
}

/// The published values of an experiment, or of those that it is derived from.
fn published(catalog: &Catalog, definition: &Definition) -> Vec<CellRecord> {
    let mut records = reference::published(definition);
    for source in &definition.derived_from {
        records.extend(catalog.get(source).map(reference::published).unwrap_or_default());
    }
    if definition.shape == "cdf" {
        add_percentiles(definition, &mut records);
    }
    records
}

/// The artifact of ICPE'24 has 17 percentiles of each cell, where its summary has five.
fn add_percentiles(definition: &Definition, records: &mut [CellRecord]) {
    let Some(rows) = reference::table(definition.study(), "cdf_percentiles") else { return };
    for row in rows {
        let text = |column: &str| row.get(column).map(String::as_str).unwrap_or_default();
        if !definition.reference.iter().any(|table| table.csv == text("experiment")) {
            continue;
        }
        let (Ok(at), Ok(value)) = (text("concurrency").parse::<f64>(), text("clat_us").parse::<f64>()) else {
            continue;
        };
        let name = format!("clat_p{}_us", text("percentile").replace('.', ""));
        for record in records.iter_mut() {
            let x = record.parameters.get(&definition.x).and_then(experiments::Value::as_f64);
            let scheduler = record.parameters.get("scheduler").and_then(experiments::Value::as_str);
            if x == Some(at) && scheduler == Some(text("scheduler")) {
                record.role_mut("fg").set(name.as_str(), value);
            }
        }
    }
}

/// A definition for cells of which nothing is known but themselves: along the axis lies the number that
/// takes most values, and names tell lines apart.
fn guessed(id: &str, cells: Option<&Vec<&Cell<'_>>>) -> Definition {
    let mut values: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut numeric: BTreeSet<&str> = BTreeSet::new();
    for cell in cells.into_iter().flatten() {
        for (name, value) in cell.parameters {
            values.entry(name).or_default().insert(value.to_string());
            if value.as_f64().is_some() {
                numeric.insert(name);
            }
        }
    }
    let along =
        values.iter().filter(|(name, _)| numeric.contains(*name)).max_by_key(|(_, values)| values.len());
    let x = along.map_or("iodepth", |(name, _)| *name).to_string();
    let named = values.iter().filter(|(name, values)| !numeric.contains(*name) && values.len() > 1);
    let mut series: Vec<String> = named.map(|(name, _)| (*name).to_string()).collect();
    if series.is_empty() {
        series.push("scheduler".to_string());
    }
    Definition {
        id: id.to_string(),
        title: id.to_string(),
        x,
        y: "iops".into(),
        role: "fg".into(),
        shape: "curve".into(),
        series,
        ..Definition::default()
    }
}

/// A run's measured records by experiment, without histograms: those are most of a record, and no check
/// looks at one.
pub struct Asking(BTreeMap<String, Vec<CellRecord>>);

impl Asking {
    /// Of a run.
    pub fn of(run: &Run) -> Asking {
        let mut records: BTreeMap<String, Vec<CellRecord>> = BTreeMap::new();
        for record in run.records.iter().filter(|record| record.is_measured()) {
            let mut slim = CellRecord::new(record.experiment.as_str(), record.series.as_str());
            slim.parameters = record.parameters.clone();
            slim.repetition = record.repetition;
            for (name, role) in &record.roles {
                slim.role_mut(name).metrics = role.metrics.clone();
            }
            records.entry(record.experiment.clone()).or_default().push(slim);
        }
        Asking(records)
    }

    /// The records that checks ask about; those that name no experiment mean `home`.
    fn records(&self, checks: &[Check], home: &str) -> Vec<CellRecord> {
        let picks = checks.iter().flat_map(|check| std::iter::once(&check.of).chain(&check.against));
        let names: BTreeSet<&str> = picks
            .map(|pick| if pick.experiment.is_empty() { home } else { pick.experiment.as_str() })
            .collect();
        names.iter().filter_map(|name| self.0.get(*name)).flatten().cloned().collect()
    }

    /// Asks the checks of an experiment.
    pub fn checks(&self, definition: &Definition) -> Vec<Outcome> {
        let records = self.records(&definition.check, &definition.id);
        definition.check.iter().map(|check| check.evaluate(&definition.id, &records)).collect()
    }

    /// Asks every finding of the studies, over all repetitions and of each alone.
    pub fn findings(&self) -> Vec<Asked> {
        Catalog::built_in().findings().iter().map(|finding| self.finding(finding)).collect()
    }

    fn finding(&self, finding: &Finding) -> Asked {
        /// More than that say nothing new about a yes or no.
        const REPETITIONS_MAX: u32 = 8;
        let records = self.records(&finding.check, &finding.id);
        let outcome = finding.evaluate(&records);
        let last = records.iter().map(|record| record.repetition).max().unwrap_or(0);
        let (mut repetitions, mut agreeing) = (0, 0);
        for repetition in 0..=last.min(REPETITIONS_MAX - 1) {
            let one: Vec<CellRecord> =
                records.iter().filter(|record| record.repetition == repetition).cloned().collect();
            let verdict = finding.evaluate(&one).verdict;
            if verdict != Verdict::NotTested {
                repetitions += 1;
                agreeing += usize::from(verdict == outcome.verdict);
            }
        }
        Asked { outcome, repetitions, agreeing }
    }
}

/// What the papers' texts, arithmetic and files disagree on, as written down with the reference data.
pub fn disagreements(studies: &BTreeSet<String>) -> Vec<Disagreement> {
    let mut all = Vec::new();
    for (study, text) in reference::FACTS {
        if !studies.contains(study) {
            continue;
        }
        // The facts come with the program, and its tests read them all.
        let facts: toml::Table = toml::from_str(text).unwrap_or_default();
        let entries = facts.get("discrepancy").and_then(toml::Value::as_array);
        for entry in entries.into_iter().flatten() {
            let word =
                |name: &str| entry.get(name).and_then(toml::Value::as_str).unwrap_or_default().to_string();
            all.push(Disagreement { study: study.to_string(), place: word("exp"), text: word("text") });
        }
    }
    all
}

/// The cells of published records, to be drawn like measured ones.
pub fn published_cells(section: &[CellRecord]) -> Vec<Cell<'_>> {
    cells(section)
}
