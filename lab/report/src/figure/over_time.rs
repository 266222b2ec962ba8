//! A cell's throughput and latency over the time of its measurement.

use std::collections::BTreeMap;

use lab_experiments::TimelineSlice;

use crate::cells::ExperimentCell;
use crate::chart::{HeatCell, OverTime};
use crate::metric::{axis_unit, display_name};

/// Most repetitions with a line each; the heat map and the percentiles have all.
const LINES_MAX: usize = 5;
/// Lines of percentiles.
const PERCENTILES: [(&str, f64); 3] = [("P50", 50.0), ("P99", 99.0), ("P99.9", 99.9)];
/// Highest latency of a bucket, divided by the highest of the bucket below; at least.
const BUCKET_RATIO: f64 = 1.14;

/// The I/Os of one interval in all repetitions.
#[derive(Default)]
struct Interval {
    from_ms: f64,
    to_ms: f64,
    clat: BTreeMap<u64, u64>,
}

/// The chart of a role of a cell; an empty string if no repetition has a timeline.
pub fn over_time(cell: &ExperimentCell<'_>, role: &str) -> String {
    let timelines: Vec<(u32, &[TimelineSlice])> = cell
        .measured()
        .filter_map(|record| Some((record.repetition, record.roles.get(role)?.timeline.as_slice())))
        .filter(|(_, timeline)| !timeline.is_empty())
        .collect();
    let rates: Vec<(u32, Vec<(f64, f64)>)> = timelines
        .iter()
        .take(LINES_MAX)
        .map(|(repetition, timeline)| (*repetition, rates(timeline)))
        .collect();
    let intervals = intervals(timelines.iter().map(|(_, timeline)| *timeline));
    let end_ms = intervals.last().map_or(0.0, |interval| interval.to_ms);
    let (time_divisor, time_unit) = if end_ms < 2000.0 { (1.0, "ms") } else { (1e3, "s") };
    let rate_unit = axis_unit("iops", rates.iter().flat_map(|(_, line)| line).map(|point| point.1), false);
    let all_us = || intervals.iter().flat_map(|interval| interval.clat.keys()).map(|ns| *ns as f64 / 1e3);
    let latency_unit = axis_unit("clat_us", all_us(), true);
    let latency = |ns: u64| ns.max(1) as f64 / 1e3 / latency_unit.divisor;
    let mut cells = Vec::new();
    for interval in &intervals {
        let mut below = 0;
        for (ns, count) in &interval.clat {
            // Where the bucket below is empty, its upper end is estimated.
            let low = latency(below).max(latency(*ns) / 1.25).min(latency(*ns) / BUCKET_RATIO);
            let time = (interval.from_ms / time_divisor, interval.to_ms / time_divisor);
            cells.push(HeatCell { time, latency: (low, latency(*ns)), count: *count });
            below = *ns;
        }
    }
    let percentile = |percent: f64| -> Vec<(f64, f64)> {
        let point = |interval: &Interval| {
            let ns = percentile(&interval.clat, percent)?;
            Some(((interval.from_ms + interval.to_ms) / 2.0 / time_divisor, latency(ns)))
        };
        intervals.iter().filter_map(point).collect()
    };
    let line = |(repetition, points): (u32, Vec<(f64, f64)>)| {
        let name =
            if timelines.len() > 1 { format!("repetition {}", repetition + 1) } else { display_name("iops") };
        let scaled = points.iter().map(|(ms, iops)| (ms / time_divisor, iops / rate_unit.divisor));
        (name, scaled.collect())
    };
    OverTime {
        title: format!("{}, {} over time", cell.experiment, cell.parameter_label()),
        x_label: format!("time, {time_unit}"),
        rate_label: format!("throughput, {}", rate_unit.unit),
        latency_label: format!("completion latency, {}", latency_unit.unit),
        rates: rates.into_iter().map(line).collect(),
        percentiles: PERCENTILES
            .into_iter()
            .map(|(name, percent)| (name.to_string(), percentile(percent)))
            .collect(),
        cells,
    }
    .svg()
}

/// Throughput in the middle of each interval.
fn rates(timeline: &[TimelineSlice]) -> Vec<(f64, f64)> {
    let mut before = 0.0;
    let mut points = Vec::with_capacity(timeline.len());
    for slice in timeline {
        let length_ms = slice.at_ms - before;
        if length_ms > 0.0 {
            points.push(((before + slice.at_ms) / 2.0, slice.ios as f64 / length_ms * 1e3));
        }
        before = slice.at_ms;
    }
    points
}

/// The timelines of all repetitions added up, by the intervals of the first.
fn intervals<'a>(timelines: impl Iterator<Item = &'a [TimelineSlice]>) -> Vec<Interval> {
    let mut intervals: Vec<Interval> = Vec::new();
    for timeline in timelines {
        if intervals.is_empty() {
            let mut from_ms = 0.0;
            for slice in timeline {
                intervals.push(Interval { from_ms, to_ms: slice.at_ms, clat: BTreeMap::new() });
                from_ms = slice.at_ms;
            }
        }
        let mut from_ms = 0.0;
        for slice in timeline {
            let middle = (from_ms + slice.at_ms) / 2.0;
            from_ms = slice.at_ms;
            let Some(interval) = intervals.iter_mut().find(|interval| middle < interval.to_ms) else { break };
            for (ns, count) in &slice.clat {
                *interval.clat.entry(*ns).or_default() += count;
            }
        }
    }
    intervals
}

fn percentile(clat: &BTreeMap<u64, u64>, percent: f64) -> Option<u64> {
    let all: u64 = clat.values().sum();
    let rank = (all as f64 * percent / 100.0).ceil() as u64;
    let mut seen = 0;
    for (ns, count) in clat {
        seen += count;
        if seen >= rank.max(1) {
            return Some(*ns);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use lab_experiments::CellRecord;

    fn slice(at_ms: f64, ios: u64) -> TimelineSlice {
        TimelineSlice { at_ms, ios, clat: vec![(1000, ios - 1), (1_000_000, 1)] }
    }

    #[test]
    fn repetitions_have_lines_of_their_own_and_one_heat_map() {
        let record = |repetition| {
            let mut record = CellRecord::new("t.fig", "iou");
            record.repetition = repetition;
            record.role_mut("fg").set("iops", 1.0);
            record.role_mut("fg").timeline = vec![slice(100.0, 50), slice(200.0, 100), slice(350.0, 150)];
            record
        };
        let records = [record(0), record(1)];
        let cells = crate::group_into_cells(&records);
        let svg = over_time(&cells[0], "fg");
        let groups: Vec<&str> = svg.split("<g class=\"").skip(1).collect();
        let data = |name: &str| {
            let named = |group: &&&str| group.contains(&format!("data-s=\"{name}\" data-v="));
            let group = groups.iter().find(named).unwrap_or_else(|| panic!("{name}: {svg}"));
            group.split("data-v=\"").nth(1).unwrap().split('"').next().unwrap().to_string()
        };
        // IOPS in the middles of the intervals.
        assert_eq!(data("repetition 2"), "50&#9;500&#10;150&#9;1000&#10;275&#9;1000");
        assert_eq!(data("P50"), "50&#9;1&#10;150&#9;1&#10;275&#9;1");
        assert_eq!(data("P99.9"), "50&#9;1000&#10;150&#9;1000&#10;275&#9;1000");
        assert!(data("I/Os up to this latency").starts_with("100&#9;1&#9;98&#10;100&#9;1000&#9;2&#10;"));
        assert!(svg.contains("time, ms") && svg.contains("completion latency, µs"));
        assert!(over_time(&cells[0], "bg").is_empty());
    }
}
