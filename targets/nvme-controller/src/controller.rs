//! The state machine of the admin queue: one per association, owned by one core.

mod events;
mod features;
mod identify;
mod log;
mod persistent_events;
mod properties;
mod reservations;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use block_io::Status;
use wire_nvme::admin::{Abort, SetFeatures};
use wire_nvme::feature::{FeatureId, NumberOfQueues};
use wire_nvme::log::TransportType;
use wire_nvme::opcode::{AdminOpcode, FABRICS, FabricsType};
use wire_nvme::sqe::{Fuse, Psdt};
use wire_nvme::{Cqe, Sqe};

use crate::connect::DirectoryRegistration;
use crate::{
    AdminConnect, ControllerAssociation, ControllerLimits, DiscoveryLog, INVALID_FIELD, INVALID_QUEUE_TYPE,
    Subsystem, SubsystemKind, SubsystemPort,
};
use events::AsyncEvents;
use features::Features;
use log::ErrorLog;
pub use persistent_events::log_has_health;
use properties::Properties;
use reservations::ReservationNotifications;

/// An input of [`Controller::handle`].
#[derive(Clone, Debug)]
pub enum ControllerEvent<'a> {
    /// A command on the admin queue, with the data that [`data_from_host`] asks for.
    Command {
        /// The command.
        sqe: &'a Sqe,
        /// Its data. Other in-capsule data is ignored.
        data: &'a [u8],
    },
    /// A new snapshot of the subsystem.
    SubsystemChanged(Arc<Subsystem>),
    /// The subsystem was removed.
    SubsystemRemoved,
    /// A new discovery log. Only discovery controllers use it.
    DiscoveryChanged(Arc<DiscoveryLog>),
    /// New counters for the health log.
    Health(HealthCounters),
    /// The host wrote a doorbell of a queue that does not exist.
    InvalidDoorbell,
    /// The host wrote a value to a doorbell that the queue's size or state does not allow.
    InvalidDoorbellValue,
    /// A [`ReservationNotifier`](crate::reservation::ReservationNotifier) was notified: notifications,
    /// completions of pending changes or an NVM Subsystem Reset may be there.
    ReservationChanged,
    /// [`Controller::deadline`] has passed.
    Tick,
}

/// An output of [`Controller::handle`]. The transport performs them in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerAction {
    /// Complete a command.
    Complete(AdminCompletion),
    /// Close every I/O queue of the controller: their [leases](crate::QueueLease::is_valid) are no longer
    /// valid. The admin queue stays open.
    CloseIoQueues,
    /// Close the admin queue and, by dropping the controller, the association.
    Terminate(TerminationReason),
}

/// The completion of an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminCompletion {
    /// The completion queue entry; the transport sets SQHD.
    pub cqe: Cqe,
    /// Data to send to the host before the completion, exactly as long as the host's buffer; empty for none.
    pub data: Vec<u8>,
}

/// Why a controller terminates its association.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TerminationReason {
    /// The host sent nothing for the keep alive timeout.
    KeepAliveExpired,
    /// A discovery controller without a keep alive timeout received no command for
    /// [`ControllerLimits::discovery_idle_ms`](crate::ControllerLimits::discovery_idle_ms).
    Idle,
    /// The subsystem was removed.
    SubsystemRemoved,
    /// The subsystem no longer allows the host.
    HostNotAllowed,
    /// The subsystem no longer listens on the port through which the host connected.
    ListenerRemoved,
}

/// Counters of the health log (Base 2.0, section 5.16.1.3), since the target started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthCounters {
    /// Bytes read.
    pub bytes_read: u128,
    /// Bytes written.
    pub bytes_written: u128,
    /// Read commands completed.
    pub reads: u128,
    /// Write commands completed.
    pub writes: u128,
    /// Minutes with I/O outstanding.
    pub busy_minutes: u64,
    /// Uptime of the target in hours.
    pub power_on_hours: u64,
    /// Media errors.
    pub media_errors: u64,
}

