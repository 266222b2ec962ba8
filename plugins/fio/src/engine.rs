//! The I/O of one job.

use std::time::{Duration, Instant};

use block_io::{Completion, Op, Request, Tag};
use dma::Data;
use fio_abi::{FinishedUnit, FioEngine, IoUnit, Queued, UnitKind};
use reactor::{Core, Reactor};
use slots::{Slab, Slot};
use workload::{DynChannel, Geometry};

use crate::devices;

/// I/Os in flight of one job. fio's depth is its own matter; what does not fit is queued again.
const IN_FLIGHT_MAX: u32 = 1 << 16;
/// Bytes of the largest I/O, as large as a pool's data.
const IO_BYTES_MAX: u64 = dma::BUFFER_BYTES_MAX as u64;
/// Rounds of polling between turns of the reactor, which costs more and has timers and connections.
const POLLS_PER_TURN: u32 = 32;
/// `EINVAL` and `EOPNOTSUPP`.
const INVALID: i32 = 22;
const NOT_SUPPORTED: i32 = 95;

/// Starts the engine of a job; devices are opened later.
pub(crate) fn start() -> Result<Box<dyn FioEngine>, String> {
    Ok(Box::new(JobEngine {
        files: Vec::new(),
        in_flight: Slab::with_capacity(IN_FLIGHT_MAX),
        completions: Vec::new(),
        ready: Vec::new(),
        polls: 0,
        core: None,
        reactor: None,
        _user: devices::User::new(),
    }))
}

struct JobEngine {
    /// Before the reactor, so that channels end before their core does.
    files: Vec<OpenFile>,
    in_flight: Slab<IoUnit>,
    /// Empty between calls.
    completions: Vec<Completion<Data>>,
    /// What has ended and was not reaped yet.
    ready: Vec<FinishedUnit>,
    polls: u32,
    /// The pool of the reactor's core, and the reactor, since the first device was opened.
    core: Option<Core>,
    reactor: Option<Reactor>,
    /// Last: its drop may end the bdevs of the configuration.
    _user: devices::User,
}

/// A device that the job has open.
struct OpenFile {
    name: String,
    /// fio's identity of the file; 0 until its first I/O.
    file: usize,
    geometry: Geometry,
    channel: Box<DynChannel>,
    requests: Vec<Request<Data>>,
}

/// What a unit asks of the device.
#[derive(Clone, Copy)]
struct UnitRange {
    op: Op,
    first: u64,
    blocks: u32,
}

impl FioEngine for JobEngine {
    fn open(&mut self, name: &str) -> Result<(), String> {
        let mut reactor = match self.reactor.take() {
            Some(reactor) => reactor,
            None => devices::reactor(name)?,
        };
        let opened = devices::open(&mut reactor, name);
        self.core = Some(reactor.core());
        self.reactor = Some(reactor);
        let (geometry, channel) = opened?;
        self.files.push(OpenFile {
            name: name.to_string(),
            file: 0,
            geometry,
            channel,
            requests: Vec::new(),
        });
        Ok(())
    }

    fn close(&mut self, name: &str) {
        if let Some(at) = self.files.iter().position(|file| file.name == name) {
            self.files.remove(at);
        }
    }

    fn queue(&mut self, unit: IoUnit) -> Queued {
        if self.in_flight.is_full() {
            return Queued::Busy(unit);
        }
        let Some(at) = self.file_of(&unit) else {
            return Queued::Completed(unit.finish(Err(INVALID)));
        };
        let range = match range_of(&unit, self.files[at].geometry.block_bytes) {
            Ok(range) => range,
            Err((errno, reason)) => return Queued::Refused { unit, errno, reason },
        };
        let mut data = None;
        if matches!(range.op, Op::Read | Op::Write) {
            data = self.core.as_ref().and_then(|core| core.pool().take_data(unit.length() as usize));
            match &mut data {
                // Memory returns with what is in flight.
                None => return Queued::Busy(unit),
                Some(data) if range.op == Op::Write => data.copy_from(0, unit.data()),
                Some(_) => {}
            }
        }
        match self.in_flight.insert(unit) {
            Ok(slot) => {
                // Made where it stays: to return one from a function would copy it.
                let requests = &mut self.files[at].requests;
                requests.push(Request::new(Tag(slot.to_bits()), range.op, range.first, range.blocks));
                if let (Some(request), Some(_)) = (requests.last_mut(), &data) {
                    request.set_data(data);
                }
                Queued::InFlight
            }
            Err(unit) => Queued::Busy(unit),
        }
    }

