//! How exact a model is: the latencies of 4 KiB random reads in real time, through a block device on a
//! reactor that spins, and in virtual time, beside what the profile says by its formulas.
//!
//! `cargo run --release -p ringbolt-model --example accuracy -- [PROFILE|FILE|all [DEPTH [DEVICES [SECONDS]]]]`
//!
//! At depth 1 all three are compared. At other depths commands meet each other, for which there is no
//! formula: real time is compared with virtual time. A second line leaves out what completed after the
//! core was away for more than 20 us, which is the machine's doing and not the model's.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::{Duration, Instant};

use bdev::{Access, Channel, Completion, Registry, Request};
use model::{Arrival, Latencies, Load, Profile, Rw, Setting, State, disk, drive};
use reactor::{Config, IdlePolicy, Period, Poller, Reactor, Work};
use ring::{Channel as _, Tag};

/// Longer than any turn of a loop that has its core.
const AWAY_NS: u64 = 20_000;
const COMMANDS: u64 = 1_000_000;

/// Keeps devices at their depth and counts.
struct Loops {
    channels: Vec<(Channel, Vec<Request>)>,
    sink: Vec<Completion>,
    random: u64,
    /// When the last poll began, in ticks.
    began_at: u64,
    all: Latencies,
    there: Latencies,
    shared: std::rc::Rc<std::cell::RefCell<(Latencies, Latencies)>>,
}

impl Poller for Loops {
    fn name(&self) -> &str {
        "accuracy"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        let start = sys::clock::ticks();
        let before = std::mem::replace(&mut self.began_at, start);
        let mut done = 0;
        for (channel, batch) in &mut self.channels {
            channel.poll(&mut self.sink);
            if !self.sink.is_empty() {
                done += self.sink.len();
                let now = channel.polled_at();
                let away = sys::clock::ticks_to_ns(now.saturating_sub(before)) > AWAY_NS;
                for completion in self.sink.drain(..) {
                    let mut request = completion.into_request();
                    let latency_ns = sys::clock::ticks_to_ns(now.saturating_sub(request.issued));
                    self.all.add(latency_ns);
                    if !away {
                        self.there.add(latency_ns);
                    }
                    self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    request.lba = (self.random >> 40) * u64::from(request.blocks);
                    request.issued = now;
                    batch.push(request);
                }
            }
            channel.submit(batch);
        }
        Work::count(done)
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        self.shared.replace((std::mem::take(&mut self.all), std::mem::take(&mut self.there)));
    }
}

fn real(
    profile: &Profile,
    depth: u32,
    devices: u32,
    seconds: f64,
) -> Result<(Latencies, Latencies), Box<dyn Error>> {
    let reactor = Reactor::new(&Config { idle: IdlePolicy::Spin, ..Config::default() })?;
    let (core, registry) = (reactor.core(), Registry::new());
    let mut channels = Vec::new();
    for device in 0..devices {
        let name = format!("M{device}");
        let config = disk::ModelConfig::new(&name, profile.clone());
        disk::create(&registry, disk::ModelConfig { seed: u64::from(device), ..config })?;
        let channel = registry.open(&name, Access::ReadOnly)?.channel(&core)?;
        let request = |tag| {
            let buffer = core.pool().take(4096).ok_or("no memory for buffers")?;
            Ok(Request::read(Tag(u64::from(tag)), 0, (4096 / channel.block_size()).max(1), buffer))
        };
        let batch = (0..depth).map(request).collect::<Result<Vec<Request>, &str>>()?;
        channels.push((channel, batch));
    }
    let shared = std::rc::Rc::default();
    let loops = Loops {
        channels,
        sink: Vec::new(),
        random: 1,
        began_at: sys::clock::ticks(),
        all: Latencies::default(),
        there: Latencies::default(),
        shared: std::rc::Rc::clone(&shared),
    };
    core.add_poller(Box::new(loops), Period::EveryTurn);
    let (mut reactor, end) = (reactor, Instant::now() + Duration::from_secs_f64(seconds));
    while Instant::now() < end {
        (0..1000).for_each(|_| {
            reactor.turn();
        });
    }
    drop((core, reactor));
    Ok(shared.take())
}

fn virtually(profile: &Profile, depth: u32) -> Latencies {
    let setting = Setting {
        devices: 1,
        bytes: profile.capacity_bytes(),
        state: State::Steady,
        ramp_ns: 1_000_000,
        measure_ns: u64::MAX / 4,
        commands_max: COMMANDS,
        seed: 1,
    };
    let arrival = Arrival::Closed { depth };
    let load = Load { rw: Rw::RandRead, bytes: 4096, arrival, host_ns: 0, wait_ns: 0 };
    drive(profile, &setting, &[load]).swap_remove(0).latency
}

/// Mean, and the 50th, 99th and 99.9th percentile, in microseconds.
fn figures(latencies: &Latencies) -> [f64; 4] {
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
    let names = if name == "all" { Profile::shipped_names().collect() } else { vec![name.as_str()] };
    println!("4 KiB random reads, depth {depth} on each of {devices} devices; mean, p50, p99, p99.9 in us");
    for name in names {
        let profile = match std::fs::read_to_string(name) {
            Ok(text) => Profile::parse(&text)?,
            Err(_) => Profile::shipped(name)?,
        };
        let virtual_time = figures(&virtually(&profile, depth));
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
        let (all, there) = real(&profile, depth, devices, seconds)?;
        print("real time", figures(&all), reference);
        let away = 100.0 * (1.0 - there.count() as f64 / all.count().max(1) as f64);
        print(&format!("  without {away:.2} % late"), figures(&there), reference);
    }
    Ok(())
}
