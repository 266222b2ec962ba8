//! Images of a cluster: its map has them, and its clients remove their objects.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bdev::{Access, AsyncChannel, Registry, Request};
use block_io::{Op, RequestFlags, Status, Tag};
use cluster_map::{ImageEntry, ImageHolder, MapError, PoolClass};
use reactor::{Core, Reactor, ReactorConfig};
use serde_json::{Value, json};
use store_client::{AttachOptions, Cluster, ClusterImage, ReclaimError};

use super::layers::{parent_of, snapshots_json};
use super::owner::{ImageOwner, mib, print_table};
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

/// Bytes that are allocated at a time: as many objects as are allocated together.
const STEP_BYTES: u64 = 64 << 20;
/// What takes longer than this says how far it is, and again after each such time.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);

pub(super) fn open(of: &ImageOwner) -> Result<Cluster, CommandError> {
    Cluster::open(&of.cluster_directory(), &of.etcd.options()).map_err(CommandError::operation)
}

fn failed(error: MapError) -> CommandError {
    CommandError::operation(error)
}

/// Says how many objects are removed, while that takes.
pub(in crate::commands) struct RemovalProgress {
    what: String,
    said: Cell<Instant>,
}

impl RemovalProgress {
    pub(in crate::commands) fn new(what: String) -> RemovalProgress {
        RemovalProgress { what, said: Cell::new(Instant::now()) }
    }

    pub(in crate::commands) fn update(&self, removed: u64, known: u64) {
        if self.said.get().elapsed() >= PROGRESS_EVERY {
            self.said.set(Instant::now());
            stderr_line!("{}: {removed} of {known} objects that are known of are removed", self.what);
        }
    }
}

/// Says how many objects are copied, while that takes.
pub(super) struct CopyProgress {
    what: String,
    said: Cell<Instant>,
}

impl CopyProgress {
    pub(super) fn new(what: String) -> CopyProgress {
        CopyProgress { what, said: Cell::new(Instant::now()) }
    }

    pub(super) fn update(&self, copied: u64, objects: u64) {
        if self.said.get().elapsed() >= PROGRESS_EVERY {
            self.said.set(Instant::now());
            stderr_line!("{}: {copied} of {objects} objects are copied", self.what);
        }
    }
}

/// Runs what removes objects.
pub(in crate::commands) fn run<T: 'static, F: Future<Output = Result<T, ReclaimError>> + 'static>(
    begin: impl FnOnce(Core) -> F,
) -> Result<T, CommandError> {
    let reactor = Reactor::new(&ReactorConfig::default()).map_err(CommandError::environment)?;
    let work = begin(reactor.core());
    reactor.block_on(work).map_err(CommandError::operation)
}

/// Creates an image, and prints how clients name it.
pub(super) fn create(of: &ImageOwner, name: &str, bytes: u64, preallocate: bool) -> Result<(), CommandError> {
    store_client::check_size(bytes).map_err(CommandError::operation)?;
    store_client::check_plain_name(name).map_err(CommandError::operation)?;
    let cluster = open(of)?;
    cluster.map().create_image(&of.pool, name, bytes).map_err(failed)?;
    if cluster.map().pools().map_err(failed)?.get(&of.pool).is_some_and(|it| it.class == PoolClass::Memory) {
        stderr_line!(
            "pool {} is of class memory: the image is lost if the machines of all its replicas lose their power",
            of.pool
        );
    }
    if preallocate && let Err(error) = allocate(&cluster, of, name, bytes) {
        remove(of, name, false)?;
        return Err(error);
    }
    stdout_line!("store:{}/{name}", of.pool);
    Ok(())
}

