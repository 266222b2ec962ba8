//! Methods that allow hosts, with the keys that they authenticate with.

use control::json::{Value, json};
use control::{Method, RpcError};
use nvme_auth::{AuthKey, AuthOptions, AuthOptionsError, TlsKey};

use super::parameters::TargetName;
use super::{NvmfModule, SUBSYSTEM};
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
        Method::update("nvmf_set_config", set_config)
            .at_any_stage()
            .canonical(canonical_config)
            .text(
                "Sets the digests and groups that hosts may authenticate with from now on. The strongest that a host \
                 has too are selected.",
                "true",
            ),
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

/// The names of a change, and the keys.
type PreparedKeys = (String, String, Option<HostKeys>);

fn prepare_add(module: &NvmfModule, params: AddHost) -> Result<(PreparedKeys, Option<HostPsk>), RpcError> {
    let psk = without_empty(params.psk).map(|name| psk_of(module, &name)).transpose()?;
    let keys = keys_of(module, params.dhchap_key, params.dhchap_ctrlr_key)?;
    Ok(((params.nqn, params.host, keys), psk))
}

/// Reads the key of a host for TLS.
fn psk_of(module: &NvmfModule, name: &str) -> Result<HostPsk, RpcError> {
    let refused = |error: &dyn std::fmt::Display| RpcError::invalid_params(format!("{name}: {error}"));
    let key = module.keyring.key(name).map_err(|error| refused(&error))?;
    let secret = key.read().map_err(|error| refused(&error))?;
    let configured = TlsKey::of_secret(&secret).map_err(|error| refused(&error))?;
    Ok(HostPsk { key, configured })
}

fn add_host(
    module: &NvmfModule,
    ((nqn, host, keys), psk): (PreparedKeys, Option<HostPsk>),
) -> Result<bool, RpcError> {
    match (keys, psk) {
        (keys, Some(psk)) => module.target.add_host_with_psk(&nqn, &host, psk, keys)?,
        (Some(keys), None) => module.target.add_host_with_keys(&nqn, &host, keys)?,
        (None, None) => module.target.add_host(&nqn, &host)?,
    }
    Ok(true)
}

fn prepare_set(module: &NvmfModule, params: SetKeys) -> Result<PreparedKeys, RpcError> {
    Ok((params.nqn, params.host, keys_of(module, params.dhchap_key, params.dhchap_ctrlr_key)?))
}

fn set_keys(module: &NvmfModule, (nqn, host, keys): PreparedKeys) -> Result<bool, RpcError> {
    module.target.set_host_keys(&nqn, &host, keys)?;
    Ok(true)
}

control::parameters! {
    /// Admin commands that SPDK may pass to an NVMe device below.
    struct AdminPassthrough {}
    only {
        identify_ctrlr: bool = false,
        identify_uuid_list: bool = false,
        get_log_page: bool = false,
        get_set_features: bool = false,
        sanitize: bool = false,
        security_send_recv: bool = false,
        fw_update: bool = false,
        nvme_mi: bool = false,
        vendor_specific: bool = false,
    }
}

control::parameters! {
    struct NvmfConfig {
        /// Nothing is passed through
        admin_cmd_passthru: Option<AdminPassthrough>,
        /// Digests: sha256, sha384, sha512; without, they stay
        dhchap_digests: Option<Vec<String>>,
        /// Groups: null, ffdhe2048, ffdhe3072, ffdhe4096, ffdhe6144, ffdhe8192; without, they stay
        dhchap_dhgroups: Option<Vec<String>>,
    }
    only {
        discovery_filters: Vec<String> = vec![],
        dup_host_policy: String = "allow".to_string(),
    }
    one_of { discovery_filter: String = ["match_any".to_string()], poll_groups_mask: String = [String::new()] }
}

/// As it is saved: all digests and groups, in order.
fn canonical_config(_: &NvmfModule, params: &mut NvmfConfig) -> Result<(), RpcError> {
    let options = options_of(AuthOptions::default(), params)?;
    params.admin_cmd_passthru = None;
    (params.dhchap_digests, params.dhchap_dhgroups) =
        (Some(options.hash_names()), Some(options.group_names()));
    Ok(())
}

fn set_config(module: &NvmfModule, params: NvmfConfig) -> Result<bool, RpcError> {
    let options = options_of(module.target.auth_options(), &params)?;
    if options != module.target.auth_options() {
        module.target.set_auth_options(options)?;
    }
    Ok(true)
}

/// The options with those of a call.
fn options_of(mut options: AuthOptions, params: &NvmfConfig) -> Result<AuthOptions, RpcError> {
    let invalid = |name: &str, error: AuthOptionsError| RpcError::invalid_params(format!("{name}: {error}"));
    if let Some(names) = &params.dhchap_digests {
        options.hashes =
            AuthOptions::parse_hashes(names).map_err(|error| invalid("dhchap_digests", error))?;
    }
    if let Some(names) = &params.dhchap_dhgroups {
        options.groups =
            AuthOptions::parse_groups(names).map_err(|error| invalid("dhchap_dhgroups", error))?;
    }
    Ok(options)
}

/// The call that sets the options again, unless they are the default.
pub(super) fn calls(target: &NvmfTarget) -> Option<Value> {
    let options = target.auth_options();
    (options != AuthOptions::default()).then(|| {
        let params =
            json!({ "dhchap_digests": options.hash_names(), "dhchap_dhgroups": options.group_names() });
        json!({ "method": "nvmf_set_config", "params": params })
    })
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
