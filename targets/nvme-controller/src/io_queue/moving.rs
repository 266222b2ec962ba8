//! A queue that moves to another core.
//!
//! [`IoQueue::pause`] has the queue begin nothing that takes memory, so that its commands complete or are
//! deferred; a deferred command holds no buffer of the pool. When nothing else is left
//! ([`IoQueue::is_detachable`]), the queue is taken apart on its core ([`IoQueue::detach`]) and put together
//! on the other ([`IoQueue::attach`]), which continues with the deferred commands in their order.

use std::rc::Rc;

use slots::Slot;
use target_shell::MemoryShare;

use super::command::{Command, CommandData, CommandState};
use super::{CommandToken, IoQueue};
use crate::io::{FusedPairing, IoPlan, NamespaceTable};

/// The commands of a queue between two cores, none of which holds a buffer. If it is dropped, the host gets
/// no answers to them, as from a queue that is.
#[derive(Debug)]
pub struct DetachedQueue<L> {
    slots: u32,
    namespaces: NamespaceTable,
    /// Deferred commands, oldest first.
    commands: Vec<DetachedCommand<L>>,
}

#[derive(Debug)]
struct DetachedCommand<L> {
    token: CommandToken,
    /// `None` if its namespace was removed.
    plan: Option<IoPlan>,
    location: L,
    /// Data that came with it.
    data: Option<Vec<u8>>,
    length: u32,
}

impl<L: Default> IoQueue<L> {
    /// Has commands that need memory wait, from now on. Others are executed as usual.
    pub fn pause(&mut self) {
        self.paused = true;
    }

    /// Ends [`pause`](Self::pause). [`retry`](Self::retry) continues the commands that have waited.
    pub fn unpause(&mut self) {
        self.paused = false;
    }

    /// Whether the host has to send data for a command: `awaits_host` says it of a command's location.
    pub fn awaits_host(&self, awaits_host: impl Fn(&L) -> bool) -> bool {
        self.commands.iter().any(|(_, command)| awaits_host(&command.location))
    }

    /// Whether all its commands are deferred, without a device request or a buffer.
    pub fn is_detachable(&self) -> bool {
        let is_bare = |slot: &Slot| {
            let Some(command) = self.commands.get(*slot) else { return false };
            let is_planned = matches!(command.state, CommandState::Planned(_) | CommandState::Rejected);
            is_planned && !matches!(command.data, CommandData::Pool(_)) && command.buffer_bytes == 0
        };
        self.device_requests == 0
            && self.commands.len() == self.deferred.len()
            && matches!(self.pairing, FusedPairing::None)
            && self.aborted.is_none()
            && self.deferred.iter().all(is_bare)
    }

    /// Takes the commands out of the queue.
    ///
    /// # Panics
    /// If it is not [detachable](Self::is_detachable).
    pub fn detach(mut self) -> DetachedQueue<L> {
        assert!(self.is_detachable(), "{} commands are in flight", self.commands.len());
        let mut commands = Vec::with_capacity(self.deferred.len());
        for slot in std::mem::take(&mut self.deferred) {
            let Some(mut command) = self.commands.remove(slot) else { continue };
            let Some(token) = command.token.take() else { continue };
            let plan = match command.state {
                CommandState::Planned(plan) => Some(plan),
                _ => None,
            };
            let data = match command.data {
                CommandData::Bytes(bytes) => Some(bytes),
                _ => None,
            };
            let (location, length) = (command.location, command.length);
            commands.push(DetachedCommand { token, plan, location, data, length });
        }
        let namespaces = Rc::unwrap_or_clone(std::mem::take(&mut self.namespaces));
        DetachedQueue { slots: self.commands.capacity() as u32, namespaces, commands }
    }

    /// The queue with these commands, whose buffers count in `memory`. [`retry`](Self::retry) continues them.
    pub fn attach(mut detached: DetachedQueue<L>, memory: MemoryShare) -> IoQueue<L> {
        let namespaces = Rc::new(std::mem::take(&mut detached.namespaces));
        let mut queue = IoQueue::new(detached.slots, memory, namespaces);
        for command in detached.commands.drain(..) {
            let DetachedCommand { token, plan, location, data, length } = command;
            let state = plan.map_or(CommandState::Rejected, CommandState::Planned);
            let data = data.map_or(CommandData::None, CommandData::Bytes);
            let slot = queue.insert(Command { data, ..Command::new(token, state, location, length) });
            queue.deferred.push_back(slot);
        }
        queue
    }
}

