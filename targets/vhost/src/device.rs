//! The virtio device of a connection: its virtqueues and requests.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block_io::Op;
use dma::Data;
use scsi::TaskManagement;
use sockets::Wait;
use target_shell::{IoContext, Polling};
use wire_vhost_user::{BackendRequest, ProtocolFeatures, VhostUserHeader};
use wire_virtio::Features;

use crate::backend::Backend;
use crate::blk_requests::{BlkRequests, Started};
use crate::chain::Chain;
use crate::connection::NewConnection;
use crate::controller::Controller;
use crate::core::{Notifications, VhostCore};
use crate::dirty_log::DirtyLog;
use crate::inflight_region::InflightRegion;
use crate::limits::{FETCHED_BYTES_MAX, FETCHED_MAX, IDLE_NS};
use crate::memory::{GuestMemory, GuestPlace, RemovedRegions};
use crate::queue::Queue;
use crate::rotation::Rotation;
use crate::scsi_requests::{CommandScan, ScsiRequests};
use crate::vring::{ChainId, Ring, RingSetup};

/// What the group lends to a connection.
pub(crate) type VhostContext<'a> = IoContext<'a, VhostCore>;

/// The device that a front-end has connected to.
///
/// [`poll`](Self::poll) fetches requests of all virtqueues and submits them, [`complete`](Self::complete)
/// writes status and used chains, and [`publish`](Self::publish) makes these visible and signals the driver,
/// once a poll. While it is active, the driver's notifications are disabled and it is polled; after
/// [`IDLE_NS`] without a request they are enabled, and it costs nothing.
pub(crate) struct VhostDevice {
    pub(crate) controller: Arc<Controller>,
    /// Features that were negotiated.
    pub(crate) features: Features,
    pub(crate) protocol_features: ProtocolFeatures,
    pub(crate) memory: GuestMemory,
    pub(crate) queues: Vec<Queue>,
    /// A virtqueue of this device runs on another core.
    pub(crate) runs_elsewhere: bool,
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
    requests: Requests,
    /// Queues with used chains that are not published.
    unpublished: Vec<u16>,
    /// The time of the last poll.
    polled_ns: u64,
    /// A signal of a driver is delayed: it is polled until that is sent.
    has_delayed_signals: bool,
    chain: Chain,
    pub(crate) flow: u16,
    /// The drivers' notifications are enabled.
    is_armed: bool,
    /// When a request was last found.
    active_ns: u64,
    /// Requests of an earlier connection may not have completed: none is fetched, so that no late write of it
    /// follows a newer one.
    waits_for_others: bool,
}

/// What the virtqueues carry.
enum Requests {
    Blk(BlkRequests),
    Scsi(Box<ScsiRequests>),
}

/// The guest's memory, and the log of what is written there while it migrates.
#[derive(Clone, Copy)]
pub(crate) struct GuestView<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) log: Option<&'a DirtyLog>,
}

/// A chain that was fetched.
#[derive(Clone, Copy)]
pub(crate) struct FetchedChain<'a> {
    pub(crate) queue: u16,
    pub(crate) id: ChainId,
    pub(crate) chain: &'a Chain,
    pub(crate) guest: GuestView<'a>,
}

/// A chain to return to the driver.
pub(crate) struct UsedChain {
    pub(crate) queue: u16,
    pub(crate) id: ChainId,
    /// Bytes written from the start of its writable part.
    pub(crate) written: u32,
}

impl GuestView<'_> {
    /// Logs the byte at a place.
    pub(crate) fn mark_place(&self, place: &GuestPlace) {
        if let (Some(log), Some(address)) = (self.log, self.memory.guest_address_of_place(place)) {
            log.mark(address, 1);
        }
    }

    /// Logs what of the guest's memory is in data.
    pub(crate) fn mark_data(&self, data: &Data) {
        let Some(log) = self.log else { return };
        for slice in data.slices() {
            if let Some(address) = self.memory.guest_address_of(slice) {
                log.mark(address, slice.len() as u64);
            }
        }
    }

    /// Logs what a request has read into the guest's memory.
    #[cold]
    pub(crate) fn mark_read(&self, completion: &bdev::Completion) {
        let request = completion.request();
        if let Some(data) = request.data().filter(|_| request.op == Op::Read) {
            self.mark_data(data);
        }
    }
}

/// The log, if the front-end wants it written.
fn active_log(log: Option<&DirtyLog>, features: Features) -> Option<&DirtyLog> {
    log.filter(|_| features.contains(Features::VHOST_LOG_ALL))
}

