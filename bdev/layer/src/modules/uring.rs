//! The uring device: a file or kernel block device, accessed through the core's io_uring. With
//! [`UringConfig::aio`] it is SPDK's AIO device, whose I/O Linux AIO carries: a core needs no io_uring for
//! it.
//!
//! It uses direct I/O where the file allows it, and reports the reason where not. A write is durable with FUA
//! (`RWF_DSYNC`) or after a flush (`fdatasync`): durability class `disk`, or `memory` where [`medium`] finds
//! that. Unmap punches holes, so that a sparse file stays sparse. [`plan`] maps requests to file operations.
//!
//! With [`UringConfig::polling`] each channel has an io_uring of its own for reads and writes, and for an
//! NVMe generic device (`/dev/ngXnY`) it passes NVMe commands through to the driver, past the kernel's block
//! layer.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use block_io::{Op, Status};
use os::{AioFile, FileIo, NvmePassthrough, UringPolling};
use rustix::io::Errno;
use uuid::Uuid;

use self::own_ring::{OwnRingChannel, RingFile};
use crate::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BlockingReader, BoxedChannel, Durability, InfoValue,
    IoLimits, Registry,
};

mod aio_port;
mod channel;
mod claim;
mod file;
mod identity;
mod medium;
mod own_ring;
mod plan;
mod port;
mod seek;
mod worker;

use aio_port::{AIO_DEPTH, AioPort};
use channel::FileIoChannel;
use identity::DeviceIdentity;
use port::UringPort;
use worker::FileWorker;

pub(crate) use file::lock as lock_file;
pub(crate) use identity::{IdentitySource, identify};
#[cfg(any(test, fuzzing, feature = "testing"))]
pub(crate) use medium::durability_of;

pub use plan::{FilePlan, FileStep, fallback, plan, status_of};

/// Configuration of a uring device.
#[derive(Clone, Debug)]
pub struct UringConfig {
    /// Path of the file or block device.
    pub filename: PathBuf,
    /// Name of the device.
    pub name: String,
    /// UUID; `None` for the one that is stored with the file, or belongs to the disk.
    pub uuid: Option<Uuid>,
    /// Size of a block in bytes; `None` for that of the block device, or 512 for a file.
    pub block_size: Option<u32>,
    /// Opens the file read-only and rejects writes.
    pub readonly: bool,
    /// Creates a sparse file of this many bytes if there is none.
    pub create_bytes: Option<u64>,
    /// Use direct I/O where the file supports it.
    pub direct: bool,
    /// Polled completions, or a submission thread of the kernel; both off by default.
    pub polling: UringPolling,
    /// Linux AIO carries its I/O, and it is a device of SPDK's AIO module. `polling` has no effect then.
    pub aio: Option<AioConfig>,
    /// Use a block device although it is mounted, used as swap, part of another device, or open exclusively.
    pub force: bool,
}

/// What only an AIO device has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AioConfig {
    /// Unmap deallocates and write zeroes uses `fallocate`. Otherwise there is no unmap, and zeroes are
    /// written as data.
    pub fallocate: bool,
    /// Reads and writes of a block device never wait within the system call (`RWF_NOWAIT`): what the device
    /// has no resources for is retried.
    pub nowait: bool,
}

/// SPDK's modules for files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileModule {
    /// `bdev_uring_*`: io_uring.
    Uring,
    /// `bdev_aio_*`: Linux AIO.
    Aio,
}

impl FileModule {
    /// The product name of its devices.
    pub fn product_name(self) -> &'static str {
        match self {
            FileModule::Uring => "URING bdev",
            FileModule::Aio => "AIO disk",
        }
    }
}

impl UringConfig {
    /// A writable device on an existing file, with direct I/O.
    pub fn new(name: &str, filename: impl Into<PathBuf>) -> UringConfig {
        UringConfig {
            filename: filename.into(),
            name: name.to_string(),
            uuid: None,
            block_size: None,
            readonly: false,
            create_bytes: None,
            direct: true,
            polling: UringPolling::default(),
            aio: None,
            force: false,
        }
    }

