//! GET LBA STATUS (SBC-4, section 5.8): what of a range is allocated.

use block_io::{Op, Payload, Tag};
use wire_scsi::blocks::{LbaStatus, encode_lba_status};

use super::{Answer, Operation, OperationContext, OperationEvent, Progress, result_of};

/// Searches for data and holes in turn, until there are as many extents as the answer has room for.
#[derive(Debug)]
pub(crate) struct GetLbaStatus {
    position: u64,
    end: u64,
    allocation: u32,
    extents: Vec<LbaStatus>,
    extents_max: usize,
    /// What is searched for: the other kind begins there.
    op: Op,
}

impl GetLbaStatus {
    /// From a block on the unit to its end.
    pub(crate) fn new(lba: u64, end: u64, allocation: u32, extents_max: usize) -> GetLbaStatus {
        GetLbaStatus { position: lba, end, allocation, extents: Vec::new(), extents_max, op: Op::SeekData }
    }

    /// Blocks of one search.
    fn length(&self) -> u32 {
        u32::try_from(self.end - self.position).unwrap_or(u32::MAX)
    }

    fn seek(&self, context: &mut OperationContext<'_>) -> Progress {
        context.submit(bdev::Request::new(Tag(0), self.op, self.position, self.length()));
        Progress::InFlight
    }

    fn found(&mut self, found: Option<u64>, context: &mut OperationContext<'_>) -> Progress {
        // Searching for data, what precedes it is a hole.
        let is_mapped = self.op == Op::SeekHole;
        let limit = self.position + u64::from(self.length());
        let next = found.unwrap_or(limit).clamp(self.position, limit);
        if next > self.position {
            let blocks = (next - self.position) as u32;
            self.extents.push(LbaStatus { lba: self.position, blocks, is_mapped });
        }
        self.position = next;
        if self.position >= self.end || self.extents.len() >= self.extents_max {
            let data = encode_lba_status(&self.extents);
            return Progress::Done(Ok(Answer::data(data, self.allocation)));
        }
        self.op = if is_mapped { Op::SeekData } else { Op::SeekHole };
        self.seek(context)
    }
}

impl Operation for GetLbaStatus {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::Completed(completion) => match result_of(&completion) {
                Ok(()) => match completion.request().payload {
                    Payload::Found(found) => self.found(found, context),
                    _ => Progress::failed(),
                },
                Err(failure) => Progress::Done(Err(failure)),
            },
            _ => self.seek(context),
        }
    }
}
