//! `ringbolt store reclaim`: the space of images that were removed.

use std::collections::BTreeSet;

use clap::Args;
use cluster_map::{ImageEntry, RemovedImage};
use serde_json::json;
use store_client::{Cluster, VolumeUse};

use super::arguments::ClusterArgs;
use crate::command_error::CommandError;
use crate::commands::image::cluster::{RemovalProgress, run as run_removal};
use crate::console::stdout_line;

/// Arguments of `ringbolt store reclaim`.
#[derive(Args)]
pub(crate) struct ReclaimArgs {
    #[command(flatten)]
    of: ClusterArgs,
    /// Remove the objects of a volume that no image has, for good; repeat it for each. It is not asked who
    /// uses it
    #[arg(long = "volume", value_name = "NUMBER")]
    volumes: Vec<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A volume of a pool that no image has.
struct UnknownVolume {
    pool: String,
    of: VolumeUse,
}

pub(super) fn run(args: &ReclaimArgs) -> Result<(), CommandError> {
    let cluster =
        Cluster::open(&args.of.cluster, &args.of.etcd.options()).map_err(CommandError::operation)?;
    let map = cluster.map().clone();
    let pools = map.pools().map_err(CommandError::operation)?;
    let removed = map.removed_images().map_err(CommandError::operation)?;
    let mut reclaimed = Vec::new();
    for image in removed.into_values() {
        if !pools.contains_key(&image.pool) {
            // Its groups are gone with its objects.
            map.image_is_empty(&image).map_err(CommandError::operation)?;
            continue;
        }
        let objects = reclaim(&cluster, &image)?;
        reclaimed.push((image, objects));
    }
    for ((pool, name), image) in map.images().map_err(CommandError::operation)? {
        if !image.layers.dropped.is_empty() && image.trashed.is_none() {
            empty_dropped(&cluster, &pool, &name)?;
        }
    }
    let mut unknown = Vec::new();
    for pool in pools.keys() {
        unknown.extend(unknown_volumes(&cluster, pool)?);
    }
    let mut emptied = Vec::new();
    for volume in &args.volumes {
        let Some(found) = unknown.iter().find(|it| it.of.volume == *volume) else {
            let reason = format!("no pool has objects of volume {volume}, or an image has it");
            return Err(CommandError::operation(reason));
        };
        emptied.push((*volume, reclaim_unknown(&cluster, &found.pool, *volume)?));
    }
    unknown.retain(|it| !args.volumes.contains(&it.of.volume));
    print(args.json, &reclaimed, &emptied, &unknown);
    Ok(())
}

fn reclaim(cluster: &Cluster, image: &RemovedImage) -> Result<u64, CommandError> {
    let (cluster, image) = (cluster.clone(), image.clone());
    let progress = RemovalProgress::new(format!("{}/{}", image.pool, image.name));
    run_removal(move |core| async move {
        let progress = move |removed, known| progress.update(removed, known);
        store_client::reclaim_removed(&core, &cluster, &image, progress).await
    })
}

/// Removes what a rollback or the removal of a snapshot that was interrupted has left.
fn empty_dropped(cluster: &Cluster, pool: &str, name: &str) -> Result<(), CommandError> {
    let (cluster, pool, name) = (cluster.clone(), pool.to_string(), name.to_string());
    run_removal(move |core| async move { store_client::empty_dropped(&core, &cluster, &pool, &name).await })
}

fn reclaim_unknown(cluster: &Cluster, pool: &str, volume: u64) -> Result<u64, CommandError> {
    let (cluster, pool) = (cluster.clone(), pool.to_string());
    let progress = RemovalProgress::new(format!("volume {volume}"));
    run_removal(move |core| async move {
        let progress = move |removed, known| progress.update(removed, known);
        store_client::reclaim_unknown(&core, &cluster, &pool, volume, progress).await
    })
}

/// The volumes of a pool that no image has. Images are read after what groups have: one that is made
/// meanwhile is known.
fn unknown_volumes(cluster: &Cluster, pool: &str) -> Result<Vec<UnknownVolume>, CommandError> {
    let (of, name) = (cluster.clone(), pool.to_string());
    let used =
        run_removal(move |core| async move { store_client::volumes_of_pool(&core, &of, &name).await })?;
    let images = cluster.map().images().map_err(CommandError::operation)?;
    let removed = cluster.map().removed_images().map_err(CommandError::operation)?;
    let known: BTreeSet<u64> =
        images.values().flat_map(ImageEntry::volumes).chain(removed.keys().copied()).collect();
    let unknown = used.into_iter().filter(|it| !known.contains(&it.volume) && it.objects > 0);
    Ok(unknown.map(|of| UnknownVolume { pool: pool.to_string(), of }).collect())
}

fn print(
    as_json: bool,
    reclaimed: &[(RemovedImage, u64)],
    emptied: &[(u64, u64)],
    unknown: &[UnknownVolume],
) {
    if as_json {
        let images = reclaimed.iter().map(|(image, objects)| {
            json!({ "pool": image.pool, "image": image.name, "volume": image.image.volume, "objects": objects })
        });
        let emptied = emptied.iter().map(|(volume, objects)| json!({ "volume": volume, "objects": objects }));
        let unknown = unknown.iter().map(|UnknownVolume { pool, of }| {
            json!({ "pool": pool, "volume": of.volume, "objects": of.objects, "bytes": of.bytes })
        });
        let report = json!({
            "images": images.collect::<Vec<_>>(),
            "volumes": emptied.collect::<Vec<_>>(),
            "unknown": unknown.collect::<Vec<_>>(),
        });
        return stdout_line!("{report:#}");
    }
    for (image, objects) in reclaimed {
        stdout_line!("{}/{}: {objects} objects removed", image.pool, image.name);
    }
    for (volume, objects) in emptied {
        stdout_line!("volume {volume}: {objects} objects removed");
    }
    for UnknownVolume { pool, of } in unknown {
        let mib = of.bytes.div_ceil(1 << 20);
        stdout_line!(
            "pool {pool}: no image has volume {}, with {} objects of {mib} MiB on each replica; `--volume {}` removes it for good",
            of.volume,
            of.objects,
            of.volume
        );
    }
}
