//! Unsettled blocks: they have, or may have, the data of entries that the log lost before they were committed.
//!
//! Such an entry was written in place, which cannot be undone. Its request is not answered, so that it may take effect later
//! or never: a new primary appends it again, under the client's number, and each replica gets it as any entry. A follower gets
//! what its primary has in the block. Until then a storage applies no entry to a part of the block, and nothing is read there.
//! A committed entry that replaces the whole block settles it as well. If no replica can read the block, what
//! a follower has there counts, but not after the session of its client has ended.

use std::ops::Range;
use std::sync::Arc;

use wire_store::{EntryHeader, ObjectId, Operation, crc32c};

use crate::follower::Follower;
use crate::repair::REPAIR_NUMBER;
use crate::replica::{Replica, Role};
use crate::{AppliedRequests, MessageBody, Plants, ReplicaAction, ReplicaId, ReplicatedEntry, RequestSeen};

/// Blocks that a follower asks for at a time.
const REQUESTS_MAX: usize = 32;

/// The blocks, with the entries.
#[derive(Default)]
pub(crate) struct UnsettledBlocks {
    blocks: Vec<UnsettledBlock>,
    truncations: u64,
}

struct UnsettledBlock {
    entry: Arc<ReplicatedEntry>,
    step: SettleStep,
    /// The truncation that the storage has not carried out: until then the block may have the data or not.
    truncation: Option<u64>,
    /// Entries from here on are later than what the block has.
    from: u64,
}

impl UnsettledBlock {
    /// Whether the session in which its client wrote it has ended.
    fn is_of_past_session(&self, applied: &AppliedRequests) -> bool {
        let EntryHeader { client, object, sequence, .. } = self.entry.header;
        applied.has_ended(client, object.volume, sequence.min(self.from))
    }
}

enum SettleStep {
    /// The primary was not asked.
    Unasked,
    /// It was asked, under this number.
    Asked { number: u64, sent_ns: u64 },
    /// The storage writes what it answered.
    Writing(u64),
}

