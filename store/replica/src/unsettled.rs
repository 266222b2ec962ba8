//! Unsettled blocks: they have, or may have, the data of entries that the log lost before they were committed.
//!
//! Such an entry was written in place, which cannot be undone. Its request is not answered, so that it may take effect later
//! or never: a new primary appends it again, under the client's number, and each replica gets it as any entry. A follower gets
//! what its primary has in the block. Until then a storage applies no entry to a part of the block, and nothing is read there.
//! A committed entry that replaces the whole block settles it as well.

use std::ops::Range;
use std::sync::Arc;

use wire_store::{EntryHeader, ObjectId, Operation};

use crate::follower::Follower;
use crate::replica::{Replica, Role};
use crate::{MessageBody, Plants, ReplicaAction, ReplicaId, ReplicatedEntry, RequestSeen};

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

    /// Adds what was truncated, if it may be in place: whole blocks of this many bytes are. Returns the number of the
    /// truncation.
    pub(crate) fn truncated(
        &mut self,
        from: u64,
        entries: Vec<Arc<ReplicatedEntry>>,
        block_bytes: u32,
    ) -> u64 {
        self.truncations += 1;
        let truncation = Some(self.truncations);
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
        self.blocks.iter().any(|block| {
            let EntryHeader { offset, length, .. } = block.entry.header;
            block.entry.header.object == object && offset < range.end && range.start < offset + length
        })
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
        // A retry was applied, and replaced the block: only a record that is older lists it.
        let applied = &self.applied;
        self.unsettled.blocks.retain(|block| {
            let EntryHeader { client, client_number, .. } = block.entry.header;
            applied.seen(client, client_number) != RequestSeen::Applied
        });
        for index in 0..self.unsettled.blocks.len() {
            let entry = self.unsettled.blocks[index].entry.clone();
            let EntryHeader { client, client_number, .. } = entry.header;
            if client != 0 && self.primary().uncommitted.contains(&(client, client_number)) {
                // The log has it again: a retry.
                self.unsettled.blocks[index].from = 0;
                continue;
            }
            // If there are much newer ones, the client waits for it no more.
            let is_new = self.applied.seen(client, client_number) == RequestSeen::New;
            let (client, client_number) = if is_new { (client, client_number) } else { (0, 0) };
            let header = EntryHeader { client, client_number, ..entry.header.clone() };
            self.append_as_primary(header, entry.data.clone(), actions);
        }
        let end = self.log.end();
        self.primary().established = end;
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
