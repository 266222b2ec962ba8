//! Counters and cost measurement of queue pairs.

use os::clock;

macro_rules! counts {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// Counters of one queue pair since its creation.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct QueueStats {
            $($(#[doc = $doc])* pub $name: u64,)*
        }

        impl QueueStats {
            /// Number of counters.
            pub const LEN: usize = [$(stringify!($name)),*].len();

            /// The counters in the order of the fields.
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
    /// Submitted commands, including those rejected by the driver.
    submitted,
    /// Commands completed by the device or aborted by a reset.
    completed,
    /// Commands completed with an error.
    errors,
    /// Submitted batches of one or more commands, each with one submission doorbell update.
    batches,
    /// Batches that exceeded the free slots.
    full,
    /// Commands whose data was copied, because the device could not access it in place.
    bounced,
    /// Polls of the completion queue.
    polls,
    /// Polls that found no completion.
    idle_polls,
    /// Doorbell register writes: the sum of the two below.
    doorbells,
    /// Register writes of the submission queue tail doorbell.
    sq_doorbells,
    /// Register writes of the completion queue head doorbell.
    cq_doorbells,
    /// Tail updates through the shadow doorbell, with or without a register write.
    sq_shadows,
    /// Head updates through the shadow doorbell, with or without a register write.
    cq_shadows,
    /// Read-readiness events of the connection; TCP only.
    arrivals,
    /// Commands that exceeded the I/O timeout.
    timeouts,
    /// Controller resets since the queue pair was created.
    resets,
}

impl QueueStats {
    /// Sums two sets of counters, wrapping on overflow.
    #[must_use]
    pub fn plus(&self, other: &QueueStats) -> QueueStats {
        let (one, other) = (self.to_array(), other.to_array());
        QueueStats::from_array(std::array::from_fn(|at| one[at].wrapping_add(other[at])))
    }
}

/// Measured cost of submission and completion, accumulated while measurement was on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Commands submitted.
    pub submitted: u64,
    /// Time spent in submission, in nanoseconds.
    pub submit_ns: u64,
    /// Instructions spent in submission; 0 if they cannot be counted.
    pub submit_instructions: u64,
    /// Commands completed.
    pub completed: u64,
    /// Time spent in polls that found completions, in nanoseconds.
    pub complete_ns: u64,
    /// Instructions spent in polls that found completions; 0 if they cannot be counted.
    pub complete_instructions: u64,
}

/// Measures [`Costs`]: two clock reads per batch while on, one flag test while off.
#[derive(Default)]
pub(crate) struct CostMeter {
    on: bool,
    instructions: Option<os::InstructionCounter>,
    submitted: u64,
    submit_ticks: u64,
    submit_instructions: u64,
    completed: u64,
    complete_ticks: u64,
    complete_instructions: u64,
}

/// Clock and instruction counter at the start of a measurement.
#[derive(Clone, Copy)]
pub(crate) struct CostSample {
    ticks: u64,
    instructions: u64,
}

impl CostMeter {
    /// Enables or disables measurement. Instructions are counted if the system permits a process to count its own.
    pub(crate) fn set_enabled(&mut self, on: bool) {
        self.on = on;
        self.instructions = if on { os::InstructionCounter::for_this_thread().ok() } else { None };
    }

    #[inline(always)]
    pub(crate) fn begin(&self) -> Option<CostSample> {
        self.on.then(|| self.mark())
    }

    #[cold]
    fn mark(&self) -> CostSample {
        let instructions = self.instructions.as_ref().map_or(0, os::InstructionCounter::count);
        CostSample { ticks: clock::ticks(), instructions }
    }

    #[cold]
    pub(crate) fn submitted(&mut self, since: CostSample, count: usize) {
        let now = self.mark();
        self.submitted += count as u64;
        self.submit_ticks += now.ticks.wrapping_sub(since.ticks);
        self.submit_instructions += now.instructions.wrapping_sub(since.instructions);
    }

    #[cold]
    pub(crate) fn completed(&mut self, since: CostSample, count: usize) {
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
