//! Bounds on the buffers that a queue, and the queues of a host, may hold.

use std::cell::Cell;
use std::rc::Rc;

use slots::Slot;

/// How many bytes of the core's buffers the commands of a queue may hold: few at first, more while the host proves that
/// it moves its data.
///
/// A host that sends no data that it was asked for, or reads none, keeps the buffers of its commands. So the window
/// starts small, and doubles each time that a window's worth of commands is finished while others wait and memory is to
/// spare. It is checked where buffers are taken; widening it costs only commands that were deferred.
///
/// What a queue has earned is not its own for good: beyond the first window it takes buffers only while all queues of the
/// core together leave the rest to others ([`HostBuffers::on_core`]). Hosts that move data for a while and then stall
/// would hold all of it otherwise.
#[derive(Clone, Copy, Debug)]
pub struct BufferWindow {
    pub(super) bytes: usize,
    /// Bytes at first, which a queue may always hold.
    pub(super) first: usize,
    bytes_max: usize,
    /// The command that found the window full. Once it is finished, so are those before it.
    pub(super) filled_by: Option<Slot>,
}

impl BufferWindow {
    /// No limit.
    pub const UNLIMITED: BufferWindow = BufferWindow::new(usize::MAX, usize::MAX);

    /// A window of `bytes` bytes that grows to `bytes_max`.
    pub const fn new(bytes: usize, bytes_max: usize) -> BufferWindow {
        let bytes = if bytes < bytes_max { bytes } else { bytes_max };
        BufferWindow { bytes, first: bytes, bytes_max, filled_by: None }
    }

    pub(super) fn double(&mut self) {
        self.bytes = self.bytes_max.min(self.bytes.saturating_mul(2));
    }
}

/// How many bytes of a core's buffers the commands of all queues of a host hold there, and how many they may.
///
/// A host may open as many queues as it likes, each of which may hold at least one command's buffers. So their sum is
/// bounded too, whatever their windows. It is counted where buffers are taken and returned, and nowhere shared between
/// cores.
#[derive(Debug)]
pub struct HostBuffers {
    bytes: Cell<usize>,
    bytes_max: usize,
    core: Rc<CoreBuffers>,
    /// Bytes of all queues of the core up to which they may hold more than their first windows.
    earned_max: usize,
}

/// Bytes of a core's buffers that the commands of all its queues hold.
#[derive(Debug, Default)]
pub struct CoreBuffers(Cell<usize>);

impl HostBuffers {
    /// At most `bytes_max` bytes, or one command.
    pub fn new(bytes_max: usize) -> HostBuffers {
        HostBuffers { bytes: Cell::new(0), bytes_max, core: Rc::default(), earned_max: usize::MAX }
    }

    /// Counts among the buffers of a core. Queues hold more than their first windows while the core's hold at most
    /// `earned_max` bytes.
    #[must_use]
    pub fn on_core(self, core: Rc<CoreBuffers>, earned_max: usize) -> HostBuffers {
        HostBuffers { core, earned_max, ..self }
    }

    /// Bytes that are held.
    pub fn bytes(&self) -> usize {
        self.bytes.get()
    }

    #[inline]
    pub(super) fn fits(&self, bytes: usize) -> bool {
        self.bytes.get() == 0 || self.bytes.get() + bytes <= self.bytes_max
    }

    /// Whether the core has buffers for a queue that holds its first window.
    #[inline]
    pub(super) fn fits_earned(&self, bytes: usize) -> bool {
        self.core.0.get() + bytes <= self.earned_max
    }

    #[inline]
    pub(super) fn add(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() + bytes);
        self.core.0.set(self.core.0.get() + bytes);
    }

    #[inline]
    pub(super) fn remove(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() - bytes);
        self.core.0.set(self.core.0.get() - bytes);
    }
}
