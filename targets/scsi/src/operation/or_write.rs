//! ORWRITE (SBC-4, section 5.13), atomic against other writes: a read, and a fused compare and write of what was read,
//! repeated if another write was first.

use block_io::{Op, RequestFlags, Status, Tag};
use dma::Data;

use super::{Answer, FusedPair, Operation, OperationContext, OperationEvent, Progress};
use crate::limits::OR_WRITE_ATTEMPTS_MAX;

/// Sets the bits of data-out in the blocks of a range.
#[derive(Debug)]
pub(crate) struct OrWrite {
    lba: u64,
    blocks: u32,
    flags: RequestFlags,
    bytes: u32,
    bits: Option<Data>,
    /// Memory for the result.
    result: Option<Data>,
    /// What was read, which is compared.
    compared: Option<Data>,
    attempts: u32,
    pair: Option<FusedPair>,
}

impl OrWrite {
    /// `blocks` is at least 1.
    pub(crate) fn new(lba: u64, blocks: u32, flags: RequestFlags, bytes: u32) -> OrWrite {
        OrWrite {
            lba,
            blocks,
            flags,
            bytes,
            bits: None,
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
        let (Some(bits), Some(mut result)) = (&self.bits, self.result.take()) else {
            return Progress::failed();
        };
        let (mut one, mut other) = ([0; 512], [0; 512]);
        for at in (0..read.len()).step_by(one.len()) {
            let length = one.len().min(read.len() - at);
            read.copy_to(at, &mut one[..length]);
            bits.copy_to(at, &mut other[..length]);
            one.iter_mut().zip(other).for_each(|(one, other)| *one |= other);
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
                let data_out_bytes = self.bytes.into();
                Progress::Done(Ok(Answer { data_out_bytes, ..Answer::good() }))
            }
            (Err(status), Some(memory))
                if status.same_code(Status::COMPARE_FAILURE) && self.attempts < OR_WRITE_ATTEMPTS_MAX =>
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

impl Operation for OrWrite {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => {
                self.bits = Some(data);
                Progress::Memory(self.bytes)
            }
            OperationEvent::Memory(memory) if self.result.is_none() => {
                self.result = Some(memory);
                Progress::Memory(self.bytes)
            }
            OperationEvent::Memory(memory) => self.read(memory, context),
            OperationEvent::Completed(completion) => self.complete(completion, context),
            _ => Progress::DataOut(self.bytes),
        }
    }
}
