//! What the replica decided, carried out; and what happened, handed to it.

use std::sync::Arc;

use block_io::Status;
use foldhash::HashSet;
use objects::SpaceNeed;
use replica::{
    ClientReply, ClientRequest, EntryId, GroupBlocked, Listing, ObjectPart, ReplicaAction, ReplicaEvent,
    SessionChange,
};
use wire_store::{BLOCK_BYTES, EntryHeader, ObjectId};

use super::{READS_MAX, ReplicaInput, Replication, WAITING_REQUESTS_MAX};
use crate::shard::append::gives_up_space;
use crate::shard::copies::PartContent;
use crate::shard::overlay::EntryData;
use crate::shard::placed::{UnsettledEntry, is_whole_block, unsettled_block};
use crate::shard::{CommittedEntry, Reply, Shard, ShardReply};

/// Writes of clients that were accepted together, and are not appended yet.
#[derive(Default)]
struct AcceptedWrites {
    need: SpaceNeed,
    /// Objects that they give up space of.
    releasing: HashSet<ObjectId>,
}

impl Shard {
    /// Something for the replica.
    pub(in crate::shard) fn take_input(&mut self, input: ReplicaInput) {
        let Some(replication) = &mut self.replication else { return };
        replication.events.push_back(match input {
            ReplicaInput::Message(message) => ReplicaEvent::Message(message),
            ReplicaInput::Memory(memory) => ReplicaEvent::Memory(memory),
            ReplicaInput::AcceptLoss { epoch } => ReplicaEvent::AcceptLoss { epoch },
            ReplicaInput::Map(config) => ReplicaEvent::Map(config),
            ReplicaInput::Leave { successors, force, outcome } => {
                replication.leave_outcome = Some(outcome);
                replication.node_leaves = true;
                ReplicaEvent::Leave { successors, force }
            }
            ReplicaInput::InSyncMin(in_sync_min) => ReplicaEvent::InSyncMin(in_sync_min),
            ReplicaInput::Stay => {
                replication.leave_outcome = None;
                replication.node_leaves = false;
                return replication.leave_or_stay();
            }
            ReplicaInput::PreferredPrimary(preferred) => ReplicaEvent::PreferredPrimary(preferred),
            ReplicaInput::Partitions(partitions) => {
                replication.partitions = partitions;
                return self.update_room();
            }
            ReplicaInput::Request(request @ ClientRequest::Read { .. }) => ReplicaEvent::Request(request),
            ReplicaInput::Request(request) => {
                // The answer to a request that waits answers those that repeat it.
                if replication.waiting_names.insert(request.name()) {
                    replication.waiting.push_back(request);
                }
                return;
            }
        });
    }

    /// Hands the replica what happened, and carries out what it decides. `turn_ns` is when the turn began.
    /// Returns how much it did.
    pub(in crate::shard) fn run_replica(&mut self, turn_ns: u64) -> usize {
        if self.failed.is_some() || self.is_closing {
            return 0;
        }
        if self.replication.as_ref().is_none_or(|replication| replication.is_idle(turn_ns)) {
            return 0;
        }
        let now_ns = self.core.now_ns();
        let Some(mut replication) = self.replication.take() else { return 0 };
        if replication.replica_deadline.is_some_and(|at_ns| at_ns <= now_ns) {
            replication.events.push_back(ReplicaEvent::Timer);
        }
        self.take_reads(&mut replication);
        let mut work = 0;
        loop {
            self.take_waiting(&mut replication);
            if !replication.events.is_empty() {
                work += replication.events.len();
                let mut actions = std::mem::take(&mut replication.actions);
                replication.replica.handle_batch(replication.events.drain(..), now_ns, &mut actions);
                actions.drain(..).for_each(|action| replication.dispatch(action));
                replication.actions = actions;
                replication.replica_deadline = replication.replica.deadline();
                replication.report_leave();
            }
            self.carry_out(&mut replication);
            if replication.events.is_empty() {
                break;
            }
        }
        self.replication = Some(replication);
        work
    }

