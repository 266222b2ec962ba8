//! Modules: what the control plane manages.

use std::sync::Arc;

use serde_json::Value;

use crate::RpcError;
use crate::balancer::BalancedTarget;
use crate::examine::Examination;
use crate::method::Method;
use crate::metrics::{Metric, MetricSamples};

/// A part of the program that is managed by methods: block devices, a target, a service.
///
/// The control plane owns modules in [`Arc`](std::sync::Arc)s and calls them from its own threads, never from
/// a reactor. Order: [`start`](Self::start) of all modules, each after those that it depends on; then
/// methods, [`save`](Self::save), [`examine_config`](Self::examine_config),
/// [`examine_disk`](Self::examine_disk) and [`report`](Self::report) in any order and concurrently; at the
/// end [`drain`](Self::drain) of all, the stop of the reactors, and [`stop`](Self::stop) of all, both in
/// reverse order.
pub trait Module: Send + Sync + Sized + 'static {
    /// Name in errors and in the reference.
    const NAME: &'static str;

    /// Modules that it depends on: they start before it and stop after it.
    const DEPENDS_ON: &'static [&'static str] = &[];

    /// Whether it is a subsystem of `framework_get_subsystems`, with a section of `save_config`.
    const IS_SUBSYSTEM: bool = false;

    /// Its methods.
    fn methods() -> Vec<Method<Self>>;

    /// Called once before its first method. An error stops the start of the program.
    fn start(&self) -> Result<(), RpcError> {
        Ok(())
    }

    /// Stops accepting work from outside. The reactors still run.
    fn drain(&self) {}

    /// Releases what it holds. The reactors have stopped.
    fn stop(&self) {}

    /// The calls that recreate its configuration, each `{"method": …, "params": …}`.
    fn save(&self) -> Vec<Value> {
        Vec::new()
    }

    /// Why what [`save`](Self::save) returns, with that of other modules, could not be loaded; `None` if it
    /// could.
    fn not_loadable(&self) -> Option<String> {
        None
    }

    /// Looks at a block device that has appeared, by name, and claims it or creates others from it as it is
    /// configured, without I/O. Devices are examined one after the other, as updates; `bdev_wait_for_examine`
    /// waits for all.
    fn examine_config(&self, _bdev: &str) {}

    /// Begins to look at what is stored on a block device that has appeared, after all modules have looked at
    /// their configuration. It must not block: it has the device read, and what was found is applied by
    /// [`Examination::finish`]. Dropping the examination ends it, which is the default. Claims of other
    /// modules are to be respected; methods do not wait for it, but `bdev_wait_for_examine` does.
    /// It is not called for a device that a configuration uses which is being applied.
    fn examine_disk(&self, _bdev: &str, _examination: Examination) {}

    /// The metrics that it declares with [`metrics!`](crate::metrics!). Several modules may have one in
    /// common.
    fn metrics() -> Vec<&'static Metric> {
        Vec::new()
    }

    /// Adds the present values of its metrics. A query: it neither changes anything nor waits for long.
    fn collect(&self, _samples: &mut MetricSamples) {}

    /// Its targets at present whose connections can move between reactors.
    fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>> {
        Vec::new()
    }

    /// Its state in short, for `framework_get_modules`; null if it has nothing to report.
    fn report(&self) -> Value {
        Value::Null
    }
}

/// [`Module`] without its type.
pub(crate) trait DynModule: Send + Sync {
    fn name(&self) -> &'static str;
    fn depends_on(&self) -> &'static [&'static str];
    fn is_subsystem(&self) -> bool;
    fn start(&self) -> Result<(), RpcError>;
    fn drain(&self);
    fn stop(&self);
    fn save(&self) -> Vec<Value>;
    fn not_loadable(&self) -> Option<String>;
    fn examine_config(&self, bdev: &str);
    fn examine_disk(&self, bdev: &str, examination: Examination);
    fn collect(&self, samples: &mut MetricSamples);
    fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>>;
    fn report(&self) -> Value;
}

impl<M: Module> DynModule for M {
    fn name(&self) -> &'static str {
        M::NAME
    }

    fn depends_on(&self) -> &'static [&'static str] {
        M::DEPENDS_ON
    }

    fn is_subsystem(&self) -> bool {
        M::IS_SUBSYSTEM
    }

    fn start(&self) -> Result<(), RpcError> {
        Module::start(self)
    }

    fn drain(&self) {
        Module::drain(self);
    }

    fn stop(&self) {
        Module::stop(self);
    }

    fn save(&self) -> Vec<Value> {
        Module::save(self)
    }

    fn not_loadable(&self) -> Option<String> {
        Module::not_loadable(self)
    }

    fn examine_config(&self, bdev: &str) {
        Module::examine_config(self, bdev);
    }

    fn examine_disk(&self, bdev: &str, examination: Examination) {
        Module::examine_disk(self, bdev, examination);
    }

    fn collect(&self, samples: &mut MetricSamples) {
        Module::collect(self, samples);
    }

    fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>> {
        Module::balanced(self)
    }

    fn report(&self) -> Value {
        Module::report(self)
    }
}
