//! A user-space NVMe driver: polled, one queue pair per core, no locks and no copies on the I/O path.
//!
//! A [`Uri`] names a namespace, and [`Namespace::open`] opens it on a core. A [`Namespace`] is a
//! [`block_io::Channel`] of reads, writes, flushes, unmaps and write zeroes over every transport: PCI Express
//! (VFIO or UIO), vfio-user and TCP. [`Controller`] is the admin interface of a controller with a
//! memory-based transport, and [`AnyController`] one for every transport. [`fabrics`] is what transports of
//! connections share. A [`QueuePair`] takes every other [`Command`].
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use block_io::{Request, Tag};
//! let uri: nvme::Uri = "nvme+pcie://0000:03:00.0?ns=1".parse()?;
//! let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default())?;
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
//! The functions in table 1 of "SPDK: A development kit to build high performance storage applications" (Yang
//! et al., 2017), and their counterparts:
//!
//! | SPDK | this crate |
//! | --- | --- |
//! | probe | [`Controller::attach`]; `pci::enumerate` lists the functions |
//! | allocate I/O queue pair | [`Controller::qpair`], or [`Namespace::open`] |
//! | get namespace | [`Controller::namespace`], [`Namespace::of`] |
//! | read, write | [`Channel::submit`](block_io::Channel::submit) of a [`Namespace`]; [`Command::read`], [`Command::write`] with all options |
//! | dataset management | [`Op::Unmap`](block_io::Op::Unmap); [`Command::dataset_management`] |
//! | flush | [`Op::Flush`](block_io::Op::Flush); [`Command::flush`] |
//! | process completions of a queue pair | [`Channel::poll`](block_io::Channel::poll), [`QueuePair::poll_commands`] |
//! | raw admin command | [`Controller::admin`] |
//! | process admin completions | the owner core's reactor polls the admin queue; there is no call |
//!
//! A queue pair belongs to the core that created it; using it from two threads does not compile.
//! `docs/NVME.md` documents errors, counters and memory use.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod any_controller;
mod attached;
mod command;
mod controller;
mod descriptors;
mod device;
mod error;
pub mod fabrics;
mod handle;
mod host_credentials;
mod inject;
mod interrupt;
mod io_queue;
mod memory_based;
mod namespace;
mod namespace_info;
mod options;
mod owner;
mod passthrough;
mod qpair;
mod queue;
mod rdma;
mod registers;
mod registry;
mod rings;
mod shadow;
mod shared;
mod stats;
mod tcp;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod testing;
mod transport;
mod uri;
mod wait;

pub use crate::rdma::{RdmaAssociation, RdmaConnection, RdmaRemote};
pub use any_controller::AnyController;
pub use attached::{Answer, AttachedController, IoQueues, Opening};
pub use command::{Command, CommandCompletion};
pub use controller::Controller;
pub use descriptors::SLICES_MAX as DATA_SLICES_MAX;
pub use device::{DeviceError, DoorbellRegion, NvmeDevice, Registers};
pub use error::{AdminError, BadCompletion, ControllerFailure, NvmeOpenError};
pub use host_credentials::HostCredentials;
pub use inject::{CompletionFault, CompletionInjection};
pub use io_queue::IoQueue;
pub use namespace::Namespace;
pub use namespace_info::NamespaceInfo;
pub use options::{HostTls, InterruptMode, Options};
pub use passthrough::PassthroughOutput;
pub use qpair::QueuePair;
pub use queue::opcode_of;
pub use shared::{AdminData, AdminOutput, NvmeEvent};
pub use stats::{Costs, QueueStats};
pub use tcp::{GeneratedPsk, TcpAssociation, TcpConnection, TcpIoQueue, TcpRemote};
pub use uri::{PcieUri, RdmaUri, TcpUri, Uri, UriError, VfioUserUri};
pub use wire_nvme::protection::{self, MetadataFormat, Protection, ProtectionType};
