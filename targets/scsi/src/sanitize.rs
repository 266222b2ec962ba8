//! The sanitize state of a unit, and SANITIZE (SBC-4, sections 4.11 and 5.25).
//!
//! An operation belongs to the unit, not to the nexus that started it: the command waits until the commands of other
//! nexuses have ended, and gives a [`SanitizeJob`] to the unit's [`SanitizeExecutor`]. From then on the operation ends
//! only when it has finished or failed, whatever becomes of the command and its connection.

mod executor;
mod job;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use reservations::PendingChange;
use wire_scsi::blocks::OverwriteParameters;
use wire_scsi::{AdditionalSense, Cdb, Sense, SenseKey, opcode};

use crate::access::check_writable;
use crate::nexus::UnitNexus;
use crate::operation::{Answer, Operation, OperationContext, OperationEvent, Progress, bytes_of};
use crate::response::{Failure, check};
use crate::unit::LogicalUnit;
use job::{JobResult, SanitizeWork};

pub use executor::{ReactorSanitizer, SanitizeExecutor};
pub use job::{SanitizeJob, SanitizeRun};

/// Whether a unit is being sanitized, in one word that each command reads.
#[derive(Debug, Default)]
pub(crate) struct SanitizeState(AtomicU32);

const IDLE: u32 = 0;
/// It has failed; EXIT FAILURE MODE ends that.
const FAILED_UNRESTRICTED: u32 = u32::MAX - 1;
/// It has failed; only a SANITIZE that succeeds ends that.
const FAILED: u32 = u32::MAX;

impl SanitizeState {
    /// What commands are answered with; `None` if it is idle.
    #[inline]
    pub(crate) fn sense(&self) -> Option<Sense> {
        match self.0.load(Ordering::Relaxed) {
            IDLE => None,
            state => Some(sense_of(state)),
        }
    }

    /// Reserves the unit for an operation. Returns the state before; `None` if there is an operation.
    fn begin(&self) -> Option<u32> {
        let begins = |state| (state == IDLE || state >= FAILED_UNRESTRICTED).then_some(1);
        self.0.fetch_update(Ordering::SeqCst, Ordering::Relaxed, begins).ok()
    }

    /// EXIT FAILURE MODE. False if the failed operation does not allow it.
    fn exit_failure(&self) -> bool {
        let exits = self.0.compare_exchange(FAILED_UNRESTRICTED, IDLE, Ordering::SeqCst, Ordering::Relaxed);
        exits != Err(FAILED)
    }
}

#[cold]
fn sense_of(state: u32) -> Sense {
    if state >= FAILED_UNRESTRICTED {
        return Sense::new(SenseKey::MediumError, AdditionalSense::SANITIZE_FAILED);
    }
    let progress = Some((state - 1).min(0xffff) as u16);
    Sense { progress, ..Sense::new(SenseKey::NotReady, AdditionalSense::SANITIZE_IN_PROGRESS) }
}

/// Checks that a command may be executed while the unit is sanitized, or after that has failed.
#[inline]
pub(crate) fn check_sanitize(unit: &LogicalUnit, cdb: &Cdb) -> Result<(), Failure> {
    match unit.sanitize().sense() {
        None => Ok(()),
        Some(sense) => check_restricted(sense, cdb),
    }
}

#[cold]
fn check_restricted(sense: Sense, cdb: &Cdb) -> Result<(), Failure> {
    let has_failed = sense.key == SenseKey::MediumError;
    let is_allowed = matches!(cdb, Cdb::Inquiry { .. } | Cdb::ReportLuns { .. } | Cdb::RequestSense { .. })
        || has_failed && matches!(cdb, Cdb::Sanitize { .. });
    if is_allowed { Ok(()) } else { Err(check(sense)) }
}

/// Starts a SANITIZE: `Ok(None)` if it is complete.
pub(crate) fn start(
    nexus: &UnitNexus,
    action: u8,
    is_immediate: bool,
    unrestricted_exit: bool,
    parameter_bytes: u32,
) -> Result<Option<Box<dyn Operation>>, Failure> {
    let unit = nexus.unit();
    if !is_supported(unit, action) {
        return Err(check(Sense::invalid_field(1, Some(4))));
    }
    let is_overwrite = action == opcode::sanitize::OVERWRITE;
    // A header of four bytes, and a pattern of up to a block.
    let expected = if is_overwrite { 5..unit.block_bytes() + 5 } else { 0..1 };
    if !expected.contains(&parameter_bytes) {
        return Err(check(Sense::invalid_field(7, None)));
    }
    if action == opcode::sanitize::EXIT_FAILURE_MODE {
        let exits = unit.sanitize().exit_failure();
        return if exits { Ok(None) } else { Err(check(Sense::invalid_field(1, Some(4)))) };
    }
    check_writable(nexus)?;
    if is_overwrite {
        let state = CommandState::Receiving { unrestricted_exit };
        return Ok(Some(Box::new(SanitizeCommand {
            parameter_bytes,
            ..SanitizeCommand::new(is_immediate, state)
        })));
    }
    let running = RunningSanitize::begin(unit, unrestricted_exit)?;
    let work = SanitizeWork::erase();
    Ok(Some(Box::new(SanitizeCommand::new(
        is_immediate,
        CommandState::Draining { running, work, drain: None },
    ))))
}

/// Whether a unit executes an action. BLOCK ERASE is deallocation. OVERWRITE is for devices whose blocks have their places:
/// what is written to another may be put elsewhere, and leaves what its blocks were before.
pub(crate) fn is_supported(unit: &LogicalUnit, action: u8) -> bool {
    match action {
        opcode::sanitize::BLOCK_ERASE => can_erase(unit),
        opcode::sanitize::OVERWRITE => can_sanitize(unit) && !unit.config().can_unmap,
        opcode::sanitize::EXIT_FAILURE_MODE => can_sanitize(unit),
        _ => false,
    }
}

