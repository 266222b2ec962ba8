//! Copies of images, between pools and between clusters.
//!
//! Both images are attached for the time, so that no client changes the one that is read. Until it is whole,
//! the copy is an image in the trash, which no client opens: what was interrupted is removed by the next copy
//! of that name, or by `image purge --expired`. Only objects that there are are read, and blocks of zeroes
//! are not written, so that holes stay holes.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use bdev::{Access, AsyncChannel, BdevError, Registry};
use block_io::Status;
use cluster_map::{ImageEntry, MapError, TrashedImage};
use dma::Buffer;
use reactor::Core;
use store_image::IMAGE_BLOCK_BYTES;
use wire_store::{BLOCK_BYTES, OBJECT_BYTES};

use crate::attach::AttachOptions;
use crate::lanes::{LANES, Lane, run_lanes};
use crate::layers::find_image;
use crate::reclaim::{ReclaimError, sweep};
use crate::sweep::SweepKind;
use crate::trash::{TRASH, TrashEntry, purge_image, restore_image, trash};
use crate::{ClientError, Cluster, ClusterImage, check_plain_name};

/// Bytes that are read at a time.
const PART_BYTES: usize = 128 << 10;

/// Why an image is not copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// A cluster cannot be used; another one has an image, or the name of the copy.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The rest of an earlier attempt cannot be removed, or the objects cannot be listed.
    #[error(transparent)]
    Reclaim(#[from] ReclaimError),
    /// The images cannot be opened here.
    #[error(transparent)]
    Bdev(#[from] BdevError),
    /// A read failed.
    #[error("the image cannot be read: {0}; does its cluster serve? `ringbolt store status` says")]
    Read(Status),
    /// A write failed.
    #[error(
        "the copy cannot be written: {0}; does its cluster serve, and has it space? `ringbolt store status` says"
    )]
    Write(Status),
    /// This process has no memory for I/O.
    #[error("there is no memory for I/O")]
    NoMemory,
}

impl From<MapError> for CopyError {
    fn from(error: MapError) -> CopyError {
        ClientError::Map(error).into()
    }
}

/// An image of a cluster, or the name of one that is to come.
#[derive(Clone, Copy)]
pub struct ImageName<'a> {
    /// Its cluster.
    pub cluster: &'a Cluster,
    /// Its pool there.
    pub pool: &'a str,
    /// Its name.
    pub name: &'a str,
}

/// What a copy has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedImage {
    /// Size of the image in bytes.
    pub bytes: u64,
    /// Objects that it had.
    pub objects: u64,
    /// Bytes that were written: those of blocks that are not zero.
    pub written_bytes: u64,
}

/// Copies an image. `progress` gets the objects that are copied, and how many there are.
///
/// # Errors
/// [`MapError::Exists`] if there is an image with the name of the copy; [`ClientError::InUse`] if another one
/// has the image attached, or makes a copy of this name; [`CopyError`]. Nothing has the name of the copy
/// then.
pub async fn copy_image(
    core: &Core,
    from: ImageName<'_>,
    to: ImageName<'_>,
    mut progress: impl FnMut(u64, u64),
) -> Result<CopiedImage, CopyError> {
    check_plain_name(to.name)?;
    find_image(&from.cluster.map().images()?, from.pool, from.name)?;
    if to.cluster.map().images()?.contains_key(&(to.pool.to_string(), to.name.to_string())) {
        return Err(MapError::Exists(format!("image {}/{}", to.pool, to.name)).into());
    }
    for entry in trash(to.cluster)? {
        if entry.pool == to.pool && entry.trashed.name == unfinished_name(to.name) {
            purge_image(core, to.cluster, &entry, |_, _| {}).await?;
        }
    }
    let source = Arc::new(ClusterImage::open(from.cluster, from.pool, from.name, AttachOptions::default())?);
    let copied = async {
        let (entry, copy) = create_unfinished(to, source.size())?;
        let copied = fill(core, &source, &copy, &mut progress).await;
        // From here on it has its name.
        let finished = copied.and_then(|copied| {
            restore_image(to.cluster, &entry, to.name)?;
            Ok(copied)
        });
        copy.detach();
        finished
    };
    let copied = copied.await;
    source.detach();
    copied
}

