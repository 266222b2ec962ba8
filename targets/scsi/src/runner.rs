//! The tasks of a session: what every transport does with them, whatever its commands look like.

use std::sync::Arc;

use block_io::{Op, Status, Tag};
use reservations::{ChangeWaker, PendingGuard};
use slots::{Slab, Slot};

use crate::events::{CoreEvents, TaskManagement};
use crate::nexus::UnitNexus;
use crate::task::{Command, SessionPeers, Step, Task, TaskContext, TaskEvent};

/// A logical unit of a session.
#[derive(Debug)]
pub struct SessionUnit<U> {
    /// The session's view of it.
    pub nexus: Arc<UnitNexus>,
    /// Key of its device among those of the core.
    pub key: u32,
    /// It is in the configuration. Others stay until their commands have ended.
    pub is_present: bool,
    /// What the transport knows of it.
    pub info: U,
    commands: u32,
}

impl<U> SessionUnit<U> {
    /// A unit without commands.
    pub fn new(nexus: Arc<UnitNexus>, key: u32, info: U) -> SessionUnit<U> {
        SessionUnit { nexus, key, is_present: true, info, commands: 0 }
    }
}

/// A task and its unit, in a transport's command.
#[derive(Debug)]
pub struct RunningTask {
    /// `None` before it is started.
    task: Option<Task>,
    unit: usize,
    /// See [`CoreEvents::sequence`].
    sequence: u64,
    /// Functions that wait for its end.
    guards: Vec<PendingGuard>,
    /// It waits for the waker.
    is_pending: bool,
}

impl RunningTask {
    /// Index of its unit.
    #[inline]
    pub fn unit(&self) -> usize {
        self.unit
    }

    /// The functions that wait for its end, which end when these are dropped: not before the initiator can
    /// see the end.
    pub fn take_guards(&mut self) -> Vec<PendingGuard> {
        std::mem::take(&mut self.guards)
    }

    /// Whether it is a READ or WRITE; see [`Task::is_transfer`].
    pub fn is_transfer(&self) -> bool {
        self.task.as_ref().is_some_and(Task::is_transfer)
    }
}

/// A command of a transport, which has a task.
pub trait SessionCommand {
    /// The task.
    fn running(&self) -> &RunningTask;
    /// The task.
    fn running_mut(&mut self) -> &mut RunningTask;
    /// The initiator's tag, by which functions name the command; `None` after its answer, or where they name
    /// none.
    fn tag(&self) -> Option<u64>;
}

/// Starts and resumes the tasks of a session on one core, and collects their device requests.
///
/// It owns the session's units; the transport owns its commands, in a slab that it lends. Order:
/// [`attach`](Self::attach) for each unit; for a command [`begin`](Self::begin) and [`start`](Self::start),
/// then [`resume`](Self::resume) after each step, and [`end`](Self::end). Requests are submitted by
/// [`submit`](Self::submit), which the transport calls where its devices are at hand.
#[derive(Debug)]
pub struct TaskRunner<U> {
    events: Arc<CoreEvents>,
    waker: Arc<dyn ChangeWaker>,
    units: Vec<SessionUnit<U>>,
    /// Requests, each with the key of its device.
    requests: Vec<(u32, bdev::Request)>,
    /// Empty between calls; keeps its memory.
    batch: Vec<bdev::Request>,
    /// Aborts of tasks in flight when the session's connection was closed.
    guards: Vec<PendingGuard>,
}

impl<U: std::fmt::Debug> TaskRunner<U> {
    /// Tasks of a core with these events.
    pub fn new(events: &Arc<CoreEvents>) -> TaskRunner<U> {
        TaskRunner {
            events: events.clone(),
            waker: events.clone(),
            units: Vec::new(),
            requests: Vec::new(),
            batch: Vec::new(),
            guards: Vec::new(),
        }
    }

    /// The units, those that are not present any more among them.
    pub fn units(&self) -> &[SessionUnit<U>] {
        &self.units
    }

    /// The units.
    pub fn units_mut(&mut self) -> &mut [SessionUnit<U>] {
        &mut self.units
    }

    /// Index of the present unit for which `is_it`.
    #[inline]
    pub fn find_unit(&self, is_it: impl Fn(&U) -> bool) -> Option<usize> {
        self.units.iter().position(|unit| unit.is_present && is_it(&unit.info))
    }

    /// Adds a unit, in the place of one that is not present any more and has no commands, if there is one.
    /// Returns whether there was a place: there are at most `max`.
    pub fn attach(&mut self, unit: SessionUnit<U>, max: usize) -> bool {
        match self.units.iter().position(|one| !one.is_present && one.commands == 0) {
            Some(free) => self.units[free] = unit,
            None if self.units.len() < max => self.units.push(unit),
            None => return false,
        }
        true
    }

