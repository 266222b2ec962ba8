//! Selects cells and aggregates their values to one number.

use super::estimate::Estimates;
use super::{Aggregation, MetricQuery, describe};
use crate::definition::matches;
use crate::record::{CellParameters, CellRecord, ParameterValue};

/// The cells of a query; their values are those of [`Estimates`] at the same index.
pub(super) struct Selection<'a> {
    query: &'a MetricQuery,
    /// Index in the estimates, and value of the query's `along`.
    cells: Vec<(usize, Option<f64>)>,
}

impl MetricQuery {
    /// The records that the query selects.
    pub(super) fn select<'a>(
        &'a self,
        experiment: &'a str,
        records: &'a [CellRecord],
        group: &'a CellParameters,
    ) -> impl Iterator<Item = &'a CellRecord> {
        let experiment = self.experiment_or(experiment);
        records.iter().filter(move |record| {
            record.experiment == experiment
                && record.is_measured()
                && matches(&record.parameters, &self.filter)
                && matches(&record.parameters, group)
                && record.metric(&self.role, &self.metric).is_some()
        })
    }

    /// The experiment of the query.
    pub(super) fn experiment_or<'a>(&'a self, default: &'a str) -> &'a str {
        if self.experiment.is_empty() { default } else { &self.experiment }
    }

    /// The cells of a group, or why the query cannot be answered: nothing was measured, or a stand-in was.
    pub(super) fn select_cells(
        &self,
        experiment: &str,
        group: &CellParameters,
        estimates: &mut Estimates<'_>,
    ) -> Result<Selection<'_>, String> {
        let experiment = self.experiment_or(experiment);
        let known = estimates.cells(experiment, &self.role, &self.metric);
        let wanted = |cell: &&super::estimate::EstimatedCell<'_>| {
            matches(cell.parameters, &self.filter) && matches(cell.parameters, group)
        };
        let mut cells = Vec::new();
        for cell in known.iter().filter(wanted) {
            if let Some(reason) = cell.stand_in {
                return Err(format!("{}: {reason}", cell.series));
            }
            let along = cell.parameters.get(&self.along).and_then(ParameterValue::as_f64);
            cells.push((cell.index, along));
        }
        if cells.is_empty() {
            let mut filter = self.filter.clone();
            filter.extend(group.clone());
            return Err(format!("{experiment}: {} was not measured for {}", self.metric, describe(&filter)));
        }
        Ok(Selection { query: self, cells })
    }
}

impl Selection<'_> {
    /// The indices of the cells.
    pub(super) fn cells(&self) -> impl Iterator<Item = usize> {
        self.cells.iter().map(|(index, _)| *index)
    }

    /// The aggregated value, or why it cannot be computed.
    pub(super) fn value(&self, values: &[f64]) -> Result<f64, String> {
        let own = || self.cells().map(|index| values[index]);
        let (min, max) = (own().fold(f64::INFINITY, f64::min), own().fold(f64::NEG_INFINITY, f64::max));
        match self.query.take {
            Aggregation::Mean => Ok(own().sum::<f64>() / self.cells.len() as f64),
            Aggregation::Max => Ok(max),
            Aggregation::Min => Ok(min),
            Aggregation::Spread if min != 0.0 => Ok(max / min),
            Aggregation::Spread => Err("the smallest is 0".to_string()),
            Aggregation::Last
            | Aggregation::First
            | Aggregation::Knee
            | Aggregation::Growth
            | Aggregation::LastToMax => self.ordered_value(values, max),
        }
    }

    fn ordered_value(&self, values: &[f64], max: f64) -> Result<f64, String> {
        let along = &self.query.along;
        let point = |(index, along): &(usize, Option<f64>)| Some(((*along)?, values[*index]));
        let mut order: Vec<(f64, f64)> = self.cells.iter().filter_map(point).collect();
        order.sort_by(|left, right| left.0.total_cmp(&right.0));
        let (Some(first), Some(last)) = (order.first(), order.last()) else {
            return Err(format!("no cell has {along}"));
        };
        match self.query.take {
            Aggregation::First => Ok(first.1),
            Aggregation::Last => Ok(last.1),
            Aggregation::Growth | Aggregation::LastToMax | Aggregation::Knee if order.len() < 2 => {
                Err(format!("only one value of {along} was measured"))
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
