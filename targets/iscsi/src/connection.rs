//! A connection: the login, then the session.

use std::io::IoSliceMut;
use std::net::{IpAddr, SocketAddr};

use scsi::TaskManagement;
use sockets::{ByteStream, StreamAddress};
use target_shell::{
    Accepted, CloseReason, IoContext, MemoryShare, MoreToRead, Notice, ProtocolConnection, Reattach,
    TransferReport,
};
use wire_iscsi::{BasicHeader, LoginStage, LoginStatus, Opcode, ScsiCommand};

use crate::config::IscsiConfig;
use crate::core::IscsiCore;
use crate::deferred::DeferredPdus;
use crate::failure::IscsiViolation;
use crate::limits::{CHECK_NS, LOGIN_TIMEOUT_NS, RECEIVE_BUDGET, REINSTATEMENT_TIMEOUT_NS, TEXT_BYTES_MAX};
use crate::login::Login;
use crate::pdu_reader::{PduReader, Stage};
use crate::pdu_writer::PduWriter;
use crate::session::{Session, isid_number};
use crate::sessions::{EnterError, Sessions};
use crate::settings::ConnectionInfo;
use crate::sink::Sink;

/// A connection of an initiator.
///
/// Bytes become PDUs in the [`PduReader`]; the data of a write goes from the stream into the command's
/// memory. The [`Login`] ends with the [`Session`], which stays until the connection is gone: while requests
/// to devices are in flight after the stream is closed, an initiator that logs in again with the same ports
/// waits.
pub(crate) struct IscsiConnection {
    pub(crate) flow: u16,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: IpAddr,
    pub(crate) reader: PduReader,
    pub(crate) out: PduWriter,
    pub(crate) sink: Sink,
    /// The header that was read waits for commands on other connections of the session, or for the next turn.
    pub(crate) is_deferred: bool,
    /// It waits for the next turn, because others have theirs first.
    pub(crate) turn_is_over: bool,
    pub(crate) phase: Phase,
    pub(crate) draining: bool,
    /// The session has to end at once.
    pub(crate) aborted: bool,
    /// It has logged in, and the group does not know yet.
    pub(crate) logged_in: bool,
    /// It completes its commands to move to another core.
    pub(crate) moving: bool,
    /// Commands that begin after that.
    pub(crate) deferred: DeferredPdus,
    pub(crate) deadline_ns: u64,
    pub(crate) last_received_ns: u64,
    /// When a login that waits for an earlier session fails.
    pub(crate) reinstatement_deadline_ns: Option<u64>,
    pub(crate) pinged_ns: u64,
    pub(crate) nop_interval_ns: u64,
    pub(crate) nop_timeout_ns: u64,
}

pub(crate) enum Phase {
    Login(Box<Login>),
    Session(Box<Session>),
}

/// In the identifiers of transfers: the rest of a PDU.
const PDU: u64 = u64::MAX;

const NS_PER_S: u64 = 1_000_000_000;

impl IscsiConnection {
    pub(crate) fn new(accepted: Accepted, config: &IscsiConfig, now_ns: u64) -> Option<IscsiConnection> {
        config.portal_group(accepted.portid)?;
        let peer = accepted.peer.tcp().map(|address| address.ip().to_canonical());
        Some(IscsiConnection {
            flow: accepted.flow,
            local: accepted.local.tcp(),
            peer: peer.unwrap_or(IpAddr::from([127, 0, 0, 1])),
            reader: PduReader::new(),
            out: PduWriter::default(),
            sink: Sink::Collect(Vec::new()),
            is_deferred: false,
            turn_is_over: false,
            phase: Phase::Login(Box::new(Login::new(accepted.portid, &accepted.peer))),
            draining: false,
            aborted: false,
            logged_in: false,
            moving: false,
            deferred: DeferredPdus::default(),
            deadline_ns: now_ns + LOGIN_TIMEOUT_NS,
            last_received_ns: now_ns,
            reinstatement_deadline_ns: None,
            pinged_ns: 0,
            nop_interval_ns: 0,
            nop_timeout_ns: 0,
        })
    }

