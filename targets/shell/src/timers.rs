//! The deadlines of a core's connections.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use slots::Slot;

/// A deadline that never comes. The largest number and not an option, so that deadlines are compared without a branch.
pub const NEVER_NS: u64 = u64::MAX;

/// When each connection has to be visited next, earliest first.
///
/// A timer may be too early, never too late: a deadline that moves away, as that of Keep Alive with every command, costs
/// nothing until the timer expires, and then one new timer. A connection has one valid timer, whose time its entry
/// keeps; a timer with another time was replaced by an earlier one. So there are few more timers than connections, and
/// none per I/O.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(u64, u64)>>,
    /// The group's own timers are in the heap.
    group_armed: bool,
    check_armed: bool,
}

/// In place of a connection's slot: the group's own timers. No slab has so many slots.
const GROUP: u64 = u64::MAX;
const CHECK: u64 = u64::MAX - 1;

/// Whose timer has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimerOwner {
    Connection(Slot),
    /// Of a group, whose memory may go back.
    Group,
    /// Of a group that checks transfers.
    Check,
}

impl Timers {
    /// Makes sure that a connection is visited by `deadline_ns`; `NEVER_NS` for never. `armed_ns` is the time of its
    /// timer, `NEVER_NS` without one.
    #[inline]
    pub(crate) fn arm(&mut self, slot: Slot, deadline_ns: u64, armed_ns: &mut u64) {
        if deadline_ns < *armed_ns {
            *armed_ns = deadline_ns;
            self.heap.push(Reverse((deadline_ns, slot.to_bits())));
        }
    }

    /// Makes sure that the group itself is visited once, after `deadline_ns`.
    pub(crate) fn arm_group(&mut self, deadline_ns: u64) {
        if !std::mem::replace(&mut self.group_armed, true) {
            self.heap.push(Reverse((deadline_ns, GROUP)));
        }
    }

    /// Makes sure that transfers are checked once, after `deadline_ns`.
    pub(crate) fn arm_check(&mut self, deadline_ns: u64) {
        if !std::mem::replace(&mut self.check_armed, true) {
            self.heap.push(Reverse((deadline_ns, CHECK)));
        }
    }

    /// Whether transfers will be checked.
    #[inline]
    pub(crate) fn is_check_armed(&self) -> bool {
        self.check_armed
    }

    /// The time of the first timer; `NEVER_NS` without one.
    #[inline]
    pub(crate) fn next_ns(&self) -> u64 {
        self.heap.peek().map_or(NEVER_NS, |Reverse((at_ns, _))| *at_ns)
    }

    /// Takes the first timer that has expired, with its time.
    pub(crate) fn pop_expired(&mut self, now_ns: u64) -> Option<(u64, TimerOwner)> {
        if self.next_ns() > now_ns {
            return None;
        }
        let Reverse((at_ns, owner)) = self.heap.pop()?;
        if owner == GROUP {
            self.group_armed = false;
            return Some((at_ns, TimerOwner::Group));
        }
        if owner == CHECK {
            self.check_armed = false;
            return Some((at_ns, TimerOwner::Check));
        }
        Some((at_ns, TimerOwner::Connection(Slot::from_bits(owner))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_replaced_by_an_earlier_one_only() {
        let (mut timers, slot, mut armed_ns) = (Timers::default(), Slot::from_bits(1), NEVER_NS);
        timers.arm(slot, NEVER_NS, &mut armed_ns);
        assert_eq!(timers.next_ns(), NEVER_NS);
        for (deadline_ns, next_ns) in [(50, 50), (70, 50), (30, 30), (30, 30)] {
            timers.arm(slot, deadline_ns, &mut armed_ns);
            assert_eq!((timers.next_ns(), armed_ns), (next_ns, next_ns));
        }
        assert_eq!(timers.pop_expired(29), None);
        assert_eq!(timers.pop_expired(50), Some((30, TimerOwner::Connection(slot))));
        // Replaced: the connection's timer is the one of 30.
        assert_eq!(timers.pop_expired(50), Some((50, TimerOwner::Connection(slot))));
        assert_eq!(timers.pop_expired(u64::MAX), None);
    }

    #[test]
    fn timers_expire_in_order() {
        let mut timers = Timers::default();
        for (index, deadline_ns) in [40, 10, 30, 20].into_iter().enumerate() {
            timers.arm(Slot::from_bits(index as u64), deadline_ns, &mut { NEVER_NS });
        }
        let expired: Vec<u64> =
            std::iter::from_fn(|| timers.pop_expired(30)).map(|(at_ns, _)| at_ns).collect();
        assert_eq!((expired, timers.next_ns()), (vec![10, 20, 30], 40));
    }

    #[test]
    fn the_group_has_one_timer() {
        let mut timers = Timers::default();
        timers.arm_group(20);
        timers.arm_group(10);
        assert_eq!(timers.pop_expired(20), Some((20, TimerOwner::Group)));
        assert_eq!(timers.pop_expired(20), None);
        timers.arm_group(30);
        assert_eq!(timers.pop_expired(30), Some((30, TimerOwner::Group)));
    }
}
