//! VERIFY with data, and WRITE AND VERIFY (SBC-4, sections 5.36 and 5.46).

use block_io::{Op, Payload, RequestFlags, Tag};
use dma::Data;

use super::{Answer, Operation, OperationContext, OperationEvent, Progress, result_of};

/// Compares the blocks of a range with data-out, maybe after they were written.
#[derive(Debug)]
pub(crate) struct VerifyData {
    pub(crate) lba: u64,
    /// At least 1.
    pub(crate) blocks: u32,
    /// Flags of the write, if there is one that has not been submitted.
    pub(crate) write: Option<RequestFlags>,
    /// Bytes of data-out that are used.
    pub(crate) bytes: u32,
    /// Bytes of all blocks that the CDB names.
    pub(crate) command_bytes: u64,
    pub(crate) is_compared: bool,
}

impl VerifyData {
    fn submit(&mut self, data: Data, context: &mut OperationContext<'_>) -> Progress {
        let (op, flags) = match self.write.take() {
            Some(flags) => (Op::Write, flags),
            None => (Op::Compare, RequestFlags::NONE),
        };
        self.is_compared = op == Op::Compare;
        let mut request = bdev::Request::with_payload(Tag(0), op, self.lba, self.blocks, Payload::Data(data));
        request.flags = flags;
        context.submit(request);
        Progress::InFlight
    }
}

impl Operation for VerifyData {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => self.submit(data, context),
            OperationEvent::Completed(completion) => {
                let result = result_of(&completion);
                if self.is_compared || result.is_err() {
                    let data_out_bytes = self.command_bytes;
                    return Progress::Done(result.map(|()| Answer { data_out_bytes, ..Answer::good() }));
                }
                match completion.into_data() {
                    Some(data) => self.submit(data, context),
                    None => Progress::failed(),
                }
            }
            _ => Progress::DataOut(self.bytes),
        }
    }
}
