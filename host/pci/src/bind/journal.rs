//! What was before, written down before anything is changed.
//!
//! A few lines of text in `/run`, which a reboot clears, as it clears bindings:
//!
//! ```text
//! ringbolt-bind 1
//! function 0000:00:04.0 nvme -
//! hugepages 0 512
//! end
//! ```

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;

use crate::Address;
use crate::bind::machine::Machine;
use crate::bind::snapshot::Binding;

/// Where the journal lies when root binds.
pub const JOURNAL: &str = "run/ringbolt/bind.journal";

/// What was before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Journal {
    /// What each function that was touched was bound to.
    pub functions: BTreeMap<Address, Binding>,
    /// How many 2 MiB hugepages there were, and the most that were set.
    pub hugepages: Option<(u64, u64)>,
}

/// The journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It cannot be read or written.
    #[error("/{path}: {error}")]
    File {
        /// The file.
        path: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// It holds something else.
    #[error(
        "/{path}, line {line}: '{text}' does not belong into a journal; move the file away to go on without it"
    )]
    Content {
        /// The file.
        path: String,
        /// Counted from 1.
        line: usize,
        /// What it says.
        text: String,
    },
}

const FIRST: &str = "ringbolt-bind 1";
const LAST: &str = "end";
const NONE: &str = "-";

impl Journal {
    /// Reads the journal; an empty one where there is none.
    pub fn load(machine: &dyn Machine, path: &str) -> Result<Journal, JournalError> {
        match machine.read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Journal::default()),
            Err(error) => Err(JournalError::File { path: path.to_string(), error }),
            Ok(text) => Journal::parse(&text).map_err(|line| JournalError::Content {
                path: path.to_string(),
                line: line + 1,
                text: text.lines().nth(line).unwrap_or_default().chars().take(80).collect(),
            }),
        }
    }

    /// Writes the journal, durably; removes it where there is nothing to remember.
    pub(crate) fn store(&self, machine: &dyn Machine, path: &str) -> Result<(), JournalError> {
        let stored = match *self == Journal::default() {
            true => machine.remove(path),
            false => machine.store(path, &self.write()),
        };
        stored.map_err(|error| JournalError::File { path: path.to_string(), error })
    }

    fn write(&self) -> String {
        let mut text = format!("{FIRST}\n");
        let word = |name: &Option<String>| name.clone().unwrap_or_else(|| NONE.to_string());
        for (address, Binding { driver, only }) in &self.functions {
            let _ = writeln!(text, "function {address} {} {}", word(driver), word(only));
        }
        if let Some((before, most)) = self.hugepages {
            let _ = writeln!(text, "hugepages {before} {most}");
        }
        text + LAST + "\n"
    }

    /// The journal, or the index of the first line that is wrong.
    fn parse(text: &str) -> Result<Journal, usize> {
        let mut journal = Journal::default();
        let mut lines = text.lines().enumerate();
        if lines.next().map(|(_, line)| line) != Some(FIRST) {
            return Err(0);
        }
        for (index, line) in lines.by_ref() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                [LAST] => return lines.next().map_or(Ok(journal), |(index, _)| Err(index)),
                ["function", address, driver, only] => {
                    let address = address.parse().map_err(|_| index)?;
                    let binding = Binding {
                        driver: driver_name(driver).map_err(|()| index)?,
                        only: driver_name(only).map_err(|()| index)?,
                    };
                    journal.functions.insert(address, binding);
                }
                ["hugepages", before, most] => {
                    let number = |word: &str| word.parse().map_err(|_| index);
                    journal.hugepages = Some((number(before)?, number(most)?));
                }
                _ => return Err(index),
            }
        }
        // Cut off: it was not written by us, who replace it whole.
        Err(text.lines().count())
    }
}

/// A driver's name becomes part of a path.
fn driver_name(word: &str) -> Result<Option<String>, ()> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    match word {
        NONE => Ok(None),
        name if !name.is_empty() && name.bytes().all(fits) => Ok(Some(name.to_string())),
        _ => Err(()),
    }
}

/// Whether a binding can be written down and read back.
pub(crate) fn can_be_noted(binding: &Binding) -> bool {
    let mut names = [&binding.driver, &binding.only].into_iter().flatten();
    names.all(|name| driver_name(name) == Ok(Some(name.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_no_journal_is_refused_with_its_line() {
        for (text, line) in [
            ("", 0),
            ("ringbolt-bind 2\nend\n", 0),
            ("ringbolt-bind 1\n", 1),
            ("ringbolt-bind 1\nfunction 0000:00:04.0 ../x -\nend\n", 1),
            ("ringbolt-bind 1\nfunction 0000:00:04.0 nvme\nend\n", 1),
            ("ringbolt-bind 1\nhugepages 0 5\nhugepages -1 5\nend\n", 2),
            ("ringbolt-bind 1\nend\nend\n", 2),
        ] {
            assert_eq!(Journal::parse(text), Err(line), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            functions in proptest::collection::btree_map(
                (0u32..3, 0u8..=255, 0u8..32, 0u8..8).prop_map(|(a, b, c, d)| Address::new(a, b, c, d).unwrap()),
                (proptest::option::of("[a-z][a-z0-9_-]{0,8}"), proptest::option::of("[a-z][a-z0-9_-]{0,8}"))
                    .prop_map(|(driver, only)| Binding { driver, only }),
                0..5,
            ),
            hugepages: Option<(u64, u64)>,
        ) {
            let journal = Journal { functions, hugepages };
            prop_assert_eq!(Journal::parse(&journal.write()), Ok(journal));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "(ringbolt-bind 1\n)?([ -~]{0,30}\n){0,4}(end\n)?") {
            let _ = Journal::parse(&text);
        }
    }
}
