//! Nodes with replicas, each a core in virtual time; messages take time and get lost; the map is in memory.
//! Clients write, zero and read sectors, never the same at once, and repeat a request until it is answered.
#![allow(dead_code)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::Registry;
use bdev::testing::CrashDisk;
use cluster_map::PoolClass;
use control::JobHandle;
use os::clock::VirtualClock;
use random::WyRand;
use replica::{ClientReply, ClientRequest, GroupConfig, ReplicaId, ReplicaMessage, ReplicaSettings};
use store_node::{
    FormatOptions, Outbox, PartitionStatus, PoolOptions, ReplicaFormat, ReplicaHandle, ReplicaInput,
    ReplicaNode, ReplicaNodeConfig, StoreCores, StoreError, StoreTuning, format_device,
};
use uuid::Uuid;
use wire_store::{EntryHeader, ObjectId, Operation, crc32c};

use crate::process::{Process, TestDisks};

pub(crate) const NODES: usize = 3;
/// Not the index of the partition.
pub(crate) const GROUPS: [u32; 2] = [9, 4];
const SECTOR: usize = 512;
pub(crate) const MS: u64 = 1_000_000;
const CLIENTS: usize = 6;
/// Sectors of each group's two objects that the load uses.
pub(crate) const WINDOW: u64 = 160;

/// What a node or the map sends, and when it arrives.
#[derive(Default)]
pub(crate) struct Network {
    messages: BTreeMap<(u64, u64), (usize, u32, Delivery)>,
    order: u64,
    replies: Vec<(u64, u64, ClientReply)>,
    pub(crate) map: BTreeMap<u32, Arc<GroupConfig>>,
    now_ns: u64,
    random: Option<WyRand>,
    /// Nodes that no other one hears, and that hear none.
    pub(crate) cut: BTreeSet<usize>,
    pub(crate) loss_per_mille: u32,
    /// Messages to nodes that do not run.
    pub(crate) unheard: Vec<ReplicaMessage>,
}

enum Delivery {
    Message(ReplicaMessage),
    Map(Arc<GroupConfig>),
}

impl Network {
    fn send(&mut self, to: usize, group: u32, delivery: Delivery) {
        let random = self.random.as_mut().unwrap();
        let delay_ns = 1000 + random.below(50_000);
        self.order += 1;
        self.messages.insert((self.now_ns + delay_ns, self.order), (to, group, delivery));
    }

    fn is_lost(&mut self) -> bool {
        let per_mille = self.loss_per_mille;
        self.random.as_mut().unwrap().happens(per_mille)
    }
}

/// The outbox of a replica.
struct TestOutbox {
    node: usize,
    network: Arc<Mutex<Network>>,
}

impl Outbox for TestOutbox {
    fn send(&mut self, group: u32, to: ReplicaId, message: ReplicaMessage) {
        let mut network = self.network.lock().unwrap();
        let to = to.0 as usize;
        let is_cut = network.cut.contains(&self.node) || network.cut.contains(&to);
        if !is_cut && !network.is_lost() {
            network.send(to, group, Delivery::Message(message));
        }
    }

    fn reply(&mut self, _group: u32, client: u64, number: u64, reply: ClientReply) {
        let mut network = self.network.lock().unwrap();
        if !network.cut.contains(&self.node) && !network.is_lost() {
            network.replies.push((client, number, reply));
        }
    }

    fn propose(&mut self, group: u32, config: Arc<GroupConfig>) {
        let mut network = self.network.lock().unwrap();
        if network.cut.contains(&self.node) {
            return;
        }
        if network.map[&group].epoch + 1 == config.epoch {
            network.map.insert(group, config);
        }
        let config = network.map[&group].clone();
        network.send(self.node, group, Delivery::Map(config));
    }
}

type Opened = Rc<RefCell<Option<Result<ReplicaNode, StoreError>>>>;

