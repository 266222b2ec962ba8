//! A trace of recent I/O and connections: a ring of events for each core, which is read while the core goes
//! on writing.
//!
//! Trace points of the group `bdev` are SPDK's. While none is enabled, a channel does nothing for the trace:
//! a bit of the device's state that each submit reads anyway, and of the epoch that each poll compares
//! anyway, leads to it. With all points enabled an event costs 23 instructions in batches of 128, and 95
//! alone (the example `null_cost`), with what is done once a batch: a clock read for submissions. Those of
//! the group `target` are passed once a connection.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::sync::{Arc, Mutex, OnceLock};

use block_io::{Op, Status};

use crate::{Completion, Flow, Request, TenantId};

/// Events that a ring keeps: 40 bytes each, allocated when the first is recorded on the core.
const EVENTS_MAX: usize = 8192;

/// Trace points that are enabled by one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceGroup {
    /// I/O of block devices: SPDK's group.
    Bdev,
    /// Connections of targets.
    Target,
}

impl TraceGroup {
    /// Every group.
    pub const ALL: [TraceGroup; 2] = [TraceGroup::Bdev, TraceGroup::Target];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            TraceGroup::Bdev => "bdev",
            TraceGroup::Target => "target",
        }
    }

    /// Its bit among the groups: SPDK's, or one that SPDK has no group for.
    pub const fn bit(self) -> u64 {
        match self {
            TraceGroup::Bdev => 1 << 3,
            TraceGroup::Target => 1 << 32,
        }
    }

    /// Its points, in the order of their numbers.
    pub fn points(self) -> impl Iterator<Item = TracePoint> {
        TracePoint::ALL.into_iter().filter(move |point| point.group() == self)
    }
}

/// A place that records events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TracePoint {
    /// A caller submitted a request.
    IoStart = 0,
    /// A request completed.
    IoDone = 1,
    /// A channel was opened.
    ChannelCreate = 2,
    /// A channel was closed.
    ChannelDestroy = 3,
    /// A submitted request stayed with the caller, whose queue is full. Not of SPDK.
    IoReturned = 4,
    /// A target has accepted a connection.
    ConnectionAccept = 5,
    /// The peer of a connection has logged in, or there is no login: its tenant is known.
    ConnectionLogin = 6,
    /// A connection is closed.
    ConnectionClose = 7,
}

impl TracePoint {
    /// Every point, in the order of their values.
    pub const ALL: [TracePoint; 8] = [
        TracePoint::IoStart,
        TracePoint::IoDone,
        TracePoint::ChannelCreate,
        TracePoint::ChannelDestroy,
        TracePoint::IoReturned,
        TracePoint::ConnectionAccept,
        TracePoint::ConnectionLogin,
        TracePoint::ConnectionClose,
    ];

    /// Its name; in the group `bdev` SPDK's.
    pub const fn name(self) -> &'static str {
        match self {
            TracePoint::IoStart => "BDEV_IO_START",
            TracePoint::IoDone => "BDEV_IO_DONE",
            TracePoint::ChannelCreate => "BDEV_IOCH_CREATE",
            TracePoint::ChannelDestroy => "BDEV_IOCH_DESTROY",
            TracePoint::IoReturned => "BDEV_IO_RETURNED",
            TracePoint::ConnectionAccept => "TARGET_CONN_ACCEPT",
            TracePoint::ConnectionLogin => "TARGET_CONN_LOGIN",
            TracePoint::ConnectionClose => "TARGET_CONN_CLOSE",
        }
    }

    /// The group that it belongs to.
    pub const fn group(self) -> TraceGroup {
        if (self as u8) < TracePoint::ConnectionAccept as u8 { TraceGroup::Bdev } else { TraceGroup::Target }
    }

    /// Its number within the group.
    pub const fn number(self) -> u8 {
        match self.group() {
            TraceGroup::Bdev => self as u8,
            TraceGroup::Target => self as u8 - TracePoint::ConnectionAccept as u8,
        }
    }

    const fn bit(self) -> u64 {
        1 << self.number()
    }
}

/// What was recorded at a trace point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Time in ticks of [`os::clock`]: of the submission or of the poll that returned the completion.
    pub ticks: u64,
    /// Index of the core.
    pub core: usize,
    /// Where.
    pub point: TracePoint,
    /// Number of the device; see [`BlockDevice::trace_id`](crate::BlockDevice::trace_id). 0 for connections.
    pub device: u32,
    /// The request; `None` for channels and connections.
    pub io: Option<TracedIo>,
    /// The connection of an event of the group `target`.
    pub connection: Option<TracedConnection>,
}

/// The connection of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedConnection {
    /// The target, by the name of its protocol.
    pub target: &'static str,
    /// Its flow.
    pub flow: u16,
    /// Its tenant at that time.
    pub tenant: TenantId,
}

