//! Nodes with a replica each, links between them, and the map, in virtual time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use random::WyRand;
use replica::{
    ClientReply, ClientRequest, EntryId, GroupConfig, GroupMemory, PlantedReplicaFault, Replica,
    ReplicaAction, ReplicaEvent, ReplicaId, ReplicaMessage, ReplicaSettings, ScrubOutcome,
};
use wire_replica::{EncodedFrame, Frame, FrameHeader};

use super::clients::VALUE_BYTES;
use super::disk::{BlockKey, DiskSnapshot, ReplicaDisk, WaitingRead};
use super::{MS, US};

/// The logical group.
pub(crate) const GROUP: u32 = 1;

/// A node of the cluster, or the client machine, which is the number after the last node.
pub(crate) type NodeIndex = usize;

/// What happens at a time.
pub(crate) enum Happening {
    /// A message of another replica arrives.
    Message { to: NodeIndex, message: ReplicaMessage },
    /// A request of a client arrives.
    Request { to: NodeIndex, request: ClientRequest },
    /// The answer to a client's request arrives there.
    Reply { client: u64, number: u64, from: NodeIndex, reply: ClientReply },
    /// A client begins a request, or repeats one.
    Client { client: usize, attempt: Option<(u64, u32)> },
    /// The oldest write of a node's log is complete.
    Disk { node: NodeIndex, incarnation: u32 },
    /// Something else of the node's storage is complete.
    Storage { node: NodeIndex, incarnation: u32, event: ReplicaEvent },
    /// The replica's deadline.
    Timer { node: NodeIndex, incarnation: u32, number: u64 },
    /// A proposal, or a read without one, arrives at the map.
    MapRequest {
        node: NodeIndex,
        incarnation: u32,
        proposal: Option<Arc<GroupConfig>>,
        /// What the node has as committed.
        committed: EntryId,
    },
    /// The map's record arrives at a node.
    MapRecord { node: NodeIndex, incarnation: u32, config: Arc<GroupConfig> },
    /// A node reads the map.
    MapPoll { node: NodeIndex, incarnation: u32 },
    /// Every node is reminded of the preferred primary, as a node's watch of the map does.
    Preference,
    /// The pool demands another number of replicas in sync.
    Demand,
    /// The primary scrubs a block.
    Scrub,
    /// A fault begins or ends.
    Chaos,
    /// Links that fail are cut.
    Cut,
    /// A node starts.
    Start { node: NodeIndex },
    /// A node that was to leave stops, or stays after all.
    LeaveEnds { node: NodeIndex, incarnation: u32, stops: bool },
    /// A node that is to leave hears nothing of what others do about it.
    LeaveCut { node: NodeIndex },
    /// A node runs on.
    Resume { node: NodeIndex, pause: u64 },
}

struct Scheduled {
    at_ns: u64,
    order: u64,
    happening: Happening,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Scheduled) -> bool {
        (self.at_ns, self.order) == (other.at_ns, other.order)
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> std::cmp::Ordering {
        (self.at_ns, self.order).cmp(&(other.at_ns, other.order))
    }
}

/// A machine with a replica.
pub(crate) struct ReplicaNode {
    pub(crate) replica: Option<Replica<Option<PlantedReplicaFault>>>,
    pub(crate) disk: ReplicaDisk,
    incarnation: u32,
    /// The last incarnation that had another disk. 0 if there is none.
    replaced: u32,
    /// A copy of its disk.
    snapshot: Option<DiskSnapshot>,
    /// Its disk lacks what it had, and the replica was not in sync with others since.
    lack: Option<Lack>,
    /// Its clock: nanoseconds at time 0, and its rate in millionths.
    clock_ns: u64,
    clock_rate: u64,
    timers: u64,
    /// Number of the pause it is in.
    pub(crate) paused: Option<u64>,
    /// What waits for the end of the pause.
    deferred: Vec<Happening>,
    /// Events that are taken together, with the next one.
    held: Vec<ReplicaEvent>,
    /// A write of its disk is under way.
    disk_busy: bool,
    /// How many times slower than usual the disk is.
    pub(crate) disk_slowness: u64,
}

/// How a disk came to lack what it had.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lack {
    /// What is kept outside of the disk shows it.
    Recorded,
    /// Only other replicas show it.
    Unrecorded,
}