/// A machine.
pub(crate) struct Node {
    pub(crate) disks: TestDisks,
    pub(crate) process: Option<Process>,
    opened: Opened,
    pub(crate) node: Option<Rc<ReplicaNode>>,
    pub(crate) replicas: HashMap<u32, ReplicaHandle>,
    pub(crate) restart_ns: u64,
    /// Counts power failures.
    boot: u8,
    /// Groups whose replicas get other partitions, and these replicas when they are there.
    renewing: BTreeSet<u32>,
    renewed: Rc<RefCell<Vec<(u32, ReplicaHandle)>>>,
}

struct Client {
    id: u64,
    number: u64,
    /// What it waits for.
    request: Option<(u32, Work)>,
    target: usize,
    again_ns: u64,
}

#[derive(Clone, Debug)]
struct Work {
    /// The index in `GROUPS`, the first sector and the number of sectors.
    range: (usize, u64, u64),
    /// What it writes; `None` reads.
    stamp: Option<u32>,
}

pub(crate) struct Cluster {
    pub(crate) clock: VirtualClock,
    pub(crate) random: WyRand,
    pub(crate) network: Arc<Mutex<Network>>,
    pub(crate) nodes: Vec<Node>,
    clients: Vec<Client>,
    /// Stamps by group and sector.
    written: HashMap<(usize, u64), u32>,
    busy: BTreeSet<(usize, u64)>,
    stamp: u32,
    ignores_fua: bool,
    /// Disks write blocks whole, and clients mostly do: they are overwritten in place.
    in_place: bool,
    /// Reads wait until what the log has of them is in place.
    reads_flush: bool,
    class: PoolClass,
    /// Objects to preallocate first: then the checksums of each are in another block of the table.
    to_preallocate: Vec<(usize, u64)>,
    tuning: StoreTuning,
    /// Each node has a non-priority thread.
    pub(crate) is_prioritized: bool,
    pub(crate) totals: Totals,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) writes: u64,
    pub(crate) reads: u64,
    pub(crate) crashes: u64,
    pub(crate) replaced: u64,
    pub(crate) cuts: u64,
    pub(crate) checkpoints: u64,
    pub(crate) redone: u64,
    pub(crate) copies: u64,
    pub(crate) overwriting: u64,
    pub(crate) flushed_reads: u64,
    pub(crate) checksum_misses: u64,
}

impl Totals {
    /// Whether each kind of event has happened.
    pub(crate) fn reaches_everything(&self) -> bool {
        let Totals { writes, reads, crashes, replaced, cuts, checkpoints, redone, copies, .. } = *self;
        let Totals { overwriting, flushed_reads, checksum_misses, .. } = *self;
        let counts =
            [writes, reads, crashes, replaced, cuts, checkpoints, redone, copies, overwriting, flushed_reads];
        counts.iter().all(|count| *count > 0) && checksum_misses > 100
    }
}

/// The default, entries in place at once, or only when they have to be.
fn tuning(seed: u64) -> StoreTuning {
    let (flush_entries, flush_after_ms) =
        [(16, 100), (0, 0), (StoreTuning::FLUSH_ENTRIES_MAX, 60_000)][seed as usize / 6 % 3];
    let flush_after = Duration::from_millis(flush_after_ms);
    StoreTuning { flush_entries, flush_after, ..StoreTuning::default() }
}

fn settings(in_place: bool, reads_flush: bool) -> ReplicaSettings {
    ReplicaSettings {
        in_place,
        reads_flush,
        lease_ns: 40 * MS,
        grace_ns: 45 * MS,
        heartbeat_ns: 10 * MS,
        resend_ns: 6 * MS,
        retry_ns: 15 * MS,
        learner_timeout_ns: 200 * MS,
        checkpoint_entries: 40,
        retained_entries: 30,
        ..ReplicaSettings::default()
    }
}

