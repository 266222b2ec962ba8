//! Commands and functions of a connection to a virtio SCSI host.

mod control;
mod event_queue;
mod scan;

use std::collections::VecDeque;
use std::sync::Arc;

use block_io::Tag;
use dma::Data;
use reservations::PendingGuard;
use scsi::{
    Command, DataIn, NexusPorts, Residual, Response, RunningTask, SessionCommand, SessionNexuses,
    SessionUnit, Step, TaskEvent, TaskManagement, TaskRunner,
};
use slots::{Slab, Slot};
use wire_scsi::ScsiStatus;
use wire_virtio::scsi::{
    COMMAND_BYTES, CONTROL_QUEUE, CommandHeader, EVENT_QUEUE, RESPONSE_BYTES, ResponseHeader, SENSE_BYTES,
    ScsiResponse, UnitAddress,
};

use crate::backend::{ScsiBackend, ScsiUnit};
use crate::blk_requests::Started;
use crate::chain;
use crate::connection::NewConnection;
use crate::device::{FetchedChain, GuestView, UsedChain, VhostContext};
use crate::failure::RingError;
use crate::limits::{BUFFERED_BYTES_MAX, SCSI_COMMANDS_MAX, SCSI_TARGETS};
use crate::tags;
use crate::vring::ChainId;

use control::PendingFunction;
use event_queue::EventQueue;
pub(crate) use scan::CommandScan;

/// What REPORT LUNS lists.
const LUNS: [u16; 1] = [0];

/// The commands of a connection on one core, as [`Task`]s of logical units, and its task management functions.
///
/// The connection's core has the control queue and the event queue. A function concerns commands of all cores: the logical
/// unit passes it to each, and it is answered when all have executed it and the chains of the commands that it has aborted
/// are visible to the driver ([`on_published`](Self::on_published)).
///
/// READ and WRITE use the guest's buffers as they are. A command that needs memory, or more than one request of its
/// device, goes to [`work`](Self::work) and its requests to the [`TaskRunner`], which [`pump`](Self::pump) empties where the
/// core's resources are at hand. Chains whose commands have ended are collected in [`used`](Self::used).
pub(crate) struct ScsiRequests {
    flow: u16,
    tasks: TaskRunner<TargetInfo>,
    commands: Slab<CommandState>,
    functions: Vec<PendingFunction>,
    /// Functions that are executed when the virtqueues were looked at: commands that the driver made available before are
    /// concerned, and its memory is not used for them after the answer.
    managed: Vec<TaskManagement>,
    /// The search for these commands.
    pub(crate) scan: CommandScan,
    /// Functions whose commands have ended, and are not visible to the driver as such.
    ended: Vec<PendingGuard>,
    /// `None` on other cores than the connection's.
    event_queue: Option<EventQueue>,
    nexuses: Arc<SessionNexuses>,
    work: VecDeque<(Slot, Work)>,
    /// Chains to return.
    pub(crate) used: Vec<UsedChain>,
    /// Bytes of buffers of the core that commands have.
    buffered_bytes: usize,
    /// A command needs a buffer that is not there: retried each millisecond.
    is_waiting: bool,
    /// Something of other cores may have changed.
    has_event: bool,
}

/// A logical unit of the connection.
#[derive(Debug)]
struct TargetInfo {
    id: u64,
    target: u8,
    blocks: u64,
    /// The driver has learnt of it.
    is_announced: bool,
}

/// A command that has not ended.
struct CommandState {
    running: RunningTask,
    queue: u16,
    /// `None` after the answer.
    id: Option<ChainId>,
    /// The driver's identifier.
    tag: u64,
    /// What the driver gets if it is aborted.
    abort_response: ScsiResponse,
    /// The driver's buffers: for the answer, and the data in the one direction or the other.
    response: Data,
    data_in: Option<Data>,
    data_out: Option<Data>,
    /// Bytes of buffers of the core.
    buffered: usize,
}

