//! A device in a file or on a block device, through the core's io_uring.
//!
//! Direct I/O where the file allows it; a reason is told where not. A write is durable with FUA
//! (`RWF_DSYNC`) or after a flush (`fdatasync`): durability class `disk`. Unmapping punches holes, so
//! that a sparse file stays sparse. See [`plan`] for what each request becomes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ring::Op;
use uuid::Uuid;

use crate::{Bdev, BdevError, BoxedChannel, Device, Geometry, Registry, Value};

mod channel;
mod file;
mod plan;

pub use plan::{Plan, Step, fallback, plan, status_of};

/// How a file device is made.
#[derive(Clone, Debug)]
pub struct UringConfig {
    /// The file or block device.
    pub filename: PathBuf,
    /// Its name.
    pub name: String,
    /// Its UUID; made up where none is given.
    pub uuid: Option<Uuid>,
    /// Bytes of a block; the device's own, or 512 for a file, where none is given.
    pub block_size: Option<u32>,
    /// Whether writes are refused and the file is opened for reading only.
    pub readonly: bool,
    /// Makes a sparse file of so many bytes where there is none.
    pub create_bytes: Option<u64>,
    /// Whether the page cache is avoided where that is possible.
    pub direct: bool,
}

impl UringConfig {
    /// A device on an existing file, writable and direct.
    pub fn new(name: &str, filename: impl Into<PathBuf>) -> UringConfig {
        UringConfig {
            filename: filename.into(),
            name: name.to_string(),
            uuid: None,
            block_size: None,
            readonly: false,
            create_bytes: None,
            direct: true,
        }
    }
}

/// Requests in flight on one channel: a sixteenth of a core's ring, what an NVMe disk keeps busy.
const DEPTH: u32 = 256;

/// The module's object.
pub struct Uring {
    config: UringConfig,
    geometry: Geometry,
    medium: (u64, u64),
    direct: Result<(), String>,
    /// `None` once the device is closed.
    file: Mutex<Option<std::fs::File>>,
    shared: Arc<Shared>,
}

/// What the channels of one device know together. Read per I/O, written when something changes.
struct Shared {
    blocks: AtomicU64,
    /// Bytes beyond the last whole block.
    unused_bytes: AtomicU64,
    /// The file cannot give space back.
    no_punch: AtomicBool,
    /// The file cannot zero a range but by writing.
    no_zero: AtomicBool,
    /// A flush failed through the page cache, which then forgets what it could not write: no later
    /// flush can vouch for it.
    flush_failed: AtomicBool,
    direct: bool,
}

/// Opens a file and makes a device of it.
///
/// # Errors
/// [`BdevError::NoFileIo`] without io_uring; [`BdevError::File`] where the operating system refuses;
/// [`BdevError::Invalid`] for what is neither file nor block device, for a bad block size and for a
/// file smaller than a block; [`BdevError::Claimed`] where another device or process has the file.
pub fn create(registry: &Registry, config: UringConfig) -> Result<Arc<Device>, BdevError> {
    let probe = sys::Config { engine: Some(sys::Engine::Uring), operations_max: 8 };
    sys::Events::new(&probe).map_err(|_| BdevError::NoFileIo)?;
    if registry.find(&config.name).is_some() {
        // Before a file is made for nothing.
        return Err(BdevError::Exists { name: config.name });
    }
    let opened = file::open(&config, |medium| registry.medium_holder(medium))?;
    let shared = Shared {
        blocks: AtomicU64::new(opened.geometry.blocks),
        unused_bytes: AtomicU64::new(opened.unused_bytes),
        no_punch: AtomicBool::new(false),
        no_zero: AtomicBool::new(false),
        flush_failed: AtomicBool::new(false),
        direct: opened.direct.is_ok(),
    };
    let module = Uring {
        geometry: opened.geometry,
        medium: opened.medium,
        direct: opened.direct,
        file: Mutex::new(Some(opened.file)),
        shared: Arc::new(shared),
        config: config.clone(),
    };
    registry.register(&config.name, config.uuid, &[], Arc::new(module))
}

/// Looks at the file's size again and tells channels and subscribers where it changed.
pub fn rescan(registry: &Registry, name: &str) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    let Some(module) = device.module::<Uring>() else {
        return Err(BdevError::WrongKind { name: name.to_string(), wanted: "URING bdev" });
    };
    {
        let file = module.file.lock().unwrap_or_else(PoisonError::into_inner);
        let file = file.as_ref().ok_or_else(|| BdevError::Removed { name: name.to_string() })?;
        let (blocks, unused) = file::blocks_of(file, &module.config.filename, module.geometry.block_size)?;
        module.shared.blocks.store(blocks, Ordering::Relaxed);
        module.shared.unused_bytes.store(unused, Ordering::Relaxed);
    }
    registry.notify_resized(device.name())
}

impl Bdev for Uring {
    fn product_name(&self) -> &'static str {
        "URING bdev"
    }

    fn geometry(&self) -> Geometry {
        Geometry { blocks: self.shared.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn supports(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::Flush => true,
            Op::Write | Op::Unmap | Op::WriteZeroes => !self.config.readonly,
            // The layer's own: there is no more to a file's reset than that I/O has drained.
            Op::Reset | Op::Compare => false,
            // Files know no such thing.
            Op::WriteUncorrectable => false,
        }
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let file = file.as_ref().ok_or_else(|| BdevError::Removed { name: self.config.name.clone() })?;
        let failed = |doing| {
            let path = self.config.filename.clone();
            move |source| BdevError::File { path, doing, source }
        };
        // A channel has its own descriptor of the one opening, so that it may outlive the device.
        let own = file.try_clone().map_err(failed("cannot be opened once more"))?;
        let client = core.events().client();
        if !client.has_files() {
            return Err(BdevError::NoFileIo);
        }
        let id = client.add_file(own.into()).map_err(failed("cannot be added to the core's ring"))?;
        let channel =
            channel::Channel::new(core.clone(), client, id, self.geometry.block_size, self.shared.clone());
        Ok(Box::new(channel))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        let mut object = vec![
            ("filename", Value::Text(self.config.filename.display().to_string())),
            ("direct", Value::Bool(self.direct.is_ok())),
            ("readonly", Value::Bool(self.config.readonly)),
            ("durability", "disk".into()),
            ("durability_until_flushed", "memory".into()),
        ];
        if let Err(reason) = &self.direct {
            object.push(("direct_refused", reason.as_str().into()));
        }
        let unused = self.shared.unused_bytes.load(Ordering::Relaxed);
        if unused > 0 {
            object.push(("unused_bytes", Value::Number(unused)));
        }
        vec![("uring", Value::Object(object))]
    }

    fn read_only(&self) -> bool {
        self.config.readonly
    }

    fn depth(&self) -> u32 {
        DEPTH
    }

    fn medium(&self) -> Option<(u64, u64)> {
        Some(self.medium)
    }

    fn closed(&self) {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(file);
    }
}
