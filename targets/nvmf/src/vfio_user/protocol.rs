//! The vfio-user transport over the target shell: what the clients of a core share.

use std::rc::Rc;
use std::sync::Arc;

use nvme_controller::ControllerDirectory;
use nvme_controller::reservation::ReservationNotifier;
use sockets::StreamAddress;
use target_shell::{Accepted, CloseReason, Connections, GroupWaker, IoContext, Protocol};
use wire_nvme::fabrics::Nqn;

use super::connection::{ClientEndpoint, VfioUserConnection};
use super::function::InjectedFaults;
use super::limits::VfioUserLimits;
use super::seats::Seats;
use super::socket::DisconnectReason;
use crate::queue_totals::QueueTotals;
use crate::reservation_watch::ReservationWatch;
use crate::snapshot::ConfigSnapshot;

/// What the group lends to a client.
pub(super) type VfioUserContext<'a> = IoContext<'a, VfioUserProtocol>;

/// A fault that [`NvmfTarget::inject`](crate::NvmfTarget::inject) injects into a client's controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VfioUserFault {
    /// The controller reports a fatal status (CSTS.CFS).
    Fatal,
    /// The next completions, this many, are dropped.
    DropCompletions(u32),
    /// Surprise removal: registers read as all ones and commands are not fetched.
    SurpriseRemoval,
    /// Commands are not fetched from the submission queue with this identifier.
    Stall(u16),
    /// The socket is closed.
    Disconnect,
    /// Ends all injected faults; their effects are not undone.
    None,
}

/// A client as reported to the control plane.
#[derive(Clone, Debug)]
pub(crate) struct ClientReport {
    pub(crate) directory: String,
    pub(crate) subnqn: Nqn,
    pub(crate) cntlid: u16,
    pub(crate) queues: Vec<ClientQueueReport>,
}

/// A submission queue of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientQueueReport {
    pub(crate) qid: u16,
    pub(crate) entries: u32,
    pub(crate) commands: u64,
    pub(crate) errors: u64,
    /// Commands that have completed.
    pub(crate) completed: u64,
}

/// The state that the clients of a core share.
///
/// The shell drives the clients. This gives each endpoint to one client at a time, applies configurations, and handles
/// what concerns several clients: reservation changes, and shared memory that was truncated.
pub(crate) struct VfioUserProtocol {
    pub(crate) limits: VfioUserLimits,
    pub(crate) directory: Arc<ControllerDirectory>,
    config: Arc<ConfigSnapshot>,
    reservations: ReservationWatch,
    waker: GroupWaker,
    seats: Seats,
    pub(crate) totals: Rc<QueueTotals>,
    /// The last value of [`Seats::changes`].
    seats_seen: u32,
    /// SIGBUS faults in client memory that were handled so far.
    sigbus_count_seen: u32,
}

impl VfioUserProtocol {
    pub(crate) fn new(
        limits: VfioUserLimits,
        directory: Arc<ControllerDirectory>,
        notifier: Arc<ReservationNotifier>,
        waker: GroupWaker,
        seats: Seats,
    ) -> VfioUserProtocol {
        VfioUserProtocol {
            limits,
            directory,
            config: Arc::default(),
            reservations: ReservationWatch::new(Some(notifier)),
            waker,
            totals: Rc::default(),
            seats_seen: seats.changes(),
            seats,
            sigbus_count_seen: dma::sigbus_fault_count(),
        }
    }

    /// Serves clients whose turn it is, and disconnects silent ones for which others wait.
    #[cold]
    fn update_seats(&mut self, connections: &mut Connections<VfioUserConnection>, now_ns: u64) {
        self.seats_seen = self.seats.changes();
        connections.update(|_, entry| {
            !entry.is_closed()
                && entry.connection.update_seat(&self.limits, &self.directory, &self.config, now_ns)
        });
    }

