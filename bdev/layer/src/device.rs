//! The [`Bdev`] trait that modules implement, and the registered [`BlockDevice`].

use std::any::Any;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use block_io::{Op, ProtectionFlags, Status};
use reactor::blocking;
use reservations::{ReservedDevice, access};
use uuid::Uuid;
use wire_nvme::protection::MetadataFormat;

use crate::claims::DeviceClaims;
use crate::fair_queue::FairQueue;
use crate::qos::{DeviceQos, RateLimits};
use crate::range_locks::RangeLocks;
use crate::scheduler::{RateLimited, Scheduler, SchedulerContext, SchedulerPolicy};
use crate::stacking::UpperOutcome;
use crate::stats::{StatsReset, StatsTable};
use crate::trace::Trace;
use crate::{
    Access, BdevError, BoxedChannel, ChannelStats, ClaimType, DeviceStats, Durability, Registry, Tenants,
};

/// Size, block size and alignment of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BdevGeometry {
    /// Size of a logical block in bytes, interleaved metadata included.
    pub block_size: u32,
    /// Number of logical blocks.
    pub blocks: u64,
    /// Metadata of a block; interleaved if `extended`.
    pub metadata: MetadataFormat,
    /// Size in bytes of writes that need no read-modify-write of the medium; at least `block_size`.
    pub physical_block_size: u32,
    /// I/O that crosses a multiple of this many blocks is slower; 0 for no boundary.
    pub optimal_io_boundary_blocks: u32,
    /// Writes are whole multiples of this many blocks, at multiples of them, and fail otherwise; 1 for any.
    pub write_unit_blocks: u32,
    /// Whether the device has a volatile write cache: a completed write without FUA may be lost at a power
    /// failure until a flush completes.
    pub write_cache: bool,
    /// Required alignment of buffer addresses in bytes, at most 4096; 1 where the device copies. Buffers of a
    /// pool always meet it.
    pub buffer_alignment: u32,
    /// Most blocks of a write with [`RequestFlags::ATOMIC`](block_io::RequestFlags::ATOMIC): after a power
    /// failure or an error all of its blocks are written or none, and no read sees a part of them. 0 where
    /// nothing is promised.
    pub atomic_write_blocks: u32,
    /// Such a write crosses no multiple of this many blocks; 0 for no boundary.
    pub atomic_write_boundary_blocks: u32,
    /// Least blocks of such a write if its length has to be a power of two, and its first block a multiple of
    /// its length, as the Linux kernel wants it; 0 for any length, anywhere.
    pub atomic_write_unit_min_blocks: u32,
}

impl BdevGeometry {
    /// No boundary, no write cache, no atomic writes, physical blocks of `block_size`, and a buffer alignment
    /// of 4096.
    pub const fn new(block_size: u32, blocks: u64) -> BdevGeometry {
        BdevGeometry {
            block_size,
            blocks,
            metadata: MetadataFormat::NONE,
            physical_block_size: block_size,
            optimal_io_boundary_blocks: 0,
            write_unit_blocks: 1,
            write_cache: false,
            buffer_alignment: 4096,
            atomic_write_blocks: 0,
            atomic_write_boundary_blocks: 0,
            atomic_write_unit_min_blocks: 0,
        }
    }

    /// That of a part which begins at a block: boundaries and alignment of atomic writes are those of the
    /// whole device.
    pub(crate) fn at(self, first_lba: u64) -> BdevGeometry {
        let aligned_blocks = if self.atomic_write_unit_min_blocks > 0 { self.atomic_write_blocks } else { 0 };
        let is_aligned = first_lba.is_multiple_of(self.atomic_write_boundary_blocks.max(1).into())
            && first_lba.is_multiple_of(aligned_blocks.max(1).into());
        BdevGeometry { atomic_write_blocks: if is_aligned { self.atomic_write_blocks } else { 0 }, ..self }
    }

    /// Whether writes of this many bytes, at multiples of them, can have
    /// [`RequestFlags::ATOMIC`](block_io::RequestFlags::ATOMIC).
    pub fn is_atomic(&self, bytes: u32) -> bool {
        let block_bytes = u64::from(self.block_size);
        let boundary = u64::from(self.atomic_write_boundary_blocks) * block_bytes;
        let unit_min = u64::from(self.atomic_write_unit_min_blocks) * block_bytes;
        bytes.is_multiple_of(self.block_size)
            && (unit_min == 0 || (bytes.is_power_of_two() && u64::from(bytes) >= unit_min))
            && u64::from(self.atomic_write_blocks) * block_bytes >= bytes.into()
            && boundary.is_multiple_of(bytes.into())
    }