    /// Removes all units, of which none has a command.
    pub fn detach_all(&mut self) {
        debug_assert!(self.units.iter().all(|unit| unit.commands == 0));
        self.units.clear();
    }

    /// Takes the units, of which none has a command, for the runner of another core.
    pub fn take_units(&mut self) -> Vec<SessionUnit<U>> {
        debug_assert!(self.units.iter().all(|unit| unit.commands == 0));
        std::mem::take(&mut self.units)
    }

    /// Adds the units that another runner had, in their order.
    pub fn put_units(&mut self, units: Vec<SessionUnit<U>>) {
        self.units.extend(units);
    }

    /// Wakes the tasks of the core.
    pub fn waker(&self) -> &Arc<dyn ChangeWaker> {
        &self.waker
    }

    /// The task of a command that the transport adds to its slab.
    pub fn begin(&self, unit: usize) -> RunningTask {
        let sequence = self.events.sequence();
        RunningTask { task: None, unit, sequence, guards: Vec::new(), is_pending: false }
    }

    /// Starts a command that was added. `luns` are those that REPORT LUNS lists.
    #[inline]
    pub fn start<C: SessionCommand>(
        &mut self,
        commands: &mut Slab<C>,
        slot: Slot,
        command: &Command<'_>,
        luns: &[u16],
    ) -> Option<Step> {
        let running = commands.get_mut(slot)?.running_mut();
        self.units[running.unit].commands += 1;
        self.with_context(running.unit, luns, |context| {
            let (task, step) = Task::start(command, context);
            running.task = Some(task);
            running.is_pending = matches!(step, Step::Pending);
            Some(step)
        })
    }

    /// Continues a task; `None` if its command has ended.
    #[inline]
    pub fn resume<C: SessionCommand>(
        &mut self,
        commands: &mut Slab<C>,
        slot: Slot,
        event: TaskEvent,
        luns: &[u16],
    ) -> Option<Step> {
        let running = commands.get_mut(slot)?.running_mut();
        self.with_context(running.unit, luns, |context| {
            let step = running.task.as_mut()?.resume(event, context);
            running.is_pending = matches!(step, Step::Pending);
            Some(step)
        })
    }

    #[inline]
    fn with_context(
        &mut self,
        unit: usize,
        luns: &[u16],
        call: impl FnOnce(&mut TaskContext<'_>) -> Option<Step>,
    ) -> Option<Step> {
        let TaskRunner { waker, units, requests, batch, .. } = self;
        let mut peers = Peers { units, requests: &mut *requests };
        let nexus = &*units[unit].nexus;
        let step = call(&mut TaskContext { nexus, luns, waker, requests: batch, peers: &mut peers });
        if !batch.is_empty() {
            let key = units[unit].key;
            requests.extend(batch.drain(..).map(|request| (key, request)));
        }
        step
    }

    /// A command was removed, whose task has ended.
    #[inline]
    pub fn end(&mut self, running: &RunningTask) {
        self.units[running.unit].commands -= 1;
    }

    /// Has functions concern all tasks that were started before this call, not only those that were when the
    /// functions were requested.
    pub fn extend(&self, functions: &mut [TaskManagement]) {
        let sequence = self.events.sequence();
        functions.iter_mut().for_each(|function| function.extend_to(sequence));
    }

    /// Executes task management functions: `abort` gets the commands to abort, and whether they are reset;
    /// the transport resumes them with [`TaskEvent::Abort`]. A function that is executed again, because
    /// further commands have been found, aborts only these. After the connection is closed, the functions
    /// stay pending until the runner is dropped.
    pub fn manage<C: SessionCommand>(
        &mut self,
        commands: &mut Slab<C>,
        functions: &[TaskManagement],
        is_closed: bool,
        mut abort: impl FnMut(Slot, &mut C, bool),
    ) {
        for (slot, command) in commands.iter_mut() {
            let (tag, running) = (command.tag(), command.running());
            let (nexus, sequence) = (&self.units[running.unit].nexus, running.sequence);
            let concerning = functions.iter().filter(|function| function.concerns(nexus, tag, sequence));
            let (mut is_aborted, mut is_reset) = (false, false);
            for function in concerning.filter(|function| function.tasks().find()) {
                let guards = if is_closed { &mut self.guards } else { &mut command.running_mut().guards };
                if is_closed || !function.is_among(guards) {
                    is_aborted = true;
                    is_reset |= function.tasks().are_reset();
                    guards.push(function.guard());
                }
            }
            if is_aborted && !is_closed {
                abort(slot, command, is_reset);
            }
        }
    }

    /// Commands that wait for the waker, which was called.
    pub fn pending<C: SessionCommand>(commands: &Slab<C>) -> impl Iterator<Item = Slot> {
        commands.iter().filter(|(_, command)| command.running().is_pending).map(|(slot, _)| slot)
    }

    /// Whether there are requests to submit.
    #[inline]
    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Requests that were not submitted are not wanted any more.
    pub fn discard_requests(&mut self) {
        self.requests.clear();
    }

    /// Submits all requests. Returns the completions of those that cannot be, whose tasks may have further
    /// ones.
    #[inline]
    #[must_use = "tasks wait for these completions"]
    pub fn submit(
        &mut self,
        mut submit: impl FnMut(u32, bdev::Request) -> Result<(), Status>,
    ) -> Vec<(Tag, bdev::Completion)> {
        let mut failed = Vec::new();
        for (key, request) in self.requests.drain(..) {
            let tag = request.tag;
            if let Err(status) = submit(key, request) {
                failed.push((tag, bdev::Request::new(tag, Op::Flush, 0, 0).complete(status)));
            }
        }
        failed
    }
}

/// The units of the session, for copies between them.
#[derive(Debug)]
struct Peers<'a, U> {
    units: &'a [SessionUnit<U>],
    requests: &'a mut Vec<(u32, bdev::Request)>,
}

