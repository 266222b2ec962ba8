//! The folder of keys: files for secrets that calls pass by value, so that a saved configuration names a file
//! instead of a secret.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use secret::Secret;

use super::{KEY_BYTES_MAX, KeyError, Keyring, read_file};

/// Most bytes of a file's name, with its ending: what file systems take.
const FILE_NAME_BYTES_MAX: usize = 255;
const ENDING: &str = ".key";

impl Keyring {
    /// Has [`store`](Self::store) write to this folder, which is created for its owner alone if it is not
    /// there.
    ///
    /// # Errors
    /// The path is relative, not UTF-8 or no folder, or others than its owner may write to it; what the
    /// system reports.
    pub fn set_folder(&self, folder: &Path) -> io::Result<()> {
        let refused = |reason: &str| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the key folder {}: {reason}", folder.display()),
            )
        };
        if !folder.is_absolute() || folder.to_str().is_none() {
            // A configuration names its files.
            return Err(refused("its path is not absolute, or not UTF-8"));
        }
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(refused(&error.to_string()));
            }
            _ => {}
        }
        let metadata = fs::metadata(folder).map_err(|error| refused(&error.to_string()))?;
        if !metadata.is_dir() {
            return Err(refused("it is not a folder"));
        }
        if metadata.mode() & 0o022 != 0 {
            return Err(refused("others than its owner may write to it: chmod 700"));
        }
        self.lock().folder = Some(folder.to_path_buf());
        Ok(())
    }

    /// Writes a secret to a new file of the folder, with mode 0600, and returns its path; `None` without a
    /// folder. A file of that name that has this secret already stays.
    ///
    /// # Errors
    /// [`KeyError::OtherSecret`]: the file has another secret, which is not overwritten. [`KeyError::Store`];
    /// [`KeyError::Name`]; [`KeyError::TooLarge`].
    pub fn store(&self, name: &str, secret: &Secret) -> Result<Option<PathBuf>, KeyError> {
        let Some(folder) = self.lock().folder.clone() else { return Ok(None) };
        if secret.reveal().len() > KEY_BYTES_MAX {
            return Err(KeyError::TooLarge(name.to_string()));
        }
        let path = folder.join(file_name(name)?);
        match secret.write_new(&path).and_then(|()| fs::File::open(&folder)?.sync_all()) {
            Ok(()) => Ok(Some(path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                match read_file(&path)? == *secret {
                    true => Ok(Some(path)),
                    false => Err(KeyError::OtherSecret(path)),
                }
            }
            Err(error) => Err(KeyError::Store { path, error }),
        }
    }

    /// Reads a file that [`store`](Self::store) has written, now or in an earlier process, or another one,
    /// which may have a relative path: it is read once.
    ///
    /// # Errors
    /// As of [`Key::read`](super::Key::read), but for [`KeyError::RelativePath`].
    pub fn read_stored(&self, path: &Path) -> Result<Secret, KeyError> {
        Secret::read(path, KEY_BYTES_MAX).map_err(|error| KeyError::File { path: path.to_path_buf(), error })
    }

    /// Removes the file that [`store`](Self::store) gives a key of this name, if it is `path`.
    pub fn discard(&self, name: &str, path: &Path) {
        let folder = self.lock().folder.clone();
        let own = folder.zip(file_name(name).ok()).map(|(folder, file)| folder.join(file));
        if own.as_deref() == Some(path)
            && let Err(error) = fs::remove_file(path)
        {
            log::warn!(target: "keyring", "{} stays: {error}", path.display());
        }
    }
}

/// The name of a key's file: characters other than letters, digits and `-_.` as `%` and two digits.
fn file_name(name: &str) -> Result<String, KeyError> {
    let mut file = String::with_capacity(name.len() + ENDING.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => file.push(char::from(byte)),
            b'.' if !file.is_empty() => file.push('.'),
            _ => file.push_str(&format!("%{byte:02x}")),
        }
    }
    file.push_str(ENDING);
    match file.len() {
        0..=FILE_NAME_BYTES_MAX => Ok(file),
        _ => Err(KeyError::Name(name.chars().take(64).collect(), "it is too long for the name of a file")),
    }
}
