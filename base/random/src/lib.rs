//! The seeded pseudo-random generator of the tree: offsets, data, arrival times, faults and simulations.
//!
//! [`WyRand`] is the generator of Wang Yi's wyhash, final version 3 (`wyrand` in `wyhash.h`, in the public domain): a
//! counter, and one wide multiplication per number. A load generator draws a number for each I/O, so it must cost
//! little; xoshiro256** costs about twice as many instructions and four times the state. It is not cryptographically
//! secure. The sequence of a seed never changes, because verify patterns on disk are made of it.
//!
//! ```
//! let mut random = random::WyRand::new(42);
//! assert!(random.below(6) < 6);
//! let mut of_a_component = random.split();
//! assert_ne!(of_a_component.next_bits(), random.next_bits());
//! ```
#![forbid(unsafe_code)]

/// The wyrand generator: a counter mixed by one wide multiplication per number.
///
/// Equal seeds give equal sequences on every platform. A clone repeats the sequence; [`split`](Self::split) starts
/// another one.
#[derive(Clone, Debug)]
pub struct WyRand(u64);

impl WyRand {
    /// Starts the sequence of `seed`.
    pub const fn new(seed: u64) -> WyRand {
        WyRand(seed)
    }

    /// A generator with a sequence of its own, for a component whose draws must not shift those of others. It draws
    /// one number.
    pub fn split(&mut self) -> WyRand {
        WyRand(self.next_bits())
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0xa076_1d64_78bd_642f);
        let wide = u128::from(self.0) * u128::from(self.0 ^ 0xe703_7ed1_a0b4_28db);
        (wide >> 64) as u64 ^ wide as u64
    }

    /// A number below `bound`, by multiply and shift; 0 if `bound` is 0. The bias is below `bound` in 2^64.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_bits()) * u128::from(bound)) >> 64) as u64
    }

    /// As [`below`](Self::below), for an index.
    #[inline]
    pub fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    /// True in `per_mille` of 1000 cases. Draws no number if it cannot be true.
    #[inline]
    pub fn happens(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    /// A number above 0 and at most 1.
    #[inline]
    pub fn fraction(&mut self) -> f64 {
        ((self.next_bits() >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// An exponentially distributed number with mean 1.
    #[inline]
    pub fn exponential(&mut self) -> f64 {
        -self.fraction().ln()
    }

    /// A normally distributed number with mean 0 and deviation 1 (Box-Muller transform).
    pub fn normal(&mut self) -> f64 {
        (2.0 * self.exponential()).sqrt() * (std::f64::consts::TAU * self.fraction()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers that `wyrand` of `wyhash.h` (final version 3), compiled as C, returns.
    #[test]
    fn sequences_are_those_of_the_reference() {
        let draw = |seed| {
            let mut random = WyRand::new(seed);
            [(); 4].map(|()| random.next_bits())
        };
        let zero =
            [0x111c_b3a7_8f59_a58e, 0xceab_d938_ff4e_856d, 0x61fb_5131_8f47_d2a4, 0x78bd_03c4_9190_9760];
        let answer =
            [0xae4a_7cbf_dda9_b434, 0xe9cc_09d3_3d38_d9d2, 0xcb57_5651_2b93_433a, 0xeb29_b2a1_320e_1a71];
        let last =
            [0xba1d_c814_e82d_5d44, 0x57ac_cfe8_5fe2_9d15, 0x3afa_6e61_6fb3_aa6f, 0x6cfb_4186_0897_62e0];
        assert_eq!(draw(0), zero);
        assert_eq!(draw(42), answer);
        assert_eq!(draw(u64::MAX), last);
    }

    #[test]
    fn numbers_below_a_bound_are_uniform() {
        let mut random = WyRand::new(1);
        let mut counts = [0u32; 10];
        for _ in 0..100_000 {
            counts[random.index(10)] += 1;
        }
        assert!(counts.iter().all(|count| count.abs_diff(10_000) < 500), "{counts:?}");
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn rates_hold_and_an_impossible_event_draws_nothing() {
        let mut random = WyRand::new(9);
        let count = (0..100_000).filter(|_| random.happens(250)).count();
        assert!(count.abs_diff(25_000) < 700, "{count}");
        let mut untouched = random.clone();
        assert!(!random.happens(0));
        assert_eq!(random.next_bits(), untouched.next_bits());
        assert!((0..1000).all(|_| random.happens(1000)));
    }

    #[test]
    fn split_generators_differ_from_each_other_and_from_their_parent() {
        let mut parent = WyRand::new(3);
        let mut draws: Vec<u64> = (0..100).map(|_| parent.split().next_bits()).collect();
        draws.extend((0..100).map(|_| parent.next_bits()));
        draws.sort_unstable();
        draws.dedup();
        assert_eq!(draws.len(), 200);
    }
}
