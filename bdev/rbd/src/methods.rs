//! Methods.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bdev::rpc::{BdevModule, STILL_OPEN};
use bdev::{BlockDevice, Closing, InfoValue, Registry, Uuid};
use control::json::{Map, Value, json};
use control::{ByName, CallRecorder, Method, Module, Parameters, RpcError};
use rbd::{ClusterOptions, Image, ImageClosed, ImageName, RadosCluster, RbdError};
use reactor::blocking;

use crate::device::{self, PRODUCT_NAME, RbdBdev, RbdConfig};
use crate::image::{self, ImageState, WatchedImage};
use crate::options::CephOptions;

/// How long a removal, and the end of the program, waits for the cluster to close an image.
const CLOSE_SECONDS_MAX: u64 = 10;

/// Images of Ceph clusters as a [`Module`].
pub struct RbdModule {
    bdevs: Arc<BdevModule>,
    clusters: Arc<Mutex<BTreeMap<String, RegisteredCluster>>>,
    registered: CallRecorder,
    /// Of the thread that reads the sizes of images that have changed, once there is an image.
    changes: Mutex<Option<Sender<Weak<ImageState>>>>,
}

/// A connection that bdevs share.
struct RegisteredCluster {
    cluster: RadosCluster,
    params: RegisterCluster,
}

impl RbdModule {
    /// Creates devices among those of `bdevs`.
    pub fn new(bdevs: &Arc<BdevModule>) -> Arc<RbdModule> {
        let clusters: Arc<Mutex<BTreeMap<String, RegisteredCluster>>> = Arc::default();
        let known = clusters.clone();
        let registered = bdevs.saved_calls().recorder(move |name| sync::lock(&known).contains_key(name));
        Arc::new(RbdModule { bdevs: bdevs.clone(), clusters, registered, changes: Mutex::default() })
    }

    /// The devices of the module.
    fn devices(&self) -> Vec<Arc<BlockDevice>> {
        let mut devices = self.bdevs.registry().list();
        devices.retain(|device| device.module::<RbdBdev>().is_some());
        devices
    }

    /// Where changes of images go.
    fn changes(&self) -> Result<Sender<Weak<ImageState>>, RpcError> {
        let mut changes = sync::lock(&self.changes);
        if changes.is_none() {
            let (sender, receiver) = channel();
            let registry = self.bdevs.registry().clone();
            let read = move |changed: Weak<ImageState>| {
                if let Some(state) = changed.upgrade() {
                    image::refresh(&registry, &state);
                }
            };
            blocking::spawn_worker("rbd-sizes", receiver, read).map_err(RpcError::internal)?;
            *changes = Some(sender);
        }
        let Some(sender) = &*changes else { unreachable!("it is there now") };
        Ok(sender.clone())
    }
}

const LIBRARY: (i64, &str) = (RpcError::ENOTSUP, "librbd or librados is not installed");
const MISSING: (i64, &str) = (RpcError::ENODEV, "there is no such bdev, or it is of another module");
const CEPH: (i64, &str) = (RpcError::EIO, "any other error of Ceph has its own number");