    /// Writes of clients for which the log has room.
    fn take_waiting(&mut self, replication: &mut Replication) {
        if replication.waiting.is_empty() {
            return;
        }
        let blocked = replication.replica.status().blocked;
        let is_primary = !matches!(blocked, Some(GroupBlocked::NotPrimary | GroupBlocked::DataLost));
        let mut room = self.log.room();
        // What this call accepts reserves space when it is appended.
        let mut accepted = AcceptedWrites::default();
        let reserved = self.reserved + self.only_here(&replication.partitions);
        while let Some(request @ ClientRequest::Write { header, .. }) = replication.waiting.front() {
            let bytes = oplog::entry_bytes(header.data_bytes(), self.log.sector());
            let refusal = if !is_primary {
                None
            } else if bytes > self.log.capacity() / 2 {
                Some(ClientReply::Failed)
            } else if replication.waiting.len() > WAITING_REQUESTS_MAX {
                Some(ClientReply::Busy)
            } else if !replication.log_queue.is_empty() || bytes > room {
                return;
            } else if SessionChange::of(header).is_some()
                || self.accept_space(header, reserved, &mut accepted)
            {
                None
            } else if !accepted.need.is_empty() {
                return;
            } else if self.is_settled() && replication.durable.is_empty() {
                Some(ClientReply::NoSpace)
            } else {
                // What others gave up is free after a checkpoint.
                self.checkpoint_wanted = true;
                return self.wake_background();
            };
            room = room.saturating_sub(bytes);
            replication.waiting_names.remove(&request.name());
            let request = replication.waiting.pop_front().expect("it is the first");
            match refusal {
                None => replication.events.push_back(ReplicaEvent::Request(request)),
                Some(reply) => {
                    let (client, number) = request.name();
                    replication.outbox.reply(replication.group, client, number, reply);
                }
            }
        }
    }

    /// Adds an entry to the accepted ones, if the partition has room for it, for these and for what is
    /// reserved.
    fn accept_space(&self, header: &EntryHeader, reserved: SpaceNeed, accepted: &mut AcceptedWrites) -> bool {
        let unapplied = self.unapplied.get(&header.object);
        let releasing = unapplied.is_some_and(|unapplied| unapplied.releasing > 0)
            || accepted.releasing.contains(&header.object);
        let Ok(need) = self.partition.space_need(header, releasing) else { return false };
        let need = accepted.need + need;
        if !self.partition.space_use().has_room(reserved, need) {
            return false;
        }
        accepted.need = need;
        if gives_up_space(header.operation) {
            accepted.releasing.insert(header.object);
        }
        true
    }

    /// Carries out what can be now.
    fn carry_out(&mut self, replication: &mut Replication) {
        if replication.is_reset() {
            return self.give_up(replication);
        }
        while let Some(action) = replication.object_queue.pop_front() {
            if let Err(action) = self.carry_out_object(action, replication) {
                replication.object_queue.push_front(action);
                break;
            }
        }
        while !replication.is_redoing()
            && replication.reading < READS_MAX
            && let Some(ReplicaAction::Read { read, object, offset, length, .. }) =
                replication.reads.pop_front()
        {
            if let Some(listing) = Listing::of(object) {
                let data = Some(self.list(replication.group, listing, length as usize).into());
                replication.events.push_back(ReplicaEvent::ReadDone { read, data });
                continue;
            }
            replication.reading += 1;
            self.read(object, offset, length, Reply::Channel(replication.sender.clone(), read));
        }
        while let Some(action) = replication.log_queue.pop_front() {
            if let Err(action) = self.carry_out_log(action, replication) {
                replication.log_queue.push_front(action);
                break;
            }
        }
        // Their data is in memory, as if the log had it.
        let is_low = self.log.room() < self.log.capacity() / 2 + self.placed.bytes_in_log();
        if is_low && !replication.log_low_sent {
            replication.events.push_back(ReplicaEvent::LogLow);
        }
        replication.log_low_sent = is_low;
    }

