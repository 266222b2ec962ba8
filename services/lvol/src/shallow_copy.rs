//! Copies of what a volume itself has to another bdev.
//!
//! A copy is a task on a core, with one cluster in progress: parts of it are read and written at a time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use bdev::{Access, AsyncChannel, BdevError, BlockDevice, Descriptor};
use block_io::Status;
use reactor::Core;

use crate::module::LvolStores;
use crate::store::{LvolStore, Volume, VolumeOperation};

/// Bytes that are read and written at a time.
const PART_BYTES: u64 = 1 << 20;
/// Copies that are remembered, those in progress included; the oldest that has ended is forgotten.
const COPIES_MAX: usize = 1024;

/// The copies, by their ids.
#[derive(Default)]
pub(crate) struct ShallowCopies(Mutex<CopyTable>);

#[derive(Default)]
struct CopyTable {
    last_id: u32,
    copies: BTreeMap<u32, Arc<ShallowCopy>>,
}

/// One copy.
pub(crate) struct ShallowCopy {
    copied: AtomicU32,
    total: u32,
    end: Mutex<Option<CopyEnd>>,
}

/// How a copy has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyEnd {
    Complete,
    /// The volume is not read-only.
    NotReadOnly,
    /// The destination is smaller, or its blocks do not divide those of the store.
    Invalid,
    /// Another operation on the volume was under way.
    Busy,
    /// The volume could not be read.
    Source(Status),
    /// The destination could not be written.
    Destination(Status),
    /// The core has stopped, or has no memory or task left.
    Core,
}

/// Why a copy does not begin.
pub(crate) enum CopyRefused {
    NoDestination,
    Destination(BdevError),
    Source(BdevError),
    NoReactor,
}

/// What is reported of a copy.
pub(crate) struct CopyStatus {
    pub(crate) copied: u32,
    pub(crate) total: u32,
    /// `None` while it is in progress.
    pub(crate) end: Option<CopyEnd>,
}

impl ShallowCopies {
    fn add(&self, total: u32) -> (u32, Arc<ShallowCopy>) {
        let mut table = sync::lock(&self.0);
        if table.copies.len() >= COPIES_MAX {
            let has_ended = |copy: &ShallowCopy| sync::lock(&copy.end).is_some();
            let oldest = table.copies.iter().find(|(_, copy)| has_ended(copy)).map(|(id, _)| *id);
            oldest.map(|id| table.copies.remove(&id));
        }
        let copy = Arc::new(ShallowCopy { copied: AtomicU32::new(0), total, end: Mutex::new(None) });
        table.last_id = table.last_id.wrapping_add(1);
        let id = table.last_id;
        table.copies.insert(id, copy.clone());
        (id, copy)
    }

    /// A start that has failed uses an id, too.
    fn skip(&self) {
        let mut table = sync::lock(&self.0);
        table.last_id = table.last_id.wrapping_add(1);
    }

    /// The state of a copy. One that has ended is forgotten.
    pub(crate) fn check(&self, id: u32) -> Option<CopyStatus> {
        let mut table = sync::lock(&self.0);
        let copy = table.copies.get(&id)?;
        let end = *sync::lock(&copy.end);
        let status = CopyStatus { copied: copy.copied.load(Ordering::Relaxed), total: copy.total, end };
        if end.is_some() {
            table.copies.remove(&id);
        }
        Some(status)
    }
}

impl ShallowCopy {
    fn end(&self, end: CopyEnd) {
        *sync::lock(&self.end) = Some(end);
    }
}

/// What a copy needs on its core.
struct CopyTask {
    copy: Arc<ShallowCopy>,
    source: Descriptor,
    destination: Descriptor,
    /// Indexes of clusters that the volume has.
    clusters: Vec<u32>,
    cluster_bytes: u64,
    /// Keeps others from changing the volume.
    _operation: VolumeOperation,
}