/// What the map has of a node.
#[derive(Clone, Copy, Default)]
struct NodeMemory {
    incarnation: u64,
    committed: EntryId,
}

/// The nodes, the links and the map.
pub(crate) struct ReplicaCluster {
    pub(crate) now_ns: u64,
    queue: BinaryHeap<Reverse<Scheduled>>,
    order: u64,
    pub(crate) random: WyRand,
    pub(crate) nodes: Vec<ReplicaNode>,
    /// Pairs, from and to, between which nothing arrives. The map is [`ReplicaCluster::map_index`].
    pub(crate) cut: HashSet<(NodeIndex, NodeIndex)>,
    /// Pairs that will be cut; with `true`, every message between them is late until then.
    pub(crate) failing: HashMap<(NodeIndex, NodeIndex), bool>,
    pub(crate) map: Arc<GroupConfig>,
    /// Nodes learn of changes at once, not only when they read the map.
    map_notifies: bool,
    /// Replicas whose disks have no room for what others have.
    without_room: Vec<ReplicaId>,
    /// Disks lose and get room, in some runs: others are what they were without.
    changes_room: bool,
    /// Of its own, so that it changes nothing else that a seed means.
    random_room: WyRand,
    /// Nodes are stopped as an operator does, in some runs: with time to leave.
    pub(crate) leaves: bool,
    /// Of its own, as that for room.
    random_leave: WyRand,
    /// Placement prefers one of the nodes as primary, in most runs.
    pub(crate) preferred: Option<NodeIndex>,
    /// Of its own, as that for room.
    random_preference: WyRand,
    /// What the map has of each node.
    memories: Vec<NodeMemory>,
    /// Disks are put back from copies, and logs lose their ends, in some runs.
    pub(crate) ages: bool,
    /// Of its own, as that for room.
    pub(crate) random_age: WyRand,
    /// A replica whose log had lost its end was alone, and nothing outside of its disk showed that:
    /// acknowledged data may be lost.
    pub(crate) may_have_lost: bool,
    /// A replica became primary with a block in place of what was committed there, of a client whose session
    /// had ended: that write took effect late.
    pub(crate) has_revived: bool,
    /// Disks that were put back, and logs that lost their ends.
    pub(crate) aged: u64,
    /// How many times a primary proposed another one, and the map took it.
    pub(crate) transfers: u64,
    /// What the pool demands changes with these numbers, if it does.
    pub(crate) random_demand: Option<WyRand>,
    /// Blocks are scrubbed with these numbers, if they are.
    pub(crate) random_scrub: Option<WyRand>,
    /// Blocks that were compared, and those that members could not read.
    pub(crate) scrubbed: u64,
    pub(crate) scrub_repairs: u64,
    /// What a scrub found to differ: replicas never do.
    pub(crate) scrub_difference: Option<String>,
    settings: ReplicaSettings,
    fault: Option<PlantedReplicaFault>,
    /// What is sent goes through its encoding.
    encodes: bool,
    /// In 1000 messages, those lost, repeated and very late.
    pub(crate) link_faults_per_mille: u32,
    /// In 1000 events, those that wait for the next ones.
    held_per_mille: u32,
    /// Hash of all that happened.
    pub(crate) trace: u64,
    pub(crate) turns: u64,
    actions: Vec<ReplicaAction>,
}

