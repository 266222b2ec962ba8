//! Task management (RFC 7143, section 11.5).

use std::sync::Arc;

use reservations::PendingChange;
use scsi::UnitFunction;
use slots::Slot;
use target_shell::PduData;
use wire_iscsi::{
    HEADER_BYTES, RejectReason, TaskFunction, TaskManagementRequest, TaskManagementResponse, TaskResponse,
};

use super::{Session, Work};
use crate::failure::IscsiViolation;
use crate::limits::FUNCTIONS_MAX;
use crate::pdu_writer::PduWriter;

/// A function that waits for tasks to end.
pub(super) struct PendingFunction {
    initiator_task_tag: u32,
    changes: Vec<Arc<PendingChange>>,
    /// The session ends with it.
    ends_session: bool,
}

impl Session {
    /// Executes a task management request.
    pub(super) fn manage(
        &mut self,
        header: &[u8; HEADER_BYTES],
        out: &mut PduWriter,
    ) -> Result<(), IscsiViolation> {
        let request = TaskManagementRequest::decode(header)?;
        if self.identity.node.is_none() {
            self.reject(header, RejectReason::ProtocolError, out);
            return Ok(());
        }
        if !self.admit(request.immediate, request.cmd_sn)? {
            return Ok(());
        }
        if !request.immediate {
            self.widen_window();
        }
        let tag = request.initiator_task_tag;
        if self.functions.len() >= FUNCTIONS_MAX {
            self.answer_function(tag, TaskResponse::Rejected, out);
            return Ok(());
        }
        let Ok(function) = TaskFunction::try_from(request.function) else {
            self.answer_function(tag, TaskResponse::NotSupported, out);
            return Ok(());
        };
        let unit_function = match function {
            TaskFunction::AbortTask => {
                self.abort_task(&request, out);
                return Ok(());
            }
            TaskFunction::AbortTaskSet => UnitFunction::AbortTaskSet,
            TaskFunction::ClearTaskSet => UnitFunction::ClearTaskSet,
            TaskFunction::LogicalUnitReset
            | TaskFunction::TargetWarmReset
            | TaskFunction::TargetColdReset => UnitFunction::LogicalUnitReset,
            TaskFunction::TaskReassign => {
                self.answer_function(tag, TaskResponse::ReassignmentNotSupported, out);
                return Ok(());
            }
            TaskFunction::ClearAca => {
                self.answer_function(tag, TaskResponse::NotSupported, out);
                return Ok(());
            }
        };
        let is_for_all = matches!(function, TaskFunction::TargetWarmReset | TaskFunction::TargetColdReset);
        let lun = wire_scsi::luns::decode_lun(request.lun.to_be_bytes());
        let units = self.tasks.units().iter();
        let units = units.filter(|unit| unit.is_present && (is_for_all || Some(unit.info.lun) == lun));
        let manage = |unit: &scsi::SessionUnit<super::UnitInfo>| {
            unit.nexus.unit().manage(unit_function, &unit.nexus, self.tasks.waker().clone())
        };
        let changes: Vec<_> = units.map(manage).collect();
        if changes.is_empty() && !is_for_all {
            self.answer_function(tag, TaskResponse::NoUnit, out);
            return Ok(());
        }
        let ends_session = function == TaskFunction::TargetColdReset;
        self.functions.push(PendingFunction { initiator_task_tag: tag, changes, ends_session });
        self.finish_functions(out);
        Ok(())
    }

    /// Answers the functions whose tasks have ended.
    pub(super) fn finish_functions(&mut self, out: &mut PduWriter) {
        let is_complete =
            |function: &mut PendingFunction| function.changes.iter().all(|change| change.outcome().is_some());
        let complete: Vec<PendingFunction> = self.functions.extract_if(.., is_complete).collect();
        for function in complete {
            self.answer_function(function.initiator_task_tag, TaskResponse::Complete, out);
            if function.ends_session {
                self.handle.end_others();
                self.abandon();
            }
        }
    }

    fn abort_task(&mut self, request: &TaskManagementRequest, out: &mut PduWriter) {
        let referenced = request.referenced_task_tag;
        let is_it = |(_, command): &(Slot, &super::CommandState)| {
            command.initiator_task_tag == referenced && command.lun == request.lun
        };
        let found = self.commands.iter().find(is_it).map(|(slot, _)| slot);
        let command = found.and_then(|slot| Some((slot, self.commands.get_mut(slot)?)));
        let Some((slot, command)) = command.filter(|(_, command)| command.abort_function.is_none()) else {
            let response = match found.is_none() && self.skip_command(request) {
                true => TaskResponse::Complete,
                false => TaskResponse::NoTask,
            };
            return self.answer_function(request.initiator_task_tag, response, out);
        };
        command.abort_function = Some(request.initiator_task_tag);
        self.work.push_back((slot, Work::Abort));
    }

    /// Receives the number of a command that has not arrived, if it is before the function (RFC 7143, section
    /// 11.5.1).
    fn skip_command(&mut self, request: &TaskManagementRequest) -> bool {
        let before = request.cmd_sn.wrapping_sub(request.ref_cmd_sn);
        if before == 0 || before > i32::MAX as u32 {
            return false;
        }
        let skipped = self.shared.numbers.skip(request.ref_cmd_sn);
        if skipped == Some(true) {
            self.handle.notify_all();
        }
        skipped.is_some()
    }

    pub(super) fn answer_function(&mut self, tag: u32, response: TaskResponse, out: &mut PduWriter) {
        let answer = TaskManagementResponse {
            initiator_task_tag: tag,
            response: response.into(),
            stat_sn: self.next_stat_sn(),
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
            ..TaskManagementResponse::default()
        };
        out.push(&answer.to_bytes(), PduData::None);
    }
}
