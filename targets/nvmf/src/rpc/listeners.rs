//! RPC methods of listeners.

use control::json::Value;
use control::{DecodeLog, Parameter, ParameterError, ParameterType, RpcError, TextOrNumber};

use super::parameters::{AnaStateName, TargetName};
use crate::ListenAddress;
use crate::module::NvmfModule;
use crate::transports::{self, TRANSPORTS};

control::parameters! {
    /// Transports say what `traddr` and `trsvcid` are.
    struct AddressFields {
        /// Transport
        trtype: String,
        /// IPv4 or IPv6
        adrfam: Option<String>,
        /// Address
        traddr: String,
        /// Service
        trsvcid: Option<TextOrNumber>,
    }
}

/// An address of any transport.
pub(super) struct ListenAddressParameters(AddressFields);

impl ParameterType for ListenAddressParameters {
    fn kind() -> String {
        AddressFields::kind()
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        AddressFields::decode(value, log).map(ListenAddressParameters)
    }

    fn encode(&self) -> Value {
        self.0.encode()
    }

    fn members() -> Vec<Parameter> {
        let texts = || TRANSPORTS.iter().map(|kind| kind.address_text());
        let mut members = AddressFields::members();
        for member in &mut members {
            match member.name {
                "trtype" => member.text = format!("Transport: {} for listeners", transports::names("or")),
                "traddr" => member.text = texts().map(|text| text.traddr).collect::<Vec<_>>().join(", or "),
                "trsvcid" => {
                    member.text = texts().filter_map(|text| text.trsvcid).collect::<Vec<_>>().join(", or ");
                }
                _ => {}
            }
        }
        members
    }
}

impl From<ListenAddressParameters> for ListenAddress {
    fn from(address: ListenAddressParameters) -> ListenAddress {
        address.address()
    }
}

impl ListenAddressParameters {
    /// The address as the target stores it.
    pub(super) fn set_canonical(&mut self, address: ListenAddress) {
        let ListenAddress { trtype, adrfam, traddr, trsvcid } = address;
        let adrfam = Some(adrfam).filter(|adrfam| !adrfam.is_empty());
        self.0 = AddressFields { trtype, adrfam, traddr, trsvcid: Some(TextOrNumber(trsvcid)) };
    }

    pub(super) fn address(&self) -> ListenAddress {
        let AddressFields { trtype, adrfam, traddr, trsvcid } = &self.0;
        let trsvcid = trsvcid.as_ref().map_or_else(String::new, |port| port.0.clone());
        let adrfam = adrfam.clone().unwrap_or_default();
        ListenAddress { trtype: trtype.clone(), adrfam, traddr: traddr.clone(), trsvcid }
    }
}

pub(super) fn canonical_listener(_: &NvmfModule, params: &mut AddListener) -> Result<(), RpcError> {
    let address = params.listen_address.address().normalized()?;
    params.listen_address.set_canonical(address);
    params.ana_state = params.ana_state.filter(|state| *state != AnaStateName::Optimized);
    Ok(())
}

pub(super) fn canonical_ana_state(_: &NvmfModule, params: &mut SetAnaState) -> Result<(), RpcError> {
    let address = params.listen_address.address().normalized()?;
    params.listen_address.set_canonical(address);
    Ok(())
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
        /// Hosts have to use TLS 1.3, each with the `psk` that it was added with, or with a key that it makes
        /// of its `dhchap_key` (secure channel concatenation)
        secure_channel: bool = false,
    }
    only("namespaces of any NUMA node are served") { numa_id: i32 = -1 }
    ignored("sockets are the kernel's") { sock_impl }
}

pub(super) fn add_listener(module: &NvmfModule, params: AddListener) -> Result<bool, RpcError> {
    let (target, address) = (params.tgt_name.find(module)?, params.listen_address.into());
    let bound = match params.secure_channel {
        true => target.add_secure_listener(&params.nqn, address)?,
        false => target.add_listener(&params.nqn, address)?,
    };
    if let Some(ana) = params.ana_state.filter(|ana| *ana != AnaStateName::Optimized) {
        let set = target.set_ana_state(&params.nqn, bound.clone(), None, ana.into());
        if let Err(error) = set {
            target.remove_listener(&params.nqn, bound)?;
            return Err(error.into());
        }
    }
    module.update_mdns();
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
    params.tgt_name.find(module)?.remove_listener(&params.nqn, params.listen_address.into())?;
    module.update_mdns();
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
    params.tgt_name.find(module)?.set_ana_state(&params.nqn, params.listen_address.into(), group, state)?;
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
    params.tgt_name.find(module)?.set_ana_group(&params.nqn, params.nsid, params.anagrpid)?;
    Ok(true)
}
