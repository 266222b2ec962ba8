//! Queue pairs in memory: hosts whose memory is a vector, and a device that works late.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::rc::Rc;

use random::WyRand;
use slots::Slab;
use sockets::{
    ConnectionId, Listen, ListenerId, Network, NetworkEvent, PeerMemory, QueuePair, QueuePairEvent,
    ReceivedMessage, RejectedWork, SENT_MESSAGE_BYTES_MAX, StreamAddress, TransferResult, Work,
};

/// Key of every host's memory.
pub(super) const KEY: u32 = 0x1234_5678;
/// Where a host's memory begins.
pub(super) const MEMORY_AT: u64 = 0x7000_0000_0000;
pub(super) const MEMORY_BYTES: usize = 256 << 10;
/// Works of a queue pair in flight.
const WORKS_MAX: usize = 6;

/// A host, as the target's device and the test see it.
#[derive(Default)]
pub(super) struct SimulatedHost {
    pub(super) memory: Vec<u8>,
    pub(super) sent: VecDeque<Vec<u8>>,
    pub(super) received: VecDeque<[u8; SENT_MESSAGE_BYTES_MAX]>,
    pub(super) invalidated: Vec<u32>,
    pub(super) has_disconnected: bool,
    /// Its device takes no answer and gives no data: works do not end.
    pub(super) is_stuck: bool,
    /// The target has closed the connection, or it has failed.
    pub(super) is_closed: bool,
}

/// All hosts, and the dice of the device.
pub(super) struct SimulatedFabric {
    pub(super) hosts: Vec<SimulatedHost>,
    incoming: VecDeque<usize>,
    dice: WyRand,
    /// Messages that were taken and not released.
    pub(super) buffers_in_use: usize,
    /// Most works that the device was given at once.
    pub(super) batch_max: usize,
}

pub(super) type Fabric = Rc<RefCell<SimulatedFabric>>;

pub(super) fn fabric(seed: u64) -> Fabric {
    let dice = WyRand::new(seed);
    let fabric = SimulatedFabric {
        hosts: Vec::new(),
        incoming: VecDeque::new(),
        dice,
        buffers_in_use: 0,
        batch_max: 0,
    };
    Rc::new(RefCell::new(fabric))
}

impl SimulatedFabric {
    /// A new host, which connects to the listener.
    pub(super) fn connect(&mut self) -> usize {
        self.hosts.push(SimulatedHost { memory: vec![0; MEMORY_BYTES], ..SimulatedHost::default() });
        self.incoming.push_back(self.hosts.len() - 1);
        self.hosts.len() - 1
    }

    /// The range of a host's memory, if the key permits the access.
    fn range(&self, at: PeerMemory, length: usize) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(at.address.checked_sub(MEMORY_AT)?).ok()?;
        let end = start.checked_add(length)?;
        (at.key == KEY && end <= MEMORY_BYTES).then_some(start..end)
    }
}

pub(super) struct SimulatedPair {
    fabric: Fabric,
    host: usize,
    posted: VecDeque<Work>,
    /// Carried out, in order; each ends some polls later.
    ended: VecDeque<QueuePairEvent>,
    taken: HashMap<u32, Vec<u8>>,
    next: u32,
    has_failed: bool,
    is_end_reported: bool,
}

impl SimulatedPair {
    /// Does a work at the host.
    fn carry_out(&mut self, work: Work) -> Option<QueuePairEvent> {
        let mut fabric = self.fabric.borrow_mut();
        match work {
            Work::Send { tag, write, message, invalidated_key } => {
                if let Some((to, data, length)) = write {
                    let range = fabric.range(to, length as usize)?;
                    let memory = &mut fabric.hosts[self.host].memory[range];
                    data.copy_to(0, memory);
                }
                let host = &mut fabric.hosts[self.host];
                host.received.push_back(message);
                host.invalidated.extend(invalidated_key);
                Some(QueuePairEvent::Sent { tag })
            }
            Work::SendData { .. } => unreachable!("a target sends responses"),
            Work::Read { tag, from, mut into } => {
                let range = fabric.range(from, into.len())?;
                into.copy_from(0, &fabric.hosts[self.host].memory[range]);
                Some(QueuePairEvent::Read { tag, data: into })
            }
        }
    }
}

impl QueuePair for SimulatedPair {
    fn next_event(&mut self) -> Option<QueuePairEvent> {
        if self.fabric.borrow_mut().dice.happens(300) {
            return None;
        }
        let is_stuck = self.fabric.borrow().hosts[self.host].is_stuck;
        if !is_stuck && let Some(event) = self.ended.pop_front() {
            return Some(event);
        }
        let has_disconnected = self.fabric.borrow().hosts[self.host].has_disconnected;
        if self.is_end_reported || !(self.has_failed || has_disconnected) {
            return None;
        }
        self.is_end_reported = true;
        Some(match self.has_failed {
            true => QueuePairEvent::Failed(io::ErrorKind::ConnectionReset),
            false => QueuePairEvent::Closed,
        })
    }

