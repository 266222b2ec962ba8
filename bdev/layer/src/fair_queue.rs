//! Requests queued for the module, dequeued fairly by tenant, and within a tenant by flow.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995), accounted in blocks: each backlogged tenant gets a
//! quantum a round and spends it on requests of its flows, which take turns in the same way. So a tenant's
//! share does not depend on how many connections and requests it has or how large they are, and neither does
//! a connection's within its tenant.

use std::collections::VecDeque;

use block_io::Tag;
use os::clock::Clock;

use crate::scheduler::Scheduler;
use crate::{Request, Tenants};

/// Queued requests of one flow; the rest stays in the caller's batch. Two full NVMe/TCP queues.
pub(crate) const FLOW_QUEUED_MAX: usize = 256;
/// Queued requests of all flows: 256 busy flows, 4 MiB of requests.
const QUEUED_MAX: usize = 65_536;
/// Quantum of a tenant, and of a flow, a round, in bytes: eight 4 KiB requests, one 32nd of the largest.
const QUANTUM_BYTES: u32 = 32 << 10;

/// The queued requests of a channel, one FIFO a flow.
pub(crate) struct FairQueue {
    tenants: Tenants,
    /// Index into `fifos` by flow; grows to the highest flow seen.
    fifo_of_flow: Vec<u16>,
    fifos: Vec<Fifo>,
    /// Index into `shares` by tenant; grows to the highest tenant seen.
    share_of_tenant: Vec<u16>,
    shares: Vec<Share>,
    /// Indices of shares with backlogged FIFOs, the next to be dequeued first.
    backlogged: VecDeque<u16>,
    len: usize,
    quantum_blocks: u64,
}

/// The requests of a flow.
#[derive(Default)]
struct Fifo {
    requests: VecDeque<Request>,
    turn: Turn,
    /// The share that it is in while it has requests: that of its flow's tenant when it got the first of
    /// them.
    share: u16,
}

/// The backlogged FIFOs of a tenant.
#[derive(Default)]
struct Share {
    /// The next to be dequeued first.
    fifos: VecDeque<u16>,
    turn: Turn,
}

/// What a tenant or a flow may still dequeue.
#[derive(Clone, Copy, Default)]
struct Turn {
    deficit_blocks: u64,
    /// Whether it got its quantum in the current round.
    has_quantum: bool,
}

impl Turn {
    /// Begins the turn, unless it has begun. Whether it pays for `cost` blocks; if not, it is over.
    fn pays(&mut self, cost: u64, quantum_blocks: u64) -> bool {
        if !self.has_quantum {
            self.has_quantum = true;
            self.deficit_blocks += quantum_blocks;
        }
        self.has_quantum = cost <= self.deficit_blocks;
        self.has_quantum
    }
}

const NO_INDEX: u16 = u16::MAX;

impl FairQueue {
    pub(crate) fn new(block_size: u32, tenants: &Tenants) -> FairQueue {
        let quantum_blocks = u64::from((QUANTUM_BYTES / block_size).max(1));
        FairQueue {
            tenants: tenants.clone(),
            fifo_of_flow: Vec::new(),
            fifos: Vec::new(),
            share_of_tenant: Vec::new(),
            shares: Vec::new(),
            backlogged: VecDeque::new(),
            len: 0,
            quantum_blocks,
        }
    }

    /// Appends a request to its flow's FIFO, or returns it if the FIFO or the queue is full.
    fn push(&mut self, request: Request) -> Result<(), Request> {
        if self.len >= QUEUED_MAX {
            return Err(request);
        }
        let flow = request.flow;
        let Some(index) = index_of(&mut self.fifo_of_flow, usize::from(flow), &mut self.fifos) else {
            return Err(request);
        };
        let fifo = &mut self.fifos[usize::from(index)];
        if fifo.requests.len() >= FLOW_QUEUED_MAX {
            return Err(request);
        }
        if fifo.requests.is_empty() {
            let tenant = self.tenants.of_flow(flow).index();
            let Some(share) = index_of(&mut self.share_of_tenant, tenant, &mut self.shares) else {
                return Err(request);
            };
            fifo.share = share;
            let fifos = &mut self.shares[usize::from(share)].fifos;
            if fifos.is_empty() {
                self.backlogged.push_back(share);
            }
            fifos.push_back(index);
        }
        fifo.requests.push_back(request);
        self.len += 1;
        Ok(())
    }

    /// Moves up to `max` requests to `out` in round-robin order.
    fn dequeue(&mut self, mut max: usize, out: &mut Vec<Request>) {
        while max > 0
            && let Some(&index) = self.backlogged.front()
        {
            let share = &mut self.shares[usize::from(index)];
            let fifo = share.select(&mut self.fifos, self.quantum_blocks);
            let Some((fifo, cost)) = fifo else {
                share.turn = Turn::default();
                self.backlogged.pop_front();
                continue;
            };
            if !share.turn.pays(cost, self.quantum_blocks) {
                self.backlogged.rotate_left(1);
                continue;
            }
            share.turn.deficit_blocks -= cost;
            fifo.turn.deficit_blocks -= cost;
            out.extend(fifo.requests.pop_front());
            self.len -= 1;
            max -= 1;
            if fifo.requests.is_empty() {
                fifo.turn = Turn::default();
                share.fifos.pop_front();
                if share.fifos.is_empty() {
                    share.turn = Turn::default();
                    self.backlogged.pop_front();
                }
            }
        }
    }
}

