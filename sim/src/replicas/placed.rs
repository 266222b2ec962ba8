//! Blocks that are overwritten in place before their entries are committed, with only the headers in the log.

use std::collections::BTreeMap;
use std::sync::Arc;

use replica::ReplicatedEntry;
use wire_store::{EntryHeader, crc32c};

use super::disk::{BlockKey, Blocks, key_of, value_of};

/// What a disk remembers of them.
pub(super) struct PlacedBlocks {
    is_enabled: bool,
    /// No object is copied.
    pub(super) is_complete: bool,
    /// The entries in place of a block, while the log may have them, and whether they are committed.
    placed: BTreeMap<BlockKey, Vec<PlacedEntry>>,
    /// Entries up to here are never given up.
    pub(super) stable: u64,
    /// Entries with their data in the log that are not applied.
    logged: Vec<LoggedEntry>,
    /// Entries that the log lost, whose data is in place.
    pub(super) unsettled: Vec<Arc<ReplicatedEntry>>,
}

struct PlacedEntry {
    entry: Arc<ReplicatedEntry>,
    is_committed: bool,
    /// A truncation is under way. Entries that are appended meanwhile have its sequences again.
    is_given_up: bool,
}

struct LoggedEntry {
    sequence: u64,
    key: BlockKey,
    is_given_up: bool,
}

impl PlacedEntry {
    fn sequence(&self) -> u64 {
        self.entry.header.sequence
    }
}

/// What a log has after a crash.
pub(super) struct RecoveredEntries {
    pub(super) entries: Vec<Arc<ReplicatedEntry>>,
    /// The log ends before this entry, whose data is not in place.
    pub(super) cut: Option<u64>,
}

