use super::*;

fn read(offset: u64) -> Io {
    Io { op: Op::Read, offset, bytes: 4096, fua: false }
}

fn write(offset: u64, bytes: u32) -> Io {
    Io { op: Op::Write, offset, bytes, fua: false }
}

/// Mixed commands at growing times; everything that completes, in order.
fn trace(name: &str, seed: u64) -> Vec<Done> {
    let mut model = Model::new(&Profile::shipped(name).unwrap(), seed);
    let mut random = Random::new(99);
    let (mut now, mut done) = (0, Vec::new());
    for number in 0..20_000u64 {
        now += random.below(20_000);
        model.complete(now, &mut done);
        let offset = random.below(100_000) * 4096;
        let io = match number % 16 {
            0..8 => read(offset),
            8..14 => write(offset, 16_384),
            14 => Io { op: Op::Unmap, offset, bytes: 65_536, fua: false },
            _ => Io { op: Op::Flush, offset: 0, bytes: 0, fua: false },
        };
        assert_eq!(model.submit(now, &io), Some(Ticket(number)));
    }
    model.complete(u64::MAX, &mut done);
    assert_eq!(model.in_flight(), 0);
    done
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_does_not() {
    for name in Profile::shipped_names() {
        assert_eq!(trace(name, 5), trace(name, 5), "{name}");
        if name != "ideal" {
            assert_ne!(trace(name, 5), trace(name, 6), "{name}");
        }
    }
}

#[test]
fn each_command_completes_once_and_in_order_of_time() {
    for name in Profile::shipped_names() {
        let done = trace(name, 7);
        assert_eq!(done.len(), 20_000, "{name}");
        assert!(done.is_sorted_by_key(|done| done.at_ns), "{name}");
        let mut tickets: Vec<u64> = done.iter().map(|done| done.ticket.0).collect();
        tickets.sort_unstable();
        tickets.dedup();
        assert_eq!(tickets.len(), 20_000, "{name}");
        assert!(done.iter().all(|done| done.status.is_success()), "{name}");
    }
}

#[test]
fn nothing_completes_before_its_deadline() {
    let mut model = Model::new(&Profile::shipped("samsung-980-pro").unwrap(), 1);
    model.submit(1000, &read(0)).unwrap();
    let due = model.deadline().unwrap();
    assert!(due > 1000 + 30_000, "{due}");
    let mut done = Vec::new();
    assert_eq!(model.complete(due - 1, &mut done), 0);
    assert_eq!(model.complete(due, &mut done), 1);
    assert_eq!((model.deadline(), model.in_flight()), (None, 0));
}

#[test]
fn a_clock_that_goes_back_is_taken_for_one_that_stands() {
    let mut model = Model::new(&Profile::shipped("ideal").unwrap(), 1);
    model.submit(1_000_000, &read(0)).unwrap();
    model.submit(0, &read(0)).unwrap();
    let mut done = Vec::new();
    model.complete(u64::MAX, &mut done);
    assert!(done.iter().all(|done| done.at_ns >= 1_010_000), "{done:?}");
}

#[test]
fn a_command_that_never_ends_is_given_back_by_a_reset() {
    let mut model = Model::new(&Profile::shipped("ideal").unwrap(), 1);
    model.inject(&Fault { count: Some(1), ..Fault::new(crate::FaultKind::Timeout) });
    let stuck = model.submit(0, &read(0)).unwrap();
    let fine = model.submit(0, &read(0)).unwrap();
    let mut done = Vec::new();
    model.complete(1 << 40, &mut done);
    assert_eq!(done.drain(..).map(|done| done.ticket).collect::<Vec<_>>(), [fine]);
    assert_eq!((model.deadline(), model.in_flight()), (None, 1));
    let reset = model.submit(1 << 40, &Io { op: Op::Reset, offset: 0, bytes: 0, fua: false }).unwrap();
    assert_eq!(model.deadline(), Some(0));
    model.complete(1 << 40, &mut done);
    let ends: Vec<(Ticket, Status)> = done.iter().map(|done| (done.ticket, done.status)).collect();
    assert_eq!(ends, [(stuck, Status::ABORT_REQUESTED), (reset, Status::SUCCESS)]);
}

#[test]
fn a_controller_that_stops_works_again_after_a_reset_and_one_that_is_gone_does_not() {
    let write_fails = |kind| Fault { op: crate::FaultOp::Write, ..Fault::new(kind) };
    let mut model = Model::new(&Profile::shipped("ideal").unwrap(), 1);
    model.inject(&Fault { count: Some(1), ..write_fails(crate::FaultKind::ControllerFatal) });
    let ends = |model: &mut Model, now: u64| {
        let mut done = Vec::new();
        model.complete(now, &mut done);
        done.iter().map(|done| done.status).collect::<Vec<Status>>()
    };
    model.submit(0, &read(0)).unwrap();
    model.submit(0, &write(0, 4096)).unwrap();
    model.submit(0, &read(0)).unwrap();
    assert_eq!((ends(&mut model, 1 << 40), model.in_flight(), model.deadline()), (vec![], 3, None));
    model.reset();
    assert_eq!(ends(&mut model, 1 << 40), [Status::ABORT_REQUESTED; 3]);
    model.submit(1 << 40, &read(0)).unwrap();
    assert_eq!(ends(&mut model, 1 << 41), [Status::SUCCESS]);
    model.inject(&Fault { count: Some(1), ..write_fails(crate::FaultKind::SurpriseRemoval) });
    model.submit(1 << 41, &read(0)).unwrap();
    model.submit(1 << 41, &write(0, 4096)).unwrap();
    model.submit(1 << 41, &read(0)).unwrap();
    assert_eq!(ends(&mut model, 1 << 41), [Status::ABORTED_SQ_DELETION; 3]);
    model.reset();
    model.submit(1 << 41, &read(0)).unwrap();
    assert_eq!(ends(&mut model, 1 << 42), [Status::ABORTED_SQ_DELETION]);
}

#[test]
fn media_errors_of_a_profile_come_at_their_rate() {
    let text = Profile::shipped_text("ideal").unwrap().to_string()
        + "\n[[faults]]\nkind = \"media_error\"\nop = \"read\"\nrate = 0.1\n";
    let mut model = Model::new(&Profile::parse(&text).unwrap(), 1);
    let mut done = Vec::new();
    for number in 0..2000 {
        model.submit(number * 10_000, &if number % 2 == 0 { read(0) } else { write(0, 4096) }).unwrap();
    }
    model.complete(u64::MAX, &mut done);
    let failed: Vec<&Done> = done.iter().filter(|done| !done.status.is_success()).collect();
    assert!((60..140).contains(&failed.len()), "{}", failed.len());
    assert!(
        failed.iter().all(|done| done.status == Status::UNRECOVERED_READ_ERROR && done.ticket.0 % 2 == 0)
    );
}

#[test]
fn what_does_not_fit_is_not_taken() {
    let mut model = Model::new(&Profile::shipped("ideal").unwrap(), 1);
    for _ in 0..IN_FLIGHT_MAX {
        assert!(model.submit(0, &read(0)).is_some());
    }
    assert_eq!(model.submit(0, &read(0)), None);
}
