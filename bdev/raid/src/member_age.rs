//! Which members have the newest data, by their superblocks and bitmaps.
//!
//! Superblocks and pages of the bitmap are written to one member after the other, and the next only when all
//! have the last. So a crash leaves a member one superblock or one page behind, never two; and nothing was
//! acknowledged that needs what it lacks. A member that is further behind is an older copy of itself, as a
//! backup or a snapshot that was put back.

use wire_raid::{IntentPage, MemberState, RaidSuperblock};

/// Pages of the bitmap between two that lack regions of the page before have generations within a multiple
/// of this.
const ERA: u64 = 1 << 16;

/// The generation of the page after one of `generation`, in the other place. With `drops` it lacks regions of
/// that one, and begins an era: what a member lacks with a page of the same era is in the bitmap.
pub(crate) fn next_generation(generation: u64, drops: bool) -> u64 {
    let next = generation + 1;
    if !drops {
        return next;
    }
    let era = next.next_multiple_of(ERA);
    era + (era + next) % 2
}

/// Whether no region has left the bitmap since a page of `then`, up to one of `now`.
pub(crate) fn is_same_era(then: u64, now: u64) -> bool {
    then / ERA >= now / ERA
}

/// What was found on a member.
#[derive(Clone, Debug)]
pub(crate) struct MemberOnDisk {
    pub(crate) superblock: RaidSuperblock,
    /// The newest valid page of the bitmap, whatever array it is of.
    pub(crate) page: Option<IntentPage>,
    /// The generation of the other page, if that is of the same array.
    pub(crate) generation_before: Option<u64>,
    /// The bitmap was read: without a page, there is none.
    pub(crate) is_page_read: bool,
}

impl MemberOnDisk {
    /// A member of which only the superblock is known.
    pub(crate) fn without_page(superblock: RaidSuperblock) -> MemberOnDisk {
        MemberOnDisk { superblock, page: None, generation_before: None, is_page_read: false }
    }
}

/// The ages of the members of an array that is to start.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MemberAges {
    /// Those with older data, and why.
    pub(crate) stale: Vec<(usize, String)>,
    /// The bit of the member whose superblock and bitmap are the newest; of several, the first.
    pub(crate) newest: u64,
    /// Bits of those that lack the newest page, which a crash has kept from them.
    pub(crate) behind: u64,
    /// One that is not stale lacks the newest superblock.
    pub(crate) lacks_superblock: bool,
}

impl MemberAges {
    /// Compares members by place, of an array whose newest superblock is `known`. Only those of which it says
    /// that they have the data are judged.
    pub(crate) fn of(known: &RaidSuperblock, members: &[(usize, &MemberOnDisk)]) -> MemberAges {
        let is_newest = |page: &&IntentPage| page.array == known.uuid && page.sequence == known.sequence;
        // After an update of the superblock that a crash has cut in two, there is none.
        let is_updated = members.iter().any(|(_, found)| found.page.as_ref().filter(is_newest).is_some());
        let has_data = |place: usize| {
            let mut listed = known.members.iter();
            listed.any(|member| usize::from(member.slot) == place && member.state == MemberState::Configured)
        };
        let judged: Vec<(usize, &MemberOnDisk)> =
            members.iter().copied().filter(|(place, _)| has_data(*place)).collect();
        let with_newest =
            |found: &MemberOnDisk| found.page.as_ref().filter(is_newest).map(|page| page.generation);
        let newest_page = judged.iter().filter_map(|(_, found)| with_newest(found)).max();
        let holders = judged.iter().filter(|(_, found)| with_newest(found) == newest_page);
        let before = holders.filter_map(|(_, found)| found.generation_before).max().unwrap_or(0);
        let mut ages = MemberAges::default();
        let mut best = None;
        for (place, found) in judged {
            let own = found.superblock.sequence;
            let is_cut = own + 1 == known.sequence && !is_updated;
            if own < known.sequence && !is_cut {
                let newest = known.sequence;
                let reason = format!("its superblock has the sequence number {own}, and the newest {newest}");
                ages.stale.push((place, reason));
                continue;
            }
            let page = found.page.as_ref().filter(|page| page.array == known.uuid);
            let generation = page.map_or(0, |page| page.generation);
            if let Some(newest) = newest_page.filter(|_| found.is_page_read) {
                if generation < before {
                    let reason =
                        format!("its bitmap has the generation {generation}, and the newest {newest}");
                    ages.stale.push((place, reason));
                    continue;
                }
                ages.behind |= u64::from(generation < newest) << place;
            }
            ages.lacks_superblock |= is_cut;
            let age = (own, with_newest(found));
            if best.is_none_or(|best| age > best) {
                best = Some(age);
                ages.newest = 1 << place;
            }
        }
        ages
    }
}

