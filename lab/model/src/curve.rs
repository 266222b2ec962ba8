//! Distributions of time, tabulated so that a sample costs one load.

/// One part of a mixture: a constant, a log-normal spread around `us`, or an exponential after `us`.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// Share of the mixture, in any unit; they are divided by their sum.
    #[serde(default = "one")]
    pub weight: f64,
    /// Microseconds: the constant, the median of a log-normal, or where the exponential begins.
    pub us: f64,
    /// Spread of the logarithm; 0 for none.
    #[serde(default)]
    pub sigma: f64,
    /// Mean of an exponential that is added; 0 for none. Not together with `sigma`.
    #[serde(default)]
    pub exp_us: f64,
}

fn one() -> f64 {
    1.0
}

/// Log2 of the number of entries of each table.
const BITS: u32 = 10;
const ENTRIES: usize = 1 << BITS;
/// Tables, each over the last part of the one before.
const TABLES: usize = 3;
/// Log2 of how much finer each table is than the one before: its entries cover the last 16 of that.
const FINER: u32 = 6;
const LAST: usize = ENTRIES >> FINER;
/// No time is longer: a mistyped unit is likelier than a wish.
pub(crate) const US_MAX: f64 = 60e6;

/// A tabulated distribution: its quantiles in 1024 steps, those of the last 64th once more in 1024, and
/// of the last 64th of that again, so that one time in a million can be told, and a step is never more
/// than a 16th of what lies beyond it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Curve {
    /// Nanoseconds by quantile: [`ENTRIES`] of each of the [`TABLES`].
    table: Box<[u32]>,
    constant: Option<u32>,
}

impl Component {
    /// The part of the component's times that are at most `us`.
    pub(crate) fn below(&self, us: f64) -> f64 {
        if self.sigma > 0.0 {
            if us <= 0.0 {
                return 0.0;
            }
            return normal((us / self.us.max(1e-9)).ln() / self.sigma);
        }
        if us < self.us {
            0.0
        } else if self.exp_us > 0.0 {
            -(-(us - self.us) / self.exp_us).exp_m1()
        } else {
            1.0
        }
    }

    fn is_constant(&self) -> bool {
        self.sigma == 0.0 && self.exp_us == 0.0
    }
}

impl Curve {
    pub(crate) fn constant_ns(ns: u32) -> Curve {
        Curve { table: Box::new([]), constant: Some(ns) }
    }

    /// Tabulates a mixture whose components have been checked; none at all is no time.
    pub(crate) fn new(components: &[Component]) -> Curve {
        let total: f64 = components.iter().map(|component| component.weight).sum();
        match components {
            [] => return Curve::constant_ns(0),
            [only] if only.is_constant() => return Curve::constant_ns(to_ns(only.us)),
            _ => {}
        }
        let below = |us: f64| components.iter().map(|c| c.below(us) * c.weight).sum::<f64>() / total;
        let step = 1.0 / ENTRIES as f64;
        let quantile = |rank: f64| {
            let (mut low, mut high) = (0.0, US_MAX);
            // Each round halves what is unsure: 52 rounds leave less than a nanosecond of a minute.
            for _ in 0..52 {
                let middle = (low + high) / 2.0;
                if below(middle) < rank { low = middle } else { high = middle }
            }
            to_ns(high)
        };
        let rank = |place: usize| {
            let part = 1.0 / f64::from(1u32 << (FINER * (place / ENTRIES) as u32));
            1.0 - part * (1.0 - ((place % ENTRIES) as f64 + 0.5) * step)
        };
        let table: Box<[u32]> = (0..TABLES * ENTRIES).map(rank).map(quantile).collect();
        Curve { table, constant: None }
    }

    /// A time in nanoseconds; `bits` decides, of which 22 are used.
    #[inline]
    pub(crate) fn at(&self, bits: u32) -> u64 {
        if let Some(constant) = self.constant {
            return u64::from(constant);
        }
        let entry = bits as usize % ENTRIES;
        if entry >= ENTRIES - LAST {
            return self.tail(entry, bits >> BITS);
        }
        u64::from(self.table[entry])
    }

