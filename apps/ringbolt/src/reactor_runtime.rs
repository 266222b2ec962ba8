//! Starts reactors from command-line options.

use std::sync::Arc;

use bdev::Registry;
use bdev::uring::ring_refusal;
use control::ManagedReactor;
use dma::Arena;
use os::{CpuSet, EventBackend};
use reactor::{IdlePolicy, ReactorHandle, Reactors};

use crate::command_error::CommandError;
use crate::machine_memory;
use crate::options::{EngineChoice, Idle, ReactorOptions};

/// Running reactors and the buffer arena that they share.
pub(crate) struct ReactorRuntime {
    pub(crate) reactors: Reactors,
    pub(crate) arena: Arc<Arena>,
    /// Memory of the machine.
    total_bytes: u64,
    cores: String,
}

impl ReactorRuntime {
    /// Starts a pinned reactor on each core of `cores`, or without `cores`, `count` reactors that are not pinned.
    pub(crate) fn start(
        options: &ReactorOptions,
        cores: Option<&str>,
        count: usize,
    ) -> Result<ReactorRuntime, CommandError> {
        ReactorRuntime::start_with(options, cores, count, false)
    }

    /// As [`start`](Self::start); with `shared`, buffers are in memory that other processes can map.
    pub(crate) fn start_with(
        options: &ReactorOptions,
        cores: Option<&str>,
        count: usize,
        shared: bool,
    ) -> Result<ReactorRuntime, CommandError> {
        let total_bytes = machine_memory::total_bytes();
        let limit_bytes = machine_memory::buffer_bytes(options.memory.as_deref(), total_bytes)?;
        let idle = match options.idle {
            Idle::Adaptive => IdlePolicy::default(),
            Idle::Spin => IdlePolicy::Spin,
            Idle::Sleep => IdlePolicy::Sleep,
        };
        let cpus = match cores {
            Some(text) => text.parse::<CpuSet>().and_then(CpuSet::checked).map_err(CommandError::usage)?,
            None => CpuSet::new(first_cores(count)).map_err(CommandError::environment)?,
        };
        let limit_bytes = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
        // Each connection and block device needs one.
        os::raise_descriptor_limit();
        let arena = Arena::new(dma::ArenaConfig { limit_bytes, shared, ..Default::default() });
        let pin = cores.is_some();
        let description =
            if pin { format!("{cpus}, pinned") } else { format!("{}, not pinned", cpus.cpus().len()) };
        let engine = match options.engine {
            EngineChoice::Auto => None,
            EngineChoice::Uring => Some(EventBackend::Uring),
            EngineChoice::Epoll => Some(EventBackend::Epoll),
        };
        let events = os::EventLoopConfig { backend: engine, ..os::EventLoopConfig::default() };
        let reactor_arena = arena.clone();
        let config = reactor::ReactorConfig {
            cpus,
            pin,
            idle,
            arena: reactor_arena,
            event_loop: events,
            ..Default::default()
        };
        let reactors = Reactors::start(&config).map_err(CommandError::environment)?;
        Ok(ReactorRuntime { reactors, arena, total_bytes, cores: description })
    }

    pub(crate) fn handles(&self) -> &[ReactorHandle] {
        self.reactors.handles()
    }

    /// The reactors with their thread IDs.
    pub(crate) fn reactors(&self) -> Result<Vec<ManagedReactor>, CommandError> {
        let one = |remote: &ReactorHandle| {
            let thread_id = remote.call(|_| thread_id()).map_err(CommandError::environment)?;
            Ok(ManagedReactor { handle: remote.clone(), thread_id })
        };
        self.handles().iter().map(one).collect()
    }

    /// The event engine, which all reactors share.
    pub(crate) fn engine(&self) -> Result<EventBackend, CommandError> {
        let first = self.handles().first().ok_or_else(|| CommandError::environment("no reactor runs"))?;
        first.call(|core| core.event_loop().backend()).map_err(CommandError::environment)
    }

    /// Why the reactors have no io_uring, if they have none.
    pub(crate) fn no_io_uring(&self) -> Result<Option<String>, CommandError> {
        if self.engine()? != EventBackend::Epoll {
            return Ok(None);
        }
        let refusal = self.reactors.uring_error();
        let refusal = refusal.map_or_else(|| "--engine=epoll".to_string(), ring_refusal);
        Ok(Some(refusal))
    }

    /// A registry whose devices in memory fit the machine, beside the I/O buffers.
    pub(crate) fn registry(&self) -> Registry {
        let registry = Registry::new();
        registry.limit_memory(self.total_bytes.saturating_sub(self.arena.limit_bytes() as u64));
        registry
    }

    /// Memory, engine and cores, as lines for the operator.
    pub(crate) fn describe(&self) -> Result<Vec<String>, CommandError> {
        let engine = match (self.engine()?, self.no_io_uring()?) {
            (EventBackend::Uring, _) => "engine: io_uring (files and sockets)".to_string(),
            (EventBackend::Virtual, _) => "engine: virtual".to_string(),
            (EventBackend::Epoll, reason) => {
                format!(
                    "engine: epoll; bdevs on files by AIO only, without io_uring: {}",
                    reason.unwrap_or_default()
                )
            }
        };
        Ok(vec![self.arena.describe(), engine, format!("cores: {}", self.cores)])
    }
}

/// The first `count` CPUs of this process, with made-up numbers beyond the last where there are fewer:
/// reactors that are not pinned need only distinct numbers.
fn first_cores(count: usize) -> Vec<u32> {
    let allowed = CpuSet::allowed();
    let allowed = allowed.cpus();
    let last = allowed.last().copied().unwrap_or(0);
    let beyond = (last + 1..).take(count.saturating_sub(allowed.len()));
    allowed.iter().copied().take(count).chain(beyond).collect()
}

/// The kernel's ID of the calling thread; 0 if `/proc` is not mounted.
fn thread_id() -> u64 {
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    link.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok()).unwrap_or(0)
}
