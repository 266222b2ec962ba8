use proptest::prelude::*;

use super::labels::spread_labels;
use super::number::tick_label;
use super::*;
use crate::stats::ConfidenceInterval;

fn plot(series: Vec<Series>, x: AxisScale, y: AxisScale) -> Plot {
    Plot { title: "t".into(), x: Axis::new("x", x), y: Axis::new("y", y), series, legend: false }
}

/// Asserts that `svg` is well-formed XML.
fn assert_well_formed(svg: &str) {
    if !svg.is_empty() {
        roxmltree::Document::parse(svg).unwrap_or_else(|error| panic!("{error}: {svg}"));
    }
}

proptest! {
    #[test]
    fn any_numbers_give_well_formed_charts(
        points in proptest::collection::vec((any::<f64>(), any::<f64>()), 0..20),
        name: String,
        scale in 0..5usize,
    ) {
        let scale = [AxisScale::Linear, AxisScale::Log10, AxisScale::Log2, AxisScale::Ordinal, AxisScale::LinearFromMin][scale];
        assert_well_formed(&plot(vec![Series::new(&name, points.clone())], scale, AxisScale::Log10).svg());
        assert_well_formed(&plot(vec![Series::new(&name, points.clone())], AxisScale::Linear, scale_for_y(scale)).svg());
        let bars = points.iter().map(|point| ChartBar { name: name.clone(), value: point.0, ..ChartBar::default() }).collect();
        let groups = vec![BarGroup { name: name.clone(), bars }];
        assert_well_formed(&BarChart { title: name.clone(), label: name.clone(), x_label: name.clone(), groups }.svg());
        let parts = points.iter().map(|point| (name.clone(), point.1)).collect();
        let columns = vec![StackedColumn { name: name.clone(), published: false, parts }];
        assert_well_formed(&StackedColumns { title: name.clone(), label: name.clone(), x_label: name.clone(), columns }.svg());
        let values: Vec<Option<f64>> = points.iter().map(|point| Some(point.0)).collect();
        let range = Heatmap::range_of(values.iter().flatten().copied());
        let columns = vec![name.clone(); values.len()];
        let cells = points.windows(2).map(|pair| HeatCell { time: (pair[0].0, pair[1].0), latency: (pair[0].1, pair[1].1), count: 3 });
        assert_well_formed(&OverTime {
            title: name.clone(),
            x_label: name.clone(),
            rate_label: name.clone(),
            latency_label: name.clone(),
            rates: vec![(name.clone(), points.clone())],
            percentiles: vec![(name.clone(), points.clone())],
            cells: cells.collect(),
        }.svg());
        let rows = vec![(name.clone(), values)];
        assert_well_formed(&Heatmap { title: name.clone(), label: name.clone(), x_label: name.clone(), y_label: name.clone(), columns, rows, range }.svg());
    }

    #[test]
    fn labels_keep_the_minimum_gap(mut desired in proptest::collection::vec(0.0..300.0f64, 1..15)) {
        desired.sort_by(f64::total_cmp);
        let places = spread_labels(&desired, 13.0, 0.0, 300.0);
        for pair in places.windows(2) {
            prop_assert!(pair[1] - pair[0] >= 13.0 - 1e-6, "{:?}", places);
        }
        prop_assert!(places.iter().all(|place| (-1e-6..=300.0 + 1e-6).contains(place)), "{:?}", places);
    }

    #[test]
    fn a_label_with_enough_room_does_not_move(position in 0.0..100.0f64) {
        let places = spread_labels(&[position, position + 50.0], 13.0, 0.0, 300.0);
        prop_assert!((places[0] - position).abs() < 1e-9 && (places[1] - position - 50.0).abs() < 1e-9);
    }
}

fn scale_for_y(scale: AxisScale) -> AxisScale {
    if scale == AxisScale::Ordinal { AxisScale::Linear } else { scale }
}

#[test]
fn numbers_have_three_significant_digits_and_separators() {
    for (value, text) in [
        (0.0, "0"),
        (783.04, "783"),
        (1.305, "1.31"),
        (999.6, "1,000"),
        (0.0123, "0.0123"),
        (1234567.0, "1,234,567"),
        (-42.5, "-42.5"),
        (9.999, "10"),
        (f64::NAN, "–"),
    ] {
        assert_eq!(format_number(value), text, "{value}");
    }
    for (value, text) in [
        (310_345_282.0, "310M"),
        (-2.5e9, "-2.5G"),
        (1.5e-8, "<0.001"),
        (-1.5e-3, "-0.0015"),
        (0.0, "0"),
        (14_292.0, "14,292"),
        (f64::INFINITY, "–"),
    ] {
        assert_eq!(format_limit(value), text, "{value}");
    }
    for (value, text) in [
        (100.0, "100"),
        (1000.0, "1k"),
        (1500.0, "1.5k"),
        (10_000.0, "10k"),
        (1024.0, "1,024"),
        (16_384.0, "16,384"),
    ] {
        assert_eq!(tick_label(value), text, "{value}");
    }
    assert_eq!(format_integer(1_000_000), "1,000,000");
}

