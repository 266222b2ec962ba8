//! A channel of an image: requests become operations on objects, which go to the primaries until they are
//! answered.
//!
//! Before its first write in a logical group it opens a session there ([`sessions`](crate::sessions)); what
//! arrives after the session has ended is refused. Before its first read there, some channel of the image
//! has: a group that has seen the attach epoch takes no write of a holder before.

#[cfg(test)]
mod tests;
mod volumes;
mod written;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bdev::{Completion, Request};
use block_io::{Channel, Op, Status};
use cluster_map::ReplicaId;
use reactor::Core;
use slots::{Slab, Slot};
use sockets::CoreNetwork;
use store_image::{RangeProgress, RangeRequest};
use wire_replica::{CLIENT_WINDOW, ClientReply, ClientRequest, Frame, SessionChange};
use wire_store::{BlockBitmap, EntryHeader, OBJECT_BYTES, ObjectId, Operation, crc32c};

use crate::attach::{AttachState, AttachStatus};
use crate::cluster::PoolView;
use crate::connections::Connections;
use crate::placement::{DEPTH, Placement};
use crate::sessions::{GroupSession, GroupSessions, SessionState};
use crate::sweep::{LIST_BYTES, Sweep, SweepKind, SweepStep};
use crate::watch::PoolWatch;

/// Numbers of requests that are not answered differ by less than this.
const NUMBERS_MAX: u64 = CLIENT_WINDOW;
/// An operation without an answer goes to another replica after this time.
const PATIENCE_NS: u64 = 150_000_000;
/// After an answer that says to try again.
const RETRY_NS: u64 = 2_000_000;
/// The map is read again while an operation has waited for this time: nodes may have other addresses.
const REFRESH_NS: u64 = 500_000_000;
/// An operation ends with an error after this time. Groups keep sessions for longer without a word of the
/// client.
const GIVE_UP_NS: u64 = 60_000_000_000;
/// After an answer that a group opens no session now, as it has too many.
const TOO_MANY_SESSIONS_RETRY_NS: u64 = 500_000_000;

/// A request that was accepted.
enum Pending {
    /// Of one object.
    Io(Request),
    /// Of a range, object by object.
    Range(RangeRequest),
}

/// What an operation belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A request.
    Request(Slot),
    /// The session of its group, which it opens or renews.
    Session,
    /// A sweep.
    Sweep(SweepStep),
    /// A list of written blocks, with its key.
    Written(u64),
}

/// An operation that is not answered.
struct PendingOperation {
    owner: Owner,
    /// It is not sent before its group has a session, or knows the attach epoch.
    is_waiting: bool,
    group: u32,
    request: ClientRequest,
    target: ReplicaId,
    /// It was sent there, and there is no answer.
    is_sent: bool,
    /// How often it was sent in its session.
    sends: u32,
    again_ns: u64,
    give_up_ns: u64,
}

/// A channel of one core.
pub(crate) struct ImageChannel<N: CoreNetwork> {
    core: Core,
    watch: Arc<PoolWatch>,
    view: Arc<PoolView>,
    /// The version of the view, and when it may be read again.
    version: u64,
    refresh_ns: u64,
    placement: Placement,
    attach: Arc<AttachState>,
    /// The attach epoch of what is in flight, and the aborts before it.
    epoch: u32,
    aborts: u32,
    block_bytes: u32,
    connections: Connections<N>,
    /// The client of reads. Each session has one of its own.
    client: u64,
    sessions: GroupSessions,
    next_number: u64,
    pending: Slab<Pending>,
    /// Ranges of which not every part was sent.
    ranges: VecDeque<Slot>,
    operations: BTreeMap<u64, PendingOperation>,
    /// What removes or lists whole volumes; without requests.
    sweep: Option<Sweep>,
    /// Answers to lists of written blocks.
    written: VecDeque<(u64, Result<BlockBitmap, Status>)>,
    /// When operations are sent again, with their numbers.
    timers: BTreeSet<(u64, u64)>,
    /// The primary of a group as far as known.
    primaries: BTreeMap<u32, ReplicaId>,
    /// Scratch of [`submit`](Channel::submit), empty between calls.
    batch: Vec<Request>,
    done: Vec<Completion>,
    replies: Vec<(u64, ClientReply)>,
    lost: Vec<ReplicaId>,
}

