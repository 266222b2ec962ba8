//! Differences between snapshots of an image, as a stream for pipes and files.
//!
//! A stream is a [`DiffHeader`], [`DiffRecord`]s in ascending order of their offsets in the image, those of
//! kind [`Data`](DiffRecordKind::Data) followed by their data, and a record of kind
//! [`End`](DiffRecordKind::End). Each record has the checksum of the stream's header and its own number, so
//! that none of another stream, and none out of its place, is taken. [`DiffEncoder`] numbers records,
//! [`DiffDecoder`] checks their order. `docs/formats/image-diff.md` has the tables.

use codec::{DecodeError, crc32c};

use crate::fields::{array, check_zero, open, put, seal, u32_at, u64_at};
use crate::{BLOCK_BYTES, SECTOR_BYTES};

/// How each stream begins.
pub const DIFF_MAGIC: [u8; 4] = *b"RBDH";
const HEADER_MAGIC: [u8; 4] = DIFF_MAGIC;
const RECORD_MAGIC: [u8; 4] = *b"RBDR";
const NAMES: [usize; 3] = [112, 176, 240];
const RESERVED: usize = 304;

/// The begin of a stream: what it leads from and to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffHeader {
    /// Identity of the image.
    pub image: [u8; 16],
    /// Name of the image, 1 to 64 bytes.
    pub image_name: String,
    /// The snapshot that an image has after the diff.
    pub to: DiffSnapshot,
    /// The snapshot that an image must have before it; `None` if the diff is of everything.
    pub from: Option<DiffSnapshot>,
    /// When `to` was made, in seconds since 1970.
    pub created: u64,
    /// A checksum of the volumes that both snapshots consisted of: an export is resumed with the same ones.
    pub chain: u64,
}

/// A snapshot, as a stream names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffSnapshot {
    /// Identity: another one of the same name has another.
    pub id: [u8; 16],
    /// Size of the image, in bytes.
    pub bytes: u64,
    /// Name, 1 to 64 bytes.
    pub name: String,
}

impl DiffHeader {
    /// Bytes of a header.
    pub const SIZE: usize = SECTOR_BYTES;
    /// Most bytes of a name.
    pub const NAME_BYTES_MAX: usize = 64;

    /// Encodes the header. A longer name is cut: it was checked.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        put(&mut out, 16, self.image);
        put(&mut out, 32, self.to.id);
        put(&mut out, 64, self.to.bytes.to_le_bytes());
        put(&mut out, 80, self.created.to_le_bytes());
        put(&mut out, 88, self.chain.to_le_bytes());
        if let Some(from) = &self.from {
            put(&mut out, 48, from.id);
            put(&mut out, 72, from.bytes.to_le_bytes());
        }
        let from = self.from.as_ref().map_or("", |from| from.name.as_str());
        let names = [self.to.name.as_str(), from, self.image_name.as_str()];
        for ((index, name), at) in names.iter().enumerate().zip(NAMES) {
            let name = &name.as_bytes()[..name.len().min(Self::NAME_BYTES_MAX)];
            out[96 + index] = name.len() as u8;
            out[at..at + name.len()].copy_from_slice(name);
        }
        seal(&mut out, HEADER_MAGIC);
        out
    }

    /// Decodes the begin of a stream.
    ///
    /// # Errors
    /// The first field that no header of this version has.
    pub fn decode(from: &[u8]) -> Result<DiffHeader, DecodeError> {
        const RESERVED_FIELD: &str = "a reserved field of the header of the diff";
        open("the header of the diff", from, Self::SIZE, HEADER_MAGIC)?;
        check_zero(RESERVED_FIELD, from, 6..8)?;
        check_zero(RESERVED_FIELD, from, 12..16)?;
        check_zero(RESERVED_FIELD, from, 99..NAMES[0])?;
        check_zero(RESERVED_FIELD, from, RESERVED..Self::SIZE)?;
        let to = DiffSnapshot { id: array(from, 32), bytes: u64_at(from, 64), name: name_at(from, 0)? };
        let start = DiffSnapshot { id: array(from, 48), bytes: u64_at(from, 72), name: name_at(from, 1)? };
        let image_name = name_at(from, 2)?;
        for (index, name) in [(0, &to.name), (2, &image_name)] {
            if name.is_empty() {
                return Err(DecodeError::value("the length of a name in the diff", 96 + index, 0));
            }
        }
        if start.name.is_empty() {
            check_zero("the begin of a diff without one", from, 48..64)?;
            check_zero("the begin of a diff without one", from, 72..80)?;
        }
        for (at, bytes) in [(64, to.bytes), (72, start.bytes)] {
            if !bytes.is_multiple_of(SECTOR_BYTES as u64) {
                return Err(DecodeError::value("the size of the image", at, bytes));
            }
        }
        Ok(DiffHeader {
            image: array(from, 16),
            image_name,
            to,
            from: (!start.name.is_empty()).then_some(start),
            created: u64_at(from, 80),
            chain: u64_at(from, 88),
        })
    }
}

