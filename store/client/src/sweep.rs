//! What a channel does to a whole volume: lists its objects group by group, and may remove each. Cost follows
//! what is allocated.

use std::collections::{BTreeMap, VecDeque};

use block_io::Status;
use wire_replica::{ListItem, ListedVolume, Listing, decode_list};

use crate::placement::Placement;

/// Lists in flight, and removals.
const LISTS_MAX: usize = 16;
const REMOVALS_MAX: usize = 256;
/// Bytes of a list.
pub(crate) const LIST_BYTES: u32 = 64 << 10;

/// What is swept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SweepKind {
    /// Objects from an index to before another one are removed, and the one before is zeroed from an offset
    /// on, unless that is 0.
    Objects { zero_from: u32, first: u64, end: u64 },
    /// The indices of the objects before one are listed.
    Indices { end: u64 },
    /// The volumes that the groups have are listed.
    Volumes,
}

/// A step of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SweepStep {
    /// Lists what a group has.
    List(u32, Listing),
    /// Removes the object with an index.
    Remove(u32),
    /// Zeroes an object from an offset on.
    Zero(u32, u32),
}

/// A sweep that goes on.
pub(crate) struct Sweep {
    kind: SweepKind,
    volume: u64,
    zero: Option<(u32, u32)>,
    to_list: VecDeque<(u32, Listing)>,
    lists: usize,
    found: VecDeque<u32>,
    /// Of groups without lists: the next index that there may be, and the end.
    unlisted: VecDeque<(u64, u64)>,
    groups: u64,
    removals: usize,
    pub(crate) removed: u64,
    pub(crate) listed: u64,
    pub(crate) volumes: BTreeMap<u64, ListedVolume>,
    /// Those that were listed and are not to be removed.
    pub(crate) indices: Vec<u32>,
    pub(crate) failed: Option<Status>,
}