/// Records the events of a target's connections on one core.
#[derive(Clone)]
pub struct TargetTrace {
    ring: Arc<TraceRing>,
    target: u32,
}

/// The request of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedIo {
    /// Its tag, the same when it starts and when it is done.
    pub tag: u64,
    /// The operation.
    pub op: Op,
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// The outcome of one that is done; otherwise success.
    pub status: Status,
}

/// The rings of all cores, and which points are enabled.
#[derive(Default)]
pub(crate) struct Trace {
    masks: Arc<TraceMasks>,
    /// Names of targets; an event has the index.
    targets: Mutex<Vec<&'static str>>,
    rings: Mutex<BTreeMap<usize, Arc<TraceRing>>>,
    devices: AtomicU32,
}

/// The enabled points of each group.
type TraceMasks = [AtomicU64; TraceGroup::ALL.len()];

impl Trace {
    pub(crate) fn mask(&self, group: TraceGroup) -> u64 {
        self.masks[group as usize].load(Relaxed)
    }

    pub(crate) fn set_mask(&self, group: TraceGroup, mask: u64) {
        self.masks[group as usize].store(mask, Relaxed);
    }

    /// Whether a point that channels pass with each I/O is enabled.
    pub(crate) fn traces_io(&self) -> bool {
        let points = [TracePoint::IoStart, TracePoint::IoDone, TracePoint::IoReturned];
        points.iter().any(|point| self.mask(TraceGroup::Bdev) & point.bit() != 0)
    }

    /// What a target records on a core.
    pub(crate) fn of_target(&self, core: usize, target: &'static str) -> TargetTrace {
        let mut targets = sync::lock(&self.targets);
        let known = targets.iter().position(|name| *name == target);
        let index = known.unwrap_or_else(|| {
            targets.push(target);
            targets.len() - 1
        });
        drop(targets);
        TargetTrace { ring: self.ring(core), target: index as u32 }
    }

    /// A number for a new device, from 1.
    pub(crate) fn next_device(&self) -> u32 {
        self.devices.fetch_add(1, Relaxed) + 1
    }

    /// The ring of a core.
    pub(crate) fn ring(&self, core: usize) -> Arc<TraceRing> {
        let new = || Arc::new(TraceRing::new(core, self.masks.clone()));
        sync::lock(&self.rings).entry(core).or_insert_with(new).clone()
    }

    /// The last `max` events of all cores, or of one, the oldest first.
    pub(crate) fn events(&self, core: Option<usize>, max: usize) -> Vec<TraceEvent> {
        let rings: Vec<Arc<TraceRing>> = sync::lock(&self.rings).values().cloned().collect();
        let selected = rings.iter().filter(|ring| core.is_none_or(|core| ring.core == core));
        let targets = sync::lock(&self.targets).clone();
        let mut events: Vec<TraceEvent> = selected.flat_map(|ring| ring.events(max, &targets)).collect();
        events.sort_by_key(|event| event.ticks);
        events.split_off(events.len().saturating_sub(max))
    }

    /// Forgets the events so far.
    pub(crate) fn clear(&self) {
        for ring in sync::lock(&self.rings).values() {
            ring.cleared.store(ring.count.load(Acquire), Relaxed);
        }
    }
}

/// The recent events of a core, which alone writes it. A reader drops what is overwritten meanwhile.
pub(crate) struct TraceRing {
    core: usize,
    masks: Arc<TraceMasks>,
    /// Events recorded so far; the next one's slot is this modulo [`EVENTS_MAX`].
    count: AtomicU64,
    /// Events that are forgotten, a number that readers keep: the core alone writes the count.
    cleared: AtomicU64,
    slots: OnceLock<Box<[TraceSlot; EVENTS_MAX]>>,
}

/// Ticks; status, operation, point and device; first block; number of blocks; tag. Of a connection: ticks;
/// point and target; flow; tenant; nothing.
type TraceSlot = [AtomicU64; 5];

impl TraceRing {
    fn new(core: usize, masks: Arc<TraceMasks>) -> TraceRing {
        TraceRing {
            core,
            masks,
            count: AtomicU64::new(0),
            cleared: AtomicU64::new(0),
            slots: OnceLock::new(),
        }
    }

    fn is_enabled(&self, point: TracePoint) -> bool {
        self.masks[point.group() as usize].load(Relaxed) & point.bit() != 0
    }

    /// Records that requests start or stay with their caller.
    #[inline(never)]
    pub(crate) fn record_requests(&self, point: TracePoint, device: u32, requests: &[Request]) {
        if self.is_enabled(point) {
            let (ticks, slots) = (os::clock::ticks(), self.slots());
            for request in requests {
                self.record(slots, ticks, word(point, device, request.op, Status::SUCCESS), request);
            }
        }
    }

