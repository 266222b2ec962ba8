//! Clients: they read and write blocks, repeat requests that get no answer, and record what they saw.
//!
//! In most runs they have sessions, come and go, and all of them are replaced at once, as when another server
//! attaches an image: what those before have in flight then takes effect before the first of the others does
//! anything, or never.

use std::collections::{BTreeMap, HashSet};

use random::WyRand;
use replica::{ClientReply, ClientRequest, SessionChange};
use wire_store::{EntryHeader, ObjectId, Operation, crc32c};

use super::cluster::{GROUP, Happening, NodeIndex, ReplicaCluster};
use super::disk::value_of;
use super::register::{NEVER, RegisterHistory};
use super::{MS, US};

/// A block of the group.
pub(crate) type BlockId = (ObjectId, u32);

/// Most clients of a run, those that are gone included.
const CLIENTS_MAX: usize = 60;
/// Most that a run begins with.
const CLIENTS_FIRST_MAX: u64 = 4;
/// The volume of all objects.
const VOLUME: u64 = 1;
/// Bytes of a block here: a value.
pub(super) const VALUE_BYTES: u32 = 8;

/// What a request does.
#[derive(Clone, Copy)]
enum Work {
    Read,
    /// Writes a value.
    Write(u64),
    Session(SessionChange),
}

struct PendingRequest {
    block: BlockId,
    work: Work,
    /// Attach epoch and token of the session.
    session: (u32, u64),
    invoked_ns: u64,
    /// Times that it was sent. Only the last one is repeated.
    attempts: u32,
    target: NodeIndex,
}

struct Client {
    next_number: u64,
    target: NodeIndex,
    pending: BTreeMap<u64, PendingRequest>,
    session: Option<ClientSession>,
    /// It begins nothing any more.
    is_gone: bool,
}

/// A session of a client, in runs with sessions.
struct ClientSession {
    attach_epoch: u32,
    /// Once it is open.
    token: Option<u32>,
    renew_ns: u64,
}

/// A write in a session whose outcome is unknown.
struct UnknownWrite {
    block: BlockId,
    value: u64,
    invoked_ns: u64,
    attach_epoch: u32,
}

/// What runs with sessions have besides.
struct Sessions {
    /// Of its own, so that it changes nothing else that a seed means.
    random: WyRand,
    timeout_ns: u64,
    attach_epoch: u32,
    /// When the first session of an attach epoch was open.
    opened_ns: BTreeMap<u32, u64>,
    unknown: Vec<UnknownWrite>,
    /// Values that were read.
    read: HashSet<u64>,
}

impl Client {
    fn new(attach_epoch: Option<u32>) -> Client {
        let session =
            attach_epoch.map(|attach_epoch| ClientSession { attach_epoch, token: None, renew_ns: 0 });
        Client { next_number: 1, target: 0, pending: BTreeMap::new(), session, is_gone: false }
    }
}

/// All clients with what they saw.
pub(crate) struct Clients {
    clients: Vec<Client>,
    blocks: Vec<BlockId>,
    history: BTreeMap<BlockId, RegisterHistory>,
    in_flight_max: usize,
    writes_per_mille: u32,
    think_ns: u64,
    sessions: Option<Sessions>,
    /// No new requests begin.
    pub(crate) stopped: bool,
    pub(crate) succeeded: u64,
    pub(crate) abandoned: u64,
}

