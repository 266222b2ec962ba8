//! Maxima, each with its reason.

/// Most data of a command: the largest buffer of a pool, so that a command needs one.
pub const TRANSFER_BYTES_MAX: u32 = dma::BUFFER_BYTES_MAX as u32;
/// Nexuses of a unit. A change visits each; there are as many registrants at most that matter.
pub const NEXUSES_MAX: usize = 1024;
/// Unit attentions of a nexus: there are fewer kinds.
pub const ATTENTIONS_MAX: usize = 16;
/// Subscribers of a unit: a core's, or a connection's.
pub(crate) const SUBSCRIBERS_MAX: usize = 4096;
/// Descriptors of an UNMAP: what fits into 4 KiB.
pub(crate) const UNMAP_DESCRIPTORS_MAX: usize = 255;
/// Extents of a GET LBA STATUS.
pub(crate) const EXTENTS_MAX: usize = 256;
/// Requests without data of a command that are in flight.
pub(crate) const RANGES_IN_FLIGHT_MAX: u32 = 16;
/// Blocks of such a request.
pub(crate) const RANGE_BLOCKS_MAX: u32 = 1 << 22;
/// Memory of a command on a long range.
pub(crate) const REPEAT_BYTES_MAX: u32 = 256 << 10;
/// Most blocks of a request of such a command: whole units of the device's writes, if a transfer can be as
/// large as one. A larger unit cannot be written in any way.
pub(crate) fn repeat_blocks_max(block_bytes: u32, unit_blocks: u32) -> u32 {
    let (most, unit_blocks) = ((REPEAT_BYTES_MAX / block_bytes).max(1), unit_blocks.max(1));
    let unit_bytes = u64::from(unit_blocks) * u64::from(block_bytes);
    if unit_bytes > TRANSFER_BYTES_MAX.into() { most } else { (most / unit_blocks).max(1) * unit_blocks }
}

/// Blocks of a WRITE SAME: what the command with a CDB of 10 bytes can say. libiscsi's tests write and read
/// as many blocks at once as they unmap by it, whatever the maximum transfer length is.
pub(crate) const WRITE_SAME_BLOCKS_MAX: u32 = 0xffff;
/// Times that a read and write of merged blocks is repeated because another write was first, each of which
/// made progress.
pub(crate) const MERGE_ATTEMPTS_MAX: u32 = 1000;
/// Target and segment descriptors of an EXTENDED COPY, and their bytes: initiators send one segment.
pub(crate) const COPY_TARGETS_MAX: usize = 16;
pub(crate) const COPY_SEGMENTS_MAX: usize = 16;
pub(crate) const COPY_LIST_BYTES_MAX: usize = 1024;
/// Blocks of a COMPARE AND WRITE: its length has eight bits.
pub(crate) const COMPARE_AND_WRITE_BLOCKS_MAX: u32 = 255;
/// Bytes of a parameter list: more than any that makes sense.
pub(crate) const PARAMETER_BYTES_MAX: u32 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_writes_are_divided_between_units() {
        for (unit_blocks, expected) in [(0, 512), (1, 512), (128, 512), (384, 384), (768, 768), (4096, 512)] {
            assert_eq!(repeat_blocks_max(512, unit_blocks), expected, "units of {unit_blocks} blocks");
        }
        assert_eq!(repeat_blocks_max(1 << 20, 1), 1, "a block that is larger than a piece");
    }
}
