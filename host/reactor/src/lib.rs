//! Reactors: one thread per core that polls while there is work and sleeps when there is none.
//!
//! [`Reactors`] starts one on each core of a set. A [`ReactorHandle`] posts closures to a reactor from
//! any thread; on the core itself, [`Core`] provides its event loop, its buffer pool and its tasks. A
//! [`Poller`] runs on every turn. Typed messages between cores go through a [`mailbox`].
//! Control threads, which may block, wait with [`blocking`].
//! A [`Reactor`] runs the same loop on the calling thread, for single-core programs.
//!
//! ```
//! let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default())?;
//! let core = reactor.core();
//! let answer = reactor.block_on(async move {
//!     core.sleep_ns(1000).await;
//!     42
//! });
//! assert_eq!(answer, 42);
//! # Ok::<(), reactor::StartError>(())
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod mailbox;

#[cfg(not(loom))]
pub mod blocking;
#[cfg(not(loom))]
mod core;
#[cfg(not(loom))]
mod executor;
#[cfg(not(loom))]
mod poller;
#[cfg(not(loom))]
mod reactor;
#[cfg(not(loom))]
mod reactors;
#[cfg(not(loom))]
mod stats;
mod sync;

#[cfg(not(loom))]
pub use crate::{
    core::{Core, MailboxReceiver, MailboxSender},
    poller::{Period, PollResult, Poller, Shutdown},
    reactor::{IdlePolicy, Reactor, ReactorConfig, StartError},
    reactors::{ReactorHandle, ReactorUnavailable, Reactors},
    stats::{PollerStats, ReactorStats},
};
