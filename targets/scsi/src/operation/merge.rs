//! Writes that depend on what the blocks contain, atomic against other writes: a read, and a fused compare and write of
//! what was read, repeated if another write was first.

use block_io::{Op, RequestFlags, Status, Tag};
use dma::Data;

use super::{Answer, FusedPair, Operation, OperationContext, OperationEvent, Progress};
use crate::limits::MERGE_ATTEMPTS_MAX;

/// What data-out does to the blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Merge {
    /// ORWRITE (SBC-4, section 5.13): sets its bits, in all blocks.
    Or,
    /// A write whose last block has only a part in data-out: replaces so many bytes, and the rest stays. `command_bytes`
    /// are those of all blocks that the CDB names.
    Overlay { bytes: u32, command_bytes: u64 },
}

/// Merges data-out into the blocks of a range.
#[derive(Debug)]
pub(crate) struct MergeWrite {
    lba: u64,
    blocks: u32,
    flags: RequestFlags,
    /// Of the blocks.
    bytes: u32,
    merge: Merge,
    data: Option<Data>,
    /// Memory for the result.
    result: Option<Data>,
    /// What was read, which is compared.
    compared: Option<Data>,
    attempts: u32,
    pair: Option<FusedPair>,
}

impl MergeWrite {
    /// `blocks` is at least 1, and `bytes` its size.
    pub(crate) fn new(lba: u64, blocks: u32, flags: RequestFlags, bytes: u32, merge: Merge) -> MergeWrite {
        MergeWrite {
            lba,
            blocks,
            flags,
            bytes,
            merge,
            data: None,
            result: None,
            compared: None,
            attempts: 0,
            pair: None,
        }
    }

    fn read(&mut self, memory: Data, context: &mut OperationContext<'_>) -> Progress {
        self.attempts += 1;
        context.submit(bdev::Request::read(Tag(0), self.lba, self.blocks, memory));
        Progress::InFlight
    }

    /// Writes the result, if the blocks are still those that were read.
    fn write(&mut self, read: Data, context: &mut OperationContext<'_>) -> Progress {
        let (Some(data), Some(mut result)) = (&self.data, self.result.take()) else {
            return Progress::failed();
        };
        let (mut one, mut other) = ([0; 512], [0; 512]);
        for at in (0..read.len()).step_by(one.len()) {
            let length = one.len().min(read.len() - at);
            read.copy_to(at, &mut one[..length]);
            let of_data = length.min(data.len().saturating_sub(at));
            data.copy_to(at, &mut other[..of_data]);
            let pairs = one.iter_mut().zip(&other[..of_data]);
            match self.merge {
                Merge::Or => pairs.for_each(|(one, other)| *one |= other),
                Merge::Overlay { .. } => pairs.for_each(|(one, other)| *one = *other),
            }
            result.copy_from(at, &one[..length]);
        }
        self.pair = Some(FusedPair::submit(self.lba, self.blocks, (read, result), self.flags, context));
        Progress::InFlight
    }

    fn complete(&mut self, completion: bdev::Completion, context: &mut OperationContext<'_>) -> Progress {
        let (status, op) = (completion.status(), completion.request().op);
        let result = match op {
            Op::Read => None,
            _ => self.pair.as_mut().map(|pair| pair.complete(&completion)),
        };
        let Some(data) = completion.into_data() else { return Progress::failed() };
        if op == Op::Read {
            if status.is_success() {
                return self.write(data, context);
            }
            return Progress::Done(Err(crate::sense::failure_of(status)));
        }
        if op == Op::Write {
            self.result = Some(data)
        } else {
            self.compared = Some(data)
        }
        let Some(result) = result else { return Progress::failed() };
        let Some(result) = result else { return Progress::InFlight };
        match (result, self.compared.take()) {
            (Ok(()), _) => {
                let data_out_bytes = match self.merge {
                    Merge::Or => self.bytes.into(),
                    Merge::Overlay { command_bytes, .. } => command_bytes,
                };
                Progress::Done(Ok(Answer { data_out_bytes, ..Answer::good() }))
            }
            (Err(status), Some(memory))
                if status.same_code(Status::COMPARE_FAILURE) && self.attempts < MERGE_ATTEMPTS_MAX =>
            {
                self.read(memory, context)
            }
            // Others write all the time.
            (Err(status), _) if status.same_code(Status::COMPARE_FAILURE) => {
                Progress::Done(Err((wire_scsi::ScsiStatus::Busy, None)))
            }
            (Err(status), _) => Progress::Done(Err(crate::sense::failure_of(status))),
        }
    }
}

impl Operation for MergeWrite {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => {
                self.data = Some(data);
                Progress::Memory(self.bytes)
            }
            OperationEvent::Memory(memory) if self.result.is_none() => {
                self.result = Some(memory);
                Progress::Memory(self.bytes)
            }
            OperationEvent::Memory(memory) => self.read(memory, context),
            OperationEvent::Completed(completion) => self.complete(completion, context),
            _ => match self.merge {
                Merge::Or => Progress::DataOut(self.bytes),
                Merge::Overlay { bytes, .. } => Progress::DataOut(bytes),
            },
        }
    }
}