impl SessionCommand for CommandState {
    fn running(&self) -> &RunningTask {
        &self.running
    }

    fn running_mut(&mut self) -> &mut RunningTask {
        &mut self.running
    }

    fn tag(&self) -> Option<u64> {
        self.id.is_some().then_some(self.tag)
    }
}

/// What a command needs, where the core's resources are at hand.
enum Work {
    /// Memory of so many bytes for data-in.
    DataIn(u32),
    /// Memory of so many bytes for the task.
    Memory(u32),
    /// The waker was called.
    Changed,
    /// It is aborted.
    Abort,
}

/// There is no memory now.
struct NotNow;

impl ScsiRequests {
    /// Those of a new connection, or of its worker on another core.
    pub(crate) fn new(new: &NewConnection<'_>, backend: &ScsiBackend, is_worker: bool) -> ScsiRequests {
        let mut requests = ScsiRequests {
            flow: new.flow,
            tasks: TaskRunner::new(new.events),
            commands: Slab::with_capacity(SCSI_COMMANDS_MAX),
            functions: Vec::new(),
            managed: Vec::new(),
            scan: CommandScan::default(),
            ended: Vec::new(),
            event_queue: (!is_worker).then(EventQueue::default),
            nexuses: new.nexuses.clone(),
            work: VecDeque::new(),
            used: Vec::new(),
            buffered_bytes: 0,
            is_waiting: false,
            has_event: false,
        };
        requests.apply(&new.controller.name, backend);
        requests.clear_events();
        requests
    }

    /// Applies a configuration, and reports what has changed.
    pub(crate) fn apply(&mut self, name: &str, backend: &ScsiBackend) {
        let find = |id: u64| backend.targets.iter().flatten().find(|unit| unit.id == id);
        let mut events = self.event_queue.as_mut();
        for unit in self.tasks.units_mut().iter_mut().filter(|unit| unit.is_present) {
            let (new, info) = (find(unit.info.id), &mut unit.info);
            let Some(new) = new else {
                unit.is_present = false;
                events.iter_mut().for_each(|events| events.push_removed(info.target));
                continue;
            };
            if new.blocks != info.blocks {
                info.blocks = new.blocks;
                events.iter_mut().for_each(|events| events.push_resized(info.target));
            }
            if new.is_announced && !std::mem::replace(&mut info.is_announced, new.is_announced) {
                events.iter_mut().for_each(|events| events.push_added(info.target));
            }
        }
        for (target, new) in (0_u8..).zip(&backend.targets) {
            let Some(new) = new else { continue };
            if !self.tasks.units().iter().any(|unit| unit.info.id == new.id) {
                self.attach(name, target, new);
            }
        }
    }

    fn attach(&mut self, name: &str, target: u8, new: &ScsiUnit) {
        let attach = || new.unit.attach(&NexusPorts::virtio(name, target));
        let nexus = match self.nexuses.get_or_attach(new.id, attach) {
            Ok(nexus) => nexus,
            Err(error) => {
                log::warn!(target: "vhost", "{name}: target {target} is not there: {error}");
                return;
            }
        };
        let ScsiUnit { id, blocks, is_announced, .. } = *new;
        let info = TargetInfo { id, target, blocks, is_announced };
        if !self.tasks.attach(SessionUnit::new(nexus, new.key, info), 2 * SCSI_TARGETS) {
            return log::warn!(target: "vhost", "{name}: target {target} is not there: too many commands");
        }
        if let Some(events) = self.event_queue.as_mut().filter(|_| is_announced) {
            events.push_added(target);
        }
    }

    /// The driver begins anew. No command is in flight.
    pub(crate) fn reset(&mut self, name: &str, backend: &ScsiBackend) {
        self.tasks.detach_all();
        self.apply(name, backend);
        self.clear_events();
    }

    /// The driver looks for itself when it starts.
    fn clear_events(&mut self) {
        self.event_queue = self.event_queue.take().map(|_| EventQueue::default());
    }

