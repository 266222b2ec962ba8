//! Who has begun commands lately, of those that share a core.

use std::cell::Cell;

/// How long a connection or a target counts as active after it has begun a command: longer than the pauses of a peer that
/// waits for each answer, over a network too. Deep queues of others are limited for as long.
const ACTIVE_NS: u64 = 10_000_000;

/// The two that were last active. Whether another is active takes a comparison, however many there are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LastActive {
    latest: ActiveKey,
    /// The last with another key.
    previous: ActiveKey,
}

#[derive(Clone, Copy, Debug, Default)]
struct ActiveKey {
    key: u64,
    until_ns: u64,
}

impl LastActive {
    /// `key` has begun commands.
    #[inline]
    pub(super) fn note(&mut self, key: u64, now_ns: u64) {
        if self.latest.key != key {
            self.previous = self.latest;
        }
        self.latest = ActiveKey { key, until_ns: now_ns.saturating_add(ACTIVE_NS) };
    }

    /// Whether one with another key is active.
    #[inline]
    pub(super) fn has_other(&self, key: u64, now_ns: u64) -> bool {
        let other = if self.latest.key == key { self.previous } else { self.latest };
        now_ns < other.until_ns
    }
}

/// The groups of a core, one for each target: they have the time of the core in common, and nothing else.
#[derive(Default)]
pub(super) struct CoreGroups {
    active: Cell<LastActive>,
    count: Cell<u64>,
}

impl CoreGroups {
    /// The key of a new group.
    pub(super) fn add(&self) -> u64 {
        self.count.set(self.count.get() + 1);
        self.count.get()
    }

    /// See [`LastActive::note`].
    #[inline]
    pub(super) fn note(&self, key: u64, now_ns: u64) {
        let mut active = self.active.get();
        active.note(key, now_ns);
        self.active.set(active);
    }

    /// See [`LastActive::has_other`].
    #[inline]
    pub(super) fn has_other(&self, key: u64, now_ns: u64) -> bool {
        self.active.get().has_other(key, now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_two_are_known_and_time_ends_them() {
        let mut active = LastActive::default();
        assert!(![0, 1].iter().any(|key| active.has_other(*key, 0)), "none at first");
        active.note(1, 100);
        assert_eq!([1, 2].map(|key| active.has_other(key, 100)), [false, true]);
        active.note(2, 200);
        active.note(2, 300);
        assert_eq!([1, 2, 3].map(|key| active.has_other(key, 300)), [true; 3]);
        assert_eq!([1, 2, 3].map(|key| active.has_other(key, 100 + ACTIVE_NS)), [true, false, true]);
        assert!(!active.has_other(3, 300 + ACTIVE_NS));
        active.note(3, 400);
        assert!(active.has_other(3, 400), "the one before the last");
    }
}
