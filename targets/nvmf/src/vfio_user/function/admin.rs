//! Admin commands.

use block_io::Status;
use nvme_controller::{ControllerAction, ControllerEvent, data_from_host, queues};
use wire_nvme::admin::GetLogPage;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::sqe::{Fuse, Psdt};
use wire_nvme::{Cqe, Sqe};

use super::super::data;
use super::super::protocol::VfioUserContext;
use super::super::queue::{CompletionQueue, QueueMemory, SubmissionQueueState, SubmissionRing, cqe_high};
use super::VfioUserFunction;

impl VfioUserFunction {
    /// Executes a command of the admin queue.
    pub(super) fn admin_command(&mut self, sqe: &Sqe, context: &mut VfioUserContext<'_>) {
        let result = match AdminOpcode::from_wire(sqe.opcode) {
            // Queues belong to the transport, not to the controller.
            Some(
                AdminOpcode::CreateIoCq
                | AdminOpcode::CreateIoSq
                | AdminOpcode::DeleteIoCq
                | AdminOpcode::DeleteIoSq,
            ) if sqe.fuse() != Fuse::Normal || sqe.psdt() != Psdt::Prp => {
                Err(Status::INVALID_FIELD.do_not_retry())
            }
            Some(AdminOpcode::CreateIoCq) => self.create_io_cq(sqe, context),
            Some(AdminOpcode::CreateIoSq) => self.create_io_sq(sqe, context),
            Some(AdminOpcode::DeleteIoCq) => self.delete_io_cq(sqe),
            Some(AdminOpcode::DeleteIoSq) => match self.delete_io_sq(sqe) {
                Ok(true) => return,
                Ok(false) => Ok(()),
                Err(status) => Err(status),
            },
            Some(AdminOpcode::DoorbellBufferConfig) if self.doorbells_trapped => {
                self.doorbell_buffer_config(sqe)
            }
            _ => return self.controller_command(sqe, context),
        };
        self.complete_command(0, sqe.cid, result.err().unwrap_or(Status::SUCCESS), 0);
    }

    fn create_io_cq(&mut self, sqe: &Sqe, context: &VfioUserContext<'_>) -> Result<(), Status> {
        let granted = self.controller.queues_granted();
        let params = queues::validate_create_io_cq(sqe, &context.protocol.limits.controller, granted, self)?;
        let bytes = u64::from(params.entries) * CompletionQueue::BYTES;
        let memory =
            QueueMemory::locate(&self.memory, params.address, bytes, true).ok_or(super::MEMORY_NOT_MAPPED)?;
        let vector = params.interrupts.then_some(params.vector);
        self.create_cq(params.qid, params.entries, params.address, memory, vector);
        Ok(())
    }

    fn create_io_sq(&mut self, sqe: &Sqe, context: &VfioUserContext<'_>) -> Result<(), Status> {
        let granted = self.controller.queues_granted();
        let params = queues::validate_create_io_sq(sqe, &context.protocol.limits.controller, granted, self)?;
        let bytes = u64::from(params.entries) * SubmissionRing::BYTES;
        let memory = QueueMemory::locate(&self.memory, params.address, bytes, false)
            .ok_or(super::MEMORY_NOT_MAPPED)?;
        let lease = self.association().lease(params.qid);
        let lease = lease.map_err(|_| Status::INVALID_QUEUE_IDENTIFIER.do_not_retry())?;
        self.create_sq(params.qid, params.entries, params.address, memory, params.cqid, Some(lease));
        Ok(())
    }

    fn delete_io_cq(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let qid = queues::validate_delete_io_cq(sqe, self)?;
        self.cqs[usize::from(qid)] = None;
        Ok(())
    }

