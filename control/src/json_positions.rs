//! Positions in JSON text: where a key stands, for messages about a configuration file.

use std::collections::HashSet;
use std::fmt;

/// A line and a column, both counted from 1; the column in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TextPosition {
    line: usize,
    column: usize,
}

impl fmt::Display for TextPosition {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "line {} column {}", self.line, self.column)
    }
}

/// A step from a value to one within it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PathStep {
    Index(usize),
    Key(String),
}

/// A key that an object has twice, at its second place. The text must be valid JSON.
pub(crate) fn find_duplicate(text: &[u8]) -> Option<(String, TextPosition)> {
    let mut found = None;
    let mut walk = Walk { text, at: 0, path: Vec::new(), visit: &mut |_, _, _| {}, duplicate: &mut found };
    walk.value();
    found.map(|(key, at)| (key, position(text, at)))
}

/// What says that an object of a text has a key twice, and where: of two values one would be ignored. `None`
/// if none has, or the text is not JSON.
pub fn duplicate_key(text: &[u8]) -> Option<String> {
    serde_json::from_slice::<serde::de::IgnoredAny>(text).ok()?;
    find_duplicate(text).map(|(key, position)| format!("{position}: the key `{key}` stands twice"))
}

/// Where the last key of a path stands. The text must be valid JSON.
pub(crate) fn find_key(text: &[u8], path: &[PathStep]) -> Option<TextPosition> {
    let mut found = None;
    let mut visit = |current: &[PathStep], at: usize, _: &str| {
        if found.is_none() && current == path {
            found = Some(at);
        }
    };
    Walk { text, at: 0, path: Vec::new(), visit: &mut visit, duplicate: &mut None }.value();
    found.map(|at| position(text, at))
}

fn position(text: &[u8], at: usize) -> TextPosition {
    let before = &text[..at];
    let line_start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
    TextPosition { line, column: at - line_start + 1 }
}

/// Visits every key of valid JSON text. Its depth is what the parser allowed, 128.
struct Walk<'a> {
    text: &'a [u8],
    at: usize,
    path: Vec<PathStep>,
    /// Called with the path of each key, the offset of its opening quote, and the key.
    visit: &'a mut dyn FnMut(&[PathStep], usize, &str),
    duplicate: &'a mut Option<(String, usize)>,
}

impl Walk<'_> {
    fn peek(&mut self) -> u8 {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied().unwrap_or(b'}')
    }

    /// Passes a comma; returns whether the container ends here instead.
    fn ends(&mut self, end: u8) -> bool {
        if self.peek() == b',' {
            self.at += 1;
        }
        let is_end = self.peek() == end || self.at >= self.text.len();
        self.at += usize::from(is_end);
        is_end
    }

    fn value(&mut self) {
        match self.peek() {
            b'{' => {
                self.at += 1;
                let mut keys = HashSet::new();
                while !self.ends(b'}') {
                    self.member(&mut keys);
                }
            }
            b'[' => {
                self.at += 1;
                let mut index = 0;
                while !self.ends(b']') {
                    self.path.push(PathStep::Index(index));
                    self.value();
                    self.path.pop();
                    index += 1;
                }
            }
            b'"' => _ = self.string(),
            _ => {
                let is_scalar = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
                let start = self.at;
                while self.text.get(self.at).is_some_and(is_scalar) {
                    self.at += 1;
                }
                // What is no value is passed too, so that every call ends.
                self.at = self.at.max(start + 1);
            }
        }
    }

    fn member(&mut self, keys: &mut HashSet<String>) {
        let at = self.at;
        let key = self.string();
        self.path.push(PathStep::Key(key.clone()));
        (self.visit)(&self.path, at, &key);
        if self.peek() == b':' {
            self.at += 1;
        }
        if self.duplicate.is_none() && keys.contains(&key) {
            *self.duplicate = Some((key.clone(), at));
        }
        keys.insert(key);
        self.value();
        self.path.pop();
    }

    fn string(&mut self) -> String {
        let start = self.at;
        self.at += 1;
        while let Some(byte) = self.text.get(self.at) {
            self.at += 1;
            match byte {
                b'"' => break,
                b'\\' => self.at += 1,
                _ => {}
            }
        }
        self.at = self.at.min(self.text.len());
        serde_json::from_slice(&self.text[start..self.at]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_at_line_and_column() {
        let text = br#"{ "a\"": [1, {"b": -1.5e3}],
  "c": {"b": "x\\", "d": {}}, "e": true }"#;
        let key = |name: &str| PathStep::Key(name.to_string());
        for (path, expected) in [
            (vec![key("a\"")], Some((1, 3))),
            (vec![key("a\""), PathStep::Index(1), key("b")], Some((1, 15))),
            (vec![key("c"), key("d")], Some((2, 21))),
            (vec![key("e")], Some((2, 31))),
            (vec![key("b")], None),
        ] {
            let found = find_key(text, &path).map(|at| (at.line, at.column));
            assert_eq!(found, expected, "{path:?}");
        }
        assert_eq!(find_duplicate(text), None);
    }

    #[test]
    fn a_duplicate_key_is_found_at_its_second_place_however_it_is_written() {
        let found = find_duplicate(b"{\"x\": [{\"a\": 1,\n \"b\": 2,\n  \"\\u0061\": 3}]}");
        assert_eq!(
            found.map(|(key, at)| (key, at.to_string())),
            Some(("a".into(), "line 3 column 3".into()))
        );
        assert_eq!(find_duplicate(br#"[{"a":1},{"a":2}]"#), None);
    }
}
