//! A host's queue over a fabric, apart from how its capsules travel: Connect, authentication, admin commands,
//! and what follows from a new configuration. TCP and RDMA share it.

mod authentication;
mod commands;
mod role;

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use block_io::Status;
use nvme_controller::io_queue::HostLink;
use nvme_controller::reservation::DrainGuards;
use nvme_controller::{
    ControllerAssociation, ControllerDirectory, ControllerEvent, ControllerLimits, IoQueue, NamespaceTable,
    SecureChannel, SubsystemPort,
};
use slots::Slot;
use target_shell::{IoContext, MemoryShare, NEVER_NS, Notice, Protocol};
use wire_nvme::Cqe;

pub(crate) use authentication::{QueueAuthentication, is_authentication};
pub(crate) use role::{ConnectionRole, TargetIoQueue};

use crate::ListenAddress;
use crate::queue_report::QueueReport;
use crate::queue_totals::QueueTotals;
use crate::snapshot::ConfigSnapshot;

/// Connect has 1024 bytes of data; before Connect no larger capsule is accepted.
pub(crate) const BEFORE_CONNECT_BYTES_MAX: u32 = wire_nvme::fabrics::CONNECT_DATA_SIZE as u32;

/// Bytes of answers of an admin queue that the host has not taken, from which it may send no more commands
/// until it has. Log pages are as long as hosts ask for, and their memory is not of the pool.
const ADMIN_ANSWERS_BYTES_MAX: usize = 32 << 10;

/// Limits of a transport over a fabric.
#[derive(Clone, Debug)]
pub(crate) struct FabricsLimits {
    pub(crate) controller: ControllerLimits,
    pub(crate) connection_bytes_max: usize,
    pub(crate) host_bytes_max: Option<usize>,
    pub(crate) connect_timeout_ns: u64,
}

/// What the queues of a core and a transport share.
pub(crate) struct FabricsCore {
    pub(crate) limits: FabricsLimits,
    pub(crate) directory: Arc<ControllerDirectory>,
    pub(crate) totals: Rc<QueueTotals>,
    /// The poll in which a host's exponentiation was computed last.
    exponentiation_ns: Option<u64>,
}

impl FabricsCore {
    pub(crate) fn new(limits: FabricsLimits, directory: Arc<ControllerDirectory>) -> FabricsCore {
        FabricsCore { limits, directory, totals: Rc::default(), exponentiation_ns: None }
    }

    /// Whether an exponentiation may be computed in the poll at `now_ns`: one in each, so that hosts without
    /// a key, who can ask for any number of them, do not keep others waiting for longer.
    fn take_exponentiation(&mut self, now_ns: u64) -> bool {
        self.exponentiation_ns.replace(now_ns) != Some(now_ns)
    }
}

/// The protocol of a transport over a fabric.
pub(crate) trait FabricsProtocol: Protocol<Config = ConfigSnapshot> {
    /// What its queues share.
    fn core(&mut self) -> &mut FabricsCore;
}

/// How a queue answers its host, as far as it does not depend on the transport.
pub(crate) trait FabricsLink: HostLink {
    /// The state of its response capsules.
    fn responses(&mut self) -> &mut Responses;

    /// Queues a response capsule.
    fn respond(&mut self, cid: u16, status: Status, result: u64);

    /// Connect has succeeded, and the state of the response capsules is set.
    fn connected(&mut self) {}
}

/// The response capsules of a queue.
#[derive(Clone, Debug)]
pub(crate) struct Responses {
    /// Submission queue entries, and the submission queue head that is reported in SQHD.
    pub(crate) sq_entries: u32,
    sq_head: u16,
    /// The host disabled SQ flow control in Connect: SQHD is not reported.
    pub(crate) sq_flow_control_disabled: bool,
    /// The controller of an I/O queue, whose host may honour retry delays. The admin queue's sets them
    /// itself.
    association: Option<Arc<ControllerAssociation>>,
    pub(crate) commands: u64,
    pub(crate) errors: u64,
}

impl Default for Responses {
    /// Before Connect.
    fn default() -> Responses {
        Responses {
            sq_entries: 1,
            sq_head: 0,
            sq_flow_control_disabled: false,
            association: None,
            commands: 0,
            errors: 0,
        }
    }
}

impl Responses {
    /// Connect has succeeded, which was the first command of a queue with `entries`.
    fn begin(&mut self, entries: u32, no_flow_control: bool) {
        self.sq_entries = entries;
        self.sq_flow_control_disabled = no_flow_control;
        self.sq_head = if entries > 1 { 1 } else { 0 };
    }

