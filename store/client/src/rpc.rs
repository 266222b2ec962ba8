//! The module of cluster images for the control plane: the methods `bdev_store_*`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bdev::rpc::{STILL_OPEN, conclude};
use bdev::{Closing, Registry};
use cluster_map::{EtcdFiles, EtcdOptions, MapError};
use control::json::{Value, json};
use control::{JobHandle, Method, Module, RpcError};

use crate::{AttachOptions, ClientError, Cluster, ClusterImage};

/// `EBUSY`: another server has the image.
const IN_USE: i64 = -16;

/// The images of clusters that a program uses, as a [`Module`].
pub struct ClusterImageModule {
    registry: Registry,
    /// By name of the bdev.
    images: Mutex<BTreeMap<String, Attached>>,
}

/// An image in use.
struct Attached {
    pool: String,
    image: String,
    cluster: PathBuf,
    etcd: EtcdOptions,
    options: AttachOptions,
    bdev: Arc<ClusterImage>,
}

impl ClusterImageModule {
    /// No images.
    pub fn new(registry: Registry) -> Arc<ClusterImageModule> {
        Arc::new(ClusterImageModule { registry, images: Mutex::default() })
    }
}

impl From<ClientError> for RpcError {
    fn from(error: ClientError) -> RpcError {
        let code = match &error {
            ClientError::Map(MapError::Exists(_)) => RpcError::EEXIST,
            ClientError::Map(MapError::Missing(_))
            | ClientError::NoImage { .. }
            | ClientError::NoSnapshot { .. }
            | ClientError::NoCluster(_) => RpcError::ENODEV,
            ClientError::Map(MapError::Invalid(_))
            | ClientError::Size(_)
            | ClientError::SharedLayers { .. } => RpcError::EINVAL,
            ClientError::InUse { .. } => IN_USE,
            _ => RpcError::EIO,
        };
        RpcError::new(code, error.to_string())
    }
}

impl Module for ClusterImageModule {
    const NAME: &'static str = "bdev_store";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<ClusterImageModule>> {
        vec![
            Method::job("bdev_store_create", create)
                .text(
                    "Creates a bdev of an image of a cluster of the store, which `ringbolt image create` made. Not an SPDK \
                     method.",
                    "name of the bdev",
                )
                .canonical(|_: &ClusterImageModule, params: &mut CreateParams| {
                    params.name.get_or_insert_with(|| format!("{}/{}", params.pool, params.image));
                    Ok(())
                })
                .errors(&[
                    (RpcError::ENODEV, "there is no such cluster, pool or image"),
                    (RpcError::EEXIST, "a bdev has the name"),
                    (IN_USE, "another server has the image attached; the message names it"),
                    (RpcError::EIO, "the map or the key of the cluster cannot be read"),
                ]),
            Method::job("bdev_store_delete", delete)
                .text(
                    "Deletes a bdev of a cluster's image. What it has in flight fails and is never sent again; others may attach the \
                     image. The image stays. Not an SPDK method.",
                    "true",
                )
                .errors(&[(RpcError::ENODEV, "no such bdev of a cluster's image exists"), STILL_OPEN]),
        ]
    }

    fn drain(&self) {
        for (name, attached) in std::mem::take(&mut *sync::lock(&self.images)) {
            // It may be gone already. What is in flight completes; another holder fences what does not.
            let _ = self.registry.unregister(&name);
            attached.bdev.detach();
        }
    }

    fn save(&self) -> Vec<Value> {
        let images = sync::lock(&self.images);
        let call = |(name, attached): (&String, &Attached)| {
            let Attached { pool, image, cluster, etcd, options, .. } = attached;
            let mut params = json!({ "name": name, "pool": pool, "image": image, "cluster": cluster });
            // Not `force`: a server that starts again takes the image from no other holder.
            for (option, is_given) in [("shared", options.shared), ("read_only", options.read_only)] {
                if is_given {
                    params[option] = true.into();
                }
            }
            for (name, value) in etcd.parameters() {
                params[name] = value.into();
            }
            json!({ "method": "bdev_store_create", "params": params })
        };
        images.iter().map(call).collect()
    }
}

