//! SPDK's methods about what the server runs on: PCI functions, and the I/O channels and buffers of each
//! reactor.

use std::collections::BTreeMap;

use control::json::{Value, json};
use control::{Method, Module, NoParameters, RpcError, thread_name, tick_rate};
use dma::PoolCounts;
use pci::{PciError, Sysfs};
use reactor::ReactorHandle;

use crate::Registry;

/// Reports; it owns nothing.
pub struct MachineModule {
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    sysfs: Sysfs,
}

impl MachineModule {
    /// Of a program with these devices and reactors.
    pub fn new(registry: Registry, reactors: Vec<ReactorHandle>) -> MachineModule {
        MachineModule { registry, reactors, sysfs: Sysfs::default() }
    }
}

impl Module for MachineModule {
    const NAME: &'static str = "machine";

    fn methods() -> Vec<Method<MachineModule>> {
        vec![
            Method::query("framework_get_pci_devices", pci_devices)
                .at_any_stage()
                .text(
                    "Lists the PCI functions that are bound to a driver for user space. Without privileges the kernel \
                     shows 64 bytes of a configuration space.",
                    "array of `address`, `config_space` in hexadecimal",
                ),
            Method::query("thread_get_io_channels", io_channels)
                .text(
                    "Lists the bdevs that have channels on each reactor, as SPDK's threads. `ref` is the number of channels.",
                    "`tick_rate`, `threads`",
                ),
            Method::query("iobuf_get_stats", buffer_stats).text(
                "Buffers that were taken since the start, of all reactors: `cache` from what the reactor had, `main` with \
                 new memory for the reactor, `retry` how often there was none and the request waited. Small buffers \
                 have at most 8 KiB. All modules of a reactor share its buffers, so that there is one entry.",
                "array of `module`, `small_pool`, `large_pool`",
            ),
        ]
    }
}

fn pci_devices(module: &MachineModule, _params: NoParameters) -> Result<Vec<Value>, RpcError> {
    let mut devices = Vec::new();
    for info in pci::enumerate(&module.sysfs).map_err(RpcError::internal)? {
        if !pci::is_for_user_space(&info) {
            continue;
        }
        let config = match pci::config_space(&module.sysfs, info.address) {
            // Removed since the functions were listed.
            Err(PciError::NotFound(_)) => continue,
            config => config.map_err(RpcError::internal)?,
        };
        let digits: String = config.iter().map(|byte| format!("{byte:02x}")).collect();
        devices.push(json!({ "address": info.address.to_string(), "config_space": digits }));
    }
    Ok(devices)
}

fn io_channels(module: &MachineModule, _params: NoParameters) -> Result<Value, RpcError> {
    let mut threads: Vec<BTreeMap<String, u64>> = vec![BTreeMap::new(); module.reactors.len()];
    for device in module.registry.list() {
        for core in device.channel_cores() {
            // A program may have channels on cores that the control plane does not know.
            if let Some(channels) = threads.get_mut(core) {
                *channels.entry(format!("bdev_{}", device.name())).or_default() += 1;
            }
        }
    }
    let one = |(index, channels): (usize, &BTreeMap<String, u64>)| {
        let io_channels: Vec<Value> =
            channels.iter().map(|(name, count)| json!({ "name": name, "ref": count })).collect();
        json!({ "name": thread_name(index), "io_channels": io_channels })
    };
    let threads: Vec<Value> = threads.iter().enumerate().map(one).collect();
    Ok(json!({ "tick_rate": tick_rate(), "threads": threads }))
}

fn buffer_stats(module: &MachineModule, _params: NoParameters) -> Result<Value, RpcError> {
    // Small, then large.
    let mut pools = [PoolCounts::default(); 2];
    for reactor in &module.reactors {
        for count in reactor.call(|core| core.pool().counts())? {
            let pool = &mut pools[usize::from(count.bytes > SMALL_BUFFER_BYTES_MAX)];
            pool.taken += count.taken;
            pool.refills += count.refills;
            pool.failures += count.failures;
        }
    }
    let [small, large] = pools.map(|PoolCounts { taken, refills, failures, .. }| {
        // No buffers are set apart for a module.
        json!({ "cache": taken.saturating_sub(refills), "main": refills, "retry": failures, "cache_size": 0 })
    });
    Ok(json!([{ "module": "reactor", "small_pool": small, "large_pool": large }]))
}

/// Where SPDK's large buffers begin: its default `small_bufsize`.
const SMALL_BUFFER_BYTES_MAX: usize = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_devices_are_those_for_user_space() {
        let root = std::env::temp_dir().join(format!("ringbolt-machine-{}", std::process::id()));
        for (address, driver) in [("0000:00:04.0", "vfio-pci"), ("0000:00:05.0", "nvme")] {
            let function = root.join("sys/bus/pci/devices").join(address);
            std::fs::create_dir_all(&function).unwrap();
            let files = [
                ("vendor", "0x1b36\n"),
                ("device", "0x0010\n"),
                ("class", "0x010802\n"),
                ("config", "\x36\x1b"),
            ];
            for (name, text) in files {
                std::fs::write(function.join(name), text).unwrap();
            }
            std::os::unix::fs::symlink(format!("../../drivers/{driver}"), function.join("driver")).unwrap();
        }
        let sysfs = Sysfs::new(&root);
        let module = MachineModule { registry: Registry::new(), reactors: Vec::new(), sysfs };
        let listed = pci_devices(&module, NoParameters {});
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(listed.unwrap(), [json!({ "address": "0000:00:04.0", "config_space": "361b" })]);
    }
}
