//! Entries that are appended together are one request to the device, whose slices are whole pages, and the
//! log has of each what it would have if it were written alone.
#![allow(clippy::unwrap_used)]

mod process;

use std::sync::{Arc, Mutex};

use bdev::testing::CrashDisk;
use bdev::{
    Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, IoLimits, Registry, Request,
};
use block_io::{Op, Payload, RequestFlags};
use cluster_map::PoolClass;
use control::JobHandle;
use os::clock::VirtualClock;
use process::Process;
use random::WyRand;
use replica::{ClientReply, ClientRequest, GroupConfig, ReplicaId, ReplicaMessage, ReplicaSettings};
use store_node::{
    FormatOptions, Outbox, PartitionStatus, PoolOptions, ReplicaFormat, ReplicaHandle, ReplicaInput,
    ReplicaNode, ReplicaNodeConfig, StoreCores, StoreThreads, StoreTuning, format_device, inspect,
};
use uuid::Uuid;
use wire_store::{BLOCK_BYTES, EntryHeader, ObjectId, Operation, crc32c};

const GROUP: u32 = 5;
const SECTOR: usize = 512;
const DISK_BYTES: u64 = 8 << 20;
/// Their headers together are no whole number of blocks.
const WRITES: u32 = 7;
const OBJECT: ObjectId = ObjectId { group: GROUP, volume: 1, index: 0, suffix: 0 };

type Writes = Arc<Mutex<Vec<(RequestFlags, Vec<u8>)>>>;

/// A disk that takes requests as direct I/O does: each slice but the last ends at a page. It records what is
/// written.
struct PagedDisk {
    disk: CrashDisk,
    atomic_write_blocks: u32,
    writes: Writes,
}

struct PagedChannel {
    inner: BoxedChannel,
    writes: Writes,
}

impl Bdev for PagedDisk {
    fn product_name(&self) -> &'static str {
        self.disk.product_name()
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry { atomic_write_blocks: self.atomic_write_blocks, ..self.disk.geometry() }
    }

    fn durability(&self) -> Durability {
        self.disk.durability()
    }

    fn supports(&self, op: Op) -> bool {
        self.disk.supports(op)
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(PagedChannel { inner: self.disk.open(core)?, writes: self.writes.clone() }))
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits { virtual_boundary: 4096, ..IoLimits::NONE }
    }
}

impl block_io::Channel for PagedChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.iter() {
            if let (Op::Write, Payload::Data(data)) = (request.op, &request.payload) {
                let mut bytes = vec![0; data.len()];
                data.copy_to(0, &mut bytes);
                self.writes.lock().unwrap().push((request.flags, bytes));
            }
        }
        self.inner.submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        self.inner.poll(sink)
    }

    fn deadline(&self) -> Option<u64> {
        self.inner.deadline()
    }
}

/// How many writes were answered, what a read found, and what the map is asked.
#[derive(Default)]
struct Answers {
    written: u32,
    read: Option<Arc<[u8]>>,
    proposal: Option<Arc<GroupConfig>>,
}

struct AnswersOutbox(Arc<Mutex<Answers>>);

impl Outbox for AnswersOutbox {
    fn send(&mut self, _group: u32, _to: ReplicaId, _message: ReplicaMessage) {}

    fn reply(&mut self, _group: u32, _client: u64, _number: u64, reply: ClientReply) {
        let mut answers = self.0.lock().unwrap();
        match reply {
            ClientReply::Written => answers.written += 1,
            ClientReply::Data(data) => answers.read = Some(data),
            reply => panic!("{reply:?}"),
        }
    }

    fn propose(&mut self, _group: u32, config: Arc<GroupConfig>) {
        self.0.lock().unwrap().proposal = Some(config);
    }
}

struct LoneNode {
    process: Process,
    node: std::rc::Rc<ReplicaNode>,
    replica: ReplicaHandle,
    answers: Arc<Mutex<Answers>>,
    sent: u32,
    writes: Writes,
    threads: StoreThreads,
}

