//! Records of a replica's checkpoints.

use codec::{DecodeError, crc32c};

use crate::fields::{array, check_location, check_zero, open, put, seal, u32_at, u64_at};
use crate::{LogHeader, SECTOR_BYTES};

const MAGIC: [u8; 4] = *b"RBCK";

/// What a checkpoint of a replica made durable. There are two records behind the area of the log, written in turn; the
/// valid one with the higher generation counts. The applied requests follow in the sectors after this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointRecord {
    /// The log, a UUID.
    pub log: [u8; 16],
    /// Counts records, and with them starts of the replica: each start writes one.
    pub generation: u64,
    /// Every entry up to this sequence is in place.
    pub sequence: u64,
    /// Epoch of that entry; 0 if there is none.
    pub epoch: u32,
    /// The replica has the data of every entry up to there. Otherwise it needs a copy of all objects.
    pub complete: bool,
    /// Bytes of the applied requests.
    pub applied_bytes: u32,
    /// CRC32C of the applied requests.
    pub applied_crc32c: u32,
}

impl CheckpointRecord {
    /// Slot of the record.
    pub fn slot(&self) -> u32 {
        (self.generation % 2) as u32
    }

    /// Encodes the record for its slot.
    pub fn encode(&self) -> [u8; SECTOR_BYTES] {
        let mut out = [0; SECTOR_BYTES];
        out[6] = self.complete.into();
        put(&mut out, 12, self.slot().to_le_bytes());
        put(&mut out, 16, self.log);
        put(&mut out, 32, self.generation.to_le_bytes());
        put(&mut out, 40, self.sequence.to_le_bytes());
        put(&mut out, 48, self.epoch.to_le_bytes());
        put(&mut out, 52, self.applied_bytes.to_le_bytes());
        put(&mut out, 56, self.applied_crc32c.to_le_bytes());
        seal(&mut out, MAGIC);
        out
    }

    /// Decodes the first sector of a slot, and checks the bytes that follow it.
    ///
    /// # Errors
    /// The first field that no record of this version, log and slot has; applied requests with another checksum.
    pub fn decode(from: &[u8], log: [u8; 16], slot: u32) -> Result<CheckpointRecord, DecodeError> {
        let what = "the checkpoint record";
        let Some((head, rest)) = from.split_at_checked(SECTOR_BYTES) else {
            return Err(DecodeError::Length { what, got: from.len(), need: SECTOR_BYTES });
        };
        open(what, head, SECTOR_BYTES, MAGIC)?;
        check_location(u32_at(head, 12).into(), slot.into(), 12)?;
        check_zero("a reserved field of the checkpoint record", head, 7..8)?;
        check_zero("a reserved field of the checkpoint record", head, 60..SECTOR_BYTES)?;
        if array(head, 16) != log {
            return Err(DecodeError::Text { what, reason: "it belongs to another log" });
        }
        let record = CheckpointRecord {
            log,
            generation: u64_at(head, 32),
            sequence: u64_at(head, 40),
            epoch: u32_at(head, 48),
            complete: match head[6] {
                0 | 1 => head[6] == 1,
                other => return Err(DecodeError::value("whether the replica is complete", 6, other.into())),
            },
            applied_bytes: u32_at(head, 52),
            applied_crc32c: u32_at(head, 56),
        };
        for (number, at) in [(record.generation, 32), (record.sequence, 40)] {
            if number >= LogHeader::LIMIT {
                return Err(DecodeError::value("a number of the checkpoint record", at, number));
            }
        }
        if record.slot() != slot {
            return Err(DecodeError::value("the generation of the checkpoint record", 32, record.generation));
        }
        let Some(applied) = rest.get(..record.applied_bytes as usize) else {
            return Err(DecodeError::value(
                "the length of the applied requests",
                52,
                record.applied_bytes.into(),
            ));
        };
        if crc32c(applied) != record.applied_crc32c {
            return Err(DecodeError::Text { what, reason: "the checksum of the applied requests is wrong" });
        }
        Ok(record)
    }
}
