//! The virtio device of a connection: its virtqueues and requests.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block_io::{Op, Tag};
use slots::{Slab, Slot};
use sockets::Wait;
use target_shell::{IoContext, Polling};
use wire_vhost_user::{BackendRequest, Header, ProtocolFeatures};
use wire_virtio::Features;
use wire_virtio::blk::BlkStatus;

use crate::blk::{self, BlkStep};
use crate::chain::Chain;
use crate::controller::Controller;
use crate::core::{Notifications, VhostCore};
use crate::dirty_log::DirtyLog;
use crate::inflight_region::InflightRegion;
use crate::limits::{FETCHED_BYTES_MAX, FETCHED_MAX, IDLE_NS, REQUESTS_MAX};
use crate::memory::{GuestMemory, GuestPlace, RemovedRegions};
use crate::queue::Queue;
use crate::rotation::Rotation;
use crate::status::blk_status;
use crate::vring::{ChainId, RingSetup};

/// What the group lends to a connection.
pub(crate) type VhostContext<'a> = IoContext<'a, VhostCore>;

/// The device that a front-end has connected to.
///
/// [`poll`](Self::poll) fetches requests of all virtqueues and submits them, [`complete`](Self::complete) writes status
/// and used chains, and [`publish`](Self::publish) makes these visible and signals the driver, once a poll. While it is
/// active, the driver's notifications are disabled and it is polled; after [`IDLE_NS`] without a request they are
/// enabled, and it costs nothing.
pub(crate) struct VhostDevice {
    pub(crate) controller: Arc<Controller>,
    /// Features that were negotiated.
    pub(crate) features: Features,
    pub(crate) protocol_features: ProtocolFeatures,
    pub(crate) memory: GuestMemory,
    pub(crate) queues: Vec<Queue>,
    /// The queue that is served first in the next poll.
    rotation: Rotation,
    /// The front-end has begun a session.
    pub(crate) has_session: bool,
    /// The driver uses the device's cache in write-back mode.
    pub(crate) writeback: bool,
    pub(crate) notifications: Rc<Notifications>,
    /// Memory of requests in flight that survives this process.
    pub(crate) inflight: Option<InflightRegion>,
    /// The log of dirty pages, written while its feature is negotiated.
    pub(crate) dirty_log: Option<DirtyLog>,
    /// The socket for requests to the front-end.
    pub(crate) backend: Option<OwnedFd>,
    requests: Slab<InflightRequest>,
    /// Queues with used chains that are not published.
    unpublished: Vec<u16>,
    chain: Chain,
    flow: u16,
    /// The drivers' notifications are enabled.
    is_armed: bool,
    /// When a request was last found.
    active_ns: u64,
    /// Requests of an earlier connection may not have completed: none is fetched, so that no late write of it follows a
    /// newer one.
    waits_for_others: bool,
}

/// A request that a block device executes.
struct InflightRequest {
    queue: u16,
    id: ChainId,
    status: GuestPlace,
    /// Bytes of data that are written if it succeeds.
    written: u32,
}

/// Tags are an index of 16 bits and 26 bits of a generation.
const INDEX_BITS: u32 = 16;
const GENERATION_MASK: u64 = (1 << (target_shell::REQUEST_TAG_BITS - INDEX_BITS)) - 1;
const _: () = assert!(REQUESTS_MAX <= 1 << INDEX_BITS);

#[inline]
fn tag_of(slot: Slot) -> u64 {
    (slot.to_bits() >> 32 & GENERATION_MASK) << INDEX_BITS | u64::from(slot.index())
}

impl VhostDevice {
    pub(crate) fn new(
        controller: Arc<Controller>,
        notifications: Rc<Notifications>,
        flow: u16,
        now_ns: u64,
    ) -> VhostDevice {
        VhostDevice {
            controller,
            features: Features::empty(),
            protocol_features: ProtocolFeatures::empty(),
            memory: GuestMemory::default(),
            queues: Vec::new(),
            rotation: Rotation::default(),
            has_session: false,
            writeback: true,
            notifications,
            inflight: None,
            dirty_log: None,
            backend: None,
            requests: Slab::with_capacity(REQUESTS_MAX),
            unpublished: Vec::new(),
            chain: Chain::default(),
            flow,
            is_armed: false,
            active_ns: now_ns,
            waits_for_others: true,
        }
    }

    /// Number of requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Starts virtqueues that can run, and finds the areas of others again: memory, features or a queue have changed.
    pub(crate) fn update_queues(&mut self, now_ns: u64) {
        (0..self.queues.len()).for_each(|index| self.update_queue(index, now_ns));
    }

