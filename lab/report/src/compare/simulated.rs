//! Comparisons of simulated runs, of which it is known whether they differ.

use lab_experiments::{CellRecord, ParameterValue, is_second_side};
use random::WyRand;

use super::*;
use crate::stats::geometric_mean_ratio;

/// A machine that measures with noise; all numbers are standard deviations of logarithms.
#[derive(Clone, Copy)]
struct Machine {
    cells: usize,
    repetitions: u32,
    /// Scatter of a repetition; cells have from half to twice of it.
    scatter: f64,
    /// Step of a random walk from block to block that all cells follow.
    walk: f64,
    /// Change from block to block, the same in all of them.
    drift: f64,
    /// What a run has in common with no other.
    run: f64,
    /// Share of repetitions in 1000 that an outlier slows down by half.
    outliers: u32,
}

const QUIET: Machine =
    Machine { cells: 21, repetitions: 3, scatter: 0.01, walk: 0.0, drift: 0.0, run: 0.0, outliers: 0 };

/// One machine for each way in which repetitions and runs differ.
const NOISY: [(&str, Machine); 7] = [
    ("quiet", QUIET),
    ("walking", Machine { walk: 0.03, ..QUIET }),
    ("drifting", Machine { drift: -0.02, ..QUIET }),
    ("each run its own", Machine { run: 0.01, walk: 0.01, ..QUIET }),
    ("outliers", Machine { outliers: 30, repetitions: 5, ..QUIET }),
    ("two cells", Machine { cells: 2, walk: 0.01, ..QUIET }),
    (
        "all of it",
        Machine { scatter: 0.03, walk: 0.02, drift: 0.01, run: 0.01, outliers: 10, repetitions: 5, ..QUIET },
    ),
];

/// Successive runs of a machine, whose state continues from run to run. `factor` slows down a cell of a run.
fn runs(
    machine: Machine,
    count: usize,
    seed: u64,
    factor: impl Fn(usize, usize) -> f64,
) -> Vec<RunDirectory> {
    let mut random = WyRand::new(seed);
    let mut level = 0.0;
    let mut own: Vec<f64> = Vec::new();
    own.resize_with(machine.cells, || machine.scatter * 2f64.powf(2.0 * random.fraction() - 1.0));
    let mut made = Vec::new();
    for number in 0..count {
        let mut run = RunDirectory::default();
        let offset = machine.run * random.normal();
        for repetition in 0..machine.repetitions {
            level += machine.drift + machine.walk * random.normal();
            for (cell, scatter) in own.iter().enumerate() {
                let mut record = CellRecord::new("t.fig", "none");
                record.parameters.insert("iodepth".into(), ParameterValue::from(cell as i64));
                record.repetition = repetition;
                let outlier = if random.happens(machine.outliers) { 0.7 } else { 0.0 };
                let slow = level + offset + outlier + factor(number, cell).ln();
                let mut value = |noise: f64| (slow + noise * scatter * random.normal()).exp();
                let (work, tail, far_tail, cpu) = (value(1.0), value(2.0), value(4.0), value(0.5));
                let fg = record.role_mut("fg");
                fg.set("iops", 1e5 * (cell + 1) as f64 / work);
                fg.set("clat_p99_us", 100.0 * tail);
                fg.set("clat_p999_us", 300.0 * far_tail);
                fg.set("cpu_ns_per_io", 2000.0 * cpu);
                run.records.push(record);
            }
        }
        made.push(run);
    }
    made
}

fn is_change(row: &ComparisonRow) -> bool {
    matches!(row.verdict, ChangeVerdict::Faster | ChangeVerdict::Slower)
}

/// Share of the rows of 100 comparisons that are reported as changed, in percent.
fn changed_percent(compared: impl Fn(u64) -> Vec<ComparisonRow>) -> f64 {
    let (mut changed, mut all) = (0, 0);
    for seed in 0..100 {
        let rows = compared(seed);
        changed += rows.iter().filter(|row| is_change(row)).count();
        all += rows.len();
    }
    100.0 * changed as f64 / all as f64
}

#[test]
fn equal_runs_rarely_differ_however_noisy_the_machine_is() {
    for (name, machine) in NOISY {
        let found = changed_percent(|seed| {
            let pair = runs(machine, 2, seed, |_, _| 1.0);
            compare(&pair[..1], &pair[1..], CompareOptions::default()).rows
        });
        eprintln!("{name}: {found:.2} % of two runs");
        assert!(found <= 5.0, "{name}: {found:.2} % differ");
    }
}

#[test]
fn equal_sides_of_several_runs_rarely_differ() {
    for (name, machine) in NOISY {
        // Sides alternate, as nightly runs of two versions do; each run has much of its own.
        let machine = Machine { run: 0.05, ..machine };
        let found = changed_percent(|seed| {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            for (at, run) in runs(machine, 8, seed, |_, _| 1.0).into_iter().enumerate() {
                if is_second_side(at as u32) { b.push(run) } else { a.push(run) }
            }
            compare(&a, &b, CompareOptions::default()).rows
        });
        eprintln!("{name}: {found:.2} % of eight runs");
        assert!(found <= 5.0, "{name}: {found:.2} % differ");
    }
}