    fn carry_out_log(
        &mut self,
        action: ReplicaAction,
        replication: &mut Replication,
    ) -> Result<(), ReplicaAction> {
        match action {
            ReplicaAction::Append { append, ref entry } => {
                // What is committed is durable here only up to this.
                let commit_point = entry.header.commit_point.min(self.log.durable_through());
                let header = EntryHeader { commit_point, ..entry.header.clone() };
                if let Some(block) = self.block_to_overwrite(&header, replication) {
                    if !self.overwrite(header, &entry.data, block) {
                        return Err(action);
                    }
                    replication.appends.push_back(append);
                    return Ok(());
                }
                let bytes = oplog::entry_bytes(entry.data.len(), self.log.sector());
                if bytes > self.log.room() || self.unplaced.is_full_for(bytes) {
                    return Err(action);
                }
                let Some(mut buffer) = self.core.pool().take(bytes as usize) else { return Err(action) };
                // The header follows; what is after the data is zero.
                let data_end = EntryHeader::SIZE + entry.data.len();
                buffer.copy_from(EntryHeader::SIZE, &entry.data);
                buffer.as_mut_slice()[data_end..].fill(0);
                let releasing = self.unapplied.get(&entry.header.object);
                let releasing = releasing.is_some_and(|unapplied| unapplied.releasing > 0);
                let need = self.space_of_entry(&entry.header, releasing);
                replication.appends.push_back(append);
                self.append(header, buffer, need, Reply::None);
            }
            ReplicaAction::Truncate { truncation, from } => {
                if !self.unacknowledged.is_empty() || !self.is_given_up(from, replication) {
                    return Err(action);
                }
                self.log.truncate(from);
                self.placed.truncate(from);
                replication.recovered_through = replication.recovered_through.min(from - 1);
                let mut in_place = Vec::new();
                while let Some(entry) = replication.durable.pop_back_if(|entry| entry.header.sequence >= from)
                {
                    in_place.extend(entry.placed.map(|_| entry.header.sequence));
                    self.unplaced.remove(entry.bytes);
                    self.release_reservation(&entry.header, entry.need);
                }
                replication.given_up = None;
                replication.events.push_back(ReplicaEvent::Truncated { truncation, in_place });
                self.resume_waiting();
            }
            _ => unreachable!("{action:?} does not concern the log"),
        }
        Ok(())
    }

    /// The block that an entry's data overwrites before it is committed, with only its header in the log.
    fn block_to_overwrite(&self, header: &EntryHeader, replication: &Replication) -> Option<u64> {
        if !self.placed.is_enabled || !is_whole_block(header) || !replication.complete {
            return None;
        }
        // Earlier entries of the object may go to the block later.
        if self.unapplied.get(&header.object).is_some_and(|unapplied| unapplied.logged > 0) {
            return None;
        }
        let block = self.partition.stored_block(header.object, header.offset, true)?;
        let is_free = !self.busy_blocks.contains(&block) && self.placed.may_write(header, block);
        is_free.then_some(block)
    }

    /// Appends an entry whose data overwrites a block, if there are room and memory.
    fn overwrite(&mut self, header: EntryHeader, data: &[u8], block: u64) -> bool {
        let header = EntryHeader { in_place: true, ..header };
        if oplog::entry_bytes(0, self.log.sector()) > self.log.room() {
            return false;
        }
        let Some(mut buffer) = self.core.pool().take(BLOCK_BYTES) else { return false };
        buffer.copy_from(0, data);
        self.append_in_place(header, buffer, block);
        true
    }

    /// Before entries are truncated, a record lists the blocks that have their data. Returns whether it is
    /// durable.
    fn is_given_up(&mut self, from: u64, replication: &mut Replication) -> bool {
        if replication.given_up != Some(from) {
            replication.given_up = Some(from);
            let lost = replication.durable.iter().filter(|entry| entry.header.sequence >= from);
            let unsettled = |entry: &CommittedEntry| {
                Some(UnsettledEntry::new(unsettled_block(&entry.header), entry.placed?))
            };
            self.placed.give_up(lost.filter_map(unsettled));
        }
        if !self.placed.is_recorded() {
            self.wake_background();
            return false;
        }
        true
    }

    fn carry_out_object(
        &mut self,
        action: ReplicaAction,
        replication: &mut Replication,
    ) -> Result<(), ReplicaAction> {
        match action {
            ReplicaAction::Apply { ref entry } => {
                let sequence = entry.header.sequence;
                if sequence <= replication.committed.sequence {
                    return Ok(());
                }
                if replication.durable.back().is_none_or(|last| last.header.sequence < sequence) {
                    return Err(action);
                }
                self.commit_through(sequence, replication);
            }
            ReplicaAction::Checkpoint { checkpoint, record } => {
                let through = record.through.sequence;
                // The last ones may have no data, and are not applied then.
                let last = replication
                    .durable
                    .back()
                    .map_or(replication.committed.sequence, |last| last.header.sequence);
                if last < through {
                    return Err(ReplicaAction::Checkpoint { checkpoint, record });
                }
                self.commit_through(through, replication);
                replication.checkpoint = Some((checkpoint, record));
                self.wake_background();
            }
            ReplicaAction::Stable { through } => {
                self.placed.set_stable(through);
                self.resume_waiting();
            }
            ReplicaAction::Settle { .. } => {
                replication.settles.push_back(action);
                self.wake_background();
            }
            ReplicaAction::Read { .. } => replication.reads.push_back(action),
            ReplicaAction::ReadObject { read, after } => replication.object_reads.push(read, after),
            ReplicaAction::WriteObject { session, part, ref content } => {
                if self.unplaced.is_full_for(content.len() as u64) {
                    return Err(action);
                }
                self.write_part(session, part, content, replication);
            }
            _ => unreachable!("{action:?} does not concern objects"),
        }
        Ok(())
    }