impl Share {
    /// The FIFO whose turn it is, and the cost of its first request, for which its deficit suffices.
    fn select<'a>(&mut self, fifos: &'a mut [Fifo], quantum_blocks: u64) -> Option<(&'a mut Fifo, u64)> {
        loop {
            let index = usize::from(*self.fifos.front()?);
            let cost = cost_blocks(fifos[index].requests.front()?, quantum_blocks);
            if fifos[index].turn.pays(cost, quantum_blocks) {
                return Some((&mut fifos[index], cost));
            }
            self.fifos.rotate_left(1);
        }
    }
}

impl Scheduler for FairQueue {
    fn enqueue(&mut self, request: Request, _clock: &Clock) -> Result<(), Request> {
        self.push(request)
    }

    fn next(&mut self, max: usize, _clock: &Clock, out: &mut Vec<Request>) {
        self.dequeue(max, out);
    }

    fn deadline(&self, _clock: &Clock) -> Option<u64> {
        (self.len > 0).then_some(0)
    }

    fn remove(&mut self, tag: Tag, flow: u16) -> Option<Request> {
        let index = *self.fifo_of_flow.get(usize::from(flow)).filter(|index| **index != NO_INDEX)?;
        let fifo = &mut self.fifos[usize::from(index)];
        let found = fifo.requests.iter().position(|request| request.tag == tag)?;
        let removed = fifo.requests.remove(found);
        self.len -= 1;
        if fifo.requests.is_empty() {
            fifo.turn = Turn::default();
            let (number, share) = (fifo.share, &mut self.shares[usize::from(fifo.share)]);
            share.fifos.retain(|other| *other != index);
            if share.fifos.is_empty() {
                share.turn = Turn::default();
                self.backlogged.retain(|other| *other != number);
            }
        }
        removed
    }

    fn drain(&mut self, out: &mut Vec<Request>) {
        self.dequeue(usize::MAX, out);
    }
}

/// The index of an entry by its identifier; it is made if there is none. There are at most 65,535.
fn index_of<T: Default>(indices: &mut Vec<u16>, id: usize, entries: &mut Vec<T>) -> Option<u16> {
    if id >= indices.len() {
        indices.resize(id + 1, NO_INDEX);
    }
    if indices[id] == NO_INDEX {
        // Requests of further ones stay in the caller's batch.
        let index = u16::try_from(entries.len()).ok().filter(|index| *index != NO_INDEX)?;
        entries.push(T::default());
        indices[id] = index;
    }
    Some(indices[id])
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
        let mut queue = FairQueue::new(512, &Tenants::default());
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
        let mut queue = FairQueue::new(512, &Tenants::default());
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
        let mut queue = FairQueue::new(512, &Tenants::default());
        queue.push(request(1, Op::Read, 2048)).unwrap();
        queue.push(request(2, Op::Unmap, u32::MAX)).unwrap();
        assert_eq!(dequeued(&mut queue, 4), [2, 1]);
        assert_eq!(queue.len, 0);
    }

    #[test]
    fn dequeueing_one_at_a_time_keeps_the_order() {
        let fill = || {
            let mut queue = FairQueue::new(4096, &Tenants::default());
            for index in 0..200u16 {
                queue.push(request(index % 5, Op::Read, u32::from(index % 7) + 1)).unwrap();
            }
            queue
        };
        let (mut whole, mut single) = (fill(), fill());
        let all = dequeued(&mut whole, 1000);
        let each: Vec<u16> = (0..200).flat_map(|_| dequeued(&mut single, 1)).collect();
        assert_eq!(all, each);
        assert_eq!(single.len, 0);
    }

    #[test]
    fn a_tenant_gets_one_share_however_many_connections_it_has() {
        let tenants = Tenants::default();
        let greedy: Vec<_> = (0..8).map(|_| tenants.connect("greedy")).collect();
        let modest = tenants.connect("modest");
        let mut queue = FairQueue::new(512, &tenants);
        for _ in 0..100 {
            for flow in &greedy {
                queue.push(request(flow.id(), Op::Read, 8)).unwrap();
            }
            queue.push(request(modest.id(), Op::Read, 8)).unwrap();
        }
        let order = dequeued(&mut queue, 128);
        assert_eq!(order.iter().filter(|flow| **flow == modest.id()).count(), 64, "{order:?}");
        // And its connections share it evenly.
        for flow in &greedy {
            assert_eq!(order.iter().filter(|other| **other == flow.id()).count(), 8, "{order:?}");
        }
    }

    #[test]
    fn a_removed_request_takes_its_flow_and_tenant_out_of_the_rounds() {
        let tenants = Tenants::default();
        let (one, two) = (tenants.connect("one"), tenants.connect("two"));
        let mut queue = FairQueue::new(512, &tenants);
        for flow in [&one, &two] {
            queue.push(request(flow.id(), Op::Read, 8)).unwrap();
        }
        let tag = |flow: u16| Tag(u64::from(flow));
        assert!(queue.remove(tag(two.id()), one.id()).is_none());
        assert!(queue.remove(tag(one.id()), one.id()).is_some());
        assert!(queue.remove(tag(one.id()), one.id()).is_none());
        // Named anew while it has nothing queued, it is in the other's share from then on.
        one.set_tenant("two");
        queue.push(request(one.id(), Op::Read, 8)).unwrap();
        assert_eq!(queue.backlogged.len(), 1);
        assert_eq!(dequeued(&mut queue, 4), [two.id(), one.id()]);
        assert_eq!(queue.len, 0);
    }
}
