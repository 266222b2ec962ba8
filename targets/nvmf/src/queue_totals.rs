//! What the queues of a core have done.

use std::cell::Cell;

/// What the queues of a core have done, for `nvmf_get_stats`. Counted when a queue opens or closes and when
/// memory is short, never for each command: those of an open queue are its own.
#[derive(Debug, Default)]
pub(crate) struct QueueTotals {
    admin_queues: Cell<u64>,
    io_queues: Cell<u64>,
    /// Commands that I/O queues have completed which are closed now.
    closed_commands: Cell<u64>,
    buffer_waits: Cell<u64>,
}

/// The values of [`QueueTotals`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueTotalsSnapshot {
    pub(crate) admin_queues: u64,
    pub(crate) io_queues: u64,
    pub(crate) closed_commands: u64,
    pub(crate) buffer_waits: u64,
}

fn add(counter: &Cell<u64>, count: u64) {
    counter.set(counter.get() + count);
}

impl QueueTotals {
    pub(crate) fn opened(&self, qid: u16) {
        add(if qid == 0 { &self.admin_queues } else { &self.io_queues }, 1);
    }

    /// An I/O queue that completed this many commands has closed.
    pub(crate) fn closed(&self, commands: u64) {
        add(&self.closed_commands, commands);
    }

    /// There was no buffer for a command, which is retried.
    #[cold]
    pub(crate) fn waited_for_buffer(&self) {
        add(&self.buffer_waits, 1);
    }

    pub(crate) fn snapshot(&self) -> QueueTotalsSnapshot {
        QueueTotalsSnapshot {
            admin_queues: self.admin_queues.get(),
            io_queues: self.io_queues.get(),
            closed_commands: self.closed_commands.get(),
            buffer_waits: self.buffer_waits.get(),
        }
    }
}