#[cfg(test)]
mod tests {
    use wire_raid::{RaidLevel, RaidMember, Uuid};

    use super::*;

    const ARRAY: Uuid = Uuid::from_u128(1);

    fn superblock(sequence: u64) -> RaidSuperblock {
        let member = |slot| RaidMember {
            uuid: Uuid::from_u128(2 + u128::from(slot)),
            data_offset: 2048,
            data_blocks: 4096,
            state: MemberState::Configured,
            slot,
        };
        RaidSuperblock {
            uuid: ARRAY,
            name: "r".into(),
            blocks: 4096,
            block_bytes: 512,
            level: RaidLevel::Raid1,
            strip_blocks: 0,
            sequence,
            slots: 3,
            members: (0..3).map(member).collect(),
        }
    }

    /// A member with a superblock, and a page of a sequence number with its generation and the one before.
    fn member(own: u64, page: Option<(u64, u64, u64)>) -> MemberOnDisk {
        let of = |(sequence, generation, _)| IntentPage {
            array: ARRAY,
            sequence,
            complete_since: 1,
            generation,
            is_clean: true,
            region_shift: 7,
            regions: 1,
            bits: vec![0],
        };
        MemberOnDisk {
            superblock: superblock(own),
            page: page.map(of),
            generation_before: page.map(|(_, _, before)| before),
            is_page_read: true,
        }
    }

    /// Places of stale members, and the bits of the newest and of those behind.
    fn judge(newest: u64, members: &[MemberOnDisk]) -> (Vec<usize>, u64, u64) {
        let members: Vec<(usize, &MemberOnDisk)> = members.iter().enumerate().collect();
        let ages = MemberAges::of(&superblock(newest), &members);
        (ages.stale.iter().map(|(place, _)| *place).collect(), ages.newest, ages.behind)
    }

    #[test]
    fn a_member_that_is_further_behind_than_a_crash_leaves_it_is_stale() {
        let page = |generation| member(4, Some((4, generation, generation - 1)));
        assert_eq!(judge(4, &[page(9), page(9), page(9)]), (vec![], 1, 0));
        // A page that a crash has cut in two.
        assert_eq!(judge(4, &[page(8), page(9), page(8)]), (vec![], 0b10, 0b101));
        assert_eq!(judge(4, &[page(7), page(9), page(9)]), (vec![0], 0b10, 0));
        assert_eq!(judge(4, &[page(9), member(4, None), page(9)]), (vec![1], 1, 0));
        // The page before one that begins an era is no number below it.
        let era = member(4, Some((4, ERA, 9)));
        assert_eq!(judge(4, &[page(9), era.clone(), era.clone()]), (vec![], 0b10, 1));
        assert_eq!(judge(4, &[page(8), era.clone(), era]), (vec![0], 0b10, 0));
        // A superblock that a crash has cut in two, with the pages of before.
        let cut = member(5, Some((4, 9, 8)));
        assert_eq!(judge(5, &[page(9), cut.clone(), page(9)]), (vec![], 0b10, 0));
        // No crash leaves two, nor a page after the superblock that one lacks.
        let old = member(3, Some((3, 5, 4)));
        assert_eq!(judge(5, &[old, cut.clone(), page(9)]), (vec![0], 0b10, 0));
        let whole = member(5, Some((5, 10, 9)));
        assert_eq!(judge(5, &[page(9), whole, cut]), (vec![0], 0b10, 0b100));
    }

    #[test]
    fn members_that_cannot_be_compared_are_taken_as_they_are() {
        // SPDK was last, which counts in superblocks and leaves pages.
        let spdk = |generation| member(7, Some((4, generation, generation - 1)));
        assert_eq!(judge(7, &[spdk(3), spdk(90), member(7, None)]), (vec![], 1, 0));
        // The first page ever.
        let first = member(4, Some((4, 2, 0)));
        assert_eq!(judge(4, &[first, member(4, None)]), (vec![], 1, 0b10));
        let unread = MemberOnDisk { is_page_read: false, ..member(4, None) };
        assert_eq!(judge(4, &[unread, member(4, Some((4, 9, 8)))]), (vec![], 0b10, 0));
        assert_eq!(judge(4, &[]), (vec![], 0, 0));
    }

    #[test]
    fn an_era_ends_with_the_page_that_lacks_regions() {
        assert_eq!(next_generation(8, false), 9);
        for generation in [1, 2, ERA - 2, ERA - 1, ERA, 3 * ERA + 7] {
            let next = next_generation(generation, true);
            assert!(!is_same_era(generation, next) && is_same_era(next, next + ERA / 2), "{generation}");
            assert_eq!((next + generation) % 2, 1, "the other place");
        }
    }
}
