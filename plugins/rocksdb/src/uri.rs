//! `ringbolt://CONFIG?bdev=NAME`: which store.

use std::path::PathBuf;

use rocksdb_abi::{ErrorKind, FileError};

const FORM: &str = "expected ringbolt://CONFIG?bdev=NAME, where CONFIG is the path of a configuration file";

/// Which store a URI names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreUri {
    /// The configuration file.
    pub(crate) config: PathBuf,
    /// The bdev with the store.
    pub(crate) bdev: String,
    /// An empty bdev gets a new store.
    pub(crate) create: bool,
    /// Space that was freed is deallocated on the bdev.
    pub(crate) discard: bool,
}

impl StoreUri {
    /// # Errors
    /// It has another form, which the error says.
    pub(crate) fn parse(text: &str) -> Result<StoreUri, FileError> {
        let invalid = |what: String| FileError::new(ErrorKind::Invalid, format!("{text}: {what}; {FORM}"));
        let rest =
            text.strip_prefix("ringbolt://").ok_or_else(|| invalid("it is no such URI".to_string()))?;
        let (config, options) = rest.split_once('?').unwrap_or((rest, ""));
        if config.is_empty() {
            return Err(invalid("the configuration file is missing".to_string()));
        }
        let (mut bdev, mut create, mut discard) = (None, false, false);
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("bdev", name)) if !name.is_empty() && bdev.is_none() => bdev = Some(name.to_string()),
                Some(("bdev", name)) if !name.is_empty() => {
                    return Err(invalid(format!("bdev={name} is a second bdev; a store has one")));
                }
                Some(("create", "1")) => create = true,
                Some(("create", "0")) => create = false,
                Some(("discard", "1")) => discard = true,
                Some(("discard", "0")) => discard = false,
                _ => {
                    return Err(invalid(format!(
                        "{option} is no option: there are bdev=NAME, create=1 and discard=1"
                    )));
                }
            }
        }
        let bdev = bdev.ok_or_else(|| invalid("bdev=NAME is missing".to_string()))?;
        Ok(StoreUri { config: config.into(), bdev, create, discard })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_has_a_file_and_a_bdev() {
        let uri = StoreUri::parse("ringbolt:///etc/db.json?bdev=Nvme0n1&create=1").unwrap();
        let config = PathBuf::from("/etc/db.json");
        assert_eq!(uri, StoreUri { config, bdev: "Nvme0n1".to_string(), create: true, discard: false });
        assert!(!StoreUri::parse("ringbolt://db.json?bdev=A").unwrap().create);
    }

    #[test]
    fn what_is_no_uri_is_refused_with_the_form() {
        for (text, part) in [
            ("file:///x", "no such URI"),
            ("ringbolt://", "file is missing"),
            ("ringbolt:///etc/db.json", "bdev=NAME is missing"),
            ("ringbolt:///etc/db.json?bdev=", "bdev= is no option"),
            ("ringbolt:///etc/db.json?bdev=A&bdev=B", "bdev=B is a second bdev"),
            ("ringbolt:///etc/db.json?bdev=A&create=yes", "create=yes is no option"),
        ] {
            let error = StoreUri::parse(text).unwrap_err();
            assert!(error.text.contains(part) && error.text.contains(FORM), "{text}: {}", error.text);
        }
    }
}