    /// The module that it is a device of.
    pub fn module(&self) -> FileModule {
        if self.aio.is_some() { FileModule::Aio } else { FileModule::Uring }
    }

    /// Whether it may deallocate and zero ranges of the file.
    fn fallocates(&self) -> bool {
        !self.readonly && self.aio.is_none_or(|aio| aio.fallocate)
    }
}

/// Requests in flight on one channel: a sixteenth of a core's ring, and enough to keep an NVMe disk busy.
const DEPTH: u32 = 256;

/// Most bytes of one read or write: the kernel ends longer ones a page before 2 GiB.
const TRANSFER_BYTES_MAX: u32 = 1 << 30;

/// The module's object of a uring device.
pub struct UringBdev {
    config: UringConfig,
    geometry: BdevGeometry,
    medium: (u64, u64),
    direct: Result<(), String>,
    /// Of an NVMe generic device: commands are passed through.
    passthrough: Option<file::GenericDevice>,
    identity: IdentitySource,
    durability: Durability,
    /// What keeps others from using the block device and the file behind it; dropped when the last user has
    /// closed it.
    claims: Mutex<Vec<File>>,
    shared: Arc<UringShared>,
}

/// State shared by the channels of one device. Read per I/O, rarely written.
struct UringShared {
    blocks: AtomicU64,
    /// Bytes of the file beyond the last whole block.
    unused_bytes: AtomicU64,
    /// The file does not support `FALLOC_FL_PUNCH_HOLE`.
    no_punch: AtomicBool,
    /// The file does not support `FALLOC_FL_ZERO_RANGE`.
    no_zero: AtomicBool,
    /// A flush through the page cache failed. The kernel then drops the dirty pages, so that a later flush
    /// may succeed without them: every later flush must fail.
    flush_failed: AtomicBool,
    direct: bool,
    /// A file, which can have holes, and not a block device.
    has_holes: bool,
    /// Most blocks of a request with `RequestFlags::ATOMIC`, of which the kernel writes all or none; 0
    /// without this promise.
    atomic_blocks_max: u32,
    worker: FileWorker,
}

/// Opens a file and registers a device for it.
///
/// # Errors
/// [`BdevError::NoFileIo`] without io_uring, or [`BdevError::NoAio`] without AIO; [`BdevError::File`] if a
/// system call fails; [`BdevError::Invalid`] for anything but a file or block device, for an invalid block
/// size, and for a file smaller than a block; [`BdevError::Claimed`] if another device or process uses the
/// file; [`BdevError::InUse`] if the block device has another user; [`BdevError::SameIdentity`] if another
/// device has its UUID, as an image of the same file system has.
pub fn create(registry: &Registry, config: UringConfig) -> Result<Arc<BlockDevice>, BdevError> {
    if config.aio.is_some() {
        AioFile::probe().map_err(|error| BdevError::NoAio { reason: aio_refusal(&error) })?;
    } else {
        registry.check_file_io()?;
        let probe = os::EventLoopConfig { backend: Some(os::EventBackend::Uring), operations_max: 8 };
        os::EventLoop::new(&probe).map_err(|error| BdevError::NoFileIo { reason: ring_refusal(&error) })?;
    }
    if registry.find(&config.name).is_some() {
        // Checked before a file is created.
        return Err(BdevError::Exists { name: config.name });
    }
    let opened = file::open(&config, |medium| registry.backing_user(medium))?;
    probe_ring(&config, &opened)?;
    let identity = match config.uuid {
        Some(uuid) => DeviceIdentity { uuid: Some(uuid), source: IdentitySource::Given },
        None => identify(&opened.file, &config.filename, config.readonly),
    };
    if identity.source != IdentitySource::Given
        && let Some(uuid) = identity.uuid
        && let Some(other) = registry.find(&uuid.to_string())
    {
        let (name, other) = (config.name, other.name().to_string());
        return Err(BdevError::SameIdentity { name, uuid, other });
    }
    let shared = UringShared {
        blocks: AtomicU64::new(opened.geometry.blocks),
        unused_bytes: AtomicU64::new(opened.unused_bytes),
        no_punch: AtomicBool::new(!config.fallocates()),
        no_zero: AtomicBool::new(!config.fallocates()),
        flush_failed: AtomicBool::new(false),
        direct: opened.direct.is_ok(),
        has_holes: opened.is_regular,
        atomic_blocks_max: opened.geometry.atomic_write_blocks,
        worker: FileWorker::new(opened.file),
    };
    let module = UringBdev {
        geometry: opened.geometry,
        medium: opened.backing_id,
        direct: opened.direct,
        passthrough: opened.generic,
        identity: identity.source,
        durability: opened.durability,
        claims: Mutex::new(opened.claim.into_iter().chain(opened.backing).collect()),
        shared: Arc::new(shared),
        config: config.clone(),
    };
    registry.register(&config.name, identity.uuid, &[], Arc::new(module))
}

