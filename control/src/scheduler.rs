//! Which reactor serves which connection: SPDK's subsystem `scheduler`.
//!
//! Reactors stay on their cores. With `static`, connections stay on the reactor that they were assigned when
//! they were accepted. With `dynamic`, the [`Balancer`] moves them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use crate::balancer::Balancer;
use crate::{Method, Module, NoParameters, Parameters, RpcError};

/// The period of decisions unless it is given: a tenth of the time in which a core that becomes busy should
/// be relieved.
pub(crate) const PERIOD_DEFAULT_US: u64 = 100_000;
/// Shorter periods say little, and cost the reactors more than they gain.
const PERIOD_MIN_US: u64 = 10_000;
const PERIOD_MAX_US: u64 = 60_000_000;

crate::parameters! {
    /// Which reactor serves which connection.
    struct SetScheduler {
        /// `static`: connections stay where they were accepted; `dynamic`: they move to reactors with less to
        /// do
        name: String = "static".to_string(),
        /// Microseconds between decisions of `dynamic`: 10000 to 60000000; 100000 without
        period: Option<u64>,
    }
    ignored("it is about SPDK's threads, of which there are none") { load_limit, core_limit, core_busy }
}

/// The subsystem `scheduler`.
pub struct SchedulerModule {
    balancer: Arc<Balancer>,
    options: Mutex<SetScheduler>,
}

impl SchedulerModule {
    /// The module, which switches this balancer on and off.
    pub fn new(balancer: Arc<Balancer>) -> Arc<SchedulerModule> {
        let options = SetScheduler { name: "static".to_string(), period: None };
        Arc::new(SchedulerModule { balancer, options: Mutex::new(options) })
    }
}

impl Module for SchedulerModule {
    const NAME: &'static str = "scheduler";

    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<SchedulerModule>> {
        vec![
            Method::update("framework_set_scheduler", set_scheduler)
                .at_any_stage()
                .text(
                    "Selects which reactor serves which connection. Reactors stay on their cores. With \
                     `dynamic`, I/O queues of NVMe/TCP and connections of iSCSI and NBD move between two \
                     commands, so that cores are equally busy; others stay (docs/SCHEDULING.md). \
                     `ringbolt_target_moved` counts the moves.",
                    "true",
                ),
            Method::query("framework_get_scheduler", get_scheduler).at_any_stage().text(
                "Names the scheduler.",
                "`scheduler_name`, `scheduler_period` in microseconds, `isolated_core_mask`, `scheduling_core`",
            ),
        ]
    }

    fn save(&self) -> Vec<Value> {
        let options = sync::lock(&self.options).to_object();
        vec![json!({ "method": "framework_set_scheduler", "params": options })]
    }
}

fn set_scheduler(module: &SchedulerModule, params: SetScheduler) -> Result<bool, RpcError> {
    let period_us = params.period.unwrap_or(PERIOD_DEFAULT_US);
    let period = match params.name.as_str() {
        "static" => None,
        "dynamic" if !(PERIOD_MIN_US..=PERIOD_MAX_US).contains(&period_us) => {
            let message = format!("period: expected {PERIOD_MIN_US} to {PERIOD_MAX_US} microseconds");
            return Err(RpcError::invalid_params(message));
        }
        "dynamic" => Some(Duration::from_micros(period_us)),
        other => {
            let message = format!("name: {other:?} is not supported; there are \"static\" and \"dynamic\"");
            return Err(RpcError::invalid_params(message));
        }
    };
    module.balancer.set_period(period).map_err(RpcError::internal)?;
    *sync::lock(&module.options) = params;
    Ok(true)
}

fn get_scheduler(module: &SchedulerModule, _params: NoParameters) -> Result<Value, RpcError> {
    let period = module.balancer.period();
    Ok(json!({
        "scheduler_name": if period.is_some() { "dynamic" } else { "static" },
        "scheduler_period": period.map_or(0, |period| period.as_micros() as u64),
        "isolated_core_mask": "0",
        "scheduling_core": module.balancer.first_cpu(),
    }))
}

#[cfg(test)]
mod tests;
