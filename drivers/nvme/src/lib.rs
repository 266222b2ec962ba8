//! A user-space NVMe driver: polled, one queue pair a core, no locks.
//!
//! [`Uri`] names a namespace, [`Namespace::open`] connects to it on a core, and a [`Namespace`] is a
//! [`ring::Channel`] of reads, writes, flushes, unmaps and write zeroes. Today's transport is
//! NVMe/TCP.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use ring::{Channel, Request, Tag};
//! let uri: nvme::Uri = "nvme+tcp://127.0.0.1:4420/nqn.2016-06.io.spdk:cnode1?ns=1".parse()?;
//! let reactor = reactor::Reactor::new(&reactor::Config::default())?;
//! let core = reactor.core();
//! reactor.block_on(async move {
//!     let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await?;
//!     let buffer = core.pool().take(4096).ok_or("no memory")?;
//!     let blocks = 4096 / namespace.block_size();
//!     namespace.submit(&mut vec![Request::read(Tag(0), 0, blocks, buffer)]);
//!     let mut done = Vec::new();
//!     while namespace.poll(&mut done) == 0 {
//!         core.next_event().await;
//!     }
//!     println!("{}", done[0].status());
//!     Ok(())
//! })
//! # }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod device;
mod error;
mod namespace;
mod options;
mod tcp;
mod uri;

pub use device::{Device, DeviceError, Dma, Doorbells, Registers};
pub use error::{AdminError, BadCompletion, Failure, OpenError};
pub use namespace::Namespace;
pub use options::{Interrupts, Options};
pub use uri::{PcieUri, TcpUri, Uri, UriError, VfioUserUri};
