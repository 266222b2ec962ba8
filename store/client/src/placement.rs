//! Where the objects of a volume are.

use wire_store::{OBJECT_BYTES, ObjectId};

/// Requests in flight on one channel: fewer than a client's numbers that replicas tell apart.
pub(crate) const DEPTH: u32 = 512;

/// The objects of a volume: each belongs to a logical group of the pool.
pub(crate) struct Placement {
    pub(crate) first_group: u32,
    pub(crate) groups: u32,
    pub(crate) volume: u64,
}

impl Placement {
    /// The objects of another volume of the pool.
    pub(crate) fn of(&self, volume: u64) -> Placement {
        Placement { volume, ..*self }
    }

    /// The object with the bytes from `offset` of the volume on, and the offset in it.
    pub(crate) fn locate(&self, offset: u64) -> (ObjectId, u32) {
        let index = (offset / OBJECT_BYTES as u64) as u32;
        let group = self.group_of(index);
        (ObjectId { group, volume: self.volume, index, suffix: 0 }, (offset % OBJECT_BYTES as u64) as u32)
    }

    /// The logical group of the object with this index.
    pub(crate) fn group_of(&self, index: u32) -> u32 {
        let groups = u64::from(self.groups);
        self.first_group + ((self.volume % groups + u64::from(index) % groups) % groups) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_where_they_were_and_no_volume_is_too_high() {
        for (volume, index) in [(1, 0), (7, 5), (12_345, 4_000_000_000)] {
            let placement = Placement { first_group: 8, groups: 6, volume };
            assert_eq!(u64::from(placement.group_of(index)), 8 + (volume + u64::from(index)) % 6);
        }
        let placement = Placement { first_group: 8, groups: 6, volume: u64::MAX };
        assert!((8..14).contains(&placement.group_of(u32::MAX)));
    }
}
