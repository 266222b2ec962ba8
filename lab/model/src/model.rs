//! The model as a sans-IO device: commands in, completions out, on whatever clock is handed in.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use ring::{Op, Status};

use crate::faults::{Fault, Rules, Verdict};
use crate::profile::{Profile, State};
use crate::random::Random;
use crate::timing::{Io, Timing};

/// Names a command in flight. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A command that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Which.
    pub ticket: Ticket,
    /// When, in nanoseconds of the caller's clock; not after the `now` at which it was asked for.
    pub at_ns: u64,
    /// How.
    pub status: Status,
}

/// A device in time. The same seed and the same calls give the same completions.
///
/// ```
/// use model::{Io, Model, Op, Profile};
/// let mut model = Model::new(&Profile::shipped("intel-p4800x")?, 1);
/// let ticket = model.submit(0, &Io { op: Op::Read, offset: 0, bytes: 4096, fua: false }).expect("room");
/// let due_ns = model.deadline().expect("one is in flight");
/// let mut done = Vec::new();
/// assert_eq!(model.complete(due_ns, &mut done), 1);
/// assert_eq!((done[0].ticket, done[0].at_ns), (ticket, due_ns));
/// # Ok::<(), model::ProfileError>(())
/// ```
pub struct Model {
    timing: Timing,
    block_bytes: u64,
    rules: Rules,
    dice: Random,
    /// Time and order of completion, and how it ends.
    due: BinaryHeap<Reverse<(u64, Ticket, u16)>>,
    /// Commands that never complete by themselves.
    stuck: BTreeSet<Ticket>,
    /// Ended by a reset or a removal, and how.
    aborted: Vec<(Ticket, Status)>,
    health: Health,
    issued: u64,
}

/// Whether the controller works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Fine,
    /// It reports a fatal status: nothing completes until it is reset.
    Fatal,
    /// It was pulled out.
    Gone,
}

/// Most commands in flight: what an NVMe queue pair can hold.
pub const IN_FLIGHT_MAX: usize = 65_536;

impl Model {
    /// A device of the profile's capacity in the steady state.
    pub fn new(profile: &Profile, seed: u64) -> Model {
        Model::with(profile, profile.capacity_bytes(), State::Steady, seed)
    }

    /// A device of another capacity, at least a mebibyte, or in another state.
    pub fn with(profile: &Profile, bytes: u64, state: State, seed: u64) -> Model {
        Model {
            timing: Timing::alone(profile, bytes.max(1 << 20), state, seed),
            block_bytes: u64::from(profile.device.block_bytes),
            rules: Rules::new(&profile.faults),
            dice: Random::new(!seed),
            due: BinaryHeap::new(),
            stuck: BTreeSet::new(),
            aborted: Vec::new(),
            health: Health::Fine,
            issued: 0,
        }
    }

    /// Adds a rule to those of the profile.
    pub fn inject(&mut self, fault: &Fault) {
        self.rules.push(fault);
    }

    /// Takes a command, or nothing where [`IN_FLIGHT_MAX`] are in flight. A time before the latest
    /// that was handed in counts as that.
    pub fn submit(&mut self, now_ns: u64, io: &Io) -> Option<Ticket> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return None;
        }
        let ticket = Ticket(self.issued);
        self.issued += 1;
        let mut due_ns = self.timing.book(now_ns, io);
        let mut status = Status::SUCCESS;
        if !self.rules.is_empty() {
            let (lba, blocks) =
                (io.offset / self.block_bytes, u64::from(io.bytes).div_ceil(self.block_bytes));
            match self.rules.judge(io.op, lba, blocks as u32, &mut self.dice) {
                Verdict::Late(ns) => due_ns += ns,
                Verdict::Fails(failure) => status = failure,
                Verdict::Never | Verdict::Lost => {
                    self.stuck.insert(ticket);
                    return Some(ticket);
                }
                Verdict::Fatal if self.health == Health::Fine => self.health = Health::Fatal,
                Verdict::Gone if self.health != Health::Gone => {
                    self.health = Health::Gone;
                    self.abort(Status::ABORTED_SQ_DELETION);
                }
                Verdict::Fatal | Verdict::Gone => {}
            }
        }
        match self.health {
            Health::Gone => {
                self.aborted.push((ticket, Status::ABORTED_SQ_DELETION));
                return Some(ticket);
            }
            _ if io.op == Op::Reset => self.reset(),
            Health::Fatal => {
                self.stuck.extend(self.due.drain().map(|Reverse((_, ticket, _))| ticket));
                self.stuck.insert(ticket);
                return Some(ticket);
            }
            Health::Fine => {}
        }
        self.due.push(Reverse((due_ns, ticket, status.field())));
        Some(ticket)
    }

    /// When the next command completes, in nanoseconds; `None` where none will by itself.
    pub fn deadline(&self) -> Option<u64> {
        if !self.aborted.is_empty() {
            return Some(0);
        }
        self.due.peek().map(|Reverse((due_ns, ..))| *due_ns)
    }

    /// Appends what has ended by now, in order of time, and returns how many that were.
    pub fn complete(&mut self, now_ns: u64, sink: &mut Vec<Done>) -> usize {
        let before = sink.len();
        let aborted = self.aborted.drain(..);
        sink.extend(aborted.map(|(ticket, status)| Done { ticket, at_ns: now_ns, status }));
        while let Some(Reverse((at_ns, ticket, field))) = self.due.peek().copied()
            && at_ns <= now_ns
        {
            self.due.pop();
            sink.push(Done { ticket, at_ns, status: Status::from_field(field) });
        }
        sink.len() - before
    }

    /// Commands that were taken and have not been given back.
    pub fn in_flight(&self) -> usize {
        self.due.len() + self.stuck.len() + self.aborted.len()
    }

    /// Aborts everything in flight; [`complete`](Self::complete) gives it back. A controller that
    /// reported a fatal status works again.
    pub fn reset(&mut self) {
        if self.health == Health::Fatal {
            self.health = Health::Fine;
        }
        self.abort(Status::ABORT_REQUESTED);
    }

    fn abort(&mut self, status: Status) {
        let due = self.due.drain().map(|Reverse((_, ticket, _))| ticket);
        let mut tickets: Vec<Ticket> = due.chain(std::mem::take(&mut self.stuck)).collect();
        tickets.sort_unstable();
        self.aborted.extend(tickets.into_iter().map(|ticket| (ticket, status)));
    }
}

#[cfg(test)]
mod tests;
