//! I/O queue pairs: one a core, made by message to the core that owns the controller.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use memory::{Buffer, DeviceBuffer};
use reactor::{Core, Period, Poller, Shutdown, Work};
use ring::{Completion, Request, Status};
use sys::clock::now_ns;
use wire_nvme::{cqe, sqe};

use crate::command::{Command, Executed};
use crate::controller::Handle;
use crate::dma::Translator;
use crate::error::{Failure, OpenError};
use crate::inject::Injection;
use crate::interrupt::Interrupt;
use crate::namespace_info::Layout;
use crate::options::{Interrupts, Options};
use crate::queue::{DEPTH_MAX, Overdue, Queue};
use crate::rings::{ENTRIES_MIN, Rings};
use crate::shared::{Ask, Phase, Record, ResetKind, Signal, State};
use crate::stats::{Costs, Meter, QueueStats};
use crate::wait::first;

/// An I/O submission queue and its completion queue, for one core.
///
/// It belongs to the core that made it, and nothing in it is shared: no lock, no atomic operation but the
/// doorbells. Using one from two threads is an error of types, not of luck:
///
/// ```compile_fail,E0277
/// fn sendable<T: Send>() {}
/// sendable::<nvme::QueuePair>(); // `Rc<…>` cannot be sent between threads safely
/// ```
///
/// ```compile_fail,E0277
/// fn shareable<T: Sync>() {}
/// shareable::<nvme::QueuePair>(); // nor shared
/// ```
///
/// ```compile_fail,E0277
/// fn other_thread(mut pair: nvme::QueuePair) {
///     std::thread::spawn(move || pair.poll_commands(&mut Vec::new()));
/// }
/// ```
///
/// Dropped with commands in flight, it keeps their memory until the controller has deleted the queue.
pub struct QueuePair {
    /// `None` only while it is dropped.
    queue: Option<Box<Queue>>,
    core: Core,
    handle: Arc<Handle>,
    record: Arc<Record>,
    seen: Signal,
    /// The epoch in which its commands are.
    epoch: u32,
    link: Link,
    interrupt: Option<Interrupt>,
    /// What completed outside of a poll of its kind.
    ios: Vec<Completion<Buffer>>,
    done: Vec<Executed>,
    meter: Meter,
    io_timeout_ns: u64,
    timeouts: Timeouts,
    changed: bool,
}

/// Whether commands can be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// Yes.
    Live,
    /// The controller is being stopped, or the queue pair has found that it cannot be trusted.
    Holding,
    /// The rings are empty, and the queue is being created anew; whether that was asked for yet.
    Waiting { asked: bool },
    /// No, and never again.
    Failed,
}

/// What is done about commands that take too long.
#[derive(Default)]
struct Timeouts {
    due_ns: u64,
    /// Commands whose abort was asked for, and when.
    aborted: Vec<(u16, u64)>,
    found: Vec<Overdue>,
    reset_asked: bool,
}

/// Time-outs are looked at so many times within one.
const LOOKS_PER_TIMEOUT: u64 = 8;
/// How soon a queue pair that waits for the controller looks again: the owner wakes it as well.
const WAIT_NS: u64 = 1_000_000;