impl ReplicaCluster {
    pub(crate) fn new(
        nodes: usize,
        settings: ReplicaSettings,
        fault: Option<PlantedReplicaFault>,
        prefers: bool,
        mut random: WyRand,
    ) -> ReplicaCluster {
        let ids = (0..nodes as u32).map(ReplicaId).collect();
        let map = Arc::new(GroupConfig { epoch: 1, primary: ReplicaId(0), in_sync: ids });
        let encodes = random.happens(250);
        let map_notifies = random.happens(500);
        let held_per_mille = if random.happens(300) { 300 } else { 0 };
        // Some disks write blocks whole, others do not. What else a seed means stays the same.
        let mut of_disks = random.clone();
        let are_alike = !matches!(of_disks.below(10), 5..=7);
        let mut random_room = of_disks.clone().split();
        let changes_room = random_room.happens(250);
        let mut random_leave = random_room.clone().split();
        let leaves = random_leave.happens(500);
        let mut random_preference = random_leave.clone().split();
        let preferred = prefers.then(|| random_preference.index(nodes));
        let mut random_age = random_preference.clone().split();
        let ages = random_age.happens(500);
        let settings = match preferred {
            // Short enough to happen between two faults.
            Some(_) => ReplicaSettings { transfer_after_ns: random_preference.below(300 * MS), ..settings },
            None => settings,
        };
        let memories = vec![NodeMemory::default(); nodes];
        let nodes = (0..nodes).map(|_| ReplicaNode {
            replica: None,
            disk: ReplicaDisk::new(settings.in_place && (are_alike || of_disks.happens(500)), fault),
            incarnation: 0,
            replaced: 0,
            snapshot: None,
            lack: None,
            clock_ns: random.below(1000 * MS),
            // Rates differ by 1 % at most.
            clock_rate: 995_000 + random.below(10_000),
            timers: 0,
            paused: None,
            deferred: Vec::new(),
            held: Vec::new(),
            disk_busy: false,
            disk_slowness: 1,
        });
        let nodes = nodes.collect();
        ReplicaCluster {
            now_ns: 0,
            queue: BinaryHeap::new(),
            order: 0,
            random,
            nodes,
            cut: HashSet::new(),
            failing: HashMap::new(),
            map,
            map_notifies,
            without_room: Vec::new(),
            changes_room,
            random_room,
            leaves,
            random_leave,
            preferred,
            random_preference,
            memories,
            ages,
            random_age,
            may_have_lost: false,
            has_revived: false,
            aged: 0,
            transfers: 0,
            random_demand: None,
            random_scrub: None,
            scrubbed: 0,
            scrub_repairs: 0,
            scrub_difference: None,
            settings,
            fault,
            encodes,
            link_faults_per_mille: 0,
            held_per_mille,
            trace: 0,
            turns: 0,
            actions: Vec::new(),
        }
    }

    pub(crate) fn session_timeout_ns(&self) -> u64 {
        self.settings.session_timeout_ns
    }

    pub(crate) fn client_index(&self) -> NodeIndex {
        self.nodes.len()
    }

    pub(crate) fn map_index(&self) -> NodeIndex {
        self.nodes.len() + 1
    }

    pub(crate) fn schedule(&mut self, delay_ns: u64, happening: Happening) {
        self.order += 1;
        let scheduled = Scheduled { at_ns: self.now_ns + delay_ns, order: self.order, happening };
        self.queue.push(Reverse(scheduled));
    }

