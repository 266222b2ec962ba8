//! Scrub: what the group has in place is read part by part, in the order of copies, and compared at all
//! members of the group.
//!
//! The replica of the primary compares ([`ReplicaEvent::Scrub`]). A part that a member cannot read is looked
//! at block by block, so that each block comes from a member that can read it: what the primary cannot read
//! is read as a client reads it, which repairs it. Each part has a turn of its own, in which it yields to
//! clients as the parts of copies do.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Poll, Waker};

use reactor::Core;
use replica::{ClientReply, ClientRequest, ObjectPart, ReplicaEvent, ScrubFindings, ScrubOutcome};
use wire_store::{BLOCK_BYTES, ObjectId};

use super::Shard;
use super::copies::{EXTENT_BYTES, PART_BYTES, extents_of_part};
use super::scrub_state::{REPAIR_READ, ScrubStep, Scrubs};
use crate::StoreError;
use crate::once::{OnceSender, once};

/// How often a range is tried while the group's record changes or the range is being written, and the time
/// between.
const ATTEMPTS_MAX: u32 = 50;
const RETRY_NS: u64 = 20_000_000;

impl Shard {
    /// The part after another one is to be compared.
    pub(super) fn add_scrub(&mut self, after: Option<ObjectPart>, answer: OnceSender<ScrubStep>) {
        let may_scrub = self.may_scrub();
        if let Some(replication) = self.replication.as_mut().filter(|_| may_scrub) {
            replication.scrubs.wanted.push_back((after, answer));
            replication.scrubs.waker.take().into_iter().for_each(Waker::wake);
        }
    }

    /// The replica acts no more: what waits for it ends without an answer.
    pub(super) fn end_scrubs(&mut self) {
        if let Some(replication) = &mut self.replication {
            let Scrubs { wanted, outcome, repair, .. } = &mut replication.scrubs;
            wanted.clear();
            (*outcome, *repair) = (None, None);
        }
    }

    /// Whether the replica acts.
    fn may_scrub(&self) -> bool {
        self.failed.is_none() && !self.is_closing
    }
}

/// Starts the task that compares parts.
pub(super) fn start(core: &Core, shard: &Rc<RefCell<Shard>>) -> Result<(), StoreError> {
    let (shard, of_task) = (Rc::downgrade(shard), core.clone());
    let task = async move {
        loop {
            let next = std::future::poll_fn(|context| {
                let Some(shard) = shard.upgrade() else { return Poll::Ready(None) };
                let mut shard = shard.borrow_mut();
                let Some(replication) = shard.replication.as_mut() else { return Poll::Ready(None) };
                match replication.scrubs.wanted.pop_front() {
                    Some(wanted) => Poll::Ready(Some(wanted)),
                    None => {
                        replication.scrubs.waker = Some(context.waker().clone());
                        Poll::Pending
                    }
                }
            });
            let (Some((after, answer)), Some(shard)) = (next.await, shard.upgrade()) else { return };
            if let Some(step) = scrub_part(&of_task, &shard, after).await {
                answer.send(step);
            }
        }
    };
    if core.spawn(task) { Ok(()) } else { Err(StoreError::Closed) }
}

/// A range of an object.
#[derive(Clone, Copy)]
struct Range {
    object: ObjectId,
    offset: u32,
    length: u32,
}

/// Compares the part after another one; `None` if the replica acts no more.
async fn scrub_part(core: &Core, shard: &RefCell<Shard>, after: Option<ObjectPart>) -> Option<ScrubStep> {
    let turn_ns = {
        let shard = shard.borrow();
        shard.replication.as_ref()?.pacer.turn_ns(core.now_ns(), false)
    };
    core.sleep_ns(turn_ns.saturating_sub(core.now_ns())).await;
    let Some((part, extents)) = shard.borrow().part_to_copy(after) else { return Some(ScrubStep::default()) };
    let allocated = extents_of_part(extents, part.number).count_ones();
    let bytes = u64::from(allocated) * EXTENT_BYTES as u64;
    let mut step = ScrubStep { part: Some(part), bytes, ..ScrubStep::default() };
    let range = Range { object: part.object, offset: part.number * PART_BYTES, length: PART_BYTES };
    match scrub_range(core, shard, range).await? {
        ScrubOutcome::NotPrimary => step.is_elsewhere = true,
        ScrubOutcome::Compared(findings) if findings.unreadable.is_empty() => step.add(findings),
        ScrubOutcome::Compared(_) | ScrubOutcome::Unreadable => {
            for index in 0..PART_BYTES / BLOCK_BYTES as u32 {
                let block = BLOCK_BYTES as u32;
                let range = Range { offset: range.offset + index * block, length: block, ..range };
                scrub_block(core, shard, range, &mut step).await?;
            }
        }
        ScrubOutcome::Interrupted => step.is_uncompared = true,
    }
    Some(step)
}

