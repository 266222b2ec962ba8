//! The channel: a ring of descriptors, and the word that says how far the engine is.

use std::collections::VecDeque;

use wire_ioat::{
    ChannelErrors, ChannelState, ChannelStatus, DESCRIPTOR_BYTES, DescriptorOp, IoatDescriptor, registers,
};

use crate::{IoatCompletion, IoatDevice, IoatError, IoatFailure, IoatOp, IoatRequest};

/// Most entries of a ring: the engine counts in 16 bits.
pub const RING_ENTRIES_MAX: u32 = 1 << 15;
/// Least: a descriptor to start with, two to work with, and one that stays free.
const RING_ENTRIES_MIN: u32 = 4;
/// How long the engine may take to stop, to reset and to start, each, as the kernel's driver allows it.
const STEP_TIMEOUT_NS: u64 = 20_000_000;
/// How long a ring may have descriptors of which none completes, as in the kernel's driver.
const COMPLETION_TIMEOUT_NS: u64 = 200_000_000;
/// Most faults in a row, halts and time-outs, after which the channel is reset: each costs milliseconds.
const FAULTS_MAX: u32 = 8;
/// Interval of looks at the registers meanwhile.
const RECHECK_NS: u64 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has the command to stop, since this time.
    Suspending(u64),
    Resetting(u64),
    /// It has the first descriptor.
    Starting(u64),
    Ready,
    Failed(IoatFailure),
}

/// A request in the ring.
struct Job<T> {
    owned: T,
    /// Position of its last descriptor.
    last: u32,
    /// Its result, once that is known, if the channel must be reset before it is given.
    error: Option<IoatError>,
}

/// One channel of an engine, on one core.
///
/// `submit` and `poll` have the usual contract: what does not fit stays in the batch, and each request that
/// was taken completes once, in order. Until the channel has started, and while it recovers, it takes none.
pub struct IoatChannel<D, T> {
    device: D,
    mask: u32,
    ring_address: u64,
    transfer_max: u64,
    fills: bool,
    state: State,
    /// Positions count on; the entry is `position & mask`.
    head: u32,
    /// Before this one the engine has all.
    given: u32,
    tail: u32,
    jobs: VecDeque<Job<T>>,
    /// Of requests that never reach the ring.
    rejected: Vec<IoatCompletion<T>>,
    resets: u64,
    /// Since this time no descriptor of those in the ring has completed.
    waits_since_ns: Option<u64>,
    /// Faults since the last request that was executed.
    faults: u32,
}

impl<D: IoatDevice, T> IoatChannel<D, T> {
    /// Begins to start a channel, which takes some polls.
    ///
    /// # Errors
    /// The device is not one that this driver knows.
    pub fn start(device: D, now_ns: u64) -> Result<IoatChannel<D, T>, IoatFailure> {
        let version = device.read_u8(registers::VERSION);
        if !(registers::VERSION_MIN..=registers::VERSION_MAX).contains(&version) {
            return Err(IoatFailure::Version(version));
        }
        let transfer_max = match device.read_u8(registers::TRANSFER_CAPACITY) & 0x1f {
            // The size has 32 bits, so that one less is the most.
            0 => u64::from(u32::MAX) / DESCRIPTOR_BYTES as u64 * DESCRIPTOR_BYTES as u64,
            order @ 12.. => 1 << order,
            order => return Err(IoatFailure::TransferCapacity(order)),
        };
        let entries = device.ring_entries();
        if !entries.is_power_of_two() || !(RING_ENTRIES_MIN..=RING_ENTRIES_MAX).contains(&entries) {
            return Err(IoatFailure::Ring(entries));
        }
        let fills = device.read_u32(registers::CAPABILITIES) & registers::CAPABILITY_FILL != 0;
        let mut channel = IoatChannel {
            ring_address: device.ring_address(),
            device,
            mask: entries - 1,
            transfer_max,
            fills,
            state: State::Ready,
            head: 0,
            given: 0,
            tail: 0,
            jobs: VecDeque::new(),
            rejected: Vec::new(),
            resets: 0,
            waits_since_ns: None,
            faults: 0,
        };
        channel.reset(now_ns);
        Ok(channel)
    }

    /// Whether it takes requests.
    pub fn is_ready(&self) -> bool {
        self.state == State::Ready
    }

