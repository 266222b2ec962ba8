//! Keys of encryption: methods, and where their secrets are.
//!
//! A key is made of a key of the keyring, or of a value. A value is stored in the keyring's folder, so that
//! the saved configuration names a file; without a folder it is in memory alone.

use std::path::PathBuf;
use std::sync::Arc;

use control::json::{Value, json};
use control::{Method, Parameters as _, RpcError};
use secret::Secret;

use super::AccelModule;
use crate::{Cipher, CryptoKey, CryptoKeyError, TweakMode};

/// Most bytes of a name: as of other objects.
const NAME_BYTES_MAX: usize = 255;

pub(super) fn methods() -> Vec<Method<AccelModule>> {
    vec![
        Method::prepared_update("accel_crypto_key_create", prepare, create)
            .canonical(|module: &AccelModule, params: &mut KeyCreate| {
                module.name_source(params);
                params.check_value.iter_mut().for_each(|value| value.make_ascii_lowercase());
                Ok(())
            })
            .text(
                "Creates a key of encryption: of a key of the keyring, of a file, or of a value. A value is \
                 written to a file of the key folder (`ringbolt serve --key-folder`), with mode 0600, and the \
                 saved configuration names that; without the folder the key is not saved.",
                "true",
            )
            .errors(&[
                (
                    RpcError::INVALID_PARAMS,
                    "a key has this name, the keys are no hexadecimal digits, of another length or equal, or \
                     no engine has the cipher; the key has another check value",
                ),
                (-126, "the keyring has no such key"),
                (RpcError::EEXIST, "the key folder has another secret for this name"),
                (RpcError::EPERM, "the file of the keyring's key is refused; the message says why"),
            ]),
        Method::update("accel_crypto_key_destroy", |module: &AccelModule, params: DestroyKey| {
            module.destroy_key(&params.key_name)?;
            Ok(true)
        })
        .text(
            "Destroys a key, and the file that it is stored in if it was passed by value. Unlike SPDK's it \
             refuses a key that a bdev uses.",
            "true",
        )
        .errors(&[(RpcError::INVALID_PARAMS, "there is no such key"), (RpcError::EBUSY, "a bdev uses the key")]),
        Method::query("accel_crypto_keys_get", list)
            .text(
                "Lists the keys. Asterisks stand for the digits of secrets, which are never shown.",
                "array of keys with `name`, `cipher`, `key`, `key2` and `tweak_mode`; and where the secret \
                 is, but in memory: `keyring_key` or `key_file`",
            )
            .errors(&[(RpcError::INVALID_PARAMS, "there is no such key")]),
    ]
}

control::parameters! {
    struct KeyCreate {
        /// Cipher; no engine has AES_CBC
        cipher: Cipher,
        /// Key by value: 32 or 64 hexadecimal digits
        key: Option<Secret>,
        /// Key of the tweaks by value: as many digits
        key2: Option<Secret>,
        /// Name of a key of the keyring instead: its secret is both keys, one after the other, as 64 or 128
        /// hexadecimal digits; not in SPDK
        keyring_key: Option<String>,
        /// Path of a file with the same instead: `save_config` names that of the key folder; not in SPDK
        key_file: Option<String>,
        /// Key check value, 16 hexadecimal digits: the call fails if the key has another one, as where its
        /// file was replaced. It is the first half of 16 bytes of zeroes that were encrypted with the tweak
        /// 2^128 - 1; not in SPDK
        check_value: Option<String>,
        /// How the tweaks are made
        tweak_mode: TweakMode = TweakMode::SimpleLba,
        /// Name
        name: String,
    }
}

control::parameters! {
    struct DestroyKey {
        /// Name of the key
        key_name: String,
    }
}

control::parameters! {
    struct GetKeys {
        /// Name of the key; all without
        key_name: Option<String>,
    }
}

/// A key that is to be created.
pub struct NewCryptoKey<'a> {
    /// Name.
    pub name: &'a str,
    /// Cipher.
    pub cipher: Cipher,
    /// Tweak mode.
    pub tweak_mode: TweakMode,
    /// First key by value.
    pub key: Option<&'a Secret>,
    /// Second key by value.
    pub key2: Option<&'a Secret>,
    /// Where the secret is instead.
    pub source: Option<KeySource>,
    /// The [check value](CryptoKey::check_value) that the key is to have.
    pub check_value: Option<&'a str>,
}

/// Where the secret of a key is, but in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A key of the keyring, by name.
    Keyring(String),
    /// A file, of the key folder if the key was passed by value.
    File(PathBuf),
}

impl std::fmt::Display for KeySource {
    /// After the name of its parameter.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KeySource::Keyring(name) => write!(formatter, "keyring_key: {name}"),
            KeySource::File(path) => write!(formatter, "key_file: {}", path.display()),
        }
    }
}