    fn commit(&mut self) {
        for file in &mut self.files {
            if !file.requests.is_empty() {
                file.channel.submit(&mut file.requests);
            }
        }
    }

    fn reap(&mut self, min: usize, max: usize, limit: Option<Duration>, to: &mut Vec<FinishedUnit>) {
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let rest = max.saturating_sub(to.len()).min(self.ready.len());
        to.extend(self.ready.drain(..rest));
        loop {
            self.poll(max, to);
            let is_over = || end.is_some_and(|end| Instant::now() >= end);
            // fio waits for no more than it has queued.
            if to.len() >= min || self.in_flight.is_empty() || is_over() {
                return;
            }
            self.commit();
        }
    }
}

impl JobEngine {
    /// The open file of a unit.
    fn file_of(&mut self, unit: &IoUnit) -> Option<usize> {
        let file = unit.file();
        if let Some(at) = self.files.iter().position(|open| open.file == file) {
            return Some(at);
        }
        let name = unit.file_name()?;
        let at = self.files.iter().position(|open| open.name == name)?;
        self.files[at].file = file;
        Some(at)
    }

    /// Takes completions, and adds the units to `to`, up to `max`. The reactor has a turn where there are
    /// none, and once in a while.
    fn poll(&mut self, max: usize, to: &mut Vec<FinishedUnit>) {
        let mut completions = std::mem::take(&mut self.completions);
        for file in &mut self.files {
            file.channel.poll(&mut completions);
        }
        self.polls += 1;
        if (completions.is_empty() || self.polls >= POLLS_PER_TURN)
            && let Some(reactor) = &mut self.reactor
        {
            reactor.turn();
            self.polls = 0;
        }
        for completion in completions.drain(..) {
            let (slot, status) = (Slot::from_bits(completion.tag().0), completion.status());
            // What is not in the table was never begun here.
            let Some(mut unit) = self.in_flight.remove(slot) else { continue };
            let is_read = unit.kind() == UnitKind::Read;
            if is_read
                && status.is_success()
                && let Some(data) = completion.into_data()
            {
                data.copy_to(0, unit.data_mut());
            }
            let outcome = if status.is_success() { Ok(()) } else { Err(status.to_errno().0) };
            let finished = unit.finish(outcome);
            if to.len() < max { to.push(finished) } else { self.ready.push(finished) }
        }
        self.completions = completions;
    }
}

/// What a unit asks of a device with blocks of this size; or an `errno`, and why.
fn range_of(unit: &IoUnit, block_bytes: u32) -> Result<UnitRange, (i32, String)> {
    let op = match unit.kind() {
        UnitKind::Read => Op::Read,
        UnitKind::Write => Op::Write,
        UnitKind::Trim => Op::Unmap,
        UnitKind::Sync => return Ok(UnitRange { op: Op::Flush, first: 0, blocks: 0 }),
        UnitKind::Other => {
            return Err((NOT_SUPPORTED, "this engine reads, writes, trims and syncs only".to_string()));
        }
    };
    checked_range(op, unit.offset(), unit.length(), block_bytes)
}

fn checked_range(op: Op, offset: u64, length: u64, block_bytes: u32) -> Result<UnitRange, (i32, String)> {
    let invalid = |why: String| Err((INVALID, format!("an I/O of {length} bytes at {offset}: {why}")));
    if op != Op::Unmap && length > IO_BYTES_MAX {
        return invalid(format!(
            "this engine has blocks of at most {} MiB, so --bs, --bsrange and --bssplit too",
            IO_BYTES_MAX >> 20
        ));
    }
    let block = u64::from(block_bytes);
    if !offset.is_multiple_of(block) || !length.is_multiple_of(block) {
        return invalid(format!(
            "the device has blocks of {block} bytes; --bs, --offset, --size and --blockalign have to be \
             multiples"
        ));
    }
    match u32::try_from(length / block) {
        Ok(blocks) if blocks > 0 => Ok(UnitRange { op, first: offset / block, blocks }),
        _ => invalid(format!("it has no blocks of {block} bytes, or more than {}", u32::MAX)),
    }
}

#[cfg(test)]
mod tests;
