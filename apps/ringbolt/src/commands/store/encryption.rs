//! Encryption at rest of a node: its key, and the crypto bdevs between its devices and its store.
//!
//! A node has one key, in a file. Its logs, where they are on a device of their own, have other tweaks than
//! its data, so that no block of the two devices is encrypted in the same way.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use accel::{Cipher, CryptoKey, TweakMode};
use bdev::{BdevError, Registry, pmem};
use secret::Secret;
use serde_json::{Value, json};
use store_node::StoreBdevs;

use super::arguments::NodeOptions;
use crate::command_error::CommandError;

/// Names of the crypto bdevs in a node's process, and of their keys.
const DEVICE: &str = "EncryptedDisk";
const LOG_DEVICE: &str = "EncryptedLog";
const KEY: &str = "disk";
const LOG_KEY: &str = "log";
/// Tweaks of the data and of the logs: no data unit of the one has that of one of the other.
const TWEAKS: TweakMode = TweakMode::SimpleLba;
const LOG_TWEAKS: TweakMode = TweakMode::JoinNegLbaWithLba;
/// Name of the key's file in a node's directory.
const KEY_FILE: &str = "data.key";
/// Bytes of a key: AES-256-XTS, with one half for the data and one for the tweaks.
const KEY_BYTES: usize = 64;
/// Most bytes of a key's file: its digits, with line ends.
const KEY_FILE_BYTES_MAX: usize = 1024;
/// What a configuration creates a key with.
const KEY_METHOD: &str = "accel_crypto_key_create";

/// The keys of a node's devices, which follow from the key of the node.
#[derive(Clone)]
pub(crate) struct DeviceKeys {
    disk: Arc<CryptoKey>,
    log: Arc<CryptoKey>,
}

impl DeviceKeys {
    fn new(secret: &Secret) -> Result<DeviceKeys, String> {
        let key = |name: &str, mode: TweakMode| {
            let key = CryptoKey::from_secret(name, Cipher::AesXts, mode, secret);
            key.map(Arc::new).map_err(|error| error.to_string())
        };
        Ok(DeviceKeys { disk: key(KEY, TWEAKS)?, log: key(LOG_KEY, LOG_TWEAKS)? })
    }

    /// Those of the key in a file.
    ///
    /// # Errors
    /// The file is refused, or has no key; the text names it.
    pub(crate) fn read(path: &Path) -> Result<DeviceKeys, CommandError> {
        let refused = |error: &dyn std::fmt::Display| {
            CommandError::environment(format!("the key {}: {error}", path.display()))
        };
        let secret = Secret::read(path, KEY_FILE_BYTES_MAX).map_err(|error| refused(&error))?;
        DeviceKeys::new(&secret).map_err(|error| refused(&error))
    }

    /// Creates the crypto bdevs on these, and returns those.
    pub(crate) fn encrypt(
        &self,
        registry: &Registry,
        bdevs: StoreBdevs<'_>,
    ) -> Result<StoreBdevs<'static>, BdevError> {
        bdev_crypto::create(registry, bdevs.data, DEVICE, self.disk.clone())?;
        if let Some(log) = bdevs.log {
            bdev_crypto::create(registry, log, LOG_DEVICE, self.log.clone())?;
        }
        Ok(encrypted(bdevs))
    }

    /// Tells keys from each other, and is no secret.
    fn check_value(&self) -> String {
        self.disk.check_value()
    }
}

