//! A shard: a logical group's log with the partition that has its objects, owned by one core.
//!
//! A write is appended to the log and acknowledged when that is durable. From then on reads find it in the
//! [`Overlay`], until the background task has written it in place ([`flusher`]); a checkpoint makes the
//! metadata durable and frees the log. A full log is backpressure: operations wait. If the device fails, or a
//! block is damaged, the shard fails: its operations end with an error, and nothing that was acknowledged is
//! overwritten. Opening it again applies the log.
//!
//! With a replica ([`replication`]), the replica decides what is appended, and an entry is committed when it
//! says so, not when it is durable here.
//!
//! [`ShardPoller`] takes [`ShardRequest`]s from a mailbox, so that the block devices of every core reach it.

mod append;
mod checksums;
mod copies;
mod device_watch;
mod flusher;
mod in_place;
mod listing;
pub(crate) mod load;
mod log_writes;
mod messages;
mod overlay;
mod placed;
mod reads;
pub(crate) mod replication;
mod room;
mod scrub;
pub(crate) mod scrub_state;
mod store_thread;
mod unplaced;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::Waker;

use bdev::{BdevChannel, Completion, Request};
use block_io::{Channel as _, Status};
use dma::Buffer;
use foldhash::{HashMap, HashSet};
use objects::{Partition, ReadPiece, SpaceNeed};
use oplog::{EntryPlace, Log};
use reactor::{Core, MailboxReceiver, Period, PollResult, Poller, Shutdown};
use slots::{Slab, Slot};
use wire_store::{BLOCK_BYTES, EntryHeader, ObjectId, Operation, Superblock};

use checksums::{BlockReader as _, ChecksumReads};
use device_watch::DeviceWatch;
use log_writes::LogWrite;
use messages::ShardUsers;
pub(crate) use messages::{ControlReply, Reply, ShardHandle, ShardOperation, ShardReply, ShardRequest};
use overlay::{EntryData, Overlay};
pub(crate) use placed::UNSETTLED_MAX;
use placed::{PlacedBlocks, PlacedWrite};
use reads::{DeviceRun, ReadState, RunRead};
use replication::Replication;
pub(crate) use room::UsedSpace;
use store_thread::StoreClient;
use unplaced::UnplacedMemory;

use crate::disks::{StoreDescriptors, StoreDisks};
use crate::tuning::StoreTuning;
use crate::{PartitionStatus, ShardStats, StoreError};
use flusher::BackgroundWork;

/// Requests that wait in a shard's mailbox, from all cores.
const MAILBOX: usize = 4096;
/// Requests taken from the mailbox in one poll.
const REQUESTS_PER_POLL: usize = 128;
/// How long an operation without memory waits at most until it is tried again.
const RETRY_NS: u64 = 1_000_000;
/// Of the entries of a log that is half full, this share is in place when a checkpoint frees them: a quarter.
const FREED_SHARE: u64 = 4;
/// What operations of a shard that failed end with.
const FAILED: Status = Status::INTERNAL_ERROR;
/// I/O of requests in flight on the device.
const IOS_MAX: u32 = 4096;

