//! The module of block devices for the control plane: SPDK's `bdev_*` methods of the layer and its basic
//! modules.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use control::json::{Value, json};
use control::{
    ByName, CallRecorder, Examiner, Method, Metric, MetricSamples, Module, Parameters, RpcError, SavedCalls,
};

use crate::failure::article;
use crate::{BdevError, BlockDevice, Closing, DeviceEvent, Registry, StillOpen};

mod backing_files;
mod devices;
mod histogram;
mod info;
mod iostat;
mod machine;
mod metrics;
mod notifications;
mod queue_depth;
mod stacked;
mod trace;
mod virtual_bdevs;

pub use iostat::counts_of;
pub use machine::MachineModule;

use backing_files::BackingFileWatch;
use histogram::HistogramBaseline;
use notifications::Notifications;
use queue_depth::QueueDepthSampler;
use virtual_bdevs::VirtualBdevs;

/// Block devices as a [`Module`]: methods to create, inspect and delete them.
///
/// It owns the calls that `save_config` writes for the subsystem `bdev`; other modules of block devices
/// record theirs in [`saved_calls`](Self::saved_calls), so that all are in order of creation.
pub struct BdevModule {
    registry: Registry,
    examiner: Arc<Examiner>,
    saved_calls: SavedCalls,
    created: CallRecorder,
    /// Enabled histograms, by name of the bdev.
    histograms: Mutex<BTreeMap<String, HistogramBaseline>>,
    virtual_bdevs: Arc<Mutex<VirtualBdevs>>,
    notifications: Arc<Mutex<Notifications>>,
    sampler: QueueDepthSampler,
    /// Devices that appear are examined without a call of `bdev_examine`.
    auto_examine: Arc<AtomicBool>,
}

impl BdevModule {
    /// Manages the devices of `registry`, and reports those that appear to `examiner`.
    pub fn new(registry: Registry, examiner: Arc<Examiner>) -> Arc<BdevModule> {
        let saved_calls = SavedCalls::default();
        let devices = registry.clone();
        let virtual_bdevs: Arc<Mutex<VirtualBdevs>> = Arc::default();
        let known = virtual_bdevs.clone();
        let created = saved_calls
            .recorder(move |name| devices.find(name).is_some() || sync::lock(&known).contains(name));
        Arc::new(BdevModule {
            registry,
            examiner,
            saved_calls,
            created,
            histograms: Mutex::default(),
            virtual_bdevs,
            notifications: Arc::default(),
            sampler: QueueDepthSampler::default(),
            auto_examine: Arc::new(AtomicBool::new(true)),
        })
    }

    /// The devices.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The calls that recreate the subsystem `bdev`.
    pub fn saved_calls(&self) -> &SavedCalls {
        &self.saved_calls
    }

    /// Finds a bdev by name, alias or UUID.
    pub fn find(&self, name: &str) -> Result<Arc<BlockDevice>, RpcError> {
        let missing = || RpcError::new(RpcError::ENODEV, format!("no bdev is called {name}"));
        self.registry.find(name).ok_or_else(missing)
    }

    /// Records the call that recreates a bdev, and returns its name.
    pub fn record(&self, device: &BlockDevice, method: &'static str, params: &impl Parameters) -> String {
        self.created.record(device.name(), method, params);
        device.name().to_string()
    }

    /// Unregisters a bdev of the module with this product name, or cancels one that waits for its base. What
    /// the caller waits for, without a lock, is that its users have closed it and that it has released its
    /// base.
    pub fn delete(&self, name: &str, product: &str) -> Result<Closing, RpcError> {
        let device = match self.registry.find(name) {
            None if self.forget_virtual(name) => return Ok(Closing::default()),
            _ => self.find(name)?,
        };
        if !device.bdev().product_name().eq_ignore_ascii_case(product) {
            let found = device.bdev().product_name();
            let (its, other) = (article(found), article(product));
            let message = format!("{name} is {its} {found}, not {other} {product}");
            return Err(RpcError::new(RpcError::ENODEV, message));
        }
        if self.registry.is_stacked(&device) {
            // First: otherwise it would be created again.
            self.forget_virtual(device.name());
        }
        let removed = self.registry.unregister(device.name())?;
        self.forget(device.name());
        Ok(Closing::removed([removed]))
    }

    /// Sets a parameter of the recorded call of a bdev that was changed.
    pub fn set_recorded(&self, name: &str, parameter: &str, value: impl Into<Value>) {
        self.created.set_parameter(name, parameter, value);
    }

    /// Forgets what is kept for a bdev that is gone.
    pub fn forget(&self, name: &str) {
        self.created.remove(name);
        self.histograms().remove(name);
    }

    fn histograms(&self) -> MutexGuard<'_, BTreeMap<String, HistogramBaseline>> {
        sync::lock(&self.histograms)
    }
}

