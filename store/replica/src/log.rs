//! The entries that a replica's log has, and which of them are durable.

use std::collections::VecDeque;
use std::sync::Arc;

use wire_replica::{EntryId, ReplicatedEntry, recycle};

/// The entries from `base` on, without the bytes' places, which the owner of the log's storage knows.
#[derive(Debug)]
pub(crate) struct EntryLog {
    /// The entry before the first.
    base: EntryId,
    /// Each with the number of its append.
    entries: VecDeque<(u64, Arc<ReplicatedEntry>)>,
    /// Entries up to this sequence are durable.
    durable: u64,
    /// Appends so far.
    appends: u64,
    /// Appends up to this number are complete.
    appended: u64,
    /// The last entry without data: no other replica gets entries up to it from this one.
    skipped_through: u64,
}

impl EntryLog {
    /// A log with these durable entries, the first of them after `base`.
    pub(crate) fn new(base: EntryId, entries: Vec<Arc<ReplicatedEntry>>) -> EntryLog {
        let mut log = EntryLog {
            base,
            entries: VecDeque::new(),
            durable: base.sequence,
            appends: 0,
            appended: 0,
            skipped_through: 0,
        };
        for entry in entries {
            log.push(0, entry);
        }
        log.durable = log.end();
        log
    }

    fn push(&mut self, append: u64, entry: Arc<ReplicatedEntry>) {
        assert_eq!(entry.header.sequence, self.end() + 1, "sequences have no gaps");
        if entry.header.withheld {
            self.skipped_through = entry.header.sequence;
        }
        self.entries.push_back((append, entry));
    }

    /// The last entry's sequence.
    pub(crate) fn end(&self) -> u64 {
        self.base.sequence + self.entries.len() as u64
    }

    /// The entry before the first.
    pub(crate) fn base(&self) -> EntryId {
        self.base
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Entries up to this sequence are durable.
    pub(crate) fn durable(&self) -> u64 {
        self.durable
    }

    /// The last sequence whose data may be missing.
    pub(crate) fn skipped_through(&self) -> u64 {
        self.skipped_through
    }

    pub(crate) fn get(&self, sequence: u64) -> Option<&Arc<ReplicatedEntry>> {
        let index = sequence.checked_sub(self.base.sequence + 1)?;
        self.entries.get(usize::try_from(index).ok()?).map(|(_, entry)| entry)
    }

    /// The name of the entry with a sequence, also of the one before the first.
    pub(crate) fn id(&self, sequence: u64) -> Option<EntryId> {
        if sequence == self.base.sequence {
            return Some(self.base);
        }
        self.get(sequence).map(|entry| entry.id())
    }

    /// Appends an entry that is not durable yet; returns the number of the append.
    pub(crate) fn append(&mut self, entry: Arc<ReplicatedEntry>) -> u64 {
        self.appends += 1;
        self.push(self.appends, entry);
        self.appends
    }

    /// Appends up to this number are complete.
    pub(crate) fn appended(&mut self, append: u64) {
        self.appended = self.appended.max(append.min(self.appends));
        while let Some((append, _)) = self.entries.get((self.durable - self.base.sequence) as usize) {
            if *append > self.appended {
                break;
            }
            self.durable += 1;
        }
    }

    /// Removes the entries from a sequence on, and returns them.
    pub(crate) fn truncate(&mut self, from: u64) -> Vec<Arc<ReplicatedEntry>> {
        assert!(from > self.base.sequence, "entry {from} is freed");
        let removed = self.entries.split_off((from - self.base.sequence - 1) as usize);
        self.durable = self.durable.min(self.end());
        self.skipped_through = self.skipped_through.min(self.end());
        removed.into_iter().map(|(_, entry)| entry).collect()
    }

    /// Removes the entries up to a sequence. Returns whether there were any.
    pub(crate) fn free(&mut self, through: u64) -> bool {
        let through = through.min(self.durable);
        let before = self.base;
        while self.base.sequence < through {
            let (_, entry) = self.entries.pop_front().expect("a durable entry is there");
            self.base = entry.id();
            recycle(entry);
        }
        before != self.base
    }

    /// Removes all entries; the next one follows `base`. What is being appended no longer counts.
    pub(crate) fn reset(&mut self, base: EntryId) {
        self.entries.clear();
        self.base = base;
        self.durable = base.sequence;
        self.skipped_through = 0;
    }
}
