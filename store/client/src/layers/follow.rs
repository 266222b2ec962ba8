//! Following the volumes of an image that another process writes.

use std::sync::{Arc, Weak};
use std::time::Duration;

use cluster_map::{ImageEntry, MapError, parents_of};
use uuid::Uuid;

use super::{ImageChain, LayerChain};
use crate::Cluster;

/// A thread that follows a chain looks at least this often whether it is in use.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Has an image that is only read follow its chain in the map, which changes with snapshots and rollbacks, on
/// a thread that ends with the image.
pub(crate) fn follow_chain(cluster: &Cluster, pool: &str, uuid: Uuid, chain: &Arc<ImageChain>) {
    let (cluster, pool, chain) = (cluster.clone(), pool.to_string(), Arc::downgrade(chain));
    std::thread::spawn(move || follow(&cluster, &pool, uuid, &chain));
}

fn follow(cluster: &Cluster, pool: &str, uuid: Uuid, chain: &Weak<ImageChain>) {
    let mut changes = cluster.map().changes();
    loop {
        let changed = changes.wait(WAIT_MAX);
        let Some(chain) = chain.upgrade() else { return };
        let read = match changed {
            Ok(changed) if changed.is_empty() => continue,
            Ok(_) => read_chain(cluster, pool, uuid),
            Err(error) => Err(error),
        };
        match read {
            Ok(Some(newest)) if !chain.get().0.is_same(&newest) => chain.replace(newest),
            // Of an image that is gone what is known stays.
            Ok(_) => {}
            Err(error) => {
                log::debug!("the volumes of an image of pool {pool}: {error}");
                std::thread::sleep(changes.retry_after().min(WAIT_MAX));
            }
        }
    }
}

fn read_chain(cluster: &Cluster, pool: &str, uuid: Uuid) -> Result<Option<LayerChain>, MapError> {
    let images = cluster.map().images()?;
    let is_it = |((of, _), image): &(&(String, String), &ImageEntry)| of == pool && image.uuid == uuid;
    let Some((_, image)) = images.iter().find(is_it) else { return Ok(None) };
    let parents = parents_of(&images, pool, image.layers.parent)?;
    Ok(Some(LayerChain::new(image.volume, parents, true)))
}
