//! Files and devices, with the open options of a fio job.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use dma::AccessOrder;
use os::{BlockFile, device};
use rustix::fs::{
    Advice, AtFlags, FallocateFlags, SeekFrom, StatxFlags, fadvise, fallocate, fdatasync, fsync,
    ioctl_blksszget, seek, statx,
};
use rustix::io::Errno;
use wire_nvme::identify::IdentifyNamespace;

mod write_lock;
mod zones;

pub use write_lock::WriteLock;
pub use zones::{DeviceZones, FileZones};

/// Access mode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// Read-only.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

/// Options for opening a file.
#[derive(Clone, Copy, Debug)]
pub struct FileOpenOptions {
    /// Access mode.
    pub access: FileAccess,
    /// Bypasses the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Synchronous writes (`O_SYNC`, `O_DSYNC`).
    pub sync: SyncMode,
    /// Block size in bytes for buffered I/O; direct I/O uses that of the file.
    pub buffered_block_bytes: u32,
    /// Allows writes to a block device that is mounted or otherwise in use.
    pub allow_mounted_write: bool,
    /// Size that a regular file may grow to by writes, if it is shorter: bytes.
    pub grows_to: u64,
}

/// Durability of each write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncMode {
    /// The write completes in the page cache, or in the cache of the device.
    #[default]
    None,
    /// Data and metadata are on the medium (`O_SYNC`).
    Sync,
    /// Data and the metadata needed to read it are on the medium (`O_DSYNC`).
    DataSync,
}

/// Type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
    /// A character device other than an NVMe generic device, such as `/dev/zero`.
    Character,
    /// An NVMe generic device (`/dev/ngXnY`).
    NvmeGeneric {
        /// Namespace identifier.
        namespace: u32,
    },
}

/// Error of opening or creating a file.
#[derive(Debug)]
pub struct EngineFileError {
    path: String,
    what: &'static str,
    error: io::Error,
}

impl fmt::Display for EngineFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.what == LOCKED {
            let hint = "a writer needs it alone; --allow_mounted_write=1 writes nevertheless";
            return write!(f, "{}: {LOCKED} {}: {hint}", self.path, self.error);
        }
        let hint = match self.error.raw_os_error() {
            Some(libc::EINVAL) if self.what == "open" => {
                "; does the file system support direct I/O? --direct=0 disables it"
            }
            Some(libc::EBUSY) => {
                "; it is mounted, used as swap or part of another device: --allow_mounted_write=1 allows writes"
            }
            Some(libc::ENOENT) => "; give --size to create the file",
            _ => "",
        };
        write!(f, "{}: {}: {}{hint}", self.path, self.what, self.error)
    }
}

impl std::error::Error for EngineFileError {}

impl EngineFileError {
    /// Whether the file does not exist.
    pub fn is_missing(&self) -> bool {
        self.error.kind() == io::ErrorKind::NotFound
    }
}

/// Checks with `O_EXCL` that a block device is not in use by the kernel. Other jobs may probe the device at
/// the same time, which claims it briefly, so only a lasting claim is an error.
fn check_not_in_use(path: &str) -> io::Result<()> {
    let probe = || std::fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path).map(drop);
    for _ in 1..PROBES_MAX {
        match probe() {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => std::thread::sleep(PROBE_INTERVAL),
            metadata => return metadata,
        }
    }
    probe()
}

/// Number of probes of a claimed device, and the pause between them: a mounted one is rejected after 100 ms.
const PROBES_MAX: u32 = 51;
const PROBE_INTERVAL: std::time::Duration = std::time::Duration::from_millis(2);

/// What is wrong with a file that another process has locked; the error names it.
const LOCKED: &str = "is locked (flock) by";

/// An open file or device with its size and block size.
#[derive(Debug)]
pub struct EngineFile {
    fd: OwnedFd,
    path: String,
    kind: FileKind,
    block_bytes: u32,
    bytes: u64,
    zones: FileZones,
}

/// The page cache of an open file.
#[derive(Debug)]
pub struct PageCache(OwnedFd);

impl PageCache {
    /// Drops the pages that are neither dirty nor mapped, and starts to write the dirty ones.
    pub fn invalidate(&self) -> io::Result<()> {
        Ok(fadvise(&self.0, 0, None, Advice::DontNeed)?)
    }

    /// Sets the expected order of the I/O through the file from which this was made.
    pub fn expect_order(&self, order: AccessOrder) -> io::Result<()> {
        let advice = match order {
            AccessOrder::Random => Advice::Random,
            AccessOrder::Sequential => Advice::Sequential,
        };
        Ok(fadvise(&self.0, 0, None, advice)?)
    }
}

/// Alignment of direct I/O in bytes if the kernel does not report it.
const DIRECT_BYTES: u32 = 512;

