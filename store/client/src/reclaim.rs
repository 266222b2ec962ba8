//! Removing the objects of a volume, and finding volumes that no image has.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use block_io::{Channel, Status};
use cluster_map::{ImageEntry, MapError, RemovedImage};
use reactor::{Core, Period, PollResult, Poller, Shutdown};
use sockets::Sockets;
use store_image::IMAGE_BLOCK_BYTES;
use wire_store::{BLOCK_BYTES, BLOCKS_PER_EXTENT, OBJECT_BYTES};

use crate::attach::{AttachOptions, AttachState, Attachment};
use crate::channel::ImageChannel;
use crate::cluster::check_whole;
use crate::placement::Placement;
use crate::sweep::{Sweep, SweepKind};
use crate::watch::PoolWatch;
use crate::{ClientError, Cluster};

/// Why objects of a volume could not be removed or listed.
#[derive(Debug, thiserror::Error)]
pub enum ReclaimError {
    /// The cluster cannot be used, or another one has the image.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A group did not do it.
    #[error(
        "its data is not removed, `ringbolt store reclaim` goes on with that: {0}; does the cluster serve? `ringbolt store status` says"
    )]
    Refused(Status),
    /// Data of a parent could not be copied to the volume above it.
    #[error(
        "its data cannot be copied: {0}; does the cluster serve, and has it space? `ringbolt store status` \
         says; the same command goes on"
    )]
    Uncopied(Status),
    /// This process has no memory for I/O.
    #[error("there is no memory for I/O")]
    NoMemory,
    /// A group did not say which objects there are.
    #[error("its objects cannot be listed: {0}; does the cluster serve? `ringbolt store status` says")]
    Unlisted(Status),
}

impl ReclaimError {
    /// The same, of what lists objects and removes none.
    pub(crate) fn of_list(self) -> ReclaimError {
        match self {
            ReclaimError::Refused(status) => ReclaimError::Unlisted(status),
            other => other,
        }
    }
}

/// What a volume uses of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeUse {
    /// The volume.
    pub volume: u64,
    /// Its objects.
    pub objects: u64,
    /// Bytes that are allocated for them, on each replica.
    pub bytes: u64,
}

/// A channel that sweeps, and who waits for it.
struct Sweeping {
    channel: ImageChannel<Sockets>,
    waker: Option<Waker>,
    is_dropped: bool,
}

struct SweepPoller(Rc<RefCell<Sweeping>>);

impl Poller for SweepPoller {
    fn name(&self) -> &str {
        "volume sweep"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let mut sweeping = self.0.borrow_mut();
        if sweeping.is_dropped {
            return PollResult::Finished;
        }
        let before = sweeping.channel.sweep().map(|sweep| (sweep.removed, sweep.listed));
        sweeping.channel.poll(&mut Vec::new());
        let sweep = sweeping.channel.sweep();
        let (after, is_done) = (sweep.map(|it| (it.removed, it.listed)), sweep.is_none_or(Sweep::is_done));
        if before != after || is_done {
            sweeping.waker.take().into_iter().for_each(Waker::wake);
        }
        PollResult::from_count(usize::from(before != after))
    }

