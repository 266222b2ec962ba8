//! The schedule of reconnection attempts to a lost controller, and the loss timeout.

use crate::multipath::IoWait;

/// Reconnection parameters, in nanoseconds (SPDK's `ctrlr_loss_timeout_sec`, `reconnect_delay_sec` and
/// `fast_io_fail_timeout_sec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReconnectPolicy {
    /// Time after the loss at which reconnection ends: `None` for never, 0 for one attempt.
    pub loss_timeout_ns: Option<u64>,
    /// Delay between attempts. It doubles after each, up to eight times this value.
    pub delay_ns: u64,
    /// Time after the loss at which waiting I/O fails: `None` to wait as long as reconnection is attempted.
    pub fast_fail_ns: Option<u64>,
}

impl ReconnectPolicy {
    /// From SPDK's three parameters in seconds, validated as SPDK does: a loss timeout of -1 is infinite, 0 is off.
    pub fn from_seconds(loss: i32, delay: u32, fast_fail: u32) -> Result<ReconnectPolicy, String> {
        let invalid = |why: &str| Err(why.to_string());
        let limit = match loss {
            i32::MIN..=-2 => return invalid("ctrlr_loss_timeout_sec is -1 or more"),
            0 if delay != 0 || fast_fail != 0 => {
                return invalid(
                    "without ctrlr_loss_timeout_sec, reconnect_delay_sec and fast_io_fail_timeout_sec are 0",
                );
            }
            -1 | 0 => u32::MAX,
            seconds => seconds.unsigned_abs(),
        };
        if loss != 0 && delay == 0 {
            return invalid("with ctrlr_loss_timeout_sec, reconnect_delay_sec is not 0");
        }
        if delay > limit {
            return invalid("reconnect_delay_sec is at most ctrlr_loss_timeout_sec");
        }
        if fast_fail != 0 && (fast_fail < delay || fast_fail > limit) {
            return invalid(
                "fast_io_fail_timeout_sec is between reconnect_delay_sec and ctrlr_loss_timeout_sec",
            );
        }
        let ns = |seconds: u32| u64::from(seconds) * 1_000_000_000;
        Ok(ReconnectPolicy {
            loss_timeout_ns: u32::try_from(loss).ok().map(ns),
            delay_ns: ns(delay),
            fast_fail_ns: (fast_fail != 0).then(|| ns(fast_fail)),
        })
    }

    /// SPDK's three parameters, in seconds: loss timeout, delay, fast-fail timeout.
    pub fn to_seconds(&self) -> (i32, u32, u32) {
        let seconds = |ns: u64| (ns / 1_000_000_000) as u32;
        let loss = self.loss_timeout_ns.map_or(-1, |ns| seconds(ns) as i32);
        (loss, seconds(self.delay_ns), self.fast_fail_ns.map_or(0, seconds))
    }
}

/// Maximum number of doublings of the delay.
const BACKOFF_DOUBLINGS_MAX: u32 = 3;

/// The reconnection state after one loss.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reconnect {
    policy: ReconnectPolicy,
    lost_ns: u64,
    next_ns: u64,
    tries: u32,
}

/// The next step of a reconnection; times in nanoseconds, and possibly past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReconnectAction {
    /// Attempt to connect at that time.
    TryAt(u64),
    /// End the reconnection at that time.
    GiveUpAt(u64),
}

impl Reconnect {
    /// Starts a reconnection: the controller was lost at `now_ns`.
    pub(crate) fn lost(policy: ReconnectPolicy, now_ns: u64) -> Reconnect {
        Reconnect { policy, lost_ns: now_ns, next_ns: now_ns, tries: 0 }
    }

    /// How long I/O waits.
    pub(crate) fn io_wait(&self) -> IoWait {
        let first = |one: Option<u64>, other: Option<u64>| match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        match self.policy.loss_timeout_ns {
            // The only attempt starts at once: I/O waits for its result.
            Some(0) if self.tries <= 1 => IoWait::Unlimited,
            loss => match first(loss, self.policy.fast_fail_ns) {
                Some(after_ns) => IoWait::Until(self.lost_ns.saturating_add(after_ns)),
                None => IoWait::Unlimited,
            },
        }
    }

    /// The next step. The caller reports the start of an attempt with [`record_attempt`](Self::record_attempt).
    pub(crate) fn next(&self) -> ReconnectAction {
        let end_ns = self.policy.loss_timeout_ns.map(|timeout| self.lost_ns.saturating_add(timeout));
        match end_ns {
            _ if self.tries == 0 => ReconnectAction::TryAt(self.next_ns),
            Some(end_ns) if self.policy.delay_ns == 0 || self.next_ns >= end_ns => {
                ReconnectAction::GiveUpAt(end_ns)
            }
            _ => ReconnectAction::TryAt(self.next_ns),
        }
    }

    /// Records that an attempt starts at `now_ns`.
    pub(crate) fn record_attempt(&mut self, now_ns: u64) {
        let delay_ns = self.policy.delay_ns.saturating_mul(1 << self.tries.min(BACKOFF_DOUBLINGS_MAX));
        self.next_ns = now_ns.saturating_add(delay_ns);
        self.tries = self.tries.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn run(policy: ReconnectPolicy) -> (Vec<u64>, Option<u64>) {
        let mut reconnect = Reconnect::lost(policy, 0);
        let mut tries = Vec::new();
        while tries.len() < 8 {
            match reconnect.next() {
                ReconnectAction::TryAt(at) => {
                    tries.push(at / SECOND);
                    reconnect.record_attempt(at);
                }
                ReconnectAction::GiveUpAt(at) => return (tries, Some(at / SECOND)),
            }
        }
        (tries, None)
    }

    #[test]
    fn attempts_back_off_until_the_loss_timeout() {
        let policy = |loss: Option<u64>, delay| ReconnectPolicy {
            loss_timeout_ns: loss.map(|loss| loss * SECOND),
            delay_ns: delay * SECOND,
            fast_fail_ns: None,
        };
        assert_eq!(run(policy(Some(0), 0)), (vec![0], Some(0)));
        assert_eq!(run(policy(Some(20), 2)), (vec![0, 2, 6, 14], Some(20)));
        assert_eq!(run(policy(None, 1)), (vec![0, 1, 3, 7, 15, 23, 31, 39], None));
    }

    #[test]
    fn timeouts_are_validated_as_by_spdk() {
        for good in [(0, 0, 0), (-1, 1, 0), (-1, 2, 10), (10, 2, 5), (10, 10, 10)] {
            let policy = ReconnectPolicy::from_seconds(good.0, good.1, good.2).unwrap();
            assert_eq!(policy.to_seconds(), good);
        }
        for bad in [(-2, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (5, 0, 0), (5, 6, 0), (5, 2, 1), (5, 2, 6)]
        {
            assert!(ReconnectPolicy::from_seconds(bad.0, bad.1, bad.2).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn io_waits_until_the_earlier_timeout() {
        let waits = |loss, fast_fail_ns| {
            let policy = ReconnectPolicy { loss_timeout_ns: loss, delay_ns: 1, fast_fail_ns };
            Reconnect::lost(policy, 100).io_wait()
        };
        assert_eq!(waits(None, None), IoWait::Unlimited);
        assert_eq!(waits(None, Some(5)), IoWait::Until(105));
        assert_eq!(waits(Some(50), Some(5)), IoWait::Until(105));
        assert_eq!(waits(Some(50), None), IoWait::Until(150));
        assert_eq!(waits(Some(0), None), IoWait::Unlimited);
    }
}
