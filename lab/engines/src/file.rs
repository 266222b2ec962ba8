//! Files and devices, opened as a job needs them.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{
    Advice, AtFlags, FallocateFlags, SeekFrom, StatxFlags, fadvise, fallocate, fdatasync, fsync,
    ioctl_blksszget, seek, statx,
};
use rustix::io::Errno;
use sys::{RingFile, device};
use wire_nvme::identify::IdentifyNamespace;

/// What a job does to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only.
    Read,
    /// Reads and writes.
    Write,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// What is done to it.
    pub access: Access,
    /// Past the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Every write waits for data and metadata (`O_SYNC`), or for data (`O_DSYNC`).
    pub sync: SyncMode,
    /// Bytes of a block where I/O is buffered; with direct I/O the file says it.
    pub unit_bytes: u32,
    /// Whether a device that is mounted, or used otherwise, may be written.
    pub allow_mounted_write: bool,
}

/// What a write waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncMode {
    /// The page cache, or the device's.
    #[default]
    None,
    /// Data and metadata on the medium.
    Sync,
    /// Data, and the metadata to find it, on the medium.
    DataSync,
}

/// What kind of file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
    /// A character device that is none of NVMe's, as `/dev/zero`.
    Character,
    /// An NVMe generic device, and the namespace behind it.
    NvmeGeneric {
        /// Its identifier.
        namespace: u32,
    },
}

/// Why a file cannot be used.
#[derive(Debug)]
pub struct FileError {
    path: String,
    what: &'static str,
    error: io::Error,
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hint = match self.error.raw_os_error() {
            Some(libc::EINVAL) if self.what == "open" => {
                "; does its file system take direct I/O? --direct=0 does without"
            }
            Some(libc::EBUSY) => {
                "; it is mounted, swapped to or part of another device: --allow_mounted_write=1 writes all the same"
            }
            Some(libc::ENOENT) => "; give --size to have a file made",
            _ => "",
        };
        write!(f, "{}: {}: {}{hint}", self.path, self.what, self.error)
    }
}

impl std::error::Error for FileError {}

impl FileError {
    /// Whether there is no such file.
    pub fn is_missing(&self) -> bool {
        self.error.kind() == io::ErrorKind::NotFound
    }
}

/// A device that the kernel uses is claimed, whole or in part, and cannot be claimed again. To look is to claim
/// it for a moment, and other jobs look in the same moment: only a claim that stays is somebody's.
fn unclaimed(path: &str) -> io::Result<()> {
    let look = || std::fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path).map(drop);
    for _ in 1..LOOKS_MAX {
        match look() {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => std::thread::sleep(LOOK_PAUSE),
            found => return found,
        }
    }
    look()
}

/// How often a claimed device is looked at, and how long apart: a mounted one is refused after a tenth of a second.
const LOOKS_MAX: u32 = 51;
const LOOK_PAUSE: std::time::Duration = std::time::Duration::from_millis(2);

/// An open file of which size and blocks are known.
#[derive(Debug)]
pub struct File {
    fd: OwnedFd,
    path: String,
    kind: FileKind,
    block_bytes: u32,
    bytes: u64,
}

/// Smallest unit of direct I/O where the kernel does not tell.
const DIRECT_BYTES: u32 = 512;

impl File {
    /// Opens what is there.
    pub fn open(path: &str, layout: &Layout) -> Result<File, FileError> {
        let failed = |what| move |error| FileError { path: path.to_string(), what, error };
        let found = std::fs::metadata(path).map_err(failed("open"))?;
        let writes = layout.access == Access::Write;
        if writes && found.file_type().is_block_device() && !layout.allow_mounted_write {
            unclaimed(path).map_err(failed("is in use"))?;
        }
        let sync = match layout.sync {
            SyncMode::None => 0,
            SyncMode::Sync => libc::O_SYNC,
            SyncMode::DataSync => libc::O_DSYNC,
        };
        let generic = found.file_type().is_char_device() && is_nvme_generic(path);
        let direct = if layout.direct && !generic { libc::O_DIRECT } else { 0 };
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(writes || generic)
            .custom_flags(sync | direct | (libc::O_NOATIME * i32::from(owned(&found))))
            .open(path)
            .map_err(failed("open"))?;
        let fd = OwnedFd::from(file);
        let (kind, block_bytes, bytes) = if generic {
            let (namespace, block_bytes, bytes) = identify(&fd).map_err(failed("identify"))?;
            (FileKind::NvmeGeneric { namespace }, block_bytes, bytes)
        } else if found.file_type().is_block_device() {
            let block_bytes = ioctl_blksszget(&fd).map_err(|error| failed("BLKSSZGET")(error.into()))?;
            // Every I/O says where it is to go: the descriptor's own position is nobody's.
            let bytes = seek(&fd, SeekFrom::End(0)).map_err(|error| failed("size")(error.into()))?;
            (FileKind::Block, if layout.direct { block_bytes } else { layout.unit_bytes }, bytes)
        } else if found.file_type().is_char_device() {
            (FileKind::Character, layout.unit_bytes, u64::MAX >> 1)
        } else {
            let block_bytes = if layout.direct { direct_unit(&fd) } else { layout.unit_bytes };
            (FileKind::Regular, block_bytes, found.len())
        };
        Ok(File { fd, path: path.to_string(), kind, block_bytes: block_bytes.max(1), bytes })
    }