#[test]
fn names_are_escaped() {
    let series = vec![Series::new("<script>alert('x')</script>", vec![(1.0, 1.0), (2.0, 2.0)])];
    let svg = plot(series, AxisScale::Linear, AxisScale::Linear).svg();
    assert!(!svg.contains("<script"), "{svg}");
    assert!(svg.contains("&lt;script&gt;"));
}

#[test]
fn a_legend_lists_names_in_order() {
    let series =
        vec![Series::new("a", vec![(1.0, 1.0), (2.0, 2.0)]), Series::new("b", vec![(1.0, 2.0), (2.0, 2.0)])];
    let svg = Plot { legend: true, ..plot(series, AxisScale::LinearFromMin, AxisScale::Linear) }.svg();
    assert_well_formed(&svg);
    let place = |name: &str| svg.find(&format!(">{name}</text>")).unwrap();
    assert!(place("a") < place("b"));
}

#[test]
fn a_chart_without_data_is_empty() {
    assert_eq!(plot(vec![], AxisScale::Linear, AxisScale::Linear).svg(), "");
    assert_eq!(
        plot(vec![Series::new("a", vec![(1.0, f64::NAN)])], AxisScale::Linear, AxisScale::Linear).svg(),
        ""
    );
    assert_eq!(
        plot(vec![Series::new("a", vec![(1.0, -1.0)])], AxisScale::Linear, AxisScale::Log10).svg(),
        ""
    );
}

#[test]
fn sub_pixel_points_are_dropped() {
    let points = (0..100_000).map(|x| (f64::from(x), f64::from(x) / 1e5)).collect();
    let series = Series { marked: false, ..Series::new("cdf", points) };
    assert!(plot(vec![series], AxisScale::Linear, AxisScale::Linear).svg().len() < 40_000);
}

#[test]
fn stacks_and_schedulers_have_the_same_style_in_every_chart() {
    let of = |names: &[&str]| palette::styles(names.iter().copied());
    let schedulers = of(&["none", "bfq", "kyber", "mq-deadline", "spdk"]);
    let stacks = of(&["psync", "aio", "iou", "iou-c", "iou-s", "ringbolt", "spdk", "spdk-perf"]);
    assert_eq!(of(&["kyber", "none"]), [schedulers[2], schedulers[0]]);
    assert_eq!(
        of(&["spdk-fio", "psync", "x", "spdk-fio"])[..2],
        [stacks[6], stacks[0]],
        "the study's name of spdk"
    );
    assert_eq!((schedulers[4], of(&["spdk"])[0]), (stacks[6], stacks[6]));
    assert_eq!(
        of(&["libaio", "io_uring", "io_uring-sqpoll", "io_uring-poll"]),
        [stacks[1], stacks[2], stacks[4], stacks[3]]
    );
    let mut colours: Vec<usize> = stacks.iter().chain(&schedulers[..4]).map(|style| style.colour).collect();
    colours.sort_unstable();
    colours.dedup();
    assert_eq!(colours.len(), palette::COLOURS, "no two of them share a colour");
    let mut marks: Vec<usize> = stacks.iter().map(|style| style.mark).collect();
    marks.sort_unstable();
    assert_eq!(marks, [0, 1, 2, 3, 4, 5, 6, 7]);
}

/// Heights of the rectangles of the only column.
fn heights(parts: &[(&str, f64)]) -> Vec<f64> {
    let parts = parts.iter().map(|(name, value)| (name.to_string(), *value)).collect();
    let columns = vec![StackedColumn { name: "c".into(), published: false, parts }];
    let svg = StackedColumns { title: "t".into(), label: "%".into(), x_label: "API".into(), columns }.svg();
    let document = roxmltree::Document::parse(&svg).unwrap();
    let rects = document.descendants().filter(|node| node.has_tag_name("rect"));
    // The squares of the legend have no tooltip.
    rects
        .filter(|rect| rect.has_children())
        .map(|rect| rect.attribute("height").unwrap().parse().unwrap())
        .collect()
}

#[test]
fn stacks_end_at_100_percent() {
    let full = heights(&[("a", 100.0)])[0];
    for parts in [[("a", 30.0), ("b", 20.0)], [("a", 80.0), ("b", 60.0)], [("a", 60.2), ("b", 39.8)]] {
        let found = heights(&parts);
        assert!((found.iter().sum::<f64>() - full).abs() < 0.5, "{parts:?}: {found:?}");
        assert_eq!(found.len(), if parts[0].1 < 50.0 { 3 } else { 2 }, "the rest is a part of its own");
    }
}