/// The name in the trash of a copy that is not whole.
fn unfinished_name(name: &str) -> String {
    format!("{name} (unfinished copy)")
}

/// Makes the image that becomes the copy, attached, and in the trash, where nothing keeps it.
fn create_unfinished(to: ImageName<'_>, bytes: u64) -> Result<(TrashEntry, Arc<ClusterImage>), CopyError> {
    let map = to.cluster.map();
    let map_name = format!("{TRASH}copy.{}", uuid::Uuid::new_v4().simple());
    let image = map.create_image(to.pool, &map_name, bytes)?;
    let copy = ClusterImage::open(to.cluster, to.pool, &map_name, AttachOptions::default())?;
    let until = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let trashed = TrashedImage { name: unfinished_name(to.name), until };
    let trashed_image = ImageEntry { trashed: Some(trashed.clone()), ..image.clone() };
    if !map.change_image(to.pool, &map_name, &image, &trashed_image)? {
        return Err(ClientError::Changed { pool: to.pool.to_string(), image: map_name }.into());
    }
    let entry = TrashEntry { pool: to.pool.to_string(), map_name, trashed, image: trashed_image };
    Ok((entry, Arc::new(copy)))
}

/// What the lanes of a copy share.
struct Copying {
    core: Core,
    from: AsyncChannel,
    to: AsyncChannel,
    bytes: u64,
    /// Objects that are to be copied.
    waiting: RefCell<VecDeque<u32>>,
    copied: Cell<u64>,
    written_bytes: Cell<u64>,
}

/// Copies all objects of an image into an empty one.
async fn fill(
    core: &Core,
    source: &Arc<ClusterImage>,
    copy: &Arc<ClusterImage>,
    progress: &mut impl FnMut(u64, u64),
) -> Result<CopiedImage, CopyError> {
    let bytes = source.size();
    let objects: VecDeque<u32> = list_objects(core, source).await?.into();
    let count = objects.len() as u64;
    let registry = Registry::new();
    registry.register("from", None, &[], source.clone())?;
    registry.register("to", None, &[], copy.clone())?;
    let open = |name: &str, access| {
        let descriptor = registry.open(name, access)?;
        let channel = AsyncChannel::new(core, descriptor.channel(core)?);
        Ok::<_, BdevError>((descriptor, channel))
    };
    // The descriptors are open for as long as there is I/O.
    let (_reads, from) = open("from", Access::ReadOnly)?;
    let (_writes, to) = open("to", Access::ReadWrite)?;
    let copying = Copying {
        core: core.clone(),
        from,
        to,
        bytes,
        waiting: RefCell::new(objects),
        copied: Cell::new(0),
        written_bytes: Cell::new(0),
    };
    let mut lanes: Vec<Lane<'_, CopyError>> = Vec::new();
    for _ in 0..LANES {
        lanes.push(Box::pin(copying.copy_objects()));
    }
    run_lanes(lanes, || progress(copying.copied.get(), count)).await?;
    Ok(CopiedImage { bytes, objects: count, written_bytes: copying.written_bytes.get() })
}

/// The indices of the objects of an image, of all its volumes.
async fn list_objects(core: &Core, image: &ClusterImage) -> Result<Vec<u32>, ReclaimError> {
    let kind = SweepKind::Indices { end: image.size().div_ceil(OBJECT_BYTES as u64) };
    let mut indices = BTreeSet::new();
    for volume in image.volumes() {
        let (watch, attach) = image.parts();
        let swept = sweep(core, watch, volume, attach, kind, |_, _| {}).await;
        indices.extend(swept.map_err(ReclaimError::of_list)?.indices);
    }
    Ok(indices.into_iter().collect())
}

impl Copying {
    /// Copies one object after the other.
    async fn copy_objects(&self) -> Result<(), CopyError> {
        loop {
            let Some(index) = self.waiting.borrow_mut().pop_front() else { return Ok(()) };
            let start = u64::from(index) * OBJECT_BYTES as u64;
            let end = self.bytes.min(start + OBJECT_BYTES as u64);
            let mut at = start;
            while at < end {
                let length = (PART_BYTES as u64).min(end - at);
                self.copy_part(at, length as usize).await?;
                at += length;
            }
            self.copied.set(self.copied.get() + 1);
        }
    }