fn object_of(group: usize, sector: u64) -> (ObjectId, u32) {
    let index = (sector / (WINDOW / 2)) as u32;
    let offset = (sector % (WINDOW / 2)) as u32 * SECTOR as u32;
    (ObjectId { group: GROUPS[group], volume: 1, index, suffix: 0 }, offset)
}

impl Cluster {
    pub(crate) fn new(seed: u64, ignores_fua: bool) -> Cluster {
        Cluster::with_class(seed, ignores_fua, PoolClass::Disk)
    }

    pub(crate) fn with_class(seed: u64, ignores_fua: bool, class: PoolClass) -> Cluster {
        Cluster::of(seed, ignores_fua, class, StoreTuning::default().checksum_cache_bytes)
    }

    /// A partition has the checksums of one object in memory.
    pub(crate) fn with_most_checksums_on_disk(seed: u64) -> Cluster {
        Cluster::of(seed, false, PoolClass::Disk, 0)
    }

    fn of(seed: u64, ignores_fua: bool, class: PoolClass, checksum_cache_bytes: u64) -> Cluster {
        let mut random = WyRand::new(seed);
        let members: Vec<_> = (0..NODES as u32).map(ReplicaId).collect();
        let record = |primary| {
            Arc::new(GroupConfig { epoch: 1, primary: ReplicaId(primary), in_sync: members.clone() })
        };
        let map = GROUPS.into_iter().zip([0, 1]).map(|(group, primary)| (group, record(primary))).collect();
        let network = Network { map, random: Some(random.split()), loss_per_mille: 5, ..Network::default() };
        let mut cluster = Cluster {
            clock: VirtualClock::default(),
            network: Arc::new(Mutex::new(network)),
            nodes: Vec::new(),
            clients: Vec::new(),
            written: HashMap::new(),
            busy: BTreeSet::new(),
            stamp: 0,
            ignores_fua,
            in_place: seed % 2 == 1 && !ignores_fua,
            reads_flush: seed % 3 == 1,
            class,
            to_preallocate: Vec::new(),
            tuning: StoreTuning { checksum_cache_bytes, ..tuning(seed) },
            is_prioritized: seed / 3 % 2 == 1,
            totals: Totals::default(),
            random,
        };
        if checksum_cache_bytes == 0 {
            let objects = (0..GROUPS.len()).flat_map(|group| [(group, 0), (group, WINDOW / 2)]);
            cluster.to_preallocate = objects.collect();
        }
        for node in 0..NODES {
            let disks = cluster.new_disks(seed * 10 + node as u64, true);
            let restart_ns = cluster.random.below(MS);
            cluster.nodes.push(Node {
                disks,
                process: None,
                opened: Rc::default(),
                node: None,
                replicas: HashMap::new(),
                restart_ns,
                boot: 1,
                renewing: BTreeSet::new(),
                renewed: Rc::default(),
            });
        }
        for id in 1..=CLIENTS as u64 {
            cluster.clients.push(Client { id, number: 0, request: None, target: 0, again_ns: 0 });
        }
        cluster
    }

