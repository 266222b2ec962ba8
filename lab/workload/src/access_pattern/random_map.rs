//! Which parts of a region random I/O has accessed in a pass, where a permutation cannot tell: with several
//! block sizes, or in strided zones.

/// A bitmap of a region's units with summaries, so that the next free unit is found in a few steps. One bit a
/// unit and a 63rd for the summaries: 32 MiB for a TiB in units of 4 KiB.
#[derive(Clone, Debug)]
pub(super) struct RandomMap {
    units: u64,
    /// The bits of level 0 are units that were accessed; those of a higher level are full words of the level
    /// below.
    levels: Vec<Box<[u64]>>,
}

impl RandomMap {
    /// Most units of a map: half a GiB of memory. Larger regions have none.
    pub(super) const UNITS_MAX: u64 = 1 << 32;

    pub(super) fn new(units: u64) -> RandomMap {
        let (mut levels, mut bits) = (Vec::new(), units.max(1));
        loop {
            let words = bits.div_ceil(64);
            let mut level = vec![0u64; words as usize].into_boxed_slice();
            // Bits beyond the last one are never free.
            if let (Some(last), false) = (level.last_mut(), bits.is_multiple_of(64)) {
                *last = u64::MAX << (bits % 64);
            }
            levels.push(level);
            if words == 1 {
                return RandomMap { units, levels };
            }
            bits = words;
        }
    }

    pub(super) fn units(&self) -> u64 {
        self.units
    }

    pub(super) fn is_free(&self, unit: u64) -> bool {
        unit < self.units && self.levels[0][(unit / 64) as usize] >> (unit % 64) & 1 == 0
    }

    /// Marks units as accessed; those beyond the end are ignored.
    pub(super) fn mark(&mut self, first: u64, count: u64) {
        for unit in first..first.saturating_add(count).min(self.units) {
            let mut bit = unit;
            for level in &mut self.levels {
                let word = &mut level[(bit / 64) as usize];
                *word |= 1 << (bit % 64);
                if *word != u64::MAX {
                    break;
                }
                bit /= 64;
            }
        }
    }

    /// The first free unit at or behind `from`.
    pub(super) fn next_free(&self, from: u64) -> Option<u64> {
        let mut at = from;
        for (height, level) in self.levels.iter().enumerate() {
            let word = (at / 64) as usize;
            let free = level.get(word).map_or(0, |word| !word & u64::MAX << (at % 64));
            if free != 0 {
                let lowest = |word: u64, index: u64| index * 64 + u64::from(word.trailing_zeros());
                let bit = lowest(free, word as u64);
                let below = self.levels[..height].iter().rev();
                return Some(below.fold(bit, |bit, level| lowest(!level[bit as usize], bit)));
            }
            at = word as u64 + 1;
        }
        None
    }

    /// How many units from `first` on are free, at most `most`.
    pub(super) fn free_run(&self, first: u64, most: u64) -> u64 {
        (0..most).take_while(|offset| self.is_free(first + offset)).count() as u64
    }

    /// Frees the units of a range.
    pub(super) fn clear(&mut self, first: u64, count: u64) {
        let end = first.saturating_add(count).min(self.units);
        let mut unit = first;
        while unit < end {
            let word = unit / 64;
            let next = ((word + 1) * 64).min(end);
            let above = if next.is_multiple_of(64) { 0 } else { u64::MAX << (next % 64) };
            let mask = u64::MAX << (unit % 64) & !above;
            self.levels[0][word as usize] &= !mask;
            let mut bit = word;
            for level in &mut self.levels[1..] {
                level[(bit / 64) as usize] &= !(1 << (bit % 64));
                bit /= 64;
            }
            unit = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WyRand;

    #[test]
    fn a_map_agrees_with_a_list_of_flags() {
        let seed = 7;
        let mut random = WyRand::new(seed);
        for units in [1u64, 63, 64, 65, 4096, 4097, 64 * 64 * 3 + 5] {
            let mut map = RandomMap::new(units);
            let mut used = vec![false; units as usize];
            for step in 0..2000 {
                let first = random.below(units);
                let count = random.below(200) + 1;
                let end = (first + count).min(units);
                let clears = random.below(4) == 0;
                used[first as usize..end as usize].fill(!clears);
                if clears {
                    map.clear(first, count)
                } else {
                    map.mark(first, count)
                }
                let from = random.below(units + 1);
                let expected = (from..units).find(|unit| !used[*unit as usize]);
                assert_eq!(map.next_free(from), expected, "{units} units, step {step}, seed {seed}");
                assert!(!map.is_free(units));
                if let Some(at) = expected {
                    let run = used[at as usize..].iter().take(100).take_while(|used| !**used).count() as u64;
                    assert_eq!(map.free_run(at, 100), run, "{units} units, step {step}, seed {seed}");
                }
            }
            map.clear(0, units);
            assert_eq!((map.next_free(0), map.next_free(units - 1)), (Some(0), Some(units - 1)));
        }
    }
}
