//! A device that hangs: it neither completes requests nor fails them.
//!
//! A replica on it would stay primary and answer nothing, because it still speaks to the others. So it gives
//! its place to another one, as that of a node that is to stop, until the device answers.

/// A device that has requests and has completed none for this time counts as one that hangs. A disk's own
/// error recovery mostly ends after 7 s.
const HANGS_AFTER_NS: u64 = 10_000_000_000;

/// When a device was heard of.
#[derive(Debug, Default)]
pub(super) struct DeviceWatch {
    /// When it had no request, or completed one; `None` while it has none.
    heard_ns: Option<u64>,
    /// It has completed a request since it was looked at.
    has_completed: bool,
    hangs: bool,
}

impl DeviceWatch {
    /// It has completed a request.
    pub(super) fn completed(&mut self) {
        self.has_completed = true;
    }

    /// Looks at it, once a turn. Returns whether it hangs, if that has changed.
    pub(super) fn observe(&mut self, has_requests: bool, now_ns: u64) -> Option<bool> {
        let hung = self.hangs;
        let has_completed = std::mem::take(&mut self.has_completed);
        let heard_ns = self.heard_ns.filter(|_| has_requests && !has_completed);
        self.hangs = heard_ns.is_some_and(|heard_ns| now_ns >= heard_ns.saturating_add(HANGS_AFTER_NS));
        self.heard_ns = has_requests.then(|| heard_ns.unwrap_or(now_ns));
        (self.hangs != hung).then_some(self.hangs)
    }

    /// When it is to be looked at next.
    pub(super) fn deadline(&self) -> Option<u64> {
        let heard_ns = self.heard_ns.filter(|_| !self.hangs)?;
        Some(heard_ns.saturating_add(HANGS_AFTER_NS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_hangs_that_completes_nothing_for_long_and_no_longer() {
        let mut watch = DeviceWatch::default();
        let at = |watch: &mut DeviceWatch, has_requests, has_completed, now_ns| {
            if has_completed {
                watch.completed();
            }
            watch.observe(has_requests, now_ns)
        };
        assert_eq!((at(&mut watch, false, false, 5), watch.deadline()), (None, None));
        assert_eq!(at(&mut watch, true, false, 10), None);
        assert_eq!(watch.deadline(), Some(10 + HANGS_AFTER_NS));
        assert_eq!(at(&mut watch, true, true, 20), None);
        assert_eq!(at(&mut watch, true, false, 19 + HANGS_AFTER_NS), None);
        assert_eq!(at(&mut watch, true, false, 20 + HANGS_AFTER_NS), Some(true));
        assert_eq!((at(&mut watch, true, false, 3 * HANGS_AFTER_NS), watch.deadline()), (None, None));
        assert_eq!(at(&mut watch, true, true, 4 * HANGS_AFTER_NS), Some(false));
        assert_eq!(at(&mut watch, true, false, 5 * HANGS_AFTER_NS), Some(true));
        assert_eq!(at(&mut watch, false, true, 5 * HANGS_AFTER_NS), Some(false));
        // Time without a request does not count.
        assert_eq!(at(&mut watch, true, false, 9 * HANGS_AFTER_NS), None);
    }
}
