//! The sanitize state of a unit, and SANITIZE (SBC-4, sections 4.11 and 5.25).

mod overwrite;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use block_io::{Op, RequestFlags, Tag};
use reservations::PendingChange;
use wire_scsi::{AdditionalSense, Cdb, Sense, SenseKey, opcode};

use crate::access::check_writable;
use crate::nexus::UnitNexus;
use crate::operation::{
    Answer, Operation, OperationContext, OperationEvent, Progress, RangeRequests, result_of,
};
use crate::response::{Failure, check};
use crate::unit::LogicalUnit;
use overwrite::Overwrite;

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

    /// Reserves the unit for an operation. False if there is one, or if it may not follow one that has failed.
    fn begin(&self) -> bool {
        let begins = |state| (state == IDLE || state >= FAILED_UNRESTRICTED).then_some(1);
        self.0.fetch_update(Ordering::SeqCst, Ordering::Relaxed, begins).is_ok()
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
        return Ok(Some(Box::new(Overwrite::new(parameter_bytes, is_immediate, unrestricted_exit))));
    }
    let running = RunningSanitize::begin(unit, unrestricted_exit)?;
    Ok(Some(Box::new(BlockErase { is_immediate, running, state: EraseState::Draining })))
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
    !unit.config().read_only
}

/// An operation that has the unit. If it is dropped before it has finished, it has failed.
#[derive(Debug)]
struct RunningSanitize {
    unit: Arc<LogicalUnit>,
    unrestricted_exit: bool,
    has_finished: bool,
    /// The end of the commands of other nexuses.
    drain: Option<Arc<PendingChange>>,
}

impl RunningSanitize {
    fn begin(unit: &Arc<LogicalUnit>, unrestricted_exit: bool) -> Result<RunningSanitize, Failure> {
        if !unit.sanitize().begin() {
            return Err(check(Sense::new(SenseKey::NotReady, AdditionalSense::SANITIZE_IN_PROGRESS)));
        }
        Ok(RunningSanitize { unit: unit.clone(), unrestricted_exit, has_finished: false, drain: None })
    }

    /// Aborts the commands of other nexuses. `None` once they have ended, otherwise what the operation waits for.
    fn drain(&mut self, context: &OperationContext<'_>) -> Option<Progress> {
        let abort = || self.unit.abort_others(context.nexus, context.waker.clone());
        match self.drain.get_or_insert_with(abort).outcome() {
            None => Some(Progress::Pending),
            Some(Ok(())) => None,
            Some(Err(_)) => Some(Progress::failed()),
        }
    }

    fn set_progress(&self, done: u64, all: u64) {
        let progress = (u128::from(done) * 0xffff / u128::from(all.max(1))) as u32;
        self.unit.sanitize().0.store(1 + progress.min(0xffff), Ordering::Relaxed);
    }
}

impl Drop for RunningSanitize {
    fn drop(&mut self) {
        let state = match (self.has_finished, self.unrestricted_exit) {
            (true, _) => IDLE,
            (false, true) => FAILED_UNRESTRICTED,
            (false, false) => FAILED,
        };
        self.unit.sanitize().0.store(state, Ordering::SeqCst);
    }
}

/// Deallocates all blocks, when the commands of other nexuses have ended, and makes that durable.
///
/// It lives in the command's task: if that is aborted, or its connection ends, the operation has failed, and the unit
/// says so until another one succeeds.
#[derive(Debug)]
struct BlockErase {
    is_immediate: bool,
    running: RunningSanitize,
    state: EraseState,
}

#[derive(Debug)]
enum EraseState {
    Draining,
    Erasing { requests: RangeRequests, done: u64 },
    Flushing,
}

impl BlockErase {
    /// Erases when nothing of other nexuses is in flight.
    fn erase(&mut self, context: &mut OperationContext<'_>) -> Progress {
        if let Some(progress) = self.running.drain(context) {
            return progress;
        }
        let range = (0, context.nexus.unit().blocks());
        let mut requests = RangeRequests::new(Op::Unmap, RequestFlags::NONE, [range].into_iter());
        if requests.submit(context).is_some() {
            return self.finish(Ok(()));
        }
        self.state = EraseState::Erasing { requests, done: 0 };
        if self.is_immediate { Progress::Respond(Answer::good()) } else { Progress::InFlight }
    }

    fn completed(&mut self, completion: &bdev::Completion, context: &mut OperationContext<'_>) -> Progress {
        let EraseState::Erasing { requests, done } = &mut self.state else {
            return self.finish(result_of(completion));
        };
        *done += u64::from(completion.request().blocks);
        self.running.set_progress(*done, context.nexus.unit().blocks());
        match requests.complete(completion, context) {
            None => Progress::InFlight,
            Some(Ok(())) if context.nexus.unit().config().can_flush => {
                self.state = EraseState::Flushing;
                context.submit(bdev::Request::new(Tag(0), Op::Flush, 0, 0));
                Progress::InFlight
            }
            Some(result) => self.finish(result),
        }
    }

    fn finish(&mut self, result: Result<(), Failure>) -> Progress {
        self.running.has_finished = result.is_ok();
        Progress::Done(result.map(|()| Answer::good()))
    }
}

impl Operation for BlockErase {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::Completed(completion) => self.completed(&completion, context),
            OperationEvent::Start => self.erase(context),
            OperationEvent::Changed if matches!(self.state, EraseState::Draining) => self.erase(context),
            OperationEvent::Changed => Progress::InFlight,
            OperationEvent::DataOut(_) | OperationEvent::Memory(_) => Progress::failed(),
        }
    }
}
