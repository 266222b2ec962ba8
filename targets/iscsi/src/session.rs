//! The full feature phase: commands of an initiator become tasks of logical units.

mod data_in;
mod data_out;
mod functions;
mod moving;
mod order;
mod requests;
mod text;

use std::collections::VecDeque;
use std::sync::Arc;

use block_io::Tag;
use dma::Data;
use scsi::{Command, RunningTask, SessionCommand, SessionUnit, Step, TaskEvent, TaskManagement, TaskRunner};
use slots::{Slab, Slot};
use target_shell::{IoContext, MemoryShare, NoMemory, PduData, TransferReport};
use wire_iscsi::{AsyncEvent, AsyncMessage, RESERVED_TAG, Reject, RejectReason};
use wire_scsi::AdditionalSense;

use crate::config::{IscsiConfig, TargetNode};
use crate::core::IscsiCore;
use crate::histogram::NodeHistogram;
use crate::limits::{
    IMMEDIATE_COMMANDS_MAX, LUNS_MAX, QUEUE_DEPTH_MAX, QUOTA_BYTES, TIME2WAIT_DEFAULT_S,
    UNSENT_HEAP_BYTES_MAX, UNSENT_PDUS_MAX,
};
use crate::login::{Identity, LoginResult};
use crate::parameters::Parameters;
use crate::pdu_writer::PduWriter;
use crate::sessions::{ConnectionControl, SessionHandle, SessionShared};

use data_out::DataOutState;
use functions::PendingFunction;
pub(crate) use moving::DetachedSession;
use text::TextExchange;

/// A connection of a session.
///
/// Commands arrive in order; in a session with several connections, one waits for those before it on the
/// others. Each has a slot, and a [`Task`] of its logical unit that says what it needs next: data of the
/// initiator ([`DataOutState`]), memory, or the device. What needs memory or the device goes to
/// [`work`](Self::work) and its requests to the [`TaskRunner`], which [`pump`](Self::pump) empties where the
/// core's resources are at hand: after receiving, and in `resume`. Buffers count towards its share of the
/// core's memory until they are free or sent.
pub(crate) struct Session {
    identity: Identity,
    handle: Arc<SessionHandle>,
    shared: Arc<SessionShared>,
    pub(crate) parameters: Parameters,
    flow: u16,
    tasks: TaskRunner<UnitInfo>,
    /// What REPORT LUNS lists, in order.
    luns: Vec<u16>,
    commands: Slab<CommandState>,
    immediate_commands: u32,
    stat_sn: u32,
    /// The number of a command that has been claimed and not started.
    claimed: Option<u32>,
    /// The next PDU is a command that waits for those before it, on other connections.
    is_out_of_turn: bool,
    work: VecDeque<(Slot, Work)>,
    /// Requests to devices in flight.
    outstanding: u32,
    memory: MemoryShare,
    /// The first of `work` needs this many bytes, with which the connection would have more than it may.
    quota_wait: Option<usize>,
    /// The core has no buffer for the first of `work`: retried each millisecond.
    waiting: bool,
    /// The core has no buffer for the data of the PDU that is being received, which waits: retried too.
    is_sink_waiting: bool,
    functions: Vec<PendingFunction>,
    /// Logouts of other connections, by their task tags, that wait for their ends.
    logouts: Vec<(u32, Arc<ConnectionControl>)>,
    /// Something of other cores may have changed.
    has_event: bool,
    text: TextExchange,
    /// A NOP-In is not answered.
    pub(crate) is_pinged: bool,
    /// Bytes of data-out received, wrapping: a change is progress.
    pub(crate) data_progress: u64,
    /// The initiator has logged out, or the session has to end: nothing more is executed.
    is_over: bool,
    /// What its commands have cost so far, wrapping: see [`target_shell::turn_cost`].
    work_done: u64,
}

/// A logical unit of the session.
#[derive(Debug)]
struct UnitInfo {
    id: u64,
    lun: u16,
}

/// A command that is not answered.
struct CommandState {
    running: RunningTask,
    initiator_task_tag: u32,
    lun: u64,
    is_immediate: bool,
    /// A task management function that waits for its end.
    abort_function: Option<u32>,
    /// Bytes of buffers.
    held: usize,
    /// Those for unsolicited data.
    held_at_once: usize,
    /// R2Ts that were sent: they count among the data PDUs of the command.
    r2ts: u32,
    expected_length: u32,
    /// When it arrived, if latencies are counted; 0 otherwise.
    started_ticks: u64,
    data_out: Option<DataOutState>,
}

impl SessionCommand for CommandState {
    fn running(&self) -> &RunningTask {
        &self.running
    }

    fn running_mut(&mut self) -> &mut RunningTask {
        &mut self.running
    }

