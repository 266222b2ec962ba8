//! Accuracy of the models: latency of 4 KiB random reads in real time (through a bdev on a busy-polling
//! reactor) and in virtual time, compared with the analytic latency of the profile.
//!
//! `cargo run --release -p ringbolt-device-model --example accuracy -- [PROFILE|FILE|all [DEPTH [DEVICES [SECONDS]]]]`
//!
//! At depth 1 all three are compared. At other depths commands queue, for which there is no analytic
//! latency: real time is compared with virtual time. A second line excludes completions after the thread
//! was preempted for more than 20 us, an effect of the machine and not of the model.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::{Duration, Instant};

use bdev::{Access, BdevChannel, Completion, Registry, Request};
use block_io::{Channel as _, Tag};
use device_model::{
    Arrival, DeviceProfile, LatencyHistogram, Load, MeasurementEnd, MediaState, Rw, SimulationConfig, disk,
    simulate,
};
use reactor::{IdlePolicy, Period, PollResult, Poller, Reactor, ReactorConfig};

/// A longer gap between two polls means that the thread was preempted.
const PREEMPTED_NS: u64 = 20_000;
const COMMANDS: u64 = 1_000_000;

/// Keeps each device at its queue depth and records the latencies.
struct LoadPoller {
    channels: Vec<(BdevChannel, Vec<Request>)>,
    sink: Vec<Completion>,
    random: u64,
    /// Start of the last poll in ticks.
    last_poll_at: u64,
    all: LatencyHistogram,
    undisturbed: LatencyHistogram,
    shared: std::rc::Rc<std::cell::RefCell<(LatencyHistogram, LatencyHistogram)>>,
}

impl Poller for LoadPoller {
    fn name(&self) -> &str {
        "accuracy"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let start = os::clock::ticks();
        let before = std::mem::replace(&mut self.last_poll_at, start);
        let mut done = 0;
        for (channel, batch) in &mut self.channels {
            channel.poll(&mut self.sink);
            if !self.sink.is_empty() {
                done += self.sink.len();
                let now = channel.last_poll_ticks();
                let preempted = os::clock::ticks_to_ns(now.saturating_sub(before)) > PREEMPTED_NS;
                for completion in self.sink.drain(..) {
                    let mut request = completion.into_request();
                    let latency_ns = os::clock::ticks_to_ns(now.saturating_sub(request.issued_ticks));
                    self.all.record(latency_ns);
                    if !preempted {
                        self.undisturbed.record(latency_ns);
                    }
                    self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    request.lba = (self.random >> 40) * u64::from(request.blocks);
                    request.issued_ticks = now;
                    batch.push(request);
                }
            }
            channel.submit(batch);
        }
        PollResult::from_count(done)
    }
}

impl Drop for LoadPoller {
    fn drop(&mut self) {
        self.shared.replace((std::mem::take(&mut self.all), std::mem::take(&mut self.undisturbed)));
    }
}

fn measure(
    profile: &DeviceProfile,
    depth: u32,
    devices: u32,
    seconds: f64,
) -> Result<(LatencyHistogram, LatencyHistogram), Box<dyn Error>> {
    let reactor = Reactor::new(&ReactorConfig { idle: IdlePolicy::Spin, ..ReactorConfig::default() })?;
    let (core, registry) = (reactor.core(), Registry::new());
    let mut channels = Vec::new();
    for device in 0..devices {
        let name = format!("M{device}");
        let config = disk::ModelConfig::new(&name, profile.clone());
        disk::create(&registry, disk::ModelConfig { seed: u64::from(device), ..config })?;
        let channel = registry.open(&name, Access::ReadOnly)?.channel(&core)?;
        let request = |tag| {
            let buffer = core.pool().take(4096).ok_or("not enough memory for the buffers")?;
            Ok(Request::read(Tag(u64::from(tag)), 0, (4096 / channel.block_size()).max(1), buffer))
        };
        let batch = (0..depth).map(request).collect::<Result<Vec<Request>, &str>>()?;
        channels.push((channel, batch));
    }
    let shared = std::rc::Rc::default();
    let poller = LoadPoller {
        channels,
        sink: Vec::new(),
        random: 1,
        last_poll_at: os::clock::ticks(),
        all: LatencyHistogram::default(),
        undisturbed: LatencyHistogram::default(),
        shared: std::rc::Rc::clone(&shared),
    };
    core.add_poller(Box::new(poller), Period::EveryTurn);
    let (mut reactor, end) = (reactor, Instant::now() + Duration::from_secs_f64(seconds));
    while Instant::now() < end {
        (0..1000).for_each(|_| {
            reactor.turn();
        });
    }
    drop((core, reactor));
    Ok(shared.take())
}

fn simulate_reads(profile: &DeviceProfile, depth: u32) -> LatencyHistogram {
    let config = SimulationConfig {
        devices: 1,
        bytes: profile.capacity_bytes(),
        state: MediaState::Steady,
        ramp_ns: 1_000_000,
        end: MeasurementEnd::AfterCommands(COMMANDS),
        seed: 1,
    };
    let arrival = Arrival::Closed { depth };
    let load = Load { rw: Rw::RandRead, bytes: 4096, arrival, host_ns: 0, wait_ns: 0 };
    simulate(profile, &config, &[load]).swap_remove(0).latency
}

/// Mean, 50th, 99th and 99.9th percentile in microseconds.
fn figures(latencies: &LatencyHistogram) -> [f64; 4] {
    let percentile = |percent| latencies.percentile_ns(percent) / 1000.0;
    [latencies.mean_ns() / 1000.0, percentile(50.0), percentile(99.0), percentile(99.9)]
}

fn print(what: &str, figures: [f64; 4], reference: [f64; 4]) {
    let cell = |(figure, of): (f64, f64)| format!("{figure:>9.2} {:>+7.2} %", (figure / of - 1.0) * 100.0);
    let cells: Vec<String> = figures.into_iter().zip(reference).map(cell).collect();
    println!("  {what:<24}{}", cells.join(" "));
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |index: usize, default: &str| arguments.get(index).cloned().unwrap_or(default.to_string());
    let name = argument(0, "all");
    let (depth, devices): (u32, u32) = (argument(1, "1").parse()?, argument(2, "1").parse()?);
    let seconds: f64 = argument(3, "5").parse()?;
    let names = if name == "all" { DeviceProfile::shipped_names().collect() } else { vec![name.as_str()] };
    println!("4 KiB random reads, depth {depth} on each of {devices} devices; mean, p50, p99, p99.9 in us");
    for name in names {
        let profile = match std::fs::read_to_string(name) {
            Ok(text) => DeviceProfile::parse(&text)?,
            Err(_) => DeviceProfile::shipped(name)?,
        };
        let virtual_time = figures(&simulate_reads(&profile, depth));
        let formulas = profile.expected(false, 4096).filter(|_| depth == 1);
        let reference = formulas.map_or(virtual_time, |formulas| {
            let percentile = |percent| formulas.percentile_us(percent);
            [formulas.mean_us(), percentile(50.0), percentile(99.0), percentile(99.9)]
        });
        println!("{name}");
        print(if depth == 1 { "profile" } else { "virtual time" }, reference, reference);
        if depth == 1 {
            print("virtual time", virtual_time, reference);
        }
        let (all, undisturbed) = measure(&profile, depth, devices, seconds)?;
        print("real time", figures(&all), reference);
        let preempted = 100.0 * (1.0 - undisturbed.count() as f64 / all.count().max(1) as f64);
        print(&format!("  without {preempted:.2} % late"), figures(&undisturbed), reference);
    }
    Ok(())
}
