//! SPDK's methods `accel_*`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use control::json::{Map, Value, json};
use control::{DecodeLog, Keyring, Method, Module, Parameters, RpcError};

use crate::{Accel, AccelOp, AccelOpStats, Engine, InjectType, Injection};

mod engines;
mod keys;

use keys::KeySource;
pub use keys::{NewCryptoKey, PreparedKey};

/// The framework as a [`Module`].
pub struct AccelModule {
    accel: Accel,
    keyring: Keyring,
    state: Mutex<AccelState>,
}

/// What `save_config` writes.
#[derive(Default)]
struct AccelState {
    options: Map<String, Value>,
    /// Operations that a call has assigned.
    assigned: BTreeMap<AccelOp, Engine>,
    /// Calls of `ioat_scan_accel_module`, by their addresses; of all PCI functions, empty.
    ioat_scans: BTreeSet<Vec<String>>,
    /// Where the secrets of keys are, by name of the key; one that is missing is in memory alone.
    sources: BTreeMap<String, KeySource>,
    /// Names of keys whose call has their check value.
    checked: BTreeSet<String>,
}

impl AccelModule {
    /// Of this framework, with secrets from this keyring.
    pub fn new(accel: Accel, keyring: Keyring) -> Arc<AccelModule> {
        let defaults = AccelOptions::from_object(Map::new(), &mut DecodeLog::default());
        let options = defaults.expect("every option has a default").to_object();
        let state = Mutex::new(AccelState { options, ..AccelState::default() });
        Arc::new(AccelModule { accel, keyring, state })
    }

    /// The framework.
    pub fn accel(&self) -> &Accel {
        &self.accel
    }

    fn state(&self) -> MutexGuard<'_, AccelState> {
        sync::lock(&self.state)
    }
}

impl Module for AccelModule {
    const NAME: &'static str = "accel";

    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<AccelModule>> {
        let mut methods = vec![
            Method::update("accel_set_driver", set_driver)
                .at_any_stage()
                .text("Selects a driver of chains of operations: only no driver is accepted.", "true")
                .errors(&[(RpcError::ENODEV, "there is no such driver")]),
            Method::update("accel_set_options", |module: &AccelModule, params: AccelOptions| {
                module.state().options = params.to_object();
                Ok(true)
            })
            .at_any_stage()
            .without_effect("operations are executed inline, so that the options are only stored"),
            Method::query("accel_get_stats", stats).text(
                "Reports how often operations were executed, and with how many bytes. What never was is left out.",
                "object with `operations`, an array of `opcode`, `module_name`, `executed`, `failed` and \
                 `num_bytes`; the members of sequences and retries are 0. With `per_core` `cores` has the \
                 operations of each core",
            ),
            Method::update("accel_error_inject_error", inject)
                .text(
                    "Has operations fail or give wrong results, as far as they are assigned to the engine `error`. \
                     Replaces what was injected into the operation before. Unlike SPDK's it is for every \
                     operation, and is not saved.",
                    "true",
                )
                .errors(&[(RpcError::EINVAL, "no engine executes the operation")]),
        ];
        methods.extend(engines::methods());
        methods.extend(keys::methods());
        methods
    }

    fn save(&self) -> Vec<Value> {
        let state = self.state();
        let mut calls = vec![json!({ "method": "accel_set_options", "params": state.options })];
        calls.extend(engines::saved(&state));
        drop(state);
        calls.extend(self.saved_keys());
        calls
    }

    fn report(&self) -> Value {
        json!({ "keys": self.accel.keys().list().len() })
    }
}

control::parameters! {
    struct AccelOptions {
        /// Small buffers in the cache of each thread
        small_cache_size: u32 = 128,
        /// Large buffers in the cache of each thread
        large_cache_size: u32 = 16,
        /// Tasks of each thread
        task_count: u32 = 2048,
        /// Sequences of each thread
        sequence_count: u32 = 2048,
        /// Buffers of each thread
        buf_count: u32 = 2048,
    }
}

control::parameters! {
    struct SetDriver {
        /// Name of the driver; empty for none
        name: Option<String>,
    }
}

fn set_driver(_: &AccelModule, params: SetDriver) -> Result<bool, RpcError> {
    match params.name.as_deref() {
        None | Some("") => Ok(true),
        Some(name) => Err(RpcError::new(RpcError::ENODEV, format!("no driver is called {name}"))),
    }
}

control::parameters! {
    struct GetStats {
        /// Report each core too; not in SPDK
        per_core: bool = false,
    }
}

fn stats(module: &AccelModule, params: GetStats) -> Result<Value, RpcError> {
    let operations = |counts: [AccelOpStats; AccelOp::COUNT]| {
        let counted = AccelOp::ALL.into_iter().zip(counts).filter(|(_, counts)| !counts.is_empty());
        let operation = |(op, counts): (AccelOp, AccelOpStats)| {
            json!({ "opcode": op.name(), "module_name": module.accel.engine(op).map(Engine::name),
                "executed": counts.executed, "failed": counts.failed, "num_bytes": counts.bytes })
        };
        Value::from(counted.map(operation).collect::<Vec<_>>())
    };
    let mut result = json!({ "sequence_executed": 0, "sequence_failed": 0, "sequence_outstanding": 0,
        "task_outstanding": 0, "operations": operations(module.accel.stats()), "retry_task": 0,
        "retry_sequence": 0, "retry_iobuf": 0, "retry_bufdesc": 0 });
    if params.per_core {
        let cores = module.accel.core_stats().into_iter();
        let cores = cores.map(|(core, counts)| json!({ "core": core, "operations": operations(counts) }));
        result["cores"] = cores.collect::<Vec<_>>().into();
    }
    Ok(result)
}

control::parameters! {
    struct InjectError {
        /// Operation
        opcode: String,
        /// What becomes of the operations that are hit
        r#type: InjectType,
        /// Most hits on each core; 0 is none
        count: u64 = u64::MAX,
        /// Every nth operation is hit; 0 is each one
        interval: u64 = 0,
        /// Error number of a failure, as a negative number in SPDK's way; 0 is -5
        errcode: i32 = 0,
    }
}

fn inject(module: &AccelModule, params: InjectError) -> Result<bool, RpcError> {
    let op = AccelOp::from_name(&params.opcode).ok_or_else(|| {
        RpcError::invalid_params(format!("opcode: no operation is called {}", params.opcode))
    })?;
    if !Engine::Error.supports(op) {
        let message = format!("opcode: no engine executes {}", op.name());
        return Err(RpcError::new(RpcError::EINVAL, message));
    }
    let errno = params.errcode.checked_abs().unwrap_or(i32::MAX);
    let (kind, count, interval) = (params.r#type, params.count, params.interval);
    module.accel.inject(op, Injection { kind, count, interval, errno });
    Ok(true)
}

#[cfg(test)]
mod tests;