impl Module for RbdModule {
    const NAME: &'static str = "bdev_rbd";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<RbdModule>> {
        vec![
            Method::prepared_update("bdev_rbd_create", prepare_create, create)
                .text(
                    "Creates a bdev on an image of Ceph, through librbd, which is loaded at run time. Waits for the \
                     cluster, as its option `client_mount_timeout` says. Requests that it does not answer wait, or fail \
                     as its options say.",
                    "name of the bdev",
                )
                .assigns(&["name", "uuid"])
                .errors(&[
                    (RpcError::EEXIST, "the name or UUID is in use"),
                    (RpcError::EINVAL, "the block size is no multiple of 512, or Ceph refuses an option"),
                    (RpcError::ENODEV, "no cluster of this name is registered"),
                    (-2, "there is no such image, pool or configuration file"),
                    (RpcError::ETIMEDOUT, "the cluster has not answered"),
                    LIBRARY,
                    CEPH,
                ]),
            Method::concluded_update("bdev_rbd_delete", delete, conclude)
                .text("Deletes the bdev. I/O in flight completes first; the image stays as it is.", "true")
                .errors(&[MISSING, STILL_OPEN]),
            Method::prepared_update("bdev_rbd_resize", prepare_resize, resize)
                .text(
                    "Makes the image larger. Other users of the image see it too, as this bdev sees their changes.",
                    "true",
                )
                .errors(&[MISSING, (RpcError::EINVAL, "it is larger already"), CEPH]),
            Method::prepared_update("bdev_rbd_register_cluster", prepare_register, register)
                .text("Connects to a Ceph cluster, for bdevs that share the connection.", "name of the cluster")
                .errors(&[
                    (RpcError::EEXIST, "the name is in use"),
                    (RpcError::EINVAL, "the cores or an option are invalid"),
                    (-2, "there is no such configuration file"),
                    (RpcError::ETIMEDOUT, "the cluster has not answered"),
                    LIBRARY,
                    CEPH,
                ]),
            Method::concluded_update("bdev_rbd_unregister_cluster", unregister, disconnect)
                .text("Ends the connection to a cluster.", "true")
                .errors(&[
                    (RpcError::ENODEV, "no cluster of this name is registered"),
                    (RpcError::EBUSY, "a bdev uses it"),
                ]),
            Method::query("bdev_rbd_get_clusters_info", get_clusters)
                .text(
                    "Lists the registered clusters.",
                    "array of `cluster_name`, `user_id`, `config_param`, `config_file`, `key_file`, `core_mask`; with a \
                     name that cluster alone",
                )
                .errors(&[(RpcError::ENODEV, "no cluster of this name is registered")]),
        ]
    }

    /// Closes the images, which flushes what librbd caches. The reactors have stopped.
    fn stop(&self) {
        let closed: Vec<_> = self
            .devices()
            .iter()
            .filter_map(|device| {
                let closed = device.module::<RbdBdev>()?.closed();
                remove_stack(self.bdevs.registry(), device);
                Some((device.name().to_string(), closed))
            })
            .collect();
        for (name, closed) in closed {
            if !closed.wait(Duration::from_secs(CLOSE_SECONDS_MAX)) {
                log::warn!(target: "bdev_rbd", "the image of {name} is not closed: its cluster does not answer");
            }
        }
        sync::lock(&self.clusters).clear();
    }

    fn report(&self) -> Value {
        json!({ "bdevs": self.devices().len(), "clusters": sync::lock(&self.clusters).len() })
    }
}

/// Unregisters a device after all that stands on it.
fn remove_stack(registry: &Registry, device: &BlockDevice) {
    registry.uppers(device).iter().for_each(|upper| remove_stack(registry, upper));
    // An error means that it is gone already.
    _ = registry.unregister(device.name());
}

/// The error of a call, with what to do about the most likely ones.
fn failed(error: &RbdError) -> RpcError {
    let code = match error {
        RbdError::Load(_) => RpcError::ENOTSUP,
        RbdError::Nul(_) => RpcError::EINVAL,
        RbdError::Call { errno, .. } => -i64::from(*errno),
    };
    RpcError::new(code, error.to_string())
}

control::parameters! {
    struct RbdCreate {
        /// Name; without, the next unused of Ceph0, Ceph1, …
        name: Option<String>,
        /// User of Ceph, without `client.`; without, admin
        user_id: Option<String>,
        /// Pool
        pool_name: String,
        /// Image
        rbd_name: String,
        /// Namespace in the pool; without, the default one
        namespace_name: Option<String>,
        /// Size of a block: a multiple of 512
        block_size: u32 ["bytes"],
        /// Options of Ceph; without, its configuration file is read
        config: Option<CephOptions>,
        /// A cluster of `bdev_rbd_register_cluster`, instead of `user_id` and `config`
        cluster_name: Option<String>,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
    }
}

/// An image that was opened for a call.
struct PreparedCreate {
    params: RbdCreate,
    image: WatchedImage,
}

fn prepare_create(module: &RbdModule, params: RbdCreate) -> Result<PreparedCreate, RpcError> {
    device::check_block_size(params.block_size)?;
    if let Some(name) = &params.name
        && module.bdevs.registry().find(name).is_some()
    {
        return Err(bdev::BdevError::Exists { name: name.clone() }.into());
    }
    let cluster = match &params.cluster_name {
        Some(_) if params.user_id.is_some() || params.config.is_some() => {
            return Err(RpcError::invalid_params("cluster_name and user_id or config are exclusive"));
        }
        Some(name) => module.cluster(name)?,
        None => {
            let options = ClusterOptions {
                user_id: params.user_id.clone(),
                options: params.config.as_ref().map(CephOptions::pairs),
                ..ClusterOptions::default()
            };
            RadosCluster::connect(&options).map_err(|error| failed(&error))?
        }
    };
    let name = ImageName {
        pool: &params.pool_name,
        namespace: params.namespace_name.as_deref(),
        image: &params.rbd_name,
    };
    let changes = module.changes()?;
    let image = Image::open(&cluster, name, false)
        .and_then(|image| image::watch(image, params.block_size, changes))
        .map_err(|error| failed(&error))?;
    Ok(PreparedCreate { params, image })
}

