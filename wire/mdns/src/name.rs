//! Domain names.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use crate::DecodeError;

/// Bytes of a label at most (RFC 1035, section 2.3.4).
pub const LABEL_BYTES_MAX: usize = 63;
/// Bytes of an encoded name at most, with the lengths of its labels and its end.
pub const NAME_BYTES_MAX: usize = 255;

/// A domain name: its labels, of any bytes, without the root. Names that differ in the case of ASCII letters
/// only are equal.
#[derive(Clone, Default)]
pub struct DnsName {
    // As on the wire, without compression and without the root's zero.
    encoded: Vec<u8>,
}

impl DnsName {
    /// This name under another one.
    ///
    /// # Errors
    /// The label is not 1 to 63 bytes long, or the name is longer than 255 bytes.
    pub fn child(&self, label: &[u8]) -> Result<DnsName, DecodeError> {
        if label.is_empty() || label.len() > LABEL_BYTES_MAX {
            return Err(DecodeError::value("length of a label", 0, label.len() as u64));
        }
        let encoded = [&[label.len() as u8], label, &self.encoded[..]].concat();
        if encoded.len() + 1 > NAME_BYTES_MAX {
            return Err(DecodeError::value("length of a name", 0, encoded.len() as u64));
        }
        Ok(DnsName { encoded })
    }

    /// The labels, from the host to the root.
    pub fn labels(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.encoded[..];
        std::iter::from_fn(move || {
            let (length, after) = rest.split_first()?;
            let (label, next) = after.split_at(usize::from(*length));
            rest = next;
            Some(label)
        })
    }

    /// Whether the name is one label and then `parent`.
    pub fn is_child_of(&self, parent: &DnsName) -> bool {
        let label = self.encoded.first().map_or(0, |length| usize::from(*length) + 1);
        label > 0 && self.encoded[label..].eq_ignore_ascii_case(&parent.encoded)
    }

    /// Decodes the name at `at`; returns the offset after it too.
    ///
    /// # Errors
    /// It exceeds the message or 255 bytes, has a reserved kind of label, or points not backward.
    pub(crate) fn decode(message: &[u8], at: usize) -> Result<(DnsName, usize), DecodeError> {
        let (mut encoded, mut at, mut end, mut lowest) = (Vec::new(), at, None, at);
        let byte = |at: usize| message.get(at).copied().ok_or(too_short(message, at));
        loop {
            let length = usize::from(byte(at)?);
            match length >> 6 {
                0 if length == 0 => return Ok((DnsName { encoded }, end.unwrap_or(at + 1))),
                0 => {
                    let label = message.get(at..at + 1 + length).ok_or(too_short(message, at + length))?;
                    encoded.extend(label);
                    if encoded.len() + 1 > NAME_BYTES_MAX {
                        return Err(DecodeError::value("length of a name", at as u32, encoded.len() as u64));
                    }
                    at += 1 + length;
                }
                3 => {
                    let target = (length & 0x3f) << 8 | usize::from(byte(at + 1)?);
                    // Each pointer is below all that the name has of this message: there is no loop.
                    if target >= lowest {
                        return Err(DecodeError::value("pointer of a name", at as u32, target as u64));
                    }
                    end.get_or_insert(at + 2);
                    (at, lowest) = (target, target);
                }
                _ => return Err(DecodeError::value("kind of a label", at as u32, length as u64)),
            }
        }
    }

    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        into.extend(&self.encoded);
        into.push(0);
    }
}

fn too_short(message: &[u8], at: usize) -> DecodeError {
    DecodeError::Length { what: "DNS message", got: message.len(), need: at + 1 }
}

impl PartialEq for DnsName {
    fn eq(&self, other: &DnsName) -> bool {
        // Lengths of labels are no letters.
        self.encoded.eq_ignore_ascii_case(&other.encoded)
    }
}

impl Eq for DnsName {}

impl Hash for DnsName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.encoded.to_ascii_lowercase().hash(state);
    }
}

impl FromStr for DnsName {
    type Err = DecodeError;

    /// Labels between dots; a dot at the end is ignored. No label has a dot.
    fn from_str(text: &str) -> Result<DnsName, DecodeError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        text.rsplit('.').try_fold(DnsName::default(), |name, label| name.child(label.as_bytes()))
    }
}

impl fmt::Display for DnsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, label) in self.labels().enumerate() {
            let dot = if index > 0 { "." } else { "" };
            write!(f, "{dot}{}", label.escape_ascii())?;
        }
        Ok(())
    }
}

impl fmt::Debug for DnsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
