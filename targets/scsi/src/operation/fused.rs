//! A fused compare and write, which the block layer executes atomically: for COMPARE AND WRITE and ORWRITE.

use block_io::{Op, Payload, RequestFlags, Status, Tag};
use dma::Data;

use super::OperationContext;

/// The two requests of a pair in flight, and why it fails.
#[derive(Debug)]
pub(crate) struct FusedPair {
    remaining: u8,
    failure: Option<Status>,
    /// The first byte of the blocks that is not as expected, if that is why.
    mismatch: Option<u64>,
}

impl FusedPair {
    /// Submits a pair: the blocks from `lba` become `data`, if they are `expected`. `flags` are the write's.
    pub(crate) fn submit(
        lba: u64,
        blocks: u32,
        (expected, data): (Data, Data),
        flags: RequestFlags,
        context: &mut OperationContext<'_>,
    ) -> FusedPair {
        let mut compare =
            bdev::Request::with_payload(Tag(0), Op::Compare, lba, blocks, Payload::Data(expected));
        compare.flags = RequestFlags::FUSED;
        let mut write = bdev::Request::write(Tag(0), lba, blocks, data);
        write.flags = flags;
        context.submit(compare);
        context.submit(write);
        FusedPair { remaining: 2, failure: None, mismatch: None }
    }

    /// After a Compare Failure: the first byte that is not as expected, counted from the first block.
    pub(crate) fn mismatch(&self) -> Option<u64> {
        self.mismatch
    }

    /// One of the two has completed. Returns the result once both have.
    pub(crate) fn complete(&mut self, completion: &bdev::Completion) -> Option<Result<(), Status>> {
        let status = completion.status();
        if let Payload::Mismatch(mismatch) = &completion.request().payload {
            self.mismatch = Some(mismatch.offset);
        }
        self.remaining = self.remaining.saturating_sub(1);
        // The one that fails by itself says why; the other only that its partner did.
        if !status.is_success() && !status.same_code(Status::FUSED_FAILED) {
            self.failure = Some(status);
        } else if !status.is_success() {
            self.failure.get_or_insert(status);
        }
        (self.remaining == 0).then(|| self.failure.map_or(Ok(()), Err))
    }
}
