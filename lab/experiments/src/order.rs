//! The order of measurement: blocks of repetitions, each shuffled.
//!
//! If the repetitions of a cell ran back to back, a slow change of the machine (temperature, garbage collection, a
//! neighbour) would differ between cells and look like an effect of their parameters. A run therefore consists of
//! blocks: block `n` holds repetition `n` of every cell once, in an order that the plan's `order_seed` determines.

use random::WyRand;

use crate::record::RunPlan;

/// One measurement of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedMeasurement {
    /// Position in the run, from 0. It does not depend on what is already measured.
    pub position: u32,
    /// Index of the experiment in the plan.
    pub experiment: usize,
    /// Index of the cell in the experiment.
    pub cell: usize,
    /// Repetition of the cell, which is also the number of the block.
    pub repetition: u32,
}

/// All measurements of a plan in their order. Cells that cannot run come first, once each, since they take no time.
///
/// A block shuffles the cells of all experiments together, because findings compare experiments too.
pub fn measurement_order(plan: &RunPlan) -> Vec<PlannedMeasurement> {
    let cells: Vec<(usize, usize)> = (plan.experiments.iter().enumerate())
        .flat_map(|(experiment, planned)| (0..planned.cells.len()).map(move |cell| (experiment, cell)))
        .collect();
    let planned = |(experiment, cell): (usize, usize)| &plan.experiments[experiment].cells[cell];
    let (skipped, able): (Vec<_>, Vec<_>) = cells.into_iter().partition(|at| planned(*at).skipped.is_some());
    let mut order: Vec<(usize, usize, u32)> =
        skipped.into_iter().map(|(experiment, cell)| (experiment, cell, 0)).collect();
    let blocks = able.iter().map(|at| planned(*at).repetitions).max().unwrap_or(0);
    let mut random = WyRand::new(plan.order_seed);
    for block in 0..blocks {
        let mut cells: Vec<_> = able.iter().copied().filter(|at| planned(*at).repetitions > block).collect();
        shuffle(&mut cells, &mut random);
        order.extend(cells.into_iter().map(|(experiment, cell)| (experiment, cell, block)));
    }
    let measurement = |(position, (experiment, cell, repetition))| PlannedMeasurement {
        position: position as u32,
        experiment,
        cell,
        repetition,
    };
    order.into_iter().enumerate().map(measurement).collect()
}

/// Whether a block of a self-check belongs to the second of the two sides that are compared. The blocks follow the
/// pattern first, second, second, first, so that a steady drift affects both sides alike.
pub fn is_second_side(repetition: u32) -> bool {
    matches!(repetition % 4, 1 | 2)
}

/// The shuffle of Fisher and Yates: every permutation is equally likely.
fn shuffle<T>(items: &mut [T], random: &mut WyRand) {
    for last in (1..items.len()).rev() {
        items.swap(last, random.index(last + 1));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::record::{PlannedCell, PlannedExperiment};

    /// Two experiments with `cells` cells each, the first of which cannot run.
    fn plan(cells: usize, repetitions: u32, order_seed: u64) -> RunPlan {
        let cell = |number: usize| PlannedCell {
            repetitions,
            skipped: (number == 0).then(|| "no device".to_string()),
            ..PlannedCell::default()
        };
        let experiment =
            PlannedExperiment { cells: (0..cells).map(cell).collect(), ..PlannedExperiment::default() };
        RunPlan { order_seed, experiments: vec![experiment.clone(), experiment], ..RunPlan::default() }
    }

    fn cells(order: &[PlannedMeasurement]) -> Vec<(usize, usize)> {
        order.iter().map(|one| (one.experiment, one.cell)).collect()
    }

    #[test]
    fn every_block_holds_every_cell_once_in_an_order_of_its_own() {
        let order = measurement_order(&plan(21, 3, 7));
        assert_eq!(order.len(), 2 + 3 * 40);
        assert!(order.iter().enumerate().all(|(at, one)| one.position as usize == at));
        assert_eq!(cells(&order[..2]), [(0, 0), (1, 0)], "what cannot run comes first");
        let blocks: Vec<_> = order[2..].chunks(40).collect();
        for (number, block) in blocks.iter().enumerate() {
            assert!(block.iter().all(|one| one.repetition as usize == number));
            let distinct: BTreeSet<_> = cells(block).into_iter().collect();
            assert_eq!(distinct.len(), 40);
            assert!(cells(block)[..20].iter().any(|cell| cell.0 == 1), "experiments are mixed");
        }
        assert_ne!(cells(blocks[0]), cells(blocks[1]));
        assert_ne!(cells(blocks[1]), cells(blocks[2]));
    }

    #[test]
    fn the_seed_determines_the_order() {
        assert_eq!(measurement_order(&plan(9, 2, 5)), measurement_order(&plan(9, 2, 5)));
        assert_ne!(measurement_order(&plan(9, 2, 5)), measurement_order(&plan(9, 2, 6)));
    }

    #[test]
    fn every_place_of_a_block_is_equally_likely() {
        let mut firsts = [0u32; 8];
        for seed in 0..4000 {
            let mut items: Vec<usize> = (0..8).collect();
            shuffle(&mut items, &mut WyRand::new(seed));
            firsts[items[0]] += 1;
        }
        assert!(firsts.iter().all(|count| count.abs_diff(500) < 100), "{firsts:?}");
    }

    #[test]
    fn cells_with_fewer_repetitions_are_absent_from_later_blocks() {
        let mut plan = plan(4, 2, 1);
        plan.experiments[1].cells[2].repetitions = 5;
        let order = measurement_order(&plan);
        let late: Vec<_> = order.iter().filter(|one| one.repetition >= 2).collect();
        assert_eq!(late.len(), 3);
        assert!(late.iter().all(|one| (one.experiment, one.cell) == (1, 2)));
        assert_eq!(measurement_order(&RunPlan::default()), []);
    }
}
