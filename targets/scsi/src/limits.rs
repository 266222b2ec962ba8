//! Maxima, each with its reason.

/// Most data of a command: the largest buffer of a pool, so that a command needs one.
pub const TRANSFER_BYTES_MAX: u32 = dma::BUFFER_BYTES_MAX as u32;
/// Nexuses of a unit. A change visits each; there are as many registrants at most that matter.
pub const NEXUSES_MAX: usize = 1024;
/// Unit attentions of a nexus: there are fewer kinds.
pub const ATTENTIONS_MAX: usize = 16;
/// Subscribers of a unit: a core's, or a connection's.
pub(crate) const SUBSCRIBERS_MAX: usize = 4096;
