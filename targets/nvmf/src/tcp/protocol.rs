//! The NVMe/TCP transport over the target shell: what the connections of a core share.

use std::fmt;
use std::sync::Arc;

use nvme_controller::reservation::ReservationNotifier;
use nvme_controller::{ControllerDirectory, SubsystemPort};
use target_shell::{Accepted, Connections, IoContext, Protocol};
use tls::TlsFailure;
use wire_nvme::tcp::FatalError;

use super::connection::NvmfConnection;
use super::limits::TcpLimits;
use super::psks::ConnectionKeys;
use super::secure_ports::SecurePorts;
use crate::fabrics::{FabricsCore, FabricsProtocol, FabricsTimeout};
use crate::queue_report::QueueReport;
use crate::reservation_watch::ReservationWatch;
use crate::snapshot::ConfigSnapshot;

/// What the group lends to a connection.
pub(crate) type TcpContext<'a> = IoContext<'a, TcpProtocol>;

/// The state that the connections of a core share.
///
/// The shell drives the connections. This decides who is accepted, applies configurations, and handles what
/// concerns several connections: reservation changes, and I/O queues whose controller is gone.
pub(crate) struct TcpProtocol {
    pub(crate) limits: TcpLimits,
    pub(crate) core: FabricsCore,
    reservations: ReservationWatch,
    secure_ports: SecurePorts,
}

/// Why the target closes a connection, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TcpError {
    /// The host violated the protocol.
    Violation(FatalError),
    /// The host was silent for too long.
    Timeout(FabricsTimeout),
    /// A step of TLS failed, or a record was not authentic.
    Tls(TlsFailure),
    /// The host closed the connection during the handshake of TLS.
    TlsClosed,
    /// The handshake of TLS did not end in time.
    TlsTimeout,
}

impl fmt::Display for TcpError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TcpError::Violation(fatal) => {
                write!(formatter, "violated the protocol: {:?} at {:#x}", fatal.status, fatal.information)
            }
            TcpError::Tls(failure) => write!(formatter, "failed in TLS: {failure}"),
            TcpError::TlsClosed => formatter.write_str("closed the connection during the TLS handshake"),
            TcpError::TlsTimeout => formatter.write_str("did not complete the TLS handshake in time"),
            TcpError::Timeout(timeout) => timeout.fmt(formatter),
        }
    }
}

impl TcpProtocol {
    pub(crate) fn new(
        limits: TcpLimits,
        directory: Arc<ControllerDirectory>,
        notifier: Option<Arc<ReservationNotifier>>,
    ) -> TcpProtocol {
        let core = FabricsCore::new(limits.fabrics.clone(), directory);
        TcpProtocol {
            limits,
            core,
            reservations: ReservationWatch::new(notifier),
            secure_ports: SecurePorts::default(),
        }
    }

    /// With ports whose connections begin with TLS.
    pub(crate) fn with_secure_ports(self, secure_ports: SecurePorts) -> TcpProtocol {
        TcpProtocol { secure_ports, ..self }
    }
}

impl FabricsProtocol for TcpProtocol {
    fn core(&mut self) -> &mut FabricsCore {
        &mut self.core
    }
}

impl Protocol for TcpProtocol {
    const NAME: &'static str = "nvmf_tcp";
    const LOG_TARGET: &'static str = "nvmf";
    type Config = ConfigSnapshot;
    type Connection = NvmfConnection;
    type Error = TcpError;

    fn accept(
        &mut self,
        accepted: Accepted,
        config: &Arc<ConfigSnapshot>,
        now_ns: u64,
    ) -> Option<NvmfConnection> {
        // The target listens on IP addresses only.
        let (local, peer) = (accepted.local.tcp()?, accepted.peer.tcp()?);
        let address = super::transport_address(local);
        let secure = self.secure_ports.contains(accepted.portid);
        let port = SubsystemPort { portid: accepted.portid, address, secure };
        let deadline_ns = now_ns.saturating_add(self.limits.ic_timeout_ns);
        let connection = NvmfConnection::new(port, peer, accepted.flow, deadline_ns);
        Some(match secure {
            true => connection.secured(ConnectionKeys {
                config: config.clone(),
                directory: self.core.directory.clone(),
                accepted_ns: now_ns,
            }),
            false => connection,
        })
    }

    fn apply(
        &mut self,
        config: &Arc<ConfigSnapshot>,
        connections: &mut Connections<NvmfConnection>,
        now_ns: u64,
    ) {
        connections.update(|_, entry| {
            !entry.is_closed() && entry.connection.state.fabrics.apply(&self.core, config, now_ns)
        });
    }

    #[inline]
    fn begin_poll(&mut self, connections: &mut Connections<NvmfConnection>, now_ns: u64) -> usize {
        self.reservations.poll(connections, now_ns)
    }

    fn deadline_ns(&self) -> u64 {
        self.reservations.deadline_ns()
    }

    #[inline]
    fn after_completions(&mut self, connections: &mut Connections<NvmfConnection>) {
        self.reservations.release(connections);
    }

    /// Drains I/O queues whose controller is gone.
    fn recheck(&mut self, connections: &mut Connections<NvmfConnection>, _now_ns: u64) {
        connections
            .update(|_, entry| !entry.is_closed() && entry.connection.state.fabrics.drain_if_orphaned());
    }
}

/// Every open connection of a core.
pub(crate) fn report(connections: &Connections<NvmfConnection>) -> Vec<QueueReport> {
    let report = |connection: &NvmfConnection| {
        let fabrics = &connection.state.fabrics;
        fabrics.report(super::address::NAME, &fabrics.link.responses)
    };
    connections.open().map(report).collect()
}
