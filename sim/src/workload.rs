//! A load on one core of a host: writes, reads and flushes of its own blocks, checked by the oracle.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use bdev::{BdevChannel, Completion, Request};
use block_io::{Channel, Op, RequestFlags, Tag};
use random::WyRand;
use reactor::{Core, Period, PollResult, Poller};

use crate::oracle::{BLOCK_BYTES, Moment, Oracle, encode};

/// Pause before a read of the verification is repeated: paths may still be reconnecting.
const RETRY_NS: u64 = 10_000_000;
/// Longest request, in blocks.
const REQUEST_BLOCKS_MAX: u64 = 12;

/// A core's load.
#[derive(Clone, Debug)]
pub struct WorkloadConfig {
    /// First block.
    pub start: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Requests in flight at most.
    pub depth: usize,
    /// Mean time between requests, in nanoseconds.
    pub pause_ns: u64,
}

/// The load of one core, as its scenario sees it. Cheap to clone.
#[derive(Clone)]
pub struct SimWorkload(Rc<RefCell<WorkloadState>>);

struct WorkloadState {
    config: WorkloadConfig,
    phase: Phase,
    counts: WorkloadCounts,
    violation: Option<String>,
    in_flight: usize,
    core: Core,
}

/// What a load has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkloadCounts {
    /// Requests that succeeded.
    pub succeeded: u64,
    /// Requests that failed.
    pub failed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Load,
    /// No new requests.
    Drain,
    /// Reads every block once; the next one.
    Verify(u64),
}

struct WorkloadPoller {
    shared: SimWorkload,
    oracle: Rc<RefCell<Oracle>>,
    core: Core,
    channel: BdevChannel,
    random: WyRand,
    in_flight: BTreeMap<u64, InFlight>,
    last_tag: u64,
    next_issue_ns: u64,
    /// Ranges whose verification failed.
    unread: Vec<(u64, u32)>,
    batch: Vec<Request>,
    done: Vec<Completion>,
}

struct InFlight {
    op: Op,
    lba: u64,
    blocks: u32,
    version: u64,
    fua: bool,
    submitted: Moment,
}

impl SimWorkload {
    /// Starts a load on `core` through `channel`, whose blocks have 512 bytes.
    pub fn start(
        core: &Core,
        channel: BdevChannel,
        oracle: &Rc<RefCell<Oracle>>,
        config: WorkloadConfig,
    ) -> SimWorkload {
        assert_eq!(channel.block_size() as usize, BLOCK_BYTES);
        let state = WorkloadState {
            config,
            phase: Phase::Load,
            counts: WorkloadCounts::default(),
            violation: None,
            in_flight: 0,
            core: core.clone(),
        };
        let workload = SimWorkload(Rc::new(RefCell::new(state)));
        let poller = WorkloadPoller {
            shared: workload.clone(),
            oracle: oracle.clone(),
            core: core.clone(),
            channel,
            random: core.rng(),
            in_flight: BTreeMap::new(),
            last_tag: 0,
            next_issue_ns: 0,
            unread: Vec::new(),
            batch: Vec::new(),
            done: Vec::new(),
        };
        core.add_poller(Box::new(poller), Period::EveryTurn);
        workload.wake();
        workload
    }

    /// Submits nothing more.
    pub fn drain(&self) {
        self.set_phase(Phase::Drain);
    }

    /// Reads all blocks, until that succeeds.
    pub fn verify(&self) {
        let start = self.0.borrow().config.start;
        self.set_phase(Phase::Verify(start));
    }

    /// Whether nothing is in flight and nothing is left to submit.
    pub fn is_idle(&self) -> bool {
        let state = self.0.borrow();
        let end = state.config.start + state.config.blocks;
        state.in_flight == 0 && (state.phase == Phase::Drain || state.phase == Phase::Verify(end))
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.0.borrow().in_flight
    }

    /// What it has done.
    pub fn counts(&self) -> WorkloadCounts {
        self.0.borrow().counts
    }

    /// The first violation.
    pub fn violation(&self) -> Option<String> {
        self.0.borrow().violation.clone()
    }

    fn set_phase(&self, phase: Phase) {
        self.0.borrow_mut().phase = phase;
        self.wake();
    }

    fn wake(&self) {
        self.0.borrow().core.event_loop().waker().wake();
    }
}

impl WorkloadPoller {
    /// Whether the time has come for a request, and there is room.
    fn may_issue(&self, now_ns: u64) -> bool {
        let state = self.shared.0.borrow();
        let end = state.config.start + state.config.blocks;
        self.in_flight.len() < state.config.depth
            && match state.phase {
                Phase::Load => now_ns >= self.next_issue_ns,
                Phase::Drain => false,
                Phase::Verify(next) => next < end || !self.unread.is_empty() && now_ns >= self.next_issue_ns,
            }
    }

