//! The devices of a process, by the names that jobs give them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use bdev::Registry;
use dma::{Arena, ArenaConfig};
use plugin_bdevs::ConfiguredBdevs;
use reactor::{IdlePolicy, Reactor, ReactorConfig};
use workload::{DynChannel, Geometry, PreparedSource, Source};

/// Bytes of the largest buffer pool of a job.
const POOL_BYTES_MAX: usize = 1 << 30;
/// I/Os in flight for which a connection to a target is made.
const QUEUE_DEPTH: u32 = 1023;

/// The devices that jobs of this process share: a RAM disk is one for all of them.
#[derive(Default)]
struct SharedDevices {
    registry: Registry,
    /// The bdevs of the configuration file. They end with the last job.
    configured: Option<ConfiguredBdevs>,
    users: usize,
    prepared: HashMap<String, PreparedSource>,
}

fn shared() -> &'static Mutex<SharedDevices> {
    static SHARED: OnceLock<Mutex<SharedDevices>> = OnceLock::new();
    SHARED.get_or_init(Mutex::default)
}

static CLUSTER: Mutex<Option<String>> = Mutex::new(None);
static CONFIG: Mutex<Option<String>> = Mutex::new(None);

/// Sets an option that all jobs have in common; or `otherwise` says what to do.
fn set(option: &Mutex<Option<String>>, value: &str, name: &str, otherwise: &str) -> Result<(), String> {
    let mut option = sync::lock(option);
    match &*option {
        Some(other) if other != value => {
            Err(format!("{name} is {other} for one job and {value} for another; {otherwise}"))
        }
        _ => {
            *option = Some(value.to_string());
            Ok(())
        }
    }
}

/// The option: the directory of a store's cluster.
pub(crate) fn set_cluster(folder: &str) -> Result<(), String> {
    set(&CLUSTER, folder, "ringbolt_cluster", "name it in the URIs")
}

/// The option: a configuration file.
pub(crate) fn set_config(file: &str) -> Result<(), String> {
    set(&CONFIG, file, "ringbolt_config", "put the bdevs of both in one file")
}

fn config() -> Option<String> {
    sync::lock(&CONFIG).clone()
}

/// A job of this process. The last one ends the bdevs of the configuration, so that stores on them are
/// closed.
pub(crate) struct User(());

impl User {
    pub(crate) fn new() -> User {
        sync::lock(shared()).users += 1;
        User(())
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut shared = sync::lock(shared());
        shared.users -= 1;
        if shared.users > 0 || shared.configured.is_none() {
            return;
        }
        // Opened devices are of their registry.
        shared.prepared.clear();
        let configured = shared.configured.take();
        drop(shared);
        drop(configured);
    }
}

fn configured(file: &str) -> Result<ConfiguredBdevs, String> {
    ConfiguredBdevs::start(Path::new(file)).map_err(|error| error.to_string())
}

fn parse(name: &str) -> Result<Source, String> {
    let mut source = Source::parse(name).map_err(|error| error.to_string())?;
    match &mut source {
        Source::Store { cluster, .. } if !name.contains("cluster=") => {
            if let Some(folder) = &*sync::lock(&CLUSTER) {
                cluster.clone_from(folder);
            }
        }
        Source::Bdev { .. } if config().is_none() => {
            return Err(format!(
                "--filename={name} is no URI: give null:1g, malloc:64m, uring:/path, nvme+tcp://…, with a backslash \
                 before each colon, or a bdev of --ringbolt_config=FILE"
            ));
        }
        _ => {}
    }
    Ok(source)
}

/// A reactor on this thread. `name` is what it is for.
pub(crate) fn reactor(name: &str) -> Result<Reactor, String> {
    // A vfio-user device, in another process, maps the I/O buffers.
    let is_shared = name.starts_with("nvme+vfio-user") || config().is_some();
    let arena =
        Arena::new(ArenaConfig { limit_bytes: POOL_BYTES_MAX, shared: is_shared, ..ArenaConfig::default() });
    // The job polls; a core that sleeps would not see what a device writes to memory.
    let config = ReactorConfig { arena, idle: IdlePolicy::Spin, ..ReactorConfig::default() };
    Reactor::new(&config).map_err(|error| error.to_string())
}

/// Opens a device on this thread's reactor, for writing where that is possible.
pub(crate) fn open(reactor: &mut Reactor, name: &str) -> Result<(Geometry, Box<DynChannel>), String> {
    let source = parse(name)?;
    let (registry, prepared) = {
        let mut shared = sync::lock(shared());
        if let (Source::Bdev { .. }, None, Some(file)) = (&source, &shared.configured, config()) {
            shared.configured = Some(configured(&file)?);
        }
        let registry = match (&source, &shared.configured) {
            (Source::Bdev { .. }, Some(configured)) => configured.registry().clone(),
            _ => shared.registry.clone(),
        };
        let prepared = match shared.prepared.get(name) {
            Some(prepared) => prepared.clone(),
            None => {
                let prepared = prepare(&source, &registry)?;
                shared.prepared.insert(name.to_string(), prepared.clone());
                prepared
            }
        };
        (registry, prepared)
    };
    open_prepared(reactor, &registry, &prepared)
}

/// For writing, or for reading if the device does not allow more.
fn prepare(source: &Source, registry: &Registry) -> Result<PreparedSource, String> {
    source
        .prepare(registry, true)
        .or_else(|error| source.prepare(registry, false).map_err(|_| error))
        .map_err(|error| error.to_string())
}

fn open_prepared(
    reactor: &mut Reactor,
    registry: &Registry,
    prepared: &PreparedSource,
) -> Result<(Geometry, Box<DynChannel>), String> {
    let (core, registry, prepared) = (reactor.core(), registry.clone(), prepared.clone());
    let opening = async move { prepared.open(&core, &registry, QUEUE_DEPTH).await };
    let opened = reactor.wait_for(opening);
    opened.map_err(|error| error.to_string())
}

/// How large a device is. A thread of its own, which ends before, opens and closes it: fio starts processes
/// afterwards, which would not have that thread.
pub(crate) fn bytes_of(name: &str) -> Result<u64, String> {
    let source = parse(name)?;
    let name = name.to_string();
    let look = move || {
        if let (Source::Bdev { name }, Some(file)) = (&source, config()) {
            let configured = configured(&file)?;
            let found = configured.registry().find(name);
            let device = found.ok_or_else(|| format!("{file} makes no bdev {name}"))?;
            return Ok(device.geometry().bytes());
        }
        let registry = Registry::new();
        let mut reactor = reactor(&name)?;
        let prepared = prepare(&source, &registry)?;
        let (geometry, channel) = open_prepared(&mut reactor, &registry, &prepared)?;
        drop(channel);
        Ok(geometry.blocks.saturating_mul(u64::from(geometry.block_bytes)))
    };
    let thread = std::thread::Builder::new().name("size".to_string()).spawn(look);
    let thread = thread.map_err(|error| format!("a thread cannot be started: {error}"))?;
    thread.join().unwrap_or_else(|_| Err("the device could not be looked at".to_string()))
}
