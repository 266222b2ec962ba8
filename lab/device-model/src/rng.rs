//! A seeded pseudo-random generator that costs one wide multiplication per number.

/// An additive counter mixed by one wide multiplication. Not cryptographic. Not `random::WyRand`, because the shipped
/// profiles were fitted to published figures with this sequence.
#[derive(Clone, Debug)]
pub(crate) struct ModelRng(u64);

impl ModelRng {
    pub(crate) const fn new(seed: u64) -> ModelRng {
        ModelRng(seed)
    }

    #[inline]
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let wide = u128::from(self.0 ^ 0xd1b5_4a32_d192_ed03) * 0xaef1_7502_108e_f2d9;
        (wide >> 64) as u64 ^ wide as u64
    }

    /// A number below `bound`; the bias is at most `bound` / 2^64.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}

/// A uniform hash of an address (the finalizer of SplitMix64, shortened).
#[inline]
pub(crate) fn mix_address(address: u64) -> u64 {
    let mixed = (address ^ (address >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb)
}