    /// Advances the submission queue head (SQHD). Called once for each command.
    #[inline]
    pub(crate) fn consume_sq_entry(&mut self) {
        self.commands += 1;
        let next = u32::from(self.sq_head) + 1;
        self.sq_head = if next == self.sq_entries { 0 } else { next as u16 };
    }

    /// The entry of a response.
    #[inline]
    pub(crate) fn cqe(&mut self, cid: u16, status: Status, result: u64) -> Cqe {
        let status = if status.is_success() { status } else { self.failed(status) };
        // Without SQ flow control SQHD is reserved and set to all ones (Base 2.0, section 6.3: CATTR).
        let sqhd = if self.sq_flow_control_disabled { 0xffff } else { self.sq_head };
        Cqe { sqhd, ..Cqe::new(cid, status).with_result(result) }
    }

    /// The status of a command that failed, as the host gets it.
    #[cold]
    fn failed(&mut self, status: Status) -> Status {
        self.errors += 1;
        match &self.association {
            Some(association) => association.with_retry_delay(status),
            None => status,
        }
    }
}

/// Why a queue is closed that was silent for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FabricsTimeout {
    /// The handshake of the transport, or Connect, did not come in time.
    Handshake,
    /// The host did not authenticate in time.
    Authentication,
    /// The host did not connect anew, with TLS, in time after secure channel concatenation.
    Concatenation,
    /// The keep alive timer of the queue's controller has expired.
    KeepAlive,
}

impl fmt::Display for FabricsTimeout {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            FabricsTimeout::Handshake => "the handshake timed out",
            FabricsTimeout::Authentication => "the authentication timed out",
            FabricsTimeout::Concatenation => {
                "authenticated with secure channel concatenation, and did not come back with TLS in time"
            }
            FabricsTimeout::KeepAlive => "sent no Keep Alive in time",
        })
    }
}

/// A host's queue over a fabric.
pub(crate) struct FabricsQueue<L: FabricsLink> {
    pub(crate) role: ConnectionRole,
    pub(crate) queue: IoQueue<L::Location>,
    pub(crate) link: L,
    /// Flow identifier for fair queueing in the block device layer.
    pub(crate) flow: u16,
    /// The listener that accepted it.
    pub(crate) port: SubsystemPort,
    /// The host's address.
    pub(crate) peer: SocketAddr,
    /// Whose key TLS was established with; `None` without TLS.
    pub(crate) secure: Option<Box<SecureChannel>>,
    /// The authentication of the host on this queue; `None` if it has no keys.
    pub(crate) authentication: Option<Box<QueueAuthentication>>,
    /// Deadline of the transport's handshake, then of Connect, then of the authentication.
    pub(crate) handshake_deadline_ns: u64,
    /// Reservation commands of other hosts wait for the outstanding device requests of this connection. No
    /// commands are accepted until those complete.
    pub(crate) drain_guards: DrainGuards,
    /// The connection drains: it accepts no commands, and closes when those in flight have completed.
    pub(crate) draining: bool,
    /// What the group has to know: Connect succeeded, or this controller's I/O queues are not valid any more.
    pub(crate) notice: Notice,
}

impl<L: FabricsLink> FabricsQueue<L> {
    pub(crate) fn new(
        role: ConnectionRole,
        link: L,
        port: SubsystemPort,
        peer: SocketAddr,
        flow: u16,
        handshake_deadline_ns: u64,
    ) -> FabricsQueue<L> {
        FabricsQueue {
            role,
            // Before Connect completes, one command at a time.
            queue: IoQueue::new(1, MemoryShare::unlimited(), Rc::default()),
            link,
            flow,
            port,
            peer,
            secure: None,
            authentication: None,
            handshake_deadline_ns,
            drain_guards: DrainGuards::default(),
            draining: false,
            notice: Notice::default(),
        }
    }

    /// The association of the host, after Connect.
    pub(crate) fn association(&self) -> Option<&Arc<ControllerAssociation>> {
        match &self.role {
            ConnectionRole::Admin(controller) => Some(controller.association()),
            ConnectionRole::Io(queue) => Some(queue.lease.association()),
            _ => None,
        }
    }

    /// The association whose I/O it carries.
    pub(crate) fn io_association(&self) -> Option<Arc<ControllerAssociation>> {
        match &self.role {
            ConnectionRole::Io(queue) => Some(queue.lease.association().clone()),
            _ => None,
        }
    }

