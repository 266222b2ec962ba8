//! The cost of a logical volume: random 4 KiB I/Os on a device in memory, and on volumes of a store there.
//!
//! `volume_cost [MIB]` prints nanoseconds an I/O at queue depth 32, the median of 15 runs, and the ratio to
//! the device alone: for a thick volume, and for one that reads through ten snapshots.

use bdev::rpc::BdevModule;
use bdev::{Access, Registry, Request};
use block_io::{Channel as _, Op, Tag};
use control::ControlPlane;
use control::json::json;
use random::WyRand;
use reactor::{Core, ReactorConfig, ReactorHandle, Reactors};

const DEPTH: u64 = 32;
const RUNS: usize = 15;
const BATCHES: u64 = 4000;

/// Nanoseconds an I/O of each run.
fn run(core: &Core, registry: &Registry, name: &str, op: Op) -> Option<Vec<f64>> {
    let mut channel = registry.open(name, Access::ReadWrite).ok()?.channel(core).ok()?;
    let block = u64::from(channel.block_size());
    let (places, blocks) = (channel.blocks() * block / 4096, 4096 / block);
    let mut rng = WyRand::new(1);
    let mut batch: Vec<Request> = Vec::new();
    for tag in 0..DEPTH {
        let mut request = Request::new(Tag(tag), op, 0, blocks as u32);
        request.set_data(Some(core.pool().take(4096)?));
        batch.push(request);
    }
    let mut sink = Vec::new();
    let mut nanoseconds = Vec::new();
    for _ in 0..RUNS {
        let start = std::time::Instant::now();
        for _ in 0..BATCHES {
            for request in &mut batch {
                request.lba = rng.below(places) * blocks;
                request.issued_ticks = 0;
            }
            channel.submit(&mut batch);
            while (sink.len() as u64) < DEPTH {
                channel.poll(&mut sink);
            }
            batch.extend(sink.drain(..).map(|completion| {
                assert!(completion.status().is_success(), "{}", completion.status());
                completion.into_request()
            }));
        }
        nanoseconds.push(start.elapsed().as_nanos() as f64 / (BATCHES * DEPTH) as f64);
    }
    nanoseconds.sort_by(f64::total_cmp);
    Some(nanoseconds)
}

fn measure(reactor: &ReactorHandle, registry: &Registry, name: &'static str, op: Op) -> f64 {
    let registry = registry.clone();
    let runs = reactor.call(move |core| run(core, &registry, name, op)).ok().flatten();
    let runs = runs.expect("the device can be opened, and the core has memory");
    println!("{name:12} {op:?}: {:.1} ns (p10 {:.1}, p90 {:.1})", runs[RUNS / 2], runs[1], runs[RUNS - 2]);
    runs[RUNS / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mib: u64 = std::env::args().nth(1).map_or(Ok(256), |text| text.parse())?;
    let reactors = Reactors::start(&ReactorConfig::default())?;
    let (registry, reactor) = (Registry::new(), reactors.handles()[0].clone());
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let lvols = lvol::LvolModule::new(registry.clone(), reactors.handles());
    let plane = builder.module(&bdevs).module(&lvols).start(None)?;
    for (name, mib) in [("bare", mib), ("disk", 4 * mib + 64)] {
        let blocks = mib * 2048;
        let params = json!({ "name": name, "num_blocks": blocks, "block_size": 512 });
        plane.invoke("bdev_malloc_create", params)?;
    }
    let params = json!({ "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": 1 << 20 });
    plane.invoke("bdev_lvol_create_lvstore", params)?;
    for (name, thin) in [("thick", false), ("chain", true)] {
        let params =
            json!({ "lvol_name": name, "size_in_mib": mib, "thin_provision": thin, "lvs_name": "lvs" });
        plane.invoke("bdev_lvol_create", params)?;
    }
    // All clusters are in the oldest snapshot.
    plane.invoke("bdev_lvol_inflate", json!({ "name": "lvs/chain" }))?;
    for index in 0..10 {
        let params = json!({ "lvol_name": "lvs/chain", "snapshot_name": format!("s{index}") });
        plane.invoke("bdev_lvol_snapshot", params)?;
    }
    for op in [Op::Write, Op::Read] {
        let bare = measure(&reactor, &registry, "bare", op);
        let thick = measure(&reactor, &registry, "lvs/thick", op);
        println!("thick: {:.1} % of the device", 100.0 * bare / thick);
        if op == Op::Read {
            let chain = measure(&reactor, &registry, "lvs/chain", op);
            println!("ten snapshots: {:.1} % of the device", 100.0 * bare / chain);
        }
    }
    plane.drain();
    drop(reactors);
    plane.stop();
    Ok(())
}
