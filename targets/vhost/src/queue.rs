//! A virtqueue of a connection: what the front-end has set, and the ring while it runs.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use wire_vhost_user::VringAddress;
use wire_virtio::Features;
use wire_virtio::packed::RingPosition;

use crate::coalescing::{Coalescing, NotificationPacer};
use crate::core::{DriverNotification, Notifications};
use crate::dirty_log::DirtyLog;
use crate::failure::{RequestError, RingError};
use crate::memory::GuestMemory;
use crate::vring::{Ring, RingSetup};

/// A virtqueue.
///
/// It runs from `SET_VRING_KICK`, once size, addresses and memory are known, to `GET_VRING_BASE`; requests are fetched
/// while it runs and is enabled.
#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) size: u16,
    pub(crate) address: Option<VringAddress>,
    /// Where it begins when it is started.
    pub(crate) base: u32,
    pub(crate) is_enabled: bool,
    /// It was started by the front-end. It runs when it has a ring.
    pub(crate) is_started: bool,
    /// It is being stopped: nothing is fetched.
    pub(crate) is_stopping: bool,
    /// The driver violated the specification; nothing is fetched until it is started again.
    pub(crate) is_broken: bool,
    /// Its areas are not mapped any more; nothing is fetched until they are.
    pub(crate) is_unmapped: bool,
    /// The driver's notifications; `None` if it has to be polled.
    pub(crate) kick: Option<DriverNotification>,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) error: Option<OwnedFd>,
    pub(crate) ring: Option<Ring>,
    /// Requests in flight.
    pub(crate) in_flight: u32,
    /// Used chains that are not published; it is on the list of such queues if there are any.
    pub(crate) unpublished: u32,
    pacer: NotificationPacer,
}

/// Checks a number of entries, which is at least 1, against the format of the negotiated features. Indices of
/// split virtqueues wrap at 2^16, which the number has to divide (virtio 1.2, section 2.7); those of packed
/// ones at the number itself (section 2.8).
pub(crate) fn check_size(size: u16, features: Features) -> Result<(), RequestError> {
    let is_split = !features.is_empty() && !features.contains(Features::RING_PACKED);
    match is_split && !size.is_power_of_two() {
        true => Err(RequestError::QueueSize(size.into())),
        false => Ok(()),
    }
}

impl Queue {
    /// Whether requests are fetched.
    #[inline]
    pub(crate) fn is_served(&self) -> bool {
        let is_blocked = self.is_stopping || self.is_broken || self.is_unmapped;
        self.is_enabled && self.ring.is_some() && !is_blocked
    }

    /// Checks the number of entries that the front-end has set, and where it is to begin, before it is
    /// started: features, which say what they mean, may have been set after them.
    pub(crate) fn check_start(&self, features: Features) -> Result<(), RequestError> {
        let size = self.size;
        if size == 0 || self.ring.is_some() {
            return Ok(());
        }
        check_size(size, features)?;
        if !features.contains(Features::RING_PACKED) {
            return Ok(());
        }
        // The next available and the next used entry, each with its wrap counter.
        let entries = [self.base, self.base >> 16].map(|half| RingPosition::from_bits(half as u16).index);
        match entries.into_iter().find(|entry| *entry >= size) {
            Some(entry) => Err(RequestError::QueueBase { entry, size }),
            None => Ok(()),
        }
    }

    /// Whether it starts as soon as everything that it needs is known.
    pub(crate) fn wants_start(&self) -> bool {
        self.is_started && self.ring.is_none()
    }

    /// Starts it if everything that it needs is known. Returns whether it has started.
    pub(crate) fn try_start(&mut self, memory: &GuestMemory, setup: RingSetup) -> bool {
        let Some(address) = &self.address else { return false };
        self.ring = Ring::new(memory, address, setup);
        self.ring.is_some()
    }

    /// Finds its areas again after memory or addresses have changed. What is in flight is returned where they were.
    pub(crate) fn relocate(&mut self, memory: &GuestMemory) {
        if let (Some(ring), Some(address)) = (&mut self.ring, &self.address) {
            self.is_unmapped = ring.relocate(memory, address).is_none();
        }
    }

    /// Ends it; nothing is in flight. Returns its base.
    pub(crate) fn stop(&mut self) -> u32 {
        if let Some(ring) = self.ring.take() {
            self.base = ring.stop();
        }
        self.is_started = false;
        self.is_stopping = false;
        self.is_broken = false;
        self.is_unmapped = false;
        self.kick = None;
        self.base
    }

    /// Logs what the device writes of the virtqueue itself.
    pub(crate) fn log(&self, memory: &GuestMemory, log: &DirtyLog) {
        let (Some(ring), Some(address)) = (&self.ring, &self.address) else { return };
        for (start, bytes) in ring.written_areas(address) {
            if let Some(start) = memory.guest_address(start) {
                log.mark(start, bytes);
            }
        }
    }

    /// Makes used chains visible, and signals the driver if it wants that.
    #[inline]
    pub(crate) fn publish(&mut self, notifications: &Rc<Notifications>) {
        self.unpublished = 0;
        if let Some(ring) = &mut self.ring
            && ring.publish()
        {
            self.signal(notifications);
        }
    }

    /// As [`publish`](Self::publish), but the signal may be delayed. Returns whether it is: [`signal_if_due`] sends it.
    ///
    /// [`signal_if_due`]: Self::signal_if_due
    pub(crate) fn publish_paced(
        &mut self,
        coalescing: &Coalescing,
        now_ns: u64,
        notifications: &Rc<Notifications>,
    ) -> bool {
        self.pacer.count(coalescing, std::mem::take(&mut self.unpublished), now_ns);
        if let Some(ring) = &mut self.ring
            && ring.publish()
            && self.pacer.notifies(now_ns)
        {
            self.signal(notifications);
        }
        self.pacer.is_pending()
    }

    /// Sends a signal that was delayed and is due. Returns whether one is delayed still.
    pub(crate) fn signal_if_due(&mut self, now_ns: u64, notifications: &Rc<Notifications>) -> bool {
        if self.pacer.take_due(now_ns) {
            self.signal(notifications);
        }
        self.pacer.is_pending()
    }

    /// Sends a signal that was delayed.
    pub(crate) fn signal_delayed(&mut self, notifications: &Rc<Notifications>) {
        if self.pacer.take_pending() {
            self.signal(notifications);
        }
    }

    #[inline]
    fn signal(&self, notifications: &Rc<Notifications>) {
        if let Some(call) = &self.call {
            notifications.signal(call.as_fd());
        }
    }

    /// Ends the service of a driver that violated the specification.
    #[cold]
    pub(crate) fn fail(
        &mut self,
        error: RingError,
        name: &str,
        index: usize,
        notifications: &Rc<Notifications>,
    ) {
        log::warn!(target: "vhost", "{name}: virtqueue {index} is not served any more: {error}");
        self.is_broken = true;
        if let Some(error) = &self.error {
            notifications.signal(error.as_fd());
        }
    }
}
