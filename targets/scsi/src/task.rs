//! The execution of one command.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use block_io::{Status, Tag};
use dma::Data;
use reservations::ChangeWaker;
use wire_scsi::{AdditionalSense, Cdb, ScsiStatus};

use crate::access::check_access;
use crate::blocks;
use crate::information::{self, Started};
use crate::nexus::UnitNexus;
use crate::operation::{Operation, OperationContext, OperationEvent, Progress};
use crate::response::{DataIn, Failure, Residual, Response};
use crate::transfer::Transfer;
use crate::unit::LogicalUnit;

/// A command as it arrives.
#[derive(Clone, Copy, Debug, Default)]
pub struct Command<'a> {
    /// The CDB; what follows it is ignored.
    pub cdb: &'a [u8],
    /// Bytes that the initiator has for the target.
    pub data_out_bytes: u32,
    /// Bytes that the initiator has room for.
    pub data_in_bytes: u32,
    /// Tag of the command's device requests.
    pub tag: Tag,
    /// Flow of the command's device requests.
    pub flow: u16,
}

/// What a transport lends to a task.
#[derive(Debug)]
pub struct TaskContext<'a> {
    /// The nexus of the command; the same in every call.
    pub nexus: &'a UnitNexus,
    /// What REPORT LUNS lists.
    pub luns: &'a [u16],
    /// Called when a task with [`Step::Pending`] can be resumed.
    pub waker: &'a Arc<dyn ChangeWaker>,
    /// Device requests are appended.
    pub requests: &'a mut Vec<bdev::Request>,
    /// The other units that the initiator reaches by its session, for copies between units.
    pub peers: &'a mut dyn SessionPeers,
}

/// The units of a session, as a transport knows them.
pub trait SessionPeers: std::fmt::Debug {
    /// The nexus of one of them, the command's own among them; `None` from their number on.
    fn nexus(&self, index: usize) -> Option<&Arc<UnitNexus>>;

    /// Submits a request to the device of a unit. It has the tag of a command, which gets the completion.
    ///
    /// # Errors
    /// The unit is not in the session.
    fn submit(&mut self, nexus: &Arc<UnitNexus>, request: bdev::Request) -> Result<(), bdev::Request>;
}

/// A session with one unit.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPeers;

impl SessionPeers for NoPeers {
    fn nexus(&self, _: usize) -> Option<&Arc<UnitNexus>> {
        None
    }

    fn submit(&mut self, _: &Arc<UnitNexus>, request: bdev::Request) -> Result<(), bdev::Request> {
        Err(request)
    }
}

/// What has happened since the last [`Step`].
#[derive(Debug)]
pub enum TaskEvent {
    /// Data-out has arrived, as much as [`Step::DataOut`] asked for.
    DataOut(Data),
    /// Writable memory for data-in, as much as [`Step::DataIn`] asked for.
    DataIn(Data),
    /// Writable memory of a pool, as much as [`Step::Memory`] asked for.
    Memory(Data),
    /// There is no memory, and waiting for it is too long.
    NoMemory,
    /// A device request of this task has completed.
    Completed(bdev::Completion),
    /// The waker was called, maybe for another task.
    Changed,
    /// The task is to end without an answer.
    Abort,
}

/// What a task needs next.
#[derive(Debug)]
#[must_use = "a task waits until its step is taken"]
pub enum Step {
    /// The first so many bytes of data-out, at least one and at most as many as the command has. The others are not
    /// used.
    DataOut(u32),
    /// Writable memory of so many bytes, at least one, for data-in: whole blocks, maybe more than the initiator expects.
    DataIn(u32),
    /// Writable memory of so many bytes, at least one, which no other has.
    Memory(u32),
    /// Completions of the requests that it has appended, now or before.
    InFlight,
    /// A call of the waker.
    Pending,
    /// Like `Done`, but the task continues, and ends with `Aborted`.
    Respond(Response),
    /// Nothing: the command has ended.
    Done(Response),
    /// Nothing: the command has ended, and there is no answer.
    Aborted,
}

/// The execution of one command, on one core.
///
/// It owns what the command needs between two calls: nothing, a range of blocks, or the state of an uncommon command on
/// the heap. Data and memory are in its requests. The order of calls is in the crate's documentation; an event that no
/// step asked for ends the command with an internal error.
#[derive(Debug)]
pub struct Task {
    tag: Tag,
    flow: u16,
    is_aborted: bool,
    has_responded: bool,
    in_flight: u32,
    /// Bytes of data-out that an operation was given.
    received_bytes: u32,
    data_out_bytes: u32,
    data_in_bytes: u32,
    state: TaskState,
}

#[derive(Debug)]
enum TaskState {
    Ended,
    Transfer(Transfer),
    Operation(Box<dyn Operation>),
}

