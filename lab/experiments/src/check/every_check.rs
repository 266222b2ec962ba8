//! Every check of the experiments and findings, against hand-made runs that it must hold for, that it must not hold for,
//! and that leave it undecided.

use super::*;
use crate::catalog::ExperimentCatalog;
use crate::definition::{Scale, matches};
use crate::record::ParameterValue;

/// The value of the cells that `against` selects.
const BASE: f64 = 1000.0;

/// The cells of an experiment that a query selects, ordered by its `along`.
fn selected(catalog: &ExperimentCatalog, default: &str, query: &MetricQuery) -> Vec<CellRecord> {
    let id = if query.experiment.is_empty() { default } else { &query.experiment };
    let definition = catalog.get(id).unwrap();
    let mut cells: Vec<CellParameters> = definition.cells(Scale::Paper).unwrap();
    cells.retain(|cell| matches(cell, &query.filter));
    let along =
        |cell: &CellParameters| cell.get(&query.along).and_then(ParameterValue::as_f64).unwrap_or(0.0);
    cells.sort_by(|left, right| along(left).total_cmp(&along(right)));
    let record = |parameters: CellParameters| {
        let mut record = CellRecord::new(id, definition.series_of(&parameters));
        record.parameters = parameters;
        record
    };
    cells.into_iter().map(record).collect()
}

/// The value of the cell at `rank` of `count`, as a share of the base. `factor` moves the aggregated number.
fn shape(take: Aggregation, factor: f64, rank: usize, count: usize) -> f64 {
    let place = rank as f64 / (count - 1).max(1) as f64;
    match take {
        Aggregation::Growth => factor.powf(place),
        Aggregation::Spread => {
            if rank.is_multiple_of(2) {
                1.0
            } else {
                factor
            }
        }
        // Rises, and falls to `factor` of the peak at the end.
        Aggregation::LastToMax => {
            if rank + 1 == count {
                factor.min(1.0)
            } else {
                0.2 + 0.8 * place
            }
        }
        // Rises steadily and is flat from a place on, which moves to the right as `factor` grows.
        Aggregation::Knee => {
            let knee = (factor.log10() / 4.0 + 0.5).clamp(0.0, 1.0) * (count - 1) as f64;
            ((rank as f64 + 1.0) / (knee + 1.0)).min(1.0)
        }
        _ => factor,
    }
}

/// Records of the cells that a check needs, with three repetitions that scatter by `noise`.
fn run(
    catalog: &ExperimentCatalog,
    id: &str,
    check: &FindingCheck,
    factor: f64,
    noise: f64,
) -> Vec<CellRecord> {
    let mut cells: Vec<CellRecord> = Vec::new();
    let mut set = |record: CellRecord, query: &MetricQuery, value: f64| {
        let place = cells.iter().position(|known| known.cell_key() == record.cell_key());
        let place = place.unwrap_or_else(|| {
            cells.push(record);
            cells.len() - 1
        });
        cells[place].role_mut(&query.role).set(query.metric.as_str(), value);
    };
    if let Some(against) = &check.against {
        selected(catalog, id, against).into_iter().for_each(|cell| set(cell, against, BASE));
    }
    let of = selected(catalog, id, &check.of);
    let count = of.len();
    for (rank, cell) in of.into_iter().enumerate() {
        // A number by itself, such as a share in percent, is of the order of its bound.
        let base = match (&check.against, check.of.take) {
            (None, Aggregation::Mean | Aggregation::Max | Aggregation::Min) => 30.0,
            _ => BASE,
        };
        set(cell, &check.of, base * shape(check.of.take, factor, rank, count));
    }
    let repeat = |(index, cell): (usize, CellRecord)| {
        (0..3).map(move |repetition| {
            let mut record = cell.clone();
            record.repetition = repetition as u32;
            let off = [noise, -noise, 0.0][(repetition + index) % 3];
            for value in record.roles.values_mut().flat_map(|role| role.metrics.values_mut()) {
                *value *= f64::exp(off);
            }
            record
        })
    };
    cells.into_iter().enumerate().flat_map(repeat).collect()
}

fn all_checks(catalog: &ExperimentCatalog) -> Vec<(String, FindingCheck)> {
    let of_experiments = catalog.definitions().iter();
    let of_experiments =
        of_experiments.flat_map(|one| one.check.iter().map(|check| (one.id.clone(), check.clone())));
    let of_findings = catalog.findings().iter();
    let of_findings =
        of_findings.flat_map(|one| one.check.iter().map(|check| (one.id.clone(), check.clone())));
    of_experiments.chain(of_findings).collect()
}

#[test]
fn every_check_holds_fails_and_is_undecided_where_it_must() {
    let catalog = ExperimentCatalog::built_in();
    let checks = all_checks(&catalog);
    assert!(checks.len() > 140, "{}", checks.len());
    let mut wrong = Vec::new();
    for (id, check) in &checks {
        let excess_of = |factor: f64| {
            let outcome = check.evaluate(id, &run(&catalog, id, check, factor, 0.0), Precision::Exact);
            Some((check.excess(outcome.measured?), factor))
        };
        let factors = (-60..=60).map(|step| 10f64.powf(f64::from(step) / 20.0));
        let mut excesses: Vec<(f64, f64)> = factors.filter_map(excess_of).collect();
        excesses.sort_by(|left, right| left.0.total_cmp(&right.0));
        let (Some(inside), Some(outside)) = (excesses.first().copied(), excesses.last().copied()) else {
            wrong.push(format!("{id}: {}: no number", check.says));
            continue;
        };
        let outcome = |factor: f64, noise: f64| {
            check.evaluate(id, &run(&catalog, id, check, factor, noise), Precision::Measured)
        };
        for (factor, expected) in [(inside.1, Verdict::Holds), (outside.1, Verdict::DoesNotHold)] {
            let outcome = outcome(factor, 0.001);
            if outcome.verdict != expected {
                wrong.push(format!("{id}: {}: not {expected:?} with {factor}: {outcome:?}", check.says));
            }
        }
        // Near a bound and with scatter; how much of it a number needs depends on its aggregation.
        excesses.sort_by(|left, right| left.0.abs().total_cmp(&right.0.abs()));
        excesses.dedup_by(|left, right| (left.0 - right.0).abs() < 1e-9);
        let near =
            excesses.iter().take(6).flat_map(|(_, factor)| [0.05, 0.15, 0.4].map(|noise| (*factor, noise)));
        if !near.into_iter().any(|(factor, noise)| outcome(factor, noise).verdict == Verdict::Undecided) {
            wrong.push(format!("{id}: {}: never undecided", check.says));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