    /// Every second node has its logs on a disk of their own, and half of these on persistent memory.
    fn new_disks(&mut self, seed: u64, are_new: bool) -> TestDisks {
        let block_size = if self.in_place || seed.is_multiple_of(3) { 4096 } else { 512 };
        let create = match (self.ignores_fua, self.in_place) {
            (true, _) => CrashDisk::create_ignoring_fua,
            (false, true) => CrashDisk::create_atomic,
            (false, false) => CrashDisk::create,
        };
        // With room for whole objects, if those are preallocated.
        let bytes: u64 = if self.tuning.checksum_cache_bytes == 0 { 24 << 20 } else { 8 << 20 };
        let disk = create(&Registry::new(), "Disk", bytes / u64::from(block_size), block_size, seed).unwrap();
        let log = (seed / 2).is_multiple_of(2).then(|| {
            let block_size = if seed.is_multiple_of(5) { 4096 } else { 512 };
            // The logs rely on no sector, also those of replicas.
            let create = match self.ignores_fua {
                false if seed.is_multiple_of(4) => CrashDisk::create_pmem,
                _ => create,
            };
            create(&Registry::new(), "Log", (4 << 20) / u64::from(block_size), block_size, seed + 1).unwrap()
        });
        let disks = TestDisks { disk, log, are_encrypted: false };
        let bdevs = disks.bdevs();
        let mut process = Process::start(&disks, &self.clock, &mut self.random);
        let (registry, core) = (process.registry.clone(), process.reactor.core());
        let replicas = ReplicaFormat {
            cluster: Uuid::nil(),
            node: Uuid::nil(),
            groups: GROUPS.to_vec(),
            are_new,
            generation: 0,
            spare: 0,
        };
        let options = FormatOptions {
            log_bytes: Some(256 << 10),
            replicas: Some(replicas),
            ..FormatOptions::default()
        };
        let formatted = process.run(async move {
            format_device(&registry, bdevs, &StoreCores::This(&core), options, &JobHandle::standalone()).await
        });
        formatted.unwrap();
        process.discard();
        disks
    }

    pub(crate) fn start(&mut self, index: usize) {
        let bdevs = self.nodes[index].disks.bdevs();
        let start = if self.is_prioritized { Process::prioritized } else { Process::start };
        let process = start(&self.nodes[index].disks, &self.clock, &mut self.random);
        let threads = process.threads();
        let (registry, core) = (process.registry.clone(), process.reactor.core());
        let (opened, network): (Opened, _) = (Rc::default(), self.network.clone());
        let (result, settings) = (opened.clone(), settings(self.in_place, self.reads_flush));
        let (pool, boot) = (PoolOptions { in_sync_min: 2, class: self.class }, [self.nodes[index].boot; 16]);
        let tuning = self.tuning;
        assert!(process.reactor.core().spawn(async move {
            let config = ReplicaNodeConfig {
                name: "test",
                id: ReplicaId(index as u32),
                settings,
                pools: vec![(0..u32::MAX, pool)],
                boot,
                tuning,
                threads,
                outbox: Arc::new(move |_, _| Box::new(TestOutbox { node: index, network: network.clone() })),
            };
            let cores = StoreCores::This(&core);
            let node = ReplicaNode::open(&registry, bdevs, &cores, config, &JobHandle::standalone()).await;
            *result.borrow_mut() = Some(node);
        }));
        let node = &mut self.nodes[index];
        (node.process, node.opened) = (Some(process), opened);
    }

    /// A node's process is killed; it comes back later.
    pub(crate) fn kill(&mut self, index: usize) {
        let restart_ns = self.clock.now_ns() + self.random.below(150 * MS);
        let node = &mut self.nodes[index];
        node.replicas.clear();
        node.node = None;
        node.renewing.clear();
        node.renewed = Rc::default();
        if let Some(process) = node.process.take() {
            process.discard();
        }
        node.restart_ns = restart_ns;
        self.totals.crashes += 1;
    }

    /// A node loses its power; it comes back later, maybe with another disk.
    pub(crate) fn crash(&mut self, index: usize, replace: bool) {
        self.kill(index);
        let mut random = self.random.split();
        let node = &mut self.nodes[index];
        node.disks.fail_power(&mut random);
        node.boot += 1;
        if replace {
            let seed = self.random.below(1 << 40);
            self.nodes[index].disks = self.new_disks(seed, false);
            self.totals.replaced += 1;
        }
    }