    async fn copy_part(&self, at: u64, length: usize) -> Result<(), CopyError> {
        let block = u64::from(IMAGE_BLOCK_BYTES);
        let buffer = self.core.pool().take(length).ok_or(CopyError::NoMemory)?;
        let buffer =
            self.from.read(at / block, buffer).await.map_err(|(status, _)| CopyError::Read(status))?;
        let runs = nonzero_runs(buffer.as_slice());
        let mut rest = Some(buffer);
        for run in runs.into_iter().rev() {
            let Some(mut part) = rest.take() else { break };
            let data = match cut(&mut part, &run) {
                Some(data) => {
                    rest = Some(part);
                    data
                }
                None => part,
            };
            self.write(at, &run, data).await?;
        }
        Ok(())
    }

    async fn write(&self, part: u64, run: &Range<usize>, data: Buffer) -> Result<(), CopyError> {
        let lba = (part + run.start as u64) / u64::from(IMAGE_BLOCK_BYTES);
        let written = self.to.write(lba, data).await;
        written.map_err(|(status, _)| CopyError::Write(status))?;
        self.written_bytes.set(self.written_bytes.get() + run.len() as u64);
        Ok(())
    }
}

/// Cuts the end of a buffer after a run, and the run off, unless that is at its begin.
fn cut(buffer: &mut Buffer, run: &Range<usize>) -> Option<Buffer> {
    if run.end < buffer.len() {
        drop(buffer.split_off(run.end));
    }
    (run.start > 0).then(|| buffer.split_off(run.start))
}

/// The blocks that are not zero, adjacent ones together.
pub(crate) fn nonzero_runs(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
        if block.iter().all(|byte| *byte == 0) {
            continue;
        }
        let start = index * BLOCK_BYTES;
        let end = start + block.len();
        match runs.last_mut().filter(|last| last.end == start) {
            Some(last) => last.end = end,
            None => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_zero_is_not_written() {
        assert_eq!(nonzero_runs(&vec![0; PART_BYTES]), []);
        let mut bytes = vec![0; 5 * BLOCK_BYTES + 512];
        for at in [BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7, 5 * BLOCK_BYTES + 511] {
            bytes[at] = 1;
        }
        let blocks = |first: usize, end: usize| first * BLOCK_BYTES..end * BLOCK_BYTES;
        let last = 5 * BLOCK_BYTES..5 * BLOCK_BYTES + 512;
        assert_eq!(nonzero_runs(&bytes), [blocks(0, 2), blocks(3, 4), last]);
        assert_eq!(nonzero_runs(&vec![7; PART_BYTES]), *std::slice::from_ref(&(0..PART_BYTES)));
    }

    #[test]
    fn a_run_is_cut_out_of_a_buffer() {
        let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).unwrap();
        let take = || {
            let mut buffer = reactor.core().pool().take(4 * BLOCK_BYTES).unwrap();
            buffer
                .as_mut_slice()
                .chunks_mut(BLOCK_BYTES)
                .zip(1..)
                .for_each(|(block, value)| block.fill(value));
            buffer
        };
        let mut buffer = take();
        let run = cut(&mut buffer, &(BLOCK_BYTES..3 * BLOCK_BYTES)).unwrap();
        let ends = |bytes: &[u8]| (bytes.len() / BLOCK_BYTES, bytes[0], bytes[bytes.len() - 1]);
        assert_eq!((ends(run.as_slice()), ends(buffer.as_slice())), ((2, 2, 3), (1, 1, 1)));
        let mut buffer = take();
        assert!(cut(&mut buffer, &(0..2 * BLOCK_BYTES)).is_none());
        assert_eq!(ends(buffer.as_slice()), (2, 1, 2));
        let mut buffer = take();
        assert!(cut(&mut buffer, &(0..4 * BLOCK_BYTES)).is_none());
        assert_eq!(ends(buffer.as_slice()), (4, 1, 4));
    }
}