/// Bytes of host data that an admin command needs; 0 for none. The transport fetches them before it passes
/// [`ControllerEvent::Command`].
pub fn data_from_host(sqe: &Sqe) -> u32 {
    match AdminOpcode::from_wire(sqe.opcode) {
        Some(AdminOpcode::SetFeatures) => match FeatureId::from_wire(SetFeatures::from_sqe(sqe).fid) {
            Some(FeatureId::HostBehavior) => wire_nvme::feature::HOST_BEHAVIOR_SIZE as u32,
            // Over fabrics, where SGLs describe data, Connect sets the host identifier.
            Some(FeatureId::HostIdentifier) if sqe.psdt() == Psdt::Prp => {
                if SetFeatures::from_sqe(sqe).cdw11 & wire_nvme::feature::HOST_ID_EXTENDED != 0 {
                    16
                } else {
                    8
                }
            }
            _ => 0,
        },
        _ => 0,
    }
}

/// The response to an admin command, or the status that it fails with.
type AdminResult = Result<AdminResponse, Status>;

#[derive(Debug, Default)]
struct AdminResponse {
    result: u64,
    data: Vec<u8>,
    // The command completes later.
    deferred: bool,
}

impl AdminResponse {
    fn with_result(result: u64) -> AdminResult {
        Ok(AdminResponse { result, ..AdminResponse::default() })
    }

    fn empty() -> AdminResult {
        Ok(AdminResponse::default())
    }
}

/// An NVMe controller: the state of one association between a host and a subsystem.
///
/// It owns the properties (CAP, CC, CSTS), the features, the error log, the outstanding Asynchronous Event
/// Requests, unread reservation notifications and the keep alive timer. I/O commands do not pass through it:
/// I/O queues hold a [`QueueLease`](crate::QueueLease) and use [`io`](crate::io), on any core.
///
/// Order of calls: [`connect`](crate::connect) returns the [`AdminConnect`] for [`new`](Self::new); then
/// [`handle`](Self::handle) for every command and event, and with [`ControllerEvent::Tick`] at
/// [`deadline`](Self::deadline). A memory-based transport also calls [`read_register`](Self::read_register)
/// and [`write_cc`](Self::write_cc), which are commands over fabrics. After [`ControllerAction::Terminate`]
/// the transport drops the controller. Dropping it ends the association and invalidates the leases of its I/O
/// queues.
#[derive(Debug)]
pub struct Controller {
    registration: DirectoryRegistration,
    subsystem: Arc<Subsystem>,
    // The same as the host sees it: all reports are about this one.
    view: Arc<Subsystem>,
    discovery: Arc<DiscoveryLog>,
    limits: Arc<ControllerLimits>,
    port: SubsystemPort,
    properties: Properties,
    features: Features,
    events: AsyncEvents,
    notifications: ReservationNotifications,
    errors: ErrorLog,
    // The reporting context of the Persistent Event log: the page as it was when the host established it.
    persistent_events: Option<Vec<u8>>,
    health: HealthCounters,
    keep_alive: KeepAlive,
    terminated: Option<TerminationReason>,
}

#[derive(Debug)]
struct KeepAlive {
    // 0 for off.
    timeout_ns: u64,
    last_activity_ns: u64,
    reason: TerminationReason,
}

impl KeepAlive {
    fn deadline(&self) -> Option<u64> {
        (self.timeout_ns != 0).then(|| self.last_activity_ns.saturating_add(self.timeout_ns))
    }
}

