//! The host's keep alive timer of an association.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wire_nvme::identify::{IdentifyController, ctratt};

/// When to send Keep Alive, when an unanswered one means that the controller fell silent (Base 2.0, section
/// 3.9.4), and how long a silent controller may still execute what it has received.
///
/// [`start`](Self::start) once the controller is enabled; then [`due`](Self::due) at
/// [`deadline_ns`](Self::deadline_ns).
#[derive(Debug, Default)]
pub(super) struct KeepAliveTimer {
    /// 0 is off.
    timeout_ns: u64,
    /// When to send the next one.
    due_ns: Option<u64>,
    /// When the outstanding one was sent.
    since_ns: Option<u64>,
    /// When the last one was answered, or the timer was started.
    answered_ns: u64,
    /// Time from then until a silent controller has stopped; 0 if it is not to be waited for.
    quiesce_ns: u64,
    quiesced_ns: Arc<AtomicU64>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeepAliveAction {
    None,
    /// Send Keep Alive, and report it with [`KeepAliveTimer::sent`].
    Send,
    /// The controller did not answer within the timeout.
    Silent,
}

impl KeepAliveTimer {
    /// A timer that is not started. A `timeout_ns` of 0 is off.
    pub(super) fn new(timeout_ns: u64) -> KeepAliveTimer {
        KeepAliveTimer { timeout_ns, ..KeepAliveTimer::default() }
    }

    /// Starts the timer. `quiesce_wait` is that of [`Options`](crate::Options).
    pub(super) fn start(&mut self, identity: &IdentifyController, quiesce_wait: bool, now_ns: u64) {
        if self.timeout_ns == 0 {
            return;
        }
        self.due_ns = Some(now_ns + self.timeout_ns / 2);
        self.answered_ns = now_ns;
        if quiesce_wait {
            self.quiesce_ns = quiesce_ns(self.timeout_ns, identity);
        }
    }

    /// What is to be done now: every half timeout one is due, unless the last is outstanding.
    pub(super) fn due(&mut self, now_ns: u64) -> KeepAliveAction {
        if self.since_ns.is_some_and(|since_ns| now_ns >= since_ns + self.timeout_ns) {
            return KeepAliveAction::Silent;
        }
        if self.due_ns.is_none_or(|due_ns| now_ns < due_ns) {
            return KeepAliveAction::None;
        }
        self.due_ns = Some(now_ns + self.timeout_ns / 2);
        if self.since_ns.is_none() { KeepAliveAction::Send } else { KeepAliveAction::None }
    }

    pub(super) fn sent(&mut self, now_ns: u64) {
        self.since_ns = Some(now_ns);
    }

    pub(super) fn answered(&mut self, now_ns: u64) {
        self.since_ns = None;
        self.answered_ns = now_ns;
    }

    pub(super) fn is_unanswered(&self) -> bool {
        self.since_ns.is_some()
    }

    /// Ends the timer. `is_silent` if the controller does not answer; one that closed the connection has
    /// stopped.
    pub(super) fn stop(&mut self, is_silent: bool) {
        if is_silent && self.quiesce_ns > 0 {
            let quiesced_ns = self.answered_ns.saturating_add(self.quiesce_ns);
            self.quiesced_ns.store(quiesced_ns, Ordering::Release);
        }
        (self.due_ns, self.since_ns, self.quiesce_ns) = (None, None, 0);
    }

    /// Until when a controller that fell silent may execute commands; 0 for one that did not.
    pub(super) fn quiesced_ns(&self) -> &Arc<AtomicU64> {
        &self.quiesced_ns
    }

    /// When [`due`](Self::due) must be called next.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        let silent_ns = self.since_ns.map(|since_ns| since_ns + self.timeout_ns);
        [self.due_ns, silent_ns].into_iter().flatten().min()
    }
}

/// Time from the last answered Keep Alive until a controller that answers no more has stopped (NVM Express TP
/// 4129): the one that was sent afterwards may have restarted its timer once, and with traffic based keep
/// alive other commands once more. An eighth is added for clocks of different rates and for what the
/// controller is just submitting.
fn quiesce_ns(timeout_ns: u64, identity: &IdentifyController) -> u64 {
    let granularity_ns = u64::from(identity.kas_100ms.max(1)) * 100_000_000;
    let timeout_ns = timeout_ns.next_multiple_of(granularity_ns);
    let timeouts = if identity.ctratt & ctratt::TRAFFIC_KEEP_ALIVE != 0 { 3 } else { 2 };
    timeouts * timeout_ns + timeout_ns / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn timer(ctratt: u32) -> KeepAliveTimer {
        let identity = IdentifyController { kas_100ms: 10, ctratt, ..IdentifyController::default() };
        let mut timer = KeepAliveTimer::new(1500 * MS);
        timer.start(&identity, true, 0);
        timer
    }

    #[test]
    fn keep_alive_is_sent_each_half_timeout_and_must_be_answered_within_one() {
        let mut timer = timer(0);
        assert_eq!((timer.deadline_ns(), timer.due(749 * MS)), (Some(750 * MS), KeepAliveAction::None));
        assert_eq!(timer.due(750 * MS), KeepAliveAction::Send);
        timer.sent(750 * MS);
        timer.answered(760 * MS);
        assert_eq!(timer.due(1500 * MS), KeepAliveAction::Send);
        timer.sent(1500 * MS);
        // One at a time.
        assert_eq!(timer.due(2250 * MS), KeepAliveAction::None);
        assert_eq!(timer.deadline_ns(), Some(3000 * MS));
        assert_eq!(timer.due(3000 * MS), KeepAliveAction::Silent);
    }

    #[test]
    fn a_silent_controller_has_stopped_some_timeouts_after_its_last_answer() {
        for (ctratt, timeouts) in [(0, 2), (ctratt::TRAFFIC_KEEP_ALIVE, 3)] {
            let mut timer = timer(ctratt);
            timer.answered(100 * MS);
            timer.sent(850 * MS);
            timer.stop(true);
            // The controller rounds the timeout up to its granularity of a second.
            let expected = (100 + timeouts * 2000 + 250) * MS;
            assert_eq!(timer.quiesced_ns().load(Ordering::Acquire), expected);
            assert_eq!(timer.deadline_ns(), None);
        }
    }

    #[test]
    fn a_controller_that_answered_all_is_not_silent_when_the_host_leaves() {
        let mut timer = timer(0);
        timer.sent(750 * MS);
        timer.answered(751 * MS);
        timer.stop(false);
        assert_eq!(timer.quiesced_ns().load(Ordering::Acquire), 0);
    }
}
