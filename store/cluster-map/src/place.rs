//! Where the directory of a cluster is. A copy of it has the same identities, and is not the original.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::MapError;
use crate::location::replace_file;

/// The file of a cluster's directory that says where that is.
const FILE: &str = "location";
const FILE_BYTES_MAX: u64 = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// Whether the directory of a cluster is where it was when it was used last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoryPlace {
    /// It is the one that it was, wherever it is now.
    Same,
    /// It is a copy, and the original is gone.
    Copied,
    /// It does not say where it was.
    Unknown,
}

impl DirectoryPlace {
    /// The place of a directory; `before` is where it was, if it does not say so.
    ///
    /// # Errors
    /// [`MapError::Invalid`] if it is a copy, and the original is there; [`MapError::Storage`].
    pub fn find(directory: &Path, before: Option<&Path>) -> Result<DirectoryPlace, MapError> {
        let own = record_of(directory).map_err(|error| failed(directory, &error))?;
        let before = match read(directory)? {
            Some(record) if (record.device, record.inode) == (own.device, own.inode) => {
                return Ok(DirectoryPlace::Same);
            }
            Some(record) => record.path,
            None => match before {
                Some(before) => before.to_path_buf(),
                None => return Ok(DirectoryPlace::Unknown),
            },
        };
        let original = record_of(&before).ok();
        if original
            .as_ref()
            .is_some_and(|original| (original.device, original.inode) == (own.device, own.inode))
            || before == own.path
        {
            return Ok(DirectoryPlace::Same);
        }
        let key = |directory: &Path| fs::read(directory.join("key")).ok();
        if original.is_none() || key(&before).is_none() || key(&before) != key(directory) {
            return Ok(DirectoryPlace::Copied);
        }
        let (own, original) = (own.path.display(), before.display());
        Err(MapError::Invalid(format!(
            "{own} is a copy of the cluster in {original}, which is there: both have the same identities, so that only one may be \
             used. Use that one; or move it away first, as with `mv {original} {original}.old`, and use this one"
        )))
    }

    /// Says in a directory that it is where it is.
    ///
    /// # Errors
    /// [`MapError::Storage`].
    pub fn save(directory: &Path, path: &Path) -> Result<(), MapError> {
        let found = record_of(directory).map_err(|error| failed(directory, &error))?;
        let record = Record { path: path.to_path_buf(), ..found };
        if read(directory)?.as_ref() == Some(&record) {
            return Ok(());
        }
        let text = serde_json::to_vec(&record).expect("it has names as keys");
        replace_file(&directory.join(FILE), &text).map_err(|error| failed(directory, &error))
    }
}

fn record_of(directory: &Path) -> std::io::Result<Record> {
    let found = fs::metadata(directory)?;
    Ok(Record { path: directory.canonicalize()?, device: found.dev(), inode: found.ino() })
}

fn read(directory: &Path) -> Result<Option<Record>, MapError> {
    let path = directory.join(FILE);
    let found = fs::metadata(&path).ok().filter(|found| found.len() <= FILE_BYTES_MAX);
    if found.is_none() {
        return Ok(None);
    }
    let text = fs::read(&path).map_err(|error| failed(&path, &error))?;
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| MapError::Record { what: path.display().to_string(), reason: error.to_string() })
}

fn failed(path: &Path, error: &std::io::Error) -> MapError {
    MapError::Storage { what: path.display().to_string(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_was_moved_is_the_same_and_a_copy_is_not() {
        let root = std::env::temp_dir().join(format!("ringbolt-place-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let make = |name: &str, key: &str| {
            let directory = root.join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("key"), key).unwrap();
            directory.canonicalize().unwrap()
        };
        let original = make("c", "secret");
        assert_eq!(DirectoryPlace::find(&original, None).unwrap(), DirectoryPlace::Unknown);
        assert_eq!(DirectoryPlace::find(&original, Some(&original)).unwrap(), DirectoryPlace::Same);
        DirectoryPlace::save(&original, &original).unwrap();
        let copy = make("copy", "secret");
        let refused = DirectoryPlace::find(&copy, Some(&original)).unwrap_err().to_string();
        assert!(refused.contains("is a copy of the cluster in"), "{refused}");
        fs::copy(original.join(FILE), copy.join(FILE)).unwrap();
        assert!(DirectoryPlace::find(&copy, None).is_err());
        // It is moved, and so is what it was.
        let moved = root.join("moved");
        fs::rename(&original, &moved).unwrap();
        assert_eq!(DirectoryPlace::find(&moved, None).unwrap(), DirectoryPlace::Same);
        assert_eq!(DirectoryPlace::find(&copy, None).unwrap(), DirectoryPlace::Copied);
        // Another cluster has come to its place.
        make("c", "other");
        assert_eq!(DirectoryPlace::find(&copy, None).unwrap(), DirectoryPlace::Copied);
        DirectoryPlace::save(&copy, &copy).unwrap();
        assert_eq!(DirectoryPlace::find(&copy, None).unwrap(), DirectoryPlace::Same);
        fs::remove_dir_all(root).unwrap();
    }
}