impl Controller {
    /// The controller of a newly connected admin queue, disabled. `discovery` is the log that a discovery
    /// controller returns; other controllers ignore it.
    ///
    /// # Panics
    /// If [`ControllerLimits::check`](crate::ControllerLimits::check) does.
    pub fn new(
        admin: AdminConnect,
        limits: Arc<ControllerLimits>,
        discovery: Arc<DiscoveryLog>,
        now_ns: u64,
    ) -> Controller {
        limits.check();
        let AdminConnect { subsystem, registration, port, kato_ms, .. } = admin;
        let view = subsystem.view_of(registration.association.hostnqn());
        let mut controller = Controller {
            properties: Properties::new(&limits, &subsystem),
            features: Features::new(kato_ms, &limits),
            events: AsyncEvents::new(limits.async_events_max),
            notifications: ReservationNotifications::default(),
            errors: ErrorLog::new(limits.error_log_entries),
            persistent_events: None,
            health: HealthCounters::default(),
            keep_alive: KeepAlive {
                timeout_ns: 0,
                last_activity_ns: now_ns,
                reason: TerminationReason::KeepAliveExpired,
            },
            terminated: None,
            registration,
            subsystem,
            view,
            discovery,
            limits,
            port,
        };
        controller.set_kato(kato_ms);
        controller
    }

    /// The state that is shared with the cores of the I/O queues.
    pub fn association(&self) -> &Arc<ControllerAssociation> {
        &self.registration.association
    }

    /// The latest snapshot of the subsystem.
    pub fn subsystem(&self) -> &Arc<Subsystem> {
        &self.subsystem
    }

    /// When [`ControllerEvent::Tick`] is due, in nanoseconds of the clock of [`handle`](Self::handle); `None`
    /// for never.
    pub fn deadline(&self) -> Option<u64> {
        if self.terminated.is_some() { None } else { self.keep_alive.deadline() }
    }

    /// The 32 bits of a register at `offset`, a multiple of four: CAP, VS, CC, CSTS and CRTO. The transport
    /// implements the registers of the admin queue's location and of interrupt masks; they read as 0 here.
    pub fn read_register(&mut self, offset: u32) -> u32 {
        self.properties.update_status(&self.registration.association);
        self.properties.read(offset)
    }

    /// Writes CC for a memory-based transport; over fabrics a Property Set command does. Enabling takes
    /// effect at once. After [`ControllerAction::CloseIoQueues`], CSTS reports a reset or shutdown as
    /// complete once no I/O queue is leased.
    pub fn write_cc(&mut self, value: u32, actions: &mut Vec<ControllerAction>) {
        if self.terminated.is_some() {
            return;
        }
        self.properties.update_status(&self.registration.association);
        match self.properties.write_cc(value, &self.registration.association) {
            Ok(change) => self.configuration_changed(change, actions),
            // The previous reset is not complete: the effect of this write is undefined, so it is ignored.
            Err(Status::COMMAND_SEQUENCE_ERROR) => {}
            // A reserved value.
            Err(_) => self.fail(),
        }
    }

    /// Writes CSTS or NSSR for a memory-based transport; over fabrics a Property Set command does. After
    /// [`ControllerAction::CloseIoQueues`] as [`write_cc`](Self::write_cc).
    pub fn write_reset_register(&mut self, offset: u32, value: u32, actions: &mut Vec<ControllerAction>) {
        if self.terminated.is_none() {
            let change = self.properties.write_reset_register(offset, value);
            self.configuration_changed(change, actions);
        }
    }

    /// Sets CSTS.CFS after a fatal error. Commands are rejected until the host resets the controller.
    pub fn fail(&mut self) {
        self.properties.fail();
    }

    /// The numbers of I/O queues that the host was granted (the Number of Queues feature).
    pub fn queues_granted(&self) -> NumberOfQueues {
        self.features.queues()
    }

    /// Whether the controller is enabled and accepts commands.
    pub fn is_enabled(&self) -> bool {
        self.terminated.is_none() && self.properties.is_enabled()
    }

