//! The pmem device: a file on persistent memory, through a file system with DAX.
//!
//! A write is copied to the mapped file and flushed from the caches of the processors; when it is completed
//! it is durable: durability class `pmem`. There is no volatile write cache, a flush has nothing to do, and
//! no request is a system call. SPDK's module of this name, of which the parameters are, used pools of
//! libpmemblk; this one uses plain files.
//!
//! A power failure leaves each aligned 8 bytes of a write that was not completed as they were before or
//! after: no block is promised to be written whole. The store's logs need no more. Memory that fails, or a
//! truncated file, does not end the process: the device then completes reads and writes with errors until it
//! is created again.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use block_io::{Op, Payload, Status};
use dma::{PersistentRegion, RegionError};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use uuid::Uuid;

#[cfg(any(test, fuzzing, feature = "testing"))]
use super::uring::durability_of;
use super::uring::{IdentitySource, identify, lock_file};
use super::zeroing::ZeroingQueue;
use crate::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, Durability, InfoValue, IoLimits,
    Registry, Request,
};

/// Configuration of a pmem device.
#[derive(Clone, Debug)]
pub struct PmemConfig {
    /// Path of the file.
    pub pmem_file: PathBuf,
    /// Name of the device.
    pub name: String,
    /// UUID; `None` for the one that is stored with the file.
    pub uuid: Option<Uuid>,
    /// Size of a block in bytes.
    pub block_size: u32,
    /// Opens the file read-only and rejects writes.
    pub readonly: bool,
    /// Creates a file of this many bytes if there is none.
    pub create_bytes: Option<u64>,
}

impl PmemConfig {
    /// A writable device with blocks of 512 bytes on an existing file.
    pub fn new(name: &str, pmem_file: impl Into<PathBuf>) -> PmemConfig {
        PmemConfig {
            pmem_file: pmem_file.into(),
            name: name.to_string(),
            uuid: None,
            block_size: 512,
            readonly: false,
            create_bytes: None,
        }
    }
}

/// The product name of its devices, as in SPDK.
pub const PRODUCT_NAME: &str = "pmemblk disk";

const NOT_PERSISTENT: &str = "is not on persistent memory: a file system that is mounted with DAX is wanted (ext4 or xfs on /dev/pmemN, mount -o dax)";
const NO_CACHE_FLUSH: &str = "cannot be used: this processor does not flush its caches from user space";

/// Most bytes of one request: about a tenth of a millisecond of processor time. The layer divides larger
/// ones.
const TRANSFER_BYTES_MAX: u32 = 1 << 20;

/// The module's object of a pmem device.
pub struct PmemBdev {
    config: PmemConfig,
    geometry: BdevGeometry,
    backing_id: (u64, u64),
    identity: IdentitySource,
    durability: Durability,
    region: Arc<PersistentRegion>,
    /// Has the lock; dropped when the last user has closed the device.
    file: Mutex<Option<File>>,
}

/// Opens a file on persistent memory and registers a device for it.
///
/// # Errors
/// [`BdevError::File`] with `EOPNOTSUPP` for a file that is not on persistent memory, and if a system call
/// fails, also because the file system is full; [`BdevError::Memory`] without address space;
/// [`BdevError::Invalid`] for an invalid block size, anything but a file, and one that is smaller than a
/// block; [`BdevError::Claimed`] if another device or process uses it.
pub fn create(registry: &Registry, config: PmemConfig) -> Result<Arc<BlockDevice>, BdevError> {
    create_mapped(registry, config, PersistentRegion::map, |_| Durability::Pmem)
}

/// A device on a file that need not be on persistent memory, and is as durable as that is without flushes:
/// for tests.
#[cfg(any(test, fuzzing, feature = "testing"))]
pub(crate) fn create_volatile(
    registry: &Registry,
    config: PmemConfig,
) -> Result<Arc<BlockDevice>, BdevError> {
    // Its writes are in the page cache.
    create_mapped(registry, config, PersistentRegion::map_volatile, |file| {
        durability_of(file).min(Durability::Memory)
    })
}

