//! Requests that wait for a slot, served in turn by flow.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995), with blocks as the currency: each flow with
//! something waiting gets a quantum a round and spends it on requests from the front of its FIFO, so
//! that a flow's share does not depend on how much it has queued or how large its requests are.

use std::collections::VecDeque;

use crate::Request;

/// Requests of one flow that wait here; the rest stays with the caller. Two full NVMe/TCP queues.
pub(crate) const FLOW_WAITING_MAX: usize = 256;
/// Requests of all flows that wait here: 256 busy flows, 4 MiB of requests.
const WAITING_MAX: usize = 65_536;
/// Bytes that a flow may spend a round: eight 4 KiB requests, one 32nd of the largest.
const QUANTUM_BYTES: u32 = 32 << 10;

pub(crate) struct Waiting {
    /// Where each flow's FIFO lies in `fifos`; grows to the highest flow seen.
    places: Vec<u16>,
    fifos: Vec<Fifo>,
    /// FIFOs that hold something, whose turn it is first.
    turns: VecDeque<u16>,
    len: usize,
    quantum_blocks: u64,
}

#[derive(Default)]
struct Fifo {
    requests: VecDeque<Request>,
    deficit_blocks: u64,
    /// Whether it got its quantum in the round that is under way.
    granted: bool,
}

const NOWHERE: u16 = u16::MAX;

impl Waiting {
    pub(crate) fn new(block_size: u32) -> Waiting {
        let quantum_blocks = u64::from((QUANTUM_BYTES / block_size).max(1));
        Waiting { places: Vec::new(), fifos: Vec::new(), turns: VecDeque::new(), len: 0, quantum_blocks }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Puts a request at the end of its flow's FIFO, or gives it back if there is no room.
    pub(crate) fn push(&mut self, request: Request) -> Result<(), Request> {
        if self.len >= WAITING_MAX {
            return Err(request);
        }
        let Some(place) = self.place_of(request.flow) else { return Err(request) };
        let fifo = &mut self.fifos[usize::from(place)];
        if fifo.requests.len() >= FLOW_WAITING_MAX {
            return Err(request);
        }
        if fifo.requests.is_empty() {
            self.turns.push_back(place);
        }
        fifo.requests.push_back(request);
        self.len += 1;
        Ok(())
    }

    /// Moves up to `room` requests to `out`, flow by flow.
    pub(crate) fn serve(&mut self, mut room: usize, out: &mut Vec<Request>) {
        while room > 0
            && let Some(&place) = self.turns.front()
        {
            let fifo = &mut self.fifos[usize::from(place)];
            if !fifo.granted {
                fifo.granted = true;
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
                fifo.granted = false;
                self.turns.pop_front();
            } else if affordable(fifo).is_none() {
                fifo.granted = false;
                self.turns.rotate_left(1);
            }
        }
    }

    fn place_of(&mut self, flow: u16) -> Option<u16> {
        let flow = usize::from(flow);
        if flow >= self.places.len() {
            self.places.resize(flow + 1, NOWHERE);
        }
        if self.places[flow] == NOWHERE {
            // 65,535 FIFOs have names; the flow after those waits at the caller's.
            let place = u16::try_from(self.fifos.len()).ok().filter(|place| *place != NOWHERE)?;
            self.fifos.push(Fifo::default());
            self.places[flow] = place;
        }
        Some(self.places[flow])
    }
}

/// What a request costs its flow: the blocks that it moves, or at most a quantum where it moves none.
fn cost_blocks(request: &Request, quantum_blocks: u64) -> u64 {
    let blocks = u64::from(request.blocks).max(1);
    if request.op.has_data() { blocks } else { blocks.min(quantum_blocks) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::{Op, Tag};

    fn request(flow: u16, op: Op, blocks: u32) -> Request {
        Request { flow, ..Request::new(Tag(u64::from(flow)), op, 0, blocks) }
    }

    fn served(waiting: &mut Waiting, room: usize) -> Vec<u16> {
        let mut out = Vec::new();
        waiting.serve(room, &mut out);
        out.iter().map(|request| request.flow).collect()
    }

    #[test]
    fn a_deep_flow_leaves_every_second_quantum_to_a_shallow_one() {
        let mut waiting = Waiting::new(512);
        for _ in 0..FLOW_WAITING_MAX {
            waiting.push(request(1, Op::Read, 8)).unwrap();
        }
        assert!(waiting.push(request(1, Op::Read, 8)).is_err(), "the FIFO is bounded");
        waiting.push(request(2, Op::Read, 8)).unwrap();
        let order = served(&mut waiting, 16);
        assert_eq!(order.iter().position(|flow| *flow == 2), Some(8), "{order:?}");
    }

    #[test]
    fn shares_are_in_blocks_and_not_in_requests() {
        let mut waiting = Waiting::new(512);
        for _ in 0..64 {
            waiting.push(request(1, Op::Write, 64)).unwrap();
        }
        for _ in 0..256 {
            waiting.push(request(2, Op::Write, 8)).unwrap();
        }
        let order = served(&mut waiting, 90);
        let large = order.iter().filter(|flow| **flow == 1).count();
        assert_eq!((large, order.len() - large), (10, 80));
    }

    #[test]
    fn a_request_beyond_the_quantum_saves_up_for_it() {
        let mut waiting = Waiting::new(512);
        waiting.push(request(1, Op::Read, 2048)).unwrap();
        waiting.push(request(2, Op::Unmap, u32::MAX)).unwrap();
        assert_eq!(served(&mut waiting, 4), [2, 1]);
        assert!(waiting.is_empty());
    }

    #[test]
    fn serving_one_at_a_time_gives_the_same_order() {
        let fill = || {
            let mut waiting = Waiting::new(4096);
            for index in 0..200u16 {
                waiting.push(request(index % 5, Op::Read, u32::from(index % 7) + 1)).unwrap();
            }
            waiting
        };
        let (mut whole, mut single) = (fill(), fill());
        let all = served(&mut whole, 1000);
        let each: Vec<u16> = (0..200).flat_map(|_| served(&mut single, 1)).collect();
        assert_eq!(all, each);
        assert_eq!(single.len(), 0);
    }
}
