//! The admin queue's state machine: one per association, on one core.

mod events;
mod features;
mod identify;
mod log;
mod properties;
mod reservations;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use ring::Status;
use wire_nvme::admin::{Abort, SetFeatures};
use wire_nvme::feature::{FeatureId, NumberOfQueues};
use wire_nvme::log::TransportType;
use wire_nvme::opcode::{AdminOpcode, FABRICS, FabricsType};
use wire_nvme::sqe::{Fuse, Psdt};
use wire_nvme::{Cqe, Sqe};

use crate::connect::Membership;
use crate::{
    AdminConnect, Association, DiscoveryLog, INVALID_FIELD, INVALID_QUEUE_TYPE, Kind, Limits, Port, Subsystem,
};
use events::Events;
use features::Features;
use log::ErrorLog;
use properties::Properties;
use reservations::Notifications;

/// What happens to a controller.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// A command on the admin queue, with the data that [`data_from_host`] asks for.
    Command {
        /// The command.
        sqe: &'a Sqe,
        /// Its data; whatever else came in the capsule is passed over.
        data: &'a [u8],
    },
    /// The subsystem changed.
    Subsystem(Arc<Subsystem>),
    /// The subsystem was removed.
    SubsystemRemoved,
    /// What there is to discover changed. Only a discovery controller looks at it.
    Discovery(Arc<DiscoveryLog>),
    /// What the health log says from now on.
    Health(HealthCounters),
    /// The host was heard of on an I/O queue. Optional: the admin queue alone keeps a host alive.
    Traffic,
    /// The host wrote a doorbell of a queue that does not exist.
    InvalidDoorbell,
    /// The host wrote a value to a doorbell that the queue's size or state does not allow.
    InvalidDoorbellValue,
    /// A [`Bell`](crate::reservation::Bell) rang.
    Bell,
    /// [`Controller::deadline`] has come.
    Tick,
}

/// What a controller wants done, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Answer a command.
    Complete(Completion),
    /// Close every I/O queue of the controller: they are no longer
    /// [wanted](crate::QueueLease::is_wanted). The admin queue stays.
    CloseIoQueues,
    /// Close the admin queue and, by dropping the controller, the association.
    Terminate(Reason),
}

/// An answer to a command of the admin queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The completion, but for SQHD.
    pub cqe: Cqe,
    /// Data to send to the host first: exactly what it has room for. Empty for none.
    pub data: Vec<u8>,
}

/// Why a controller ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The host was not heard of for the keep alive timeout.
    KeepAliveExpired,
    /// A discovery controller without keep alive had nothing to do for too long.
    Idle,
    /// The subsystem was removed.
    SubsystemRemoved,
    /// The host may no longer connect.
    HostRefused,
    /// The subsystem is no longer reached where the host came in.
    ListenerRemoved,
}

/// What the health log reports (Base 2.0, section 5.16.1.3); counted since the target started.
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
    /// Hours that the target has run.
    pub power_on_hours: u64,
    /// Errors of the medium.
    pub media_errors: u64,
}

/// Bytes of data that a host sends with a command of the admin queue and that the controller needs to
/// answer it; 0 for none. Tells the transport what to fetch before [`Event::Command`].
pub fn data_from_host(sqe: &Sqe) -> u32 {
    match AdminOpcode::from_wire(sqe.opcode) {
        Some(AdminOpcode::SetFeatures) => match FeatureId::from_wire(SetFeatures::of(sqe).fid) {
            Some(FeatureId::HostBehavior) => wire_nvme::feature::HOST_BEHAVIOR_SIZE as u32,
            // Over fabrics, where data is described by SGLs, Connect has told it.
            Some(FeatureId::HostIdentifier) if sqe.psdt() == Psdt::Prp => {
                if SetFeatures::of(sqe).cdw11 & wire_nvme::feature::HOST_ID_EXTENDED != 0 { 16 } else { 8 }
            }
            _ => 0,
        },
        _ => 0,
    }
}

/// What a command is answered with, or why not.
type Answer = Result<Reply, Status>;

#[derive(Debug, Default)]
struct Reply {
    result: u64,
    data: Vec<u8>,
    // It is not the time to answer yet.
    is_later: bool,
}

impl Reply {
    fn result(result: u64) -> Answer {
        Ok(Reply { result, ..Reply::default() })
    }

    fn none() -> Answer {
        Ok(Reply::default())
    }
}

