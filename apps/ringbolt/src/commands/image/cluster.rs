//! Images of a cluster: its map has them, and its clients remove their objects.

use std::sync::Arc;

use bdev::{Access, AsyncChannel, Registry, Request};
use block_io::{Op, RequestFlags, Status, Tag};
use cluster_map::{MapError, PoolClass};
use reactor::{Reactor, ReactorConfig};
use serde_json::{Value, json};
use store_client::{Cluster, ClusterImage};

use super::{ImageOwner, mib, print_table};
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

/// Bytes that are zeroed at a time: as many objects as are removed or allocated together.
const STEP_BYTES: u64 = 64 << 20;

fn open(of: &ImageOwner) -> Result<Cluster, CommandError> {
    let directory = of.cluster.as_deref().unwrap_or(std::path::Path::new("."));
    Cluster::open(directory, &of.etcd.options()).map_err(CommandError::operation)
}

fn failed(error: MapError) -> CommandError {
    CommandError::operation(error)
}

/// Creates an image, and prints how clients name it.
pub(super) fn create(of: &ImageOwner, name: &str, bytes: u64, preallocate: bool) -> Result<(), CommandError> {
    store_client::check_size(bytes).map_err(CommandError::operation)?;
    let cluster = open(of)?;
    cluster.map().create_image(&of.pool, name, bytes).map_err(failed)?;
    if cluster.map().pools().map_err(failed)?.get(&of.pool).is_some_and(|it| it.class == PoolClass::Memory) {
        stderr_line!(
            "pool {} is of class memory: the image is lost if the machines of all its replicas lose their power",
            of.pool
        );
    }
    if preallocate && let Err(error) = zero(&cluster, of, name, 0..bytes, RequestFlags::ALLOCATE) {
        zero(&cluster, of, name, 0..bytes, RequestFlags::DEALLOCATE)?;
        cluster.map().remove_image(&of.pool, name).map_err(failed)?;
        return Err(error);
    }
    stdout_line!("store:{}/{name}", of.pool);
    Ok(())
}

/// Resizes an image; what is cut off is removed first, so that it does not come back.
pub(super) fn resize(of: &ImageOwner, name: &str, bytes: u64) -> Result<(), CommandError> {
    store_client::check_size(bytes).map_err(CommandError::operation)?;
    let cluster = open(of)?;
    let before = cluster.image(&of.pool, name).map_err(CommandError::operation)?.bytes;
    if bytes < before {
        zero(&cluster, of, name, bytes..before, RequestFlags::DEALLOCATE)?;
    }
    cluster.map().resize_image(&of.pool, name, bytes).map_err(failed)?;
    Ok(())
}

/// Removes an image with its data.
pub(super) fn remove(of: &ImageOwner, name: &str) -> Result<(), CommandError> {
    let cluster = open(of)?;
    let bytes = cluster.image(&of.pool, name).map_err(CommandError::operation)?.bytes;
    zero(&cluster, of, name, 0..bytes, RequestFlags::DEALLOCATE)?;
    cluster.map().remove_image(&of.pool, name).map_err(failed)
}

/// Writes zeroes, which give space back or allocate it.
fn zero(
    cluster: &Cluster,
    of: &ImageOwner,
    name: &str,
    range: std::ops::Range<u64>,
    flags: RequestFlags,
) -> Result<(), CommandError> {
    let registry = Registry::new();
    let image = ClusterImage::open(cluster, &of.pool, name).map_err(CommandError::operation)?;
    registry.register(name, None, &[], Arc::new(image)).map_err(CommandError::operation)?;
    let reactor = Reactor::new(&ReactorConfig::default()).map_err(CommandError::environment)?;
    let core = reactor.core();
    let descriptor = registry.open(name, Access::ReadWrite).map_err(CommandError::operation)?;
    let zeroed = reactor.block_on(async move {
        let block = u64::from(store_client::IMAGE_BLOCK_BYTES);
        let io = AsyncChannel::new(&core, descriptor.channel(&core)?);
        let mut at = range.start;
        while at < range.end {
            let bytes = STEP_BYTES.min(range.end - at);
            let request = Request::new(Tag(0), Op::WriteZeroes, at / block, (bytes / block) as u32);
            let status = io.submit(Request { flags, ..request }).await.status();
            if !status.is_success() {
                return Ok(Some(status));
            }
            at += bytes;
        }
        Ok::<_, bdev::BdevError>(None)
    });
    match zeroed.map_err(CommandError::operation)? {
        None => Ok(()),
        Some(status) => {
            let what = match flags.contains(RequestFlags::ALLOCATE) {
                true => "its space cannot be allocated, so that it is removed",
                false => "its data cannot be removed",
            };
            let advice = match status {
                Status::CAPACITY_EXCEEDED => "make it smaller, remove images, or add nodes",
                _ => "does the cluster serve? `ringbolt store status` says",
            };
            Err(CommandError::operation(format!("{}/{name}: {what}: {status}; {advice}", of.pool)))
        }
    }
}

/// Lists the images of all pools.
pub(super) fn list(of: &ImageOwner, as_json: bool) -> Result<(), CommandError> {
    let images = open(of)?.map().images().map_err(failed)?;
    if as_json {
        let all = images.iter().map(|((pool, name), image)| {
            json!({ "pool": pool, "name": name, "size": image.bytes, "uuid": image.uuid.to_string() })
        });
        stdout_line!("{:#}", Value::Array(all.collect()));
        return Ok(());
    }
    let rows = images
        .iter()
        .map(|((pool, name), image)| [format!("{pool}/{name}"), mib(image.bytes), image.uuid.to_string()]);
    print_table(["image", "MiB", "uuid"], rows);
    Ok(())
}
