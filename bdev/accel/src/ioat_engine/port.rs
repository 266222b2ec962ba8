//! A core's side of the engine `ioat`: the channel of its function, which all users on the core share.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dma::{Buffer, Data, DeviceAddresses, RegionMapping, RegionState};
use ioat::{FunctionDevice, IoatAddress, IoatChannel, IoatCompletion, IoatError, IoatOp, IoatRequest};
use reactor::Core;

use super::IoatCounts;
use crate::engine::AccelInner;

/// Most requests that wait for entries of the ring; each is an operation on one slice. Others are the CPU's.
const WAITING_MAX: usize = 1024;
/// Interval of looks at a channel that starts or recovers.
const RECHECK_NS: u64 = 10_000;
/// Device addresses of chunks are multiples of this.
const PAGE_BYTES: u64 = 4096;

type Request = block_io::Request<Data>;

/// What a request was not executed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFailure {
    /// The device does nothing more with its memory: the CPU can execute it.
    Stopped,
    /// The device could not be stopped, and may write its memory: it must not be repeated.
    Running,
}

/// A request that a device is done with.
#[derive(Debug)]
pub struct DeviceOutcome {
    /// As it was given.
    pub request: Request,
    /// Whether it was executed.
    pub result: Result<(), DeviceFailure>,
}

/// A request in the ring. Of several operations the last one has it, since they complete in order. It fails
/// if one of them has: they need not be in the ring together, so that a reset can be between them.
struct Job {
    user: PortUser,
    bytes: u64,
    request: Request,
    /// What the device reads or writes besides the memory that the request owns.
    _memory: Option<Rc<Vec<Buffer>>>,
}

/// A user of a port: an index, and a number that no other user of the port has or had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortUser {
    index: usize,
    serial: u64,
}

/// The channel of a core's function, and what its users are to be given.
pub(crate) struct IoatPort {
    inner: Arc<AccelInner>,
    state: RefCell<PortState>,
}

#[derive(Default)]
struct PortState {
    channel: Option<PortChannel>,
    /// The last scan after which the core has looked for a function.
    looked_after: u32,
    users: Vec<Option<UserOutcomes>>,
    users_total: u64,
}

/// What a user has not polled yet.
struct UserOutcomes {
    serial: u64,
    outcomes: Vec<DeviceOutcome>,
}

struct PortChannel {
    inner: Arc<AccelInner>,
    channel: Option<IoatChannel<FunctionDevice, Option<Job>>>,
    addresses: DeviceAddresses<ioat::IoatFunction>,
    counts: Arc<IoatCounts>,
    /// What the ring has no entries for.
    waiting: Vec<IoatRequest<Option<Job>>>,
    /// An operation of the request whose last one completes next has failed.
    has_failed_part: bool,
    completed: Vec<IoatCompletion<Option<Job>>>,
    /// When to look at a channel that starts or recovers: each look is an access to a register.
    recheck_at_ns: u64,
}

impl IoatPort {
    pub(crate) fn new(inner: Arc<AccelInner>) -> IoatPort {
        IoatPort { inner, state: RefCell::default() }
    }

    /// Whether it is of this framework.
    pub(crate) fn is_of(&self, inner: &Arc<AccelInner>) -> bool {
        Arc::ptr_eq(&self.inner, inner)
    }

    /// Adds a user.
    pub(crate) fn attach(&self) -> PortUser {
        let state = &mut *self.state.borrow_mut();
        let index = state.users.iter().position(Option::is_none).unwrap_or_else(|| {
            state.users.push(None);
            state.users.len() - 1
        });
        state.users_total += 1;
        let serial = state.users_total;
        state.users[index] = Some(UserOutcomes { serial, outcomes: Vec::new() });
        PortUser { index, serial }
    }

    /// Removes a user. What it has in flight is dropped when the device is done with it.
    pub(crate) fn detach(&self, user: PortUser) {
        let removed = self.state.borrow_mut().users[user.index].take();
        // After the state is free: requests may have something to do with it when they are dropped.
        drop(removed);
    }