/// A controller. Dropping it ends the association: its I/O queues are no longer wanted.
#[derive(Debug)]
pub struct Controller {
    membership: Membership,
    subsystem: Arc<Subsystem>,
    discovery: Arc<DiscoveryLog>,
    limits: Arc<Limits>,
    port: Port,
    properties: Properties,
    features: Features,
    events: Events,
    notifications: Notifications,
    errors: ErrorLog,
    health: HealthCounters,
    keep_alive: KeepAlive,
    ended: Option<Reason>,
}

#[derive(Debug)]
struct KeepAlive {
    // 0 for off.
    timeout_ns: u64,
    heard_ns: u64,
    reason: Reason,
}

impl KeepAlive {
    fn deadline(&self) -> Option<u64> {
        (self.timeout_ns != 0).then(|| self.heard_ns.saturating_add(self.timeout_ns))
    }
}

impl Controller {
    /// The controller of an admin queue that was just connected. `discovery` is what a discovery
    /// controller tells; others have no use for it.
    pub fn new(
        admin: AdminConnect,
        limits: Arc<Limits>,
        discovery: Arc<DiscoveryLog>,
        now_ns: u64,
    ) -> Controller {
        limits.check();
        let AdminConnect { subsystem, membership, port, kato_ms, .. } = admin;
        let mut controller = Controller {
            properties: Properties::new(&limits, subsystem.kind),
            features: Features::new(kato_ms, &limits),
            events: Events::new(limits.async_events_max),
            notifications: Notifications::default(),
            errors: ErrorLog::new(limits.error_log_entries),
            health: HealthCounters::default(),
            keep_alive: KeepAlive { timeout_ns: 0, heard_ns: now_ns, reason: Reason::KeepAliveExpired },
            ended: None,
            membership,
            subsystem,
            discovery,
            limits,
            port,
        };
        controller.set_kato(kato_ms);
        controller
    }

    /// What the other cores know of it.
    pub fn association(&self) -> &Arc<Association> {
        &self.membership.association
    }

    /// The subsystem as the controller last saw it.
    pub fn subsystem(&self) -> &Arc<Subsystem> {
        &self.subsystem
    }

    /// When [`Event::Tick`] is due, in the clock of [`handle`](Self::handle).
    pub fn deadline(&self) -> Option<u64> {
        if self.ended.is_some() { None } else { self.keep_alive.deadline() }
    }

    /// The four bytes of a register at `offset`, a multiple of four, as the host reads them: CAP, VS, CC,
    /// CSTS and CRTO. Those that say where the admin queue lies and which interrupts are masked are the
    /// transport's; they read as 0 here.
    pub fn register(&mut self, offset: u32) -> u32 {
        self.properties.settle(&self.membership.association);
        self.properties.register(offset)
    }

    /// The host writes CC, which over fabrics is a command. The controller is enabled at once; on
    /// [`Action::CloseIoQueues`] CSTS says that a reset or shutdown is done when no queue is leased any
    /// more.
    pub fn configure(&mut self, value: u32, actions: &mut Vec<Action>) {
        if self.ended.is_some() {
            return;
        }
        self.properties.settle(&self.membership.association);
        match self.properties.configure(value, &self.membership.association) {
            Ok(change) => self.changed(change, actions),
            // The reset before has not finished: what the host then writes has no defined effect.
            Err(Status::COMMAND_SEQUENCE_ERROR) => {}
            // A reserved value.
            Err(_) => self.fail(),
        }
    }

    /// The controller cannot go on: CSTS.CFS is set, and until the host resets it no command is taken.
    pub fn fail(&mut self) {
        self.properties.fail();
    }

    /// I/O queues that the host was granted (Number of Queues).
    pub fn queues_granted(&self) -> NumberOfQueues {
        self.features.queues()
    }

    /// Whether commands are taken.
    pub fn is_enabled(&self) -> bool {
        self.ended.is_none() && self.properties.is_enabled()
    }