    fn doorbell_buffer_config(&mut self, sqe: &Sqe) -> Result<(), Status> {
        if sqe.fuse() != Fuse::Normal || sqe.psdt() != Psdt::Prp {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let addresses = queues::validate_doorbell_buffer(sqe)?;
        self.doorbells.configure_shadow(addresses, &self.memory)
    }

    /// Deletes a submission queue. Returns whether the completion of this command must wait for the queue's
    /// commands in flight.
    fn delete_io_sq(&mut self, sqe: &Sqe) -> Result<bool, Status> {
        let qid = queues::validate_delete_io_sq(sqe, self)?;
        self.active_sqids.retain(|active| *active != qid);
        let Some(queue) = self.sq(qid) else { return Ok(false) };
        queue.ring.state = SubmissionQueueState::Deleting(sqe.cid);
        // Commands that are not at a device are aborted (Base 2.0, section 5.6).
        self.abort_pending(qid);
        self.reap(qid);
        // It completes with the last command of the queue, which may have been now.
        Ok(true)
    }

    /// Passes a command to the controller. All complete immediately, except Asynchronous Event Requests.
    fn controller_command(&mut self, sqe: &Sqe, context: &mut VfioUserContext<'_>) {
        let mut host_data = vec![0; data_from_host(sqe) as usize];
        if !host_data.is_empty() {
            let parsed = data::parse_data_pointer(
                &self.memory,
                (sqe.data, false),
                false,
                host_data.len() as u32,
                &mut self.segments,
            );
            let copied = parsed.and_then(|()| {
                data::gather(&self.memory, &self.segments, std::iter::once(&mut host_data[..]))
            });
            if let Err(status) = copied {
                return self.complete_command(0, sqe.cid, status, 0);
            }
        }
        if sqe.opcode == AdminOpcode::GetLogPage.to_wire()
            && nvme_controller::log_has_health(GetLogPage::from_sqe(sqe).lid)
        {
            let health = context.config.health(&self.subsystem, self.controller.hostnqn());
            self.controller_event(ControllerEvent::Health(health), context.now_ns);
        }
        let host_id = self.association().host_id();
        let mut actions = std::mem::take(&mut self.actions);
        self.controller.handle(
            ControllerEvent::Command { sqe, data: &host_data },
            context.now_ns,
            &mut actions,
        );
        let mut completed = false;
        for action in actions.drain(..) {
            match action {
                ControllerAction::Complete(completion) if completion.cqe.cid == sqe.cid && !completed => {
                    completed = true;
                    let status = match completion.data.is_empty() {
                        true => completion.cqe.status,
                        false => {
                            self.copy_to_client(sqe, &completion.data).err().unwrap_or(completion.cqe.status)
                        }
                    };
                    self.complete_command(0, sqe.cid, status, completion.cqe.result);
                }
                ControllerAction::Complete(completion) => self.complete_event_request(&completion.cqe),
                ControllerAction::CloseIoQueues => {}
                ControllerAction::Terminate(_) => self.begin_drain(),
            }
        }
        self.actions = actions;
        if self.association().host_id() != host_id {
            // Reservations depend on the host identifier.
            self.rebuild_namespace_table(&context.protocol.limits.controller);
        }
        if !completed {
            // An Asynchronous Event Request holds no completion queue entry until the event occurs.
            if let Some(queue) = self.sq(0) {
                queue.ring.in_flight -= 1;
            }
            if let Some(completions) = self.cq(0) {
                completions.release(1);
            }
        }
    }

    /// Copies data to client memory.
    fn copy_to_client(&mut self, sqe: &Sqe, data: &[u8]) -> Result<(), Status> {
        let bytes = data.len() as u32;
        data::parse_data_pointer(&self.memory, (sqe.data, false), true, bytes, &mut self.segments)?;
        data::scatter(&self.memory, &self.segments, std::iter::once(data))
    }

    /// Completes an Asynchronous Event Request.
    pub(super) fn complete_event_request(&mut self, cqe: &Cqe) {
        let Some(queue) = self.sq(0) else { return };
        let high = cqe_high(queue.ring.head as u16, 0, cqe.cid, cqe.status);
        let Some(completions) = self.cq(0) else { return };
        let was_dirty = completions.dirty;
        if !completions.post_unreserved(cqe.result, high) {
            self.has_blocked_completions = true;
        } else if !was_dirty {
            self.dirty_cqids.push(0);
        }
    }
}
