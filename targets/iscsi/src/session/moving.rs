//! A connection of a session that moves to another core.
//!
//! It moves when all its commands have ended: none begins on the way. So a task management function finds
//! every task on some core. The session's other connections stay where they are; what they share is not bound
//! to a core.

use super::*;

/// What a session without commands has on no core.
pub(crate) struct DetachedSession {
    identity: Identity,
    handle: Arc<SessionHandle>,
    parameters: Parameters,
    flow: u16,
    units: Vec<SessionUnit<UnitInfo>>,
    luns: Vec<u16>,
    stat_sn: u32,
    text: TextExchange,
    is_pinged: bool,
    data_progress: u64,
    work_done: u64,
}

impl DetachedSession {
    /// A session that begins.
    pub(super) fn new(result: LoginResult, handle: SessionHandle, flow: u16) -> DetachedSession {
        let LoginResult { identity, parameters, stat_sn } = result;
        DetachedSession {
            identity,
            handle: Arc::new(handle),
            parameters,
            flow,
            units: Vec::new(),
            luns: Vec::new(),
            stat_sn,
            text: TextExchange::default(),
            is_pinged: false,
            data_progress: 0,
            work_done: 0,
        }
    }
}

impl Session {
    /// What its commands have cost so far, wrapping.
    pub(crate) fn work_done(&self) -> u64 {
        self.work_done
    }

    /// Whether it has no command, function, logout, device request or buffer.
    pub(crate) fn is_detachable(&self) -> bool {
        self.commands.is_empty()
            && self.outstanding == 0
            && self.claimed.is_none()
            && self.functions.is_empty()
            && self.logouts.is_empty()
            && !self.tasks.has_requests()
            && !self.is_over
    }

    /// What remains of a session that is [detachable](Self::is_detachable).
    ///
    /// # Panics
    /// If it is not.
    pub(crate) fn detach(mut self) -> DetachedSession {
        assert!(self.is_detachable(), "{} commands are in flight", self.commands.len());
        debug_assert_eq!(self.memory.held(), 0);
        DetachedSession {
            identity: self.identity.clone(),
            handle: self.handle.clone(),
            parameters: self.parameters,
            flow: self.flow,
            units: self.tasks.take_units(),
            luns: std::mem::take(&mut self.luns),
            stat_sn: self.stat_sn,
            text: std::mem::take(&mut self.text),
            is_pinged: self.is_pinged,
            data_progress: self.data_progress,
            work_done: self.work_done,
        }
    }

    /// The session on a core, with its resources.
    pub(crate) fn attach(detached: DetachedSession, context: &IoContext<'_, IscsiCore>) -> Session {
        let events = &context.protocol.events;
        let mut tasks = TaskRunner::new(events);
        tasks.put_units(detached.units);
        // From now on this core is notified. What others have asked for before is looked at in `resume`.
        detached.handle.set_events(events);
        let shared = detached.handle.shared().clone();
        Session {
            identity: detached.identity,
            handle: detached.handle,
            parameters: detached.parameters,
            flow: detached.flow,
            tasks,
            luns: detached.luns,
            commands: Slab::with_capacity(shared.numbers.depth() + IMMEDIATE_COMMANDS_MAX),
            shared,
            immediate_commands: 0,
            stat_sn: detached.stat_sn,
            claimed: None,
            is_out_of_turn: false,
            work: VecDeque::new(),
            outstanding: 0,
            memory: context.memory_share(QUOTA_BYTES),
            quota_wait: None,
            waiting: false,
            is_sink_waiting: false,
            functions: Vec::new(),
            logouts: Vec::new(),
            has_event: false,
            text: detached.text,
            is_pinged: detached.is_pinged,
            data_progress: detached.data_progress,
            is_over: false,
            work_done: detached.work_done,
        }
    }
}
