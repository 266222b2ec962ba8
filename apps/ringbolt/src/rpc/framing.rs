//! Where one JSON value ends and the next begins, in a stream without other marks.

use std::collections::VecDeque;

/// Cuts a byte stream into JSON objects and arrays, looking at each byte once.
#[derive(Default)]
pub(crate) struct Framer {
    /// What has arrived of the value that is not whole yet.
    partial: Vec<u8>,
    depth: u32,
    in_string: bool,
    escaped: bool,
    whole: VecDeque<Vec<u8>>,
}

/// The stream cannot be cut any further: there is no mark to begin again at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameError {
    /// Something else than an object or an array began.
    Garbage,
    /// A value is longer than [`FRAME_BYTES_MAX`].
    TooLong,
}

/// Longest request: SPDK's is 32 KiB, but a configuration may come as one batch.
pub(crate) const FRAME_BYTES_MAX: usize = 16 << 20;

impl Framer {
    /// Takes what arrived.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), FrameError> {
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
            if self.depth == 0 {
                self.partial.extend_from_slice(&bytes[start..=at]);
                self.whole.push_back(std::mem::take(&mut self.partial));
            }
        }
        if self.depth > 0 {
            self.partial.extend_from_slice(&bytes[start..]);
        }
        if self.partial.len() > FRAME_BYTES_MAX { Err(FrameError::TooLong) } else { Ok(()) }
    }

    /// The next whole value. Brackets balance; whether it is JSON is for the parser to say.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        self.whole.pop_front()
    }

    fn step(&mut self, byte: u8) {
        match (self.in_string, byte) {
            (true, _) if self.escaped => self.escaped = false,
            (true, b'\\') => self.escaped = true,
            (_, b'"') => self.in_string = !self.in_string,
            (false, b'{' | b'[') => self.depth += 1,
            (false, b'}' | b']') => self.depth -= 1,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(pieces: &[&str]) -> (Vec<String>, Option<FrameError>) {
        let mut framer = Framer::default();
        let error = pieces.iter().find_map(|piece| framer.push(piece.as_bytes()).err());
        let whole = std::iter::from_fn(|| framer.next());
        (whole.map(|bytes| String::from_utf8(bytes).unwrap()).collect(), error)
    }

    #[test]
    fn values_may_come_in_any_pieces() {
        let text = r#" {"a":"}{\"]"} [1,{"b":[]}]
            {"c":"\\"}"#;
        let expected = [r#"{"a":"}{\"]"}"#, r#"[1,{"b":[]}]"#, r#"{"c":"\\"}"#];
        assert_eq!(cut(&[text]).0, expected);
        let bytes: Vec<String> = text.chars().map(String::from).collect();
        let pieces: Vec<&str> = bytes.iter().map(String::as_str).collect();
        assert_eq!(cut(&pieces).0, expected);
        assert_eq!(cut(&[r#"{"a":1"#]).0, Vec::<String>::new());
    }

    #[test]
    fn garbage_is_told_after_what_was_whole() {
        let (whole, error) = cut(&["{} x"]);
        assert_eq!((whole.len(), error), (1, Some(FrameError::Garbage)));
        assert_eq!(cut(&["}"]).1, Some(FrameError::Garbage));
    }

    #[test]
    fn a_value_without_end_is_refused() {
        let mut framer = Framer::default();
        framer.push(b"[").unwrap();
        let piece = vec![b' '; 1 << 20];
        let error = (0..17).find_map(|_| framer.push(&piece).err());
        assert_eq!(error, Some(FrameError::TooLong));
    }
}