    /// As [`update_queues`](Self::update_queues), of one virtqueue, which exists.
    pub(crate) fn update_queue(&mut self, index: usize, now_ns: u64) {
        let queue = &mut self.queues[index];
        queue.relocate(&self.memory);
        if queue.wants_start() {
            let inflight = self.inflight.as_ref();
            let setup = RingSetup {
                size: queue.size,
                base: queue.base,
                features: self.features,
                inflight: inflight.and_then(|region| region.area(index, queue.size, self.features)),
            };
            let has_started = queue.try_start(&self.memory, setup);
            let always_enabled = !self.features.contains(Features::VHOST_USER_PROTOCOL_FEATURES);
            queue.is_enabled |= has_started && always_enabled;
        }
        // New virtqueues have notifications disabled.
        self.wake(now_ns);
    }

    /// Whether no request in flight writes to removed memory.
    pub(crate) fn is_unused(&mut self, removed: &RemovedRegions) -> bool {
        self.publish();
        let writes = |request: &InflightRequest| {
            // The areas of its virtqueue may be in that memory.
            removed.contain(&request.status) || self.queues[usize::from(request.queue)].is_unmapped
        };
        removed.are_returned() && !self.requests.iter().any(|(_, request)| writes(request))
    }

    /// Polls from now on.
    pub(crate) fn wake(&mut self, now_ns: u64) {
        self.active_ns = now_ns;
        if std::mem::take(&mut self.is_armed) {
            self.disable_notifications();
        }
    }

    fn disable_notifications(&mut self) {
        let mapped = self.queues.iter_mut().filter(|queue| !queue.is_unmapped);
        let rings = mapped.filter_map(|queue| queue.ring.as_mut());
        rings.for_each(|ring| ring.disable_notifications());
    }

    /// Enables the notifications of all virtqueues, unless one has work.
    #[cold]
    fn arm(&mut self, now_ns: u64) {
        self.is_armed = true;
        let log = self.dirty_log.as_ref().filter(|_| self.features.contains(Features::VHOST_LOG_ALL));
        let mut has_work = false;
        for queue in self.queues.iter_mut().filter(|queue| queue.is_served()) {
            has_work |= queue.ring.as_mut().is_some_and(|ring| ring.enable_notifications());
            if let Some(log) = log {
                queue.log(&self.memory, log);
            }
        }
        if has_work {
            self.wake(now_ns);
        }
    }

    /// How the device has to be polled.
    #[inline]
    pub(crate) fn polling(&self) -> Polling {
        let needs_polling = |queue: &Queue| queue.is_served() && (!self.is_armed || queue.kick.is_none());
        if self.queues.iter().any(needs_polling) {
            Polling::Timed { active_ns: self.active_ns }
        } else {
            Polling::Off
        }
    }

    /// Fetches and submits requests. Returns their number.
    #[inline]
    pub(crate) fn poll(&mut self, context: &mut VhostContext<'_>) -> usize {
        if self.waits_for_others {
            if self.controller.closing.load(Ordering::Acquire) != 0 {
                return 0;
            }
            self.waits_for_others = false;
        }
        let mut found = 0;
        let mut bytes_left = FETCHED_BYTES_MAX;
        let mut rotation = self.rotation;
        rotation.visit(self.queues.len(), |index| {
            if self.queues[index].is_served() {
                found += self.fetch(index, &mut bytes_left, context);
            }
            bytes_left > 0
        });
        self.rotation = rotation;
        if found > 0 {
            self.wake(context.now_ns);
        } else if !self.is_armed && context.now_ns.saturating_sub(self.active_ns) > IDLE_NS {
            self.arm(context.now_ns);
        }
        found
    }

    /// Fetches and submits requests of a virtqueue, until none of `bytes_left` are left.
    #[inline]
    fn fetch(&mut self, index: usize, bytes_left: &mut u64, context: &mut VhostContext<'_>) -> usize {
        let write_through = !self.features.contains(Features::BLK_FLUSH)
            || self.features.contains(Features::BLK_CONFIG_WCE) && !self.writeback;
        let VhostDevice { controller, memory, queues, requests, unpublished, chain, features, .. } = self;
        let dirty_log = self.dirty_log.as_ref().filter(|_| features.contains(Features::VHOST_LOG_ALL));
        let queue = &mut queues[index];
        let Some(ring) = &mut queue.ring else { return 0 };
        let mut found = 0;
        let error = loop {
            if found == FETCHED_MAX || *bytes_left == 0 {
                break None;
            }
            if requests.is_full() {
                *bytes_left = 0;
                break None;
            }
            let id = match ring.fetch(memory, chain) {
                Ok(Some(id)) => id,
                Ok(None) => break None,
                Err(error) => break Some(error),
            };
            found += 1;
            let plan = match blk::plan(memory, chain, controller, write_through) {
                Ok(plan) => plan,
                Err(error) => break Some(error),
            };
            let (status, written) = match plan.step {
                BlkStep::Complete(status, written) => (status, written),
                BlkStep::Submit(mut request, written) => {
                    let entry =
                        InflightRequest { queue: index as u16, id, status: plan.status.clone(), written };
                    let Ok(slot) = requests.insert(entry) else { break None };
                    request.tag = Tag(tag_of(slot));
                    request.flow = self.flow;
                    let bytes = u64::from(request.blocks) * u64::from(controller.block_size);
                    *bytes_left = bytes_left.saturating_sub(bytes);
                    match context.submit(controller.key, request) {
                        Ok(()) => {
                            queue.in_flight += 1;
                            continue;
                        }
                        Err(status) => {
                            requests.remove(slot);
                            (blk_status(status), 0)
                        }
                    }
                }
            };
            plan.status.region.store_u8(plan.status.offset, status.to_wire());
            if let Some(log) = dirty_log {
                // Not all that it could write: a driver may describe any lengths.
                chain.written(written).for_each(|range| log.mark(range.address, range.length.into()));
                if let Some(address) = memory.guest_address_of_place(&plan.status) {
                    log.mark(address, 1);
                }
            }
            ring.push_used(id, written + 1);
            if !std::mem::replace(&mut queue.is_unpublished, true) {
                unpublished.push(index as u16);
            }
        };
        if let Some(error) = error {
            queue.fail(error, &controller.name, index, &self.notifications);
        }
        found
    }

