use super::*;

/// Four checks make up the time-out.
fn times() -> CheckTimes {
    CheckTimes::new(4_000_000_000)
}

/// A check of transfers by identifier, bytes of buffers and bytes moved.
fn check(
    state: &mut TransferCheck,
    transfers: &[(u64, usize, usize)],
    returned: usize,
    is_lacking: bool,
) -> CheckResult {
    let mut report = TransferReport::default();
    transfers.iter().for_each(|(id, bytes, moved)| report.waits_for_peer(*id, *bytes, *moved));
    state.check(&report, returned, &times(), is_lacking)
}

#[test]
fn the_time_out_is_divided_into_checks_of_at_most_a_second() {
    let of = |timeout_ms: u64| {
        let times = CheckTimes::new(timeout_ms * 1_000_000);
        (times.interval_ns / 1_000_000, times.checks_max, times.checks_if_lacking)
    };
    assert_eq!(of(100), (25, 4, 4));
    assert_eq!(of(4000), (1000, 4, 4));
    assert_eq!(of(30_000), (1000, 30, 10));
}

#[test]
fn a_peer_that_moves_nothing_for_the_time_out_fails() {
    let mut state = TransferCheck::default();
    for passed in 0..4 {
        assert!(!check(&mut state, &[(1, 100, 0), (2, 0, 7)], 50, false).has_failed, "check {passed}");
    }
    assert!(check(&mut state, &[(1, 100, 0), (2, 0, 7)], 50, false).has_failed);
}

#[test]
fn any_progress_is_enough_while_there_is_memory() {
    for step in 0..4 {
        let mut state = TransferCheck::default();
        for check_number in 0..20 {
            // A byte that arrives, one that is sent without a buffer, a transfer that ends, buffers that come
            // back.
            let (id, moved, header, returned) = match step {
                0 => (1, check_number, 0, 0),
                1 => (1, 0, check_number, 0),
                2 => (check_number as u64, 0, 0, 0),
                _ => (1, 0, 0, check_number),
            };
            let result = check(&mut state, &[(id, 100, moved), (99, 0, header)], returned, false);
            assert!(!result.has_failed, "{step}");
        }
    }
}

#[test]
fn while_memory_lacks_what_is_held_has_to_be_moved_within_the_time() {
    // Of 100 bytes 25 have to move in each check.
    for (rate, fails) in [(0, true), (1, true), (24, true), (25, false), (60, false)] {
        let mut state = TransferCheck::default();
        check(&mut state, &[(1, 100, 0)], 0, true);
        let mut results =
            (1..=2).map(|n| check(&mut state, &[(n, 100, 0)], n as usize * rate, true).has_failed);
        // Transfers of 100 bytes that end are 100 bytes.
        assert!(!results.any(|failed| failed), "{rate}");
        let mut state = TransferCheck::default();
        let results = [0, 1, 2].map(|n| check(&mut state, &[(1, 1000, 10 * n * rate)], 0, true).has_failed);
        assert_eq!(results, [false, false, fails], "{rate}");
    }
}

#[test]
fn bytes_without_buffers_are_no_progress_of_those_with() {
    let mut state = TransferCheck::default();
    // Requests that arrive and short answers that are read, while the data that was asked for does not come.
    let results: Vec<_> = (0..3)
        .map(|n| check(&mut state, &[(1, 100, 0), (2, 0, n * 1_000_000), (100 + n as u64, 0, 0)], 0, true))
        .collect();
    assert_eq!(results.iter().map(|result| result.has_failed).collect::<Vec<_>>(), [false, false, true]);
    assert!(results[1].is_slow && !results[1].makes_progress);
}

#[test]
fn a_slow_peer_fails_in_the_first_check_after_others_lack_memory() {
    let mut state = TransferCheck::default();
    for moved in 0..10 {
        assert!(!check(&mut state, &[(1, 1000, moved)], 0, false).has_failed);
    }
    assert!(check(&mut state, &[(1, 1000, 10)], 0, true).has_failed);
}

#[test]
fn no_transfer_takes_longer_than_the_time_out_while_memory_lacks() {
    let mut state = TransferCheck::default();
    for number in 0..4 {
        // Many others end meanwhile.
        assert!(
            !check(&mut state, &[(1, 10, 0), (100 + number, 10, 0)], number as usize * 1000, true).has_failed
        );
    }
    assert!(!check(&mut state.clone_for_test(), &[(1, 10, 0)], 5000, false).has_failed);
    assert!(check(&mut state, &[(1, 10, 0)], 5000, true).has_failed);
}

#[test]
fn what_did_not_wait_at_the_last_check_is_not_slow() {
    let mut state = TransferCheck::default();
    for returned in [0, 4096, 8192] {
        let result = check(&mut state, &[], returned, true);
        assert_eq!((result.is_waiting, result.has_failed), (false, false));
        assert_eq!(result.makes_progress, returned > 0);
    }
    let result = check(&mut state, &[(1, 1000, 0)], 8192, true);
    assert_eq!((result.is_waiting, result.is_slow, result.makes_progress), (true, false, false));
}

#[test]
fn every_transfer_of_a_long_queue_is_found_again() {
    let mut state = TransferCheck::default();
    let transfers: Vec<_> = (0..4096).rev().map(|id| (id, 1, 0)).collect();
    for _ in 0..3 {
        check(&mut state, &transfers, 0, false);
    }
    assert_eq!(state.stalled_checks, 2);
    let others: Vec<_> = transfers.iter().map(|(id, ..)| (id | 1 << 32, 1, 0)).collect();
    check(&mut state, &others, 0, false);
    assert!(state.stalled_checks == 0 && state.waiting.iter().all(|transfer| transfer.checks == 0));
}

impl TransferCheck {
    fn clone_for_test(&self) -> TransferCheck {
        TransferCheck { waiting: self.waiting.clone(), ..*self }
    }
}

#[test]
fn what_waits_for_less_than_a_check_proves_nothing() {
    let mut state = TransferCheck::default();
    // 50 bytes have come back, which the network alone may have taken.
    assert!(!check(&mut state, &[(1, 100, 0)], 50, true).makes_progress);
    assert!(!check(&mut state, &[(1, 100, 0)], 50, true).makes_progress);
    // It reads, and all of it.
    assert!(check(&mut state, &[(2, 100, 0)], 150, true).makes_progress);
    let mut state = TransferCheck::default();
    assert!(check(&mut state, &[], 50, true).makes_progress, "nothing waits");
}
