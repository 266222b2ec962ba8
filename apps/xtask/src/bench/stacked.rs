//! What a layer costs: a stacked bdev beside what is below it, and an operation of the acceleration framework
//! beside the same without it. One core, in turn.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use wire_gpt::{ENTRY_BYTES, GptEntry, GptHeader, GptTable, NAME_UNITS, PartitionType, ProtectiveMbr};

use super::load::{IoPattern, perf, ramp, second_core, timed, values};
use super::metric::BenchMetric;
use super::process::describe;
use super::{RunContext, RunOutcome};

/// The layer that is measured, and so what it is compared with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StackedLayer {
    /// The framework's copy, beside one without it.
    AccelCopy,
    /// A crypto bdev on a null device, beside the cipher alone.
    Crypto,
    /// Two null devices limited to [`MEMBER_IOPS`] each, beside one of them twice.
    Raid0,
    Concat,
    /// The same with reads, which all members serve.
    Raid1,
    /// A part of a memory device, beside the device.
    Split,
    /// A partition of a file in memory, beside the file.
    Gpt,
}

/// Rate limit of a member, which a core can serve twice with room to spare.
const MEMBER_IOPS: u64 = 200_000;
const FILE_BLOCKS: u64 = (64 << 20) / BLOCK_BYTES as u64;
const BLOCK_BYTES: u32 = 512;
/// Entries of the partition table; the specification wants 16 KiB of them.
const TABLE_ENTRIES: u32 = 128;

/// What is loaded: device, calls of the configuration, and what its rate counts for.
struct Loaded {
    device: String,
    calls: Vec<Value>,
    /// How often the base counts: of members, one is measured.
    times: f64,
}

impl Loaded {
    fn new(device: &str, calls: Vec<Value>) -> Loaded {
        Loaded { device: device.to_string(), calls, times: 1.0 }
    }
}

/// Measures the layer and its base; which is the first changes from run to run.
pub(super) fn compare(
    context: &RunContext<'_>,
    layer: StackedLayer,
    pattern: &IoPattern,
) -> anyhow::Result<RunOutcome> {
    // Memory, not a disk: the directory of benchmarks may be on one.
    let file = Path::new("/dev/shm").join(format!("ringbolt-bench-{}.gpt", std::process::id()));
    let _removed = RemovedFile(&file);
    if layer == StackedLayer::Gpt {
        write_partition(&file).with_context(|| file.display().to_string())?;
    }
    let both = loaded(layer, &file, pattern.rw.ends_with("read"));
    let mut results = [None, None];
    let mut commands = Vec::new();
    for turn in 0..2 {
        let which = (turn + context.run as usize) % 2;
        let (result, command) = measure(context, &both[which], pattern)?;
        results[which] = Some(result);
        commands.push(command);
    }
    let [Some(mut found), Some(base)] = results else { anyhow::bail!("one of both was not measured") };
    let iops = |values: &std::collections::BTreeMap<BenchMetric, f64>| {
        values.get(&BenchMetric::Iops).copied().context("no rate in the result")
    };
    let (ours, below) = (iops(&found)?, iops(&base)? * both[1].times);
    ensure!(below > 0.0, "{} did no I/O", both[1].device);
    found.extend([(BenchMetric::BaseIops, below), (BenchMetric::BaseRatio, ours / below)]);
    Ok(RunOutcome::measured(found, commands))
}

fn measure(
    context: &RunContext<'_>,
    loaded: &Loaded,
    pattern: &IoPattern,
) -> anyhow::Result<(std::collections::BTreeMap<BenchMetric, f64>, String)> {
    let mut command: Command = timed(context, &loaded.device, pattern, ramp(context));
    command.arg(format!("--cpus_allowed={}", second_core(context)));
    if !loaded.calls.is_empty() {
        let config = context.directory.file("stacked.json");
        let document = json!({ "subsystems": [{ "subsystem": "bdev", "config": loaded.calls }] });
        std::fs::write(&config, document.to_string())?;
        command.arg(format!("--config={}", config.display()));
    }
    let result = perf(context, &mut command)?;
    Ok((values(&result)?, describe(&command)))
}

/// The layer, and what is below it.
fn loaded(layer: StackedLayer, file: &Path, reads: bool) -> [Loaded; 2] {
    match layer {
        StackedLayer::AccelCopy => ["accel:copy", "accel:memcpy"].map(|uri| Loaded::new(uri, Vec::new())),
        StackedLayer::Crypto => {
            let digits = |first: usize| (0..32).map(|at| format!("{:02x}", first + at)).collect::<String>();
            let key = json!({ "cipher": "AES_XTS", "name": "k", "key": digits(0), "key2": digits(100) });
            let calls = vec![
                call("accel_crypto_key_create", key),
                call("bdev_null_create", json!({ "name": "N0", "num_blocks": 1 << 18, "block_size": 4096 })),
                call("bdev_crypto_create", json!({ "base_bdev_name": "N0", "name": "C0", "key_name": "k" })),
            ];
            let op = if reads { "decrypt" } else { "encrypt" };
            let floor = format!("accel:{op}?size=4k&block=4k");
            [Loaded::new("C0", calls), Loaded::new(&floor, Vec::new())]
        }
        StackedLayer::Raid0 => array("raid0", Some(64)),
        StackedLayer::Concat => array("concat", Some(64)),
        StackedLayer::Raid1 => array("raid1", None),
        StackedLayer::Split => {
            let base = json!({ "name": "M0", "num_blocks": 1 << 17, "block_size": 512 });
            let mut calls = vec![call("bdev_malloc_create", base)];
            let below = Loaded::new("M0", calls.clone());
            calls.push(call("bdev_split_create", json!({ "base_bdev": "M0", "split_count": 1 })));
            [Loaded::new("M0p0", calls), below]
        }
        StackedLayer::Gpt => {
            let base = json!({ "name": "F0", "filename": file, "block_size": BLOCK_BYTES });
            let mut calls = vec![call("bdev_uring_create", base)];
            let below = Loaded::new("F0", calls.clone());
            calls.push(call("bdev_gpt_create", json!({ "base_bdev_name": "F0", "part_type": "linux" })));
            [Loaded::new("F0p1", calls), below]
        }
    }
}

