//! Values of cells with their uncertainty, and the interval of a number that is computed from several of them.
//!
//! The mean of a cell's repetitions is one draw from a distribution whose scatter the repetitions show, pooled over the
//! cells of the experiment ([`pooled_scatter`]). The interval of a number is the range of 95 % of the numbers that
//! result from other draws. This covers every aggregation, maxima and knees included, and cells that a number uses
//! twice.

use std::collections::HashMap;

use random::WyRand;

use crate::record::{CellParameters, CellRecord};
use crate::scatter::{Scatter, pooled_scatter};

/// What the values of records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Published values: taken as they are.
    Exact,
    /// Measurements, which scatter. Without repetitions, nothing is known about how much.
    Measured,
}

/// Draws of an interval: enough for two digits of a tail of 0.5 %.
const DRAWS: usize = 2_000;
/// Fixed, so that the same run always yields the same interval.
const SEED: u64 = 0x5269_6e67;
/// Draws are multiplied up to this exponent, so that no scatter overflows.
const EXPONENT_MAX: f64 = 50.0;

/// A cell of an experiment with one metric.
pub(super) struct EstimatedCell<'a> {
    /// Index of its value.
    pub(super) index: usize,
    pub(super) series: &'a str,
    pub(super) parameters: &'a CellParameters,
    /// Why the cell measured something else than its name says.
    pub(super) stand_in: Option<&'a str>,
}

/// The mean of a cell's repetitions.
#[derive(Clone, Copy)]
struct Estimate {
    mean: f64,
    /// Standard error of the mean, relative if `relative`; 0 for an exact value.
    error: f64,
    relative: bool,
    /// 0 if nothing is known about the error.
    degrees_of_freedom: f64,
}

/// The estimates that a check has asked for so far.
pub(super) struct Estimates<'a> {
    records: &'a [CellRecord],
    precision: Precision,
    estimates: Vec<Estimate>,
    /// The cells by experiment, role and metric.
    known: HashMap<(String, String, String), std::rc::Rc<Vec<EstimatedCell<'a>>>>,
}

