//! RPC methods of referrals.

use control::json::Value;
use control::{Method, RpcError};

use super::info::describe_referral;
use super::listeners::ListenAddressParameters;
use super::parameters::TargetName;
use crate::Referral;
use crate::module::{NvmfModule, UNRESPONSIVE};

const INVALID: (i64, &str) = (RpcError::INVALID_PARAMS, "the address or the NQN is not valid");

pub(super) fn methods() -> Vec<Method<NvmfModule>> {
    vec![
        Method::update("nvmf_discovery_add_referral", add)
            .text("Refers hosts to another discovery service, or to a subsystem of another target, in the discovery log.", "true")
            .canonical(|_: &NvmfModule, params: &mut AddReferral| {
                let (address, subnqn) = (params.address.address(), params.subnqn.as_deref());
                let referral = Referral::new(&address, subnqn, params.secure_channel)?;
                params.address.set_canonical(referral.address);
                params.subnqn = Some(referral.subnqn.as_str().to_string());
                Ok(())
            })
            .errors(&[INVALID, UNRESPONSIVE]),
        Method::update("nvmf_discovery_remove_referral", remove)
            .text("Removes a referral from the discovery log.", "true")
            .errors(&[(RpcError::INVALID_PARAMS, "there is no such referral"), UNRESPONSIVE]),
        Method::query("nvmf_discovery_get_referrals", get)
            .text("Lists the referrals.", "array of `address`, `secure_channel`, `subnqn`"),
    ]
}

control::parameters! {
    struct AddReferral {
        /// Where it listens; `trtype` is TCP or RDMA
        address: ListenAddressParameters,
        tgt_name: TargetName,
        /// Hosts must connect through a secure channel
        secure_channel: bool = false,
        /// NQN; without, that of a discovery service
        subnqn: Option<String>,
    }
}

fn add(module: &NvmfModule, params: AddReferral) -> Result<bool, RpcError> {
    let address = params.address.into();
    params.tgt_name.find(module)?.add_referral(Referral::new(
        &address,
        params.subnqn.as_deref(),
        params.secure_channel,
    )?)?;
    Ok(true)
}

control::parameters! {
    struct RemoveReferral {
        /// As it was added
        address: ListenAddressParameters,
        tgt_name: TargetName,
        /// NQN; without, that of a discovery service
        subnqn: Option<String>,
    }
}

fn remove(module: &NvmfModule, params: RemoveReferral) -> Result<bool, RpcError> {
    params.tgt_name.find(module)?.remove_referral(&Referral::new(
        &params.address.into(),
        params.subnqn.as_deref(),
        false,
    )?)?;
    Ok(true)
}

control::parameters! {
    struct GetReferrals {
        tgt_name: TargetName,
    }
}

fn get(module: &NvmfModule, params: GetReferrals) -> Result<Vec<Value>, RpcError> {
    Ok(params.tgt_name.find(module)?.referrals().iter().map(describe_referral).collect())
}