    /// Describes it, with the address of the peer.
    pub(crate) fn info(&self, peer: &StreamAddress) -> ConnectionInfo {
        let (stage, identity) = match &self.phase {
            Phase::Login(login) => (login.stage(), login.identity()),
            Phase::Session(session) => (LoginStage::FullFeature, Some(session.identity())),
        };
        let session = self.session();
        let node = identity.and_then(|identity| identity.node.as_ref());
        ConnectionInfo {
            core: 0,
            cpu: 0,
            stage,
            is_draining: self.draining,
            initiator: identity.map_or_else(String::new, |identity| identity.initiator.clone()),
            isid: identity.map_or(0, |identity| isid_number(identity.isid)),
            tsih: session.map(Session::tsih),
            cid: identity.map_or(0, |identity| identity.cid),
            node: node.map(|node| node.name.clone()),
            portal_group: identity.map_or(0, |identity| identity.tag),
            peer: peer.clone(),
            local: self.local,
            header_digest: session.is_some_and(|session| session.parameters.header_digest),
            data_digest: session.is_some_and(|session| session.parameters.data_digest),
        }
    }

    /// The session, once the initiator has logged in.
    pub(crate) fn session(&self) -> Option<&Session> {
        match &self.phase {
            Phase::Session(session) => Some(session),
            Phase::Login(_) => None,
        }
    }

    /// Applies a configuration. Returns whether the connection has changed.
    pub(crate) fn apply(&mut self, config: &IscsiConfig) -> bool {
        self.set_nop_times(config);
        let is_current = match &mut self.phase {
            Phase::Session(session) => session.apply(config),
            Phase::Login(_) => true,
        };
        if !is_current {
            self.begin_drain();
        }
        true
    }

    fn set_nop_times(&mut self, config: &IscsiConfig) {
        self.nop_interval_ns = u64::from(config.options.nop_in_interval_s) * NS_PER_S;
        self.nop_timeout_ns = u64::from(config.options.nop_timeout_s) * NS_PER_S;
    }

    /// Something of other cores has changed.
    pub(crate) fn on_event(&mut self, functions: &[TaskManagement], is_closed: bool) {
        let Phase::Session(session) = &mut self.phase else { return };
        session.on_event(functions, is_closed);
        self.heed_control();
    }

    /// Does what others have asked of it by its session's
    /// [`ConnectionControl`](crate::sessions::ConnectionControl).
    pub(crate) fn heed_control(&mut self) {
        let Phase::Session(session) = &mut self.phase else { return };
        session.answer_logout_request(&mut self.out);
        if session.is_ending() {
            session.abandon();
            (self.draining, self.aborted) = (true, true);
        }
    }

    /// Handles what was received, as far as possible.
    fn advance(&mut self, context: &mut IoContext<'_, IscsiCore>) -> Result<(), IscsiViolation> {
        while !self.draining && (self.is_deferred || self.may_continue_deferred() || !self.is_blocked()) {
            if self.may_continue_deferred() {
                if !self.continue_deferred(context)? {
                    return Ok(());
                }
                continue;
            }
            if self.is_deferred {
                if !self.begin_pdu(context)? {
                    return Ok(());
                }
                continue;
            }
            match self.reader.stage() {
                Stage::Header => {
                    if !self.reader.read_header()? || !self.begin_pdu(context)? {
                        return Ok(());
                    }
                }
                Stage::Data | Stage::Trailer if !self.prepare_sink(context) => return Ok(()),
                Stage::Data => {
                    if self.reader.buffered().is_empty() {
                        return Ok(());
                    }
                    let count = self.take_data()?;
                    self.reader.data_taken(count);
                }
                Stage::Trailer => {
                    let Some(is_intact) = self.reader.read_trailer() else { return Ok(()) };
                    self.end_pdu(is_intact, context)?;
                }
            }
        }
        Ok(())
    }

