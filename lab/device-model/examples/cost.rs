//! CPU cost of a modelled command: closed loops of 4 KiB random reads on several devices, through the bdev
//! layer, on one core.
//!
//! `cargo run --release -p ringbolt-device-model --example cost -- PROFILE DEVICES DEPTH COMMANDS`. Under
//! callgrind, the difference between runs of COMMANDS and 2 x COMMANDS, divided by COMMANDS, is the
//! instructions per command.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Instant;

use bdev::{Access, BdevChannel, Registry, Request};
use block_io::{Channel as _, Tag};
use device_model::{DeviceProfile, disk};
use reactor::{IdlePolicy, Reactor, ReactorConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |index: usize, default: &str| arguments.get(index).cloned().unwrap_or(default.to_string());
    let name = argument(0, "ideal");
    let profile = match std::fs::read_to_string(&name) {
        Ok(text) => DeviceProfile::parse(&text)?,
        Err(_) => DeviceProfile::shipped(&name)?,
    };
    let devices: usize = argument(1, "16").parse()?;
    let depth: u64 = argument(2, "32").parse()?;
    let commands: u64 = argument(3, "20000000").parse()?;
    let reactor = Reactor::new(&ReactorConfig { idle: IdlePolicy::Spin, ..ReactorConfig::default() })?;
    let (core, registry) = (reactor.core(), Registry::new());
    let mut loops: Vec<(BdevChannel, Vec<Request>)> = Vec::new();
    for device in 0..devices {
        let name = format!("M{device}");
        disk::create(
            &registry,
            disk::ModelConfig { seed: device as u64, ..disk::ModelConfig::new(&name, profile.clone()) },
        )?;
        let channel = registry.open(&name, Access::ReadOnly)?.channel(&core)?;
        let request = |tag| {
            let buffer = core.pool().take(4096).ok_or("not enough memory for the buffers")?;
            Ok(Request::read(Tag(tag), 0, (4096 / channel.block_size()).max(1), buffer))
        };
        let batch = (0..depth).map(request).collect::<Result<Vec<Request>, &str>>()?;
        loops.push((channel, batch));
    }
    let (mut sink, mut done, mut random) = (Vec::new(), 0u64, 1u64);
    let (mut latency, mut iterations) = (0u128, 0u64);
    let start = Instant::now();
    while done < commands {
        iterations += 1;
        for (channel, batch) in &mut loops {
            channel.poll(&mut sink);
            done += sink.len() as u64;
            let now = if sink.is_empty() { 0 } else { channel.last_poll_ticks() };
            for completion in sink.drain(..) {
                let mut request = completion.into_request();
                latency += u128::from(now - request.issued_ticks.min(now));
                request.issued_ticks = now;
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                request.lba = (random >> 40) * 8;
                batch.push(request);
            }
            channel.submit(batch);
        }
    }
    let ns = start.elapsed().as_nanos() as f64;
    let mean = os::clock::ticks_to_ns((latency / u128::from(done.max(1))) as u64);
    println!(
        "{} x {} depth {}: {:.1} M commands/s, {:.1} ns per command, mean latency {:.2} us, {:.1} completions per poll loop",
        devices,
        profile.name,
        depth,
        done as f64 * 1e3 / ns,
        ns / done as f64,
        mean as f64 / 1e3,
        done as f64 / iterations as f64
    );
    Ok(())
}