/// A regular file for writing, which is created if it does not exist, and its length.
fn open_or_create(path: &str) -> std::io::Result<(std::fs::File, u64)> {
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    let length = file.metadata()?.len();
    Ok((file, length))
}

impl EngineFile {
    /// Opens an existing file or device.
    ///
    /// # Errors
    /// A failed system call, or a block device that is in use, opened for writing. The writer of a regular
    /// file or a block device has its [`WriteLock`].
    pub fn open(path: &str, layout: &FileOpenOptions) -> Result<EngineFile, EngineFileError> {
        let failed = |what| move |error| EngineFileError { path: path.to_string(), what, error };
        let metadata = std::fs::metadata(path).map_err(failed("open"))?;
        let writes = layout.access == FileAccess::ReadWrite;
        if writes && metadata.file_type().is_block_device() && !layout.allow_mounted_write {
            check_not_in_use(path).map_err(failed("is in use"))?;
        }
        let sync = match layout.sync {
            SyncMode::None => 0,
            SyncMode::Sync => libc::O_SYNC,
            SyncMode::DataSync => libc::O_DSYNC,
        };
        let generic = metadata.file_type().is_char_device() && is_nvme_generic(path);
        let direct = if layout.direct && !generic { libc::O_DIRECT } else { 0 };
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(writes || generic)
            .custom_flags(sync | direct | (libc::O_NOATIME * i32::from(may_skip_atime(&metadata))))
            .open(path)
            .map_err(failed("open"))?;
        let fd = OwnedFd::from(file);
        let (kind, block_bytes, bytes) = if generic {
            let (namespace, block_bytes, bytes) = identify(&fd).map_err(failed("identify"))?;
            (FileKind::NvmeGeneric { namespace }, block_bytes, bytes)
        } else if metadata.file_type().is_block_device() {
            let block_bytes = ioctl_blksszget(&fd).map_err(|error| failed("BLKSSZGET")(error.into()))?;
            // All I/O is positioned, so the file offset of the descriptor is unused.
            let bytes = seek(&fd, SeekFrom::End(0)).map_err(|error| failed("size")(error.into()))?;
            (FileKind::Block, if layout.direct { block_bytes } else { layout.buffered_block_bytes }, bytes)
        } else if metadata.file_type().is_char_device() {
            (FileKind::Character, layout.buffered_block_bytes, u64::MAX >> 1)
        } else {
            let block_bytes =
                if layout.direct { direct_io_alignment(&fd) } else { layout.buffered_block_bytes };
            (FileKind::Regular, block_bytes, metadata.len().max(layout.grows_to))
        };
        Ok(EngineFile {
            fd,
            path: path.to_string(),
            kind,
            block_bytes: block_bytes.max(1),
            bytes,
            zones: FileZones::None,
        })
    }

    /// A placeholder file of the given size, for the `null` engine.
    pub fn null(block_bytes: u32, bytes: u64) -> Result<EngineFile, EngineFileError> {
        let path = "/dev/null";
        let file = std::fs::File::open(path).map_err(|error| EngineFileError {
            path: path.to_string(),
            what: "open",
            error,
        })?;
        Ok(EngineFile {
            fd: file.into(),
            path: path.to_string(),
            kind: FileKind::Character,
            block_bytes,
            bytes,
            zones: FileZones::None,
        })
    }

    /// Lays out a regular file of at least `bytes`. With `fill`, the new part is written with
    /// pseudo-random data of `seed`; otherwise it is preallocated if the file system supports it.
    pub fn lay_out(path: &str, bytes: u64, fill: bool, seed: u64) -> Result<(), EngineFileError> {
        let failed = |what| move |error| EngineFileError { path: path.to_string(), what, error };
        let (file, mut length) = open_or_create(path).map_err(failed("create"))?;
        if length >= bytes {
            return Ok(());
        }
        if !fill {
            return match fallocate(&file, FallocateFlags::empty(), length, bytes - length) {
                Ok(()) => Ok(()),
                Err(_) => file.set_len(bytes).map_err(failed("extend")),
            };
        }
        let mut piece = vec![0u8; 1 << 20];
        let mut random = random::WyRand::new(seed);
        while length < bytes {
            for chunk in piece.chunks_exact_mut(8) {
                chunk.copy_from_slice(&random.next_bits().to_le_bytes());
            }
            let count = (bytes - length).min(piece.len() as u64) as usize;
            std::os::unix::fs::FileExt::write_all_at(&file, &piece[..count], length)
                .map_err(failed("lay out"))?;
            length += count as u64;
        }
        file.sync_data().map_err(failed("lay out"))
    }

