//! Reads, writes and compares of long ranges, piece after piece with the same memory: WRITE SAME, VERIFY.

use block_io::{Op, Payload, RequestFlags, Tag};
use dma::Data;

use super::{Answer, Operation, OperationContext, OperationEvent, Progress, bytes_of, result_of};
use crate::limits::repeat_blocks_max;

/// What each piece does, and with which data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// The block of data-out, repeated.
    DataOut,
    /// Zeroes.
    Zeroes,
    /// None: the memory is read into.
    None,
}

/// One operation on all blocks of a range, in pieces.
#[derive(Debug)]
pub(crate) struct Repeat {
    op: Op,
    flags: RequestFlags,
    lba: u64,
    blocks: u64,
    block_bytes: u32,
    /// Pieces are a multiple of this many blocks.
    unit_blocks: u32,
    pattern: Pattern,
    /// The block of data-out.
    block: Vec<u8>,
}

impl Repeat {
    /// `blocks` is at least 1.
    pub(crate) fn new(
        op: Op,
        flags: RequestFlags,
        range: (u64, u64),
        block_bytes: u32,
        pattern: Pattern,
    ) -> Repeat {
        let (lba, blocks) = range;
        Repeat { op, flags, lba, blocks, block_bytes, unit_blocks: 1, pattern, block: Vec::new() }
    }

    /// In pieces of whole units of the device's writes.
    pub(crate) fn in_units(self, unit_blocks: u32) -> Repeat {
        Repeat { unit_blocks, ..self }
    }

    /// With the block that is repeated.
    pub(crate) fn with_block(self, block: Vec<u8>) -> Repeat {
        Repeat { block, ..self }
    }

    /// Blocks of the next piece.
    fn piece(&self) -> u32 {
        self.blocks.min(repeat_blocks_max(self.block_bytes, self.unit_blocks).into()) as u32
    }

    fn submit(&mut self, mut data: Data, context: &mut OperationContext<'_>) -> Progress {
        let blocks = self.piece();
        let bytes = (blocks * self.block_bytes) as usize;
        if data.len() > bytes {
            drop(data.split_off(bytes));
        }
        let mut request = bdev::Request::with_payload(Tag(0), self.op, self.lba, blocks, Payload::Data(data));
        request.flags = self.flags;
        self.lba += u64::from(blocks);
        self.blocks -= u64::from(blocks);
        context.submit(request);
        Progress::InFlight
    }

    fn fill(&self, memory: &mut Data) {
        match self.pattern {
            Pattern::None => {}
            Pattern::Zeroes => memory.clear(),
            Pattern::DataOut => {
                for at in (0..memory.len()).step_by(self.block.len()) {
                    memory.copy_from(at, &self.block);
                }
            }
        }
    }
}

impl Operation for Repeat {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => self.block = bytes_of(&data),
            OperationEvent::Memory(mut memory) => {
                self.fill(&mut memory);
                return self.submit(memory, context);
            }
            OperationEvent::Completed(completion) => {
                let result = result_of(&completion);
                if self.blocks == 0 || result.is_err() {
                    let data_out_bytes = self.block.len() as u64;
                    return Progress::Done(result.map(|()| Answer { data_out_bytes, ..Answer::good() }));
                }
                let Some(memory) = completion.into_data() else { return Progress::failed() };
                return self.submit(memory, context);
            }
            _ if self.pattern == Pattern::DataOut && self.block.is_empty() => {
                return Progress::DataOut(self.block_bytes);
            }
            _ => {}
        }
        Progress::Memory(self.piece() * self.block_bytes)
    }
}
