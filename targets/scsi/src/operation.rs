//! Commands other than READ and WRITE that need data or the device: each is an [`Operation`].

mod compare_and_write;
mod flush;
mod fused;
mod lba_status;
mod merge;
mod ranges;
mod repeat;
mod set_port_groups;
mod unmap;
mod verify;
mod write_same;

use std::fmt;
use std::sync::Arc;

use block_io::{Status, Tag};
use dma::Data;
use reservations::ChangeWaker;
use wire_scsi::{AdditionalSense, ScsiStatus, Sense};

use crate::limits::PARAMETER_BYTES_MAX;
use crate::nexus::UnitNexus;
use crate::response::{Failure, check};
use crate::task::SessionPeers;

pub(crate) use compare_and_write::CompareAndWrite;
pub(crate) use flush::Flush;
pub(crate) use fused::FusedPair;
pub(crate) use lba_status::GetLbaStatus;
pub(crate) use merge::{Merge, MergeWrite};
pub(crate) use ranges::RangeRequests;
pub(crate) use repeat::{Pattern, Repeat};
pub(crate) use set_port_groups::SetPortGroups;
pub(crate) use unmap::Unmap;
pub(crate) use verify::VerifyData;
pub(crate) use write_same::{WriteSame, WriteSameState};

/// The state of a command.
pub(crate) trait Operation: fmt::Debug {
    /// Handles what was asked for. An operation ends only when none of its requests is in flight.
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress;
}

/// What happens to an operation.
#[derive(Debug)]
pub(crate) enum OperationEvent {
    /// Once, at first.
    Start,
    DataOut(Data),
    Memory(Data),
    Completed(bdev::Completion),
    Changed,
}

/// What an operation needs next; see [`Step`](crate::Step).
#[derive(Debug)]
pub(crate) enum Progress {
    DataOut(u32),
    Memory(u32),
    InFlight,
    Pending,
    Respond(Answer),
    Done(Result<Answer, Failure>),
}

impl Progress {
    /// Asks for a parameter list of so many bytes, at least one. The initiator must have all of it.
    pub(crate) fn parameters(bytes: u32, context: &OperationContext<'_>) -> Progress {
        if bytes > PARAMETER_BYTES_MAX || bytes > context.data_out_bytes {
            let additional = AdditionalSense::PARAMETER_LIST_LENGTH_ERROR;
            return Progress::Done(Err(check(Sense::illegal(additional))));
        }
        Progress::DataOut(bytes)
    }

    /// An internal error.
    pub(crate) fn failed() -> Progress {
        Progress::Done(Err(crate::sense::failure_of(Status::INTERNAL_ERROR)))
    }
}

/// The answer to a command that succeeds.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: ScsiStatus,
    /// Parameter data, cut at the allocation length.
    pub(crate) data_in: Vec<u8>,
    /// Length of the command's data-out.
    pub(crate) data_out_bytes: u64,
}

impl Answer {
    /// Success without data.
    pub(crate) fn good() -> Answer {
        Answer { status: ScsiStatus::Good, data_in: Vec::new(), data_out_bytes: 0 }
    }

    /// Success with parameter data, of which the CDB allows so many bytes.
    pub(crate) fn data(mut data: Vec<u8>, allocation: u32) -> Answer {
        data.truncate(allocation as usize);
        Answer { data_in: data, ..Answer::good() }
    }
}

/// What a task lends to its operation.
pub(crate) struct OperationContext<'a> {
    pub(crate) nexus: &'a UnitNexus,
    pub(crate) waker: &'a Arc<dyn ChangeWaker>,
    pub(crate) requests: &'a mut Vec<bdev::Request>,
    pub(crate) peers: &'a mut dyn SessionPeers,
    /// Requests submitted to peers in this call.
    pub(crate) peer_requests: u32,
    pub(crate) tag: Tag,
    pub(crate) flow: u16,
    pub(crate) data_out_bytes: u32,
}

impl OperationContext<'_> {
    /// Appends a request, with the command's tag and flow.
    pub(crate) fn submit(&mut self, mut request: bdev::Request) {
        (request.tag, request.flow) = (self.tag, self.flow);
        self.requests.push(request);
    }

    /// Submits a request to another unit of the session, with the command's tag and flow.
    ///
    /// # Errors
    /// The unit is not in the session any more.
    pub(crate) fn submit_to_peer(
        &mut self,
        nexus: &Arc<UnitNexus>,
        mut request: bdev::Request,
    ) -> Result<(), bdev::Request> {
        (request.tag, request.flow) = (self.tag, self.flow);
        self.peers.submit(nexus, request)?;
        self.peer_requests += 1;
        Ok(())
    }
}

/// A copy of a parameter list, which the initiator may change meanwhile.
pub(crate) fn bytes_of(data: &Data) -> Vec<u8> {
    let mut bytes = vec![0; data.len()];
    data.copy_to(0, &mut bytes);
    bytes
}

/// The result of a device request.
pub(crate) fn result_of(completion: &bdev::Completion) -> Result<(), Failure> {
    let status = completion.status();
    if status.is_success() { Ok(()) } else { Err(crate::sense::failure_of(status)) }
}
