//! Where the blocks of raid0 and concat are.

/// The part of a range that is on one member, and contiguous there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripePiece {
    /// The member's place in the array.
    pub place: usize,
    /// First block of the member's data.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// Where the blocks of an array without redundancy are on its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StripeLayout {
    /// Strips of 2^`shift` blocks on each of `members` in turn.
    Raid0 {
        /// Number of members.
        members: u64,
        /// Binary logarithm of the blocks of a strip.
        shift: u32,
    },
    /// One member after the other: the array's block after the last one of each.
    Concat {
        /// In the order of the members.
        ends: Vec<u64>,
    },
}

impl StripeLayout {
    /// raid0 of `members` with strips of `strip_blocks`, a power of two.
    ///
    /// # Panics
    /// If that is none, or there are no members.
    pub fn raid0(members: usize, strip_blocks: u32) -> StripeLayout {
        assert!(strip_blocks.is_power_of_two() && members > 0, "{strip_blocks} blocks on {members} members");
        StripeLayout::Raid0 { members: members as u64, shift: strip_blocks.trailing_zeros() }
    }

    /// concat of members with these numbers of blocks, whose sum is below 2^64.
    pub fn concat(blocks: impl IntoIterator<Item = u64>) -> StripeLayout {
        let mut end = 0;
        let add = |blocks: u64| {
            end += blocks;
            end
        };
        StripeLayout::Concat { ends: blocks.into_iter().map(add).collect() }
    }

    /// The first piece of a range inside the array: of a strip or a member.
    #[inline]
    pub fn piece(&self, lba: u64, blocks: u64) -> StripePiece {
        match self {
            StripeLayout::Raid0 { members, shift } => {
                let strip_blocks = 1u64 << *shift;
                let (strip, offset) = (lba >> *shift, lba & (strip_blocks - 1));
                let (row, place) = (strip / *members, strip % *members);
                // One member has all strips in a row.
                let rest = if *members == 1 { blocks } else { strip_blocks - offset };
                StripePiece { place: place as usize, lba: (row << *shift) | offset, blocks: blocks.min(rest) }
            }
            StripeLayout::Concat { ends } => {
                // Few: a search by halves would cost more.
                let place = ends.iter().take_while(|end| **end <= lba).count().min(ends.len() - 1);
                let start = if place == 0 { 0 } else { ends[place - 1] };
                StripePiece { place, lba: lba - start, blocks: blocks.min(ends[place] - lba) }
            }
        }
    }

    /// The array's block of a block of a member's data: the inverse of [`piece`](Self::piece).
    #[inline]
    pub fn array_lba(&self, place: usize, lba: u64) -> u64 {
        match self {
            StripeLayout::Raid0 { members, shift } => {
                let (row, offset) = (lba >> *shift, lba & ((1u64 << *shift) - 1));
                ((row * *members + place as u64) << *shift) | offset
            }
            StripeLayout::Concat { ends } => lba + if place == 0 { 0 } else { ends[place - 1] },
        }
    }

    /// What of a range is on each member, for operations without data: at most one piece a member, as the
    /// strips of a member follow each other there. The range is not empty.
    pub fn pieces_by_member(&self, lba: u64, blocks: u64) -> impl Iterator<Item = StripePiece> {
        let members = match self {
            StripeLayout::Raid0 { members, .. } => *members as usize,
            StripeLayout::Concat { ends } => ends.len(),
        };
        (0..members).filter_map(move |place| {
            let (start, end) = (self.first_on(place, lba), self.first_on(place, lba + blocks));
            (end > start).then_some(StripePiece { place, lba: start, blocks: end - start })
        })
    }

    /// The first block of a member that is at `lba` of the array or behind it.
    fn first_on(&self, place: usize, lba: u64) -> u64 {
        match self {
            StripeLayout::Raid0 { members, shift } => {
                let shift = *shift;
                let (strip, offset) = (lba >> shift, lba & ((1u64 << shift) - 1));
                let (row, at) = (strip / *members, strip % *members);
                match (place as u64).cmp(&at) {
                    std::cmp::Ordering::Less => (row + 1) << shift,
                    std::cmp::Ordering::Equal => (row << shift) | offset,
                    std::cmp::Ordering::Greater => row << shift,
                }
            }
            StripeLayout::Concat { ends } => {
                let start = if place == 0 { 0 } else { ends[place - 1] };
                lba.clamp(start, ends[place]) - start
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The member and its block for each block of an array, counted one by one.
    fn model(layout: &StripeLayout, blocks: u64) -> Vec<(usize, u64)> {
        match layout {
            StripeLayout::Raid0 { members, shift } => {
                let strip = 1u64 << *shift;
                let mut next = vec![0; *members as usize];
                (0..blocks)
                    .map(|lba| {
                        let place = (lba / strip % members) as usize;
                        next[place] += 1;
                        (place, next[place] - 1)
                    })
                    .collect()
            }
            StripeLayout::Concat { ends } => {
                let starts: Vec<u64> = std::iter::once(0).chain(ends.iter().copied()).collect();
                let of_member = |place: usize| (0..ends[place] - starts[place]).map(move |lba| (place, lba));
                (0..ends.len()).flat_map(of_member).collect()
            }
        }
    }

    fn layouts() -> impl Strategy<Value = (StripeLayout, u64)> {
        let raid0 = (1..6usize, 0..5u32, 1..6u64).prop_map(|(members, shift, rows)| {
            (StripeLayout::raid0(members, 1 << shift), (members as u64 * rows) << shift)
        });
        let concat = prop::collection::vec(1..40u64, 1..6).prop_map(|blocks| {
            let total = blocks.iter().sum();
            (StripeLayout::concat(blocks), total)
        });
        raid0.boxed().prop_union(concat.boxed())
    }

    proptest! {
        #[test]
        fn pieces_are_the_blocks_of_the_model((layout, total) in layouts(), at in any::<u64>(), size in any::<u64>()) {
            let model = model(&layout, total);
            let lba = at % total;
            let blocks = size % (total - lba) + 1;
            let expected = &model[lba as usize..][..blocks as usize];
            let mut found = Vec::new();
            while (found.len() as u64) < blocks {
                let done = found.len() as u64;
                let piece = layout.piece(lba + done, blocks - done);
                prop_assert!(piece.blocks > 0);
                prop_assert_eq!(layout.array_lba(piece.place, piece.lba), lba + done);
                found.extend((0..piece.blocks).map(|block| (piece.place, piece.lba + block)));
            }
            prop_assert_eq!(&found, expected);
            let mut by_member: Vec<(usize, u64)> = Vec::new();
            for piece in layout.pieces_by_member(lba, blocks) {
                by_member.extend((0..piece.blocks).map(|block| (piece.place, piece.lba + block)));
            }
            found.sort_unstable();
            prop_assert_eq!(by_member, found);
        }
    }
}
