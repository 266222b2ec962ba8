//! The module of block devices for the control plane: SPDK's `bdev_*` methods of the layer and its basic modules.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use control::json::{Value, json};
use control::{CallRecorder, Examiner, Method, Module, Parameters, RpcError, SavedCalls};

use crate::{BdevError, BlockDevice, DeviceEvent, Registry};

mod devices;
mod histogram;
mod info;
mod iostat;

pub use iostat::counts_of;

use histogram::HistogramBaseline;

/// Block devices as a [`Module`]: methods to create, inspect and delete them.
///
/// It owns the calls that `save_config` writes for the subsystem `bdev`; other modules of block devices record theirs
/// in [`saved_calls`](Self::saved_calls), so that all are in order of creation.
pub struct BdevModule {
    registry: Registry,
    examiner: Arc<Examiner>,
    saved_calls: SavedCalls,
    created: CallRecorder,
    /// Enabled histograms, by name of the bdev.
    histograms: Mutex<BTreeMap<String, HistogramBaseline>>,
}

impl BdevModule {
    /// Manages the devices of `registry`, and reports those that appear to `examiner`.
    pub fn new(registry: Registry, examiner: Arc<Examiner>) -> Arc<BdevModule> {
        let saved_calls = SavedCalls::default();
        let devices = registry.clone();
        let created = saved_calls.recorder(move |name| devices.find(name).is_some());
        Arc::new(BdevModule { registry, examiner, saved_calls, created, histograms: Mutex::default() })
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

    /// Unregisters a bdev of the module with this product name.
    pub fn delete(&self, name: &str, product: &str) -> Result<bool, RpcError> {
        let device = self.find(name)?;
        if !device.bdev().product_name().eq_ignore_ascii_case(product) {
            let message = format!("{name} is a {}, not a {product}", device.bdev().product_name());
            return Err(RpcError::new(RpcError::ENODEV, message));
        }
        self.registry.unregister(device.name())?;
        self.forget(device.name());
        Ok(true)
    }

    /// Forgets what is kept for a bdev that is gone.
    pub fn forget(&self, name: &str) {
        self.created.remove(name);
        self.histograms().remove(name);
    }

    fn histograms(&self) -> MutexGuard<'_, BTreeMap<String, HistogramBaseline>> {
        self.histograms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Module for BdevModule {
    const NAME: &'static str = "bdev";
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<BdevModule>> {
        let mut methods = info::methods();
        methods.extend(devices::methods());
        methods.extend(iostat::methods());
        methods.extend(histogram::methods());
        methods
    }

    fn start(&self) -> Result<(), RpcError> {
        let examiner = self.examiner.clone();
        self.registry.subscribe(Box::new(move |event| {
            if let DeviceEvent::Registered(device) = event {
                examiner.appeared(device.name());
            }
        }));
        Ok(())
    }

    /// Removes every bdev that a method created, in reverse order. I/O in flight completes.
    fn stop(&self) {
        for name in self.created.names().iter().rev() {
            // An error means that it is gone already, with the bdev that it was based on.
            let _ = self.registry.unregister(name);
        }
    }

    fn save(&self) -> Vec<Value> {
        self.saved_calls.calls()
    }

    fn report(&self) -> Value {
        let devices = self.registry.list();
        let claimed = devices.iter().filter(|device| device.claimed_by().is_some()).count();
        json!({ "bdevs": devices.len(), "claimed": claimed })
    }
}

impl From<BdevError> for RpcError {
    fn from(error: BdevError) -> RpcError {
        let code = match &error {
            BdevError::NotFound { .. } | BdevError::Removed { .. } | BdevError::WrongKind { .. } => {
                RpcError::ENODEV
            }
            BdevError::Exists { .. } => RpcError::EEXIST,
            BdevError::Claimed { .. } => RpcError::EBUSY,
            BdevError::Invalid { .. } => RpcError::EINVAL,
            BdevError::Memory(_) => RpcError::ENOMEM,
            BdevError::NoFileIo => RpcError::ENOTSUP,
            BdevError::File { source, .. } => {
                source.raw_os_error().map_or(RpcError::EIO, |errno| -i64::from(errno))
            }
        };
        RpcError::new(code, error.to_string())
    }
}

#[cfg(test)]
mod tests;