/// Resizes an image; what is cut off is removed, so that it does not come back.
pub(super) fn resize(
    of: &ImageOwner,
    name: &str,
    bytes: u64,
    allow_shrink: bool,
    force: bool,
) -> Result<(), CommandError> {
    store_client::check_size(bytes).map_err(CommandError::operation)?;
    let cluster = open(of)?;
    let (pool, name) = (of.pool.clone(), name.to_string());
    let progress = RemovalProgress::new(format!("{pool}/{name}"));
    run(move |core| async move {
        let progress = move |removed, known| progress.update(removed, known);
        let may = (allow_shrink, force);
        store_client::resize_image(&core, &cluster, (&pool, &name), bytes, may, progress).await
    })
}

/// Removes an image with its data.
pub(super) fn remove(of: &ImageOwner, name: &str, force: bool) -> Result<(), CommandError> {
    let cluster = open(of)?;
    let (pool, name) = (of.pool.clone(), name.to_string());
    let progress = RemovalProgress::new(format!("{pool}/{name}"));
    run(move |core| async move {
        let progress = move |removed, known| progress.update(removed, known);
        store_client::remove_image(&core, &cluster, &pool, &name, force, progress).await
    })
    .map(drop)
}

/// Allocates the space of an image.
fn allocate(cluster: &Cluster, of: &ImageOwner, name: &str, bytes: u64) -> Result<(), CommandError> {
    let registry = Registry::new();
    let image = ClusterImage::open(cluster, &of.pool, name, AttachOptions::default());
    let image = Arc::new(image.map_err(CommandError::operation)?);
    registry.register(name, None, &[], image.clone()).map_err(CommandError::operation)?;
    let reactor = Reactor::new(&ReactorConfig::default()).map_err(CommandError::environment)?;
    let core = reactor.core();
    let descriptor = registry.open(name, Access::ReadWrite).map_err(CommandError::operation)?;
    let allocated = reactor.block_on(async move {
        let block = u64::from(store_client::IMAGE_BLOCK_BYTES);
        let io = AsyncChannel::new(&core, descriptor.channel(&core)?);
        let mut at = 0;
        while at < bytes {
            let step = STEP_BYTES.min(bytes - at);
            let request = Request::new(Tag(0), Op::WriteZeroes, at / block, (step / block) as u32);
            let status = io.submit(Request { flags: RequestFlags::ALLOCATE, ..request }).await.status();
            if !status.is_success() {
                return Ok(Some(status));
            }
            at += step;
        }
        Ok::<_, bdev::BdevError>(None)
    });
    image.detach();
    match allocated.map_err(CommandError::operation)? {
        None => Ok(()),
        Some(status) => {
            let advice = match status {
                Status::CAPACITY_EXCEEDED => "make it smaller, remove images, or add nodes",
                _ => "does the cluster serve? `ringbolt store status` says",
            };
            let what = "its space cannot be allocated, so that it is removed";
            Err(CommandError::operation(format!("{}/{name}: {what}: {status}; {advice}", of.pool)))
        }
    }
}

/// Those that have an image attached and have said lately that they live. One that ended without detaching it
/// stays in the map until another one attaches the image.
fn holders_of(cluster: &Cluster, pool: &str, image: &ImageEntry) -> Result<Vec<ImageHolder>, CommandError> {
    let lock = cluster.map().image_lock(pool, image.volume).map_err(failed)?;
    let lives = |holder: ImageHolder| match cluster.map().holder_age(holder.lease) {
        Ok(age) => age.map(|_| Ok(holder)),
        Err(error) => Some(Err(failed(error))),
    };
    lock.unwrap_or_default().holders.into_iter().filter_map(lives).collect()
}

/// Who has an image attached, for people.
fn users_of(cluster: &Cluster, pool: &str, image: &ImageEntry) -> Result<Vec<String>, CommandError> {
    let holders = holders_of(cluster, pool, image)?.into_iter();
    Ok(holders.map(|holder| format!("{} ({}, {})", holder.name, holder.process, holder.address)).collect())
}

/// Protects an image from removal, or ends that.
pub(super) fn protect(of: &ImageOwner, name: &str, protected: bool) -> Result<(), CommandError> {
    store_client::protect_image(&open(of)?, &of.pool, name, protected).map_err(CommandError::operation)
}

