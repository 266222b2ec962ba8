//! Fused Compare and Write: two entries next to each other in a submission queue.

use controller::io::{self, Paired, Pairing, Plan};
use memory::Buffer;
use ring::{Flags, Op, Request, Status};
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use super::super::data;
use super::io::{direct_tag, is_sgl};
use super::{Function, Lent};

impl Function {
    /// A command that is fused, or that comes while some queue has had the first of two.
    #[cold]
    pub(super) fn io_fused(&mut self, qid: u16, sqe: &Sqe, lent: &mut Lent<'_>) {
        let planned = io::plan(sqe, &self.namespaces);
        let place = self.pairings.iter().position(|(of, _)| *of == qid);
        let mut pairing = place.map(|place| self.pairings.swap_remove(place).1).unwrap_or_default();
        match pairing.follow(sqe, &planned) {
            Paired::With(first, _) => return self.compare_and_write(qid, &first, sqe, lent),
            Paired::Neither(first, of_first, of_second) => {
                self.answer(qid, first.cid, of_first, 0);
                return self.answer(qid, sqe.cid, of_second, 0);
            }
            Paired::Apart(first, status) => self.answer(qid, first.cid, status, 0),
            Paired::Alone => {}
            Paired::Refused(status) => return self.answer(qid, sqe.cid, status, 0),
        }
        if sqe.fuse() != Fuse::First {
            return self.io_alone(qid, sqe, lent);
        }
        let pairing = match planned {
            Ok(plan) => Pairing::Waits(*sqe, plan),
            Err(status) => {
                self.answer(qid, sqe.cid, status, 0);
                Pairing::Refused
            }
        };
        self.pairings.push((qid, pairing));
    }

    /// Executes both, or puts them aside until there are buffers.
    pub(super) fn compare_and_write(&mut self, qid: u16, first: &Sqe, second: &Sqe, lent: &mut Lent<'_>) {
        let (compare, write) = match [first, second].map(|sqe| io::plan(sqe, &self.namespaces)) {
            [Ok(compare), Ok(write)] => (compare, write),
            [compare, write] => {
                let status = |planned: Result<Plan, Status>| planned.err().unwrap_or(Status::FUSED_FAILED);
                self.answer(qid, first.cid, status(compare), 0);
                return self.answer(qid, second.cid, status(write), 0);
            }
        };
        let entry = self.namespaces.entry(&compare);
        let (backend, bytes) = (entry.backend, (compare.blocks as usize) << entry.block_log2);
        // Both or none, so that nobody holds one while waiting for the other.
        let (Some(mut expected), Some(mut new)) = (lent.pool.take(bytes), lent.pool.take(bytes)) else {
            return self.pairs_aside.push_back((qid, *first, *second));
        };
        let gathered = [self.gather(first, &mut expected), self.gather(second, &mut new)];
        if let [Err(status), _] | [_, Err(status)] = gathered {
            let of = |one: Result<(), Status>| if one.is_err() { status } else { Status::FUSED_FAILED };
            self.answer(qid, first.cid, of(gathered[0]), 0);
            return self.answer(qid, second.cid, of(gathered[1]), 0);
        }
        let request = |sqe: &Sqe, op, plan: &Plan, buffer| {
            let tag = direct_tag(lent.tag_base, qid, sqe.cid);
            let mut request = Request::new(tag, op, plan.lba, plan.blocks);
            (request.flow, request.flags, request.buffer) = (lent.flow, plan.flags, Some(buffer));
            request
        };
        let fused = Request { flags: Flags::FUSED, ..request(first, Op::Compare, &compare, expected) };
        let write = request(second, Op::Write, &write, new);
        // Next to each other in the device's batch.
        let submitted = lent.devices.put(backend, fused).and_then(|()| lent.devices.put(backend, write));
        match submitted {
            Ok(()) => self.direct += 2,
            Err(status) => {
                self.answer(qid, first.cid, status, 0);
                self.answer(qid, second.cid, Status::FUSED_FAILED, 0);
            }
        }
    }

    fn gather(&mut self, sqe: &Sqe, buffer: &mut Buffer) -> Result<(), Status> {
        data::walk(&self.memory, sqe.data, is_sgl(sqe), buffer.len() as u32, &mut self.pieces)?;
        data::gather(&self.memory, &self.pieces, buffer.as_mut_slice())
    }

    /// Tries pairs again that had no buffers, oldest first.
    pub(super) fn serve_pairs(&mut self, lent: &mut Lent<'_>) {
        for _ in 0..self.pairs_aside.len() {
            let Some((qid, first, second)) = self.pairs_aside.pop_front() else { return };
            self.compare_and_write(qid, &first, &second, lent);
        }
    }

    /// Takes back what waits for its other half or for buffers, of one queue or of all: the queue and the
    /// identifier of each command.
    pub(super) fn take_pairs(&mut self, of: Option<u16>) -> Vec<(u16, u16)> {
        let concerns = |qid: u16| of.is_none_or(|of| of == qid);
        let mut taken = Vec::new();
        self.pairings.retain(|(qid, pairing)| {
            if let (true, Pairing::Waits(first, _)) = (concerns(*qid), pairing) {
                taken.push((*qid, first.cid));
            }
            !concerns(*qid)
        });
        self.pairs_aside.retain(|(qid, first, second)| {
            if concerns(*qid) {
                taken.extend([(*qid, first.cid), (*qid, second.cid)]);
            }
            !concerns(*qid)
        });
        taken
    }
}
