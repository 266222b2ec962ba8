//! The admin queue.

use std::collections::VecDeque;

use controller::{Action, Event, data_from_host, queues};
use ring::Status;
use wire_nvme::admin::GetLogPage;
use wire_nvme::log::LogId;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::sqe::{Fuse, Psdt};
use wire_nvme::{Cqe, Sqe};

use super::super::data;
use super::super::queue::{Completion, Place, State, Submission, rest};
use super::{Function, Lent};

impl Function {
    /// Executes a command of the admin queue.
    pub(super) fn admin(&mut self, sqe: &Sqe, lent: &mut Lent<'_>) {
        let made = match AdminOpcode::from_wire(sqe.opcode) {
            // These are about queues, which the controller does not keep.
            Some(
                AdminOpcode::CreateIoCq
                | AdminOpcode::CreateIoSq
                | AdminOpcode::DeleteIoCq
                | AdminOpcode::DeleteIoSq,
            ) if sqe.fuse() != Fuse::Normal || sqe.psdt() != Psdt::Prp => {
                Err(Status::INVALID_FIELD.do_not_retry())
            }
            Some(AdminOpcode::CreateIoCq) => self.create_completion(sqe, lent),
            Some(AdminOpcode::CreateIoSq) => self.create_submission(sqe, lent),
            Some(AdminOpcode::DeleteIoCq) => self.delete_completion(sqe),
            Some(AdminOpcode::DeleteIoSq) => match self.delete_submission(sqe) {
                Ok(true) => return,
                Ok(false) => Ok(()),
                Err(status) => Err(status),
            },
            Some(AdminOpcode::DoorbellBufferConfig) if self.trapped => self.share_doorbells(sqe),
            _ => return self.at_controller(sqe, lent),
        };
        self.answer(0, sqe.cid, made.err().unwrap_or(Status::SUCCESS), 0);
    }

    fn create_completion(&mut self, sqe: &Sqe, lent: &Lent<'_>) -> Result<(), Status> {
        let granted = self.core.queues_granted();
        let made = queues::create_completion(sqe, &lent.shared.limits.controller, granted, self)?;
        let bytes = u64::from(made.entries) * Completion::BYTES;
        let place = Place::find(&self.memory, made.address, bytes, true).ok_or(super::UNREACHABLE)?;
        let vector = made.interrupts.then_some(made.vector);
        self.make_completion(made.qid, made.entries, made.address, place, vector);
        Ok(())
    }

    fn create_submission(&mut self, sqe: &Sqe, lent: &Lent<'_>) -> Result<(), Status> {
        let granted = self.core.queues_granted();
        let made = queues::create_submission(sqe, &lent.shared.limits.controller, granted, self)?;
        let bytes = u64::from(made.entries) * Submission::BYTES;
        let place = Place::find(&self.memory, made.address, bytes, false).ok_or(super::UNREACHABLE)?;
        let lease = self.association().lease(made.qid);
        let lease = lease.map_err(|_| Status::INVALID_QUEUE_IDENTIFIER.do_not_retry())?;
        self.make_submission(made.qid, made.entries, made.address, place, made.cqid, Some(lease));
        Ok(())
    }

    fn delete_completion(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let qid = queues::delete_completion(sqe, self)?;
        self.completions[usize::from(qid)] = None;
        Ok(())
    }

    fn share_doorbells(&mut self, sqe: &Sqe) -> Result<(), Status> {
        if sqe.fuse() != Fuse::Normal || sqe.psdt() != Psdt::Prp {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let addresses = queues::doorbell_buffer(sqe)?;
        self.doorbells.share(addresses, &self.memory)
    }

    /// Whether the answer has to wait until everything that was fetched from the queue is answered.
    fn delete_submission(&mut self, sqe: &Sqe) -> Result<bool, Status> {
        let qid = queues::delete_submission(sqe, self)?;
        self.active.retain(|active| *active != qid);
        // What no device has is aborted (Base 2.0, section 5.6).
        let all = std::mem::take(&mut self.aside);
        let (aborted, kept): (VecDeque<_>, VecDeque<_>) = all.into_iter().partition(|(of, _)| *of == qid);
        self.aside = kept;
        for (_, command) in aborted {
            self.answer(qid, command.cid, Status::ABORTED_SQ_DELETION, 0);
        }
        for (_, cid) in self.take_pairs(Some(qid)) {
            self.answer(qid, cid, Status::ABORTED_SQ_DELETION, 0);
        }
        let Some(queue) = self.submission(qid) else { return Ok(false) };
        if queue.in_flight > 0 {
            queue.state = State::Deleting(sqe.cid);
            return Ok(true);
        }
        self.submissions[usize::from(qid)] = None;
        Ok(false)
    }

    /// A command that the controller executes: at once, unless it asks for an event.
    fn at_controller(&mut self, sqe: &Sqe, lent: &mut Lent<'_>) {
        let mut host = vec![0; data_from_host(sqe) as usize];
        if !host.is_empty() {
            let walked = data::walk(&self.memory, sqe.data, false, host.len() as u32, &mut self.pieces);
            let got = walked.and_then(|()| data::gather(&self.memory, &self.pieces, &mut host));
            if let Err(status) = got {
                return self.answer(0, sqe.cid, status, 0);
            }
        }
        if sqe.opcode == AdminOpcode::GetLogPage.to_wire()
            && GetLogPage::of(sqe).lid == LogId::Health.to_wire()
        {
            let health = lent.shared.picture.health(&self.subsystem);
            self.tell(Event::Health(health), lent.now_ns);
        }
        let host_id = self.association().host_id();
        let mut actions = std::mem::take(&mut self.actions);
        self.core.handle(Event::Command { sqe, data: &host }, lent.now_ns, &mut actions);
        let mut answered = false;
        for action in actions.drain(..) {
            match action {
                Action::Complete(completion) if completion.cqe.cid == sqe.cid && !answered => {
                    answered = true;
                    let status = match completion.data.is_empty() {
                        true => completion.cqe.status,
                        false => self.give(sqe, &completion.data).err().unwrap_or(completion.cqe.status),
                    };
                    self.answer(0, sqe.cid, status, completion.cqe.result);
                }
                Action::Complete(completion) => self.answer_event(&completion.cqe),
                Action::CloseIoQueues => {}
                Action::Terminate(_) => self.leave(lent.now_ns),
            }
        }
        self.actions = actions;
        if self.association().host_id() != host_id {
            // What it may do is up to who it is.
            self.tabulate(&lent.shared.limits.controller);
        }
        if !answered {
            // It waits for an event, and has no claim to room until there is one.
            if let Some(queue) = self.submission(0) {
                queue.in_flight -= 1;
            }
            if let Some(completions) = self.completion(0) {
                completions.release(1);
            }
        }
    }

    /// Copies data to where the client wants it.
    fn give(&mut self, sqe: &Sqe, data: &[u8]) -> Result<(), Status> {
        data::walk(&self.memory, sqe.data, false, data.len() as u32, &mut self.pieces)?;
        data::scatter(&self.memory, &self.pieces, data)
    }

    /// Answers an Asynchronous Event Request.
    pub(super) fn answer_event(&mut self, cqe: &Cqe) {
        let Some(queue) = self.submission(0) else { return };
        let high = rest(queue.head as u16, 0, cqe.cid, cqe.status);
        let Some(completions) = self.completion(0) else { return };
        let was = completions.dirty;
        if !completions.post_unreserved(cqe.result, high) {
            self.holds = true;
        } else if !was {
            self.dirty.push(0);
        }
    }
}
