use lab_experiments::{CellRecord, ParameterValue};

use super::*;
use crate::cells::group_into_cells;

fn definition(text: &str) -> ExperimentDefinition {
    let shape = format!("id = 't.fig'\ntitle = 'a figure'\n{text}\n[vary]\niodepth = [1, 2]\n");
    ExperimentDefinition::parse(&shape).unwrap()
}

fn record(series: &str, depth: i64, devices: i64, values: &[(&str, f64)]) -> CellRecord {
    let mut record = CellRecord::new("t.fig", series);
    record.parameters.insert("scheduler".into(), series.into());
    record.parameters.insert("iodepth".into(), ParameterValue::from(depth));
    record.parameters.insert("devices".into(), ParameterValue::from(devices));
    for (name, value) in values {
        record.role_mut("fg").set(*name, *value);
    }
    record
}

fn figure(definition: &ExperimentDefinition, here: &[CellRecord], published: &[CellRecord]) -> Figure {
    let (here, published) = (group_into_cells(here), group_into_cells(published));
    draw(definition, &here.iter().collect::<Vec<_>>(), &published.iter().collect::<Vec<_>>(), true)
}

fn run(factor: f64) -> Vec<CellRecord> {
    let mut records = Vec::new();
    for (devices, series) in [(1, "none"), (1, "bfq"), (8, "none"), (8, "bfq")] {
        for depth in [1, 2, 4, 8] {
            let iops = factor * depth as f64 * 1000.0;
            records.push(record(
                series,
                depth,
                devices,
                &[("iops", iops), ("clat_p99_us", 100.0 * depth as f64)],
            ));
        }
    }
    records
}

#[test]
fn remaining_parameters_split_into_panels() {
    let definition = definition("x = 'iodepth'\ny = 'clat_p99_us'\nseries = ['scheduler']");
    let figure = figure(&definition, &run(1.0), &run(1.2));
    let titles: Vec<&str> = figure.panels.iter().map(|panel| panel.title.as_str()).collect();
    assert_eq!(titles, ["devices 1", "devices 8"]);
    assert!(
        figure
            .panels
            .iter()
            .all(|panel| panel.charts.len() == 1 && panel.charts[0].source == FigureSource::Both)
    );
    let svg = &figure.panels[0].charts[0].svg;
    assert!(svg.contains("data-s=\"none\"") && svg.contains("data-s=\"none · publ.\""), "{svg}");
}

#[test]
fn published_values_on_another_scale_get_their_own_chart() {
    let definition = definition("x = 'iodepth'\ny = 'iops'\nseries = ['scheduler']");
    let figure = figure(&definition, &run(1.0), &run(50.0));
    let sources: Vec<FigureSource> = figure.panels[0].charts.iter().map(|chart| chart.source).collect();
    assert_eq!(sources, [FigureSource::Measured, FigureSource::Published]);
}

#[test]
fn latency_over_throughput_is_ordered_by_depth() {
    let definition =
        definition("x = 'iodepth'\nx_metric = 'iops'\ny = 'clat_p99_us'\nseries = ['scheduler']");
    let figure = figure(&definition, &run(1.0), &[]);
    assert!(figure.panels[0].charts[0].svg.contains("throughput, KIOPS"));
    assert!(figure.panels[0].charts[0].svg.contains("queue depth 8: 800 µs at 8 KIOPS"));
}

#[test]
fn a_heat_map_is_relative_to_its_baseline() {
    let text = "x = 'iodepth'\ny = 'clat_p99_us'\nseries = ['scheduler']\nshape = 'heatmap'\n\
                relative_to = { scheduler = 'none', iodepth = 1 }";
    let figure = figure(&definition(text), &run(1.0), &[]);
    assert!(figure.panels[0].charts[0].svg.contains(">8</text>"), "800 us over 100 us is 8");
}

#[test]
fn a_distribution_uses_histograms_or_else_percentiles() {
    let mut with = record("none", 1, 1, &[]);
    with.role_mut("fg").histograms.insert("clat".into(), vec![(10_000, 1), (20_000, 2), (40_000, 1)]);
    let without = record("none", 1, 1, &[("clat_p50_us", 20.0), ("clat_p999_us", 90.0), ("clat_p5_us", 9.0)]);
    let records = [with];
    assert_eq!(points(&group_into_cells(&records)[0], "fg"), [(10.0, 0.25), (20.0, 0.75), (40.0, 1.0)]);
    let records = [without];
    assert_eq!(points(&group_into_cells(&records)[0], "fg"), [(9.0, 0.05), (20.0, 0.5), (90.0, 0.999)]);
}

