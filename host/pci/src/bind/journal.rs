//! The undo journal: the original bindings, recorded before any change.
//!
//! A few lines of text in `/run`, which a reboot clears together with the bindings:
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

use crate::PciAddress;
use crate::bind::host_system::HostSystem;
use crate::bind::snapshot::Binding;

/// Path of the journal, without the leading `/`.
pub const JOURNAL_PATH: &str = "run/ringbolt/bind.journal";

/// The original state of everything that was changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindJournal {
    /// The original binding of each changed function.
    pub functions: BTreeMap<PciAddress, Binding>,
    /// The original number of 2 MiB hugepages, and the highest number that was set.
    pub hugepages: Option<(u64, u64)>,
}

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BindJournalError {
    /// The file cannot be read or written.
    #[error("/{path}: {error}")]
    File {
        /// The file.
        path: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// The file has invalid contents.
    #[error(
        "/{path}, line {line}: '{text}' is not valid in a journal; move the file away to continue without it"
    )]
    Content {
        /// The file.
        path: String,
        /// Line number, from 1.
        line: usize,
        /// The invalid line.
        text: String,
    },
}

const FIRST: &str = "ringbolt-bind 1";
const LAST: &str = "end";
const NONE: &str = "-";

impl BindJournal {
    /// Reads the journal; returns an empty one if the file does not exist.
    pub fn load(machine: &dyn HostSystem, path: &str) -> Result<BindJournal, BindJournalError> {
        match machine.read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BindJournal::default()),
            Err(error) => Err(BindJournalError::File { path: path.to_string(), error }),
            Ok(text) => BindJournal::parse(&text).map_err(|line| BindJournalError::Content {
                path: path.to_string(),
                line: line + 1,
                text: text.lines().nth(line).unwrap_or_default().chars().take(80).collect(),
            }),
        }
    }

    /// Writes the journal durably, or removes the file if the journal is empty.
    pub(crate) fn store(&self, machine: &dyn HostSystem, path: &str) -> Result<(), BindJournalError> {
        let stored = match *self == BindJournal::default() {
            true => machine.remove(path),
            false => machine.store(path, &self.write()),
        };
        stored.map_err(|error| BindJournalError::File { path: path.to_string(), error })
    }

    fn write(&self) -> String {
        let mut text = format!("{FIRST}\n");
        let word = |name: &Option<String>| name.clone().unwrap_or_else(|| NONE.to_string());
        for (address, Binding { driver, driver_override: only }) in &self.functions {
            let _ = writeln!(text, "function {address} {} {}", word(driver), word(only));
        }
        if let Some((before, most)) = self.hugepages {
            let _ = writeln!(text, "hugepages {before} {most}");
        }
        text + LAST + "\n"
    }

    /// Parses a journal; the error is the index of the first invalid line.
    fn parse(text: &str) -> Result<BindJournal, usize> {
        let mut journal = BindJournal::default();
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
                        driver_override: driver_name(only).map_err(|()| index)?,
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
        // Truncated: not written by us, because we replace the file atomically.
        Err(text.lines().count())
    }
}

/// Parses a driver name; allows only characters that are safe in a path.
fn driver_name(word: &str) -> Result<Option<String>, ()> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    match word {
        NONE => Ok(None),
        name if !name.is_empty() && name.bytes().all(is_allowed) => Ok(Some(name.to_string())),
        _ => Err(()),
    }
}

/// Whether a binding can be written to the journal and parsed again.
pub(crate) fn can_be_recorded(binding: &Binding) -> bool {
    let mut names = [&binding.driver, &binding.driver_override].into_iter().flatten();
    names.all(|name| driver_name(name) == Ok(Some(name.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_invalid_journal_is_rejected_with_the_line() {
        for (text, line) in [
            ("", 0),
            ("ringbolt-bind 2\nend\n", 0),
            ("ringbolt-bind 1\n", 1),
            ("ringbolt-bind 1\nfunction 0000:00:04.0 ../x -\nend\n", 1),
            ("ringbolt-bind 1\nfunction 0000:00:04.0 nvme\nend\n", 1),
            ("ringbolt-bind 1\nhugepages 0 5\nhugepages -1 5\nend\n", 2),
            ("ringbolt-bind 1\nend\nend\n", 2),
        ] {
            assert_eq!(BindJournal::parse(text), Err(line), "{text}");
        }
    }

    proptest! {
        #[test]
        fn write_and_parse_round_trip(
            functions in proptest::collection::btree_map(
                (0u32..3, 0u8..=255, 0u8..32, 0u8..8).prop_map(|(a, b, c, d)| PciAddress::new(a, b, c, d).unwrap()),
                (proptest::option::of("[a-z][a-z0-9_-]{0,8}"), proptest::option::of("[a-z][a-z0-9_-]{0,8}"))
                    .prop_map(|(driver, driver_override)| Binding { driver, driver_override }),
                0..5,
            ),
            hugepages: Option<(u64, u64)>,
        ) {
            let journal = BindJournal { functions, hugepages };
            prop_assert_eq!(BindJournal::parse(&journal.write()), Ok(journal));
        }

        #[test]
        fn parsing_arbitrary_text_never_panics(text in "(ringbolt-bind 1\n)?([ -~]{0,30}\n){0,4}(end\n)?") {
            let _ = BindJournal::parse(&text);
        }
    }
}