    /// Disconnects clients whose shared memory raised SIGBUS, because they truncated the file.
    #[cold]
    fn disconnect_poisoned(&mut self, connections: &mut Connections<VfioUserConnection>) {
        connections.update(|_, entry| {
            let connection = &mut entry.connection;
            let is_poisoned = connection.function().is_some_and(|function| function.is_poisoned());
            if is_poisoned {
                let reason = DisconnectReason::InvalidMessage("it truncated memory that it shares");
                connection.disconnect(CloseReason::Protocol(reason));
            }
            is_poisoned
        });
    }
}

impl Protocol for VfioUserProtocol {
    const NAME: &'static str = "nvmf_vfio_user";
    const LOG_TARGET: &'static str = "nvmf";
    type Config = ConfigSnapshot;
    type Connection = VfioUserConnection;
    type Error = DisconnectReason;

    fn accept(
        &mut self,
        accepted: Accepted,
        config: &Arc<ConfigSnapshot>,
        now_ns: u64,
    ) -> Option<VfioUserConnection> {
        let StreamAddress::Unix(socket) = &accepted.local else { return None };
        let directory = socket.parent()?.to_str()?.to_owned();
        let endpoint = ClientEndpoint { directory, portid: accepted.portid, totals: self.totals.clone() };
        let ticket = self.seats.enter(accepted.portid, self.waker.clone());
        let mut connection = VfioUserConnection::new(endpoint, accepted.flow, ticket);
        connection.update_seat(&self.limits, &self.directory, config, now_ns);
        Some(connection)
    }

    fn apply(
        &mut self,
        config: &Arc<ConfigSnapshot>,
        connections: &mut Connections<VfioUserConnection>,
        now_ns: u64,
    ) {
        self.config = config.clone();
        connections.update(|_, entry| {
            if entry.is_closed() {
                return false;
            }
            entry.connection.apply(&self.limits, config, now_ns);
            true
        });
    }

    #[inline]
    fn begin_poll(&mut self, connections: &mut Connections<VfioUserConnection>, now_ns: u64) -> usize {
        let mut count = self.reservations.poll(connections, now_ns);
        if self.seats.changes() != self.seats_seen {
            self.update_seats(connections, now_ns);
            count += 1;
        }
        let faults = dma::sigbus_fault_count();
        if faults != self.sigbus_count_seen {
            self.sigbus_count_seen = faults;
            self.disconnect_poisoned(connections);
        }
        count
    }

    fn deadline_ns(&self) -> u64 {
        self.reservations.deadline_ns()
    }

    #[inline]
    fn after_completions(&mut self, connections: &mut Connections<VfioUserConnection>) {
        self.reservations.release(connections);
    }
}

/// Every client of a core that is served.
pub(crate) fn report(connections: &Connections<VfioUserConnection>) -> Vec<ClientReport> {
    connections.open().filter_map(VfioUserConnection::report).collect()
}

/// Injects a fault into the controller of the client that a port serves; whether there is one on this core.
pub(crate) fn inject(
    connections: &mut Connections<VfioUserConnection>,
    portid: u16,
    fault: VfioUserFault,
) -> bool {
    let mut is_found = false;
    connections.update(|_, entry| {
        let is_closed = entry.is_closed();
        let connection = &mut entry.connection;
        if is_closed || connection.portid() != portid {
            return false;
        }
        let Some(function) = connection.function_mut() else { return false };
        match fault {
            VfioUserFault::Fatal => function.fail(),
            VfioUserFault::DropCompletions(count) => function.faults.drop_completions = count,
            VfioUserFault::SurpriseRemoval => function.faults.surprise_removed = true,
            VfioUserFault::Stall(qid) => function.faults.stalled = Some(qid),
            VfioUserFault::Disconnect => connection.disconnect(CloseReason::Closed),
            VfioUserFault::None => function.faults = InjectedFaults::default(),
        }
        is_found = true;
        true
    });
    is_found
}