impl LoneNode {
    /// A node with the only replica of a group, on an empty disk. It overwrites blocks in place with the
    /// option, or if the disk promises atomic writes.
    fn start(disk: &CrashDisk, random: &mut WyRand, in_place: bool, atomic_write_blocks: u32) -> LoneNode {
        let settings = ReplicaSettings { in_place, ..ReplicaSettings::default() };
        let process = Process::start(&disk.clone().into(), &VirtualClock::default(), random);
        let checksum_cache_bytes = StoreTuning::default().checksum_cache_bytes;
        LoneNode::with_settings(disk, process, settings, atomic_write_blocks, None, checksum_cache_bytes)
    }

    fn with_settings(
        disk: &CrashDisk,
        mut process: Process,
        settings: ReplicaSettings,
        atomic_write_blocks: u32,
        log_bytes: Option<u64>,
        checksum_cache_bytes: u64,
    ) -> LoneNode {
        let writes = Writes::default();
        let paged = PagedDisk { disk: disk.clone(), atomic_write_blocks, writes: writes.clone() };
        process.registry.register("Paged", None, &[], Arc::new(paged)).unwrap();
        let (registry, core) = (process.registry.clone(), process.reactor.core());
        let answers = Arc::new(Mutex::new(Answers::default()));
        let outbox = answers.clone();
        let threads = process.threads();
        let of_node = threads.clone();
        let node = process.run(async move {
            let (cores, job) = (StoreCores::This(&core), JobHandle::standalone());
            let replicas = ReplicaFormat {
                cluster: Uuid::nil(),
                node: Uuid::nil(),
                groups: vec![GROUP],
                are_new: true,
                generation: 0,
                spare: 0,
            };
            let options = FormatOptions { replicas: Some(replicas), log_bytes, ..FormatOptions::default() };
            format_device(&registry, "Paged", &cores, options, &job).await.unwrap();
            let config = ReplicaNodeConfig {
                name: "test",
                id: ReplicaId(0),
                settings,
                pools: vec![(0..u32::MAX, PoolOptions { in_sync_min: 1, class: PoolClass::Disk })],
                boot: [1; 16],
                tuning: StoreTuning { checksum_cache_bytes, ..StoreTuning::default() },
                threads: of_node,
                outbox: Arc::new(move |_, _| Box::new(AnswersOutbox(outbox.clone()))),
            };
            ReplicaNode::open(&registry, "Paged", &cores, config, &job).await.unwrap()
        });
        let replica = node.replica(GROUP).unwrap();
        let config = GroupConfig { epoch: 1, primary: ReplicaId(0), in_sync: vec![ReplicaId(0)] };
        replica.send(ReplicaInput::Map(Arc::new(config)));
        let node = std::rc::Rc::new(node);
        let mut lone = LoneNode { process, node, replica, answers, sent: 0, writes, threads };
        while lone.status().replica.unwrap().status.blocked.is_some() {
            let proposal = lone.answers.lock().unwrap().proposal.take();
            proposal.into_iter().for_each(|config| _ = lone.replica.send(ReplicaInput::Map(config)));
        }
        lone
    }

    fn status(&mut self) -> PartitionStatus {
        let node = self.node.clone();
        self.process.run(async move { node.status().await }).unwrap().remove(0)
    }

    fn send(&mut self, object: ObjectId, offset: u32, data: Vec<u8>) {
        self.sent += 1;
        let header = EntryHeader {
            client: 1,
            client_number: self.sent.into(),
            data_crc32c: crc32c(&data),
            ..EntryHeader::new(Operation::Write, object, offset, data.len() as u32)
        };
        self.replica.send(ReplicaInput::Request(ClientRequest::Write { header, data: data.into() }));
    }

    /// Writes blocks of this byte, all at once. Returns what reached the device until all were answered.
    fn write_together(&mut self, byte: u8) -> Vec<(RequestFlags, Vec<u8>)> {
        while self.status().stats.entries_in_place < self.sent.into() {}
        self.writes.lock().unwrap().clear();
        for block in 0..WRITES {
            self.send(OBJECT, block * BLOCK_BYTES as u32, vec![byte + block as u8; BLOCK_BYTES]);
        }
        while self.answers.lock().unwrap().written < self.sent {
            self.process.turn();
        }
        self.writes.lock().unwrap().clone()
    }
}

