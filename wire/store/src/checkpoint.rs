//! Records of a replica's checkpoints.

use codec::{DecodeError, crc32c};

use crate::fields::{array, check_location, check_zero, open, put, seal, u32_at, u64_at};
use crate::{BLOCK_BYTES, LogHeader, OBJECT_BYTES, ObjectId, SECTOR_BYTES};

const MAGIC: [u8; 4] = *b"RBCK";

/// What a checkpoint of a replica made durable. There are two records behind the area of the log, written in turn; the
/// valid one with the higher generation counts. The applied requests follow in the sectors after this one, then the unsettled
/// blocks.
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
    /// CRC32C of the applied requests and of the unsettled blocks.
    pub applied_crc32c: u32,
    /// Number of the unsettled blocks, which follow the applied requests.
    pub unsettled: u32,
    /// Later writes may be in the device's volatile cache alone: they are there as long as the machine was not booted again.
    /// The boot, a UUID; 0 if every write that counts is durable.
    pub boot: [u8; 16],
}

/// A block that has, or may have, the data of an entry that is no longer in the log: a crash left the entry after one that
/// was not written completely, or its primary never had it. Other replicas have other data there until it is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsettledBlock {
    /// The object.
    pub object: ObjectId,
    /// Offset of the block in the object, in bytes.
    pub offset: u32,
    /// CRC32C of the data.
    pub data_crc32c: u32,
    /// The client that wrote it, and its number of the request.
    pub client: u64,
    /// See `client`.
    pub client_number: u64,
}

impl UnsettledBlock {
    /// Bytes of one.
    pub const SIZE: usize = 48;

    /// Appends the encoding.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut bytes = [0; UnsettledBlock::SIZE];
        self.object.put(&mut bytes, 0);
        put(&mut bytes, 24, self.offset.to_le_bytes());
        put(&mut bytes, 28, self.data_crc32c.to_le_bytes());
        put(&mut bytes, 32, self.client.to_le_bytes());
        put(&mut bytes, 40, self.client_number.to_le_bytes());
        out.extend_from_slice(&bytes);
    }

    /// Decodes those of a record, whose length and checksum were checked with it.
    ///
    /// # Errors
    /// A block that is not in an object.
    pub fn decode_all(from: &[u8]) -> Result<Vec<UnsettledBlock>, DecodeError> {
        let decode = |bytes: &[u8; UnsettledBlock::SIZE]| {
            let offset = u32_at(bytes, 24);
            if !offset.is_multiple_of(BLOCK_BYTES as u32) || offset >= OBJECT_BYTES as u32 {
                return Err(DecodeError::value("the offset of an unsettled block", 24, offset.into()));
            }
            Ok(UnsettledBlock {
                object: ObjectId::at(bytes, 0),
                offset,
                data_crc32c: u32_at(bytes, 28),
                client: u64_at(bytes, 32),
                client_number: u64_at(bytes, 40),
            })
        };
        from.as_chunks().0.iter().map(decode).collect()
    }
}

const _: () = assert!(ObjectId::SIZE == 24);

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
        put(&mut out, 60, self.unsettled.to_le_bytes());
        put(&mut out, 64, self.boot);
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
        check_zero("a reserved field of the checkpoint record", head, 80..SECTOR_BYTES)?;
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
            unsettled: u32_at(head, 60),
            boot: array(head, 64),
        };
        for (number, at) in [(record.generation, 32), (record.sequence, 40)] {
            if number >= LogHeader::LIMIT {
                return Err(DecodeError::value("a number of the checkpoint record", at, number));
            }
        }
        if record.slot() != slot {
            return Err(DecodeError::value("the generation of the checkpoint record", 32, record.generation));
        }
        let unsettled_bytes = (record.unsettled as usize).saturating_mul(UnsettledBlock::SIZE);
        let bytes = (record.applied_bytes as usize).saturating_add(unsettled_bytes);
        let Some(following) = rest.get(..bytes) else {
            return Err(DecodeError::value("the length of what follows the record", 52, bytes as u64));
        };
        if crc32c(following) != record.applied_crc32c {
            return Err(DecodeError::Text { what, reason: "the checksum of what follows it is wrong" });
        }
        Ok(record)
    }
}
