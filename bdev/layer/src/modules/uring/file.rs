//! Opens the file: its type, size and geometry, the lock against other users, and direct I/O.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use file_lock::LockMode;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use wire_nvme::identify::IdentifyNamespace;

use super::{UringConfig, claim, medium};
use crate::{BdevError, BdevGeometry, Durability};

pub(super) struct OpenedFile {
    pub(super) file: File,
    pub(super) geometry: BdevGeometry,
    pub(super) unused_bytes: u64,
    pub(super) backing_id: (u64, u64),
    /// Whether direct I/O is enabled, or the reason why not.
    pub(super) direct: Result<(), String>,
    /// A regular file.
    pub(super) is_regular: bool,
    /// Of an NVMe generic device.
    pub(super) generic: Option<GenericDevice>,
    /// The claim on the block device.
    pub(super) claim: Option<File>,
    /// The file behind a loop device, whose lock ends with it.
    pub(super) backing: Option<File>,
    pub(super) durability: Durability,
}

/// An NVMe generic device (`/dev/ngXnY`).
#[derive(Clone, Copy)]
pub(super) struct GenericDevice {
    pub(super) namespace_id: u32,
    /// Limits of one command.
    pub(super) transfer_bytes_max: u32,
    pub(super) segments_max: u32,
}

/// Opens and examines the file. `holder` returns the device that already uses a backing file.
pub(super) fn open(
    config: &UringConfig,
    holder: impl Fn((u64, u64)) -> Option<String>,
) -> Result<OpenedFile, BdevError> {
    let path = config.filename.as_path();
    create_if_requested(config)?;
    let failed = |doing: &'static str| {
        move |source: io::Error| BdevError::File { path: path.to_path_buf(), doing, source }
    };
    let metadata = std::fs::metadata(path).map_err(failed("cannot be opened"))?;
    let kind = metadata.file_type();
    if kind.is_char_device() && config.aio.is_none() {
        return open_generic(config, metadata.rdev(), holder);
    }
    if !kind.is_file() && !kind.is_block_device() {
        let what = if kind.is_dir() {
            "a directory"
        } else if config.aio.is_some() {
            "neither a file nor a block device"
        } else {
            "neither a file, a block device nor an NVMe generic device"
        };
        return Err(BdevError::invalid("filename", format!("{} is {what}", path.display())));
    }
    if config.aio.is_some_and(|aio| aio.nowait) && !kind.is_block_device() {
        let unsupported = io::Error::from(rustix::io::Errno::OPNOTSUPP);
        return Err(failed("is no block device, which nowait needs")(unsupported));
    }
    // A block device has several nodes, hence its device number; no file has the inode number `u64::MAX`.
    let medium = if kind.is_file() { (metadata.dev(), metadata.ino()) } else { (metadata.rdev(), u64::MAX) };
    if let Some(by) = holder(medium) {
        return Err(BdevError::Claimed { name: path.display().to_string(), by: format!("the bdev {by}") });
    }
    // Linux before 6.13 writes a block device atomically only if it was opened for direct I/O.
    let early = if config.direct && kind.is_block_device() { OFlags::DIRECT } else { OFlags::empty() };
    let file = open_file(path, config.readonly, early).map_err(failed("cannot be opened"))?;
    let backing = lock(&file, path, config.readonly)?;
    let claim = kind.is_block_device().then(|| claim::claim(path, config)).transpose()?.flatten();
    let block_size = match config.block_size {
        Some(size) => size,
        None if kind.is_block_device() => rustix::fs::ioctl_blksszget(&file).unwrap_or(512),
        None => 512,
    };
    if block_size < 512 || !block_size.is_multiple_of(512) {
        let reason = format!("{block_size} is not a multiple of 512");
        return Err(BdevError::invalid("block_size", reason));
    }
    let (blocks, unused_bytes) = blocks_of(&file, path, block_size)?;
    let physical = if kind.is_block_device() {
        rustix::fs::ioctl_blkpbszget(&file).unwrap_or(block_size)
    } else {
        u32::try_from(metadata.blksize()).unwrap_or(block_size)
    };
    let sensible = physical.is_power_of_two() && physical <= 64 << 10;
    let mut geometry = BdevGeometry {
        physical_block_size: if sensible { physical.max(block_size) } else { block_size },
        write_cache: true,
        ..BdevGeometry::new(block_size, blocks)
    };
    let direct = if config.direct {
        enable_direct_io(&file, path, config.readonly, geometry)
    } else {
        Err("not requested".to_string())
    };
    if direct.is_ok()
        && let Some((least, most)) = atomic_write_units(&file, block_size)
    {
        (geometry.atomic_write_unit_min_blocks, geometry.atomic_write_blocks) = (least, most);
    }
    Ok(OpenedFile {
        durability: medium::durability_of(&file),
        file,
        geometry,
        unused_bytes,
        backing_id: medium,
        direct,
        is_regular: kind.is_file(),
        generic: None,
        claim,
        backing,
    })
}