impl Sweep {
    pub(crate) fn new(placement: &Placement, kind: SweepKind) -> Sweep {
        let listing = match kind {
            SweepKind::Objects { first, .. } => {
                Listing::Objects { volume: placement.volume, from: first as u32 }
            }
            SweepKind::Indices { .. } => Listing::Objects { volume: placement.volume, from: 0 },
            SweepKind::Volumes => Listing::Volumes { from: 0 },
        };
        let zero = match kind {
            SweepKind::Objects { zero_from: from, first, .. } if from > 0 => Some((first as u32 - 1, from)),
            _ => None,
        };
        let groups = placement.first_group..placement.first_group + placement.groups;
        Sweep {
            kind,
            volume: placement.volume,
            to_list: groups.map(|group| (group, listing)).collect(),
            zero,
            lists: 0,
            found: VecDeque::new(),
            unlisted: VecDeque::new(),
            groups: placement.groups.into(),
            removals: 0,
            removed: 0,
            listed: 0,
            volumes: BTreeMap::new(),
            indices: Vec::new(),
            failed: None,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        let is_idle = self.lists == 0 && self.removals == 0;
        is_idle && (self.failed.is_some() || self.has_nothing_left())
    }

    fn has_nothing_left(&self) -> bool {
        let has_found = !self.found.is_empty() || !self.unlisted.is_empty();
        self.to_list.is_empty() && !has_found && self.zero.is_none()
    }

    /// An object that is to be removed.
    fn next_object(&mut self) -> Option<u32> {
        if let Some(index) = self.found.pop_front() {
            return Some(index);
        }
        let (next, end) = self.unlisted.front_mut()?;
        let index = *next as u32;
        *next += self.groups;
        if *next >= *end {
            self.unlisted.pop_front();
        }
        Some(index)
    }

    /// The next step, if it may begin now.
    pub(crate) fn next(&mut self) -> Option<SweepStep> {
        if self.failed.is_some() {
            return None;
        }
        if let Some((index, offset)) = self.zero.take() {
            self.removals += 1;
            return Some(SweepStep::Zero(index, offset));
        }
        if self.removals < REMOVALS_MAX
            && let Some(index) = self.next_object()
        {
            self.removals += 1;
            return Some(SweepStep::Remove(index));
        }
        // What was listed is removed first: it is kept in memory.
        if self.lists >= LISTS_MAX || !self.found.is_empty() || !self.unlisted.is_empty() {
            return None;
        }
        let (group, listing) = self.to_list.pop_front()?;
        self.lists += 1;
        Some(SweepStep::List(group, listing))
    }

    /// A step has ended.
    pub(crate) fn ended(
        &mut self,
        placement: &Placement,
        step: SweepStep,
        status: Status,
        data: Option<&[u8]>,
    ) {
        match step {
            SweepStep::Remove(_) => {
                self.removals -= 1;
                self.removed += u64::from(status.is_success());
            }
            SweepStep::Zero(..) => self.removals -= 1,
            SweepStep::List(..) => self.lists -= 1,
        }
        match (step, data) {
            _ if !status.is_success() => self.failed = self.failed.or(Some(status)),
            (SweepStep::Remove(_) | SweepStep::Zero(..), _) => {}
            (SweepStep::List(group, listing), Some(data)) => {
                let listed = match listing {
                    Listing::Objects { .. } => self.objects_listed(placement, group, data),
                    Listing::Volumes { .. } => self.volumes_listed(group, data),
                    Listing::Written { .. } => None,
                };
                if listed.is_none() {
                    self.failed = Some(Status::INTERNAL_ERROR);
                }
            }
            (SweepStep::List(..), None) => self.failed = Some(Status::INTERNAL_ERROR),
        }
    }

    /// `None` if it is no list.
    fn objects_listed(&mut self, placement: &Placement, group: u32, data: &[u8]) -> Option<()> {
        let (first, end) = match self.kind {
            SweepKind::Objects { first, end, .. } => (first, end),
            SweepKind::Indices { end } => (0, end),
            SweepKind::Volumes => return None,
        };
        let Some((indices, has_more)) = decode_list::<u32>(data).ok()? else {
            if let SweepKind::Indices { .. } = self.kind {
                return None;
            }
            // The node's version has no lists: every object that there may be.
            let groups = u64::from(placement.groups);
            let of_group =
                (first..end.min(first + groups)).find(|it| placement.group_of(*it as u32) == group);
            if let Some(from) = of_group {
                self.unlisted.push_back((from, end));
                self.listed += (end - from).div_ceil(groups);
            }
            return Some(());
        };
        if has_more && let Some(from) = indices.last().and_then(|last| last.checked_add(1)) {
            self.to_list.push_front((group, Listing::Objects { volume: self.volume, from }));
        }
        let found = indices.into_iter().filter(|index| u64::from(*index) < end);
        if let SweepKind::Indices { .. } = self.kind {
            self.indices.extend(found);
            return Some(());
        }
        let before = self.found.len();
        self.found.extend(found);
        self.listed += (self.found.len() - before) as u64;
        Some(())
    }

    /// `None` if it is no list.
    fn volumes_listed(&mut self, group: u32, data: &[u8]) -> Option<()> {
        let (listed, has_more) = decode_list::<ListedVolume>(data).ok()??;
        if has_more && let Some(from) = listed.last().and_then(|last| last.volume.checked_add(1)) {
            self.to_list.push_front((group, Listing::Volumes { from }));
        }
        for ListedVolume { volume, objects, extents } in listed {
            let new = ListedVolume { volume, objects: 0, extents: 0 };
            let known = self.volumes.entry(volume).or_insert(new);
            known.objects = known.objects.saturating_add(objects);
            known.extents = known.extents.saturating_add(extents);
        }
        Some(())
    }
}

const _: () = assert!(LIST_BYTES as usize / <u32 as ListItem>::BYTES > 1024);

#[cfg(test)]
mod tests {
    use wire_replica::encode_list;

    use super::*;

    const PLACEMENT: Placement = Placement { first_group: 4, groups: 3, volume: 7 };

