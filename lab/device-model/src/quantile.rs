//! Latency distributions, tabulated by quantile so that a sample costs one load.

/// One component of a mixture distribution: a constant, a log-normal with median `us`, or an exponential
/// shifted by `us`.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixtureComponent {
    /// Relative weight; the weights of a mixture are normalized to a sum of 1.
    #[serde(default = "default_weight")]
    pub weight: f64,
    /// Microseconds: the constant, the median of the log-normal, or the offset of the exponential.
    pub us: f64,
    /// Standard deviation of the logarithm; 0 if the component is not log-normal.
    #[serde(default)]
    pub sigma: f64,
    /// Mean in microseconds of an exponential that is added; 0 for none. Not allowed together with `sigma`.
    #[serde(default)]
    pub exp_us: f64,
}

fn default_weight() -> f64 {
    1.0
}

/// Log2 of the number of entries of each table.
const BITS: u32 = 10;
const ENTRIES: usize = 1 << BITS;
/// Number of tables; each one covers the upper tail of the previous one.
const TABLES: usize = 3;
/// Log2 of the resolution gain from one table to the next: each covers the last 16 entries of the previous.
const REFINE_BITS: u32 = 6;
const TAIL_ENTRIES: usize = ENTRIES >> REFINE_BITS;
/// Upper bound on any configured time, in microseconds; a larger value is most likely a unit error.
pub(crate) const US_MAX: f64 = 60e6;

/// A tabulated distribution: 1024 quantiles, 1024 more for the last 64th, and 1024 more for the last 64th
/// of that. This resolves the tail to about one in a million, and a step is at most a 16th of the
/// probability beyond it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct QuantileTable {
    /// Nanoseconds by quantile: [`ENTRIES`] for each of the [`TABLES`].
    table: Box<[u32]>,
    constant: Option<u32>,
}

impl MixtureComponent {
    /// The cumulative distribution function at `us`.
    pub(crate) fn cdf(&self, us: f64) -> f64 {
        if self.sigma > 0.0 {
            if us <= 0.0 {
                return 0.0;
            }
            return normal_cdf((us / self.us.max(1e-9)).ln() / self.sigma);
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

impl QuantileTable {
    pub(crate) fn constant_ns(ns: u32) -> QuantileTable {
        QuantileTable { table: Box::new([]), constant: Some(ns) }
    }

    /// Tabulates a validated mixture; an empty one is the constant 0.
    pub(crate) fn new(components: &[MixtureComponent]) -> QuantileTable {
        let total: f64 = components.iter().map(|component| component.weight).sum();
        match components {
            [] => return QuantileTable::constant_ns(0),
            [only] if only.is_constant() => return QuantileTable::constant_ns(to_ns(only.us)),
            _ => {}
        }
        let below = |us: f64| components.iter().map(|c| c.cdf(us) * c.weight).sum::<f64>() / total;
        let step = 1.0 / ENTRIES as f64;
        let quantile = |rank: f64| to_ns(quantile_us(rank, below));
        let rank = |index: usize| {
            let part = 1.0 / f64::from(1u32 << (REFINE_BITS * (index / ENTRIES) as u32));
            1.0 - part * (1.0 - ((index % ENTRIES) as f64 + 0.5) * step)
        };
        let table: Box<[u32]> = (0..TABLES * ENTRIES).map(rank).map(quantile).collect();
        QuantileTable { table, constant: None }
    }

    /// The time in nanoseconds for a random `bits`, of which 22 are used.
    #[inline]
    pub(crate) fn sample(&self, bits: u32) -> u64 {
        if let Some(constant) = self.constant {
            return u64::from(constant);
        }
        let entry = bits as usize % ENTRIES;
        if entry >= ENTRIES - TAIL_ENTRIES {
            return self.tail(entry, bits >> BITS);
        }
        u64::from(self.table[entry])
    }

    /// A sample from the upper tail: one sample in 64.
    #[cold]
    fn tail(&self, entry: usize, mut bits: u32) -> u64 {
        let (mut table, mut entry) = (0, entry);
        while entry >= ENTRIES - TAIL_ENTRIES && table + 1 < TABLES {
            let finer = bits as usize % (1 << REFINE_BITS);
            entry = ((entry - (ENTRIES - TAIL_ENTRIES)) << REFINE_BITS) + finer;
            bits >>= REFINE_BITS;
            table += 1;
        }
        u64::from(self.table[table * ENTRIES + entry])
    }

    /// The value in nanoseconds if the distribution is a constant.
    pub(crate) fn constant_value_ns(&self) -> Option<u64> {
        self.constant.map(u64::from)
    }

    /// The smallest time in the table, in nanoseconds.
    pub(crate) fn min_ns(&self) -> u64 {
        self.constant.map_or_else(|| u64::from(self.table[0]), u64::from)
    }
}

/// A quantile by bisection: the smallest time up to [`US_MAX`], in microseconds, with `below(time) >= rank`.
pub(crate) fn quantile_us(rank: f64, below: impl Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (0.0, US_MAX);
    // 52 rounds reduce the interval of a minute to less than a nanosecond.
    for _ in 0..52 {
        let middle = (low + high) / 2.0;
        if below(middle) < rank { low = middle } else { high = middle }
    }
    high
}

fn to_ns(us: f64) -> u32 {
    (us * 1000.0).round() as u32
}

/// Cumulative distribution function of the standard normal distribution, by a Chebyshev approximation of
/// erfc with a relative error below 1.2e-7, which keeps far tails accurate.
fn normal_cdf(z: f64) -> f64 {
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
    use crate::rng::ModelRng;

    fn part(weight: f64, us: f64, sigma: f64, exp_us: f64) -> MixtureComponent {
        MixtureComponent { weight, us, sigma, exp_us }
    }

    fn samples(curve: &QuantileTable) -> Vec<u64> {
        let mut random = ModelRng::new(7);
        let mut samples: Vec<u64> = (0..400_000).map(|_| curve.sample(random.next_u64() as u32)).collect();
        samples.sort_unstable();
        samples
    }

    #[test]
    fn normal_cdf_matches_published_values() {
        // Abramowitz and Stegun, table 26.1.
        for (z, expected) in [(0.0, 0.5), (1.0, 0.841_344_75), (-2.0, 0.022_750_13), (3.0, 0.998_650_10)] {
            assert!((normal_cdf(z) - expected).abs() < 2e-7, "{z}: {}", normal_cdf(z));
        }
    }

    #[test]
    fn samples_match_the_quantiles_and_mean_of_the_mixture() {
        let curve = QuantileTable::new(&[part(2.0, 50.0, 0.0, 0.0), part(1.0, 60.0, 0.0, 30.0)]);
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
    fn the_tail_is_accurate_to_one_in_ten_thousand() {
        let samples = samples(&QuantileTable::new(&[part(1.0, 100.0, 0.5, 0.0)]));
        for (share, z) in [(0.5, 0.0), (0.99, 2.3263), (0.999, 3.0902), (0.9999, 3.7190)] {
            let measured = samples[(samples.len() as f64 * share) as usize] as f64;
            let expected = 100_000.0 * (0.5f64 * z).exp();
            assert!((measured / expected - 1.0).abs() < 0.02, "{share}: {measured} {expected}");
        }
    }

    #[test]
    fn a_constant_and_an_empty_mixture_are_exact() {
        assert_eq!(QuantileTable::new(&[part(1.0, 10.0, 0.0, 0.0)]).sample(77), 10_000);
        assert_eq!(QuantileTable::new(&[]).sample(77), 0);
    }
}
