//! A cluster as its clients find it: the map, and the key.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cluster_map::{
    ClusterMap, EtcdOptions, GroupId, ImageEntry, MapError, MapLocation, PoolClass, PoolRecord, ReplicaId,
};
use sockets::StreamAddress;
use store_link::{Identity, LinkKey, NodeAddress};

/// Why a client cannot use a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The map.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The key.
    #[error("the cluster's key {path}: {source}", path = .path.display())]
    Key {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        source: std::io::Error,
    },
    /// There is no cluster there.
    #[error("there is no cluster in {}: `ringbolt store up` makes one", .0.display())]
    NoCluster(PathBuf),
    /// There is no such image.
    #[error("there is no image {pool}/{image}")]
    NoImage {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
    },
    /// There is no such snapshot.
    #[error("image {pool}/{image} has no snapshot {snapshot}")]
    NoSnapshot {
        /// Pool.
        pool: String,
        /// Name of the image.
        image: String,
        /// Name of the snapshot.
        snapshot: String,
    },
    /// An image of several volumes is to be shared.
    #[error(
        "image {pool}/{image} has snapshots or a parent: one process at a time writes it, so that it cannot \
         be shared (shared=true)"
    )]
    SharedLayers {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
    },
    /// The image is in the trash.
    #[error("image {pool}/{image} is in the trash: `ringbolt image restore` takes it out")]
    Trashed {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
    },
    /// Several images in the trash had a name.
    #[error(
        "several images in the trash were {pool}/{image}: choose one by its volume, --volume with one of {volumes}"
    )]
    SeveralTrashed {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
        /// Their volumes.
        volumes: String,
    },
    /// The image has a part of a stream of differences.
    #[error(
        "image {pool}/{image} has a part of a backup of snapshot {to} (`ringbolt image import-diff`): import \
         the whole backup again, which goes on; or `ringbolt image snapshot rollback` takes the part back"
    )]
    Importing {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
        /// The snapshot that the stream leads to.
        to: String,
    },
    /// Another one has the image attached.
    #[error(
        "image {pool}/{image} is in use by {holder} (process {process}, {address}), which attached it {seconds} s ago: stop that, or \
         fence it with --force (force=true); then what it has in flight is refused"
    )]
    InUse {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
        /// Its host.
        holder: String,
        /// Its process there.
        process: u32,
        /// Its address.
        address: String,
        /// Since when it has it.
        seconds: u64,
    },
    /// Another one has the image attached, and does not make a snapshot of it.
    #[error(
        "image {pool}/{image} is in use by {holder} (process {process}, {address}), which did not make the \
         snapshot within 10 s: its log says why, or its release knows no snapshots; stop that, or fence it \
         with --force"
    )]
    Unanswered {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
        /// Its host.
        holder: String,
        /// Its process there.
        process: u32,
        /// Its address.
        address: String,
    },
    /// An image would lose its end.
    #[error(
        "image {pool}/{image} would lose its last {cut} bytes, and what they have: with --allow-shrink they are removed for good"
    )]
    Shrinks {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
        /// Bytes that would be gone.
        cut: u64,
    },
    /// Another one changed an image at the same time.
    #[error(
        "image {pool}/{image} was changed by another one at the same time: look at its size (`ringbolt image list`), and try again"
    )]
    Changed {
        /// Pool.
        pool: String,
        /// Name.
        image: String,
    },
    /// A volume is that of an image.
    #[error("volume {0} is that of an image: `ringbolt image remove` removes it")]
    VolumeOfImage(u64),
    /// The map has an address that is none.
    #[error("node {node} has the address {address:?}, which is none")]
    Address {
        /// The node.
        node: u32,
        /// Its address.
        address: String,
    },
    /// A group of a pool has no record.
    #[error("logical group {0} has no record in the map")]
    NoGroup(u32),
    /// The size cannot be that of an image.
    #[error("{0} bytes are no size of an image: a multiple of 512, at most 16 PiB")]
    Size(u64),
}

/// Refuses to use an image of which a part was imported.
pub(crate) fn check_whole(pool: &str, name: &str, image: &ImageEntry) -> Result<(), ClientError> {
    match &image.layers.import {
        None => Ok(()),
        Some(import) => Err(ClientError::Importing {
            pool: pool.to_string(),
            image: name.to_string(),
            to: import.name.clone(),
        }),
    }
}