    /// Whether the device takes requests now. Looks for a function if there was a scan.
    pub(crate) fn is_ready(&self, core: &Core) -> bool {
        let mut state = self.state.borrow_mut();
        if state.channel.is_none() && state.looked_after != self.inner.ioat.scans() {
            state.looked_after = self.inner.ioat.scans();
            state.channel = PortChannel::open(&self.inner, core);
        }
        let Some(open) = &mut state.channel else { return false };
        let Some(channel) = &open.channel else { return false };
        if !channel.is_ready() {
            // It starts, or recovers: users that wait for nothing do not poll.
            state.poll(core.now_ns());
        }
        let open = state.channel.as_ref();
        open.and_then(|open| open.channel.as_ref()).is_some_and(IoatChannel::is_ready)
    }

    /// Where the device sees a buffer; `None` if it does not.
    pub(crate) fn buffer_address(&self, buffer: &Buffer) -> Option<u64> {
        let mut state = self.state.borrow_mut();
        state.channel.as_mut()?.addresses.locate(buffer).ok().flatten()
    }

    /// Where the device sees a region, and whether that is final; `None` if it does not, or not yet.
    pub(crate) fn region_address(&self, region: &Arc<RegionMapping>) -> Option<RegionState> {
        let state = self.state.borrow();
        let channel = state.channel.as_ref()?.channel.as_ref()?;
        Some(channel.device().mappings().region(region))
    }

    /// Number of the function that the core has: it changes with the function.
    pub(crate) fn generation(&self) -> u32 {
        self.state.borrow().looked_after
    }

    /// Queues a request, which consists of these operations.
    ///
    /// # Errors
    /// The request, if the device takes no more.
    pub(crate) fn queue(
        &self,
        user: PortUser,
        parts: &mut Vec<IoatOp>,
        request: Request,
        memory: Option<Rc<Vec<Buffer>>>,
    ) -> Result<(), Request> {
        let mut state = self.state.borrow_mut();
        let Some(open) = &mut state.channel else { return Err(request) };
        let Some(channel) = &open.channel else { return Err(request) };
        // All of them, or none: an operation that is rejected fails without those around it.
        let is_taken = !parts.is_empty() && parts.iter().all(|part| channel.accepts(part));
        if !is_taken || open.waiting.len() + parts.len() > WAITING_MAX {
            return Err(request);
        }
        let bytes = parts.iter().map(IoatOp::bytes).sum();
        let last = parts.pop();
        open.waiting.extend(parts.drain(..).map(|op| IoatRequest { op, owned: None }));
        let job = Job { user, bytes, request, _memory: memory };
        open.waiting.extend(last.map(|op| IoatRequest { op, owned: Some(job) }));
        Ok(())
    }

    /// Gives the device what was queued.
    pub(crate) fn flush(&self) {
        if let Some(open) = &mut self.state.borrow_mut().channel
            && let Some(channel) = &mut open.channel
        {
            channel.submit(&mut open.waiting);
        }
    }

    /// Returns what the device is done with.
    pub(crate) fn poll(&self, user: PortUser, now_ns: u64, sink: &mut Vec<DeviceOutcome>) {
        let mut state = self.state.borrow_mut();
        state.poll(now_ns);
        if let Some(user) = &mut state.users[user.index] {
            sink.append(&mut user.outcomes);
        }
    }
}

impl PortState {
    fn poll(&mut self, now_ns: u64) {
        let Some(open) = &mut self.channel else { return };
        let failure = open.poll(now_ns);
        for done in open.completed.drain(..) {
            open.has_failed_part |= done.result.is_err();
            if done.owned.is_none() {
                continue;
            }
            let has_failed = std::mem::take(&mut open.has_failed_part);
            let result = if has_failed { Err(DeviceFailure::Stopped) } else { Ok(()) };
            deliver(&mut self.users, &open.counts, done.owned, result);
        }
        if let Some(reason) = failure
            && let Some(open) = self.channel.take()
        {
            self.close(open, reason);
        }
    }

    /// Ends the use of a function that has failed.
    #[cold]
    fn close(&mut self, mut open: PortChannel, reason: String) {
        let Some(channel) = open.channel.take() else { return };
        let (address, jobs, failure) = stop(channel);
        let result = Err(failure);
        log::error!(target: "ioat", "{address}: {reason}; the CPU copies instead");
        for job in jobs {
            deliver(&mut self.users, &open.counts, job, result);
        }
        for request in open.waiting.drain(..) {
            // The device may have the first operations of it.
            deliver(&mut self.users, &open.counts, request.owned, result);
        }
        open.inner.ioat.close(&address, reason);
    }
}

