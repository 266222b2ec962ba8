//! UNMAP (SBC-4, section 5.35).

use block_io::{Op, RequestFlags};
use wire_scsi::blocks::UnmapList;
use wire_scsi::{AdditionalSense, Sense};

use super::{Answer, Operation, OperationContext, OperationEvent, Progress, RangeRequests, bytes_of};
use crate::limits::UNMAP_DESCRIPTORS_MAX;
use crate::response::{Failure, check};
use crate::transfer::check_range;
use crate::unit::LogicalUnit;

/// Deallocates the ranges of a parameter list.
#[derive(Debug)]
pub(crate) struct Unmap {
    parameter_bytes: u32,
    requests: Option<RangeRequests>,
}

impl Unmap {
    /// `parameter_bytes` is more than 0.
    pub(crate) fn new(parameter_bytes: u32) -> Unmap {
        Unmap { parameter_bytes, requests: None }
    }

    fn done(&self, result: Option<Result<(), Failure>>) -> Progress {
        let data_out_bytes = self.parameter_bytes.into();
        match result {
            None => Progress::InFlight,
            Some(result) => Progress::Done(result.map(|()| Answer { data_out_bytes, ..Answer::good() })),
        }
    }
}

/// The ranges of a list, all of which are on the unit.
fn ranges(unit: &LogicalUnit, bytes: &[u8]) -> Result<Vec<(u64, u64)>, Failure> {
    let list = UnmapList::decode(bytes);
    let list = list.map_err(|_| check(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR)))?;
    if list.len() > UNMAP_DESCRIPTORS_MAX {
        return Err(check(Sense::invalid_parameter(2, None)));
    }
    list.iter()
        .map(|(lba, blocks)| check_range(unit, lba, blocks.into()).map(|()| (lba, blocks.into())))
        .collect()
}

impl Operation for Unmap {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => match ranges(context.nexus.unit(), &bytes_of(&data)) {
                Ok(ranges) => {
                    let ranges = ranges.into_iter();
                    let mut requests = RangeRequests::new(Op::Unmap, RequestFlags::NONE, ranges);
                    let result = requests.submit(context);
                    self.requests = Some(requests);
                    self.done(result)
                }
                Err(failure) => Progress::Done(Err(failure)),
            },
            OperationEvent::Completed(completion) => {
                let result =
                    self.requests.as_mut().and_then(|requests| requests.complete(&completion, context));
                self.done(result)
            }
            _ => Progress::parameters(self.parameter_bytes, context),
        }
    }
}
