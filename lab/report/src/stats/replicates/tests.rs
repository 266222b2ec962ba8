use proptest::prelude::*;

use super::*;

fn cell(a: &[f64], b: &[f64]) -> ReplicatedCell {
    let numbered = |values: &[f64]| values.iter().copied().enumerate().collect();
    ReplicatedCell { a: numbered(a), b: numbered(b) }
}

#[test]
fn p_values_are_corrected_as_by_hand() {
    // The example of Benjamini and Hochberg (1995), section 3.2: 15 p-values, four rejected at 5 %.
    let p_values = [
        0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719,
        0.6528, 0.7590, 1.0,
    ];
    let corrected = corrected_p_values(&p_values);
    assert_eq!(corrected.iter().filter(|value| **value <= 0.05).count(), 4);
    assert!((corrected[3] - 0.0095 * 15.0 / 4.0).abs() < 1e-12);
    assert_eq!(corrected[14], 1.0);
    assert!(corrected_p_values(&[]).is_empty());
}

#[test]
fn one_measurement_of_a_side_has_no_interval() {
    let cells = [cell(&[10.0, 10.1], &[20.0]), cell(&[10.0, 10.1], &[20.0, 20.1])];
    let effects = compare_replicates(&cells, ReplicateOrder::SeparateRuns, 0.95).cells;
    let once = effects[0].unwrap();
    assert!((once.ratio - 1.99).abs() < 0.01 && once.interval.is_none() && once.p_value.is_none());
    assert!(effects[1].unwrap().interval.is_some());
}

#[test]
fn several_runs_of_one_side_give_an_interval_to_a_single_run_of_the_other() {
    let cells = [cell(&[10.0, 10.1, 9.9, 10.05], &[12.0]), cell(&[5.0, 5.1, 4.9, 5.0], &[5.0])];
    let effects = compare_replicates(&cells, ReplicateOrder::Exchangeable, 0.95).cells;
    assert!(effects[0].unwrap().p_value.unwrap() < 0.01, "{effects:?}");
    assert!(effects[1].unwrap().p_value.unwrap() > 0.1, "{effects:?}");
}

#[test]
fn a_cell_without_values_has_no_effect() {
    let cells = [cell(&[], &[1.0]), cell(&[0.0, -1.0, f64::NAN], &[1.0, 2.0])];
    let effects = compare_replicates(&cells, ReplicateOrder::SeparateRuns, 0.95);
    assert_eq!(effects, ReplicateEffects { cells: vec![None, None], overall: None });
    assert_eq!(compare_replicates(&[], ReplicateOrder::SeparateRuns, 0.95).overall, None);
}

#[test]
fn an_effect_that_all_cells_of_a_replicate_share_widens_every_interval() {
    let quiet: Vec<ReplicatedCell> = (1..=10)
        .map(|at| {
            let jitter = |sign: f64| f64::from(at) * (1.0 + sign * 0.001);
            cell(&[jitter(1.0), jitter(-1.0), jitter(0.0)], &[jitter(-1.0), jitter(0.0), jitter(1.0)])
        })
        .collect();
    let mut shaken = quiet.clone();
    for cell in &mut shaken {
        cell.a[2].1 *= 1.1;
    }
    let width = |cells: &[ReplicatedCell]| {
        let effect = compare_replicates(cells, ReplicateOrder::SeparateRuns, 0.95).cells[0].unwrap();
        let interval = effect.interval.unwrap();
        (interval.high / interval.low).ln()
    };
    assert!(width(&shaken) > 10.0 * width(&quiet), "{} and {}", width(&shaken), width(&quiet));
}

proptest! {
    #[test]
    fn swapping_the_sides_inverts_the_effect(
        values in proptest::collection::vec((1.0..2.0f64, 1.0..2.0f64, 1.0..2.0f64, 1.0..2.0f64), 1..12),
    ) {
        let there: Vec<_> = values.iter().map(|(a, b, c, d)| cell(&[*a, *b], &[*c, *d])).collect();
        let back: Vec<_> = values.iter().map(|(a, b, c, d)| cell(&[*c, *d], &[*a, *b])).collect();
        for order in [ReplicateOrder::SeparateRuns, ReplicateOrder::Exchangeable] {
            let there = compare_replicates(&there, order, 0.95).cells;
            let back = compare_replicates(&back, order, 0.95).cells;
            for (there, back) in there.iter().flatten().zip(back.iter().flatten()) {
                prop_assert!((there.ratio * back.ratio - 1.0).abs() < 1e-9);
                prop_assert!((there.p_value.unwrap() - back.p_value.unwrap()).abs() < 1e-9);
                let interval = there.interval.unwrap();
                prop_assert!(interval.low <= there.ratio && there.ratio <= interval.high);
            }
        }
    }

    #[test]
    fn arbitrary_values_never_panic(
        values in proptest::collection::vec((any::<f64>(), any::<f64>(), any::<f64>()), 0..9),
    ) {
        let cells: Vec<_> = values.iter().map(|(a, b, c)| cell(&[*a, *b], &[*c, *a])).collect();
        let effects = compare_replicates(&cells, ReplicateOrder::SeparateRuns, 0.95);
        prop_assert_eq!(effects.cells.len(), cells.len());
    }
}
