//! Methods that set options of the whole target.

use control::json::{Value, json};
use control::{Method, Parameters, RpcError};
use nvme_auth::{AuthOptions, AuthOptionsError};
use nvme_controller::DiscoveryFilter;

use crate::module::{NvmfModule, PENDING};
use crate::{NvmfTarget, TargetOptions};

pub(super) fn methods() -> Vec<Method<NvmfModule>> {
    vec![
        Method::update("nvmf_set_config", set_config)
            .at_any_stage()
            .canonical(canonical_config)
            .text(
                "Sets options of `nvmf_tgt`. Digests and groups are those that hosts of every target may \
                 authenticate with from now on; the strongest that a host has too are selected. \
                 `dup_host_policy` is that of hosts that connect from now on.",
                "true",
            )
            .errors(&[PENDING]),
        Method::update("nvmf_set_crdt", set_crdt)
            .at_any_stage()
            .text(
                "Sets the delays after which hosts retry a command that failed and may be retried, for hosts \
                 that connect to `nvmf_tgt` from now on and honour delays (Linux does if `crdt1` is not 0). \
                 Failed commands select `crdt1`; the others are only reported.",
                "true",
            )
            .errors(&[PENDING]),
    ]
}

control::parameters! {
    /// Admin commands that SPDK may pass to an NVMe device below.
    struct AdminPassthrough {}
    only("admin commands are executed by the target, and not passed to NVMe devices below") {
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

control::choices! {
    /// What an address of the discovery log has to have in common with the one that a host has connected to.
    pub(super) enum DiscoveryFilterName {
        Transport = "transport",
        Address = "address",
        Svcid = "svcid",
    }
}

control::choices! {
    /// How many controllers a host may have.
    pub(super) enum DupHostPolicy {
        Allow = "allow",
        RestrictPerListener = "restrict_per_listener",
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
        /// Hosts see those listeners in the discovery log that have the same transport, address or svcid
        /// (port) as the one that they connected to; all listeners if empty. Without, it stays
        discovery_filters: Option<Vec<DiscoveryFilterName>>,
        /// Older form of `discovery_filters`: match_any, or names with commas between them
        discovery_filter: Option<String>,
        /// Controllers of a host, known by its HOSTID: allow is any number, restrict_per_listener is one of a
        /// subsystem on each listener. While it exists another one is refused with Connect Controller Busy.
        /// Without, it stays
        dup_host_policy: Option<DupHostPolicy>,
        /// CPUs whose reactors serve hosts, as a mask or a list; all if empty. Only before
        /// `nvmf_create_transport`; targets that are created later have the same. Without, it stays
        poll_groups_mask: Option<String>,
    }
}

impl NvmfConfig {
    /// The filter of a call, in either form; `None` if it stays.
    fn filter(&self) -> Result<Option<DiscoveryFilter>, RpcError> {
        let invalid = |text: &str| RpcError::invalid_params(format!("discovery_filter: {text}"));
        match (&self.discovery_filters, self.discovery_filter.as_deref()) {
            (Some(_), Some(_)) => Err(invalid("discovery_filters is the same option; leave one out")),
            (Some(names), None) => Ok(Some(filter_of(names))),
            (None, None) => Ok(None),
            (None, Some("match_any")) => Ok(Some(DiscoveryFilter::default())),
            (None, Some(text)) => {
                let name = |name: &str| match name {
                    "transport" => Ok(DiscoveryFilterName::Transport),
                    "address" => Ok(DiscoveryFilterName::Address),
                    "svcid" => Ok(DiscoveryFilterName::Svcid),
                    _ => Err(invalid(
                        "expected match_any, or transport, address and svcid with commas between",
                    )),
                };
                let names: Vec<DiscoveryFilterName> = text.split(',').map(name).collect::<Result<_, _>>()?;
                Ok(Some(filter_of(&names)))
            }
        }
    }

    /// The mask of a call: `None` if it stays, `Some(None)` for all CPUs.
    fn mask(&self) -> Option<Option<&str>> {
        self.poll_groups_mask.as_deref().map(|mask| Some(mask).filter(|mask| !mask.is_empty()))
    }
}

pub(super) fn filter_of(names: &[DiscoveryFilterName]) -> DiscoveryFilter {
    DiscoveryFilter {
        transport: names.contains(&DiscoveryFilterName::Transport),
        address: names.contains(&DiscoveryFilterName::Address),
        svcid: names.contains(&DiscoveryFilterName::Svcid),
    }
}

pub(super) fn filter_names(filter: DiscoveryFilter) -> Vec<DiscoveryFilterName> {
    let DiscoveryFilter { transport, address, svcid } = filter;
    let all = [
        (transport, DiscoveryFilterName::Transport),
        (address, DiscoveryFilterName::Address),
        (svcid, DiscoveryFilterName::Svcid),
    ];
    all.into_iter().filter_map(|(is_set, name)| is_set.then_some(name)).collect()
}

/// As it is saved: all digests and groups, in order, and what else is not the default.
fn canonical_config(_: &NvmfModule, params: &mut NvmfConfig) -> Result<(), RpcError> {
    let options = options_of(AuthOptions::default(), params)?;
    let filter = params.filter()?.unwrap_or_default();
    params.admin_cmd_passthru = None;
    (params.dhchap_digests, params.dhchap_dhgroups) =
        (Some(options.hash_names()), Some(options.group_names()));
    params.discovery_filter = None;
    params.discovery_filters = Some(filter_names(filter)).filter(|names| !names.is_empty());
    params.dup_host_policy = params.dup_host_policy.filter(|policy| *policy != DupHostPolicy::Allow);
    let mask = params.mask().flatten().map(target_shell::canonical_mask).transpose();
    params.poll_groups_mask =
        mask.map_err(|error| RpcError::invalid_params(format!("poll_groups_mask: {error}")))?;
    Ok(())
}

fn set_config(module: &NvmfModule, params: NvmfConfig) -> Result<bool, RpcError> {
    let target = module.target();
    let auth_options = options_of(target.auth_options(), &params)?;
    let mut options = target.options();
    if let Some(filter) = params.filter()? {
        options.discovery_filter = filter;
    }
    if let Some(policy) = params.dup_host_policy {
        options.one_controller_per_listener = policy == DupHostPolicy::RestrictPerListener;
    }
    // First, as it may be refused.
    if let Some(mask) = params.mask() {
        target.set_poll_groups(mask)?;
    }
    for (_, one) in module.all() {
        if auth_options != one.target.auth_options() {
            one.target.set_auth_options(auth_options.clone())?;
        }
    }
    if options != target.options() {
        target.set_options(options)?;
    }
    Ok(true)
}

/// The options of authentication with those of a call.
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

control::parameters! {
    struct RetryDelays {
        /// First delay (CRDT1)
        crdt1: u16 ["100 ms"] = 0,
        /// Second delay (CRDT2)
        crdt2: u16 ["100 ms"] = 0,
        /// Third delay (CRDT3)
        crdt3: u16 ["100 ms"] = 0,
    }
}

fn set_crdt(module: &NvmfModule, params: RetryDelays) -> Result<bool, RpcError> {
    let retry_delays_100ms = [params.crdt1, params.crdt2, params.crdt3];
    module.target().set_options(TargetOptions { retry_delays_100ms, ..module.target().options() })?;
    Ok(true)
}

/// The calls that set the options again, as far as they are not the default.
pub(super) fn calls(target: &NvmfTarget) -> Vec<Value> {
    let (options, auth_options) = (target.options(), target.auth_options());
    let config = NvmfConfig {
        admin_cmd_passthru: None,
        dhchap_digests: Some(auth_options.hash_names()),
        dhchap_dhgroups: Some(auth_options.group_names()),
        discovery_filters: Some(filter_names(options.discovery_filter)).filter(|names| !names.is_empty()),
        discovery_filter: None,
        dup_host_policy: options.one_controller_per_listener.then_some(DupHostPolicy::RestrictPerListener),
        poll_groups_mask: target.poll_groups_mask(),
    };
    let is_default = auth_options == AuthOptions::default()
        && TargetOptions { retry_delays_100ms: [0; 3], ..options } == TargetOptions::default()
        && config.poll_groups_mask.is_none();
    let config = (!is_default).then(|| json!({ "method": "nvmf_set_config", "params": config.to_object() }));
    let [crdt1, crdt2, crdt3] = options.retry_delays_100ms;
    let delays = (options.retry_delays_100ms != [0; 3]).then(|| {
        let params = RetryDelays { crdt1, crdt2, crdt3 }.to_object();
        json!({ "method": "nvmf_set_crdt", "params": params })
    });
    config.into_iter().chain(delays).collect()
}