impl<N: CoreNetwork> ImageChannel<N> {
    pub(crate) fn new(
        core: &Core,
        watch: Arc<PoolWatch>,
        placement: Placement,
        attach: Arc<AttachState>,
        block_bytes: u32,
    ) -> ImageChannel<N> {
        let (view, version) = watch.view();
        let primaries = view.replicas.iter().filter_map(|(group, all)| Some((*group, *all.first()?)));
        ImageChannel {
            core: core.clone(),
            connections: Connections::new(core, view.identity.clone(), &view.nodes),
            client: crate::sessions::new_client(),
            sessions: GroupSessions::new(placement.first_group, placement.groups),
            // In this order: with a newer epoch than the count of aborts has, there is one more to come.
            aborts: attach.aborts(),
            epoch: attach.epoch(),
            attach,
            block_bytes,
            next_number: 1,
            pending: Slab::with_capacity(DEPTH),
            ranges: VecDeque::new(),
            operations: BTreeMap::new(),
            sweep: None,
            written: VecDeque::new(),
            timers: BTreeSet::new(),
            primaries: primaries.collect(),
            batch: Vec::new(),
            done: Vec::new(),
            replies: Vec::new(),
            lost: Vec::new(),
            watch,
            view,
            version,
            refresh_ns: 0,
            placement,
        }
    }

    /// Begins to list or remove what groups have, with the polls that follow.
    pub(crate) fn start_sweep(&mut self, kind: SweepKind) {
        self.sweep = Some(Sweep::new(&self.placement, kind));
        self.run_sweep();
    }

    pub(crate) fn sweep(&self) -> Option<&Sweep> {
        self.sweep.as_ref()
    }

    /// The sweep, once it is done.
    pub(crate) fn take_sweep(&mut self) -> Option<Sweep> {
        self.sweep.take_if(|sweep| sweep.is_done())
    }

    fn run_sweep(&mut self) {
        while self.has_numbers()
            && let Some(step) = self.sweep.as_mut().and_then(Sweep::next)
        {
            let (group, request) = match step {
                SweepStep::List(group, listing) => {
                    let (client, number) = (self.client, self.next_number);
                    let object = listing.object(group);
                    (group, ClientRequest::Read { client, number, object, offset: 0, length: LIST_BYTES })
                }
                SweepStep::Remove(index) | SweepStep::Zero(index, _) => {
                    let (group, volume) = (self.placement.group_of(index), self.placement.volume);
                    let object = ObjectId { group, volume, index, suffix: 0 };
                    let header = match step {
                        SweepStep::Zero(_, offset) => {
                            let length = OBJECT_BYTES as u32 - offset;
                            EntryHeader::new(Operation::WriteZeroes, object, offset, length)
                        }
                        _ => EntryHeader::new(Operation::Remove, object, 0, 0),
                    };
                    let header = self.name(header, 0);
                    (group, ClientRequest::Write { header, data: [].into() })
                }
            };
            self.begin(Owner::Sweep(step), group, request);
        }
    }

    /// Accepts a request, or a read of another volume; gives it back if too many are in flight.
    fn accept(&mut self, request: Request, volume: u64) -> Result<(), Request> {
        self.follow_aborts();
        let attached = self.attach.status();
        if attached != AttachStatus::Live {
            self.done.push(request.complete(status_of_end(attached)));
            return Ok(());
        }
        if request.op == Op::Flush {
            // Every write is durable on every replica in sync when it completes.
            self.done.push(request.complete(Status::SUCCESS));
            return Ok(());
        }
        if self.pending.is_full() || !self.has_numbers() {
            return Err(request);
        }
        let bytes = u64::from(request.blocks) * u64::from(self.block_bytes);
        let offset = request.lba * u64::from(self.block_bytes);
        if !request.op.has_data() {
            let range = Pending::Range(RangeRequest::of_blocks(request, self.block_bytes));
            let slot = self.pending.insert(range).ok().expect("there is room");
            self.ranges.push_back(slot);
            self.send_ranges();
            return Ok(());
        }
        let (object, offset) = self.placement.of(volume).locate(offset);
        let (length, number) = (bytes as u32, self.next_number);
        let operation = if request.op == Op::Read {
            ClientRequest::Read { client: self.client, number, object, offset, length }
        } else {
            let mut data = vec![0; bytes as usize];
            if let Some(source) = request.data() {
                source.copy_to(0, &mut data);
            }
            let header = EntryHeader::new(Operation::Write, object, offset, length);
            ClientRequest::Write { header: self.name(header, crc32c(&data)), data: data.into() }
        };
        let slot = self.pending.insert(Pending::Io(request)).ok().expect("there is room");
        self.begin(Owner::Request(slot), object.group, operation);
        Ok(())
    }

