//! A session that moves to another core.
//!
//! It moves when each request that it has read is answered: it reads no further one, and what has arrived of
//! those moves with the connection's buffer. The payload of a write follows its header, so that a session
//! never waits for what comes behind a request that it does not read.

use super::*;

/// A session without commands, between two cores.
pub(crate) struct DetachedSession {
    export: Arc<Export>,
    form: HeaderForm,
    structured: bool,
    allocation: bool,
    flow: u16,
    pieces_begun: u64,
    work: u64,
}

impl DetachedSession {
    /// A session that begins.
    pub(super) fn new(export: Arc<Export>, handshake: &Handshake, flow: u16) -> DetachedSession {
        let allocation = handshake.selects_allocation(&export);
        let Handshake { form, structured, .. } = *handshake;
        DetachedSession { export, form, structured, allocation, flow, pieces_begun: 0, work: 0 }
    }
}

impl Session {
    /// What its requests have cost so far, wrapping.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// Reads no request from now on.
    pub(crate) fn begin_move(&mut self) {
        self.paused = true;
    }

    /// Ends [`begin_move`](Self::begin_move).
    pub(crate) fn cancel_move(&mut self) {
        self.paused = false;
    }

    /// Whether what comes next from the client is a request.
    pub(super) fn is_between_requests(&self) -> bool {
        self.issuing.is_none() && self.skip == 0 && self.rejected.is_none()
    }

    /// Whether it has no command, device request or buffer.
    pub(crate) fn is_detachable(&self) -> bool {
        self.is_between_requests() && self.commands.is_empty() && self.is_idle()
    }

    /// What remains of a session that is [detachable](Self::is_detachable).
    ///
    /// # Panics
    /// If it is not.
    pub(crate) fn detach(self) -> DetachedSession {
        assert!(self.is_detachable(), "{} commands are in flight", self.commands.len());
        debug_assert_eq!(self.memory.held(), 0);
        let Session { export, form, structured, allocation, flow, pieces_begun, work, .. } = self;
        DetachedSession { export, form, structured, allocation, flow, pieces_begun, work }
    }

    /// The session on another core, whose buffers count in `memory`.
    pub(crate) fn attach(detached: DetachedSession, memory: MemoryShare) -> Session {
        let DetachedSession { export, form, structured, allocation, flow, pieces_begun, work } = detached;
        Session {
            export,
            form,
            structured,
            allocation,
            flow,
            commands: Slab::with_capacity(COMMANDS_MAX),
            issuing: None,
            skip: 0,
            rejected: None,
            retries: VecDeque::new(),
            edge_turns: EdgeTurns::default(),
            outstanding: 0,
            memory,
            pieces_begun,
            blocked: Blocked::No,
            waiting: false,
            turn_is_over: false,
            paused: false,
            work,
        }
    }
}
