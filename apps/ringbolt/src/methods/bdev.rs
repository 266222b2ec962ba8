//! Methods about bdevs of any kind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::bdev::{Device, Value as Detail};
use ring::Op;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Table;
use super::parameters::Nothing;
use crate::rpc::RpcError;
use crate::state::App;

pub(super) fn add(table: &mut Table) {
    table.read("bdev_get_bdevs", get_bdevs);
    table.read("bdev_wait_for_examine", wait_for_examine);
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetBdevs {
    name: Option<String>,
    /// Milliseconds to wait for the device to appear.
    #[serde(default)]
    timeout: u64,
}

/// How often a wait looks again.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Longest wait, so that a connection is not held for ever: SPDK's tools give up after a minute.
const WAIT_MAX: Duration = Duration::from_secs(600);

fn get_bdevs(app: &App, params: GetBdevs) -> Result<Vec<Value>, RpcError> {
    let Some(name) = params.name else {
        return Ok(app.registry.list().iter().map(describe).collect());
    };
    let end = Instant::now() + Duration::from_millis(params.timeout).min(WAIT_MAX);
    loop {
        match find(app, &name) {
            Ok(device) => return Ok(vec![describe(&device)]),
            Err(error) if Instant::now() >= end => return Err(error),
            Err(_) => std::thread::sleep(LOOK_INTERVAL),
        }
    }
}

/// A device by name, alias or UUID.
pub(super) fn find(app: &App, name: &str) -> Result<Arc<Device>, RpcError> {
    let missing = || RpcError::new(RpcError::ENODEV, format!("no bdev is called {name}"));
    app.registry.find(name).ok_or_else(missing)
}

/// Nothing is examined: a device is there when its method returns.
fn wait_for_examine(_app: &App, _params: Nothing) -> Result<bool, RpcError> {
    Ok(true)
}

/// SPDK's names of the operations that ours stand for; the others are never supported.
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

fn describe(device: &Arc<Device>) -> Value {
    let geometry = device.geometry();
    // The layer answers resets itself where a module does not.
    let supports = |op: Option<Op>| op.is_some_and(|op| op == Op::Reset || device.bdev().supports(op));
    let io_types = IO_TYPES.iter().map(|(name, op)| (name.to_string(), Value::Bool(supports(*op))));
    let claim = device.claimed_by();
    let mut described = json!({
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
        described["claim_type"] = json!("exclusive_write");
        described["claimed_by"] = json!(holder);
    }
    described
}

fn object(details: &[(&'static str, Detail)]) -> Value {
    Value::Object(details.iter().map(|(name, detail)| (name.to_string(), value(detail))).collect())
}

fn value(detail: &Detail) -> Value {
    match detail {
        Detail::Bool(yes) => json!(yes),
        Detail::Number(number) => json!(number),
        Detail::Text(text) => json!(text),
        Detail::List(list) => list.iter().map(value).collect(),
        Detail::Object(details) => object(details),
    }
}
