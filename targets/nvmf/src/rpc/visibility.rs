//! RPC methods of the hosts that see a namespace.

use control::{Method, RpcError};

use super::parameters::TargetName;
use crate::module::{NvmfModule, SUBSYSTEM};

pub(super) fn methods() -> Vec<Method<NvmfModule>> {
    vec![
        Method::update("nvmf_ns_add_host", add_host)
            .text("Lets a host see a namespace that was added with `no_auto_visible`.", "true")
            .errors(SUBSYSTEM),
        Method::update("nvmf_ns_remove_host", remove_host)
            .text("Hides a namespace from a host again. The host's commands in flight complete.", "true")
            .errors(SUBSYSTEM),
    ]
}

control::parameters! {
    struct NamespaceHost {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// NSID
        nsid: u32,
        /// Host's NQN
        host: String,
    }
}

fn add_host(module: &NvmfModule, params: NamespaceHost) -> Result<bool, RpcError> {
    params.tgt_name.find(module)?.add_namespace_host(&params.nqn, params.nsid, &params.host)?;
    Ok(true)
}

fn remove_host(module: &NvmfModule, params: NamespaceHost) -> Result<bool, RpcError> {
    params.tgt_name.find(module)?.remove_namespace_host(&params.nqn, params.nsid, &params.host)?;
    Ok(true)
}
