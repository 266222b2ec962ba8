//! RPC methods for bdevs of every module.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use block_io::{Op, ProtectionFlags};
use control::json::{Map, Value, json};
use control::{Method, NoParameters, Parameters, RpcError};

use super::BdevModule;
use crate::{BlockDevice, InfoValue, MetadataFormat};

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    vec![
        Method::query("bdev_get_bdevs", get_bdevs)
            .text("Describes block devices.", "array of descriptions, sorted by name")
            .errors(&[(RpcError::ENODEV, "there is no such bdev")]),
        Method::query("bdev_wait_for_examine", wait_for_examine)
            .text("Waits until every module has examined the block devices that appeared.", "true"),
        Method::query("bdev_examine", examine)
            .text("Has every module examine a device, whether it was examined before or not; also what was not read when it appeared: a device that a configuration uses, and stores of logical volumes in a volume.", "true")
            .errors(&[(RpcError::ENODEV, "there is no such bdev")]),
        Method::update("bdev_set_qos_limit", set_qos_limit)
            .text(
                "Limits reads and writes of a device, over all its users. A limit that is not given stays as it is.",
                "true",
            )
            .assigns(&["rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec"])
            .canonical(|bdevs: &BdevModule, params: &mut SetQosLimit| {
                params.name = bdevs.registry.name_of(&params.name);
                Ok(())
            })
            .errors(&[
                (RpcError::ENODEV, "there is no such bdev"),
                (RpcError::EINVAL, "no limit is given, or one is too large"),
            ]),
        Method::update("bdev_set_options", set_options)
            .at_any_stage()
            .text("Sets options of the block layer.", "true"),
    ]
}

control::parameters! {
    struct GetBdevs {
        /// Name, alias or UUID of one device; all without
        name: Option<String>,
        /// How long to wait for the device to appear, at most ten minutes
        timeout: u64 ["ms"] = 0,
    }
}

/// Polling interval of a wait.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Longest wait, so that a connection is not occupied for ever. SPDK's tools time out after a minute.
const WAIT_MAX: Duration = Duration::from_secs(600);