impl Task {
    /// Starts a command.
    #[inline]
    pub fn start(command: &Command<'_>, context: &mut TaskContext<'_>) -> (Task, Step) {
        let mut task = Task {
            tag: command.tag,
            flow: command.flow,
            is_aborted: false,
            has_responded: false,
            in_flight: 0,
            received_bytes: 0,
            data_out_bytes: command.data_out_bytes,
            data_in_bytes: command.data_in_bytes,
            state: TaskState::Ended,
        };
        let step = match check_access(context.nexus, Cdb::decode(command.cdb)) {
            Ok(cdb) => task.begin(cdb, context),
            Err(failure) => task.fail(failure, context.nexus.unit()),
        };
        (task, step)
    }

    #[inline]
    fn begin(&mut self, cdb: Cdb, context: &mut TaskContext<'_>) -> Step {
        let planned = match cdb {
            Cdb::Read(range) => Transfer::read(context.nexus, &range, self.data_in_bytes),
            Cdb::Write(range) => Transfer::write(context.nexus, &range, self.data_out_bytes),
            Cdb::WriteAtomic { range, boundary_blocks } => {
                Transfer::write_atomic(context.nexus, &range, boundary_blocks, self.data_out_bytes)
            }
            _ => return self.begin_uncommon(&cdb, context),
        };
        match planned {
            Ok(transfer) if transfer.leaves_part(context.nexus.unit(), self.data_out_bytes) => {
                self.begin_uncommon(&cdb, context)
            }
            Ok(transfer) if transfer.blocks() == 0 => {
                self.finish_transfer(transfer, None, context.nexus.unit())
            }
            Ok(transfer) => {
                let step = transfer.first_step(context.nexus.unit());
                self.state = TaskState::Transfer(transfer);
                step
            }
            Err(failure) => self.fail(failure, context.nexus.unit()),
        }
    }

    fn begin_uncommon(&mut self, cdb: &Cdb, context: &mut TaskContext<'_>) -> Step {
        let started = blocks::start(cdb, context.nexus, self.data_out_bytes);
        match started.unwrap_or_else(|| information::start(cdb, context)) {
            Ok(Started::Answer(answer)) => self.respond(answer, context.nexus.unit()),
            Ok(Started::Operation(operation)) => {
                self.state = TaskState::Operation(operation);
                self.resume_operation(OperationEvent::Start, context)
            }
            Err(failure) => self.fail(failure, context.nexus.unit()),
        }
    }

