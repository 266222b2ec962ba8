//! A client's connection: what the shell drives.

use std::rc::Rc;
use std::sync::Arc;

use block_io::FabricsStatus;
use nvme_controller::reservation::DrainGuards;
use nvme_controller::{ConnectOk, ControllerAssociation, ControllerDirectory, ControllerEvent};
use sockets::ByteStream;
use target_shell::{CloseReason, MoreToRead, NEVER_NS, Notice, Polling, ProtocolConnection};
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectData, Nqn};
use wire_nvme::log::{AddressFamily, TransportAddress, TransportType};

use super::function::VfioUserFunction;
use super::limits::VfioUserLimits;
use super::protocol::{ClientReport, VfioUserContext, VfioUserProtocol};
use super::seats::SeatTicket;
use super::session::ClientSession;
use super::socket::DisconnectReason;
use crate::queue_totals::QueueTotals;
use crate::reservation_watch::ReservedConnection;
use crate::snapshot::ConfigSnapshot;

/// The endpoint that a client has connected to.
pub(super) struct ClientEndpoint {
    pub(super) directory: String,
    pub(super) portid: u16,
    pub(super) totals: Rc<QueueTotals>,
}

/// The connection of a client, which waits until the endpoint's clients before it have gone.
///
/// While it waits, nothing is read. When it is served it has a [`ClientSession`] with its controller. The
/// shell polls it while the controller is enabled, because doorbells are shared memory. A connection that is
/// closed stays until its device requests have completed, because they may use the client's memory; only then
/// the next client is served.
pub(crate) struct VfioUserConnection {
    endpoint: ClientEndpoint,
    flow: u16,
    session: Option<ClientSession>,
    /// It is closed for this reason before it is read again.
    close_reason: Option<CloseReason<DisconnectReason>>,
    draining: bool,
    notice: Notice,
    /// Reservation commands of other hosts wait for the client's device requests. Nothing is fetched until
    /// those complete.
    drain_guards: DrainGuards,
    /// Dropped last: the next client is served then.
    ticket: SeatTicket,
}

impl VfioUserConnection {
    pub(super) fn new(endpoint: ClientEndpoint, flow: u16, ticket: SeatTicket) -> VfioUserConnection {
        VfioUserConnection {
            endpoint,
            flow,
            session: None,
            close_reason: None,
            draining: false,
            notice: Notice::default(),
            drain_guards: DrainGuards::default(),
            ticket,
        }
    }

    pub(super) fn portid(&self) -> u16 {
        self.endpoint.portid
    }

    pub(super) fn function(&self) -> Option<&VfioUserFunction> {
        self.session.as_ref().map(|session| &session.function)
    }

    pub(super) fn function_mut(&mut self) -> Option<&mut VfioUserFunction> {
        self.session.as_mut().map(|session| &mut session.function)
    }

    pub(super) fn disconnect(&mut self, reason: CloseReason<DisconnectReason>) {
        self.close_reason = Some(reason);
    }

    /// Serves the client if it is its turn, and disconnects it if it is silent and another waits. Whether
    /// anything has changed.
    pub(super) fn update_seat(
        &mut self,
        limits: &VfioUserLimits,
        directory: &Arc<ControllerDirectory>,
        config: &ConfigSnapshot,
        now_ns: u64,
    ) -> bool {
        if let Some(session) = &self.session {
            if session.is_silent(now_ns) && self.ticket.is_contended() {
                self.disconnect(CloseReason::Protocol(DisconnectReason::Silent));
            }
            return self.close_reason.is_some();
        }
        if self.draining || !self.ticket.is_first() {
            return false;
        }
        match create_function(&self.endpoint, self.flow, limits, directory, config, now_ns) {
            Ok(function) => {
                self.session = Some(ClientSession::new(function, now_ns));
                self.notice.logged_in = true;
            }
            Err(reason) => {
                log::warn!(
                    target: "nvmf",
                    "vfio-user {}: client rejected: {reason}",
                    self.endpoint.directory
                );
                self.disconnect(CloseReason::Closed);
            }
        }
        true
    }

