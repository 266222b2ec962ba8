//! One core's queues of disks.

use os::{EventClient, EventCompletion};
use reactor::{Core, Shutdown};
use slots::{Slab, Slot};
use target_shell::{GroupMail, Inbox, PollGroup, Responder};

use crate::UblkError;
use crate::core_queue::{CoreQueue, QueueContext, QueueStart};
use crate::limits::{CORE_QUEUES_MAX, CORE_TAGS_MAX, RETRY_NS};
use crate::queue::QueueAction;

/// A message to a core.
pub(crate) enum UblkMessage {
    /// Nothing.
    Wake,
    /// Serve a queue.
    Start(Box<QueueStart>, Responder<Result<(), UblkError>>),
    /// Answer when the queues of a disk have ended.
    WaitEnd(u32, Responder<()>),
}

impl GroupMail for UblkMessage {
    const WAKE: Self = UblkMessage::Wake;
}

/// The queues of a core. Those without requests cost nothing.
pub(crate) struct UblkGroup {
    client: EventClient,
    inbox: Inbox<UblkMessage, ()>,
    queues: Slab<CoreQueue>,
    /// Queues with work that no event of the loop announces.
    active: Vec<Slot>,
    /// Spare allocation for the next `active`.
    active_spare: Vec<Slot>,
    /// Tags of all queues.
    tags: u32,
    clock: os::clock::Clock,
    pool: dma::Pool,
    events: Vec<EventCompletion>,
    actions: Vec<QueueAction>,
    completions: Vec<bdev::Completion>,
}

/// Bits of an event's tag that are the tag of the request.
const TAG_BITS: u32 = 16;

impl UblkGroup {
    pub(crate) fn new(core: &Core, inbox: Inbox<UblkMessage, ()>) -> UblkGroup {
        UblkGroup {
            client: core.event_loop().client(),
            inbox,
            queues: Slab::with_capacity(CORE_QUEUES_MAX),
            active: Vec::new(),
            active_spare: Vec::new(),
            tags: 0,
            clock: core.clock().clone(),
            pool: core.pool().clone(),
            events: Vec::new(),
            actions: Vec::new(),
            completions: Vec::with_capacity(256),
        }
    }

    #[cold]
    fn process_message(&mut self, core: &Core, message: UblkMessage) {
        match message {
            UblkMessage::Wake => {}
            UblkMessage::Start(start, responder) => {
                // The requester has reported a failure: serving now would contradict it.
                if !responder.is_abandoned() {
                    // A requester that gives up between the two stops the disk, as after any failure.
                    _ = responder.answer(self.start_queue(core, *start));
                }
            }
            UblkMessage::WaitEnd(disk, responder) => {
                let last = self.queues.iter_mut().filter(|(_, queue)| queue.disk == disk).last();
                match last {
                    Some((_, queue)) => queue.end.push(responder),
                    None => _ = responder.answer(()),
                }
            }
        }
    }

    fn start_queue(&mut self, core: &Core, start: QueueStart) -> Result<(), UblkError> {
        let depth = u32::from(start.depth);
        if self.tags + depth > CORE_TAGS_MAX || self.queues.is_full() {
            let reason = format!(
                "reactor {} has {} queues with {} requests already",
                core.index(),
                self.queues.len(),
                self.tags
            );
            return Err(UblkError::TooMany(reason));
        }
        let queue = CoreQueue::new(core, &self.client, start)?;
        let Ok(slot) = self.queues.insert(queue) else { unreachable!("the slab was not full") };
        self.tags += depth;
        self.with_queue(slot, |queue, context| {
            queue.start(u64::from(slot.index()) << TAG_BITS, context);
        });
        Ok(())
    }

    /// Calls a queue, and updates the lists that it is in.
    #[inline]
    fn with_queue(&mut self, slot: Slot, call: impl FnOnce(&mut CoreQueue, &mut QueueContext<'_>)) {
        let UblkGroup { client, queues, active, pool, actions, completions, .. } = self;
        let Some(queue) = queues.get_mut(slot) else { return };
        call(queue, &mut QueueContext { client, pool, actions, completions });
        if queue.has_work() && !queue.is_active {
            queue.is_active = true;
            active.push(slot);
        }
        if queue.has_ended() {
            self.end_queue(slot);
        }
    }

    #[cold]
    fn end_queue(&mut self, slot: Slot) {
        let Some(mut queue) = self.queues.remove(slot) else { return };
        self.tags -= queue.depth();
        self.active.retain(|active| *active != slot);
        log::debug!(target: "ublk", "/dev/ublkb{}: queue {} has ended", queue.disk, queue.index);
        // Who waits for the disk waits for its last queue here.
        let other = self.queues.iter_mut().find(|(_, other)| other.disk == queue.disk);
        if let Some((_, other)) = other {
            other.end.append(&mut queue.end);
        }
        queue.close(&self.client);
    }

    fn drive_active(&mut self) -> usize {
        let mut count = 0;
        let spare = std::mem::take(&mut self.active_spare);
        let mut active = std::mem::replace(&mut self.active, spare);
        for slot in active.drain(..) {
            if let Some(queue) = self.queues.get_mut(slot) {
                queue.is_active = false;
            }
            self.with_queue(slot, |queue, context| count += queue.drive(context));
        }
        self.active_spare = active;
        count
    }
}

impl PollGroup for UblkGroup {
    const NAME: &'static str = "ublk";

    fn poll(&mut self, core: &Core, _now_ns: u64) -> usize {
        let mut count = 0;
        while let Some(message) = self.inbox.messages.receive() {
            self.process_message(core, message);
            count += 1;
        }
        let mut events = std::mem::take(&mut self.events);
        count += self.client.reap(&mut events);
        for event in events.drain(..) {
            let Some(slot) = self.queues.slot_at((event.tag >> TAG_BITS) as u32) else {
                unreachable!("a queue ends with its last operation")
            };
            self.with_queue(slot, |queue, context| queue.on_event(event, context));
        }
        self.events = events;
        if !self.active.is_empty() {
            count += self.drive_active();
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        if !self.inbox.messages.is_empty() {
            return Some(0);
        }
        if self.active.is_empty() {
            return None;
        }
        let retry_ns = self.clock.now_ns() + RETRY_NS;
        let queues = self.active.iter().filter_map(|slot| self.queues.get(*slot));
        queues.filter_map(|queue| queue.deadline(retry_ns)).min()
    }

    /// Disks are stopped while the reactors run. Those that could not be stopped survive this process.
    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        let is_busy = self.queues.iter().any(|(_, queue)| queue.has_work());
        if is_busy { Shutdown::Draining } else { Shutdown::Done }
    }
}
