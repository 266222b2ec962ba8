//! Splits a byte stream into JSON values. The stream has no delimiters: brackets are counted.

use std::collections::VecDeque;

/// Splits a byte stream into JSON objects and arrays. Each byte is examined once.
pub struct Framer {
    limits: FrameLimits,
    /// Bytes of an incomplete value.
    partial: Vec<u8>,
    depth: u32,
    /// Values of the incomplete value so far, counted by their separators.
    values: usize,
    in_string: bool,
    escaped: bool,
    complete: VecDeque<Vec<u8>>,
}

/// The stream cannot be split any further: there is no delimiter to resynchronize at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// A value that is neither an object nor an array.
    Garbage,
    /// A value longer than [`FrameLimits::bytes_max`].
    TooLong,
    /// A value nested deeper than [`FrameLimits::depth_max`].
    TooDeep,
    /// A value of more than [`FrameLimits::values_max`] values.
    TooManyValues,
}

/// Limits of one value. What is parsed takes up to some hundred times the memory of its text, so that a limit
/// of bytes alone is not enough.
#[derive(Clone, Copy, Debug)]
pub struct FrameLimits {
    /// Bytes of the text.
    pub bytes_max: usize,
    /// Objects and arrays within each other.
    pub depth_max: u32,
    /// Values within it.
    pub values_max: usize,
}

impl FrameLimits {
    /// Of a request. SPDK's limit is 32 KiB, but a configuration may be sent as one batch.
    pub const REQUEST: FrameLimits = FrameLimits { bytes_max: 1 << 20, depth_max: 32, values_max: 1 << 17 };
    /// Of a response, which is from a server that the caller trusts: `save_config` of many devices is long.
    pub const RESPONSE: FrameLimits =
        FrameLimits { bytes_max: 1 << 30, depth_max: 128, values_max: usize::MAX };
}

impl Framer {
    /// At the start of a stream.
    pub fn new(limits: FrameLimits) -> Framer {
        Framer {
            limits,
            partial: Vec::new(),
            depth: 0,
            values: 0,
            in_string: false,
            escaped: false,
            complete: VecDeque::new(),
        }
    }

    /// Adds received bytes. After an error, values completed before it are still returned by `next`.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), FrameError> {
        let mut start = 0;
        for (at, byte) in bytes.iter().copied().enumerate() {
            if self.depth == 0 {
                match byte {
                    b'{' | b'[' => start = at,
                    _ if byte.is_ascii_whitespace() => continue,
                    _ => return Err(FrameError::Garbage),
                }
            }
            self.step(byte);
            if self.depth > self.limits.depth_max {
                return Err(FrameError::TooDeep);
            }
            if self.values > self.limits.values_max {
                return Err(FrameError::TooManyValues);
            }
            if self.depth == 0 {
                self.values = 0;
                self.partial.extend_from_slice(&bytes[start..=at]);
                if self.partial.len() > self.limits.bytes_max {
                    return Err(FrameError::TooLong);
                }
                self.complete.push_back(std::mem::take(&mut self.partial));
            }
        }
        if self.depth > 0 {
            self.partial.extend_from_slice(&bytes[start..]);
        }
        if self.partial.len() > self.limits.bytes_max { Err(FrameError::TooLong) } else { Ok(()) }
    }

    /// The next complete value. Its brackets balance; it may still be invalid JSON.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<Vec<u8>> {
        self.complete.pop_front()
    }

    fn step(&mut self, byte: u8) {
        match (self.in_string, byte) {
            (true, _) if self.escaped => self.escaped = false,
            (true, b'\\') => self.escaped = true,
            (_, b'"') => self.in_string = !self.in_string,
            (false, b'{' | b'[') => {
                self.depth += 1;
                self.values += 1;
            }
            (false, b',') => self.values += 1,
            (false, b'}' | b']') => self.depth -= 1,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(pieces: &[&str]) -> (Vec<String>, Option<FrameError>) {
        let mut framer = Framer::new(FrameLimits::REQUEST);
        let error = pieces.iter().find_map(|piece| framer.push(piece.as_bytes()).err());
        let complete = std::iter::from_fn(|| framer.next());
        (complete.map(|bytes| String::from_utf8(bytes).unwrap()).collect(), error)
    }

    #[test]
    fn values_may_be_fragmented_anywhere() {
        let text = r#" {"a":"}{\"]"} [1,{"b":[]}]
            {"c":"\\"}"#;
        let expected = [r#"{"a":"}{\"]"}"#, r#"[1,{"b":[]}]"#, r#"{"c":"\\"}"#];
        assert_eq!(split(&[text]).0, expected);
        let bytes: Vec<String> = text.chars().map(String::from).collect();
        let pieces: Vec<&str> = bytes.iter().map(String::as_str).collect();
        assert_eq!(split(&pieces).0, expected);
        assert_eq!(split(&[r#"{"a":1"#]).0, Vec::<String>::new());
    }

    #[test]
    fn complete_values_before_garbage_are_returned() {
        let (complete, error) = split(&["{} x"]);
        assert_eq!((complete.len(), error), (1, Some(FrameError::Garbage)));
        assert_eq!(split(&["}"]).1, Some(FrameError::Garbage));
    }

    #[test]
    fn a_value_beyond_a_limit_is_rejected_before_it_is_complete() {
        let too_long = [String::from("["), " ".repeat(1 << 20)].concat();
        let complete_too_long = format!("[{}]", " ".repeat((1 << 20) - 1));
        let too_deep = "[".repeat(33);
        let too_many = ["[".to_string(), "1,".repeat(1 << 17)].concat();
        for (text, expected) in [
            (too_long.as_str(), Some(FrameError::TooLong)),
            (&complete_too_long, Some(FrameError::TooLong)),
            (&too_deep, Some(FrameError::TooDeep)),
            (&too_many, Some(FrameError::TooManyValues)),
            (&too_long[..1 << 20], None),
            (&too_deep[..32], None),
            (&too_many[..1 << 17], None),
            ("{\"a\":\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[,,,,,,\"}", None),
        ] {
            assert_eq!(split(&[text]).1, expected, "{}", &text[..40.min(text.len())]);
        }
        // The count of values starts anew with each value.
        let mut framer = Framer::new(FrameLimits::REQUEST);
        for _ in 0..4 {
            framer.push(format!("[{}1]", "1,".repeat(1 << 16)).as_bytes()).unwrap();
        }
    }
}