    /// ABORT TASK names commands of its own connection only, and is executed there.
    fn tag(&self) -> Option<u64> {
        None
    }
}

/// What a command needs, where the core's resources are at hand.
enum Work {
    /// Memory of so many bytes for data-in.
    DataIn(u32),
    /// Memory of so many bytes for the task.
    Memory(u32),
    /// Memory for solicited data, and R2Ts.
    Solicit,
    /// The waker was called.
    Changed,
    /// It is aborted.
    Abort,
}

impl Session {
    pub(crate) fn new(
        result: LoginResult,
        handle: SessionHandle,
        context: &IoContext<'_, IscsiCore>,
        flow: u16,
    ) -> Session {
        let mut session = Session::attach(DetachedSession::new(result, handle, flow), context);
        session.apply(context.config);
        session
    }

    /// Who is logged in.
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The session's identifier.
    pub(crate) fn tsih(&self) -> u16 {
        self.handle.tsih()
    }

    /// Applies a configuration. Returns whether the session's target and portal group are still there.
    pub(crate) fn apply(&mut self, config: &IscsiConfig) -> bool {
        if config.portal_groups.iter().all(|group| group.tag != self.identity.tag) {
            return false;
        }
        let Some(node) = &self.identity.node else { return true };
        let Some(node) = config.nodes.iter().find(|other| other.id == node.id).cloned() else { return false };
        self.update_units(&node);
        self.identity.node = Some(node);
        true
    }

    fn update_units(&mut self, node: &TargetNode) {
        let mut has_changed = false;
        for unit in self.tasks.units_mut() {
            let is_present = node.units.iter().any(|one| one.id == unit.info.id);
            has_changed |= unit.is_present != is_present;
            unit.is_present = is_present;
        }
        for new in &node.units {
            if self.tasks.units().iter().any(|unit| unit.info.id == new.id) {
                continue;
            }
            let ports = scsi::NexusPorts::iscsi(
                &self.identity.initiator,
                isid_number(self.identity.isid),
                &node.name,
                self.identity.tag,
            );
            let nexus = match self.shared.nexuses.get_or_attach(new.id, || new.unit.attach(&ports)) {
                Ok(nexus) => nexus,
                Err(error) => {
                    let name = &self.identity.initiator;
                    log::warn!(target: "iscsi", "LUN {} of {} is not there for {name}: {error}", new.lun, node.name);
                    continue;
                }
            };
            has_changed = true;
            let info = UnitInfo { id: new.id, lun: new.lun };
            self.tasks.attach(SessionUnit::new(nexus, new.key, info), 2 * LUNS_MAX);
        }
        let is_first = self.luns.is_empty();
        let present = self.tasks.units().iter().filter(|unit| unit.is_present);
        self.luns = present.map(|unit| unit.info.lun).collect();
        self.luns.sort_unstable();
        if has_changed && !is_first {
            for unit in self.tasks.units().iter().filter(|unit| unit.is_present) {
                unit.nexus.set_attention(AdditionalSense::REPORTED_LUNS_CHANGED);
            }
        }
    }

    /// Something of other cores has changed.
    pub(crate) fn on_event(&mut self, functions: &[TaskManagement], is_closed: bool) {
        self.has_event = true;
        let work = &mut self.work;
        self.tasks.manage(&mut self.commands, functions, is_closed, |slot, _, _| {
            work.push_back((slot, Work::Abort));
        });
    }

    /// Whether the session has to end at once, without waiting for commands.
    pub(crate) fn is_ending(&self) -> bool {
        self.handle.is_ending()
    }

    /// Whether the initiator has logged out.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Nothing more is executed.
    pub(crate) fn abandon(&mut self) {
        self.is_over = true;
        self.work.clear();
        self.tasks.discard_requests();
        self.quota_wait = None;
    }

