//! What a queue pair counts, and what it costs.

use sys::clock;

macro_rules! counts {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// Counts of one queue pair since it was made.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct QueueStats {
            $($(#[doc = $doc])* pub $name: u64,)*
        }

        impl QueueStats {
            /// How many counts there are.
            pub const LEN: usize = [$(stringify!($name)),*].len();

            /// The counts in the order of the fields.
            pub fn to_array(&self) -> [u64; Self::LEN] {
                [$(self.$name),*]
            }

            /// The inverse of [`to_array`](Self::to_array).
            pub fn from_array(counts: [u64; Self::LEN]) -> QueueStats {
                let [$($name),*] = counts;
                QueueStats { $($name),* }
            }
        }
    };
}

counts! {
    /// Commands submitted, those that were refused at once included.
    submitted,
    /// Commands completed by the device, or ended by a reset.
    completed,
    /// Of those, how many failed.
    errors,
    /// Submissions of one or more commands: how often the submission doorbell was due.
    batches,
    /// Submissions that did not fit whole.
    full,
    /// Looks at the completion queue.
    polls,
    /// Of those, how many found nothing.
    idle_polls,
    /// Doorbells that were rung: both kinds below.
    doorbells,
    /// Doorbells of the submission queue: registers that were written.
    sq_doorbells,
    /// Doorbells of the completion queue.
    cq_doorbells,
    /// Tails that were left in a shadow doorbell, whether its register was written as well or not.
    sq_shadows,
    /// Heads, likewise.
    cq_shadows,
    /// Times that a connection had something to be read; over TCP alone.
    arrivals,
    /// Commands that took longer than they may.
    timeouts,
    /// Resets of the controller that the queue pair lived through.
    resets,
}

impl QueueStats {
    /// The sum of two.
    #[must_use]
    pub fn plus(&self, other: &QueueStats) -> QueueStats {
        let (one, other) = (self.to_array(), other.to_array());
        QueueStats::from_array(std::array::from_fn(|at| one[at].wrapping_add(other[at])))
    }
}

/// What submission and completion cost, while counting was on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Commands that were submitted in that time.
    pub submitted: u64,
    /// Nanoseconds that submitting them took.
    pub submit_ns: u64,
    /// Instructions that submitting them took; 0 where they cannot be counted.
    pub submit_instructions: u64,
    /// Commands that were completed in that time.
    pub completed: u64,
    /// Nanoseconds of the looks at the completion queue that found something.
    pub complete_ns: u64,
    /// Instructions of those looks; 0 where they cannot be counted.
    pub complete_instructions: u64,
}

/// The meter behind [`Costs`]: two readings of the clock a batch while on, one test of a flag while off.
#[derive(Default)]
pub(crate) struct Meter {
    on: bool,
    instructions: Option<sys::Instructions>,
    submitted: u64,
    submit_ticks: u64,
    submit_instructions: u64,
    completed: u64,
    complete_ticks: u64,
    complete_instructions: u64,
}

/// When a measurement began.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    ticks: u64,
    instructions: u64,
}

impl Meter {
    /// Turns counting on or off. Instructions are counted where the machine lets a process count its own.
    pub(crate) fn switch(&mut self, on: bool) {
        self.on = on;
        self.instructions = if on { sys::Instructions::of_this_thread().ok() } else { None };
    }

    #[inline(always)]
    pub(crate) fn begin(&self) -> Option<Mark> {
        self.on.then(|| self.mark())
    }

    #[cold]
    fn mark(&self) -> Mark {
        let instructions = self.instructions.as_ref().map_or(0, sys::Instructions::count);
        Mark { ticks: clock::ticks(), instructions }
    }

    #[cold]
    pub(crate) fn submitted(&mut self, since: Mark, count: usize) {
        let now = self.mark();
        self.submitted += count as u64;
        self.submit_ticks += now.ticks.wrapping_sub(since.ticks);
        self.submit_instructions += now.instructions.wrapping_sub(since.instructions);
    }

    #[cold]
    pub(crate) fn completed(&mut self, since: Mark, count: usize) {
        if count == 0 {
            return;
        }
        let now = self.mark();
        self.completed += count as u64;
        self.complete_ticks += now.ticks.wrapping_sub(since.ticks);
        self.complete_instructions += now.instructions.wrapping_sub(since.instructions);
    }

    pub(crate) fn costs(&self) -> Costs {
        Costs {
            submitted: self.submitted,
            submit_ns: clock::ticks_to_ns(self.submit_ticks),
            submit_instructions: self.submit_instructions,
            completed: self.completed,
            complete_ns: clock::ticks_to_ns(self.complete_ticks),
            complete_instructions: self.complete_instructions,
        }
    }
}