#[test]
fn the_halves_of_an_interleaved_run_rarely_differ() {
    for (name, machine) in NOISY {
        let machine = Machine { repetitions: 8, ..machine };
        let (mut significant, mut between, mut compared) = (0, 0, 0);
        for seed in 0..100 {
            let check = self_check(&runs(machine, 1, seed, |_, _| 1.0)[0]);
            significant += check.significant;
            between += check.significant_between_runs;
            compared += check.compared;
        }
        assert_eq!(compared, 100 * 4 * machine.cells);
        eprintln!("{name}: {significant} and {between} of {compared}");
        assert!(
            significant * 20 <= compared && between * 20 <= compared,
            "{name}: {significant} of {compared}"
        );
    }
}

#[test]
fn the_simulated_machines_deceive_a_plain_test() {
    // The test that `compare` used before: repetitions as independent samples, no correction.
    let drifting = NOISY[2].1;
    let (mut wrong, mut all) = (0, 0);
    for seed in 0..50 {
        let pair = runs(drifting, 2, seed, |_, _| 1.0);
        for cell in 0..drifting.cells {
            let values = |run: &RunDirectory| -> Vec<f64> {
                let records = run.records.iter().skip(cell).step_by(drifting.cells);
                records.filter_map(|record| record.metric("fg", "iops")).collect()
            };
            let (_, interval) = geometric_mean_ratio(&values(&pair[0]), &values(&pair[1]), 0.95).unwrap();
            wrong += usize::from(!interval.unwrap().contains(1.0));
            all += 1;
        }
    }
    assert!(wrong * 4 > all, "only {wrong} of {all}: the simulation is too kind");
}

#[test]
fn real_changes_are_found_where_they_are() {
    for (name, machine, slower, share) in [
        ("quiet", QUIET, 1.1, 0.9),
        ("walking", Machine { walk: 0.01, repetitions: 5, ..QUIET }, 1.15, 0.8),
        ("all of it", Machine { repetitions: 8, scatter: 0.02, walk: 0.01, ..NOISY[6].1 }, 1.3, 0.7),
    ] {
        let (mut found, mut all, mut wrong) = (0.0, 0.0, 0.0);
        for seed in 0..60 {
            let changed = |run: usize, cell: usize| if run == 1 && cell < 7 { slower } else { 1.0 };
            let pair = runs(machine, 2, seed, changed);
            for row in compare(&pair[..1], &pair[1..], CompareOptions::default()).rows {
                let cell: usize = row.cell.trim_start_matches("iodepth ").parse().unwrap();
                // The far tail scatters four times as much.
                if cell < 7 && row.metric != "clat_p999_us" {
                    all += 1.0;
                    found += f64::from(row.verdict == ChangeVerdict::Slower);
                }
                wrong += f64::from(cell >= 7 && is_change(&row));
            }
        }
        let unchanged = 60.0 * 14.0 * 4.0;
        eprintln!("{name}: {:.2} found, {:.3} wrong", found / all, wrong / unchanged);
        assert!(found / all >= share, "{name}: only {:.2} found", found / all);
        assert!(wrong / unchanged <= 0.05, "{name}: {:.3} wrong", wrong / unchanged);
    }
}

#[test]
fn a_regression_fails_the_gate_and_noise_does_not() {
    let machine = Machine { repetitions: 5, walk: 0.01, ..QUIET };
    let verdict = |machine, slower: f64, seed| {
        let pair = runs(machine, 2, seed, |run, _| if run == 1 { slower } else { 1.0 });
        let rules = CompareOptions { difference_percent: 10.0, ..CompareOptions::default() };
        let comparison = compare(&pair[..1], &pair[1..], rules);
        match comparison.regression(10.0) {
            RegressionVerdict::None => 0,
            RegressionVerdict::Worse(rows) => {
                assert!(rows.iter().all(|row| row.worse_percent().unwrap() > 10.0));
                1
            }
            RegressionVerdict::Undecided(_) => 2,
        }
    };
    let count =
        |machine, slower, wanted| (0..60).filter(|seed| verdict(machine, slower, *seed) == wanted).count();
    assert!(count(machine, 1.0, 1) <= 3, "equal runs fail");
    assert!(count(machine, 1.3, 1) >= 54, "a regression of 30 % passes");
    let loud = Machine { scatter: 0.2, walk: 0.1, ..machine };
    assert!(count(loud, 1.0, 2) >= 54, "noise is not reported as such");
    assert!(count(loud, 1.0, 1) <= 3);
}

#[test]
fn intervals_of_the_overall_ratio_cover_what_they_should() {
    for (name, machine) in NOISY {
        let mut covered = 0;
        for seed in 0..200 {
            let pair = runs(machine, 2, seed, |run, _| if run == 1 { 1.1 } else { 1.0 });
            let overall = compare(&pair[..1], &pair[1..], CompareOptions::default()).overall;
            let interval = overall[0].interval.unwrap();
            covered += usize::from(interval.contains(1.0 / 1.1));
        }
        assert!(covered >= 180, "{name}: {covered} of 200 intervals contain the true ratio");
    }
}
