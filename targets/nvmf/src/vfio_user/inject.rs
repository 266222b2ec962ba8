//! Faults that are injected into the controllers of clients: the call, and its RPC method.

use control::{Method, RpcError};
use sockets::ServerNetwork;

use super::{VfioUserCores, protocol};
use crate::module::{NvmfModule, SUBSYSTEM};
use crate::{ListenAddress, NvmfTarget, NvmfTargetError, VfioUserFault};

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Injects a fault into the controller of the client at a vfio-user listener.
    ///
    /// # Errors
    /// No client is connected at the address.
    pub fn inject(&self, traddr: &str, fault: VfioUserFault) -> Result<(), NvmfTargetError> {
        let address = ListenAddress::vfio_user(traddr).normalized()?;
        let injected = self.at_listener(&address, |transport: &VfioUserCores, portid| {
            transport.cores.query(move |_, connections| protocol::inject(connections, portid, fault))
        })?;
        match injected.transpose()? {
            Some(cores) if cores.contains(&true) => Ok(()),
            _ => Err(NvmfTargetError::Parameter(format!("no client is connected at {}", address.traddr))),
        }
    }
}

pub(super) fn methods() -> Vec<Method<NvmfModule>> {
    vec![
        Method::update("nvmf_vfio_user_inject", inject)
            .text("Injects a fault into the controller of a vfio-user listener. Not an SPDK method.", "true")
            .errors(SUBSYSTEM),
    ]
}

control::choices! {
    enum FaultName {
        None = "none",
        Fatal = "fatal",
        Gone = "gone",
        Disconnect = "disconnect",
        DropCompletions = "drop_completions",
        Stall = "stall",
    }
}

control::parameters! {
    struct InjectVfioUserFault {
        /// Directory of the listener
        traddr: String,
        /// What fails
        fault: FaultName,
        /// How many completions drop_completions drops; without, 1
        count: Option<u32>,
        /// Which queue stalls
        qid: Option<u16>,
    }
}

fn inject(module: &NvmfModule, params: InjectVfioUserFault) -> Result<bool, RpcError> {
    let fault = match (params.fault, params.count, params.qid) {
        (FaultName::None, None, None) => VfioUserFault::None,
        (FaultName::Fatal, None, None) => VfioUserFault::Fatal,
        (FaultName::Gone, None, None) => VfioUserFault::SurpriseRemoval,
        (FaultName::Disconnect, None, None) => VfioUserFault::Disconnect,
        (FaultName::DropCompletions, count, None) => VfioUserFault::DropCompletions(count.unwrap_or(1)),
        (FaultName::Stall, None, Some(qid)) => VfioUserFault::Stall(qid),
        _ => {
            let message = "count belongs to the fault drop_completions, and qid to stall, which needs it";
            return Err(RpcError::invalid_params(message));
        }
    };
    module.target().inject(&params.traddr, fault)?;
    Ok(true)
}