    /// Handles an event and appends the resulting actions.
    ///
    /// Every command completes exactly once. An Asynchronous Event Request completes when an event occurs,
    /// and a change of reservation persistence when it is on stable storage; all other commands complete in
    /// this call. Commands that are outstanding when the controller terminates never complete.
    pub fn handle(&mut self, event: ControllerEvent<'_>, now_ns: u64, actions: &mut Vec<ControllerAction>) {
        if self.terminated.is_none() {
            self.check_keep_alive(now_ns, actions);
        }
        match event {
            ControllerEvent::Command { sqe, data } => self.command(sqe, data, now_ns, actions),
            _ if self.terminated.is_some() => return,
            ControllerEvent::SubsystemChanged(subsystem) => self.subsystem_changed(subsystem, actions),
            ControllerEvent::SubsystemRemoved => self.terminate(TerminationReason::SubsystemRemoved, actions),
            ControllerEvent::DiscoveryChanged(log) => {
                if self.view.kind == SubsystemKind::Discovery
                    && log.differs_for(self.hostnqn(), &self.port.address, &self.discovery)
                {
                    self.events.discovery_changed();
                }
                self.discovery = log;
            }
            ControllerEvent::Health(health) => self.health = health,
            ControllerEvent::InvalidDoorbell => self.events.invalid_doorbell(false),
            ControllerEvent::InvalidDoorbellValue => self.events.invalid_doorbell(true),
            ControllerEvent::ReservationChanged => {
                self.take_subsystem_reset(actions);
                self.reservation_changed(actions);
            }
            ControllerEvent::Tick => {}
        }
        if self.terminated.is_none() {
            self.events.deliver(self.features.async_events(), actions);
        }
    }

    /// NQN of its host.
    pub fn hostnqn(&self) -> &wire_nvme::fabrics::Nqn {
        self.registration.association.hostnqn()
    }

    fn set_kato(&mut self, kato_ms: u32) {
        let (timeout_ns, reason) = match (kato_ms, self.view.kind) {
            (0, SubsystemKind::Discovery) => {
                (u64::from(self.limits.discovery_idle_ms) * 1_000_000, TerminationReason::Idle)
            }
            (kato_ms, _) => (self.limits.keep_alive_ns(kato_ms), TerminationReason::KeepAliveExpired),
        };
        self.keep_alive.timeout_ns = timeout_ns;
        self.keep_alive.reason = reason;
        self.publish_deadline();
    }

    /// Restarts the keep alive timer.
    fn restart_keep_alive(&mut self, now_ns: u64) {
        self.keep_alive.last_activity_ns = now_ns;
        self.publish_deadline();
    }

    fn publish_deadline(&self) {
        self.association().set_keep_alive_deadline(self.keep_alive.deadline().unwrap_or(u64::MAX));
    }

    /// Whether a command restarts the timer: only Keep Alive does (Base 2.0, section 3.9.3.1), and what
    /// activates or changes the timer. So a host knows when a silent controller has stopped. Of an idle
    /// discovery controller every command does.
    fn restarts_keep_alive(&self, sqe: &Sqe) -> bool {
        if !self.properties.is_enabled() || self.keep_alive.reason == TerminationReason::Idle {
            return true;
        }
        match AdminOpcode::from_wire(sqe.opcode) {
            Some(AdminOpcode::KeepAlive) => true,
            Some(AdminOpcode::SetFeatures) => sqe.cdw10 as u8 == FeatureId::KeepAliveTimer.to_wire(),
            _ => false,
        }
    }

    /// Base 2.0, section 3.9: on expiry the controller sets CSTS.CFS, stops and ends the association.
    fn check_keep_alive(&mut self, now_ns: u64, actions: &mut Vec<ControllerAction>) {
        if self.keep_alive.deadline().is_some_and(|deadline| deadline <= now_ns) {
            self.terminate(self.keep_alive.reason, actions);
        }
    }

    fn terminate(&mut self, reason: TerminationReason, actions: &mut Vec<ControllerAction>) {
        if self.terminated.is_some() {
            return;
        }
        self.terminated = Some(reason);
        self.properties.fail();
        self.association().set_enabled(false);
        actions.push(ControllerAction::CloseIoQueues);
        actions.push(ControllerAction::Terminate(reason));
    }

