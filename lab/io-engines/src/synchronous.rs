//! Operations that are performed synchronously, as the kernel's asynchronous interfaces lack them or do
//! not support them for every file.

use block_io::{Completion, Op, Request, Status};
use dma::Data;

use crate::EngineFile;
use crate::engine::status_of;

/// Index of the first request that must be performed synchronously; `batch.len()` if there is none.
#[inline]
pub(crate) fn first_synchronous(batch: &[Request<Data>]) -> usize {
    let is_synchronous = |request: &Request<Data>| !matches!(request.op, Op::Read | Op::Write | Op::Flush);
    batch.iter().position(is_synchronous).unwrap_or(batch.len())
}

/// Performs a discard synchronously; rejects other operations as invalid opcodes.
#[cold]
pub(crate) fn perform_synchronous(request: Request<Data>, files: &[EngineFile]) -> Completion<Data> {
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
