//! The array of partition entries.

use codec::{DecodeError, crc32};
use uuid::Uuid;

use crate::{GptHeader, array, guid_at, put, u64_at};

/// Bytes of an entry; one may have more, which are reserved.
pub const ENTRY_BYTES: usize = 128;

/// UTF-16 code units of a partition's name.
pub const NAME_UNITS: usize = 36;

const UNIQUE_GUID_AT: usize = 16;
const FIRST_AT: usize = 32;
const LAST_AT: usize = 40;
const ATTRIBUTES_AT: usize = 48;
const NAME_AT: usize = 56;
const _: () = assert!(NAME_AT + 2 * NAME_UNITS == ENTRY_BYTES);

/// The entry of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptEntry {
    /// What the partition is for; not zero.
    pub type_guid: Uuid,
    /// Identity of the partition.
    pub unique_guid: Uuid,
    /// Its first block.
    pub first_lba: u64,
    /// Its last block, which may be before the first one in an entry that is not valid.
    pub last_lba: u64,
    /// Bits of the specification and of the type.
    pub attributes: u64,
    /// Its name, in UTF-16, up to the first zero.
    pub name: [u16; NAME_UNITS],
}

impl GptEntry {
    /// Decodes an entry; `None` if it is not used.
    ///
    /// # Errors
    /// `from` is too short.
    pub fn decode(from: &[u8]) -> Result<Option<GptEntry>, DecodeError> {
        if from.len() < ENTRY_BYTES {
            return Err(DecodeError::Length { what: "an entry", got: from.len(), need: ENTRY_BYTES });
        }
        let type_guid = guid_at(from, 0);
        Ok((!type_guid.is_nil()).then(|| GptEntry {
            type_guid,
            unique_guid: guid_at(from, UNIQUE_GUID_AT),
            first_lba: u64_at(from, FIRST_AT),
            last_lba: u64_at(from, LAST_AT),
            attributes: u64_at(from, ATTRIBUTES_AT),
            name: std::array::from_fn(|unit| u16::from_le_bytes(array(from, NAME_AT + 2 * unit))),
        }))
    }

    /// Encodes the entry; the inverse of [`decode`](Self::decode).
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        put(&mut out, 0, &self.type_guid.to_bytes_le());
        put(&mut out, UNIQUE_GUID_AT, &self.unique_guid.to_bytes_le());
        put(&mut out, FIRST_AT, &self.first_lba.to_le_bytes());
        put(&mut out, LAST_AT, &self.last_lba.to_le_bytes());
        put(&mut out, ATTRIBUTES_AT, &self.attributes.to_le_bytes());
        for (index, unit) in self.name.iter().enumerate() {
            put(&mut out, NAME_AT + 2 * index, &unit.to_le_bytes());
        }
        out
    }

    /// Blocks of the partition; `None` if it ends before it begins.
    pub fn blocks(&self) -> Option<u64> {
        self.last_lba.checked_sub(self.first_lba)?.checked_add(1)
    }

    /// The name as text: what is no Unicode is replaced.
    pub fn name_text(&self) -> String {
        let end = self.name.iter().position(|unit| *unit == 0).unwrap_or(NAME_UNITS);
        String::from_utf16_lossy(&self.name[..end])
    }
}

/// A header with the entries that are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GptTable {
    /// The header.
    pub header: GptHeader,
    /// The entries in their order, each with its index in the array.
    pub entries: Vec<(u32, GptEntry)>,
}

impl GptTable {
    /// Decodes the array of a header; bytes after it are ignored.
    ///
    /// # Errors
    /// `array` is too short, or its CRC is not that of the header.
    pub fn decode(header: &GptHeader, array: &[u8]) -> Result<GptTable, DecodeError> {
        let need = header.entries_bytes() as usize;
        let Some(array) = array.get(..need) else {
            return Err(DecodeError::Length { what: "the array of entries", got: array.len(), need });
        };
        let crc = crc32(array);
        if crc != header.entries_crc {
            return Err(DecodeError::value("the CRC of the entries", 88, header.entries_crc.into()));
        }
        let mut entries = Vec::new();
        for (index, entry) in (0..).zip(array.chunks_exact(header.entry_bytes.max(1) as usize)) {
            if let Some(entry) = GptEntry::decode(entry)? {
                entries.push((index, entry));
            }
        }
        Ok(GptTable { header: *header, entries })
    }

    /// Encodes the array, and the header that belongs to it.
    ///
    /// # Panics
    /// If an index is beyond the header's number of entries.
    pub fn encode(&self) -> (GptHeader, Vec<u8>) {
        let mut array = vec![0; self.header.entries_bytes() as usize];
        for (index, entry) in &self.entries {
            assert!(*index < self.header.entry_count, "entry {index} of {}", self.header.entry_count);
            put(&mut array, (*index * self.header.entry_bytes) as usize, &entry.encode());
        }
        (GptHeader { entries_crc: crc32(&array), ..self.header }, array)
    }

    /// The entries whose partitions are within the usable blocks and have none in common with another, each
    /// with its index, and the indices of the others.
    pub fn valid_entries(&self) -> (Vec<(u32, GptEntry)>, Vec<u32>) {
        let is_inside = |entry: &GptEntry| {
            entry.first_lba >= self.header.first_usable_lba
                && entry.last_lba <= self.header.last_usable_lba
                && entry.first_lba <= entry.last_lba
        };
        let mut sorted: Vec<usize> =
            (0..self.entries.len()).filter(|place| is_inside(&self.entries[*place].1)).collect();
        sorted.sort_by_key(|place| self.entries[*place].1.first_lba);
        let mut is_valid = vec![false; self.entries.len()];
        sorted.iter().for_each(|place| is_valid[*place] = true);
        // The one before that reaches furthest.
        let mut furthest: Option<usize> = None;
        for place in sorted {
            if let Some(before) = furthest
                && self.entries[before].1.last_lba >= self.entries[place].1.first_lba
            {
                (is_valid[before], is_valid[place]) = (false, false);
            }
            if furthest.is_none_or(|far| self.entries[far].1.last_lba < self.entries[place].1.last_lba) {
                furthest = Some(place);
            }
        }
        let valid = self.entries.iter().zip(&is_valid).filter(|(_, valid)| **valid).map(|(entry, _)| *entry);
        let rest = self.entries.iter().zip(&is_valid).filter(|(_, valid)| !**valid);
        (valid.collect(), rest.map(|((index, _), _)| *index).collect())
    }
}
