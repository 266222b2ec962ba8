//! Methods that create, delete and list targets.

use bdev::Closing;
use control::json::{Value, json};
use control::{ByName, Method, NoParameters, Parameters, RpcError};

use super::info;
use super::options::{DiscoveryFilterName, DupHostPolicy, filter_names, filter_of};
use crate::module::{DEFAULT_TARGET, NvmfModule, PENDING, UNRESPONSIVE};
use crate::{NvmfTarget, TargetOptions};

pub(super) fn methods() -> Vec<Method<NvmfModule>> {
    vec![
        Method::update("nvmf_create_target", create)
            .canonical(|_: &NvmfModule, params: &mut CreateTarget| {
                let filter = filter_of(params.discovery_filter.as_deref().unwrap_or_default());
                params.discovery_filter = Some(filter_names(filter)).filter(|names| !names.is_empty());
                Ok(())
            })
            .text(
                "Creates another target, with transports, subsystems and hosts of its own, which other \
                 methods take as `tgt_name`. The targets share reactors and bdevs. 64 are created in the \
                 life of a process at most.",
                "the name",
            )
            .errors(&[
                (
                    RpcError::INVALID_PARAMS,
                    "it exists, or the name is not 1 to 255 printable ASCII characters",
                ),
                (RpcError::ENOSPC, "64 were created"),
                PENDING,
            ]),
        Method::concluded_update("nvmf_delete_target", delete, conclude_delete)
            .text(
                "Deletes a target that `nvmf_create_target` has created, and its subsystems, and disconnects \
                 its hosts. Commands in flight complete first.",
                "true",
            )
            .errors(&[
                (RpcError::INVALID_PARAMS, "there is no such target, or it is nvmf_tgt"),
                UNRESPONSIVE,
                PENDING,
            ]),
        Method::query("nvmf_get_targets", get).text(
            "Lists the targets: `nvmf_tgt`, which always exists, and those that were created.",
            "array of names",
        ),
    ]
}

control::parameters! {
    struct CreateTarget {
        /// Name
        name: String,
        /// Most subsystems, the discovery subsystem not counted; 0 is no limit
        max_subsystems: u32 = 0,
        /// As `discovery_filters` of `nvmf_set_config`
        discovery_filter: Option<Vec<DiscoveryFilterName>>,
        /// As in `nvmf_set_config`
        dup_host_policy: DupHostPolicy = DupHostPolicy::Allow,
    }
}

fn create(module: &NvmfModule, params: CreateTarget) -> Result<String, RpcError> {
    let created = module.create(&params.name, params.max_subsystems)?;
    created.target.set_options(TargetOptions {
        discovery_filter: filter_of(params.discovery_filter.as_deref().unwrap_or_default()),
        one_controller_per_listener: params.dup_host_policy == DupHostPolicy::RestrictPerListener,
        ..TargetOptions::default()
    })?;
    Ok(params.name)
}

/// Deletes the subsystems, whose hosts are disconnected.
fn delete(module: &NvmfModule, params: ByName) -> Result<(NvmfTarget, Vec<Closing>), RpcError> {
    if params.name == DEFAULT_TARGET {
        return Err(RpcError::invalid_params(format!("{DEFAULT_TARGET} always exists")));
    }
    let found = module.named(Some(&params.name));
    let target = found.map_err(|error| RpcError::invalid_params(error.message))?.target.clone();
    let subsystems = target.subsystems().into_iter().filter(|subsystem| !subsystem.discovery);
    let closing = subsystems.map(|subsystem| target.delete_subsystem(&subsystem.nqn));
    let closing = closing.collect::<Result<Vec<Closing>, _>>()?;
    module.remove(&params.name);
    module.update_mdns();
    Ok((target, closing))
}

/// Disconnects hosts of the discovery service, and waits for those of the subsystems.
fn conclude_delete(_: &NvmfModule, (target, closing): (NvmfTarget, Vec<Closing>)) -> Result<bool, RpcError> {
    let drained = target.disconnect_all();
    target.shutdown();
    closing.into_iter().try_for_each(Closing::wait)?;
    drained?;
    Ok(true)
}

fn get(module: &NvmfModule, _: NoParameters) -> Result<Vec<String>, RpcError> {
    let all = module.all().into_iter();
    Ok(all.map(|(name, _)| name.unwrap_or_else(|| DEFAULT_TARGET.to_string())).collect())
}

/// The calls that recreate the targets that were created.
pub(super) fn calls(module: &NvmfModule) -> Vec<Value> {
    let mut calls = Vec::new();
    for (name, one) in module.all() {
        let Some(name) = name else { continue };
        let options = one.target.options();
        let params = CreateTarget {
            name: name.clone(),
            max_subsystems: one.subsystems_max(),
            discovery_filter: Some(filter_names(options.discovery_filter)).filter(|names| !names.is_empty()),
            dup_host_policy: match options.one_controller_per_listener {
                true => DupHostPolicy::RestrictPerListener,
                false => DupHostPolicy::Allow,
            },
        };
        calls.push(json!({ "method": "nvmf_create_target", "params": params.to_object() }));
        for mut call in info::calls(&one.target) {
            call["params"]["tgt_name"] = json!(name);
            calls.push(call);
        }
    }
    calls
}
