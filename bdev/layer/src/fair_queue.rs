//! Requests queued for the module, dequeued fairly by flow.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995), accounted in blocks: each backlogged flow gets a quantum a
//! round and spends it on requests from the front of its FIFO, so that a flow's share does not depend on how many
//! requests it has queued or how large they are.

use std::collections::VecDeque;

use block_io::Tag;

use crate::Request;

/// Queued requests of one flow; the rest stays in the caller's batch. Two full NVMe/TCP queues.
pub(crate) const FLOW_QUEUED_MAX: usize = 256;
/// Queued requests of all flows: 256 busy flows, 4 MiB of requests.
const QUEUED_MAX: usize = 65_536;
/// Quantum of a flow a round, in bytes: eight 4 KiB requests, one 32nd of the largest.
const QUANTUM_BYTES: u32 = 32 << 10;

/// The queued requests of a channel, one FIFO a flow.
pub(crate) struct FairQueue {
    /// Index into `fifos` by flow; grows to the highest flow seen.
    fifo_of_flow: Vec<u16>,
    fifos: Vec<Fifo>,
    /// Indices of FIFOs that are not empty, the next to be dequeued first.
    backlogged: VecDeque<u16>,
    len: usize,
    quantum_blocks: u64,
}

#[derive(Default)]
struct Fifo {
    requests: VecDeque<Request>,
    deficit_blocks: u64,
    /// Whether it got its quantum in the current round.
    has_quantum: bool,
}

const NO_FIFO: u16 = u16::MAX;