impl QueuePair {
    /// Makes a queue pair on this core. The controller is asked through its owner.
    pub(crate) async fn open(
        core: &Core,
        handle: &Arc<Handle>,
        options: &Options,
    ) -> Result<QueuePair, OpenError> {
        let shared = &handle.shared;
        shared.keep(core.pool().arena());
        let facts = shared.facts();
        if !(1..=DEPTH_MAX).contains(&options.queue_depth) {
            return Err(OpenError::Invalid("a queue's depth is 1 to 1023"));
        }
        let entries = entries_for(options.queue_depth, facts.capabilities.queue_entries_max);
        let depth = options.queue_depth.min(entries - 1);
        let page = 1usize << facts.page_log2;
        let take = |bytes: usize| core.pool().take(bytes.max(page)).ok_or(OpenError::NoMemory);
        let sq = take(entries as usize * sqe::SIZE)?;
        let cq = take(entries as usize * cqe::SIZE)?;
        let ranges = take(depth as usize * wire_nvme::io::DSM_RANGE_SIZE)?;
        let mut translator = Translator::new(shared, core.pool(), facts.page_log2);
        translator.use_sgl(facts.identity.sgls & 3 != 0);
        let qid = shared.take_qid().ok_or(OpenError::NoQueue(facts.queues_max.into()))?;
        let stride = facts.capabilities.doorbell_stride_log2;
        let (sq, cq) = (DeviceBuffer::new(sq), DeviceBuffer::new(cq));
        let mut rings = Rings::new(sq, cq, entries, qid, facts.doorbells.clone(), stride);
        rings.set_shadow(facts.shadow.as_ref().and_then(|pages| pages.of_queue(qid, stride)));
        let made = Queue::new(rings, translator, depth, core.pool(), ranges)
            .and_then(|mut queue| Ok((queue.ring_addresses()?, queue)));
        let (addresses, queue) = match made {
            Ok(made) => made,
            Err(error) => {
                shared.give_qid(qid);
                return Err(OpenError::Device(shared.device().name(), error));
            }
        };
        let wanted = match options.interrupts {
            Interrupts::Off => false,
            Interrupts::Auto => !core.spins(),
            Interrupts::On => true,
        };
        let interrupt = match facts.vectors.get(usize::from(qid)).filter(|_| wanted) {
            Some(_) => Interrupt::watch(core, handle, qid),
            None => None,
        };
        let vector = interrupt.as_ref().map(|_| qid);
        let record = Record::new(shared, qid, addresses, entries, vector, core.events().waker());
        let mut pair = QueuePair {
            queue: Some(Box::new(queue)),
            core: core.clone(),
            handle: handle.clone(),
            record,
            seen: shared.signal(),
            epoch: 0,
            link: Link::Waiting { asked: false },
            interrupt,
            ios: Vec::new(),
            done: Vec::new(),
            meter: Meter::default(),
            io_timeout_ns: options.io_timeout_ns,
            timeouts: Timeouts::default(),
            changed: false,
        };
        pair.meter.switch(options.count_costs);
        pair.connect(options.timeout_ns).await?;
        Ok(pair)
    }

    async fn connect(&mut self, timeout_ns: u64) -> Result<(), OpenError> {
        let deadline_ns = now_ns() + timeout_ns;
        loop {
            self.follow();
            match self.link {
                Link::Live => return Ok(()),
                Link::Failed => {
                    if let Phase::Refused(status) = self.record.phase() {
                        return Err(OpenError::Command("Create I/O Queue", Status::from_field(status)));
                    }
                    return Err(self.failure().unwrap_or(Failure::Detached).into());
                }
                Link::Holding | Link::Waiting { .. } => {}
            }
            if now_ns() > deadline_ns {
                return Err(OpenError::Timeout("Create I/O Queue"));
            }
            let settled = std::pin::pin!(self.record.settled());
            let later = std::pin::pin!(self.core.sleep_ns(WAIT_NS));
            first(settled, later).await;
        }
    }

    /// Its identifier.
    pub fn qid(&self) -> u16 {
        self.record.qid
    }

    /// Commands that can be in flight.
    pub fn depth(&self) -> usize {
        self.queue().depth()
    }

    /// Commands that can still be submitted.
    pub fn room(&self) -> usize {
        if self.link == Link::Live { self.queue().room() } else { 0 }
    }

    /// Commands in flight.
    pub fn in_flight(&self) -> usize {
        self.queue().in_flight()
    }

    /// What it counted.
    pub fn stats(&self) -> QueueStats {
        let queue = self.queue();
        let (tails, heads) = (queue.rings.tails, queue.rings.heads);
        QueueStats {
            doorbells: tails.rung + heads.rung,
            sq_doorbells: tails.rung,
            cq_doorbells: heads.rung,
            sq_shadows: tails.shadows,
            cq_shadows: heads.shadows,
            ..queue.stats
        }
    }

    /// What submission and completion cost; see [`Options::count_costs`].
    pub fn costs(&self) -> Costs {
        self.meter.costs()
    }

    /// Turns the counting of costs on or off.
    pub fn count_costs(&mut self, on: bool) {
        self.meter.switch(on);
    }

    /// Bytes of ordinary memory, and of memory that the device reads or writes, that the queue pair holds.
    pub fn memory_bytes(&self) -> (usize, usize) {
        let (own, device) = self.queue().bytes();
        (own + size_of::<QueuePair>() + size_of::<Record>(), device)
    }

