//! The view of a pool that the channels of an image share, read again when one of them reaches no replica.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};

use cluster_map::PoolClass;

use crate::cluster::{ClientError, Cluster, PoolView};

/// The newest view of a pool. A thread reads it, because cores never wait for the map.
pub(crate) struct PoolWatch {
    view: Mutex<Arc<PoolView>>,
    class: Mutex<PoolClass>,
    /// Counts views.
    version: AtomicU64,
    wanted: SyncSender<()>,
}

impl PoolWatch {
    /// Reads the map, and starts the thread. It ends with this.
    pub(crate) fn start(cluster: &Cluster, pool: &str) -> Result<Arc<PoolWatch>, ClientError> {
        let view = Arc::new(cluster.view(pool)?);
        let class = Mutex::new(cluster.class(&view)?);
        let (wanted, requests) = sync_channel(1);
        let watch = Arc::new(PoolWatch { view: Mutex::new(view), class, version: AtomicU64::new(0), wanted });
        let (cluster, pool) = (cluster.clone(), pool.to_string());
        let weak = Arc::downgrade(&watch);
        std::thread::spawn(move || {
            for () in requests {
                let view = cluster.view(&pool).map(Arc::new);
                let Some(watch) = Weak::upgrade(&weak) else { return };
                let class = view.and_then(|view| {
                    watch.replace(view.clone());
                    cluster.class(&view)
                });
                match class {
                    Ok(class) => *sync::lock(&watch.class) = class,
                    Err(error) => log::warn!("the map of the cluster: {error}"),
                }
            }
        });
        Ok(watch)
    }

    /// One that stays as it is.
    #[cfg(test)]
    pub(crate) fn fixed(view: PoolView) -> Arc<PoolWatch> {
        Arc::new(PoolWatch {
            view: Mutex::new(Arc::new(view)),
            class: Mutex::default(),
            version: AtomicU64::new(0),
            wanted: sync_channel(1).0,
        })
    }

    fn replace(&self, view: Arc<PoolView>) {
        *sync::lock(&self.view) = view;
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The newest view, and its version.
    pub(crate) fn view(&self) -> (Arc<PoolView>, u64) {
        let version = self.version();
        (sync::lock(&self.view).clone(), version)
    }

    /// See [`Cluster::class`].
    pub(crate) fn class(&self) -> PoolClass {
        *sync::lock(&self.class)
    }

    /// The version of the newest view.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Has the map read again. One request that waits serves all.
    pub(crate) fn refresh(&self) {
        let _ = self.wanted.try_send(());
    }
}
