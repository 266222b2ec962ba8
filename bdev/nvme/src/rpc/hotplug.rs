//! `bdev_nvme_set_hotplug`: attaches PCI Express controllers that are inserted, and detaches those that are
//! removed.

use std::sync::Arc;
use std::time::Duration;

use control::{Method, RpcError};

use super::module::NvmeModule;
use super::options::reconnect_policy;
use crate::hotplug::{HOTPLUG_PERIOD_DEFAULT, HOTPLUG_PERIOD_MAX, PciBus};
use crate::{Attach, PathConfig, TransportId};

pub(super) fn methods() -> Vec<Method<NvmeModule>> {
    vec![
        Method::update("bdev_nvme_set_hotplug", set_hotplug)
            .text(
                "Attaches NVMe controllers that are inserted, or bound to a driver for user space, as HotInNvme0, \
                 HotInNvme1, …, and detaches those that are removed.",
                "true",
            )
            .canonical(|_: &NvmeModule, params: &mut SetHotplug| {
                params.period_us = period_us(params.period_us);
                Ok(())
            })
            .errors(&[(RpcError::ENOMEM, "there can be no thread or descriptor for it")]),
    ]
}

control::parameters! {
    pub(super) struct SetHotplug {
        /// Whether it is on; what is attached stays attached when it is turned off
        enable: bool,
        /// How often to look for controllers that the kernel has not reported, 1 to 10000000; 0 is 100000
        period_us: u64 ["us"] = 0,
    }
}

fn period_us(asked: u64) -> u64 {
    match asked {
        0 => HOTPLUG_PERIOD_DEFAULT.as_micros() as u64,
        _ => asked.min(HOTPLUG_PERIOD_MAX.as_micros() as u64),
    }
}

fn set_hotplug(module: &NvmeModule, mut params: SetHotplug) -> Result<bool, RpcError> {
    params.period_us = period_us(params.period_us);
    let period = params.enable.then(|| Duration::from_micros(params.period_us));
    let options = module.options.clone();
    let attach = Box::new(move |name: &str, id: TransportId| {
        let options = sync::lock(&options).clone();
        let mut path = PathConfig::new(id);
        (path.options, path.count_io) = (options.driver_options(), options.io_path_stat);
        if let Ok(policy) = reconnect_policy(options.loss_timeouts) {
            path.reconnect = policy;
        }
        let (policy, retries_max) = (options.policy, options.retries_max());
        Attach { policy, retries_max, ..Attach::new(name, path) }
    });
    module
        .hotplug
        .set(period, || Ok(PciBus::new("/")), attach)
        .map_err(|error| RpcError::new(RpcError::ENOMEM, format!("hot plug cannot be enabled: {error}")))?;
    *sync::lock(&module.hotplug_call) = Some(Arc::new(params));
    module.record_hotplug();
    Ok(true)
}

impl NvmeModule {
    /// Saves the call after those that attach controllers by name, as it would attach them under other names.
    pub(super) fn record_hotplug(&self) {
        let call = sync::lock(&self.hotplug_call).clone();
        if let Some(params) = call {
            self.saved.options.record("hotplug", "bdev_nvme_set_hotplug", &*params);
        }
    }
}
