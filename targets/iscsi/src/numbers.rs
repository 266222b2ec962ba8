//! Numbers of a session's commands, for its connections on any core (RFC 7143, section 4.2.2.1).

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use arrayvec::ArrayVec;

use crate::limits::QUEUE_DEPTH_MAX;

/// The numbers of the commands of a session.
///
/// A connection asks for the [`turn`](Self::turn) of a command, [claims](Self::claim) its number, starts the command,
/// and [reports](Self::deliver) that it was. So commands start in the order of their numbers, on whichever connection
/// they come. In a session that may have several connections, this costs a command three atomic operations and no lock.
#[derive(Debug)]
pub(crate) struct CommandNumbers {
    /// Several connections may use it.
    is_shared: bool,
    /// ExpCmdSN: the number that is claimed next.
    expected: AtomicU32,
    /// All commands with smaller numbers have started.
    delivered: AtomicU32,
    /// MaxCmdSN.
    max: AtomicU32,
    /// Commands in flight, at most.
    depth: u32,
    /// A connection waits for the turn of its command.
    has_waiting: AtomicBool,
    /// There are skipped numbers.
    has_skipped: AtomicBool,
    /// Numbers of commands that were aborted before they arrived, all in the window.
    skipped: Mutex<ArrayVec<u32, { QUEUE_DEPTH_MAX as usize }>>,
}

/// When a command may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It is the next.
    Now,
    /// Commands before it are missing.
    Later,
    /// It is outside the window, and is ignored.
    Never,
}

impl CommandNumbers {
    /// Numbers from `first`, with room for `depth` commands.
    pub(crate) fn new(first: u32, depth: u32, is_shared: bool) -> CommandNumbers {
        CommandNumbers {
            is_shared,
            expected: AtomicU32::new(first),
            delivered: AtomicU32::new(first),
            max: AtomicU32::new(first.wrapping_add(depth).wrapping_sub(1)),
            depth,
            has_waiting: AtomicBool::new(false),
            has_skipped: AtomicBool::new(false),
            skipped: Mutex::default(),
        }
    }

    /// Commands in flight, at most.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    /// Whether several connections may use it.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// ExpCmdSN. To be read before [`max`](Self::max), which only grows, so that the window is never negative.
    #[inline]
    pub(crate) fn expected(&self) -> u32 {
        self.expected.load(Ordering::Acquire)
    }

    /// MaxCmdSN.
    #[inline]
    pub(crate) fn max(&self) -> u32 {
        self.max.load(Ordering::Acquire)
    }

    /// Commands have ended.
    #[inline]
    pub(crate) fn widen(&self, commands: u32) {
        if self.is_shared {
            self.max.fetch_add(commands, Ordering::AcqRel);
        } else {
            self.max.store(self.max().wrapping_add(commands), Ordering::Relaxed);
        }
    }

    /// When a command may start.
    #[inline]
    pub(crate) fn turn(&self, cmd_sn: u32) -> Turn {
        let expected = self.expected.load(Ordering::SeqCst);
        let ahead = cmd_sn.wrapping_sub(expected);
        let window = self.max().wrapping_sub(expected).wrapping_add(1);
        if ahead >= window {
            Turn::Never
        } else if ahead == 0 && self.delivered.load(Ordering::SeqCst) == cmd_sn {
            Turn::Now
        } else {
            Turn::Later
        }
    }

    /// As [`turn`](Self::turn); if the answer is [`Turn::Later`], the next delivery reports that connections wait.
    pub(crate) fn wait_for_turn(&self, cmd_sn: u32) -> Turn {
        // Before the numbers are read: a delivery after that sees it.
        self.has_waiting.store(true, Ordering::SeqCst);
        self.turn(cmd_sn)
    }

    /// Takes a number. Returns false if another connection has: a command whose number is used twice starts once.
    #[inline]
    pub(crate) fn claim(&self, cmd_sn: u32) -> bool {
        let next = cmd_sn.wrapping_add(1);
        if self.is_shared {
            let claimed = self.expected.compare_exchange(cmd_sn, next, Ordering::SeqCst, Ordering::Relaxed);
            return claimed.is_ok();
        }
        self.expected.store(next, Ordering::Relaxed);
        true
    }

    /// The command of a claimed number has started. Returns whether connections wait.
    #[inline]
    pub(crate) fn deliver(&self, cmd_sn: u32) -> bool {
        let next = cmd_sn.wrapping_add(1);
        if !self.is_shared {
            self.delivered.store(next, Ordering::Relaxed);
        } else {
            self.delivered.store(next, Ordering::SeqCst);
        }
        // After the numbers are stored: one that is skipped at the same time sees them, or is seen.
        if self.has_skipped.load(Ordering::SeqCst) {
            self.pass_skipped();
        }
        self.is_shared && self.has_waiting.swap(false, Ordering::SeqCst)
    }

