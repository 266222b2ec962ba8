//! Where random I/O goes: fio's `random_distribution`, and each place once.

use crate::Random;

/// fio's `random_distribution`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Distribution {
    /// Every place as likely as every other.
    #[default]
    Uniform,
    /// The k-th most popular place is drawn in proportion to 1 / k^theta.
    Zipf {
        /// The exponent, above 0.
        theta: f64,
    },
    /// A share `h` of the I/O goes to a share `1 - h` of the places, and so on within them.
    Pareto {
        /// Between 0 and 1, both excluded.
        h: f64,
    },
    /// Around the middle, with a deviation in percent of all places.
    Normal {
        /// Percent, above 0.
        deviation: f64,
    },
    /// Zones in their order, each with the percentage of I/O that it gets and where it ends.
    Zoned(Vec<Zone>),
}

/// A zone of [`Distribution::Zoned`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Zone {
    /// Percent of the I/O.
    pub access_percent: f64,
    /// How large it is.
    pub extent: Extent,
}

/// The size of a zone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Extent {
    /// Percent of the places: `zoned`.
    Percent(f64),
    /// Bytes: `zoned_abs`.
    Bytes(u64),
}

/// Draws places of a part of a device.
#[derive(Clone, Debug)]
pub(crate) enum Draw {
    Uniform,
    /// Every place once, then all again in another order.
    Each(Permutation),
    Zipf(Zipf, Permutation),
    Pareto(f64, Permutation),
    Normal(f64),
    /// The end of each zone in draws of 64 bits, its first place, its places.
    Zoned(Vec<(u64, u64, u64)>),
}

impl Draw {
    /// For `positions` places of `unit_bytes`.
    pub(crate) fn new(
        distribution: &Distribution,
        each_once: bool,
        positions: u64,
        unit_bytes: u64,
        seed: u64,
    ) -> Draw {
        let scatter = || Permutation::new(positions, seed ^ 0x7363_6174_7465_7221);
        match distribution {
            Distribution::Uniform if each_once => Draw::Each(Permutation::new(positions, seed)),
            Distribution::Uniform => Draw::Uniform,
            Distribution::Zipf { theta } => Draw::Zipf(Zipf::new(positions, *theta), scatter()),
            Distribution::Pareto { h } => Draw::Pareto(h.ln() / (1.0 - h).ln(), scatter()),
            Distribution::Normal { deviation } => Draw::Normal(deviation / 100.0 * positions as f64),
            Distribution::Zoned(zones) => Draw::Zoned(zone_table(zones, positions, unit_bytes)),
        }
    }

    /// The next place, below `positions`.
    #[inline]
    pub(crate) fn next(&mut self, random: &mut Random, positions: u64) -> u64 {
        match self {
            Draw::Uniform => random.below(positions),
            Draw::Each(permutation) => permutation.next(),
            other => other.next_shaped(random, positions),
        }
    }

    fn next_shaped(&mut self, random: &mut Random, positions: u64) -> u64 {
        match self {
            Draw::Uniform | Draw::Each(_) => random.below(positions),
            // What is popular lies scattered, as with fio.
            Draw::Zipf(zipf, scatter) => scatter.at(zipf.draw(random) - 1),
            Draw::Pareto(power, scatter) => {
                let place = (random.fraction().powf(*power) * positions as f64) as u64;
                scatter.at(place.min(positions - 1))
            }
            Draw::Normal(deviation) => loop {
                let place = positions as f64 / 2.0 + random.normal() * *deviation;
                if place >= 0.0 && place < positions as f64 {
                    return place as u64;
                }
            },
            Draw::Zoned(table) => {
                let draw = random.next_bits();
                let at = table.partition_point(|(end, _, _)| *end < draw).min(table.len() - 1);
                table[at].1 + random.below(table[at].2)
            }
        }
    }
}