    /// Records that requests are done.
    #[inline(never)]
    pub(crate) fn record_completions(&self, device: u32, ticks: u64, completions: &[Completion]) {
        if self.is_enabled(TracePoint::IoDone) {
            let slots = self.slots();
            for completion in completions {
                let request = completion.request();
                let word = word(TracePoint::IoDone, device, request.op, completion.status());
                self.record(slots, ticks, word, request);
            }
        }
    }

    /// Records that a channel was opened or closed.
    pub(crate) fn record_channel(&self, point: TracePoint, device: u32) {
        if self.is_enabled(point) {
            let word = word(point, device, Op::Read, Status::SUCCESS);
            self.write(self.slots(), [os::clock::ticks(), word, 0, 0, 0]);
        }
    }

    #[inline(always)]
    fn record(&self, slots: &[TraceSlot; EVENTS_MAX], ticks: u64, word: u64, request: &Request) {
        self.write(slots, [ticks, word, request.lba, u64::from(request.blocks), request.tag.0]);
    }

    #[inline(always)]
    fn write(&self, slots: &[TraceSlot; EVENTS_MAX], values: [u64; 5]) {
        let index = self.count.load(Relaxed);
        let slot = &slots[index as usize % EVENTS_MAX];
        // A reader that sees one of these stores sees the count as it is now: see `events`.
        fence(Release);
        for (word, value) in slot.iter().zip(values) {
            word.store(value, Relaxed);
        }
        self.count.store(index + 1, Release);
    }

    fn slots(&self) -> &[TraceSlot; EVENTS_MAX] {
        self.slots.get_or_init(|| {
            let slots: Box<[TraceSlot]> = (0..EVENTS_MAX).map(|_| TraceSlot::default()).collect();
            slots.try_into().expect("it has this many slots")
        })
    }

