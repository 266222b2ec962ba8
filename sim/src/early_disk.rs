//! A disk that acknowledges writes before it has them: a planted fault.

use std::collections::VecDeque;
use std::sync::Arc;

use bdev::{Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, InfoValue, Request};
use block_io::{Op, RequestFlags, Status, Tag};
use os::clock::Clock;
use reactor::Core;

/// How long an acknowledged write stays in the channel, in nanoseconds.
const LATE_NS: u64 = 500_000;
/// Tag of the writes to the disk below, whose completions are dropped.
const OWN: Tag = Tag(u64::MAX);

/// Acknowledges each write at once and passes it on later; everything else follows in order. It loses acknowledged
/// writes, even those with FUA, when its process ends, and behaves in every other respect.
pub struct EarlyDisk(pub Arc<dyn Bdev>);

struct EarlyChannel {
    base: BoxedChannel,
    core: Core,
    clock: Clock,
    /// Not yet passed on, with the time when that is due.
    queued: VecDeque<(u64, Request)>,
    acknowledged: Vec<Completion>,
    completed: Vec<Completion>,
}

impl Bdev for EarlyDisk {
    fn product_name(&self) -> &'static str {
        "Early disk"
    }

    fn geometry(&self) -> BdevGeometry {
        self.0.geometry()
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn supports(&self, op: Op) -> bool {
        self.0.supports(op)
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(EarlyChannel {
            base: self.0.open(core)?,
            core: core.clone(),
            clock: core.clock().clone(),
            queued: VecDeque::new(),
            acknowledged: Vec::new(),
            completed: Vec::new(),
        }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        self.0.driver_specific()
    }

    fn depth(&self) -> u32 {
        self.0.depth()
    }
}

impl EarlyChannel {
    fn acknowledge(&mut self, request: Request, now_ns: u64) {
        let data = request.data().expect("a write has data");
        let Some(mut buffer) = self.core.pool().take(data.len()) else {
            self.acknowledged.push(request.complete(Status::INTERNAL_ERROR));
            return;
        };
        data.copy_to(0, buffer.as_mut_slice());
        let mut write = Request::write(OWN, request.lba, request.blocks, buffer);
        write.flags = RequestFlags::FUA;
        self.queued.push_back((now_ns + LATE_NS, write));
        self.acknowledged.push(request.complete(Status::SUCCESS));
    }
}

impl block_io::Channel for EarlyChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let now_ns = self.clock.now_ns();
        for request in batch.drain(..) {
            match request.op {
                Op::Write => self.acknowledge(request, now_ns),
                // Behind the writes, and no later than them.
                _ => self.queued.push_back((now_ns, request)),
            }
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let now_ns = self.clock.now_ns();
        let mut due = Vec::new();
        while self.queued.front().is_some_and(|(at_ns, _)| *at_ns <= now_ns) {
            due.extend(self.queued.pop_front().map(|(_, request)| request));
        }
        self.base.submit(&mut due);
        self.base.poll(&mut self.completed);
        sink.extend(self.completed.drain(..).filter(|completion| completion.tag() != OWN));
        sink.append(&mut self.acknowledged);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.acknowledged.is_empty() {
            return Some(0);
        }
        let queued = self.queued.front().map(|(at_ns, _)| *at_ns);
        [queued, self.base.deadline()].into_iter().flatten().min()
    }
}
