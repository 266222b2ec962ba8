//! Distributions of random offsets: fio's `random_distribution`, and permutations that cover every offset
//! once.
//!
//! A position is an offset in units of the alignment of random I/O.

use crate::WyRand;

/// fio's `random_distribution`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Distribution {
    /// All positions are equally likely.
    #[default]
    Uniform,
    /// The k-th rank has a probability proportional to 1 / k^theta.
    Zipf {
        /// The exponent, above 0.
        theta: f64,
    },
    /// A share `1 - h` of the I/O goes to a share `h` of the positions, and so on recursively within them.
    Pareto {
        /// Share, above 0 and below 1.
        h: f64,
    },
    /// Nearly normal ranks, as fio draws them: the mean of twelve uniform draws, and a uniform one added.
    /// Their standard deviation is the root of 1/144 + `deviation`² / 120,000 of the region: never below a
    /// twelfth.
    Normal {
        /// Width of the added draw in percent of the region, above 0; 50 at most has an effect.
        deviation: f64,
    },
    /// Consecutive zones, each with its size and its percentage of the I/O.
    Zoned(Vec<AccessZone>),
}

/// A zone of [`Distribution::Zoned`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AccessZone {
    /// Percentage of the I/O.
    pub access_percent: f64,
    /// Size of the zone.
    pub size: ZoneSize,
}

/// The size of a zone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ZoneSize {
    /// Percentage of the region: `zoned`.
    Percent(f64),
    /// Bytes: `zoned_abs`.
    Bytes(u64),
}

/// Samples random positions of a region.
#[derive(Clone, Debug)]
pub(crate) enum OffsetSampler {
    Uniform,
    /// Every position once, then all again in another order.
    Permuted(Permutation),
    /// The ranks, and what is added to their hashes.
    Zipf(Zipf, u64),
    /// The exponent, and what is added to the hashes.
    Pareto(f64, u64),
    /// Width of the added draw, in positions.
    Normal(u64),
    /// Of each zone: upper bound of its 64-bit random numbers, first position, number of positions.
    Zoned(Vec<(u64, u64, u64)>),
}

impl OffsetSampler {
    /// For `positions` positions, `unit_bytes` apart.
    pub(crate) fn new(
        distribution: &Distribution,
        each_once: bool,
        positions: u64,
        unit_bytes: u64,
        seed: u64,
    ) -> OffsetSampler {
        let rotation = u64::from(seed as u32).rotate_left(13);
        match distribution {
            Distribution::Uniform if each_once => OffsetSampler::Permuted(Permutation::new(positions, seed)),
            Distribution::Uniform => OffsetSampler::Uniform,
            Distribution::Zipf { theta } => OffsetSampler::Zipf(Zipf::new(positions, *theta), rotation),
            Distribution::Pareto { h } => OffsetSampler::Pareto(h.ln() / (1.0 - h).ln(), rotation),
            Distribution::Normal { deviation } => {
                let width = (deviation / 100.0 * positions as f64).ceil() as u64;
                OffsetSampler::Normal(width.min(positions / 2))
            }
            Distribution::Zoned(zones) => OffsetSampler::Zoned(zone_table(zones, positions, unit_bytes)),
        }
    }

    /// The next position, below `positions`.
    #[inline]
    pub(crate) fn next(&mut self, random: &mut WyRand, positions: u64) -> u64 {
        match self {
            OffsetSampler::Uniform => random.below(positions),
            OffsetSampler::Permuted(permutation) => permutation.next(),
            other => other.next_nonuniform(random, positions),
        }
    }

    fn next_nonuniform(&mut self, random: &mut WyRand, positions: u64) -> u64 {
        match self {
            OffsetSampler::Uniform | OffsetSampler::Permuted(_) => random.below(positions),
            OffsetSampler::Zipf(zipf, rotation) => scatter(zipf.draw(random) - 1, *rotation, positions),
            OffsetSampler::Pareto(power, rotation) => {
                let rank = (random.fraction().powf(*power) * (positions - 1) as f64) as u64;
                scatter(rank, *rotation, positions)
            }
            OffsetSampler::Normal(width) => scatter(near_middle(random, positions, *width), 0, positions),
            OffsetSampler::Zoned(table) => {
                let draw = random.next_bits();
                let at = table.partition_point(|(end, _, _)| *end < draw).min(table.len() - 1);
                table[at].1 + random.below(table[at].2)
            }
        }
    }
}

/// Draws of a nearly normal rank.
const NORMAL_DRAWS: u64 = 12;

/// A rank near the middle: the mean of twelve uniform draws, plus a uniform draw of this width about 0, which
/// is halved until the rank is below `positions`.
fn near_middle(random: &mut WyRand, positions: u64, width: u64) -> u64 {
    let sum: u64 = (0..NORMAL_DRAWS).map(|_| random.below(positions + 1)).sum();
    let mean = sum.div_ceil(NORMAL_DRAWS);
    let mut added = if width == 0 { 0 } else { random.below(width) as i64 - (width / 2) as i64 };
    while added != 0 && mean.checked_add_signed(added).is_none_or(|rank| rank >= positions) {
        added /= 2;
    }
    mean.saturating_add_signed(added).min(positions - 1)
}

/// The position of a rank, by fio's hash: a multiplication modulo 2^64 and a remainder. Ranks share positions
/// unless their number is a power of two, so that about a third of the positions is never visited, and those
/// that several hot ranks share are hotter than the distribution alone makes them.
fn scatter(rank: u64, rotation: u64, positions: u64) -> u64 {
    rank.wrapping_mul(0x61c8_8646_80b5_83eb).wrapping_add(rotation) % positions
}

