//! The NVMe/TCP transport over the target shell: what the connections of a core share.

use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use nvme_controller::reservation::ReservationNotifier;
use nvme_controller::{ControllerDirectory, ControllerEvent, NamespaceTable, SubsystemPort};
use target_shell::{Accepted, Connections, IoContext, Protocol};
use tls::TlsFailure;
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::TransportAddress;
use wire_nvme::tcp::FatalError;

use super::connection::{ConnectionState, NvmfConnection};
use super::limits::TcpLimits;
use super::link::QueueCounters;
use super::queue::{ConnectionRole, TargetIoQueue};
use super::secure_ports::SecurePorts;
use crate::queue_totals::QueueTotals;
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
    pub(crate) directory: Arc<ControllerDirectory>,
    reservations: ReservationWatch,
    pub(crate) totals: Rc<QueueTotals>,
    secure_ports: SecurePorts,
    /// The poll in which a host's exponentiation was computed last.
    exponentiation_ns: Option<u64>,
}

/// Why the target closes a connection, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TcpError {
    /// The host violated the protocol.
    Violation(FatalError),
    /// ICReq or Connect did not arrive in time.
    HandshakeTimeout,
    /// The host did not authenticate in time.
    AuthenticationTimeout,
    /// A step of TLS failed, or a record was not authentic.
    Tls(TlsFailure),
    /// The host closed the connection during the handshake of TLS.
    TlsClosed,
    /// The handshake of TLS did not end in time.
    TlsTimeout,
    /// The keep alive timer of the queue's controller has expired.
    KeepAliveExpired,
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
            TcpError::KeepAliveExpired => formatter.write_str("sent no Keep Alive in time"),
            TcpError::AuthenticationTimeout => formatter.write_str("the authentication timed out"),
            TcpError::HandshakeTimeout => formatter.write_str("the handshake timed out"),
        }
    }
}

/// A connection as reported to the control plane.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionReport {
    pub(crate) subnqn: Option<Nqn>,
    pub(crate) cntlid: u16,
    /// `None` before Connect.
    pub(crate) qid: Option<u16>,
    pub(crate) peer: SocketAddr,
    pub(crate) local: TransportAddress,
    pub(crate) entries: u32,
    pub(crate) counters: QueueCounters,
    /// Commands that have completed since it is on this core.
    pub(crate) completed: u64,
}

impl TcpProtocol {
    pub(crate) fn new(
        limits: TcpLimits,
        directory: Arc<ControllerDirectory>,
        notifier: Option<Arc<ReservationNotifier>>,
    ) -> TcpProtocol {
        TcpProtocol {
            limits,
            directory,
            reservations: ReservationWatch::new(notifier),
            totals: Rc::default(),
            secure_ports: SecurePorts::default(),
            exponentiation_ns: None,
        }
    }

    /// Whether an exponentiation may be computed in the poll at `now_ns`: one in each, so that hosts without
    /// a key, who can ask for any number of them, do not keep others waiting for longer.
    pub(crate) fn take_exponentiation(&mut self, now_ns: u64) -> bool {
        self.exponentiation_ns.replace(now_ns) != Some(now_ns)
    }

    /// With ports whose connections begin with TLS.
    pub(crate) fn with_secure_ports(self, secure_ports: SecurePorts) -> TcpProtocol {
        TcpProtocol { secure_ports, ..self }
    }

    /// Applies a new configuration to an I/O queue.
    pub(super) fn apply_to_queue(&self, state: &mut ConnectionState, config: &ConfigSnapshot) {
        let ConnectionRole::Io(queue) = &mut state.role else { return };
        let queue: &mut TargetIoQueue = queue;
        match config.subsystem(&queue.subsystem.nqn) {
            Some(subsystem) if !Arc::ptr_eq(&subsystem, &queue.subsystem) => {
                state.queue.set_namespaces(Rc::new(NamespaceTable::for_controller(
                    &subsystem,
                    state.port.portid,
                    &self.limits.controller,
                    &self.directory,
                    queue.lease.association(),
                )));
                queue.subsystem = subsystem;
                // The controller makes the same check, possibly on another core and later.
                let host = queue.lease.association().hostnqn();
                if !queue.subsystem.listens_on(state.port.portid) || !queue.subsystem.allows(host) {
                    state.begin_drain();
                }
            }
            Some(_) => {}
            None => {
                // Its backend keys may soon be reused for other devices: commands not yet submitted are
                // rejected.
                state.queue.set_namespaces(Rc::default());
                state.begin_drain();
            }
        }
    }
}

/// Applies a new configuration to a controller.
fn apply_to_controller(state: &mut ConnectionState, config: &ConfigSnapshot, now_ns: u64) {
    let ConnectionRole::Admin(controller) = &state.role else { return };
    let current = controller.subsystem().clone();
    match config.subsystem(&current.nqn) {
        Some(subsystem) if !Arc::ptr_eq(&subsystem, &current) => {
            state.controller_event(ControllerEvent::SubsystemChanged(subsystem), now_ns);
        }
        Some(_) => {}
        None => state.controller_event(ControllerEvent::SubsystemRemoved, now_ns),
    }
    state.controller_event(ControllerEvent::DiscoveryChanged(config.discovery.clone()), now_ns);
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
        let port = SubsystemPort { portid: accepted.portid, address };
        let deadline_ns = now_ns.saturating_add(self.limits.ic_timeout_ns);
        let connection = NvmfConnection::new(port, peer, accepted.flow, deadline_ns);
        Some(match self.secure_ports.contains(accepted.portid) {
            true => connection.secured(config.clone()),
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
            if entry.is_closed() {
                return false;
            }
            let state = &mut entry.connection.state;
            state.apply_keys(config);
            match &state.role {
                ConnectionRole::Io(_) => self.apply_to_queue(state, config),
                ConnectionRole::Admin(_) => apply_to_controller(state, config, now_ns),
                _ => return false,
            }
            true
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
        connections.update(|_, entry| !entry.is_closed() && entry.connection.state.drain_if_orphaned());
    }
}

/// Every open connection of a core.
pub(crate) fn report(connections: &Connections<NvmfConnection>) -> Vec<ConnectionReport> {
    let report = |connection: &NvmfConnection| {
        let state = &connection.state;
        let association = match &state.role {
            ConnectionRole::Admin(controller) => Some((controller.association(), 0)),
            ConnectionRole::Io(queue) => Some((queue.lease.association(), queue.lease.qid())),
            _ => None,
        };
        ConnectionReport {
            subnqn: association.map(|(association, _)| association.subnqn().clone()),
            cntlid: association.map_or(0xffff, |(association, _)| association.cntlid()),
            qid: association.map(|(_, qid)| qid),
            peer: state.peer,
            local: state.port.address.clone(),
            entries: state.link.sq_entries,
            counters: state.link.stats,
            completed: state.completed_here(),
        }
    };
    connections.open().map(report).collect()
}