/// The names of the crypto bdevs on these.
fn encrypted(bdevs: StoreBdevs<'_>) -> StoreBdevs<'static> {
    StoreBdevs { data: DEVICE, log: bdevs.log.map(|_| LOG_DEVICE) }
}

/// Where the key of a new node is.
enum KeyPlace {
    /// A new file in the node's directory.
    Node,
    /// A new file in this directory.
    Directory(PathBuf),
    /// This new file.
    New(PathBuf),
    /// This file, which has the key.
    Existing(PathBuf),
}

/// The key of a new node.
pub(super) struct NodeKey {
    pub(super) keys: DeviceKeys,
    digits: Secret,
    place: KeyPlace,
    /// The file that was made outside of the node's directory.
    made: Option<PathBuf>,
}

impl NodeKey {
    /// The key of a node with these options; `None` if it is not encrypted. Nothing is written.
    ///
    /// # Errors
    /// The file or the directory that is named cannot be used.
    pub(super) fn prepare(options: &NodeOptions) -> Result<Option<NodeKey>, CommandError> {
        if !options.encrypt {
            return Ok(None);
        }
        let place = match (&options.key_file, &options.key_dir) {
            (Some(file), _) => {
                let failed =
                    |error| CommandError::environment(format!("--key-file {}: {error}", file.display()));
                let path = std::path::absolute(file).map_err(failed)?;
                match path.try_exists().map_err(failed)? {
                    true => KeyPlace::Existing(path),
                    false => KeyPlace::New(path),
                }
            }
            (None, Some(directory)) => {
                let failed = |error: io::Error| {
                    CommandError::environment(format!("--key-dir {}: {error}", directory.display()))
                };
                let path = directory.canonicalize().map_err(failed)?;
                if !path.is_dir() {
                    return Err(failed(ErrorKind::NotADirectory.into()));
                }
                KeyPlace::Directory(path)
            }
            (None, None) => KeyPlace::Node,
        };
        let digits = match &place {
            KeyPlace::Existing(path) => {
                let keys = DeviceKeys::read(path)?;
                return Ok(Some(NodeKey { keys, digits: Secret::new(""), place, made: None }));
            }
            _ => random_digits().map_err(CommandError::environment)?,
        };
        let keys = DeviceKeys::new(&digits).map_err(CommandError::operation)?;
        Ok(Some(NodeKey { keys, digits, place, made: None }))
    }

    /// Writes the file of the key of a node, whose directory is `directory` now, unless it is there. Returns
    /// its path as the configuration has it. It is durable on return, but for the name of the node's
    /// directory.
    fn store(&mut self, directory: &Path, node: u32) -> Result<PathBuf, CommandError> {
        let (path, of_config) = match &self.place {
            KeyPlace::Existing(path) => return Ok(path.clone()),
            KeyPlace::New(path) => (path.clone(), path.clone()),
            KeyPlace::Directory(keys) => {
                let path = keys.join(format!("node{node}-{}.key", self.keys.check_value()));
                (path.clone(), path)
            }
            KeyPlace::Node => (directory.join(KEY_FILE), Path::new(&format!("node{node}")).join(KEY_FILE)),
        };
        let failed = |error| CommandError::environment(format!("the key {}: {error}", path.display()));
        self.digits.write_new(&path).map_err(failed)?;
        if !matches!(self.place, KeyPlace::Node) {
            self.made = Some(path.clone());
        }
        path.parent().map_or(Ok(()), sync_directory).map_err(failed)?;
        Ok(of_config)
    }

    /// Writes the file of the key, and returns the calls that create the keys and the crypto bdevs on these.
    pub(super) fn configure(
        &mut self,
        directory: &Path,
        node: u32,
        bdevs: StoreBdevs<'_>,
    ) -> Result<EncryptedConfig, CommandError> {
        let file = self.store(directory, node)?;
        let check_value = self.keys.check_value();
        let key = |name: &str, mode: TweakMode| {
            json!({ "method": KEY_METHOD, "params": {
                "name": name, "cipher": Cipher::AesXts.name(), "tweak_mode": mode.name(), "key_file": file,
                "check_value": check_value } })
        };
        let create = |base: &str, name: &str, key: &str| {
            json!({ "method": "bdev_crypto_create", "params": {
                "base_bdev_name": base, "name": name, "key_name": key } })
        };
        let mut config = EncryptedConfig {
            keys: vec![key(KEY, TWEAKS)],
            bdevs: vec![create(bdevs.data, DEVICE, KEY)],
            names: encrypted(bdevs),
        };
        if let Some(log) = bdevs.log {
            config.keys.push(key(LOG_KEY, LOG_TWEAKS));
            config.bdevs.push(create(log, LOG_DEVICE, LOG_KEY));
        }
        Ok(config)
    }

    /// Removes the file that was made outside of the node's directory: there is no node for it.
    pub(super) fn discard(&mut self) {
        if let Some(path) = self.made.take() {
            let _ = fs::remove_file(path);
        }
    }
}

/// What is in the configuration of an encrypted node.
pub(super) struct EncryptedConfig {
    pub(super) keys: Vec<Value>,
    pub(super) bdevs: Vec<Value>,
    pub(super) names: StoreBdevs<'static>,
}

/// Makes the names in a directory durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// The digits of a new key.
fn random_digits() -> io::Result<Secret> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let random = Secret::read_with(KEY_BYTES, |buffer| {
        let key = &mut buffer[..KEY_BYTES];
        getrandom::fill(key).map_err(|_| io::Error::other("the system has no random numbers"))?;
        Ok(KEY_BYTES)
    })?;
    let mut digits = Vec::with_capacity(2 * KEY_BYTES);
    for byte in random.iter().flat_map(|random| random.reveal()) {
        digits.extend([byte >> 4, byte & 15].map(|digit| DIGITS[usize::from(digit)]));
    }
    Ok(Secret::new(digits))
}

