//! A software model of an I/OAT function (CBDMA 3.3), for a driver that has no silicon.
//!
//! [`IoatModel`] are the registers and the engine that executes descriptors, in whatever [`ModelMemory`] they
//! name: sans-IO, a step at a time. An [`IoatServer`] serves one behind vfio-user, where a driver in another
//! process opens it by the path of a socket. An [`IoatFault`] makes it halt, stop, or lie.
//!
//! ```
//! use ioat_model::{IoatFault, IoatModel};
//! let mut model = IoatModel::new();
//! model.inject("halt-every=100".parse::<IoatFault>()?);
//! assert_eq!(model.read(wire_ioat::registers::VERSION, 1), 0x33);
//! # Ok::<(), ioat_model::InvalidIoatFault>(())
//! ```
//!
//! It is written from the same documents as the driver, by the same people: it finds errors of the driver,
//! and no misreading of the documents.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod client_memory;
mod fault;
mod model;
mod server;
mod session;

pub use fault::{InvalidIoatFault, IoatFault};
pub use model::{IoatModel, ModelMemory};
pub use server::{IoatServer, StopHandle};