/// A cluster: its map, which is in its directory or in etcd, and its key or that of a client.
#[derive(Clone)]
pub struct Cluster {
    directory: PathBuf,
    map: Arc<dyn ClusterMap>,
    key: LinkKey,
}

/// What channels of an image need of its pool.
pub(crate) struct PoolView {
    pub(crate) identity: Arc<Identity>,
    pub(crate) pool: PoolRecord,
    pub(crate) nodes: BTreeMap<ReplicaId, NodeAddress>,
    /// The replicas of each group, the primary first.
    pub(crate) replicas: BTreeMap<u32, Vec<ReplicaId>>,
}

impl Cluster {
    /// Opens the cluster in a directory: its key is in `key`; its map is in etcd if there are URLs or the
    /// file `etcd` has some, else in `map`.
    ///
    /// # Errors
    /// [`ClientError::NoCluster`], [`ClientError::Key`], [`ClientError::Map`].
    pub fn open(directory: &Path, etcd: &EtcdOptions) -> Result<Cluster, ClientError> {
        let location = MapLocation::find(directory, etcd)?;
        let location = location.ok_or_else(|| ClientError::NoCluster(directory.to_path_buf()))?;
        let path = directory.join("key");
        let key = LinkKey::load(&path).map_err(|source| ClientError::Key { path, source })?;
        Ok(Cluster { directory: directory.to_path_buf(), map: location.open()?, key })
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its map.
    pub fn map(&self) -> &Arc<dyn ClusterMap> {
        &self.map
    }

    /// Who a client of it is.
    ///
    /// # Errors
    /// [`ClientError::Map`].
    pub fn identity(&self, node: Option<ReplicaId>) -> Result<Identity, ClientError> {
        let cluster = self.map.cluster()?.into_bytes();
        Ok(Identity { cluster, node, key: self.key.clone() })
    }

    /// An image of a pool, which is not in the trash.
    ///
    /// # Errors
    /// [`ClientError::NoImage`], [`ClientError::Trashed`], [`ClientError::Map`].
    pub fn image(&self, pool: &str, image: &str) -> Result<ImageEntry, ClientError> {
        let missing = || ClientError::NoImage { pool: pool.to_string(), image: image.to_string() };
        let found = self.map.images()?.remove(&(pool.to_string(), image.to_string())).ok_or_else(missing)?;
        match found.trashed {
            None => Ok(found),
            Some(_) => Err(ClientError::Trashed { pool: pool.to_string(), image: image.to_string() }),
        }
    }

    pub(crate) fn view(&self, pool: &str) -> Result<PoolView, ClientError> {
        let missing = || MapError::Missing(format!("pool {pool}"));
        let pool = self.map.pools()?.remove(pool).ok_or_else(missing)?;
        let mut nodes = BTreeMap::new();
        for (id, node) in self.map.nodes()? {
            // One that was never started has none.
            let Some(address) = node.addresses.first() else { continue };
            let parsed = address.parse().map(StreamAddress::Tcp);
            let parsed = parsed.map_err(|_| ClientError::Address { node: id.0, address: address.clone() })?;
            nodes.insert(ReplicaId(id.0), NodeAddress { stream: parsed, has_tls: !node.tls.is_off() });
        }
        let mut replicas: BTreeMap<u32, Vec<ReplicaId>> = BTreeMap::new();
        let range = pool.first_group..pool.first_group + pool.groups;
        let mut records = self.map.groups(range.clone())?;
        for group in range {
            let record = records.remove(&GroupId(group)).ok_or(ClientError::NoGroup(group))?;
            let primary = record.config.primary;
            let others = record.replicas.into_iter().filter(|replica| *replica != primary);
            replicas.insert(group, [primary].into_iter().chain(others).collect());
        }
        Ok(PoolView { identity: Arc::new(self.identity(None)?), pool, nodes, replicas })
    }

    /// Where a write of the pool is when it is acknowledged, as far as the devices of its replicas keep its
    /// class. Not part of a view: a client that looks for its replicas does not wait for all devices of a
    /// large cluster.
    pub(crate) fn class(&self, view: &PoolView) -> Result<PoolClass, ClientError> {
        let used: BTreeSet<_> = view.replicas.values().flatten().copied().collect();
        let devices = self.map.devices()?;
        let devices = devices.values().filter(|device| used.contains(&ReplicaId(device.node.0)));
        Ok(view.pool.class_on(devices))
    }
}
