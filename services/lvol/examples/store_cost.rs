//! The cost of a large store: making its volumes and snapshots, listing them, loading it.
//!
//! `store_cost make FILE TIB VOLUMES SNAPSHOTS` makes a sparse file with a store with clusters of 1 MiB and
//! thick volumes that fill nine tenths of it (thin ones if there are to be snapshots), and ends without
//! unloading, as a kill would. `store_cost load FILE` loads it as it is. `store_cost foreign FILE` removes
//! from a store that is not clean what ours record ahead, as if another program had written it. Files of 16
//! TiB and more need a file system such as tmpfs or XFS.

use std::os::unix::fs::FileExt;
use std::time::Instant;

use bdev::Registry;
use bdev::rpc::BdevModule;
use control::ControlPlane;
use control::json::{Value, json};
use reactor::{ReactorConfig, Reactors};

const PAGE_BYTES: usize = 4096;

/// Resident memory of this process in MiB.
fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0) / 1024
}

fn length(list: &Value) -> usize {
    list.as_array().map_or(0, Vec::len)
}

/// Lists everything, and prints how long that takes.
fn list(plane: &ControlPlane) -> Result<(), Box<dyn std::error::Error>> {
    for method in ["bdev_lvol_get_lvstores", "bdev_lvol_get_lvols", "bdev_get_bdevs"] {
        let start = Instant::now();
        let found = plane.invoke(method, json!({}))?;
        println!("{method}: {} in {:.3} s", length(&found), start.elapsed().as_secs_f64());
        if length(&found) == 0 {
            return Err("no store was loaded".into());
        }
    }
    println!("resident: {} MiB", resident_mib());
    Ok(())
}

fn make(
    plane: &ControlPlane,
    tib: u64,
    volumes: u64,
    snapshots: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let params = json!({
        "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": 1 << 20, "clear_method": "none",
        // A page for each cluster, which is the default, is for a volume a cluster: 64 GiB, which are
        // written.
        "num_md_pages_per_cluster_ratio": 1,
    });
    let start = Instant::now();
    plane.invoke("bdev_lvol_create_lvstore", params)?;
    println!("store: {:.3} s", start.elapsed().as_secs_f64());
    let mib = (tib << 20) * 9 / 10 / volumes.max(1);
    let mut start = Instant::now();
    for index in 0..volumes {
        let params = json!({
            "lvol_name": format!("v{index}"), "size_in_mib": mib, "lvs_name": "lvs",
            "thin_provision": snapshots > 0, "clear_method": "none",
        });
        plane.invoke("bdev_lvol_create", params)?;
        if (index + 1) % 100 == 0 {
            println!("volumes up to {}: {:.2} ms each", index + 1, start.elapsed().as_secs_f64() * 10.0);
            start = Instant::now();
        }
    }
    for round in 0..snapshots {
        let start = Instant::now();
        for index in 0..volumes {
            let params = json!({
                "lvol_name": format!("lvs/v{index}"), "snapshot_name": format!("v{index}s{round}"),
            });
            plane.invoke("bdev_lvol_snapshot", params)?;
        }
        if round % 10 == 0 || round + 1 == snapshots {
            let each = start.elapsed().as_secs_f64() * 1000.0 / volumes.max(1) as f64;
            println!("snapshot {} of each: {each:.2} ms each, {} MiB", round + 1, resident_mib());
        }
    }
    list(plane)
}

/// Writes zeroes over the mask of used pages, in which a store of ours that is not clean has the groups of
/// pages that may be in use, and over the copies of pages in the other masks.
fn make_foreign(file: &str) -> Result<(), Box<dyn std::error::Error>> {
    let file = std::fs::File::options().read(true).write(true).open(file)?;
    let mut page = [0; PAGE_BYTES];
    file.read_exact_at(&mut page, 0)?;
    let super_block = wire_blob::SuperBlock::decode(&page)?;
    let masks = [Some(super_block.used_pages), Some(super_block.used_clusters), super_block.used_blob_ids];
    for mask in masks.into_iter().flatten() {
        let page_bytes = u64::from(super_block.metadata_page_bytes);
        let zeroes = vec![0; mask.pages as usize * page_bytes as usize];
        file.write_all_at(&zeroes, u64::from(mask.start) * page_bytes)?;
    }
    let (read, _) = read_in_order(&file, &super_block, |_, _| 0)?;
    // The least that the format demands: a page is one if its CRC is right, and what it says must be known.
    let (parsed, clusters) = read_in_order(&file, &super_block, |index, page| {
        let page = wire_blob::MetadataPage::decode(page, index).ok();
        let descriptors = page.into_iter().flat_map(|page| page.descriptors);
        let clusters = descriptors.map(|descriptor| match descriptor {
            wire_blob::MetadataDescriptor::ExtentPage(extents) => extents.clusters.len(),
            _ => 0,
        });
        clusters.sum()
    })?;
    let mib = (super_block.metadata.pages as usize * super_block.metadata_page_bytes as usize) >> 20;
    println!("{mib} MiB of metadata were read in order in {read:.3} s");
    println!("they were read in order and decoded in {parsed:.3} s: {clusters} clusters");
    Ok(())
}

/// Reads the metadata in order, and hands each page that has something to `page`. Returns the seconds that it
/// took, and the sum of what `page` has returned.
fn read_in_order(
    file: &std::fs::File,
    super_block: &wire_blob::SuperBlock,
    page: impl Fn(u32, &[u8]) -> usize,
) -> std::io::Result<(f64, usize)> {
    let page_bytes = super_block.metadata_page_bytes as usize;
    let (mut at, end) = (0, super_block.metadata.pages as usize * page_bytes);
    let mut bytes = vec![0; 1 << 20];
    let (start, mut sum) = (Instant::now(), 0);
    while at < end {
        let count = bytes.len().min(end - at);
        let offset = u64::from(super_block.metadata.start) * page_bytes as u64;
        file.read_exact_at(&mut bytes[..count], offset + at as u64)?;
        for (index, content) in bytes[..count].chunks_exact(page_bytes).enumerate() {
            // The index of a page has 32 bits.
            sum += page((at / page_bytes + index) as u32, content);
        }
        at += count;
    }
    Ok((start.elapsed().as_secs_f64(), sum))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |at: usize| arguments.get(at).map_or(Ok(0), |text| text.parse::<u64>());
    let [command, path, ..] = arguments[..] else { return Err("make, load or foreign, and a file".into()) };
    if command == "foreign" {
        return make_foreign(path);
    }
    let reactors = Reactors::start(&ReactorConfig::default())?;
    let registry = Registry::new();
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let lvols = lvol::LvolModule::new(registry.clone(), reactors.handles());
    let plane = builder.module(&bdevs).module(&lvols).start(None)?;
    if command == "make" {
        std::fs::File::create(path)?.set_len(number(2)? << 40)?;
    }
    let start = Instant::now();
    let params = json!({ "name": "disk", "filename": path, "block_size": 512 });
    plane.invoke("bdev_aio_create", params)?;
    plane.invoke("bdev_wait_for_examine", json!({}))?;
    if command == "make" {
        make(&plane, number(2)?, number(3)?, number(4)?)?;
        // Nothing is unloaded.
        std::process::exit(0);
    }
    println!("loaded: {:.3} s", start.elapsed().as_secs_f64());
    list(&plane)?;
    let start = Instant::now();
    plane.drain();
    drop(reactors);
    plane.stop();
    println!("unloaded: {:.3} s", start.elapsed().as_secs_f64());
    Ok(())
}