impl FairQueue {
    pub(crate) fn new(block_size: u32) -> FairQueue {
        let quantum_blocks = u64::from((QUANTUM_BYTES / block_size).max(1));
        FairQueue {
            fifo_of_flow: Vec::new(),
            fifos: Vec::new(),
            backlogged: VecDeque::new(),
            len: 0,
            quantum_blocks,
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends a request to its flow's FIFO, or returns it if the FIFO or the queue is full.
    pub(crate) fn push(&mut self, request: Request) -> Result<(), Request> {
        if self.len >= QUEUED_MAX {
            return Err(request);
        }
        let Some(index) = self.fifo_index(request.flow) else { return Err(request) };
        let fifo = &mut self.fifos[usize::from(index)];
        if fifo.requests.len() >= FLOW_QUEUED_MAX {
            return Err(request);
        }
        if fifo.requests.is_empty() {
            self.backlogged.push_back(index);
        }
        fifo.requests.push_back(request);
        self.len += 1;
        Ok(())
    }

    /// Moves up to `room` requests to `out` in round-robin order.
    pub(crate) fn dequeue(&mut self, mut room: usize, out: &mut Vec<Request>) {
        while room > 0
            && let Some(&index) = self.backlogged.front()
        {
            let fifo = &mut self.fifos[usize::from(index)];
            if !fifo.has_quantum {
                fifo.has_quantum = true;
                fifo.deficit_blocks += self.quantum_blocks;
            }
            let affordable = |fifo: &Fifo| {
                let cost = fifo.requests.front().map(|request| cost_blocks(request, self.quantum_blocks));
                cost.filter(|cost| *cost <= fifo.deficit_blocks)
            };
            while room > 0
                && let Some(cost) = affordable(fifo)
                && let Some(request) = fifo.requests.pop_front()
            {
                fifo.deficit_blocks -= cost;
                out.push(request);
                self.len -= 1;
                room -= 1;
            }
            if fifo.requests.is_empty() {
                fifo.deficit_blocks = 0;
                fifo.has_quantum = false;
                self.backlogged.pop_front();
            } else if affordable(fifo).is_none() {
                fifo.has_quantum = false;
                self.backlogged.rotate_left(1);
            }
        }
    }

    /// Removes a request of a flow by its tag.
    pub(crate) fn remove(&mut self, tag: Tag, flow: u16) -> Option<Request> {
        let index = self.fifo_of_flow.get(usize::from(flow)).filter(|index| **index != NO_FIFO)?;
        let requests = &mut self.fifos[usize::from(*index)].requests;
        let found = requests.iter().position(|request| request.tag == tag)?;
        let removed = requests.remove(found);
        self.len -= 1;
        if requests.is_empty() {
            let fifo = &mut self.fifos[usize::from(*index)];
            (fifo.deficit_blocks, fifo.has_quantum) = (0, false);
            self.backlogged.retain(|other| other != index);
        }
        removed
    }

    fn fifo_index(&mut self, flow: u16) -> Option<u16> {
        let flow = usize::from(flow);
        if flow >= self.fifo_of_flow.len() {
            self.fifo_of_flow.resize(flow + 1, NO_FIFO);
        }
        if self.fifo_of_flow[flow] == NO_FIFO {
            // There are at most 65,535 FIFOs; requests of further flows stay in the caller's batch.
            let index = u16::try_from(self.fifos.len()).ok().filter(|index| *index != NO_FIFO)?;
            self.fifos.push(Fifo::default());
            self.fifo_of_flow[flow] = index;
        }
        Some(self.fifo_of_flow[flow])
    }
}

/// Cost of a request in blocks: its length, but at most a quantum if it carries no data.
fn cost_blocks(request: &Request, quantum_blocks: u64) -> u64 {
    let blocks = u64::from(request.blocks).max(1);
    if request.op.has_data() { blocks } else { blocks.min(quantum_blocks) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block_io::{Op, Tag};

    fn request(flow: u16, op: Op, blocks: u32) -> Request {
        Request { flow, ..Request::new(Tag(u64::from(flow)), op, 0, blocks) }
    }

    fn dequeued(queue: &mut FairQueue, room: usize) -> Vec<u16> {
        let mut out = Vec::new();
        queue.dequeue(room, &mut out);
        out.iter().map(|request| request.flow).collect()
    }

    #[test]
    fn a_shallow_flow_is_served_after_one_quantum_of_a_deep_flow() {
        let mut queue = FairQueue::new(512);
        for _ in 0..FLOW_QUEUED_MAX {
            queue.push(request(1, Op::Read, 8)).unwrap();
        }
        assert!(queue.push(request(1, Op::Read, 8)).is_err(), "the FIFO is bounded");
        queue.push(request(2, Op::Read, 8)).unwrap();
        let order = dequeued(&mut queue, 16);
        assert_eq!(order.iter().position(|flow| *flow == 2), Some(8), "{order:?}");
    }

    #[test]
    fn flows_share_blocks_and_not_requests() {
        let mut queue = FairQueue::new(512);
        for _ in 0..64 {
            queue.push(request(1, Op::Write, 64)).unwrap();
        }
        for _ in 0..256 {
            queue.push(request(2, Op::Write, 8)).unwrap();
        }
        let order = dequeued(&mut queue, 90);
        let large = order.iter().filter(|flow| **flow == 1).count();
        assert_eq!((large, order.len() - large), (10, 80));
    }

    #[test]
    fn a_request_larger_than_the_quantum_is_served_in_a_later_round() {
        let mut queue = FairQueue::new(512);
        queue.push(request(1, Op::Read, 2048)).unwrap();
        queue.push(request(2, Op::Unmap, u32::MAX)).unwrap();
        assert_eq!(dequeued(&mut queue, 4), [2, 1]);
        assert!(queue.is_empty());
    }

    #[test]
    fn dequeueing_one_at_a_time_keeps_the_order() {
        let fill = || {
            let mut queue = FairQueue::new(4096);
            for index in 0..200u16 {
                queue.push(request(index % 5, Op::Read, u32::from(index % 7) + 1)).unwrap();
            }
            queue
        };
        let (mut whole, mut single) = (fill(), fill());
        let all = dequeued(&mut whole, 1000);
        let each: Vec<u16> = (0..200).flat_map(|_| dequeued(&mut single, 1)).collect();
        assert_eq!(all, each);
        assert_eq!(single.len(), 0);
    }
}
