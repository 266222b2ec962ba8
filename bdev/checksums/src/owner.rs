//! The owner: a poller on one core with the table, which does its I/O.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bdev::stacking::{BaseBdev, BaseChannel};
use bdev::{BdevError, PlanRunner, PlannedAction, PlannedIo, PlannedOutcome, Planner, Request};
use block_io::{Op, Status, Tag};
use reactor::{Core, MailboxReceiver, MailboxSender, Period, PollResult, Poller, ReactorHandle, Shutdown};

use crate::shared::{ChecksumShared, OwnerMessage};
use crate::table::{ChecksumTable, Granted, TableAction, TableIo, TableIoFailed};

/// Messages that wait for the owner; channels keep more.
const MESSAGES_MAX: usize = 4096;
const MESSAGES_A_TURN: usize = 256;
/// A region that was not written to for as long has its checksums written.
const TICK_NS: u64 = 1_000_000_000;
/// How often the log has a line about blocks that are not as they were written; the others are counted.
const LOG_NS: u64 = 10_000_000_000;

/// Starts the owner on a core.
///
/// # Errors
/// The device cannot be opened there, or the core has stopped.
pub(crate) fn start(
    reactor: &ReactorHandle,
    shared: &Arc<ChecksumShared>,
    base: &Arc<BaseBdev>,
) -> Result<(), BdevError> {
    let (shared, base) = (shared.clone(), base.clone());
    let name = base.device().name().to_string();
    let start = move |core: &Core| -> Result<(), BdevError> {
        let runner = PlanRunner::new(core, base.channel(core)?);
        let (sender, messages) = core.mailbox(MESSAGES_MAX);
        shared.set_owner(sender);
        let geometry = base.device().geometry();
        let owner = ChecksumOwner {
            name: format!("data checksums of {}", base.device().name()),
            has_volatile_cache: geometry.write_cache && base.device().supports(Op::Flush),
            plan: TablePlan {
                table: None,
                waiting: VecDeque::new(),
                flushes: BaseChannel::new(base.channel(core)?),
            },
            runner,
            shared,
            messages,
            seats: BTreeMap::new(),
            last_token: 0,
            tick_at_ns: None,
            log: MismatchLog::default(),
            is_settling: false,
        };
        let shared = owner.shared.clone();
        core.add_poller(Box::new(OwnerPoller { owner: Some(owner), shared }), Period::EveryTurn);
        Ok(())
    };
    reactor.call(start).map_err(|_| BdevError::Removed { name })?
}

struct ChecksumOwner {
    name: String,
    has_volatile_cache: bool,
    plan: TablePlan,
    runner: PlanRunner,
    shared: Arc<ChecksumShared>,
    messages: MailboxReceiver<OwnerMessage>,
    /// Who waits for regions, and the number that it has given to its request.
    seats: BTreeMap<u64, (Arc<MailboxSender<Granted>>, u64)>,
    last_token: u64,
    tick_at_ns: Option<u64>,
    log: MismatchLog,
    is_settling: bool,
}

/// The table, for the runner of its I/O.
struct TablePlan {
    table: Option<ChecksumTable>,
    /// Wants before there is a table.
    waiting: VecDeque<(u64, std::ops::Range<u32>, bool)>,
    /// A flush has a channel of its own: it is no barrier, and waits for no read of a whole region.
    flushes: BaseChannel,
}

impl Planner for TablePlan {
    fn next_io(&mut self) -> Option<PlannedIo> {
        loop {
            let TableIo { id, action } = self.table.as_mut()?.next_io()?;
            let action = match action {
                TableAction::Read { offset, bytes } => PlannedAction::Read { offset, bytes },
                TableAction::Write { offset, data } => {
                    PlannedAction::Write { offset, data: data.into(), durable: false }
                }
                TableAction::Flush => {
                    self.flushes.push(Request::new(Tag(id), Op::Flush, 0, 0));
                    self.flushes.submit();
                    continue;
                }
            };
            return Some(PlannedIo { id, action });
        }
    }

    fn complete(&mut self, id: u64, outcome: PlannedOutcome) {
        let bytes = |data: dma::Data| {
            let mut bytes = vec![0; data.len()];
            data.copy_to(0, &mut bytes);
            bytes
        };
        let result = outcome.map(|data| data.map(bytes)).map_err(|_| TableIoFailed);
        if let Some(table) = &mut self.table {
            table.complete(id, result);
        }
    }
}

impl TablePlan {
    /// Completes flushes. Returns how many.
    fn turn(&mut self) -> usize {
        let flushed: Vec<(Tag, Status)> =
            self.flushes.poll().map(|completion| (completion.tag(), completion.status())).collect();
        for (tag, status) in &flushed {
            if let Some(table) = &mut self.table {
                table.complete(tag.0, if status.is_success() { Ok(None) } else { Err(TableIoFailed) });
            }
        }
        flushed.len()
    }
}

/// Lines of the log about blocks that are not as they were written.
#[derive(Default)]
struct MismatchLog {
    next_at_ns: u64,
    suppressed: u64,
}

