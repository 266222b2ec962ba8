//! SPDK's subsystems that have options and no counterpart here. As SPDK's, they repeat their options in a saved
//! configuration: the defaults, and what was set.

use std::marker::PhantomData;
use std::sync::Mutex;

use control::json::{Map, Value, json};
use control::{DecodeLog, Method, Module, Parameters, RpcError};

/// The options of such a subsystem. All have defaults, and none has an effect.
pub(crate) trait FixedOptions: Parameters + Send + Sync + 'static {
    /// Name of the subsystem.
    const SUBSYSTEM: &'static str;
    /// The method that sets the options.
    const METHOD: &'static str;
    /// For the reference and the log: why it has no effect.
    const REASON: &'static str;

    /// Rejects a value that asks for something that is not there.
    fn check(&self) -> Result<(), RpcError> {
        Ok(())
    }
}

/// A subsystem that stores its options. Options that a call leaves out have their defaults after it.
pub(crate) struct FixedSubsystem<P> {
    options: Mutex<Map<String, Value>>,
    parameters: PhantomData<P>,
}

impl<P: FixedOptions> FixedSubsystem<P> {
    pub(crate) fn new() -> FixedSubsystem<P> {
        let defaults = P::from_object(Map::new(), &mut DecodeLog::default());
        let defaults = defaults.expect("every option has a default").to_object();
        FixedSubsystem { options: Mutex::new(defaults), parameters: PhantomData }
    }
}

impl<P: FixedOptions> Module for FixedSubsystem<P> {
    const NAME: &'static str = P::SUBSYSTEM;

    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<FixedSubsystem<P>>> {
        let set = |module: &FixedSubsystem<P>, params: P| {
            params.check()?;
            log::info!(target: "rpc", "{} changes nothing else: {}", P::METHOD, P::REASON);
            *sync::lock(&module.options) = params.to_object();
            Ok::<bool, RpcError>(true)
        };
        let update = Method::update(P::METHOD, set).at_any_stage();
        vec![update.without_effect(P::REASON)]
    }

    fn save(&self) -> Vec<Value> {
        let options = sync::lock(&self.options).clone();
        vec![json!({ "method": P::METHOD, "params": options })]
    }
}

control::parameters! {
    pub(crate) struct FsdevOptions {
        /// Requests of all threads
        fsdev_io_pool_size: u32 = 65_535,
        /// Requests in the cache of each thread
        fsdev_io_cache_size: u32 = 256,
    }
}

control::parameters! {
    pub(crate) struct IobufOptions {
        /// Small buffers
        small_pool_count: u64 = 8192,
        /// Large buffers
        large_pool_count: u64 = 1024,
        /// Bytes of a small buffer
        small_bufsize: u32 = 8192,
        /// Bytes of a large buffer
        large_bufsize: u32 = 135_168,
        /// Pools for each NUMA node
        enable_numa: bool = false,
    }
}

control::parameters! {
    pub(crate) struct SchedulerName {
        /// Only `static` is there
        name: String = "static".to_string(),
        /// Microseconds between decisions
        period: Option<u64>,
        /// Percent of a core from which on a thread is busy
        load_limit: Option<u8>,
        /// Percent of a core up to which it takes threads
        core_limit: Option<u8>,
        /// Percent of a core from which on it is busy
        core_busy: Option<u8>,
    }
}

impl FixedOptions for FsdevOptions {
    const SUBSYSTEM: &'static str = "fsdev";
    const METHOD: &'static str = "fsdev_set_opts";
    const REASON: &'static str = "there are no file system devices, so that the options are only stored";
}

impl FixedOptions for IobufOptions {
    const SUBSYSTEM: &'static str = "iobuf";
    const METHOD: &'static str = "iobuf_set_options";
    const REASON: &'static str =
        "buffers come from pools of each core, limited by --memory; the options are only stored";
}

impl FixedOptions for SchedulerName {
    const SUBSYSTEM: &'static str = "scheduler";
    const METHOD: &'static str = "framework_set_scheduler";
    const REASON: &'static str = "reactors do not move between cores, and the options are only stored; --idle selects their idle policy";

    fn check(&self) -> Result<(), RpcError> {
        if self.name == "static" {
            return Ok(());
        }
        Err(RpcError::invalid_params(format!(
            "name: {:?} is not supported; there is only \"static\"",
            self.name
        )))
    }
}

#[cfg(test)]
mod tests {
    use bdev::Registry;
    use control::ConfigFile;

    use super::*;
    use crate::app::{App, StartOptions, catalog};

    fn app() -> App {
        App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap()
    }

    fn config(app: &App, subsystem: &str) -> Value {
        app.control.invoke("framework_get_config", json!({ "name": subsystem })).unwrap()
    }

    #[test]
    fn defaults_are_those_that_spdk_saves() {
        let text = include_str!("../tests/data/spdk_26_09_save_config.json");
        let spdk: Value = control::json::from_str(text).unwrap();
        let app = app();
        for name in ["accel", "fsdev", "iobuf", "scheduler"] {
            let sections = spdk["subsystems"].as_array().unwrap();
            let section = sections.iter().find(|section| section["subsystem"] == name).unwrap();
            assert_eq!(config(&app, name), section["config"], "{name}");
        }
    }

    #[test]
    fn what_is_set_is_saved_and_loads_again() {
        let _turn = sync::lock(&crate::sock::OPTIONS_OF_PROCESS);
        let first = app();
        for (method, params) in [
            ("accel_set_options", json!({ "task_count": 4096 })),
            ("fsdev_set_opts", json!({ "fsdev_io_cache_size": 64 })),
            ("iobuf_set_options", json!({ "small_pool_count": 65_536, "enable_numa": true })),
            ("framework_set_scheduler", json!({ "name": "static", "period": 500 })),
        ] {
            first.control.invoke(method, params).unwrap();
        }
        let saved = first.control.invoke("save_config", Value::Null).unwrap();
        let second = app();
        let file = ConfigFile::parse("saved", saved.to_string().as_bytes(), &catalog()).unwrap();
        file.apply(&second.control).unwrap();
        for (name, option, value) in [
            ("accel", "task_count", 4096),
            ("fsdev", "fsdev_io_cache_size", 64),
            ("iobuf", "small_pool_count", 65_536),
            ("scheduler", "period", 500),
        ] {
            assert_eq!(config(&second, name)[0]["params"][option], value, "{name}");
        }
        assert_eq!(second.control.invoke("save_config", Value::Null).unwrap(), saved);
        // An option that a call leaves out has its default again.
        second.control.invoke("accel_set_options", json!({ "buf_count": 1 })).unwrap();
        assert_eq!(config(&second, "accel")[0]["params"]["task_count"], 2048);
    }
}
