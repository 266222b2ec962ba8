//! WRITE SAME (SBC-4, sections 5.48 and 5.49).

use block_io::{Op, RequestFlags};

use super::{
    Answer, Operation, OperationContext, OperationEvent, Pattern, Progress, RangeRequests, Repeat, bytes_of,
};

/// Writes one block to all blocks of a range. Zeroes need no data if the device can write them, or
/// deallocate.
#[derive(Debug)]
pub(crate) struct WriteSame {
    pub(crate) lba: u64,
    /// At least 1.
    pub(crate) blocks: u64,
    pub(crate) flags: RequestFlags,
    /// UNMAP: zeroes may be deallocated instead.
    pub(crate) unmaps: bool,
    /// There is no data-out, which is the same as zeroes.
    pub(crate) has_no_data: bool,
    pub(crate) state: WriteSameState,
}

#[derive(Debug)]
pub(crate) enum WriteSameState {
    Receiving,
    Ranges(RangeRequests),
    Repeating(Repeat),
}

impl WriteSame {
    fn begin(&mut self, block: Vec<u8>, context: &mut OperationContext<'_>) -> Progress {
        let config = context.nexus.unit().config();
        let range = (self.lba, self.blocks);
        let is_zero = block.iter().all(|byte| *byte == 0);
        let op = match is_zero {
            true if self.unmaps => Some(Op::Unmap),
            true if config.can_write_zeroes => Some(Op::WriteZeroes),
            _ => None,
        };
        if let Some(op) = op {
            let flags = if op == Op::WriteZeroes { self.flags } else { RequestFlags::NONE };
            let mut requests = RangeRequests::new(op, flags, [range].into_iter());
            // A range that is not empty is submitted.
            let _ = requests.submit(context);
            self.state = WriteSameState::Ranges(requests);
            return Progress::InFlight;
        }
        let block_bytes = config.geometry.block_size;
        let pattern = if is_zero { Pattern::Zeroes } else { Pattern::DataOut };
        let repeat = Repeat::new(Op::Write, self.flags, range, block_bytes, pattern).with_block(block);
        let mut repeat = repeat.in_units(config.geometry.write_unit_blocks);
        let progress = repeat.resume(OperationEvent::Start, context);
        self.state = WriteSameState::Repeating(repeat);
        progress
    }
}

impl Operation for WriteSame {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match (&mut self.state, event) {
            (WriteSameState::Receiving, OperationEvent::DataOut(data)) => {
                self.begin(bytes_of(&data), context)
            }
            (WriteSameState::Receiving, _) if self.has_no_data => self.begin(Vec::new(), context),
            (WriteSameState::Receiving, _) => Progress::DataOut(context.nexus.unit().block_bytes()),
            (WriteSameState::Ranges(requests), OperationEvent::Completed(completion)) => {
                let data_out_bytes =
                    if self.has_no_data { 0 } else { context.nexus.unit().block_bytes().into() };
                match requests.complete(&completion, context) {
                    None => Progress::InFlight,
                    Some(result) => {
                        Progress::Done(result.map(|()| Answer { data_out_bytes, ..Answer::good() }))
                    }
                }
            }
            (WriteSameState::Ranges(_), _) => Progress::failed(),
            (WriteSameState::Repeating(repeat), event) => repeat.resume(event, context),
        }
    }
}