/// Why the kernel refuses an io_uring, from the error of `io_uring_setup`, and what to do about it.
pub fn ring_refusal(error: &std::io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::NOMEM) => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or_else(|| "what is free".to_string(), |bytes| format!("{} KiB", bytes >> 10));
            format!(
                "locked memory is limited to {limit} (RLIMIT_MEMLOCK); raise it with `ulimit -l` or LimitMEMLOCK= of \
                 systemd"
            )
        }
        Some(Errno::PERM | Errno::ACCESS) => {
            "it is forbidden; root allows it with sysctl kernel.io_uring_disabled=0, unless a seccomp filter (of a \
             container) forbids it"
                .to_string()
        }
        Some(Errno::NOSYS | Errno::INVAL) => format!("the kernel is too old, or built without it ({error})"),
        Some(Errno::MFILE | Errno::NFILE) => format!("{error}; raise the limit of descriptors (ulimit -n)"),
        _ => error.to_string(),
    }
}

/// Why the kernel refuses a context of AIO, from the error of `io_setup`, and what to do about it.
pub fn aio_refusal(error: &std::io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => {
            "the contexts of all processes exceed the limit; raise it with sysctl fs.aio-max-nr".to_string()
        }
        Some(Errno::PERM | Errno::ACCESS) => {
            "it is forbidden, as by a seccomp filter of a container".to_string()
        }
        Some(Errno::NOSYS) => "the kernel is built without it, or a sandbox has none".to_string(),
        _ => error.to_string(),
    }
}

/// Checks that the file can be used by rings of their own, if the device's channels will have such.
fn probe_ring(config: &UringConfig, opened: &file::OpenedFile) -> Result<(), BdevError> {
    let UringPolling { iopoll, sqpoll, .. } = config.polling;
    if config.aio.is_some() || (opened.generic.is_none() && !iopoll && !sqpoll) {
        return Ok(());
    }
    let field = if iopoll {
        "iopoll"
    } else if sqpoll {
        "sqpoll"
    } else {
        "filename"
    };
    let invalid =
        |reason: String| BdevError::invalid(field, format!("{}: {reason}", config.filename.display()));
    if let (true, None, Err(reason)) = (iopoll, &opened.generic, &opened.direct) {
        return Err(invalid(format!("completions are polled with direct I/O only, but {reason}")));
    }
    let file = opened.file.try_clone().map_err(|error| invalid(format!("cannot be duplicated ({error})")))?;
    let namespace_id = opened.generic.map_or(0, |device| device.namespace_id);
    let file = RingFile { file: file.into(), block_size: opened.geometry.block_size, namespace_id };
    match opened.generic {
        Some(_) => own_ring::probe::<NvmePassthrough>(file, config.polling),
        None => own_ring::probe::<FileIo>(file, config.polling),
    }
    .map_err(invalid)
}