/// Describes an image and who has it attached.
pub(super) fn info(of: &ImageOwner, name: &str, as_json: bool) -> Result<(), CommandError> {
    let cluster = open(of)?;
    let image = cluster.image(&of.pool, name).map_err(CommandError::operation)?;
    let images = cluster.map().images().map_err(failed)?;
    let parent = parent_of(&images, &of.pool, &image);
    let holders = holders_of(&cluster, &of.pool, &image)?;
    let since = |holder: &ImageHolder| {
        let since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(holder.since));
        since.map(|since| humantime::format_rfc3339_seconds(since).to_string()).unwrap_or_default()
    };
    if as_json {
        let holders = holders.iter().map(|holder| {
            json!({
                "name": holder.name,
                "address": holder.address,
                "process": holder.process,
                "since": since(holder),
                "shared": holder.shared,
            })
        });
        let described = json!({
            "pool": of.pool,
            "name": name,
            "size": image.bytes,
            "uuid": image.uuid.to_string(),
            "volume": image.volume,
            "protected": image.protected,
            "parent": parent,
            "snapshots": snapshots_json(&images, &of.pool, &image),
            "import": image.layers.import.as_ref().map(|it| json!({ "snapshot": it.name, "done": it.done })),
            "attached_by": holders.collect::<Vec<_>>(),
        });
        stdout_line!("{described:#}");
        return Ok(());
    }
    stdout_line!("{}/{name}: {} MiB, UUID {}", of.pool, mib(image.bytes), image.uuid);
    stdout_line!("protected from removal: {}", if image.protected { "yes" } else { "no" });
    if let Some(parent) = parent {
        stdout_line!("parent: {}/{parent}", of.pool);
    }
    let snapshots: Vec<&str> = image.layers.snapshots.iter().map(|snapshot| snapshot.name.as_str()).collect();
    stdout_line!(
        "snapshots: {}",
        if snapshots.is_empty() { "none".to_string() } else { snapshots.join(", ") }
    );
    if let Some(import) = &image.layers.import {
        let (done, bytes) = (mib(import.done), mib(image.bytes));
        stdout_line!("import of snapshot {}: {done} of {bytes} MiB, not whole", import.name);
    }
    match holders.is_empty() {
        true => stdout_line!("attached by: none"),
        false => stdout_line!("attached by:"),
    }
    for holder in &holders {
        let shared = if holder.shared { ", shared" } else { "" };
        let ImageHolder { name, process, address, .. } = holder;
        stdout_line!("  {name}, process {process} at {address}, since {}{shared}", since(holder));
    }
    Ok(())
}

/// Lists the images of all pools.
pub(super) fn list(of: &ImageOwner, as_json: bool) -> Result<(), CommandError> {
    let cluster = open(of)?;
    let mut images = cluster.map().images().map_err(failed)?;
    let all_images = images.clone();
    images.retain(|_, image| image.trashed.is_none());
    if as_json {
        let mut all = Vec::new();
        for ((pool, name), image) in &images {
            all.push(json!({
                "pool": pool,
                "name": name,
                "size": image.bytes,
                "uuid": image.uuid.to_string(),
                "protected": image.protected,
                "parent": parent_of(&all_images, pool, image),
                "snapshots": image.layers.snapshots.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(),
                "attached_by": users_of(&cluster, pool, image)?,
            }));
        }
        stdout_line!("{:#}", Value::Array(all));
        return Ok(());
    }
    let rows = images.iter().map(|((pool, name), image)| {
        let snapshots = image.layers.snapshots.len().to_string();
        let parent = parent_of(&all_images, pool, image).unwrap_or_default();
        [format!("{pool}/{name}"), mib(image.bytes), image.uuid.to_string(), snapshots, parent]
    });
    print_table(["image", "MiB", "uuid", "snapshots", "parent"], rows);
    Ok(())
}
