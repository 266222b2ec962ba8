//! What a reactor runs every turn.

/// What a poll found to do; more than none keeps the core awake and counts its time as busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing.
    None,
    /// So many things.
    Some(u32),
    /// This poller is finished and is to be dropped.
    Finished,
}

impl Work {
    /// [`Work::None`] for 0, otherwise that many.
    pub fn count(count: usize) -> Work {
        if count == 0 { Work::None } else { Work::Some(u32::try_from(count).unwrap_or(u32::MAX)) }
    }
}

/// How far a poller is with stopping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Something is still in flight; ask again.
    Draining,
    /// Nothing is in flight; it may be dropped.
    Done,
}

/// How often a poller runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    /// Every turn of the reactor.
    EveryTurn,
    /// Once in so many nanoseconds, as long as turns are shorter.
    EveryNs(u64),
}

/// Work of one part of the system on one core. Never blocks; bounds what it does in one call.
pub trait Poller {
    /// Its name in statistics and stall reports.
    fn name(&self) -> &str;

    /// Does what there is to do. `now_ns` is [`sys::clock::now_ns`] at the start of the turn.
    fn poll(&mut self, now_ns: u64) -> Work;

    /// When it must run again although no event of the core's ring announces it: `Some(0)` forbids
    /// sleep, `None` leaves it to events, messages and wake-ups.
    fn deadline(&self) -> Option<u64> {
        None
    }

    /// Asked every turn once the reactor stops: takes nothing new, and says when it is empty.
    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        let _ = now_ns;
        Shutdown::Done
    }
}
