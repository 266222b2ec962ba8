//! COMPARE AND WRITE (SBC-4, section 5.4): a fused compare and write, which the block layer executes atomically.

use block_io::{Op, RequestFlags, Status, Tag};

use super::{Answer, Operation, OperationContext, OperationEvent, Progress};
use crate::response::Failure;

/// Compares blocks, and writes others if they are equal.
#[derive(Debug)]
pub(crate) struct CompareAndWrite {
    pub(crate) lba: u64,
    /// At least 1.
    pub(crate) blocks: u32,
    pub(crate) flags: RequestFlags,
    /// Bytes of the data to compare, and of the data to write.
    pub(crate) half_bytes: u32,
    remaining: u8,
    failure: Option<Failure>,
}

impl CompareAndWrite {
    pub(crate) fn new(lba: u64, blocks: u32, flags: RequestFlags, half_bytes: u32) -> CompareAndWrite {
        CompareAndWrite { lba, blocks, flags, half_bytes, remaining: 2, failure: None }
    }
}

impl Operation for CompareAndWrite {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(mut expected) => {
                let data = expected.split_off(self.half_bytes as usize);
                let payload = block_io::Payload::Data(expected);
                let mut compare =
                    bdev::Request::with_payload(Tag(0), Op::Compare, self.lba, self.blocks, payload);
                compare.flags = RequestFlags::FUSED;
                let mut write = bdev::Request::write(Tag(0), self.lba, self.blocks, data);
                write.flags = self.flags;
                context.submit(compare);
                context.submit(write);
                Progress::InFlight
            }
            OperationEvent::Completed(completion) => {
                self.remaining -= 1;
                let status = completion.status();
                // The write fails for the compare's reason.
                if !status.is_success() && !status.same_code(Status::FUSED_FAILED) {
                    self.failure = Some(crate::sense::failure_of(status));
                } else if !status.is_success() {
                    self.failure.get_or_insert_with(|| crate::sense::failure_of(status));
                }
                if self.remaining > 0 {
                    return Progress::InFlight;
                }
                let data_out_bytes = u64::from(self.half_bytes) * 2;
                let answer = Answer { data_out_bytes, ..Answer::good() };
                Progress::Done(self.failure.take().map_or(Ok(answer), Err))
            }
            _ => Progress::DataOut(self.half_bytes * 2),
        }
    }
}
