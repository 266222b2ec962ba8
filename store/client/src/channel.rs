//! A channel of an image: requests become operations on objects, which go to the primaries until they are answered.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bdev::{Completion, Request};
use block_io::{Channel, Op, Status};
use cluster_map::ReplicaId;
use reactor::Core;
use slots::{Slab, Slot};
use sockets::CoreNetwork;
use store_image::{IMAGE_BLOCK_BYTES, RangeProgress, RangeRequest};
use wire_replica::{CLIENT_WINDOW, ClientReply, ClientRequest, Frame};
use wire_store::{EntryHeader, OBJECT_BYTES, Operation, crc32c};

use crate::cluster::PoolView;
use crate::connections::Connections;
use crate::image::{DEPTH, Placement};
use crate::watch::PoolWatch;

/// Numbers of requests that are not answered differ by less than this.
const NUMBERS_MAX: u64 = CLIENT_WINDOW / 2;
/// An operation without an answer goes to another replica after this time.
const PATIENCE_NS: u64 = 150_000_000;
/// After an answer that says to try again.
const RETRY_NS: u64 = 2_000_000;
/// The map is read again while an operation has waited for this time: nodes may have other addresses.
const REFRESH_NS: u64 = 500_000_000;
/// An operation ends with an error after this time.
const GIVE_UP_NS: u64 = 60_000_000_000;

/// A request that was accepted.
enum Pending {
    /// Of one object.
    Io(Request),
    /// Of a range, object by object.
    Range(RangeRequest),
}

/// An operation that is not answered.
struct PendingOperation {
    slot: Slot,
    group: u32,
    request: ClientRequest,
    target: ReplicaId,
    /// It was sent there, and there is no answer.
    is_sent: bool,
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
    connections: Connections<N>,
    client: u64,
    next_number: u64,
    pending: Slab<Pending>,
    /// Ranges of which not every part was sent.
    ranges: VecDeque<Slot>,
    operations: BTreeMap<u64, PendingOperation>,
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
    pub(crate) fn new(core: &Core, watch: Arc<PoolWatch>, placement: Placement) -> ImageChannel<N> {
        let (view, version) = watch.view();
        let primaries = view.replicas.iter().filter_map(|(group, all)| Some((*group, *all.first()?)));
        let mut client = [0; 8];
        // Without random numbers, the time tells channels apart.
        if getrandom::fill(&mut client).is_err() {
            client = os::clock::now_ns().to_le_bytes();
        }
        ImageChannel {
            core: core.clone(),
            connections: Connections::new(core, view.identity.clone(), &view.nodes),
            // 0 is no client.
            client: u64::from_le_bytes(client).max(1),
            next_number: 1,
            pending: Slab::with_capacity(DEPTH),
            ranges: VecDeque::new(),
            operations: BTreeMap::new(),
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

    /// Accepts a request; gives it back if too many are in flight.
    fn accept(&mut self, request: Request) -> Result<(), Request> {
        if request.op == Op::Flush {
            // Every write is durable on every replica in sync when it completes.
            self.done.push(request.complete(Status::SUCCESS));
            return Ok(());
        }
        if self.pending.is_full() || !self.has_numbers() {
            return Err(request);
        }
        let bytes = u64::from(request.blocks) * u64::from(IMAGE_BLOCK_BYTES);
        let offset = request.lba * u64::from(IMAGE_BLOCK_BYTES);
        if !request.op.has_data() {
            let range = Pending::Range(RangeRequest::new(request));
            let slot = self.pending.insert(range).ok().expect("there is room");
            self.ranges.push_back(slot);
            self.send_ranges();
            return Ok(());
        }
        let (object, offset) = self.placement.locate(offset);
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
        self.begin(slot, object.group, operation);
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
        EntryHeader { client: self.client, client_number: self.next_number, mtime_ns, data_crc32c, ..header }
    }

    /// Sends an operation with the next number.
    fn begin(&mut self, slot: Slot, group: u32, request: ClientRequest) {
        let now_ns = self.core.now_ns();
        let number = self.next_number;
        self.next_number += 1;
        let target = self.primaries.get(&group).copied().unwrap_or(ReplicaId(0));
        let (again_ns, give_up_ns) = (now_ns, now_ns + GIVE_UP_NS);
        let is_sent = false;
        let operation = PendingOperation { slot, group, request, target, is_sent, again_ns, give_up_ns };
        self.operations.insert(number, operation);
        self.timers.insert((now_ns, number));
        self.send(number, now_ns);
    }

    /// Sends an operation to its target; it is sent again if no answer comes.
    fn send(&mut self, number: u64, now_ns: u64) {
        let Some(operation) = self.operations.get_mut(&number) else { return };
        let frame = || Frame::Request(operation.request.clone()).encode(operation.group);
        operation.is_sent = self.connections.send(operation.target, frame, now_ns);
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
        self.begin(slot, object.group, request);
        true
    }

    fn answered(&mut self, number: u64, reply: ClientReply) {
        let now_ns = self.core.now_ns();
        let Some(operation) = self.operations.get_mut(&number) else { return };
        operation.is_sent = false;
        match reply {
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

    /// An operation has ended.
    fn finish(&mut self, number: u64, status: Status, data: Option<&[u8]>) {
        let Some(operation) = self.operations.remove(&number) else { return };
        self.timers.remove(&(operation.again_ns, number));
        if status.is_success() {
            self.primaries.insert(operation.group, operation.target);
        }
        if let Some(Pending::Range(range)) = self.pending.get_mut(operation.slot) {
            match range.part_completed(status) {
                RangeProgress::InFlight => return,
                RangeProgress::Again => return self.ranges.push_back(operation.slot),
                RangeProgress::Ended => {}
            }
        }
        let completion = match self.pending.remove(operation.slot) {
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
                batch.extend(self.accept(request).err());
            } else {
                batch.push(request);
            }
        }
        self.batch = requests;
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let now_ns = self.core.now_ns();
        let (replies, lost, client) = (&mut self.replies, &mut self.lost, self.client);
        let received = |_, frame| match frame {
            Frame::Reply { client: of, number, reply } if of == client => replies.push((number, reply)),
            _ => {}
        };
        self.connections.poll(now_ns, received, |node| lost.push(node));
        for (number, reply) in std::mem::take(&mut self.replies) {
            self.answered(number, reply);
        }
        for node in std::mem::take(&mut self.lost) {
            let of_node = self.operations.iter().filter(|(_, operation)| operation.target == node);
            for number in of_node.map(|(number, _)| *number).collect::<Vec<_>>() {
                self.schedule(number, now_ns + RETRY_NS);
            }
        }
        self.follow_map(now_ns);
        self.run_timers(now_ns);
        if !self.ranges.is_empty() {
            self.send_ranges();
        }
        sink.append(&mut self.done);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.done.is_empty() {
            return Some(0);
        }
        let timer = self.timers.first().map(|(at_ns, _)| *at_ns);
        timer.into_iter().chain(self.connections.deadline()).min()
    }
}
