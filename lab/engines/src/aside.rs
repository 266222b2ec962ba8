//! What goes past an engine's ring, as the kernel's rings do it not at all, or not on every file.

use memory::Buffer;
use ring::{Completion, Op, Request, Status};

use crate::File;
use crate::engine::status_of;

/// Where the first of the requests stands that goes past the ring; their number where none does.
#[inline]
pub(crate) fn position(batch: &[Request<Buffer>]) -> usize {
    let is_aside = |request: &Request<Buffer>| !matches!(request.op, Op::Read | Op::Write | Op::Flush);
    batch.iter().position(is_aside).unwrap_or(batch.len())
}

/// Discards at once; nothing else is asked of a kernel's file.
#[cold]
pub(crate) fn perform(request: Request<Buffer>, files: &[File]) -> Completion<Buffer> {
    let file = &files[request.flow as usize];
    let unit = u64::from(file.block_bytes());
    let status = match request.op {
        Op::Unmap => {
            let result = file.discard(request.lba * unit, u64::from(request.blocks) * unit);
            status_of(Op::Unmap, result.into(), 0)
        }
        _ => Status::INVALID_OPCODE,
    };
    request.complete(status)
}