    /// Whether another operation may begin.
    fn has_numbers(&self) -> bool {
        let oldest = self.operations.first_key_value().map_or(self.next_number, |(number, _)| *number);
        self.next_number - oldest < NUMBERS_MAX
    }

    /// Gives a logged operation its client and number.
    fn name(&self, header: EntryHeader, data_crc32c: u32) -> EntryHeader {
        let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let mtime_ns = since_1970.map_or(0, |time| time.as_nanos() as u64);
        let client = self.sessions.of(header.object.group).map_or(self.client, |session| session.client);
        EntryHeader { client, client_number: self.next_number, mtime_ns, data_crc32c, ..header }
    }

    /// Sends an operation with the next number, or has its group open a session first.
    fn begin(&mut self, owner: Owner, group: u32, request: ClientRequest) {
        let now_ns = self.core.now_ns();
        let number = self.next_number;
        self.next_number += 1;
        let target = self.primaries.get(&group).copied().unwrap_or(ReplicaId(0));
        let (again_ns, give_up_ns) = (now_ns, now_ns + GIVE_UP_NS);
        let (is_sent, is_waiting) = (false, owner != Owner::Session && !self.may_send(group, &request));
        let operation = PendingOperation {
            owner,
            is_waiting,
            group,
            request,
            target,
            is_sent,
            sends: 0,
            again_ns,
            give_up_ns,
        };
        self.operations.insert(number, operation);
        self.timers.insert((now_ns, number));
        if is_waiting {
            self.schedule(number, give_up_ns);
            self.open_session(group);
        } else {
            self.send(number, now_ns);
        }
    }

    /// Whether a group may get an operation: it has a session, or needs none.
    fn may_send(&self, group: u32, request: &ClientRequest) -> bool {
        if self.epoch == 0 {
            return true;
        }
        match self.sessions.of(group).map(|session| session.state) {
            Some(SessionState::Open { .. } | SessionState::Denied) => true,
            _ => matches!(request, ClientRequest::Read { .. }) && self.attach.is_known_in(group, self.epoch),
        }
    }

    /// Opens a session in a group that has none.
    fn open_session(&mut self, group: u32) {
        let number = self.next_number;
        if let Some(session) = self.sessions.of_mut(group)
            && session.state == SessionState::None
        {
            session.state = SessionState::Opening;
            self.send_session_change(group, number);
        }
    }

    /// Opens or renews a session.
    fn send_session_change(&mut self, group: u32, number: u64) {
        let Some(GroupSession { client, .. }) = self.sessions.of(group).copied() else { return };
        let (volume, attach_epoch) = (self.placement.volume, self.epoch);
        let header = SessionChange::Open { volume, attach_epoch }.header(group);
        let header = EntryHeader { client, client_number: number, ..header };
        self.begin(Owner::Session, group, ClientRequest::Write { header, data: [].into() });
    }

    /// Renews the sessions of groups, so that they are kept.
    fn renew_sessions(&mut self, now_ns: u64) {
        if !self.has_numbers() {
            return self.sessions.postpone(now_ns);
        }
        while self.has_numbers()
            && let Some(group) = self.sessions.take_due(now_ns)
        {
            self.send_session_change(group, self.next_number);
        }
    }

    /// A session is open: what waited for it is sent.
    fn session_opened(&mut self, group: u32, state: SessionState) {
        let now_ns = self.core.now_ns();
        if let Some(session) = self.sessions.of_mut(group) {
            session.state = state;
            session.renew_ns = now_ns + GroupSessions::RENEW_NS;
        }
        self.sessions.count_open();
        if state != SessionState::Denied {
            self.attach.set_known_in(group, self.epoch);
        }
        for number in self.waiting_for(group) {
            if let Some(operation) = self.operations.get_mut(&number) {
                operation.is_waiting = false;
            }
            self.send(number, now_ns);
        }
    }

