//! The time of first writes to the clusters of a thin volume, on a device that takes 100 µs for each I/O.
//!
//! `first_write [MICROSECONDS]` writes one at a time and prints medians in µs and as multiples of a write to a
//! cluster that is there: of whole clusters of 64 KiB, of 4 KiB in a cluster that was zero, and of 4 KiB in a
//! cluster that a snapshot has. A second volume is read meanwhile, and the longest of its reads is printed.

use std::rc::Rc;
use std::time::Instant;

use bdev::rpc::BdevModule;
use bdev::{Access, AsyncChannel, Registry};
use control::ControlPlane;
use control::json::json;
use reactor::{Core, ReactorConfig, ReactorHandle, Reactors};

const CLUSTER_BYTES: u64 = 64 << 10;
/// Writes of a kind.
const WRITES: u64 = 400;

/// Medians of the writes in µs, and the longest read of the other volume.
struct Times {
    median_us: f64,
    worst_read_us: f64,
}

/// Writes `bytes` at the start of each cluster from `first` on, one after the other.
fn writes(reactor: &ReactorHandle, registry: &Registry, first: u64, bytes: u64) -> Times {
    let (registry, (sender, result)) = (registry.clone(), std::sync::mpsc::channel());
    let start = move |core: &Core| {
        let is_done = Rc::new(std::cell::Cell::new(false));
        let worst = Rc::new(std::cell::Cell::new(0.0f64));
        let open = |name: &str| {
            let device = registry.open(name, Access::ReadWrite).expect("the volume is there");
            let channel = device.channel(core).expect("a device in memory");
            (AsyncChannel::new(core, channel), device)
        };
        let ((io, volume), (other, second)) = (open("lvs/thin"), open("lvs/other"));
        let (reader, reader_done, longest) = (core.clone(), is_done.clone(), worst.clone());
        core.spawn(async move {
            let _second = second;
            let mut buffer = reader.pool().take(4096);
            while let Some(taken) = buffer.take().filter(|_| !reader_done.get()) {
                let start = Instant::now();
                buffer = other.read(0, taken).await.ok();
                longest.set(longest.get().max(start.elapsed().as_secs_f64() * 1e6));
            }
        });
        let core = core.clone();
        core.clone().spawn(async move {
            let block = u64::from(volume.device().geometry().block_size);
            let mut times = Vec::new();
            for index in first..first + WRITES {
                let mut data = core.pool().take(bytes as usize).expect("memory for a cluster");
                data.as_mut_slice().fill(1);
                let start = Instant::now();
                let written = io.write(index * CLUSTER_BYTES / block, data).await;
                times.push(start.elapsed().as_secs_f64() * 1e6);
                assert!(written.is_ok(), "cluster {index} is not written");
            }
            times.sort_by(f64::total_cmp);
            is_done.set(true);
            _ = sender.send(Times { median_us: times[times.len() / 2], worst_read_us: worst.get() });
        });
    };
    reactor.post(start).expect("the reactor runs");
    result.recv().expect("all is written")
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let delay: u64 = std::env::args().nth(1).map_or(Ok(100), |text| text.parse())?;
    let reactors = Reactors::start(&ReactorConfig::default())?;
    let (registry, reactor) = (Registry::new(), reactors.handles()[0].clone());
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let lvols = lvol::LvolModule::new(registry.clone(), reactors.handles());
    let plane = builder.module(&bdevs).module(&lvols).start(None)?;
    for block_size in [512, 4096] {
        let name = format!("memory{block_size}");
        let blocks = (512 << 20) / block_size;
        plane.invoke(
            "bdev_malloc_create",
            json!({ "name": name, "num_blocks": blocks, "block_size": block_size }),
        )?;
        let params = json!({
            "base_bdev_name": name, "name": "disk", "avg_read_latency": delay, "p99_read_latency": delay,
            "avg_write_latency": delay, "p99_write_latency": delay,
        });
        plane.invoke("bdev_delay_create", params)?;
        let params = json!({ "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": CLUSTER_BYTES });
        plane.invoke("bdev_lvol_create_lvstore", params)?;
        for (name, is_thin) in [("thin", true), ("other", false)] {
            let params = json!({ "lvol_name": name, "size_in_mib": 128, "thin_provision": is_thin, "lvs_name": "lvs" });
            plane.invoke("bdev_lvol_create", params)?;
        }
        println!("blocks of {block_size} bytes");
        let mut plain = [0.0; 2];
        let kinds = [("a whole cluster", 0, CLUSTER_BYTES, 0), ("4 KiB in a new cluster", WRITES, 4096, 1)];
        for (kind, first, bytes, at) in kinds {
            let first_time = writes(&reactor, &registry, first, bytes);
            let again = writes(&reactor, &registry, first, bytes);
            plain[at] = again.median_us;
            report(kind, &first_time, again.median_us);
        }
        plane.invoke("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/thin", "snapshot_name": "s" }))?;
        report("4 KiB in a snapshot's cluster", &writes(&reactor, &registry, 0, 4096), plain[1]);
        plane.invoke("bdev_lvol_delete_lvstore", json!({ "lvs_name": "lvs" }))?;
        plane.invoke("bdev_delay_delete", json!({ "name": "disk" }))?;
    }
    plane.drain();
    drop(reactors);
    plane.stop();
    Ok(())
}

fn report(kind: &str, first: &Times, plain_us: f64) {
    let Times { median_us, worst_read_us } = first;
    let ratio = median_us / plain_us;
    println!(
        "{kind}: {median_us:.0} µs, {ratio:.2} x {plain_us:.0} µs; longest read of others {worst_read_us:.0} µs"
    );
}
