//! Repair: what the primary's device cannot read is fetched from another member, and written again.
//!
//! The member reads what it has committed, and says up to which entry that is at least. If the primary's log
//! has no later entry that changes the range, the data is what the range has now: the client gets it, and an
//! entry writes it, which every replica applies as it does a client's. If there is one, the member is asked
//! again.
//!
//! A member whose block is unsettled answers with the entry that the block has. If no member has anything
//! better, what was committed there is lost at the primary and overwritten at the others: the primary appends
//! that entry, as if it had become primary with it. Its request is not answered yet, and may take effect as
//! late as this.

use std::sync::Arc;

use wire_store::{EntryHeader, ObjectId, Operation, crc32c};

use crate::follower::FetchOfPrimary;
use crate::primary::{ClientRead, FetchOfFollower};
use crate::replica::{Replica, Role};
use crate::{
    ClientReply, MessageBody, PlantedReplicaFault, Plants, ReplicaAction, ReplicaId, ReplicatedEntry,
    encode_checksums, log_end_object, object_of_checksums,
};

/// Repairs at a time, and reads for the primary; further reads are refused as busy, or asked again.
const REPAIRS_MAX: usize = 64;
/// The number of an entry that repairs a block, of no client. It changes nothing that was committed.
pub(crate) const REPAIR_NUMBER: u64 = 1;
/// Times that members are asked for a range. The client asks again after that.
const ATTEMPTS_MAX: u32 = 8;

/// A range that waits for another member.
pub(crate) struct Repair {
    /// The read of a client; `None` if a follower with an unsettled block waits for it.
    read: Option<ClientRead>,
    object: ObjectId,
    /// The range in whole blocks.
    offset: u32,
    length: u32,
    /// Who was asked last, and when.
    member: Option<ReplicaId>,
    pub(crate) sent_ns: u64,
    attempts: u32,
    /// Members that could not read it either.
    unreadable: Vec<ReplicaId>,
    /// What a member has in an unsettled block, with entries up to a sequence.
    unsettled: Option<(u64, Arc<ReplicatedEntry>)>,
}

impl Repair {
    fn is_unreadable_at(&mut self, member: ReplicaId) {
        if !self.unreadable.contains(&member) {
            self.unreadable.push(member);
        }
    }

    /// Ends without the data.
    pub(crate) fn refuse(self, reply: ClientReply, actions: &mut Vec<ReplicaAction>) {
        if let Some(read) = self.read {
            read.answer(reply, actions);
        }
    }
}

impl<F: Plants> Replica<F> {
    /// The storage could not read a range for a client.
    pub(crate) fn begin_repair(&mut self, number: u64, read: ClientRead, actions: &mut Vec<ReplicaAction>) {
        let block = self.settings.block_bytes;
        let offset = read.offset / block * block;
        let length = (read.offset + read.length).next_multiple_of(block) - offset;
        if self.primary().repairs.len() >= REPAIRS_MAX {
            return read.answer(ClientReply::Busy, actions);
        }
        if length > wire_replica::TRANSFER_BYTES_MAX {
            return read.answer(ClientReply::Failed, actions);
        }
        self.start_repair(number, Some(read), (read.object, offset, length), actions);
    }

    /// The storage could not read a block that is unsettled at a follower, which asks again.
    pub(crate) fn begin_repair_for_follower(
        &mut self,
        number: u64,
        range: (ObjectId, u32, u32),
        actions: &mut Vec<ReplicaAction>,
    ) {
        let (object, offset, length) = range;
        let is_pending = self.is_changed_after(self.commit_point, range);
        let primary = self.primary();
        let overlaps = |it: &Repair| {
            it.object == object && it.offset < offset + length && offset < it.offset + it.length
        };
        if !is_pending && primary.repairs.len() < REPAIRS_MAX && !primary.repairs.values().any(overlaps) {
            self.start_repair(number, None, range, actions);
        }
    }