type MapFile = fn(std::os::fd::BorrowedFd<'_>, u64, bool) -> Result<PersistentRegion, RegionError>;

fn create_mapped(
    registry: &Registry,
    config: PmemConfig,
    map: MapFile,
    durability: fn(&File) -> Durability,
) -> Result<Arc<BlockDevice>, BdevError> {
    if registry.find(&config.name).is_some() {
        // Checked before a file is created.
        return Err(BdevError::Exists { name: config.name });
    }
    let (path, block_size) = (config.pmem_file.as_path(), config.block_size);
    if block_size < 512 || !block_size.is_multiple_of(512) {
        let reason = format!("{block_size} is not a multiple of 512");
        return Err(BdevError::invalid("block_size", reason));
    }
    let (file, bytes) = open(&config)?;
    let blocks = bytes / u64::from(block_size);
    if blocks == 0 {
        let reason = format!("{} has {bytes} bytes, less than a block of {block_size}", path.display());
        return Err(BdevError::invalid("pmem_file", reason));
    }
    lock_file(&file, path, config.readonly)?;
    let bytes = blocks * u64::from(block_size);
    let region = map(file.as_fd(), bytes, !config.readonly).map_err(|error| match error {
        RegionError::NotPersistent => failed(path, NOT_PERSISTENT)(Errno::OPNOTSUPP),
        RegionError::NoCacheFlush => failed(path, NO_CACHE_FLUSH)(Errno::OPNOTSUPP),
        error => BdevError::Memory(error),
    })?;
    if !config.readonly {
        // A page without a block gets one with its first store, which cannot report that the file system is
        // full.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .map_err(failed(path, "cannot get the space of its size"))?;
    }
    let (uuid, identity) = match config.uuid {
        Some(uuid) => (Some(uuid), IdentitySource::Given),
        None => {
            let found = identify(&file, path, config.readonly);
            (found.uuid, found.source)
        }
    };
    let metadata = file.metadata().map_err(failed(path, "cannot be examined"))?;
    let module = PmemBdev {
        geometry: BdevGeometry { buffer_alignment: 1, ..BdevGeometry::new(block_size, blocks) },
        backing_id: (metadata.dev(), metadata.ino()),
        identity,
        durability: durability(&file),
        region: Arc::new(region),
        file: Mutex::new(Some(file)),
        config: config.clone(),
    };
    registry.register(&config.name, uuid, &[], Arc::new(module))
}

fn failed<E: Into<std::io::Error>>(path: &Path, doing: &'static str) -> impl Fn(E) -> BdevError {
    let path = path.to_path_buf();
    move |error| BdevError::File { path: path.clone(), doing, source: error.into() }
}

/// Opens the file, or creates it if that is wanted; returns it with its size.
fn open(config: &PmemConfig) -> Result<(File, u64), BdevError> {
    let path = config.pmem_file.as_path();
    if let Some(bytes) = config.create_bytes {
        match File::options().read(true).write(true).create_new(true).open(path) {
            Ok(file) => {
                let sized = file.set_len(bytes).and_then(|()| file.sync_all());
                sized.map_err(failed(path, "cannot be created"))?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(path, "cannot be created")(error)),
        }
    }
    // Opening a device or a pipe may wait, or do something.
    let metadata = std::fs::metadata(path).map_err(failed(path, "cannot be opened"))?;
    if !metadata.is_file() {
        let reason = format!(
            "{} is no file: a file on a file system with DAX is wanted (ext4 or xfs on /dev/pmemN, mount -o dax)",
            path.display()
        );
        return Err(BdevError::invalid("pmem_file", reason));
    }
    let file = File::options().read(true).write(!config.readonly).open(path);
    let file = file.map_err(failed(path, "cannot be opened"))?;
    let metadata = file.metadata().map_err(failed(path, "cannot be examined"))?;
    Ok((file, metadata.len()))
}

/// Whether a device of this module can be made on a file: it is on persistent memory.
pub fn is_persistent(path: &Path) -> bool {
    // Opening a device or a pipe may wait, or do something.
    let is_file = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() > 0);
    let Some(file) = is_file.then(|| File::open(path).ok()).flatten() else { return false };
    PersistentRegion::map(file.as_fd(), 1, false).is_ok()
}