fn create(module: &RbdModule, prepared: PreparedCreate) -> Result<String, RpcError> {
    let PreparedCreate { mut params, image } = prepared;
    let registry = module.bdevs.registry();
    let name = match &params.name {
        Some(name) => name.clone(),
        None => {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let mut names =
                std::iter::repeat_with(|| format!("Ceph{}", COUNT.fetch_add(1, Ordering::Relaxed)));
            names.find(|name| registry.find(name).is_none()).unwrap_or_default()
        }
    };
    let config = RbdConfig {
        name,
        uuid: params.uuid,
        block_size: params.block_size,
        info: module.info(&params),
        cluster_name: params.cluster_name.clone(),
    };
    let device = device::create(registry, config, image)?;
    (params.name, params.uuid) = (Some(device.name().to_string()), Some(device.uuid()));
    Ok(module.bdevs.record(&device, "bdev_rbd_create", &params))
}

impl RbdModule {
    fn cluster(&self, name: &str) -> Result<RadosCluster, RpcError> {
        let clusters = sync::lock(&self.clusters);
        Ok(clusters.get(name).ok_or_else(|| no_cluster(name))?.cluster.clone())
    }

    /// The members of `driver_specific.rbd`, without the values of options that may be keys.
    fn info(&self, params: &RbdCreate) -> Vec<(&'static str, InfoValue)> {
        let mut info = vec![
            ("pool_name", InfoValue::from(params.pool_name.as_str())),
            ("rbd_name", params.rbd_name.as_str().into()),
        ];
        if let Some(namespace) = &params.namespace_name {
            info.push(("namespace_name", namespace.as_str().into()));
        }
        match &params.cluster_name {
            Some(name) => {
                info.push(("cluster_name", name.as_str().into()));
                let clusters = sync::lock(&self.clusters);
                if let Some(user) = clusters.get(name).and_then(|cluster| cluster.params.user_id.as_deref()) {
                    info.push(("user_id", user.into()));
                }
            }
            None => {
                if let Some(user) = &params.user_id {
                    info.push(("user_id", user.as_str().into()));
                }
            }
        }
        info
    }
}

fn no_cluster(name: &str) -> RpcError {
    RpcError::new(RpcError::ENODEV, format!("no cluster is registered as {name}"))
}

/// A bdev that is being closed, and its image, which is closed after it.
struct Deleted {
    name: String,
    closing: Closing,
    image: Option<Arc<ImageClosed>>,
}

fn delete(module: &RbdModule, params: ByName) -> Result<Deleted, RpcError> {
    let device = module.bdevs.find(&params.name)?;
    let image = device.module::<RbdBdev>().map(RbdBdev::closed);
    let name = device.name().to_string();
    Ok(Deleted { closing: module.bdevs.delete(&params.name, PRODUCT_NAME)?, image, name })
}

fn conclude(module: &RbdModule, deleted: Deleted) -> Result<bool, RpcError> {
    bdev::rpc::conclude(module, deleted.closing)?;
    let limit = Duration::from_secs(CLOSE_SECONDS_MAX);
    if deleted.image.is_some_and(|image| !image.wait(limit)) {
        let message = format!("{} is removed, but its cluster has not closed the image yet", deleted.name);
        return Err(RpcError::new(RpcError::EINPROGRESS, message));
    }
    Ok(true)
}

control::parameters! {
    struct RbdResize {
        /// Name
        name: String,
        /// Size
        new_size: u64 ["MiB"],
    }
}

fn prepare_resize(module: &RbdModule, params: RbdResize) -> Result<Arc<ImageState>, RpcError> {
    let device = module.bdevs.find(&params.name)?;
    let Some(bdev) = device.module::<RbdBdev>() else {
        let message = format!("{} is no {PRODUCT_NAME}", params.name);
        return Err(RpcError::new(RpcError::ENODEV, message));
    };
    let invalid = |reason: String| RpcError::new(RpcError::EINVAL, format!("new_size: {reason}"));
    let bytes = params.new_size.checked_mul(1 << 20).filter(|bytes| *bytes <= i64::MAX as u64);
    let bytes = bytes.ok_or_else(|| invalid(format!("{} MiB is not a valid capacity", params.new_size)))?;
    let state = bdev.state().clone();
    let removed = || RpcError::new(RpcError::ENODEV, format!("{} is removed", params.name));
    let image = state.image().ok_or_else(removed)?;
    let present = image.bytes().map_err(|error| failed(&error))?;
    if bytes < present {
        return Err(invalid(format!("the image has {present} bytes, and data would be lost (`rbd resize`)")));
    }
    image.resize(bytes).map_err(|error| failed(&error))?;
    Ok(state)
}