/// Returns a chain that was in flight. `unpublished` is the list of virtqueues with used chains that are not
/// published.
#[inline]
fn return_chain(queues: &mut [Queue], unpublished: &mut Vec<u16>, used: &UsedChain) {
    // After the end of the connection there are no virtqueues.
    let Some(queue) = queues.get_mut(usize::from(used.queue)) else { return };
    queue.in_flight -= 1;
    if let Some(ring) = &mut queue.ring {
        ring.push_used(used.id, used.written);
        queue.unpublished += 1;
        if queue.unpublished == 1 {
            unpublished.push(used.queue);
        }
    }
}

impl VhostDevice {
    /// The device of a new connection, or of its worker on another core.
    pub(crate) fn new(new: &NewConnection<'_>, is_worker: bool) -> VhostDevice {
        let requests = match &new.controller.backend {
            Backend::Blk(_) => Requests::Blk(BlkRequests::new()),
            Backend::Scsi(scsi) => Requests::Scsi(Box::new(ScsiRequests::new(new, scsi, is_worker))),
        };
        VhostDevice {
            controller: new.controller.clone(),
            features: Features::empty(),
            protocol_features: ProtocolFeatures::empty(),
            memory: GuestMemory::default(),
            queues: Vec::new(),
            runs_elsewhere: false,
            rotation: Rotation::default(),
            has_session: false,
            writeback: true,
            notifications: new.notifications.clone(),
            inflight: None,
            dirty_log: None,
            backend: None,
            requests,
            unpublished: Vec::new(),
            polled_ns: new.now_ns,
            has_delayed_signals: false,
            chain: Chain::default(),
            flow: new.flow,
            is_armed: false,
            active_ns: new.now_ns,
            waits_for_others: true,
        }
    }

