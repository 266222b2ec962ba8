use super::*;
use crate::LossEvent::{RegistrationPreempted, ReservationReleased};
use crate::ReservationError::{Conflict, ZeroKey};
use crate::ReservationType::*;

/// Asserts who is notified of a preempted registration, and who of a released reservation.
fn assert_notified(effects: &Effects, preempted: &[u8], released: &[u8], name: &str) {
    assert_eq!(effects.notified(RegistrationPreempted), hosts(preempted), "{name}");
    assert_eq!(effects.notified(ReservationReleased), hosts(released), "{name}");
    assert_eq!(effects.notices.len(), preempted.len() + released.len(), "{name}");
}

#[test]
fn preempt_depends_on_type_and_key() {
    type Notified<'a> = Result<(&'a [u8], &'a [u8]), ReservationError>;
    // A holds the reservation of a type; B preempts a key with a new type. Who is notified of a preemption and of a
    // release, who remains registered, and the reservation.
    type Row<'a> = (
        Option<ReservationType>,
        u64,
        ReservationType,
        Notified<'a>,
        &'a [u8],
        Option<(ReservationType, u8)>,
    );
    let rows: [Row<'_>; 11] = [
        (None, 0xa, WriteExclusive, Ok((&[A], &[])), &[B, C], None),
        (None, 5, WriteExclusive, Err(Conflict), &[A, B, C], None),
        (Some(WriteExclusive), 0xa, WriteExclusive, Ok((&[A], &[])), &[B, C], Some((WriteExclusive, B))),
        (Some(WriteExclusive), 0xa, ExclusiveAccess, Ok((&[A], &[C])), &[B, C], Some((ExclusiveAccess, B))),
        (Some(ExclusiveAccess), 0xc, WriteExclusive, Ok((&[C], &[])), &[A, B], Some((ExclusiveAccess, A))),
        (Some(ExclusiveAccess), 5, WriteExclusive, Err(Conflict), &[A, B, C], Some((ExclusiveAccess, A))),
        (Some(ExclusiveAccess), 0, WriteExclusive, Err(ZeroKey), &[A, B, C], Some((ExclusiveAccess, A))),
        (
            Some(WriteExclusiveRegistrants),
            0xa,
            WriteExclusiveRegistrants,
            Ok((&[A], &[])),
            &[B, C],
            Some((WriteExclusiveRegistrants, B)),
        ),
        (Some(WriteExclusiveAll), 0, WriteExclusive, Ok((&[A, C], &[])), &[B], Some((WriteExclusive, B))),
        (
            Some(WriteExclusiveAll),
            0xa,
            WriteExclusive,
            Ok((&[A], &[])),
            &[B, C],
            Some((WriteExclusiveAll, B)),
        ),
        (
            Some(ExclusiveAccessAll),
            5,
            WriteExclusive,
            Err(Conflict),
            &[A, B, C],
            Some((ExclusiveAccessAll, A)),
        ),
    ];
    for (held, victim, kind, expected, remaining, then) in rows {
        let mut state = three_registrants();
        if let Some(held) = held {
            state.apply(&host(A), &acquire(held, 0xa)).unwrap();
        }
        let generation = state.generation;
        let name = format!("{held:?}, {victim:#x} for {kind:?}");
        let outcome = state.apply(&host(B), &preempt(kind, 0xb, victim));
        match (&outcome, expected) {
            (Ok(effects), Ok((preempted, released))) => assert_notified(effects, preempted, released, &name),
            (Err(error), Err(expected)) => assert_eq!(*error, expected, "{name}"),
            _ => panic!("{name}: {outcome:?}"),
        }
        let registered: Vec<_> = state.registrations.iter().map(|one| one.registrant.clone()).collect();
        assert_eq!(registered, hosts(remaining), "{name}");
        let then = then.map(|(kind, holder)| ActiveReservation { kind, holder: host(holder) });
        assert_eq!(state.reservation, then, "{name}");
        assert_eq!(state.generation, generation + u32::from(expected.is_ok()), "{name}");
    }
}

#[test]
fn holder_changes_the_type_by_preempting_itself() {
    let mut state = three_registrants();
    state.apply(&host(A), &acquire(WriteExclusive, 0xa)).unwrap();
    let effects = state.apply(&host(A), &preempt(ExclusiveAccess, 0xa, 0xa)).unwrap();
    assert_notified(&effects, &[], &[B, C], "own key");
    assert_eq!(state.reservation, Some(ActiveReservation { kind: ExclusiveAccess, holder: host(A) }));
}

#[test]
fn preempt_and_abort_is_preempt_and_an_abort_of_the_preempted() {
    let abort = ReservationCommand::Preempt { key: 0xb, victim: 0xa, kind: ExclusiveAccess, abort: true };
    let mut state = three_registrants();
    state.apply(&host(A), &acquire(ExclusiveAccess, 0xa)).unwrap();
    let mut other = state.clone();
    let effects = state.apply(&host(B), &abort).unwrap();
    assert_eq!(effects.abort, hosts(&[A]));
    let without = other.apply(&host(B), &preempt(ExclusiveAccess, 0xb, 0xa)).unwrap();
    assert_eq!((state, effects.notices), (other, without.notices));
}