/// The state of a shard.
pub(crate) struct Shard {
    core: Core,
    channel: BdevChannel,
    block_bytes: u64,
    /// The logs' own device.
    log_channel: Option<LogChannel>,
    index: u32,
    pub(crate) partition: Partition,
    pub(crate) log: Log,
    /// First block of the log on the device.
    log_start: u64,
    /// A write is durable when the device's cache has it.
    is_volatile: bool,
    /// Difference between the time of day and the core's clock when the shard was opened.
    wall_clock_offset_ns: u64,
    overlay: Overlay,
    placed: PlacedBlocks,
    /// Operations that wait for room in the log or for space.
    deferred: VecDeque<ShardRequest>,
    /// Entries that were appended and not acknowledged, in their order; the last `unwritten` were not
    /// submitted.
    unacknowledged: VecDeque<UnacknowledgedEntry>,
    unwritten: usize,
    log_writes: usize,
    /// Entries that were acknowledged and are not in place, in their order.
    committed: VecDeque<CommittedEntry>,
    /// Memory of entries that are not in place.
    unplaced: UnplacedMemory,
    /// Since when the oldest of them waits, at the earliest.
    oldest_committed_ns: u64,
    /// Space of entries that are not applied to the partition.
    reserved: SpaceNeed,
    /// Such entries, by object.
    unapplied: HashMap<ObjectId, UnappliedEntries>,
    /// Sequences below are in place.
    applied_below: u64,
    ios: Slab<DeviceIo>,
    device_watch: DeviceWatch,
    /// Requests that the channel has not accepted.
    requests: Vec<Request>,
    completions: Vec<Completion>,
    /// Scratch of the plan of a read, empty between plans; and allocations of reads that are complete.
    pieces: Vec<ReadPiece>,
    spare_runs: Vec<Vec<DeviceRun>>,
    /// Reads that wait for blocks which are being written in place, or for a buffer.
    parked: Vec<ReadState>,
    /// They are not tried again before, because the non-priority thread had no memory, or this one's pool was
    /// full.
    parked_until_ns: u64,
    /// Reads that wait for blocks of the checksum table.
    checksums: ChecksumReads<RunRead>,
    /// Reads that wait until what the log has of them is in place: see
    /// [`replica::ReplicaSettings::reads_flush`].
    waiting_for_flush: Vec<ReadState>,
    reads_flush: bool,
    tuning: StoreTuning,
    /// Blocks that are being written in place.
    busy_blocks: HashSet<u64>,
    /// Counts batches written in place: a read that one overtook is repeated.
    generation: u64,
    /// Each read in flight holds a clone: a checkpoint waits for those that were planned before it.
    reading: Rc<()>,
    /// The background task, while it waits for work.
    background: Option<Waker>,
    /// The background task, while it waits for reads: it looks again after each poll.
    waits_for_readers: Option<Waker>,
    checkpoint_wanted: bool,
    /// Something was applied since the last checkpoint began.
    is_changed: bool,
    /// Gets the answer once the background task has ended.
    closing: Vec<Reply>,
    is_closing: bool,
    /// The background task has ended, and the non-priority thread has closed its channels.
    is_ended: bool,
    /// Why it failed, if it did: operations end with [`FAILED`].
    failed: Option<Arc<str>>,
    /// It failed because the device had no space, as a file on a full file system.
    is_out_of_space: bool,
    pub(crate) stats: ShardStats,
    /// The replica that owns log and objects.
    replication: Option<Box<Replication>>,
    /// The thread that has the blocks in place and their checksums, if it is not this one.
    store: Option<StoreClient>,
    used: Arc<UsedSpace>,
}

/// The channel of a device that has logs alone.
struct LogChannel {
    channel: BdevChannel,
    /// Requests that the channel has not accepted.
    requests: Vec<Request>,
}

/// How many entries of an object are not applied to the partition, and how many of them may give up space.
#[derive(Clone, Copy, Default)]
struct UnappliedEntries {
    all: u32,
    releasing: u32,
    /// Their data is in the log.
    logged: u32,
}

struct UnacknowledgedEntry {
    place: EntryPlace,
    header: EntryHeader,
    data: EntryData,
    /// What is written to the log; `None` once it is.
    bytes: Option<EntryBytes>,
    need: SpaceNeed,
    reply: Reply,
    /// The block that the data overwrites, if it is not in the log.
    placed: Option<u64>,
    /// That data, until its write begins.
    to_place: Option<Buffer>,
}

/// What the log gets of an entry.
enum EntryBytes {
    /// Header, data and padding.
    All(Buffer),
    /// The header; the data goes in place.
    Header([u8; EntryHeader::SIZE]),
}

struct CommittedEntry {
    header: EntryHeader,
    data: EntryData,
    /// Of the entry in the log, and nearly those of its memory.
    bytes: u64,
    need: SpaceNeed,
    /// The last operation of a part of a copied object: the session, and the number of the part.
    copied: Option<(u64, u32)>,
    /// The block that the data has overwritten already.
    placed: Option<u64>,
}

