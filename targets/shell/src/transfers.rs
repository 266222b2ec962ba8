//! The bound on how long a peer may keep the buffers of its connection.

/// Longest time between checks.
const CHECK_INTERVAL_NS_MAX: u64 = 1_000_000_000;
/// Most time for a transfer while memory lacks.
const TIMEOUT_IF_LACKING_NS: u64 = 10_000_000_000;
/// Checks in a row in which a connection may be too slow while memory lacks.
const SLOW_CHECKS_MAX: u32 = 2;

/// What a connection waits for its peer with, as of now: data that the peer owes, answers that it has not
/// read.
///
/// The protocol fills it in when it is asked
/// ([`ProtocolConnection::transfers`](crate::ProtocolConnection::transfers)), about once a second, from what
/// it knows anyway; commands themselves cost nothing.
#[derive(Debug, Default)]
pub struct TransferReport {
    waiting: Vec<WaitingTransfer>,
}

/// A transfer that waits for the peer.
#[derive(Clone, Copy, Debug)]
struct WaitingTransfer {
    id: u64,
    bytes: usize,
    moved: usize,
    /// Checks in a row that have seen it.
    checks: u32,
}

impl WaitingTransfer {
    /// Bytes of its buffers that were moved. What keeps none delays no other connection, however slow it is.
    fn moved_of_buffers(&self) -> usize {
        self.moved.min(self.bytes)
    }
}

impl TransferReport {
    /// A transfer waits for the peer. `id` is its own, also after the end of others. It keeps buffers of
    /// `bytes`, and `moved` bytes of it have arrived or are sent.
    pub fn waits_for_peer(&mut self, id: u64, bytes: usize, moved: usize) {
        self.waiting.push(WaitingTransfer { id, bytes, moved, checks: 0 });
    }

    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Identifiers, bytes of buffers and bytes moved.
    #[cfg(test)]
    pub(crate) fn list(&self) -> Vec<(u64, usize, usize)> {
        self.waiting.iter().map(|one| (one.id, one.bytes, one.moved)).collect()
    }
}

/// How often transfers are checked, and how many checks make up the time that they have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckTimes {
    pub(crate) interval_ns: u64,
    /// The time-out in checks.
    checks_max: u32,
    /// The same while memory lacks.
    checks_if_lacking: u32,
}

impl CheckTimes {
    pub(crate) fn new(timeout_ns: u64) -> CheckTimes {
        let interval_ns = (timeout_ns / 4).clamp(1, CHECK_INTERVAL_NS_MAX);
        let checks = |timeout_ns: u64| u32::try_from(timeout_ns.div_ceil(interval_ns)).unwrap_or(u32::MAX);
        CheckTimes {
            interval_ns,
            checks_max: checks(timeout_ns),
            checks_if_lacking: checks(timeout_ns.min(TIMEOUT_IF_LACKING_NS)),
        }
    }
}

/// The transfers of a connection at the last check, and what checks have found.
///
/// A connection ends if nothing of its transfers moves for the time-out. While memory lacks, progress is
/// measured: a connection has to move as many bytes as it keeps buffers for its peer within the time-out (at
/// most 10 s), as the mean of each check, and too slow in two checks in a row is too slow. No single transfer
/// may take longer than that time then.
#[derive(Debug, Default)]
pub(crate) struct TransferCheck {
    /// Transfers that waited, in the order of their identifiers.
    waiting: Vec<WaitingTransfer>,
    /// Bytes of buffers that the connection had given back.
    returned: usize,
    stalled_checks: u32,
    slow_checks: u32,
    /// How often connections of its peer were refused what the peer holds.
    refusals: u64,
}

/// What a check has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckResult {
    /// Something waits for the peer.
    pub(crate) is_waiting: bool,
    /// Data was moved since the last check, and fast enough.
    pub(crate) makes_progress: bool,
    /// Buffers wait for the peer, and too little was moved.
    pub(crate) is_slow: bool,
    /// The peer has had its time.
    pub(crate) has_failed: bool,
}

impl TransferCheck {
    /// Whether there were refusals since the last check.
    pub(crate) fn take_refusals(&mut self, refusals: u64) -> bool {
        std::mem::replace(&mut self.refusals, refusals) != refusals
    }

    /// `returned`: bytes of buffers that the connection has ever given back, wrapping. `is_lacking`: others
    /// lack memory.
    pub(crate) fn check(
        &mut self,
        report: &TransferReport,
        returned: usize,
        times: &CheckTimes,
        is_lacking: bool,
    ) -> CheckResult {
        let before = std::mem::take(&mut self.waiting);
        let bytes_of = |transfers: &[WaitingTransfer]| transfers.iter().map(|one| one.bytes).sum::<usize>();
        let required =
            bytes_of(&before).min(bytes_of(&report.waiting)).div_ceil(times.checks_if_lacking as usize);
        // What the transfers of the last check have moved. One that has ended has moved all of it.
        let mut moved: usize = before.iter().map(|one| one.bytes.saturating_sub(one.moved)).sum();
        let (mut still_waiting, mut has_changed) = (0, false);
        self.waiting.extend_from_slice(&report.waiting);
        self.waiting.sort_unstable_by_key(|transfer| transfer.id);
        for transfer in &mut self.waiting {
            let known = before.binary_search_by_key(&transfer.id, |known| known.id);
            let Some(known) = known.ok().map(|position| before[position]) else {
                moved += transfer.moved_of_buffers();
                continue;
            };
            transfer.checks = known.checks + 1;
            still_waiting += 1;
            has_changed |= transfer.moved != known.moved;
            moved = moved.saturating_sub(known.bytes.saturating_sub(known.moved));
            moved += transfer.moved_of_buffers().saturating_sub(known.moved);
        }
        // There may have been others in between.
        moved = moved.max(returned.wrapping_sub(self.returned));
        self.returned = returned;
        let has_waited = !self.waiting.is_empty() && !before.is_empty();
        let has_moved = has_changed || moved > 0 || still_waiting < before.len();
        let (is_stalled, is_slow) = (has_waited && !has_moved, has_waited && moved < required);
        self.stalled_checks = if is_stalled { self.stalled_checks + 1 } else { 0 };
        self.slow_checks = if is_slow { self.slow_checks + 1 } else { 0 };
        let is_old =
            |transfer: &WaitingTransfer| transfer.bytes > 0 && transfer.checks >= times.checks_if_lacking;
        let is_in_the_way =
            is_lacking && (self.slow_checks >= SLOW_CHECKS_MAX || self.waiting.iter().any(is_old));
        CheckResult {
            is_waiting: !self.waiting.is_empty(),
            // What waits since less than a check has not shown whether it moves: the network alone may have
            // taken what was before it.
            makes_progress: moved > 0 && !is_slow && (has_waited || self.waiting.is_empty()),
            is_slow,
            has_failed: self.stalled_checks >= times.checks_max || is_in_the_way,
        }
    }
}

#[cfg(test)]
mod tests;
