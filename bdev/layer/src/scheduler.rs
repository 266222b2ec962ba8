//! The place of schedulers: which of a channel's queued requests go to the module, and when.
//!
//! A channel has one [`Scheduler`], on its core. What several cores have to agree on is in the
//! [`SchedulerPolicy`] that makes them; they meet in [`Scheduler::exchange`]. Ringbolt's own is a
//! [`RateLimited`] [`FairQueue`]: rate limits are in force whatever the policy is.
//!
//! [`FairQueue`]: crate::fair_queue::FairQueue

use std::sync::Arc;

use block_io::Tag;
use os::clock::Clock;

use crate::device::LIMITED;
use crate::qos::ChannelQos;
use crate::{BlockDevice, Completion, Request, Tenants};

/// Interval at which a channel that reached a rate limit looks for another limit; a change sends no event.
const RATE_CHECK_NS: u64 = 10_000_000;

/// Requests queued in front of a module on one core, and their order. Sans-IO: time is handed in as the
/// core's clock, which costs a few nanoseconds to read and can be virtual.
///
/// Order of calls: [`enqueue`](Self::enqueue) for each request of a batch; then, and in each poll,
/// [`exchange`] and [`next`]; [`completed`](Self::completed) for what the module has completed. A request
/// goes to the module after it left `next`, unless it is aborted or the device is removed; for the policy
/// that [decides about all](SchedulerPolicy::decides_all) it is reported by `completed` in any case, once.
///
/// [`exchange`]: Self::exchange
/// [`next`]: Self::next
pub trait Scheduler {
    /// Queues a request, or returns it: it stays in the caller's batch, in order, and is offered again. What
    /// is queued must have a limit, for each flow and for all together.
    ///
    /// # Errors
    /// The request, if there is no space for it.
    fn enqueue(&mut self, request: Request, clock: &Clock) -> Result<(), Request>;

    /// Moves requests that may go to the module now to `out`, in order, at most `max` of them.
    fn next(&mut self, max: usize, clock: &Clock, out: &mut Vec<Request>);

    /// Requests that [`next`](Self::next) had moved have ended. Called only if the policy
    /// [decides about all](SchedulerPolicy::decides_all).
    fn completed(&mut self, completions: &[Completion], clock: &Clock) {
        let _ = (completions, clock);
    }

    /// Learns what the schedulers of other cores and the control plane have published, and publishes its own.
    /// Called before [`next`](Self::next), in each poll with queued requests.
    fn exchange(&mut self, clock: &Clock) {
        let _ = clock;
    }

    /// When [`next`](Self::next) is due without an event, in nanoseconds of the clock: 0 while it has
    /// requests for which the module's space is all that is missing, `None` if nothing is queued.
    fn deadline(&self, clock: &Clock) -> Option<u64>;

    /// Whether this batch may go to the module at once, past the queue, which is empty. Called only for
    /// devices with a rate limit. `same_shape`: all requests have one operation and length.
    fn admits(&mut self, batch: &[Request], same_shape: bool, clock: &Clock) -> bool {
        let _ = (batch, same_shape, clock);
        true
    }

    /// Takes a queued request out, by its tag and flow, as it is aborted.
    fn remove(&mut self, tag: Tag, flow: u16) -> Option<Request>;

    /// Moves all queued requests to `out`, as the device is removed.
    fn drain(&mut self, out: &mut Vec<Request>);
}

impl<S: Scheduler + ?Sized> Scheduler for Box<S> {
    fn enqueue(&mut self, request: Request, clock: &Clock) -> Result<(), Request> {
        (**self).enqueue(request, clock)
    }

    fn next(&mut self, max: usize, clock: &Clock, out: &mut Vec<Request>) {
        (**self).next(max, clock, out);
    }

    fn completed(&mut self, completions: &[Completion], clock: &Clock) {
        (**self).completed(completions, clock);
    }

    fn exchange(&mut self, clock: &Clock) {
        (**self).exchange(clock);
    }

    fn deadline(&self, clock: &Clock) -> Option<u64> {
        (**self).deadline(clock)
    }

    fn admits(&mut self, batch: &[Request], same_shape: bool, clock: &Clock) -> bool {
        (**self).admits(batch, same_shape, clock)
    }

