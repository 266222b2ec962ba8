//! Placement of I/Os in zones.

use super::devices::emulated;
use super::*;

const ZONE: u64 = 1000;

fn options() -> ZonedOptions {
    ZonedOptions { zone_bytes: Some(ZONE), ..ZonedOptions::default() }
}

/// A device of eight zones of 1000 bytes.
fn device(options: &ZonedOptions) -> Arc<ZonedDevice> {
    Arc::new(emulated("x", 8 * ZONE, options).unwrap())
}

fn join(device: &Arc<ZonedDevice>, options: &ZonedOptions) -> ZonedJob {
    device.join(options, 0..8 * ZONE, [100; 3], true).unwrap()
}

#[test]
fn writes_go_to_the_write_pointer_and_a_full_zone_is_reset() {
    let device = device(&options());
    let mut job = join(&device, &options());
    // The drawn offset selects the zone alone.
    assert_eq!(job.place(Op::Write, 2 * ZONE + 500, 300, true), Placement::At(2 * ZONE, 300));
    assert_eq!(job.place(Op::Write, 2 * ZONE, 300, true), Placement::At(2 * ZONE + 300, 300));
    job.completed(Op::Write, 2 * ZONE, true);
    // The last write of a zone is cut, and then nothing fits until both writes have completed.
    assert_eq!(job.place(Op::Write, 2 * ZONE, 600, true), Placement::At(2 * ZONE + 600, 400));
    assert_eq!(job.place(Op::Write, 2 * ZONE, 100, true), Placement::Busy);
    job.completed(Op::Write, 2 * ZONE + 300, true);
    assert_eq!(job.place(Op::Write, 2 * ZONE, 100, true), Placement::Busy);
    job.completed(Op::Write, 2 * ZONE + 600, true);
    assert_eq!(job.place(Op::Write, 2 * ZONE, 100, true), Placement::At(2 * ZONE, 100));
    assert_eq!(job.resets(), 1);
}

#[test]
fn one_job_at_a_time_has_a_zone() {
    let device = device(&options());
    let (mut one, mut other) = (join(&device, &options()), join(&device, &options()));
    assert_eq!(one.place(Op::Write, 0, 100, true), Placement::At(0, 100));
    assert_eq!(other.place(Op::Write, 0, 100, true), Placement::Busy);
    assert_eq!(other.place(Op::Unmap, 0, ZONE, false), Placement::Busy);
    assert_eq!(other.place(Op::Write, ZONE, 100, true), Placement::At(ZONE, 100));
    one.completed(Op::Write, 0, true);
    assert_eq!(other.place(Op::Write, 0, 100, true), Placement::At(100, 100));
}

#[test]
fn reads_find_written_data() {
    let device = device(&options());
    let mut job = join(&device, &options());
    assert_eq!(job.op_of_mix(Op::Read), Op::Write, "there is nothing to read");
    assert_eq!(job.place(Op::Read, 0, 100, true), Placement::Exhausted);
    assert_eq!(job.place(Op::Write, 3 * ZONE, 500, true), Placement::At(3 * ZONE, 500));
    assert_eq!(job.place(Op::Read, 0, 100, true), Placement::Busy, "the write is in flight");
    job.completed(Op::Write, 3 * ZONE, true);
    assert_eq!(job.op_of_mix(Op::Read), Op::Read);
    // The nearest zone, within what is written.
    assert_eq!(job.place(Op::Read, 5 * ZONE + 900, 100, true), Placement::At(3 * ZONE + 100, 100));
    // In sequence: up to the write pointer, and then the next zone with data.
    assert_eq!(job.place(Op::Read, 3 * ZONE + 300, 300, false), Placement::At(3 * ZONE + 300, 200));
    assert_eq!(job.place(Op::Read, 3 * ZONE + 500, 100, false), Placement::Exhausted);
    assert_eq!(job.place(Op::Read, 100, 100, false), Placement::At(3 * ZONE, 100));
    let beyond = ZonedOptions { reads_beyond_pointer: true, ..options() };
    let mut reader = device.join(&beyond, 0..8 * ZONE, [100; 3], false).unwrap();
    assert_eq!(reader.place(Op::Read, 7 * ZONE, 100, true), Placement::At(7 * ZONE, 100));
}

#[test]
fn open_zones_are_limited() {
    let limited = ZonedOptions { open_max: 2, ..options() };
    let device = device(&limited);
    let mut job = join(&device, &limited);
    for zone in [1, 6] {
        assert_eq!(job.place(Op::Write, zone * ZONE, 500, true), Placement::At(zone * ZONE, 500));
        job.completed(Op::Write, zone * ZONE, true);
    }
    // Others are written to an open one, which the offset selects.
    assert_eq!(job.place(Op::Write, 0, 400, true), Placement::At(ZONE + 500, 400));
    assert_eq!(job.place(Op::Write, 7 * ZONE, 400, true), Placement::At(6 * ZONE + 500, 400));
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(ZONE + 900, 100));
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(6 * ZONE + 900, 100));
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::Busy, "both are about to be full");
    for at in [500, 900] {
        job.completed(Op::Write, ZONE + at, true);
    }
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(0, 100), "a full zone is closed");
    // One that is opened to be reset stays so while a read is in flight.
    let device = self::device(&limited);
    let mut job = join(&device, &limited);
    for zone in 0..2 {
        assert_eq!(job.place(Op::Write, zone * ZONE, ZONE, true), Placement::At(zone * ZONE, ZONE));
        job.completed(Op::Write, zone * ZONE, true);
        assert_eq!(job.place(Op::Read, zone * ZONE, ZONE, true), Placement::At(zone * ZONE, ZONE));
    }
    for zone in [0, 1, 0] {
        assert_eq!(job.place(Op::Write, zone * ZONE, 100, true), Placement::Busy, "{zone}");
    }
    job.completed(Op::Read, 0, true);
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(0, 100));
    let one = ZonedOptions { job_open_max: 1, ..limited.clone() };
    let mut job = join(&Arc::new(emulated("x", 8 * ZONE, &limited).unwrap()), &one);
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(0, 100));
    assert_eq!(job.place(Op::Write, 5 * ZONE, 100, true), Placement::At(100, 100));
    let wrong = ZonedOptions { open_max: 3, ..options() };
    assert!(device.join(&wrong, 0..ZONE, [100; 3], true).unwrap_err().contains("--max_open_zones"));
    let device = self::device(&options());
    assert!(device.join(&one, 0..ZONE, [100; 3], true).unwrap_err().contains("max_open_zones"));
}

