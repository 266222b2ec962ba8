//! The keyring: secrets by name, as SPDK's. What needs a secret takes the name of a key, so that
//! configurations and requests have none.
//!
//! A key is a file ([`Keyring::add_file`]), or one of the kernel's keyring where that is enabled: then its
//! name is looked for there if no file has it. The keyring keeps no secret: a key is read whenever its secret
//! is needed, so that a file with new contents is in force from then on, and what has read a [`Secret`] keeps
//! the one that it has.

mod folder;
mod module;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use os::KernelKey;
use rustix::io::Errno;
use secret::{Secret, SecretFileError};
use serde_json::{Value, json};

use crate::RpcError;
pub use module::KeyringModule;

/// Most bytes of a key: what one of the kernel's can have.
pub const KEY_BYTES_MAX: usize = 32_767;
/// Most keys, with those that were removed and are in use: two for each host of a large target.
const KEYS_MAX: usize = 1 << 16;
/// Most bytes of a name: as of other objects.
const NAME_BYTES_MAX: usize = 255;

/// The keys of this process. Clones are the same keyring.
///
/// [`key`](Self::key) gives a reference for as long as something is to use the key, [`get`](Self::get) its
/// secret at once. References are counted. A key that is removed cannot be found any more, nor read by what
/// has a reference; it is listed until the last of these is dropped. Methods wait for files and take a lock:
/// they are called on control threads.
#[derive(Clone, Default)]
pub struct Keyring(Arc<Mutex<KeyringState>>);

#[derive(Default)]
struct KeyringState {
    /// By a number that grows: in the order in which they were added.
    entries: BTreeMap<u64, KeyEntry>,
    /// Numbers of those that are not removed, by their names without a colon.
    numbers: HashMap<String, u64>,
    last: u64,
    has_kernel_keys: bool,
    /// Where secrets that calls pass by value are stored.
    folder: Option<PathBuf>,
}

struct KeyEntry {
    /// As it was given.
    name: String,
    source: KeySource,
    /// References, beside the one of the keyring.
    users: usize,
    is_removed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum KeySource {
    File(PathBuf),
    /// Of the kernel. It was found because its name was used, and is forgotten with the last use.
    Kernel(KernelKey),
}

/// The name of a key, for a text. A secret in its place is not shown.
fn shown(name: &str) -> &str {
    let is_secret = ["DHHC-1:", "NVMeTLSkey-1:"].iter().any(|prefix| name.starts_with(prefix));
    if is_secret { "what was given, which is a secret: give the name of a key of the keyring" } else { name }
}

/// Why there is no key, or no secret in it. No text has a secret.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// There is no such key.
    #[error("no key is called {}", shown(.0))]
    NotFound(String),
    /// It was removed while something has a reference to it.
    #[error("the key {0} was removed")]
    Removed(String),
    /// There is a key of this name.
    #[error("there is a key {0}")]
    Exists(String),
    /// A name that no key can have.
    #[error("{0:?} is no name of a key: {1}")]
    Name(String, &'static str),
    /// It is not a file.
    #[error("the key {0} is the kernel's, and not a file: it is forgotten with its last use")]
    OfKernel(String),
    /// A path that another working directory would change.
    #[error("{}: the path of a key is absolute", .0.display())]
    RelativePath(PathBuf),
    /// Its file is refused.
    #[error("{}: {error}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        error: SecretFileError,
    },
    /// The kernel does not give it.
    #[error("the key {name} of the kernel's keyring: {error}")]
    Kernel {
        /// The key.
        name: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// It has more than [`KEY_BYTES_MAX`].
    #[error("the key {0} has more than {KEY_BYTES_MAX} bytes")]
    TooLarge(String),
    /// The folder of keys has a file for this key, with another secret.
    #[error("{} has another secret: move it away, or give the key another name", .0.display())]
    OtherSecret(PathBuf),
    /// The folder of keys does not take it.
    #[error("{}: {error}", .path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// There are as many keys as there can be.
    #[error("there are {KEYS_MAX} keys already")]
    TooMany,
}

impl From<KeyError> for RpcError {
    /// SPDK's codes.
    fn from(error: KeyError) -> RpcError {
        let errno = |errno: Errno| -i64::from(errno.raw_os_error());
        let of_system =
            |error: &io::Error| error.raw_os_error().map_or(RpcError::EIO, |errno| -i64::from(errno));
        let code = match &error {
            KeyError::NotFound(_) | KeyError::Removed(_) => errno(Errno::NOKEY),
            KeyError::Exists(_) | KeyError::OtherSecret(_) => RpcError::EEXIST,
            KeyError::Name(..) | KeyError::OfKernel(_) => RpcError::EINVAL,
            KeyError::RelativePath(_) => RpcError::EPERM,
            KeyError::File { error: SecretFileError::System(error), .. }
            | KeyError::Kernel { error, .. }
            | KeyError::Store { error, .. } => of_system(error),
            KeyError::File { error: SecretFileError::TooLarge(_), .. } | KeyError::TooLarge(_) => {
                errno(Errno::NOBUFS)
            }
            KeyError::File { .. } => RpcError::EPERM,
            KeyError::TooMany => RpcError::ENOSPC,
        };
        RpcError::new(code, error.to_string())
    }
}

/// A file that was found to be good for a key.
struct CheckedFile {
    name: String,
    path: PathBuf,
}

impl Keyring {
    /// Adds a file as a key. It is read once, to know that it can be, and again whenever the secret is
    /// needed.
    ///
    /// # Errors
    /// [`KeyError`]: the name is used, or of another keyring than the global one; the path is relative; the
    /// file is refused ([`Secret::read`]) or cannot be read.
    pub fn add_file(&self, name: &str, path: &Path) -> Result<(), KeyError> {
        self.add_checked(self.check_file(name, path)?)
    }

