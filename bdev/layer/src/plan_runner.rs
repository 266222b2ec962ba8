//! Runs the I/O of a planner: code without I/O of its own, which says what to read and write and is given
//! what came of it.
//!
//! A [`Planner`] is deterministic: the same code runs here, under a simulator and over a disk image in
//! memory. The [`PlanRunner`] has what every such user needs beside a channel: a table of I/Os in flight,
//! waiting for memory, barriers and retries. It takes turns with other work on its core: [`PlanRunner::turn`]
//! is called by a poller, or [`run_plan`] does so until the planner is done.
//!
//! ```
//! use bdev::{Access, PlannedAction, PlannedIo, PlannedOutcome, Planner, Registry, malloc, run_plan};
//! /// Writes a block, flushes, and reads it back.
//! #[derive(Default)]
//! struct Check { step: u64, read: Vec<u8> }
//! impl Planner for Check {
//!     fn next_io(&mut self) -> Option<PlannedIo> {
//!         let action = match self.step {
//!             0 => PlannedAction::Write { offset: 4096, data: vec![7; 4096].into(), durable: false },
//!             1 => PlannedAction::Flush,
//!             2 => PlannedAction::Read { offset: 4096, bytes: 4096 },
//!             _ => return None,
//!         };
//!         self.step += 1;
//!         Some(PlannedIo { id: self.step, action })
//!     }
//!     fn complete(&mut self, _id: u64, outcome: PlannedOutcome) {
//!         if let Ok(Some(data)) = outcome {
//!             self.read = vec![0; data.len()];
//!             data.copy_to(0, &mut self.read);
//!         }
//!     }
//! }
//! let registry = Registry::new();
//! malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 512))?;
//! let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).expect("a reactor");
//! let core = reactor.core();
//! let channel = registry.open("Malloc0", Access::ReadWrite)?.channel(&core)?;
//! let mut check = reactor.block_on(async move { run_plan(&core, channel, Check::default()).await });
//! // A flush is a barrier: the write completed before it, the read began after it.
//! assert_eq!(check.read, vec![7; 4096]);
//! # Ok::<(), bdev::BdevError>(())
//! ```

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use block_io::{Channel as _, Op, RequestFlags, Status, Tag};
use dma::Data;
use reactor::{Core, Period, PollResult, Poller, Shutdown};
use slots::{Slab, Slot};

use crate::{BdevChannel, Completion, Request};

/// I/Os of one runner in flight: enough to keep a device busy with what is not a data path.
const IN_FLIGHT_MAX: u32 = 64;
/// How often an I/O is repeated that failed with a status that says so.
const RETRIES_MAX: u32 = 8;
/// Wait before a repetition, and for memory.
const RETRY_NS: u64 = 1_000_000;
/// Blocks of one request without data, as few devices take 2^32.
const RANGE_BLOCKS_MAX: u64 = 1 << 20;
/// Bytes of zeroes in memory, for devices that write no zeroes without.
const ZEROES_BYTES: u64 = 1 << 20;

