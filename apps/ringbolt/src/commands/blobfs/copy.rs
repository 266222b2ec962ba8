//! Copies into a store and out of it, each under a temporary name: a failure leaves what was there.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};

use blobfs::{BlobFsError, OpenHow, OpenNumber};
use file_lock::LockMode;
use rustix::fs::OFlags;

use super::image::{COPY_BYTES, Files, LOCK_TIMEOUT, at, bytes};
use crate::command_error::CommandError;

/// Names that are tried for a temporary file: one of 64 random bits is free.
const NAMES_TRIED_MAX: usize = 8;

/// A hidden name of 20 bytes, another with each call.
fn temporary_name() -> String {
    // Each state has random keys.
    format!(".cp-{:016x}", RandomState::new().build_hasher().finish())
}

/// Reads a file in order, until `write` returns false.
pub(super) fn each(
    files: &Files,
    path: &Path,
    mut write: impl FnMut(&[u8]) -> io::Result<bool>,
) -> Result<(), CommandError> {
    let failed = |error: BlobFsError| at(path, &error);
    let file = files.open(bytes(path), OpenHow::READ).map_err(failed)?;
    let mut offset = 0;
    loop {
        let data = files.read(file, offset, COPY_BYTES).map_err(failed)?;
        if data.is_empty() || !write(&data).map_err(|error| at(path, &error))? {
            return Ok(());
        }
        offset += data.len() as u64;
    }
}

/// Writes a file under another name in its directory, and then renames it.
pub(super) fn into(
    files: &Files,
    path: &Path,
    mut read: impl FnMut(u64) -> Result<Vec<u8>, CommandError>,
) -> Result<(), CommandError> {
    let failed = |error: BlobFsError| at(path, &error);
    // Before anything is copied.
    match files.status(bytes(path)) {
        Ok(status) if status.is_directory => return Err(failed(BlobFsError::IsDirectory)),
        Ok(_) | Err(BlobFsError::NotFound) => {}
        Err(error) => return Err(failed(error)),
    }
    let (temporary, file) = open_temporary(files, bytes(path)).map_err(failed)?;
    let mut offset = 0;
    let copied = loop {
        let data = match read(offset) {
            Ok(data) if data.is_empty() => break Ok(()),
            Ok(data) => data,
            Err(error) => break Err(error),
        };
        offset += data.len() as u64;
        if let Err(error) = files.append(file, data) {
            break Err(failed(error));
        }
    };
    let closed = files.close(file).map_err(failed);
    let renamed = copied.and(closed).and_then(|()| files.rename(&temporary, bytes(path)).map_err(failed));
    if renamed.is_err() {
        // What failed first is reported.
        let _ = files.unlink(&temporary);
    }
    renamed
}

/// Makes a file in the directory of `path` under a name that nothing there has.
fn open_temporary(files: &Files, path: &[u8]) -> Result<(Vec<u8>, OpenNumber), BlobFsError> {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    let directory = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let how = OpenHow { only_new: true, ..OpenHow::CREATE };
    let mut opened = Err(BlobFsError::Exists);
    for _ in 0..NAMES_TRIED_MAX {
        let name = [&path[..directory], temporary_name().as_bytes()].concat();
        opened = files.open(&name, how).map(|file| (name, file));
        if !matches!(opened, Err(BlobFsError::Exists)) {
            break;
        }
    }
    opened
}