    /// No request to a device is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.outstanding == 0
    }

    /// Whether something waits for memory that others have.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting || self.is_sink_waiting
    }

    /// Whether nothing is received because there is no memory for the data that comes next.
    #[inline]
    pub(crate) fn is_sink_waiting(&self) -> bool {
        self.is_sink_waiting
    }

    /// Whether nothing is to be received until answers are sent.
    #[inline]
    pub(crate) fn is_blocked(&self, out: &PduWriter) -> bool {
        out.queue.len() >= UNSENT_PDUS_MAX || out.queue.heap_bytes() >= UNSENT_HEAP_BYTES_MAX
    }

    /// Whether [`resume`](Self::resume) makes progress.
    #[inline]
    pub(crate) fn wants_resume(&self) -> bool {
        if self.is_over || self.waiting {
            return false;
        }
        let is_quota_free = self.quota_wait.is_none_or(|bytes| self.memory.fits(bytes));
        self.has_event || self.tasks.has_requests() || (!self.work.is_empty() && is_quota_free)
    }

    /// Whether the initiator has to send data for a command.
    pub(crate) fn awaits_data(&self) -> bool {
        self.commands
            .iter()
            .any(|(_, command)| command.data_out.as_ref().is_some_and(DataOutState::awaits_data))
    }

    pub(crate) fn buffers_freed(&mut self, bytes: usize) {
        self.memory.remove(bytes);
    }

    /// Its share of the core's memory.
    pub(crate) fn memory(&mut self) -> &mut MemoryShare {
        &mut self.memory
    }

    /// Reports the data that the initiator owes.
    pub(crate) fn transfers(&self, report: &mut TransferReport) {
        for (slot, command) in self.commands.iter() {
            if let Some(state) = command.data_out.as_ref().filter(|state| state.awaits_data()) {
                state.transfers(DATA_OUT | slot.to_bits(), report);
            }
        }
    }

    /// Answers were sent, so that receiving goes on.
    pub(crate) fn unblock(&mut self) {
        self.has_event = true;
    }

    /// Continues what was deferred.
    pub(crate) fn resume(&mut self, out: &mut PduWriter, context: &mut IoContext<'_, IscsiCore>) {
        (self.waiting, self.is_sink_waiting) = (false, false);
        if std::mem::take(&mut self.has_event) {
            self.finish_functions(out);
            self.finish_logouts(out);
            let pending = TaskRunner::<UnitInfo>::pending(&self.commands);
            self.work.extend(pending.map(|slot| (slot, Work::Changed)));
        }
        self.pump(out, context);
    }

    /// Does what needs memory or the device.
    #[inline]
    pub(crate) fn pump(&mut self, out: &mut PduWriter, context: &mut IoContext<'_, IscsiCore>) {
        self.quota_wait = None;
        while let Some((slot, work)) = self.work.pop_front() {
            if self.do_work(slot, &work, out, context).is_err() {
                self.work.push_front((slot, work));
                break;
            }
        }
        self.submit_requests(out, context);
    }

    fn do_work(
        &mut self,
        slot: Slot,
        work: &Work,
        out: &mut PduWriter,
        context: &mut IoContext<'_, IscsiCore>,
    ) -> Result<(), NoMemory> {
        if self.commands.get(slot).is_none() {
            return Ok(());
        }
        let event = match *work {
            Work::DataIn(bytes) => TaskEvent::DataIn(self.take(slot, bytes as usize, context)?),
            Work::Memory(bytes) => TaskEvent::Memory(self.take(slot, bytes as usize, context)?),
            Work::Solicit => return self.solicit(slot, out, context),
            Work::Changed => TaskEvent::Changed,
            Work::Abort => TaskEvent::Abort,
        };
        self.resume_task(slot, event, out);
        Ok(())
    }

    /// Takes buffers for a command, within the connection's share.
    fn take(
        &mut self,
        slot: Slot,
        bytes: usize,
        context: &IoContext<'_, IscsiCore>,
    ) -> Result<Data, NoMemory> {
        let taken = self.memory.take(bytes, context.pool);
        match &taken {
            Ok(data) => {
                if let Some(command) = self.commands.get_mut(slot) {
                    command.held += data.len();
                }
            }
            Err(NoMemory::Full) => self.quota_wait = Some(bytes),
            Err(NoMemory::Lacking) => self.waiting = true,
        }
        taken
    }

    fn submit_requests(&mut self, out: &mut PduWriter, context: &mut IoContext<'_, IscsiCore>) {
        // A request that cannot be submitted may lead to further ones.
        while self.tasks.has_requests() {
            let outstanding = &mut self.outstanding;
            let failed = self.tasks.submit(|key, request| {
                context.submit(key, request)?;
                *outstanding += 1;
                Ok(())
            });
            for (tag, completion) in failed {
                if let Some(slot) = self.slot_of(tag.0) {
                    self.resume_task(slot, TaskEvent::Completed(completion), out);
                }
            }
        }
    }

    /// A request has completed.
    #[inline]
    pub(crate) fn complete(&mut self, tag: u64, completion: bdev::Completion, out: &mut PduWriter) {
        self.outstanding -= 1;
        if let Some(slot) = self.slot_of(tag) {
            self.resume_task(slot, TaskEvent::Completed(completion), out);
        }
    }

    fn slot_of(&self, tag: u64) -> Option<Slot> {
        self.commands.slot_at((tag & 0xffff) as u32).filter(|slot| tag_of(*slot).0 == tag)
    }

    /// Starts the task of a command.
    fn start_task(&mut self, slot: Slot, command: &Command<'_>, out: &mut PduWriter) {
        if let Some(step) = self.tasks.start(&mut self.commands, slot, command, &self.luns) {
            self.take_step(slot, step, out);
        }
    }

    #[inline]
    fn resume_task(&mut self, slot: Slot, event: TaskEvent, out: &mut PduWriter) {
        if let Some(step) = self.tasks.resume(&mut self.commands, slot, event, &self.luns) {
            self.take_step(slot, step, out);
        }
    }

    #[inline]
    fn take_step(&mut self, slot: Slot, step: Step, out: &mut PduWriter) {
        match step {
            Step::DataIn(bytes) => self.work.push_back((slot, Work::DataIn(bytes))),
            Step::Memory(bytes) => self.work.push_back((slot, Work::Memory(bytes))),
            Step::DataOut(bytes) => self.begin_data_out(slot, bytes),
            Step::InFlight | Step::Pending => {}
            Step::Respond(response) => self.respond(slot, response, out),
            Step::Done(response) => {
                self.respond(slot, response, out);
                self.end_command(slot, out);
            }
            Step::Aborted => self.end_command(slot, out),
        }
    }

    /// Removes a command, and completes what waits for its end.
    fn end_command(&mut self, slot: Slot, out: &mut PduWriter) {
        let Some(command) = self.commands.remove(slot) else { return };
        self.memory.remove(command.held);
        if command.held_at_once > 0 {
            self.memory.remove_at_once(command.held_at_once);
        }
        self.tasks.end(&command.running);
        if command.is_immediate {
            self.immediate_commands -= 1;
        } else {
            self.widen_window();
        }
        if command.started_ticks != 0 {
            self.count_latency(command.started_ticks);
        }
        if let Some(tag) = command.abort_function {
            self.answer_function(tag, wire_iscsi::TaskResponse::Complete, out);
        }
    }

    /// The histogram that the target node's commands are counted in, if there is one.
    #[inline]
    fn histogram(&self) -> Option<&NodeHistogram> {
        self.identity.node.as_ref().and_then(|node| node.histogram.as_deref())
    }

    #[cold]
    fn count_latency(&self, started_ticks: u64) {
        if let Some(histogram) = self.histogram() {
            histogram.count(os::clock::ticks().saturating_sub(started_ticks));
        }
    }

    /// The number of the next response.
    fn next_stat_sn(&mut self) -> u32 {
        let stat_sn = self.stat_sn;
        self.stat_sn = stat_sn.wrapping_add(1);
        stat_sn
    }

    /// Rejects a PDU, whose header is returned.
    fn reject(&mut self, header: &[u8], reason: RejectReason, out: &mut PduWriter) {
        let reject = Reject {
            initiator_task_tag: RESERVED_TAG,
            reason: reason.into(),
            stat_sn: self.next_stat_sn(),
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
            data_length: header.len() as u32,
            ..Reject::default()
        };
        out.push(&reject.to_bytes(), PduData::Bytes(header.to_vec()));
    }

    /// Says that the target drops the connection, which its initiator may make again (RFC 7143, section
    /// 11.9.1).
    pub(crate) fn announce_drop(&mut self, out: &mut PduWriter) {
        let message = AsyncMessage {
            initiator_task_tag: RESERVED_TAG,
            stat_sn: self.next_stat_sn(),
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
            event: AsyncEvent::ConnectionDropped.into(),
            parameter1: self.identity.cid,
            parameter2: TIME2WAIT_DEFAULT_S as u16,
            ..AsyncMessage::default()
        };
        out.push(&message.to_bytes(), PduData::None);
    }

    /// Asks the initiator to log out, if that is asked for.
    pub(crate) fn answer_logout_request(&mut self, out: &mut PduWriter) {
        let Some(seconds) = self.handle.take_logout_request() else { return };
        let message = AsyncMessage {
            initiator_task_tag: RESERVED_TAG,
            stat_sn: self.next_stat_sn(),
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
            event: AsyncEvent::LogoutRequested.into(),
            parameter3: seconds,
            ..AsyncMessage::default()
        };
        out.push(&message.to_bytes(), PduData::None);
    }
}

/// In the identifiers of transfers: data-out, and no PDU of the target.
const DATA_OUT: u64 = 1 << 63;

/// Index of the slot, and a part of its generation.
#[inline]
fn tag_of(slot: Slot) -> Tag {
    Tag(u64::from(slot.index()) | (slot.to_bits() >> 32 & 0xff_ffff) << 16)
}

const _: () =
    assert!(QUEUE_DEPTH_MAX + IMMEDIATE_COMMANDS_MAX <= 1 << 16 && target_shell::REQUEST_TAG_BITS >= 40);

/// An ISID as a number.
pub(crate) fn isid_number(isid: [u8; 6]) -> u64 {
    isid.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