    /// There is no session in a group any more: another one is another client's.
    fn session_ended(&mut self, group: u32) {
        if let Some(session) = self.sessions.of_mut(group) {
            *session = GroupSession::new();
        }
        self.sessions.count_open();
        if !self.waiting_for(group).is_empty() {
            self.rename_waiting(group);
            self.open_session(group);
        }
    }

    /// What was not sent, or refused, is of the new client.
    fn rename_waiting(&mut self, group: u32) {
        let Some(GroupSession { client: new, .. }) = self.sessions.of(group).copied() else { return };
        for number in self.waiting_for(group) {
            if let Some(PendingOperation { request: ClientRequest::Write { header, .. }, sends, .. }) =
                self.operations.get_mut(&number)
            {
                (header.client, header.epoch, header.sequence) = (new, 0, 0);
                *sends = 0;
            }
        }
    }

    fn waiting_for(&self, group: u32) -> Vec<u64> {
        let waiting = self.operations.iter().filter(|(_, it)| it.is_waiting && it.group == group);
        waiting.map(|(number, _)| *number).collect()
    }

    /// Sends an operation to its target; it is sent again if no answer comes.
    fn send(&mut self, number: u64, now_ns: u64) {
        let Some(operation) = self.operations.get_mut(&number) else { return };
        if let ClientRequest::Write { header, .. } = &mut operation.request
            && header.epoch == 0
            && operation.owner != Owner::Session
            && let Some(SessionState::Open { token }) = self.sessions.of(operation.group).map(|it| it.state)
        {
            // A repetition is of the same session.
            (header.epoch, header.sequence) = (self.epoch, token.into());
        }
        let frame = || Frame::Request(operation.request.clone()).encode(operation.group);
        operation.is_sent = self.connections.send(operation.target, frame, now_ns);
        operation.sends += u32::from(operation.is_sent);
        let wait_ns = if operation.is_sent { PATIENCE_NS } else { RETRY_NS };
        if !operation.is_sent {
            self.try_another(number);
        }
        self.schedule(number, now_ns + wait_ns);
    }

    /// Another replica of the group may be the primary.
    fn try_another(&mut self, number: u64) {
        let Some(operation) = self.operations.get_mut(&number) else { return };
        let replicas = &self.view.replicas[&operation.group];
        let at = replicas.iter().position(|replica| *replica == operation.target).unwrap_or(0);
        operation.target = replicas[(at + 1) % replicas.len()];
    }

    fn schedule(&mut self, number: u64, again_ns: u64) {
        if let Some(operation) = self.operations.get_mut(&number) {
            self.timers.remove(&(operation.again_ns, number));
            operation.again_ns = again_ns;
            self.timers.insert((again_ns, number));
        }
    }

    /// Takes a view that was read again, and wants one if an operation has waited for long.
    fn follow_map(&mut self, now_ns: u64) {
        if self.watch.version() != self.version {
            (self.view, self.version) = self.watch.view();
            self.connections.set_addresses(&self.view.nodes);
        }
        let oldest = self.operations.first_key_value().map(|(_, oldest)| oldest.give_up_ns - GIVE_UP_NS);
        if now_ns >= self.refresh_ns && oldest.is_some_and(|began_ns| now_ns >= began_ns + REFRESH_NS) {
            self.refresh_ns = now_ns + REFRESH_NS;
            self.watch.refresh();
        }
    }

    fn run_timers(&mut self, now_ns: u64) {
        while let Some((at_ns, number)) = self.timers.first().copied().filter(|(at_ns, _)| *at_ns <= now_ns) {
            let Some(operation) = self.operations.get(&number) else {
                self.timers.remove(&(at_ns, number));
                continue;
            };
            let replicas = self.view.replicas.get(&operation.group).map_or(&[][..], Vec::as_slice);
            if now_ns >= operation.give_up_ns || self.connections.are_foreign(replicas) {
                // It happened, or will have happened, once or never.
                self.finish(number, Status::NAMESPACE_NOT_READY, None);
                continue;
            }
            if operation.is_waiting {
                // Its session is what is sent.
                let give_up_ns = operation.give_up_ns;
                self.schedule(number, give_up_ns);
                continue;
            }
            if operation.is_sent {
                self.try_another(number);
            }
            self.send(number, now_ns);
        }
    }