/// Zones beyond the last place are cut off; what is left of percents goes to the last zone.
fn zone_table(zones: &[Zone], positions: u64, unit_bytes: u64) -> Vec<(u64, u64, u64)> {
    let mut table = Vec::new();
    let (mut first, mut share) = (0, 0.0);
    for zone in zones {
        let length = match zone.extent {
            Extent::Percent(percent) => (percent / 100.0 * positions as f64).round() as u64,
            Extent::Bytes(bytes) => bytes / unit_bytes,
        };
        let length = length.min(positions - first);
        share += zone.access_percent / 100.0;
        if length > 0 && zone.access_percent > 0.0 {
            table.push(((share.min(1.0) * u64::MAX as f64) as u64, first, length));
        }
        first += length;
    }
    if table.is_empty() {
        table.push((u64::MAX, 0, positions));
    }
    table
}

/// An order of the numbers below a bound in which each comes once, and which needs no memory.
///
/// Steps of the golden section run through the next power of two; a mixing that is one-to-one on that many
/// bits scatters them, and what is not below the bound is passed over: less than half. Shifts of two fifths
/// of the bits leave fewer traces in the differences of neighbours than halves do.
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    bound: u64,
    mask: u64,
    shift: u32,
    step: u64,
    factors: [u64; 2],
    /// Where a lap begins and ends.
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
        permutation.rekey(seed);
        permutation
    }

    fn rekey(&mut self, seed: u64) {
        let mut random = Random::new(seed);
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

    /// The next of the order; after the last, the first of another order.
    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        loop {
            let value = self.mix(self.state);
            self.state = self.state.wrapping_add(self.step) & self.mask;
            if self.state == self.origin {
                self.rekey(self.origin ^ self.factors[1].rotate_left(17));
            }
            if value < self.bound {
                return value;
            }
        }
    }

    /// Where a number below the bound is scattered to.
    #[inline]
    pub(crate) fn at(&self, number: u64) -> u64 {
        let scattered =
            |number: u64| self.mix(number.wrapping_mul(self.step).wrapping_add(self.origin) & self.mask);
        let mut value = scattered(number);
        while value >= self.bound {
            value = scattered(value);
        }
        value
    }
}

/// Ranks by Zipf's law, by rejection-inversion (W. Hörmann and G. Derflinger, "Rejection-inversion to
/// generate variates from monotone discrete distributions", 1996): no table, a few draws at most.
#[derive(Clone, Debug)]
pub(crate) struct Zipf {
    count: f64,
    theta: f64,
    integral_first: f64,
    integral_last: f64,
    sure: f64,
}

impl Zipf {
    pub(crate) fn new(count: u64, theta: f64) -> Zipf {
        let mut zipf =
            Zipf { count: count as f64, theta, integral_first: 0.0, integral_last: 0.0, sure: 0.0 };
        zipf.integral_first = zipf.integral(1.5) - 1.0;
        zipf.integral_last = zipf.integral(zipf.count + 0.5);
        zipf.sure = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    fn weight(&self, rank: f64) -> f64 {
        (-self.theta * rank.ln()).exp()
    }

    /// The integral of the weight, up to a constant.
    fn integral(&self, rank: f64) -> f64 {
        let log = rank.ln();
        let exponent = (1.0 - self.theta) * log;
        // (exp(t) - 1) / t, which is 1 where t is 0.
        let slope = if exponent.abs() > 1e-8 { exponent.exp_m1() / exponent } else { 1.0 + exponent / 2.0 };
        slope * log
    }

    fn inverse(&self, area: f64) -> f64 {
        let t = (area * (1.0 - self.theta)).max(-1.0);
        // ln(1 + t) / t, which is 1 where t is 0.
        let slope = if t.abs() > 1e-8 { t.ln_1p() / t } else { 1.0 - t / 2.0 };
        (slope * area).exp()
    }

    /// A rank, from 1.
    pub(crate) fn draw(&self, random: &mut Random) -> u64 {
        loop {
            let area = self.integral_last + random.fraction() * (self.integral_first - self.integral_last);
            let exact = self.inverse(area);
            let rank = exact.round().clamp(1.0, self.count);
            if rank - exact <= self.sure || area >= self.integral(rank + 0.5) - self.weight(rank) {
                return rank as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests;