    /// Everything for a few microseconds.
    pub(crate) fn turn(&mut self) -> Result<(), String> {
        let now_ns = self.clock.now_ns() + 1 + self.random.below(10_000);
        self.clock.advance_to(now_ns);
        for index in 0..NODES {
            let node = &mut self.nodes[index];
            match &mut node.process {
                None if now_ns >= node.restart_ns => self.start(index),
                None => {}
                Some(process) => {
                    process.turn_cores();
                    let opened = node.opened.borrow_mut().take();
                    if let Some(opened) = opened {
                        let opened = opened.map_err(|error| format!("node {index}: {error}"))?;
                        node.replicas = opened
                            .groups()
                            .into_iter()
                            .map(|group| (group, opened.replica(group).unwrap()))
                            .collect();
                        node.node = Some(Rc::new(opened));
                    }
                }
            }
        }
        self.renew_failed();
        let mut network = self.network.lock().unwrap();
        network.now_ns = now_ns;
        while let Some(message) = network.messages.first_entry().filter(|message| message.key().0 <= now_ns) {
            let (to, group, delivery) = message.remove();
            let input = match delivery {
                Delivery::Message(message) => ReplicaInput::Message(message),
                Delivery::Map(config) => ReplicaInput::Map(config),
            };
            match (self.nodes[to].replicas.get(&group), input) {
                (Some(replica), input) => _ = replica.send(input),
                (None, ReplicaInput::Message(message)) => network.unheard.push(message),
                (None, _) => {}
            }
        }
        // The map notifies every node from time to time.
        if network.random.as_mut().unwrap().happens(2) {
            for (group, config) in network.map.clone() {
                (0..NODES).for_each(|to| network.send(to, group, Delivery::Map(config.clone())));
            }
        }
        let replies = std::mem::take(&mut network.replies);
        drop(network);
        replies.into_iter().try_for_each(|(client, number, reply)| self.answer(client, number, reply))?;
        Ok(())
    }

    /// Partitions that failed are discarded when others are in sync without their nodes, and the replicas get
    /// copies. The headers that name a group may be damaged: then it is the one that is missing.
    fn renew_failed(&mut self) {
        let pool = PoolOptions { in_sync_min: 2, class: self.class };
        for (index, machine) in self.nodes.iter_mut().enumerate() {
            machine.replicas.extend(machine.renewed.borrow_mut().drain(..));
            let Some(node) = &machine.node else { continue };
            for failed in node.failed_partitions() {
                let missing = || GROUPS.into_iter().find(|group| !machine.replicas.contains_key(group));
                let group = failed.group.or_else(missing).unwrap();
                let is_member = self.network.lock().unwrap().map[&group].has(ReplicaId(index as u32));
                if is_member || !machine.renewing.insert(group) {
                    continue;
                }
                let core = machine.process.as_ref().unwrap().reactor.core();
                let (node, renewed, of_task) = (node.clone(), machine.renewed.clone(), core.clone());
                assert!(core.spawn(async move {
                    let cores = StoreCores::This(&of_task);
                    node.discard_partition(&cores, failed.index).await.unwrap();
                    let replica = node.add_group(&cores, group, false, pool).await.unwrap();
                    renewed.borrow_mut().push((group, replica));
                }));
            }
        }
    }

    fn answer(&mut self, id: u64, number: u64, reply: ClientReply) -> Result<(), String> {
        let client = &mut self.clients[id as usize - 1];
        let Some((_, work)) = client.request.clone().filter(|_| client.number == number) else {
            return Ok(());
        };
        let (group, first, count) = work.range;
        match (reply, work.stamp) {
            (ClientReply::Written, Some(stamp)) => {
                (first..first + count).for_each(|sector| _ = self.written.insert((group, sector), stamp));
                self.totals.writes += 1;
            }
            (ClientReply::Data(data), None) => {
                for (sector, bytes) in (first..).zip(data.chunks(SECTOR)) {
                    let expected = self.written.get(&(group, sector)).copied().unwrap_or(0);
                    if bytes != expected.to_le_bytes().repeat(SECTOR / 4) {
                        let found = u32::from_le_bytes(bytes[..4].try_into().unwrap());
                        return Err(format!("sector {sector} of group {group} has {found}, not {expected}"));
                    }
                }
                self.totals.reads += 1;
            }
            (ClientReply::NotPrimary { primary }, _) => {
                client.target = primary.map_or(client.target + 1, |primary| primary.0 as usize) % NODES;
                client.again_ns = client.again_ns.min(self.clock.now_ns() + MS);
                return Ok(());
            }
            (ClientReply::Busy, _) => return Ok(()),
            (reply, _) => return Err(format!("client {id} gets {reply:?}")),
        }
        client.request = None;
        client.again_ns = self.clock.now_ns() + self.random.below(MS / 2);
        self.busy.retain(|(of, sector)| *of != group || !(first..first + count).contains(sector));
        Ok(())
    }