    /// Entries up to a sequence are committed: reads find them, and they go in place.
    fn commit_through(&mut self, sequence: u64, replication: &mut Replication) {
        while let Some(entry) = replication.durable.pop_front_if(|entry| entry.header.sequence <= sequence) {
            let EntryHeader { sequence, epoch, .. } = entry.header;
            replication.committed = EntryId { sequence, epoch };
            self.commit(entry);
        }
    }

    /// Writes a part of a copied object: its operations go in place as entries do, and count as done by the
    /// last committed one.
    fn write_part(
        &mut self,
        session: u64,
        part: ObjectPart,
        content: &Arc<[u8]>,
        replication: &mut Replication,
    ) {
        let Some(copy) = PartContent::decode(content) else {
            return log::error!(
                "group {}: a copy of an object is malformed, and is ignored",
                replication.group
            );
        };
        let object = part.object;
        let need = copy.space_need(part.number, self.extents_of(object).unwrap_or(0));
        if !self.partition.space_use().has_room(self.reserved, need) {
            // It comes again, until the primary knows the size of this partition. What was given up is free
            // meanwhile.
            if replication.refused_copy != Some(session) {
                log::warn!(
                    "group {}: the partition has no room for a copy of object {} of volume {}, of {} extents",
                    replication.group,
                    object.index,
                    object.volume,
                    need.extents
                );
            }
            replication.refused_copy = Some(session);
            self.checkpoint_wanted |= self.is_changed;
            return self.wake_background();
        }
        let operations = copy.into_operations(part);
        let count = operations.len();
        if count == 0 {
            // Earlier parts are in place: the primary sends one after the other.
            return replication.events.push_back(ReplicaEvent::ObjectWritten { session, part });
        }
        replication.copies_to_place += 1;
        for (index, (header, data)) in operations.into_iter().enumerate() {
            let EntryId { sequence, epoch } = replication.committed;
            let copied = (index + 1 == count).then_some((session, part.number));
            let header = EntryHeader { sequence, epoch, version: sequence, ..header };
            let need = self.partition.space_need(&header, false).unwrap_or_default();
            let bytes = data.len() as u64;
            self.reserve(&header, need);
            self.unplaced.add(bytes);
            self.commit(CommittedEntry {
                header,
                data: EntryData::Recovered(Arc::new(data)),
                bytes,
                need,
                copied,
                placed: None,
            });
        }
    }

    /// Reads a part of an object that another replica gets.
    pub(in crate::shard) fn read_for_copy(
        &mut self,
        object: ObjectId,
        offset: u32,
        length: u32,
        reply: Reply,
    ) {
        let replication = self.replication.as_ref();
        let verify = replication.is_none_or(|it| !it.may_be_changed(object, offset..offset + length));
        self.read_as(object, offset, length, verify, reply);
    }

    /// Results of reads.
    fn take_reads(&mut self, replication: &mut Replication) {
        while let Some(ShardReply { tag, status, data }) = replication.replies.receive() {
            replication.reading -= 1;
            let data = data.filter(|_| status == Status::SUCCESS).and_then(|data| {
                let data = self.core.pool().adopt(data).ok()?;
                let mut bytes = vec![0; data.len()];
                data.copy_to(0, &mut bytes);
                Some(bytes.into())
            });
            replication.events.push_back(ReplicaEvent::ReadDone { read: tag, data });
        }
    }

    /// Before a reset: what is durable and not committed is given up; what is being written follows.
    fn give_up(&mut self, replication: &mut Replication) {
        for entry in replication.durable.drain(..) {
            self.unplaced.remove(entry.bytes);
            self.release_reservation(&entry.header, entry.need);
        }
        self.wake_background();
    }
}
