//! Messages, questions and records.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::{DecodeError, DnsName};

/// Bytes of a message at most (RFC 6762, section 17).
pub const MESSAGE_BYTES_MAX: usize = 9000;
/// Questions and records of a message at most, together.
pub const RECORDS_MAX: usize = 128;

const HEADER: usize = 12;
/// QR and AA of the flags: an authoritative response.
const RESPONSE: u16 = 0x8000;
const AUTHORITATIVE: u16 = 0x0400;
/// Class IN.
const IN: u16 = 1;
/// Unicast response desired, of a question; cache flush, of a record (RFC 6762, sections 5.4 and 10.2).
const TOP_BIT: u16 = 0x8000;

/// Types of records.
pub mod kind {
    /// IPv4 address.
    pub const A: u16 = 1;
    /// Pointer: an instance of a service.
    pub const PTR: u16 = 12;
    /// Text: attributes of an instance.
    pub const TXT: u16 = 16;
    /// IPv6 address.
    pub const AAAA: u16 = 28;
    /// Service: host and port of an instance.
    pub const SRV: u16 = 33;
    /// Any type, of a question.
    pub const ANY: u16 = 255;
}

/// A query or a response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsMessage {
    /// A response; else a query.
    pub is_response: bool,
    /// Questions.
    pub questions: Vec<DnsQuestion>,
    /// Answers of a response; of a query, what the querier knows.
    pub answers: Vec<DnsRecord>,
    /// Additional records.
    pub additional: Vec<DnsRecord>,
}

/// A question, of class IN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsQuestion {
    /// The name.
    pub name: DnsName,
    /// The type; see [`kind`].
    pub kind: u16,
}

/// A record of class IN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsRecord {
    /// The name.
    pub name: DnsName,
    /// Time to live in seconds; 0 withdraws it.
    pub ttl_s: u32,
    /// The record replaces all of its name and type (cache flush).
    pub flush: bool,
    /// The data.
    pub data: RecordData,
}

/// Data of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordData {
    /// A.
    Ipv4(Ipv4Addr),
    /// AAAA.
    Ipv6(Ipv6Addr),
    /// PTR.
    Pointer(DnsName),
    /// SRV; priority and weight are 0 and ignored.
    Service {
        /// The host.
        host: DnsName,
        /// The port.
        port: u16,
    },
    /// TXT: strings of at most 255 bytes.
    Text(Vec<Vec<u8>>),
    /// Another type, whose data is ignored; it encodes without data.
    Other(u16),
}

impl DnsMessage {
    /// Decodes a message. Questions and records of other classes are left out, as are records of the
    /// authority section.
    ///
    /// # Errors
    /// Not a standard query or response, a malformed name or record, more than [`RECORDS_MAX`] of them, or
    /// more than [`MESSAGE_BYTES_MAX`].
    pub fn decode(message: &[u8]) -> Result<DnsMessage, DecodeError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(DecodeError::value("length of a DNS message", 0, message.len() as u64));
        }
        let mut reader = MessageReader { message, at: 0 };
        let _id = reader.u16()?;
        let flags = reader.u16()?;
        // Opcode and response code (RFC 6762, sections 18.3 and 18.11).
        if flags & 0x780f != 0 {
            return Err(DecodeError::value("DNS flags", 2, flags.into()));
        }
        let counts = [reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?].map(usize::from);
        let total: usize = counts.iter().sum();
        if total > RECORDS_MAX {
            return Err(DecodeError::value("records of a DNS message", 4, total as u64));
        }
        let mut decoded = DnsMessage { is_response: flags & RESPONSE != 0, ..DnsMessage::default() };
        for _ in 0..counts[0] {
            let (name, kind, class) = (reader.name()?, reader.u16()?, reader.u16()?);
            // Class ANY, too.
            if matches!(class & !TOP_BIT, IN | 255) {
                decoded.questions.push(DnsQuestion { name, kind });
            }
        }
        for (section, count) in counts[1..].iter().enumerate() {
            for _ in 0..*count {
                let Some(record) = reader.record()? else { continue };
                match section {
                    0 => decoded.answers.push(record),
                    2 => decoded.additional.push(record),
                    _ => {}
                }
            }
        }
        Ok(decoded)
    }

    /// Encodes the message, without an identifier.
    ///
    /// # Panics
    /// If a section has more than 65535 entries, or a text a string of more than 255 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut into = vec![0; HEADER];
        let mut header = |at: usize, value: u16| into[at..at + 2].copy_from_slice(&value.to_be_bytes());
        let count = |length: usize| u16::try_from(length).expect("a section has at most 65535 entries");
        header(2, if self.is_response { RESPONSE | AUTHORITATIVE } else { 0 });
        header(4, count(self.questions.len()));
        header(6, count(self.answers.len()));
        header(10, count(self.additional.len()));
        for question in &self.questions {
            question.name.encode(&mut into);
            into.extend(question.kind.to_be_bytes());
            into.extend(IN.to_be_bytes());
        }
        for record in self.answers.iter().chain(&self.additional) {
            record.encode(&mut into);
        }
        into
    }
}

