//! Clients: they read and write blocks, repeat requests that get no answer, and record what they saw.

use std::collections::BTreeMap;

use replica::{ClientReply, ClientRequest};
use wire_store::{EntryHeader, ObjectId, Operation, crc32c};

use super::cluster::{GROUP, Happening, NodeIndex, ReplicaCluster};
use super::disk::value_of;
use super::register::{NEVER, RegisterHistory};
use super::{MS, US};

/// A block of the group.
pub(crate) type BlockId = (ObjectId, u32);

/// Bytes of a block here: a value.
pub(super) const VALUE_BYTES: u32 = 8;

struct PendingRequest {
    block: BlockId,
    /// The value to write; `None` for a read.
    value: Option<u64>,
    invoked_ns: u64,
    /// Times that it was sent. Only the last one is repeated.
    attempts: u32,
    target: NodeIndex,
}

struct Client {
    next_number: u64,
    target: NodeIndex,
    pending: BTreeMap<u64, PendingRequest>,
}

/// All clients with what they saw.
pub(crate) struct Clients {
    clients: Vec<Client>,
    blocks: Vec<BlockId>,
    history: BTreeMap<BlockId, RegisterHistory>,
    in_flight_max: usize,
    writes_per_mille: u32,
    think_ns: u64,
    /// No new requests begin.
    pub(crate) stopped: bool,
    pub(crate) succeeded: u64,
    pub(crate) abandoned: u64,
}

impl Clients {
    pub(crate) fn new(cluster: &mut ReplicaCluster) -> Clients {
        let random = &mut cluster.random;
        let count = 1 + random.index(4);
        let objects = 1 + random.below(5) as u32;
        let offsets = 1 + random.below(3) as u32;
        let object = |index| ObjectId { group: GROUP, volume: 1, index, suffix: 0 };
        let offset = |number| number * VALUE_BYTES;
        let blocks = (0..objects).flat_map(|index| (0..offsets).map(move |at| (object(index), offset(at))));
        let clients = (0..count).map(|_| Client { next_number: 1, target: 0, pending: BTreeMap::new() });
        let clients = Clients {
            clients: clients.collect(),
            blocks: blocks.collect(),
            history: BTreeMap::new(),
            in_flight_max: 1 + random.index(6),
            writes_per_mille: 300 + random.below(600) as u32,
            think_ns: 20 * US + random.below(30 * MS),
            stopped: false,
            succeeded: 0,
            abandoned: 0,
        };
        for client in 0..clients.clients.len() {
            cluster.schedule(0, Happening::Client { client, attempt: None });
        }
        clients
    }

    /// What is read and written.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Requests without an answer.
    pub(crate) fn pending(&self) -> usize {
        self.clients.iter().map(|client| client.pending.len()).sum()
    }

    /// Begins a request, or repeats `attempt`, a request's number and how often it was sent.
    pub(crate) fn act(&mut self, cluster: &mut ReplicaCluster, client: usize, attempt: Option<(u64, u32)>) {
        if let Some((number, attempts)) = attempt {
            let pending = self.clients[client].pending.get(&number);
            if pending.is_some_and(|pending| pending.attempts == attempts) {
                self.repeat(cluster, client, number);
            }
            return;
        }
        if self.stopped {
            return;
        }
        let wait_ns = cluster.random.below(2 * self.think_ns);
        cluster.schedule(wait_ns, Happening::Client { client, attempt: None });
        if self.clients[client].pending.len() < self.in_flight_max {
            let block = self.blocks[cluster.random.index(self.blocks.len())];
            let is_write = cluster.random.happens(self.writes_per_mille);
            self.begin(cluster, client, block, is_write);
        }
    }

    /// Reads every block once more.
    pub(crate) fn read_all(&mut self, cluster: &mut ReplicaCluster) {
        for block in self.blocks.clone() {
            self.begin(cluster, 0, block, false);
        }
    }

    fn begin(&mut self, cluster: &mut ReplicaCluster, client: usize, block: BlockId, is_write: bool) {
        let it = &mut self.clients[client];
        let number = it.next_number;
        it.next_number += 1;
        let value = is_write.then_some((client as u64 + 1) << 32 | number);
        let target = it.target;
        let request = PendingRequest { block, value, invoked_ns: cluster.now_ns, attempts: 0, target };
        it.pending.insert(number, request);
        self.send(cluster, client, number);
    }

