//! Connections whose work arrives through memory.

use slots::Slot;
use sockets::Listen;

use super::ConnectionGroup;
use crate::connections::ConnectionEntry;
use crate::protocol::{IoContext, Polling, Protocol, ProtocolConnection, Turn};

/// Longest time between two polls of a core without other work.
const POLL_INTERVAL_NS_MAX: u64 = 1_000_000;

/// Adds a connection to the list of those that are polled, if it is to be.
#[inline]
pub(super) fn add_polled<P: Protocol>(
    polled: &mut Vec<Slot>,
    slot: Slot,
    entry: &mut ConnectionEntry<P::Connection>,
) {
    if !entry.polled && entry.connection.polling() != Polling::Off {
        entry.polled = true;
        polled.push(slot);
    }
}

impl<P: Protocol, N: Listen> ConnectionGroup<P, N> {
    /// Polls connections whose work arrives through memory. Returns the number of commands found.
    #[inline]
    pub(super) fn poll_connections(&mut self, now_ns: u64) -> usize {
        let (mut found, mut busy) = (0, 0);
        let has_other_target = self.core_groups.has_other(self.key, now_ns);
        let ConnectionGroup { polled, polled_active, connections, pool, protocol, config, devices, .. } =
            self;
        polled.retain(|slot| {
            let Some(entry) = connections.slab.get_mut(*slot).filter(|entry| !entry.closed) else {
                return false;
            };
            let key = slot.to_bits();
            // Not only those with commands in this poll: one that waits for each answer has none in every other.
            let turn = Turn::new(has_other_target || polled_active.has_other(key, now_ns), false);
            let mut context =
                IoContext { pool, protocol, config, now_ns, turn, devices, requests: &mut entry.requests };
            let count = entry.connection.poll(&mut context);
            if count > 0 {
                found += count;
                busy += 1;
                polled_active.note(key, now_ns);
                if !entry.dirty {
                    entry.dirty = true;
                    connections.dirty.push(*slot);
                }
            }
            entry.polled = entry.connection.polling() != Polling::Off;
            entry.polled
        });
        self.polled_busy = busy;
        self.is_active |= busy > 0;
        found
    }

    /// When the core has to poll although it has no other work.
    pub(super) fn next_poll_ns(&self) -> Option<u64> {
        if self.polled.is_empty() {
            return None;
        }
        let now_ns = self.clock.now_ns();
        let idle_ns = |slot: &Slot| {
            let entry = self.connections.slab.get(*slot).filter(|entry| !entry.closed)?;
            match entry.connection.polling() {
                Polling::Timed { active_ns } => Some(now_ns.saturating_sub(active_ns)),
                Polling::Off | Polling::WhileAwake => None,
            }
        };
        // A command waits at most an eighth of the idle time before it.
        let idle_ns = self.polled.iter().filter_map(idle_ns).min()?;
        Some(now_ns + (idle_ns / 8).min(POLL_INTERVAL_NS_MAX))
    }
}
