//! A user-space NVMe driver: polled, one queue pair a core, no locks, no copies.
//!
//! [`Uri`] names a namespace, [`Namespace::open`] opens it on a core, and a [`Namespace`] is a
//! [`ring::Channel`] of reads, writes, flushes, unmaps and write zeroes, whatever is in between: PCI
//! Express (VFIO or UIO), vfio-user or TCP. [`Controller`] is the admin side of one that has its queues in
//! memory, [`QueuePair`] takes every other [`Command`].
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use ring::{Request, Tag};
//! let uri: nvme::Uri = "nvme+pcie://0000:03:00.0?ns=1".parse()?;
//! let reactor = reactor::Reactor::new(&reactor::Config::default())?;
//! let core = reactor.core();
//! reactor.block_on(async move {
//!     let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await?;
//!     let buffer = core.pool().take(4096).ok_or("no memory")?;
//!     let blocks = 4096 / namespace.block_size();
//!     let done = namespace.run(Request::read(Tag(0), 0, blocks, buffer)).await;
//!     println!("{}", done.status());
//!     Ok(())
//! })
//! # }
//! ```
//!
//! The functions of table 1 of "SPDK: A development kit to build high performance storage applications"
//! (Yang et al., 2017), and what stands for them here:
//!
//! | there | here |
//! | --- | --- |
//! | probe | [`Controller::attach`]; `pci::enumerate` lists what there is |
//! | allocate I/O queue pair | [`Controller::qpair`], or [`Namespace::open`] |
//! | get namespace | [`Controller::namespace`], [`Namespace::of`] |
//! | read, write | [`Channel::submit`](ring::Channel::submit) of a [`Namespace`]; [`Command::read`], [`Command::write`] with all options |
//! | dataset management | [`Op::Unmap`](ring::Op::Unmap); [`Command::dataset_management`] |
//! | flush | [`Op::Flush`](ring::Op::Flush); [`Command::flush`] |
//! | process completions of a queue pair | [`Channel::poll`](ring::Channel::poll), [`QueuePair::poll_commands`] |
//! | raw admin command | [`Controller::admin`] |
//! | process admin completions | the owner core's reactor does it: nothing to call |
//!
//! A queue pair belongs to the core that made it, and using it from two threads does not compile. `docs/NVME.md`
//! says what errors mean, what is counted and what memory is held.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod command;
mod controller;
mod device;
mod dma;
mod error;
mod inject;
mod interrupt;
mod namespace;
mod namespace_info;
mod options;
mod owner;
mod passthrough;
pub mod protection;
mod qpair;
mod queue;
mod registers;
mod registry;
mod rings;
mod shadow;
mod shared;
pub mod simulated;
mod stats;
mod tcp;
mod transport;
mod uri;
mod wait;

pub use command::{Command, Executed};
pub use controller::Controller;
pub use device::{Device, DeviceError, Dma, Doorbells, Registers};
pub use error::{AdminError, BadCompletion, Failure, OpenError};
pub use inject::{Fault, Injection};
pub use namespace::Namespace;
pub use namespace_info::{Metadata, NamespaceInfo, Protection, ProtectionType};
pub use options::{Interrupts, Options};
pub use passthrough::IoAnswer;
pub use qpair::QueuePair;
pub use queue::opcode_of;
pub use shared::{AdminAnswer, AdminData, Event};
pub use stats::{Costs, QueueStats};
pub use tcp::{Association, IoQueue, Membership};
pub use uri::{PcieUri, TcpUri, Uri, UriError, VfioUserUri};
