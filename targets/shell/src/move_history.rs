//! A connection's moves between cores.

/// Time that a connection stays on a core after its first move, or after a move that failed: moves cost it a
/// thousandth of its time at most.
const STAY_NS: u64 = 1_000_000_000;
/// How often that time is doubled, once for each further move, so that moves to and fro come to an end.
const STAY_DOUBLED_MAX: u8 = 6;
/// A connection that has stayed for as long beyond that time counts as one that has not moved.
const CALM_NS: u64 = 60_000_000_000;

/// What a group knows of a connection's moves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MoveHistory {
    /// It completes its commands for a move.
    pub(crate) is_moving: bool,
    /// Moves in a row that it could not be ready for in time.
    pub(crate) failures: u8,
    /// How often it has moved, each time soon after the one before.
    pub(crate) count: u8,
    /// It stays on this core until then.
    pub(crate) stays_until_ns: u64,
    /// Its [`work`](crate::ProtocolConnection::work) when it was asked last.
    pub(crate) work_seen: u64,
}

impl MoveHistory {
    /// Whether a connection may move that has to leave its core, however short it is there.
    pub(crate) fn can_begin(&self, now_ns: u64) -> bool {
        !self.is_moving && (self.failures == 0 || self.stays_until_ns <= now_ns)
    }

    /// Of a connection that moves now.
    pub(crate) fn after_move(self, now_ns: u64) -> MoveHistory {
        let is_calm = now_ns >= self.stays_until_ns.saturating_add(CALM_NS);
        let count = if is_calm { 0 } else { self.count };
        let stays_until_ns = now_ns.saturating_add(STAY_NS << count.min(STAY_DOUBLED_MAX));
        MoveHistory { stays_until_ns, count: count.saturating_add(1), ..MoveHistory::default() }
    }

    /// Of a connection that could not move in time.
    pub(crate) fn after_failure(self, now_ns: u64) -> MoveHistory {
        let failures = self.failures.saturating_add(1);
        let stays_until_ns = self.stays_until_ns.max(now_ns.saturating_add(STAY_NS));
        MoveHistory { is_moving: false, failures, stays_until_ns, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_moves_to_and_fro_stays_for_longer_each_time() {
        let (mut moves, mut now_ns, mut stays) = (MoveHistory::default(), 1, Vec::new());
        for _ in 0..8 {
            moves = moves.after_move(now_ns);
            stays.push((moves.stays_until_ns - now_ns) / STAY_NS);
            now_ns = moves.stays_until_ns;
        }
        assert_eq!(stays, [1, 2, 4, 8, 16, 32, 64, 64]);
        assert!(moves.can_begin(now_ns - 1), "it may leave a core that it has to");
        let failed = moves.after_failure(now_ns);
        assert!(!failed.can_begin(now_ns + STAY_NS - 1) && failed.can_begin(now_ns + STAY_NS));
        assert!(!MoveHistory { is_moving: true, ..MoveHistory::default() }.can_begin(now_ns));
        now_ns += CALM_NS;
        assert_eq!(moves.after_move(now_ns).stays_until_ns - now_ns, STAY_NS);
    }
}
