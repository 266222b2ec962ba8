//! Reactors from options.

use std::sync::Arc;

use memory::Arena;
use reactor::{IdlePolicy, Reactors, Remote};
use sys::{CpuSet, Engine};

use crate::cli::{self, EngineChoice, Idle};
use crate::failure::Failure;
use crate::state;

/// Running reactors, and the memory that they share.
pub(crate) struct Machine {
    pub(crate) reactors: Reactors,
    pub(crate) arena: Arc<Arena>,
    cores: String,
}

impl Machine {
    /// Starts one reactor on each core of `cores`, pinned; where none are named, `count` that are not.
    pub(crate) fn start(
        options: &cli::Machine,
        cores: Option<&str>,
        count: usize,
    ) -> Result<Machine, Failure> {
        Machine::start_with(options, cores, count, false)
    }

    /// As [`start`](Self::start); with `shared`, other processes can be given the buffers.
    pub(crate) fn start_with(
        options: &cli::Machine,
        cores: Option<&str>,
        count: usize,
        shared: bool,
    ) -> Result<Machine, Failure> {
        let limit_bytes = cli::size(&options.memory)
            .map_err(|hint| Failure::usage(format!("--memory={}: {hint}", options.memory)))?;
        let idle = match options.idle {
            Idle::Adaptive => IdlePolicy::default(),
            Idle::Spin => IdlePolicy::Spin,
            Idle::Sleep => IdlePolicy::Sleep,
        };
        let cpus = match cores {
            Some(text) => text.parse::<CpuSet>().and_then(CpuSet::checked).map_err(Failure::usage)?,
            None => CpuSet::new(first_cores(count)).map_err(Failure::machine)?,
        };
        let limit_bytes = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
        let arena = Arena::new(memory::Config { limit_bytes, shared, ..Default::default() });
        let pin = cores.is_some();
        let described =
            if pin { format!("{cpus}, pinned") } else { format!("{}, not pinned", cpus.cpus().len()) };
        let engine = match options.engine {
            EngineChoice::Auto => None,
            EngineChoice::Uring => Some(Engine::Uring),
            EngineChoice::Epoll => Some(Engine::Epoll),
        };
        let events = sys::Config { engine, ..sys::Config::default() };
        let arena_too = arena.clone();
        let config = reactor::Config { cpus, pin, idle, arena: arena_too, events, ..Default::default() };
        let reactors = Reactors::start(&config).map_err(Failure::machine)?;
        Ok(Machine { reactors, arena, cores: described })
    }

    pub(crate) fn remotes(&self) -> &[Remote] {
        self.reactors.remotes()
    }

    /// The reactors, each with its thread.
    pub(crate) fn reactors(&self) -> Result<Vec<state::Reactor>, Failure> {
        let one = |remote: &Remote| {
            let thread_id = remote.call(|_| thread_id()).map_err(Failure::machine)?;
            Ok(state::Reactor { remote: remote.clone(), thread_id })
        };
        self.remotes().iter().map(one).collect()
    }

    /// The engine of the first reactor; they are all alike.
    pub(crate) fn engine(&self) -> Result<Engine, Failure> {
        let first = self.remotes().first().ok_or_else(|| Failure::machine("no reactor runs"))?;
        first.call(|core| core.events().engine()).map_err(Failure::machine)
    }

    /// What was found, in lines for the operator.
    pub(crate) fn describe(&self) -> Result<Vec<String>, Failure> {
        let engine = match self.engine()? {
            Engine::Uring => "engine: io_uring (files and sockets)",
            Engine::Epoll => {
                "engine: epoll (without io_uring there is no bdev_uring; kernel.io_uring_disabled=0 as root allows it)"
            }
        };
        Ok(vec![self.arena.describe(), engine.to_string(), format!("cores: {}", self.cores)])
    }
}

/// The first `count` cores of this process, beginning again where there are fewer: not pinned, the
/// kernel spreads them.
fn first_cores(count: usize) -> Vec<u32> {
    let allowed = CpuSet::allowed();
    let allowed = allowed.cpus();
    let last = allowed.last().copied().unwrap_or(0);
    let beyond = (last + 1..).take(count.saturating_sub(allowed.len()));
    allowed.iter().copied().take(count).chain(beyond).collect()
}

/// The kernel's number of the calling thread.
fn thread_id() -> u64 {
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    link.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok()).unwrap_or(0)
}