    /// Capacity in bytes, interleaved metadata included.
    pub const fn bytes(&self) -> u64 {
        self.blocks * self.block_size as u64
    }

    /// Data bytes of a block, without metadata.
    pub const fn data_block_size(&self) -> u32 {
        self.block_size - if self.metadata.extended { self.metadata.bytes as u32 } else { 0 }
    }

    /// Bytes of data of one block in a request with these flags.
    pub fn transfer_bytes(&self, flags: ProtectionFlags) -> u32 {
        self.metadata.transfer_bytes(self.data_block_size(), flags)
    }
}

/// What a module takes in one request. The layer divides requests beyond it, so that callers need not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoLimits {
    /// Most bytes of data.
    pub transfer_bytes_max: u32,
    /// Most slices of data.
    pub segments_max: u32,
    /// Alignment of each slice's address, and of the length of each slice but the last, in bytes: a power of
    /// two up to
    /// 4096. The layer copies what is misaligned.
    pub alignment: u32,
    /// Each slice but the first begins, and each but the last ends, at a multiple of this many bytes, a power
    /// of two; 1 for none (the Linux kernel's virtual boundary). An NVMe controller without SGLs needs its
    /// page size.
    pub virtual_boundary: u32,
    /// Requests do not cross multiples of this many blocks; 0 for no boundary.
    pub boundary_blocks: u32,
}

impl IoLimits {
    /// Any size, any number of slices, any alignment.
    pub const NONE: IoLimits = IoLimits {
        transfer_bytes_max: u32::MAX,
        segments_max: u32::MAX,
        alignment: 1,
        virtual_boundary: 1,
        boundary_blocks: 0,
    };
}

