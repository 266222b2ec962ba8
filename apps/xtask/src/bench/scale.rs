//! A target with a large configuration.

use std::time::Instant;

use anyhow::bail;
use serde_json::json;

use super::metric::BenchMetric;
use super::server::{
    SUBSYSTEM_BDEVS, TargetNamespaces, TargetServer, TargetTransport, subsystem_bdev, subsystem_nqn,
};
use super::{RunContext, RunOutcome};

const SUBSYSTEMS: u32 = 1000;

/// From exec until 10,000 devices and namespaces in 1,000 subsystems can be reached; the memory that each of these
/// devices takes; and the mean time of a call that removes a device, with its namespace, or a subsystem.
pub(super) fn scale(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let Some(core) = context.cores.first() else { bail!("no core to run on") };
    let core = core.to_string();
    let start = |subsystems| {
        let namespaces = TargetNamespaces::InSubsystems(subsystems);
        TargetServer::start(context, &core, "adaptive", &namespaces, TargetTransport::Tcp)
    };
    let empty = start(0)?;
    let empty_mib = empty.resident_mib()?;
    empty.end()?;

    let server = start(SUBSYSTEMS)?;
    let bdevs = f64::from(SUBSYSTEMS * SUBSYSTEM_BDEVS);
    let bdev_kib = (server.resident_mib()? - empty_mib) * 1024.0 / bdevs;

    let mut rpc = server.rpc(context)?;
    let begun = Instant::now();
    for subsystem in 0..SUBSYSTEMS {
        for number in 0..SUBSYSTEM_BDEVS {
            rpc.call("bdev_null_delete", &json!({ "name": subsystem_bdev(subsystem, number) }))?;
        }
        rpc.call("nvmf_delete_subsystem", &json!({ "nqn": subsystem_nqn(subsystem) }))?;
    }
    let remove_us = begun.elapsed().as_secs_f64() * 1e6 / (bdevs + f64::from(SUBSYSTEMS));

    let values = [
        (BenchMetric::StartMs, server.startup_time.as_secs_f64() * 1e3),
        (BenchMetric::BdevKib, bdev_kib),
        (BenchMetric::RemoveUs, remove_us),
    ];
    let commands = vec![server.command.clone()];
    server.end()?;
    Ok(RunOutcome::measured(values, commands))
}