    /// Applies a new configuration.
    pub(super) fn apply(&mut self, limits: &VfioUserLimits, config: &ConfigSnapshot, now_ns: u64) {
        match &mut self.session {
            Some(session) => session.function.apply(limits, config, now_ns),
            // A client that waits at a listener that was removed.
            None => self.draining |= config.subsystem_on(self.endpoint.portid).is_none(),
        }
    }

    pub(super) fn report(&self) -> Option<ClientReport> {
        let function = self.function()?;
        Some(ClientReport {
            directory: self.endpoint.directory.clone(),
            subnqn: function.association().subnqn().clone(),
            cntlid: function.association().cntlid(),
            queues: function.sq_stats().collect(),
        })
    }
}

impl ReservedConnection for VfioUserConnection {
    fn io_association(&self) -> Option<Arc<ControllerAssociation>> {
        self.function().map(|function| function.association().clone())
    }

    fn drain_guards(&mut self) -> &mut DrainGuards {
        &mut self.drain_guards
    }

    fn on_reservation_change(&mut self, now_ns: u64) {
        if let Some(function) = self.function_mut() {
            function.complete_pending_reservations();
            function.controller_event(ControllerEvent::ReservationChanged, now_ns);
        }
    }

    fn begin_drain(&mut self) {
        ProtocolConnection::begin_drain(self);
    }
}

impl ProtocolConnection<VfioUserProtocol> for VfioUserConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        _scratch: &mut [u8],
        context: &mut VfioUserContext<'_>,
    ) -> Result<MoreToRead, CloseReason<DisconnectReason>> {
        if let Some(reason) = self.close_reason.take() {
            return Err(reason);
        }
        match &mut self.session {
            Some(session) => session.receive(stream, context),
            None => Ok(MoreToRead::No),
        }
    }

    fn resume(
        &mut self,
        context: &mut VfioUserContext<'_>,
    ) -> Result<MoreToRead, CloseReason<DisconnectReason>> {
        let Some(session) = &mut self.session else { return Ok(MoreToRead::No) };
        if self.drain_guards.is_empty() {
            session.function.resume(context);
        }
        Ok(if std::mem::take(&mut session.resumes_reading) { MoreToRead::Yes } else { MoreToRead::No })
    }

    #[inline]
    fn complete_in_place(&mut self, completions: &[bdev::Completion]) -> bool {
        self.function_mut().is_some_and(|function| function.complete_direct(completions))
    }

    fn complete(&mut self, _tag: u64, completion: bdev::Completion) {
        if let Some(function) = self.function_mut() {
            function.complete(completion);
        }
    }

    /// Signals interrupts and sends replies.
    #[inline]
    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<DisconnectReason>> {
        if let Some(reason) = self.close_reason.take() {
            return Err(reason);
        }
        match &mut self.session {
            Some(session) => session.flush(stream),
            None => Ok(()),
        }
    }

    #[inline]
    fn polling(&self) -> Polling {
        self.function().map_or(Polling::Off, VfioUserFunction::polling)
    }

    /// Fetches new entries of the submission queues.
    #[inline]
    fn poll(&mut self, context: &mut VfioUserContext<'_>) -> usize {
        match &mut self.session {
            Some(session) if self.drain_guards.is_empty() => session.function.fetch(context),
            _ => 0,
        }
    }

    #[inline]
    fn wants_resume(&self) -> bool {
        let wants_resume =
            |session: &ClientSession| session.resumes_reading || session.function.wants_resume();
        self.session.as_ref().is_some_and(wants_resume)
    }

    fn is_waiting(&self) -> bool {
        let waits = |session: &ClientSession| session.is_pending() || session.function.is_waiting();
        self.session.as_ref().is_some_and(waits)
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.draining || self.function().is_some_and(VfioUserFunction::is_draining)
    }

    /// The virtual machine, by its endpoint.
    fn tenant(&self) -> Option<String> {
        Some(format!("vfio-user {}", self.endpoint.directory))
    }

    fn begin_drain(&mut self) {
        self.draining = true;
        if let Some(function) = self.function_mut() {
            function.begin_drain();
        }
    }

    fn is_drained(&self) -> bool {
        self.function().is_none_or(|function| !function.has_pending())
    }

    /// The controller's timeout, or the end of a silent client's seat.
    fn deadline_ns(&self) -> u64 {
        let Some(session) = &self.session else { return NEVER_NS };
        let deadlines = [session.function.deadline(), session.seat_deadline_ns()];
        deadlines.into_iter().flatten().min().unwrap_or(NEVER_NS)
    }

    fn on_deadline(
        &mut self,
        _protocol: &mut VfioUserProtocol,
        now_ns: u64,
    ) -> Result<(), CloseReason<DisconnectReason>> {
        let Some(session) = &mut self.session else { return Ok(()) };
        if session.function.deadline().is_some_and(|deadline_ns| deadline_ns <= now_ns) {
            session.function.controller_event(ControllerEvent::Tick, now_ns);
        }
        if session.seat_deadline_ns().is_some_and(|deadline_ns| deadline_ns <= now_ns) {
            if self.ticket.is_contended() {
                return Err(CloseReason::Protocol(DisconnectReason::Silent));
            }
            session.seat_checked_ns = now_ns;
        }
        Ok(())
    }

    #[inline]
    fn take_notice(&mut self) -> Notice {
        std::mem::take(&mut self.notice)
    }

    fn awaits_login(&self) -> bool {
        true
    }

    /// Releases the client's memory and interrupts. Its device requests may be outstanding.
    fn on_close(&mut self) -> bool {
        if let Some(function) = self.function_mut() {
            function.disconnect();
        }
        false
    }
}