    fn subsystem_changed(&mut self, subsystem: Arc<Subsystem>, actions: &mut Vec<ControllerAction>) {
        subsystem.check();
        let termination = if !subsystem.allows(self.hostnqn()) {
            Some(TerminationReason::HostNotAllowed)
        } else if !subsystem.listens_on(self.port.portid) {
            Some(TerminationReason::ListenerRemoved)
        } else {
            None
        };
        if let Some(reason) = termination {
            (self.view, self.subsystem) = (subsystem.clone(), subsystem);
            self.terminate(reason, actions);
            return;
        }
        let view = subsystem.view_of(self.hostnqn());
        self.events.subsystem_changed(&self.view, &view, self.port.portid);
        (self.view, self.subsystem) = (view, subsystem);
    }

    fn command(&mut self, sqe: &Sqe, data: &[u8], now_ns: u64, actions: &mut Vec<ControllerAction>) {
        if let Some(reason) = self.terminated {
            let status = match reason {
                TerminationReason::KeepAliveExpired => Status::KEEP_ALIVE_EXPIRED,
                _ => Status::ABORTED_SQ_DELETION,
            };
            self.complete(sqe, Err(status), actions);
            return;
        }
        if self.restarts_keep_alive(sqe) {
            self.restart_keep_alive(now_ns);
        }
        self.properties.update_status(&self.registration.association);
        if let Err(status) = self.check_command(sqe) {
            return self.complete(sqe, Err(status), actions);
        }
        // `AsyncEvents::deliver` completes an Asynchronous Event Request later.
        if AdminOpcode::from_wire(sqe.opcode) == Some(AdminOpcode::AsyncEventRequest) {
            if let Err(status) = self.events.add_request(sqe.cid) {
                self.complete(sqe, Err(status), actions);
            }
            return;
        }
        let answer = if sqe.opcode == FABRICS && !self.limits.memory_based {
            self.fabrics_command(sqe, actions)
        } else {
            self.admin_command(sqe, data, actions)
        };
        if matches!(&answer, Ok(reply) if reply.deferred) {
            return;
        }
        self.complete(sqe, answer, actions);
    }

    /// Checks that apply to every command.
    fn check_command(&self, sqe: &Sqe) -> Result<(), Status> {
        // Fused operations are for I/O queues. Over fabrics SGLs describe data; on memory-based transports
        // admin commands use PRPs (Base 2.0, section 3.3.3.1).
        let psdt = if self.limits.memory_based { Psdt::Prp } else { Psdt::Sgl };
        if sqe.fuse() != Fuse::Normal || sqe.psdt() != psdt {
            return Err(INVALID_FIELD);
        }
        // A disabled controller accepts only fabrics commands (Base 2.0, section 3.5.2).
        if sqe.opcode != FABRICS && !self.properties.is_enabled() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        Ok(())
    }

    fn fabrics_command(&mut self, sqe: &Sqe, actions: &mut Vec<ControllerAction>) -> AdminResult {
        match wire_nvme::fabrics::fabrics_type(sqe) {
            Ok(FabricsType::PropertyGet) => self.properties.get(sqe),
            Ok(FabricsType::PropertySet) => self.property_set(sqe, actions),
            Ok(FabricsType::Connect) => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
            // Disconnect deletes I/O queues only (Base 2.0, section 6.4).
            Ok(FabricsType::Disconnect) => Err(INVALID_QUEUE_TYPE),
            // Authentication is not required, so the host may not start it.
            _ => Err(Status::INVALID_OPCODE.do_not_retry()),
        }
    }

    fn property_set(&mut self, sqe: &Sqe, actions: &mut Vec<ControllerAction>) -> AdminResult {
        let change = self.properties.set(sqe, &self.registration.association)?;
        self.configuration_changed(change, actions);
        AdminResponse::empty()
    }