    /// The driver has used a virtqueue before, and continues after a migration or a restart of the target:
    /// its nexuses are as they were.
    pub(crate) fn resume(&self) {
        self.tasks.units().iter().for_each(|unit| unit.nexus.resume());
    }

    /// Commands and functions that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.commands.len() + self.functions.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.commands.is_full()
    }

    /// Whether a chain of a virtqueue is to be fetched. Those for events wait for one.
    #[inline]
    pub(crate) fn wants(&self, queue: usize) -> bool {
        queue != EVENT_QUEUE || self.event_queue.as_ref().is_some_and(|events| !events.is_empty())
    }

    /// Whether there is an event since the last call, for which the driver has to be polled.
    #[inline]
    pub(crate) fn take_has_new_event(&mut self) -> bool {
        self.event_queue.as_mut().is_some_and(|events| std::mem::take(&mut events.is_new))
    }

    /// Whether a command uses a virtqueue for which `is_unmapped` says so. Its buffers are known by themselves.
    pub(crate) fn use_any(&self, is_unmapped: impl Fn(u16) -> bool) -> bool {
        self.commands.iter().any(|(_, command)| command.id.is_some() && is_unmapped(command.queue))
            || self.functions.iter().any(|function| is_unmapped(function.queue))
    }

    /// The stream is closed. Commands stay until their requests have completed; nothing more is written.
    pub(crate) fn close(&mut self) {
        self.work.clear();
        self.tasks.discard_requests();
        self.functions.clear();
        self.tasks.manage(&mut self.commands, &self.managed, true, |_, _, _| {});
        (self.managed, self.ended) = (Vec::new(), Vec::new());
        self.scan.cancel();
        self.is_waiting = false;
    }

    /// Something of other cores has changed.
    pub(crate) fn on_event(&mut self, functions: &[TaskManagement], is_closed: bool) {
        self.has_event = !is_closed;
        if is_closed {
            return self.tasks.manage(&mut self.commands, functions, true, |_, _, _| {});
        }
        let units = self.tasks.units();
        let concerns_any = |one: &&TaskManagement| units.iter().any(|unit| one.contains(&unit.nexus));
        let before = self.managed.len();
        self.managed.extend(functions.iter().filter(concerns_any).cloned());
        if self.managed.len() > before {
            self.scan.request();
        }
    }

    /// Executes functions, for all commands that were fetched. They stay pending while others are to be fetched.
    fn manage(&mut self) {
        let mut functions = std::mem::take(&mut self.managed);
        self.tasks.extend(&mut functions);
        let work = &mut self.work;
        self.tasks.manage(&mut self.commands, &functions, false, |slot, command, is_reset| {
            if is_reset {
                command.abort_response = ScsiResponse::Reset;
            }
            work.push_back((slot, Work::Abort));
        });
        if self.scan.is_pending() {
            self.managed = functions;
        }
    }

    /// What has ended is visible to the driver.
    #[inline]
    pub(crate) fn on_published(&mut self) {
        if !self.ended.is_empty() {
            self.ended.clear();
        }
    }

    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    #[inline]
    pub(crate) fn wants_resume(&self) -> bool {
        // Without room, the end of a command continues the scan.
        let scans = self.scan.is_pending() && !self.is_full();
        let has_work = !self.work.is_empty() && !self.is_waiting;
        self.has_event || scans || has_work || self.tasks.has_requests()
    }

    /// Executes the request of a chain.
    pub(crate) fn start(&mut self, fetched: &FetchedChain<'_>) -> Result<Started, RingError> {
        match usize::from(fetched.queue) {
            CONTROL_QUEUE => self.start_control(fetched),
            EVENT_QUEUE => {
                self.event_queue.as_mut().map_or(Ok(Started::Used(0)), |events| events.fill(fetched))
            }
            _ => self.start_command(fetched),
        }
    }

    fn start_command(&mut self, fetched: &FetchedChain<'_>) -> Result<Started, RingError> {
        let FetchedChain { queue, id, chain, guest } = *fetched;
        let (readable, writable) = (chain.readable(), chain.writable());
        let bytes = chain::first_bytes::<COMMAND_BYTES>(guest.memory, readable);
        let bytes = bytes.map_err(|_| RingError::NoStatus)?;
        let header = CommandHeader::decode(&bytes).map_err(|_| RingError::NoStatus)?;
        let (out_bytes, in_bytes) = (
            chain::total(readable) - COMMAND_BYTES as u64,
            chain::total(writable).checked_sub(RESPONSE_BYTES as u64).ok_or(RingError::NoStatus)?,
        );
        let response = chain::data(guest.memory, writable, 0, RESPONSE_BYTES as u64);
        let mut response = response.map_err(|_| RingError::NoStatus)?;
        let data = |ranges, skip: usize, length: u64| match length {
            0 => Ok(None),
            _ => chain::data(guest.memory, ranges, skip as u64, length).map(Some),
        };
        let address = UnitAddress::decode(header.lun);
        let unit = address.ok().and_then(|address| self.find_unit(address.target));
        let (unit, address) = match (unit, address) {
            (Some(unit), Ok(address)) => (unit, address),
            _ => return Ok(answer(&mut response, ScsiResponse::BadTarget, guest)),
        };
        // Data in both directions needs a feature that is not offered.
        let is_valid = (out_bytes == 0 || in_bytes == 0) && out_bytes.max(in_bytes) <= u32::MAX.into();
        let buffers = is_valid.then(|| {
            Some((
                data(writable, RESPONSE_BYTES, in_bytes).ok()?,
                data(readable, COMMAND_BYTES, out_bytes).ok()?,
            ))
        });
        let Some((mut data_in, data_out)) = buffers.flatten() else {
            return Ok(answer(&mut response, ScsiResponse::Failure, guest));
        };
        let mut command = Command {
            cdb: &bytes[CommandHeader::SIZE..],
            data_out_bytes: out_bytes as u32,
            data_in_bytes: in_bytes as u32,
            tag: Tag(0),
            flow: self.flow,
        };
        if address.lun != 0 {
            let answered = scsi::absent_unit(&command, &LUNS);
            return Ok(Started::Used(write_response(answered, &mut response, &mut data_in, guest)));
        }
        let state = CommandState {
            running: self.tasks.begin(unit),
            queue,
            id: Some(id),
            tag: header.tag,
            abort_response: ScsiResponse::Aborted,
            response,
            data_in,
            data_out,
            buffered: 0,
        };
        let slot = match self.commands.insert(state) {
            Ok(slot) => slot,
            // The caller has looked whether there is room.
            Err(mut state) => return Ok(answer(&mut state.response, ScsiResponse::Busy, guest)),
        };
        command.tag = Tag(tags::tag_of(slot));
        if let Some(step) = self.tasks.start(&mut self.commands, slot, &command, &LUNS) {
            self.take_step(slot, step, guest);
        }
        Ok(Started::InFlight(out_bytes + in_bytes))
    }

    /// The unit of a target.
    fn find_unit(&self, target: u8) -> Option<usize> {
        self.tasks.find_unit(|unit| unit.target == target)
    }

    /// A request has completed.
    #[inline]
    pub(crate) fn complete(&mut self, tag: u64, completion: bdev::Completion, guest: GuestView<'_>) {
        if guest.log.is_some() {
            guest.mark_read(&completion);
        }
        if let Some(slot) = tags::find(&self.commands, tag) {
            self.resume_task(slot, TaskEvent::Completed(completion), guest);
        }
    }

    /// Does what needs memory or the device.
    #[inline]
    pub(crate) fn pump(&mut self, guest: GuestView<'_>, context: &mut VhostContext<'_>) {
        self.is_waiting = false;
        if std::mem::take(&mut self.has_event) || !self.managed.is_empty() {
            self.manage();
            self.finish_functions(guest);
            let pending = TaskRunner::<TargetInfo>::pending(&self.commands);
            self.work.extend(pending.map(|slot| (slot, Work::Changed)));
        }
        while let Some((slot, work)) = self.work.pop_front() {
            if let Err(NotNow) = self.do_work(slot, &work, guest, context) {
                self.work.push_front((slot, work));
                self.is_waiting = true;
                break;
            }
        }
        self.submit_requests(guest, context);
    }

    fn do_work(
        &mut self,
        slot: Slot,
        work: &Work,
        guest: GuestView<'_>,
        context: &VhostContext<'_>,
    ) -> Result<(), NotNow> {
        if self.commands.get(slot).is_none() {
            return Ok(());
        }
        let event = match *work {
            Work::DataIn(bytes) => TaskEvent::DataIn(self.take(slot, bytes as usize, context)?),
            Work::Memory(bytes) => TaskEvent::Memory(self.take(slot, bytes as usize, context)?),
            Work::Changed => TaskEvent::Changed,
            Work::Abort => TaskEvent::Abort,
        };
        self.resume_task(slot, event, guest);
        Ok(())
    }

    /// Takes a buffer of the core.
    fn take(&mut self, slot: Slot, bytes: usize, context: &VhostContext<'_>) -> Result<Data, NotNow> {
        if self.buffered_bytes > 0 && self.buffered_bytes + bytes > BUFFERED_BYTES_MAX {
            return Err(NotNow);
        }
        let buffer = context.pool.take(bytes).ok_or(NotNow)?;
        if let Some(command) = self.commands.get_mut(slot) {
            command.buffered += bytes;
            self.buffered_bytes += bytes;
        }
        Ok(buffer.into())
    }

    #[inline]
    fn submit_requests(&mut self, guest: GuestView<'_>, context: &mut VhostContext<'_>) {
        // A request that cannot be submitted may lead to further ones.
        while self.tasks.has_requests() {
            for (tag, completion) in self.tasks.submit(|key, request| context.submit(key, request)) {
                if let Some(slot) = tags::find(&self.commands, tag.0) {
                    self.resume_task(slot, TaskEvent::Completed(completion), guest);
                }
            }
        }
    }

    #[inline]
    fn resume_task(&mut self, slot: Slot, event: TaskEvent, guest: GuestView<'_>) {
        if let Some(step) = self.next_step(slot, event) {
            self.take_step(slot, step, guest);
        }
    }

    #[inline]
    fn next_step(&mut self, slot: Slot, event: TaskEvent) -> Option<Step> {
        self.tasks.resume(&mut self.commands, slot, event, &LUNS)
    }

    /// Does what a step asks for, as far as the guest's buffers are enough.
    #[inline]
    fn take_step(&mut self, slot: Slot, mut step: Step, guest: GuestView<'_>) {
        loop {
            let Some(command) = self.commands.get_mut(slot) else { return };
            let event = match step {
                Step::DataOut(bytes) => {
                    let data = command.data_out.take().and_then(|data| first(data, bytes).ok());
                    data.map_or(TaskEvent::NoMemory, TaskEvent::DataOut)
                }
                Step::DataIn(bytes) => match command.data_in.take().map(|data| first(data, bytes)) {
                    Some(Ok(data)) => TaskEvent::DataIn(data),
                    other => {
                        // The last block does not fit: it is read elsewhere.
                        command.data_in = other.and_then(Result::err);
                        return self.work.push_back((slot, Work::DataIn(bytes)));
                    }
                },
                Step::Memory(bytes) => return self.work.push_back((slot, Work::Memory(bytes))),
                Step::InFlight | Step::Pending => return,
                Step::Respond(response) => return self.respond(slot, response, guest),
                Step::Done(response) => {
                    self.respond(slot, response, guest);
                    return self.end_command(slot, guest);
                }
                Step::Aborted => return self.end_command(slot, guest),
            };
            let Some(next) = self.next_step(slot, event) else { return };
            step = next;
        }
    }

    /// Answers a command, which stays.
    #[inline]
    fn respond(&mut self, slot: Slot, response: Response, guest: GuestView<'_>) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let Some(id) = command.id.take() else { return };
        let written = write_response(response, &mut command.response, &mut command.data_in, guest);
        (command.data_in, command.data_out) = (None, None);
        self.used.push(UsedChain { queue: command.queue, id, written });
    }

    /// Removes a command. What waits for its end completes when that is published.
    #[inline]
    fn end_command(&mut self, slot: Slot, guest: GuestView<'_>) {
        let Some(mut command) = self.commands.remove(slot) else { return };
        self.buffered_bytes -= command.buffered;
        self.tasks.end(&command.running);
        self.ended.append(&mut command.running.take_guards());
        if let Some(id) = command.id {
            let written = header_bytes(command.abort_response);
            write(&mut command.response, &written, guest);
            self.used.push(UsedChain { queue: command.queue, id, written: RESPONSE_BYTES as u32 });
        }
    }
}