    /// The first part, which may wait for a file system.
    fn check_file(&self, name: &str, path: &Path) -> Result<CheckedFile, KeyError> {
        let bare = bare_name(name)?;
        if self.lock().numbers.contains_key(bare) {
            return Err(KeyError::Exists(name.to_string()));
        }
        read_file(path)?;
        Ok(CheckedFile { name: name.to_string(), path: path.to_path_buf() })
    }

    fn add_checked(&self, CheckedFile { name, path }: CheckedFile) -> Result<(), KeyError> {
        let mut state = self.lock();
        match state.numbers.contains_key(bare_name(&name)?) {
            true => Err(KeyError::Exists(name)),
            false => state.add(name, KeySource::File(path)).map(drop),
        }
    }

    /// Removes a file from the keyring; the file itself stays. What has a reference to the key reads it no
    /// more.
    ///
    /// # Errors
    /// [`KeyError::NotFound`]; [`KeyError::OfKernel`].
    pub fn remove_file(&self, name: &str) -> Result<(), KeyError> {
        let users = self.lock().remove_file(name)?;
        if users > 0 {
            log::warn!(target: "keyring", "the key {name} is removed: its {users} users read it no more");
        }
        Ok(())
    }

    /// A reference to a key, which need not be readable.
    ///
    /// # Errors
    /// [`KeyError::NotFound`]; [`KeyError::Kernel`] if the kernel has the key and does not give it.
    pub fn key(&self, name: &str) -> Result<Key, KeyError> {
        let not_found = || KeyError::NotFound(name.to_string());
        let bare = bare_name(name).map_err(|_| not_found())?;
        let mut state = self.lock();
        let number = match state.numbers.get(bare) {
            Some(number) => *number,
            None if !state.has_kernel_keys => return Err(not_found()),
            None => {
                // Without a wait: no program is asked to make the key.
                let found = KernelKey::find(bare).map_err(|error| match error.raw_os_error() {
                    Some(errno) if errno == Errno::NOKEY.raw_os_error() => not_found(),
                    _ => KeyError::Kernel { name: name.to_string(), error },
                })?;
                state.add(name.to_string(), KeySource::Kernel(found))?
            }
        };
        state.use_more(number);
        Ok(Key { keyring: self.clone(), number, name: name.into() })
    }

    /// The secret of a key, which is read now.
    ///
    /// # Errors
    /// As [`key`](Self::key) and [`Key::read`].
    pub fn get(&self, name: &str) -> Result<Secret, KeyError> {
        self.key(name)?.read()
    }

    /// Whether names that no file has are looked for in the kernel's keyring. Keys that were found there
    /// before stay.
    pub fn set_kernel_keys(&self, enabled: bool) {
        self.lock().has_kernel_keys = enabled;
    }

    /// The keys as SPDK lists them: those that are removed and in use are last.
    pub fn describe(&self) -> Vec<Value> {
        let state = self.lock();
        let (removed, present): (Vec<&KeyEntry>, _) =
            state.entries.values().partition(|entry| entry.is_removed);
        present.into_iter().chain(removed).map(KeyEntry::describe).collect()
    }

    /// A key that was removed and is in use, unless another one has its name now.
    fn removed_in_use(&self) -> Option<String> {
        let state = self.lock();
        let has_name = |name: &str| bare_name(name).is_ok_and(|name| state.numbers.contains_key(name));
        let mut removed = state.entries.values().filter(|entry| entry.is_removed);
        removed.find(|entry| !has_name(&entry.name)).map(|entry| entry.name.clone())
    }

    /// The calls that make the keyring again.
    fn calls(&self) -> Vec<Value> {
        let state = self.lock();
        let file = |entry: &KeyEntry| match &entry.source {
            KeySource::File(path) if !entry.is_removed => Some(json!({ "method": "keyring_file_add_key",
                "params": { "name": entry.name, "path": path.to_string_lossy() } })),
            _ => None,
        };
        let kernel = json!({ "method": "keyring_linux_set_options", "params": { "enable": true } });
        state
            .has_kernel_keys
            .then_some(kernel)
            .into_iter()
            .chain(state.entries.values().filter_map(file))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, KeyringState> {
        sync::lock(&self.0)
    }
}

impl KeyringState {
    /// Adds a key without a reference.
    fn add(&mut self, name: String, source: KeySource) -> Result<u64, KeyError> {
        if self.entries.len() >= KEYS_MAX {
            return Err(KeyError::TooMany);
        }
        self.last += 1;
        self.numbers.insert(bare_name(&name)?.to_string(), self.last);
        self.entries.insert(self.last, KeyEntry { name, source, users: 0, is_removed: false });
        Ok(self.last)
    }

