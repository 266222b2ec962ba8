use super::*;

fn load(rw: Rw, bytes: u32, depth: u32) -> Load {
    Load { rw, bytes, arrival: Arrival::Closed { depth }, host_ns: 0, wait_ns: 0 }
}

fn run(name: &str, state: MediaState, millis: u64, loads: &[Load]) -> Vec<LoadResult> {
    let profile = DeviceProfile::shipped(name).unwrap();
    let config = SimulationConfig {
        devices: 1,
        bytes: profile.capacity_bytes(),
        state,
        ramp_ns: millis * 1_000_000,
        end: MeasurementEnd::AfterNs(millis * 1_000_000),
        seed: 11,
    };
    simulate(&profile, &config, loads)
}

fn mean_us(measured: &LoadResult) -> f64 {
    measured.latency.mean_ns() / 1000.0
}

#[test]
fn a_closed_loop_obeys_littles_law() {
    for name in ["ideal", "intel-p4800x", "samsung-980-pro", "intel-p3700"] {
        for depth in [1, 16, 256] {
            let seen = &run(name, MediaState::Steady, 50, &[load(Rw::RandRead, 4096, depth)])[0];
            let depth_seen = seen.iops * mean_us(seen) / 1e6;
            assert!((depth_seen / f64::from(depth) - 1.0).abs() < 0.02, "{name} {depth}: {depth_seen}");
        }
    }
}

#[test]
fn throughput_grows_with_depth_until_saturation_then_latency_grows() {
    let at =
        |depth| run("samsung-980-pro", MediaState::Steady, 40, &[load(Rw::RandRead, 4096, depth)]).remove(0);
    let points: Vec<LoadResult> = [1, 8, 64, 256, 512].map(at).into();
    assert!(points.windows(2).all(|pair| pair[1].iops > pair[0].iops * 0.999));
    assert!(points[1].iops > 7.0 * points[0].iops, "eight reads rarely share a die");
    assert!(points[4].iops < 1.02 * points[3].iops, "saturated");
    assert!(mean_us(&points[1]) < 1.15 * mean_us(&points[0]));
    assert!(mean_us(&points[4]) > 1.9 * mean_us(&points[3]), "latency doubles with the depth at saturation");
}

#[test]
fn concurrent_writes_slow_down_reads_on_flash_but_not_on_optane() {
    let slowdown = |name, depth| {
        let loads = [load(Rw::RandRead, 4096, 1), load(Rw::RandWrite, 4096, depth)];
        let alone = mean_us(&run(name, MediaState::Steady, 300, &loads[..1])[0]);
        mean_us(&run(name, MediaState::Steady, 300, &loads)[0]) / alone
    };
    let (flash, optane) = (slowdown("samsung-980-pro", 4), slowdown("intel-p4800x", 1));
    assert!(flash > 1.5, "{flash}");
    assert!(optane < 1.25, "{optane}");
    assert!(slowdown("samsung-980-pro", 128) > 3.0);
    assert!(slowdown("intel-p3700", 128) > 1.3);
}

#[test]
fn write_throughput_drops_when_the_slc_cache_is_full_and_again_with_garbage_collection() {
    let writer = [load(Rw::RandWrite, 65_536, 32)];
    let mut profile = DeviceProfile::shipped("samsung-980-pro").unwrap();
    profile.device.capacity_gb = 20.0;
    profile.slc.as_mut().unwrap().gb = 4.0;
    let at = |seconds: u64| {
        let config = SimulationConfig {
            devices: 1,
            bytes: profile.capacity_bytes(),
            state: MediaState::Fresh,
            ramp_ns: seconds * 1_000_000_000,
            end: MeasurementEnd::AfterNs(500_000_000),
            seed: 11,
        };
        simulate(&profile, &config, &writer)[0].iops
    };
    let (first, direct, steady) = (at(0), at(5), at(90));
    assert!(first > 1.8 * direct, "{first} {direct}");
    assert!(direct > 1.2 * steady, "{direct} {steady}");
}