use distribution::points;

#[test]
fn shares_are_stacked_columns() {
    let text = "x = 'iodepth'\ny = 'share_driver_pct'\nseries = ['scheduler']\nshape = 'breakdown'";
    let here = [record("none", 1, 1, &[("share_driver_pct", 60.0), ("share_generator_pct", 40.0)])];
    let figure = figure(&definition(text), &here, &[]);
    assert!(figure.panels[0].charts[0].svg.contains("none · NVMe driver: 60 %"));
}

/// The text of the elements of a class, in order.
fn texts(svg: &str, class: &str) -> Vec<String> {
    let document = roxmltree::Document::parse(svg).unwrap();
    let of_class = document.descendants().filter(|node| node.attribute("class") == Some(class));
    of_class.filter_map(|node| node.text().map(String::from)).collect()
}

#[test]
fn rows_columns_and_axes_of_a_heat_map_are_sorted_and_titled() {
    let text = "x = 'iodepth'\ny = 'clat_p99_us'\nseries = ['scheduler']\nshape = 'heatmap'";
    let mut here = run(1.0);
    here.retain(|record| record.parameters["devices"].as_f64() == Some(1.0));
    here.reverse();
    let figure = figure(&definition(text), &here, &[]);
    let svg = &figure.panels[0].charts[0].svg;
    assert_eq!(texts(svg, "a"), ["P99 completion latency, µs", "queue depth", "scheduler"]);
    assert_eq!(texts(svg, "t"), ["1", "2", "4", "8", "none", "bfq"]);
}

#[test]
fn a_missing_bar_leaves_a_gap_and_the_others_keep_their_order() {
    let text = "x = 'iodepth'\ny = 'iops'\nseries = ['scheduler']\nshape = 'bars'";
    let here: Vec<CellRecord> = [("bfq", 1), ("none", 1), ("kyber", 1), ("kyber", 2), ("none", 2)]
        .map(|(series, depth)| record(series, depth, 1, &[("iops", 1e5)]))
        .into();
    let figure = figure(&definition(text), &here, &[]);
    let svg = &figure.panels[0].charts[0].svg;
    let document = roxmltree::Document::parse(svg).unwrap();
    let bars = document.descendants().filter(|node| node.has_tag_name("rect") && node.has_children());
    let bars: Vec<(String, f64)> = bars
        .map(|node| {
            (
                node.children().next().unwrap().text().unwrap().into(),
                node.attribute("x").unwrap().parse().unwrap(),
            )
        })
        .collect();
    let names: Vec<&str> = bars.iter().map(|(name, _)| name.split(':').next().unwrap()).collect();
    assert_eq!(names, ["1 · none", "1 · bfq", "1 · kyber", "2 · none", "2 · kyber"]);
    let width = bars[1].1 - bars[0].1;
    assert!((bars[4].1 - bars[3].1 - 2.0 * width).abs() < 0.5, "a gap where bfq is missing: {bars:?}");
    assert_eq!(texts(svg, "a"), ["throughput, KIOPS", "queue depth"]);
}

#[test]
fn bars_that_their_group_names_have_no_gaps_and_no_legend() {
    let text = "x = 'scheduler'\ny = 'iops'\nseries = ['scheduler']\nshape = 'bars'";
    let here = ["bfq", "none", "kyber"].map(|series| record(series, 1, 1, &[("iops", 1e5)]));
    let figure = figure(&definition(text), &here, &[]);
    let svg = &figure.panels[0].charts[0].svg;
    assert_eq!(texts(svg, "n"), [""; 0], "the groups name the bars");
    let document = roxmltree::Document::parse(svg).unwrap();
    let bars: Vec<_> = document.descendants().filter(|node| node.has_tag_name("rect")).collect();
    assert!(bars.iter().all(|bar| bar.attribute("width").unwrap().parse::<f64>().unwrap() > 40.0), "{svg}");
    assert_eq!(bars.len(), 3);
}