    /// A time of the last part of the first table, one in 64.
    #[cold]
    fn tail(&self, entry: usize, mut bits: u32) -> u64 {
        let (mut table, mut entry) = (0, entry);
        while entry >= ENTRIES - LAST && table + 1 < TABLES {
            let finer = bits as usize % (1 << FINER);
            entry = ((entry - (ENTRIES - LAST)) << FINER) + finer;
            bits >>= FINER;
            table += 1;
        }
        u64::from(self.table[table * ENTRIES + entry])
    }

    /// The time of a constant.
    pub(crate) fn constant_ns_if_any(&self) -> Option<u64> {
        self.constant.map(u64::from)
    }

    /// The shortest time in the table, in nanoseconds.
    pub(crate) fn least_ns(&self) -> u64 {
        self.constant.map_or_else(|| u64::from(self.table[0]), u64::from)
    }
}

fn to_ns(us: f64) -> u32 {
    (us * 1000.0).round() as u32
}

/// Cumulative distribution of the standard normal, by a Chebyshev fit of erfc whose relative error is
/// below 1.2e-7 everywhere, so that far tails keep their shape.
fn normal(z: f64) -> f64 {
    let x = z.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * x);
    let series = [
        -1.265_512_23,
        1.000_023_68,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_203_98,
        1.488_515_87,
        -0.822_152_23,
        0.170_872_77,
    ];
    let polynomial = series.iter().rev().fold(0.0, |sum, coefficient| sum * t + coefficient);
    let upper = 0.5 * t * (polynomial - x * x).exp();
    if z > 0.0 { 1.0 - upper } else { upper }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn part(weight: f64, us: f64, sigma: f64, exp_us: f64) -> Component {
        Component { weight, us, sigma, exp_us }
    }

    fn samples(curve: &Curve) -> Vec<u64> {
        let mut random = Random::new(7);
        let mut samples: Vec<u64> = (0..400_000).map(|_| curve.at(random.bits() as u32)).collect();
        samples.sort_unstable();
        samples
    }

    #[test]
    fn the_normal_distribution_is_the_tabulated_one() {
        // Abramowitz and Stegun, table 26.1.
        for (z, expected) in [(0.0, 0.5), (1.0, 0.841_344_75), (-2.0, 0.022_750_13), (3.0, 0.998_650_10)] {
            assert!((normal(z) - expected).abs() < 2e-7, "{z}: {}", normal(z));
        }
    }

    #[test]
    fn samples_have_the_quantiles_and_mean_that_were_asked_for() {
        let curve = Curve::new(&[part(2.0, 50.0, 0.0, 0.0), part(1.0, 60.0, 0.0, 30.0)]);
        let samples = samples(&curve);
        let mean = samples.iter().sum::<u64>() as f64 / samples.len() as f64;
        let mixture = (2.0 * 50_000.0 + 90_000.0) / 3.0;
        assert!((mean / mixture - 1.0).abs() < 0.005, "{mean}");
        assert!(samples[samples.len() / 2] == 50_000);
        // The 99th percentile of the mixture is the 97th of the exponential.
        let p99 = samples[samples.len() / 100 * 99] as f64;
        let expected = (60.0 - 30.0 * 0.03f64.ln()) * 1000.0;
        assert!((p99 / expected - 1.0).abs() < 0.02, "{p99} {expected}");
    }

    #[test]
    fn tails_reach_beyond_one_in_a_thousand() {
        let samples = samples(&Curve::new(&[part(1.0, 100.0, 0.5, 0.0)]));
        for (share, z) in [(0.5, 0.0), (0.99, 2.3263), (0.999, 3.0902), (0.9999, 3.7190)] {
            let measured = samples[(samples.len() as f64 * share) as usize] as f64;
            let expected = 100_000.0 * (0.5f64 * z).exp();
            assert!((measured / expected - 1.0).abs() < 0.02, "{share}: {measured} {expected}");
        }
    }

    #[test]
    fn a_constant_and_nothing_are_exact() {
        assert_eq!(Curve::new(&[part(1.0, 10.0, 0.0, 0.0)]).at(77), 10_000);
        assert_eq!(Curve::new(&[]).at(77), 0);
    }
}