/// One of the names of a header.
fn name_at(from: &[u8], index: usize) -> Result<String, DecodeError> {
    let (length, at) = (usize::from(from[96 + index]), NAMES[index]);
    if length > DiffHeader::NAME_BYTES_MAX {
        let at = 96 + index as u32;
        return Err(DecodeError::value("the length of a name in the diff", at, length as u64));
    }
    check_zero("the end of a name in the diff", from, at + length..at + DiffHeader::NAME_BYTES_MAX)?;
    let name = str::from_utf8(&from[at..at + length]);
    let reason = "it is not valid UTF-8";
    Ok(name.map_err(|_| DecodeError::Text { what: "a name in the diff", reason })?.to_string())
}

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DiffRecordKind {
    /// It has the data that follows the record.
    Data = 1,
    /// It is zero.
    Zeroes = 2,
    /// Nothing: there are no more records. The offset is the size of the image.
    End = 3,
}

/// A record, without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiffRecord {
    /// What it is.
    pub kind: DiffRecordKind,
    /// Offset in the image in bytes, a multiple of [`BLOCK_BYTES`] but for the end.
    pub offset: u64,
    /// Bytes of the range, a multiple of 512; 0 at the end.
    pub length: u64,
    /// CRC32C of the data; 0 without.
    pub data_crc32c: u32,
    /// The checksum in the header of the stream.
    pub stream: u32,
    /// Records before it.
    pub number: u64,
}

impl DiffRecord {
    /// Bytes of a record without data.
    pub const SIZE: usize = 48;
    /// Most bytes of the data of a record.
    pub const DATA_BYTES_MAX: usize = 128 << 10;

    /// Encodes the record.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        out[6] = self.kind as u8;
        put(&mut out, 12, self.data_crc32c.to_le_bytes());
        put(&mut out, 16, self.offset.to_le_bytes());
        put(&mut out, 24, self.length.to_le_bytes());
        put(&mut out, 32, self.number.to_le_bytes());
        put(&mut out, 40, self.stream.to_le_bytes());
        seal(&mut out, RECORD_MAGIC);
        out
    }

    /// Decodes a record.
    ///
    /// # Errors
    /// The first field that no record of this version has.
    pub fn decode(from: &[u8]) -> Result<DiffRecord, DecodeError> {
        open("a record of the diff", from, Self::SIZE, RECORD_MAGIC)?;
        let kind = match from[6] {
            1 => DiffRecordKind::Data,
            2 => DiffRecordKind::Zeroes,
            3 => DiffRecordKind::End,
            other => return Err(DecodeError::value("the kind of a record of the diff", 6, other.into())),
        };
        check_zero("a reserved field of a record of the diff", from, 7..8)?;
        check_zero("a reserved field of a record of the diff", from, 44..48)?;
        let (offset, length) = (u64_at(from, 16), u64_at(from, 24));
        let unit = if kind == DiffRecordKind::End { SECTOR_BYTES } else { BLOCK_BYTES };
        if !offset.is_multiple_of(unit as u64) {
            return Err(DecodeError::value("the offset of a record of the diff", 16, offset));
        }
        let is_length = match kind {
            DiffRecordKind::Data => (1..=Self::DATA_BYTES_MAX as u64).contains(&length),
            DiffRecordKind::Zeroes => length > 0,
            DiffRecordKind::End => length == 0,
        };
        let is_range = length.is_multiple_of(SECTOR_BYTES as u64) && offset.checked_add(length).is_some();
        if !is_length || !is_range {
            return Err(DecodeError::value("the length of a record of the diff", 24, length));
        }
        if kind != DiffRecordKind::Data {
            check_zero("the checksum of a record without data", from, 12..16)?;
        }
        Ok(DiffRecord {
            kind,
            offset,
            length,
            data_crc32c: u32_at(from, 12),
            stream: u32_at(from, 40),
            number: u64_at(from, 32),
        })
    }
}