/// Compares a block of a part that a member cannot read.
async fn scrub_block(core: &Core, shard: &RefCell<Shard>, range: Range, step: &mut ScrubStep) -> Option<()> {
    let mut outcome = scrub_range(core, shard, range).await?;
    if outcome == ScrubOutcome::Unreadable {
        step.damaged += 1;
        if !repair(core, shard, range).await? {
            return Some(());
        }
        step.repaired += 1;
        outcome = scrub_repaired(core, shard, range).await?;
    }
    match outcome {
        ScrubOutcome::Compared(findings) => {
            let copies = findings.unreadable.len() as u64;
            (step.damaged, step.repaired) = (step.damaged + copies, step.repaired + copies);
            step.add(findings);
        }
        ScrubOutcome::NotPrimary => step.is_elsewhere = true,
        ScrubOutcome::Unreadable | ScrubOutcome::Interrupted => step.is_uncompared = true,
    }
    Some(())
}

/// Compares a block that was repaired here: the answer came before its entry was committed.
async fn scrub_repaired(core: &Core, shard: &RefCell<Shard>, range: Range) -> Option<ScrubOutcome> {
    for _ in 0..ATTEMPTS_MAX {
        let outcome = scrub_range(core, shard, range).await?;
        if outcome != ScrubOutcome::Unreadable {
            return Some(outcome);
        }
        core.sleep_ns(RETRY_NS).await;
    }
    Some(ScrubOutcome::Unreadable)
}

impl ScrubStep {
    fn add(&mut self, findings: ScrubFindings) {
        self.is_uncompared |= !findings.unanswered.is_empty() || findings.overtaken > 0;
        self.differing.extend(findings.differing.into_iter().map(|(offset, member)| (offset, member.0)));
    }
}

/// Has the replica compare a range, again while it cannot.
async fn scrub_range(core: &Core, shard: &RefCell<Shard>, range: Range) -> Option<ScrubOutcome> {
    let Range { object, offset, length } = range;
    let mut last = ScrubOutcome::Interrupted;
    for _ in 0..ATTEMPTS_MAX {
        let (sender, receiver) = once();
        {
            let shard = &mut *shard.borrow_mut();
            let may_scrub = shard.may_scrub();
            let replication = shard.replication.as_mut().filter(|_| may_scrub)?;
            replication.scrubs.number += 1;
            replication.scrubs.outcome = Some(sender);
            let scrub = replication.scrubs.number;
            replication.events.push_back(ReplicaEvent::Scrub { scrub, object, offset, length });
        }
        last = receiver.await?;
        let is_overtaken = matches!(&last, ScrubOutcome::Compared(findings) if findings.overtaken > 0);
        if last != ScrubOutcome::Interrupted && !is_overtaken {
            break;
        }
        core.sleep_ns(RETRY_NS).await;
    }
    Some(last)
}

/// Reads a block as a client does, which repairs it. Returns whether it does.
async fn repair(core: &Core, shard: &RefCell<Shard>, range: Range) -> Option<bool> {
    let Range { object, offset, length } = range;
    for _ in 0..ATTEMPTS_MAX {
        let (sender, receiver) = once();
        {
            let shard = &mut *shard.borrow_mut();
            let may_scrub = shard.may_scrub();
            let replication = shard.replication.as_mut().filter(|_| may_scrub)?;
            replication.scrubs.repair = Some(sender);
            let (client, number) = REPAIR_READ;
            replication.read_for_repair(ClientRequest::Read { client, number, object, offset, length });
        }
        match receiver.await? {
            ClientReply::Data(_) => return Some(true),
            ClientReply::Busy => core.sleep_ns(RETRY_NS).await,
            _ => return Some(false),
        }
    }
    Some(false)
}