impl PlacedBlocks {
    pub(super) fn new(is_enabled: bool) -> PlacedBlocks {
        PlacedBlocks {
            is_enabled,
            is_complete: true,
            placed: BTreeMap::new(),
            stable: 0,
            logged: Vec::new(),
            unsettled: Vec::new(),
        }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    /// An entry is appended. Returns whether its data goes in place: not over what is not committed or not in place.
    pub(super) fn append(&mut self, entry: &Arc<ReplicatedEntry>, may_be_placed: bool) -> bool {
        let key = key_of(&entry.header);
        let is_free = !self.is_uncommitted(key)
            && self.logged.iter().all(|other| other.key != key)
            && self.unsettled.iter().all(|other| key_of(&other.header) != key);
        if self.is_enabled && self.is_complete && may_be_placed && is_free && !entry.header.withheld {
            let placed = PlacedEntry { entry: entry.clone(), is_committed: false, is_given_up: false };
            self.placed.entry(key).or_default().push(placed);
            return true;
        }
        self.logged.push(LoggedEntry { sequence: entry.header.sequence, key, is_given_up: false });
        false
    }

    /// An entry is committed. Returns the one whose data its block has, if that is this one or a later one: then there is nothing
    /// to write.
    pub(super) fn apply(&mut self, header: &EntryHeader) -> Option<u64> {
        let key = key_of(header);
        self.logged.retain(|logged| logged.sequence > header.sequence);
        let placed = self.placed.get_mut(&key).map(Vec::as_mut_slice).unwrap_or_default();
        for entry in placed.iter_mut().filter(|placed| placed.sequence() == header.sequence) {
            entry.is_committed = true;
        }
        let in_place = placed.last().map(PlacedEntry::sequence).filter(|newest| *newest >= header.sequence);
        if in_place.is_none() {
            self.unsettled.retain(|other| key_of(&other.header) != key);
        }
        in_place
    }

    fn newest(&self, key: BlockKey) -> Option<&PlacedEntry> {
        self.placed.get(&key)?.last()
    }

    /// The log's entries up to this one are superfluous.
    pub(super) fn checkpointed(&mut self, through: u64) {
        self.placed.values_mut().for_each(|placed| placed.retain(|entry| entry.sequence() > through));
        self.placed.retain(|_, placed| !placed.is_empty());
    }

    /// Whether an entry in place of a block is not committed.
    pub(super) fn is_uncommitted(&self, key: BlockKey) -> bool {
        self.newest(key).is_some_and(|newest| !newest.is_committed)
    }

    /// Whether an entry in place of a block may be given up.
    pub(super) fn is_uncertain(&self, key: BlockKey) -> bool {
        self.newest(key).is_some_and(|newest| !newest.is_committed && newest.sequence() > self.stable)
    }

    /// Whether the log may have the header only of what is in a block.
    pub(super) fn is_listed(&self, key: BlockKey) -> bool {
        self.placed.contains_key(&key)
    }

    /// Entries from a sequence on are given up. Returns those whose blocks are unsettled.
    pub(super) fn begin_truncate(&mut self, from: u64) -> Vec<Arc<ReplicatedEntry>> {
        let mut given_up = Vec::new();
        let placed = self.placed.values_mut().flatten();
        for placed in placed.filter(|placed| !placed.is_given_up && placed.sequence() >= from) {
            placed.is_given_up = true;
            given_up.push(placed.entry.clone());
        }
        for logged in self.logged.iter_mut().filter(|logged| logged.sequence >= from) {
            logged.is_given_up = true;
        }
        self.unsettled.extend(given_up.iter().cloned());
        given_up
    }

    /// They are given up.
    pub(super) fn truncate(&mut self, from: u64) {
        self.placed
            .values_mut()
            .for_each(|placed| placed.retain(|entry| !entry.is_given_up || entry.sequence() < from));
        self.placed.retain(|_, placed| !placed.is_empty());
        self.logged.retain(|logged| !logged.is_given_up || logged.sequence < from);
    }

    /// Everything is removed; a copy follows.
    pub(super) fn clear(&mut self) {
        *self = PlacedBlocks { is_complete: false, ..PlacedBlocks::new(self.is_enabled) };
    }

    /// Whether a block has what an entry wrote that the log lost.
    pub(super) fn is_unsettled(&self, key: &BlockKey) -> bool {
        self.unsettled.iter().any(|entry| key_of(&entry.header) == *key)
    }

    /// A block is settled. Returns whether it was not.
    pub(super) fn settle(&mut self, key: BlockKey) -> bool {
        let before = self.unsettled.len();
        self.unsettled.retain(|entry| key_of(&entry.header) != key);
        self.unsettled.len() < before
    }

    /// Whether something else than the newest entry in place may be in a block: only if what the log has proves that the
    /// entry was committed, as recovery would miss its data.
    pub(super) fn may_be_replaced(&self, key: BlockKey, value: u64, evidence: u64) -> bool {
        self.newest(key)
            .is_none_or(|newest| value_of(&newest.entry.data) == value || newest.sequence() <= evidence)
    }

    /// What the entries of a log are after a crash, which left `blocks`. Entries up to `through` are in place, those up to
    /// `evidence` are committed.
    pub(super) fn recover(
        &mut self,
        found: Vec<Arc<ReplicatedEntry>>,
        unsettled: Vec<Arc<ReplicatedEntry>>,
        blocks: &Blocks,
        through: u64,
        evidence: u64,
        is_checked: bool,
    ) -> RecoveredEntries {
        let matches = |header: &EntryHeader| {
            let value = blocks.get(&key_of(header));
            value.is_some_and(|value| crc32c(&value.to_le_bytes()) == header.data_crc32c)
        };
        // The log may still have what was to be truncated.
        let name = |it: &EntryHeader| (it.object, it.offset, it.client, it.client_number, it.data_crc32c);
        let is_in_log = |header: &EntryHeader| {
            found.iter().any(|entry| entry.header.in_place && name(&entry.header) == name(header))
        };
        self.unsettled = unsettled;
        self.unsettled.retain(|entry| matches(&entry.header) && !is_in_log(&entry.header));
        let last = last_of_blocks(&found);
        let is_last = |header: &EntryHeader| last.get(&key_of(header)) == Some(&header.sequence);
        let is_there = |header: &EntryHeader| {
            !header.in_place
                || !is_checked
                || header.sequence <= evidence
                || matches(header)
                || !is_last(header)
                || self.unsettled.iter().any(|other| key_of(&other.header) == key_of(header))
        };
        let kept = found.iter().take_while(|entry| is_there(&entry.header)).count();
        let cut = found.get(kept).map(|entry| entry.header.sequence);
        let with_data = |entry: &Arc<ReplicatedEntry>| {
            // What committed entries have changed since is in it, and is applied again.
            let data: Arc<[u8]> = blocks[&key_of(&entry.header)].to_le_bytes().into();
            let data_crc32c = crc32c(&data);
            let header = EntryHeader { in_place: false, data_crc32c, ..entry.header.clone() };
            Arc::new(ReplicatedEntry { header, data })
        };
        let lost = found[kept..].iter().filter(|entry| entry.header.in_place && matches(&entry.header));
        for entry in lost.map(with_data) {
            // An earlier start may have listed it.
            if self.unsettled.iter().all(|other| key_of(&other.header) != key_of(&entry.header)) {
                self.unsettled.push(entry);
            }
        }
        let last = last_of_blocks(&found[..kept]);
        let is_last = |header: &EntryHeader| last.get(&key_of(header)) == Some(&header.sequence);
        self.placed.clear();
        self.stable = 0;
        self.logged.clear();
        let mut entries = Vec::new();
        for entry in &found[..kept] {
            let header = &entry.header;
            if !header.in_place {
                if header.sequence > through {
                    let (sequence, key) = (header.sequence, key_of(header));
                    self.logged.push(LoggedEntry { sequence, key, is_given_up: false });
                }
                entries.push(entry.clone());
                continue;
            }
            let is_settled = self.unsettled.iter().all(|other| key_of(&other.header) != key_of(header));
            let has_data = is_last(header) && is_settled && blocks.contains_key(&key_of(header));
            let recovered = if has_data {
                with_data(entry)
            } else {
                let header =
                    EntryHeader { in_place: false, withheld: true, data_crc32c: 0, ..header.clone() };
                Arc::new(ReplicatedEntry { header, data: [].into() })
            };
            let is_committed = !has_data || !matches(header);
            let data = blocks.get(&key_of(header)).copied().unwrap_or(0).to_le_bytes().into();
            let newest = Arc::new(ReplicatedEntry { header: recovered.header.clone(), data });
            if header.sequence > through {
                let placed = PlacedEntry { entry: newest, is_committed, is_given_up: false };
                self.placed.entry(key_of(header)).or_default().push(placed);
            }
            entries.push(recovered);
        }
        RecoveredEntries { entries, cut }
    }
}

/// The last entry in place of each block.
fn last_of_blocks(entries: &[Arc<ReplicatedEntry>]) -> BTreeMap<BlockKey, u64> {
    let in_place = entries.iter().map(|entry| &entry.header).filter(|header| header.in_place);
    in_place.map(|header| (key_of(header), header.sequence)).collect()
}
