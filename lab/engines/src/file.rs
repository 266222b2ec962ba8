//! Files and devices, opened as a job needs them.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

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
/// `BLKDISCARD`, `BLKSSZGET` and `BLKGETSIZE64` of `linux/fs.h`.
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKSSZGET: libc::Ioctl = 0x1268;
const BLKGETSIZE64: libc::Ioctl = 0x8008_1272u32 as libc::Ioctl;
/// `NVME_IOCTL_ID` and `NVME_IOCTL_ADMIN_CMD` of `linux/nvme_ioctl.h`.
const NVME_ID: libc::Ioctl = 0x4e40;
const NVME_ADMIN: libc::Ioctl = 0xc048_4e41u32 as libc::Ioctl;
const IDENTIFY_BYTES: usize = 4096;

impl File {
    /// Opens what is there.
    pub fn open(path: &str, layout: &Layout) -> Result<File, FileError> {
        let failed = |what| move |error| FileError { path: path.to_string(), what, error };
        let found = std::fs::metadata(path).map_err(failed("open"))?;
        let writes = layout.access == Access::Write;
        if writes && found.file_type().is_block_device() && !layout.allow_mounted_write {
            // A device that the kernel uses is claimed, whole or in part, and cannot be claimed again.
            std::fs::OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_EXCL)
                .open(path)
                .map_err(failed("is in use"))?;
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
            let (namespace, block_bytes, bytes) = identify(fd.as_raw_fd()).map_err(failed("identify"))?;
            (FileKind::NvmeGeneric { namespace }, block_bytes, bytes)
        } else if found.file_type().is_block_device() {
            let block_bytes = word(fd.as_raw_fd(), BLKSSZGET).map_err(failed("BLKSSZGET"))? as u32;
            let bytes = word(fd.as_raw_fd(), BLKGETSIZE64).map_err(failed("BLKGETSIZE64"))?;
            (FileKind::Block, if layout.direct { block_bytes } else { layout.unit_bytes }, bytes)
        } else if found.file_type().is_char_device() {
            (FileKind::Character, layout.unit_bytes, u64::MAX >> 1)
        } else {
            let block_bytes = if layout.direct { direct_unit(fd.as_raw_fd()) } else { layout.unit_bytes };
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
            let length = (bytes - have) as libc::off_t;
            // SAFETY: the descriptor is open; nothing else is passed but numbers.
            let result = unsafe { libc::fallocate(file.as_raw_fd(), 0, have as libc::off_t, length) };
            return if result == 0 { Ok(()) } else { file.set_len(bytes).map_err(failed("extend")) };
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
        // SAFETY: numbers only.
        match unsafe { libc::posix_fadvise(self.raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
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

    /// The namespace behind an NVMe generic device, 0 of others.
    pub(crate) fn namespace(&self) -> u32 {
        match self.kind {
            FileKind::NvmeGeneric { namespace } => namespace,
            _ => 0,
        }
    }

    #[inline]
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// 0, or a negative error number.
    pub(crate) fn flush(&self, data_only: bool) -> i32 {
        let fd = self.raw_fd();
        // SAFETY: numbers only.
        let result = if data_only { unsafe { libc::fdatasync(fd) } } else { unsafe { libc::fsync(fd) } };
        outcome(result)
    }

    /// 0, or a negative error number.
    pub(crate) fn discard(&self, offset: u64, bytes: u64) -> i32 {
        let fd = self.raw_fd();
        match self.kind {
            FileKind::Block => {
                let range = [offset, bytes];
                // SAFETY: BLKDISCARD reads two words, which live until the call returns.
                outcome(unsafe { libc::ioctl(fd, BLKDISCARD, range.as_ptr()) })
            }
            FileKind::Regular => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                // SAFETY: numbers only.
                outcome(unsafe { libc::fallocate(fd, mode, offset as libc::off_t, bytes as libc::off_t) })
            }
            _ => -libc::EOPNOTSUPP,
        }
    }
}

fn outcome(result: libc::c_int) -> i32 {
    if result == 0 { 0 } else { -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
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
fn direct_unit(fd: RawFd) -> u32 {
    // SAFETY: all zeroes are a value of this structure of numbers.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty string, and the structure is ours.
    let result =
        unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut found) };
    let told = result == 0 && found.stx_mask & libc::STATX_DIOALIGN != 0;
    if told && found.stx_dio_offset_align > 0 { found.stx_dio_offset_align } else { DIRECT_BYTES }
}

/// A number that a device tells.
fn word(fd: RawFd, request: libc::Ioctl) -> io::Result<u64> {
    let mut value = 0u64;
    // SAFETY: both requests write at most eight bytes, and the word is ours.
    let result = unsafe { libc::ioctl(fd, request, &raw mut value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// `struct nvme_passthru_cmd`.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    address: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10_to_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}
const _: () = assert!(size_of::<AdminCommand>() == 72);

/// The namespace behind a generic device: identifier, bytes of a block, bytes.
fn identify(fd: RawFd) -> io::Result<(u32, u32, u64)> {
    // SAFETY: the request takes no argument.
    let namespace = unsafe { libc::ioctl(fd, NVME_ID) };
    let namespace = u32::try_from(namespace).map_err(|_| io::Error::last_os_error())?;
    let mut data = Box::new([0u8; IDENTIFY_BYTES]);
    let mut command = AdminCommand {
        opcode: 0x06,
        namespace,
        address: data.as_mut_ptr() as u64,
        data_len: IDENTIFY_BYTES as u32,
        ..AdminCommand::default()
    };
    // SAFETY: the kernel writes IDENTIFY_BYTES into `data` and a result into the command, both ours.
    let result = unsafe { libc::ioctl(fd, NVME_ADMIN, &raw mut command) };
    match result {
        0 => {}
        1.. => return Err(io::Error::other(format!("NVMe status {result:#x}"))),
        _ => return Err(io::Error::last_os_error()),
    }
    let identity = IdentifyNamespace::decode(&data).map_err(|error| io::Error::other(error.to_string()))?;
    let format = identity.formats.get(usize::from(identity.format));
    let log2 = format.map(|format| format.data_log2).filter(|log2| (9..=20).contains(log2));
    let block_bytes = 1u32 << log2.ok_or_else(|| io::Error::other("an impossible LBA format"))?;
    Ok((namespace, block_bytes, identity.nsze.saturating_mul(u64::from(block_bytes))))
}