impl DnsRecord {
    fn encode(&self, into: &mut Vec<u8>) {
        self.name.encode(into);
        into.extend(self.data.kind().to_be_bytes());
        into.extend((IN | if self.flush { TOP_BIT } else { 0 }).to_be_bytes());
        into.extend(self.ttl_s.to_be_bytes());
        let at = into.len();
        into.extend([0; 2]);
        match &self.data {
            RecordData::Ipv4(address) => into.extend(address.octets()),
            RecordData::Ipv6(address) => into.extend(address.octets()),
            RecordData::Pointer(name) => name.encode(into),
            RecordData::Service { host, port } => {
                into.extend([0; 4]);
                into.extend(port.to_be_bytes());
                host.encode(into);
            }
            RecordData::Text(strings) => {
                // An empty text is one empty string (RFC 6763, section 6.1).
                if strings.is_empty() {
                    into.push(0);
                }
                for string in strings {
                    into.push(u8::try_from(string.len()).expect("a string has at most 255 bytes"));
                    into.extend(string);
                }
            }
            RecordData::Other(_) => {}
        }
        let length = u16::try_from(into.len() - at - 2).expect("records are short");
        into[at..at + 2].copy_from_slice(&length.to_be_bytes());
    }
}

impl RecordData {
    /// Its type; see [`kind`].
    pub fn kind(&self) -> u16 {
        match self {
            RecordData::Ipv4(_) => kind::A,
            RecordData::Ipv6(_) => kind::AAAA,
            RecordData::Pointer(_) => kind::PTR,
            RecordData::Service { .. } => kind::SRV,
            RecordData::Text(_) => kind::TXT,
            RecordData::Other(other) => *other,
        }
    }
}

struct MessageReader<'a> {
    message: &'a [u8],
    at: usize,
}

impl<'a> MessageReader<'a> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let found = self.message.get(self.at..).and_then(<[u8]>::first_chunk);
        let need = self.at + N;
        self.at = need;
        found.copied().ok_or(DecodeError::Length { what: "DNS message", got: self.message.len(), need })
    }

    fn u16(&mut self) -> Result<u16, DecodeError> {
        self.bytes().map(u16::from_be_bytes)
    }

    fn name(&mut self) -> Result<DnsName, DecodeError> {
        let (name, end) = DnsName::decode(self.message, self.at)?;
        self.at = end;
        Ok(name)
    }

    /// A record; `None` of another class.
    fn record(&mut self) -> Result<Option<DnsRecord>, DecodeError> {
        let (name, kind, class) = (self.name()?, self.u16()?, self.u16()?);
        let ttl_s = u32::from_be_bytes(self.bytes()?);
        let length = usize::from(self.u16()?);
        let (start, end) = (self.at, self.at + length);
        if end > self.message.len() {
            return Err(DecodeError::Length { what: "DNS message", got: self.message.len(), need: end });
        }
        let data = match kind {
            kind::A => RecordData::Ipv4(self.bytes::<4>()?.into()),
            kind::AAAA => RecordData::Ipv6(self.bytes::<16>()?.into()),
            kind::PTR => RecordData::Pointer(self.name()?),
            kind::SRV => {
                let [_, _, _, _, high, low] = self.bytes()?;
                RecordData::Service { port: u16::from_be_bytes([high, low]), host: self.name()? }
            }
            kind::TXT => {
                let data = &self.message[start..end];
                self.at = end;
                RecordData::Text(strings(data).ok_or(DecodeError::value("text", start as u32, 0))?)
            }
            other => {
                self.at = end;
                RecordData::Other(other)
            }
        };
        if self.at != end {
            return Err(DecodeError::value("length of record data", start as u32, length as u64));
        }
        let flush = class & TOP_BIT != 0;
        Ok((class & !TOP_BIT == IN).then_some(DnsRecord { name, ttl_s, flush, data }))
    }
}

/// The strings of a text, without empty ones; `None` if one exceeds it.
fn strings(mut data: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut strings = Vec::new();
    while let Some((length, rest)) = data.split_first() {
        let (string, next) = rest.split_at_checked(usize::from(*length))?;
        if !string.is_empty() {
            strings.push(string.to_vec());
        }
        data = next;
    }
    Some(strings)
}

#[cfg(test)]
mod tests;