/// A request to the device, by the tag that it has.
enum DeviceIo {
    /// Of the log.
    Log(Rc<LogWrite>),
    /// Of a read.
    Read(ReadState),
    /// Of this block of the checksum table.
    Checksums(u64),
    /// Of a block before its entry is committed: the entry, the block and the checksum of its data.
    Placed(EntryPlace, u64, u32),
}

/// Drives a shard on its core.
struct ShardPoller {
    shard: Rc<RefCell<Shard>>,
    requests: MailboxReceiver<ShardRequest>,
    /// Dead once no handle is left.
    users: Weak<ShardUsers>,
}

/// Opens a shard on this core, which owns it from now on.
pub(crate) async fn start(
    core: &Core,
    descriptors: &StoreDescriptors,
    superblock: &Superblock,
    index: u32,
) -> Result<ShardHandle, StoreError> {
    let (shard, disks) = load::open(core, descriptors, superblock, index).await?;
    run(core, descriptors, index, shard, disks).await
}

/// Starts the tasks of an open shard.
async fn run(
    core: &Core,
    descriptors: &StoreDescriptors,
    index: u32,
    shard: Rc<RefCell<Shard>>,
    disks: StoreDisks,
) -> Result<ShardHandle, StoreError> {
    if let Some(thread) = descriptors.threads.of_partition(index) {
        store_thread::attach(core, &shard, descriptors, thread).await?;
    }
    shard.borrow_mut().update_room();
    let (sector, used) = (shard.borrow().log.sector(), shard.borrow().used.clone());
    let (sender, requests) = core.mailbox(MAILBOX);
    if !core.spawn(flusher::run(shard.clone(), disks)) {
        return Err(StoreError::Closed);
    }
    let users = Arc::new(ShardUsers(sender.clone()));
    let poller = ShardPoller { shard, requests, users: Arc::downgrade(&users) };
    core.add_poller(Box::new(poller), Period::EveryTurn);
    Ok(ShardHandle { sender, sector, used, users })
}

impl Shard {
    fn new(
        core: &Core,
        (channel, log_channel): (BdevChannel, Option<BdevChannel>),
        index: u32,
        partition: Partition,
        log: Log,
        log_start: u64,
        spare: Buffer,
    ) -> Shard {
        let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let wall_ns = since_1970.map_or(0, |time| time.as_nanos() as u64);
        Shard {
            block_bytes: channel.block_size().into(),
            channel,
            log_channel: log_channel.map(|channel| LogChannel { channel, requests: Vec::new() }),
            index,
            partition,
            applied_below: log.sequences().start,
            log,
            log_start,
            is_volatile: false,
            wall_clock_offset_ns: wall_ns.wrapping_sub(core.now_ns()),
            overlay: Overlay::default(),
            placed: PlacedBlocks::default(),
            deferred: VecDeque::new(),
            unacknowledged: VecDeque::new(),
            unwritten: 0,
            log_writes: 0,
            committed: VecDeque::new(),
            unplaced: UnplacedMemory::new(core),
            oldest_committed_ns: 0,
            reserved: SpaceNeed::default(),
            unapplied: HashMap::default(),
            ios: Slab::with_capacity(IOS_MAX),
            device_watch: DeviceWatch::default(),
            requests: Vec::new(),
            completions: Vec::new(),
            pieces: Vec::new(),
            spare_runs: Vec::new(),
            parked: Vec::new(),
            parked_until_ns: 0,
            checksums: ChecksumReads::new(spare),
            waiting_for_flush: Vec::new(),
            reads_flush: false,
            tuning: StoreTuning::default(),
            busy_blocks: HashSet::default(),
            generation: 0,
            reading: Rc::default(),
            background: None,
            waits_for_readers: None,
            checkpoint_wanted: false,
            is_changed: false,
            closing: Vec::new(),
            is_closing: false,
            is_ended: false,
            failed: None,
            is_out_of_space: false,
            stats: ShardStats::default(),
            replication: None,
            store: None,
            used: Arc::default(),
            core: core.clone(),
        }
    }

