//! Opening the file: what it is, how large, who else has it, and whether direct I/O is possible.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};

use super::UringConfig;
use crate::{BdevError, Geometry};

pub(super) struct Opened {
    pub(super) file: File,
    pub(super) geometry: Geometry,
    pub(super) unused_bytes: u64,
    pub(super) medium: (u64, u64),
    /// Or why not.
    pub(super) direct: Result<(), String>,
}

/// Opens and examines. `holder` says which device has a medium already.
pub(super) fn open(
    config: &UringConfig,
    holder: impl Fn((u64, u64)) -> Option<String>,
) -> Result<Opened, BdevError> {
    let path = config.filename.as_path();
    make_if_wanted(config)?;
    let failed = |doing: &'static str| {
        move |source: io::Error| BdevError::File { path: path.to_path_buf(), doing, source }
    };
    let metadata = std::fs::metadata(path).map_err(failed("cannot be opened"))?;
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let what = if kind.is_dir() { "a directory" } else { "neither a file nor a block device" };
        return Err(BdevError::invalid("filename", format!("{} is {what}", path.display())));
    }
    // A block device is the same medium under whatever node; no file system has that inode number.
    let medium = if kind.is_file() { (metadata.dev(), metadata.ino()) } else { (metadata.rdev(), u64::MAX) };
    if let Some(by) = holder(medium) {
        return Err(BdevError::Claimed { name: path.display().to_string(), by: format!("the bdev {by}") });
    }
    let file = open_file(path, config.readonly, OFlags::empty()).map_err(failed("cannot be opened"))?;
    lock(&file, path, config.readonly)?;
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
    let geometry = Geometry {
        physical_block_size: if sensible { physical.max(block_size) } else { block_size },
        write_cache: true,
        ..Geometry::new(block_size, blocks)
    };
    let direct = if config.direct {
        make_direct(&file, path, config.readonly, geometry)
    } else {
        Err("not asked for".to_string())
    };
    Ok(Opened { file, geometry, unused_bytes, medium, direct })
}

/// Whole blocks, and the bytes behind them.
pub(super) fn blocks_of(file: &File, path: &Path, block_size: u32) -> Result<(u64, u64), BdevError> {
    // The end of a block device is its size (what BLKGETSIZE64 says); I/O names its own offsets, so
    // that moving the file's does no harm.
    let bytes = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|errno| BdevError::File {
        path: path.to_path_buf(),
        doing: "does not tell its size",
        source: errno.into(),
    })?;
    let blocks = bytes / u64::from(block_size);
    if blocks == 0 {
        let reason = format!("{} has {bytes} bytes, less than a block of {block_size}", path.display());
        return Err(BdevError::invalid("filename", reason));
    }
    Ok((blocks, bytes % u64::from(block_size)))
}

fn make_if_wanted(config: &UringConfig) -> Result<(), BdevError> {
    let Some(bytes) = config.create_bytes else { return Ok(()) };
    let failed =
        |source| BdevError::File { path: config.filename.clone(), doing: "cannot be created", source };
    match File::options().read(true).write(true).create_new(true).open(&config.filename) {
        Ok(file) => file.set_len(bytes).and_then(|()| file.sync_all()).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

fn open_file(path: &Path, readonly: bool, more: OFlags) -> io::Result<File> {
    let access = if readonly { OFlags::RDONLY } else { OFlags::RDWR };
    let descriptor = rustix::fs::open(path, access | OFlags::CLOEXEC | more, Mode::empty())?;
    Ok(descriptor.into())
}

/// Keeps other processes out: an exclusive advisory lock, or a shared one for reading.
fn lock(file: &File, path: &Path, readonly: bool) -> Result<(), BdevError> {
    let how = if readonly {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match rustix::fs::flock(file, how) {
            // The kernel lets go of a killed process's io_uring, and of the files in it, some time
            // after the process is gone; there is no event for that with a bound.
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_RETRY);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(BdevError::Claimed {
                    name: path.display().to_string(),
                    by: "another process, or by a removed bdev that is still open (flock)".to_string(),
                });
            }
            // Some file systems have no locks; then there is nothing to keep others out with.
            _ => return Ok(()),
        }
    }
}

/// How long a lock is waited for, and how often it is tried.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Turns direct I/O on if a block can be read that way, or says why not.
///
/// What a file system wants aligned how is not told by all of them, so it is tried.
fn make_direct(file: &File, path: &Path, readonly: bool, geometry: Geometry) -> Result<(), String> {
    let block_size = geometry.block_size as usize;
    let probe = open_file(path, readonly, OFlags::DIRECT)
        .map_err(|error| format!("the file system has no direct I/O ({error})"))?;
    let mut memory = vec![0; block_size + 4096];
    let start = memory.as_ptr().align_offset(4096);
    // The second block lies at an offset that is aligned to no more than a block.
    let offset = if geometry.blocks > 1 { block_size as u64 } else { 0 };
    match rustix::io::pread(&probe, &mut memory[start..start + block_size], offset) {
        Ok(_) => {}
        Err(rustix::io::Errno::INVAL) => {
            return Err(format!("direct I/O needs blocks larger than {block_size} bytes here"));
        }
        Err(errno) => return Err(format!("a direct read failed ({errno})")),
    }
    let flags = rustix::fs::fcntl_getfl(file).map_err(|errno| format!("fcntl failed ({errno})"))?;
    rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT)
        .map_err(|errno| format!("the file system has no direct I/O ({errno})"))
}