    fn message_count(&self) -> usize {
        self.fabric.borrow().hosts[self.host].sent.len()
    }

    fn next_message(&mut self) -> Option<ReceivedMessage> {
        let mut fabric = self.fabric.borrow_mut();
        let bytes = fabric.hosts[self.host].sent.pop_front()?;
        fabric.buffers_in_use += 1;
        let message = ReceivedMessage { index: self.next, length: bytes.len() as u32 };
        self.taken.insert(self.next, bytes);
        self.next += 1;
        Some(message)
    }

    fn copy_message(&self, message: &ReceivedMessage, offset: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.taken[&message.index][offset..offset + out.len()]);
    }

    fn release(&mut self, message: ReceivedMessage) {
        self.taken.remove(&message.index).expect("a message is released once");
        self.fabric.borrow_mut().buffers_in_use -= 1;
    }

    fn post(&mut self, work: Work) -> Result<(), RejectedWork> {
        if self.posted.len() + self.ended.len() >= WORKS_MAX {
            return Err(RejectedWork::Full(work));
        }
        self.posted.push_back(work);
        Ok(())
    }

    fn submit(&mut self) -> Result<(), io::ErrorKind> {
        {
            let mut fabric = self.fabric.borrow_mut();
            fabric.batch_max = fabric.batch_max.max(self.posted.len());
        }
        while let Some(work) = self.posted.pop_front() {
            match self.carry_out(work).filter(|_| !self.has_failed) {
                Some(event) => self.ended.push_back(event),
                None => self.has_failed = true,
            }
        }
        if self.has_failed { Err(io::ErrorKind::ConnectionReset) } else { Ok(()) }
    }
}

/// The target's side.
pub(super) struct SimulatedPairs {
    fabric: Fabric,
    pairs: Slab<SimulatedPair>,
    listeners: Slab<StreamAddress>,
}

impl SimulatedPairs {
    pub(super) fn new(fabric: &Fabric) -> SimulatedPairs {
        let (pairs, listeners) = (Slab::with_capacity(64), Slab::with_capacity(4));
        SimulatedPairs { fabric: fabric.clone(), pairs, listeners }
    }
}

impl Network for SimulatedPairs {
    type Stream = usize;

    fn local_address_of(_stream: &usize) -> Option<StreamAddress> {
        Some(super::address().into())
    }

    fn add(&mut self, host: usize) -> io::Result<ConnectionId> {
        let pair = SimulatedPair {
            fabric: self.fabric.clone(),
            host,
            posted: VecDeque::new(),
            ended: VecDeque::new(),
            taken: HashMap::new(),
            next: 0,
            has_failed: false,
            is_end_reported: false,
        };
        self.pairs.insert(pair).map(ConnectionId).map_err(|_| io::ErrorKind::QuotaExceeded.into())
    }

    fn poll(&mut self, events: &mut Vec<NetworkEvent<usize>>) -> usize {
        let before = events.len();
        if let Some((listener, _)) = self.listeners.iter().next() {
            for stream in std::mem::take(&mut self.fabric.borrow_mut().incoming) {
                let (listener, peer) = (ListenerId(listener), super::address().into());
                events.push(NetworkEvent::Incoming { listener, stream, peer });
            }
        }
        events.extend(self.pairs.iter().map(|(slot, _)| NetworkEvent::Ready(ConnectionId(slot))));
        events.len() - before
    }

    fn receive(&mut self, _: ConnectionId, _: &mut [IoSliceMut<'_>]) -> TransferResult {
        TransferResult::Failed(io::ErrorKind::Unsupported)
    }

    fn send(&mut self, _: ConnectionId, _: &[IoSlice<'_>]) -> TransferResult {
        TransferResult::Failed(io::ErrorKind::Unsupported)
    }

    fn queue_pair(&mut self, connection: ConnectionId) -> Option<&mut dyn QueuePair> {
        self.pairs.get_mut(connection.0).map(|pair| pair as &mut dyn QueuePair)
    }

    fn close(&mut self, connection: ConnectionId) {
        if let Some(pair) = self.pairs.remove(connection.0) {
            assert!(pair.taken.is_empty(), "messages were not released");
            self.fabric.borrow_mut().hosts[pair.host].is_closed = true;
        }
    }

    fn is_pending(&self) -> bool {
        true
    }
}

impl Listen for SimulatedPairs {
    fn listen(&mut self, address: &StreamAddress) -> io::Result<ListenerId> {
        let listener = self.listeners.insert(address.clone());
        listener.map(ListenerId).map_err(|_| io::ErrorKind::QuotaExceeded.into())
    }

    fn close_listener(&mut self, listener: ListenerId) {
        self.listeners.remove(listener.0);
    }

    fn local_address(&self, listener: ListenerId) -> Option<StreamAddress> {
        self.listeners.get(listener.0).cloned()
    }
}
