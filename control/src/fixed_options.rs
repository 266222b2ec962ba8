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
