//! Text keys (RFC 7143, section 6.1): `key=value` pairs, each ended by NUL, and the forms of values.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use codec::DecodeError;

/// Bytes of a key.
pub const KEY_BYTES_MAX: usize = 63;
/// Bytes of a value: what RFC 7143 allows for the keys that are lists or large numbers.
pub const VALUE_BYTES_MAX: usize = 8192;
/// Bytes of an iSCSI name.
pub const NAME_BYTES_MAX: usize = 223;

/// Values that stand for no value.
pub const NOT_UNDERSTOOD: &str = "NotUnderstood";
/// The key does not apply here.
pub const IRRELEVANT: &str = "Irrelevant";
/// None of the values offered can be used.
pub const REJECT: &str = "Reject";

/// Iterates over the pairs of a data segment, which may come in any number of PDUs but is complete here.
#[derive(Clone, Copy, Debug)]
pub struct TextKeys<'a> {
    rest: &'a [u8],
}

impl<'a> TextKeys<'a> {
    /// The pairs in `text`.
    pub const fn new(text: &'a [u8]) -> TextKeys<'a> {
        TextKeys { rest: text }
    }
}

const fn invalid<T>(what: &'static str, reason: &'static str) -> Result<T, DecodeError> {
    Err(DecodeError::Text { what, reason })
}

impl<'a> Iterator for TextKeys<'a> {
    type Item = Result<(&'a str, &'a str), DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        // Some initiators pad with NULs within the data segment.
        while let [0, rest @ ..] = self.rest {
            self.rest = rest;
        }
        if self.rest.is_empty() {
            return None;
        }
        let end = self.rest.iter().position(|byte| *byte == 0);
        let (pair, rest) = match end {
            Some(end) => (&self.rest[..end], &self.rest[end + 1..]),
            None => (self.rest, &self.rest[self.rest.len()..]),
        };
        self.rest = rest;
        Some(if end.is_some() { decode_pair(pair) } else { invalid("text key", "it has no NUL at its end") })
    }
}

fn decode_pair(pair: &[u8]) -> Result<(&str, &str), DecodeError> {
    let Some(split) = pair.iter().position(|byte| *byte == b'=') else {
        return invalid("text key", "it has no value");
    };
    let (key, value) = (&pair[..split], &pair[split + 1..]);
    let is_key = |byte: &u8| byte.is_ascii_alphanumeric() || b".-+@_:/".contains(byte);
    if key.is_empty() || key.len() > KEY_BYTES_MAX || !key.iter().all(is_key) {
        return invalid("text key", "its name is invalid");
    }
    if value.len() > VALUE_BYTES_MAX {
        return invalid("text value", "it is too long");
    }
    match (std::str::from_utf8(key), std::str::from_utf8(value)) {
        (Ok(key), Ok(value)) => Ok((key, value)),
        _ => invalid("text value", "it is not UTF-8"),
    }
}

/// Writes pairs.
#[derive(Clone, Debug, Default)]
pub struct TextWriter {
    bytes: Vec<u8>,
}

impl TextWriter {
    /// Appends a pair.
    pub fn push(&mut self, key: &str, value: &str) {
        debug_assert!(!key.contains(['=', '\0']) && !value.contains('\0'), "{key}={value:?}");
        for part in [key.as_bytes(), b"=", value.as_bytes(), b"\0"] {
            self.bytes.extend_from_slice(part);
        }
    }

    /// What is written.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Takes what is written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// A number, decimal or hexadecimal behind `0x`.
///
/// # Errors
/// It is not one, or more than 64 bits.
pub fn number(value: &str) -> Result<u64, DecodeError> {
    let hex = value.strip_prefix("0x").or(value.strip_prefix("0X"));
    let (digits, radix) = hex.map_or((value, 10), |hex| (hex, 16));
    // The library would take a sign.
    match u64::from_str_radix(digits, radix) {
        Ok(number) if digits.as_bytes()[0] != b'+' => Ok(number),
        _ => invalid("number", "it is not a number of 64 bits"),
    }
}

/// Two numbers of a range, as `4~16`.
///
/// # Errors
/// It is none, or the first is more than the second.
pub fn range(value: &str) -> Result<(u64, u64), DecodeError> {
    let Some((first, last)) = value.split_once('~') else { return invalid("range", "it has no ~") };
    match (number(first)?, number(last)?) {
        (first, last) if first <= last => Ok((first, last)),
        _ => invalid("range", "it is empty"),
    }
}

/// `Yes` or `No`.
///
/// # Errors
/// It is neither.
pub fn boolean(value: &str) -> Result<bool, DecodeError> {
    match value {
        "Yes" => Ok(true),
        "No" => Ok(false),
        _ => invalid("boolean", "it is neither Yes nor No"),
    }
}

/// Bytes as a large number in hexadecimal (`0x`) or base64 (`0b`) form.
///
/// # Errors
/// It is neither, or has more than `max` bytes.
pub fn binary(value: &str, max: usize) -> Result<Vec<u8>, DecodeError> {
    let bytes = match value.as_bytes() {
        [b'0', b'x' | b'X', digits @ ..] if digits.len() <= 2 * max => hex(digits),
        [b'0', b'b' | b'B', digits @ ..] if digits.len() <= 2 * max => STANDARD.decode(digits).ok(),
        _ => None,
    };
    match bytes {
        Some(bytes) if bytes.len() <= max => Ok(bytes),
        _ => invalid("binary value", "it is not hexadecimal or base64, or too long"),
    }
}

/// Digits to bytes; an odd number of them has a leading zero.
fn hex(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |at: &u8| char::from(*at).to_digit(16).map(|digit| digit as u8);
    let (first, pairs) = digits.split_at(digits.len() % 2);
    let mut bytes: Vec<u8> = first.iter().map(digit).collect::<Option<_>>()?;
    for pair in pairs.chunks_exact(2) {
        bytes.push(digit(&pair[0])? << 4 | digit(&pair[1])?);
    }
    Some(bytes)
}

/// Bytes in hexadecimal form.
pub fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 + 2 * bytes.len());
    text.push_str("0x");
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}