#[test]
fn series_of_one_chart_differ_in_colour_or_mark() {
    let of = |names: &[&str]| palette::styles(names.iter().copied());
    let both = of(&["iou/none", "iou-c/none", "iou/kyber", "iou-c/kyber"]);
    assert_eq!((both[0].colour, both[2].colour), (0, 2), "the colour is the scheduler's");
    assert_eq!((both[0].mark, both[1].mark), (2, 3), "the mark is the stack's");
    // The stack of all series tells none apart.
    let processes = of(&["iou, 1 proc", "iou, 2 proc", "iou, 4 proc"]);
    assert!(processes[0].colour != processes[1].colour && processes[1].colour != processes[2].colour);
    for names in [
        ["spdk, 1 proc", "spdk, 4 proc", "iou, 1 proc", "iou, 4 proc", "spdk"],
        ["a", "b", "c", "d", "none"],
        ["none", "iou/none", "none, depth 8", "kyber", "kyber, depth 8"],
    ] {
        let mut styles: Vec<(usize, usize)> =
            of(&names).iter().map(|style| (style.colour, style.mark)).collect();
        styles.sort_unstable();
        styles.dedup();
        assert_eq!(styles.len(), names.len(), "{names:?}");
    }
}

#[test]
fn the_extremes_of_numbers_have_an_end_of_ticks() {
    let tiny = f64::from_bits(1);
    for (low, high) in [(tiny, tiny), (tiny, 1.0), (1.0, f64::MAX), (f64::MAX, f64::MAX), (tiny, f64::MAX)] {
        for scale in [AxisScale::Linear, AxisScale::LinearFromMin, AxisScale::Log10, AxisScale::Log2] {
            let points = vec![(low, high), (high, low)];
            assert_well_formed(&plot(vec![Series::new("s", points)], scale, scale).svg());
        }
    }
}

/// The data of a chart as its script reads it: each group's rows of fields.
fn data_of(svg: &str) -> Vec<Vec<String>> {
    let document = roxmltree::Document::parse(svg).unwrap();
    let groups: Vec<&str> = document.descendants().filter_map(|node| node.attribute("data-v")).collect();
    let rows = groups.iter().flat_map(|group| group.split('\n'));
    rows.map(|row| row.split('\t').map(String::from).collect()).collect()
}

#[test]
fn a_chart_carries_its_data() {
    let series = vec![Series::new("a\tb\n", vec![(1.0, 0.123456789), (2.0, 1234567.0)])];
    let svg = plot(series, AxisScale::Linear, AxisScale::Linear).svg();
    assert_eq!(data_of(&svg), [["1", "0.123457"], ["2", "1234567"]]);
    assert!(svg.contains("data-columns=\"series&#9;source&#9;x&#9;y\""), "{svg}");
    let map = Heatmap {
        title: "t".into(),
        label: "latency, µs".into(),
        x_label: "depth".into(),
        y_label: "API".into(),
        columns: vec!["1".into(), "2".into()],
        rows: vec![("x\ty".into(), vec![Some(1e-9), None])],
        range: (0.0, 1.0),
    };
    assert_eq!(data_of(&map.svg()), [["x y", "1", "1.00000e-9"], ["x y", "2", ""]]);
    let bar = ChartBar { name: "none".into(), value: 5.0, ..ChartBar::default() };
    let groups = vec![BarGroup { name: "g".into(), bars: vec![bar] }];
    let bars = BarChart { title: "t".into(), label: "KIOPS".into(), x_label: "x".into(), groups };
    assert_eq!(data_of(&bars.svg()), [["g", "5", "", ""]]);
}

#[test]
fn the_number_of_a_bar_is_above_its_interval() {
    let interval = Some(ConfidenceInterval { low: 1.0, high: 9.0 });
    let bar = ChartBar { name: "none".into(), value: 5.0, interval, ..ChartBar::default() };
    let groups = vec![BarGroup { name: "g".into(), bars: vec![bar] }];
    let svg = BarChart { title: "t".into(), label: "KIOPS".into(), x_label: "x".into(), groups }.svg();
    let drawing = roxmltree::Document::parse(&svg).unwrap();
    let attribute = |class: &str, name: &str| {
        let node = drawing.descendants().find(|node| node.attribute("class") == Some(class)).unwrap();
        node.attribute(name).unwrap().to_string()
    };
    let line = attribute("e2", "d");
    let ends = line.trim_start_matches('M').split('L').map(|point| point.split(' ').nth(1).unwrap());
    let top = ends.map(|y| y.parse::<f64>().unwrap()).fold(f64::INFINITY, f64::min);
    assert!(attribute("v", "y").parse::<f64>().unwrap() < top, "{svg}");
}