    /// Clients begin requests, and repeat those without an answer.
    pub(crate) fn run_clients(&mut self, begin: bool) {
        let now_ns = self.clock.now_ns();
        for index in 0..CLIENTS {
            if self.clients[index].again_ns > now_ns {
                continue;
            }
            if self.clients[index].request.is_none() {
                if begin && let Some(work) = self.claim() {
                    let client = &mut self.clients[index];
                    client.number += 1;
                    client.request = Some((GROUPS[work.range.0], work));
                }
            } else {
                self.clients[index].target = self.random.index(NODES);
            }
            let client = &mut self.clients[index];
            client.again_ns = now_ns + 8 * MS;
            let Some((group, work)) = client.request.clone() else { continue };
            let (object, offset) = object_of(work.range.0, work.range.1);
            let length = work.range.2 as u32 * SECTOR as u32;
            let (id, number) = (client.id, client.number);
            let header = |operation| EntryHeader {
                client: id,
                client_number: number,
                ..EntryHeader::new(operation, object, offset, length)
            };
            let request = match work.stamp {
                None => ClientRequest::Read { client: id, number, object, offset, length },
                Some(_) if length == 0 => {
                    ClientRequest::Write { header: header(Operation::Preallocate), data: [].into() }
                }
                Some(0) => ClientRequest::Write { header: header(Operation::WriteZeroes), data: [].into() },
                Some(stamp) => {
                    let data = stamp.to_le_bytes().repeat(length as usize / 4);
                    let header = EntryHeader { data_crc32c: crc32c(&data), ..header(Operation::Write) };
                    ClientRequest::Write { header, data: data.into() }
                }
            };
            let target = client.target;
            let mut network = self.network.lock().unwrap();
            if network.cut.contains(&target) || network.is_lost() {
                continue;
            }
            drop(network);
            if let Some(replica) = self.nodes[target].replicas.get(&group) {
                replica.send(ReplicaInput::Request(request));
            }
        }
    }

    fn claim(&mut self) -> Option<Work> {
        if let Some((group, first)) = self.to_preallocate.pop() {
            return Some(Work { range: (group, first, 0), stamp: Some(0) });
        }
        let group = self.random.index(GROUPS.len());
        let half = WINDOW / 2;
        let at = self.random.below(half);
        let count = (1 + self.random.below(40)).min(half - at);
        let is_block = self.in_place && self.random.happens(850);
        let (at, count) = if is_block { (at / 8 * 8, 8) } else { (at, count) };
        let first = at + half * self.random.below(2);
        let sectors: Vec<_> = (first..first + count).map(|sector| (group, sector)).collect();
        if sectors.iter().any(|sector| self.busy.contains(sector)) {
            return None;
        }
        self.busy.extend(sectors);
        let stamp = match self.random.below(10) {
            0..3 => None,
            3 => Some(0),
            _ => {
                self.stamp += 1;
                Some(self.stamp)
            }
        };
        Some(Work { range: (group, first, count), stamp })
    }

    pub(crate) fn statuses(&mut self) -> Vec<Vec<PartitionStatus>> {
        let nodes: Vec<_> = self.nodes.iter().map(|node| node.node.clone()).collect();
        let mut all = Vec::new();
        for (index, node) in nodes.into_iter().enumerate() {
            let Some(node) = node else { continue };
            let process = self.nodes[index].process.as_mut().unwrap();
            all.push(process.run(async move { node.status().await }).unwrap());
        }
        all
    }