    /// Sends parts of ranges, as many as may be in flight.
    fn send_ranges(&mut self) {
        for _ in 0..self.ranges.len() {
            let Some(slot) = self.ranges.pop_front() else { return };
            while self.has_numbers() && self.send_part(slot) {}
            if let Some(Pending::Range(range)) = self.pending.get(slot)
                && range.is_unsent()
            {
                self.ranges.push_back(slot);
            }
        }
    }

    /// Sends the next part of a range, if it may be sent now.
    fn send_part(&mut self, slot: Slot) -> bool {
        let Some(Pending::Range(range)) = self.pending.get_mut(slot) else { return false };
        let Some(part) = range.next_part() else { return false };
        range.part_sent(part);
        let (object, offset) = self.placement.locate(part.offset);
        let header = match part.length as usize {
            _ if part.allocates => EntryHeader::new(Operation::Preallocate, object, offset, part.length),
            OBJECT_BYTES => EntryHeader::new(Operation::Remove, object, 0, 0),
            _ => EntryHeader::new(Operation::WriteZeroes, object, offset, part.length),
        };
        let request = ClientRequest::Write { header: self.name(header, 0), data: [].into() };
        self.begin(Owner::Request(slot), object.group, request);
        true
    }

    fn answered(&mut self, number: u64, reply: ClientReply) {
        let now_ns = self.core.now_ns();
        let Some(operation) = self.operations.get_mut(&number) else { return };
        operation.is_sent = false;
        let group = operation.group;
        if operation.owner == Owner::Session {
            return self.session_answered(number, group, reply);
        }
        match reply {
            ClientReply::SessionOpened { .. } => {}
            ClientReply::SessionEnded => self.refused_without_session(number, group),
            ClientReply::Fenced => self.fenced(),
            ClientReply::TooManySessions => self.schedule(number, now_ns + TOO_MANY_SESSIONS_RETRY_NS),
            ClientReply::Written => self.finish(number, Status::SUCCESS, None),
            ClientReply::Data(data) => self.finish(number, Status::SUCCESS, Some(&data)),
            ClientReply::NotPrimary { primary: Some(primary) } => {
                operation.target = primary;
                self.primaries.insert(operation.group, primary);
                self.schedule(number, now_ns + RETRY_NS);
            }
            ClientReply::NotPrimary { primary: None } => {
                self.try_another(number);
                self.schedule(number, now_ns + RETRY_NS);
            }
            ClientReply::Busy => self.schedule(number, now_ns + RETRY_NS),
            ClientReply::NoSpace => self.finish(number, Status::CAPACITY_EXCEEDED, None),
            ClientReply::Failed => self.finish(number, Status::UNRECOVERED_READ_ERROR, None),
            ClientReply::Denied => self.finish(number, Status::ACCESS_DENIED, None),
            ClientReply::TooOld => self.finish(number, Status::INTERNAL_ERROR, None),
        }
    }

    /// A write was refused, as its session had ended. If it was sent but once, nothing else of it is under
    /// way, and it is sent in another session. Otherwise an earlier copy may have been executed.
    fn refused_without_session(&mut self, number: u64, group: u32) {
        let now_ns = self.core.now_ns();
        let Some(operation) = self.operations.get_mut(&number) else { return };
        let (client, _) = operation.request.name();
        let is_known = operation.sends == 1 && matches!(operation.request, ClientRequest::Write { .. });
        if is_known {
            operation.is_waiting = true;
            let give_up_ns = operation.give_up_ns;
            self.schedule(number, give_up_ns);
        } else {
            log::warn!(
                "logical group {group} has ended the session of a client that was silent: a write that was \
                 sent several times is not repeated"
            );
            self.finish(number, Status::INTERNAL_ERROR, None);
        }
        let Some(session) = self.sessions.of(group) else { return };
        // Another one may be open already.
        match session.state {
            _ if session.client == client => self.session_ended(group),
            SessionState::Open { .. } | SessionState::Denied if is_known => {
                self.rename_waiting(group);
                if let Some(operation) = self.operations.get_mut(&number) {
                    operation.is_waiting = false;
                }
                self.send(number, now_ns);
            }
            _ if is_known => {
                self.rename_waiting(group);
                self.open_session(group);
            }
            _ => {}
        }
    }