    fn remove(&mut self, tag: Tag, flow: u16) -> Option<Request> {
        (**self).remove(tag, flow)
    }

    fn drain(&mut self, out: &mut Vec<Request>) {
        (**self).drain(out);
    }
}

/// Makes the schedulers of a device, one for each channel, and has what they share.
/// [`BlockDevice::set_scheduler_policy`] takes one.
pub trait SchedulerPolicy: Send + Sync {
    /// Its name, for logs.
    fn name(&self) -> &'static str;

    /// The scheduler of a new channel. Called on the channel's core.
    fn scheduler(&self, context: &SchedulerContext<'_>) -> Box<dyn Scheduler>;

    /// Whether every request goes through the scheduler, and every completion is reported to it. Otherwise a
    /// batch goes past it while nothing is queued and the module has space for all: that costs nothing.
    fn decides_all(&self) -> bool {
        true
    }
}

/// What a scheduler is made from.
#[derive(Debug)]
pub struct SchedulerContext<'a> {
    /// Index of the core.
    pub core: usize,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Maximum number of requests in flight on the channel.
    pub depth: u32,
    /// The tenants of requests, by their flows.
    pub tenants: &'a Tenants,
}

/// A scheduler within the rate limits of its device. What they do not allow yet keeps its place at the front.
pub(crate) struct RateLimited<S> {
    inner: S,
    qos: ChannelQos,
    device: Arc<BlockDevice>,
    block_size: u32,
    /// The request at the front that awaits tokens; empty or one.
    pending: Vec<Request>,
}

impl<S: Scheduler> RateLimited<S> {
    pub(crate) fn new(inner: S, device: &Arc<BlockDevice>, block_size: u32) -> RateLimited<S> {
        RateLimited {
            inner,
            qos: ChannelQos::default(),
            device: device.clone(),
            block_size,
            pending: Vec::new(),
        }
    }

    /// Dequeues one by one, as the rate limits allow.
    #[cold]
    fn next_limited(&mut self, max: usize, clock: &Clock, out: &mut Vec<Request>) {
        for _ in 0..max {
            if self.pending.is_empty() {
                self.inner.next(1, clock, &mut self.pending);
            }
            let Some(request) = self.pending.pop() else { return };
            if !self.qos.admit(&self.device.qos, clock, &request, self.block_size) {
                return self.pending.push(request);
            }
            out.push(request);
        }
    }
}

impl<S: Scheduler> Scheduler for RateLimited<S> {
    fn enqueue(&mut self, request: Request, clock: &Clock) -> Result<(), Request> {
        self.inner.enqueue(request, clock)
    }

    fn next(&mut self, max: usize, clock: &Clock, out: &mut Vec<Request>) {
        let state = self.device.state.load(std::sync::atomic::Ordering::Relaxed);
        if self.pending.is_empty() && state & LIMITED == 0 {
            self.inner.next(max, clock, out);
        } else {
            self.next_limited(max, clock, out);
        }
    }

    fn completed(&mut self, completions: &[Completion], clock: &Clock) {
        self.inner.completed(completions, clock);
    }

    fn exchange(&mut self, clock: &Clock) {
        self.qos.exchange(&self.device.qos);
        self.inner.exchange(clock);
    }

    fn deadline(&self, clock: &Clock) -> Option<u64> {
        if self.pending.is_empty() {
            return self.inner.deadline(clock);
        }
        Some(self.qos.retry_at_ns.min(clock.now_ns() + RATE_CHECK_NS))
    }

    fn admits(&mut self, batch: &[Request], same_shape: bool, clock: &Clock) -> bool {
        self.qos.admit_batch(&self.device.qos, clock, batch, same_shape, self.block_size)
    }

    fn remove(&mut self, tag: Tag, flow: u16) -> Option<Request> {
        let is_pending = |request: &mut Request| request.tag == tag && request.flow == flow;
        self.inner.remove(tag, flow).or_else(|| self.pending.pop_if(is_pending))
    }

    fn drain(&mut self, out: &mut Vec<Request>) {
        out.append(&mut self.pending);
        self.inner.drain(out);
    }
}
