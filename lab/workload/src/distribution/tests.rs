//! Statistical tests of the distributions. Seeds are fixed, so results are deterministic.

use super::*;

const DRAWS: u64 = 400_000;

/// The chi-square statistic: the sum of (count - expected)^2 / expected.
fn chi_square(counts: &[u64], expected: impl Fn(usize) -> f64) -> f64 {
    let term = |(index, count): (usize, &u64)| (*count as f64 - expected(index)).powi(2) / expected(index);
    counts.iter().enumerate().map(term).sum()
}

/// Five standard deviations above the mean of a chi-square distribution: mean `n`, deviation sqrt(2 n).
fn limit(cells: usize) -> f64 {
    cells as f64 + 5.0 * (2.0 * cells as f64).sqrt()
}

#[test]
fn ranks_follow_zipfs_law() {
    for (theta, count) in [(0.5, 100), (0.9, 1000), (1.0, 50), (1.2, 1000), (2.5, 20)] {
        let zipf = Zipf::new(count, theta);
        let mut random = WyRand::new(11);
        // The statistic needs enough expected samples per cell: ranks with fewer are left out.
        let weights: Vec<f64> = (1..=count).map(|rank| (rank as f64).powf(-theta)).collect();
        let total: f64 = weights.iter().sum();
        let plenty = weights.iter().filter(|weight| **weight / total * DRAWS as f64 > 50.0).count();
        let mut counts = vec![0u64; plenty];
        for _ in 0..DRAWS {
            let rank = zipf.draw(&mut random);
            assert!((1..=count).contains(&rank));
            if let Some(cell) = counts.get_mut(rank as usize - 1) {
                *cell += 1;
            }
        }
        let statistic = chi_square(&counts, |rank| weights[rank] / total * DRAWS as f64);
        assert!(statistic < limit(plenty), "theta {theta}: {statistic} for {plenty} cells");
    }
}

#[test]
fn permutations_cover_every_number_once_and_differ_between_passes() {
    for bound in [1, 2, 3, 7, 64, 65, 1000, 4097] {
        let mut permutation = Permutation::new(bound, 5);
        let pass =
            |permutation: &mut Permutation| -> Vec<u64> { (0..bound).map(|_| permutation.next()).collect() };
        let (first, second) = (pass(&mut permutation), pass(&mut permutation));
        for order in [&first, &second] {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..bound), "{bound}: {order:?}");
        }
        assert!(bound < 64 || first != second);
    }
}

#[test]
fn consecutive_numbers_of_a_permutation_are_far_apart() {
    let bound = 1 << 16;
    let mut permutation = Permutation::new(bound, 9);
    let order: Vec<u64> = (0..bound).map(|_| permutation.next()).collect();
    let near = order.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < bound / 100).count() as f64;
    // About 2 % of independent samples are that close.
    assert!((0.01..0.04).contains(&(near / bound as f64)), "{near}");
    // After half of the permutation, half of the lower half of the numbers has been visited.
    let low = order[..bound as usize / 2].iter().filter(|place| **place < bound / 2).count() as f64;
    assert!((low / (bound as f64 / 4.0) - 1.0).abs() < 0.05, "{low}");
}

#[test]
fn pareto_sends_its_share_of_io_to_the_hot_positions() {
    // The hash has no collisions where the number of positions is a power of two.
    let (positions, h) = (2048, 0.2);
    let mut draw = OffsetSampler::new(&Distribution::Pareto { h }, false, positions, 4096, 1);
    let mut random = WyRand::new(2);
    let mut counts = vec![0u64; positions as usize];
    for _ in 0..DRAWS {
        counts[draw.next(&mut random, positions) as usize] += 1;
    }
    counts.sort_unstable_by(|one, other| other.cmp(one));
    let hot: u64 = counts[..(positions as f64 * h) as usize].iter().sum();
    let share = hot as f64 / DRAWS as f64;
    assert!((share - (1.0 - h)).abs() < 0.02, "{share}");
}

#[test]
fn nearly_normal_ranks_have_the_documented_deviation() {
    let positions = 10_000u64;
    let mut random = WyRand::new(3);
    for (width, deviation) in [(0, 833.3), (1000, 882.0), (5000, 1666.7)] {
        let places: Vec<f64> =
            (0..DRAWS).map(|_| near_middle(&mut random, positions, width) as f64).collect();
        let mean = places.iter().sum::<f64>() / DRAWS as f64;
        let variance = places.iter().map(|place| (place - mean).powi(2)).sum::<f64>() / DRAWS as f64;
        let is_near = (mean - 5000.0).abs() < 10.0 && (variance.sqrt() / deviation - 1.0).abs() < 0.01;
        assert!(is_near, "{width}: {mean} {}", variance.sqrt());
    }
    for positions in 1..20 {
        let ranks: Vec<u64> = (0..1000).map(|_| near_middle(&mut random, positions, positions / 2)).collect();
        assert!(ranks.into_iter().all(|rank| rank < positions), "{positions}");
    }
}