/// A key for which files were read or written.
pub struct PreparedKey {
    key: CryptoKey,
    source: Option<KeySource>,
    has_check_value: bool,
}

fn prepare(module: &AccelModule, params: KeyCreate) -> Result<PreparedKey, RpcError> {
    let KeyCreate { cipher, key, key2, keyring_key, key_file, check_value, tweak_mode, name } = &params;
    let source = match (keyring_key, key_file) {
        (Some(_), Some(_)) => return Err(RpcError::invalid_params("key_file: keyring_key is given too")),
        (Some(key), None) => Some(KeySource::Keyring(key.clone())),
        (None, file) => file.as_ref().map(|file| KeySource::File(file.into())),
    };
    let new = NewCryptoKey {
        name,
        cipher: *cipher,
        tweak_mode: *tweak_mode,
        key: key.as_ref(),
        key2: key2.as_ref(),
        source,
        check_value: check_value.as_deref(),
    };
    Ok(module.prepare_key(&new)?)
}

fn create(module: &AccelModule, prepared: PreparedKey) -> Result<bool, RpcError> {
    module.add_key(prepared)?;
    Ok(true)
}

/// Refuses a key with another check value.
fn check(key: &CryptoKey, wanted: Option<&str>, source: &str) -> Result<(), CryptoKeyError> {
    let Some(wanted) = wanted else { return Ok(()) };
    let found = key.check_value();
    if found.eq_ignore_ascii_case(wanted) {
        return Ok(());
    }
    // What has another length or other characters is none, and may be the secret itself.
    if wanted.len() != found.len() || !wanted.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(CryptoKeyError::invalid("check_value", "it has 16 hexadecimal digits"));
    }
    let wanted = wanted.to_string();
    Err(CryptoKeyError::OtherKey { source_name: source.to_string(), found, wanted })
}

/// The name by which the key folder stores a key that was passed by value.
fn stored_name(name: &str) -> String {
    format!("accel_crypto_key.{name}")
}

/// Both halves as digits, one after the other.
fn joined(key: &Secret, key2: &Secret) -> Secret {
    let mut digits = Vec::with_capacity(key.reveal().len() + key2.reveal().len());
    digits.extend_from_slice(key.reveal());
    digits.extend_from_slice(key2.reveal());
    Secret::new(digits)
}