/// Truncates zones at the end of the region; the last zone also gets the rest of the percentages. The bounds
/// of zones in percent are those of fio: start and length are cut to whole bytes, then to whole positions.
fn zone_table(zones: &[AccessZone], positions: u64, unit_bytes: u64) -> Vec<(u64, u64, u64)> {
    let region_bytes = positions as f64 * unit_bytes as f64;
    let of_region = |percent: f64| (percent / 100.0 * region_bytes) as u64 / unit_bytes;
    let mut table = Vec::new();
    let (mut end, mut percent_before, mut share) = (0, 0.0, 0.0);
    for zone in zones {
        let (first, length) = match zone.size {
            ZoneSize::Percent(percent) => {
                percent_before += percent;
                (of_region(percent_before - percent), of_region(percent))
            }
            ZoneSize::Bytes(bytes) => (end, bytes / unit_bytes),
        };
        let first = first.min(positions);
        let length = length.min(positions - first);
        share += zone.access_percent / 100.0;
        if length > 0 && zone.access_percent > 0.0 {
            table.push(((share.min(1.0) * u64::MAX as f64) as u64, first, length));
        }
        end = first + length;
    }
    if table.is_empty() {
        table.push((u64::MAX, 0, positions));
    }
    table
}

/// A pseudo-random permutation of the numbers below a bound, in constant memory.
///
/// A counter visits all values below the next power of two in golden-ratio steps; a bijective mix of that
/// many bits scatters them, and values at or above the bound, fewer than half, are skipped. Shifts by two
/// fifths of the bits correlate neighbours less than shifts by half of them.
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    bound: u64,
    mask: u64,
    shift: u32,
    step: u64,
    factors: [u64; 2],
    /// Counter value at which a pass starts and ends.
    origin: u64,
    state: u64,
}

impl Permutation {
    pub(crate) fn new(bound: u64, seed: u64) -> Permutation {
        let bits = bound.max(2).next_power_of_two().ilog2();
        let golden = 0x9e37_79b9_7f4a_7c15u64;
        let mut permutation = Permutation {
            bound,
            mask: u64::MAX >> (64 - bits),
            shift: (bits * 2 / 5).max(1),
            step: (golden >> (64 - bits)) | 1,
            factors: [1; 2],
            origin: 0,
            state: 0,
        };
        permutation.reseed(seed);
        permutation
    }

    fn reseed(&mut self, seed: u64) {
        let mut random = WyRand::new(seed);
        self.origin = random.next_bits() & self.mask;
        self.factors = [random.next_bits() | 1, random.next_bits() | 1];
        self.state = self.origin;
    }

    #[inline]
    fn mix(&self, mut value: u64) -> u64 {
        value ^= value >> self.shift;
        for factor in self.factors {
            value = value.wrapping_mul(factor) & self.mask;
            value ^= value >> self.shift;
        }
        value
    }

    /// The next number; after the last one, reseeds and starts another permutation.
    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        loop {
            let value = self.mix(self.state);
            self.state = self.state.wrapping_add(self.step) & self.mask;
            if self.state == self.origin {
                self.reseed(self.origin ^ self.factors[1].rotate_left(17));
            }
            if value < self.bound {
                return value;
            }
        }
    }
}

/// Samples ranks by Zipf's law with rejection-inversion (W. Hörmann and G. Derflinger, "Rejection-inversion
/// to generate variates from monotone discrete distributions", 1996), without a table.
#[derive(Clone, Debug)]
pub(crate) struct Zipf {
    count: f64,
    theta: f64,
    integral_first: f64,
    integral_last: f64,
    accept_within: f64,
}

impl Zipf {
    pub(crate) fn new(count: u64, theta: f64) -> Zipf {
        let mut zipf =
            Zipf { count: count as f64, theta, integral_first: 0.0, integral_last: 0.0, accept_within: 0.0 };
        zipf.integral_first = zipf.integral(1.5) - 1.0;
        zipf.integral_last = zipf.integral(zipf.count + 0.5);
        zipf.accept_within = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    fn weight(&self, rank: f64) -> f64 {
        (-self.theta * rank.ln()).exp()
    }

    /// The integral of the weight, up to a constant.
    fn integral(&self, rank: f64) -> f64 {
        let log = rank.ln();
        let exponent = (1.0 - self.theta) * log;
        // (exp(t) - 1) / t, whose limit at 0 is 1.
        let slope = if exponent.abs() > 1e-8 { exponent.exp_m1() / exponent } else { 1.0 + exponent / 2.0 };
        slope * log
    }

    fn inverse(&self, area: f64) -> f64 {
        let t = (area * (1.0 - self.theta)).max(-1.0);
        // ln(1 + t) / t, whose limit at 0 is 1.
        let slope = if t.abs() > 1e-8 { t.ln_1p() / t } else { 1.0 - t / 2.0 };
        (slope * area).exp()
    }

    /// Samples a rank, from 1.
    pub(crate) fn draw(&self, random: &mut WyRand) -> u64 {
        loop {
            let area = self.integral_last + random.fraction() * (self.integral_first - self.integral_last);
            let exact = self.inverse(area);
            let rank = exact.round().clamp(1.0, self.count);
            if rank - exact <= self.accept_within || area >= self.integral(rank + 0.5) - self.weight(rank) {
                return rank as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests;