/// Numbers the records of a stream.
#[derive(Clone, Debug)]
pub struct DiffEncoder {
    stream: u32,
    number: u64,
    bytes: u64,
}

impl DiffEncoder {
    /// The encoder of a stream with this header, of which some records are there already.
    pub fn new(header: &DiffHeader, records: u64) -> DiffEncoder {
        let encoded = header.encode();
        DiffEncoder { stream: u32_at(&encoded, 8), number: records, bytes: header.to.bytes }
    }

    /// The record before data, of at most [`DiffRecord::DATA_BYTES_MAX`].
    pub fn data(&mut self, offset: u64, data: &[u8]) -> [u8; DiffRecord::SIZE] {
        self.record(DiffRecordKind::Data, offset, data.len() as u64, crc32c(data))
    }

    /// The record of zeroes.
    pub fn zeroes(&mut self, offset: u64, length: u64) -> [u8; DiffRecord::SIZE] {
        self.record(DiffRecordKind::Zeroes, offset, length, 0)
    }

    /// The last record.
    pub fn end(&mut self) -> [u8; DiffRecord::SIZE] {
        self.record(DiffRecordKind::End, self.bytes, 0, 0)
    }

    fn record(
        &mut self,
        kind: DiffRecordKind,
        offset: u64,
        length: u64,
        data_crc32c: u32,
    ) -> [u8; DiffRecord::SIZE] {
        let record =
            DiffRecord { kind, offset, length, data_crc32c, stream: self.stream, number: self.number };
        self.number += 1;
        record.encode()
    }
}

/// What a decoder has taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiffItem<'a> {
    /// The begin of the stream.
    Header(Box<DiffHeader>),
    /// Data of the image.
    Data {
        /// Where it is, in bytes.
        offset: u64,
        /// What it is.
        data: &'a [u8],
    },
    /// Zeroes.
    Zeroes {
        /// Where they are, in bytes.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// The stream is whole.
    End,
}

/// What a decoder takes next.
#[derive(Clone, Copy, Debug)]
enum ExpectedPiece {
    Header,
    Record,
    Data(DiffRecord),
    Nothing,
}

/// Decodes a stream in pieces: the caller gives it as many bytes as it [needs](Self::needs).
///
/// ```
/// use wire_store::{DiffDecoder, DiffHeader, DiffItem, DiffSnapshot};
/// let to = DiffSnapshot { id: [1; 16], bytes: 1 << 20, name: "monday".to_string() };
/// let image_name = "vol".to_string();
/// let header = DiffHeader { image: [2; 16], image_name, to, from: None, created: 0, chain: 0 };
/// let mut decoder = DiffDecoder::new();
/// let encoded = header.encode();
/// assert_eq!(decoder.needs(), encoded.len());
/// assert_eq!(decoder.take(&encoded)?, Some(DiffItem::Header(Box::new(header))));
/// # Ok::<(), wire_store::DecodeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct DiffDecoder {
    expected: ExpectedPiece,
    stream: u32,
    bytes: u64,
    number: u64,
    end: u64,
    whole_bytes: u64,
}

impl Default for DiffDecoder {
    fn default() -> DiffDecoder {
        DiffDecoder::new()
    }
}

impl DiffDecoder {
    /// A decoder at the begin of a stream.
    pub fn new() -> DiffDecoder {
        let expected = ExpectedPiece::Header;
        DiffDecoder { expected, stream: 0, bytes: 0, number: 0, end: 0, whole_bytes: 0 }
    }

    /// Bytes that it takes next; 0 after the end of the stream.
    pub fn needs(&self) -> usize {
        match self.expected {
            ExpectedPiece::Header => DiffHeader::SIZE,
            ExpectedPiece::Record => DiffRecord::SIZE,
            ExpectedPiece::Data(record) => record.length as usize,
            ExpectedPiece::Nothing => 0,
        }
    }

    /// Bytes of the stream up to the end of what was taken as a whole: the header, and records with their
    /// data.
    pub fn whole_bytes(&self) -> u64 {
        self.whole_bytes
    }

    /// Records that were taken as a whole, without the end.
    pub fn records(&self) -> u64 {
        self.number
    }

    /// Where the last range ended, in bytes of the image.
    pub fn end_offset(&self) -> u64 {
        self.end
    }