    fn configuration_changed(
        &mut self,
        change: properties::ConfigurationChange,
        actions: &mut Vec<ControllerAction>,
    ) {
        let association = self.registration.association.clone();
        match change {
            properties::ConfigurationChange::None => {}
            properties::ConfigurationChange::Enabled => association.set_enabled(true),
            properties::ConfigurationChange::Shutdown => actions.push(ControllerAction::CloseIoQueues),
            properties::ConfigurationChange::SubsystemReset => {
                self.registration.directory.request_subsystem_reset(association.subnqn());
                self.take_subsystem_reset(actions);
            }
            properties::ConfigurationChange::Reset => {
                // A Controller Level Reset (Base 2.0, section 3.7.2) restores the default features and aborts
                // outstanding commands. The association, its keep alive timer and the admin queue stay.
                actions.push(ControllerAction::CloseIoQueues);
                self.events.reset(actions);
                self.notifications.reset(actions);
                self.persistent_events = None;
                self.record_reset();
                self.features = Features::new(self.features.kato_ms(), &self.limits);
                association.set_queues_max(self.limits.io_queues_max);
                association.set_extended_formats(false);
                association.set_retry_delay(false);
            }
        }
    }

    /// Resets the controller if an NVM Subsystem Reset was initiated since the last one.
    fn take_subsystem_reset(&mut self, actions: &mut Vec<ControllerAction>) {
        let association = self.registration.association.clone();
        if association.take_subsystem_reset() {
            let change = self.properties.subsystem_reset(&association);
            self.configuration_changed(change, actions);
        }
    }

    fn admin_command(&mut self, sqe: &Sqe, data: &[u8], actions: &mut Vec<ControllerAction>) -> AdminResult {
        let unsupported = Err(Status::INVALID_OPCODE.do_not_retry());
        let Some(opcode) = AdminOpcode::from_wire(sqe.opcode) else {
            return unsupported;
        };
        match opcode {
            AdminOpcode::Identify => self.identify(sqe),
            AdminOpcode::GetLogPage => self.get_log_page(sqe),
            AdminOpcode::GetFeatures => self.get_features(sqe),
            AdminOpcode::SetFeatures => {
                let result = self.set_features(sqe, data);
                self.record_feature(sqe, &result);
                result
            }
            // A memory-based host is alive while its memory is mapped; KAS is 0.
            AdminOpcode::KeepAlive if !self.limits.memory_based => AdminResponse::empty(),
            AdminOpcode::Abort if self.view.kind == SubsystemKind::Nvm => {
                let Abort { sqid, cid } = Abort::from_sqe(sqe);
                // Only event requests can be aborted. I/O commands complete as fast as their devices do and
                // are not aborted, which bit 0 of dword 0 reports (Base 2.0, section 5.1).
                let aborted = sqid == 0 && self.events.abort(cid, actions);
                AdminResponse::with_result(u64::from(!aborted))
            }
            _ => unsupported,
        }
    }

    fn complete(&mut self, sqe: &Sqe, answer: AdminResult, actions: &mut Vec<ControllerAction>) {
        let completion = match answer {
            Ok(AdminResponse { result, data, .. }) => {
                AdminCompletion { cqe: Cqe::new(sqe.cid, Status::SUCCESS).with_result(result), data }
            }
            Err(status) => {
                let status = self.association().with_retry_delay(status);
                let transport = if self.limits.memory_based { 0 } else { self.limits.transport.to_wire() };
                self.errors.push(sqe, status, transport);
                AdminCompletion { cqe: Cqe::new(sqe.cid, status), data: Vec::new() }
            }
        };
        actions.push(ControllerAction::Complete(completion));
    }

    /// A response with data; the host's buffer must be exactly as long.
    fn respond_with_data(&self, sqe: &Sqe, data: Vec<u8>) -> AdminResult {
        self.check_buffer_length(sqe, data.len() as u64)?;
        Ok(AdminResponse { data, ..AdminResponse::default() })
    }

    fn check_buffer_length(&self, sqe: &Sqe, length: u64) -> Result<(), Status> {
        // PRPs have no length.
        if self.limits.memory_based {
            return Ok(());
        }
        let length_available = match self.limits.transport {
            TransportType::Tcp => crate::sgl::to_host(sqe.data)?,
            _ => sqe.data.length(),
        };
        if u64::from(length_available) != length {
            return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        Ok(())
    }
}