    /// Executes a request, or defers it.
    fn execute(&mut self, request: ShardRequest) {
        if self.failed.is_some() {
            match request.operation {
                ShardOperation::Describe => return request.reply.send_description(self.describe()),
                ShardOperation::Close => return self.close(request.reply),
                _ => {}
            }
            return request.reply.send(FAILED, None);
        }
        match request.operation {
            ShardOperation::Read { object, offset, length } if self.replication.is_none() => {
                self.read(object, offset, length, request.reply);
            }
            ShardOperation::Close => self.close(request.reply),
            ShardOperation::Describe => request.reply.send_description(self.describe()),
            ShardOperation::Replica(input) => self.take_input(*input),
            // Without a replica that acts it is dropped, which its owner sees.
            ShardOperation::Scrub { after, answer } => self.add_scrub(after, answer),
            ShardOperation::Objects { volume } => request.reply.send_objects(self.objects_of(volume)),
            // Only the replica changes its objects.
            _ if self.replication.is_some() => request.reply.send(Status::INVALID_FIELD, None),
            _ if self.is_closing => request.reply.send(Status::NAMESPACE_NOT_READY, None),
            _ if !self.deferred.is_empty() => self.deferred.push_back(request),
            _ => self.change(request),
        }
    }

    /// Appends an operation that changes an object to the log.
    fn change(&mut self, mut request: ShardRequest) {
        let header = match request.operation.header() {
            Some(header) => header,
            None => return request.reply.send(Status::INVALID_FIELD, None),
        };
        let unapplied = self.unapplied.get(&header.object).copied().unwrap_or_default();
        if matches!(header.operation, Operation::WriteZeroes | Operation::Remove)
            && unapplied.all == 0
            && self.partition.onode(header.object).is_none()
        {
            // There is no such object: it reads as zeroes already.
            return request.reply.send(Status::SUCCESS, None);
        }
        let Ok(need) = self.partition.space_need(&header, unapplied.releasing > 0) else {
            return request.reply.send(Status::INVALID_FIELD, None);
        };
        if !self.partition.space_use().has_room(self.reserved, need) {
            // Space may be reserved in vain, or free after the next checkpoint.
            if self.is_settled() {
                return request.reply.send(Status::CAPACITY_EXCEEDED, None);
            }
            return self.defer(request);
        }
        let entry_bytes = oplog::entry_bytes(header.data_bytes(), self.log.sector());
        if entry_bytes > self.log.capacity() {
            return request.reply.send(Status::INVALID_FIELD, None);
        }
        if self.log.room() < entry_bytes {
            return self.defer(request);
        }
        // A batch in place makes room, and tries again.
        if self.unplaced.is_full_for(entry_bytes) {
            return self.deferred.push_back(request);
        }
        // Without a buffer, it is tried again in the next poll.
        let Some(buffer) = request.take_entry(self.core.pool(), entry_bytes as usize) else {
            return self.deferred.push_back(request);
        };
        let sequence = self.log.sequences().end;
        let header = EntryHeader {
            version: sequence,
            sequence,
            epoch: 1,
            commit_point: sequence - 1,
            mtime_ns: self.core.now_ns().wrapping_add(self.wall_clock_offset_ns),
            ..header
        };
        self.append(header, buffer, need, request.reply);
    }

    /// No space is reserved, and no checkpoint frees any, one that is in progress included.
    fn is_settled(&self) -> bool {
        let is_freed = !self.is_changed && !self.partition.is_in_checkpoint();
        self.unacknowledged.is_empty() && self.committed.is_empty() && is_freed
    }

    fn defer(&mut self, request: ShardRequest) {
        self.checkpoint_wanted = true;
        self.stats.deferred += 1;
        self.deferred.push_back(request);
        self.wake_background();
    }

    /// As many entries are committed as start a batch in place.
    fn has_enough_to_flush(&self) -> bool {
        self.committed.len() > self.tuning.flush_entries as usize
    }

    fn flush_after_ns(&self) -> u64 {
        self.tuning.flush_after.as_nanos() as u64
    }

    /// Committed entries go in place however few they are.
    fn is_flush_due(&self) -> bool {
        self.core.now_ns().saturating_sub(self.oldest_committed_ns) >= self.flush_after_ns()
    }

