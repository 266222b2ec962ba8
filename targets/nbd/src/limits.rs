//! Maxima of a connection, each with its reason.

/// Connections of the target, unless its options say otherwise. The kernel's client alone opens several per
/// device.
pub(crate) const CONNECTIONS_DEFAULT: u32 = 1024;
/// The same, at most: the range of a core's slots.
pub(crate) const CONNECTIONS_MAX: u32 = 16_384;
/// Commands of a connection that are not answered: fio's and the kernel's usual depth. Further ones are not
/// read.
pub(crate) const COMMANDS_MAX: u32 = 128;
/// Replies that are not sent; while there are as many, no request is read. A read may have several.
pub(crate) const REPLIES_MAX: usize = 256;
/// Bytes of buffers that the commands and unsent replies of a connection have at most, once it has moved
/// data. One larger command is admitted alone.
pub(crate) const QUOTA_BYTES: usize = 8 << 20;
/// Most data of a read or write: what clients assume that do not ask for block sizes.
pub(crate) const PAYLOAD_MAX: u64 = 32 << 20;
/// Payload of a request that is rejected is skipped up to this length; beyond it the connection is closed.
pub(crate) const SKIPPED_PAYLOAD_MAX: u64 = 64 << 20;
/// Most data of a device's read: the largest buffer.
pub(crate) const READ_PIECE_BYTES: u64 = dma::BUFFER_BYTES_MAX as u64;
/// Most data of a device's write, so that a peer that never sends its payload has no more than this.
pub(crate) const WRITE_PIECE_BYTES: u64 = 256 << 10;
/// Largest unit of writes of a device (`write_unit_size`) that clients can write: a piece is one buffer, and
/// holds whole units.
pub(crate) const WRITE_UNIT_BYTES_MAX: u64 = dma::BUFFER_BYTES_MAX as u64;
/// Largest minimum block size that the protocol allows.
pub(crate) const MINIMUM_BYTES_MAX: u32 = 64 << 10;
/// Most blocks of a device's deallocation or write of zeroes.
pub(crate) const ZERO_PIECE_BLOCKS: u64 = 1 << 22;
/// Pieces of one command in flight.
pub(crate) const PIECES_MAX: u32 = 16;
/// A read of fewer bytes is not preceded by a search for a hole.
pub(crate) const HOLE_BYTES_MIN: u64 = 64 << 10;
/// Times that a write of a part of a block is repeated because another writer was first. Each time that
/// writer made progress; who loses as often competes with more writers of one block than there are
/// connections.
pub(crate) const EDGE_ATTEMPTS_MAX: u32 = 10_000;
/// Bytes received beside payload: requests, and the payload of short writes.
pub(crate) const RECEIVE_BYTES: usize = 16 << 10;
/// The same before the transmission phase, unless an option is longer.
pub(crate) const RECEIVE_BYTES_FIRST: usize = 512;
/// Longest data of an option: an export's name and as many queries.
pub(crate) const OPTION_BYTES_MAX: u32 = 12 << 10;
/// Data of a longer option is skipped up to this length; beyond it the connection is closed.
pub(crate) const SKIPPED_OPTION_MAX: u32 = 1 << 20;
/// Options of a connection: clients send a dozen.
pub(crate) const OPTIONS_MAX: u32 = 1024;
/// Bytes of answers to options that are not sent; above it no option is read.
pub(crate) const UNSENT_OPTIONS_MAX: usize = 64 << 10;
/// Bytes received on a connection in one poll.
pub(crate) const RECEIVE_BUDGET: usize = 1 << 20;
/// Time for the handshake.
pub(crate) const HANDSHAKE_TIMEOUT_NS: u64 = 10_000_000_000;
/// Exports of the target.
pub(crate) const EXPORTS_MAX: usize = 1024;
/// Bytes of an export's name and description.
pub(crate) const NAME_BYTES_MAX: usize = 255;
pub(crate) const DESCRIPTION_BYTES_MAX: usize = 1024;
