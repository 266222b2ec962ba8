//! The NVMe/RDMA transport.
//!
//! The shell drives the connections ([`protocol`], [`connection`]) over an
//! [`RdmaNetwork`](rdma::RdmaNetwork). Command capsules arrive in buffers that all connections of a core and
//! a device share; data is read from and written to the host's memory by the device ([`link`]). What does
//! not depend on RDMA is in [`fabrics`](crate::fabrics).

mod connection;
mod limits;
mod link;
mod parameters;
mod protocol;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use control::json::{Map, Value};
use control::{BalancedTarget, DecodeLog, ParameterError};
use rdma::RdmaNetwork;
use reactor::Core;
use sockets::ServerNetwork;
use target_shell::{ConnectionTotals, GroupLimits, GroupWaker, Protocol as _, ShellError, TargetCores};
use wire_nvme::log::{TransportAddress, TransportType};

use limits::NAME;
pub use limits::RdmaTransportConfig;
use protocol::RdmaProtocol;

use crate::transport::{
    AddressText, CoreQueues, Listening, Transport, TransportConfig, TransportKind, TransportParameters,
    TransportParts,
};
use crate::{ListenAddress, NvmfTargetError};

/// NVMe/RDMA, as a type of transport.
pub(crate) struct Rdma;

impl TransportKind for Rdma {
    fn name(&self) -> &'static str {
        NAME
    }

    fn address_text(&self) -> AddressText {
        AddressText {
            traddr: "IP address of an RDMA device",
            trsvcid: Some("port of RDMA's connection manager; 0 is any that is free"),
        }
    }

    fn listening(&self) -> Listening {
        Listening::Shared
    }

    fn normalize(&self, address: &ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        Ok(ListenAddress { trtype: NAME.into(), ..ListenAddress::from_socket(address.socket_of(NAME)?) })
    }

    fn discovery_address(&self, address: &ListenAddress) -> Option<TransportAddress> {
        let socket = address.socket_of(NAME).ok()?;
        Some(TransportAddress { trtype: TransportType::Rdma, ..crate::tcp::transport_address(socket) })
    }

    fn parameters(&self) -> TransportParameters {
        parameters::declaration()
    }

    fn decode(
        &self,
        object: &mut Map<String, Value>,
        log: &mut DecodeLog,
    ) -> Result<Box<dyn TransportConfig>, ParameterError> {
        Ok(Box::new(parameters::decode(object, log)?))
    }
}

impl<N: ServerNetwork> TransportConfig<N> for RdmaTransportConfig {
    fn kind(&self) -> &'static dyn TransportKind {
        &Rdma
    }

    fn check(&self) -> Result<(), NvmfTargetError> {
        self.limits().map(drop)
    }

    fn to_object(&self) -> Map<String, Value> {
        parameters::to_object(self)
    }

    fn start(&self, parts: &TransportParts<'_>) -> Result<Box<dyn Transport>, NvmfTargetError> {
        let mut limits = self.limits()?;
        parts.masked.apply_to(&mut limits.fabrics.controller);
        let group_limits =
            GroupLimits { registry: Some(parts.registry.clone()), ..limits.connections.clone() };
        let directory = parts.directory.clone();
        let protocol = move |core: &Core, waker: &GroupWaker| {
            let waker = waker.clone();
            let notifier = directory.add_notifier(Box::new(move || waker.wake()));
            RdmaProtocol::new(core, limits.clone(), directory.clone(), Some(notifier))
        };
        let cores = TargetCores::start(parts.reactors, parts.publisher, group_limits, protocol)?;
        Ok(Box::new(RdmaCores { config: self.clone(), cores }))
    }
}

/// The transport with its groups on all cores.
struct RdmaCores {
    config: RdmaTransportConfig,
    cores: TargetCores<RdmaProtocol, RdmaNetwork>,
}

impl Transport for RdmaCores {
    fn options(&self) -> Map<String, Value> {
        parameters::to_object(&self.config)
    }

    fn listen(
        &self,
        address: &ListenAddress,
        portid: u16,
        _secure: bool,
    ) -> Result<ListenAddress, NvmfTargetError> {
        let socket = address.socket_of(NAME)?;
        let bound = self.cores.listen(&socket.into(), portid)?.tcp().unwrap_or(socket);
        Ok(ListenAddress { trtype: NAME.into(), ..ListenAddress::from_socket(bound) })
    }

    fn stop_listening(&self, portid: u16) -> Result<(), ShellError> {
        self.cores.unlisten(Some(portid))
    }

    fn shutdown(&self) -> Result<(), ShellError> {
        self.cores.drain()
    }

    /// Its connections stay, but others can be kept away from a reactor.
    fn balanced(&self) -> Option<Arc<dyn BalancedTarget>> {
        Some(Arc::new(self.cores.clone()))
    }

    fn connections(&self) -> (&'static str, ConnectionTotals) {
        (RdmaProtocol::NAME, self.cores.totals())
    }

    fn queues(&self) -> Result<Vec<CoreQueues>, ShellError> {
        let reports = self.cores.query(|protocol, connections| {
            (protocol.core.totals.snapshot(), protocol::report(connections))
        })?;
        let queues = |(totals, open)| CoreQueues { totals, open };
        Ok(reports.into_iter().map(queues).collect())
    }
}
