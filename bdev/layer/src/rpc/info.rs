//! RPC methods for bdevs of every module.

use std::sync::Arc;
use std::time::{Duration, Instant};

use block_io::Op;
use control::json::{Map, Value, json};
use control::{Method, NoParameters, RpcError};

use super::BdevModule;
use crate::{BlockDevice, InfoValue};

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    vec![
        Method::query("bdev_get_bdevs", get_bdevs)
            .text("Describes block devices.", "array of descriptions, sorted by name")
            .errors(&[(RpcError::ENODEV, "there is no such bdev")]),
        Method::query("bdev_wait_for_examine", wait_for_examine)
            .text("Waits until every module has examined the block devices that appeared.", "true"),
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

/// SPDK's I/O types, with the operation that implements each; `None` is never supported.
const IO_TYPES: [(&str, Option<Op>); 20] = [
    ("read", Some(Op::Read)),
    ("write", Some(Op::Write)),
    ("unmap", Some(Op::Unmap)),
    ("flush", Some(Op::Flush)),
    ("reset", Some(Op::Reset)),
    ("nvme_admin", None),
    ("nvme_io", None),
    ("nvme_io_md", None),
    ("write_zeroes", Some(Op::WriteZeroes)),
    ("zcopy", None),
    ("get_zone_info", None),
    ("zone_management", None),
    ("zone_append", None),
    ("compare", None),
    ("compare_and_write", None),
    ("abort", None),
    ("seek_hole", None),
    ("seek_data", None),
    ("copy", None),
    ("nvme_iov_md", None),
];

fn describe(device: &Arc<BlockDevice>) -> Value {
    let geometry = device.geometry();
    // The bdev layer implements resets where a module does not.
    let supports = |op: Option<Op>| op.is_some_and(|op| op == Op::Reset || device.bdev().supports(op));
    let io_types = IO_TYPES.iter().map(|(name, op)| (name.to_string(), Value::Bool(supports(*op))));
    let claim = device.claimed_by();
    let mut description = json!({
        "name": device.name(),
        "aliases": device.aliases(),
        "product_name": device.bdev().product_name(),
        "block_size": geometry.block_size,
        "num_blocks": geometry.blocks,
        "physical_block_size": geometry.physical_block_size,
        "uuid": device.uuid(),
        "assigned_rate_limits": {
            "rw_ios_per_sec": 0,
            "rw_mbytes_per_sec": 0,
            "r_mbytes_per_sec": 0,
            "w_mbytes_per_sec": 0,
        },
        "claimed": claim.is_some(),
        "zoned": false,
        "supported_io_types": io_types.collect::<Map<_, _>>(),
        "driver_specific": object(&device.bdev().driver_specific()),
    });
    if let Some(holder) = claim {
        description["claim_type"] = json!("exclusive_write");
        description["claimed_by"] = json!(holder);
    }
    description
}

fn object(details: &[(&'static str, InfoValue)]) -> Value {
    Value::Object(details.iter().map(|(name, detail)| (name.to_string(), value(detail))).collect())
}

fn value(detail: &InfoValue) -> Value {
    match detail {
        InfoValue::Bool(yes) => json!(yes),
        InfoValue::Number(number) => json!(number),
        InfoValue::Text(text) => json!(text),
        InfoValue::List(list) => list.iter().map(value).collect(),
        InfoValue::Object(details) => object(details),
    }
}