/// The shares of 100,000 I/Os, in percent, that the hottest 1, 5, 20 and 50 % of the blocks get with fio 3.33
/// (`fio --bs=4k --rw=randread --random_distribution=… --size=… --write_iolog`), for a number of blocks that
/// is a power of two and one that is not.
#[test]
fn hot_blocks_get_the_share_that_fio_gives_them() {
    let zipf = |theta| Distribution::Zipf { theta };
    let normal = |deviation| Distribution::Normal { deviation };
    let cases = [
        (4096, normal(20.0), [4.4, 20.3, 67.5, 99.0]),
        (4096, normal(5.0), [5.2, 24.1, 76.4, 99.8]),
        (4096, Distribution::Pareto { h: 0.2 }, [52.5, 66.0, 80.5, 92.0]),
        (4096, Distribution::Pareto { h: 0.4 }, [7.6, 18.9, 41.5, 70.0]),
        (4096, zipf(1.2), [70.6, 84.3, 93.0, 98.0]),
        (4096, zipf(0.8), [28.2, 46.4, 67.8, 85.9]),
        (3328, normal(20.0), [4.4, 20.1, 67.5, 100.0]),
        (3328, normal(5.0), [5.2, 23.9, 76.3, 100.0]),
        (3328, Distribution::Pareto { h: 0.2 }, [53.1, 68.1, 87.9, 100.0]),
        (3328, Distribution::Pareto { h: 0.4 }, [8.9, 25.6, 66.3, 100.0]),
        (3328, zipf(1.2), [69.4, 84.2, 95.3, 100.0]),
        (3328, zipf(0.8), [28.4, 49.4, 80.0, 100.0]),
    ];
    for (positions, distribution, shares) in cases {
        let mut draw = OffsetSampler::new(&distribution, false, positions, 4096, 7);
        let mut random = WyRand::new(8);
        let mut counts = vec![0u64; positions as usize];
        (0..100_000).for_each(|_| counts[draw.next(&mut random, positions) as usize] += 1);
        counts.sort_unstable_by(|one, other| other.cmp(one));
        for (part, share) in [0.01, 0.05, 0.2, 0.5].into_iter().zip(shares) {
            let hottest = &counts[..(positions as f64 * part) as usize];
            let got = hottest.iter().sum::<u64>() as f64 / 1000.0;
            // fio's Zipf is an approximation (Gray and others, 1994), ours is exact.
            let tolerance = if matches!(distribution, Distribution::Zipf { .. }) { 2.5 } else { 1.5 };
            assert!(
                (got - share).abs() < tolerance,
                "{distribution:?}, {positions}: {part}: {got}, not {share}"
            );
        }
    }
}

#[test]
fn zones_get_their_percentages_of_io() {
    let percent = |access_percent, size| AccessZone { access_percent, size: ZoneSize::Percent(size) };
    let zones = vec![percent(60.0, 10.0), percent(30.0, 20.0), percent(8.0, 30.0), percent(2.0, 40.0)];
    let bytes = |access_percent, bytes| AccessZone { access_percent, size: ZoneSize::Bytes(bytes) };
    let absolute =
        vec![bytes(60.0, 409_600), bytes(30.0, 819_200), bytes(8.0, 1_228_800), bytes(2.0, u64::MAX)];
    for zones in [zones, absolute] {
        let positions = 1000;
        let mut draw = OffsetSampler::new(&Distribution::Zoned(zones), false, positions, 4096, 1);
        let mut random = WyRand::new(4);
        let mut counts = [0u64; 4];
        for _ in 0..DRAWS {
            let place = draw.next(&mut random, positions);
            counts[[100, 300, 600, 1000].iter().position(|end| place < *end).unwrap()] += 1;
        }
        let shares = [0.6, 0.3, 0.08, 0.02];
        let statistic = chi_square(&counts, |zone| shares[zone] * DRAWS as f64);
        assert!(statistic < limit(4), "{counts:?}");
    }
}

/// By fio's arithmetic: start and length of each zone in whole bytes, divided by the block size.
#[test]
fn zones_have_fios_bounds() {
    let zones = [60.0, 30.0, 10.0]
        .map(|percent| AccessZone { access_percent: percent, size: ZoneSize::Percent(percent) });
    let table = zone_table(&zones, 33, 4096);
    let bounds: Vec<(u64, u64)> = table.iter().map(|(_, first, length)| (*first, *length)).collect();
    assert_eq!(bounds, [(0, 19), (19, 9), (29, 3)]);
}