/// Rereads the file's size, and notifies channels and subscribers if it changed.
pub fn rescan(registry: &Registry, name: &str, of: FileModule) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    let Some(module) = device.module::<UringBdev>().filter(|module| module.config.module() == of) else {
        return Err(BdevError::WrongKind { name: name.to_string(), expected: of.product_name() });
    };
    {
        let file =
            &module.shared.worker.file().ok_or_else(|| BdevError::Removed { name: name.to_string() })?;
        let (path, block_size) = (&module.config.filename, module.geometry.block_size);
        let (blocks, unused) = match &module.passthrough {
            Some(device) => (file::identify(file, path, device.namespace_id)?.nsze, 0),
            None => file::blocks_of(file, path, block_size)?,
        };
        module.shared.blocks.store(blocks, Ordering::Relaxed);
        module.shared.unused_bytes.store(unused, Ordering::Relaxed);
    }
    registry.notify_resized(device.name())
}

impl UringBdev {
    /// The file, if it is a regular one and the device is not closed.
    pub(crate) fn regular_file(&self) -> Option<Arc<File>> {
        self.shared.has_holes.then(|| self.shared.worker.file()).flatten()
    }

    /// Whether the file has no name any more: its contents are lost when the device is closed.
    pub(crate) fn is_file_deleted(&self) -> bool {
        let file = self.regular_file();
        file.is_some_and(|file| rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_nlink == 0))
    }
}

impl BlockingReader for UringShared {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        let file = self.worker.file().ok_or(Status::ABORT_REQUESTED)?;
        let status = |error: std::io::Error| match error.raw_os_error() {
            Some(errno) => status_of(Op::Read, block_io::Errno(errno)),
            // The file has become shorter.
            None => Status::INTERNAL_ERROR,
        };
        file.read_exact_at(out, offset).map_err(status)
    }
}

impl Bdev for UringBdev {
    fn product_name(&self) -> &'static str {
        self.config.module().product_name()
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry { blocks: self.shared.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn durability(&self) -> Durability {
        self.durability
    }

    fn supports(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::Flush => true,
            Op::Write => !self.config.readonly,
            // The commands that are passed through have none of these yet.
            Op::Unmap => self.config.fallocates() && self.passthrough.is_none(),
            Op::WriteZeroes => !self.config.readonly && self.passthrough.is_none(),
            Op::SeekData | Op::SeekHole => self.shared.has_holes,
            // A reset of a file only drains its I/O, which the layer does, and files have no uncorrectable
            // blocks.
            _ => false,
        }
    }

    /// A request is one file operation. Direct I/O needs aligned slices of whole sectors; the page cache
    /// takes any.
    fn io_limits(&self) -> IoLimits {
        if let Some(device) = &self.passthrough {
            // The kernel does not split a command, and maps it as PRPs.
            return IoLimits {
                transfer_bytes_max: device.transfer_bytes_max,
                segments_max: device.segments_max,
                alignment: 4,
                virtual_boundary: 4096,
                boundary_blocks: 0,
            };
        }
        IoLimits {
            transfer_bytes_max: TRANSFER_BYTES_MAX,
            segments_max: os::IO_VECTORS_MAX as u32,
            alignment: if self.direct.is_ok() { self.geometry.buffer_alignment } else { 1 },
            ..IoLimits::NONE
        }
    }

    fn blocking_reader(&self) -> Option<Arc<dyn BlockingReader>> {
        self.passthrough.is_none().then(|| self.shared.clone() as Arc<dyn BlockingReader>)
    }

