//! Scrub: the primary reads a range and asks the members in sync for the checksums of its blocks there.
//!
//! Each reads what it has committed, and says up to which entry that is at least. A block that differs counts
//! if the primary's log has no later entry that changes it, since the log of every member has what any of
//! them may have applied. Both copies have their checksums then, so nothing says which one is right: it is
//! reported, and neither is changed.
//!
//! A block that a member cannot read is written again with what the primary has, by an entry, as in a
//! [repair](crate::repair). What the primary itself cannot read a read of a client repairs.

use std::collections::BTreeMap;
use std::sync::Arc;

use wire_store::{EntryHeader, ObjectId, Operation, crc32c};

use crate::repair::REPAIR_NUMBER;
use crate::replica::{Replica, Role};
use crate::scrub_state::{MemberChecksums, Scrub};
use crate::{
    MessageBody, PlantedReplicaFault, Plants, ReplicaAction, ReplicaId, ScrubFindings, ScrubOutcome,
    checksums_object, decode_checksums,
};

/// Times that members are asked for a range.
const ATTEMPTS_MAX: u32 = 8;

impl Scrub {
    /// Whether a number is that of its read.
    pub(crate) fn reads(&self, read: u64) -> bool {
        self.read == read
    }

    pub(crate) fn end(&self, outcome: ScrubOutcome, actions: &mut Vec<ReplicaAction>) {
        actions.push(ReplicaAction::Scrubbed { scrub: self.scrub, outcome });
    }

    /// When members are asked again.
    pub(crate) fn deadline(&self, resend_ns: u64) -> Option<u64> {
        self.data.as_ref().map(|_| self.sent_ns + resend_ns)
    }

    fn range(&self) -> (ObjectId, u32, u32) {
        (self.object, self.offset, self.length)
    }
}

impl<F: Plants> Replica<F> {
    /// Begins to compare a range of whole blocks.
    pub(crate) fn begin_scrub(
        &mut self,
        scrub: u64,
        (object, offset, length): (ObjectId, u32, u32),
        actions: &mut Vec<ReplicaAction>,
    ) {
        let block = self.settings.block_bytes;
        let is_whole = [offset, length].into_iter().all(|number| number.is_multiple_of(block));
        assert!(is_whole && length > 0, "a scrub of {length} bytes at {offset} is none of whole blocks");
        self.interrupt_scrub(actions);
        let refused = match &self.role {
            Role::Primary(primary) if self.stale.is_some() || self.reads_blocked(primary).is_some() => {
                Some(ScrubOutcome::Interrupted)
            }
            Role::Primary(_) => None,
            Role::Follower(_) | Role::Starting => Some(ScrubOutcome::NotPrimary),
        };
        if let Some(outcome) = refused {
            return actions.push(ReplicaAction::Scrubbed { scrub, outcome });
        }
        self.reads += 1;
        let (read, through) = (self.reads, self.commit_point);
        let (data, answers, sent_ns, attempts) = (None, BTreeMap::new(), 0, 0);
        let begun = Scrub { scrub, read, object, offset, length, through, data, answers, sent_ns, attempts };
        self.primary().scrub = Some(begun);
        actions.push(ReplicaAction::Read { read, object, offset, length, through });
    }

    /// The range is read here, or cannot be.
    pub(crate) fn on_scrub_read(&mut self, data: Option<Arc<[u8]>>, actions: &mut Vec<ReplicaAction>) {
        let Some(scrub) = &mut self.primary().scrub else { return };
        scrub.data = data;
        if scrub.data.is_none() {
            return self.end_scrub(ScrubOutcome::Unreadable, actions);
        }
        self.ask_members(actions);
    }

    /// The members that have not answered.
    fn unanswered(&self) -> Vec<ReplicaId> {
        let Role::Primary(primary) = &self.role else { return Vec::new() };
        let has_answered = |id| primary.scrub.as_ref().is_some_and(|scrub| scrub.answers.contains_key(id));
        let members = primary.peers.iter().filter(|(id, peer)| peer.in_sync && !has_answered(id));
        members.map(|(id, _)| *id).collect()
    }

    /// Asks those that have not answered. Ends when all have, or were asked often enough.
    fn ask_members(&mut self, actions: &mut Vec<ReplicaAction>) {
        let (now_ns, unanswered) = (self.now_ns, self.unanswered());
        let Some(scrub) = &mut self.primary().scrub else { return };
        let (number, offset, length) = (scrub.read, scrub.offset, scrub.length);
        let wanted = checksums_object(scrub.object).filter(|_| scrub.attempts < ATTEMPTS_MAX);
        let Some(object) = wanted.filter(|_| !unanswered.is_empty()) else {
            return self.conclude_scrub(unanswered, actions);
        };
        (scrub.sent_ns, scrub.attempts) = (now_ns, scrub.attempts + 1);
        for member in unanswered {
            self.send(member, MessageBody::Fetch { number, object, offset, length }, actions);
        }
    }