fn resize(module: &RbdModule, state: Arc<ImageState>) -> Result<bool, RpcError> {
    image::refresh(module.bdevs.registry(), &state);
    Ok(true)
}

control::parameters! {
    struct RegisterCluster {
        /// Name
        name: String,
        /// User of Ceph, without `client.`; without, admin
        user_id: Option<String>,
        /// Options of Ceph, instead of a configuration file
        config_param: Option<CephOptions>,
        /// Configuration file; without, that which Ceph finds
        config_file: Option<String>,
        /// File with the user's key
        key_file: Option<String>,
        /// Cores of the library's threads, as a mask or a list in brackets; without, any
        core_mask: Option<String>,
    }
}

fn prepare_register(
    module: &RbdModule,
    params: RegisterCluster,
) -> Result<(RegisterCluster, RadosCluster), RpcError> {
    check_unused(module, &params.name)?;
    if params.config_param.is_some() && params.config_file.is_some() {
        return Err(RpcError::invalid_params("config_param and config_file are exclusive"));
    }
    let cpus = match &params.core_mask {
        Some(mask) => {
            let invalid = |error| RpcError::new(RpcError::EINVAL, format!("core_mask: {error}"));
            os::CpuSet::from_mask(mask).map_err(invalid)?.cpus().to_vec()
        }
        None => Vec::new(),
    };
    let options = ClusterOptions {
        user_id: params.user_id.clone(),
        config_file: params.config_file.clone(),
        options: params.config_param.as_ref().map(CephOptions::pairs),
        key_file: params.key_file.clone(),
        cpus,
    };
    let cluster = RadosCluster::connect(&options).map_err(|error| failed(&error))?;
    Ok((params, cluster))
}

fn check_unused(module: &RbdModule, name: &str) -> Result<(), RpcError> {
    if sync::lock(&module.clusters).contains_key(name) {
        return Err(RpcError::new(RpcError::EEXIST, format!("a cluster is registered as {name} already")));
    }
    Ok(())
}

fn register(
    module: &RbdModule,
    (params, cluster): (RegisterCluster, RadosCluster),
) -> Result<String, RpcError> {
    check_unused(module, &params.name)?;
    let name = params.name.clone();
    module.registered.record(&name, "bdev_rbd_register_cluster", &params);
    sync::lock(&module.clusters).insert(name.clone(), RegisteredCluster { cluster, params });
    Ok(name)
}

fn unregister(module: &RbdModule, params: ByName) -> Result<RadosCluster, RpcError> {
    let is_on = |device: &Arc<BlockDevice>| {
        device.module::<RbdBdev>().and_then(RbdBdev::cluster_name) == Some(&params.name)
    };
    if let Some(device) = module.devices().iter().find(|device| is_on(device)) {
        let message = format!("the bdev {} uses the cluster {}; delete it first", device.name(), params.name);
        return Err(RpcError::new(RpcError::EBUSY, message));
    }
    let removed = sync::lock(&module.clusters).remove(&params.name);
    let removed = removed.ok_or_else(|| no_cluster(&params.name))?;
    module.registered.remove(&params.name);
    Ok(removed.cluster)
}

/// Shuts the connection down, which waits for its threads.
fn disconnect(_: &RbdModule, cluster: RadosCluster) -> Result<bool, RpcError> {
    drop(cluster);
    Ok(true)
}

control::parameters! {
    struct GetClusters {
        /// Name; without, all
        name: Option<String>,
    }
}

fn get_clusters(module: &RbdModule, params: GetClusters) -> Result<Value, RpcError> {
    let clusters = sync::lock(&module.clusters);
    match params.name {
        Some(name) => Ok(cluster_info(&clusters.get(&name).ok_or_else(|| no_cluster(&name))?.params)),
        None => Ok(clusters.values().map(|cluster| cluster_info(&cluster.params)).collect()),
    }
}

/// The members that were given, under SPDK's names.
fn cluster_info(params: &RegisterCluster) -> Value {
    let mut info = Map::new();
    for (name, value) in params.to_object() {
        let name = if name == "name" { "cluster_name".to_string() } else { name };
        if !value.is_null() {
            info.insert(name, value);
        }
    }
    Value::Object(info)
}