/// Asks `statx` for the units of atomic writes (uapi/linux/stat.h, Linux 6.11). rustix has no name for it.
const STATX_WRITE_ATOMIC: u32 = 0x1_0000;

/// The least and the most blocks of an atomic write to the file, whose direct I/O is enabled; `None` if the kernel promises
/// none: before Linux 6.11, before 6.13 of a file on a file system, and where the disk has none, or where a partition does
/// not begin at a multiple of its unit.
fn atomic_write_units(file: &File, block_size: u32) -> Option<(u32, u32)> {
    let wanted = StatxFlags::from_bits_retain(STATX_WRITE_ATOMIC);
    let found = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted).ok()?;
    // An older kernel leaves them 0.
    units_in_blocks(found.stx_atomic_write_unit_min, found.stx_atomic_write_unit_max, block_size)
}

fn units_in_blocks(bytes_min: u32, bytes_max: u32, block_size: u32) -> Option<(u32, u32)> {
    let least = bytes_min.max(block_size);
    // One buffer, which slices are copied to.
    let most = 1 << bytes_max.min(dma::BUFFER_BYTES_MAX as u32).checked_ilog2()?;
    let are_units = bytes_min.is_power_of_two() && block_size.is_power_of_two() && least <= most;
    are_units.then_some((least / block_size, most / block_size))
}

/// Opens an NVMe generic device, whose geometry Identify Namespace tells.
fn open_generic(
    config: &UringConfig,
    device_number: u64,
    holder: impl Fn((u64, u64)) -> Option<String>,
) -> Result<OpenedFile, BdevError> {
    let path = config.filename.as_path();
    let medium = (device_number, u64::MAX - 1);
    if let Some(by) = holder(medium) {
        return Err(BdevError::Claimed { name: path.display().to_string(), by: format!("the bdev {by}") });
    }
    let invalid = |reason: &str| BdevError::invalid("filename", format!("{} {reason}", path.display()));
    let file = open_file(path, config.readonly, OFlags::empty()).map_err(|source| BdevError::File {
        path: path.to_path_buf(),
        doing: "cannot be opened",
        source,
    })?;
    let namespace_id = os::device::nvme_namespace_id(&file)
        .map_err(|_| invalid("is neither a file, a block device nor an NVMe generic device (/dev/ngXnY)"))?;
    lock(&file, path, config.readonly)?;
    let claim = block_device(path).map(|node| claim::claim(&node, config)).transpose()?.flatten();
    let identify = identify(&file, path, namespace_id)?;
    let format = identify.formats.get(usize::from(identify.format));
    let format = format.ok_or_else(|| invalid("has no valid format"))?;
    if format.metadata_bytes > 0 || !(9..=16).contains(&format.data_log2) {
        return Err(invalid("has a format with metadata, or blocks under 512 bytes or over 64 KiB"));
    }
    let block_size = 1u32 << format.data_log2;
    if config.block_size.is_some_and(|bytes| bytes != block_size) {
        return Err(BdevError::invalid(
            "block_size",
            format!("the namespace has blocks of {block_size} bytes"),
        ));
    }
    let geometry = BdevGeometry {
        write_cache: true,
        buffer_alignment: 4,
        ..BdevGeometry::new(block_size, identify.nsze)
    };
    let segments_max = queue_limit(path, "max_segments").unwrap_or(1).clamp(1, os::IO_VECTORS_MAX as u32);
    let transfer = queue_limit(path, "max_hw_sectors_kb").map(|kib| kib.saturating_mul(1024));
    // A page a segment; and a command has at most 65,536 blocks.
    let most = (segments_max * 4096).max(block_size).min(block_size << 14);
    let transfer_bytes_max = transfer.unwrap_or(TRANSFER_BYTES_DEFAULT).min(most).max(block_size);
    let generic = GenericDevice { namespace_id, transfer_bytes_max, segments_max };
    let direct = Ok(());
    Ok(OpenedFile {
        durability: Durability::Disk,
        file,
        geometry,
        unused_bytes: 0,
        backing_id: medium,
        direct,
        is_regular: false,
        generic: Some(generic),
        claim,
        backing: None,
    })
}

/// Most bytes of a command where the kernel does not say: what every controller takes that the kernel drives.
const TRANSFER_BYTES_DEFAULT: u32 = 64 << 10;

/// A limit of the block device of a generic device's namespace, from sysfs.
fn queue_limit(path: &Path, name: &str) -> Option<u32> {
    let device = std::fs::canonicalize(path).ok()?;
    let suffix = device.file_name()?.to_str()?.strip_prefix("ng")?.to_string();
    std::fs::read_to_string(format!("/sys/block/nvme{suffix}/queue/{name}")).ok()?.trim().parse().ok()
}

/// The block device of a generic device's namespace; `None` if the kernel made none.
fn block_device(path: &Path) -> Option<PathBuf> {
    let device = std::fs::canonicalize(path).ok()?;
    let suffix = device.file_name()?.to_str()?.strip_prefix("ng")?.to_string();
    Some(PathBuf::from(format!("/dev/nvme{suffix}"))).filter(|node| node.exists())
}