    fn start_repair(
        &mut self,
        number: u64,
        read: Option<ClientRead>,
        (object, offset, length): (ObjectId, u32, u32),
        actions: &mut Vec<ReplicaAction>,
    ) {
        let (member, sent_ns, attempts, unreadable, unsettled) = (None, 0, 0, Vec::new(), None);
        let repair =
            Repair { read, object, offset, length, member, sent_ns, attempts, unreadable, unsettled };
        self.primary().repairs.insert(number, repair);
        self.ask_member(number, actions);
    }

    /// Asks the next member that may read it. If there is none, what one has in an unsettled block counts, or
    /// else the client is answered that no member can read it.
    fn ask_member(&mut self, number: u64, actions: &mut Vec<ReplicaAction>) {
        let now_ns = self.now_ns;
        let primary = self.primary();
        let Some(repair) = primary.repairs.get_mut(&number) else { return };
        let members = primary.peers.iter().filter(|(_, peer)| peer.in_sync).map(|(id, _)| *id);
        let members: Vec<ReplicaId> = members.filter(|id| !repair.unreadable.contains(id)).collect();
        let next = members.iter().find(|member| repair.member.is_none_or(|last| **member > last));
        let Some(member) = next.or(members.first()).copied() else {
            let repair = primary.repairs.remove(&number).expect("it was there");
            let settles = repair
                .unsettled
                .as_ref()
                .is_some_and(|(through, entry)| self.settle_by_entry(*through, entry, actions));
            let reply = if settles { ClientReply::Busy } else { ClientReply::Failed };
            return repair.refuse(reply, actions);
        };
        if repair.attempts >= ATTEMPTS_MAX {
            let repair = primary.repairs.remove(&number).expect("it was there");
            return repair.refuse(ClientReply::Busy, actions);
        }
        (repair.member, repair.sent_ns) = (Some(member), now_ns);
        repair.attempts += 1;
        let Repair { object, offset, length, .. } = *repair;
        self.send(member, MessageBody::Fetch { number, object, offset, length }, actions);
    }

    /// Asks again where no answer came.
    pub(crate) fn run_repairs(&mut self, actions: &mut Vec<ReplicaAction>) {
        let (now_ns, resend_ns) = (self.now_ns, self.settings.resend_ns);
        let Role::Primary(primary) = &self.role else { return };
        let due = primary.repairs.iter().filter(|(_, repair)| now_ns >= repair.sent_ns + resend_ns);
        let due: Vec<u64> = due.map(|(number, _)| *number).collect();
        due.into_iter().for_each(|number| self.ask_member(number, actions));
    }

    /// The primary asks for a range, or a follower with an unsettled block does.
    pub(crate) fn on_fetch(
        &mut self,
        from: ReplicaId,
        number: u64,
        (object, offset, length): (ObjectId, u32, u32),
        actions: &mut Vec<ReplicaAction>,
    ) {
        let may_answer = self.is_sound_member() && from == self.config.primary;
        let (read, through) = (self.reads + 1, self.commit_point);
        let range = offset..offset.saturating_add(length);
        if object == log_end_object(self.settings.group) {
            return self.answer_log_end(from, number, actions);
        }
        let scrubbed = object_of_checksums(object);
        let (object, is_scrub) = (scrubbed.unwrap_or(object), scrubbed.is_some());
        if self.unsettled.has(object, range.clone()) {
            // A primary's is in its log again; it is asked for again. To a scrub there is nothing to say.
            if may_answer && !is_scrub {
                self.offer_unsettled(number, object, range, actions);
            }
            return;
        }
        let follower = match &mut self.role {
            Role::Follower(follower) => follower,
            Role::Primary(primary) => {
                let is_peer = primary.peers.contains_key(&from) && !primary.is_comparing;
                if is_peer && !is_scrub && primary.fetches.len() < REPAIRS_MAX {
                    let range = (object, offset, length);
                    primary.fetches.insert(read, FetchOfFollower { from, number, through, range });
                    self.reads = read;
                    actions.push(ReplicaAction::Read { read, object, offset, length, through });
                }
                return;
            }
            Role::Starting => return,
        };
        if may_answer && !follower.fenced && follower.fetches.len() < REPAIRS_MAX {
            follower.fetches.insert(read, FetchOfPrimary { number, through, is_scrub });
            self.reads = read;
            actions.push(ReplicaAction::Read { read, object, offset, length, through });
        }
    }