    /// Why it can no longer be used, if so.
    pub fn failure(&self) -> Option<Failure> {
        if let Phase::Refused(status) = self.record.phase() {
            return Some(Failure::QueueRefused(self.record.qid, Status::from_field(status)));
        }
        self.handle.shared.failure().filter(|_| self.link == Link::Failed)
    }

    /// Errors on purpose: the next completions of a kind are dropped or report something else. `false` when
    /// there are too many injections already.
    pub fn inject(&mut self, injection: Injection) -> bool {
        self.queue_mut().injections.add(injection)
    }

    /// Ends all injections.
    pub fn clear_injections(&mut self) {
        self.queue_mut().injections.clear();
    }

    /// Takes requests from the front of the batch; what does not fit stays.
    #[inline]
    pub(crate) fn submit(&mut self, layout: &Layout, batch: &mut Vec<Request<Buffer>>) {
        if self.link != Link::Live || self.handle.shared.signal() != self.seen {
            self.follow();
            if self.link != Link::Live {
                if self.link == Link::Failed {
                    self.ios
                        .extend(batch.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR)));
                }
                return;
            }
        }
        let mark = self.meter.begin();
        let before = batch.len();
        let now_ns = self.stamp();
        let Some(queue) = &mut self.queue else { return };
        queue.submit(layout, batch, &mut self.ios, now_ns);
        if let Some(mark) = mark {
            self.meter.submitted(mark, before - batch.len());
        }
    }

    /// Appends the requests that have completed, and returns how many there were.
    #[inline]
    pub(crate) fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        let before = sink.len();
        if self.handle.shared.signal() != self.seen || self.link != Link::Live {
            self.follow();
        }
        let mark = self.meter.begin();
        let count = self.reap(|ios| std::mem::swap(ios, sink));
        if let Some(mark) = mark {
            self.meter.completed(mark, count);
        }
        if !self.ios.is_empty() {
            sink.append(&mut self.ios);
        }
        sink.len() - before
    }

    /// Takes typed commands from the front of the batch; what does not fit stays. What cannot be sent comes
    /// back at the next [`poll_commands`](Self::poll_commands).
    pub fn submit_commands(&mut self, batch: &mut Vec<Command>) {
        self.follow();
        match self.link {
            Link::Live => {}
            Link::Holding | Link::Waiting { .. } => return,
            Link::Failed => {
                let refused = batch.drain(..).map(|command| command.refuse(Status::HOST_PATHING_ERROR));
                self.done.extend(refused);
                return;
            }
        }
        let mark = self.meter.begin();
        let before = batch.len();
        let now_ns = self.stamp();
        let Some(queue) = &mut self.queue else { return };
        queue.submit_commands(batch, &mut self.done, now_ns);
        if let Some(mark) = mark {
            self.meter.submitted(mark, before - batch.len());
        }
    }

    /// Appends the typed commands that have completed, and returns how many there were.
    pub fn poll_commands(&mut self, sink: &mut Vec<Executed>) -> usize {
        self.follow();
        self.reap(|_| ());
        let count = self.done.len();
        sink.append(&mut self.done);
        count
    }

    /// Whether a namespace has changed since this was last asked.
    pub(crate) fn take_change(&mut self) -> bool {
        std::mem::replace(&mut self.changed, false)
    }

    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.changed
    }

    /// When it is next worth polling; see [`ring::Channel::deadline`].
    pub(crate) fn deadline(&self) -> Option<u64> {
        if !self.ios.is_empty() || !self.done.is_empty() {
            return Some(0);
        }
        match self.link {
            Link::Holding | Link::Waiting { .. } => return Some(now_ns() + WAIT_NS),
            Link::Failed => return None,
            Link::Live => {}
        }
        if self.handle.shared.signal() != self.seen {
            return Some(0);
        }
        match &self.interrupt {
            _ if self.queue().in_flight() == 0 => None,
            None => Some(0),
            Some(_) if self.io_timeout_ns == 0 => None,
            Some(_) => Some(self.timeouts.due_ns.max(1)),
        }
    }

    fn queue(&self) -> &Queue {
        self.queue.as_ref().expect("a queue pair has its queue until it is dropped")
    }

    fn queue_mut(&mut self) -> &mut Queue {
        self.queue.as_mut().expect("a queue pair has its queue until it is dropped")
    }

    /// The time that commands are stamped with: none where nothing looks at it.
    #[inline]
    fn stamp(&self) -> u64 {
        if self.io_timeout_ns == 0 { 0 } else { now_ns() }
    }

    /// Takes in completions. `exchange` puts the caller's sink in the place of ours, and back.
    #[inline]
    fn reap(&mut self, mut exchange: impl FnMut(&mut Vec<Completion<Buffer>>)) -> usize {
        let Some(queue) = &mut self.queue else { return 0 };
        if self.link != Link::Live {
            return 0;
        }
        if let Some(interrupt) = &mut self.interrupt {
            interrupt.drain();
        }
        queue.stats.polls += 1;
        exchange(&mut self.ios);
        let reaped = queue.reap(&mut self.ios, &mut self.done);
        exchange(&mut self.ios);
        match reaped {
            Ok(0) => {
                queue.stats.idle_polls += 1;
                if queue.in_flight() > 0 && self.io_timeout_ns > 0 && queue.stats.idle_polls & 63 == 0
                    || self.interrupt.is_some()
                {
                    self.look_for_overdue();
                }
                0
            }
            Ok(count) => count,
            Err(what) => {
                self.distrust(what);
                0
            }
        }
    }

    /// The device said what cannot be: nothing that it says counts any more.
    #[cold]
    fn distrust(&mut self, what: crate::error::BadCompletion) {
        if self.link != Link::Live {
            return;
        }
        let failure = Failure::Queue { qid: self.record.qid, what };
        if self.handle.shared.asks.send(Ask::Broken(failure)).is_ok() {
            self.link = Link::Holding;
        }
    }

    /// Follows the controller's state.
    #[cold]
    fn follow(&mut self) {
        let signal = self.handle.shared.signal();
        let news = signal != self.seen;
        if news {
            self.changed |= signal.changes() != self.seen.changes();
            self.seen = signal;
        }
        match signal.state() {
            State::Dead => {
                if self.link != Link::Failed {
                    self.end(Status::HOST_PATHING_ERROR);
                    self.link = Link::Failed;
                }
            }
            State::Stopping => {
                if self.link == Link::Live {
                    self.link = Link::Holding;
                }
            }
            State::Stopped => self.empty(signal.epoch()),
            State::Running => {
                self.empty(signal.epoch());
                self.reconnect();
            }
        }
    }

    /// Ends what was in flight in an earlier epoch, and makes the rings ready for this one.
    fn empty(&mut self, epoch: u32) {
        if self.link == Link::Failed || self.epoch == epoch {
            return;
        }
        self.end(Status::ABORTED_BY_HOST);
        let lived = matches!(self.link, Link::Live | Link::Holding);
        self.epoch = epoch;
        let queue = self.queue_mut();
        queue.rings.reset();
        queue.stats.resets += u64::from(lived);
        self.timeouts = Timeouts::default();
        self.link = Link::Waiting { asked: false };
        self.record.set_phase(Phase::Empty(epoch));
    }

    fn reconnect(&mut self) {
        let Link::Waiting { asked } = self.link else { return };
        match self.record.phase() {
            Phase::Live(epoch) if epoch == self.epoch => self.link = Link::Live,
            Phase::Refused(_) => self.link = Link::Failed,
            _ if !asked => {
                let sent = self.handle.shared.asks.send(Ask::Create(self.record.clone())).is_ok();
                self.link = Link::Waiting { asked: sent };
            }
            _ => {}
        }
    }

    /// Every command in flight is over; the device has let go of their memory, or can never be kept from it.
    fn end(&mut self, status: Status) {
        let forsaken = self.handle.shared.is_forsaken();
        let (mut ios, mut done) = (Vec::new(), Vec::new());
        self.queue_mut().end_all(status, &mut ios, &mut done);
        if forsaken {
            let keep = |completion: Completion<Buffer>| {
                let mut request = completion.into_request();
                std::mem::forget(request.buffer.take());
                request.complete(status)
            };
            ios = ios.into_iter().map(keep).collect();
            for executed in &mut done {
                std::mem::forget((executed.command.data.take(), executed.command.metadata.take()));
            }
        }
        self.ios.append(&mut ios);
        self.done.append(&mut done);
    }

    /// Asks for commands that take too long to be aborted, and for a reset when that did not help.
    #[cold]
    fn look_for_overdue(&mut self) {
        let now_ns = now_ns();
        if self.io_timeout_ns == 0 || now_ns < self.timeouts.due_ns || self.link != Link::Live {
            return;
        }
        self.timeouts.due_ns = now_ns + self.io_timeout_ns / LOOKS_PER_TIMEOUT;
        let Some(queue) = &mut self.queue else { return };
        let Timeouts { aborted, found, reset_asked, .. } = &mut self.timeouts;
        found.clear();
        queue.overdue(now_ns, self.io_timeout_ns, found);
        aborted.retain(|(cid, _)| queue.is_in_flight(*cid));
        let shared = &self.handle.shared;
        for Overdue { cid } in found.drain(..) {
            match aborted.iter().find(|(known, _)| *known == cid) {
                None => {
                    queue.stats.timeouts += 1;
                    if shared.asks.send(Ask::Abort { qid: self.record.qid, cid }).is_ok() {
                        shared.aborts.fetch_add(1, Ordering::Relaxed);
                        aborted.push((cid, now_ns));
                    }
                }
                Some((_, since_ns)) if now_ns > since_ns + self.io_timeout_ns => {
                    if !*reset_asked {
                        let ask = Ask::Reset { how: ResetKind::Controller, reply: None };
                        *reset_asked = shared.asks.send(ask).is_ok();
                    }
                }
                Some(_) => {}
            }
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        let leaving = Leaving {
            queue: Some(queue),
            handle: self.handle.clone(),
            record: self.record.clone(),
            epoch: self.epoch,
            interrupt: self.interrupt.take(),
            asked: false,
        };
        // Live, or about to be.
        let asked = matches!(self.link, Link::Waiting { asked: true });
        if self.record.phase() == Phase::Live(self.epoch)
            || asked && self.record.phase() == Phase::Empty(self.epoch)
        {
            self.record.set_phase(Phase::Leaving);
            self.core.add_poller(Box::new(leaving), Period::EveryTurn);
        } else {
            drop(leaving);
        }
    }
}

