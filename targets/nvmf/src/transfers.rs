//! The bound on how long a host may keep the memory of its commands.

use block_io::Status;
use nvme_tcp::SendPosition;
use slots::Slot;
use target_shell::{CloseReason, NEVER_NS};

use crate::connection::{ConnectionState, IncomingPdu};
use crate::limits::TcpLimits;
use crate::link::TcpLocation;
use crate::tcp::{TcpError, TcpProtocol};

/// Longest time between checks.
const CHECK_INTERVAL_NS_MAX: u64 = 1_000_000_000;
/// Checks without progress that a connection may see while memory lacks.
const CHECKS_IF_EXHAUSTED: u32 = 2;
/// Time for which the pool counts as exhausted. Commands that wait for a buffer ask again each millisecond.
const EXHAUSTED_NS: u64 = 1_000_000_000;

/// Finds transfers that do not end: data that an R2T requests, answers that the host does not read.
///
/// Such a transfer holds a buffer of the core's pool, and many of them would leave none for other hosts. A connection
/// with commands in flight is checked each second at most, and only then: a check lists the commands that wait for the
/// host, with the number of checks that have seen each. Commands themselves cost nothing. A slot's generation tells a
/// command from a later one in its slot. An idle connection has no timer.
///
/// A connection is closed if none of its transfers ends for the time-out; a slow one that moves data is not. While the
/// pool is exhausted, two checks without progress are enough, and no single transfer may take longer than the time-out.
#[derive(Debug, Default)]
pub(crate) struct TransferCheck {
    due_ns: Option<u64>,
    interval_ns: u64,
    /// Commands that waited for the host at the last check, and how many checks in a row, by index of their slot.
    waiting: Vec<(Slot, u32)>,
    /// Where sending stood at the last check, if not everything was sent.
    sending: Option<SendPosition>,
    /// Checks in a row that found no progress.
    stalled: u32,
}

impl TransferCheck {
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.due_ns.is_some()
    }

    /// The time of the next check; `NEVER_NS` for none.
    #[inline]
    pub(crate) fn due_ns(&self) -> u64 {
        self.due_ns.unwrap_or(NEVER_NS)
    }

    /// Starts to check: commands may be in flight.
    pub(crate) fn arm(&mut self, now_ns: u64, limits: &TcpLimits) {
        self.interval_ns = (limits.transfer_timeout_ns / 4).min(CHECK_INTERVAL_NS_MAX);
        self.due_ns = Some(now_ns + self.interval_ns);
    }

    /// Checks those commands that wait for the host, and where sending stands, `None` if everything is sent.
    fn check(&mut self, waiting: impl Iterator<Item = Slot>, sending: Option<SendPosition>) {
        let before = std::mem::take(&mut self.waiting);
        let checks = |slot: Slot| {
            let known = before.binary_search_by_key(&slot.index(), |(known, _)| known.index());
            let known = known.ok().map(|position| before[position]).filter(|(known, _)| *known == slot);
            known.map_or(0, |(_, checks)| checks + 1)
        };
        self.waiting = waiting.map(|slot| (slot, checks(slot))).collect();
        self.waiting.sort_unstable_by_key(|(slot, _)| slot.index());
        let still_waiting = self.waiting.iter().filter(|(_, checks)| *checks > 0).count();
        let moved = still_waiting < before.len() || self.sending.is_some() && self.sending != sending;
        let waits = !self.waiting.is_empty() || sending.is_some();
        let waited = !before.is_empty() || self.sending.is_some();
        self.stalled = if waits && waited && !moved { self.stalled + 1 } else { 0 };
        self.sending = sending;
    }

    /// Whether the last check found the host too slow. `checks_max` is the time-out in checks.
    fn has_failed(&self, checks_max: u32, is_exhausted: bool) -> bool {
        let oldest = || self.waiting.iter().map(|(_, checks)| *checks).max().unwrap_or(0);
        self.stalled >= checks_max
            || is_exhausted && (self.stalled >= CHECKS_IF_EXHAUSTED || oldest() >= checks_max)
    }
}