/// The first so many bytes of data; all of it if there are fewer.
#[inline]
fn first(mut data: Data, bytes: u32) -> Result<Data, Data> {
    match data.len().cmp(&(bytes as usize)) {
        std::cmp::Ordering::Less => Err(data),
        std::cmp::Ordering::Equal => Ok(data),
        std::cmp::Ordering::Greater => {
            drop(data.split_off(bytes as usize));
            Ok(data)
        }
    }
}

/// Writes to the start of guest memory.
fn write(to: &mut Data, bytes: &[u8], guest: GuestView<'_>) {
    to.copy_from(0, bytes);
    guest.mark_data(to);
}

fn header_bytes(response: ScsiResponse) -> [u8; RESPONSE_BYTES] {
    let header = ResponseHeader { response: response.to_wire(), ..ResponseHeader::default() };
    let mut bytes = [0; RESPONSE_BYTES];
    bytes[..ResponseHeader::SIZE].copy_from_slice(&header.to_bytes());
    bytes
}

/// Answers a command that is not executed.
fn answer(to: &mut Data, response: ScsiResponse, guest: GuestView<'_>) -> Started {
    write(to, &header_bytes(response), guest);
    Started::Used(RESPONSE_BYTES as u32)
}

/// Writes the answer and data that are not in place. Returns the bytes written.
#[inline]
fn write_response(
    response: Response,
    to: &mut Data,
    data_in: &mut Option<Data>,
    guest: GuestView<'_>,
) -> u32 {
    let (kind, residual) = match response.residual {
        Residual::None => (ScsiResponse::Ok, 0),
        Residual::Underflow(bytes) => (ScsiResponse::Ok, bytes),
        // Sense data says more than that.
        Residual::Overflow(_) if response.status != ScsiStatus::Good => (ScsiResponse::Ok, 0),
        Residual::Overflow(_) => (ScsiResponse::Overrun, 0),
    };
    let sense = response.sense_bytes();
    let sense = &sense[..sense.len().min(SENSE_BYTES)];
    let header = ResponseHeader {
        sense_length: sense.len() as u32,
        residual,
        status_qualifier: 0,
        status: response.status as u8,
        response: kind.to_wire(),
    };
    let mut bytes = [0; RESPONSE_BYTES];
    bytes[..ResponseHeader::SIZE].copy_from_slice(&header.to_bytes());
    bytes[ResponseHeader::SIZE..ResponseHeader::SIZE + sense.len()].copy_from_slice(sense);
    write(to, &bytes, guest);
    let length = response.data.len();
    match (&response.data, data_in) {
        (DataIn::Bytes(bytes), Some(room)) => write(room, &bytes[..bytes.len().min(room.len())], guest),
        // There is still room only if the data is not in it.
        (DataIn::Data(data, valid), Some(room)) => {
            let mut bytes = vec![0; (*valid as usize).min(room.len())];
            data.copy_to(0, &mut bytes);
            write(room, &bytes, guest);
        }
        _ => {}
    }
    RESPONSE_BYTES as u32 + length
}
