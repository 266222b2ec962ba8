//! SYNCHRONIZE CACHE (SBC-4, sections 5.29 and 5.30).

use block_io::{Op, Tag};

use super::{Answer, Operation, OperationContext, OperationEvent, Progress, result_of};

/// Makes all completed writes durable, whatever range the command names.
#[derive(Debug)]
pub(crate) struct Flush {
    /// The answer does not wait for the device.
    pub(crate) is_immediate: bool,
}

impl Operation for Flush {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::Completed(completion) => {
                Progress::Done(result_of(&completion).map(|()| Answer::good()))
            }
            _ => {
                context.submit(bdev::Request::new(Tag(0), Op::Flush, 0, 0));
                if self.is_immediate { Progress::Respond(Answer::good()) } else { Progress::InFlight }
            }
        }
    }
}
