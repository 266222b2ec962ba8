//! The cost of many volumes: of a store in memory with volumes and snapshots of each.
//!
//! `many_volumes [VOLUMES] [SNAPSHOTS]` (1000 and 6) prints milliseconds a volume, and a snapshot of each round,
//! and seconds to remove the disk and to find all of them again: neither may grow with what is there already.

use std::time::Instant;

use bdev::Registry;
use bdev::rpc::BdevModule;
use control::ControlPlane;
use control::json::json;
use reactor::{ReactorConfig, Reactors};

fn milliseconds(start: Instant, count: u64) -> f64 {
    start.elapsed().as_secs_f64() * 1e3 / count as f64
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let volumes = arguments.next().unwrap_or(Ok(1000))?;
    let snapshots = arguments.next().unwrap_or(Ok(6))?;
    let reactors = Reactors::start(&ReactorConfig::default())?;
    let registry = Registry::new();
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let lvols = lvol::LvolModule::new(registry.clone(), reactors.handles());
    let plane = builder.module(&bdevs).module(&lvols).start(None)?;
    // A metadata page for each, and as many clusters.
    let blocks = (volumes * (snapshots + 1) + 1024) * 2 * 8;
    let params = json!({ "name": "disk", "num_blocks": blocks, "block_size": 512 });
    plane.invoke("bdev_malloc_create", params)?;
    let params = json!({ "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": 8192, "clear_method": "none",
        "num_md_pages_per_cluster_ratio": 100 });
    plane.invoke("bdev_lvol_create_lvstore", params)?;
    let start = Instant::now();
    for index in 0..volumes {
        let params = json!({ "lvol_name": format!("v{index}"), "size_in_mib": 1, "thin_provision": true,
            "lvs_name": "lvs" });
        plane.invoke("bdev_lvol_create", params)?;
    }
    println!("{volumes} volumes: {:.2} ms each", milliseconds(start, volumes));
    for round in 0..snapshots {
        let start = Instant::now();
        for index in 0..volumes {
            let name = format!("s{index}-{round}");
            let params = json!({ "lvol_name": format!("lvs/v{index}"), "snapshot_name": name });
            plane.invoke("bdev_lvol_snapshot", params)?;
        }
        let all = volumes * (round + 2);
        println!("snapshots, to {all} volumes: {:.2} ms each", milliseconds(start, volumes));
    }
    plane.invoke("bdev_wait_for_examine", json!({}))?;
    let start = Instant::now();
    for index in 0..volumes.min(100) {
        plane.invoke("bdev_lvol_delete", json!({ "name": format!("lvs/s{index}-0") }))?;
    }
    println!("deletions: {:.2} ms each", milliseconds(start, volumes.min(100)));
    let start = Instant::now();
    let disk = registry.find("disk").ok_or("the disk is there")?;
    let module = disk.bdev().clone();
    registry.unregister("disk")?;
    println!("removal of the disk: {:.2} s", start.elapsed().as_secs_f64());
    disk.wait_closed(std::time::Duration::from_secs(60));
    let start = Instant::now();
    registry.register("disk", None, &[], module)?;
    plane.invoke("bdev_wait_for_examine", json!({}))?;
    println!("found again: {:.2} s", start.elapsed().as_secs_f64());
    plane.drain();
    drop(reactors);
    plane.stop();
    Ok(())
}