    fn send(&mut self, cluster: &mut ReplicaCluster, client: usize, number: u64) {
        let Some(pending) = self.clients[client].pending.get_mut(&number) else {
            return;
        };
        pending.attempts += 1;
        let ((object, offset), target) = (pending.block, pending.target);
        let attempt = Some((number, pending.attempts));
        let id = client as u64 + 1;
        let request = match pending.value {
            Some(value) => {
                let data = value.to_le_bytes();
                let mut header = EntryHeader::new(Operation::Write, object, offset, VALUE_BYTES);
                (header.client, header.client_number) = (id, number);
                header.data_crc32c = crc32c(&data);
                ClientRequest::Write { header, data: data.into() }
            }
            None => ClientRequest::Read { client: id, number, object, offset, length: VALUE_BYTES },
        };
        cluster.send_request(target, request);
        let patience_ns = 50 * MS + cluster.random.below(400 * MS);
        cluster.schedule(patience_ns, Happening::Client { client, attempt });
    }

    fn repeat(&mut self, cluster: &mut ReplicaCluster, client: usize, number: u64) {
        let nodes = cluster.nodes.len();
        let abandon = !self.stopped && cluster.random.happens(20);
        let another = cluster.random.happens(500).then(|| cluster.random.index(nodes));
        let it = &mut self.clients[client];
        let Some(pending) = it.pending.get_mut(&number) else {
            return;
        };
        if abandon {
            // As if the client were killed: the request happened once or never.
            let abandoned = it.pending.remove(&number).expect("it is pending");
            self.abandoned += 1;
            return self.record(abandoned, None, NEVER);
        }
        if let Some(another) = another {
            pending.target = another;
            it.target = another;
        }
        self.send(cluster, client, number);
    }

    pub(crate) fn reply(
        &mut self,
        cluster: &mut ReplicaCluster,
        (client, number): (u64, u64),
        from: NodeIndex,
        reply: ClientReply,
    ) {
        let client = client as usize - 1;
        let it = &mut self.clients[client];
        let Some(pending) = it.pending.get_mut(&number) else {
            return;
        };
        match reply {
            ClientReply::NotPrimary { primary } => {
                if let Some(primary) = primary {
                    pending.target = primary.0 as usize;
                    it.target = primary.0 as usize;
                }
                let wait_ns = MS + cluster.random.below(20 * MS);
                let attempt = Some((number, pending.attempts));
                cluster.schedule(wait_ns, Happening::Client { client, attempt });
            }
            // The time-out repeats it.
            ClientReply::Busy | ClientReply::Failed | ClientReply::NoSpace => {}
            ClientReply::Denied => unreachable!("replicas know no rights"),
            ClientReply::TooOld => {
                let unknown = it.pending.remove(&number).expect("it is pending");
                self.record(unknown, None, NEVER);
            }
            ClientReply::Written | ClientReply::Data(_) => {
                it.target = from;
                let done = it.pending.remove(&number).expect("it is pending");
                let read = if let ClientReply::Data(data) = &reply { Some(value_of(data)) } else { None };
                self.succeeded += 1;
                self.record(done, read, cluster.now_ns);
            }
        }
    }

    fn record(&mut self, request: PendingRequest, read: Option<u64>, responded_ns: u64) {
        let history = self.history.entry(request.block).or_default();
        match (request.value, read) {
            (Some(value), _) => history.write(value, request.invoked_ns, responded_ns),
            (None, Some(value)) => history.read(value, request.invoked_ns, responded_ns),
            (None, None) => {}
        }
    }

    /// Says what is wrong, if what the clients saw of a block is not linearizable.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        for client in 0..self.clients.len() {
            for (_, request) in std::mem::take(&mut self.clients[client].pending) {
                self.record(request, None, NEVER);
            }
        }
        for ((object, offset), history) in &self.history {
            history
                .check()
                .map_err(|why| format!("block {} of object {}: {why}", offset / VALUE_BYTES, object.index))?;
        }
        Ok(())
    }
}
