//! Engines: which there are, what they execute, and the scan for devices.

use control::json::{Value, json};
use control::{Method, NoParameters, RpcError};
use ioat::{IoatAddress, IoatOpenError};

use super::{AccelModule, AccelState};
use crate::{AccelOp, Engine};

pub(super) fn methods() -> Vec<Method<AccelModule>> {
    vec![
        Method::query("accel_get_opc_assignments", |module: &AccelModule, _: NoParameters| {
            let assigned = AccelOp::ALL
                .into_iter()
                .filter_map(|op| Some((op.name().to_string(), Value::from(module.accel.engine(op)?.name()))));
            Ok(Value::Object(assigned.collect()))
        })
        .text("Lists the operations with the engines that execute them.", "object of engines by operation"),
        Method::query("accel_get_module_info", |module: &AccelModule, _: NoParameters| {
            let engines = Engine::ALL.into_iter().filter(|engine| module.accel.is_enabled(*engine));
            Ok(engines
                .map(|engine| {
                    let ops = AccelOp::ALL.into_iter().filter(|op| engine.supports(*op)).map(AccelOp::name);
                    json!({ "module": engine.name(), "supported ops": ops.collect::<Vec<_>>() })
                })
                .collect::<Vec<_>>())
        })
        .text("Lists the engines.", "array of engines with `module` and `supported ops`"),
        Method::update("accel_assign_opc", assign)
            .at_any_stage()
            .text(
                "Has an engine execute an operation. Unlike SPDK's it can be called at any time, and is \
                 in force at once.",
                "true",
            )
            .errors(&[(
                RpcError::INVALID_PARAMS,
                "no such operation, or no engine of that name that is enabled executes it",
            )]),
        Method::prepared_update("ioat_scan_accel_module", prepare_scan, scanned)
            .at_any_stage()
            .canonical(|_, params: &mut ScanIoat| {
                *params = ScanIoat { addresses: canonical(params)?.map(|addresses| texts(&addresses)) };
                Ok(())
            })
            .text(
                "Enables the engine `ioat`, and has it execute the operations that it can, unless they are \
                 assigned already. It opens the functions of Intel's DMA engine that are bound to `vfio-pci` \
                 or `uio_pci_generic`. Unlike SPDK's it can be called at any time, and again: functions that \
                 have failed are opened anew.",
                "true",
            )
            .errors(&[
                (RpcError::INVALID_PARAMS, "an address is none"),
                (RpcError::ENODEV, "one of the addresses cannot be opened; the message says why"),
            ]),
        Method::query("ioat_get_channels", channels).text(
            "Lists the functions of the engine `ioat`, one channel each. Not in SPDK.",
            "array of functions with `address`, `state` (`free`, `in use`, `closed`), `core`, `failure` if \
             closed, `executed` and `num_bytes` of the device, `failed` (what the CPU has executed instead, \
             or has failed), and `resets`",
        ),
    ]
}

/// What `save_config` writes: scans before the assignments that need them.
pub(super) fn saved(state: &AccelState) -> Vec<Value> {
    let scan = |addresses: &Vec<String>| match addresses.is_empty() {
        true => json!({ "method": "ioat_scan_accel_module" }),
        false => json!({ "method": "ioat_scan_accel_module", "params": { "addresses": addresses } }),
    };
    let assign = |(op, engine): (&AccelOp, &Engine)| {
        let params = json!({ "opname": op.name(), "module": engine.name() });
        json!({ "method": "accel_assign_opc", "params": params })
    };
    state.ioat_scans.iter().map(scan).chain(state.assigned.iter().map(assign)).collect()
}

control::parameters! {
    struct AssignOp {
        /// Operation, as in `accel_get_opc_assignments`
        opname: String,
        /// Engine: `software`, `error`, or `ioat` after `ioat_scan_accel_module`
        module: String,
    }
}

fn assign(module: &AccelModule, params: AssignOp) -> Result<bool, RpcError> {
    let op = AccelOp::from_name(&params.opname).ok_or_else(|| {
        RpcError::invalid_params(format!("opname: no operation is called {}", params.opname))
    })?;
    let engine = Engine::from_name(&params.module)
        .ok_or_else(|| RpcError::invalid_params(format!("module: no engine is called {}", params.module)))?;
    if !module.accel.is_enabled(engine) {
        let message = "module: ioat is enabled by ioat_scan_accel_module, which was not called";
        return Err(RpcError::invalid_params(message));
    }
    if !module.accel.assign(op, engine) {
        let message = format!("module: {} does not execute {}", engine.name(), op.name());
        return Err(RpcError::invalid_params(message));
    }
    module.state().assigned.insert(op, engine);
    Ok(true)
}

control::parameters! {
    struct ScanIoat {
        /// Functions to open: PCI addresses, or `vfio-user:PATH` of a device that another process serves; all
        /// PCI functions that are bound for user space without; not in SPDK
        addresses: Option<Vec<String>>,
    }
}

/// The addresses of a scan, each once, in their order.
fn canonical(params: &ScanIoat) -> Result<Option<Vec<IoatAddress>>, RpcError> {
    let Some(addresses) = &params.addresses else { return Ok(None) };
    let parsed = addresses.iter().map(|address| address.parse::<IoatAddress>());
    let mut parsed: Vec<IoatAddress> = parsed
        .collect::<Result<_, _>>()
        .map_err(|error| RpcError::invalid_params(format!("addresses: {error}")))?;
    if parsed.is_empty() {
        return Err(RpcError::invalid_params("addresses: there is none; leave the parameter out for all"));
    }
    parsed.sort();
    parsed.dedup();
    Ok(Some(parsed))
}

fn texts(addresses: &[IoatAddress]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}

fn prepare_scan(module: &AccelModule, params: ScanIoat) -> Result<Vec<IoatAddress>, RpcError> {
    let addresses = canonical(&params)?.unwrap_or_default();
    let failed = |error: IoatOpenError| RpcError::new(RpcError::ENODEV, error.to_string());
    let opened = module.accel.scan_ioat(&addresses).map_err(failed)?;
    log::info!(target: "ioat", "{opened} functions were opened");
    if module.accel.ioat_channels().is_empty() {
        log::warn!(
            target: "ioat",
            "there is no I/OAT function that is bound to vfio-pci or uio_pci_generic, see `ringbolt nvme \
             bind`: the CPU executes all operations"
        );
    }
    Ok(addresses)
}

fn scanned(module: &AccelModule, addresses: Vec<IoatAddress>) -> Result<bool, RpcError> {
    let mut state = module.state();
    let ops = AccelOp::ALL.into_iter().filter(|op| Engine::Ioat.supports(*op));
    for op in ops.filter(|op| !state.assigned.contains_key(op)) {
        module.accel.assign(op, Engine::Ioat);
    }
    state.ioat_scans.insert(texts(&addresses));
    Ok(true)
}

fn channels(module: &AccelModule, _: NoParameters) -> Result<Vec<Value>, RpcError> {
    let describe = |info: crate::IoatChannelInfo| {
        let state = match (&info.failure, info.core) {
            (Some(_), _) => "closed",
            (None, Some(_)) => "in use",
            (None, None) => "free",
        };
        let mut value = json!({ "address": info.address, "state": state, "executed": info.executed,
            "num_bytes": info.bytes, "failed": info.failed, "resets": info.resets });
        if let Some(core) = info.core {
            value["core"] = core.into();
        }
        if let Some(failure) = info.failure {
            value["failure"] = failure.into();
        }
        value
    };
    Ok(module.accel.ioat_channels().into_iter().map(describe).collect())
}