    /// What the background task does now, if anything.
    fn background_work(&self) -> Option<BackgroundWork> {
        if self.failed.is_some() {
            return Some(BackgroundWork::End);
        }
        if let Some(replication) = &self.replication {
            return self.replica_work(replication);
        }
        let is_low = self.log.room() < self.log.capacity() / 2;
        let is_wanted = is_low || self.checkpoint_wanted || self.is_closing || self.unplaced.is_half_full();
        // While entries keep coming, those that are in place are freed before more go there: else the log
        // fills up, and every write waits.
        let in_log = self.log.sequences();
        let freeable = self.applied_below - in_log.start;
        let is_freeable = is_low && freeable * FREED_SHARE >= in_log.end - in_log.start;
        if self.is_changed && (is_freeable || self.has_many_changed_checksums()) {
            return Some(BackgroundWork::Checkpoint);
        }
        let is_enough = self.has_enough_to_flush() || is_wanted;
        if !self.committed.is_empty() && (is_enough || self.is_flush_due()) {
            return Some(BackgroundWork::Flush);
        }
        if self.is_changed && is_wanted {
            return Some(BackgroundWork::Checkpoint);
        }
        let is_idle = self.unacknowledged.is_empty() && self.deferred.is_empty();
        (self.is_closing && is_idle).then_some(BackgroundWork::End)
    }

    /// Ends the shard. That is answered once the background task has ended, which of a shard that failed
    /// writes nothing.
    fn close(&mut self, reply: Reply) {
        self.closing.push(reply);
        if !self.is_closing {
            self.is_closing = true;
            self.end_scrubs();
            self.wake_background();
        }
        if self.is_ended {
            self.answer_closing();
        }
    }

    /// The background task ended.
    fn ended(&mut self) {
        self.is_ended = true;
        self.answer_closing();
    }

    fn answer_closing(&mut self) {
        let status = if self.failed.is_some() { FAILED } else { Status::SUCCESS };
        self.closing.drain(..).for_each(|reply| reply.send(status, None));
    }

    fn wake_background(&mut self) {
        self.background.take().into_iter().for_each(Waker::wake);
    }

    /// Tries again what waited until an entry was committed.
    fn resume_waiting(&mut self) {
        for read in std::mem::take(&mut self.placed.waiting) {
            self.plan(read);
        }
    }

    /// Tries again what waited for a batch in place or for a checkpoint.
    fn resume(&mut self) {
        let waiting = std::mem::take(&mut self.waiting_for_flush);
        for read in std::mem::take(&mut self.parked).into_iter().chain(waiting) {
            self.plan(read);
        }
        self.resume_deferred();
    }

    fn resume_deferred(&mut self) {
        for _ in 0..self.deferred.len() {
            let Some(request) = self.deferred.pop_front() else { break };
            let waiting = self.deferred.len();
            self.change(request);
            if self.deferred.len() > waiting {
                // It waits still: keep the order.
                self.deferred.rotate_right(1);
                break;
            }
        }
    }

    /// The device failed, or a block is damaged.
    fn fail(&mut self, error: &StoreError) {
        if self.failed.is_some() {
            return;
        }
        let name = self.channel.device().name().to_string();
        log::error!(
            "store on {name}, partition {}: {error}; its operations fail until it is opened again",
            self.index
        );
        self.failed = Some(error.to_string().into());
        self.is_out_of_space =
            matches!(error, StoreError::Io { status, .. } if *status == Status::CAPACITY_EXCEEDED);
        let deferred = std::mem::take(&mut self.deferred).into_iter().map(|request| request.reply);
        let unacknowledged = std::mem::take(&mut self.unacknowledged).into_iter().map(|entry| entry.reply);
        let waiting_for_flush = std::mem::take(&mut self.waiting_for_flush);
        let parked = std::mem::take(&mut self.parked).into_iter().chain(waiting_for_flush);
        let parked = parked.map(ReadState::into_reply);
        let waiting = std::mem::take(&mut self.placed.waiting).into_iter().map(ReadState::into_reply);
        self.placed.to_write.clear();
        let unverified = self.checksums.take_all().map(RunRead::into_reply);
        let replies = deferred.chain(unacknowledged).chain(parked).chain(waiting).chain(unverified);
        replies.for_each(|reply| reply.send(FAILED, None));
        self.unwritten = 0;
        self.end_scrubs();
        self.wake_background();
    }

