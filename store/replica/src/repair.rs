//! Repair: what the primary's device cannot read is fetched from another member, and written again.
//!
//! The member reads what it has committed, and says up to which entry that is at least. If the primary's log has no later
//! entry that changes the range, the data is what the range has now: the client gets it, and an entry writes it, which
//! every replica applies as it does a client's. If there is one, the member is asked again.

use std::sync::Arc;

use wire_store::{EntryHeader, ObjectId, Operation, crc32c};

use crate::primary::ClientRead;
use crate::replica::{Replica, Role};
use crate::{
    ClientReply, MessageBody, PlantedReplicaFault, Plants, ReplicaAction, ReplicaId, ReplicatedEntry,
};

/// Repairs at a time, and reads for the primary; further reads are refused as busy, or asked again.
const REPAIRS_MAX: usize = 64;
/// Times that members are asked for a range. The client asks again after that.
const ATTEMPTS_MAX: u32 = 8;

/// A read that waits for another member.
pub(crate) struct Repair {
    pub(crate) read: ClientRead,
    /// The range in whole blocks.
    offset: u32,
    length: u32,
    /// Who was asked last, and when.
    member: Option<ReplicaId>,
    pub(crate) sent_ns: u64,
    attempts: u32,
    /// Members that could not read it either.
    unreadable: usize,
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
        let (member, sent_ns, attempts, unreadable) = (None, 0, 0, 0);
        let repair = Repair { read, offset, length, member, sent_ns, attempts, unreadable };
        self.primary().repairs.insert(number, repair);
        self.ask_member(number, actions);
    }

    /// Asks the next member, or answers the client that no member can read it.
    fn ask_member(&mut self, number: u64, actions: &mut Vec<ReplicaAction>) {
        let now_ns = self.now_ns;
        let primary = self.primary();
        let members: Vec<ReplicaId> =
            primary.peers.iter().filter(|(_, peer)| peer.in_sync).map(|(id, _)| *id).collect();
        let Some(repair) = primary.repairs.get_mut(&number) else { return };
        let reply = if repair.unreadable >= members.len() {
            Some(ClientReply::Failed)
        } else {
            (repair.attempts >= ATTEMPTS_MAX).then_some(ClientReply::Busy)
        };
        if let Some(reply) = reply {
            let repair = primary.repairs.remove(&number).expect("it was there");
            return repair.read.answer(reply, actions);
        }
        let next = members.iter().find(|member| repair.member.is_none_or(|last| **member > last));
        let member = *next.unwrap_or(&members[0]);
        (repair.member, repair.sent_ns) = (Some(member), now_ns);
        repair.attempts += 1;
        let Repair { read: ClientRead { object, .. }, offset, length, .. } = *repair;
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
        let may_answer = self.is_in_sync() && self.complete && from == self.config.primary;
        let (read, through) = (self.reads + 1, self.commit_point);
        // What is unsettled here is no answer; it is asked for again.
        if self.unsettled.has(object, offset..offset.saturating_add(length)) {
            return;
        }
        let follower = match &mut self.role {
            Role::Follower(follower) => follower,
            Role::Primary(primary) => {
                if primary.peers.contains_key(&from) && primary.fetches.len() < REPAIRS_MAX {
                    primary.fetches.insert(read, (from, number, through));
                    self.reads = read;
                    actions.push(ReplicaAction::Read { read, object, offset, length, through });
                }
                return;
            }
            Role::Starting => return,
        };
        if may_answer && !follower.fenced && follower.fetches.len() < REPAIRS_MAX {
            follower.fetches.insert(read, (number, through));
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
        if let Some((number, through)) = follower.fetches.remove(&read) {
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
            return self.on_settling_data(from, number, through, data, actions);
        };
        let Some(repair) = primary.repairs.get_mut(&number).filter(|repair| repair.member == Some(from))
        else {
            return;
        };
        let Repair { read, offset, length, .. } = *repair;
        let Some(data) = data.filter(|data| data.len() == length as usize) else {
            repair.unreadable += 1;
            return self.ask_member(number, actions);
        };
        let range = (read.object, offset, length);
        if self.is_changed_after(through, range) && !self.has_fault(PlantedReplicaFault::RepairOvertaken) {
            return self.ask_member(number, actions);
        }
        self.primary().repairs.remove(&number);
        let Role::Primary(primary) = &self.role else { return };
        if self.reads_blocked(primary).is_some() {
            return read.answer(ClientReply::Busy, actions);
        }
        let wanted = &data[(read.offset - offset) as usize..][..read.length as usize];
        read.answer(ClientReply::Data(wanted.into()), actions);
        if self.log.len() < self.settings.entries_max {
            let header = EntryHeader::new(Operation::Write, read.object, offset, length);
            let header = EntryHeader { data_crc32c: crc32c(&data), ..header };
            self.append_as_primary(header, data, actions);
            self.repaired += 1;
        }
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