    /// A file that nothing is done to, for the engine that does nothing.
    pub fn nothing(block_bytes: u32, bytes: u64) -> Result<File, FileError> {
        let path = "/dev/null";
        let file = std::fs::File::open(path).map_err(|error| FileError {
            path: path.to_string(),
            what: "open",
            error,
        })?;
        Ok(File { fd: file.into(), path: path.to_string(), kind: FileKind::Character, block_bytes, bytes })
    }

    /// Makes a regular file at least so long. With `fill` all that is new is written with noise of
    /// `seed`, so that reads find data; otherwise it is allocated where the file system can.
    pub fn make(path: &str, bytes: u64, fill: bool, seed: u64) -> Result<(), FileError> {
        let failed = |what| move |error| FileError { path: path.to_string(), what, error };
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed("create"))?;
        let mut have = file.metadata().map_err(failed("create"))?.len();
        if have >= bytes {
            return Ok(());
        }
        if !fill {
            return match fallocate(&file, FallocateFlags::empty(), have, bytes - have) {
                Ok(()) => Ok(()),
                Err(_) => file.set_len(bytes).map_err(failed("extend")),
            };
        }
        let mut piece = vec![0u8; 1 << 20];
        let mut state = seed | 1;
        while have < bytes {
            for chunk in piece.chunks_exact_mut(8) {
                // An odd multiplier and a rotation: noise that no compressor likes, for little.
                state = state.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ have;
                chunk.copy_from_slice(&state.to_le_bytes());
            }
            let length = (bytes - have).min(piece.len() as u64) as usize;
            std::os::unix::fs::FileExt::write_all_at(&file, &piece[..length], have)
                .map_err(failed("lay out"))?;
            have += length as u64;
        }
        file.sync_data().map_err(failed("lay out"))
    }

    /// Forgets what the page cache holds of it, so that a job reads from the device.
    pub fn invalidate(&self) -> io::Result<()> {
        Ok(fadvise(&self.fd, 0, None, Advice::DontNeed)?)
    }

    /// Where it is.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What it is.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The unit of `lba` and `blocks`.
    #[inline]
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it takes NVMe commands.
    pub fn is_nvme_generic(&self) -> bool {
        matches!(self.kind, FileKind::NvmeGeneric { .. })
    }

    /// 0, or a negative error number.
    pub(crate) fn flush(&self, data_only: bool) -> i32 {
        outcome(if data_only { fdatasync(&self.fd) } else { fsync(&self.fd) })
    }

    /// 0, or a negative error number.
    pub(crate) fn discard(&self, offset: u64, bytes: u64) -> i32 {
        match self.kind {
            FileKind::Block => match device::discard(&self.fd, offset, bytes) {
                Ok(()) => 0,
                Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
            },
            FileKind::Regular => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                outcome(fallocate(&self.fd, mode, offset, bytes))
            }
            _ => -libc::EOPNOTSUPP,
        }
    }
}

impl AsFd for File {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl RingFile for File {
    #[inline]
    fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The namespace behind an NVMe generic device, 0 of others.
    #[inline]
    fn namespace(&self) -> u32 {
        match self.kind {
            FileKind::NvmeGeneric { namespace } => namespace,
            _ => 0,
        }
    }
}

fn outcome(result: Result<(), Errno>) -> i32 {
    result.map_or_else(|error| -error.raw_os_error(), |()| 0)
}

/// `/dev/ng0n1`.
fn is_nvme_generic(path: &str) -> bool {
    let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let digits = name.strip_prefix("ng").and_then(|rest| rest.split_once('n'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.is_some_and(|(controller, namespace)| is_number(controller) && is_number(namespace))
}

/// Only a file's owner, or root, may leave its access time alone.
fn owned(found: &std::fs::Metadata) -> bool {
    let user = rustix::process::geteuid().as_raw();
    found.is_file() && (user == 0 || user == found.uid())
}

/// What direct I/O must be a multiple of, as statx(2) tells since Linux 6.1.
fn direct_unit(fd: &OwnedFd) -> u32 {
    match statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(found) if found.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && found.stx_dio_offset_align > 0 => {
            found.stx_dio_offset_align
        }
        _ => DIRECT_BYTES,
    }
}

/// The namespace behind a generic device: identifier, bytes of a block, bytes.
fn identify(fd: &OwnedFd) -> io::Result<(u32, u32, u64)> {
    let namespace = device::nvme_namespace(fd)?;
    let data = device::nvme_identify_namespace(fd, namespace)?;
    let identity = IdentifyNamespace::decode(&data).map_err(|error| io::Error::other(error.to_string()))?;
    let format = identity.formats.get(usize::from(identity.format));
    let log2 = format.map(|format| format.data_log2).filter(|log2| (9..=20).contains(log2));
    let block_bytes = 1u32 << log2.ok_or_else(|| io::Error::other("an impossible LBA format"))?;
    Ok((namespace, block_bytes, identity.nsze.saturating_mul(u64::from(block_bytes))))
}