impl LvolStores {
    /// Starts a copy; its id. What is wrong with source and size is reported as its end.
    pub(crate) fn start_copy(
        &self,
        store: &Arc<LvolStore>,
        volume: &Volume,
        device: &Arc<BlockDevice>,
        destination: &str,
    ) -> Result<u32, CopyRefused> {
        let opened = self.open_destination(destination);
        let (destination, source) = match opened.and_then(|destination| {
            let source = self.registry.open(device.name(), Access::ReadOnly);
            Ok((destination, source.map_err(CopyRefused::Source)?))
        }) {
            Ok(both) => both,
            Err(refused) => {
                self.copies.skip();
                return Err(refused);
            }
        };
        let published = store.shared.published();
        let blob = published.blob(volume.blob);
        let clusters: Vec<u32> =
            blob.map_or(Vec::new(), |blob| blob.clusters().iter().map(|(index, _)| index).collect());
        let (id, copy) = self.copies.add(clusters.len() as u32);
        let geometry = destination.device().geometry();
        let io_unit = published.super_block().io_unit_bytes;
        let end = if clusters.is_empty() {
            Some(CopyEnd::Complete)
        } else if !blob.is_some_and(|blob| blob.is_read_only()) {
            Some(CopyEnd::NotReadOnly)
        } else if geometry.bytes() < device.geometry().bytes() || !io_unit.is_multiple_of(geometry.block_size)
        {
            Some(CopyEnd::Invalid)
        } else {
            None
        };
        if let Some(end) = end {
            copy.end(end);
            return Ok(id);
        }
        let Ok(operation) = store.operate(&[volume.blob], None) else {
            copy.end(CopyEnd::Busy);
            return Ok(id);
        };
        let task = CopyTask {
            copy: copy.clone(),
            source,
            destination,
            clusters,
            cluster_bytes: published.layout().cluster_bytes.into(),
            _operation: operation,
        };
        let reactor = self.next_reactor().ok_or(CopyRefused::NoReactor)?;
        let of_task = copy.clone();
        let start = move |core: &Core| {
            let run = task.run(core.clone());
            if !core.spawn(run) {
                of_task.end(CopyEnd::Core);
            }
        };
        if reactor.post(start).is_err() {
            copy.end(CopyEnd::Core);
        }
        Ok(id)
    }

    fn open_destination(&self, name: &str) -> Result<Descriptor, CopyRefused> {
        if self.registry.find(name).is_none() {
            return Err(CopyRefused::NoDestination);
        }
        let access = Access::Exclusive { by: "bdev_lvol_start_shallow_copy" };
        self.registry.open(name, access).map_err(CopyRefused::Destination)
    }
}

impl CopyTask {
    async fn run(self, core: Core) {
        let end = self.copy_all(&core).await.err().unwrap_or(CopyEnd::Complete);
        let copy = self.copy.clone();
        // The claims end before the end is known.
        drop(self);
        copy.end(end);
    }

    async fn copy_all(&self, core: &Core) -> Result<(), CopyEnd> {
        let open = |device: &Descriptor| device.channel(core).map_err(|_| CopyEnd::Core);
        let from = AsyncChannel::new(core, open(&self.source)?);
        let to = AsyncChannel::new(core, open(&self.destination)?);
        let from_block = u64::from(self.source.device().geometry().block_size);
        let to_block = u64::from(self.destination.device().geometry().block_size);
        for index in &self.clusters {
            let start = u64::from(*index) * self.cluster_bytes;
            let mut at = 0;
            while at < self.cluster_bytes {
                let bytes = PART_BYTES.min(self.cluster_bytes - at);
                let mut buffer = core.pool().take(bytes as usize);
                while buffer.is_none() {
                    core.sleep_ns(1_000_000).await;
                    buffer = core.pool().take(bytes as usize);
                }
                let Some(buffer) = buffer else { return Err(CopyEnd::Core) };
                let read = from.read((start + at) / from_block, buffer).await;
                let buffer = read.map_err(|(status, _)| CopyEnd::Source(status))?;
                let written = to.write((start + at) / to_block, buffer).await;
                written.map_err(|(status, _)| CopyEnd::Destination(status))?;
                at += bytes;
            }
            self.copy.copied.fetch_add(1, Ordering::Relaxed);
        }
        if to.device().supports(block_io::Op::Flush) {
            to.flush().await.map_err(CopyEnd::Destination)?;
        }
        Ok(())
    }
}
