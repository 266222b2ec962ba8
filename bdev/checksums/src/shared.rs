//! What the channels of a device, its owner and its user share.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use reactor::{MailboxSender, blocking};
use wire_blob::ChecksumsId;

use crate::layout::ChecksumLayout;
use crate::table::{Granted, TableStart};

/// Says to whom a byte of the device belongs, for the log.
pub type DescribeOffset = Box<dyn Fn(u64) -> Option<String> + Send + Sync>;

/// A message to the owner.
pub(crate) enum OwnerMessage {
    Begin {
        id: ChecksumsId,
        start: TableStart,
    },
    /// A channel wants regions.
    Want {
        seat: Arc<MailboxSender<Granted>>,
        token: u64,
        regions: Range<u32>,
        is_write: bool,
    },
    /// The block at this byte is not as it was written.
    Mismatch {
        offset: u64,
    },
    /// Write all checksums.
    Settle,
    /// The device is to be closed.
    Close,
}

/// What cores share of a device.
pub(crate) struct ChecksumShared {
    pub(crate) layout: ChecksumLayout,
    /// Of the device below.
    pub(crate) name: String,
    id: Mutex<ChecksumsId>,
    /// Data is verified, and regions are wanted; before, requests pass as they are.
    is_active: AtomicBool,
    owner: OnceLock<MailboxSender<OwnerMessage>>,
    is_closing: AtomicBool,
    /// Changes when channels are to forget regions that they do not use.
    trims: AtomicU64,
    mismatches: AtomicU64,
    dirty_regions: AtomicU32,
    progress: Mutex<Progress>,
    changed: Condvar,
    describe: Mutex<Option<DescribeOffset>>,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    is_started: bool,
    is_settled: bool,
    is_closed: bool,
    is_released: bool,
}

impl ChecksumShared {
    pub(crate) fn new(layout: ChecksumLayout, name: &str, id: ChecksumsId) -> Arc<ChecksumShared> {
        Arc::new(ChecksumShared {
            layout,
            name: name.to_string(),
            id: Mutex::new(id),
            is_active: AtomicBool::new(false),
            owner: OnceLock::new(),
            is_closing: AtomicBool::new(false),
            trims: AtomicU64::new(0),
            mismatches: AtomicU64::new(0),
            dirty_regions: AtomicU32::new(0),
            progress: Mutex::default(),
            changed: Condvar::new(),
            describe: Mutex::default(),
        })
    }

    pub(crate) fn id(&self) -> ChecksumsId {
        *sync::lock(&self.id)
    }

    pub(crate) fn set_owner(&self, owner: MailboxSender<OwnerMessage>) {
        // A device has one owner.
        _ = self.owner.set(owner);
    }

    /// Sends a message to the owner; returns it if the mailbox is full, or there is no owner.
    pub(crate) fn send(&self, message: OwnerMessage) -> Result<(), OwnerMessage> {
        match self.owner.get() {
            Some(owner) => owner.send(message),
            None => Err(message),
        }
    }

    /// Has the owner close the device below, on any thread.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
        // It wakes the owner, which is awake if its mailbox is full.
        _ = self.send(OwnerMessage::Close);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// [`send`](Self::send) by a thread that may wait.
    pub(crate) fn send_blocking(&self, message: OwnerMessage) {
        let mut message = message;
        while let Err(returned) = self.send(message) {
            if self.is_closed() {
                return;
            }
            message = returned;
            blocking::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn begin(&self, id: ChecksumsId, start: TableStart, describe: DescribeOffset) {
        *sync::lock(&self.id) = id;
        *sync::lock(&self.describe) = Some(describe);
        self.is_active.store(true, Ordering::Release);
        self.send_blocking(OwnerMessage::Begin { id, start });
    }

    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }

    pub(crate) fn trim(&self) {
        self.trims.fetch_add(1, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn trims(&self) -> u64 {
        self.trims.load(Ordering::Relaxed)
    }

    pub(crate) fn count_mismatch(&self) {
        self.mismatches.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn mismatches(&self) -> u64 {
        self.mismatches.load(Ordering::Relaxed)
    }

    pub(crate) fn set_dirty_regions(&self, regions: u32) {
        self.dirty_regions.store(regions, Ordering::Relaxed);
    }

    pub(crate) fn dirty_regions(&self) -> u32 {
        self.dirty_regions.load(Ordering::Relaxed)
    }

    /// Whose the byte is.
    pub(crate) fn describe(&self, offset: u64) -> Option<String> {
        sync::lock(&self.describe).as_ref().and_then(|describe| describe(offset))
    }

    pub(crate) fn set_started(&self) {
        self.set(|progress| progress.is_started = true);
    }

    pub(crate) fn set_settled(&self, is_settled: bool) {
        self.set(|progress| progress.is_settled = is_settled);
    }

    /// The owner takes no messages any more.
    pub(crate) fn set_closed(&self) {
        self.set(|progress| progress.is_closed = true);
    }

    /// The owner has closed the device below.
    pub(crate) fn set_released(&self) {
        self.set(|progress| progress.is_released = true);
    }

    fn set(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut sync::lock(&self.progress));
        self.changed.notify_all();
    }

    /// Whether no message is taken any more.
    pub(crate) fn is_closed(&self) -> bool {
        sync::lock(&self.progress).is_closed
    }

    /// Waits until the checksums are there.
    pub(crate) fn wait_started(&self, timeout: Duration) -> bool {
        self.wait(timeout, |progress| progress.is_started)
    }

    /// Waits until all checksums are durable.
    pub(crate) fn wait_settled(&self, timeout: Duration) -> bool {
        self.wait(timeout, |progress| progress.is_settled)
    }

    pub(crate) fn wait_released(&self, timeout: Duration) -> bool {
        self.wait(timeout, |progress| progress.is_released)
    }

    fn wait(&self, timeout: Duration, is_done: impl Fn(&Progress) -> bool) -> bool {
        let done = |progress: &mut Progress| is_done(progress).then_some(());
        blocking::wait_until(&self.progress, &self.changed, timeout, done).is_ok()
    }
}
