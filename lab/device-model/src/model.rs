//! The model as a sans-IO device: commands in, completions out, with the clock supplied by the caller.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use block_io::{Op, Status};

use crate::faults::{FaultOutcome, ModelFault, ModelFaultRules};
use crate::profile::{DeviceProfile, MediaState};
use crate::rng::ModelRng;
use crate::timing::{IoCommand, TimingModel};

/// Identifies a submitted command; unique over the life of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandId(pub u64);

/// A completed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelCompletion {
    /// The command, as [`DeviceModel::submit`] returned it.
    pub id: CommandId,
    /// Completion time in nanoseconds of the caller's clock; at most the `now_ns` passed to
    /// [`DeviceModel::poll`].
    pub at_ns: u64,
    /// NVMe status of the command.
    pub status: Status,
}

/// A simulated device: a [`TimingModel`] plus fault injection and controller state.
///
/// [`submit`](Self::submit) schedules a command, [`deadline`](Self::deadline) says when the next one
/// completes, and [`poll`](Self::poll) returns the completed ones. A command costs a heap insertion and
/// removal. Deterministic: the same seed and the same calls give the same completions.
///
/// ```
/// use device_model::{DeviceModel, DeviceProfile, IoCommand, Op};
/// let mut model = DeviceModel::new(&DeviceProfile::shipped("intel-p4800x")?, 1);
/// let id = model.submit(0, &IoCommand { op: Op::Read, offset: 0, bytes: 4096, fua: false }).expect("room");
/// let due_ns = model.deadline().expect("one is in flight");
/// let mut done = Vec::new();
/// assert_eq!(model.poll(due_ns, &mut done), 1);
/// assert_eq!((done[0].id, done[0].at_ns), (id, due_ns));
/// # Ok::<(), device_model::ProfileError>(())
/// ```
pub struct DeviceModel {
    timing: TimingModel,
    block_bytes: u64,
    rules: ModelFaultRules,
    rng: ModelRng,
    /// Completion time, command and status field, earliest first.
    due: BinaryHeap<Reverse<(u64, CommandId, u16)>>,
    /// Commands that complete only when they are aborted.
    hung: BTreeSet<CommandId>,
    /// Commands aborted by a reset or a removal, with their status.
    aborted: Vec<(CommandId, Status)>,
    state: ControllerState,
    issued: u64,
}

/// State of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ControllerState {
    Operational,
    /// CSTS.CFS is set: nothing completes until a reset.
    Fatal,
    /// Surprise removal.
    Removed,
}

/// Maximum number of commands in flight: the entries of the largest NVMe queue.
pub const IN_FLIGHT_MAX: usize = 65_536;

impl DeviceModel {
    /// A device with the profile's capacity in the steady state.
    pub fn new(profile: &DeviceProfile, seed: u64) -> DeviceModel {
        DeviceModel::with_state(profile, profile.capacity_bytes(), MediaState::Steady, seed)
    }

    /// A device with another capacity in bytes, raised to 1 MiB if it is less, or in another state.
    pub fn with_state(profile: &DeviceProfile, bytes: u64, state: MediaState, seed: u64) -> DeviceModel {
        DeviceModel {
            timing: TimingModel::whole_device(profile, bytes.max(1 << 20), state, seed),
            block_bytes: u64::from(profile.device.block_bytes),
            rules: ModelFaultRules::new(&profile.faults),
            rng: ModelRng::new(!seed),
            due: BinaryHeap::new(),
            hung: BTreeSet::new(),
            aborted: Vec::new(),
            state: ControllerState::Operational,
            issued: 0,
        }
    }

    /// Adds a fault rule to those of the profile.
    pub fn inject(&mut self, fault: &ModelFault) {
        self.rules.push(fault);
    }

    /// Submits a command; `None` if [`IN_FLIGHT_MAX`] are in flight. A clock that goes back is treated as
    /// one that stands still.
    pub fn submit(&mut self, now_ns: u64, io: &IoCommand) -> Option<CommandId> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return None;
        }
        let id = CommandId(self.issued);
        self.issued += 1;
        let mut due_ns = self.timing.schedule(now_ns, io);
        let mut status = Status::SUCCESS;
        if !self.rules.is_empty() {
            let (lba, blocks) =
                (io.offset / self.block_bytes, u64::from(io.bytes).div_ceil(self.block_bytes));
            match self.rules.evaluate(io.op, lba, blocks as u32, &mut self.rng) {
                FaultOutcome::Delay(ns) => due_ns += ns,
                FaultOutcome::Fail(failure) => status = failure,
                FaultOutcome::Hang | FaultOutcome::DropCompletion => {
                    self.hung.insert(id);
                    return Some(id);
                }
                FaultOutcome::Fatal if self.state == ControllerState::Operational => {
                    self.state = ControllerState::Fatal
                }
                FaultOutcome::SurpriseRemoval if self.state != ControllerState::Removed => {
                    self.state = ControllerState::Removed;
                    self.abort(Status::ABORTED_SQ_DELETION);
                }
                FaultOutcome::Fatal | FaultOutcome::SurpriseRemoval => {}
            }
        }
        match self.state {
            ControllerState::Removed => {
                self.aborted.push((id, Status::ABORTED_SQ_DELETION));
                return Some(id);
            }
            _ if io.op == Op::Reset => self.reset(),
            ControllerState::Fatal => {
                self.hung.extend(self.due.drain().map(|Reverse((_, id, _))| id));
                self.hung.insert(id);
                return Some(id);
            }
            ControllerState::Operational => {}
        }
        self.due.push(Reverse((due_ns, id, status.field())));
        Some(id)
    }

    /// Completion time of the next command in nanoseconds; `None` if none completes without an abort.
    pub fn deadline(&self) -> Option<u64> {
        if !self.aborted.is_empty() {
            return Some(0);
        }
        self.due.peek().map(|Reverse((due_ns, ..))| *due_ns)
    }

    /// Appends the commands completed by `now_ns` in order of time and returns their number.
    pub fn poll(&mut self, now_ns: u64, sink: &mut Vec<ModelCompletion>) -> usize {
        let before = sink.len();
        let aborted = self.aborted.drain(..);
        sink.extend(aborted.map(|(id, status)| ModelCompletion { id, at_ns: now_ns, status }));
        while let Some(Reverse((at_ns, id, field))) = self.due.peek().copied()
            && at_ns <= now_ns
        {
            self.due.pop();
            sink.push(ModelCompletion { id, at_ns, status: Status::from_field(field) });
        }
        sink.len() - before
    }

    /// Commands submitted and not yet returned by [`poll`](Self::poll).
    pub fn in_flight(&self) -> usize {
        self.due.len() + self.hung.len() + self.aborted.len()
    }

    /// Controller reset: aborts all commands in flight, which [`poll`](Self::poll) then returns, and
    /// clears a fatal status.
    pub fn reset(&mut self) {
        if self.state == ControllerState::Fatal {
            self.state = ControllerState::Operational;
        }
        self.abort(Status::ABORT_REQUESTED);
    }

    fn abort(&mut self, status: Status) {
        let due = self.due.drain().map(|Reverse((_, id, _))| id);
        let mut ids: Vec<CommandId> = due.chain(std::mem::take(&mut self.hung)).collect();
        ids.sort_unstable();
        self.aborted.extend(ids.into_iter().map(|id| (id, status)));
    }
}

#[cfg(test)]
mod tests;
