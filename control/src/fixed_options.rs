//! SPDK's subsystems that have options and no counterpart here. As SPDK's, they repeat their options in a
//! saved configuration: the defaults, and what was set.

use std::marker::PhantomData;
use std::sync::Mutex;

use crate::{DecodeLog, Method, Module, Parameters, RpcError};
use serde_json::{Map, Value, json};

/// The options of such a subsystem. All have defaults, and none has an effect.
pub trait FixedOptions: Parameters + Send + Sync + 'static {
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
pub struct FixedSubsystem<P> {
    options: Mutex<Map<String, Value>>,
    parameters: PhantomData<P>,
}

impl<P: FixedOptions> FixedSubsystem<P> {
    /// With the defaults.
    pub fn new() -> FixedSubsystem<P> {
        let defaults = P::from_object(Map::new(), &mut DecodeLog::default());
        let defaults = defaults.expect("every option has a default").to_object();
        FixedSubsystem { options: Mutex::new(defaults), parameters: PhantomData }
    }
}

impl<P: FixedOptions> Default for FixedSubsystem<P> {
    fn default() -> Self {
        FixedSubsystem::new()
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

crate::parameters! {
    /// SPDK's subsystem `fsdev`: requests of file systems.
    pub struct FsdevOptions {
        /// Requests of all threads
        fsdev_io_pool_size: u32 = 65_535,
        /// Requests in the cache of each thread
        fsdev_io_cache_size: u32 = 256,
    }
}

crate::parameters! {
    /// SPDK's subsystem `iobuf`: pools of buffers.
    pub struct IobufOptions {
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

crate::parameters! {
    /// SPDK's subsystem `scheduler`: which cores threads move to.
    pub struct SchedulerName {
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
