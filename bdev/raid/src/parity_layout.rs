//! Where the blocks of raid5f are.

use std::ops::Range;

use crate::layout::StripePiece;

/// Stripes of a strip on each member, one of which has the parity of the others.
///
/// Data strips follow each other in the order of the members, without the one with the parity. That is the
/// last member in the first stripe, the one before in the next, and so on, as in SPDK's module. A *row* is a
/// block of a member's data: the exclusive or of a row of all members is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParityLayout {
    members: u64,
    shift: u32,
}

impl ParityLayout {
    /// Of `members`, at least 3, with strips of `strip_blocks`, a power of two.
    ///
    /// # Panics
    /// If that is none, or there are fewer members.
    pub fn new(members: usize, strip_blocks: u32) -> ParityLayout {
        assert!(strip_blocks.is_power_of_two() && members > 2, "{strip_blocks} blocks on {members} members");
        ParityLayout { members: members as u64, shift: strip_blocks.trailing_zeros() }
    }

    /// Number of members.
    pub fn members(&self) -> usize {
        self.members as usize
    }

    /// Blocks of a strip.
    pub fn strip_blocks(&self) -> u64 {
        1 << self.shift
    }

    /// Blocks of the array in a stripe.
    pub fn stripe_blocks(&self) -> u64 {
        (self.members - 1) << self.shift
    }

    /// The stripe of a block of the array.
    pub fn stripe_of(&self, lba: u64) -> u64 {
        lba / self.stripe_blocks()
    }

    /// The member with the parity of a stripe.
    pub fn parity_place(&self, stripe: u64) -> usize {
        (self.members - 1 - stripe % self.members) as usize
    }

    /// The member with a data strip of a stripe, by its index from 0.
    pub fn data_place(&self, stripe: u64, index: usize) -> usize {
        index + usize::from(index >= self.parity_place(stripe))
    }

    /// The rows of a stripe.
    pub fn rows_of(&self, stripe: u64) -> Range<u64> {
        stripe << self.shift..(stripe + 1) << self.shift
    }

    /// The stripe of a row.
    pub fn stripe_of_row(&self, row: u64) -> u64 {
        row >> self.shift
    }

    /// The blocks of the array in all stripes of some rows, which are not empty.
    pub fn blocks_of_rows(&self, rows: &Range<u64>) -> Range<u64> {
        let last = (rows.end - 1) >> self.shift;
        (rows.start >> self.shift) * self.stripe_blocks()..(last + 1) * self.stripe_blocks()
    }

    /// The first piece of a range inside the array: of a strip.
    pub fn piece(&self, lba: u64, blocks: u64) -> StripePiece {
        let (stripe, within) = (self.stripe_of(lba), lba % self.stripe_blocks());
        let offset = within & (self.strip_blocks() - 1);
        StripePiece {
            place: self.data_place(stripe, (within >> self.shift) as usize),
            lba: (stripe << self.shift) | offset,
            blocks: blocks.min(self.strip_blocks() - offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parity_moves_down_from_the_last_member_as_in_spdk() {
        let layout = ParityLayout::new(4, 8);
        let places: Vec<usize> = (0..6).map(|stripe| layout.parity_place(stripe)).collect();
        assert_eq!(places, [3, 2, 1, 0, 3, 2]);
        let data = |stripe| (0..3).map(|index| layout.data_place(stripe, index)).collect::<Vec<usize>>();
        assert_eq!([data(0), data(1), data(2), data(3)], [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]);
    }

    #[test]
    fn pieces_are_whole_strips_but_the_ends() {
        let layout = ParityLayout::new(3, 4);
        // Stripe 1 has rows 4 to 7, blocks 8 to 15, and its parity on member 1.
        assert_eq!(layout.piece(9, 100), StripePiece { place: 0, lba: 5, blocks: 3 });
        assert_eq!(layout.piece(12, 100), StripePiece { place: 2, lba: 4, blocks: 4 });
        assert_eq!((layout.rows_of(1), layout.blocks_of_rows(&(5..6))), (4..8, 8..16));
        assert_eq!(layout.blocks_of_rows(&(3..5)), 0..16);
    }

    #[test]
    fn every_block_has_a_row_of_its_own() {
        for (members, strip) in [(3, 1), (4, 2), (5, 8)] {
            let layout = ParityLayout::new(members, strip);
            let blocks = layout.stripe_blocks() * 12;
            let mut taken = std::collections::BTreeSet::new();
            for lba in 0..blocks {
                let piece = layout.piece(lba, 1);
                assert_ne!(piece.place, layout.parity_place(layout.stripe_of(lba)));
                assert_eq!(layout.stripe_of_row(piece.lba), layout.stripe_of(lba));
                assert!(taken.insert((piece.place, piece.lba)), "block {lba} of {layout:?}");
            }
        }
    }
}