impl<'a> Estimates<'a> {
    pub(super) fn new(records: &'a [CellRecord], precision: Precision) -> Estimates<'a> {
        Estimates { records, precision, estimates: Vec::new(), known: HashMap::new() }
    }

    /// All cells of an experiment that have the metric.
    pub(super) fn cells(
        &mut self,
        experiment: &str,
        role: &str,
        metric: &str,
    ) -> std::rc::Rc<Vec<EstimatedCell<'a>>> {
        let key = (experiment.to_string(), role.to_string(), metric.to_string());
        if let Some(cells) = self.known.get(&key) {
            return cells.clone();
        }
        let mut places: HashMap<String, usize> = HashMap::new();
        let (mut cells, mut values): (Vec<EstimatedCell<'a>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
        for record in self.records.iter().filter(|record| record.experiment == experiment) {
            let Some(value) = record.metric(role, metric).filter(|_| record.is_measured()) else { continue };
            let place = *places.entry(record.cell_key()).or_insert(cells.len());
            if place == cells.len() {
                cells.push(EstimatedCell {
                    index: self.estimates.len() + place,
                    series: &record.series,
                    parameters: &record.parameters,
                    stand_in: None,
                });
                values.push(Vec::new());
            }
            values[place].push(value);
            cells[place].stand_in = cells[place].stand_in.or(record.stand_in());
        }
        self.estimates.extend(estimates(&values, self.precision));
        let cells = std::rc::Rc::new(cells);
        self.known.insert(key, cells.clone());
        cells
    }

    pub(super) fn means(&self) -> Vec<f64> {
        self.estimates.iter().map(|estimate| estimate.mean).collect()
    }

    /// The interval of a number that `compute` derives from these cells, whose value is `value`. It is one of `count`
    /// that shall cover their numbers together. `None` if the scatter of a cell is not known.
    pub(super) fn interval(
        &self,
        cells: &[usize],
        count: usize,
        value: f64,
        compute: impl Fn(&[f64]) -> Option<f64>,
    ) -> Option<(f64, f64)> {
        if self.precision == Precision::Exact {
            return Some((value, value));
        }
        if cells.iter().any(|cell| self.estimates[*cell].degrees_of_freedom <= 0.0) {
            return None;
        }
        let mut cells = cells.to_vec();
        cells.sort_unstable();
        cells.dedup();
        let mut random = WyRand::new(SEED);
        let mut values = self.means();
        let mut draws: Vec<f64> = Vec::with_capacity(DRAWS);
        for _ in 0..DRAWS {
            for cell in &cells {
                values[*cell] = self.estimates[*cell].draw(&mut random);
            }
            draws.extend(compute(&values).filter(|number| !number.is_nan()));
        }
        draws.sort_by(f64::total_cmp);
        let tail = 0.05 / 2.0 / count.max(1) as f64;
        let last = draws.len().checked_sub(1)?;
        let low = draws[(last as f64 * tail).floor() as usize];
        let high = draws[(last as f64 * (1.0 - tail)).ceil() as usize];
        // A maximum of draws is biased upwards, so the number itself may be outside.
        Some((low.min(value), high.max(value)))
    }
}

impl Estimate {
    fn draw(&self, random: &mut WyRand) -> f64 {
        let deviation = self.error * students_t(random, self.degrees_of_freedom);
        if self.relative {
            self.mean * deviation.clamp(-EXPONENT_MAX, EXPONENT_MAX).exp()
        } else {
            self.mean + deviation
        }
    }
}

/// The estimates of cells from their repetitions.
fn estimates(values: &[Vec<f64>], precision: Precision) -> Vec<Estimate> {
    // Disturbances multiply; only a metric that can be 0, such as a share, is treated as a sum.
    let relative = values.iter().flatten().all(|value| *value > 0.0);
    let own: Vec<Scatter> = values.iter().map(|values| scatter_of(values, relative)).collect();
    let estimate = |(values, scatter): (&Vec<f64>, Scatter)| {
        let count = values.len() as f64;
        Estimate {
            mean: values.iter().sum::<f64>() / count,
            error: if precision == Precision::Exact { 0.0 } else { (scatter.variance / count).sqrt() },
            relative,
            degrees_of_freedom: scatter.degrees_of_freedom,
        }
    };
    values.iter().zip(pooled_scatter(&own)).map(estimate).collect()
}

fn scatter_of(values: &[f64], relative: bool) -> Scatter {
    let scaled: Vec<f64> = values.iter().map(|value| if relative { value.ln() } else { *value }).collect();
    let count = scaled.len() as f64;
    let mean = scaled.iter().sum::<f64>() / count;
    let squares: f64 = scaled.iter().map(|value| (value - mean).powi(2)).sum();
    Scatter { variance: squares / (count - 1.0).max(1.0), degrees_of_freedom: count - 1.0 }
}

/// A number from Student's t distribution.
fn students_t(random: &mut WyRand, degrees_of_freedom: f64) -> f64 {
    /// Above it, the approximation of Wilson and Hilferty is good to three digits.
    const EXACT_MAX: f64 = 8.0;
    let squares = if degrees_of_freedom < EXACT_MAX {
        let whole = degrees_of_freedom.floor().max(1.0) as u32;
        let pairs: f64 = (0..whole / 2).map(|_| 2.0 * random.exponential()).sum();
        let odd = if whole % 2 == 1 { random.normal().powi(2) } else { 0.0 };
        (pairs + odd) / f64::from(whole)
    } else {
        let spread = 2.0 / (9.0 * degrees_of_freedom);
        (1.0 - spread + random.normal() * spread.sqrt()).max(0.01).powi(3)
    };
    random.normal() / squares.sqrt().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tails_of_students_t_are_those_of_the_tables() {
        for (degrees_of_freedom, table) in
            [(1.0, 12.706), (2.0, 4.303), (4.0, 2.776), (10.0, 2.228), (60.0, 2.0)]
        {
            let mut random = WyRand::new(7);
            let outside = (0..40_000).filter(|_| students_t(&mut random, degrees_of_freedom).abs() > table);
            let share = outside.count() as f64 / 40_000.0;
            assert!((0.045..0.055).contains(&share), "{degrees_of_freedom}: {share} is not 5 %");
        }
    }

    /// Records of `cells` cells whose values scatter by 3 %; the true values are 1, 2, 3, ….
    fn records(cells: i64, repetitions: u32, seed: u64) -> Vec<CellRecord> {
        let mut random = WyRand::new(seed);
        let mut records = Vec::new();
        for cell in 1..=cells {
            for repetition in 0..repetitions {
                let mut record = CellRecord::new("t.fig", "a");
                record.parameters.insert("iodepth".into(), cell.into());
                record.repetition = repetition;
                record.role_mut("fg").set("iops", cell as f64 * (0.03 * random.normal()).exp());
                records.push(record);
            }
        }
        records
    }

    #[test]
    fn intervals_cover_the_true_number_in_95_of_100_runs() {
        for (cells, repetitions) in [(2, 3), (8, 2), (8, 5)] {
            let (mut covered, mut width) = (0, 0.0);
            for seed in 0..300 {
                let records = records(cells, repetitions, seed);
                let mut estimates = Estimates::new(&records, Precision::Measured);
                let _ = estimates.cells("t.fig", "fg", "iops");
                let ratio = |values: &[f64]| Some(values[1] / values[0]);
                let value = ratio(&estimates.means()).unwrap();
                let (low, high) = estimates.interval(&[0, 1], 1, value, ratio).unwrap();
                covered += usize::from(low <= 2.0 && 2.0 <= high);
                width += (high / low).ln() / 300.0;
            }
            assert!(covered >= 278, "{cells} cells, {repetitions} repetitions: {covered} of 300");
            if cells == 8 {
                assert!(width < 0.35, "{width}: pooling keeps intervals narrow");
            }
        }
    }

    #[test]
    fn a_cell_in_both_sides_of_a_ratio_cancels() {
        let records = records(4, 3, 1);
        let mut estimates = Estimates::new(&records, Precision::Measured);
        let _ = estimates.cells("t.fig", "fg", "iops");
        let same = estimates.interval(&[2, 2], 1, 1.0, |values| Some(values[2] / values[2]));
        assert_eq!(same, Some((1.0, 1.0)));
    }

    #[test]
    fn without_repetitions_there_is_no_interval() {
        let records = records(6, 1, 1);
        let mut estimates = Estimates::new(&records, Precision::Measured);
        let _ = estimates.cells("t.fig", "fg", "iops");
        assert_eq!(estimates.interval(&[0], 1, 1.0, |values| Some(values[0])), None);
        let mut exact = Estimates::new(&records, Precision::Exact);
        let _ = exact.cells("t.fig", "fg", "iops");
        assert_eq!(exact.interval(&[0], 1, 1.5, |values| Some(values[0])), Some((1.5, 1.5)));
    }
}