impl Bdev for PmemBdev {
    fn product_name(&self) -> &'static str {
        PRODUCT_NAME
    }

    fn geometry(&self) -> BdevGeometry {
        self.geometry
    }

    fn durability(&self) -> Durability {
        self.durability
    }

    fn supports(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::Flush => true,
            Op::Write | Op::WriteZeroes => !self.config.readonly,
            _ => false,
        }
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits { transfer_bytes_max: TRANSFER_BYTES_MAX.max(self.geometry.block_size), ..IoLimits::NONE }
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(PmemChannel {
            region: self.region.clone(),
            block_size: self.geometry.block_size,
            executed: Vec::new(),
            completed: Vec::new(),
            zeroing: ZeroingQueue::default(),
        }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let mut object = vec![
            ("pmem_file", InfoValue::Text(self.config.pmem_file.display().to_string())),
            ("readonly", InfoValue::Bool(self.config.readonly)),
            ("flushed_with", self.region.flush_instruction().into()),
            ("uuid_source", self.identity.name().into()),
        ];
        if self.region.is_poisoned() {
            object.push(("failed", InfoValue::Bool(true)));
        }
        vec![("pmem", InfoValue::Object(object))]
    }

    fn read_only(&self) -> bool {
        self.config.readonly
    }

    fn backing_id(&self) -> Option<(u64, u64)> {
        Some(self.backing_id)
    }

    fn on_closed(&self) {
        *sync::lock(&self.file) = None;
    }
}

struct PmemChannel {
    region: Arc<PersistentRegion>,
    block_size: u32,
    /// Requests of this turn with their status, which counts once they are durable. Empty between calls.
    executed: Vec<(Request, Status)>,
    completed: Vec<Completion>,
    zeroing: ZeroingQueue,
}

impl PmemChannel {
    /// Executes a request, or queues it if it zeroes a range.
    fn execute(&mut self, mut request: Request) {
        let (mut at, bytes) = super::bytes_of(&request, self.block_size);
        let status = match (request.op, &mut request.payload) {
            (Op::Read, Payload::Data(data)) => {
                for slice in data.slices_mut() {
                    self.region.read_into(at, slice);
                    at += slice.len() as u64;
                }
                Status::SUCCESS
            }
            (Op::Write, Payload::Data(data)) => {
                for slice in data.slices() {
                    self.region.write_from(at, slice);
                    at += slice.len() as u64;
                }
                Status::SUCCESS
            }
            (Op::WriteZeroes, _) => {
                self.zeroing.push(request, at, bytes);
                return;
            }
            // What was completed is durable.
            (Op::Flush, _) => Status::SUCCESS,
            _ => Status::INTERNAL_ERROR,
        };
        self.executed.push((request, status));
    }

    /// Makes durable what was executed, and completes it.
    fn complete(&mut self) {
        if self.executed.is_empty() {
            return;
        }
        self.region.persist();
        let is_poisoned = self.region.is_poisoned();
        for (request, status) in self.executed.drain(..) {
            let status = match request.op {
                Op::Read if is_poisoned => Status::UNRECOVERED_READ_ERROR,
                Op::Write | Op::WriteZeroes | Op::Flush if is_poisoned => Status::WRITE_FAULT,
                _ => status,
            };
            self.completed.push(request.complete(status));
        }
    }
}

impl block_io::Channel for PmemChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            self.execute(request);
        }
        self.complete();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        if !self.zeroing.is_empty() {
            let done = self.zeroing.zero_next_piece(|offset, bytes| self.region.zero(offset, bytes));
            self.executed.extend(done.map(|request| (request, Status::SUCCESS)));
            self.complete();
        }
        let count = self.completed.len();
        sink.append(&mut self.completed);
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.completed.is_empty() || !self.zeroing.is_empty()).then_some(0)
    }
}