    /// The answer to what opens or renews a session.
    fn session_answered(&mut self, number: u64, group: u32, reply: ClientReply) {
        let now_ns = self.core.now_ns();
        let Some(operation) = self.operations.get_mut(&number) else { return };
        let (client, _) = operation.request.name();
        if self.sessions.of(group).is_none_or(|session| session.client != client) {
            // It has ended meanwhile.
            return self.forget(number);
        }
        let state = match reply {
            ClientReply::SessionOpened { token } => SessionState::Open { token },
            // Of a version without sessions, where clients have none.
            ClientReply::Written => SessionState::Open { token: 0 },
            ClientReply::Denied => SessionState::Denied,
            ClientReply::NotPrimary { primary: Some(primary) } => {
                operation.target = primary;
                self.primaries.insert(group, primary);
                return self.schedule(number, now_ns + RETRY_NS);
            }
            ClientReply::NotPrimary { primary: None } => {
                self.try_another(number);
                return self.schedule(number, now_ns + RETRY_NS);
            }
            ClientReply::Busy => return self.schedule(number, now_ns + RETRY_NS),
            ClientReply::TooManySessions => {
                self.sessions.warn_of_limit(group, now_ns);
                return self.schedule(number, now_ns + TOO_MANY_SESSIONS_RETRY_NS);
            }
            ClientReply::Fenced => return self.fenced(),
            ClientReply::SessionEnded => {
                self.forget(number);
                return self.session_ended(group);
            }
            ClientReply::TooOld | ClientReply::Failed | ClientReply::NoSpace | ClientReply::Data(_) => {
                return self.schedule(number, now_ns + TOO_MANY_SESSIONS_RETRY_NS);
            }
        };
        self.primaries.insert(group, self.operations[&number].target);
        self.forget(number);
        self.session_opened(group, state);
    }

    /// Removes an operation of a session.
    fn forget(&mut self, number: u64) {
        if let Some(operation) = self.operations.remove(&number) {
            self.timers.remove(&(operation.again_ns, number));
        }
    }

    /// Another one has attached the image.
    fn fenced(&mut self) {
        if self.attach.end(AttachStatus::Fenced) {
            log::error!("an image was attached elsewhere: its requests fail here");
        }
        self.fail_all(AttachStatus::Fenced);
    }

    /// Fails what was in flight when requests of the image were aborted. Its sessions may be of an epoch that
    /// is fenced: the next requests open others.
    fn follow_aborts(&mut self) {
        let aborts = self.attach.aborts();
        if aborts == self.aborts {
            return;
        }
        self.fail_all(AttachStatus::Closed);
        self.end_sessions();
        self.aborts = aborts;
        self.start_sessions();
    }

    /// Sessions are opened anew with the requests that follow.
    fn start_sessions(&mut self) {
        self.epoch = self.attach.epoch();
        self.client = crate::sessions::new_client();
        self.sessions = GroupSessions::new(self.placement.first_group, self.placement.groups);
    }

    /// Ends the sessions, so that groups need not wait for their time-out. What does not get there is ended
    /// by that.
    fn end_sessions(&mut self) {
        let now_ns = self.core.now_ns();
        for (group, client) in self.sessions.open() {
            let number = self.next_number;
            self.next_number += 1;
            let header = SessionChange::End { volume: self.placement.volume }.header(group);
            let header = EntryHeader { client, client_number: number, ..header };
            let request = ClientRequest::Write { header, data: [].into() };
            let target = self.primaries.get(&group).copied().unwrap_or(ReplicaId(0));
            self.connections.send(target, || Frame::Request(request).encode(group), now_ns);
        }
    }

    /// Nothing in flight is sent again.
    fn fail_all(&mut self, end: AttachStatus) {
        let status = status_of_end(end);
        for number in self.operations.keys().copied().collect::<Vec<_>>() {
            self.finish(number, status, None);
        }
        // Of those that are left nothing is in flight.
        for slot in std::mem::take(&mut self.ranges) {
            let Some(Pending::Range(range)) = self.pending.get_mut(slot) else { continue };
            let Some(part) = range.next_part() else { continue };
            range.part_sent(part);
            if range.part_completed(status) == RangeProgress::Ended
                && let Some(Pending::Range(range)) = self.pending.remove(slot)
            {
                self.done.push(range.complete());
            }
        }
    }