/// A queue pair whose user has gone, until the controller has deleted it.
struct Leaving {
    queue: Option<Box<Queue>>,
    handle: Arc<Handle>,
    record: Arc<Record>,
    epoch: u32,
    interrupt: Option<Interrupt>,
    asked: bool,
}

impl Leaving {
    /// Whether the device has let go of the queue's memory.
    fn is_over(&self) -> bool {
        let signal = self.handle.shared.signal();
        let stopped = matches!(signal.state(), State::Stopped | State::Dead) || signal.epoch() != self.epoch;
        let stopping = signal.state() == State::Stopping;
        let never_live = !matches!(self.record.phase(), Phase::Live(_) | Phase::Leaving);
        (stopped && !stopping) || never_live
    }

    fn finish(&mut self) {
        self.interrupt = None;
        if let Some(mut queue) = self.queue.take()
            && self.handle.shared.is_forsaken()
        {
            let (mut ios, mut done) = (Vec::new(), Vec::new());
            queue.end_all(Status::ABORTED_BY_HOST, &mut ios, &mut done);
            std::mem::forget((queue, ios, done));
        }
    }
}

impl Poller for Leaving {
    fn name(&self) -> &str {
        "nvme-leaving"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        if self.is_over() {
            self.finish();
            return Work::Finished;
        }
        if !self.asked && self.handle.shared.signal().state() == State::Running {
            self.asked = self.handle.shared.asks.send(Ask::Delete(self.record.clone())).is_ok();
        }
        Work::None
    }

    fn deadline(&self) -> Option<u64> {
        Some(now_ns() + WAIT_NS)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.queue.is_none() || self.is_over() { Shutdown::Done } else { Shutdown::Draining }
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if self.queue.is_none() {
            return;
        }
        if !self.is_over() {
            // The reactor ends before the controller has answered. The device must not write what is
            // about to be somebody else's.
            let shared = &self.handle.shared;
            if shared.device().stop().is_err() && shared.device().is_present() {
                shared.forsake();
            }
        }
        self.finish();
    }
}

/// Entries of the rings: the least power of two above the depth, as far as the controller goes.
fn entries_for(depth: u32, entries_max: u32) -> u32 {
    let mut entries = (depth + 1).next_power_of_two().max(ENTRIES_MIN);
    while entries > entries_max {
        entries /= 2;
    }
    entries
}