    /// Makes a regular file of at least `bytes`, whose new part is not allocated.
    pub fn extend(path: &str, bytes: u64) -> Result<(), EngineFileError> {
        let failed = |what| move |error| EngineFileError { path: path.to_string(), what, error };
        let (file, length) = open_or_create(path).map_err(failed("create"))?;
        match length >= bytes {
            true => Ok(()),
            false => file.set_len(bytes).map_err(failed("extend")),
        }
    }

    /// Creates a regular file if it does not exist, and returns the size that it can grow to: its own, and
    /// what is free in its file system.
    pub fn room(path: &str) -> Result<u64, EngineFileError> {
        let failed = |what| move |error| EngineFileError { path: path.to_string(), what, error };
        let (file, length) = open_or_create(path).map_err(failed("create"))?;
        let system = rustix::fs::fstatvfs(&file).map_err(|error| failed("statvfs")(error.into()))?;
        Ok(length.saturating_add(system.f_bavail.saturating_mul(system.f_frsize)))
    }

    /// The page cache of a regular file or block device; `None` of others. It stays usable when an engine has
    /// the file.
    pub fn page_cache(&self) -> io::Result<Option<PageCache>> {
        match self.kind {
            FileKind::Regular | FileKind::Block => Ok(Some(PageCache(self.fd.try_clone()?))),
            _ => Ok(None),
        }
    }

    /// What a discard does from now on: with zones it resets one.
    pub fn set_zones(&mut self, zones: FileZones) {
        self.zones = zones;
    }

    /// Path of the file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Type of the file.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// Block size in bytes: the unit of `lba` and `blocks`.
    #[inline]
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is an NVMe generic device, which accepts NVMe commands.
    pub fn is_nvme_generic(&self) -> bool {
        matches!(self.kind, FileKind::NvmeGeneric { .. })
    }

    /// Returns 0 or a negative errno.
    pub(crate) fn flush(&self, data_only: bool) -> i32 {
        errno_result(if data_only { fdatasync(&self.fd) } else { fsync(&self.fd) })
    }

    /// Returns 0 or a negative errno.
    pub(crate) fn discard(&self, offset: u64, bytes: u64) -> i32 {
        match self.zones {
            FileZones::None => {}
            FileZones::Emulated => return 0,
            FileZones::Device => return zones::reset(&self.fd, offset, bytes),
        }
        match self.kind {
            FileKind::Block => match device::discard(&self.fd, offset, bytes) {
                Ok(()) => 0,
                Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
            },
            FileKind::Regular => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                errno_result(fallocate(&self.fd, mode, offset, bytes))
            }
            _ => -libc::EOPNOTSUPP,
        }
    }
}

impl AsFd for EngineFile {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl BlockFile for EngineFile {
    #[inline]
    fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Namespace identifier of an NVMe generic device; 0 for other files.
    #[inline]
    fn namespace_id(&self) -> u32 {
        match self.kind {
            FileKind::NvmeGeneric { namespace } => namespace,
            _ => 0,
        }
    }
}

fn errno_result(result: Result<(), Errno>) -> i32 {
    result.map_or_else(|error| -error.raw_os_error(), |()| 0)
}

/// Whether a path has the form of `/dev/ng0n1`.
fn is_nvme_generic(path: &str) -> bool {
    let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let digits = name.strip_prefix("ng").and_then(|rest| rest.split_once('n'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.is_some_and(|(controller, namespace)| is_number(controller) && is_number(namespace))
}

/// Whether `O_NOATIME` is permitted: only for the owner of a regular file, or root.
fn may_skip_atime(metadata: &std::fs::Metadata) -> bool {
    let user = rustix::process::geteuid().as_raw();
    metadata.is_file() && (user == 0 || user == metadata.uid())
}

/// Offset alignment of direct I/O, which statx(2) reports since Linux 6.1.
fn direct_io_alignment(fd: &OwnedFd) -> u32 {
    match statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(metadata)
            if metadata.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && metadata.stx_dio_offset_align > 0 =>
        {
            metadata.stx_dio_offset_align
        }
        _ => DIRECT_BYTES,
    }
}

/// Namespace identifier, block size and size in bytes of an NVMe generic device.
fn identify(fd: &OwnedFd) -> io::Result<(u32, u32, u64)> {
    let namespace = device::nvme_namespace_id(fd)?;
    let data = device::nvme_identify_namespace(fd, namespace)?;
    let identity = IdentifyNamespace::decode(&data).map_err(|error| io::Error::other(error.to_string()))?;
    let format = identity.formats.get(usize::from(identity.format));
    let log2 = format.map(|format| format.data_log2).filter(|log2| (9..=20).contains(log2));
    let block_bytes = 1u32 << log2.ok_or_else(|| io::Error::other("invalid LBA format"))?;
    Ok((namespace, block_bytes, identity.nsze.saturating_mul(u64::from(block_bytes))))
}