    /// Begins the PDU whose header was read; false if it has to wait for commands on other connections, for
    /// the end of a move, or because the turn is over.
    fn begin_pdu(&mut self, context: &mut IoContext<'_, IscsiCore>) -> Result<bool, IscsiViolation> {
        let (header, segments) = (self.reader.header(), self.reader.segments());
        self.sink = match &mut self.phase {
            Phase::Login(_) => Sink::Collect(Vec::new()),
            Phase::Session(session) if self.moving && !is_data_out(header) => {
                // Data that is owed may be behind it.
                self.turn_is_over = false;
                self.is_deferred = !session.awaits_data() || !self.deferred.admits(header);
                if self.is_deferred {
                    return Ok(false);
                }
                session.end_wait_for_turn();
                Sink::Defer(Vec::new())
            }
            Phase::Session(session) => {
                self.is_deferred = !may_begin(session, header, &mut self.turn_is_over, context);
                if self.is_deferred {
                    return Ok(false);
                }
                session.begin_pdu(header, segments, &mut self.out)?
            }
        };
        Ok(true)
    }

    /// Whether a command that has waited for a move begins or continues before what comes from the initiator.
    #[inline]
    fn may_continue_deferred(&self) -> bool {
        !self.deferred.is_empty() && (!self.moving || self.deferred.has_begun())
    }

    /// Begins or continues the first command that waited for a move; false if it has to wait on.
    #[cold]
    fn continue_deferred(&mut self, context: &mut IoContext<'_, IscsiCore>) -> Result<bool, IscsiViolation> {
        let (Phase::Session(session), Some(pdu)) = (&mut self.phase, self.deferred.first()) else {
            return Ok(true);
        };
        let sink = match &mut pdu.sink {
            Some(sink) => sink,
            none => {
                if !may_begin(session, &pdu.header, &mut self.turn_is_over, context) {
                    return Ok(false);
                }
                none.insert(session.begin_pdu(&pdu.header, &pdu.segments, &mut self.out)?)
            }
        };
        if session.prepare_sink(sink, &mut self.out, context).is_none() {
            return Ok(false);
        }
        while pdu.taken < pdu.data.len() {
            pdu.taken += session.take_data(sink, &pdu.data[pdu.taken..])?;
        }
        let Some(pdu) = self.deferred.remove_first() else { return Ok(true) };
        session.end_pdu(&pdu.header, pdu.sink.unwrap_or_default(), pdu.is_intact, &mut self.out)?;
        session.pump(&mut self.out, context);
        self.draining |= session.is_over();
        Ok(true)
    }

    /// Finds memory for the data of the PDU; false if there is none now.
    fn prepare_sink(&mut self, context: &IoContext<'_, IscsiCore>) -> bool {
        match (&mut self.phase, &mut self.sink) {
            (Phase::Session(session), sink @ Sink::NeedsMemory(..)) => {
                session.prepare_sink(sink, &mut self.out, context).is_some()
            }
            _ => true,
        }
    }

    /// Passes buffered data on. Returns how many bytes.
    fn take_data(&mut self) -> Result<usize, IscsiViolation> {
        let buffered = self.reader.buffered();
        match (&mut self.phase, &mut self.sink) {
            (Phase::Session(session), sink) => session.take_data(sink, buffered),
            (Phase::Login(_), Sink::Collect(text)) if text.len() + buffered.len() <= TEXT_BYTES_MAX => {
                text.extend_from_slice(buffered);
                Ok(buffered.len())
            }
            (Phase::Login(_), _) => Err(IscsiViolation::DataLength(self.reader.data_left() as u32)),
        }
    }

