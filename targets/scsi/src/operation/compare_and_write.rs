//! COMPARE AND WRITE (SBC-4, section 5.4).

use block_io::{RequestFlags, Status};
use wire_scsi::{Sense, SenseKey};

use crate::response::Failure;

use super::{Answer, FusedPair, Operation, OperationContext, OperationEvent, Progress};

/// Compares blocks, and writes others if they are equal.
#[derive(Debug)]
pub(crate) struct CompareAndWrite {
    lba: u64,
    blocks: u32,
    flags: RequestFlags,
    /// Bytes of the data to compare, and of the data to write.
    half_bytes: u32,
    pair: Option<FusedPair>,
}

impl CompareAndWrite {
    /// `blocks` is at least 1.
    pub(crate) fn new(lba: u64, blocks: u32, flags: RequestFlags, half_bytes: u32) -> CompareAndWrite {
        CompareAndWrite { lba, blocks, flags, half_bytes, pair: None }
    }
}

/// "The offset from the start of the Data-Out Buffer to the first byte of data that was not equal shall be reported in the
/// INFORMATION field" (SBC-4, section 5.4): the data to compare is first there.
fn failure_of(status: Status, mismatch: Option<u64>) -> Failure {
    let (status, sense) = crate::sense::failure_of(status);
    let with_offset = |sense: Sense| match sense.key {
        SenseKey::Miscompare => Sense { information: mismatch, ..sense },
        _ => sense,
    };
    (status, sense.map(with_offset))
}

impl Operation for CompareAndWrite {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(mut expected) => {
                let data = expected.split_off(self.half_bytes as usize);
                let pair = FusedPair::submit(self.lba, self.blocks, (expected, data), self.flags, context);
                self.pair = Some(pair);
                Progress::InFlight
            }
            OperationEvent::Completed(completion) => {
                let Some(pair) = &mut self.pair else { return Progress::failed() };
                let Some(result) = pair.complete(&completion) else { return Progress::InFlight };
                let data_out_bytes = u64::from(self.half_bytes) * 2;
                let answer = result.map(|()| Answer { data_out_bytes, ..Answer::good() });
                let mismatch = pair.mismatch();
                Progress::Done(answer.map_err(|status| failure_of(status, mismatch)))
            }
            _ => Progress::DataOut(self.half_bytes * 2),
        }
    }
}
