//! When a lost controller is tried again, and when it is given up.

/// How long a lost controller is waited for. All in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReconnectPolicy {
    /// How long after the loss it is given up for good: `None` for never, 0 to try once.
    pub loss_timeout_ns: Option<u64>,
    /// Time between tries. It doubles with each, up to eight times as much.
    pub delay_ns: u64,
    /// How long after the loss I/O stops waiting for it: `None` as long as it is tried.
    pub fast_fail_ns: Option<u64>,
}

impl ReconnectPolicy {
    /// From SPDK's three parameters, under SPDK's conditions: -1 is for ever, and 0 is off.
    pub fn from_seconds(loss: i32, delay: u32, fast_fail: u32) -> Result<ReconnectPolicy, String> {
        let no = |why: &str| Err(why.to_string());
        let limit = match loss {
            i32::MIN..=-2 => return no("ctrlr_loss_timeout_sec is -1 or more"),
            0 if delay != 0 || fast_fail != 0 => {
                return no(
                    "without ctrlr_loss_timeout_sec, reconnect_delay_sec and fast_io_fail_timeout_sec are 0",
                );
            }
            -1 | 0 => u32::MAX,
            seconds => seconds.unsigned_abs(),
        };
        if loss != 0 && delay == 0 {
            return no("with ctrlr_loss_timeout_sec, reconnect_delay_sec is not 0");
        }
        if delay > limit {
            return no("reconnect_delay_sec is at most ctrlr_loss_timeout_sec");
        }
        if fast_fail != 0 && (fast_fail < delay || fast_fail > limit) {
            return no("fast_io_fail_timeout_sec is between reconnect_delay_sec and ctrlr_loss_timeout_sec");
        }
        let ns = |seconds: u32| u64::from(seconds) * 1_000_000_000;
        Ok(ReconnectPolicy {
            loss_timeout_ns: u32::try_from(loss).ok().map(ns),
            delay_ns: ns(delay),
            fast_fail_ns: (fast_fail != 0).then(|| ns(fast_fail)),
        })
    }

    /// SPDK's three parameters again.
    pub fn to_seconds(&self) -> (i32, u32, u32) {
        let seconds = |ns: u64| (ns / 1_000_000_000) as u32;
        let loss = self.loss_timeout_ns.map_or(-1, |ns| seconds(ns) as i32);
        (loss, seconds(self.delay_ns), self.fast_fail_ns.map_or(0, seconds))
    }
}

/// Most doublings of the delay.
const DOUBLINGS_MAX: u32 = 3;

/// The tries after one loss.
#[derive(Clone, Copy, Debug)]
pub struct Reconnect {
    policy: ReconnectPolicy,
    lost_ns: u64,
    next_ns: u64,
    tries: u32,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Try at that time, which may be past.
    TryAt(u64),
    /// It is gone for good at that time, which may be past.
    GiveUpAt(u64),
}

impl Reconnect {
    /// The controller was lost now.
    pub fn lost(policy: ReconnectPolicy, now_ns: u64) -> Reconnect {
        Reconnect { policy, lost_ns: now_ns, next_ns: now_ns, tries: 0 }
    }

    /// Until when I/O waits.
    pub fn waits_until_ns(&self) -> u64 {
        let first = |one: Option<u64>, other: Option<u64>| match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        match self.policy.loss_timeout_ns {
            // One try is all there is, and it starts at once: I/O waits for its outcome.
            Some(0) if self.tries <= 1 => u64::MAX,
            loss => match first(loss, self.policy.fast_fail_ns) {
                Some(after_ns) => self.lost_ns.saturating_add(after_ns),
                None => u64::MAX,
            },
        }
    }

    /// What to do next. A try that begins is to be told by [`tried`](Self::tried).
    pub fn next(&self) -> Next {
        let end_ns = self.policy.loss_timeout_ns.map(|timeout| self.lost_ns.saturating_add(timeout));
        match end_ns {
            _ if self.tries == 0 => Next::TryAt(self.next_ns),
            Some(end_ns) if self.policy.delay_ns == 0 || self.next_ns >= end_ns => Next::GiveUpAt(end_ns),
            _ => Next::TryAt(self.next_ns),
        }
    }

    /// A try begins now.
    pub fn tried(&mut self, now_ns: u64) {
        let delay_ns = self.policy.delay_ns.saturating_mul(1 << self.tries.min(DOUBLINGS_MAX));
        self.next_ns = now_ns.saturating_add(delay_ns);
        self.tries = self.tries.saturating_add(1);
    }

    /// Tries so far.
    pub fn tries(&self) -> u32 {
        self.tries
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
                Next::TryAt(at) => {
                    tries.push(at / SECOND);
                    reconnect.tried(at);
                }
                Next::GiveUpAt(at) => return (tries, Some(at / SECOND)),
            }
        }
        (tries, None)
    }

    #[test]
    fn tries_come_further_apart_until_it_is_given_up() {
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
    fn timeouts_are_checked_as_spdk_checks_them() {
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
    fn io_waits_until_the_first_of_the_timeouts() {
        let waits = |loss, fast_fail_ns| {
            let policy = ReconnectPolicy { loss_timeout_ns: loss, delay_ns: 1, fast_fail_ns };
            Reconnect::lost(policy, 100).waits_until_ns()
        };
        assert_eq!(waits(None, None), u64::MAX);
        assert_eq!(waits(None, Some(5)), 105);
        assert_eq!(waits(Some(50), Some(5)), 105);
        assert_eq!(waits(Some(50), None), 150);
        assert_eq!(waits(Some(0), None), u64::MAX);
    }
}