    fn end_pdu(
        &mut self,
        is_intact: bool,
        context: &mut IoContext<'_, IscsiCore>,
    ) -> Result<(), IscsiViolation> {
        let sink = std::mem::take(&mut self.sink);
        match &mut self.phase {
            Phase::Login(login) => {
                let Sink::Collect(text) = sink else { return Err(IscsiViolation::NoLogin) };
                let sessions = &context.protocol.sessions;
                login.receive(self.reader.header(), &text, context.config, sessions, &mut self.out)?;
                if login.is_complete() {
                    self.enter(context)?;
                }
            }
            Phase::Session(session) => {
                if let Sink::Defer(data) = sink {
                    self.deferred.push(self.reader.header(), self.reader.segments(), data, is_intact);
                    return Ok(());
                }
                session.end_pdu(self.reader.header(), sink, is_intact, &mut self.out)?;
                session.answer_text(context.config, self.local, self.peer, &mut self.out);
                session.pump(&mut self.out, context);
                self.draining |= session.is_over();
            }
        }
        Ok(())
    }

    /// Begins the session of a complete login, unless an earlier one has to end first.
    fn enter(&mut self, context: &mut IoContext<'_, IscsiCore>) -> Result<(), IscsiViolation> {
        let Phase::Login(login) = &mut self.phase else { return Ok(()) };
        let Some(entry) = login.entry(&context.config.options) else { return Ok(()) };
        let core = &context.protocol;
        let handle = match Sessions::enter(&core.sessions, &entry, &core.events) {
            Ok(handle) => handle,
            Err(EnterError::Busy) => {
                let deadline_ns = context.now_ns + REINSTATEMENT_TIMEOUT_NS;
                if *self.reinstatement_deadline_ns.get_or_insert(deadline_ns) > context.now_ns {
                    return Ok(());
                }
                return login.finish(Err(LoginStatus::TargetError), &mut self.out).map(drop);
            }
            Err(error) => {
                let status = match error {
                    EnterError::NoSession => LoginStatus::NoSession,
                    EnterError::TooManyConnections => LoginStatus::TooManyConnections,
                    EnterError::TooMany | EnterError::Busy => LoginStatus::OutOfResources,
                };
                return login.finish(Err(status), &mut self.out).map(drop);
            }
        };
        let result = login.finish(Ok(&handle), &mut self.out)?;
        let parameters = result.parameters;
        (self.reader.header_digest, self.reader.data_digest) =
            (parameters.header_digest, parameters.data_digest);
        (self.out.header_digest, self.out.data_digest) = (parameters.header_digest, parameters.data_digest);
        let session = Session::new(result, handle, context, self.flow);
        self.phase = Phase::Session(Box::new(session));
        self.set_nop_times(context.config);
        self.reinstatement_deadline_ns = None;
        self.deadline_ns = context.now_ns + CHECK_NS;
        self.logged_in = true;
        Ok(())
    }

    /// Whether nothing is to be received for now.
    fn is_blocked(&self) -> bool {
        match &self.phase {
            Phase::Login(login) => login.is_complete(),
            Phase::Session(session) => {
                session.is_sink_waiting() || session.is_out_of_turn() || session.is_blocked(&self.out)
            }
        }
    }

    /// Whether nothing is to be received until it has moved.
    fn is_paused(&self) -> bool {
        self.moving && self.is_deferred
    }

    /// Receives once, into the memory of a command and then into the reader's. Returns the bytes received and
    /// asked for.
    fn receive_some<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<(usize, usize), CloseReason<IscsiViolation>> {
        let data_left = if self.reader.stage() == Stage::Data { self.reader.data_left() } else { 0 };
        let direct = match &mut self.phase {
            Phase::Session(session) if data_left > 0 => session.sink_room(&self.sink),
            _ => &mut [],
        };
        let of_direct = direct.len().min(data_left);
        let direct = &mut direct[..of_direct];
        let room = self.reader.inbound.room();
        // What does not fit into the command's memory is dropped by way of the reader's.
        let asked = of_direct + room.len();
        let mut parts = [IoSliceMut::new(direct), IoSliceMut::new(room)];
        let first = usize::from(of_direct == 0);
        let count = CloseReason::check(stream.receive(&mut parts[first..]))?;
        let of_command = count.min(of_direct);
        if of_command > 0
            && let Phase::Session(session) = &mut self.phase
        {
            self.reader.data_received(&session.sink_room(&self.sink)[..of_command]);
            session.sink_received(&self.sink, of_command);
        }
        self.reader.inbound.added(count - of_command);
        Ok((count, asked))
    }