/// An array of two limited members, and one of them, which counts twice.
fn array(level: &str, strip_size_kb: Option<u32>) -> [Loaded; 2] {
    let mut calls = Vec::new();
    for name in ["N0", "N1"] {
        calls.push(call(
            "bdev_null_create",
            json!({ "name": name, "num_blocks": 1 << 21, "block_size": 512 }),
        ));
        calls.push(call("bdev_set_qos_limit", json!({ "name": name, "rw_ios_per_sec": MEMBER_IOPS })));
    }
    let below = Loaded { times: 2.0, ..Loaded::new("N0", calls.clone()) };
    let mut params = json!({ "name": "R0", "raid_level": level, "base_bdevs": ["N0", "N1"] });
    if let Some(strip) = strip_size_kb {
        params["strip_size_kb"] = json!(strip);
    }
    calls.push(call("bdev_raid_create", params));
    [Loaded::new("R0", calls), below]
}

fn call(method: &str, params: Value) -> Value {
    json!({ "method": method, "params": params })
}

/// A file with a partition table, both copies of it, and a partition of all usable blocks.
fn write_partition(path: &Path) -> anyhow::Result<()> {
    let array_blocks = u64::from(TABLE_ENTRIES) * ENTRY_BYTES as u64 / u64::from(BLOCK_BYTES);
    // Aligned as tools align it.
    let (first, last) = (2048, FILE_BLOCKS - 2 - array_blocks);
    let linux = PartitionType::parse("linux").context("no type of that name")?.0;
    let entry = GptEntry {
        type_guid: linux,
        unique_guid: PartitionType::SPDK.0,
        first_lba: first,
        last_lba: last,
        attributes: 0,
        name: [0; NAME_UNITS],
    };
    let header = |lba: u64, alternate_lba: u64, entries_lba: u64| GptHeader {
        lba,
        alternate_lba,
        first_usable_lba: 2 + array_blocks,
        last_usable_lba: last,
        disk_guid: PartitionType::SPDK.0,
        entries_lba,
        entry_count: TABLE_ENTRIES,
        entry_bytes: ENTRY_BYTES as u32,
        entries_crc: 0,
    };
    let mut file = std::fs::File::create(path)?;
    // Written, not a hole: reads of holes are of one page.
    let zeroes = vec![0; 1 << 20];
    for _ in 0..(FILE_BLOCKS * u64::from(BLOCK_BYTES)) >> 20 {
        file.write_all(&zeroes)?;
    }
    let mut put = |lba: u64, bytes: &[u8]| {
        file.seek(SeekFrom::Start(lba * u64::from(BLOCK_BYTES)))?;
        file.write_all(bytes)
    };
    put(0, &ProtectiveMbr::of(FILE_BLOCKS).encode())?;
    let backup = FILE_BLOCKS - 1;
    for header in [header(1, backup, 2), header(backup, 1, backup - array_blocks)] {
        let (header, array) = GptTable { header, entries: vec![(0, entry)] }.encode();
        put(header.lba, &header.encode())?;
        put(header.entries_lba, &array)?;
    }
    Ok(())
}

/// A file that goes at the end of the run, if there is one.
struct RemovedFile<'a>(&'a Path);

impl Drop for RemovedFile<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_the_gpt_row_has_a_partition_of_all_usable_blocks() {
        let path = std::env::temp_dir().join(format!("ringbolt-bench-test-{}.gpt", std::process::id()));
        let _removed = RemovedFile(&path);
        write_partition(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let block = |lba: u64| &bytes[(lba * u64::from(BLOCK_BYTES)) as usize..];
        assert!(ProtectiveMbr::decode(block(0)).unwrap().covers(FILE_BLOCKS));
        for lba in [1, FILE_BLOCKS - 1] {
            let header = GptHeader::decode(block(lba)).unwrap();
            header.check_on(lba, FILE_BLOCKS, BLOCK_BYTES).unwrap();
            let table = GptTable::decode(&header, block(header.entries_lba)).unwrap();
            assert_eq!(table.valid_entries().0.len(), 1, "of the header in block {lba}");
        }
    }

    #[test]
    fn members_count_twice_and_others_once() {
        let file = Path::new("/x");
        for layer in [StackedLayer::Raid0, StackedLayer::Concat, StackedLayer::Raid1] {
            let [array, member] = loaded(layer, file, true);
            assert_eq!((array.times, member.times), (1.0, 2.0));
            assert_eq!(array.calls.len(), member.calls.len() + 1);
        }
        let [crypto, floor] = loaded(StackedLayer::Crypto, file, false);
        assert_eq!((crypto.device.as_str(), floor.device.as_str()), ("C0", "accel:encrypt?size=4k&block=4k"));
    }
}
