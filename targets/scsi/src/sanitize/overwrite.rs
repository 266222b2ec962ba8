//! SANITIZE OVERWRITE (SBC-4, section 5.25.2.2): a pattern on every block, once or several times.

use block_io::{Op, Tag};
use dma::Data;
use wire_scsi::Sense;
use wire_scsi::blocks::OverwriteParameters;

use super::RunningSanitize;
use crate::limits::REPEAT_BYTES_MAX;
use crate::operation::{Answer, Operation, OperationContext, OperationEvent, Progress, bytes_of, result_of};
use crate::response::{Failure, check};

/// Writes all blocks, pass after pass, when the commands of other nexuses have ended, and makes that durable.
///
/// The unit is reserved for it once it has its parameters and memory: what fails before changes nothing. Writes follow
/// each other with the same memory.
#[derive(Debug)]
pub(super) struct Overwrite {
    parameter_bytes: u32,
    is_immediate: bool,
    unrestricted_exit: bool,
    /// A block of the pattern.
    block: Vec<u8>,
    /// Each pass writes the inverse of the one before.
    inverts: bool,
    passes: u8,
    passes_done: u8,
    /// First block that this pass has not written.
    next_lba: u64,
    state: OverwriteState,
}

#[derive(Debug)]
enum OverwriteState {
    Receiving,
    Draining(RunningSanitize, Data),
    /// With the memory that the write in flight leaves out, at the end of a pass.
    Writing(RunningSanitize, Option<Data>),
    Flushing(RunningSanitize),
}

impl Overwrite {
    pub(super) fn new(parameter_bytes: u32, is_immediate: bool, unrestricted_exit: bool) -> Overwrite {
        Overwrite {
            parameter_bytes,
            is_immediate,
            unrestricted_exit,
            block: Vec::new(),
            inverts: false,
            passes: 0,
            passes_done: 0,
            next_lba: 0,
            state: OverwriteState::Receiving,
        }
    }

    fn decode(&mut self, bytes: &[u8], block_bytes: u32) -> Result<(), Failure> {
        let parameters = OverwriteParameters::decode(bytes);
        let parameters = parameters.map_err(|byte| check(Sense::invalid_parameter(byte, None)))?;
        (self.inverts, self.passes) = (parameters.inverts, parameters.passes);
        self.block = parameters.pattern.iter().copied().cycle().take(block_bytes as usize).collect();
        Ok(())
    }

    /// Begins when nothing of other nexuses is in flight.
    fn begin(
        &mut self,
        mut running: RunningSanitize,
        mut memory: Data,
        context: &mut OperationContext<'_>,
    ) -> Progress {
        if let Some(progress) = running.drain(context) {
            self.state = OverwriteState::Draining(running, memory);
            return progress;
        }
        self.fill(&mut memory);
        match self.write(running, memory, context) {
            Progress::InFlight if self.is_immediate => Progress::Respond(self.answer()),
            progress => progress,
        }
    }

    fn answer(&self) -> Answer {
        Answer { data_out_bytes: self.parameter_bytes.into(), ..Answer::good() }
    }

    fn fill(&self, memory: &mut Data) {
        for at in (0..memory.len()).step_by(self.block.len()) {
            memory.copy_from(at, &self.block);
        }
    }

    /// Writes the next blocks, of this pass or of the next; after the last, what is cached becomes durable.
    fn write(
        &mut self,
        mut running: RunningSanitize,
        mut memory: Data,
        context: &mut OperationContext<'_>,
    ) -> Progress {
        let unit = context.nexus.unit();
        // It may shrink meanwhile.
        let blocks = unit.blocks();
        let done = u64::from(self.passes_done) * blocks + self.next_lba.min(blocks);
        running.set_progress(done, u64::from(self.passes) * blocks);
        while self.next_lba >= blocks {
            (self.passes_done, self.next_lba) = (self.passes_done + 1, 0);
            if self.passes_done >= self.passes {
                if !unit.config().can_flush {
                    running.has_finished = true;
                    return Progress::Done(Ok(self.answer()));
                }
                self.state = OverwriteState::Flushing(running);
                context.submit(bdev::Request::new(Tag(0), Op::Flush, 0, 0));
                return Progress::InFlight;
            }
            if self.inverts {
                self.block.iter_mut().for_each(|byte| *byte = !*byte);
                self.fill(&mut memory);
            }
        }
        let piece = (blocks - self.next_lba).min((memory.len() / self.block.len()) as u64);
        let bytes = piece as usize * self.block.len();
        let unused = (bytes < memory.len()).then(|| memory.split_off(bytes));
        context.submit(bdev::Request::write(Tag(0), self.next_lba, piece as u32, memory));
        self.next_lba += piece;
        self.state = OverwriteState::Writing(running, unused);
        Progress::InFlight
    }

    fn completed(&mut self, completion: bdev::Completion, context: &mut OperationContext<'_>) -> Progress {
        let result = result_of(&completion);
        match std::mem::replace(&mut self.state, OverwriteState::Receiving) {
            OverwriteState::Writing(running, unused) if result.is_ok() => {
                let Some(memory) = completion.into_data() else { return Progress::failed() };
                self.write(running, unused.into_iter().fold(memory, Data::join), context)
            }
            OverwriteState::Flushing(mut running) if result.is_ok() => {
                running.has_finished = true;
                Progress::Done(Ok(self.answer()))
            }
            // What was begun has failed, with the drop of the state.
            _ => Progress::Done(result.map(|()| self.answer())),
        }
    }
}

impl Operation for Overwrite {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        let unit = context.nexus.unit();
        let block_bytes = unit.block_bytes();
        match event {
            OperationEvent::Start => Progress::parameters(self.parameter_bytes, context),
            OperationEvent::DataOut(data) => match self.decode(&bytes_of(&data), block_bytes) {
                Ok(()) => Progress::Memory((REPEAT_BYTES_MAX / block_bytes).max(1) * block_bytes),
                Err(failure) => Progress::Done(Err(failure)),
            },
            OperationEvent::Memory(memory) => match RunningSanitize::begin(unit, self.unrestricted_exit) {
                Ok(running) => self.begin(running, memory, context),
                Err(failure) => Progress::Done(Err(failure)),
            },
            OperationEvent::Completed(completion) => self.completed(completion, context),
            OperationEvent::Changed => match std::mem::replace(&mut self.state, OverwriteState::Receiving) {
                OverwriteState::Draining(running, memory) => self.begin(running, memory, context),
                state => {
                    self.state = state;
                    Progress::InFlight
                }
            },
        }
    }
}