#[test]
fn short_write_bursts_are_absorbed_by_the_buffer() {
    let profile = DeviceProfile::shipped("intel-p3700").unwrap();
    let mut timing = TimingModel::whole_device(&profile, profile.capacity_bytes(), MediaState::Steady, 1);
    let write =
        |number: u64| IoCommand { op: Op::Write, offset: number * 999_424, bytes: 65_536, fua: false };
    let buffered = (profile.write.buffer_kib / 64.0) as u64;
    let first = timing.schedule(0, &write(0));
    assert!(first < 60_000, "{first}");
    let late = (1..4 * buffered).map(|number| timing.schedule(0, &write(number))).max().unwrap();
    assert!(late > 1_000_000, "a full buffer drains at the program rate of the flash: {late}");
    let after_pause = 60_000_000_000;
    assert!(timing.schedule(after_pause, &write(9)) < after_pause + 60_000);
}

#[test]
fn a_flush_drains_the_buffer_unless_it_has_power_loss_protection() {
    for (name, waits) in [("samsung-980-pro", true), ("intel-p3700", false), ("intel-p4800x", false)] {
        let profile = DeviceProfile::shipped(name).unwrap();
        let mut timing = TimingModel::whole_device(&profile, profile.capacity_bytes(), MediaState::Steady, 1);
        for number in 0..64 {
            timing.schedule(0, &IoCommand { op: Op::Write, offset: number << 20, bytes: 4096, fua: false });
        }
        let flushed = timing.schedule(0, &IoCommand { op: Op::Flush, offset: 0, bytes: 0, fua: false });
        assert_eq!(flushed > 500_000, waits, "{name}: {flushed}");
        let fua = timing.schedule(flushed, &IoCommand { op: Op::Write, offset: 0, bytes: 4096, fua: true })
            - flushed;
        assert_eq!(fua > 500_000, waits, "{name}: {fua}");
    }
}

#[test]
fn an_open_loop_issues_at_its_rate_independent_of_completions() {
    let load = |per_second| Load { arrival: Arrival::Open { per_second }, ..load(Rw::RandRead, 4096, 1) };
    let seen = &run("intel-p4800x", MediaState::Steady, 200, &[load(300e3)])[0];
    assert!((seen.iops / 300e3 - 1.0).abs() < 0.02, "{}", seen.iops);
    assert!(mean_us(seen) < 12.0, "{}", mean_us(seen));
    // Above the device's maximum rate, the wait in the host queue is part of the latency.
    let seen = &run("intel-p4800x", MediaState::Steady, 200, &[load(900e3)])[0];
    assert!(seen.iops < 600e3);
    assert!(mean_us(seen) > 10_000.0, "{}", mean_us(seen));
}

#[test]
fn half_a_share_has_half_the_throughput() {
    let profile = DeviceProfile::shipped("samsung-980-pro").unwrap();
    let rate = |share: f64, depth: u64| {
        let mut timing = TimingModel::whole_device(&profile, profile.capacity_bytes(), MediaState::Steady, 3);
        timing.set_share(share);
        let mut random = ModelRng::new(5);
        let mut due: BinaryHeap<Reverse<u64>> = (0..depth).map(Reverse).collect();
        for _ in 0..40_000 {
            let now = due.pop().unwrap().0;
            let offset = random.below(1 << 24) * 4096;
            due.push(Reverse(
                timing.schedule(now, &IoCommand { op: Op::Read, offset, bytes: 4096, fua: false }),
            ));
        }
        40_000.0 / due.peek().unwrap().0 as f64
    };
    for depth in [16, 128, 512] {
        let ratio = 2.0 * rate(0.5, depth / 2) / rate(1.0, depth);
        assert!((ratio - 1.0).abs() < 0.05, "depth {depth}: {ratio}");
    }
}

#[test]
fn host_cpu_time_limits_throughput() {
    let slow = Load { host_ns: 10_000, ..load(Rw::RandRead, 4096, 64) };
    let seen = &run("intel-p4800x", MediaState::Steady, 50, &[slow])[0];
    assert!((seen.iops / 100e3 - 1.0).abs() < 0.02, "{}", seen.iops);
}
