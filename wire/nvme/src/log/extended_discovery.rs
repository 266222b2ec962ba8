//! Extended entries of the Discovery log page, which carry attributes (Base 2.1, section 5.1.12.3.1).

use super::DiscoveryEntry;
use crate::DecodeError;
use crate::le::{put16, put32, u16_at, u32_at};

/// Options of the log specific parameter of Get Log Page, of DLPF in the page's header, and of the page's
/// support (LIDSP).
pub mod discovery_option {
    /// Extended entries (EXTDLPE, EXTEND, EXTDLPES).
    pub const EXTENDED: u8 = 1 << 0;
}

/// An entry with its attributes. Of these only the Admin Label is known; others are skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtendedDiscoveryEntry {
    /// What a plain entry has.
    pub entry: DiscoveryEntry,
    /// Admin Label: 1 to 256 bytes of ASCII.
    pub admin_label: Option<String>,
}

mod at {
    use super::DiscoveryEntry;

    pub(super) const TEL: usize = DiscoveryEntry::SIZE;
    pub(super) const NUMEXAT: usize = TEL + 4;
    pub(super) const EXAT: usize = NUMEXAT + 4;
}

/// Bytes of EXATTYPE and EXATLEN.
const ATTRIBUTE_HEADER: usize = 4;
/// EXATTYPE of the Admin Label.
const ADMIN_LABEL: u16 = 2;

impl ExtendedDiscoveryEntry {
    /// Size in bytes of an entry without attributes.
    pub const SIZE_MIN: usize = at::EXAT;
    /// Bytes of an Admin Label at most.
    pub const ADMIN_LABEL_MAX: usize = 256;

    /// Total Entry Length (TEL): bytes of the encoded entry.
    pub fn encoded_length(&self) -> usize {
        let attribute = |label: &String| ATTRIBUTE_HEADER + label.len().next_multiple_of(4);
        at::EXAT + self.admin_label.as_ref().map_or(0, attribute)
    }

    /// Encodes the entry. Values of attributes are padded with zeroes to a multiple of 4 bytes.
    ///
    /// # Panics
    /// If `into` is not [`encoded_length`](Self::encoded_length) bytes long, or a text is out of its range.
    pub fn encode(&self, into: &mut [u8]) {
        assert!(into.len() == self.encoded_length(), "{} bytes for an entry", into.len());
        into.fill(0);
        let (plain, _) = into.split_first_chunk_mut().expect("an entry has its plain part");
        self.entry.encode(plain);
        put32(into, at::TEL, into.len() as u32);
        if let Some(label) = &self.admin_label {
            let range = 1..=Self::ADMIN_LABEL_MAX;
            assert!(range.contains(&label.len()), "an admin label of {} bytes", label.len());
            put16(into, at::NUMEXAT, 1);
            put16(into, at::EXAT, ADMIN_LABEL);
            put16(into, at::EXAT + 2, label.len().next_multiple_of(4) as u16);
            let value = at::EXAT + ATTRIBUTE_HEADER;
            into[value..value + label.len()].copy_from_slice(label.as_bytes());
        }
    }

    /// Decodes the first entry of `from`. The next one follows after its `TEL`, the second result.
    ///
    /// # Errors
    /// As [`DiscoveryEntry::decode`]; lengths that exceed the data or what contains them, and an Admin Label
    /// that is empty, too long or not UTF-8.
    pub fn decode(from: &[u8]) -> Result<(ExtendedDiscoveryEntry, usize), DecodeError> {
        let plain = from.first_chunk().filter(|_| from.len() >= Self::SIZE_MIN);
        let (what, got, need) = ("extended discovery entry", from.len(), Self::SIZE_MIN);
        let plain = plain.ok_or(DecodeError::Length { what, got, need })?;
        let bad = |what, at: usize, value: usize| DecodeError::value(what, at as u32, value as u64);
        let tel = u32_at(from, at::TEL) as usize;
        let Some(all) = from.get(..tel).filter(|_| tel >= Self::SIZE_MIN) else {
            return Err(bad("TEL", at::TEL, tel));
        };
        let mut admin_label = None;
        let mut next = at::EXAT;
        for _ in 0..u16_at(all, at::NUMEXAT) {
            let value = next + ATTRIBUTE_HEADER;
            if value > all.len() {
                return Err(bad("NUMEXAT", at::NUMEXAT, u16_at(all, at::NUMEXAT).into()));
            }
            let (kind, length) = (u16_at(all, next), usize::from(u16_at(all, next + 2)));
            let bytes = all.get(value..value + length).filter(|_| length > 0 && length.is_multiple_of(4));
            let bytes = bytes.ok_or(bad("EXATLEN", next + 2, length))?;
            if kind == ADMIN_LABEL {
                let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(length);
                let label = std::str::from_utf8(&bytes[..end]).ok();
                let label = label.filter(|label| (1..=Self::ADMIN_LABEL_MAX).contains(&label.len()));
                admin_label = Some(label.ok_or(bad("EXATVAL", value, length))?.to_owned());
            }
            next = value + length;
        }
        Ok((ExtendedDiscoveryEntry { entry: DiscoveryEntry::decode(plain)?, admin_label }, tel))
    }
}