#[test]
fn trims_reset_zones_with_data() {
    let device = device(&options());
    let mut job = join(&device, &options());
    assert_eq!(job.place(Op::Unmap, 0, ZONE, true), Placement::Exhausted);
    assert_eq!(job.place(Op::Write, 4 * ZONE, 100, true), Placement::At(4 * ZONE, 100));
    assert_eq!(job.place(Op::Unmap, 4 * ZONE, ZONE, true), Placement::Busy);
    job.completed(Op::Write, 4 * ZONE, true);
    assert_eq!(job.place(Op::Unmap, 300, 100, true), Placement::At(4 * ZONE, ZONE));
    job.completed(Op::Unmap, 4 * ZONE, true);
    assert_eq!((job.resets(), job.place(Op::Unmap, 300, 100, true)), (1, Placement::Exhausted));
    assert_eq!(job.place(Op::Write, 4 * ZONE, 100, true), Placement::At(4 * ZONE, 100));
}

#[test]
fn zones_are_reset_above_the_threshold() {
    let collecting = ZonedOptions { reset_threshold: 0.25, reset_frequency: 0.5, ..options() };
    let device = device(&collecting);
    let mut job = join(&device, &collecting);
    let mut write = |zone: u64, length| {
        let placement = job.place(Op::Write, zone * ZONE, length, true);
        if let Placement::At(at, _) = placement {
            job.completed(Op::Write, at, true);
        }
        (placement, job.resets())
    };
    assert_eq!(write(0, 1000), (Placement::At(0, 1000), 0));
    assert_eq!(write(1, 1000), (Placement::At(ZONE, 1000), 0));
    // A quarter of the region has data: every second write resets its zone.
    assert_eq!(write(2, 500), (Placement::At(2 * ZONE, 500), 0));
    assert_eq!(write(2, 300), (Placement::At(2 * ZONE, 300), 1));
    assert_eq!(write(2, 300), (Placement::At(2 * ZONE + 300, 300), 1));
}

#[test]
fn cancelled_and_failed_writes_leave_the_pointer_where_the_device_has_it() {
    #[derive(Debug)]
    struct Commands;
    impl ZoneCommands for Commands {
        fn reset(&self, start: u64, _: u64) -> io::Result<()> {
            if start == 7 * ZONE { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(()) }
        }

        fn pointer(&self, start: u64) -> io::Result<u64> {
            Ok(start + 200)
        }
    }
    let device = ZonedDevice::of_test(8 * ZONE, &options(), Box::new(Commands));
    let mut job = join(&device, &options());
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(0, 100));
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(100, 100));
    job.cancel(Op::Write, 100);
    assert_eq!(job.place(Op::Write, 0, 300, true), Placement::At(100, 300));
    job.completed(Op::Write, 100, false);
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::Busy, "another write is in flight");
    job.completed(Op::Write, 0, true);
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(200, 100));
    assert_eq!(job.place(Op::Write, 7 * ZONE, 1000, true), Placement::At(7 * ZONE, 1000));
    job.completed(Op::Write, 7 * ZONE, true);
    let Placement::Failed(message) = job.place(Op::Write, 7 * ZONE, 100, true) else { panic!("it is reset") };
    assert!(message.contains("zone at 7000 cannot be reset"), "{message}");
}

#[test]
fn conventional_zones_take_any_io_up_to_their_end() {
    let mut device = emulated("x", 8 * ZONE, &options()).unwrap();
    device.table.get_mut().unwrap().zones[0].is_sequential = false;
    let mut job = join(&Arc::new(device), &options());
    assert_eq!(job.place(Op::Write, 500, 100, true), Placement::At(500, 100));
    assert_eq!(job.place(Op::Read, 900, 200, true), Placement::At(900, 100));
    job.completed(Op::Write, 500, true);
    assert_eq!(job.place(Op::Write, 0, 100, true), Placement::At(0, 100));
}

#[test]
fn regions_of_jobs_that_write_are_whole_zones() {
    let device = device(&options());
    assert_eq!(align_region(&device, 2500, 3000), Ok((3000, 2000)));
    assert_eq!(align_region(&device, 2000, 3000), Ok((2000, 3000)));
    assert!(align_region(&device, 2100, 1000).unwrap_err().contains("no whole zone"));
    assert!(emulated("x", 999, &options()).unwrap_err().contains("--zonesize=1000"));
    assert!(emulated("x", 999, &ZonedOptions::default()).unwrap_err().contains("has no zones"));
    assert!(emulated("x", u64::MAX, &options()).unwrap_err().contains("more than"));
}
