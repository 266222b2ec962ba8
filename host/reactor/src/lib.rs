//! Reactors: one thread a core, that polls while there is work and sleeps when there is none.
//!
//! [`Reactors`] starts one on each core of a set. A [`Remote`] posts work to one from any thread;
//! on the core itself, [`Core`] gives its ring to the kernel, its buffers, its tasks. What runs
//! every turn is a [`Poller`]. Typed messages between cores go through a [`mailbox`].
//! A [`Reactor`] on the calling thread does the same for a program of one core, without the rest.
//!
//! ```
//! let reactor = reactor::Reactor::new(&reactor::Config::default())?;
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
    core::{Core, Receiver, Sender},
    poller::{Period, Poller, Shutdown, Work},
    reactor::{Config, IdlePolicy, Reactor, StartError},
    reactors::{Gone, Reactors, Remote},
    stats::{PollerStats, ReactorStats},
};