    fn complete(&mut self, completion: Completion) {
        let Some(io) = self.ios.remove(Slot::from_bits(completion.tag().0)) else { return };
        match io {
            DeviceIo::Log(write) => {
                let status = completion.status();
                if !status.is_success() {
                    let offset = completion.request().lba * self.log_block_bytes();
                    self.fail(&StoreError::Io { what: "write to the log", offset, status });
                }
                write.requests_left.set(write.requests_left.get() - 1);
                if write.requests_left.get() == 0 {
                    self.log_writes -= 1;
                    if self.failed.is_none() {
                        self.headers_written(&write.places);
                    }
                }
            }
            DeviceIo::Placed(place, block, data_crc32c) => {
                self.placed_written(place, block, data_crc32c, &completion)
            }
            DeviceIo::Read(read) => self.read_completed(read, completion),
            DeviceIo::Checksums(block) => self.checksums_read(block, completion),
        }
    }

    fn poll(&mut self, requests: &mut MailboxReceiver<ShardRequest>, now_ns: u64) -> usize {
        let mut work = 0;
        // Operations that wait for memory; those that wait for space are tried again after a checkpoint.
        if !self.deferred.is_empty() && !self.checkpoint_wanted {
            self.resume_deferred();
        }
        if self.resumes_parked() && now_ns >= self.parked_until_ns {
            self.resume();
        }
        self.resume_unverified();
        work += self.take_store_replies();
        while work < REQUESTS_PER_POLL {
            let Some(request) = requests.receive() else { break };
            self.execute(request);
            work += 1;
        }
        work += self.run_replica(now_ns);
        self.submit();
        let mut completions = std::mem::take(&mut self.completions);
        work += self.channel.poll(&mut completions);
        if let Some(log) = &mut self.log_channel {
            work += log.channel.poll(&mut completions);
        }
        if !completions.is_empty() {
            self.device_watch.completed();
        }
        completions.drain(..).for_each(|completion| self.complete(completion));
        self.completions = completions;
        self.watch_device(now_ns);
        if work > 0 {
            self.run_replica(now_ns);
            self.submit();
        }
        if self.background.is_some() && self.background_work().is_some() {
            self.wake_background();
        }
        self.waits_for_readers.take().into_iter().for_each(Waker::wake);
        work
    }

    /// Looks whether the device hangs.
    fn watch_device(&mut self, now_ns: u64) {
        let has_requests = !self.ios.is_empty() && self.failed.is_none();
        let Some(hangs) = self.device_watch.observe(has_requests, now_ns) else { return };
        let name = self.channel.device().name();
        let index = self.index;
        match (hangs, &mut self.replication) {
            (false, None) => log::warn!("store on {name}, partition {index}: the device answers again"),
            (true, None) => {
                log::warn!("store on {name}, partition {index}: the device answers nothing for 10 s")
            }
            (false, Some(replication)) => {
                log::warn!("store on {name}, partition {index}: the device answers again: its replica stays");
                replication.device_hangs(false);
            }
            (true, Some(replication)) => {
                log::warn!(
                    "store on {name}, partition {index}: the device answers nothing for 10 s: its replica \
                     gives its place to another one, if enough others are in sync"
                );
                replication.device_hangs(true);
            }
        }
    }

    /// Submits what the devices are to do.
    fn submit(&mut self) {
        self.submit_log_writes();
        self.submit_placed_writes();
        if let Some(store) = &mut self.store {
            store.send_unsent();
        }
        if !self.requests.is_empty() {
            self.channel.submit(&mut self.requests);
        }
        if let Some(log) = self.log_channel.as_mut().filter(|log| !log.requests.is_empty()) {
            log.channel.submit(&mut log.requests);
        }
    }

    /// Whether the devices have all requests.
    fn is_submitted(&self) -> bool {
        self.requests.is_empty() && self.log_channel.as_ref().is_none_or(|log| log.requests.is_empty())
    }