    /// A member has answered.
    pub(crate) fn on_scrub_answer(
        &mut self,
        from: ReplicaId,
        through: u64,
        answer: Option<Arc<[u8]>>,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let block = self.settings.block_bytes;
        let is_member = self.config.has(from);
        let Some(scrub) = self.primary().scrub.as_mut().filter(|it| is_member && it.data.is_some()) else {
            return;
        };
        let blocks = (scrub.length / block) as usize;
        let answer = match answer {
            None => MemberChecksums::Unreadable,
            Some(answer) => decode_checksums(&answer, blocks)
                .map_or(MemberChecksums::Unknown, |known| MemberChecksums::Known(through, known)),
        };
        scrub.answers.entry(from).or_insert(answer);
        if self.unanswered().is_empty() {
            self.conclude_scrub(Vec::new(), actions);
        }
    }

    /// Asks again where no answer came.
    pub(crate) fn run_scrub(&mut self, actions: &mut Vec<ReplicaAction>) {
        let (now_ns, resend_ns) = (self.now_ns, self.settings.resend_ns);
        let Role::Primary(primary) = &self.role else { return };
        let deadline = primary.scrub.as_ref().and_then(|scrub| scrub.deadline(resend_ns));
        if deadline.is_some_and(|deadline| now_ns >= deadline) {
            self.ask_members(actions);
        }
    }

    /// All answers are there that come.
    fn conclude_scrub(&mut self, unanswered: Vec<ReplicaId>, actions: &mut Vec<ReplicaAction>) {
        let Some(scrub) = self.primary().scrub.take() else { return };
        let Role::Primary(primary) = &self.role else { return };
        if self.reads_blocked(primary).is_some() {
            return scrub.end(ScrubOutcome::Interrupted, actions);
        }
        let findings = self.compare_answers(&scrub, unanswered);
        let is_one_block = scrub.length == self.settings.block_bytes;
        if is_one_block && !findings.unreadable.is_empty() && !self.write_again(&scrub, actions) {
            return scrub.end(ScrubOutcome::Interrupted, actions);
        }
        scrub.end(ScrubOutcome::Compared(findings), actions);
    }

    fn compare_answers(&self, scrub: &Scrub, unanswered: Vec<ReplicaId>) -> ScrubFindings {
        let block = self.settings.block_bytes;
        let data = scrub.data.as_deref().unwrap_or_default();
        let own: Vec<u32> = data.chunks(block as usize).map(crc32c).collect();
        let mut findings = ScrubFindings { unanswered, ..ScrubFindings::default() };
        let is_blind = self.has_fault(PlantedReplicaFault::ScrubOvertaken);
        for (member, answer) in &scrub.answers {
            let (through, checksums) = match answer {
                MemberChecksums::Known(through, checksums) => (scrub.through.min(*through), checksums),
                MemberChecksums::Unreadable => {
                    findings.unreadable.push(*member);
                    continue;
                }
                MemberChecksums::Unknown => {
                    findings.unanswered.push(*member);
                    continue;
                }
            };
            let offsets = (0..).map(|index| scrub.offset + index * block);
            let differing = offsets.zip(own.iter().zip(checksums)).filter(|(_, (own, other))| own != other);
            for (offset, _) in differing {
                match self.is_changed_after(through, (scrub.object, offset, block)) && !is_blind {
                    true => findings.overtaken += 1,
                    false => findings.differing.push((offset, *member)),
                }
            }
        }
        findings
    }

    /// An entry writes what was read, if nothing has changed it since. Returns whether it does.
    fn write_again(&mut self, scrub: &Scrub, actions: &mut Vec<ReplicaAction>) -> bool {
        let is_overtaken = self.is_changed_after(scrub.through, scrub.range())
            && !self.has_fault(PlantedReplicaFault::ScrubRepairOvertaken);
        let Some(data) = scrub.data.clone().filter(|_| !is_overtaken) else { return false };
        if self.log.len() >= self.settings.entries_max {
            return false;
        }
        let header = EntryHeader::new(Operation::Write, scrub.object, scrub.offset, scrub.length);
        let (client_number, data_crc32c) = (REPAIR_NUMBER, crc32c(&data));
        self.append_as_primary(EntryHeader { client_number, data_crc32c, ..header }, data, actions);
        self.repaired += 1;
        true
    }

    fn end_scrub(&mut self, outcome: ScrubOutcome, actions: &mut Vec<ReplicaAction>) {
        if let Role::Primary(primary) = &mut self.role
            && let Some(scrub) = primary.scrub.take()
        {
            scrub.end(outcome, actions);
        }
    }

    /// What is compared may be tried again.
    pub(crate) fn interrupt_scrub(&mut self, actions: &mut Vec<ReplicaAction>) {
        self.end_scrub(ScrubOutcome::Interrupted, actions);
    }
}
