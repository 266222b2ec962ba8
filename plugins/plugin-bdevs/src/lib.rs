//! The bdevs of a configuration file, and the reactor that they need, inside a process that loads a plugin.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::{Arc, Mutex};

use accel::AccelModule;
use bdev::Registry;
use bdev::rpc::BdevModule;
use bdev::uring::ring_refusal;
use bdev_crypto::CryptoModule;
use bdev_gpt::GptModule;
use bdev_nvme::rpc::NvmeModule;
use bdev_raid::RaidModule;
use control::{
    Catalog, Compatibility, ConfigFile, ControlPlane, FixedSubsystem, FsdevOptions, IobufOptions, Keyring,
    KeyringModule, ManagedReactor, SchedulerModule, SocketModule, json::Value,
};
use dma::{Arena, ArenaConfig};
use lvol::LvolModule;
use os::{CpuSet, EventBackend};
use reactor::{ReactorConfig, ReactorHandle, Reactors};
use store_client::rpc::ClusterImageModule;
use store_node::rpc::StoreModule;

/// Bytes of I/O buffers at most; they are allocated as they are used.
const BUFFER_BYTES_MAX: usize = 512 << 20;

/// A running reactor with the bdevs of a file. They end when it is dropped.
pub struct ConfiguredBdevs {
    registry: Registry,
    reactor: ReactorHandle,
    control: Arc<ControlPlane>,
    reactors: Mutex<Option<Reactors>>,
}

/// Why there are no bdevs of a file.
#[derive(Debug, thiserror::Error)]
pub enum ConfiguredBdevsError {
    /// The file cannot be read, or is no configuration of bdevs.
    #[error("{0}")]
    Invalid(String),
    /// What it says cannot be done: a device cannot be opened, or another program has it.
    #[error("{0}")]
    Failed(String),
}

fn failed(error: impl std::fmt::Display) -> ConfiguredBdevsError {
    ConfiguredBdevsError::Failed(error.to_string())
}

/// The methods of a configuration: those of bdevs. Targets are another program's.
fn catalog() -> Catalog {
    Catalog::new()
        .with::<SchedulerModule>()
        .with::<SocketModule>()
        .with::<FixedSubsystem<IobufOptions>>()
        .with::<KeyringModule>()
        .with::<FixedSubsystem<FsdevOptions>>()
        .with::<AccelModule>()
        .with::<BdevModule>()
        .with::<CryptoModule>()
        .with::<GptModule>()
        .with::<RaidModule>()
        .with::<NvmeModule>()
        .with::<LvolModule>()
        .with::<StoreModule>()
        .with::<ClusterImageModule>()
        .with::<Compatibility>()
}

fn start_plane(registry: &Registry, reactor: &ReactorHandle) -> Result<Arc<ControlPlane>, control::RpcError> {
    let handles = [reactor.clone()];
    let managed = ManagedReactor { handle: reactor.clone(), thread_id: 0 };
    let builder = ControlPlane::builder(vec![managed]);
    let keyring = Keyring::default();
    let accel = AccelModule::new(registry.accel().clone(), keyring.clone());
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let scheduler = SchedulerModule::new(builder.balancer());
    builder
        .module::<SchedulerModule>(&scheduler)
        .module::<SocketModule>(&Arc::new(SocketModule::new()))
        .module::<FixedSubsystem<IobufOptions>>(&Arc::new(FixedSubsystem::new()))
        .module::<KeyringModule>(&Arc::new(KeyringModule::new(keyring.clone())))
        .module::<FixedSubsystem<FsdevOptions>>(&Arc::new(FixedSubsystem::new()))
        .module::<AccelModule>(&accel)
        .module::<BdevModule>(&bdevs)
        .module::<CryptoModule>(&CryptoModule::new(&bdevs, &accel))
        .module::<GptModule>(&GptModule::new(&bdevs, &handles))
        .module::<RaidModule>(&RaidModule::new(&bdevs, &handles))
        .module::<NvmeModule>(&NvmeModule::new(&bdevs, &handles, keyring))
        .module::<LvolModule>(&LvolModule::new(registry.clone(), &handles))
        .module::<StoreModule>(&StoreModule::new(registry.clone(), &handles))
        .module::<ClusterImageModule>(&ClusterImageModule::new(registry.clone()))
        .module::<Compatibility>(&Arc::new(Compatibility))
        .start(None)
}

impl ConfiguredBdevs {
    /// Starts a reactor, and makes the bdevs of a configuration file.
    ///
    /// # Errors
    /// The file cannot be read or names what is not there; a device cannot be opened, or another program has
    /// it.
    pub fn start(config: &Path) -> Result<ConfiguredBdevs, ConfiguredBdevsError> {
        let invalid = |error: control::ConfigError| ConfiguredBdevsError::Invalid(error.to_string());
        let config = ConfigFile::read(config, &catalog()).map_err(invalid)?;
        os::raise_descriptor_limit();
        let cpu = CpuSet::allowed().cpus().first().copied().unwrap_or(0);
        let arena = Arena::new(ArenaConfig { limit_bytes: BUFFER_BYTES_MAX, ..ArenaConfig::default() });
        let cpus = CpuSet::new(vec![cpu]).map_err(failed)?;
        let reactors = ReactorConfig { cpus, pin: false, arena, ..ReactorConfig::default() };
        let reactors = Reactors::start(&reactors).map_err(failed)?;
        let reactor = reactors.handles().first().cloned().ok_or_else(|| failed("no reactor runs"))?;
        let registry = Registry::new();
        let backend = reactor.call(|core| core.event_loop().backend()).map_err(failed)?;
        if backend == EventBackend::Epoll {
            let refusal = reactors.uring_error().map_or_else(String::new, ring_refusal);
            registry.refuse_files(refusal);
        }
        let control = start_plane(&registry, &reactor).map_err(failed)?;
        // From here on its drop stops what was started.
        let configured = ConfiguredBdevs { registry, reactor, control, reactors: Mutex::new(Some(reactors)) };
        config.apply(&configured.control).map_err(|error| failed(error.message))?;
        configured
            .control
            .invoke("bdev_wait_for_examine", Value::Null)
            .map_err(|error| failed(error.message))?;
        Ok(configured)
    }

    /// The bdevs.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The reactor, which does what the bdevs do by themselves.
    pub fn reactor(&self) -> &ReactorHandle {
        &self.reactor
    }
}

impl Drop for ConfiguredBdevs {
    fn drop(&mut self) {
        self.control.drain();
        if let Some(reactors) = sync::lock(&self.reactors).take() {
            reactors.stop();
        }
        self.control.stop();
    }
}