    /// Number of requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        match &self.requests {
            Requests::Blk(blk) => blk.len(),
            Requests::Scsi(scsi) => scsi.len(),
        }
    }

    /// Number of virtqueues that run here.
    pub(crate) fn running(&self) -> usize {
        self.queues.iter().filter(|queue| queue.ring.is_some()).count()
    }

    /// Starts virtqueues that can run, and finds the areas of others again: memory, features or a queue have
    /// changed.
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
            if let Requests::Scsi(scsi) = &self.requests
                && queue.ring.as_ref().is_some_and(Ring::has_begun)
            {
                scsi.resume();
            }
            let always_enabled = !self.features.contains(Features::VHOST_USER_PROTOCOL_FEATURES);
            queue.is_enabled |= has_started && always_enabled;
        }
        // New virtqueues have notifications disabled.
        self.wake(now_ns);
    }

    /// Whether no request in flight writes to removed memory.
    pub(crate) fn is_unused(&mut self, removed: &RemovedRegions) -> bool {
        self.publish_at_once();
        // The areas of its virtqueue may be in that memory.
        let is_unmapped = |queue: u16| self.queues[usize::from(queue)].is_unmapped;
        removed.are_returned()
            && match &self.requests {
                Requests::Blk(blk) => !blk.use_removed(removed, is_unmapped),
                Requests::Scsi(scsi) => !scsi.use_any(is_unmapped),
            }
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
        let log = active_log(self.dirty_log.as_ref(), self.features);
        let mut has_work = false;
        let has_requests = |index: usize| match &self.requests {
            Requests::Blk(_) => true,
            Requests::Scsi(scsi) => scsi.wants(index),
        };
        for (index, queue) in self.queues.iter_mut().enumerate().filter(|(_, queue)| queue.is_served()) {
            if !has_requests(index) {
                continue;
            }
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
        let has_requests = |index: usize| match &self.requests {
            Requests::Blk(_) => true,
            Requests::Scsi(scsi) => scsi.wants(index),
        };
        let needs_polling = |(index, queue): (usize, &Queue)| {
            queue.is_served() && (!self.is_armed || queue.kick.is_none()) && has_requests(index)
        };
        if self.has_delayed_signals || self.queues.iter().enumerate().any(needs_polling) {
            Polling::Timed { active_ns: self.active_ns }
        } else {
            Polling::Off
        }
    }

    /// Fetches and submits requests. Returns their number.
    #[inline]
    pub(crate) fn poll(&mut self, context: &mut VhostContext<'_>) -> usize {
        self.polled_ns = context.now_ns;
        if self.has_delayed_signals {
            self.signal_if_due();
        }
        if self.waits_for_others {
            if self.controller.closing.load(Ordering::Acquire) != 0 {
                return 0;
            }
            self.waits_for_others = false;
        }
        if self.is_scanning() {
            self.begin_scan();
        }
        let mut found = 0;
        let mut bytes_left = FETCHED_BYTES_MAX;
        let mut rotation = self.rotation;
        rotation.visit(self.queues.len(), |index| {
            if self.queues[index].is_served() {
                found += self.fetch(index, &mut bytes_left, context);
            }
            bytes_left > 0 && context.turn_commands() > 0
        });
        self.rotation = rotation;
        if self.is_scanning() {
            self.finish_scan();
        }
        found += self.resume(context);
        let has_event = match &mut self.requests {
            Requests::Blk(_) => false,
            Requests::Scsi(scsi) => scsi.take_has_new_event(),
        };
        if found > 0 || has_event {
            self.wake(context.now_ns);
        } else if !self.is_armed
            && !self.has_delayed_signals
            && context.now_ns.saturating_sub(self.active_ns) > IDLE_NS
        {
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
        let guest = GuestView { memory, log: active_log(self.dirty_log.as_ref(), *features) };
        let queue = &mut queues[index];
        let Some(ring) = &mut queue.ring else { return 0 };
        let mut found = 0;
        if let Err(error) = ring.look() {
            queue.fail(error, &controller.name, index, &self.notifications);
            return 0;
        }
        let error = loop {
            if found == FETCHED_MAX || *bytes_left == 0 || context.turn_commands() == 0 {
                break None;
            }
            let (is_full, wants) = match requests {
                Requests::Blk(blk) => (blk.is_full(), true),
                Requests::Scsi(scsi) => (scsi.is_full(), scsi.wants(index) && scsi.scan.allows(index)),
            };
            if is_full || !wants {
                *bytes_left = if is_full { 0 } else { *bytes_left };
                break None;
            }
            let id = match ring.fetch(memory, chain) {
                Ok(Some(id)) => id,
                Ok(None) => {
                    if let Requests::Scsi(scsi) = requests {
                        scsi.scan.on_empty(index);
                    }
                    break None;
                }
                Err(error) => break Some(error),
            };
            found += 1;
            if let Requests::Scsi(scsi) = requests {
                scsi.scan.on_fetched(index);
            }
            let fetched = FetchedChain { queue: index as u16, id, chain, guest };
            let started = match (&mut *requests, &controller.backend) {
                (Requests::Blk(blk), Backend::Blk(backend)) => {
                    blk.start(&fetched, backend, write_through, self.flow, context)
                }
                (Requests::Scsi(scsi), _) => scsi.start(&fetched),
                // A controller remains what it is.
                (Requests::Blk(_), Backend::Scsi(_)) => break None,
            };
            match started {
                Ok(Started::InFlight(bytes)) => {
                    context.count_command(bytes);
                    *bytes_left = bytes_left.saturating_sub(bytes);
                    queue.in_flight += 1;
                }
                Ok(Started::Used(written)) => {
                    context.count_command(0);
                    ring.push_used(id, written);
                    queue.unpublished += 1;
                    if queue.unpublished == 1 {
                        unpublished.push(index as u16);
                    }
                }
                Err(error) => break Some(error),
            }
        };
        if let Some(error) = error {
            queue.fail(error, &controller.name, index, &self.notifications);
        }
        found
    }

    /// Continues commands that need more than their first request. Returns the number of those that have
    /// ended.
    pub(crate) fn resume(&mut self, context: &mut VhostContext<'_>) -> usize {
        let Requests::Scsi(scsi) = &mut self.requests else { return 0 };
        let guest =
            GuestView { memory: &self.memory, log: active_log(self.dirty_log.as_ref(), self.features) };
        scsi.pump(guest, context);
        self.return_chains()
    }

    /// Commands for task management functions are being searched: it has to be polled.
    #[inline]
    pub(crate) fn is_scanning(&self) -> bool {
        matches!(&self.requests, Requests::Scsi(scsi) if scsi.scan.is_pending())
    }

    /// The search for commands.
    pub(crate) fn scan_mut(&mut self) -> Option<&mut CommandScan> {
        match &mut self.requests {
            Requests::Scsi(scsi) => Some(&mut scsi.scan),
            Requests::Blk(_) => None,
        }
    }

    /// Whether [`resume`](Self::resume) makes progress.
    #[inline]
    pub(crate) fn wants_resume(&self) -> bool {
        matches!(&self.requests, Requests::Scsi(scsi) if scsi.wants_resume())
    }

    /// Whether a command waits for memory.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(&self.requests, Requests::Scsi(scsi) if scsi.is_waiting())
    }

    /// Something of other cores has changed for tasks.
    pub(crate) fn on_task_event(&mut self, functions: &[TaskManagement], is_closed: bool) {
        if let Requests::Scsi(scsi) = &mut self.requests {
            scsi.on_event(functions, is_closed);
        }
    }

    /// Whether its completions are handled in place.
    #[inline]
    pub(crate) fn completes_in_place(&self) -> bool {
        matches!(self.requests, Requests::Blk(_))
    }

    /// Requests of a block device have completed.
    #[inline]
    pub(crate) fn complete_in_place(&mut self, completions: &[bdev::Completion]) {
        let VhostDevice { memory, queues, requests, unpublished, features, .. } = self;
        let guest = GuestView { memory, log: active_log(self.dirty_log.as_ref(), *features) };
        let Requests::Blk(blk) = requests else { return };
        for completion in completions {
            if let Some(used) = blk.complete(completion, &guest) {
                return_chain(queues, unpublished, &used);
            }
        }
    }

    /// A request of a SCSI command has completed.
    #[inline]
    pub(crate) fn complete(&mut self, tag: u64, completion: bdev::Completion) {
        let guest =
            GuestView { memory: &self.memory, log: active_log(self.dirty_log.as_ref(), self.features) };
        let Requests::Scsi(scsi) = &mut self.requests else { return };
        scsi.complete(tag, completion, guest);
        self.return_chains();
    }

    fn return_chains(&mut self) -> usize {
        let Requests::Scsi(scsi) = &mut self.requests else { return 0 };
        let mut used = std::mem::take(&mut scsi.used);
        let count = used.len();
        for used in used.drain(..) {
            return_chain(&mut self.queues, &mut self.unpublished, &used);
        }
        if let Requests::Scsi(scsi) = &mut self.requests {
            scsi.used = used;
        }
        count
    }

    /// Makes used chains visible, and signals drivers that want it.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if !self.unpublished.is_empty() {
            self.publish_queues();
        }
        if let Requests::Scsi(scsi) = &mut self.requests {
            scsi.on_published();
        }
    }

    #[inline]
    fn publish_queues(&mut self) {
        let log = active_log(self.dirty_log.as_ref(), self.features);
        let coalescing = self.controller.coalescing;
        // A device that is not polled is idle, and would not send what is delayed.
        let is_paced = coalescing.is_on() && !self.is_armed;
        for index in self.unpublished.drain(..) {
            let queue = &mut self.queues[usize::from(index)];
            if is_paced {
                self.has_delayed_signals |=
                    queue.publish_paced(&coalescing, self.polled_ns, &self.notifications);
            } else {
                queue.publish(&self.notifications);
            }
            if let Some(log) = log {
                queue.log(&self.memory, log);
            }
        }
    }

    /// Makes used chains visible, and sends all signals: virtqueues stop or move.
    pub(crate) fn publish_at_once(&mut self) {
        self.publish();
        if std::mem::take(&mut self.has_delayed_signals) {
            self.queues.iter_mut().for_each(|queue| queue.signal_delayed(&self.notifications));
        }
    }

    #[cold]
    fn signal_if_due(&mut self) {
        let due = |queue: &mut Queue| queue.signal_if_due(self.polled_ns, &self.notifications);
        self.has_delayed_signals = self.queues.iter_mut().map(due).fold(false, |any, one| any | one);
    }

    /// Whether memory of the front-end was truncated.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.memory.is_poisoned()
            || self.inflight.as_ref().is_some_and(InflightRegion::is_poisoned)
            || self.dirty_log.as_ref().is_some_and(DirtyLog::is_poisoned)
    }

    /// Applies a changed controller.
    pub(crate) fn update_controller(&mut self, controller: &Arc<Controller>) {
        let is_resized = match (&controller.backend, &self.controller.backend) {
            (Backend::Blk(new), Backend::Blk(old)) => new.sectors != old.sectors,
            _ => false,
        };
        self.controller = controller.clone();
        if is_resized {
            self.announce_config();
        }
        if let (Requests::Scsi(scsi), Backend::Scsi(backend)) = (&mut self.requests, &controller.backend) {
            scsi.apply(&controller.name, backend);
        }
    }

    /// The driver has begun anew: its nexuses are lost.
    pub(crate) fn reset_requests(&mut self) {
        if let (Requests::Scsi(scsi), Backend::Scsi(backend)) = (&mut self.requests, &self.controller.backend)
        {
            scsi.reset(&self.controller.name, backend);
        }
    }

    /// Tells the front-end that the configuration space has changed.
    #[cold]
    fn announce_config(&mut self) {
        let Some(backend) = &self.backend else { return };
        let message = VhostUserHeader::request(BackendRequest::ConfigChange.to_wire(), 0).to_bytes();
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
        self.publish_at_once();
        self.queues.clear();
        self.memory.clear();
        (self.inflight, self.dirty_log, self.backend) = (None, None, None);
        match &mut self.requests {
            Requests::Blk(blk) => blk.clear(),
            Requests::Scsi(scsi) => scsi.close(),
        }
    }
}