    /// Continues after a step. `context` is for the same nexus.
    #[inline]
    pub fn resume(&mut self, event: TaskEvent, context: &mut TaskContext<'_>) -> Step {
        if matches!(event, TaskEvent::Completed(_)) {
            debug_assert!(self.in_flight > 0, "a request of another task has completed");
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        if self.is_aborted || matches!(event, TaskEvent::Abort) {
            if !self.is_aborted && !self.has_responded && context.nexus.unit().sanitize().sense().is_some() {
                // By another initiator's SANITIZE.
                context.nexus.set_attention(AdditionalSense::COMMANDS_CLEARED);
            }
            return self.abort();
        }
        if let TaskState::Transfer(transfer) = self.state {
            return self.resume_transfer(transfer, event, context);
        }
        let event = match event {
            TaskEvent::DataOut(data) => {
                self.received_bytes = data.len() as u32;
                OperationEvent::DataOut(data)
            }
            TaskEvent::Memory(data) => OperationEvent::Memory(data),
            TaskEvent::Completed(completion) => OperationEvent::Completed(completion),
            TaskEvent::Changed => OperationEvent::Changed,
            TaskEvent::NoMemory => return self.fail((ScsiStatus::Busy, None), context.nexus.unit()),
            TaskEvent::DataIn(_) | TaskEvent::Abort => return self.fail_internally(context.nexus.unit()),
        };
        self.resume_operation(event, context)
    }

    /// Whether it is a READ or WRITE, which asks for data once, before its only device request.
    #[inline]
    pub fn is_transfer(&self) -> bool {
        matches!(self.state, TaskState::Transfer(_))
    }

    /// Whether a device request is in flight.
    pub fn is_in_flight(&self) -> bool {
        self.in_flight > 0
    }

    #[cold]
    fn abort(&mut self) -> Step {
        self.is_aborted = true;
        self.state = TaskState::Ended;
        if self.in_flight > 0 { Step::InFlight } else { Step::Aborted }
    }

    #[inline]
    fn resume_transfer(
        &mut self,
        transfer: Transfer,
        event: TaskEvent,
        context: &mut TaskContext<'_>,
    ) -> Step {
        let unit = context.nexus.unit();
        match event {
            TaskEvent::DataOut(data) | TaskEvent::DataIn(data)
                if self.in_flight == 0 && data.len() as u64 == transfer.bytes(unit) =>
            {
                let mut request = transfer.request(self.tag, data);
                request.flow = self.flow;
                context.requests.push(request);
                self.in_flight = 1;
                Step::InFlight
            }
            TaskEvent::Completed(completion) if completion.status().is_success() => {
                self.finish_transfer(transfer, completion.into_data(), unit)
            }
            TaskEvent::Completed(completion) => self.fail_transfer(transfer, completion.status(), unit),
            TaskEvent::NoMemory if self.in_flight == 0 => self.fail((ScsiStatus::Busy, None), unit),
            TaskEvent::Changed if self.in_flight > 0 => Step::InFlight,
            _ => self.fail_internally(unit),
        }
    }

    #[inline]
    fn finish_transfer(&mut self, transfer: Transfer, data: Option<Data>, unit: &LogicalUnit) -> Step {
        self.state = TaskState::Ended;
        let (data, residual) = transfer.result(data, self.data_in_bytes, self.data_out_bytes);
        let sense_format = unit.sense_format();
        Step::Done(Response { status: ScsiStatus::Good, sense: None, sense_format, data, residual })
    }

    #[cold]
    fn fail_transfer(&mut self, transfer: Transfer, status: Status, unit: &LogicalUnit) -> Step {
        let (status, sense) = crate::sense::failure_of(status);
        self.state = TaskState::Ended;
        let residual = transfer.residual_of_failure(self.data_in_bytes, self.data_out_bytes);
        let sense_format = unit.sense_format();
        Step::Done(Response { status, sense, sense_format, data: DataIn::None, residual })
    }

    fn resume_operation(&mut self, event: OperationEvent, context: &mut TaskContext<'_>) -> Step {
        let TaskState::Operation(operation) = &mut self.state else {
            return self.fail_internally(context.nexus.unit());
        };
        let first_request = context.requests.len();
        let mut lent = OperationContext {
            nexus: context.nexus,
            waker: context.waker,
            requests: &mut *context.requests,
            peers: &mut *context.peers,
            peer_requests: 0,
            tag: self.tag,
            flow: self.flow,
            data_out_bytes: self.data_out_bytes,
        };
        let progress = operation.resume(event, &mut lent);
        let peer_requests = lent.peer_requests;
        self.in_flight += (context.requests.len() - first_request) as u32 + peer_requests;
        let unit = context.nexus.unit();
        match progress {
            Progress::DataOut(bytes) => Step::DataOut(bytes),
            Progress::Memory(bytes) => Step::Memory(bytes),
            Progress::InFlight => Step::InFlight,
            Progress::Pending => Step::Pending,
            Progress::Respond(answer) => {
                self.has_responded = true;
                Step::Respond(self.response(answer, unit))
            }
            Progress::Done(_) if self.has_responded => self.abort(),
            Progress::Done(Ok(answer)) => self.respond(answer, unit),
            Progress::Done(Err(failure)) => self.fail(failure, unit),
        }
    }

    fn respond(&mut self, answer: crate::operation::Answer, unit: &LogicalUnit) -> Step {
        self.state = TaskState::Ended;
        Step::Done(self.response(answer, unit))
    }

    fn response(&self, answer: crate::operation::Answer, unit: &LogicalUnit) -> Response {
        let crate::operation::Answer { status, mut data_in, data_out_bytes } = answer;
        // Of the direction in which the command has data.
        let residual = match (data_in.len() as u64, data_out_bytes) {
            (0, 0) => Residual::of(0, self.data_in_bytes.max(self.data_out_bytes)),
            (0, bytes) => Residual::of(bytes, self.data_out_bytes),
            (bytes, _) => Residual::of(bytes, self.data_in_bytes),
        };
        data_in.truncate(self.data_in_bytes as usize);
        let data = if data_in.is_empty() { DataIn::None } else { DataIn::Bytes(data_in) };
        Response { status, sense: None, sense_format: unit.sense_format(), data, residual }
    }

    /// Ends the command. Of its data, what an operation was given is transferred.
    #[cold]
    fn fail(&mut self, (status, sense): Failure, unit: &LogicalUnit) -> Step {
        self.state = TaskState::Ended;
        if self.has_responded {
            return self.abort();
        }
        let residual = Residual::of(self.received_bytes.into(), self.data_in_bytes.max(self.data_out_bytes));
        Step::Done(Response {
            status,
            sense,
            sense_format: unit.sense_format(),
            data: DataIn::None,
            residual,
        })
    }

    #[cold]
    fn fail_internally(&mut self, unit: &LogicalUnit) -> Step {
        debug_assert!(false, "an event that the task does not wait for");
        self.fail(crate::sense::failure_of(Status::INTERNAL_ERROR), unit)
    }
}

/// A waker for callers that poll.
pub fn no_waker() -> Arc<dyn ChangeWaker> {
    #[derive(Debug)]
    struct NoWaker;
    impl ChangeWaker for NoWaker {
        fn wake(&self) {}
    }
    Arc::new(NoWaker)
}
