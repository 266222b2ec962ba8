//! Which threads do the work of a store: one a core does all, or, as in the paper, prioritized threads (Oh et
//! al., section IV-B).
//!
//! With prioritized threads, the core that owns a partition is a *priority thread*: it has the connections,
//! the log, the replication and the metadata, and is pinned. What moves and compares data in place is with a
//! *non-priority thread*, partition modulo threads, which sleeps until a priority thread wakes it. A wake-up
//! selects an idle core of the non-priority pool if there is one; else the kernel places the thread in the
//! pool.
//!
//! Once it has something to do, a non-priority thread may sleep between: completions of the device wake it,
//! and so does the memory of a read, which is its own, when that comes back. This is neither counted nor does
//! it place the thread.

mod placement;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bdev::{BlockDevice, Registry};
use control::json::{Value, json};
use os::{CpuSet, EventLoopConfig, ThreadId};
use reactor::{Core, IdlePolicy, ReactorConfig, ReactorHandle, Reactors};

use crate::StoreError;
use placement::{CorePool, Placed};

/// The threads of a store.
#[derive(Clone, Default)]
pub enum StoreThreads {
    /// The core that owns a partition does all of its work.
    #[default]
    RunToCompletion,
    /// The core that owns a partition is its priority thread; one of these has its data in place.
    Prioritized(Arc<NonPriorityThreads>),
}

control::choices! {
    /// Which threads do the work of a store.
    #[derive(Default)]
    pub enum ThreadMode {
        /// The core that owns a partition.
        #[default]
        RunToCompletion = "run-to-completion",
        /// A priority thread and a non-priority thread.
        Prioritized = "prioritized",
    }
}

/// Products that other threads than a program's reactors do not use: an NVMe bdev waits for a turn of these
/// before it identifies a namespace again, and a RAID bdev may get one as a base.
const NOT_PRIORITIZED: [&str; 2] = ["NVMe disk", "Raid Volume"];

impl StoreThreads {
    /// Refuses devices that non-priority threads must not use.
    pub(crate) fn check(&self, registry: &Registry, devices: &[&BlockDevice]) -> Result<(), StoreError> {
        if self.mode() == ThreadMode::RunToCompletion {
            return Ok(());
        }
        for device in devices {
            let products = registry.below(device).into_iter().map(|below| below.bdev().product_name());
            let mut products = products.chain([device.bdev().product_name()]);
            if let Some(product) = products.find(|product| NOT_PRIORITIZED.contains(product)) {
                let name = device.name();
                let reason =
                    format!("{name} is or has a {product}, which works with run-to-completion threads only");
                return Err(StoreError::Geometry(reason));
            }
        }
        Ok(())
    }

    /// Their mode.
    pub fn mode(&self) -> ThreadMode {
        match self {
            StoreThreads::RunToCompletion => ThreadMode::RunToCompletion,
            StoreThreads::Prioritized(_) => ThreadMode::Prioritized,
        }
    }

    /// The thread that has the data in place of a partition, if that is not its owner.
    pub(crate) fn of_partition(&self, index: u32) -> Option<Arc<NonPriorityThread>> {
        match self {
            StoreThreads::RunToCompletion => None,
            StoreThreads::Prioritized(threads) => Some(threads.of_partition(index)),
        }
    }

    /// The threads that others are woken by.
    pub(crate) fn prioritized(&self) -> Option<&NonPriorityThreads> {
        match self {
            StoreThreads::RunToCompletion => None,
            StoreThreads::Prioritized(threads) => Some(threads),
        }
    }

    /// Mode, pools, wake-ups and placements, as methods report them.
    pub(crate) fn describe(&self) -> Value {
        let mode = self.mode().name();
        let Some(threads) = self.prioritized() else { return json!({ "mode": mode }) };
        let wakes = threads.wakes().map(|(cause, count)| (cause.to_string(), Value::from(count)));
        let (idle_core, kernel) = threads.placements();
        json!({
            "mode": mode,
            "non_priority_threads": threads.threads.len(),
            "priority_cores": threads.priority_cores,
            "non_priority_cores": threads.pool.as_ref().map(|pool| pool.to_string()),
            "pools_overlap": threads.pool.as_ref().is_some_and(|pool| pool.overlaps()),
            "wakes": Value::Object(wakes.into_iter().collect()),
            "placed_on_idle_core": idle_core,
            "placed_by_kernel": kernel,
        })
    }
}