    /// The state of everything, for a test that hangs.
    fn describe(&mut self) -> String {
        let mut lines = Vec::new();
        for (node, partitions) in self.statuses().into_iter().enumerate() {
            for PartitionStatus { failed, replica, entries_to_place, .. } in partitions {
                let replica = replica.unwrap();
                lines.push(format!(
                    "node {node}, failed {failed:?}: {:?} {:?}, {entries_to_place} to place, {} in place",
                    replica.config, replica.status, replica.in_place
                ));
            }
        }
        for client in self.clients.iter().filter(|client| client.request.is_some()) {
            lines.push(format!("client {} waits for {}: {:?}", client.id, client.number, client.request));
        }
        lines.join("\n")
    }

    fn is_in_sync(&self) -> bool {
        let network = self.network.lock().unwrap();
        network.map.values().all(|config| config.in_sync.len() == NODES)
            && self.nodes.iter().all(|node| node.node.is_some())
            && self.clients.iter().all(|client| client.request.is_none())
    }

    /// No more faults: everything that was begun ends, and all replicas are in sync.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        self.network.lock().unwrap().cut.clear();
        self.network.lock().unwrap().loss_per_mille = 0;
        let end_ns = self.clock.now_ns() + 5000 * MS;
        // The map may still list one that has restarted without its data.
        while !self.is_in_sync() || !self.are_complete() {
            self.turn()?;
            self.run_clients(false);
            if self.clock.now_ns() > end_ns {
                return Err(format!("it does not recover: {}", self.describe()));
            }
        }
        Ok(())
    }

    fn are_complete(&mut self) -> bool {
        let statuses = self.statuses();
        let mut replicas = statuses.iter().flatten().filter_map(|partition| partition.replica.as_ref());
        replicas.all(|replica| replica.status.complete)
    }

    /// Reads everything from the primaries.
    pub(crate) fn read_all(&mut self) -> Result<(), String> {
        for (group, of_group) in GROUPS.into_iter().enumerate() {
            for first in (0..WINDOW).step_by(WINDOW as usize / 2) {
                let client = &mut self.clients[0];
                client.number += 1;
                let work = Work { range: (group, first, WINDOW / 2), stamp: None };
                client.request = Some((of_group, work));
                client.again_ns = 0;
                let end_ns = self.clock.now_ns() + 2000 * MS;
                while self.clients[0].request.is_some() {
                    self.turn()?;
                    self.run_clients(false);
                    if self.clock.now_ns() > end_ns {
                        return Err("a read does not end".to_string());
                    }
                }
            }
        }
        Ok(())
    }

    /// Each node in turn is the only one that is up, so that it serves what it has.
    pub(crate) fn read_from_each(&mut self) -> Result<(), String> {
        for alone in 0..NODES {
            // The others' power fails, with all that was only in their caches.
            for node in (0..NODES).filter(|node| *node != alone) {
                match self.class {
                    PoolClass::Disk | PoolClass::Pmem => self.crash(node, false),
                    // They are to come back with their data: none but this one has it.
                    PoolClass::Memory => self.kill(node),
                }
            }
            for node in &mut self.nodes {
                node.restart_ns = u64::MAX;
            }
            let config = |epoch| GroupConfig {
                epoch,
                primary: ReplicaId(alone as u32),
                in_sync: vec![ReplicaId(alone as u32)],
            };
            // The replica proposes this after its lease; with two in sync at least it would serve nothing
            // then.
            let mut network = self.network.lock().unwrap();
            for config_of in network.map.values_mut() {
                *config_of = Arc::new(config(config_of.epoch + 1));
            }
            drop(network);
            for node in (0..NODES).filter(|node| *node != alone) {
                self.nodes[node].restart_ns = self.clock.now_ns() + 300 * MS;
            }
            self.read_all()?;
            self.settle()?;
        }
        Ok(())
    }
}
