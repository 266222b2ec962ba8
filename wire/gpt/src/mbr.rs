//! The protective MBR, block 0.

use codec::DecodeError;

use crate::{PRIMARY_LBA, put, u32_at};

/// Bytes of an MBR, at the start of block 0.
pub const MBR_BYTES: usize = 512;

const PARTITIONS_AT: usize = 446;
const PARTITION_BYTES: usize = 16;
const PARTITIONS: usize = 4;
/// Within a partition's record.
const START_CHS_AT: usize = 1;
const TYPE_AT: usize = 4;
const END_CHS_AT: usize = 5;
const START_AT: usize = 8;
const BLOCKS_AT: usize = 12;
const SIGNATURE_AT: usize = 510;
const SIGNATURE: [u8; 2] = [0x55, 0xaa];
const _: () = assert!(PARTITIONS_AT + PARTITIONS * PARTITION_BYTES == SIGNATURE_AT);
/// The type of a partition that protects a GUID partition table.
const PROTECTIVE: u8 = 0xee;

/// An MBR with a partition that protects a GUID partition table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtectiveMbr {
    /// Blocks of that partition: all after the MBR, or `u32::MAX` where these are more, or not known.
    pub blocks: u32,
}

impl ProtectiveMbr {
    /// The MBR of a device of `device_blocks`, at least 2.
    pub fn of(device_blocks: u64) -> ProtectiveMbr {
        ProtectiveMbr { blocks: u32::try_from(device_blocks.saturating_sub(1)).unwrap_or(u32::MAX) }
    }

    /// Whether it is one of a device with that many blocks: the partition reaches the device's end, or says
    /// nothing about it. As with SPDK, of more than 32 bits the lower ones do as well.
    pub fn covers(&self, device_blocks: u64) -> bool {
        self.blocks == u32::MAX || self.blocks == device_blocks.wrapping_sub(1) as u32
    }

    /// Decodes block 0. Of its partitions the first one of the protective type counts.
    ///
    /// # Errors
    /// The first field that no protective MBR has: the signature, no partition of the type, or its start.
    pub fn decode(block: &[u8]) -> Result<ProtectiveMbr, DecodeError> {
        let Some(mbr) = block.first_chunk::<MBR_BYTES>() else {
            return Err(DecodeError::Length { what: "the MBR", got: block.len(), need: MBR_BYTES });
        };
        if mbr[SIGNATURE_AT..] != SIGNATURE {
            let found = u16::from_le_bytes([mbr[SIGNATURE_AT], mbr[SIGNATURE_AT + 1]]);
            return Err(DecodeError::value("the signature of the MBR", SIGNATURE_AT as u32, found.into()));
        }
        let records = (0..PARTITIONS).map(|index| PARTITIONS_AT + index * PARTITION_BYTES);
        let Some(at) = records.into_iter().find(|at| mbr[at + TYPE_AT] == PROTECTIVE) else {
            let at = PARTITIONS_AT + TYPE_AT;
            return Err(DecodeError::value("the type of the MBR's partition", at as u32, mbr[at].into()));
        };
        let start = u32_at(mbr, at + START_AT);
        if u64::from(start) != PRIMARY_LBA {
            let at = (at + START_AT) as u32;
            return Err(DecodeError::value("the start of the protective partition", at, start.into()));
        }
        Ok(ProtectiveMbr { blocks: u32_at(mbr, at + BLOCKS_AT) })
    }

    /// Encodes block 0, of which the protective partition is the first and only one.
    pub fn encode(&self) -> [u8; MBR_BYTES] {
        let mut out = [0; MBR_BYTES];
        let record = &mut out[PARTITIONS_AT..];
        // Head 0, sector 2, cylinder 0; and the largest address, as the end is beyond it.
        put(record, START_CHS_AT, &[0, 2, 0]);
        record[TYPE_AT] = PROTECTIVE;
        put(record, END_CHS_AT, &[0xff; 3]);
        put(record, START_AT, &(PRIMARY_LBA as u32).to_le_bytes());
        put(record, BLOCKS_AT, &self.blocks.to_le_bytes());
        put(&mut out, SIGNATURE_AT, &SIGNATURE);
        out
    }
}