    /// Pings a silent initiator. Returns whether it is gone.
    fn check_silence(&mut self, now_ns: u64) -> bool {
        let Phase::Session(session) = &mut self.phase else { return false };
        if session.is_pinged {
            return self.nop_timeout_ns > 0 && now_ns >= self.pinged_ns.saturating_add(self.nop_timeout_ns);
        }
        let is_silent = now_ns >= self.last_received_ns.saturating_add(self.nop_interval_ns);
        if self.nop_interval_ns > 0 && is_silent {
            self.pinged_ns = now_ns;
            session.send_ping(&mut self.out);
        }
        false
    }
}

impl ProtocolConnection<IscsiCore> for IscsiConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        _scratch: &mut [u8],
        context: &mut IoContext<'_, IscsiCore>,
    ) -> Result<MoreToRead, CloseReason<IscsiViolation>> {
        let mut budget = RECEIVE_BUDGET;
        loop {
            self.advance(context).map_err(CloseReason::Protocol)?;
            if self.draining || self.is_blocked() || self.is_paused() {
                // `resume` reads on.
                return Ok(MoreToRead::No);
            }
            if budget == 0 || self.turn_is_over {
                return Ok(MoreToRead::Yes);
            }
            let (count, asked) = self.receive_some(stream)?;
            budget = budget.saturating_sub(count);
            if count > 0 {
                self.last_received_ns = context.now_ns;
            }
            if count < asked {
                self.advance(context).map_err(CloseReason::Protocol)?;
                return Ok(if self.turn_is_over { MoreToRead::Yes } else { MoreToRead::No });
            }
        }
    }

    fn resume(
        &mut self,
        context: &mut IoContext<'_, IscsiCore>,
    ) -> Result<MoreToRead, CloseReason<IscsiViolation>> {
        if self.draining {
            return Ok(MoreToRead::No);
        }
        match &mut self.phase {
            Phase::Session(session) => {
                session.resume(&mut self.out, context);
                self.draining |= session.is_over();
            }
            Phase::Login(login) if login.is_complete() => {
                self.enter(context).map_err(CloseReason::Protocol)?;
            }
            Phase::Login(_) => {}
        }
        self.advance(context).map_err(CloseReason::Protocol)?;
        let stops = self.draining || self.is_blocked() || self.is_paused();
        Ok(if stops { MoreToRead::No } else { MoreToRead::Yes })
    }

    #[inline]
    fn complete(&mut self, tag: u64, completion: bdev::Completion) {
        if let Phase::Session(session) = &mut self.phase {
            session.complete(tag, completion, &mut self.out);
        }
    }

    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<IscsiViolation>> {
        let was_blocked = self.is_blocked();
        let freed = self.out.queue.send(stream)?;
        if let Phase::Session(session) = &mut self.phase {
            session.buffers_freed(freed);
            if was_blocked && !session.is_blocked(&self.out) {
                session.unblock();
            }
        }
        Ok(())
    }

    #[inline]
    fn wants_resume(&self) -> bool {
        match &self.phase {
            Phase::Login(_) => false,
            Phase::Session(session) => !self.draining && session.wants_resume(),
        }
    }

    #[inline]
    fn is_waiting(&self) -> bool {
        match &self.phase {
            // For an earlier session to end.
            Phase::Login(login) => !self.draining && login.is_complete(),
            Phase::Session(session) => session.is_waiting(),
        }
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.draining
    }

    fn begin_drain(&mut self) {
        self.draining = true;
        if let Phase::Session(session) = &mut self.phase {
            session.abandon();
        }
    }

    fn is_drained(&self) -> bool {
        let is_idle = match &self.phase {
            Phase::Login(_) => true,
            Phase::Session(session) => session.is_idle(),
        };
        self.aborted || (self.out.queue.is_empty() && is_idle)
    }

    fn awaits_login(&self) -> bool {
        true
    }

    #[inline]
    fn take_notice(&mut self) -> Notice {
        Notice { logged_in: std::mem::take(&mut self.logged_in), recheck: false }
    }

    #[inline]
    fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    fn on_deadline(&mut self, _: &mut IscsiCore, now_ns: u64) -> Result<(), CloseReason<IscsiViolation>> {
        let Phase::Session(_) = &self.phase else {
            return Err(CloseReason::Protocol(IscsiViolation::LoginTimeout));
        };
        self.deadline_ns = now_ns + CHECK_NS;
        if self.check_silence(now_ns) {
            return Err(CloseReason::Protocol(IscsiViolation::Silent));
        }
        Ok(())
    }

    /// The node; of a discovery session nothing.
    fn object(&self) -> Option<u64> {
        Some(self.session()?.identity().node.as_ref()?.id)
    }

    fn tenant(&self) -> Option<String> {
        Some(self.session()?.identity().initiator.clone())
    }

    fn transfers(&self, report: &mut TransferReport) {
        // The login has a time-out of its own.
        let Phase::Session(session) = &self.phase else { return };
        let awaits_pdu = self.reader.is_within_pdu() && !session.is_sink_waiting();
        if awaits_pdu || session.is_out_of_turn() {
            report.waits_for_peer(PDU, 0, session.data_progress as usize);
        }
        session.transfers(report);
        self.out.queue.transfers(report);
    }

    fn memory(&mut self) -> Option<&mut MemoryShare> {
        match &mut self.phase {
            Phase::Session(session) => Some(session.memory()),
            Phase::Login(_) => None,
        }
    }

    fn abandon_transfers(&mut self) {
        if let Phase::Session(session) = &mut self.phase {
            session.announce_drop(&mut self.out);
        }
    }

    fn work(&self) -> Option<u64> {
        self.movable_work()
    }

    fn begin_move(&mut self) {
        self.moving = true;
    }

    fn cancel_move(&mut self) {
        self.moving = false;
    }

    fn is_movable(&self) -> bool {
        self.is_between_cores()
    }

    fn detach(self) -> Option<Reattach<IscsiCore>> {
        self.take_apart()
    }
}