/// Each entry has its place, its header and its data, one after the other, and zeroes up to the next sector.
fn check_entries(written: &[u8], byte: u8, in_place: bool) {
    let data_bytes = if in_place { 0 } else { BLOCK_BYTES };
    let entry_bytes = EntryHeader::SIZE + data_bytes;
    let (entries, padding) = written.split_at(WRITES as usize * entry_bytes);
    assert_eq!(written.len() % SECTOR, 0);
    assert!(padding.len() < SECTOR && padding.iter().all(|byte| *byte == 0), "{padding:?}");
    let first = u64::from_le_bytes(written[96..104].try_into().unwrap());
    let log: [u8; 16] = written[104..120].try_into().unwrap();
    for (index, entry) in entries.chunks(entry_bytes).enumerate() {
        let (header, data) = entry.split_at(EntryHeader::SIZE);
        let header = EntryHeader::decode(header, log, first + (index * entry_bytes) as u64).unwrap();
        let expected = vec![byte + index as u8; BLOCK_BYTES];
        assert_eq!((header.offset as usize, header.in_place), (index * BLOCK_BYTES, in_place));
        assert_eq!(header.data_crc32c, crc32c(&expected));
        assert!(in_place || data == expected);
    }
}

fn lengths(written: &[(RequestFlags, Vec<u8>)]) -> Vec<usize> {
    written.iter().map(|(_, bytes)| bytes.len()).collect()
}

fn new_disk() -> CrashDisk {
    CrashDisk::create(&Registry::new(), "Disk", DISK_BYTES / SECTOR as u64, SECTOR as u32, 1).unwrap()
}

/// Writes until a checkpoint has the object, which is when the log is half full: then blocks are overwritten
/// in place.
fn overwrite_in_place(node: &mut LoneNode) -> Option<Vec<(RequestFlags, Vec<u8>)>> {
    (0..100).find_map(|_| {
        let before = node.status().stats;
        let written = node.write_together(50);
        let after = node.status().stats;
        (after.entries_overwriting > before.entries_overwriting).then(|| {
            assert_eq!(after.log_writes, before.log_writes + 1);
            assert_eq!(after.entries_overwriting, before.entries_overwriting + u64::from(WRITES));
            written
        })
    })
}

#[test]
fn entries_that_are_appended_together_are_one_request_to_the_device() {
    let mut random = WyRand::new(1);
    let disk = new_disk();
    let mut node = LoneNode::start(&disk, &mut random, true, 0);

    let written = node.write_together(10);
    assert_eq!(written.len(), 1, "{:?}", lengths(&written));
    check_entries(&written[0].1, 10, false);

    let written = overwrite_in_place(&mut node).unwrap();
    let headers: Vec<_> = written.iter().filter(|(_, bytes)| bytes.len() % BLOCK_BYTES != 0).collect();
    assert_eq!(headers.len(), 1, "{:?}", lengths(&written));
    check_entries(&headers[0].1, 50, true);

    let LoneNode { process, .. } = node;
    process.discard();
    let mut process = Process::start(&disk.into(), &VirtualClock::default(), &mut random);
    let (registry, core) = (process.registry.clone(), process.reactor.core());
    let contents = process.run(async move { inspect(&core, &registry, "Disk", true, |_| ()).await }).unwrap();
    assert_eq!(contents.problems, Vec::<String>::new());
    process.discard();
}

/// The option is for devices that do not report what they do; those that do are asked for it with each write.
#[test]
fn blocks_are_overwritten_in_place_where_the_device_promises_atomic_writes() {
    for (in_place, atomic_write_blocks, overwrites) in
        [(false, 0, false), (false, 7, false), (false, 8, true), (true, 0, true), (true, 64, true)]
    {
        let mut node = LoneNode::start(&new_disk(), &mut WyRand::new(1), in_place, atomic_write_blocks);
        let written = overwrite_in_place(&mut node);
        assert_eq!(written.is_some(), overwrites, "{in_place} {atomic_write_blocks}");
        let is_atomic = |(flags, bytes): &&(RequestFlags, Vec<u8>)| {
            assert!(!flags.contains(RequestFlags::ATOMIC) || bytes.len() == BLOCK_BYTES);
            flags.contains(RequestFlags::ATOMIC | RequestFlags::FUA)
        };
        let atomic = written.iter().flatten().filter(is_atomic).count();
        let expected = if overwrites && atomic_write_blocks >= 8 { WRITES as usize } else { 0 };
        assert_eq!(atomic, expected, "{in_place} {atomic_write_blocks}");
        node.process.discard();
    }
}