fn get_bdevs(bdevs: &BdevModule, params: GetBdevs) -> Result<Vec<Value>, RpcError> {
    let Some(name) = params.name else {
        return Ok(bdevs.registry.list().iter().map(describe).collect());
    };
    let end = Instant::now() + Duration::from_millis(params.timeout).min(WAIT_MAX);
    loop {
        match bdevs.find(&name) {
            Ok(device) => return Ok(vec![describe(&device)]),
            Err(error) if Instant::now() >= end => return Err(error),
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

fn wait_for_examine(bdevs: &BdevModule, _params: NoParameters) -> Result<bool, RpcError> {
    bdevs.examiner.wait();
    Ok(true)
}

control::parameters! {
    struct Examine {
        /// Name, alias or UUID
        name: String,
    }
}

fn examine(bdevs: &BdevModule, params: Examine) -> Result<bool, RpcError> {
    let device = bdevs.find(&params.name)?;
    bdevs.examiner.request(device.name());
    bdevs.examiner.wait_for(device.name());
    Ok(true)
}

control::parameters! {
    /// Of `bdev_set_qos_limit`; absent limits are not changed.
    pub(super) struct SetQosLimit {
        /// Name, alias or UUID
        name: String,
        /// Reads and writes a second; 0 is no limit
        rw_ios_per_sec: Option<u64>,
        /// Data of reads and writes a second; 0 is no limit
        rw_mbytes_per_sec: Option<u64> ["MiB"],
        /// Data of reads a second; 0 is no limit
        r_mbytes_per_sec: Option<u64> ["MiB"],
        /// Data of writes a second; 0 is no limit
        w_mbytes_per_sec: Option<u64> ["MiB"],
    }
}

/// Highest limit: tokens of a second are counted in 63 bits.
const RATE_MAX: u64 = 1 << 62;

impl SetQosLimit {
    /// The call that sets a device's present limits.
    pub(super) fn of(device: &BlockDevice) -> SetQosLimit {
        let limits = device.rate_limits();
        SetQosLimit {
            name: device.name().to_string(),
            rw_ios_per_sec: Some(limits.rw_ios),
            rw_mbytes_per_sec: Some(limits.rw_bytes >> 20),
            r_mbytes_per_sec: Some(limits.read_bytes >> 20),
            w_mbytes_per_sec: Some(limits.write_bytes >> 20),
        }
    }

    fn rates(&self) -> Value {
        let mut rates = self.to_object();
        rates.remove("name");
        Value::Object(rates)
    }
}

fn set_qos_limit(bdevs: &BdevModule, params: SetQosLimit) -> Result<bool, RpcError> {
    let device = bdevs.find(&params.name)?;
    let given =
        [params.rw_ios_per_sec, params.rw_mbytes_per_sec, params.r_mbytes_per_sec, params.w_mbytes_per_sec];
    if given.iter().all(Option::is_none) {
        let message =
            "give at least one of rw_ios_per_sec, rw_mbytes_per_sec, r_mbytes_per_sec, w_mbytes_per_sec";
        return Err(RpcError::new(RpcError::EINVAL, message));
    }
    let mut limits = device.rate_limits();
    let bytes = |mib: u64| mib.checked_mul(1 << 20);
    for (limit, wanted, name) in [
        (&mut limits.rw_ios, params.rw_ios_per_sec.map(Some), "rw_ios_per_sec"),
        (&mut limits.rw_bytes, params.rw_mbytes_per_sec.map(bytes), "rw_mbytes_per_sec"),
        (&mut limits.read_bytes, params.r_mbytes_per_sec.map(bytes), "r_mbytes_per_sec"),
        (&mut limits.write_bytes, params.w_mbytes_per_sec.map(bytes), "w_mbytes_per_sec"),
    ] {
        let Some(wanted) = wanted else { continue };
        let too_large = || RpcError::new(RpcError::EINVAL, format!("{name}: the limit is too large"));
        *limit = wanted.filter(|rate| *rate <= RATE_MAX).ok_or_else(too_large)?;
    }
    device.set_rate_limits(limits);
    Ok(true)
}

control::parameters! {
    struct SetOptions {
        /// Examine devices when they appear; without, `bdev_examine` does
        bdev_auto_examine: Option<bool>,
    }
    ignored("requests and buffers come from bounded pools of each core") {
        bdev_io_pool_size, bdev_io_cache_size, iobuf_small_cache_size, iobuf_large_cache_size
    }
}

fn set_options(bdevs: &BdevModule, params: SetOptions) -> Result<bool, RpcError> {
    if let Some(auto) = params.bdev_auto_examine {
        bdevs.auto_examine.store(auto, Ordering::Relaxed);
    }
    Ok(true)
}

/// SPDK's I/O types, with the operation that implements each; `None` is never supported.
const IO_TYPES: [(&str, Option<Op>); 22] = [
    ("read", Some(Op::Read)),
    ("write", Some(Op::Write)),
    ("unmap", Some(Op::Unmap)),
    ("flush", Some(Op::Flush)),
    ("reset", Some(Op::Reset)),
    ("nvme_admin", None),
    ("nvme_io", None),
    ("nvme_io_md", None),
    ("nvme_nssr", None),
    ("write_zeroes", Some(Op::WriteZeroes)),
    ("zcopy", None),
    ("get_zone_info", None),
    ("zone_management", None),
    ("zone_append", None),
    ("compare", Some(Op::Compare)),
    ("compare_and_write", Some(Op::Compare)),
    ("abort", Some(Op::Abort)),
    ("seek_hole", Some(Op::SeekHole)),
    ("seek_data", Some(Op::SeekData)),
    ("copy", Some(Op::Copy)),
    ("nvme_iov_md", None),
    ("write_uncorrectable", Some(Op::WriteUncorrectable)),
];

/// The UUID, unless it is the name already, and the aliases.
fn aliases(device: &BlockDevice) -> Vec<String> {
    let uuid = Some(device.uuid().to_string()).filter(|uuid| uuid != device.name());
    uuid.into_iter().chain(device.aliases().iter().cloned()).collect()
}

fn describe(device: &Arc<BlockDevice>) -> Value {
    let geometry = device.geometry();
    let supports = |op: Option<Op>| op.is_some_and(|op| device.supports(op));
    let io_types = IO_TYPES.iter().map(|(name, op)| (name.to_string(), Value::Bool(supports(*op))));
    let claim = device.claim();
    let mut description = json!({
        "name": device.name(),
        "aliases": aliases(device),
        "product_name": device.bdev().product_name(),
        "block_size": geometry.block_size,
        "num_blocks": geometry.blocks,
        "physical_block_size": geometry.physical_block_size,
        "preferred_write_alignment": 0,
        "preferred_write_granularity": 0,
        "optimal_write_size": 0,
        "preferred_unmap_alignment": 0,
        "preferred_unmap_granularity": 0,
        "uuid": device.uuid(),
        // Any: memory is of the core that uses it.
        "numa_id": -1,
        // Not SPDK's: what a write survives, and whether it is to be flushed first.
        "durability": device.durability().name(),
        "write_cache": geometry.write_cache,
        "assigned_rate_limits": SetQosLimit::of(device).rates(),
        "claimed": claim.is_some(),
        "zoned": false,
        "supported_io_types": io_types.collect::<Map<_, _>>(),
        "driver_specific": object(&device.bdev().driver_specific()),
    });
    if geometry.write_unit_blocks > 1 {
        let unit = json!(geometry.write_unit_blocks);
        description["preferred_write_alignment"] = unit.clone();
        description["preferred_write_granularity"] = unit.clone();
        description["optimal_write_size"] = unit.clone();
        // Not SPDK's: other writes fail.
        description["write_unit_size"] = unit;
    }
    describe_metadata(&geometry.metadata, &mut description);
    if let Some((kind, holders)) = claim {
        description["claim_type"] = json!(kind.name());
        // Not SPDK's.
        description["claimed_by"] = json!(holders.join(", "));
    }
    description
}

/// Adds what SPDK reports of a device with metadata.
fn describe_metadata(format: &MetadataFormat, description: &mut Value) {
    if format.bytes == 0 {
        return;
    }
    description["md_size"] = json!(format.bytes);
    description["md_interleave"] = json!(format.extended);
    let kind = format.protection.map_or(0, |protection| protection.kind.to_wire());
    description["dif_type"] = json!(kind);
    if let Some(protection) = format.protection {
        let checks = format.checks();
        description["dif_is_head_of_md"] = json!(protection.first);
        description["enabled_dif_check_types"] = json!({
            "reftag": checks.contains(ProtectionFlags::CHECK_REFERENCE_TAG),
            "apptag": checks.contains(ProtectionFlags::CHECK_APPLICATION_TAG),
            "guard": checks.contains(ProtectionFlags::CHECK_GUARD),
        });
        description["dif_pi_format"] = json!(protection.guard.to_wire());
    }
}

fn object(details: &[(&'static str, InfoValue)]) -> Value {
    Value::Object(details.iter().map(|(name, detail)| (name.to_string(), value(detail))).collect())
}

fn value(detail: &InfoValue) -> Value {
    match detail {
        InfoValue::Null => Value::Null,
        InfoValue::Bool(yes) => json!(yes),
        InfoValue::Number(number) => json!(number),
        InfoValue::Text(text) => json!(text),
        InfoValue::List(list) => list.iter().map(value).collect(),
        InfoValue::Object(details) => object(details),
    }
}