/// The method of a module with its own kind of bdevs that deletes one: `product` is their product name, and
/// `bdevs` finds the devices that it creates them among.
pub fn delete_method<M: Module>(
    name: &'static str,
    product: &'static str,
    bdevs: impl Fn(&M) -> &BdevModule + Send + Sync + 'static,
) -> Method<M> {
    let delete = move |module: &M, params: ByName| bdevs(module).delete(&params.name, product);
    Method::concluded_update(name, delete, conclude)
        .text("Deletes the bdev. I/O in flight completes first.", "true")
        .errors(&[devices::MISSING, STILL_OPEN])
}

/// The last part of a method that removes something: waits until the devices that it used are free for
/// others.
pub fn conclude<M>(_: &M, closing: Closing) -> Result<bool, RpcError> {
    closing.wait()?;
    Ok(true)
}

/// The error of [`conclude`].
pub const STILL_OPEN: (i64, &str) =
    (RpcError::EINPROGRESS, "it is removed, but I/O in flight uses a bdev still");

impl From<StillOpen> for RpcError {
    fn from(error: StillOpen) -> RpcError {
        RpcError::new(RpcError::EINPROGRESS, error.to_string())
    }
}

impl Module for BdevModule {
    const NAME: &'static str = "bdev";
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<BdevModule>> {
        let mut methods = info::methods();
        methods.extend(devices::methods());
        methods.extend(stacked::methods());
        methods.extend(notifications::methods());
        methods.extend(iostat::methods());
        methods.extend(histogram::methods());
        methods.extend(trace::methods());
        methods
    }

    fn metrics() -> Vec<&'static Metric> {
        metrics::declared()
    }

    fn collect(&self, samples: &mut MetricSamples) {
        metrics::collect(&self.registry, samples);
    }

    fn start(&self) -> Result<(), RpcError> {
        let (examiner, auto_examine) = (self.examiner.clone(), self.auto_examine.clone());
        let (notifications, deleted) = (self.notifications.clone(), self.notifications.clone());
        let files = BackingFileWatch::new(move |device| {
            let name = device.name();
            log::warn!(target: "bdev", "the file of {name} was deleted: its data is lost when the bdev is deleted or the server ends");
            sync::lock(&deleted).add_deleted_file(name);
        });
        self.registry.subscribe(Box::new(move |event| {
            sync::lock(&notifications).add(event);
            match event {
                DeviceEvent::Registered(device) => files.add(device),
                DeviceEvent::Removed(device) => files.remove(device),
                DeviceEvent::Resized(_) => {}
            }
            // A virtual bdev that goes when its base is back already is created again.
            if let DeviceEvent::Registered(device) | DeviceEvent::Removed(device) = event
                && auto_examine.load(Ordering::Relaxed)
            {
                let (uuid, aliases) = (device.uuid().to_string(), device.aliases());
                let other_names = aliases.iter().map(String::as_str).chain([uuid.as_str()]);
                examiner.appeared(device.name(), other_names);
            }
        }));
        Ok(())
    }

    fn examine_config(&self, bdev: &str) {
        self.create_pending(bdev);
    }

    /// Removes every bdev that a method created, in reverse order and upper before base. I/O in flight
    /// completes.
    fn stop(&self) {
        *self.virtual_bdevs() = VirtualBdevs::default();
        for name in self.created.names().iter().rev() {
            // A base that went and returned is younger than what stands on it.
            self.registry.unregister_stack(name);
        }
    }

    fn save(&self) -> Vec<Value> {
        let limited = self.registry.list().into_iter().filter(|device| !device.rate_limits().is_none());
        let limits = limited.map(|device| {
            json!({ "method": "bdev_set_qos_limit", "params": info::SetQosLimit::of(&device).to_object() })
        });
        // First, because it says what becomes of the devices that follow.
        let is_default = self.auto_examine.load(Ordering::Relaxed);
        let options = json!({ "method": "bdev_set_options", "params": { "bdev_auto_examine": false } });
        let mut calls: Vec<Value> = (!is_default).then_some(options).into_iter().collect();
        calls.extend(self.saved_calls.calls());
        calls.extend(limits);
        calls.extend(histogram::saved(self));
        calls
    }

    fn report(&self) -> Value {
        let devices = self.registry.list();
        let claimed = devices.iter().filter(|device| device.claim().is_some()).count();
        json!({ "bdevs": devices.len(), "claimed": claimed })
    }
}

impl From<BdevError> for RpcError {
    fn from(error: BdevError) -> RpcError {
        let code = match &error {
            BdevError::NotFound { .. } | BdevError::Removed { .. } | BdevError::WrongKind { .. } => {
                RpcError::ENODEV
            }
            BdevError::Exists { .. } | BdevError::SameIdentity { .. } => RpcError::EEXIST,
            BdevError::Claimed { .. } | BdevError::InUse { .. } => RpcError::EBUSY,
            BdevError::Invalid { .. } => RpcError::EINVAL,
            BdevError::Memory(_) | BdevError::NoMemoryLeft { .. } => RpcError::ENOMEM,
            BdevError::NoFileIo { .. } | BdevError::NoAio { .. } => RpcError::ENOTSUP,
            BdevError::File { source, .. } => {
                source.raw_os_error().map_or(RpcError::EIO, |errno| -i64::from(errno))
            }
        };
        RpcError::new(code, error.to_string())
    }
}

#[cfg(test)]
mod tests;