/// A value in a module's [`driver_specific`](Bdev::driver_specific) information, shaped like JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InfoValue {
    /// JSON's null.
    Null,
    /// A JSON boolean.
    Bool(bool),
    /// A JSON number.
    Number(u64),
    /// A JSON string.
    Text(String),
    /// A JSON array.
    List(Vec<InfoValue>),
    /// A JSON object, in the order of its members.
    Object(Vec<(&'static str, InfoValue)>),
}

impl From<&str> for InfoValue {
    fn from(text: &str) -> InfoValue {
        InfoValue::Text(text.to_string())
    }
}

/// What a module implements whose devices can be read by any thread.
pub trait BlockingReader: Send + Sync {
    /// Reads whole blocks at a byte of the device; `out` is aligned to the device's
    /// [`buffer_alignment`](BdevGeometry::buffer_alignment).
    ///
    /// # Errors
    /// The device's; [`Status::ABORT_REQUESTED`] once it is closed.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status>;
}

/// Default [`Bdev::depth`]: what a busy NVMe queue pair holds.
pub const DEPTH_DEFAULT: u32 = 1024;

/// The interface of a module: one object a device, called from any thread.
pub trait Bdev: Any + Send + Sync {
    /// The kind of device, as SPDK's `product_name`.
    fn product_name(&self) -> &'static str;

    /// Current geometry. Only `blocks` may change, announced by [`Registry::notify_resized`].
    ///
    /// [`Registry::notify_resized`]: crate::Registry::notify_resized
    fn geometry(&self) -> BdevGeometry;

    /// What a write survives once it was completed with FUA or flushed. A device on top of others has that of
    /// the weakest.
    fn durability(&self) -> Durability;

    /// Whether the module implements an operation. Where [`Op::Reset`] is not supported, the layer completes
    /// it once all I/O in flight has completed; where it is, it reaches the module even beyond
    /// [`depth`](Self::depth). [`Op::Compare`] never reaches a module: the layer supports it wherever reads
    /// are supported, and likewise [`Op::Copy`] and [`Op::Abort`]. For a module without [`Op::SeekData`] or
    /// [`Op::SeekHole`], all blocks are allocated.
    fn supports(&self, op: Op) -> bool;

    /// Opens an I/O channel on the core that will use it.
    ///
    /// Requests that reach it are validated: a supported operation, a range inside the device, data of the
    /// right length within [`io_limits`](Self::io_limits), writable for a read. Protected data, which only a
    /// device with metadata gets, may exceed the limits. A device that can shrink must check the range again.
    /// The range fields of an operation without a range are undefined.
    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError>;

    /// What the module takes in one request, read when a channel is opened. By default one slice of any size,
    /// aligned to the geometry's `buffer_alignment`.
    fn io_limits(&self) -> IoLimits {
        IoLimits { segments_max: 1, alignment: self.geometry().buffer_alignment, ..IoLimits::NONE }
    }

    /// The members of `driver_specific` in the result of `bdev_get_bdevs`.
    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        Vec::new()
    }

    /// What reads the device on any thread, if it can be read without a channel.
    fn blocking_reader(&self) -> Option<Arc<dyn BlockingReader>> {
        None
    }

    /// Whether reads leave the buffer unchanged. A target clears the buffer first, so that no old data leaks.
    fn reads_undefined(&self) -> bool {
        false
    }

    /// How the pages of [`Payload::Registered`](block_io::Payload::Registered) are aligned, in bytes, if
    /// reads and writes may have them: they are operations of the core's own io_uring. The layer does not
    /// divide such a request: it may exceed [`io_limits`](Self::io_limits).
    fn registered_page_alignment(&self) -> Option<u32> {
        None
    }

    /// Whether the device rejects writes, however it is opened.
    fn read_only(&self) -> bool {
        false
    }

    /// Maximum number of requests in flight on one channel.
    fn depth(&self) -> u32 {
        DEPTH_DEFAULT
    }

    /// Identity of a backing file that only one device may use: device and inode number. Registration fails
    /// if another device has the same.
    fn backing_id(&self) -> Option<(u64, u64)> {
        None
    }

    /// Fails what is in flight on all channels as soon as it can, and makes sure that none of it takes effect
    /// after a later request: a user of the device has been removed, and its I/O does not complete. Called by
    /// a thread that may wait for some seconds. Without it, the removal waits for the I/O in vain.
    fn abort_in_flight(&self) {}

    /// A base of the device was removed, on the thread that removed it. May be called twice for one removal.
    /// By default the device goes with it; a module that does without closes the base, so that it can go.
    ///
    /// What stands on what is known from [`Registry::stack`](crate::Registry::stack).
    fn on_base_removed(&self, _base: &BlockDevice) -> UpperOutcome {
        UpperOutcome::Removed
    }

    /// A base has another number of blocks. By default the device's is asked for again.
    fn on_base_resized(&self, _base: &BlockDevice) -> UpperOutcome {
        UpperOutcome::Resized
    }

    /// A device that the call which created this device names as a base has appeared, or is examined again.
    /// By default nothing. A module that did without it opens and [stacks](crate::Registry::stack) it; one
    /// that has it already does nothing. Must not block.
    ///
    /// # Errors
    /// Why it is not used; that is logged.
    fn on_base_returned(&self, _registry: &Registry, _base: &Arc<BlockDevice>) -> Result<(), BdevError> {
        Ok(())
    }

    /// Called once, at removal: resumes I/O that the module holds back, as it cannot be resumed later.
    fn on_removed(&self) {}

    /// Called once, after removal, when the last descriptor and channel are closed: releases claims and
    /// files.
    fn on_closed(&self) {}
}

/// A registered block device (SPDK's `spdk_bdev`).
///
/// It owns the module's object, the statistics and range locks that its channels share, and the claim. Made
/// by [`Registry::register`](crate::Registry::register), opened by [`Registry::open`](crate::Registry::open),
/// removed by [`Registry::unregister`](crate::Registry::unregister): from then on new I/O fails, and the
/// object lives until the last descriptor and channel are closed.
pub struct BlockDevice {
    name: String,
    /// Changed with the registry's lock.
    aliases: Mutex<Arc<[String]>>,
    uuid: Uuid,
    bdev: Arc<dyn Bdev>,
    /// Read by channels at each submit, written by the control plane.
    pub(crate) blocks: AtomicU64,
    /// [`REMOVED`], [`LIMITED`], [`SAMPLED`], [`TRACED`], [`READS_RESERVED`] and [`WRITES_RESERVED`]: read at
    /// each submit.
    pub(crate) state: AtomicU8,
    pub(crate) qos: DeviceQos,
    tenants: Tenants,
    /// Of channels that are opened from now on; `None` is the layer's own.
    scheduler_policy: Mutex<Option<Arc<dyn SchedulerPolicy>>>,
    pub(crate) stats: StatsTable,
    pub(crate) trace: Arc<Trace>,
    trace_id: u32,
    pub(crate) range_locks: RangeLocks,
    open_state: Mutex<OpenState>,
    /// An open has ended.
    changed: Condvar,
}