/// Creates the controller of a new client, as a Connect command would.
fn create_function(
    endpoint: &ClientEndpoint,
    flow: u16,
    limits: &VfioUserLimits,
    directory: &Arc<ControllerDirectory>,
    config: &ConfigSnapshot,
    now_ns: u64,
) -> Result<VfioUserFunction, String> {
    let sqe = Connect {
        record_format: 0,
        qid: 0,
        queue_entries: limits.controller.admin_queue_entries_max,
        attributes: Default::default(),
        kato_ms: 0,
    }
    .to_sqe();
    let subsystem = config.subsystem_on(endpoint.portid).ok_or("no subsystem listens here")?;
    let hostnqn = super::host_nqn(&endpoint.directory);
    let connect = ConnectData {
        host_id: *super::host_uuid(&endpoint.directory).as_bytes(),
        cntlid: wire_nvme::fabrics::CNTLID_DYNAMIC,
        subnqn: subsystem.nqn.clone(),
        hostnqn: hostnqn.clone(),
    };
    let mut data = [0; CONNECT_DATA_SIZE];
    connect.encode(&mut data);
    let address = TransportAddress {
        trtype: TransportType::IntraHost,
        adrfam: AddressFamily::IntraHost,
        traddr: endpoint.directory.clone(),
        trsvcid: "0".to_owned(),
    };
    let controller_limits = config.controller_limits(&limits.controller);
    let connect_context = nvme_controller::ConnectContext {
        secure: None,
        directory,
        limits: &controller_limits,
        port: nvme_controller::SubsystemPort { portid: endpoint.portid, address, secure: false },
    };
    let find = |nqn: &Nqn| config.subsystem(nqn);
    match nvme_controller::connect(&sqe, &data, &connect_context, find) {
        Ok(ConnectOk::Admin(admin)) => {
            let function = VfioUserFunction::new(admin, limits, directory, config, endpoint, flow, now_ns);
            function.map_err(|errno| format!("cannot allocate doorbells or interrupts: {errno}"))
        }
        Ok(ConnectOk::Io(_)) => Err("Connect created an I/O queue".into()),
        Err(error) => Err(format!("{} (its host NQN is {hostnqn})", FabricsStatus(error.status))),
    }
}