    /// The subsystem, by which connections are counted.
    pub(crate) fn object(&self) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        self.association()?.subnqn().hash(&mut hasher);
        Some(hasher.finish())
    }

    /// The host.
    pub(crate) fn tenant(&self) -> Option<String> {
        Some(self.association()?.hostnqn().to_string())
    }

    /// Starts to drain: accepts no more commands, and closes when those in flight have completed or after
    /// [`DRAIN_TIMEOUT_NS`](crate::queue_report::DRAIN_TIMEOUT_NS).
    pub(crate) fn begin_drain(&mut self) {
        self.draining = true;
    }

    /// Drains an I/O queue whose controller is gone; returns whether it is.
    pub(crate) fn drain_if_orphaned(&mut self) -> bool {
        let is_orphaned = matches!(&self.role, ConnectionRole::Io(queue) if !queue.lease.is_valid());
        if is_orphaned {
            self.begin_drain();
        }
        is_orphaned
    }

    /// Whether the host has to take answers before it may send more commands: one that logs in, all of them;
    /// one with an admin queue, those whose data is on the heap and that would be too many.
    #[inline]
    pub(crate) fn waits_for_answers(&self) -> bool {
        match self.role {
            ConnectionRole::Admin(_) if self.queue.unsent_bytes() > ADMIN_ANSWERS_BYTES_MAX => true,
            _ => self.is_logging_in() && !self.queue.is_idle(),
        }
    }

    /// Whether a queue that drains may close, as far as its role is concerned. The admin queue closes last: a
    /// host that sees it close gives up its I/O queues. One that cannot authenticate is to give them up.
    pub(crate) fn may_close(&self) -> bool {
        match &self.role {
            ConnectionRole::Admin(_) if self.has_failed_authentication() => true,
            ConnectionRole::Admin(controller) => controller.association().queues().is_empty(),
            _ => true,
        }
    }

    /// The timeout of the handshake, of the authentication or of Keep Alive. An I/O queue has its
    /// controller's: the controller's core may notice the expiry later than this core resumes.
    #[inline]
    pub(crate) fn deadline_ns(&self) -> u64 {
        match &self.role {
            ConnectionRole::Io(queue) => {
                let keep_alive_ns = queue.lease.association().keep_alive_deadline_ns();
                keep_alive_ns.min(self.handshake_deadline_ns)
            }
            ConnectionRole::Admin(controller) => {
                controller.deadline().unwrap_or(NEVER_NS).min(self.handshake_deadline_ns)
            }
            ConnectionRole::AwaitingIcReq | ConnectionRole::AwaitingConnect => self.handshake_deadline_ns,
            ConnectionRole::Closed => NEVER_NS,
        }
    }

    /// The deadline has passed.
    ///
    /// # Errors
    /// The connection is to be closed.
    pub(crate) fn on_deadline(&mut self, core: &mut FabricsCore, now_ns: u64) -> Result<(), FabricsTimeout> {
        let is_due = self.handshake_deadline_ns <= now_ns;
        if is_due && self.resume_authentication(core, now_ns) {
            return Ok(());
        }
        match self.role {
            ConnectionRole::Admin(_) if is_due && self.concatenates() && self.is_authenticated() => {
                Err(FabricsTimeout::Concatenation)
            }
            ConnectionRole::Admin(_) | ConnectionRole::Io(_) if is_due => Err(FabricsTimeout::Authentication),
            ConnectionRole::Admin(_) => {
                self.controller_event(ControllerEvent::Tick, now_ns);
                Ok(())
            }
            ConnectionRole::AwaitingIcReq | ConnectionRole::AwaitingConnect if is_due => {
                Err(FabricsTimeout::Handshake)
            }
            ConnectionRole::Io(ref queue) if queue.lease.association().keep_alive_deadline_ns() <= now_ns => {
                Err(FabricsTimeout::KeepAlive)
            }
            _ => Ok(()),
        }
    }

    /// Commands of the queue that have completed since it is on this core.
    pub(crate) fn completed_here(&mut self) -> u64 {
        let before = match &self.role {
            ConnectionRole::Io(queue) => queue.completed_before,
            _ => 0,
        };
        self.completed_commands() - before
    }

    /// Commands of the queue that have completed.
    pub(crate) fn completed_commands(&mut self) -> u64 {
        self.link.responses().commands.saturating_sub(self.queue.in_flight() as u64)
    }

    /// Answers an admin or Connect command without data.
    pub(crate) fn answer(&mut self, slot: Slot, status: Status, result: u64) {
        self.queue.answer(slot, status, result, &mut self.link);
    }

    /// The stream is closed. A controller ends with its admin queue, and its I/O queues end with the
    /// controller. An I/O queue keeps its identifier until outstanding device requests complete. Returns
    /// whether it was an admin queue.
    pub(crate) fn on_close(&mut self) -> bool {
        let completed = self.completed_here();
        if let ConnectionRole::Io(queue) = &self.role {
            queue.totals.closed(completed);
        }
        let was_admin = matches!(self.role, ConnectionRole::Admin(_));
        if was_admin {
            self.role = ConnectionRole::Closed;
        }
        was_admin
    }

    /// A reservation of others has changed.
    pub(crate) fn on_reservation_change(&mut self, now_ns: u64) {
        self.queue.complete_reservations(&mut self.link);
        self.controller_event(ControllerEvent::ReservationChanged, now_ns);
    }

    /// Applies a new configuration; returns whether the connection may have something to do.
    pub(crate) fn apply(&mut self, core: &FabricsCore, config: &ConfigSnapshot, now_ns: u64) -> bool {
        self.apply_keys(config);
        match &self.role {
            ConnectionRole::Io(_) => self.apply_to_queue(core, config),
            ConnectionRole::Admin(_) => self.apply_to_controller(config, now_ns),
            _ => return false,
        }
        true
    }

    /// Applies a new configuration to an I/O queue.
    pub(crate) fn apply_to_queue(&mut self, core: &FabricsCore, config: &ConfigSnapshot) {
        let ConnectionRole::Io(queue) = &mut self.role else { return };
        match config.subsystem(&queue.subsystem.nqn) {
            Some(subsystem) if !Arc::ptr_eq(&subsystem, &queue.subsystem) => {
                self.queue.set_namespaces(Rc::new(NamespaceTable::for_controller(
                    &subsystem,
                    self.port.portid,
                    &core.limits.controller,
                    &core.directory,
                    queue.lease.association(),
                )));
                queue.subsystem = subsystem;
                // The controller makes the same check, possibly on another core and later.
                let host = queue.lease.association().hostnqn();
                if !queue.subsystem.listens_on(self.port.portid) || !queue.subsystem.allows(host) {
                    self.begin_drain();
                }
            }
            Some(_) => {}
            None => {
                // Its backend keys may soon be reused for other devices: commands not yet submitted are
                // rejected.
                self.queue.set_namespaces(Rc::default());
                self.begin_drain();
            }
        }
    }

    /// Applies a new configuration to a controller.
    fn apply_to_controller(&mut self, config: &ConfigSnapshot, now_ns: u64) {
        let ConnectionRole::Admin(controller) = &self.role else { return };
        let current = controller.subsystem().clone();
        match config.subsystem(&current.nqn) {
            Some(subsystem) if !Arc::ptr_eq(&subsystem, &current) => {
                self.controller_event(ControllerEvent::SubsystemChanged(subsystem), now_ns);
            }
            Some(_) => {}
            None => self.controller_event(ControllerEvent::SubsystemRemoved, now_ns),
        }
        self.controller_event(ControllerEvent::DiscoveryChanged(config.discovery.clone()), now_ns);
    }

    /// The memory that the commands of an I/O queue may hold.
    pub(crate) fn memory_share<P: FabricsProtocol>(
        association: &ControllerAssociation,
        context: &mut IoContext<'_, P>,
    ) -> MemoryShare {
        let limits = &context.protocol.core().limits;
        let (host_max, connection_max) = (limits.host_bytes_max, limits.connection_bytes_max);
        context.memory_share_of(association.hostnqn().as_str().as_bytes(), host_max, connection_max)
    }

    /// The queue for the control plane. Its addresses are of the transport `trtype`.
    pub(crate) fn report(&self, trtype: &str, responses: &Responses) -> QueueReport {
        let qid = match &self.role {
            ConnectionRole::Io(queue) => queue.lease.qid(),
            _ => 0,
        };
        let association = self.association();
        let completed = responses.commands.saturating_sub(self.queue.in_flight() as u64);
        let before = match &self.role {
            ConnectionRole::Io(queue) => queue.completed_before,
            _ => 0,
        };
        let peer = ListenAddress { trtype: trtype.into(), ..ListenAddress::from_socket(self.peer) };
        let (traddr, trsvcid) = (self.port.address.traddr.clone(), self.port.address.trsvcid.clone());
        QueueReport {
            subnqn: association.map(|association| association.subnqn().clone()),
            cntlid: association.map_or(0xffff, |association| association.cntlid()),
            qid: association.map(|_| qid),
            local: ListenAddress { traddr, trsvcid, ..peer.clone() },
            peer,
            entries: responses.sq_entries,
            commands: responses.commands,
            errors: responses.errors,
            completed: completed - before,
        }
    }
}