    /// A range for the primary is read.
    pub(crate) fn answer_fetch(
        &mut self,
        read: u64,
        data: Option<Arc<[u8]>>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let Role::Follower(follower) = &mut self.role else { return };
        if let Some(FetchOfPrimary { number, through, is_scrub }) = follower.fetches.remove(&read) {
            let block = self.settings.block_bytes as usize;
            let checksums = |data: Arc<[u8]>| encode_checksums(&data, block).into();
            let data = if is_scrub { data.map(checksums) } else { data };
            self.send(self.config.primary, MessageBody::Fetched { number, through, data }, actions);
        }
    }

    /// A member has answered.
    pub(crate) fn on_fetched(
        &mut self,
        from: ReplicaId,
        number: u64,
        through: u64,
        data: Option<Arc<[u8]>>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let Role::Primary(primary) = &mut self.role else {
            if !self.on_primary_log_end(from, number, through) {
                self.on_settling_data(from, number, through, data, actions);
            }
            return;
        };
        if primary.scrub.as_ref().is_some_and(|scrub| scrub.reads(number)) {
            return self.on_scrub_answer(from, through, data, actions);
        }
        let Some(repair) = primary.repairs.get_mut(&number).filter(|repair| repair.member == Some(from))
        else {
            return;
        };
        let Repair { read, object, offset, length, .. } = *repair;
        let Some(data) = data.filter(|data| data.len() == length as usize) else {
            repair.is_unreadable_at(from);
            return self.ask_member(number, actions);
        };
        let range = (object, offset, length);
        if self.is_changed_after(through, range) && !self.has_fault(PlantedReplicaFault::RepairOvertaken) {
            return self.ask_member(number, actions);
        }
        let repair = self.primary().repairs.remove(&number).expect("it was there");
        let Role::Primary(primary) = &self.role else { return };
        if self.reads_blocked(primary).is_some() {
            return repair.refuse(ClientReply::Busy, actions);
        }
        if let Some(read) = read {
            let wanted = &data[(read.offset - offset) as usize..][..read.length as usize];
            read.answer(ClientReply::Data(wanted.into()), actions);
        }
        if self.log.len() < self.settings.entries_max {
            let header = EntryHeader::new(Operation::Write, object, offset, length);
            let (client_number, data_crc32c) = (REPAIR_NUMBER, crc32c(&data));
            let header = EntryHeader { client_number, data_crc32c, ..header };
            self.append_as_primary(header, data, actions);
            self.repaired += 1;
        }
    }

    /// A member has an unsettled block in the range.
    pub(crate) fn on_unsettled(
        &mut self,
        from: ReplicaId,
        (number, through): (u64, u64),
        entry: Arc<ReplicatedEntry>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let block = self.settings.block_bytes;
        let Role::Primary(primary) = &mut self.role else { return };
        let repair = primary.repairs.get_mut(&number).filter(|repair| repair.member == Some(from));
        let Some(repair) = repair else { return };
        let EntryHeader { operation, object, offset, length, .. } = entry.header;
        let is_block = operation == Operation::Write
            && entry.data.len() == block as usize
            && (length, offset % block) == (block, 0);
        let end = repair.offset + repair.length;
        let is_in_range = object == repair.object && repair.offset <= offset && offset < end;
        repair.is_unreadable_at(from);
        if is_block && is_in_range {
            repair.unsettled.get_or_insert((through, entry));
        }
        self.ask_member(number, actions);
    }

    /// Whether an entry after a sequence changes a range, or may.
    pub(crate) fn is_changed_after(
        &self,
        through: u64,
        (object, offset, length): (ObjectId, u32, u32),
    ) -> bool {
        if through < self.log.base().sequence {
            return true;
        }
        let changes = |entry: &Arc<ReplicatedEntry>| {
            let header = &entry.header;
            let is_all = header.operation == Operation::Remove;
            let overlaps = header.offset < offset + length && offset < header.offset + header.length;
            header.object == object && (is_all || overlaps)
        };
        (through + 1..=self.log.end()).filter_map(|sequence| self.log.get(sequence)).any(changes)
    }
}
