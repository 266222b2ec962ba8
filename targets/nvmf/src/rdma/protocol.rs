//! The NVMe/RDMA transport over the target shell: what the connections of a core share.

use std::fmt;
use std::sync::Arc;

use nvme_controller::reservation::ReservationNotifier;
use nvme_controller::{ControllerDirectory, SubsystemPort};
use rdma::{Admission, RdmaNetworkConfig, RdmaNetworkSettings};
use reactor::Core;
use target_shell::{Accepted, Connections, IoContext, Protocol};
use wire_nvme::log::{TransportAddress, TransportType};
use wire_nvme::rdma::{RdmaConnectError, RdmaConnectRequest, encode_accept, encode_reject};
use wire_nvme::sqe;

use super::connection::RdmaConnection;
use super::limits::RdmaLimits;
use crate::fabrics::{FabricsCore, FabricsProtocol, FabricsTimeout};
use crate::queue_report::QueueReport;
use crate::reservation_watch::ReservationWatch;
use crate::snapshot::ConfigSnapshot;

/// What the group lends to a connection.
pub(crate) type RdmaContext<'a> = IoContext<'a, RdmaProtocol>;

/// The state that the connections of a core share.
pub(crate) struct RdmaProtocol {
    pub(crate) core: FabricsCore,
    batches: bool,
    reservations: ReservationWatch,
}

/// Why the target closes a connection, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RdmaProtocolError {
    /// A capsule is shorter than a command, or has more data than it may.
    CapsuleLength(u32),
    /// More commands than the queue has entries.
    TooManyCommands,
    /// The host was silent for too long.
    Timeout(FabricsTimeout),
}

impl fmt::Display for RdmaProtocolError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RdmaProtocolError::CapsuleLength(bytes) => write!(formatter, "sent a capsule of {bytes} bytes"),
            RdmaProtocolError::TooManyCommands => {
                formatter.write_str("sent more commands than its queue has entries")
            }
            RdmaProtocolError::Timeout(timeout) => timeout.fmt(formatter),
        }
    }
}

impl RdmaProtocol {
    pub(crate) fn new(
        core: &Core,
        limits: RdmaLimits,
        directory: Arc<ControllerDirectory>,
        notifier: Option<Arc<ReservationNotifier>>,
    ) -> RdmaProtocol {
        let controller = &limits.fabrics.controller;
        core.local::<RdmaNetworkSettings>().set(RdmaNetworkConfig {
            message_bytes: sqe::SIZE + controller.in_capsule_bytes as usize,
            receives: limits.receives,
            backlog: limits.backlog,
            commands_max: controller.io_queue_entries_max.max(controller.admin_queue_entries_max),
            admit,
            no_resources: encode_reject(RdmaConnectError::NoResources).to_vec(),
        });
        RdmaProtocol {
            core: FabricsCore::new(limits.fabrics, directory),
            batches: limits.batches,
            reservations: ReservationWatch::new(notifier),
        }
    }
}

/// Accepts a host by its private data (RDMA Transport 1.0, section 3.3.1). The queue itself is
/// checked by Connect.
fn admit(private_data: &[u8], config: &RdmaNetworkConfig) -> Result<Admission, Vec<u8>> {
    let request = RdmaConnectRequest::decode(private_data).map_err(|error| encode_reject(error).to_vec())?;
    let commands = request.send_entries.min(config.commands_max);
    let reply = encode_accept(u16::try_from(commands).unwrap_or(u16::MAX)).to_vec();
    Ok(Admission { commands, reply })
}

impl FabricsProtocol for RdmaProtocol {
    fn core(&mut self) -> &mut FabricsCore {
        &mut self.core
    }
}

impl Protocol for RdmaProtocol {
    const NAME: &'static str = "nvmf_rdma";
    const LOG_TARGET: &'static str = "nvmf";
    type Config = ConfigSnapshot;
    type Connection = RdmaConnection;
    type Error = RdmaProtocolError;

    fn accept(
        &mut self,
        accepted: Accepted,
        _config: &Arc<ConfigSnapshot>,
        now_ns: u64,
    ) -> Option<RdmaConnection> {
        // The connection manager's addresses are IP addresses.
        let (local, peer) = (accepted.local.tcp()?, accepted.peer.tcp()?);
        let address =
            TransportAddress { trtype: TransportType::Rdma, ..crate::tcp::transport_address(local) };
        let port = SubsystemPort { portid: accepted.portid, address, secure: false };
        let deadline_ns = now_ns.saturating_add(self.core.limits.connect_timeout_ns);
        let mut connection = RdmaConnection::new(port, peer, accepted.flow, deadline_ns);
        connection.fabrics.link.is_unbatched = !self.batches;
        Some(connection)
    }

    fn apply(
        &mut self,
        config: &Arc<ConfigSnapshot>,
        connections: &mut Connections<RdmaConnection>,
        now_ns: u64,
    ) {
        connections.update(|_, entry| {
            !entry.is_closed() && entry.connection.fabrics.apply(&self.core, config, now_ns)
        });
    }

    #[inline]
    fn begin_poll(&mut self, connections: &mut Connections<RdmaConnection>, now_ns: u64) -> usize {
        self.reservations.poll(connections, now_ns)
    }

    fn deadline_ns(&self) -> u64 {
        self.reservations.deadline_ns()
    }

    #[inline]
    fn after_completions(&mut self, connections: &mut Connections<RdmaConnection>) {
        self.reservations.release(connections);
    }

    /// Drains I/O queues whose controller is gone.
    fn recheck(&mut self, connections: &mut Connections<RdmaConnection>, _now_ns: u64) {
        connections.update(|_, entry| !entry.is_closed() && entry.connection.fabrics.drain_if_orphaned());
    }
}

/// Every open connection of a core.
pub(crate) fn report(connections: &Connections<RdmaConnection>) -> Vec<QueueReport> {
    let report = |connection: &RdmaConnection| {
        let fabrics = &connection.fabrics;
        fabrics.report(super::limits::NAME, &fabrics.link.responses)
    };
    connections.open().map(report).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_accepted_with_as_many_commands_as_there_may_be_and_rejected_with_the_reason() {
        let config = RdmaNetworkConfig {
            message_bytes: 64,
            receives: 1,
            backlog: 1,
            commands_max: 128,
            admit,
            no_resources: Vec::new(),
        };
        let request = |send_entries| {
            RdmaConnectRequest { qid: 1, receive_entries: 9, send_entries, cntlid: 0 }.encode()
        };
        let admitted =
            |data: &[u8]| admit(data, &config).map(|admission| (admission.commands, admission.reply));
        assert_eq!(admitted(&request(32)), Ok((32, encode_accept(32).to_vec())));
        assert_eq!(admitted(&request(1024)), Ok((128, encode_accept(128).to_vec())));
        assert_eq!(admitted(&[0; 31]), Err(vec![0, 0, 1, 0]));
        assert_eq!(admitted(&[7; 32]), Err(vec![0, 0, 2, 0]));
    }
}