/// Identify Namespace of a generic device.
pub(super) fn identify(file: &File, path: &Path, namespace_id: u32) -> Result<IdentifyNamespace, BdevError> {
    let page = os::device::nvme_identify_namespace(file, namespace_id).map_err(|source| BdevError::File {
        path: path.to_path_buf(),
        doing: "cannot be identified",
        source,
    })?;
    IdentifyNamespace::decode(&page).map_err(|error| {
        BdevError::invalid("filename", format!("{} has no valid namespace: {error}", path.display()))
    })
}

/// The number of whole blocks, and the bytes beyond them.
pub(super) fn blocks_of(file: &File, path: &Path, block_size: u32) -> Result<(u64, u64), BdevError> {
    // Seeking to the end returns the size of a block device too (as BLKGETSIZE64). All I/O has explicit offsets, so
    // that the file position does not matter.
    let bytes = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|errno| BdevError::File {
        path: path.to_path_buf(),
        doing: "has no size",
        source: errno.into(),
    })?;
    let blocks = bytes / u64::from(block_size);
    if blocks == 0 {
        let reason = format!("{} has {bytes} bytes, less than a block of {block_size}", path.display());
        return Err(BdevError::invalid("filename", reason));
    }
    Ok((blocks, bytes % u64::from(block_size)))
}

fn create_if_requested(config: &UringConfig) -> Result<(), BdevError> {
    let Some(bytes) = config.create_bytes else { return Ok(()) };
    let failed =
        |source| BdevError::File { path: config.filename.clone(), doing: "cannot be created", source };
    match File::options().read(true).write(true).create_new(true).open(&config.filename) {
        Ok(file) => file.set_len(bytes).and_then(|()| file.sync_all()).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

fn open_file(path: &Path, readonly: bool, extra_flags: OFlags) -> io::Result<File> {
    let access = if readonly { OFlags::RDONLY } else { OFlags::RDWR };
    let descriptor = rustix::fs::open(path, access | OFlags::CLOEXEC | extra_flags, Mode::empty())?;
    Ok(descriptor.into())
}

/// Takes the advisory lock of the file: shared if it is only read, so that readers share it and no writer
/// gets it. What is returned is the file behind a loop device, which is locked too until it is dropped.
pub(crate) fn lock(file: &File, path: &Path, readonly: bool) -> Result<Option<File>, BdevError> {
    let mode = if readonly { LockMode::Shared } else { LockMode::Exclusive };
    file_lock::lock_device(file, mode, LOCK_TIMEOUT).map_err(|holder| BdevError::Claimed {
        name: path.display().to_string(),
        by: format!("{holder} (flock)"),
    })
}

/// How long the lock is retried.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Enables direct I/O if a block can be read that way, or returns the reason why not.
///
/// Not every file system reports its alignment requirements, so that a read is tried.
fn enable_direct_io(file: &File, path: &Path, readonly: bool, geometry: BdevGeometry) -> Result<(), String> {
    let flags = rustix::fs::fcntl_getfl(file).map_err(|errno| format!("fcntl failed ({errno})"))?;
    let result = try_direct_io(path, readonly, geometry);
    let flags = if result.is_ok() { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT };
    let set = rustix::fs::fcntl_setfl(file, flags);
    result.and_then(|()| set.map_err(|errno| format!("the file system has no direct I/O ({errno})")))
}

/// Reads a block with direct I/O.
fn try_direct_io(path: &Path, readonly: bool, geometry: BdevGeometry) -> Result<(), String> {
    let block_size = geometry.block_size as usize;
    let probe = open_file(path, readonly, OFlags::DIRECT)
        .map_err(|error| format!("the file system has no direct I/O ({error})"))?;
    let mut memory = vec![0; block_size + 4096];
    let start = memory.as_ptr().align_offset(4096);
    // The offset of the second block is aligned to one block only.
    let offset = if geometry.blocks > 1 { block_size as u64 } else { 0 };
    match rustix::io::pread(&probe, &mut memory[start..start + block_size], offset) {
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::INVAL) => {
            Err(format!("direct I/O needs blocks larger than {block_size} bytes here"))
        }
        Err(errno) => Err(format!("a direct read failed ({errno})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_atomic_writes_are_the_kernels_in_blocks() {
        for (least, most, block_size, units) in [
            (1024, 65536, 512, (2, 128)),
            // No less than a block, no more than a buffer, and a power of two.
            (512, 65536, 4096, (1, 16)),
            (512, 4 << 20, 512, (1, 2048)),
            (512, 24576, 512, (1, 32)),
            (4096, 4096, 4096, (1, 1)),
        ] {
            assert_eq!(units_in_blocks(least, most, block_size), Some(units), "{least} {most} {block_size}");
        }
        for (least, most, block_size) in
            [(0, 0, 512), (0, 65536, 512), (512, 2048, 4096), (512, 0, 512), (512, 8192, 1536)]
        {
            assert_eq!(units_in_blocks(least, most, block_size), None, "{least} {most} {block_size}");
        }
    }
}