impl ChecksumOwner {
    fn take_message(&mut self, message: OwnerMessage, now_ns: u64) {
        match message {
            OwnerMessage::Begin { id, start } if self.plan.table.is_none() => {
                let mut table = ChecksumTable::new(self.shared.layout, id, start, self.has_volatile_cache);
                for (token, regions, is_write) in self.plan.waiting.drain(..) {
                    table.want(token, regions, is_write);
                }
                self.plan.table = Some(table);
                self.tick_at_ns = Some(now_ns + TICK_NS);
            }
            OwnerMessage::Begin { .. } => {}
            OwnerMessage::Want { seat, token, regions, is_write } => {
                self.last_token += 1;
                self.seats.insert(self.last_token, (seat, token));
                match &mut self.plan.table {
                    Some(table) => table.want(self.last_token, regions, is_write),
                    None => self.plan.waiting.push_back((self.last_token, regions, is_write)),
                }
            }
            OwnerMessage::Mismatch { offset } => self.log_mismatch(offset, now_ns),
            OwnerMessage::Settle => {
                self.is_settling = true;
                if let Some(table) = &mut self.plan.table {
                    table.settle();
                }
            }
            // It has woken the owner.
            OwnerMessage::Close => {}
        }
    }

    fn log_mismatch(&mut self, offset: u64, now_ns: u64) {
        if now_ns < self.log.next_at_ns {
            self.log.suppressed += 1;
            return;
        }
        let whose = self.shared.describe(offset).unwrap_or_else(|| "no volume that is there".to_string());
        let others = match std::mem::take(&mut self.log.suppressed) {
            0 => String::new(),
            count => format!(" ({count} more were found since the last line)"),
        };
        self.log.next_at_ns = now_ns + LOG_NS;
        log::error!(
            target: "checksums",
            "{} returns other data at byte {offset} than was written there, of {whose}{others}: the read \
             fails, and so does each until the block is written again; restore it from a copy, list what \
             else is damaged with `ringbolt blob check --data`, and replace the device",
            self.shared.name
        );
    }

    /// Answers all that wait. The device below is closed with the owner's drop.
    fn end(&mut self) {
        self.shared.set_closed();
        while let Some(message) = self.messages.receive() {
            self.take_message(message, 0);
        }
        for (seat, token) in std::mem::take(&mut self.seats).into_values() {
            // As in `turn`.
            _ = seat.send(Granted { token, result: Err(TableIoFailed) });
        }
    }

    fn turn(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        while count < MESSAGES_A_TURN
            && let Some(message) = self.messages.receive()
        {
            count += 1;
            self.take_message(message, now_ns);
        }
        count += self.plan.turn();
        count += self.runner.turn(&mut self.plan);
        let Some(table) = &mut self.plan.table else { return count };
        if self.tick_at_ns.is_some_and(|at_ns| at_ns <= now_ns) {
            self.tick_at_ns = Some(now_ns + TICK_NS);
            if table.tick() {
                self.shared.trim();
            }
            if self.is_settling {
                table.settle();
            }
            self.shared.set_dirty_regions(table.dirty_regions());
            let damaged = table.take_damaged();
            if damaged > 0 {
                log::error!(
                    target: "checksums",
                    "checksums on {} are damaged, of {damaged} MiB of data, which are not verified until they \
                     are written again: `ringbolt blob check --data` says which",
                    self.shared.name
                );
            }
            let failures = table.take_failures();
            if failures > 0 {
                log::warn!(
                    target: "checksums",
                    "{failures} writes of checksums to {} have failed: writes to data of which they say that \
                     it changes fail too",
                    self.shared.name
                );
            }
        }
        while let Some(granted) = table.next_granted() {
            count += 1;
            let Some((seat, token)) = self.seats.remove(&granted.token) else { continue };
            // A mailbox has a place for each request of its channel, and a channel that is gone wants
            // nothing.
            _ = seat.send(Granted { token, ..granted });
        }
        if table.is_started() {
            self.shared.set_started();
        }
        if self.is_settling && table.is_settled() {
            self.shared.set_settled(true);
            self.is_settling = false;
        }
        count
    }
}

impl ChecksumOwner {
    fn is_idle(&self) -> bool {
        self.runner.is_idle() && self.plan.flushes.is_idle()
    }

    fn deadline(&self) -> Option<u64> {
        if !self.messages.is_empty() || self.shared.is_closing() && self.is_idle() {
            return Some(0);
        }
        let deadlines = [self.runner.deadline(), self.plan.flushes.deadline(), self.tick_at_ns];
        deadlines.into_iter().flatten().min()
    }
}

impl Drop for ChecksumOwner {
    fn drop(&mut self) {
        self.end();
    }
}

/// The poller: the owner until it has ended, which closes the device below.
struct OwnerPoller {
    owner: Option<ChecksumOwner>,
    shared: Arc<ChecksumShared>,
}

impl OwnerPoller {
    fn end(&mut self) {
        drop(self.owner.take());
        self.shared.set_released();
    }
}

impl Poller for OwnerPoller {
    fn name(&self) -> &str {
        self.owner.as_ref().map_or("data checksums", |owner| &owner.name)
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        let Some(owner) = &mut self.owner else { return PollResult::Finished };
        let count = owner.turn(now_ns);
        if self.shared.is_closing() && owner.is_idle() {
            self.end();
            return PollResult::Finished;
        }
        PollResult::from_count(count)
    }

    fn deadline(&self) -> Option<u64> {
        self.owner.as_ref().map_or(Some(0), ChecksumOwner::deadline)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if !self.owner.as_ref().is_none_or(ChecksumOwner::is_idle) {
            return Shutdown::Draining;
        }
        self.end();
        Shutdown::Done
    }
}

impl Drop for OwnerPoller {
    fn drop(&mut self) {
        self.end();
    }
}