    /// A number that was not used before.
    pub(crate) fn order_number(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// The next happening; the time is then its time.
    pub(crate) fn next(&mut self) -> Option<Happening> {
        let Reverse(scheduled) = self.queue.pop()?;
        self.now_ns = scheduled.at_ns;
        self.turns += 1;
        let mixed = self.trace ^ scheduled.at_ns.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ scheduled.order;
        self.trace = mixed.rotate_left(17).wrapping_mul(0xff51_afd7_ed55_8ccd);
        Some(scheduled.happening)
    }

    /// Delay of a message; `None` if it is lost.
    fn link_delay(&mut self, from: NodeIndex, to: NodeIndex) -> Option<u64> {
        let lost = self.random.happens(self.link_faults_per_mille);
        let usual_ns = 20 * US + self.random.below(200 * US);
        let is_failing = self.failing.get(&(from, to)) == Some(&true);
        let late = self.random.happens(self.link_faults_per_mille) || is_failing;
        let delay_ns = if late { self.random.below(900 * MS) } else { usual_ns };
        (!lost && !self.cut.contains(&(from, to))).then_some(delay_ns)
    }

    /// A message as its receiver decodes it.
    fn received(&self, frame: Frame) -> Frame {
        if !self.encodes {
            return frame;
        }
        let EncodedFrame { head, data } = frame.encode(GROUP);
        let (header, body) = head.split_first_chunk().expect("a header");
        let header = FrameHeader::decode(header).expect("a header that was encoded");
        let decoded = Frame::decode(&header, body, &data.concat()).expect("a message that was encoded");
        assert_eq!(decoded, frame);
        decoded
    }

    /// Sends a client's request.
    pub(crate) fn send_request(&mut self, to: NodeIndex, request: ClientRequest) {
        let Frame::Request(request) = self.received(Frame::Request(request)) else {
            unreachable!("it was a request");
        };
        if let Some(delay_ns) = self.link_delay(self.client_index(), to) {
            self.schedule(delay_ns, Happening::Request { to, request });
        }
    }

    /// A node's clock.
    fn local_ns(&self, node: NodeIndex) -> u64 {
        let node = &self.nodes[node];
        node.clock_ns + (u128::from(self.now_ns) * u128::from(node.clock_rate) / 1_000_000) as u64
    }

    pub(crate) fn start(&mut self, node: NodeIndex) {
        if self.nodes[node].replica.is_some() {
            return;
        }
        let now_ns = self.local_ns(node);
        let mut random = self.random.split();
        let started = &mut self.nodes[node];
        started.incarnation += 1;
        let recovered = started.disk.crash(&mut random);
        let last = recovered.entries.last().map_or(recovered.base, |entry| entry.id());
        let is_older = started.disk.incarnation < self.memories[node].incarnation;
        let is_behind = self.is_behind(last);
        let started = &mut self.nodes[node];
        if !is_older {
            // The disk first, so that a crash in between is not taken for an older disk.
            started.disk.incarnation += 1;
            self.memories[node].incarnation = started.disk.incarnation;
        }
        if let Some(lack) = &mut started.lack {
            *lack = if is_older || is_behind { Lack::Recorded } else { Lack::Unrecorded };
        }
        let id = ReplicaId(node as u32);
        let settings = ReplicaSettings { in_place: started.disk.is_overwritten(), ..self.settings.clone() };
        let replica = Replica::with_faults(id, started.incarnation, settings, recovered, now_ns, self.fault);
        started.replica = Some(replica);
        started.disk_busy = false;
        let incarnation = started.incarnation;
        self.schedule(0, Happening::MapPoll { node, incarnation });
        self.notify_room(node);
    }

    /// Whether a log that ends with an entry lacks what the map has as committed.
    fn is_behind(&self, last: EntryId) -> bool {
        let committed = self.committed();
        last.sequence < committed.sequence || last.epoch < committed.epoch
    }

    /// The newest entry that the map has as committed.
    fn committed(&self) -> EntryId {
        self.memories.iter().map(|memory| memory.committed).max().unwrap_or_default()
    }

    /// What a node knows of its replica from elsewhere than its disk.
    fn memory_of(&self, node: NodeIndex) -> GroupMemory {
        let is_older = self.nodes[node].disk.incarnation < self.memories[node].incarnation;
        GroupMemory { committed: self.committed(), is_older, loss_epoch: 0 }
    }

    /// Whether a replica has all that a member has to have.
    pub(crate) fn is_sound(&mut self, node: NodeIndex) -> bool {
        let node = &mut self.nodes[node];
        if node.replica.as_ref().is_some_and(Replica::is_compared) {
            node.lack = None;
        }
        node.lack.is_none() && node.disk.is_complete()
    }

    /// Copies the disk of a node.
    pub(crate) fn copy_disk(&mut self, node: NodeIndex) {
        self.nodes[node].snapshot = Some(self.nodes[node].disk.snapshot());
    }

    /// Puts the disk of a stopped node back from its copy, if that is older than the last start.
    pub(crate) fn roll_back(&mut self, node: NodeIndex) {
        let incarnation = self.memories[node].incarnation;
        let rolled_back = &mut self.nodes[node];
        let Some(snapshot) = rolled_back.snapshot.as_ref().filter(|it| it.incarnation < incarnation) else {
            return;
        };
        rolled_back.disk.roll_back(snapshot);
        rolled_back.lack = Some(Lack::Recorded);
        // As with another disk, what it proposed is lost.
        rolled_back.replaced = rolled_back.incarnation;
        self.aged += 1;
    }

    /// Damages the last entry of the log of a stopped node, if there is one.
    pub(crate) fn damage_log(&mut self, node: NodeIndex) {
        let damaged = &mut self.nodes[node];
        if damaged.disk.damage_log(&mut self.random_age) {
            damaged.lack = Some(Lack::Unrecorded);
            damaged.replaced = damaged.incarnation;
            self.aged += 1;
        }
    }

    /// Another replica's disk has no room now, or all have: a fault now and then.
    pub(crate) fn change_room(&mut self) {
        if self.changes_room && self.random_room.happens(400) {
            let small = self.random_room.index(2 * self.nodes.len());
            self.set_without_room((small < self.nodes.len()).then_some(ReplicaId(small as u32)));
        }
    }

    pub(crate) fn set_without_room(&mut self, replicas: impl IntoIterator<Item = ReplicaId>) {
        self.without_room = replicas.into_iter().collect();
        for node in 0..self.nodes.len() {
            self.notify_room(node);
        }
    }

    fn with_room(&self) -> Vec<ReplicaId> {
        let all = (0..self.nodes.len()).map(|node| ReplicaId(node as u32));
        all.filter(|replica| !self.without_room.contains(replica)).collect()
    }

    /// A node is to leave: a fault now and then. It is stopped some time later, whether it has left or not,
    /// or stays.
    pub(crate) fn leave(&mut self) {
        if !self.leaves || !self.random_leave.happens(800) {
            return;
        }
        let random = &mut self.random_leave;
        let node = random.index(self.nodes.len());
        let (incarnation, id) = (self.nodes[node].incarnation, ReplicaId(node as u32));
        let mut successors: Vec<_> = (0..self.nodes.len() as u32).map(ReplicaId).collect();
        // Some nodes are down, or are about to leave as well.
        successors.retain(|other| *other != id && random.happens(900));
        if !successors.is_empty() {
            let first = random.index(successors.len());
            successors.rotate_left(first);
        }
        let force = random.happens(300);
        let (ends_ns, stops) = (random.below(400 * MS), random.happens(700));
        let event = ReplicaEvent::Leave { successors, force };
        self.schedule(0, Happening::Storage { node, incarnation, event });
        self.schedule(ends_ns, Happening::LeaveEnds { node, incarnation, stops });
        if self.random_leave.happens(500) {
            let cut_ns = self.random_leave.below(MS);
            self.schedule(cut_ns, Happening::LeaveCut { node });
        }
    }

    /// Placement prefers another node: a change now and then.
    pub(crate) fn change_preference(&mut self) {
        if self.preferred.is_some() && self.random_preference.happens(100) {
            self.preferred = Some(self.random_preference.index(self.nodes.len()));
        }
    }

    /// Nodes are reminded of the preferred primary, whether they are the primary or not: they may not know
    /// yet.
    pub(crate) fn remind_of_preference(&mut self) {
        let Some(preferred) = self.preferred else { return };
        for node in 0..self.nodes.len() {
            let (incarnation, delay_ns) =
                (self.nodes[node].incarnation, self.random_preference.below(20 * MS));
            let event = ReplicaEvent::PreferredPrimary(ReplicaId(preferred as u32));
            self.schedule(delay_ns, Happening::Storage { node, incarnation, event });
        }
        let again_ns = 10 * MS + self.random_preference.below(100 * MS);
        self.schedule(again_ns, Happening::Preference);
    }

    /// The pool demands another number of replicas in sync, which nodes read from the map one after the
    /// other. One that starts has the first number until then.
    pub(crate) fn change_demand(&mut self) {
        let Some(mut random) = self.random_demand.take() else { return };
        let in_sync_min = 1 + random.index(self.nodes.len() - 1);
        for node in 0..self.nodes.len() {
            let incarnation = self.nodes[node].incarnation;
            let event = ReplicaEvent::InSyncMin(in_sync_min);
            self.schedule(random.below(200 * MS), Happening::Storage { node, incarnation, event });
        }
        self.schedule(100 * MS + random.below(1000 * MS), Happening::Demand);
        self.random_demand = Some(random);
    }

    /// The primary scrubs one of these blocks, which clients may write meanwhile.
    pub(crate) fn scrub(&mut self, blocks: &[BlockKey]) {
        let Some(mut random) = self.random_scrub.take() else { return };
        let (object, offset) = blocks[random.index(blocks.len())];
        // A node that was the primary until now gets it too, and one that becomes it.
        for node in 0..self.nodes.len() {
            let (incarnation, scrub) = (self.nodes[node].incarnation, random.below(u64::MAX));
            let event = ReplicaEvent::Scrub { scrub, object, offset, length: VALUE_BYTES };
            self.schedule(random.below(MS), Happening::Storage { node, incarnation, event });
        }
        self.schedule(random.below(40 * MS), Happening::Scrub);
        self.random_scrub = Some(random);
    }

    fn scrubbed(&mut self, node: NodeIndex, outcome: &ScrubOutcome) {
        let ScrubOutcome::Compared(findings) = outcome else { return };
        self.scrubbed += 1;
        self.scrub_repairs += findings.unreadable.len() as u64;
        if !findings.differing.is_empty() {
            let at_ms = self.now_ns / MS;
            let text = format!("a scrub of primary {node} after {at_ms} ms found {:?}", findings.differing);
            self.scrub_difference.get_or_insert(text);
        }
    }

    /// Whether the preferred node is the primary, if there is one.
    pub(crate) fn is_primary_preferred(&self) -> bool {
        self.preferred.is_none_or(|preferred| self.map.primary == ReplicaId(preferred as u32))
    }

    pub(crate) fn cut_from_others(&mut self, node: NodeIndex) {
        let others = (0..self.nodes.len()).chain([self.map_index()]).filter(|other| *other != node);
        self.cut.extend(others.map(|other| (other, node)));
    }

    /// How long a node that has left is away.
    pub(crate) fn away_ns(&mut self) -> u64 {
        self.random_leave.below(1500 * MS)
    }

    /// Every node stays, from now on.
    pub(crate) fn stay(&mut self) {
        self.leaves = false;
        for node in 0..self.nodes.len() {
            let incarnation = self.nodes[node].incarnation;
            self.schedule(0, Happening::Storage { node, incarnation, event: ReplicaEvent::Stay });
        }
    }

    /// Each node learns it at another time.
    fn notify_room(&mut self, node: NodeIndex) {
        if !self.changes_room {
            return;
        }
        let incarnation = self.nodes[node].incarnation;
        let delay_ns = self.random_room.below(100 * MS);
        let event = ReplicaEvent::Learners(self.with_room());
        self.schedule(delay_ns, Happening::Storage { node, incarnation, event });
    }

    /// The node stops at once. Its disk keeps what was durable.
    pub(crate) fn stop(&mut self, node: NodeIndex) {
        let stopped = &mut self.nodes[node];
        stopped.replica = None;
        stopped.paused = None;
        stopped.deferred.clear();
        stopped.held.clear();
    }

    /// Replaces the disk of a stopped node. What the node proposed before is lost with it: a record whose
    /// only complete member is this one would end the group.
    pub(crate) fn replace_disk(&mut self, node: NodeIndex) {
        let replaced = &mut self.nodes[node];
        replaced.disk.replace();
        replaced.replaced = replaced.incarnation;
    }

    pub(crate) fn resume(&mut self, node: NodeIndex) {
        self.nodes[node].paused = None;
        for happening in std::mem::take(&mut self.nodes[node].deferred) {
            self.schedule(0, happening);
        }
    }

    pub(crate) fn is_current(&self, node: NodeIndex, incarnation: u32) -> bool {
        self.nodes[node].replica.is_some() && self.nodes[node].incarnation == incarnation
    }

    /// Carries out what happens to nodes and the map; returns what concerns clients and faults.
    pub(crate) fn carry_out(&mut self, happening: Happening) -> Option<Happening> {
        let node = match &happening {
            Happening::Message { to, .. } | Happening::Request { to, .. } => *to,
            Happening::Disk { node, incarnation }
            | Happening::Storage { node, incarnation, .. }
            | Happening::Timer { node, incarnation, .. }
            | Happening::MapRecord { node, incarnation, .. }
            | Happening::LeaveEnds { node, incarnation, stops: false }
            | Happening::MapPoll { node, incarnation } => {
                if !self.is_current(*node, *incarnation) {
                    return None;
                }
                *node
            }
            Happening::MapRequest { .. } => {
                self.ask_map(happening);
                return None;
            }
            _ => return Some(happening),
        };
        if self.nodes[node].paused.is_some() {
            self.nodes[node].deferred.push(happening);
            return None;
        }
        let event = match happening {
            Happening::Message { message, .. } => ReplicaEvent::Message(message),
            Happening::Request { request, .. } => ReplicaEvent::Request(request),
            // What is known then: nodes learn changes in their order.
            Happening::Storage { event: ReplicaEvent::Learners(_), .. } => {
                ReplicaEvent::Learners(self.with_room())
            }
            Happening::Storage { event, .. } => event,
            Happening::MapRecord { config, .. } => {
                if self.nodes[node].replica.as_ref().is_some_and(|it| it.config().epoch == 0) {
                    let memory = ReplicaEvent::Memory(self.memory_of(node));
                    self.nodes[node].held.push(memory);
                }
                ReplicaEvent::Map(config)
            }
            Happening::Timer { number, .. } if number != self.nodes[node].timers => return None,
            Happening::Timer { .. } => ReplicaEvent::Timer,
            Happening::LeaveEnds { .. } => ReplicaEvent::Stay,
            Happening::Disk { .. } => {
                self.nodes[node].disk_busy = false;
                let event = self.nodes[node].disk.complete_write(&mut self.random);
                self.complete_reads(node);
                self.start_disk(node);
                event?
            }
            Happening::MapPoll { incarnation, .. } => {
                self.send_to_map(node, None);
                let unknown = self.nodes[node].replica.as_ref().is_some_and(|it| it.config().epoch == 0);
                let delay_ns = if unknown { 20 * MS } else { 100 * MS + self.random.below(300 * MS) };
                self.schedule(delay_ns, Happening::MapPoll { node, incarnation });
                if !unknown && self.random.happens(100) {
                    self.handle(node, ReplicaEvent::LogLow);
                }
                return None;
            }
            _ => unreachable!("only events of nodes are left"),
        };
        self.handle(node, event);
        None
    }

    fn handle(&mut self, node: NodeIndex, event: ReplicaEvent) {
        let now_ns = self.local_ns(node);
        if self.nodes[node].replica.is_none() {
            return;
        }
        self.nodes[node].held.push(event);
        if self.random.happens(self.held_per_mille) {
            // It is taken with what happens until then.
            let (delay_ns, incarnation) = (self.random.below(200 * US), self.nodes[node].incarnation);
            let event = ReplicaEvent::Timer;
            return self.schedule(delay_ns, Happening::Storage { node, incarnation, event });
        }
        let mut actions = std::mem::take(&mut self.actions);
        let held = std::mem::take(&mut self.nodes[node].held);
        let Some(replica) = &mut self.nodes[node].replica else { return };
        replica.handle_batch(held, now_ns, &mut actions);
        let deadline = replica.deadline();
        self.has_revived |= replica.status().revived > 0;
        for action in actions.drain(..) {
            self.act(node, action);
            self.complete_reads(node);
        }
        self.actions = actions;
        self.start_disk(node);
        if let Some(deadline_ns) = deadline {
            let at = &mut self.nodes[node];
            at.timers += 1;
            let (number, incarnation) = (at.timers, at.incarnation);
            let wait_ns =
                u128::from(deadline_ns.saturating_sub(now_ns)) * 1_000_000 / u128::from(at.clock_rate);
            self.schedule(wait_ns as u64 + 1, Happening::Timer { node, incarnation, number });
        }
    }

    fn act(&mut self, node: NodeIndex, action: ReplicaAction) {
        let incarnation = self.nodes[node].incarnation;
        let disk = &mut self.nodes[node].disk;
        match action {
            ReplicaAction::Send { to, message } => {
                let to = to.0 as usize;
                let Frame::Replica(message) = self.received(Frame::Replica(message)) else {
                    unreachable!("it was a message of a replica");
                };
                let repeats = if self.random.happens(self.link_faults_per_mille) { 2 } else { 1 };
                for _ in 0..repeats {
                    if let Some(delay_ns) = self.link_delay(node, to) {
                        self.schedule(delay_ns, Happening::Message { to, message: message.clone() });
                    }
                }
            }
            ReplicaAction::Reply { client, number, reply } => {
                let frame = self.received(Frame::Reply { client, number, reply });
                if let Some(delay_ns) = self.link_delay(node, self.client_index())
                    && let Frame::Reply { client, number, reply } = frame
                {
                    self.schedule(delay_ns, Happening::Reply { client, number, from: node, reply });
                }
            }
            ReplicaAction::Append { append, entry } => disk.append(append, entry),
            ReplicaAction::Truncate { truncation, from } => disk.truncate(truncation, from),
            ReplicaAction::Apply { entry } => disk.apply(&entry),
            ReplicaAction::Stable { through } => disk.stable(through),
            ReplicaAction::Checkpoint { checkpoint, record } => disk.checkpoint(checkpoint, record),
            ReplicaAction::Free { through } => disk.free(through),
            ReplicaAction::Reset { session, record } => disk.reset(session, record),
            ReplicaAction::Read { read, object, offset, through, .. } => {
                disk.waiting_reads.push(WaitingRead::Block { read, key: (object, offset), through });
            }
            ReplicaAction::ReadObject { read, after } => {
                disk.waiting_reads.push(WaitingRead::Object { read, after });
            }
            ReplicaAction::Settle { number, object, offset, data } => {
                disk.settle(object, offset, &data);
                self.complete(node, incarnation, ReplicaEvent::Settled { number });
            }
            ReplicaAction::WriteObject { session, part, content } => {
                disk.write_part(part, &content);
                self.complete(node, incarnation, ReplicaEvent::ObjectWritten { session, part });
            }
            ReplicaAction::Restored => {
                // The disk is not older any more.
                let incarnation = self.memories[node].incarnation.max(disk.incarnation) + 1;
                disk.incarnation = incarnation;
                self.memories[node].incarnation = incarnation;
            }
            ReplicaAction::Scrubbed { outcome, .. } => self.scrubbed(node, &outcome),
            ReplicaAction::Propose(config) => self.send_to_map(node, Some(config)),
        }
    }

    fn complete(&mut self, node: NodeIndex, incarnation: u32, event: ReplicaEvent) {
        let delay_ns = (10 * US + self.random.below(100 * US)) * self.nodes[node].disk_slowness;
        self.schedule(delay_ns, Happening::Storage { node, incarnation, event });
    }

    /// Completes the reads that wait for nothing.
    fn complete_reads(&mut self, node: NodeIndex) {
        let incarnation = self.nodes[node].incarnation;
        for event in self.nodes[node].disk.take_reads() {
            self.complete(node, incarnation, event);
        }
    }

    /// Starts the next write of a node's disk.
    fn start_disk(&mut self, node: NodeIndex) {
        let at = &mut self.nodes[node];
        if at.disk_busy || !at.disk.has_writes() {
            return;
        }
        at.disk_busy = true;
        let (incarnation, slowness) = (at.incarnation, at.disk_slowness);
        let delay_ns = (5 * US + self.random.below(60 * US)) * slowness;
        self.schedule(delay_ns, Happening::Disk { node, incarnation });
    }

    fn send_to_map(&mut self, node: NodeIndex, proposal: Option<Arc<GroupConfig>>) {
        let incarnation = self.nodes[node].incarnation;
        if let Some(delay_ns) = self.link_delay(node, self.map_index()) {
            let committed = self.nodes[node].replica.as_ref().and_then(Replica::committed);
            let committed = committed.unwrap_or_default();
            self.schedule(delay_ns, Happening::MapRequest { node, incarnation, proposal, committed });
        }
    }

    /// The map compares and swaps, answers, and may notify the other nodes.
    fn ask_map(&mut self, happening: Happening) {
        let Happening::MapRequest { node, proposal, incarnation, committed } = happening else {
            return;
        };
        let memory = &mut self.memories[node];
        memory.committed = memory.committed.max(committed);
        let is_lost = incarnation <= self.nodes[node].replaced;
        if let Some(config) = proposal.filter(|config| config.epoch == self.map.epoch + 1 && !is_lost) {
            let proposer = ReplicaId(node as u32);
            self.transfers += u64::from(self.map.primary == proposer && config.primary != proposer);
            let sound = config.in_sync.iter().filter(|member| self.is_sound(member.0 as usize)).count();
            let lack = self.nodes[config.primary.0 as usize].lack;
            self.may_have_lost |= sound == 0 && lack == Some(Lack::Unrecorded);
            self.map = config;
            let notified = if self.map_notifies { self.nodes.len() } else { 0 };
            for other in (0..notified).filter(|other| *other != node) {
                self.send_record(other, self.nodes[other].incarnation);
            }
        }
        self.send_record(node, incarnation);
    }

    fn send_record(&mut self, node: NodeIndex, incarnation: u32) {
        if let Some(delay_ns) = self.link_delay(self.map_index(), node) {
            let config = self.map.clone();
            self.schedule(delay_ns, Happening::MapRecord { node, incarnation, config });
        }
    }
}