    fn issue(&mut self, now_ns: u64) {
        let (config, phase) = {
            let state = self.shared.0.borrow();
            (state.config.clone(), state.phase)
        };
        if let Phase::Verify(next) = phase {
            if now_ns >= self.next_issue_ns
                && let Some((lba, blocks)) = self.unread.pop()
            {
                return self.submit(Op::Read, lba, blocks, false);
            }
            let blocks = REQUEST_BLOCKS_MAX.min(config.start + config.blocks - next);
            self.shared.0.borrow_mut().phase = Phase::Verify(next + blocks);
            return self.submit(Op::Read, next, blocks as u32, false);
        }
        // Bursts, with pauses between them.
        let burst = self.random.happens(700);
        let pause_ns = (self.random.exponential() * config.pause_ns as f64) as u64;
        self.next_issue_ns = now_ns + if burst { pause_ns / 100 } else { pause_ns * 3 };
        let op = match self.random.below(10) {
            0 => Op::Flush,
            1..=3 => Op::Read,
            _ => Op::Write,
        };
        if op == Op::Flush {
            return self.submit(op, 0, 0, false);
        }
        let blocks = 1 + self.random.below(REQUEST_BLOCKS_MAX.min(config.blocks));
        let lba = config.start + self.random.below(config.blocks - blocks + 1);
        let fua = op == Op::Write && self.random.happens(300);
        // A write overlaps nothing in flight, a read no write.
        let overlaps = |other: &InFlight| {
            other.lba < lba + blocks
                && lba < other.lba + u64::from(other.blocks)
                && (op == Op::Write || other.op == Op::Write)
        };
        if !self.in_flight.values().any(overlaps) {
            self.submit(op, lba, blocks as u32, fua);
        }
    }

    fn submit(&mut self, op: Op, lba: u64, blocks: u32, fua: bool) {
        self.last_tag += 1;
        let mut oracle = self.oracle.borrow_mut();
        let version = if op == Op::Write { oracle.next_version() } else { 0 };
        let submitted = oracle.now();
        let mut request = Request::new(Tag(self.last_tag), op, lba, blocks);
        if op != Op::Flush {
            let mut buffer =
                self.core.pool().take(blocks as usize * BLOCK_BYTES).expect("the world's arena has room");
            if op == Op::Write {
                for (lba, block) in (lba..).zip(buffer.as_mut_slice().chunks_exact_mut(BLOCK_BYTES)) {
                    encode(lba, version, block);
                }
            }
            request.set_data(Some(buffer));
        }
        if fua {
            request.flags = RequestFlags::FUA;
        }
        self.in_flight.insert(self.last_tag, InFlight { op, lba, blocks, version, fua, submitted });
        self.batch.push(request);
    }

    fn complete(&mut self, completion: Completion) {
        let Some(own) = self.in_flight.remove(&completion.tag().0) else {
            let violation = format!("{:?} completed twice or was never submitted", completion.tag());
            self.shared.0.borrow_mut().violation.get_or_insert(violation);
            return;
        };
        let succeeded = completion.status().is_success();
        let mut oracle = self.oracle.borrow_mut();
        let mut state = self.shared.0.borrow_mut();
        match succeeded {
            true => state.counts.succeeded += 1,
            false => state.counts.failed += 1,
        }
        match own.op {
            Op::Write if succeeded => {
                oracle.write_acknowledged(own.lba, own.blocks, own.version, own.fua, own.submitted);
            }
            Op::Write => oracle.write_failed(own.lba, own.blocks, own.version),
            Op::Flush if succeeded => oracle.flush_acknowledged(own.submitted),
            Op::Read if succeeded => {
                let data = completion.request().data().expect("a read has data");
                let mut bytes = vec![0; data.len()];
                data.copy_to(0, &mut bytes);
                if let Err(violation) = oracle.read_returned(own.lba, &bytes, own.submitted) {
                    state.violation.get_or_insert(violation.to_string());
                }
            }
            Op::Read if matches!(state.phase, Phase::Verify(_)) => {
                self.unread.push((own.lba, own.blocks));
                self.next_issue_ns = self.core.now_ns() + RETRY_NS;
            }
            _ => {}
        }
    }
}

impl Poller for WorkloadPoller {
    fn name(&self) -> &str {
        "workload"
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        let mut count = 0;
        while self.may_issue(now_ns) {
            self.issue(now_ns);
            count += 1;
        }
        self.channel.submit(&mut self.batch);
        let mut done = std::mem::take(&mut self.done);
        count += self.channel.poll(&mut done);
        done.drain(..).for_each(|completion| self.complete(completion));
        self.done = done;
        self.shared.0.borrow_mut().in_flight = self.in_flight.len() + self.unread.len();
        PollResult::from_count(count)
    }

    fn deadline(&self) -> Option<u64> {
        let own = match self.shared.0.borrow().phase {
            Phase::Load if self.in_flight.len() < self.shared.0.borrow().config.depth => {
                Some(self.next_issue_ns)
            }
            Phase::Verify(_) if !self.unread.is_empty() => Some(self.next_issue_ns),
            _ if self.may_issue(u64::MAX) => Some(0),
            _ => None,
        };
        [own, self.channel.deadline()].into_iter().flatten().min()
    }
}
