//! Lists of what a group has, for clients that remove volumes: cost follows what is allocated.

use std::collections::{BTreeMap, BTreeSet};

use objects::WrittenBlocks;
use wire_replica::{ListedVolume, Listing, encode_list};
use wire_store::{BlockBitmap, ObjectId, OnodeContent};

use super::Shard;

impl Shard {
    /// The answer to a read that lists: the objects, or volumes, that there are when the committed entries
    /// are in place.
    pub(super) fn list(&self, group: u32, listing: Listing, bytes: usize) -> Vec<u8> {
        if let Listing::Written { volume, index } = listing {
            let written = self.written_blocks(ObjectId { group, volume, index, suffix: 0 });
            return encode_list([written], bytes);
        }
        let changed: BTreeSet<ObjectId> = self.committed.iter().map(|entry| entry.header.object).collect();
        let changed = changed.into_iter().filter_map(|object| Some((object, self.extents_of(object)?)));
        let changed: BTreeMap<ObjectId, u64> = changed.collect();
        // What entries have removed is in place until they are.
        let is_unchanged = |object: ObjectId| !self.unapplied.contains_key(&object);
        match listing {
            Listing::Objects { volume, from } => {
                let (first, last) = (
                    ObjectId { group, volume, index: from, suffix: 0 },
                    ObjectId { group, volume, index: u32::MAX, suffix: u64::MAX },
                );
                let stored = self.partition.objects_between(first, last);
                let stored =
                    stored.filter(|object| is_unchanged(*object) || self.extents_of(*object).is_some());
                let mut found: Vec<u32> = stored.map(|object| object.index).collect();
                found.extend(changed.range(first..=last).map(|(object, _)| object.index));
                found.sort_unstable();
                found.dedup();
                encode_list(found, bytes)
            }
            Listing::Volumes { from } => {
                let mut volumes = BTreeMap::new();
                let mut add = |volume: u64, extents: u32| {
                    let new = ListedVolume { volume, objects: 0, extents: 0 };
                    let listed: &mut ListedVolume = volumes.entry(volume).or_insert(new);
                    listed.objects += 1;
                    listed.extents += extents;
                };
                for onode in self.partition.objects_of_group(group).filter(|onode| onode.id.volume >= from) {
                    if !is_unchanged(onode.id) {
                        if let (false, Some(extents)) =
                            (changed.contains_key(&onode.id), self.extents_of(onode.id))
                        {
                            add(onode.id.volume, extents.count_ones());
                        }
                        continue;
                    }
                    let extents = match &onode.content {
                        OnodeContent::Mapped(map) => {
                            map.extents.iter().filter(|extent| **extent != 0).count()
                        }
                        OnodeContent::Inline(_) => 0,
                    };
                    add(onode.id.volume, extents as u32);
                }
                for (object, extents) in changed.iter().filter(|(object, _)| object.volume >= from) {
                    add(object.volume, extents.count_ones());
                }
                encode_list(volumes.into_values(), bytes)
            }
            Listing::Written { .. } => unreachable!("it was answered"),
        }
    }

    /// The blocks of an object that are written when the committed entries are in place.
    pub(super) fn written_blocks(&self, object: ObjectId) -> BlockBitmap {
        let stored = self.partition.onode(object).map(|onode| WrittenBlocks::of(&onode.content));
        let entries = self.committed.iter().map(|entry| &entry.header);
        let entries = entries.filter(|entry| entry.object == object && !entry.withheld);
        entries.fold(stored, WrittenBlocks::after).map_or(BlockBitmap::default(), |written| *written.blocks())
    }
}