    /// Runs a sweep over groups that have some objects; returns what was removed, and the number of steps.
    fn sweep(kind: SweepKind, has_lists: bool, objects: &[u32], list_bytes: usize) -> (Vec<u32>, usize) {
        let mut sweep = Sweep::new(&PLACEMENT, kind);
        let (mut removed, mut steps) = (Vec::new(), 0);
        while let Some(step) = sweep.next() {
            steps += 1;
            match step {
                SweepStep::Remove(index) => {
                    removed.push(index);
                    sweep.ended(&PLACEMENT, step, Status::SUCCESS, None);
                }
                SweepStep::List(group, Listing::Objects { from, .. }) => {
                    let of_group = |index: &&u32| PLACEMENT.group_of(**index) == group && **index >= from;
                    let answer = match has_lists {
                        true => encode_list(objects.iter().filter(of_group).copied(), list_bytes),
                        false => vec![0; list_bytes],
                    };
                    sweep.ended(&PLACEMENT, step, Status::SUCCESS, Some(&answer));
                }
                SweepStep::List(..) | SweepStep::Zero(..) => unreachable!("objects are listed"),
            }
        }
        assert!(sweep.is_done() && sweep.failed.is_none());
        assert_eq!(sweep.removed, removed.len() as u64);
        removed.sort_unstable();
        (removed, steps)
    }

    #[test]
    fn only_objects_that_there_are_are_removed_and_a_large_image_costs_no_more() {
        let objects = [0, 1, 5, 1000, 4_000_000_000];
        let all = SweepKind::Objects { zero_from: 0, first: 0, end: 1 << 32 };
        assert_eq!(sweep(all, true, &objects, 4096), (objects.to_vec(), 3 + 5));
        assert_eq!(sweep(all, true, &[], 4096), (vec![], 3));
        // Lists that have room for one object each.
        let (removed, _) = sweep(all, true, &objects, 12 + 4);
        assert_eq!(removed, objects);
        let (removed, _) =
            sweep(SweepKind::Objects { zero_from: 0, first: 5, end: 1001 }, true, &objects, 4096);
        assert_eq!(removed, [5, 1000]);
    }

    #[test]
    fn objects_are_listed_and_stay_where_they_are() {
        let list = |has_lists| {
            let mut sweep = Sweep::new(&PLACEMENT, SweepKind::Indices { end: 7 });
            while let Some(step) = sweep.next() {
                let SweepStep::List(group, Listing::Objects { from, .. }) = step else {
                    panic!("{step:?}");
                };
                let of_group = |index: &u32| PLACEMENT.group_of(*index) == group && *index >= from;
                let answer = match has_lists {
                    // Lists that have room for one object each.
                    true => encode_list([0, 1, 3, 6, 7, 9].into_iter().filter(of_group), 12 + 4),
                    false => vec![0; 4096],
                };
                sweep.ended(&PLACEMENT, step, Status::SUCCESS, Some(&answer));
            }
            assert!(sweep.is_done());
            sweep.indices.sort_unstable();
            (sweep.indices, sweep.failed)
        };
        assert_eq!(list(true), (vec![0, 1, 3, 6], None));
        // Nodes that do not say what they have.
        assert_eq!(list(false), (vec![], Some(Status::INTERNAL_ERROR)));
    }

    #[test]
    fn of_nodes_without_lists_every_object_is_removed_that_there_may_be() {
        let (removed, steps) =
            sweep(SweepKind::Objects { zero_from: 0, first: 2, end: 12 }, false, &[], 4096);
        assert_eq!((removed, steps), ((2..12).collect(), 3 + 10));
    }

    #[test]
    fn the_first_error_ends_a_sweep() {
        let mut sweep = Sweep::new(&PLACEMENT, SweepKind::Objects { zero_from: 512, first: 1, end: 10 });
        assert_eq!(sweep.next(), Some(SweepStep::Zero(0, 512)));
        sweep.ended(&PLACEMENT, SweepStep::Zero(0, 512), Status::SUCCESS, None);
        let step = sweep.next().expect("a list");
        sweep.ended(&PLACEMENT, step, Status::ACCESS_DENIED, None);
        assert!(sweep.next().is_none() && sweep.is_done());
        assert_eq!(sweep.failed, Some(Status::ACCESS_DENIED));
    }

    #[test]
    fn the_space_of_a_volume_is_that_of_all_groups() {
        let mut sweep = Sweep::new(&PLACEMENT, SweepKind::Volumes);
        while let Some(step) = sweep.next() {
            let volumes = [ListedVolume { volume: 9, objects: 2, extents: 5 }];
            sweep.ended(&PLACEMENT, step, Status::SUCCESS, Some(&encode_list(volumes, 4096)));
        }
        assert_eq!(sweep.volumes[&9], ListedVolume { volume: 9, objects: 6, extents: 15 });
    }
}
