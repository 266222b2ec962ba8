//! The module of cluster images for the control plane: the methods `bdev_store_*`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bdev::rpc::{STILL_OPEN, conclude};
use bdev::{Closing, Registry};
use cluster_map::{EtcdFiles, EtcdOptions, MapError};
use control::json::{Value, json};
use control::{JobHandle, Method, Module, RpcError};

use crate::{ClientError, Cluster, ClusterImage};

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
            | ClientError::NoCluster(_) => RpcError::ENODEV,
            ClientError::Map(MapError::Invalid(_)) | ClientError::Size(_) => RpcError::EINVAL,
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
                    (RpcError::EIO, "the map or the key of the cluster cannot be read"),
                ]),
            Method::job("bdev_store_delete", delete)
                .text("Deletes a bdev of a cluster's image. The image stays. Not an SPDK method.", "true")
                .errors(&[(RpcError::ENODEV, "no such bdev of a cluster's image exists"), STILL_OPEN]),
        ]
    }

    fn drain(&self) {
        for name in std::mem::take(&mut *sync::lock(&self.images)).into_keys() {
            // It may be gone already.
            let _ = self.registry.unregister(&name);
        }
    }

    fn save(&self) -> Vec<Value> {
        let images = sync::lock(&self.images);
        let call = |(name, attached): (&String, &Attached)| {
            let Attached { pool, image, cluster, etcd } = attached;
            let mut params = json!({ "name": name, "pool": pool, "image": image, "cluster": cluster });
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
        /// Name of the image
        image: String,
        /// Directory of the cluster, with its key, and with its map or the URLs of etcd
        cluster: String,
        /// URLs of etcd, which has the map: `http://HOST:PORT[/PREFIX]`, with commas between
        etcd: Option<String>,
        /// File with a user of etcd, a line `NAME:PASSWORD`; without, `etcd-user` of the directory if it is there
        etcd_user_file: Option<String>,
        /// File with the certificates of etcd's CAs, which `https://` needs; without, `etcd-ca.pem` of the directory
        etcd_ca_file: Option<String>,
        /// File with a client certificate for etcd; without, `etcd-cert.pem` of the directory if it is there
        etcd_cert_file: Option<String>,
        /// File with its key; without, `etcd-key.pem` of the directory if it is there
        etcd_key_file: Option<String>,
        /// Name of the bdev; without, `POOL/IMAGE`
        name: Option<String>,
    }
}

fn create(module: &ClusterImageModule, params: CreateParams, _job: &JobHandle) -> Result<String, RpcError> {
    let CreateParams { pool, image, cluster, etcd, name, .. } = params;
    let CreateParams { etcd_user_file, etcd_ca_file, etcd_cert_file, etcd_key_file, .. } = params;
    let files = EtcdFiles::at(etcd_user_file, etcd_ca_file, etcd_cert_file, etcd_key_file);
    let etcd = EtcdOptions { urls: etcd, files };
    let name = name.unwrap_or_else(|| format!("{pool}/{image}"));
    let opened = Cluster::open(cluster.as_ref(), &etcd)?;
    let uuid = opened.image(&pool, &image)?.uuid;
    let bdev = ClusterImage::open(&opened, &pool, &image)?;
    let registered = module.registry.register(&name, Some(uuid), &[], Arc::new(bdev));
    registered.map_err(|error| RpcError::new(RpcError::EEXIST, error.to_string()))?;
    let attached = Attached { pool, image, cluster: opened.directory().to_path_buf(), etcd };
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
    sync::lock(&module.images).remove(&params.name).ok_or_else(missing)?;
    let removed = module.registry.unregister(&params.name);
    let removed = removed.map_err(|error| RpcError::new(RpcError::ENODEV, error.to_string()))?;
    conclude(module, Closing::removed([removed]))
}
