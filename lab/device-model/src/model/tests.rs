use super::*;

fn read(offset: u64) -> IoCommand {
    IoCommand { op: Op::Read, offset, bytes: 4096, fua: false }
}

fn write(offset: u64, bytes: u32) -> IoCommand {
    IoCommand { op: Op::Write, offset, bytes, fua: false }
}

/// Submits mixed commands at increasing times and returns the completions in order.
fn trace(name: &str, seed: u64) -> Vec<ModelCompletion> {
    let mut model = DeviceModel::new(&DeviceProfile::shipped(name).unwrap(), seed);
    let mut random = ModelRng::new(99);
    let (mut now, mut done) = (0, Vec::new());
    for number in 0..20_000u64 {
        now += random.below(20_000);
        model.poll(now, &mut done);
        let offset = random.below(100_000) * 4096;
        let io = match number % 16 {
            0..8 => read(offset),
            8..14 => write(offset, 16_384),
            14 => IoCommand { op: Op::Unmap, offset, bytes: 65_536, fua: false },
            _ => IoCommand { op: Op::Flush, offset: 0, bytes: 0, fua: false },
        };
        assert_eq!(model.submit(now, &io), Some(CommandId(number)));
    }
    model.poll(u64::MAX, &mut done);
    assert_eq!(model.in_flight(), 0);
    done
}

#[test]
fn completions_are_deterministic_per_seed() {
    for name in DeviceProfile::shipped_names() {
        assert_eq!(trace(name, 5), trace(name, 5), "{name}");
        if name != "ideal" {
            assert_ne!(trace(name, 5), trace(name, 6), "{name}");
        }
    }
}

#[test]
fn each_command_completes_once_and_in_order_of_time() {
    for name in DeviceProfile::shipped_names() {
        let done = trace(name, 7);
        assert_eq!(done.len(), 20_000, "{name}");
        assert!(done.is_sorted_by_key(|done| done.at_ns), "{name}");
        let mut ids: Vec<u64> = done.iter().map(|done| done.id.0).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 20_000, "{name}");
        assert!(done.iter().all(|done| done.status.is_success()), "{name}");
    }
}

#[test]
fn no_command_completes_before_its_deadline() {
    let mut model = DeviceModel::new(&DeviceProfile::shipped("samsung-980-pro").unwrap(), 1);
    model.submit(1000, &read(0)).unwrap();
    let due = model.deadline().unwrap();
    assert!(due > 1000 + 30_000, "{due}");
    let mut done = Vec::new();
    assert_eq!(model.poll(due - 1, &mut done), 0);
    assert_eq!(model.poll(due, &mut done), 1);
    assert_eq!((model.deadline(), model.in_flight()), (None, 0));
}

#[test]
fn a_clock_that_goes_back_is_treated_as_stopped() {
    let mut model = DeviceModel::new(&DeviceProfile::shipped("ideal").unwrap(), 1);
    model.submit(1_000_000, &read(0)).unwrap();
    model.submit(0, &read(0)).unwrap();
    let mut done = Vec::new();
    model.poll(u64::MAX, &mut done);
    assert!(done.iter().all(|done| done.at_ns >= 1_010_000), "{done:?}");
}

#[test]
fn a_reset_aborts_a_timed_out_command() {
    let mut model = DeviceModel::new(&DeviceProfile::shipped("ideal").unwrap(), 1);
    model.inject(&ModelFault { count: Some(1), ..ModelFault::new(crate::FaultKind::Timeout) });
    let hung = model.submit(0, &read(0)).unwrap();
    let normal = model.submit(0, &read(0)).unwrap();
    let mut done = Vec::new();
    model.poll(1 << 40, &mut done);
    assert_eq!(done.drain(..).map(|done| done.id).collect::<Vec<_>>(), [normal]);
    assert_eq!((model.deadline(), model.in_flight()), (None, 1));
    let reset = model.submit(1 << 40, &IoCommand { op: Op::Reset, offset: 0, bytes: 0, fua: false }).unwrap();
    assert_eq!(model.deadline(), Some(0));
    model.poll(1 << 40, &mut done);
    let results: Vec<(CommandId, Status)> = done.iter().map(|done| (done.id, done.status)).collect();
    assert_eq!(results, [(hung, Status::ABORT_REQUESTED), (reset, Status::SUCCESS)]);
}

#[test]
fn a_reset_recovers_a_fatal_status_but_not_a_surprise_removal() {
    let on_write = |kind| ModelFault { op: crate::FaultOp::Write, ..ModelFault::new(kind) };
    let mut model = DeviceModel::new(&DeviceProfile::shipped("ideal").unwrap(), 1);
    model.inject(&ModelFault { count: Some(1), ..on_write(crate::FaultKind::ControllerFatal) });
    let results = |model: &mut DeviceModel, now: u64| {
        let mut done = Vec::new();
        model.poll(now, &mut done);
        done.iter().map(|done| done.status).collect::<Vec<Status>>()
    };
    model.submit(0, &read(0)).unwrap();
    model.submit(0, &write(0, 4096)).unwrap();
    model.submit(0, &read(0)).unwrap();
    assert_eq!((results(&mut model, 1 << 40), model.in_flight(), model.deadline()), (vec![], 3, None));
    model.reset();
    assert_eq!(results(&mut model, 1 << 40), [Status::ABORT_REQUESTED; 3]);
    model.submit(1 << 40, &read(0)).unwrap();
    assert_eq!(results(&mut model, 1 << 41), [Status::SUCCESS]);
    model.inject(&ModelFault { count: Some(1), ..on_write(crate::FaultKind::SurpriseRemoval) });
    model.submit(1 << 41, &read(0)).unwrap();
    model.submit(1 << 41, &write(0, 4096)).unwrap();
    model.submit(1 << 41, &read(0)).unwrap();
    assert_eq!(results(&mut model, 1 << 41), [Status::ABORTED_SQ_DELETION; 3]);
    model.reset();
    model.submit(1 << 41, &read(0)).unwrap();
    assert_eq!(results(&mut model, 1 << 42), [Status::ABORTED_SQ_DELETION]);
}

#[test]
fn media_errors_of_a_profile_occur_at_the_configured_rate() {
    let text = DeviceProfile::shipped_text("ideal").unwrap().to_string()
        + "\n[[faults]]\nkind = \"media_error\"\nop = \"read\"\nrate = 0.1\n";
    let mut model = DeviceModel::new(&DeviceProfile::parse(&text).unwrap(), 1);
    let mut done = Vec::new();
    for number in 0..2000 {
        model.submit(number * 10_000, &if number % 2 == 0 { read(0) } else { write(0, 4096) }).unwrap();
    }
    model.poll(u64::MAX, &mut done);
    let failed: Vec<&ModelCompletion> = done.iter().filter(|done| !done.status.is_success()).collect();
    assert!((60..140).contains(&failed.len()), "{}", failed.len());
    assert!(failed.iter().all(|done| done.status == Status::UNRECOVERED_READ_ERROR && done.id.0 % 2 == 0));
}

#[test]
fn submission_is_refused_above_the_limit_in_flight() {
    let mut model = DeviceModel::new(&DeviceProfile::shipped("ideal").unwrap(), 1);
    for _ in 0..IN_FLIGHT_MAX {
        assert!(model.submit(0, &read(0)).is_some());
    }
    assert_eq!(model.submit(0, &read(0)), None);
}
