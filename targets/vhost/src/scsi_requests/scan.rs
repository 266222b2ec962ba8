//! The search for commands that a driver made available before a task management function was executed.

use wire_virtio::scsi::EVENT_QUEUE;

use crate::device::VhostDevice;

/// What is left to fetch before functions have been executed for all commands that they concern.
///
/// Functions concern commands that the driver made available before, and a poll fetches only some of those. So a function
/// stays pending over as many polls as these need, and each aborts what it has fetched. Nothing else is fetched meanwhile:
/// the virtqueues have at most as many chains as descriptors, and the commands in flight have a maximum, so it ends.
#[derive(Debug, Default)]
pub(crate) struct CommandScan {
    is_wanted: bool,
    /// Chains of each virtqueue that are left to fetch; empty without a scan.
    left: Vec<u16>,
}

impl CommandScan {
    /// Functions have come: the next poll begins it, anew if it has begun.
    pub(crate) fn request(&mut self) {
        self.is_wanted = true;
    }

    /// Whether it has not ended.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.is_wanted || !self.left.is_empty()
    }

    /// Ends it: nothing is fetched any more.
    pub(crate) fn cancel(&mut self) {
        *self = CommandScan::default();
    }

    /// Whether chains of a virtqueue may be fetched.
    #[inline]
    pub(crate) fn allows(&self, queue: usize) -> bool {
        self.left.is_empty() || queue <= EVENT_QUEUE || self.left.get(queue).is_some_and(|left| *left > 0)
    }

    /// A chain of a virtqueue was fetched.
    #[inline]
    pub(crate) fn on_fetched(&mut self, queue: usize) {
        if let Some(left) = self.left.get_mut(queue) {
            *left = left.saturating_sub(1);
        }
    }

    /// A virtqueue has no chain.
    #[inline]
    pub(crate) fn on_empty(&mut self, queue: usize) {
        if let Some(left) = self.left.get_mut(queue) {
            *left = 0;
        }
    }

    /// A poll begins.
    fn begin(&mut self, available_max: impl Iterator<Item = u16>) {
        if std::mem::take(&mut self.is_wanted) {
            self.left = available_max.collect();
        }
    }

    /// A poll has fetched. `is_served` says whether chains of a virtqueue are fetched at all.
    fn finish(&mut self, is_served: impl Fn(usize) -> bool) {
        let mut left = self.left.iter().enumerate();
        if left.all(|(queue, left)| *left == 0 || !is_served(queue)) {
            self.left = Vec::new();
        }
    }
}

impl VhostDevice {
    /// Before chains are fetched.
    #[cold]
    pub(crate) fn begin_scan(&mut self) {
        let VhostDevice { queues, .. } = self;
        let available = queues.iter().enumerate().map(|(index, queue)| match &queue.ring {
            Some(ring) if index > EVENT_QUEUE && queue.is_served() => ring.available_max(),
            _ => 0,
        });
        let available: Vec<u16> = available.collect();
        if let Some(scan) = self.scan_mut() {
            scan.begin(available.into_iter());
        }
    }

    /// The device is not polled any more.
    #[inline]
    pub(crate) fn cancel_scan(&mut self) {
        if let Some(scan) = self.scan_mut() {
            scan.cancel();
        }
    }

    /// After chains were fetched.
    #[cold]
    pub(crate) fn finish_scan(&mut self) {
        let served: Vec<bool> = self.queues.iter().map(|queue| queue.is_served()).collect();
        if let Some(scan) = self.scan_mut() {
            scan.finish(|queue| served.get(queue).is_some_and(|is_served| *is_served));
        }
    }
}
