//! Random numbers that cost a multiplication.

/// A generator of the wyrand kind: an additive counter, mixed by one wide multiplication. Good for
/// placing I/O; not for secrets.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed`.
    pub const fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0xa076_1d64_78bd_642f);
        let wide = u128::from(self.0) * u128::from(self.0 ^ 0xe703_7ed1_a0b4_28db);
        (wide >> 64) as u64 ^ wide as u64
    }

    /// A number below `bound`, by multiply and shift. The bias is below `bound` in 2^64.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_bits()) * u128::from(bound)) >> 64) as u64
    }

    /// A number above 0 and at most 1.
    #[inline]
    pub fn fraction(&mut self) -> f64 {
        ((self.next_bits() >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// The time to the next of events that come once in a while of 1 and know nothing of each other.
    #[inline]
    pub fn exponential(&mut self) -> f64 {
        -self.fraction().ln()
    }

    /// From the normal distribution of mean 0 and deviation 1 (G. Box and M. Muller).
    pub fn normal(&mut self) -> f64 {
        (2.0 * self.exponential()).sqrt() * (std::f64::consts::TAU * self.fraction()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_below_a_bound_fill_it_evenly() {
        let mut random = Random::new(1);
        let mut counts = [0u32; 10];
        for _ in 0..100_000 {
            counts[random.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|count| count.abs_diff(10_000) < 500), "{counts:?}");
    }

    #[test]
    fn a_seed_repeats() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            [random.next_bits(), random.next_bits()]
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }
}
