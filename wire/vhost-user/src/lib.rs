//! Encodings of the vhost-user protocol: a virtio device that another process serves.
//!
//! The front-end (QEMU, libblkio) sends [`VhostUserHeader`]s with a [`FrontendRequest`] and a payload over a
//! UNIX socket, and the back-end answers some of them. Memory is described by [`MemoryRegion`]s, whose files
//! travel as ancillary data of the socket and are not part of this crate; virtqueues by [`VringState`] and
//! [`VringAddress`]. With [`ProtocolFeatures::BACKEND_REQ`] the back-end sends [`BackendRequest`]s over a
//! socket of their own. Requests in flight survive the back-end in a region that both map ([`inflight`]).
//! Integers are in host byte order; this crate assumes little-endian, as on every machine that Ringbolt
//! supports. The format is that of QEMU's `docs/interop/vhost-user.rst`.
//!
//! ```
//! use wire_vhost_user::{FrontendRequest, VhostUserHeader, VringState};
//! let state = VringState { index: 1, value: 256 };
//! let header = VhostUserHeader::request(FrontendRequest::SetVringNum.to_wire(), VringState::SIZE as u32);
//! assert_eq!(VhostUserHeader::decode(&header.to_bytes())?, header);
//! assert_eq!(VringState::decode(&state.to_bytes())?, state);
//! # Ok::<(), wire_vhost_user::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod header;
pub mod inflight;
mod memory;
mod requests;
mod vring;

pub use codec::DecodeError;
pub use header::{BackendRequest, FrontendRequest, VhostUserHeader};
pub use memory::{LogBase, MemoryRegion, MemoryTable, SingleRegion};
pub use requests::{ConfigHeader, ProtocolFeatures, U64Payload};
pub use vring::{VringAddress, VringDescriptor, VringState, vring_flags};

/// Maximum number of memory regions in a [`MemoryTable`], and of file descriptors with a message
/// (`VHOST_MEMORY_BASELINE_NREGIONS`).
pub const TABLE_REGIONS_MAX: usize = 8;
/// Maximum bytes of a device's configuration space in a message (`VHOST_USER_MAX_CONFIG_SIZE`).
pub const CONFIG_BYTES_MAX: usize = 256;