    /// Takes an event and appends what is to be done.
    ///
    /// Every command is completed once: at once, or, for an Asynchronous Event Request, when there is
    /// an event. Those that are outstanding when the queue ends are never completed.
    pub fn handle(&mut self, event: Event<'_>, now_ns: u64, actions: &mut Vec<Action>) {
        if self.ended.is_none() {
            self.expire(now_ns, actions);
        }
        match event {
            Event::Command { sqe, data } => self.command(sqe, data, now_ns, actions),
            _ if self.ended.is_some() => return,
            Event::Subsystem(subsystem) => self.subsystem_changed(subsystem, actions),
            Event::SubsystemRemoved => self.end(Reason::SubsystemRemoved, actions),
            Event::Discovery(log) => {
                if self.subsystem.kind == Kind::Discovery && log.differs_for(self.hostnqn(), &self.discovery)
                {
                    self.events.discovery_changed();
                }
                self.discovery = log;
            }
            Event::Health(health) => self.health = health,
            Event::Traffic => self.keep_alive.heard_ns = now_ns,
            Event::InvalidDoorbell => self.events.doorbell(false),
            Event::InvalidDoorbellValue => self.events.doorbell(true),
            Event::Bell => self.look(actions),
            Event::Tick => {}
        }
        if self.ended.is_none() {
            self.events.deliver(self.features.async_events(), actions);
        }
    }

    fn hostnqn(&self) -> &wire_nvme::fabrics::Nqn {
        self.membership.association.hostnqn()
    }

    fn set_kato(&mut self, kato_ms: u32) {
        let (timeout_ns, reason) = match (kato_ms, self.subsystem.kind) {
            (0, Kind::Discovery) => (u64::from(self.limits.discovery_idle_ms) * 1_000_000, Reason::Idle),
            (kato_ms, _) => (self.limits.keep_alive_ns(kato_ms), Reason::KeepAliveExpired),
        };
        self.keep_alive.timeout_ns = timeout_ns;
        self.keep_alive.reason = reason;
    }

    /// Base 2.0, section 3.9: on expiry the controller sets CSTS.CFS, stops and ends the association.
    fn expire(&mut self, now_ns: u64, actions: &mut Vec<Action>) {
        if self.keep_alive.deadline().is_some_and(|deadline| deadline <= now_ns) {
            self.end(self.keep_alive.reason, actions);
        }
    }

    fn end(&mut self, reason: Reason, actions: &mut Vec<Action>) {
        if self.ended.is_some() {
            return;
        }
        self.ended = Some(reason);
        self.properties.fail();
        self.association().set_enabled(false);
        actions.push(Action::CloseIoQueues);
        actions.push(Action::Terminate(reason));
    }

    fn subsystem_changed(&mut self, subsystem: Arc<Subsystem>, actions: &mut Vec<Action>) {
        subsystem.check();
        let refused = if !subsystem.allows(self.hostnqn()) {
            Some(Reason::HostRefused)
        } else if !subsystem.listens_on(self.port.portid) {
            Some(Reason::ListenerRemoved)
        } else {
            None
        };
        if let Some(reason) = refused {
            self.subsystem = subsystem;
            self.end(reason, actions);
            return;
        }
        self.events.subsystem_changed(&self.subsystem, &subsystem, self.port.portid);
        self.subsystem = subsystem;
    }

    fn command(&mut self, sqe: &Sqe, data: &[u8], now_ns: u64, actions: &mut Vec<Action>) {
        if let Some(reason) = self.ended {
            let status = match reason {
                Reason::KeepAliveExpired => Status::KEEP_ALIVE_EXPIRED,
                _ => Status::ABORTED_SQ_DELETION,
            };
            self.complete(sqe, Err(status), actions);
            return;
        }
        self.keep_alive.heard_ns = now_ns;
        self.properties.settle(&self.membership.association);
        if let Err(status) = self.check(sqe) {
            return self.complete(sqe, Err(status), actions);
        }
        // An Asynchronous Event Request is answered later, by `Events::deliver`.
        if AdminOpcode::from_wire(sqe.opcode) == Some(AdminOpcode::AsyncEventRequest) {
            if let Err(status) = self.events.request(sqe.cid) {
                self.complete(sqe, Err(status), actions);
            }
            return;
        }
        let answer = if sqe.opcode == FABRICS && !self.limits.memory_based {
            self.fabrics(sqe, actions)
        } else {
            self.admin(sqe, data, actions)
        };
        if matches!(&answer, Ok(reply) if reply.is_later) {
            return;
        }
        self.complete(sqe, answer, actions);
    }

    /// What holds for every command.
    fn check(&self, sqe: &Sqe) -> Result<(), Status> {
        // Fused operations are for I/O queues, over fabrics data is described by SGLs, and with queues in
        // memory admin commands use PRPs (Base 2.0, section 3.3.3.1).
        let psdt = if self.limits.memory_based { Psdt::Prp } else { Psdt::Sgl };
        if sqe.fuse() != Fuse::Normal || sqe.psdt() != psdt {
            return Err(INVALID_FIELD);
        }
        // Until it is enabled a controller takes fabrics commands only (Base 2.0, section 3.5.2).
        if sqe.opcode != FABRICS && !self.properties.is_enabled() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        Ok(())
    }

