//! The control queue: task management functions and asynchronous notifications.

use std::sync::Arc;

use dma::Data;
use reservations::PendingChange;
use scsi::UnitFunction;
use wire_scsi::AdditionalSense;
use wire_virtio::scsi::{
    AsyncRequest, AsyncResponse, ControlKind, ScsiResponse, TaskFunction, TaskManagementRequest, UnitAddress,
};

use super::{ScsiRequests, Work, write};
use crate::blk_requests::Started;
use crate::chain;
use crate::device::{FetchedChain, GuestView, UsedChain};
use crate::failure::RingError;
use crate::limits::FUNCTIONS_MAX;
use crate::vring::ChainId;

/// A function that waits for tasks to end.
pub(super) struct PendingFunction {
    pub(super) queue: u16,
    id: ChainId,
    response: Data,
    change: Arc<PendingChange>,
}

/// A function that waits for one command to end.
pub(super) struct AbortFunction {
    queue: u16,
    id: ChainId,
    response: Data,
}

/// I_T NEXUS LOSS OCCURRED.
const NEXUS_LOSS: AdditionalSense = AdditionalSense { code: 0x29, qualifier: 0x07 };

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
        let function = match function {
            TaskFunction::AbortTask => {
                let found = self.commands.iter_mut();
                let found = found
                    .filter(|(_, command)| command.running.unit() == unit && command.tag == request.tag)
                    .find(|(_, command)| command.id.is_some() && command.abort_function.is_none());
                let Some((slot, command)) = found else { return done(ScsiResponse::Ok) };
                command.abort_function = Some(AbortFunction { queue, id, response });
                self.work.push_back((slot, Work::Abort));
                return Ok(Started::InFlight(0));
            }
            TaskFunction::QueryTask | TaskFunction::QueryTaskSet => {
                let is_any = function == TaskFunction::QueryTaskSet;
                let is_there = self.commands.iter().any(|(_, command)| {
                    command.running.unit() == unit
                        && command.id.is_some()
                        && (is_any || command.tag == request.tag)
                });
                return done(if is_there { ScsiResponse::FunctionSucceeded } else { ScsiResponse::Ok });
            }
            TaskFunction::ClearAca => return done(ScsiResponse::FunctionRejected),
            TaskFunction::AbortTaskSet | TaskFunction::NexusReset => UnitFunction::AbortTaskSet,
            TaskFunction::ClearTaskSet => UnitFunction::ClearTaskSet,
            TaskFunction::LogicalUnitReset => UnitFunction::LogicalUnitReset,
        };
        if self.functions.len() >= FUNCTIONS_MAX {
            return done(ScsiResponse::FunctionRejected);
        }
        let nexus = self.tasks.units()[unit].nexus.clone();
        if request.function != TaskFunction::AbortTaskSet.to_wire()
            && request.function != TaskFunction::ClearTaskSet.to_wire()
        {
            let concerned = self.commands.iter_mut().filter(|(_, command)| command.running.unit() == unit);
            concerned.for_each(|(_, command)| command.abort_response = ScsiResponse::Reset);
        }
        let change = nexus.unit().manage(function, &nexus, self.tasks.waker().clone());
        if request.function == TaskFunction::NexusReset.to_wire() {
            nexus.set_attention(NEXUS_LOSS);
        }
        self.functions.push(PendingFunction { queue, id, response, change });
        self.has_event = true;
        Ok(Started::InFlight(0))
    }

    /// Answers the functions whose tasks have ended.
    pub(super) fn finish_functions(&mut self, guest: GuestView<'_>) {
        let complete = self.functions.extract_if(.., |function| function.change.outcome().is_some());
        for PendingFunction { queue, id, mut response, .. } in complete {
            write(&mut response, &[ScsiResponse::Ok.to_wire()], guest);
            self.used.push(UsedChain { queue, id, written: 1 });
        }
    }

    /// Answers a function whose command has ended.
    pub(super) fn finish_abort(&mut self, function: AbortFunction, guest: GuestView<'_>) {
        let AbortFunction { queue, id, mut response } = function;
        write(&mut response, &[ScsiResponse::Ok.to_wire()], guest);
        self.used.push(UsedChain { queue, id, written: 1 });
    }
}
