//! Methods.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use accel::{AccelModule, Cipher, CryptoKey, NewCryptoKey, TweakMode};
use bdev::Closing;
use bdev::rpc::{BdevModule, STILL_OPEN};
use control::json::{Value, json};
use control::{ByName, Method, Module, RpcError};
use secret::Secret;

use crate::device::{self, CryptoBdev};

/// Encrypted bdevs as a [`Module`].
pub struct CryptoModule {
    bdevs: Arc<BdevModule>,
    accel: Arc<AccelModule>,
    /// Bdevs whose key was made by the call that created them, and goes with them.
    owners: Mutex<BTreeSet<String>>,
}

impl CryptoModule {
    /// On the devices of `bdevs`, with keys of `accel`, which is the framework of these devices.
    pub fn new(bdevs: &Arc<BdevModule>, accel: &Arc<AccelModule>) -> Arc<CryptoModule> {
        Arc::new(CryptoModule { bdevs: bdevs.clone(), accel: accel.clone(), owners: Mutex::default() })
    }
}

impl Module for CryptoModule {
    const NAME: &'static str = "bdev_crypto";
    const DEPENDS_ON: &'static [&'static str] = &["accel", "bdev"];

    fn methods() -> Vec<Method<CryptoModule>> {
        vec![
            Method::prepared_update("bdev_crypto_create", prepare, create)
                .canonical(|module: &CryptoModule, params: &mut CryptoCreate| {
                    params.base_bdev_name = module.bdevs.registry().name_of(&params.base_bdev_name);
                    // As it is saved.
                    if params.key_name.is_none() {
                        params.key_name = Some(legacy_key(params));
                    }
                    (params.key, params.key2, params.cipher) = (None, None, None);
                    Ok(())
                })
                .text(
                    "Creates a bdev that encrypts the blocks of its base, at once or when the base appears, and \
                     again when it returns. The key is one of `accel_crypto_key_create`, which then cannot be \
                     destroyed; a wrong one is not noticed, and reads noise.",
                    "name of the bdev",
                )
                .errors(&[
                    (RpcError::INVALID_PARAMS, "there is no such key, or the key by value is none"),
                    (RpcError::EEXIST, "the name or UUID is in use"),
                    (RpcError::EBUSY, "the base bdev is claimed"),
                    (RpcError::EINVAL, "the base has metadata, or blocks of a size that the key does not take"),
                ]),
            Method::concluded_update("bdev_crypto_delete", delete, conclude)
                .text("Deletes the bdev. I/O in flight completes first.", "true")
                .errors(&[(RpcError::ENODEV, "there is no such bdev, or it is of another module"), STILL_OPEN]),
        ]
    }

    fn report(&self) -> Value {
        let devices = self.bdevs.registry().list();
        json!({ "bdevs": devices.iter().filter(|device| device.module::<CryptoBdev>().is_some()).count() })
    }
}

control::parameters! {
    struct CryptoCreate {
        /// Device below
        base_bdev_name: String,
        /// Name
        name: String,
        /// Name of a key of `accel_crypto_key_create`
        key_name: Option<String>,
        /// Key by value, of a key `NAME_CIPHER` that is made, and goes with the bdev; obsolete
        key: Option<Secret>,
        /// Second key by value; obsolete
        key2: Option<Secret>,
        /// Cipher of a key by value: AES_XTS, as no engine has AES_CBC, which is SPDK's default; obsolete
        cipher: Option<Cipher>,
    }
    ignored("the engine of encryption is that of accel_assign_opc") { crypto_pmd }
}

/// A call whose key was found, or made.
struct PreparedCreate {
    params: CryptoCreate,
    key: Arc<CryptoKey>,
    is_owner: bool,
}

/// The name of the key that SPDK makes of a key by value.
fn legacy_key(params: &CryptoCreate) -> String {
    format!("{}_{}", params.name, params.cipher.unwrap_or(Cipher::AesCbc).name())
}

fn prepare(module: &CryptoModule, params: CryptoCreate) -> Result<PreparedCreate, RpcError> {
    let keys = module.accel.accel().keys();
    if let Some(name) = &params.key_name {
        let missing = || RpcError::invalid_params(format!("key_name: no key is called {name}"));
        let key = keys.get(name).ok_or_else(missing)?;
        return Ok(PreparedCreate { params, key, is_owner: false });
    }
    let name = legacy_key(&params);
    // Of the same configuration, as SPDK saves it.
    if let Some(key) = keys.get(&name) {
        return Ok(PreparedCreate { params, key, is_owner: false });
    }
    let prepared = module.accel.prepare_key(&NewCryptoKey {
        name: &name,
        cipher: params.cipher.unwrap_or(Cipher::AesCbc),
        tweak_mode: TweakMode::SimpleLba,
        key: params.key.as_ref(),
        key2: params.key2.as_ref(),
        source: None,
        check_value: None,
    })?;
    let key = module.accel.add_key(prepared)?;
    Ok(PreparedCreate { params, key, is_owner: true })
}

fn create(module: &CryptoModule, prepared: PreparedCreate) -> Result<String, RpcError> {
    let PreparedCreate { mut params, key, is_owner } = prepared;
    let (name, base, key_name) = (params.name.clone(), params.base_bdev_name.clone(), key.name().to_string());
    (params.key_name, params.key, params.key2, params.cipher) = (Some(key_name.clone()), None, None, None);
    // The key is in use as long as the call is remembered, whether the base is there or not.
    let made = module.bdevs.create_on_bases(
        &[&base],
        &name,
        "bdev_crypto_create",
        params,
        move |registry, params| {
            device::create(registry, &params.base_bdev_name, &params.name, key.clone()).map(drop)
        },
    );
    match made {
        Ok(()) => {
            if is_owner {
                sync::lock(&module.owners).insert(name.clone());
            }
            Ok(name)
        }
        Err(error) => {
            if is_owner {
                module.accel.destroy_key(&key_name)?;
            }
            Err(error)
        }
    }
}

/// A bdev that is being closed, with the key that goes with it.
struct Deleted {
    closing: Closing,
    key_name: Option<String>,
}

fn delete(module: &CryptoModule, params: ByName) -> Result<Deleted, RpcError> {
    let registry = module.bdevs.registry();
    let key_of = |name: &str| Some(registry.find(name)?.module::<CryptoBdev>()?.key_name().to_string());
    let own_name = registry.name_of(&params.name);
    let is_owner = sync::lock(&module.owners).contains(&own_name);
    // Of one that waits for its base, the name is that which was given.
    let key_name = is_owner.then(|| key_of(&own_name).unwrap_or_else(|| format!("{own_name}_AES_XTS")));
    let closing = module.bdevs.delete(&params.name, "crypto")?;
    sync::lock(&module.owners).remove(&own_name);
    Ok(Deleted { closing, key_name })
}

fn conclude(module: &CryptoModule, deleted: Deleted) -> Result<bool, RpcError> {
    bdev::rpc::conclude(module, deleted.closing)?;
    if let Some(name) = deleted.key_name {
        module.accel.destroy_key(&name)?;
    }
    Ok(true)
}