    /// Returns the number of references to the key, which goes with the last of them.
    fn remove_file(&mut self, name: &str) -> Result<usize, KeyError> {
        let not_found = || KeyError::NotFound(name.to_string());
        let bare = bare_name(name).map_err(|_| not_found())?;
        let number = *self.numbers.get(bare).ok_or_else(not_found)?;
        let entry = self.entry(number);
        if !matches!(entry.source, KeySource::File(_)) {
            return Err(KeyError::OfKernel(name.to_string()));
        }
        entry.is_removed = true;
        let users = entry.users;
        self.numbers.remove(bare);
        if users == 0 {
            self.entries.remove(&number);
        }
        Ok(users)
    }

    /// One of a reference.
    fn entry(&mut self, number: u64) -> &mut KeyEntry {
        self.entries.get_mut(&number).expect("a key that has a name or a reference is there")
    }

    fn use_more(&mut self, number: u64) {
        self.entry(number).users += 1;
    }

    fn use_less(&mut self, number: u64) {
        let entry = self.entry(number);
        entry.users -= 1;
        if entry.users > 0 {
            return;
        }
        let is_of_kernel = matches!(entry.source, KeySource::Kernel(_));
        if !entry.is_removed && !is_of_kernel {
            return;
        }
        let entry = self.entries.remove(&number);
        // The name of a file that was removed may be another key's.
        let name = entry.filter(|_| is_of_kernel).map(|entry| entry.name);
        name.as_deref().map(bare_name).and_then(Result::ok).and_then(|name| self.numbers.remove(name));
    }
}

impl KeyEntry {
    fn describe(&self) -> Value {
        let (module, is_probed) = match self.source {
            KeySource::File(_) => ("keyring_file", false),
            KeySource::Kernel(_) => ("linux", true),
        };
        // The keyring's reference is counted too, as in SPDK.
        let references = self.users + usize::from(!self.is_removed);
        let mut value = json!({ "name": self.name, "module": module, "removed": self.is_removed,
            "probed": is_probed, "refcnt": references });
        match &self.source {
            _ if self.is_removed => {}
            KeySource::File(path) => value["path"] = json!(path.to_string_lossy()),
            KeySource::Kernel(key) => value["sn"] = json!(key.serial()),
        }
        value
    }
}

/// A counted reference to a key.
pub struct Key {
    keyring: Keyring,
    number: u64,
    name: Arc<str>,
}

impl Key {
    /// The name by which it was looked for.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads the secret: all bytes of the file, with a line end if there is one.
    ///
    /// # Errors
    /// [`KeyError::Removed`]; [`KeyError::File`] if the file is gone, or is not what [`Keyring::add_file`]
    /// accepts any more.
    pub fn read(&self) -> Result<Secret, KeyError> {
        let mut state = self.keyring.lock();
        let entry = state.entry(self.number);
        if entry.is_removed {
            return Err(KeyError::Removed(self.name.to_string()));
        }
        let source = entry.source.clone();
        drop(state);
        match source {
            KeySource::File(path) => read_file(&path),
            KeySource::Kernel(key) => {
                let failed = |error| KeyError::Kernel { name: self.name.to_string(), error };
                let secret = Secret::read_with(KEY_BYTES_MAX, |buffer| key.read(buffer)).map_err(failed)?;
                secret.ok_or_else(|| KeyError::TooLarge(self.name.to_string()))
            }
        }
    }
}

impl Clone for Key {
    fn clone(&self) -> Key {
        self.keyring.lock().use_more(self.number);
        Key { keyring: self.keyring.clone(), number: self.number, name: self.name.clone() }
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        self.keyring.lock().use_less(self.number);
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Key").field(&self.name).finish()
    }
}

fn read_file(path: &Path) -> Result<Secret, KeyError> {
    if !path.is_absolute() {
        return Err(KeyError::RelativePath(path.to_path_buf()));
    }
    Secret::read(path, KEY_BYTES_MAX).map_err(|error| KeyError::File { path: path.to_path_buf(), error })
}

/// The name within the global keyring: `:key0` is `key0`. There is no other keyring, which `name:key0` would
/// be in.
fn bare_name(name: &str) -> Result<&str, KeyError> {
    let bare = name.strip_prefix(':').unwrap_or(name);
    let reason = match bare {
        "" => "it is empty",
        _ if bare.len() > NAME_BYTES_MAX => "it has more than 255 bytes",
        _ if bare.contains('\0') => "it has a NUL",
        _ if bare.len() == name.len() && name.contains(':') => {
            "there is only the global keyring, without a name"
        }
        _ => return Ok(bare),
    };
    Err(KeyError::Name(name.chars().take(64).collect(), reason))
}

#[cfg(test)]
mod tests;