impl<L> DetachedQueue<L> {
    /// How many commands wait in it.
    pub fn len(&self) -> usize {
        self.commands.len()
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }
}

impl<L> Drop for DetachedQueue<L> {
    fn drop(&mut self) {
        for command in self.commands.drain(..) {
            command.token.abandon();
        }
    }
}

#[cfg(test)]
mod tests {
    use block_io::{Op, Status};
    use proptest::prelude::*;
    use wire_nvme::Sqe;
    use wire_nvme::opcode::NvmOpcode;

    use super::super::harness::{FakeLocation, QueueHarness, namespaces};
    use super::super::tests::io;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

        #[test]
        fn every_command_of_a_queue_that_moves_is_answered_once(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            QueueHarness::run_moving(&bytes);
        }
    }

    #[test]
    fn deferred_commands_move_with_their_data_and_keep_their_order() {
        fn is_send<T: Send>(detached: T) -> T {
            detached
        }
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        let busy = harness.command(io(NvmOpcode::Read, 1, 0, 1));
        harness.queue.pause();
        let read = harness.command(io(NvmOpcode::Read, 1, 8, 2));
        (harness.transport.immediate, harness.transport.host_byte) = (true, 9);
        let write = harness.command(io(NvmOpcode::Write, 1, 16, 1));
        let requested = {
            harness.transport.immediate = false;
            harness.command(io(NvmOpcode::Write, 1, 24, 1))
        };
        assert!(!harness.queue.is_detachable(), "a read is in flight");
        harness.complete(0, Status::SUCCESS);
        assert!(harness.answer(busy).is_some() && harness.queue.is_detachable());

        harness.change(|queue| IoQueue::attach(is_send(queue.detach()), MemoryShare::unlimited()));
        assert_eq!(harness.queue.in_flight(), 3);
        harness.queue.retry(&mut harness.transport);
        let submitted: Vec<(Op, u64)> =
            harness.transport.requests.iter().map(|request| (request.op, request.lba)).collect();
        assert_eq!(submitted, [(Op::Read, 8), (Op::Write, 16), (Op::Write, 24)]);
        let data = harness.transport.requests[1].data().and_then(|data| data.single());
        assert_eq!(data.map(|data| data.as_slice()), Some(&[9; 512][..]), "the data that came with it");
        harness.settle();
        for cid in [read, write, requested] {
            assert_eq!(harness.answer(cid).map(|answer| answer.status), Some(Status::SUCCESS));
        }
    }

    #[test]
    fn a_command_whose_namespace_is_gone_on_the_other_core_fails_there() {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        harness.queue.pause();
        let read = harness.command(io(NvmOpcode::Read, 1, 0, 1));
        harness.change(|queue| IoQueue::attach(queue.detach(), MemoryShare::unlimited()));
        harness.queue.set_namespaces(namespaces(0, 0));
        harness.settle();
        let expected = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        assert_eq!(harness.answer(read).map(|answer| answer.status), Some(expected));
    }

    #[test]
    fn what_cannot_wait_without_a_buffer_keeps_a_queue_on_its_core() {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        harness.queue.pause();
        let flush =
            harness.command(Sqe { nsid: 1, flags: Sqe::FLAGS_SGL, ..Sqe::new(NvmOpcode::Flush.to_wire()) });
        assert!(!harness.queue.is_detachable(), "its request is in flight");
        harness.complete(0, Status::SUCCESS);
        assert!(harness.answer(flush).is_some() && harness.queue.is_detachable());
        assert!(!harness.queue.awaits_host(|_: &FakeLocation| true));
    }

    #[test]
    fn a_detached_queue_that_is_dropped_ends_its_commands() {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        harness.queue.pause();
        harness.command(io(NvmOpcode::Read, 1, 0, 1));
        harness.change(|queue| {
            let detached = queue.detach();
            assert!((detached.len(), detached.is_empty()) == (1, false));
            drop(detached);
            IoQueue::new(16, MemoryShare::unlimited(), namespaces(0xff, 0))
        });
    }
}