impl Clients {
    pub(crate) fn new(cluster: &mut ReplicaCluster, has_sessions: bool) -> Clients {
        let sessions = has_sessions.then(|| Sessions {
            random: cluster.random.clone().split(),
            timeout_ns: cluster.session_timeout_ns(),
            attach_epoch: 1,
            opened_ns: BTreeMap::new(),
            unknown: Vec::new(),
            read: HashSet::new(),
        });
        let random = &mut cluster.random;
        let count = 1 + random.below(CLIENTS_FIRST_MAX);
        let objects = 1 + random.below(5) as u32;
        let offsets = 1 + random.below(3) as u32;
        let object = |index| ObjectId { group: GROUP, volume: VOLUME, index, suffix: 0 };
        let offset = |number| number * VALUE_BYTES;
        let blocks = (0..objects).flat_map(|index| (0..offsets).map(move |at| (object(index), offset(at))));
        let clients = (0..count).map(|_| Client::new(has_sessions.then_some(1)));
        let clients = Clients {
            clients: clients.collect(),
            sessions,
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
        if self.clients[client].is_gone {
            return;
        }
        // However many come, together they do as much as a few.
        let live = self.clients.iter().filter(|client| !client.is_gone).count() as u64;
        let wait_ns = cluster.random.below(2 * self.think_ns) * (live / CLIENTS_FIRST_MAX).max(1);
        cluster.schedule(wait_ns, Happening::Client { client, attempt: None });
        if self.sessions.is_some() && self.act_in_session(cluster, client) {
            return;
        }
        if self.clients[client].pending.len() < self.in_flight_max {
            let block = self.blocks[cluster.random.index(self.blocks.len())];
            let is_write = cluster.random.happens(self.writes_per_mille);
            let value = (client as u64 + 1) << 32 | self.clients[client].next_number;
            let work = if is_write { Work::Write(value) } else { Work::Read };
            self.begin(cluster, client, block, work);
        }
    }

    /// What a client with a session does besides reading and writing: it comes, goes, and says that it lives.
    /// Returns whether it did.
    fn act_in_session(&mut self, cluster: &mut ReplicaCluster, client: usize) -> bool {
        let Some(sessions) = &mut self.sessions else { return false };
        let attach_epoch = self.clients[client].session.as_ref().map_or(0, |session| session.attach_epoch);
        let is_newest = attach_epoch == sessions.attach_epoch && self.clients.len() < CLIENTS_MAX;
        if is_newest && sessions.random.happens(15) {
            match sessions.random.below(4) {
                0 | 1 => self.replace(cluster, client, true),
                2 => self.replace(cluster, client, false),
                _ => {
                    sessions.attach_epoch += 1;
                    // Those before go on until they learn it.
                    let count = 1 + sessions.random.index(4);
                    (0..count).for_each(|_| self.add(cluster));
                }
            }
            return true;
        }
        let it = &mut self.clients[client];
        let Some(session) = &mut it.session else { return false };
        let is_opening = it.pending.values().any(|request| matches!(request.work, Work::Session(_)));
        if session.token.is_some() && cluster.now_ns < session.renew_ns {
            return false;
        }
        if !is_opening {
            session.renew_ns = cluster.now_ns + sessions.timeout_ns / 4;
            let attach_epoch = session.attach_epoch;
            let change = SessionChange::Open { volume: VOLUME, attach_epoch };
            self.begin(cluster, client, self.blocks[0], Work::Session(change));
        }
        self.clients[client].session.as_ref().is_some_and(|session| session.token.is_none())
    }

    /// A client ends, in order or not, and another one comes.
    fn replace(&mut self, cluster: &mut ReplicaCluster, client: usize, in_order: bool) {
        self.clients[client].is_gone = true;
        if in_order {
            let change = SessionChange::End { volume: VOLUME };
            self.begin(cluster, client, self.blocks[0], Work::Session(change));
        } else {
            let killed = std::mem::take(&mut self.clients[client].pending);
            self.abandoned += killed.len() as u64;
            killed.into_values().for_each(|request| self.record(request, None, NEVER));
        }
        self.add(cluster);
    }

    fn add(&mut self, cluster: &mut ReplicaCluster) {
        let attach_epoch = self.sessions.as_ref().map(|sessions| sessions.attach_epoch);
        let client = self.clients.len();
        self.clients.push(Client::new(attach_epoch));
        cluster.schedule(0, Happening::Client { client, attempt: None });
    }

    /// Reads every block once more.
    pub(crate) fn read_all(&mut self, cluster: &mut ReplicaCluster) {
        for block in self.blocks.clone() {
            self.begin(cluster, 0, block, Work::Read);
        }
    }

    fn begin(&mut self, cluster: &mut ReplicaCluster, client: usize, block: BlockId, work: Work) {
        let it = &mut self.clients[client];
        let number = it.next_number;
        it.next_number += 1;
        let target = it.target;
        let session = it
            .session
            .as_ref()
            .map_or((0, 0), |session| (session.attach_epoch, session.token.map_or(0, u64::from)));
        let request =
            PendingRequest { block, work, session, invoked_ns: cluster.now_ns, attempts: 0, target };
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
        let (attach_epoch, token) = pending.session;
        let request = match pending.work {
            Work::Session(change) => {
                let mut header = change.header(GROUP);
                (header.client, header.client_number) = (id, number);
                ClientRequest::Write { header, data: [].into() }
            }
            Work::Write(value) => {
                let data = value.to_le_bytes();
                let mut header = EntryHeader::new(Operation::Write, object, offset, VALUE_BYTES);
                (header.client, header.client_number) = (id, number);
                (header.epoch, header.sequence) = (attach_epoch, token);
                header.data_crc32c = crc32c(&data);
                ClientRequest::Write { header, data: data.into() }
            }
            Work::Read => ClientRequest::Read { client: id, number, object, offset, length: VALUE_BYTES },
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
            ClientReply::Busy | ClientReply::Failed | ClientReply::NoSpace | ClientReply::TooManySessions => {
            }
            ClientReply::SessionOpened { token } => {
                it.pending.remove(&number);
                let session = it.session.as_mut().expect("it asked for a session");
                session.token = Some(token);
                let sessions = self.sessions.as_mut().expect("runs with sessions");
                sessions.opened_ns.entry(session.attach_epoch).or_insert(cluster.now_ns);
            }
            ClientReply::SessionEnded | ClientReply::Fenced => {
                let unknown = it.pending.remove(&number).expect("it is pending");
                it.is_gone |= reply == ClientReply::Fenced;
                if let Some(session) = &mut it.session {
                    session.token = None;
                }
                self.record(unknown, None, NEVER);
            }
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
        let PendingRequest { block, work, invoked_ns, session: (attach_epoch, _), .. } = request;
        let history = self.history.entry(block).or_default();
        match (work, read, &mut self.sessions) {
            (Work::Write(value), _, Some(sessions)) if responded_ns == NEVER => {
                sessions.unknown.push(UnknownWrite { block, value, invoked_ns, attach_epoch });
            }
            (Work::Write(value), ..) => history.write(value, invoked_ns, responded_ns),
            (Work::Read, Some(value), sessions) => {
                history.read(value, invoked_ns, responded_ns);
                sessions.iter_mut().for_each(|sessions| _ = sessions.read.insert(value));
            }
            (Work::Read, None, _) | (Work::Session(_), ..) => {}
        }
    }

    /// Writes whose outcome is unknown happened before the image was attached again, if at all; and at any
    /// time, if a replica had nothing else than such a write.
    fn record_unknown(&mut self, has_revived: bool) -> Result<(), String> {
        let Some(sessions) = &mut self.sessions else { return Ok(()) };
        for UnknownWrite { block, value, invoked_ns, attach_epoch } in std::mem::take(&mut sessions.unknown) {
            let attached = sessions.opened_ns.range(attach_epoch + 1..).map(|(_, at_ns)| *at_ns).min();
            let happened = attached.filter(|_| !has_revived && sessions.read.contains(&value));
            if happened.is_some_and(|attached_ns| attached_ns < invoked_ns) {
                return Err(format!("{value:#x} was written after another client had attached the image"));
            }
            let history = self.history.entry(block).or_default();
            history.write(value, invoked_ns, happened.unwrap_or(NEVER));
        }
        Ok(())
    }

    /// Says what is wrong, if what the clients saw of a block is not linearizable.
    pub(crate) fn check(&mut self, has_revived: bool) -> Result<(), String> {
        for client in 0..self.clients.len() {
            for (_, request) in std::mem::take(&mut self.clients[client].pending) {
                self.record(request, None, NEVER);
            }
        }
        self.record_unknown(has_revived)?;
        for ((object, offset), history) in &self.history {
            history
                .check()
                .map_err(|why| format!("block {} of object {}: {why}", offset / VALUE_BYTES, object.index))?;
        }
        Ok(())
    }
}
