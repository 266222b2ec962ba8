//! Methods that allow hosts, with the keys that they authenticate with.

use control::json::{Value, json};
use control::{Method, RpcError};
use nvme_auth::{AuthKey, TlsKey};

use super::parameters::TargetName;
use crate::module::{NvmfModule, SUBSYSTEM};
use crate::{HostKeys, HostPsk, NvmfTarget};

pub(super) fn methods() -> Vec<Method<NvmfModule>> {
    vec![
        Method::prepared_update("nvmf_subsystem_add_host", prepare_add, add_host)
            .canonical(|_, params: &mut AddHost| {
                params.dhchap_key = without_empty(params.dhchap_key.take());
                params.dhchap_ctrlr_key = without_empty(params.dhchap_ctrlr_key.take());
                params.psk = without_empty(params.psk.take());
                Ok(())
            })
            .text(
                "Allows a host to connect. With a key it has to authenticate on every queue (DH-HMAC-CHAP). The \
                 secret is read now: `nvmf_subsystem_set_keys` reads it anew. With a `psk` the host has to connect \
                 through a listener with `secure_channel`, with TLS 1.3 and this key.",
                "true",
            )
            .errors(SUBSYSTEM),
        Method::prepared_update("nvmf_subsystem_set_keys", prepare_set, set_keys)
            .text(
                "Replaces the keys of a host; without any it need not authenticate. A host that is connected uses them \
                 when it connects or authenticates anew. One that had no keys is disconnected.",
                "true",
            )
            .errors(SUBSYSTEM),
    ]
}

control::parameters! {
    struct AddHost {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// Host's NQN
        host: String,
        /// Key of the keyring with which the host authenticates
        dhchap_key: Option<String>,
        /// Key of the keyring with which the subsystem authenticates to the host, if the host asks for it
        dhchap_ctrlr_key: Option<String>,
        /// Key of the keyring with which the host has to use TLS, in the form NVMeTLSkey-1:HH:BASE64:
        psk: Option<String>,
    }
}

control::parameters! {
    struct SetKeys {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// Host's NQN
        host: String,
        /// Key of the keyring with which the host authenticates
        dhchap_key: Option<String>,
        /// Key of the keyring with which the subsystem authenticates to the host, if the host asks for it
        dhchap_ctrlr_key: Option<String>,
    }
}

fn without_empty(name: Option<String>) -> Option<String> {
    name.filter(|name| !name.is_empty())
}

/// Reads the keys of a host.
fn keys_of(
    module: &NvmfModule,
    host: Option<String>,
    controller: Option<String>,
) -> Result<Option<HostKeys>, RpcError> {
    // With SPDK's code for all errors of keys.
    let refused =
        |name: &str, error: &dyn std::fmt::Display| RpcError::invalid_params(format!("{name}: {error}"));
    let read = |name: String| {
        let key = module.keyring.key(&name).map_err(|error| refused(&name, &error))?;
        let secret = key.read().map_err(|error| refused(&name, &error))?;
        let secret = AuthKey::of_secret(&secret).map_err(|error| refused(&name, &error))?;
        Ok::<_, RpcError>((key, secret))
    };
    match (without_empty(host), without_empty(controller)) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(RpcError::invalid_params("dhchap_ctrlr_key needs a dhchap_key")),
        (Some(host), controller) => {
            Ok(Some(HostKeys { host: read(host)?, controller: controller.map(read).transpose()? }))
        }
    }
}

/// The target and the names of a change, and the keys.
struct PreparedKeys {
    target: NvmfTarget,
    nqn: String,
    host: String,
    keys: Option<HostKeys>,
}

fn prepare_add(module: &NvmfModule, params: AddHost) -> Result<(PreparedKeys, Option<HostPsk>), RpcError> {
    let psk = without_empty(params.psk).map(|name| psk_of(module, &name)).transpose()?;
    let keys = keys_of(module, params.dhchap_key, params.dhchap_ctrlr_key)?;
    let target = params.tgt_name.find(module)?;
    Ok((PreparedKeys { target, nqn: params.nqn, host: params.host, keys }, psk))
}

/// Reads the key of a host for TLS.
fn psk_of(module: &NvmfModule, name: &str) -> Result<HostPsk, RpcError> {
    let refused = |error: &dyn std::fmt::Display| RpcError::invalid_params(format!("{name}: {error}"));
    let key = module.keyring.key(name).map_err(|error| refused(&error))?;
    let secret = key.read().map_err(|error| refused(&error))?;
    let configured = TlsKey::of_secret(&secret).map_err(|error| refused(&error))?;
    Ok(HostPsk { key, configured })
}

fn add_host(_: &NvmfModule, (prepared, psk): (PreparedKeys, Option<HostPsk>)) -> Result<bool, RpcError> {
    let PreparedKeys { target, nqn, host, keys } = prepared;
    match (keys, psk) {
        (keys, Some(psk)) => target.add_host_with_psk(&nqn, &host, psk, keys)?,
        (Some(keys), None) => target.add_host_with_keys(&nqn, &host, keys)?,
        (None, None) => target.add_host(&nqn, &host)?,
    }
    Ok(true)
}

fn prepare_set(module: &NvmfModule, params: SetKeys) -> Result<PreparedKeys, RpcError> {
    let keys = keys_of(module, params.dhchap_key, params.dhchap_ctrlr_key)?;
    let target = params.tgt_name.find(module)?;
    Ok(PreparedKeys { target, nqn: params.nqn, host: params.host, keys })
}

fn set_keys(_: &NvmfModule, prepared: PreparedKeys) -> Result<bool, RpcError> {
    let PreparedKeys { target, nqn, host, keys } = prepared;
    target.set_host_keys(&nqn, &host, keys)?;
    Ok(true)
}

/// A host of a subsystem with the names of its keys, as SPDK describes it: under the key `nqn` or `host`.
pub(super) fn describe_host(name: &str, host: &str, keys: Option<&crate::HostKeyNames>) -> Value {
    let mut described = json!({ name: host });
    if let Some(key) = keys.and_then(|keys| keys.host.as_ref()) {
        described["dhchap_key"] = json!(key);
    }
    if let Some(key) = keys.and_then(|keys| keys.controller.as_ref()) {
        described["dhchap_ctrlr_key"] = json!(key);
    }
    if let Some(key) = keys.and_then(|keys| keys.psk.as_ref()) {
        described["psk"] = json!(key);
    }
    described
}