/// The device was unregistered.
pub(crate) const REMOVED: u8 = 1;
/// The device has a rate limit.
pub(crate) const LIMITED: u8 = 2;
/// Channels publish their requests in flight.
pub(crate) const SAMPLED: u8 = 4;
/// Channels record events.
pub(crate) const TRACED: u8 = 8;
/// A reservation denies reads to users that are no registrants.
pub(crate) const READS_RESERVED: u8 = 16;
/// A reservation denies writes and flushes to users that are no registrants.
pub(crate) const WRITES_RESERVED: u8 = 32;

#[derive(Default)]
struct OpenState {
    /// The opens at present, by number.
    opens: Vec<u64>,
    last_open: u64,
    claims: DeviceClaims,
    /// It is removed, and closed by all users.
    closed: bool,
    /// The module has released what it has.
    released: bool,
}

/// An open of a device, shared by its descriptor and the descriptor's channels; dropping the last closes it.
pub(crate) struct OpenHandle {
    pub(crate) device: Arc<BlockDevice>,
    pub(crate) writes: bool,
    /// Its user checks reservations itself, for each of its registrants.
    pub(crate) checks_reservations: bool,
    number: u64,
}

impl BlockDevice {
    pub(crate) fn new(
        name: &str,
        uuid: Option<Uuid>,
        aliases: &[String],
        bdev: Arc<dyn Bdev>,
        trace: &Arc<Trace>,
        tenants: &Tenants,
    ) -> BlockDevice {
        BlockDevice {
            name: name.to_string(),
            aliases: Mutex::new(aliases.into()),
            uuid: uuid.unwrap_or_else(Uuid::new_v4),
            blocks: AtomicU64::new(bdev.geometry().blocks),
            bdev,
            state: AtomicU8::new(0),
            qos: DeviceQos::default(),
            tenants: tenants.clone(),
            scheduler_policy: Mutex::new(None),
            stats: StatsTable::default(),
            trace_id: trace.next_device(),
            trace: trace.clone(),
            range_locks: RangeLocks::default(),
            open_state: Mutex::new(OpenState::default()),
            changed: Condvar::new(),
        }
    }

    /// The name under which it is registered; unique.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Further names under which it can be found and opened, as they are now.
    pub fn aliases(&self) -> Arc<[String]> {
        sync::lock(&self.aliases).clone()
    }

    pub(crate) fn set_aliases(&self, aliases: &[String]) {
        *sync::lock(&self.aliases) = aliases.into();
    }

    /// UUID; random if none was given at registration.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Geometry, with the number of blocks that channels validate against.
    pub fn geometry(&self) -> BdevGeometry {
        BdevGeometry { blocks: self.blocks.load(Ordering::Relaxed), ..self.bdev.geometry() }
    }

    /// Whether requests of this operation are executed, by the module or by the layer on its behalf.
    pub fn supports(&self, op: Op) -> bool {
        match op {
            Op::Reset | Op::Abort => true,
            Op::Compare | Op::SeekData | Op::SeekHole => self.bdev.supports(Op::Read),
            Op::Copy => self.bdev.supports(Op::Read) && self.bdev.supports(Op::Write),
            op => self.bdev.supports(op),
        }
    }

    /// What a write survives; see [`Bdev::durability`].
    pub fn durability(&self) -> Durability {
        self.bdev.durability()
    }

    /// The module's object behind the device.
    pub fn bdev(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    /// The module's object, if it is a `T`.
    pub fn module<T: Bdev>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.bdev;
        any.downcast_ref()
    }

    /// Whether it was unregistered; new I/O then fails.
    pub fn is_removed(&self) -> bool {
        self.state.load(Ordering::Relaxed) & REMOVED != 0
    }

    /// The rate limits of all channels together.
    pub fn rate_limits(&self) -> RateLimits {
        self.qos.limits()
    }

    /// Sets the rate limits. Requests in flight are not affected; queued ones obey the new limits within 10
    /// ms.
    pub fn set_rate_limits(&self, limits: RateLimits) {
        self.qos.set_limits(limits);
        if limits.is_none() {
            self.state.fetch_and(!LIMITED, Ordering::Relaxed);
        } else {
            self.state.fetch_or(LIMITED, Ordering::Relaxed);
        }
    }