    /// Whether the devices have nothing to do, and no read waits for them.
    fn is_quiet(&self) -> bool {
        let has_unsent = self.store.as_ref().is_some_and(StoreClient::has_unsent);
        self.ios.is_empty() && self.is_submitted() && self.checksums.is_empty() && !has_unsent
    }

    /// Whether a poll tries parked reads again; else a batch in place does.
    fn resumes_parked(&self) -> bool {
        self.busy_blocks.is_empty() && !self.parked.is_empty()
    }

    fn deadline(&self) -> Option<u64> {
        if self.store.as_ref().is_some_and(StoreClient::has_replies) {
            return Some(0);
        }
        if !self.is_submitted() {
            return Some(0);
        }
        let parked = self.resumes_parked().then_some(self.parked_until_ns);
        let flush = (!self.committed.is_empty()).then(|| self.oldest_committed_ns + self.flush_after_ns());
        // What waits for memory, while no batch in place will try it again.
        let waits = !self.deferred.is_empty() && !self.checkpoint_wanted && self.unplaced.bytes() == 0;
        let waits = waits || (self.unwritten > 0 && self.log_writes == 0) || self.checksums.is_blocked();
        let waits = waits || self.store.as_ref().is_some_and(StoreClient::has_unsent);
        let retry = waits.then(|| self.core.now_ns() + RETRY_NS);
        let replica =
            self.replication.as_ref().and_then(|replication| replication.deadline(self.core.now_ns()));
        let log = self.log_channel.as_ref().and_then(|log| log.channel.deadline());
        let watch = self.device_watch.deadline();
        let device = self.channel.deadline().into_iter().chain(log).chain(watch);
        device.chain(flush).chain(parked).chain(retry).chain(replica).min()
    }

    fn describe(&self) -> PartitionStatus {
        let mut stats = self.stats;
        let checksum_cache_bytes = match &self.store {
            Some(store) => {
                let (hits, misses) = store.checksum_counts();
                stats.checksum_hits += hits;
                stats.checksum_misses += misses;
                store.checksum_cache_bytes()
            }
            None => (self.partition.checksums().cached_blocks() * BLOCK_BYTES) as u64,
        };
        PartitionStatus {
            space: self.partition.space_use(),
            log_bytes: self.log.capacity(),
            log_used_bytes: self.log.capacity() - self.log.room(),
            entries_to_place: self.committed.len() as u64,
            failed: self.failed.clone(),
            checksum_cache_bytes,
            is_out_of_space: self.is_out_of_space,
            stats,
            replica: self.replication.as_ref().map(|replication| replication.describe()),
        }
    }

    /// The first object after another, those of entries that are not in place included.
    fn object_after(&self, after: Option<ObjectId>) -> Option<ObjectId> {
        let stored = self.partition.objects().map(|onode| onode.id);
        let committed = self.committed.iter().map(|entry| entry.header.object);
        stored.chain(committed).filter(|object| after.is_none_or(|after| *object > after)).min()
    }

    /// The indices of a volume's objects, those of entries that are not in place included.
    fn objects_of(&self, volume: u64) -> Vec<ObjectId> {
        let stored = self.partition.objects().map(|onode| onode.id);
        let committed = self.committed.iter().map(|entry| entry.header.object);
        let unacknowledged = self.unacknowledged.iter().map(|entry| entry.header.object);
        let of_volume = stored.chain(committed).chain(unacknowledged).filter(|id| id.volume == volume);
        of_volume.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    }
}

impl Poller for ShardPoller {
    fn name(&self) -> &str {
        "store shard"
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        let mut shard = self.shard.borrow_mut();
        let work = shard.poll(&mut self.requests, now_ns);
        let is_unused = shard.is_closing && self.users.strong_count() == 0;
        if is_unused && shard.is_quiet() && self.requests.is_empty() {
            return PollResult::Finished;
        }
        PollResult::from_count(work)
    }

    fn deadline(&self) -> Option<u64> {
        // What was sent after the last poll has woken nothing.
        if self.requests.is_empty() { self.shard.borrow().deadline() } else { Some(0) }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        let shard = self.shard.borrow();
        let is_idle = shard.is_quiet() && self.requests.is_empty();
        if is_idle { Shutdown::Done } else { Shutdown::Draining }
    }
}