/// Those that changed are in memory until a checkpoint: with one block of the table, that of 1,024 blocks and
/// one batch.
#[test]
fn many_changed_checksums_of_a_replica_make_a_checkpoint_however_large_the_log_is() {
    let bytes = 64 << 20;
    let disk = CrashDisk::create(&Registry::new(), "Disk", bytes / SECTOR as u64, SECTOR as u32, 1).unwrap();
    let settings = ReplicaSettings { checkpoint_entries: 8192, ..ReplicaSettings::default() };
    let process = Process::start(&disk.clone().into(), &VirtualClock::default(), &mut WyRand::new(1));
    let mut node = LoneNode::with_settings(&disk, process, settings, 0, Some(24 << 20), 0);
    let mut checkpoints = Vec::new();
    for round in 0..40 {
        // An object has 32 such parts.
        let object = ObjectId { index: round / 32, ..OBJECT };
        node.send(object, round % 32 * (128 << 10), vec![round as u8; 128 << 10]);
        while node.status().stats.entries_in_place < node.sent.into() {}
        checkpoints.push(node.status().stats.checkpoints);
    }
    assert_eq!((checkpoints[31], checkpoints[34], checkpoints[39]), (0, 1, 1), "{checkpoints:?}");
    node.process.discard();
}

/// Those of 256 blocks wake it once; fewer are sent with what is sent anyway. Reads find them.
#[test]
fn checksums_of_overwritten_blocks_wake_the_non_priority_thread_together() {
    let disk = new_disk();
    let mut random = WyRand::new(1);
    let process = Process::prioritized(&disk.clone().into(), &VirtualClock::default(), &mut random);
    let settings = ReplicaSettings { in_place: true, ..ReplicaSettings::default() };
    let cache_bytes = StoreTuning::default().checksum_cache_bytes;
    let mut node = LoneNode::with_settings(&disk, process, settings, 0, None, cache_bytes);
    overwrite_in_place(&mut node).unwrap();
    let StoreThreads::Prioritized(threads) = node.threads.clone() else { panic!("they are prioritized") };
    let all = || threads.wakes().into_iter().map(|(_, count)| count).sum::<u64>();
    let of_checksums = || threads.wakes().into_iter().find(|(cause, _)| *cause == "other").unwrap().1;
    let (before, wakes) = (node.status().stats, all());
    let count = 100;
    for round in 0..count {
        node.write_together(round);
    }
    let after = node.status().stats;
    let overwritten = after.entries_overwriting - before.entries_overwriting;
    assert_eq!(overwritten, u64::from(count) * u64::from(WRITES), "all are in place without a batch");
    // What else wakes it are checkpoints.
    let checkpoints = after.checkpoints - before.checkpoints;
    assert!(all() - wakes <= checkpoints + overwritten / 256, "{:?} {checkpoints}", threads.wakes());
    assert!(of_checksums() <= overwritten / 256, "{:?}", threads.wakes());
    let length = WRITES * BLOCK_BYTES as u32;
    let read = ClientRequest::Read { client: 1, number: 1 << 32, object: OBJECT, offset: 0, length };
    node.replica.send(ReplicaInput::Request(read));
    let mut found = None;
    while found.is_none() {
        node.process.turn();
        found = node.answers.lock().unwrap().read.take();
    }
    let read = found.unwrap();
    let blocks = (count - 1..).zip(read.chunks(BLOCK_BYTES));
    blocks.for_each(|(byte, block)| assert!(block.iter().all(|found| *found == byte)));
    assert_eq!(node.status().stats.damaged_blocks, 0);
    node.process.discard();
}