impl AccelModule {
    /// Makes a key, and stores it if it is by value. May wait for files.
    ///
    /// # Errors
    /// [`CryptoKeyError`].
    pub fn prepare_key(&self, new: &NewCryptoKey<'_>) -> Result<PreparedKey, CryptoKeyError> {
        let NewCryptoKey { name, cipher, tweak_mode, key, key2, source, check_value } = new;
        let (cipher, tweak_mode) = (*cipher, *tweak_mode);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
            return Err(CryptoKeyError::invalid("name", "it is empty, has more than 255 bytes, or a NUL"));
        }
        if self.accel.keys().get(name).is_some() {
            return Err(CryptoKeyError::Exists(name.to_string()));
        }
        match (source, key) {
            (Some(source), None) if key2.is_none() => {
                let (field, secret) = match source {
                    KeySource::Keyring(key) => ("keyring_key", self.keyring.get(key)?),
                    KeySource::File(path) => {
                        ("key_file", self.keyring.read_stored(path).map_err(CryptoKeyError::File)?)
                    }
                };
                let key = CryptoKey::from_secret(name, cipher, tweak_mode, &secret);
                let key = key.map_err(|error| error.of_source(field))?;
                check(&key, *check_value, &source.to_string())?;
                Ok(PreparedKey { key, source: Some(source.clone()), has_check_value: check_value.is_some() })
            }
            (None, Some(value)) => {
                let made =
                    CryptoKey::from_hex(name, cipher, tweak_mode, value.reveal(), key2.map(Secret::reveal))?;
                // Before it is stored.
                check(&made, *check_value, "key")?;
                // It has two keys, or it was not made.
                let both = key2.map(|key2| joined(value, key2));
                let file = both.map(|both| self.keyring.store(&stored_name(name), &both)).transpose()?;
                let source = file.flatten().map(KeySource::File);
                Ok(PreparedKey { key: made, source, has_check_value: check_value.is_some() })
            }
            _ => Err(CryptoKeyError::invalid(
                "key",
                "a key is given either by value, or by where it is: keyring_key or key_file",
            )),
        }
    }

    /// Adds a key that was prepared.
    ///
    /// # Errors
    /// [`CryptoKeyError::Exists`] if another one of this name came first; [`CryptoKeyError::TooMany`].
    pub fn add_key(&self, prepared: PreparedKey) -> Result<Arc<CryptoKey>, CryptoKeyError> {
        let PreparedKey { key, source, has_check_value } = prepared;
        let name = key.name().to_string();
        // What fails leaves the file, which may be that of the key that has come first.
        let key = self.accel.keys().add(key)?;
        let mut state = self.state();
        if has_check_value {
            state.checked.insert(name.clone());
        }
        if let Some(source) = source {
            state.sources.insert(name, source);
        }
        drop(state);
        Ok(key)
    }

    /// Removes a key, with the file that it is stored in.
    ///
    /// # Errors
    /// [`CryptoKeyError::NotFound`]; [`CryptoKeyError::InUse`].
    pub fn destroy_key(&self, name: &str) -> Result<(), CryptoKeyError> {
        self.accel.keys().remove(name)?;
        self.state().checked.remove(name);
        let source = self.state().sources.remove(name);
        if let Some(KeySource::File(path)) = source {
            self.keyring.discard(&stored_name(name), &path);
        }
        Ok(())
    }

    /// The calls that create the keys again. Those of which nothing stored the value are missing, and named.
    pub(super) fn saved_keys(&self) -> Vec<Value> {
        let keys = self.accel.keys().list();
        let state = self.state();
        let mut calls = Vec::new();
        for key in keys {
            match state.sources.get(key.name()) {
                Some(source) => {
                    let mut params = KeyCreate {
                        cipher: key.cipher(),
                        key: None,
                        key2: None,
                        keyring_key: None,
                        key_file: None,
                        check_value: state.checked.contains(key.name()).then(|| key.check_value()),
                        tweak_mode: key.tweak_mode(),
                        name: key.name().to_string(),
                    };
                    params.set_source(source);
                    let params = Value::Object(params.to_object());
                    calls.push(json!({ "method": "accel_crypto_key_create", "params": params }));
                }
                None => log::warn!(
                    target: "accel",
                    "the key {} was passed by value and is in memory alone: it is not saved, and bdevs with it are \
                     lost with this process unless you have the key (ringbolt serve --key-folder stores them)",
                    key.name()
                ),
            }
        }
        calls
    }

    /// Gives a call with the value of a key that is there, and stored, the form in which that is saved.
    fn name_source(&self, params: &mut KeyCreate) {
        let (Some(key), Some(key2)) = (&params.key, &params.key2) else { return };
        let source = self.state().sources.get(&params.name).cloned();
        let (Some(source), Some(present)) = (source, self.accel.keys().get(&params.name)) else { return };
        let given = CryptoKey::from_hex(
            &params.name,
            params.cipher,
            params.tweak_mode,
            key.reveal(),
            Some(key2.reveal()),
        );
        if given.is_ok_and(|given| given.is_same(&present)) {
            params.set_source(&source);
        }
    }
}

impl KeyCreate {
    /// Says where the secret is, instead of the value.
    fn set_source(&mut self, source: &KeySource) {
        (self.key, self.key2, self.keyring_key, self.key_file) = (None, None, None, None);
        match source {
            KeySource::Keyring(key) => self.keyring_key = Some(key.clone()),
            KeySource::File(path) => self.key_file = Some(path.to_string_lossy().into_owned()),
        }
    }
}

fn list(module: &AccelModule, params: GetKeys) -> Result<Vec<Value>, RpcError> {
    let keys = module.accel.keys();
    let keys = match params.key_name {
        Some(name) => vec![keys.get(&name).ok_or(CryptoKeyError::NotFound(name))?],
        None => keys.list(),
    };
    let state = module.state();
    let describe = |key: Arc<CryptoKey>| {
        let mut value = json!({ "name": key.name(), "cipher": key.cipher().name(), "key": key.mask(),
            "key2": key.mask(), "tweak_mode": key.tweak_mode().name() });
        match state.sources.get(key.name()) {
            Some(KeySource::Keyring(source)) => value["keyring_key"] = source.as_str().into(),
            Some(KeySource::File(path)) => value["key_file"] = path.to_string_lossy().into(),
            None => {}
        }
        value
    };
    Ok(keys.into_iter().map(describe).collect())
}

impl From<CryptoKeyError> for RpcError {
    /// SPDK has one code for all that is wrong with a key.
    fn from(error: CryptoKeyError) -> RpcError {
        match error {
            CryptoKeyError::InUse { .. } => RpcError::new(RpcError::EBUSY, error.to_string()),
            CryptoKeyError::TooMany(_) => RpcError::new(RpcError::ENOSPC, error.to_string()),
            CryptoKeyError::Keyring(error) => error.into(),
            CryptoKeyError::File(error) => {
                let RpcError { code, message, .. } = error.into();
                RpcError::new(code, format!("key_file: {message}"))
            }
            error => RpcError::invalid_params(error.to_string()),
        }
    }
}
