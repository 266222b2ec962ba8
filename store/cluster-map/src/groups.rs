//! Numbers of logical groups and of volumes, of which none is given twice.

use std::ops::Range;

use uuid::Uuid;

use crate::{MapError, PoolRecord};

/// Numbers below are those that earlier releases counted, and those of a cluster's first pool.
pub(crate) const COUNTED_END: u32 = 1 << 20;
/// No group has this number or a higher one: the last ones say that a partition is spare.
const GROUPS_END: u32 = u32::MAX - COUNTED_END;
/// Attempts to find groups that are free. With a million groups one in a thousand fails.
const ATTEMPTS_MAX: usize = 64;

fn random() -> u128 {
    Uuid::new_v4().as_u128()
}

/// The volume of a new image. A map that is an older copy of itself does not know which were given, so they
/// are not counted: a random one was given before with a probability of 2⁻⁶³ for each image.
pub fn random_volume() -> u64 {
    // The version and the variant of a UUID are in its middle. Those below are what earlier releases counted.
    let volume = (random() >> 64) as u64 ^ random() as u64;
    (volume >> 1) | 1 << 32
}

/// Groups that no pool has or had, as far as is known: 0 if none ever was.
pub(crate) fn free_groups(groups: u32, counted_end: u32, taken: &[Range<u32>]) -> Result<u32, MapError> {
    let none = || MapError::Invalid(format!("there are no {groups} groups that are free"));
    if taken.is_empty() && counted_end == 0 {
        return Ok(0);
    }
    let starts =
        GROUPS_END.checked_sub(COUNTED_END).and_then(|all| all.checked_sub(groups)).ok_or_else(none)?;
    let candidates = std::iter::repeat_with(|| COUNTED_END + (random() as u32) % starts);
    let is_free = |first: &u32| {
        let end = first + groups;
        *first >= counted_end && taken.iter().all(|range| end <= range.start || range.end <= *first)
    };
    candidates.take(ATTEMPTS_MAX).find(is_free).ok_or_else(none)
}

/// The groups of a pool.
pub(crate) fn range_of(pool: &PoolRecord) -> Range<u32> {
    pool.first_group..pool.first_group.saturating_add(pool.groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_groups_begin_with_0_and_others_are_random() {
        assert_eq!(free_groups(8, 0, &[]).unwrap(), 0);
        let first = Range { start: 0, end: 8 };
        // A map that forgot the pools that were made after a snapshot gives their numbers to no other one.
        let mut seen = vec![first.clone()];
        for _ in 0..1000 {
            let start = free_groups(8, 8, std::slice::from_ref(&first)).unwrap();
            assert!((COUNTED_END..=GROUPS_END - 8).contains(&start));
            assert!(seen.iter().all(|range| start + 8 <= range.start || range.end <= start), "{start}");
            seen.push(start..start + 8);
        }
        // What is known is left out for certain.
        let all_but_few = [first, COUNTED_END..GROUPS_END - 100];
        assert!(free_groups(200, 8, &all_but_few).is_err());
        assert!(free_groups(u32::MAX, 8, &[]).is_err());
    }

    #[test]
    fn volumes_are_random_and_not_those_that_were_counted() {
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..1000 {
            let volume = random_volume();
            assert!((1 << 32..1 << 63).contains(&volume));
            assert!(seen.insert(volume));
        }
    }
}