    /// An operation has ended.
    fn finish(&mut self, number: u64, status: Status, data: Option<&[u8]>) {
        let Some(operation) = self.operations.remove(&number) else { return };
        self.timers.remove(&(operation.again_ns, number));
        if let Owner::Sweep(step) = operation.owner {
            if let Some(sweep) = &mut self.sweep {
                sweep.ended(&self.placement, step, status, data);
            }
            return;
        }
        if let Owner::Written(key) = operation.owner {
            return self.written.push_back((key, written::written_blocks(status, data)));
        }
        let Owner::Request(slot) = operation.owner else {
            // What waits for the session ends as it did.
            let waiting = self.waiting_for(operation.group);
            if let Some(session) = self.sessions.of_mut(operation.group)
                && session.state == SessionState::Opening
            {
                session.state = SessionState::None;
            }
            return waiting.into_iter().for_each(|number| self.finish(number, status, None));
        };
        if status.is_success() {
            self.primaries.insert(operation.group, operation.target);
        }
        if let Some(Pending::Range(range)) = self.pending.get_mut(slot) {
            match range.part_completed(status) {
                RangeProgress::InFlight => return,
                RangeProgress::Again => return self.ranges.push_back(slot),
                RangeProgress::Ended => {}
            }
        }
        let completion = match self.pending.remove(slot) {
            None => return,
            Some(Pending::Range(range)) => range.complete(),
            Some(Pending::Io(mut request)) => {
                let status = match (data, request.data_mut()) {
                    (Some(data), Some(out)) if data.len() == out.len() => {
                        out.copy_from(0, data);
                        status
                    }
                    (Some(_), _) => Status::INTERNAL_ERROR,
                    _ => status,
                };
                request.complete(status)
            }
        };
        self.done.push(completion);
    }
}

impl<N: CoreNetwork> Channel for ImageChannel<N> {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let mut requests = std::mem::take(&mut self.batch);
        std::mem::swap(&mut requests, batch);
        for request in requests.drain(..) {
            // In order: after the first that waits, all do.
            if batch.is_empty() {
                batch.extend(self.accept(request, self.placement.volume).err());
            } else {
                batch.push(request);
            }
        }
        self.batch = requests;
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let now_ns = self.core.now_ns();
        self.follow_aborts();
        let attached = self.attach.status();
        if attached != AttachStatus::Live && !(self.operations.is_empty() && self.ranges.is_empty()) {
            self.fail_all(attached);
        }
        let (replies, lost, operations) = (&mut self.replies, &mut self.lost, &self.operations);
        let received = |_, frame| match frame {
            Frame::Reply { client, number, reply }
                if operations.get(&number).is_some_and(|it| it.request.name().0 == client) =>
            {
                replies.push((number, reply));
            }
            _ => {}
        };
        self.connections.poll(now_ns, received, |node| lost.push(node));
        for (number, reply) in std::mem::take(&mut self.replies) {
            self.answered(number, reply);
        }
        for node in std::mem::take(&mut self.lost) {
            let of_node = self.operations.iter().filter(|(_, it)| it.target == node && !it.is_waiting);
            for number in of_node.map(|(number, _)| *number).collect::<Vec<_>>() {
                self.schedule(number, now_ns + RETRY_NS);
            }
        }
        self.follow_map(now_ns);
        if self.sessions.is_due(now_ns) && attached == AttachStatus::Live {
            self.renew_sessions(now_ns);
        }
        self.run_timers(now_ns);
        if !self.ranges.is_empty() {
            self.send_ranges();
        }
        if self.sweep.is_some() {
            self.run_sweep();
        }
        sink.append(&mut self.done);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.done.is_empty() || !self.written.is_empty() {
            return Some(0);
        }
        let timer = self.timers.first().map(|(at_ns, _)| *at_ns);
        timer.into_iter().chain(self.connections.deadline()).chain(self.sessions.deadline()).min()
    }
}

/// The status of requests of an image that is not attached any more.
fn status_of_end(end: AttachStatus) -> Status {
    match end {
        AttachStatus::Closed => Status::ABORT_REQUESTED,
        AttachStatus::Live | AttachStatus::Fenced => Status::ACCESS_DENIED,
    }
}

impl<N: CoreNetwork> Drop for ImageChannel<N> {
    fn drop(&mut self) {
        self.end_sessions();
        self.connections.poll(self.core.now_ns(), |_, _| {}, |_| {});
    }
}