impl ConnectionState {
    /// Closes the connection if its host has kept transfers waiting for too long. Its commands whose data is missing
    /// fail with Transient Transport Error.
    pub(crate) fn check_transfers(
        &mut self,
        protocol: &TcpProtocol,
        now_ns: u64,
    ) -> Result<(), CloseReason<TcpError>> {
        let sending = self.link.sender.position();
        if self.queue.is_idle() && sending.is_none() {
            self.transfers = TransferCheck::default();
            return Ok(());
        }
        let in_capsule = match self.incoming_pdu {
            IncomingPdu::Capsule { slot, .. } => Some(slot),
            _ => None,
        };
        let is_missing = |slot, location: &TcpLocation| Some(slot) == in_capsule || location.waits_for_host();
        self.transfers.check(self.queue.waiting_for_host(is_missing), sending);
        let interval_ns = self.transfers.interval_ns;
        self.transfers.due_ns = Some(now_ns + interval_ns);
        let is_exhausted =
            protocol.exhausted_ns.is_some_and(|at_ns| now_ns.saturating_sub(at_ns) < EXHAUSTED_NS);
        let checks_max = protocol.limits.transfer_timeout_ns.div_ceil(interval_ns) as u32;
        if !self.transfers.has_failed(checks_max, is_exhausted) {
            return Ok(());
        }
        self.queue.abort_pending(Status::TRANSIENT_TRANSPORT_ERROR, &mut self.link);
        Err(CloseReason::Protocol(TcpError::TransferTimeout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(check: &mut TransferCheck, slots: &[u64], sending: Option<SendPosition>) -> (u32, bool) {
        check.check(slots.iter().map(|bits| Slot::from_bits(*bits)), sending);
        (check.stalled, check.has_failed(4, true))
    }

    #[test]
    fn checks_without_progress_are_counted() {
        let mut state = TransferCheck::default();
        let later = 1 << 32 | 2;
        assert_eq!(check(&mut state, &[1, 2], None), (0, false));
        assert_eq!(check(&mut state, &[1, 2, 3], None), (1, false));
        assert_eq!(check(&mut state, &[1, 3, later], None), (0, false), "another command in the slot of one");
        assert_eq!(check(&mut state, &[1, 3, later], None), (1, false));
        assert_eq!(check(&mut state, &[1, later], None), (0, true), "it moves, but one takes too long");
        assert_eq!(check(&mut state, &[], None), (0, false));
        assert_eq!(check(&mut state, &[7], None), (0, false));
        assert_eq!(check(&mut state, &[7], None), (1, false));
        assert_eq!(check(&mut state, &[7], None), (2, true));
        assert!(!state.has_failed(3, false));
        assert_eq!(check(&mut state, &[7], None).0, 3);
        assert!(state.has_failed(3, false));
    }

    #[test]
    fn every_command_of_a_long_queue_is_found_again() {
        let mut state = TransferCheck::default();
        let slots: Vec<u64> = (0..4096).rev().collect();
        for stalled in 0..3 {
            assert_eq!(check(&mut state, &slots, None).0, stalled);
        }
        assert!(state.waiting.iter().all(|(_, checks)| *checks == 2));
        let moved: Vec<u64> = slots.iter().map(|bits| bits | 1 << 32).collect();
        assert_eq!(check(&mut state, &moved, None).0, 0);
        assert!(state.waiting.iter().all(|(_, checks)| *checks == 0), "the slots hold other commands");
    }

    #[test]
    fn answers_that_are_not_read_count_too() {
        let mut state = TransferCheck::default();
        let (one, other) =
            (SendPosition::default(), SendPosition { unsent_segments: 1, ..Default::default() });
        assert_eq!(check(&mut state, &[], Some(one)).0, 0);
        assert_eq!(check(&mut state, &[], Some(one)).0, 1);
        assert_eq!(check(&mut state, &[], Some(other)).0, 0);
        assert_eq!(check(&mut state, &[], Some(other)).0, 1);
        assert_eq!(check(&mut state, &[], None).0, 0);
        assert_eq!(check(&mut state, &[], Some(one)).0, 0);
    }
}
