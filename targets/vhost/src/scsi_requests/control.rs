//! The control queue: task management functions and asynchronous notifications.

use std::sync::Arc;

use dma::Data;
use reservations::PendingChange;
use scsi::{TaskQuery, UnitFunction};
use wire_virtio::scsi::{
    AsyncRequest, AsyncResponse, ControlKind, ScsiResponse, TaskFunction, TaskManagementRequest, UnitAddress,
};

use super::{ScsiRequests, write};
use crate::blk_requests::Started;
use crate::chain;
use crate::device::{FetchedChain, GuestView, UsedChain};
use crate::failure::RingError;
use crate::limits::FUNCTIONS_MAX;
use crate::vring::ChainId;

/// A function that waits for all cores.
pub(super) struct PendingFunction {
    pub(super) queue: u16,
    id: ChainId,
    response: Data,
    awaited: Awaited,
}

enum Awaited {
    /// Tasks to end.
    Change(Arc<PendingChange>),
    /// Whether there is a task.
    Query(TaskQuery),
}

impl Awaited {
    /// The answer of the function, when it is known.
    fn outcome(&self) -> Option<ScsiResponse> {
        match self {
            Awaited::Change(change) => change.outcome().map(|_| ScsiResponse::Ok),
            Awaited::Query(query) => query.outcome().map(|is_there| match is_there {
                true => ScsiResponse::FunctionSucceeded,
                false => ScsiResponse::Ok,
            }),
        }
    }
}

impl ScsiRequests {
    /// Executes a request of the control queue.
    pub(super) fn start_control(&mut self, fetched: &FetchedChain<'_>) -> Result<Started, RingError> {
        let FetchedChain { chain, guest, .. } = *fetched;
        let no_request = |_| RingError::NoStatus;
        let bytes = chain::first_bytes::<{ AsyncRequest::SIZE }>(guest.memory, chain.readable());
        let request = AsyncRequest::decode(&bytes.map_err(no_request)?).map_err(|_| RingError::NoStatus)?;
        match ControlKind::decode(request.kind) {
            Ok(ControlKind::TaskManagement) => {
                let bytes =
                    chain::first_bytes::<{ TaskManagementRequest::SIZE }>(guest.memory, chain.readable());
                let request = TaskManagementRequest::decode(&bytes.map_err(no_request)?);
                self.start_function(&request.map_err(|_| RingError::NoStatus)?, fetched)
            }
            Ok(ControlKind::AsyncQuery | ControlKind::AsyncSubscribe) => {
                // No notification is among those that disks have.
                let unit = UnitAddress::decode(request.lun);
                let is_there = unit.is_ok_and(|address| self.find_unit(address.target).is_some());
                let response = if is_there { ScsiResponse::Ok } else { ScsiResponse::BadTarget };
                let answer = AsyncResponse { actual: 0, response: response.to_wire() };
                let room = chain::data(guest.memory, chain.writable(), 0, AsyncResponse::SIZE as u64);
                let mut room = room.ok().filter(|room| room.len() == AsyncResponse::SIZE);
                write(room.as_mut().ok_or(RingError::NoStatus)?, &answer.to_bytes(), guest);
                Ok(Started::Used(AsyncResponse::SIZE as u32))
            }
            Err(_) => {
                let room = chain::data(guest.memory, chain.writable(), 0, 1);
                write(&mut room.map_err(no_request)?, &[ScsiResponse::Failure.to_wire()], guest);
                Ok(Started::Used(1))
            }
        }
    }

    fn start_function(
        &mut self,
        request: &TaskManagementRequest,
        fetched: &FetchedChain<'_>,
    ) -> Result<Started, RingError> {
        let FetchedChain { queue, id, chain, guest } = *fetched;
        let response = chain::data(guest.memory, chain.writable(), 0, 1);
        let mut response = response.map_err(|_| RingError::NoStatus)?;
        let mut done = |outcome: ScsiResponse| {
            write(&mut response, &[outcome.to_wire()], guest);
            Ok(Started::Used(1))
        };
        let Ok(address) = UnitAddress::decode(request.lun) else { return done(ScsiResponse::BadTarget) };
        let Some(unit) = self.find_unit(address.target) else { return done(ScsiResponse::BadTarget) };
        let Ok(function) = TaskFunction::decode(request.function) else {
            return done(ScsiResponse::FunctionRejected);
        };
        if address.lun != 0 && function != TaskFunction::NexusReset {
            return done(ScsiResponse::IncorrectLun);
        }
        if self.functions.len() >= FUNCTIONS_MAX {
            return done(ScsiResponse::FunctionRejected);
        }
        let Some(awaited) = self.begin_function(function, unit, request.tag) else {
            return done(ScsiResponse::FunctionRejected);
        };
        self.functions.push(PendingFunction { queue, id, response, awaited });
        self.has_event = true;
        Ok(Started::InFlight(0))
    }

    /// Passes a function to all cores; `None` if there is nothing that it could do.
    fn begin_function(&self, function: TaskFunction, unit: usize, tag: u64) -> Option<Awaited> {
        let nexus = &self.tasks.units()[unit].nexus;
        let waker = self.tasks.waker().clone();
        let function = match function {
            TaskFunction::QueryTask => {
                return Some(Awaited::Query(nexus.unit().query(nexus, Some(tag), waker)));
            }
            TaskFunction::QueryTaskSet => {
                return Some(Awaited::Query(nexus.unit().query(nexus, None, waker)));
            }
            TaskFunction::AbortTask => UnitFunction::AbortTask(tag),
            TaskFunction::AbortTaskSet => UnitFunction::AbortTaskSet,
            TaskFunction::ClearTaskSet => UnitFunction::ClearTaskSet,
            TaskFunction::LogicalUnitReset => UnitFunction::LogicalUnitReset,
            TaskFunction::NexusReset => UnitFunction::NexusReset,
            // Units never establish an ACA.
            TaskFunction::ClearAca => return None,
        };
        Some(Awaited::Change(nexus.unit().manage(function, nexus, waker)))
    }

    /// Answers the functions that all cores have executed.
    pub(super) fn finish_functions(&mut self, guest: GuestView<'_>) {
        let used = &mut self.used;
        self.functions.retain_mut(|function| {
            let Some(outcome) = function.awaited.outcome() else { return true };
            write(&mut function.response, &[outcome.to_wire()], guest);
            used.push(UsedChain { queue: function.queue, id: function.id, written: 1 });
            false
        });
    }
}