    fn deadline(&self) -> Option<u64> {
        self.0.borrow().channel.deadline()
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

/// Attempts to change a record that others change at the same time.
const ATTEMPTS_MAX: usize = 32;

/// Sweeps the groups of a pool.
pub(crate) async fn sweep(
    core: &Core,
    watch: Arc<PoolWatch>,
    volume: u64,
    attach: Arc<AttachState>,
    kind: SweepKind,
    mut progress: impl FnMut(u64, u64),
) -> Result<Sweep, ReclaimError> {
    let pool = watch.view().0.pool.clone();
    let placement = Placement { first_group: pool.first_group, groups: pool.groups, volume };
    let mut channel = ImageChannel::new(core, watch, placement, attach, IMAGE_BLOCK_BYTES);
    channel.start_sweep(kind);
    let sweeping = Rc::new(RefCell::new(Sweeping { channel, waker: None, is_dropped: false }));
    core.add_poller(Box::new(SweepPoller(sweeping.clone())), Period::EveryTurn);
    let swept = std::future::poll_fn(|context| {
        let mut sweeping = sweeping.borrow_mut();
        if let Some(sweep) = sweeping.channel.take_sweep() {
            return Poll::Ready(sweep);
        }
        if let Some(sweep) = sweeping.channel.sweep() {
            progress(sweep.removed, sweep.listed);
        }
        sweeping.waker = Some(context.waker().clone());
        Poll::Pending
    });
    let swept = swept.await;
    sweeping.borrow_mut().is_dropped = true;
    match swept.failed {
        Some(status) => Err(ReclaimError::Refused(status)),
        None => Ok(swept),
    }
}

/// An image that this attaches while it removes objects, or changes the volumes of the image: no other client
/// writes it then, in any group.
pub(crate) struct Emptied {
    pub(crate) watch: Arc<PoolWatch>,
    pub(crate) attachment: Attachment,
}

impl Emptied {
    /// Others are to attach it again.
    pub(crate) fn detach(&self) {
        self.attachment.detach();
    }

    pub(crate) fn new(
        cluster: &Cluster,
        pool: &str,
        name: &str,
        image: &ImageEntry,
        force: bool,
    ) -> Result<Emptied, ClientError> {
        let watch = PoolWatch::start(cluster, pool)?;
        let record = watch.view().0.pool.clone();
        let groups = record.first_group..record.first_group + record.groups;
        let options = AttachOptions { force, ..AttachOptions::default() };
        let attachment = Attachment::new(cluster, pool, name, image, groups, options)?;
        Ok(Emptied { watch, attachment })
    }

    /// Has all groups refuse what others have in flight: the volume changes no more but by this one.
    pub(crate) async fn fence(&self, core: &Core, volume: u64) -> Result<(), ReclaimError> {
        let attach = self.attachment.state.clone();
        // A group lists nothing for a client whose attach epoch it does not know.
        let kind = SweepKind::Indices { end: 0 };
        sweep(core, self.watch.clone(), volume, attach, kind, |_, _| {})
            .await
            .map_err(ReclaimError::of_list)?;
        Ok(())
    }

    async fn sweep(
        &self,
        core: &Core,
        image: &ImageEntry,
        from_bytes: u64,
        progress: impl FnMut(u64, u64),
    ) -> Result<u64, ReclaimError> {
        let attach = self.attachment.state.clone();
        let kind = objects_from(image, from_bytes);
        Ok(sweep(core, self.watch.clone(), image.volume, attach, kind, progress).await?.removed)
    }
}

/// Protects an image from being removed and made smaller, or ends that.
///
/// # Errors
/// There is no such image; [`ClientError::Changed`] if another one changes it at the same time.
pub fn protect_image(cluster: &Cluster, pool: &str, name: &str, protected: bool) -> Result<(), ClientError> {
    let image = cluster.image(pool, name)?;
    let to = ImageEntry { protected, ..image.clone() };
    match to == image || cluster.map().change_image(pool, name, &image, &to).map_err(ClientError::Map)? {
        true => Ok(()),
        false => Err(ClientError::Changed { pool: pool.to_string(), image: name.to_string() }),
    }
}

/// Removes an image: it is gone from the map in one step, then its objects are removed. `progress` gets the
/// number of objects that are removed, and that are known of. Returns how many were removed.
///
/// # Errors
/// [`MapError::Protected`](cluster_map::MapError::Protected); [`ClientError::InUse`] if another one has the
/// image, without `force`; [`ReclaimError::Refused`]: then the image is gone, and [`reclaim_removed`] goes
/// on.
pub async fn remove_image(
    core: &Core,
    cluster: &Cluster,
    pool: &str,
    name: &str,
    force: bool,
    progress: impl FnMut(u64, u64),
) -> Result<u64, ReclaimError> {
    let image = cluster.image(pool, name)?;
    // Before another one loses it.
    image.check_unprotected(pool, name).map_err(ClientError::Map)?;
    check_no_snapshots(&image, pool, name)?;
    empty_dropped(core, cluster, pool, name).await?;
    let image = cluster.image(pool, name)?;
    let emptied = Emptied::new(cluster, pool, name, &image, force)?;
    let removed = match cluster.map().remove_image(pool, name, Some(&image)).map_err(ClientError::Map) {
        Ok(removed) => removed,
        Err(error) => {
            emptied.detach();
            return Err(error.into());
        }
    };
    empty(core, cluster, &emptied, &removed, progress).await
}

/// Goes on with the removal of an image. See [`remove_image`].
///
/// # Errors
/// As [`remove_image`].
pub async fn reclaim_removed(
    core: &Core,
    cluster: &Cluster,
    removed: &RemovedImage,
    progress: impl FnMut(u64, u64),
) -> Result<u64, ReclaimError> {
    let emptied = Emptied::new(cluster, &removed.pool, &removed.name, &removed.image, false)?;
    empty(core, cluster, &emptied, removed, progress).await
}

pub(crate) async fn empty(
    core: &Core,
    cluster: &Cluster,
    emptied: &Emptied,
    removed: &RemovedImage,
    progress: impl FnMut(u64, u64),
) -> Result<u64, ReclaimError> {
    let swept = emptied.sweep(core, &removed.image, 0, progress).await;
    if swept.is_ok() {
        cluster.map().image_is_empty(removed).map_err(ClientError::Map)?;
    }
    emptied.detach();
    swept
}

/// Refuses to take an image away that has snapshots.
///
/// # Errors
/// [`MapError::Invalid`].
pub(crate) fn check_no_snapshots(image: &ImageEntry, pool: &str, name: &str) -> Result<(), ClientError> {
    if image.layers.snapshots.is_empty() {
        return Ok(());
    }
    let names = image.layers.snapshots.iter().map(|snapshot| snapshot.name.as_str());
    let names = names.collect::<Vec<_>>().join(", ");
    Err(MapError::Invalid(format!(
        "image {pool}/{name} has snapshots: {names}; remove them first (`ringbolt image snapshot remove`)"
    ))
    .into())
}

/// Changes the size of an image. What is cut off is removed, and does not come back when the image grows
/// again.
///
/// # Errors
/// [`ClientError::Shrinks`] if it gets smaller, without `allow_shrink`; [`ClientError::InUse`] if another one
/// has it then, without `force`; [`ClientError::Changed`] if another one changes it at the same time.
pub async fn resize_image(
    core: &Core,
    cluster: &Cluster,
    (pool, name): (&str, &str),
    bytes: u64,
    (allow_shrink, force): (bool, bool),
    mut progress: impl FnMut(u64, u64),
) -> Result<(), ReclaimError> {
    let changed = || ClientError::Changed { pool: pool.to_string(), image: name.to_string() };
    let change = |known: &ImageEntry, to: &ImageEntry| match cluster
        .map()
        .change_image(pool, name, known, to)
        .map_err(ClientError::Map)?
    {
        true => Ok(()),
        false => Err(changed()),
    };
    let mut image = cluster.image(pool, name)?;
    check_whole(pool, name, &image)?;
    if bytes < image.bytes {
        image.check_unprotected(pool, name).map_err(ClientError::Map)?;
    }
    if bytes < image.bytes && !allow_shrink {
        let cut = image.bytes - bytes;
        return Err(ClientError::Shrinks { pool: pool.to_string(), image: name.to_string(), cut }.into());
    }
    if bytes < image.bytes || image.cut_from.is_some() {
        let emptied = Emptied::new(cluster, pool, name, &image, force)?;
        let cut = async {
            let cut_from = image.cut_from.unwrap_or(0).max(image.bytes);
            let smaller = ImageEntry { cut_from: Some(cut_from), ..image.cut_to(bytes.min(image.bytes)) };
            // From here on it has this size, and what follows may be done later.
            change(&image, &smaller)?;
            emptied.sweep(core, &smaller, smaller.bytes, &mut progress).await?;
            let done = ImageEntry { cut_from: None, ..smaller.clone() };
            change(&smaller, &done)?;
            Ok::<_, ReclaimError>(done)
        };
        let cut = cut.await;
        emptied.detach();
        image = cut?;
    }
    if bytes != image.bytes {
        change(&image, &ImageEntry { bytes, ..image.clone() })?;
    }
    Ok(())
}

/// Removes the objects of volumes that are not part of an image any more.
///
/// # Errors
/// As [`remove_image`](crate::remove_image); the next call goes on.
pub async fn empty_dropped(
    core: &Core,
    cluster: &Cluster,
    pool: &str,
    name: &str,
) -> Result<(), ReclaimError> {
    for volume in cluster.image(pool, name)?.layers.dropped {
        let image = ImageEntry::new(uuid::Uuid::nil(), volume, store_image::IMAGE_BYTES_MAX);
        let dropped = RemovedImage::new(pool, &format!("{name} (volume {volume})"), image);
        let emptied = Emptied::new(cluster, pool, &dropped.name, &dropped.image, true)?;
        empty(core, cluster, &emptied, &dropped, |_, _| {}).await?;
        forget_dropped(cluster, pool, name, volume)?;
    }
    Ok(())
}

fn forget_dropped(cluster: &Cluster, pool: &str, name: &str, volume: u64) -> Result<(), ClientError> {
    for _ in 0..ATTEMPTS_MAX {
        let image = cluster.image(pool, name)?;
        let mut to = image.clone();
        to.layers.dropped.retain(|it| *it != volume);
        if to == image || cluster.map().change_image(pool, name, &image, &to)? {
            return Ok(());
        }
    }
    Err(ClientError::Changed { pool: pool.to_string(), image: name.to_string() })
}

/// Removes the objects of a volume that no image has, and that was not removed either: an older version left
/// it.
///
/// # Errors
/// As [`remove_image`]; [`ClientError::VolumeOfImage`] if an image has it after all.
pub async fn reclaim_unknown(
    core: &Core,
    cluster: &Cluster,
    pool: &str,
    volume: u64,
    progress: impl FnMut(u64, u64),
) -> Result<u64, ReclaimError> {
    let images = cluster.map().images().map_err(ClientError::Map)?;
    if images.values().any(|image| image.volumes().any(|of| of == volume)) {
        return Err(ClientError::VolumeOfImage(volume).into());
    }
    let bytes = store_image::IMAGE_BYTES_MAX;
    let image = ImageEntry::new(uuid::Uuid::nil(), volume, bytes);
    let emptied = Emptied::new(cluster, pool, &format!("of volume {volume}"), &image, false)?;
    let swept = emptied.sweep(core, &image, 0, progress).await;
    emptied.detach();
    swept
}

/// The objects of an image from an offset on, those that it had before it was cut included.
fn objects_from(image: &ImageEntry, from_bytes: u64) -> SweepKind {
    let bytes = image.bytes.max(image.cut_from.unwrap_or(0));
    let object = OBJECT_BYTES as u64;
    let zero_from = (from_bytes % object) as u32;
    SweepKind::Objects { zero_from, first: from_bytes.div_ceil(object), end: bytes.div_ceil(object) }
}

/// The volumes that the groups of a pool have objects of, whether images have them or not.
///
/// # Errors
/// [`ReclaimError::Refused`]: a node's version has no lists, or does not serve.
pub async fn volumes_of_pool(
    core: &Core,
    cluster: &Cluster,
    pool: &str,
) -> Result<Vec<VolumeUse>, ReclaimError> {
    let watch = PoolWatch::start(cluster, pool)?;
    let record = watch.view().0.pool.clone();
    let groups = record.first_group..record.first_group + record.groups;
    let reads = Arc::new(AttachState::new(0, groups));
    let swept = sweep(core, watch, 0, reads, SweepKind::Volumes, |_, _| {}).await?;
    let used = swept.volumes.into_values().map(|listed| VolumeUse {
        volume: listed.volume,
        objects: listed.objects.into(),
        bytes: u64::from(listed.extents) * (BLOCKS_PER_EXTENT * BLOCK_BYTES) as u64,
    });
    Ok(used.collect())
}