impl UnsettledBlocks {
    /// What a storage has at the start, when the log ends before an entry.
    pub(crate) fn new(entries: Vec<Arc<ReplicatedEntry>>, from: u64) -> UnsettledBlocks {
        let block = |entry| UnsettledBlock { entry, step: SettleStep::Unasked, truncation: None, from };
        UnsettledBlocks { blocks: entries.into_iter().map(block).collect(), truncations: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Adds what was truncated, if it may be in place: whole blocks of this many bytes are. What the log gets from there on is
    /// later than every block. Returns the number of the truncation.
    pub(crate) fn truncated(
        &mut self,
        from: u64,
        entries: Vec<Arc<ReplicatedEntry>>,
        block_bytes: u32,
    ) -> u64 {
        self.truncations += 1;
        let truncation = Some(self.truncations);
        self.blocks.iter_mut().for_each(|block| block.from = block.from.min(from));
        let may_be_in_place = |entry: &Arc<ReplicatedEntry>| {
            let EntryHeader { operation, offset, length, withheld, .. } = entry.header;
            let is_block = length == block_bytes && offset.is_multiple_of(block_bytes);
            operation == Operation::Write && is_block && !withheld
        };
        let block = |entry| UnsettledBlock { entry, step: SettleStep::Unasked, truncation, from };
        self.blocks.extend(entries.into_iter().filter(may_be_in_place).map(block));
        self.truncations
    }

    /// The storage has carried out a truncation: of its entries, these were in place.
    pub(crate) fn confirm(&mut self, truncation: u64, in_place: &[u64]) {
        self.blocks.retain_mut(|block| {
            if block.truncation != Some(truncation) {
                return true;
            }
            block.truncation = None;
            in_place.contains(&block.entry.header.sequence)
        });
    }

    /// A committed entry settles the blocks that it replaces.
    pub(crate) fn is_replaced(&mut self, by: &EntryHeader) {
        self.blocks.retain(|block| {
            let EntryHeader { object, offset, length, .. } = block.entry.header;
            by.sequence < block.from || !by.replaces(object, offset..offset + length)
        });
    }

    /// The storage has written what the primary has.
    pub(crate) fn settled(&mut self, number: u64) {
        self.blocks.retain(|block| !matches!(block.step, SettleStep::Writing(writing) if writing == number));
    }

    /// Whether a range has an unsettled block.
    pub(crate) fn has(&self, object: ObjectId, range: Range<u32>) -> bool {
        self.find(object, range).is_some()
    }

    /// An unsettled block of a range.
    fn find(&self, object: ObjectId, range: Range<u32>) -> Option<&UnsettledBlock> {
        self.blocks.iter().find(|block| {
            let EntryHeader { offset, length, .. } = block.entry.header;
            block.entry.header.object == object && offset < range.end && range.start < offset + length
        })
    }

    /// A retry was applied, and replaced the block: only a record that is older lists it.
    fn forget_applied(&mut self, applied: &AppliedRequests) {
        self.blocks.retain(|block| {
            let EntryHeader { client, client_number, .. } = block.entry.header;
            applied.seen(client, client_number) != RequestSeen::Applied
        });
    }

    /// A new epoch or another role: no answer counts any more.
    pub(crate) fn forget_requests(&mut self) {
        for block in &mut self.blocks {
            if matches!(block.step, SettleStep::Asked { .. }) {
                block.step = SettleStep::Unasked;
            }
        }
    }
}

impl<F: Plants> Replica<F> {
    /// A new primary appends the entries of its unsettled blocks again. Reads wait until these are committed.
    pub(crate) fn append_unsettled(&mut self, actions: &mut Vec<ReplicaAction>) {
        self.unsettled.forget_applied(&self.applied);
        if !self.unsettled.is_empty() {
            let mut applied = self.applied.clone();
            let uncommitted = self.commit_point + 1..=self.log.end();
            let entries = uncommitted.filter_map(|sequence| self.log.get(sequence));
            entries.for_each(|entry| applied.apply(&entry.header));
            let revived = self.unsettled.blocks.iter().filter(|block| block.is_of_past_session(&applied));
            self.revived += revived.count() as u64;
        }
        for index in 0..self.unsettled.blocks.len() {
            let entry = self.unsettled.blocks[index].entry.clone();
            let EntryHeader { client, client_number, .. } = entry.header;
            if client != 0 && self.primary().uncommitted.contains(&(client, client_number)) {
                // The log has it again: a retry.
                self.unsettled.blocks[index].from = 0;
                continue;
            }
            let entry = self.with_later_changes(entry, self.log.end());
            self.append_again(&entry, actions);
        }
        let end = self.log.end();
        self.primary().established = end;
    }

    /// The primary appends an entry that a log lost.
    fn append_again(&mut self, entry: &ReplicatedEntry, actions: &mut Vec<ReplicaAction>) {
        let EntryHeader { client, client_number, .. } = entry.header;
        // If there are much newer ones, the client waits for it no more.
        let is_new = self.applied.seen(client, client_number) == RequestSeen::New;
        let (client, client_number) = if is_new { (client, client_number) } else { (0, 0) };
        let header = EntryHeader { client, client_number, ..entry.header.clone() };
        self.append_as_primary(header, entry.data.clone(), actions);
    }

    /// A repair belongs before what the log has of its block since, up to a sequence, because it changes nothing that was
    /// committed before. A client's write comes last.
    fn with_later_changes(&self, entry: Arc<ReplicatedEntry>, through: u64) -> Arc<ReplicatedEntry> {
        let EntryHeader { client, client_number, object, offset, length, .. } = entry.header;
        if (client, client_number) != (0, REPAIR_NUMBER) {
            return entry;
        }
        let mut data = entry.data.to_vec();
        let sequences = self.log.base().sequence + 1..=through;
        for change in sequences.filter_map(|sequence| self.log.get(sequence)) {
            let header = &change.header;
            let (start, end) = match header.operation {
                Operation::Remove => (0, u32::MAX),
                Operation::Write | Operation::WriteZeroes => (header.offset, header.offset + header.length),
                Operation::Preallocate => continue,
            };
            let (from, to) = (start.max(offset), end.min(offset + length));
            if header.object != object || from >= to {
                continue;
            }
            if header.withheld {
                // It is in what the repair read, with all before it.
                data.copy_from_slice(&entry.data);
                continue;
            }
            let changed = &mut data[(from - offset) as usize..(to - offset) as usize];
            match header.operation {
                Operation::Write => {
                    changed.copy_from_slice(&change.data[(from - start) as usize..(to - start) as usize]);
                }
                _ => changed.fill(0),
            }
        }
        let header = EntryHeader { data_crc32c: crc32c(&data), ..entry.header.clone() };
        Arc::new(ReplicatedEntry { header, data: data.into() })
    }

    /// The primary, whose device cannot read a block, asks a follower for which it is unsettled.
    pub(crate) fn offer_unsettled(
        &mut self,
        number: u64,
        object: ObjectId,
        range: Range<u32>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        self.unsettled.forget_applied(&self.applied);
        let Role::Follower(follower) = &self.role else { return };
        // A truncation that is not carried out may show that it is not in place.
        let Some(block) = self.unsettled.find(object, range).filter(|it| it.truncation.is_none()) else {
            return;
        };
        if follower.fenced {
            return;
        }
        let through = self.commit_point;
        let entry = self.with_later_changes(block.entry.clone(), through);
        let header = EntryHeader { previous_crc32c: 0, in_place: false, ..entry.header.clone() };
        let entry = Arc::new(ReplicatedEntry { header, data: entry.data.clone() });
        self.send(self.config.primary, MessageBody::Unsettled { number, through, entry }, actions);
    }

    /// No replica can read a block: the primary settles it by what a follower has there. That has the committed entries up to
    /// `through`, if it is a repair. Returns whether the block can be read soon: not if the session of the
    /// entry's client has ended. What others read since then must not change any more, so that the block is
    /// lost.
    pub(crate) fn settle_by_entry(
        &mut self,
        through: u64,
        entry: &ReplicatedEntry,
        actions: &mut Vec<ReplicaAction>,
    ) -> bool {
        let EntryHeader { client, client_number, object, offset, length, .. } = entry.header;
        let Role::Primary(primary) = &self.role else { return true };
        let is_in_log = client != 0 && primary.uncommitted.contains(&(client, client_number));
        // A follower that does not know it yet gets the entry, which replaces the block.
        let is_applied = self.applied.seen(client, client_number) == RequestSeen::Applied;
        let through = if client == 0 { through.min(self.commit_point) } else { self.commit_point };
        let is_replaced = self.is_changed_after(through, (object, offset, length));
        let is_full = self.log.len() >= self.settings.entries_max;
        if self.reads_blocked(primary).is_some() || is_in_log || is_applied || is_replaced || is_full {
            return true;
        }
        let is_lost = self.applied.has_ended(client, object.volume, entry.header.sequence);
        if !is_lost {
            self.append_again(entry, actions);
            self.repaired += 1;
        }
        !is_lost
    }

    /// Whether a block has what a client wrote that is gone since: as a primary the replica would append it.
    pub(crate) fn is_of_past_session(&self) -> bool {
        self.unsettled.blocks.iter().any(|block| block.is_of_past_session(&self.applied))
    }

    /// A follower asks its primary for what the blocks have there.
    pub(crate) fn settle_blocks(&mut self, actions: &mut Vec<ReplicaAction>) {
        let Role::Follower(follower) = &self.role else { return };
        if self.unsettled.is_empty() || follower.fenced || self.config.primary == self.id {
            return;
        }
        let (now_ns, resend_ns) = (self.now_ns, self.settings.resend_ns);
        let mut requests = Vec::new();
        for block in self.unsettled.blocks.iter_mut().filter(|it| it.truncation.is_none()).take(REQUESTS_MAX)
        {
            let is_due = match block.step {
                SettleStep::Unasked => true,
                SettleStep::Asked { sent_ns, .. } => now_ns >= sent_ns + resend_ns,
                SettleStep::Writing(_) => false,
            };
            if is_due {
                // Unlike reads, sessions differ from those before a restart in the same epoch.
                self.sessions += 1;
                let number = self.sessions;
                block.step = SettleStep::Asked { number, sent_ns: now_ns };
                let EntryHeader { object, offset, length, .. } = block.entry.header;
                requests.push(MessageBody::Fetch { number, object, offset, length });
            }
        }
        requests.into_iter().for_each(|request| self.send(self.config.primary, request, actions));
    }

    /// When a follower asks next.
    pub(crate) fn settle_deadline(&self, follower: &Follower) -> Option<u64> {
        let resend_ns = self.settings.resend_ns;
        let asked = self.unsettled.blocks.iter().filter_map(|block| match block.step {
            SettleStep::Asked { sent_ns, .. } => Some(sent_ns + resend_ns),
            _ => None,
        });
        asked.min().filter(|_| !follower.fenced)
    }

    /// The primary has answered what a block has.
    pub(crate) fn on_settling_data(
        &mut self,
        from: ReplicaId,
        number: u64,
        through: u64,
        data: Option<Arc<[u8]>>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        if from != self.config.primary || !matches!(self.role, Role::Follower(_)) {
            return;
        }
        let is_asked =
            |step: &SettleStep| matches!(step, SettleStep::Asked { number: asked, .. } if *asked == number);
        let Some(index) = self.unsettled.blocks.iter().position(|block| is_asked(&block.step)) else {
            return;
        };
        let EntryHeader { object, offset, length, .. } = self.unsettled.blocks[index].entry.header;
        let Some(data) = data.filter(|data| data.len() == length as usize) else { return };
        // What this log has after it is asked for again: the answer may lack it.
        if !self.is_changed_after(through, (object, offset, length)) {
            self.unsettled.blocks[index].step = SettleStep::Writing(number);
            actions.push(ReplicaAction::Settle { number, object, offset, data });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_a_truncation_replaces_older_blocks() {
        const BLOCK: u32 = 4096;
        let object = ObjectId { group: 1, volume: 1, index: 0, suffix: 0 };
        let write =
            |sequence| EntryHeader { sequence, ..EntryHeader::new(Operation::Write, object, 0, BLOCK) };
        // The log ended before 51 at the start, and loses what is from 49 on to another primary.
        let lost = ReplicatedEntry { header: write(51), data: vec![0; BLOCK as usize].into() };
        let mut blocks = UnsettledBlocks::new(vec![Arc::new(lost)], 51);
        blocks.truncated(49, Vec::new(), BLOCK);
        blocks.is_replaced(&write(48));
        assert_eq!(blocks.len(), 1, "48 was there when the block was written");
        blocks.is_replaced(&write(49));
        assert!(blocks.is_empty());
    }
}