/// Refuses what cannot be encrypted, before anything is made.
///
/// # Errors
/// Logs in persistent memory.
pub(super) fn check_log(options: &NodeOptions, log: Option<&Path>) -> Result<(), CommandError> {
    match log {
        Some(log) if options.encrypt && pmem::is_persistent(log) => Err(CommandError::usage(format!(
            "--encrypt: {} is persistent memory, and the logs of an encrypted node are not there: give it \
             logs on another device, or none",
            log.display()
        ))),
        _ => Ok(()),
    }
}

/// The key that the configuration of a node names.
pub(super) struct ConfiguredKey {
    /// As it is in the configuration: relative to the cluster's directory, or absolute.
    path: PathBuf,
    check_value: Option<String>,
}

/// The key that the configuration of a node names, if it is encrypted.
pub(super) fn configured_key(config: &Value) -> Option<ConfiguredKey> {
    let subsystems = config["subsystems"].as_array()?.iter();
    let mut calls = subsystems.filter_map(|it| it["config"].as_array()).flatten();
    let params = &calls.find(|call| call["method"] == KEY_METHOD)?["params"];
    let check_value = params["check_value"].as_str().map(str::to_string);
    Some(ConfiguredKey { path: params["key_file"].as_str()?.into(), check_value })
}

impl ConfiguredKey {
    /// The directory that it is in, if that is not its node's.
    pub(super) fn directory_elsewhere(&self, cluster: &Path, node: u32) -> Option<PathBuf> {
        let directory = cluster.join(&self.path).parent()?.to_path_buf();
        (directory != cluster.join(format!("node{node}"))).then_some(directory)
    }

    /// Whether the key in a file is this one. A file that cannot be used has none.
    pub(super) fn is_in(&self, file: &Path) -> bool {
        let found = DeviceKeys::read(file).ok().map(|keys| keys.check_value());
        found.is_some() && found == self.check_value
    }

    /// Why a node of this directory cannot start with its key, in a line that says what to do.
    pub(super) fn problem(&self, cluster: &Path, node: u32) -> Option<String> {
        let path = cluster.join(&self.path);
        let keys = Secret::read(&path, KEY_FILE_BYTES_MAX).map_err(|error| error.to_string());
        let why = match keys.and_then(|secret| DeviceKeys::new(&secret)) {
            Ok(keys) => match &self.check_value {
                Some(wanted) if *wanted != keys.check_value() => format!(
                    "it is another key, with the check value {}, than the one of its device, with {wanted}",
                    keys.check_value()
                ),
                _ => return None,
            },
            Err(error) => error,
        };
        Some(format!(
            "the key of node {node}, {}: {why}. Put the file of the key in order; if the key is lost, so is \
             what the node has: `ringbolt store replace-device {node}` gives it an empty device",
            path.display()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_key_has_random_digits_and_other_tweaks_for_the_logs() {
        let keys = [(); 2].map(|()| random_digits().unwrap());
        assert!(
            keys.iter()
                .all(|key| key.reveal().len() == 128 && key.reveal().iter().all(u8::is_ascii_hexdigit))
        );
        assert_ne!(keys[0], keys[1]);
        let devices = DeviceKeys::new(&keys[0]).unwrap();
        assert_eq!(devices.disk.check_value(), devices.log.check_value());
        let encrypt = |key: &CryptoKey| {
            let mut block = [0; 512];
            key.encrypt(&mut block, 512, 7);
            block
        };
        assert_ne!(encrypt(&devices.disk), encrypt(&devices.log));
    }

    #[test]
    fn the_key_of_a_configuration_is_found() {
        let config = json!({ "subsystems": [
            { "subsystem": "accel", "config": [{ "method": KEY_METHOD, "params":
                { "key_file": "node1/data.key", "check_value": "00d5581adc4f00ee" } }] },
            { "subsystem": "bdev", "config": [] }] });
        let key = configured_key(&config).unwrap();
        assert_eq!(key.directory_elsewhere(Path::new("/cluster"), 1), None);
        let problem = key.problem(Path::new("/nonexistent"), 1).unwrap();
        assert!(
            problem.starts_with("the key of node 1, /nonexistent/node1/data.key: No such file"),
            "{problem}"
        );
        assert!(configured_key(&json!({ "subsystems": [{ "config": [] }] })).is_none());
        for (path, directory) in [("/keys/a.key", "/keys"), ("keys/a.key", "/cluster/keys")] {
            let key = ConfiguredKey { path: path.into(), check_value: None };
            assert_eq!(key.directory_elsewhere(Path::new("/cluster"), 1), Some(directory.into()));
        }
    }
}