/// Copies a file out of the store on `image`. A file that is there is replaced when all is copied; a pipe or
/// a device is written as it is.
pub(super) fn out(files: &Files, image: &Path, path: &Path, to: &Path) -> Result<(), CommandError> {
    let failed = |error: io::Error| at(to, &error);
    // Nothing of the destination is touched for a file that is not there.
    let source = files.open(bytes(path), OpenHow::READ).map_err(|error| at(path, &error))?;
    files.close(source).map_err(|error| at(path, &error))?;
    let found = std::fs::metadata(to).ok();
    let store = std::fs::metadata(image).map_err(|error| at(image, &error))?;
    let _locked = found.as_ref().map(|found| check_destination(to, found, &store)).transpose()?;
    let replaced = match &found {
        Some(found) if !found.is_file() => None,
        // A file behind `/dev/stdout` is open already, and stays the one that is written.
        _ if is_descriptor(to) => None,
        Some(_) => Some(std::fs::canonicalize(to).map_err(failed)?),
        // There is nothing to lose behind a link to nowhere.
        None if std::fs::symlink_metadata(to).is_ok() => None,
        None => Some(to.to_path_buf()),
    };
    let Some(target) = replaced else {
        let mut file = File::create(to).map_err(failed)?;
        return each(files, path, |data| file.write_all(data).map(|()| true));
    };
    let (temporary, mut file) = create_beside(&target, found.as_ref()).map_err(failed)?;
    let copied = each(files, path, |data| file.write_all(data).map(|()| true))
        // A power failure leaves the old one or the new one.
        .and_then(|()| file.sync_all().map_err(failed))
        .and_then(|()| std::fs::rename(&temporary, &target).map_err(failed));
    if copied.is_err() {
        // What failed first is reported.
        let _ = std::fs::remove_file(&temporary);
    }
    copied
}

/// Refuses a directory, and what the store itself is on. A block device is locked until what is returned is
/// dropped.
fn check_destination(to: &Path, found: &Metadata, store: &Metadata) -> Result<Vec<File>, CommandError> {
    if found.is_dir() {
        return Err(at(to, &"it is a directory"));
    }
    let are_devices = found.file_type().is_block_device() && store.file_type().is_block_device();
    let is_store = (found.dev(), found.ino()) == (store.dev(), store.ino());
    if is_store || (are_devices && found.rdev() == store.rdev()) {
        return Err(at(to, &"the store itself is there; nothing was copied"));
    }
    if !found.file_type().is_block_device() {
        return Ok(Vec::new());
    }
    // The store may be on the file behind it, or another program use it. The kernel refuses what is mounted.
    let device = File::options().read(true).custom_flags(OFlags::EXCL.bits().cast_signed()).open(to);
    let device = device.map_err(|error| at(to, &error))?;
    let locked = file_lock::lock_device(&device, LockMode::Exclusive, LOCK_TIMEOUT);
    let backing = locked.map_err(|holder| at(to, &format!("{holder} has it open; end that first")))?;
    Ok([device].into_iter().chain(backing).collect())
}

/// Whether a path leads to what a process has open, as `/dev/stdout` and `/proc/self/fd/1` do.
fn is_descriptor(path: &Path) -> bool {
    let mut path = path.to_path_buf();
    // As many links as the kernel follows.
    for _ in 0..40 {
        let directory = match path.parent() {
            Some(parent) if parent != Path::new("") => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        let Ok(directory) = std::fs::canonicalize(directory) else { return false };
        let Ok(next) = std::fs::read_link(&path) else { return false };
        if directory.starts_with("/proc") {
            return true;
        }
        path = directory.join(next);
    }
    false
}

/// Makes a file beside `target`, whose owner and permissions it gets.
fn create_beside(target: &Path, replaced: Option<&Metadata>) -> io::Result<(PathBuf, File)> {
    if replaced.is_some() {
        // One that may not be written is not replaced either.
        File::options().write(true).open(target)?;
    }
    let mut options = File::options();
    options.write(true).create_new(true).mode(if replaced.is_some() { 0o600 } else { 0o666 });
    let mut made = Err(io::ErrorKind::AlreadyExists.into());
    for _ in 0..NAMES_TRIED_MAX {
        let temporary = target.with_file_name(OsStr::from_bytes(temporary_name().as_bytes()));
        made = options.open(&temporary).map(|file| (temporary, file));
        if !made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
            break;
        }
    }
    let (temporary, file) = made?;
    if let Some(replaced) = replaced {
        // Only root can give a file away.
        let _ = fchown(&file, Some(replaced.uid()), Some(replaced.gid()));
        let _ = file.set_permissions(replaced.permissions());
    }
    Ok((temporary, file))
}