impl<U: std::fmt::Debug> SessionPeers for Peers<'_, U> {
    fn nexus(&self, index: usize) -> Option<&Arc<UnitNexus>> {
        self.units.iter().filter(|unit| unit.is_present).nth(index).map(|unit| &unit.nexus)
    }

    fn submit(&mut self, nexus: &Arc<UnitNexus>, request: bdev::Request) -> Result<(), bdev::Request> {
        let found = self.units.iter().find(|unit| unit.is_present && Arc::ptr_eq(&unit.nexus, nexus));
        let Some(unit) = found else { return Err(request) };
        self.requests.push((unit.key, request));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use reservations::PendingChange;

    use super::*;
    use crate::test_unit::{self, config};
    use crate::{LogicalUnit, UnitFunction, no_waker};

    struct TestCommand(RunningTask, Option<u64>);

    impl SessionCommand for TestCommand {
        fn running(&self) -> &RunningTask {
            &self.0
        }

        fn running_mut(&mut self) -> &mut RunningTask {
            &mut self.0
        }

        fn tag(&self) -> Option<u64> {
            self.1
        }
    }

    const FLUSH: [u8; 10] = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    fn unit() -> Arc<LogicalUnit> {
        LogicalUnit::new(config(512, 64), Arc::default())
    }

    /// A runner with a unit, whose number is its key.
    fn runner(unit: &LogicalUnit) -> (TaskRunner<u8>, Arc<CoreEvents>) {
        let events = CoreEvents::new(None);
        unit.subscribe(&events);
        let mut runner = TaskRunner::new(&events);
        let nexus = test_unit::nexus(unit, 1);
        nexus.take_attention();
        assert!(runner.attach(SessionUnit::new(nexus, 7, 7), 1));
        (runner, events)
    }

    fn start(runner: &mut TaskRunner<u8>, commands: &mut Slab<TestCommand>, tag: u64) -> Slot {
        let Ok(slot) = commands.insert(TestCommand(runner.begin(0), Some(tag))) else { panic!("no room") };
        let command = Command { cdb: &FLUSH, tag: Tag(3), ..Command::default() };
        let step = runner.start(commands, slot, &command, &[0]);
        assert!(matches!(step, Some(Step::InFlight)));
        slot
    }

    #[test]
    fn requests_have_the_key_of_their_unit_and_fail_where_that_is_gone() {
        let unit = unit();
        let (mut runner, _) = runner(&unit);
        let mut commands = Slab::with_capacity(4);
        let slot = start(&mut runner, &mut commands, 5);
        let failed = runner.submit(|key, _| {
            assert_eq!(key, 7);
            Err(Status::INVALID_NAMESPACE_OR_FORMAT)
        });
        assert!(!runner.has_requests());
        for (tag, completion) in failed {
            assert_eq!(tag, Tag(3));
            let step = runner.resume(&mut commands, slot, TaskEvent::Completed(completion), &[0]);
            let Some(Step::Done(response)) = step else { panic!("{step:?}") };
            assert_eq!(response.status, wire_scsi::ScsiStatus::CheckCondition);
        }
    }

    #[test]
    fn a_unit_that_is_not_present_makes_room_when_its_commands_have_ended() {
        let unit = unit();
        let (mut runner, _) = runner(&unit);
        let mut commands = Slab::with_capacity(4);
        let slot = start(&mut runner, &mut commands, 5);
        let other = |key: u8| SessionUnit::new(test_unit::nexus(&unit, 2), key.into(), key);
        assert!(!runner.attach(other(8), 1));
        runner.units_mut()[0].is_present = false;
        assert!(!runner.attach(other(8), 1) && runner.find_unit(|key| *key == 7).is_none());
        let ended = commands.remove(slot).unwrap();
        runner.end(&ended.0);
        assert!(runner.attach(other(8), 1));
        assert_eq!(runner.find_unit(|key| *key == 8), Some(0));
    }

    #[test]
    fn aborts_concern_earlier_tasks_and_stay_pending_after_a_close() {
        let unit = unit();
        let (mut runner, events) = runner(&unit);
        let mut commands = Slab::with_capacity(4);
        let earlier = start(&mut runner, &mut commands, 5);
        let nexus = runner.units()[0].nexus.clone();
        let reset = || -> Arc<PendingChange> { unit.manage(UnitFunction::ClearTaskSet, &nexus, no_waker()) };
        let change = reset();
        let later = start(&mut runner, &mut commands, 5);
        let mut aborts = events.take().unwrap();
        let mut aborted = Vec::new();
        runner.manage(&mut commands, &aborts, false, |slot, _, is_reset| aborted.push((slot, is_reset)));
        assert_eq!(aborted, [(earlier, false)]);
        runner.extend(&mut aborts);
        aborted.clear();
        runner.manage(&mut commands, &aborts, false, |slot, _, is_reset| aborted.push((slot, is_reset)));
        assert_eq!(aborted, [(later, false)], "a function aborts a command once");
        drop(commands.get_mut(later).unwrap().0.take_guards());
        drop(aborts);
        assert!(change.outcome().is_none());
        runner.end(&commands.remove(earlier).unwrap().0);
        assert!(change.outcome().is_some());
        let change = reset();
        runner.manage(&mut commands, &events.take().unwrap(), true, |_, _, _| panic!("it is closed"));
        commands.iter_mut().for_each(|(_, command)| command.0.task = None);
        assert!(change.outcome().is_none());
        drop(runner);
        assert!(change.outcome().is_some());
    }

    /// The tasks of a session on two cores: functions reach those of both.
    #[test]
    fn functions_reach_tasks_of_every_core_by_tag() {
        let unit = unit();
        let ((mut first, first_events), (mut second, second_events)) = (runner(&unit), runner(&unit));
        second.units_mut()[0].nexus = first.units()[0].nexus.clone();
        let nexus = first.units()[0].nexus.clone();
        let (mut here, mut there) = (Slab::with_capacity(4), Slab::with_capacity(4));
        start(&mut first, &mut here, 5);
        let wanted = start(&mut second, &mut there, 6);
        start(&mut second, &mut there, 7);
        let mut run = |there: &mut Slab<TestCommand>| {
            let mut aborted = Vec::new();
            first.manage(&mut here, &first_events.take().unwrap(), false, |_, _, _| panic!("another's"));
            let functions = second_events.take().unwrap();
            second.manage(there, &functions, false, |slot, _, is_reset| aborted.push((slot, is_reset)));
            aborted
        };
        for (tag, is_there) in [(Some(6), true), (Some(5), true), (None, true), (Some(8), false)] {
            let query = unit.query(&nexus, tag, no_waker());
            assert_eq!(query.outcome(), None, "no core has looked");
            assert_eq!(run(&mut there), []);
            assert_eq!(query.outcome(), Some(is_there), "{tag:?}");
        }
        let unknown = unit.manage(UnitFunction::AbortTask(8), &nexus, no_waker());
        assert_eq!((run(&mut there), unknown.outcome().is_some()), (vec![], true));
        // Two functions wait for one task.
        let changes = [(); 2].map(|()| unit.manage(UnitFunction::AbortTask(6), &nexus, no_waker()));
        assert_eq!(run(&mut there), [(wanted, false)]);
        let other = test_unit::nexus(&unit, 9);
        unit.manage(UnitFunction::NexusReset, &other, no_waker());
        assert_eq!(run(&mut there), [], "another nexus");
        assert!(changes.iter().all(|change| change.outcome().is_none()));
        // An answered command has no tag, and stays until it has ended.
        there.get_mut(wanted).unwrap().1 = None;
        let late = unit.manage(UnitFunction::AbortTask(6), &nexus, no_waker());
        assert_eq!((run(&mut there), late.outcome().is_some()), (vec![], true));
        let guards = there.remove(wanted).unwrap().0.take_guards();
        assert!(changes.iter().all(|change| change.outcome().is_none()), "its end is not visible");
        drop(guards);
        assert!(changes.iter().all(|change| change.outcome().is_some()));
    }
}