/// What a planner wants done. Offsets and lengths are in bytes, whole blocks of the device, inside it.
#[derive(Debug)]
pub enum PlannedAction {
    /// Reads, up to the largest data that a pool has at a time; 1 MiB is safe.
    Read {
        /// Where on the device.
        offset: u64,
        /// Bytes.
        bytes: usize,
    },
    /// Writes.
    Write {
        /// Where on the device.
        offset: u64,
        /// What; whole blocks.
        data: PlannedData,
        /// With FUA: it is on the medium when it completes.
        durable: bool,
    },
    /// Writes zeroes without data; with data where the device cannot.
    WriteZeroes {
        /// Where on the device.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Gives the space back; what it reads as then is the device's matter. Does nothing where the device
    /// cannot.
    Deallocate {
        /// Where on the device.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
    /// A barrier: begins when all I/O before it has completed, makes it durable, and holds what follows until
    /// then.
    Flush,
}

/// Data of a write.
#[derive(Debug)]
pub enum PlannedData {
    /// These bytes, which are copied to memory of the core's pool.
    Bytes(Vec<u8>),
    /// Data that was read before, or that a request has: nothing is copied.
    Data(Data),
}

impl From<Vec<u8>> for PlannedData {
    fn from(bytes: Vec<u8>) -> PlannedData {
        PlannedData::Bytes(bytes)
    }
}

impl From<Data> for PlannedData {
    fn from(data: Data) -> PlannedData {
        PlannedData::Data(data)
    }
}

impl PlannedData {
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            PlannedData::Bytes(bytes) => bytes.len(),
            PlannedData::Data(data) => data.len(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An I/O of a planner.
#[derive(Debug)]
pub struct PlannedIo {
    /// The planner's own number of it.
    pub id: u64,
    /// What is to be done.
    pub action: PlannedAction,
}

/// What came of an I/O: the data of a read or write, or why it failed.
pub type PlannedOutcome = Result<Option<Data>, Status>;

/// Decides what to read and write, without doing it.
pub trait Planner {
    /// An I/O to begin now. `None` if others have to complete first, or if there is nothing to do.
    fn next_io(&mut self) -> Option<PlannedIo>;

    /// An I/O has ended. They end in any order.
    fn complete(&mut self, id: u64, outcome: PlannedOutcome);
}

/// Runs planners over one channel, on its core. Dropped, it leaves the I/O in flight to the channel.
pub struct PlanRunner {
    core: Core,
    channel: BdevChannel,
    block_bytes: u64,
    in_flight: Slab<InFlight>,
    /// What the channel has not accepted.
    requests: Vec<Request>,
    completions: Vec<Completion>,
    /// What waits for memory, or for all I/O before it.
    waiting: Option<PlannedIo>,
    /// A flush is in flight: nothing else begins.
    is_flushing: bool,
    /// To be repeated at a time.
    retries: Vec<(u64, Slot)>,
    /// When memory is asked for again.
    memory_at_ns: Option<u64>,
}

struct InFlight {
    id: u64,
    /// The request, while it waits to be repeated.
    request: Option<Request>,
    retries: u32,
    /// What is left of a range after the request in flight.
    rest: Option<RangeRest>,
}

/// Blocks that get the same as those before them.
#[derive(Clone, Copy)]
struct RangeRest {
    first: u64,
    blocks: u64,
}

impl PlanRunner {
    /// A runner without I/O.
    pub fn new(core: &Core, channel: BdevChannel) -> PlanRunner {
        PlanRunner {
            core: core.clone(),
            block_bytes: channel.block_size().into(),
            channel,
            in_flight: Slab::with_capacity(IN_FLIGHT_MAX),
            requests: Vec::new(),
            completions: Vec::new(),
            waiting: None,
            is_flushing: false,
            retries: Vec::new(),
            memory_at_ns: None,
        }
    }

    /// Whether nothing is in flight or waits.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.waiting.is_none()
    }

    /// Hands completions to the planner, and begins what it wants and there is room for. Returns how many
    /// I/Os have ended.
    pub fn turn(&mut self, planner: &mut dyn Planner) -> usize {
        let now_ns = self.core.now_ns();
        self.repeat(now_ns);
        self.channel.submit(&mut self.requests);
        let mut completions = std::mem::take(&mut self.completions);
        self.channel.poll(&mut completions);
        let mut ended = 0;
        for completion in completions.drain(..) {
            ended += usize::from(self.complete(completion, planner, now_ns));
        }
        self.completions = completions;
        while let Some(io) = self.take_next(planner, now_ns) {
            if let Err(io) = self.begin(io, planner) {
                self.waiting = Some(io);
                break;
            }
        }
        self.channel.submit(&mut self.requests);
        ended
    }

    /// When [`turn`](Self::turn) is to be called next at the latest; `None` if only a completion changes
    /// anything.
    pub fn deadline(&self) -> Option<u64> {
        if !self.requests.is_empty() && self.channel.outstanding() == 0 {
            return Some(0);
        }
        let retry = self.retries.iter().map(|(at_ns, _)| *at_ns).min();
        [retry, self.memory_at_ns, self.channel.deadline()].into_iter().flatten().min()
    }

    /// The next I/O that may begin.
    fn take_next(&mut self, planner: &mut dyn Planner, now_ns: u64) -> Option<PlannedIo> {
        if self.is_flushing || self.in_flight.is_full() {
            return None;
        }
        if self.memory_at_ns.is_some_and(|at_ns| now_ns < at_ns) {
            return None;
        }
        self.memory_at_ns = None;
        let io = self.waiting.take().or_else(|| planner.next_io())?;
        if matches!(io.action, PlannedAction::Flush) && !self.in_flight.is_empty() {
            self.waiting = Some(io);
            return None;
        }
        Some(io)
    }

    /// Begins an I/O; gives it back if there is no memory.
    fn begin(&mut self, io: PlannedIo, planner: &mut dyn Planner) -> Result<(), PlannedIo> {
        let PlannedIo { id, action } = io;
        let block_bytes = self.block_bytes;
        let blocks = |bytes: usize| (bytes as u64 / block_bytes) as u32;
        match action {
            PlannedAction::Read { offset, bytes } => {
                let Some(data) = self.core.pool().take_data(bytes) else {
                    return Err(self.await_memory(id, PlannedAction::Read { offset, bytes }));
                };
                let mut request = Request::new(Tag(0), Op::Read, offset / block_bytes, blocks(bytes));
                request.set_data(Some(data));
                self.push(id, request, None);
            }
            PlannedAction::Write { offset, data, durable } => {
                let data = match data {
                    PlannedData::Data(data) => data,
                    PlannedData::Bytes(bytes) => match self.core.pool().take_data(bytes.len()) {
                        Some(mut data) => {
                            data.copy_from(0, &bytes);
                            data
                        }
                        None => {
                            let action = PlannedAction::Write { offset, data: bytes.into(), durable };
                            return Err(self.await_memory(id, action));
                        }
                    },
                };
                let mut request = Request::new(Tag(0), Op::Write, offset / block_bytes, blocks(data.len()));
                request.flags.set(RequestFlags::FUA, durable);
                request.set_data(Some(data));
                self.push(id, request, None);
            }
            PlannedAction::WriteZeroes { offset, bytes }
                if self.channel.device().supports(Op::WriteZeroes) =>
            {
                self.push_range(id, Op::WriteZeroes, offset, bytes);
            }
            PlannedAction::WriteZeroes { offset, bytes } => {
                let Some(mut zeroes) = self.core.pool().take_data(bytes.min(ZEROES_BYTES) as usize) else {
                    return Err(self.await_memory(id, PlannedAction::WriteZeroes { offset, bytes }));
                };
                zeroes.clear();
                let (first, count) = (offset / block_bytes, blocks(zeroes.len()));
                let (first_left, left) = (first + u64::from(count), bytes / block_bytes - u64::from(count));
                let mut request = Request::new(Tag(0), Op::Write, first, count);
                request.set_data(Some(zeroes));
                self.push(id, request, (left > 0).then_some(RangeRest { first: first_left, blocks: left }));
            }
            PlannedAction::Deallocate { offset, bytes } => {
                if !self.channel.device().supports(Op::Unmap) {
                    planner.complete(id, Ok(None));
                    return Ok(());
                }
                self.push_range(id, Op::Unmap, offset, bytes);
            }
            PlannedAction::Flush => {
                self.is_flushing = true;
                self.push(id, Request::new(Tag(0), Op::Flush, 0, 0), None);
            }
        }
        Ok(())
    }

    fn await_memory(&mut self, id: u64, action: PlannedAction) -> PlannedIo {
        self.memory_at_ns = Some(self.core.now_ns() + RETRY_NS);
        PlannedIo { id, action }
    }

    fn push_range(&mut self, id: u64, op: Op, offset: u64, bytes: u64) {
        let (first, blocks) = (offset / self.block_bytes, bytes / self.block_bytes);
        let count = blocks.min(RANGE_BLOCKS_MAX);
        let rest = (blocks > count).then_some(RangeRest { first: first + count, blocks: blocks - count });
        self.push(id, Request::new(Tag(0), op, first, count as u32), rest);
    }

    fn push(&mut self, id: u64, mut request: Request, rest: Option<RangeRest>) {
        let entry = InFlight { id, request: None, retries: 0, rest };
        let slot = self.in_flight.insert(entry).ok().expect("the table has a free slot");
        request.tag = Tag(slot.to_bits());
        self.requests.push(request);
    }

    /// Returns whether the I/O has ended.
    fn complete(&mut self, completion: Completion, planner: &mut dyn Planner, now_ns: u64) -> bool {
        let (slot, status) = (Slot::from_bits(completion.tag().0), completion.status());
        let entry = self.in_flight.get_mut(slot).expect("a completion of an I/O in flight");
        if is_transient(status) && entry.retries < RETRIES_MAX {
            entry.retries += 1;
            entry.request = Some(completion.into_request());
            self.retries.push((now_ns + (RETRY_NS << entry.retries), slot));
            return false;
        }
        if status.is_success()
            && let Some(rest) = entry.rest.take()
        {
            let mut request = completion.into_request();
            let count = rest.blocks.min(match request.op {
                Op::Write => request.blocks.into(),
                _ => RANGE_BLOCKS_MAX,
            });
            let left = RangeRest { first: rest.first + count, blocks: rest.blocks - count };
            entry.rest = (left.blocks > 0).then_some(left);
            if let Some(mut zeroes) = request.take_data() {
                if count < request.blocks.into() {
                    zeroes.split_off((count * self.block_bytes) as usize);
                }
                request.set_data(Some(zeroes));
            }
            (request.lba, request.blocks) = (rest.first, count as u32);
            self.requests.push(request);
            return false;
        }
        let entry = self.in_flight.remove(slot).expect("it was there just before");
        let mut request = completion.into_request();
        if request.op == Op::Flush {
            self.is_flushing = false;
        }
        let outcome = if status.is_success() { Ok(request.take_data()) } else { Err(status) };
        planner.complete(entry.id, outcome);
        true
    }

    /// Submits again what is due.
    fn repeat(&mut self, now_ns: u64) {
        let (in_flight, requests) = (&mut self.in_flight, &mut self.requests);
        self.retries.retain(|(at_ns, slot)| {
            if now_ns < *at_ns {
                return true;
            }
            requests.extend(in_flight.get_mut(*slot).and_then(|entry| entry.request.take()));
            false
        });
    }
}

/// Whether a status asks for a repetition: the command was interrupted, or the device is becoming ready.
fn is_transient(status: Status) -> bool {
    !status.is_do_not_retry()
        && [Status::COMMAND_INTERRUPTED, Status::NAMESPACE_NOT_READY].iter().any(|one| one.same_code(status))
}

/// Runs a planner on this core until it has nothing in flight and wants nothing more, and returns it.
pub async fn run_plan<P: Planner + 'static>(core: &Core, channel: BdevChannel, planner: P) -> P {
    let runner = PlanRunner::new(core, channel);
    let state = Rc::new(RefCell::new(RunState { runner, planner: Some(planner), ended: None, waker: None }));
    core.add_poller(Box::new(PlanPoller(state.clone())), Period::EveryTurn);
    poll_fn(move |context| {
        let mut state = state.borrow_mut();
        match state.ended.take() {
            Some(planner) => Poll::Ready(planner),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    })
    .await
}

/// What the poller of [`run_plan`] and its future share.
struct RunState<P> {
    runner: PlanRunner,
    /// Until it is done.
    planner: Option<P>,
    ended: Option<P>,
    waker: Option<Waker>,
}

struct PlanPoller<P>(Rc<RefCell<RunState<P>>>);

impl<P: Planner> Poller for PlanPoller<P> {
    fn name(&self) -> &str {
        "bdev plan"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let RunState { runner, planner, ended, waker } = &mut *self.0.borrow_mut();
        let Some(running) = planner else { return PollResult::Finished };
        let count = runner.turn(running);
        if !runner.is_idle() {
            return PollResult::from_count(count);
        }
        *ended = planner.take();
        if let Some(waker) = waker.take() {
            waker.wake();
        }
        PollResult::Finished
    }

    fn deadline(&self) -> Option<u64> {
        let state = self.0.borrow();
        if state.planner.is_none() { Some(0) } else { state.runner.deadline() }
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        let state = self.0.borrow();
        if state.planner.is_none() || state.runner.in_flight.is_empty() {
            Shutdown::Done
        } else {
            Shutdown::Draining
        }
    }
}

#[cfg(test)]
mod tests;
