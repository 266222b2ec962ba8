//! Fused Compare and Write: two adjacent entries of a submission queue.

use block_io::{Op, Request, RequestFlags, Status};
use dma::Buffer;
use nvme_controller::io::{self, FusedMatch, FusedPairing, IoPlan};
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use super::super::data;
use super::io::{is_sgl, slotless_tag};
use super::{FunctionContext, VfioUserFunction};

impl VfioUserFunction {
    /// Executes a fused command, or any command while a queue has a pending first fused command.
    #[cold]
    pub(super) fn io_fused(&mut self, qid: u16, sqe: &Sqe, context: &mut FunctionContext<'_>) {
        let planned = io::plan(sqe, &self.namespaces);
        let index = self.pairings.iter().position(|(of, _)| *of == qid);
        let mut pairing = index.map(|index| self.pairings.swap_remove(index).1).unwrap_or_default();
        match pairing.match_next(sqe, &planned) {
            FusedMatch::Matched(first, _) => return self.compare_and_write(qid, &first, sqe, context),
            FusedMatch::BothAborted(first, first_status, second_status) => {
                self.complete_command(qid, first.cid, first_status, 0);
                return self.complete_command(qid, sqe.cid, second_status, 0);
            }
            FusedMatch::FirstAborted(first, status) => self.complete_command(qid, first.cid, status, 0),
            FusedMatch::Independent => {}
            FusedMatch::Rejected(status) => return self.complete_command(qid, sqe.cid, status, 0),
        }
        if sqe.fuse() != Fuse::First {
            return self.io_unfused(qid, sqe, context);
        }
        let pairing = match planned {
            Ok(plan) => FusedPairing::FirstPending(*sqe, plan),
            Err(status) => {
                self.complete_command(qid, sqe.cid, status, 0);
                FusedPairing::FirstRejected
            }
        };
        self.pairings.push((qid, pairing));
    }

    /// Submits both commands, or defers them until two buffers are available.
    pub(super) fn compare_and_write(
        &mut self,
        qid: u16,
        first: &Sqe,
        second: &Sqe,
        context: &mut FunctionContext<'_>,
    ) {
        let (compare, write) = match [first, second].map(|sqe| io::plan(sqe, &self.namespaces)) {
            [Ok(compare), Ok(write)] => (compare, write),
            [compare, write] => {
                let status = |planned: Result<IoPlan, Status>| planned.err().unwrap_or(Status::FUSED_FAILED);
                self.complete_command(qid, first.cid, status(compare), 0);
                return self.complete_command(qid, second.cid, status(write), 0);
            }
        };
        let entry = self.namespaces.entry(&compare);
        let (backend, bytes) = (entry.backend, (compare.blocks as usize) << entry.block_log2);
        // Both or none, so that no pair holds one buffer while it waits for the other.
        let (Some(mut expected), Some(mut new)) = (context.pool.take(bytes), context.pool.take(bytes)) else {
            return self.deferred_pairs.push_back((qid, *first, *second));
        };
        let gathered = [self.gather(first, &mut expected), self.gather(second, &mut new)];
        if let [Err(status), _] | [_, Err(status)] = gathered {
            let status_of =
                |gathered: Result<(), Status>| if gathered.is_err() { status } else { Status::FUSED_FAILED };
            self.complete_command(qid, first.cid, status_of(gathered[0]), 0);
            return self.complete_command(qid, second.cid, status_of(gathered[1]), 0);
        }
        let request = |sqe: &Sqe, op, plan: &IoPlan, buffer| {
            let tag = slotless_tag(context.tag_base, qid, sqe.cid);
            let mut request = Request::new(tag, op, plan.lba, plan.blocks);
            (request.flow, request.flags) = (context.flow, plan.flags);
            request.set_data(Some(buffer));
            request
        };
        let fused = Request { flags: RequestFlags::FUSED, ..request(first, Op::Compare, &compare, expected) };
        let write = request(second, Op::Write, &write, new);
        // Adjacent in the device's batch.
        let submitted =
            context.devices.submit(backend, fused).and_then(|()| context.devices.submit(backend, write));
        match submitted {
            Ok(()) => self.direct_in_flight += 2,
            Err(status) => {
                self.complete_command(qid, first.cid, status, 0);
                self.complete_command(qid, second.cid, Status::FUSED_FAILED, 0);
            }
        }
    }

    fn gather(&mut self, sqe: &Sqe, buffer: &mut Buffer) -> Result<(), Status> {
        data::parse_data_pointer(
            &self.memory,
            sqe.data,
            is_sgl(sqe),
            buffer.len() as u32,
            &mut self.segments,
        )?;
        data::gather(&self.memory, &self.segments, buffer.as_mut_slice())
    }

    /// Retries deferred pairs, oldest first.
    pub(super) fn retry_deferred_pairs(&mut self, context: &mut FunctionContext<'_>) {
        for _ in 0..self.deferred_pairs.len() {
            let Some((qid, first, second)) = self.deferred_pairs.pop_front() else { return };
            self.compare_and_write(qid, &first, &second, context);
        }
    }

    /// Removes fused commands that wait for their second command or for buffers, of one queue or of all. Returns
    /// the queue and the CID of each.
    pub(super) fn take_pairs(&mut self, queue_filter: Option<u16>) -> Vec<(u16, u16)> {
        let matches = |qid: u16| queue_filter.is_none_or(|queue_filter| queue_filter == qid);
        let mut removed = Vec::new();
        self.pairings.retain(|(qid, pairing)| {
            if let (true, FusedPairing::FirstPending(first, _)) = (matches(*qid), pairing) {
                removed.push((*qid, first.cid));
            }
            !matches(*qid)
        });
        self.deferred_pairs.retain(|(qid, first, second)| {
            if matches(*qid) {
                removed.extend([(*qid, first.cid), (*qid, second.cid)]);
            }
            !matches(*qid)
        });
        removed
    }
}