/// Whether BLOCK ERASE is supported: deallocated blocks read as zeroes.
pub(crate) fn can_erase(unit: &LogicalUnit) -> bool {
    unit.config().can_unmap && can_sanitize(unit)
}

/// Whether SANITIZE is supported at all.
pub(crate) fn can_sanitize(unit: &LogicalUnit) -> bool {
    !unit.config().read_only && unit.sanitizer().is_some()
}

/// An operation that has the unit. Dropped before its job starts, it leaves the unit as it was; dropped later, before it
/// has finished, it has failed.
#[derive(Debug)]
struct RunningSanitize {
    /// It does not keep the unit: without users, there is nothing to report.
    unit: Weak<LogicalUnit>,
    unrestricted_exit: bool,
    /// The state after the drop.
    state_after: u32,
}

impl RunningSanitize {
    fn begin(unit: &Arc<LogicalUnit>, unrestricted_exit: bool) -> Result<RunningSanitize, Failure> {
        let in_progress = || check(Sense::new(SenseKey::NotReady, AdditionalSense::SANITIZE_IN_PROGRESS));
        let state_after = unit.sanitize().begin().ok_or_else(in_progress)?;
        Ok(RunningSanitize { unit: Arc::downgrade(unit), unrestricted_exit, state_after })
    }

    fn start(&mut self) {
        self.state_after = if self.unrestricted_exit { FAILED_UNRESTRICTED } else { FAILED };
    }

    fn finish(&mut self) {
        self.state_after = IDLE;
    }

    fn set_progress(&self, done: u64, all: u64) {
        let progress = (u128::from(done) * 0xffff / u128::from(all.max(1))) as u32;
        if let Some(unit) = self.unit.upgrade() {
            unit.sanitize().0.store(1 + progress.min(0xffff), Ordering::Relaxed);
        }
    }
}

impl Drop for RunningSanitize {
    fn drop(&mut self) {
        if let Some(unit) = self.unit.upgrade() {
            unit.sanitize().0.store(self.state_after, Ordering::SeqCst);
        }
    }
}

/// The command: starts the operation, and waits for it unless the initiator wants the answer at once (IMMED).
#[derive(Debug)]
struct SanitizeCommand {
    parameter_bytes: u32,
    is_immediate: bool,
    state: CommandState,
}

#[derive(Debug)]
enum CommandState {
    Receiving {
        unrestricted_exit: bool,
    },
    /// Until the commands of other nexuses have ended.
    Draining {
        running: RunningSanitize,
        work: SanitizeWork,
        drain: Option<Arc<PendingChange>>,
    },
    Waiting(Arc<JobResult>),
    Ended,
}

impl SanitizeCommand {
    fn new(is_immediate: bool, state: CommandState) -> SanitizeCommand {
        SanitizeCommand { parameter_bytes: 0, is_immediate, state }
    }

    /// Takes the parameters of OVERWRITE. The unit is reserved for it then: what fails before changes nothing.
    fn receive(
        &self,
        bytes: &[u8],
        unrestricted_exit: bool,
        unit: &Arc<LogicalUnit>,
    ) -> Result<CommandState, Failure> {
        let parameters = OverwriteParameters::decode(bytes);
        let parameters = parameters.map_err(|byte| check(Sense::invalid_parameter(byte, None)))?;
        let work = SanitizeWork::overwrite(&parameters, unit.block_bytes());
        let running = RunningSanitize::begin(unit, unrestricted_exit)?;
        Ok(CommandState::Draining { running, work, drain: None })
    }

    fn proceed(&mut self, context: &OperationContext<'_>) -> Progress {
        let unit = context.nexus.unit();
        if let CommandState::Draining { drain, .. } = &mut self.state {
            let abort = || unit.abort_others(context.nexus, context.waker.clone());
            match drain.get_or_insert_with(abort).outcome() {
                None => return Progress::Pending,
                Some(Ok(())) => {}
                Some(Err(_)) => return Progress::failed(),
            }
            let state = std::mem::replace(&mut self.state, CommandState::Ended);
            let (CommandState::Draining { running, work, .. }, Some(executor)) = (state, unit.sanitizer())
            else {
                return Progress::failed();
            };
            let result = JobResult::new(context.waker);
            executor.execute(SanitizeJob::new(running, work, unit, result.clone()));
            self.state = CommandState::Waiting(result);
        }
        let answer = Answer { data_out_bytes: self.parameter_bytes.into(), ..Answer::good() };
        match &self.state {
            CommandState::Waiting(_) if self.is_immediate => Progress::Done(Ok(answer)),
            CommandState::Waiting(result) => match result.get() {
                None => Progress::Pending,
                Some(result) => Progress::Done(result.map(|()| answer)),
            },
            _ => Progress::failed(),
        }
    }
}

impl Operation for SanitizeCommand {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match (event, &self.state) {
            (OperationEvent::Start, CommandState::Receiving { .. }) => {
                Progress::parameters(self.parameter_bytes, context)
            }
            (OperationEvent::DataOut(data), CommandState::Receiving { unrestricted_exit }) => {
                match self.receive(&bytes_of(&data), *unrestricted_exit, context.nexus.unit()) {
                    Ok(state) => self.state = state,
                    Err(failure) => return Progress::Done(Err(failure)),
                }
                self.proceed(context)
            }
            (OperationEvent::Start | OperationEvent::Changed, _) => self.proceed(context),
            _ => Progress::failed(),
        }
    }
}