/// Ends the use of a function: it writes no memory any more, or else its own memory is never used again.
#[cold]
fn stop(channel: IoatChannel<FunctionDevice, Option<Job>>) -> (IoatAddress, Vec<Option<Job>>, DeviceFailure) {
    let (device, jobs) = channel.into_parts();
    let address = device.mappings().device().address().clone();
    let failure = match device.disable_dma() {
        Ok(()) => DeviceFailure::Stopped,
        Err(error) => {
            log::error!(
                target: "ioat",
                "{address} cannot be stopped, and its requests fail: {error}; end it, and create malloc \
                 devices again that it had requests of: until then it may write what it has begun"
            );
            std::mem::forget(device);
            DeviceFailure::Running
        }
    };
    (address, jobs, failure)
}

/// Gives a request back to its user.
fn deliver(
    users: &mut [Option<UserOutcomes>],
    counts: &IoatCounts,
    job: Option<Job>,
    result: Result<(), DeviceFailure>,
) {
    let Some(Job { user, bytes, request, .. }) = job else { return };
    match result {
        Ok(()) => {
            counts.executed.fetch_add(1, Ordering::Relaxed);
            counts.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        Err(_) => _ = counts.failed.fetch_add(1, Ordering::Relaxed),
    }
    if let Some(known) = &mut users[user.index]
        && known.serial == user.serial
    {
        known.outcomes.push(DeviceOutcome { request, result });
    }
}

impl PortChannel {
    /// Takes a function, and begins to start its channel.
    #[cold]
    fn open(inner: &Arc<AccelInner>, core: &Core) -> Option<PortChannel> {
        let (mappings, counts) = inner.ioat.take(core.index())?;
        let address = mappings.device().address().clone();
        let addresses = DeviceAddresses::new(&mappings, core.pool().arena(), PAGE_BYTES);
        let started = FunctionDevice::new(mappings, core.pool()).map_err(|error| error.to_string());
        let started = started.and_then(|device| {
            IoatChannel::start(device, core.now_ns()).map_err(|failure| failure.to_string())
        });
        match started {
            Ok(channel) => {
                log::info!(target: "ioat", "core {} uses {address}", core.index());
                let (inner, channel) = (inner.clone(), Some(channel));
                let (waiting, completed) = (Vec::new(), Vec::new());
                Some(PortChannel {
                    inner,
                    channel,
                    addresses,
                    counts,
                    waiting,
                    completed,
                    has_failed_part: false,
                    recheck_at_ns: 0,
                })
            }
            Err(reason) => {
                log::error!(target: "ioat", "{address}: {reason}");
                inner.ioat.close(&address, reason);
                None
            }
        }
    }

    /// Polls the channel; why it has failed, if it has.
    fn poll(&mut self, now_ns: u64) -> Option<String> {
        let channel = self.channel.as_mut()?;
        if !channel.is_ready() {
            if now_ns < self.recheck_at_ns {
                return None;
            }
            self.recheck_at_ns = now_ns + RECHECK_NS;
        }
        channel.poll(now_ns, &mut self.completed);
        if channel.failure().is_none() && !self.waiting.is_empty() {
            channel.submit(&mut self.waiting);
        }
        self.counts.resets.store(channel.resets(), Ordering::Relaxed);
        for done in &self.completed {
            if let Err(error @ IoatError::Halted(_)) = &done.result {
                log::warn!(target: "ioat", "{}: {error}", channel.device().mappings().device().address());
            }
        }
        channel.failure().map(|failure| failure.to_string())
    }
}

impl Drop for PortChannel {
    /// The core ends: what is in the ring is dropped, so that the device must not write it.
    fn drop(&mut self) {
        if let Some(channel) = self.channel.take() {
            let (address, jobs, failure) = stop(channel);
            if failure == DeviceFailure::Running {
                // Memory that it may write is never used again.
                std::mem::forget(jobs);
            }
            self.inner.ioat.close(&address, "its core has ended".to_string());
        }
    }
}