    /// Why it can no longer be used.
    pub fn failure(&self) -> Option<IoatFailure> {
        match self.state {
            State::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    /// Requests in the ring.
    pub fn in_flight(&self) -> usize {
        self.jobs.len()
    }

    /// Number of resets, the first one included.
    pub fn resets(&self) -> u64 {
        self.resets
    }

    /// Its device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Its device, to change it.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Ends the use of the device. What requests own is returned, also if the channel has failed: the caller
    /// has made sure that the engine writes no memory any more, as by disabling its DMA.
    pub fn into_parts(self) -> (D, Vec<T>) {
        let rejected = self.rejected.into_iter().map(|one| one.owned);
        (self.device, self.jobs.into_iter().map(|job| job.owned).chain(rejected).collect())
    }

    /// Takes requests as far as the ring has entries, and tells the engine once.
    pub fn submit(&mut self, batch: &mut Vec<IoatRequest<T>>) {
        if let State::Failed(failure) = self.state {
            let failed = |request: IoatRequest<T>| {
                let result = Err(IoatError::Failed(failure));
                IoatCompletion { owned: request.owned, result }
            };
            return self.rejected.extend(batch.drain(..).map(failed));
        }
        if self.state != State::Ready {
            return;
        }
        let mut taken = 0;
        for request in batch.iter() {
            // What is invalid takes none.
            let count = self.check(&request.op).unwrap_or_default();
            // One entry stays free, so that a full ring is not an empty one.
            if count > self.mask - self.head.wrapping_sub(self.tail) {
                break;
            }
            if count > 0 {
                self.write(&request.op);
            }
            taken += 1;
        }
        // Positions of the requests follow from their sizes.
        let mut position = self.given;
        for request in batch.drain(..taken) {
            match self.check(&request.op) {
                Ok(count) => {
                    position = position.wrapping_add(count);
                    let last = position.wrapping_sub(1);
                    self.jobs.push_back(Job { owned: request.owned, last, error: None });
                }
                Err(error) => {
                    self.rejected.push(IoatCompletion { owned: request.owned, result: Err(error) });
                }
            }
        }
        self.give();
    }

    /// Whether an operation is executed, and not rejected for its length or because the engine cannot fill.
    pub fn accepts(&self, op: &IoatOp) -> bool {
        self.check(op).is_ok()
    }

    /// The number of descriptors of an operation.
    fn check(&self, op: &IoatOp) -> Result<u32, IoatError> {
        let bytes = op.bytes();
        if matches!(op, IoatOp::Fill { .. }) && !self.fills {
            return Err(IoatError::Unsupported);
        }
        let ends = match op {
            IoatOp::Copy { from, to, bytes } => from.checked_add(*bytes).and(to.checked_add(*bytes)),
            IoatOp::Fill { to, bytes, .. } => to.checked_add(*bytes),
        };
        let count = bytes.div_ceil(self.transfer_max);
        if bytes == 0 || ends.is_none() || count > u64::from(self.mask) {
            return Err(IoatError::Length { bytes });
        }
        Ok(count as u32)
    }

    /// Writes the descriptors of an operation.
    fn write(&mut self, op: &IoatOp) {
        let (mut done, total) = (0, op.bytes());
        while done < total {
            let bytes = (total - done).min(self.transfer_max) as u32;
            let part = match *op {
                IoatOp::Copy { from, to, .. } => {
                    DescriptorOp::Copy { from: from + done, to: to + done, bytes }
                }
                // Parts are whole patterns but the last.
                IoatOp::Fill { pattern, to, .. } => DescriptorOp::Fill { pattern, to: to + done, bytes },
            };
            done += u64::from(bytes);
            self.push(part, done == total);
        }
    }

    fn push(&mut self, op: DescriptorOp, reports: bool) {
        let next = self.address(self.head.wrapping_add(1));
        let words = IoatDescriptor { op, reports, next }.encode();
        self.device.write_descriptor(self.head & self.mask, &words);
        self.head = self.head.wrapping_add(1);
    }

    /// Tells the engine how many descriptors there are.
    fn give(&mut self) {
        if self.given != self.head {
            self.given = self.head;
            self.device.write_u16(registers::DESCRIPTOR_COUNT, self.head as u16);
        }
    }

    fn address(&self, position: u32) -> u64 {
        self.ring_address + u64::from(position & self.mask) * DESCRIPTOR_BYTES as u64
    }

    /// Completes what the engine has done, and takes the next step of a reset. Returns the number of
    /// completions.
    pub fn poll(&mut self, now_ns: u64, sink: &mut Vec<IoatCompletion<T>>) -> usize {
        let before = sink.len();
        sink.append(&mut self.rejected);
        match self.state {
            State::Ready if self.tail != self.given => self.poll_ready(now_ns, sink),
            State::Ready => self.waits_since_ns = None,
            State::Failed(_) => {}
            State::Suspending(since_ns) => self.poll_suspending(now_ns, since_ns),
            State::Resetting(since_ns) => self.poll_resetting(now_ns, since_ns, sink),
            State::Starting(since_ns) => self.poll_starting(now_ns, since_ns),
        }
        sink.len() - before
    }

    /// When [`poll`](Self::poll) is to be called next; `None` if there is nothing to wait for.
    pub fn deadline(&self, now_ns: u64) -> Option<u64> {
        if !self.rejected.is_empty() {
            return Some(now_ns);
        }
        match self.state {
            State::Ready => (self.tail != self.given).then_some(now_ns),
            State::Failed(_) => None,
            State::Suspending(_) | State::Resetting(_) | State::Starting(_) => Some(now_ns + RECHECK_NS),
        }
    }

    fn poll_ready(&mut self, now_ns: u64, sink: &mut Vec<IoatCompletion<T>>) {
        let status = ChannelStatus::decode(self.device.completion());
        match status.state {
            ChannelState::Unknown(state) => self.state = State::Failed(IoatFailure::State(state)),
            ChannelState::Halted => self.halted(now_ns, sink),
            _ => match self.advance(status.completed, sink) {
                Err(failure) => self.state = State::Failed(failure),
                Ok(true) => self.waits_since_ns = Some(now_ns),
                Ok(false) => {
                    let since_ns = *self.waits_since_ns.get_or_insert(now_ns);
                    if now_ns.saturating_sub(since_ns) >= COMPLETION_TIMEOUT_NS {
                        self.recover(now_ns);
                    }
                }
            },
        }
    }

    /// Resets the channel after a fault, or gives it up after too many.
    #[cold]
    fn recover(&mut self, now_ns: u64) {
        self.faults += 1;
        if self.faults > FAULTS_MAX {
            self.state = State::Failed(IoatFailure::Faults(self.faults));
        } else {
            self.reset(now_ns);
        }
    }

    /// Completes all requests up to a descriptor. Whether there is one that had not completed before.
    fn advance(&mut self, completed: u64, sink: &mut Vec<IoatCompletion<T>>) -> Result<bool, IoatFailure> {
        let last = self.tail.wrapping_sub(1);
        if completed == 0 || completed == self.address(last) {
            // It is where it was: before the first, or at the last that was seen.
            return Ok(false);
        }
        let unknown = Err(IoatFailure::Completion(completed));
        let Some(offset) = completed.checked_sub(self.ring_address) else { return unknown };
        let index = offset / DESCRIPTOR_BYTES as u64;
        if !offset.is_multiple_of(DESCRIPTOR_BYTES as u64) || index > u64::from(self.mask) {
            return unknown;
        }
        let count = ((index as u32).wrapping_sub(self.tail) & self.mask) + 1;
        if count > self.given.wrapping_sub(self.tail) {
            return unknown;
        }
        let position = self.tail.wrapping_add(count - 1);
        self.tail = position.wrapping_add(1);
        while let Some(job) = self.jobs.front()
            && self.tail.wrapping_sub(job.last) as i32 > 0
            && let Some(job) = self.jobs.pop_front()
        {
            self.faults = 0;
            sink.push(IoatCompletion { owned: job.owned, result: Ok(()) });
        }
        Ok(true)
    }

    /// The engine has stopped at a descriptor. The request fails that has it, and those behind it.
    #[cold]
    fn halted(&mut self, now_ns: u64, sink: &mut Vec<IoatCompletion<T>>) {
        let status = ChannelStatus::decode(self.device.read_u64(registers::CHANNEL_STATUS));
        if let Err(failure) = self.advance(status.completed, sink) {
            self.state = State::Failed(failure);
            return;
        }
        let errors = ChannelErrors(self.device.read_u32(registers::CHANNEL_ERROR));
        if let Some(job) = self.jobs.front_mut() {
            job.error = Some(IoatError::Halted(errors));
        }
        self.recover(now_ns);
    }

    /// Resets the channel: what is in the ring fails with [`IoatError::Aborted`], once the engine has
    /// stopped.
    pub fn reset(&mut self, now_ns: u64) {
        if self.failure().is_some() {
            return;
        }
        self.resets += 1;
        self.waits_since_ns = None;
        let status = ChannelStatus::decode(self.device.read_u64(registers::CHANNEL_STATUS));
        match status.state {
            ChannelState::Active | ChannelState::Idle | ChannelState::Armed => {
                self.device.write_u8(registers::CHANNEL_COMMAND, registers::COMMAND_SUSPEND);
                self.state = State::Suspending(now_ns);
            }
            ChannelState::Suspended | ChannelState::Halted => self.command_reset(now_ns),
            ChannelState::Unknown(state) => self.state = State::Failed(IoatFailure::State(state)),
        }
    }

    fn command_reset(&mut self, now_ns: u64) {
        // Each bit is cleared by writing it.
        let errors = self.device.read_u32(registers::CHANNEL_ERROR);
        self.device.write_u32(registers::CHANNEL_ERROR, errors);
        self.device.write_u8(registers::CHANNEL_COMMAND, registers::COMMAND_RESET);
        self.state = State::Resetting(now_ns);
    }

    fn poll_suspending(&mut self, now_ns: u64, since_ns: u64) {
        let status = ChannelStatus::decode(self.device.read_u64(registers::CHANNEL_STATUS));
        match status.state {
            ChannelState::Suspended | ChannelState::Halted => self.command_reset(now_ns),
            ChannelState::Unknown(state) => self.state = State::Failed(IoatFailure::State(state)),
            _ if now_ns.saturating_sub(since_ns) >= STEP_TIMEOUT_NS => {
                self.state = State::Failed(IoatFailure::SuspendTimeout);
            }
            _ => {}
        }
    }

    fn poll_resetting(&mut self, now_ns: u64, since_ns: u64, sink: &mut Vec<IoatCompletion<T>>) {
        let command = self.device.read_u8(registers::CHANNEL_COMMAND);
        if command == u8::MAX {
            self.state = State::Failed(IoatFailure::State(7));
        } else if command & registers::COMMAND_RESET == 0 {
            // The engine writes no memory now.
            for job in self.jobs.drain(..) {
                let error = job.error.unwrap_or(IoatError::Aborted);
                sink.push(IoatCompletion { owned: job.owned, result: Err(error) });
            }
            self.prepare(now_ns);
        } else if now_ns.saturating_sub(since_ns) >= STEP_TIMEOUT_NS {
            self.state = State::Failed(IoatFailure::ResetTimeout);
        }
    }

    /// Has a channel that was reset execute a descriptor that does nothing.
    fn prepare(&mut self, now_ns: u64) {
        (self.head, self.given, self.tail) = (0, 0, 0);
        self.device.clear_completion();
        let control = registers::CONTROL_ABORT_ON_ERROR | registers::CONTROL_REPORT_ERROR;
        self.device.write_u16(registers::CHANNEL_CONTROL, control);
        let address = self.device.completion_address();
        self.device.write_u64(registers::COMPLETION_ADDRESS, address);
        self.device.write_u64(registers::CHAIN_ADDRESS, self.address(0));
        self.push(DescriptorOp::Null, true);
        self.give();
        self.state = State::Starting(now_ns);
    }

    fn poll_starting(&mut self, now_ns: u64, since_ns: u64) {
        let status = ChannelStatus::decode(self.device.completion());
        match status.state {
            ChannelState::Halted => {
                let errors = ChannelErrors(self.device.read_u32(registers::CHANNEL_ERROR));
                self.state = State::Failed(IoatFailure::Start(errors));
            }
            ChannelState::Unknown(state) => self.state = State::Failed(IoatFailure::State(state)),
            _ if status.completed == self.address(0) && status.completed != 0 => {
                self.tail = 1;
                self.state = State::Ready;
            }
            _ if status.completed != 0 => {
                self.state = State::Failed(IoatFailure::Completion(status.completed));
            }
            _ if now_ns.saturating_sub(since_ns) >= STEP_TIMEOUT_NS => {
                self.state = State::Failed(IoatFailure::StartTimeout);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
