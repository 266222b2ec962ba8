//! A driver of Intel's I/OAT DMA engine (CBDMA 3.x): copies and fills, without interrupts and without a lock.
//!
//! [`IoatFunction::open`] opens a function by its [`IoatAddress`]: a PCI function, or a device that another
//! process serves by vfio-user. A [`FunctionDevice`] gives it memory of a core. An [`IoatChannel`] belongs to
//! that core. It has a ring of descriptors in memory that the engine reads, and
//! a word that the engine writes when it has completed some: [`IoatChannel::submit`] fills the ring and tells
//! the engine once a batch, [`IoatChannel::poll`] looks at the word. Where registers and ring are is an
//! [`IoatDevice`]'s matter; clocks are the caller's. A request owns what it is made for until the engine is
//! done with it: after an error the channel is reset first.
//!
//! **No silicon was seen.** Layouts are those of [`wire_ioat`], from documents; the peer of all tests is a
//! model of registers and descriptors, which this project has written, too.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod access;
mod address;
mod channel;
mod device;
mod function;
mod request;

pub use access::IoatOpenError;
pub use address::{InvalidIoatAddress, IoatAddress};
pub use channel::{IoatChannel, RING_ENTRIES_MAX};
pub use device::IoatDevice;
pub use function::{FunctionDevice, IoatFunction, IoatMemoryError};
pub use request::{IoatCompletion, IoatError, IoatFailure, IoatOp, IoatRequest};