/// What a priority thread wakes a non-priority thread for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WakeCause {
    /// More committed entries than the threshold.
    Count,
    /// The oldest committed entry has waited for the time-out.
    Time,
    /// The log, the memory of entries or the space is short, or the store closes.
    FullLog,
    /// A read waits until what the log has of its object is in place (W3).
    WaitingRead,
    /// A read needs what is in place (R2, R3).
    Read,
    /// A checkpoint.
    Checkpoint,
    /// Checksums of many overwritten blocks, or the end.
    Other,
}

impl WakeCause {
    const ALL: [WakeCause; 7] = [
        WakeCause::Count,
        WakeCause::Time,
        WakeCause::FullLog,
        WakeCause::WaitingRead,
        WakeCause::Read,
        WakeCause::Checkpoint,
        WakeCause::Other,
    ];

    /// As methods and metrics name it.
    fn name(self) -> &'static str {
        match self {
            WakeCause::Count => "count",
            WakeCause::Time => "time",
            WakeCause::FullLog => "full_log",
            WakeCause::WaitingRead => "waiting_read",
            WakeCause::Read => "read",
            WakeCause::Checkpoint => "checkpoint",
            WakeCause::Other => "other",
        }
    }
}

/// Wake-ups since the threads started.
#[derive(Default)]
struct WakeCounters {
    by_cause: [AtomicU64; WakeCause::ALL.len()],
    idle_core: AtomicU64,
    kernel: AtomicU64,
}

/// The non-priority threads of a program. Stores that use them are closed before it is dropped.
pub struct NonPriorityThreads {
    threads: Vec<Arc<NonPriorityThread>>,
    counters: Arc<WakeCounters>,
    /// The cores of the priority threads.
    priority_cores: String,
    /// Where the threads run; `None` if only the kernel places them.
    pool: Option<Arc<CorePool>>,
    #[expect(dead_code, reason = "they stop when it is dropped")]
    reactors: Option<Reactors>,
}

impl NonPriorityThreads {
    /// Pins the reactors, which are the priority threads, each to its core, and starts a non-priority thread
    /// for each other core that this process may use. Without any, one for each core. A reactor that is not
    /// pinned yet gets one of the cores from the one with index `first` on, so that several programs of a
    /// machine get different ones. Reactors of the program have indices below `first_index`. The caller is on
    /// none of them.
    ///
    /// # Errors
    /// [`StoreError::Threads`]; [`StoreError::Closed`] if a reactor has stopped.
    pub fn start(
        reactors: &[ReactorHandle],
        first: usize,
        first_index: usize,
    ) -> Result<Arc<NonPriorityThreads>, StoreError> {
        let allowed = CpuSet::allowed().cpus().to_vec();
        let mut priority = Vec::new();
        for (index, reactor) in reactors.iter().enumerate() {
            let selected = allowed[(first + index) % allowed.len()];
            let pin = move |core: &Core| match core.cpu() {
                Some(cpu) => Ok(cpu),
                None => os::pin_thread_to(selected).map(|()| selected),
            };
            let pinned = reactor.call(pin).map_err(|_| StoreError::Closed)?;
            priority.push(pinned.map_err(|error| failed(&error))?);
        }
        let pool = Arc::new(CorePool::new(&allowed, &priority));
        let started = start_pool(reactors, first_index, &pool)?;
        let (mut threads, counters) = (Vec::new(), Arc::default());
        for handle in started.handles() {
            let id = handle.call(|_| ThreadId::current()).map_err(|_| StoreError::Closed)?;
            os::set_thread_cpus(id, pool.cpus()).map_err(|error| failed(&error))?;
            let placed = Some(Placed::new(pool.clone(), id));
            threads.push(NonPriorityThread::new(handle.clone(), placed, &counters));
        }
        let priority_cores = CpuSet::new(priority).map_or_else(|_| String::new(), |set| set.to_string());
        let (pool, reactors) = (Some(pool), Some(started));
        Ok(Arc::new(NonPriorityThreads { threads, counters, priority_cores, pool, reactors }))
    }

