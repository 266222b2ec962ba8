//! RPC methods of listeners.

use control::{RpcError, TextOrNumber};

use super::NvmfModule;
use super::parameters::{AnaStateName, TargetName};
use crate::ListenAddress;

control::parameters! {
    pub(super) struct ListenAddressParameters {
        /// Transport: TCP or VFIOUSER for listeners
        trtype: String,
        /// IPv4 or IPv6
        adrfam: Option<String>,
        /// IP address, or directory of the vfio-user socket
        traddr: String,
        /// TCP port; 0 is any that is free
        trsvcid: Option<TextOrNumber>,
    }
}

impl From<ListenAddressParameters> for ListenAddress {
    fn from(address: ListenAddressParameters) -> ListenAddress {
        let trsvcid = address.trsvcid.map_or_else(String::new, |port| port.0);
        let adrfam = address.adrfam.unwrap_or_default();
        ListenAddress { trtype: address.trtype, adrfam, traddr: address.traddr, trsvcid }
    }
}

control::parameters! {
    pub(super) struct AddListener {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// The address
        listen_address: ListenAddressParameters,
        /// ANA state; without, optimized
        ana_state: Option<AnaStateName>,
    }
    only { secure_channel: bool = false, numa_id: i32 = -1 }
    ignored("sockets are the kernel's") { sock_impl }
}

pub(super) fn add_listener(module: &NvmfModule, params: AddListener) -> Result<bool, RpcError> {
    let bound = module.target.add_listener(&params.nqn, params.listen_address.into())?;
    if let Some(ana) = params.ana_state.filter(|ana| *ana != AnaStateName::Optimized) {
        let set = module.target.set_ana_state(&params.nqn, bound.clone(), None, ana.into());
        if let Err(error) = set {
            module.target.remove_listener(&params.nqn, bound)?;
            return Err(error.into());
        }
    }
    Ok(true)
}

control::parameters! {
    pub(super) struct RemoveListener {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// The address
        listen_address: ListenAddressParameters,
    }
}

pub(super) fn remove_listener(module: &NvmfModule, params: RemoveListener) -> Result<bool, RpcError> {
    module.target.remove_listener(&params.nqn, params.listen_address.into())?;
    Ok(true)
}

control::parameters! {
    pub(super) struct SetAnaState {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// The address
        listen_address: ListenAddressParameters,
        /// New state
        ana_state: AnaStateName,
        /// ANA group; 0 is all
        anagrpid: u32 = 0,
    }
}

pub(super) fn set_ana_state(module: &NvmfModule, params: SetAnaState) -> Result<bool, RpcError> {
    let state = params.ana_state.into();
    let group = Some(params.anagrpid).filter(|group| *group != 0);
    module.target.set_ana_state(&params.nqn, params.listen_address.into(), group, state)?;
    Ok(true)
}

control::parameters! {
    pub(super) struct SetNsAnaGroup {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// NSID
        nsid: u32,
        /// ANA group
        anagrpid: u32,
    }
}

pub(super) fn set_ns_ana_group(module: &NvmfModule, params: SetNsAnaGroup) -> Result<bool, RpcError> {
    module.target.set_ana_group(&params.nqn, params.nsid, params.anagrpid)?;
    Ok(true)
}
