//! The NVMe/TCP transport.
//!
//! The shell drives the connections ([`protocol`], [`connection`]). Received PDUs go through [`handler`] to
//! the queue, whose answers [`link`] sends. What does not depend on TCP is in [`fabrics`](crate::fabrics).

mod address;
mod connection;
mod handler;
mod limits;
mod link;
mod moving;
mod parameters;
mod protocol;
mod psks;
mod secure;
mod secure_ports;
#[cfg(any(test, fuzzing))]
pub mod testing;

use std::sync::Arc;

use control::json::{Map, Value};
use control::{BalancedTarget, DecodeLog, ParameterError};
use reactor::{Core, ReactorHandle};
use sockets::ServerNetwork;
use target_shell::{ConnectionTotals, GroupLimits, GroupWaker, Protocol as _, ShellError, TargetCores};
use wire_nvme::log::TransportAddress;

pub use limits::TcpTransportConfig;
use protocol::TcpProtocol;
use secure_ports::SecurePorts;

use crate::transport::{
    AddressText, CoreQueues, Counters, Listening, Transport, TransportConfig, TransportKind,
    TransportParameters, TransportParts,
};
use crate::{ListenAddress, NvmfTargetError, TargetStats};

pub(crate) use address::transport_address;

/// NVMe/TCP, as a type of transport.
pub(crate) struct Tcp;

impl TransportKind for Tcp {
    fn name(&self) -> &'static str {
        address::NAME
    }

    fn address_text(&self) -> AddressText {
        AddressText { traddr: "IP address", trsvcid: Some("TCP port; 0 is any that is free") }
    }

    fn listening(&self) -> Listening {
        Listening::Shared
    }

    fn has_tls(&self) -> bool {
        true
    }

    fn normalize(&self, address: &ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        Ok(ListenAddress::from_socket(address.socket()?))
    }

    fn discovery_address(&self, address: &ListenAddress) -> Option<TransportAddress> {
        address.socket().ok().map(transport_address)
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

    fn counters_text(&self) -> &'static str {
        " Over TCP, `zerocopy_sends` counts sends of data without a copy, `zerocopy_sends_copied` those that the \
         kernel copied nevertheless, and `zerocopy_connections_off` the connections that stopped trying for that \
         reason."
    }
}

impl<N: ServerNetwork> TransportConfig<N> for TcpTransportConfig {
    fn kind(&self) -> &'static dyn TransportKind {
        &Tcp
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
        let registry = Some(parts.registry.clone());
        let group_limits = GroupLimits { registry, ..limits.connections.clone() };
        let directory = parts.directory.clone();
        let secure_ports = SecurePorts::default();
        let ports = secure_ports.clone();
        let protocol = move |_: &Core, waker: &GroupWaker| {
            let waker = waker.clone();
            let notifier = directory.add_notifier(Box::new(move || waker.wake()));
            TcpProtocol::new(limits.clone(), directory.clone(), Some(notifier))
                .with_secure_ports(ports.clone())
        };
        let cores: TargetCores<TcpProtocol, N> =
            TargetCores::start(parts.reactors, parts.publisher, group_limits, protocol)?;
        Ok(Box::new(TcpCores { config: self.clone(), cores, secure_ports }))
    }
}

/// The transport with its groups on all cores.
struct TcpCores<N: ServerNetwork> {
    config: TcpTransportConfig,
    cores: TargetCores<TcpProtocol, N>,
    secure_ports: SecurePorts,
}

impl<N: ServerNetwork> Transport for TcpCores<N> {
    fn options(&self) -> Map<String, Value> {
        parameters::to_object(&self.config)
    }

    fn listen(
        &self,
        address: &ListenAddress,
        portid: u16,
        secure: bool,
    ) -> Result<ListenAddress, NvmfTargetError> {
        let socket = address.socket()?;
        // Before the first connection is accepted.
        self.secure_ports.set(portid, secure);
        let bound = self.cores.listen(&socket.into(), portid)?.tcp().unwrap_or(socket);
        Ok(ListenAddress::from_socket(bound))
    }

    fn stop_listening(&self, portid: u16) -> Result<(), ShellError> {
        self.cores.unlisten(Some(portid))
    }

    /// Each port is free when this returns. Without it, the kernel releases what io_uring holds of an exited
    /// process only some time later.
    fn shutdown(&self) -> Result<(), ShellError> {
        self.cores.drain()
    }

    fn connections(&self) -> (&'static str, ConnectionTotals) {
        (TcpProtocol::NAME, self.cores.totals())
    }

    fn balanced(&self) -> Option<Arc<dyn BalancedTarget>> {
        Some(Arc::new(self.cores.clone()))
    }

    fn queues(&self) -> Result<Vec<CoreQueues>, ShellError> {
        let reports = self.cores.query(|protocol, connections| {
            (protocol.core.totals.snapshot(), protocol::report(connections))
        })?;
        let queues = |(totals, open)| CoreQueues { totals, open };
        Ok(reports.into_iter().map(queues).collect())
    }

    fn counters(
        &self,
        _reactors: &[ReactorHandle],
        stats: &mut TargetStats,
    ) -> Result<Vec<Counters>, ShellError> {
        stats.tcp_sends = self.cores.send_stats()?;
        let counters = stats.tcp_sends.iter().map(|sends| {
            vec![
                ("zerocopy_sends", sends.zero_copied),
                ("zerocopy_sends_copied", sends.copied),
                ("zerocopy_connections_off", sends.turned_off),
            ]
        });
        Ok(counters.collect())
    }
}