    /// These reactors, on which the caller is not, and which the kernel places.
    ///
    /// # Panics
    /// If there are none.
    pub fn on(reactors: &[ReactorHandle]) -> Arc<NonPriorityThreads> {
        assert!(!reactors.is_empty(), "a store needs a thread");
        let counters = Arc::default();
        let thread = |handle: &ReactorHandle| NonPriorityThread::new(handle.clone(), None, &counters);
        let threads = reactors.iter().map(thread).collect();
        let priority_cores = String::new();
        Arc::new(NonPriorityThreads { threads, counters, priority_cores, pool: None, reactors: None })
    }

    /// Their reactors.
    pub(crate) fn handles(&self) -> Vec<ReactorHandle> {
        self.threads.iter().map(|thread| thread.handle.clone()).collect()
    }

    /// Wake-ups by cause, as methods and metrics name it, since the threads started.
    pub fn wakes(&self) -> [(&'static str, u64); WakeCause::ALL.len()] {
        let counts = &self.counters.by_cause;
        WakeCause::ALL.map(|cause| (cause.name(), counts[cause as usize].load(Ordering::Relaxed)))
    }

    /// Of these, those that selected an idle core, and those that left the placement to the kernel.
    pub(crate) fn placements(&self) -> (u64, u64) {
        let WakeCounters { idle_core, kernel, .. } = &*self.counters;
        (idle_core.load(Ordering::Relaxed), kernel.load(Ordering::Relaxed))
    }

    fn of_partition(&self, index: u32) -> Arc<NonPriorityThread> {
        self.threads[index as usize % self.threads.len()].clone()
    }
}

/// Starts a thread for each core of the pool. They have the arena and the kernel interface of the priority
/// threads, so that a device that works there works here.
fn start_pool(
    priority: &[ReactorHandle],
    first_index: usize,
    pool: &CorePool,
) -> Result<Reactors, StoreError> {
    let of_first = |core: &Core| (core.pool().arena().clone(), core.event_loop().backend());
    let first = priority.first().ok_or(StoreError::Closed)?;
    let (arena, backend) = first.call(of_first).map_err(|_| StoreError::Closed)?;
    let config = ReactorConfig {
        cpus: CpuSet::new(pool.cpus().to_vec()).map_err(|error| failed(&error))?,
        first_index,
        name: "nonpriority",
        pin: false,
        idle: IdlePolicy::Sleep,
        arena,
        event_loop: EventLoopConfig { backend: Some(backend), ..EventLoopConfig::default() },
        ..ReactorConfig::default()
    };
    Reactors::start(&config).map_err(|error| failed(&error))
}

fn failed(error: &dyn std::error::Error) -> StoreError {
    StoreError::Threads(error.to_string())
}

/// A non-priority thread, for the priority threads that wake it.
pub(crate) struct NonPriorityThread {
    pub(crate) handle: ReactorHandle,
    /// Partitions for which it has something to do.
    working: AtomicU32,
    placed: Option<Placed>,
    counters: Arc<WakeCounters>,
}

impl NonPriorityThread {
    fn new(
        handle: ReactorHandle,
        placed: Option<Placed>,
        counters: &Arc<WakeCounters>,
    ) -> Arc<NonPriorityThread> {
        Arc::new(NonPriorityThread { handle, working: AtomicU32::new(0), placed, counters: counters.clone() })
    }

    /// It gets something to do for another partition. If it sleeps, it is placed: what follows wakes it.
    pub(crate) fn begin(&self, cause: WakeCause) {
        if self.working.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        self.counters.by_cause[cause as usize].fetch_add(1, Ordering::Relaxed);
        let is_placed = self.placed.as_ref().is_some_and(Placed::select);
        let counter = if is_placed { &self.counters.idle_core } else { &self.counters.kernel };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// It found more to do for a partition, before it slept.
    pub(crate) fn resume(&self) {
        self.working.fetch_add(1, Ordering::AcqRel);
    }

    /// It has nothing to do for one of these partitions.
    pub(crate) fn end(&self) {
        if self.working.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(placed) = &self.placed
        {
            placed.release();
        }
    }
}