    /// Neither AIO nor a ring of its own has the buffers of the core's ring.
    fn registered_page_alignment(&self) -> Option<u32> {
        let UringPolling { iopoll, sqpoll, .. } = self.config.polling;
        (self.passthrough.is_none() && self.config.aio.is_none() && !iopoll && !sqpoll)
            .then(|| self.io_limits().alignment)
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let file =
            self.shared.worker.file().ok_or_else(|| BdevError::Removed { name: self.config.name.clone() })?;
        let failed = |doing| {
            let path = self.config.filename.clone();
            move |source| BdevError::File { path, doing, source }
        };
        // A channel duplicates the file descriptor, so that it may outlive the device.
        let own = file.try_clone().map_err(failed("cannot be duplicated"))?;
        let (block_size, polling) = (self.geometry.block_size, self.config.polling);
        if let Some(aio) = self.config.aio {
            let no_context = failed("cannot have a context of AIO (see fs.aio-max-nr)");
            let port = AioPort::new(core, own.into(), aio.nowait, self.shared.clone()).map_err(no_context)?;
            return Ok(Box::new(FileIoChannel::new(core.clone(), port, block_size, self.shared.clone())));
        }
        let no_ring = failed("cannot have a ring of its own");
        if let Some(device) = &self.passthrough {
            let file = RingFile { file: own.into(), block_size, namespace_id: device.namespace_id };
            let channel = OwnRingChannel::<NvmePassthrough>::new(file, polling, None).map_err(no_ring)?;
            return Ok(Box::new(channel));
        }
        let client = core.event_loop().client();
        if !client.supports_files() {
            return Err(BdevError::NoFileIo { reason: "this reactor uses epoll".to_string() });
        }
        let polled = (polling.iopoll || polling.sqpoll).then(|| own.try_clone()).transpose();
        let polled = polled.map_err(failed("cannot be duplicated"))?;
        let id = client.add_file(own.into()).map_err(failed("cannot be added to the core's ring"))?;
        let port = UringPort::new(client, id);
        let channel = FileIoChannel::new(core.clone(), port, block_size, self.shared.clone());
        let Some(polled) = polled else { return Ok(Box::new(channel)) };
        let file = RingFile { file: polled.into(), block_size, namespace_id: 0 };
        let channel = OwnRingChannel::<FileIo>::new(file, polling, Some(channel)).map_err(no_ring)?;
        Ok(Box::new(channel))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let mut object = vec![
            ("filename", InfoValue::Text(self.config.filename.display().to_string())),
            ("direct", InfoValue::Bool(self.direct.is_ok())),
            ("readonly", InfoValue::Bool(self.config.readonly)),
            ("uuid_source", self.identity.name().into()),
        ];
        for (name, is_on) in [
            ("iopoll", self.config.polling.iopoll),
            ("sqpoll", self.config.polling.sqpoll),
            ("passthrough", self.passthrough.is_some()),
        ] {
            if is_on {
                object.push((name, InfoValue::Bool(true)));
            }
        }
        if self.is_file_deleted() {
            object.push(("file_deleted", InfoValue::Bool(true)));
        }
        if let IdentitySource::Unstable(reason) = &self.identity {
            object.push(("uuid_not_kept", reason.as_str().into()));
        }
        if let Err(reason) = &self.direct {
            object.push(("direct_refused", reason.as_str().into()));
        }
        let unused = self.shared.unused_bytes.load(Ordering::Relaxed);
        if unused > 0 {
            object.push(("unused_bytes", InfoValue::Number(unused)));
        }
        let Some(aio) = self.config.aio else { return vec![("uring", InfoValue::Object(object))] };
        object.push(("block_size_override", InfoValue::Bool(self.config.block_size.is_some())));
        object.push(("fallocate", InfoValue::Bool(aio.fallocate)));
        object.push(("nowait", InfoValue::Bool(aio.nowait)));
        vec![("aio", InfoValue::Object(object))]
    }

    fn read_only(&self) -> bool {
        self.config.readonly
    }

    fn depth(&self) -> u32 {
        if self.config.aio.is_some() { AIO_DEPTH } else { DEPTH }
    }

    fn backing_id(&self) -> Option<(u64, u64)> {
        Some(self.medium)
    }

    fn on_closed(&self) {
        sync::lock(&self.claims).clear();
        self.shared.worker.close();
    }
}