    /// A device request has completed.
    #[inline]
    pub(crate) fn complete(&mut self, completion: &bdev::Completion) {
        let tag = completion.tag().0 & ((1 << target_shell::REQUEST_TAG_BITS) - 1);
        let index = (tag & ((1 << INDEX_BITS) - 1)) as u32;
        let slot = self.requests.slot_at(index).filter(|slot| tag_of(*slot) == tag);
        let Some(request) = slot.and_then(|slot| self.requests.remove(slot)) else { return };
        let status = blk_status(completion.status());
        if self.features.contains(Features::VHOST_LOG_ALL) {
            self.log_completion(completion, &request.status);
        }
        request.status.region.store_u8(request.status.offset, status.to_wire());
        let queue = &mut self.queues[usize::from(request.queue)];
        queue.in_flight -= 1;
        if let Some(ring) = &mut queue.ring {
            let written = if status == BlkStatus::Ok { request.written } else { 0 };
            ring.push_used(request.id, written + 1);
            if !std::mem::replace(&mut queue.is_unpublished, true) {
                self.unpublished.push(request.queue);
            }
        }
    }

    /// Logs what a request has written.
    #[cold]
    fn log_completion(&self, completion: &bdev::Completion, status: &GuestPlace) {
        let Some(log) = &self.dirty_log else { return };
        if let Some(address) = self.memory.guest_address_of_place(status) {
            log.mark(address, 1);
        }
        let request = completion.request();
        let slices = request.data().filter(|_| request.op == Op::Read).map(|data| data.slices());
        for slice in slices.unwrap_or_default() {
            if let Some(address) = self.memory.guest_address_of(slice) {
                log.mark(address, slice.len() as u64);
            }
        }
    }

    /// Makes used chains visible, and signals drivers that want it.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if self.unpublished.is_empty() {
            return;
        }
        let log = self.dirty_log.as_ref().filter(|_| self.features.contains(Features::VHOST_LOG_ALL));
        for index in self.unpublished.drain(..) {
            let queue = &mut self.queues[usize::from(index)];
            queue.publish(&self.notifications);
            if let Some(log) = log {
                queue.log(&self.memory, log);
            }
        }
    }

    /// Whether memory of the front-end was truncated.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.memory.is_poisoned()
            || self.inflight.as_ref().is_some_and(InflightRegion::is_poisoned)
            || self.dirty_log.as_ref().is_some_and(DirtyLog::is_poisoned)
    }

    /// Applies a changed controller.
    pub(crate) fn update_controller(&mut self, controller: &Arc<Controller>) {
        let is_resized = controller.sectors != self.controller.sectors;
        self.controller = controller.clone();
        if is_resized {
            self.announce_config();
        }
    }

    /// Tells the front-end that the configuration space has changed.
    #[cold]
    fn announce_config(&mut self) {
        let Some(backend) = &self.backend else { return };
        let message = Header::request(BackendRequest::ConfigChange.to_wire(), 0).to_bytes();
        let parts = [IoSlice::new(&message)];
        let sent = sockets::send_with_descriptors(backend, &parts, &[], Wait::No);
        // A front-end that does not read them, or has closed the socket, gets no more.
        if !sent.is_ok_and(|count| count == message.len()) {
            log::warn!(target: "vhost", "{}: the front-end does not learn of a change", self.controller.name);
            self.backend = None;
        }
    }

    /// Releases the front-end's memory and eventfds. Device requests may be in flight.
    pub(crate) fn release(&mut self) {
        self.publish();
        self.queues.clear();
        self.memory.clear();
        (self.inflight, self.dirty_log, self.backend) = (None, None, None);
        self.requests = Slab::with_capacity(1);
    }
}