    /// Takes as many bytes as it [needs](Self::needs). `None` if data follows.
    ///
    /// # Errors
    /// What no stream has. The decoder stays where it is.
    pub fn take<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<DiffItem<'a>>, DecodeError> {
        match self.expected {
            ExpectedPiece::Header => {
                let header = DiffHeader::decode(bytes)?;
                self.stream = u32_at(bytes, 8);
                self.bytes = header.to.bytes;
                self.whole(bytes.len(), 0, ExpectedPiece::Record);
                Ok(Some(DiffItem::Header(Box::new(header))))
            }
            ExpectedPiece::Record => {
                let record = DiffRecord::decode(bytes)?;
                self.check(&record)?;
                match record.kind {
                    DiffRecordKind::Data => {
                        self.expected = ExpectedPiece::Data(record);
                        Ok(None)
                    }
                    DiffRecordKind::Zeroes => {
                        self.number += 1;
                        self.whole(bytes.len(), record.offset + record.length, ExpectedPiece::Record);
                        Ok(Some(DiffItem::Zeroes { offset: record.offset, length: record.length }))
                    }
                    DiffRecordKind::End => {
                        self.whole(bytes.len(), self.end, ExpectedPiece::Nothing);
                        Ok(Some(DiffItem::End))
                    }
                }
            }
            ExpectedPiece::Data(record) => {
                if bytes.len() as u64 != record.length || crc32c(bytes) != record.data_crc32c {
                    let reason = "the checksum is wrong";
                    return Err(DecodeError::Text { what: "the data of a record of the diff", reason });
                }
                self.number += 1;
                let end = record.offset + record.length;
                self.whole(DiffRecord::SIZE + bytes.len(), end, ExpectedPiece::Record);
                Ok(Some(DiffItem::Data { offset: record.offset, data: bytes }))
            }
            ExpectedPiece::Nothing => {
                let reason = "something follows its end";
                Err(DecodeError::Text { what: "the diff", reason })
            }
        }
    }

    fn whole(&mut self, bytes: usize, end: u64, expected: ExpectedPiece) {
        self.whole_bytes += bytes as u64;
        self.end = end;
        self.expected = expected;
    }

    /// Checks that a record is the next one of the stream.
    fn check(&self, record: &DiffRecord) -> Result<(), DecodeError> {
        let refuse = |reason| Err(DecodeError::Text { what: "a record of the diff", reason });
        let end = record.offset + record.length;
        if record.stream != self.stream {
            return refuse("it is of another stream");
        }
        if record.number != self.number {
            return refuse("it is out of its place: records before it are missing, or there twice");
        }
        if record.offset < self.end {
            return refuse("it is before the end of the one before it");
        }
        if end > self.bytes || (record.kind == DiffRecordKind::End && end != self.bytes) {
            return refuse("it does not end with the image");
        }
        if !end.is_multiple_of(BLOCK_BYTES as u64) && end != self.bytes {
            return refuse("it ends in the middle of a block");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(bytes: u64) -> DiffHeader {
        let snapshot = |id, name: &str| DiffSnapshot { id: [id; 16], bytes, name: name.to_string() };
        DiffHeader {
            image: [1; 16],
            image_name: "vol".to_string(),
            to: snapshot(2, "tuesday"),
            from: Some(snapshot(3, "monday")),
            created: 1_700_000_000,
            chain: 77,
        }
    }

    /// A stream, and where its pieces end.
    fn stream(header: &DiffHeader) -> (Vec<u8>, Vec<usize>) {
        let mut encoder = DiffEncoder::new(header, 0);
        let mut stream = header.encode().to_vec();
        let mut ends = vec![stream.len()];
        let data = vec![7; 2 * BLOCK_BYTES];
        stream.extend(encoder.data(BLOCK_BYTES as u64, &data));
        stream.extend(&data);
        ends.push(stream.len());
        stream.extend(encoder.zeroes(8 * BLOCK_BYTES as u64, 4 << 20));
        ends.push(stream.len());
        let at = header.to.bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let last = vec![9; (header.to.bytes - at) as usize];
        stream.extend(encoder.data(at, &last));
        stream.extend(&last);
        ends.push(stream.len());
        stream.extend(encoder.end());
        ends.push(stream.len());
        (stream, ends)
    }

    /// Decodes as far as it goes: the items, and whether the stream was whole.
    fn decode(mut bytes: &[u8]) -> (DiffDecoder, Vec<String>, Result<bool, DecodeError>) {
        let (mut decoder, mut items) = (DiffDecoder::new(), Vec::new());
        loop {
            let needs = decoder.needs();
            if needs == 0 || bytes.len() < needs {
                return (decoder, items, Ok(needs == 0 && bytes.is_empty()));
            }
            let (piece, rest) = bytes.split_at(needs);
            bytes = rest;
            match decoder.take(piece) {
                Ok(Some(DiffItem::Data { offset, data })) => items.push(format!("{offset}+{}", data.len())),
                Ok(Some(DiffItem::Zeroes { offset, length })) => items.push(format!("{offset}-{length}")),
                Ok(_) => {}
                Err(error) => return (decoder, items, Err(error)),
            }
        }
    }

    #[test]
    fn a_stream_is_whole_only_with_its_end() {
        let header = header((64 << 20) + 512);
        let (stream, ends) = stream(&header);
        let (decoder, items, whole) = decode(&stream);
        assert_eq!(items, ["4096+8192", "32768-4194304", "67108864+512"]);
        assert_eq!((decoder.records(), decoder.end_offset(), whole), (3, header.to.bytes, Ok(true)));
        for length in 0..stream.len() {
            let (decoder, items, whole) = decode(&stream[..length]);
            assert_eq!(whole, Ok(false), "{length}");
            let before = ends.iter().filter(|end| **end <= length).count();
            assert_eq!(items.len(), before.saturating_sub(1), "{length}");
            let whole_bytes = ends.iter().rfind(|end| **end <= length).copied().unwrap_or(0);
            assert_eq!(decoder.whole_bytes(), whole_bytes as u64);
        }
    }

    #[test]
    fn no_bit_of_a_stream_may_differ() {
        let (stream, _) = stream(&header((64 << 20) + 512));
        for at in 0..stream.len() {
            let mut damaged = stream.clone();
            damaged[at] ^= 1 << (at % 8);
            let (_, _, whole) = decode(&damaged);
            assert!(whole.is_err(), "byte {at}");
        }
    }

    #[test]
    fn records_of_other_streams_and_out_of_their_places_are_refused() {
        let header = header(64 << 20);
        let refused = |records: &[[u8; DiffRecord::SIZE]], reason: &str| {
            let mut stream = header.encode().to_vec();
            records.iter().for_each(|record| stream.extend(record));
            let (_, _, whole) = decode(&stream);
            let error = whole.unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        };
        let encoder = || DiffEncoder::new(&header, 0);
        let other = DiffHeader { created: 8, ..header.clone() };
        refused(&[DiffEncoder::new(&other, 0).end()], "it is of another stream");
        refused(&[DiffEncoder::new(&header, 1).end()], "it is out of its place");
        let mut of = encoder();
        let (first, second) = (of.zeroes(0, 8192), of.zeroes(8192, 4096));
        refused(&[first, first], "it is out of its place");
        refused(&[second, first], "it is out of its place");
        let mut of = encoder();
        refused(&[of.zeroes(0, 8192), of.zeroes(4096, 4096)], "before the end of the one before");
        refused(&[encoder().zeroes(0, (64 << 20) + 4096)], "it does not end with the image");
        refused(&[encoder().zeroes(64 << 20, 4096)], "it does not end with the image");
        refused(&[encoder().zeroes(0, 512)], "it ends in the middle of a block");
        refused(&[encoder().zeroes(512, 4096)], "the offset of a record of the diff");
        refused(&[encoder().zeroes(0, u64::MAX - 511)], "it does not end with the image");
        refused(&[encoder().zeroes(4096, u64::MAX - 511)], "the length of a record of the diff");
        refused(&[encoder().data(0, &[])], "the length of a record of the diff");
        refused(&[encoder().data(0, &vec![0; DiffRecord::DATA_BYTES_MAX + 512])], "the length of a record");
        let mut short = encoder();
        short.bytes = 4096;
        refused(&[short.end()], "it does not end with the image");
    }

    #[test]
    fn nothing_follows_the_end() {
        let mut decoder = DiffDecoder::new();
        let (stream, _) = stream(&header(64 << 20 | 512));
        let mut rest = &stream[..];
        while decoder.needs() > 0 {
            let (piece, after) = rest.split_at(decoder.needs());
            decoder.take(piece).unwrap();
            rest = after;
        }
        assert!(decoder.take(&[]).unwrap_err().to_string().contains("something follows its end"));
    }
}