    /// The last `max` events, the oldest first.
    fn events(&self, max: usize, targets: &[&'static str]) -> Vec<TraceEvent> {
        let Some(slots) = self.slots.get() else { return Vec::new() };
        let end = self.count.load(Acquire);
        let first = end.saturating_sub(max.min(EVENTS_MAX) as u64).max(self.cleared.load(Relaxed));
        let read = |index: u64| {
            let values = slots[index as usize % EVENTS_MAX].each_ref().map(|word| word.load(Relaxed));
            // If a value is of a later event, the count is at least that event's index.
            fence(Acquire);
            let is_overwritten = self.count.load(Relaxed) >= index + EVENTS_MAX as u64;
            if is_overwritten { None } else { decode(self.core, values, targets) }
        };
        (first..end).filter_map(read).collect()
    }
}

#[inline(always)]
fn word(point: TracePoint, device: u32, op: Op, status: Status) -> u64 {
    u64::from(status.field()) << 48 | (op.index() as u64) << 40 | (point as u64) << 32 | u64::from(device)
}

fn decode(
    core: usize,
    [ticks, word, lba, blocks, tag]: [u64; 5],
    targets: &[&'static str],
) -> Option<TraceEvent> {
    let point = *TracePoint::ALL.get((word >> 32) as u8 as usize)?;
    let number = word as u32;
    if point.group() == TraceGroup::Target {
        let (target, flow) = (*targets.get(number as usize)?, lba as u16);
        let connection = Some(TracedConnection { target, flow, tenant: TenantId::of_index(blocks as u16) });
        return Some(TraceEvent { ticks, core, point, device: 0, io: None, connection });
    }
    let op = *Op::ALL.get((word >> 40) as u8 as usize)?;
    let status = Status::from_field((word >> 48) as u16);
    let is_io = !matches!(point, TracePoint::ChannelCreate | TracePoint::ChannelDestroy);
    let io = is_io.then_some(TracedIo { tag, op, lba, blocks: blocks as u32, status });
    Some(TraceEvent { ticks, core, point, device: number, io, connection: None })
}

impl TargetTrace {
    /// Records an event of the group `target`, and passes the probe point of the same meaning.
    #[cold]
    pub fn record(&self, point: TracePoint, flow: &Flow) {
        let tenant = flow.tenant();
        if self.ring.is_enabled(point) {
            let word = word(point, self.target, Op::Read, Status::SUCCESS);
            let values = [os::clock::ticks(), word, flow.id().into(), tenant.index() as u64, 0];
            self.ring.write(self.ring.slots(), values);
        }
    }
}

#[cfg(test)]
mod tests {
    use block_io::Tag;

    use super::*;

    #[test]
    fn a_ring_keeps_the_last_events_of_enabled_points() {
        let trace = Trace::default();
        let ring = trace.ring(3);
        ring.record_requests(TracePoint::IoStart, 1, &[Request::new(Tag(1), Op::Flush, 0, 0)]);
        assert!(ring.slots.get().is_none(), "nothing is allocated while the trace is off");
        trace.set_mask(TraceGroup::Bdev, TracePoint::IoStart.bit() | TracePoint::IoDone.bit());
        ring.record_channel(TracePoint::ChannelCreate, 1);
        assert_eq!(trace.events(None, 10), []);
        for lba in 0..EVENTS_MAX as u64 + 5 {
            ring.record_requests(TracePoint::IoStart, 7, &[Request::new(Tag(lba), Op::Unmap, lba, 9)]);
        }
        let failed = Request::new(Tag(u64::MAX), Op::Flush, 0, 0).complete(Status::INTERNAL_ERROR);
        ring.record_completions(8, u64::MAX, &[failed]);
        let events = trace.events(Some(3), usize::MAX);
        // The slot that is written next may be half-written at any time.
        assert_eq!(events.len(), EVENTS_MAX - 1);
        let io = |index: usize| events[index].io.clone().unwrap();
        let last = EVENTS_MAX as u64 + 4;
        assert_eq!((io(0).lba, io(events.len() - 2).lba), (7, last));
        let started = TracedIo { tag: last, op: Op::Unmap, lba: last, blocks: 9, status: Status::SUCCESS };
        assert_eq!(io(events.len() - 2), started);
        let done = events.last().unwrap();
        assert_eq!((done.point, done.device, done.core), (TracePoint::IoDone, 8, 3));
        assert_eq!(io(events.len() - 1).status, Status::INTERNAL_ERROR);
        assert_eq!(
            (trace.events(Some(0), 10).len(), trace.events(None, 2)),
            (0, events[events.len() - 2..].to_vec())
        );
        trace.clear();
        assert_eq!(trace.events(None, usize::MAX), []);
        ring.record_requests(TracePoint::IoStart, 9, &[Request::new(Tag(1), Op::Flush, 0, 0)]);
        let after: Vec<u32> = trace.events(None, usize::MAX).iter().map(|event| event.device).collect();
        assert_eq!(after, [9]);
    }

    #[test]
    fn connections_are_recorded_with_target_flow_and_tenant() {
        let (trace, tenants) = (Trace::default(), crate::Tenants::default());
        let flow = tenants.connect("nqn.host");
        let (nbd, nvmf) = (trace.of_target(1, "nbd"), trace.of_target(0, "nvmf"));
        nbd.record(TracePoint::ConnectionAccept, &flow);
        trace.set_mask(TraceGroup::Bdev, u64::MAX);
        nbd.record(TracePoint::ConnectionAccept, &flow);
        assert_eq!(trace.events(None, 10), []);
        trace.set_mask(TraceGroup::Bdev, 0);
        trace.set_mask(TraceGroup::Target, TracePoint::ConnectionLogin.bit());
        for one in [&nbd, &trace.of_target(1, "nbd"), &nvmf] {
            one.record(TracePoint::ConnectionLogin, &flow);
            one.record(TracePoint::ConnectionClose, &flow);
        }
        let events = trace.events(None, 10);
        let of = |event: &TraceEvent| {
            let connection = event.connection.clone().unwrap();
            assert_eq!((event.point, event.io.is_none()), (TracePoint::ConnectionLogin, true));
            assert_eq!((connection.flow, connection.tenant), (flow.id(), flow.tenant()));
            (event.core, connection.target)
        };
        assert_eq!(events.iter().map(of).collect::<Vec<_>>(), [(1, "nbd"), (1, "nbd"), (0, "nvmf")]);
    }

    #[test]
    fn numbers_within_a_group_begin_at_zero() {
        for group in TraceGroup::ALL {
            let numbers: Vec<u8> = group.points().map(TracePoint::number).collect();
            assert_eq!(numbers, (0..numbers.len() as u8).collect::<Vec<_>>(), "{}", group.name());
        }
        assert_eq!(
            TraceGroup::Bdev.points().count() + TraceGroup::Target.points().count(),
            TracePoint::ALL.len()
        );
    }

    #[test]
    fn a_reader_sees_whole_events_while_the_core_writes() {
        let trace = Trace::default();
        trace.set_mask(TraceGroup::Bdev, u64::MAX);
        let ring = trace.ring(0);
        let writer = std::thread::spawn(move || {
            for n in 0..200_000u64 {
                let request = Request::new(Tag(n), Op::Unmap, n, n as u32);
                ring.record_requests(TracePoint::IoStart, n as u32, &[request]);
            }
        });
        let mut seen = 0;
        while !writer.is_finished() {
            let events = trace.events(None, usize::MAX);
            let mut tags = events.iter().map(|event| (event.device, event.io.clone().unwrap()));
            assert!(
                tags.all(|(device, io)| io.tag == io.lba && io.blocks == device && io.tag as u32 == device)
            );
            seen += events.len();
        }
        writer.join().unwrap();
        assert!(seen + trace.events(None, usize::MAX).len() > 0);
    }
}
