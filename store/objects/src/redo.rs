//! What of a log is applied again after a crash.

use std::collections::BTreeMap;

use wire_store::{EntryHeader, ObjectId, Operation};

/// The entries to apply again, in their order: all but those whose data was withheld, and those of an object before its
/// last removal.
///
/// The crash may have left the object as entries after the removal made it. Entries before it could then need an extent
/// that neither the object has now nor any operation gave up, and REDO would not find the space.
pub fn entries_to_redo<D>(log: &[(EntryHeader, D)]) -> impl Iterator<Item = &(EntryHeader, D)> {
    let applied = log.iter().filter(|(entry, _)| !entry.withheld);
    let removals =
        applied.clone().map(|(entry, _)| entry).filter(|entry| entry.operation == Operation::Remove);
    let last: BTreeMap<ObjectId, u64> = removals.map(|entry| (entry.object, entry.sequence)).collect();
    let is_obsolete =
        move |entry: &EntryHeader| last.get(&entry.object).is_some_and(|at| entry.sequence < *at);
    applied.filter(move |(entry, _)| !is_obsolete(entry))
}
