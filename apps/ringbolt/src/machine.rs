//! SPDK's methods about what the server runs on: PCI functions, and the I/O channels and buffers of each reactor.

use std::collections::BTreeMap;

use bdev::Registry;
use control::json::{Value, json};
use control::{Method, Module, NoParameters, RpcError, thread_name, tick_rate};
use dma::PoolCounts;
use pci::{PciError, Sysfs};
use reactor::ReactorHandle;

/// Reports; it owns nothing.
pub(crate) struct MachineModule {
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    sysfs: Sysfs,
}

impl MachineModule {
    pub(crate) fn new(registry: Registry, reactors: Vec<ReactorHandle>) -> MachineModule {
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
    use bdev::Access;
    use control::ManagedReactor;
    use reactor::{ReactorConfig, Reactors};

    use super::*;
    use crate::app::{App, StartOptions};

    #[test]
    fn io_channels_are_those_that_are_open() {
        let reactors = Reactors::start(&ReactorConfig::default()).unwrap();
        let managed = |handle: &ReactorHandle| ManagedReactor { handle: handle.clone(), thread_id: 0 };
        let managed = reactors.handles().iter().map(managed).collect();
        let app = App::start(Registry::new(), managed, StartOptions::default()).unwrap();
        let null = json!({ "name": "N", "num_blocks": 8, "block_size": 512 });
        app.control.invoke("bdev_null_create", null).unwrap();
        let channels = || {
            let answer = app.control.invoke("thread_get_io_channels", Value::Null).unwrap();
            answer["threads"][0].clone()
        };
        assert_eq!(channels(), json!({ "name": "reactor_0", "io_channels": [] }));
        let (registry, control) = (app.registry.clone(), app.control.clone());
        let with_two = reactors.handles()[0].call(move |core| {
            let device = registry.open("N", Access::ReadOnly).unwrap();
            let _channels = (device.channel(core).unwrap(), device.channel(core).unwrap());
            control.invoke("thread_get_io_channels", Value::Null).unwrap()
        });
        let expected = json!([{ "name": "bdev_N", "ref": 2 }]);
        assert_eq!(with_two.unwrap()["threads"][0]["io_channels"], expected);
        assert_eq!(channels()["io_channels"], json!([]));
    }

    #[test]
    fn buffer_stats_count_what_the_reactors_have_taken() {
        let reactors = Reactors::start(&ReactorConfig::default()).unwrap();
        let managed = |handle: &ReactorHandle| ManagedReactor { handle: handle.clone(), thread_id: 0 };
        let managed = reactors.handles().iter().map(managed).collect();
        let app = App::start(Registry::new(), managed, StartOptions::default()).unwrap();
        let stats = || app.control.invoke("iobuf_get_stats", Value::Null).unwrap();
        let count = |pool: &str, name: &str| stats()[0][pool][name].as_u64().unwrap();
        let both = |name: &str| (count("small_pool", name), count("large_pool", name));
        let (cache, main) = (both("cache"), both("main"));
        reactors.handles()[0]
            .call(|core| (0..10).for_each(|_| drop((core.pool().take(8192), core.pool().take(65536)))))
            .unwrap();
        let taken = |name: &str, before: (u64, u64)| (both(name).0 - before.0, both(name).1 - before.1);
        let (cached, refilled) = (taken("cache", cache), taken("main", main));
        assert_eq!((cached.0 + refilled.0, cached.1 + refilled.1), (10, 10), "{}", stats());
        assert!(refilled.0 <= 1 && refilled.1 <= 1, "{}", stats());
        assert_eq!((both("retry"), &stats()[0]["module"]), ((0, 0), &json!("reactor")));
        assert_eq!(both("cache_size"), (0, 0));
    }

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