    /// For whom requests are, by their flows.
    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// Has channels that are opened from now on schedule requests as the policy says, or, without one, fairly
    /// between tenants. Rate limits are in force with any.
    pub fn set_scheduler_policy(&self, policy: Option<Arc<dyn SchedulerPolicy>>) {
        *sync::lock(&self.scheduler_policy) = policy;
    }

    /// The scheduler of a new channel, and whether it decides about all requests.
    pub(crate) fn scheduler(self: &Arc<Self>, core: usize) -> (Box<dyn Scheduler>, bool) {
        let block_size = self.bdev.geometry().block_size;
        let policy = sync::lock(&self.scheduler_policy).clone();
        let Some(policy) = policy else {
            let fair = FairQueue::new(block_size, &self.tenants);
            return (Box::new(RateLimited::new(fair, self, block_size)), false);
        };
        let context = SchedulerContext { core, block_size, depth: self.bdev.depth(), tenants: &self.tenants };
        log::debug!(target: "bdev", "{}: scheduled by {} on core {core}", self.name, policy.name());
        let limited = RateLimited::new(policy.scheduler(&context), self, block_size);
        (Box::new(limited), policy.decides_all())
    }

    /// Type and holders of its claims, if there are any. Several holders are possible where they do not
    /// write, or share a key.
    pub fn claim(&self) -> Option<(ClaimType, Vec<String>)> {
        self.lock().claims.current()
    }

    /// Number of open descriptors; one whose channels are still open counts.
    pub fn open_count(&self) -> u32 {
        self.lock().opens.len() as u32
    }

    /// Blocks until it is removed, closed by all users, and its module has released claims and files; `false`
    /// after `timeout`. Must not be called on a reactor.
    pub fn wait_closed(&self, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.released)
    }

    /// Blocks until no descriptor is open; `false` after `timeout`. Must not be called on a reactor.
    pub fn wait_unused(&self, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.opens.is_empty())
    }

    /// Blocks until an open has ended, with its claim; `false` after `timeout`.
    pub(crate) fn wait_open_ended(&self, number: u64, timeout: Duration) -> bool {
        self.wait(timeout, |state| !state.opens.contains(&number))
    }

    fn wait(&self, timeout: Duration, is_done: impl Fn(&OpenState) -> bool) -> bool {
        let check = |state: &mut OpenState| is_done(state).then_some(());
        blocking::wait_until(&self.open_state, &self.changed, timeout, check).is_ok()
    }

    /// Statistics, summed over all channels, closed ones included.
    pub fn stats(&self) -> DeviceStats {
        self.stats.total()
    }

    /// Statistics of each open channel.
    pub fn channel_stats(&self) -> Vec<ChannelStats> {
        self.stats.channels()
    }

    /// Resets statistics to zero.
    pub fn reset_stats(&self, what: StatsReset) {
        self.stats.reset(what);
    }

    /// The cores that have a channel, one for each channel.
    pub fn channel_cores(&self) -> Vec<usize> {
        self.stats.channel_cores()
    }

    /// Has channels publish their requests in flight, for [`in_flight`](Self::in_flight).
    pub(crate) fn set_sampled(&self, is_sampled: bool) {
        self.stats.set_sampled(is_sampled);
        if is_sampled {
            self.state.fetch_or(SAMPLED, Ordering::Relaxed);
        } else {
            self.state.fetch_and(!SAMPLED, Ordering::Relaxed);
        }
    }

    /// The number of the device in trace events; no other device of the registry gets it again.
    pub fn trace_id(&self) -> u32 {
        self.trace_id
    }

    /// Has channels record events, or not, as the trace says now.
    pub(crate) fn sync_traced(&self) {
        let is_traced = self.trace.traces_io();
        self.stats.set_traced(is_traced);
        if is_traced {
            self.state.fetch_or(TRACED, Ordering::Relaxed);
        } else {
            self.state.fetch_and(!TRACED, Ordering::Relaxed);
        }
    }

    /// Requests in flight on all channels, as they published last; 0 if the device is not sampled.
    pub(crate) fn in_flight(&self) -> u64 {
        self.stats.in_flight()
    }

    pub(crate) fn open(self: &Arc<Self>, access: Access<'_>) -> Result<OpenHandle, BdevError> {
        let mut state = self.lock();
        if self.is_removed() {
            return Err(BdevError::Removed { name: self.name.clone() });
        }
        state.claims.check(&self.name, access)?;
        state.last_open += 1;
        let number = state.last_open;
        state.opens.push(number);
        state.claims.add(number, access);
        Ok(OpenHandle { device: self.clone(), writes: access.writes(), checks_reservations: false, number })
    }

    /// Marks it removed: every new I/O fails.
    pub(crate) fn remove(&self) {
        let mut state = self.lock();
        self.state.fetch_or(REMOVED, Ordering::Relaxed);
        self.bdev.on_removed();
        let is_last = state.opens.is_empty() && !state.closed;
        state.closed |= is_last;
        drop(state);
        if is_last {
            self.release();
        }
    }

    fn release(&self) {
        self.bdev.on_closed();
        self.lock().released = true;
        self.changed.notify_all();
    }

    fn close(&self, open: &OpenHandle) {
        let mut state = self.lock();
        state.opens.retain(|number| *number != open.number);
        state.claims.remove(open.number, open.writes);
        let is_last = state.opens.is_empty() && self.is_removed() && !state.closed;
        state.closed |= is_last;
        drop(state);
        self.changed.notify_all();
        if is_last {
            self.release();
        }
    }

    fn lock(&self) -> MutexGuard<'_, OpenState> {
        // No change under the lock can panic half-way, so that a poisoned lock is consistent.
        sync::lock(&self.open_state)
    }
}