control::parameters! {
    struct CreateParams {
        /// Pool of the image
        pool: String,
        /// Name of the image, or `IMAGE@SNAPSHOT`, which is only read
        image: String,
        /// Directory of the cluster, with its key, and with its map or the URLs of etcd
        cluster: String,
        /// URLs of etcd, which has the map: `http://HOST:PORT[/PREFIX]`, with commas between
        etcd: Option<String>,
        /// File with a user of etcd, a line `NAME:PASSWORD`; without, `etcd-user` of the directory if it is
        /// there
        etcd_user_file: Option<String>,
        /// File with the certificates of etcd's CAs, which `https://` needs; without, `etcd-ca.pem` of the
        /// directory
        etcd_ca_file: Option<String>,
        /// File with a client certificate for etcd; without, `etcd-cert.pem` of the directory if it is there
        etcd_cert_file: Option<String>,
        /// File with its key; without, `etcd-key.pem` of the directory if it is there
        etcd_key_file: Option<String>,
        /// Name of the bdev; without, `POOL/IMAGE`
        name: Option<String>,
        /// Takes the image from the server that has it attached: what that one has in flight is refused
        force: bool = false,
        /// Other servers may attach the image with `shared` as well; the bdev then has blocks of 4 KiB
        shared: bool = false,
        /// Only reads, beside a server that has the image attached
        read_only: bool = false,
    }
}

fn create(module: &ClusterImageModule, params: CreateParams, _job: &JobHandle) -> Result<String, RpcError> {
    let CreateParams { pool, image, cluster, etcd, name, .. } = params;
    let CreateParams { etcd_user_file, etcd_ca_file, etcd_cert_file, etcd_key_file, .. } = params;
    let CreateParams { force, shared, read_only, .. } = params;
    let options = AttachOptions { force, shared, read_only, same_run: false };
    let files = EtcdFiles::at(etcd_user_file, etcd_ca_file, etcd_cert_file, etcd_key_file);
    let etcd = EtcdOptions { urls: etcd, files };
    let name = name.unwrap_or_else(|| format!("{pool}/{image}"));
    let opened = Cluster::open(cluster.as_ref(), &etcd)?;
    let uuid = opened.image_uuid(&pool, &image)?;
    if module.registry.find(&name).is_some() {
        return Err(RpcError::new(RpcError::EEXIST, format!("a bdev has the name {name}")));
    }
    let bdev = Arc::new(ClusterImage::open(&opened, &pool, &image, options)?);
    let registered = module.registry.register(&name, Some(uuid), &[], bdev.clone());
    if let Err(error) = registered {
        bdev.detach();
        return Err(RpcError::new(RpcError::EEXIST, error.to_string()));
    }
    let (registry, of) = (module.registry.clone(), name.clone());
    bdev.follow(move || {
        // It may be deleted meanwhile.
        let _ = registry.notify_resized(&of);
    });
    let cluster = opened.directory().to_path_buf();
    let attached = Attached { pool, image, cluster, etcd, options, bdev };
    sync::lock(&module.images).insert(name.clone(), attached);
    Ok(name)
}

control::parameters! {
    struct DeleteParams {
        /// Name of the bdev
        name: String,
    }
}

fn delete(module: &ClusterImageModule, params: DeleteParams, _job: &JobHandle) -> Result<bool, RpcError> {
    let missing =
        || RpcError::new(RpcError::ENODEV, format!("no cluster image has the bdev {}", params.name));
    let attached = sync::lock(&module.images).remove(&params.name).ok_or_else(missing)?;
    let removed = module.registry.unregister(&params.name);
    attached.bdev.abort();
    attached.bdev.detach();
    let removed = removed.map_err(|error| RpcError::new(RpcError::ENODEV, error.to_string()))?;
    conclude(module, Closing::removed([removed]))
}
