//! Pairs a run with the published studies: experiments with published values, findings, and discrepancies
//! within the papers.

mod printed;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use lab_experiments::{
    CellRecord, CheckOutcome, ExperimentCatalog, ExperimentDefinition, Finding, FindingCheck, FindingOutcome,
    Precision, RunDirectory, reference,
};

use crate::cells::{ExperimentCell, group_into_cells};

pub use printed::{Agreement, PrintedNumber, printed_numbers};

/// One experiment of a run with the published values.
pub struct ExperimentData<'a> {
    /// The definition from the plan, the catalog, or inferred from the cells.
    pub definition: ExperimentDefinition,
    /// How the run deviates from the published method, one phrase each.
    pub scaled: &'a [String],
    /// The measured cells; those of the source experiments for a derived experiment.
    pub cells: Vec<&'a ExperimentCell<'a>>,
    /// The published values as records.
    pub published: Vec<CellRecord>,
}

/// A discrepancy between a paper's text, arithmetic and published files.
pub struct Discrepancy {
    /// The study's identifier, for example `icpe24`.
    pub study: String,
    /// The figure or table of the paper.
    pub location: String,
    /// A description in one or more sentences.
    pub text: String,
}

/// Groups a run's cells by experiment, in the order of the catalog; experiments that are not in the catalog
/// come last. Includes experiments that can be derived from the measured ones and experiments without a plan.
pub fn group_by_experiment<'a>(
    run: &'a RunDirectory,
    cells: &'a [ExperimentCell<'a>],
) -> Vec<ExperimentData<'a>> {
    let catalog = ExperimentCatalog::built_in();
    let mut by_experiment: BTreeMap<&str, Vec<&ExperimentCell<'_>>> = BTreeMap::new();
    for cell in cells {
        by_experiment.entry(cell.experiment).or_default().push(cell);
    }
    let mut definitions: Vec<(ExperimentDefinition, &[String])> = Vec::new();
    for planned in &run.plan.experiments {
        let definition = ExperimentDefinition::parse(&planned.definition)
            .ok()
            .or_else(|| catalog.get(&planned.id).cloned());
        // A newer program's plan may hold a definition that does not parse; its cells are drawn regardless.
        let definition = definition
            .unwrap_or_else(|| inferred_definition(&planned.id, by_experiment.get(planned.id.as_str())));
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
            definitions.push((known.unwrap_or_else(|| inferred_definition(experiment, Some(cells))), &[]));
        }
    }
    // The catalog has the order of the papers; the plan may be shuffled.
    let position = |definition: &ExperimentDefinition| {
        catalog.definitions().iter().position(|known| known.id == definition.id)
    };
    definitions.sort_by_key(|(definition, _)| position(definition).unwrap_or(usize::MAX));
    let cells_of = |definition: &ExperimentDefinition| {
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
        .map(|(definition, scaled)| ExperimentData {
            cells: cells_of(&definition),
            published: published(&catalog, &definition),
            definition,
            scaled,
        })
        .collect()
}

/// The published values of an experiment and of its source experiments.
fn published(catalog: &ExperimentCatalog, definition: &ExperimentDefinition) -> Vec<CellRecord> {
    let mut records = reference::published(definition);
    for source in &definition.derived_from {
        records.extend(catalog.get(source).map(reference::published).unwrap_or_default());
    }
    if definition.shape == "cdf" {
        add_percentiles(definition, &mut records);
    }
    records
}

/// Adds percentiles for CDFs: the artifact of ICPE'24 has 17 for each cell, its summary only five.
fn add_percentiles(definition: &ExperimentDefinition, records: &mut [CellRecord]) {
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
            let x = record.parameters.get(&definition.x).and_then(lab_experiments::ParameterValue::as_f64);
            let scheduler =
                record.parameters.get("scheduler").and_then(lab_experiments::ParameterValue::as_str);
            if x == Some(at) && scheduler == Some(text("scheduler")) {
                record.role_mut("fg").set(name.as_str(), value);
            }
        }
    }
}

/// Infers a definition from cells of an unknown experiment: the x axis is the numeric parameter with the most
/// values; parameters with text values that vary define the series.
fn inferred_definition(id: &str, cells: Option<&Vec<&ExperimentCell<'_>>>) -> ExperimentDefinition {
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
    ExperimentDefinition {
        id: id.to_string(),
        title: id.to_string(),
        x,
        y: "iops".into(),
        role: "fg".into(),
        shape: "curve".into(),
        series,
        ..ExperimentDefinition::default()
    }
}

/// Evaluates checks and findings against a run. Holds the measured records by experiment without their
/// histograms, which are most of a record and are not used by checks.
pub struct FindingEvaluator(BTreeMap<String, Vec<CellRecord>>);

impl FindingEvaluator {
    /// Copies the measured records of a run.
    pub fn new(run: &RunDirectory) -> FindingEvaluator {
        let mut records: BTreeMap<String, Vec<CellRecord>> = BTreeMap::new();
        for record in run.records.iter().filter(|record| record.is_measured()) {
            let mut slim = CellRecord::new(record.experiment.as_str(), record.series.as_str());
            slim.parameters = record.parameters.clone();
            slim.repetition = record.repetition;
            slim.stand_in = record.stand_in().map(str::to_string);
            for (name, role) in &record.roles {
                slim.role_mut(name).metrics = role.metrics.clone();
            }
            records.entry(record.experiment.clone()).or_default().push(slim);
        }
        FindingEvaluator(records)
    }

    /// The records that `checks` refer to. A check without an experiment refers to `default_experiment`.
    fn records(&self, checks: &[FindingCheck], default_experiment: &str) -> Vec<CellRecord> {
        let picks = checks.iter().flat_map(|check| std::iter::once(&check.of).chain(&check.against));
        let names: BTreeSet<&str> = picks
            .map(
                |pick| if pick.experiment.is_empty() { default_experiment } else { pick.experiment.as_str() },
            )
            .collect();
        names.iter().filter_map(|name| self.0.get(*name)).flatten().cloned().collect()
    }

    /// Evaluates the checks of an experiment.
    pub fn checks(&self, definition: &ExperimentDefinition) -> Vec<CheckOutcome> {
        let records = self.records(&definition.check, &definition.id);
        definition
            .check
            .iter()
            .map(|check| check.evaluate(&definition.id, &records, Precision::Measured))
            .collect()
    }

    /// Evaluates every finding of the studies.
    pub fn findings(&self) -> Vec<FindingOutcome> {
        let evaluate = |finding: &Finding| {
            finding.evaluate(&self.records(&finding.check, &finding.id), Precision::Measured)
        };
        ExperimentCatalog::built_in().findings().iter().map(evaluate).collect()
    }
}

/// The known discrepancies of `studies`, from the reference data.
pub fn discrepancies(studies: &BTreeSet<String>) -> Vec<Discrepancy> {
    let mut all = Vec::new();
    for (study, text) in reference::FACTS {
        if !studies.contains(study) {
            continue;
        }
        // The reference data is built in, and tests parse all of it.
        let facts: toml::Table = toml::from_str(text).unwrap_or_default();
        let entries = facts.get("discrepancy").and_then(toml::Value::as_array);
        for entry in entries.into_iter().flatten() {
            let word =
                |name: &str| entry.get(name).and_then(toml::Value::as_str).unwrap_or_default().to_string();
            all.push(Discrepancy { study: study.to_string(), location: word("exp"), text: word("text") });
        }
    }
    all
}

/// Groups published records into cells, which are drawn like measured ones.
pub fn published_cells(section: &[CellRecord]) -> Vec<ExperimentCell<'_>> {
    group_into_cells(section)
}