impl ReservedDevice for BlockDevice {
    fn set_denied(&self, denied: u8) {
        let mut bits = 0;
        for (class, bit) in [(access::READ, READS_RESERVED), (access::WRITE, WRITES_RESERVED)] {
            bits |= if denied & class != 0 { bit } else { 0 };
        }
        // What stays denied is denied at every moment.
        self.state.fetch_or(bits, Ordering::Relaxed);
        self.state.fetch_and(!((READS_RESERVED | WRITES_RESERVED) & !bits), Ordering::Relaxed);
    }
}

impl OpenHandle {
    /// Its number among the opens of the device.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for OpenHandle {
    fn drop(&mut self) {
        let device = self.device.clone();
        device.close(self);
    }
}

impl std::fmt::Debug for BlockDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}, {}, {:?})", self.name, self.bdev.product_name(), self.geometry())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_writes_are_atomic_within_the_unit_and_the_boundary() {
        for (block_size, blocks, boundary, expected) in [
            (512, 0, 0, false),
            (512, 7, 0, false),
            (512, 8, 0, true),
            (512, 256, 64, true),
            (512, 64, 12, false),
            (4096, 1, 0, true),
            (4096, 1, 1, true),
            (8192, 1, 0, false),
        ] {
            let geometry = BdevGeometry {
                atomic_write_blocks: blocks,
                atomic_write_boundary_blocks: boundary,
                ..BdevGeometry::new(block_size, 1024)
            };
            assert_eq!(geometry.is_atomic(4096), expected, "{block_size} {blocks} {boundary}");
        }
        for (unit_min, bytes, expected) in [(8, 4096, true), (16, 4096, false), (8, 12288, false)] {
            let geometry = BdevGeometry {
                atomic_write_blocks: 64,
                atomic_write_unit_min_blocks: unit_min,
                ..BdevGeometry::new(512, 1024)
            };
            assert_eq!(geometry.is_atomic(bytes), expected, "{unit_min} {bytes}");
        }
    }

    #[test]
    fn atomic_writes_of_a_part_keep_the_alignment_of_the_whole_device() {
        let mut whole = BdevGeometry::new(512, 1 << 20);
        (whole.atomic_write_blocks, whole.atomic_write_unit_min_blocks) = (64, 2);
        assert_eq!([0, 64, 2048].map(|lba| whole.at(lba).atomic_write_blocks), [64; 3]);
        assert_eq!([1, 2, 32, 96].map(|lba| whole.at(lba).atomic_write_blocks), [0; 4]);
        // Without units, only a boundary counts.
        (whole.atomic_write_unit_min_blocks, whole.atomic_write_boundary_blocks) = (0, 8);
        assert_eq!([8, 12].map(|lba| whole.at(lba).atomic_write_blocks), [64, 0]);
    }
}