    fn fabrics(&mut self, sqe: &Sqe, actions: &mut Vec<Action>) -> Answer {
        match wire_nvme::fabrics::fabrics_type(sqe) {
            Ok(FabricsType::PropertyGet) => self.properties.get(sqe),
            Ok(FabricsType::PropertySet) => self.property_set(sqe, actions),
            Ok(FabricsType::Connect) => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
            // Only I/O queues are deleted one by one (Base 2.0, section 6.4).
            Ok(FabricsType::Disconnect) => Err(INVALID_QUEUE_TYPE),
            // Authentication is not asked for, so nobody may start it.
            _ => Err(Status::INVALID_OPCODE.do_not_retry()),
        }
    }

    fn property_set(&mut self, sqe: &Sqe, actions: &mut Vec<Action>) -> Answer {
        let change = self.properties.set(sqe, &self.membership.association)?;
        self.changed(change, actions);
        Reply::none()
    }

    fn changed(&mut self, change: properties::Change, actions: &mut Vec<Action>) {
        let association = self.membership.association.clone();
        match change {
            properties::Change::None => {}
            properties::Change::Enabled => association.set_enabled(true),
            properties::Change::Shutdown => actions.push(Action::CloseIoQueues),
            properties::Change::Reset => {
                // A Controller Level Reset (Base 2.0, section 3.7.2): features are back at their
                // defaults and outstanding commands are aborted. The association, its keep alive
                // and the admin queue stay.
                actions.push(Action::CloseIoQueues);
                self.events.reset(actions);
                self.notifications.reset(actions);
                self.features = Features::new(self.features.kato_ms(), &self.limits);
                association.set_queues_max(self.limits.io_queues_max);
            }
        }
    }

    fn admin(&mut self, sqe: &Sqe, data: &[u8], actions: &mut Vec<Action>) -> Answer {
        let unknown = Err(Status::INVALID_OPCODE.do_not_retry());
        let Some(opcode) = AdminOpcode::from_wire(sqe.opcode) else {
            return unknown;
        };
        match opcode {
            AdminOpcode::Identify => self.identify(sqe),
            AdminOpcode::GetLogPage => self.get_log_page(sqe),
            AdminOpcode::GetFeatures => self.get_features(sqe),
            AdminOpcode::SetFeatures => self.set_features(sqe, data),
            // Whoever shares its memory is alive as long as it is there; KAS says so.
            AdminOpcode::KeepAlive if !self.limits.memory_based => Reply::none(),
            AdminOpcode::Abort if self.subsystem.kind == Kind::Nvm => {
                let Abort { sqid, cid } = Abort::of(sqe);
                // What is outstanding here is event requests; commands of I/O queues are answered as
                // fast as their devices can, and are not aborted. Bit 0 says so (Base 2.0, section 5.1).
                let aborted = sqid == 0 && self.events.abort(cid, actions);
                Reply::result(u64::from(!aborted))
            }
            _ => unknown,
        }
    }

    fn complete(&mut self, sqe: &Sqe, answer: Answer, actions: &mut Vec<Action>) {
        let completion = match answer {
            Ok(Reply { result, data, .. }) => {
                Completion { cqe: Cqe::new(sqe.cid, Status::SUCCESS).with_result(result), data }
            }
            Err(status) => {
                let transport = if self.limits.memory_based { 0 } else { self.limits.transport.to_wire() };
                self.errors.note(sqe, status, transport);
                Completion { cqe: Cqe::new(sqe.cid, status), data: Vec::new() }
            }
        };
        actions.push(Action::Complete(completion));
    }

    /// Data for the host, which must have room for exactly that much.
    fn send(&self, sqe: &Sqe, data: Vec<u8>) -> Answer {
        self.room(sqe, data.len() as u64)?;
        Ok(Reply { data, ..Reply::default() })
    }

    fn room(&self, sqe: &Sqe, length: u64) -> Result<(), Status> {
        // PRPs say where, but not how much.
        if self.limits.memory_based {
            return Ok(());
        }
        let room = match self.limits.transport {
            TransportType::Tcp => crate::sgl::to_host(sqe.data)?,
            _ => sqe.data.length(),
        };
        if u64::from(room) != length {
            return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        Ok(())
    }
}