    /// A command that has not arrived is aborted: its number counts as received, and if it arrives it is ignored (RFC
    /// 7143, section 11.5.1). Returns `None` if the number was received, or is outside the window; otherwise whether
    /// connections wait.
    #[cold]
    pub(crate) fn skip(&self, cmd_sn: u32) -> Option<bool> {
        let mut skipped = sync::lock(&self.skipped);
        if self.turn(cmd_sn) == Turn::Never {
            return None;
        }
        if !skipped.contains(&cmd_sn) {
            // The window has no more numbers than that.
            skipped.try_push(cmd_sn).ok()?;
        }
        self.has_skipped.store(true, Ordering::SeqCst);
        drop(skipped);
        self.pass_skipped();
        Some(self.is_shared && self.has_waiting.swap(false, Ordering::SeqCst))
    }

    /// Receives skipped numbers whose turn it is.
    #[cold]
    fn pass_skipped(&self) {
        let mut skipped = sync::lock(&self.skipped);
        while let Some(at) = skipped.iter().position(|cmd_sn| self.turn(*cmd_sn) != Turn::Later) {
            let cmd_sn = skipped.swap_remove(at);
            // Another connection may have claimed it: the command has arrived after all.
            if self.turn(cmd_sn) == Turn::Now && self.claim(cmd_sn) {
                self.delivered.store(cmd_sn.wrapping_add(1), Ordering::SeqCst);
                self.widen(1);
            }
        }
        self.has_skipped.store(!skipped.is_empty(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_command_starts_when_those_before_it_have() {
        let numbers = CommandNumbers::new(u32::MAX, 3, true);
        assert_eq!((numbers.expected(), numbers.max()), (u32::MAX, 1));
        let turns = |of: [u32; 5]| of.map(|cmd_sn| numbers.turn(cmd_sn));
        let all = [u32::MAX - 1, u32::MAX, 0, 1, 2];
        assert_eq!(turns(all), [Turn::Never, Turn::Now, Turn::Later, Turn::Later, Turn::Never]);
        assert_eq!(numbers.wait_for_turn(0), Turn::Later);
        assert!(numbers.claim(u32::MAX) && !numbers.claim(u32::MAX));
        // It is claimed, and has not started.
        assert_eq!(turns(all), [Turn::Never, Turn::Never, Turn::Later, Turn::Later, Turn::Never]);
        assert!(numbers.deliver(u32::MAX));
        assert_eq!(turns(all), [Turn::Never, Turn::Never, Turn::Now, Turn::Later, Turn::Never]);
        assert!(numbers.claim(0) && !numbers.deliver(0));
        numbers.widen(1);
        assert_eq!(turns(all), [Turn::Never, Turn::Never, Turn::Never, Turn::Now, Turn::Later]);
    }

    #[test]
    fn a_command_that_is_aborted_before_it_arrives_counts_as_received() {
        for is_shared in [false, true] {
            let numbers = CommandNumbers::new(5, 4, is_shared);
            assert_eq!((numbers.skip(4), numbers.skip(9)), (None, None), "outside the window");
            assert_eq!((numbers.skip(6), numbers.skip(6)), (Some(false), Some(false)));
            assert_eq!((numbers.expected(), numbers.turn(6)), (5, Turn::Later));
            assert!(numbers.claim(5));
            numbers.deliver(5);
            // It is ignored if it arrives, and makes room for another one.
            assert_eq!((numbers.expected(), numbers.max(), numbers.turn(6)), (7, 9, Turn::Never));
            assert_eq!((numbers.skip(7), numbers.turn(8)), (Some(false), Turn::Now));
            assert_eq!(numbers.skip(7), None);
        }
        let numbers = CommandNumbers::new(5, 4, true);
        assert_eq!(numbers.wait_for_turn(6), Turn::Later);
        assert_eq!((numbers.skip(5), numbers.turn(6)), (Some(true), Turn::Now), "it waits no longer");
    }

    /// Threads that own commands at random start all of them in order.
    #[test]
    fn commands_of_several_threads_start_in_order() {
        const COMMANDS: u32 = 3000;
        const THREADS: u32 = 3;
        let numbers = CommandNumbers::new(0, COMMANDS, true);
        let started = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (numbers, started) = (&numbers, &started);
                scope.spawn(move || {
                    let own = (0..COMMANDS)
                        .filter(|number| (number.wrapping_mul(0x9e37_79b9) >> 20) % THREADS == thread);
                    for cmd_sn in own.collect::<Vec<_>>() {
                        while numbers.wait_for_turn(cmd_sn) != Turn::Now {
                            std::thread::yield_now();
                        }
                        assert!(numbers.claim(cmd_sn));
                        sync::lock(started).push(cmd_sn);
                        numbers.deliver(cmd_sn);
                    }
                });
            }
        });
        assert_eq!(*sync::lock(&started), (0..COMMANDS).collect::<Vec<_>>());
    }
}