/// Whether a PDU that begins may do so now. If not, it has to wait for commands on other connections, or, as
/// `turn_is_over` says, for the next turn.
#[inline]
fn may_begin(
    session: &mut Session,
    header: &[u8; wire_iscsi::HEADER_BYTES],
    turn_is_over: &mut bool,
    context: &mut IoContext<'_, IscsiCore>,
) -> bool {
    // The session decodes the header as well, so that a turn without a limit costs nothing.
    let command_bytes = context.is_turn_shared().then(|| command_bytes(header)).flatten();
    *turn_is_over = command_bytes.is_some() && context.turn_commands() == 0;
    if *turn_is_over || session.waits_for_turn(header) {
        return false;
    }
    if let Some(bytes) = command_bytes {
        context.count_command(bytes);
    }
    true
}

/// Whether a PDU has data of a command that has begun.
fn is_data_out(header: &[u8; wire_iscsi::HEADER_BYTES]) -> bool {
    BasicHeader::decode(header).is_ok_and(|common| common.opcode == Opcode::DataOut)
}

/// The data of the command that begins with this header; `None` if it is no command, as the data of one that
/// has begun.
#[inline]
fn command_bytes(header: &[u8; wire_iscsi::HEADER_BYTES]) -> Option<u64> {
    match BasicHeader::decode(header).ok()?.opcode {
        Opcode::DataOut => None,
        Opcode::ScsiCommand => Some(ScsiCommand::decode(header).ok()?.expected_length.into()),
        _ => Some(0),
    }
}
