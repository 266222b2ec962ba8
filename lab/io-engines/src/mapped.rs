//! `mmap`: copies to and from mappings of the files.

use std::io;
use std::os::fd::AsFd;

use block_io::{Op, Request};
use dma::{AccessOrder, Data, SharedRegion};
use rustix::fs::{OFlags, fcntl_getfl, fstat};

use crate::{EngineFile, EngineOpenError, FileKind};

/// Files that are mapped whole. A page that cannot be read, or is not there any more, fails the I/O and all that follow
/// in the file; it does not end the process.
pub(crate) struct MappedFiles(Vec<SharedRegion>);

impl MappedFiles {
    /// Maps the files.
    ///
    /// # Errors
    /// Of a file that cannot be mapped, or whose options a mapping bypasses.
    pub(crate) fn map(
        files: &[EngineFile],
        order: Option<AccessOrder>,
    ) -> Result<MappedFiles, EngineOpenError> {
        let mapped = files.iter().map(map).collect::<Result<Vec<_>, _>>()?;
        if let Some(order) = order {
            // As for other buffered I/O, the kernel may do without.
            mapped.iter().for_each(|region| drop(region.expect_order(order)));
        }
        Ok(MappedFiles(mapped))
    }

    /// Performs a request on the range of the file that its `flow` indexes. Returns the number of bytes or a negative errno.
    pub(crate) fn perform(
        &self,
        file: &EngineFile,
        request: &mut Request<Data>,
        (offset, bytes): (u64, u64),
    ) -> i64 {
        let region = &self.0[request.flow as usize];
        let op = request.op;
        let result = match (op, request.data_mut()) {
            (Op::Write, _) if !region.mapping().is_writable() => -i64::from(libc::EBADF),
            (Op::Read | Op::Write, Some(data)) => copy(region, op, offset, bytes, data),
            (Op::Flush, _) => region
                .sync()
                .map_or_else(|error| -i64::from(error.raw_os_error().unwrap_or(libc::EIO)), |()| 0),
            (Op::Unmap, _) => i64::from(file.discard(offset, bytes)),
            _ => -i64::from(libc::EOPNOTSUPP),
        };
        if region.is_poisoned() { -i64::from(libc::EIO) } else { result }
    }
}

/// Copies between the mapping and the buffers of a request; nothing if its range is not inside the file.
fn copy(region: &SharedRegion, op: Op, offset: u64, bytes: u64, data: &mut Data) -> i64 {
    assert!(bytes as usize <= data.len(), "{bytes} bytes in buffers of {}", data.len());
    if offset.checked_add(bytes).is_none_or(|end| end > region.len()) {
        return 0;
    }
    let mut at = offset;
    for part in data.parts_mut(0, bytes as usize) {
        match op {
            Op::Read => region.read(at, part),
            _ => region.write(at, part),
        }
        at += part.len() as u64;
    }
    bytes as i64
}

fn map(file: &EngineFile) -> Result<SharedRegion, EngineOpenError> {
    let unsuitable = |reason| EngineOpenError::File { engine: "mmap", path: file.path().to_string(), reason };
    let failed = |call, error| EngineOpenError::Kernel { engine: "mmap", call, error, hint: "" };
    let flags = fcntl_getfl(file).map_err(|error| failed("fcntl", error.into()))?;
    if flags.contains(OFlags::DIRECT) {
        return Err(unsuitable("is opened for direct I/O, which a mapping is not: --direct=0"));
    }
    if flags.contains(OFlags::DSYNC) {
        return Err(unsuitable("is opened for synchronous writes, which a mapping bypasses: --fsync=1"));
    }
    let is_short = || fstat(file).is_ok_and(|metadata| (metadata.st_size as u64) < file.bytes());
    match file.kind() {
        FileKind::Regular if is_short() => return Err(unsuitable("would grow, which a mapping does not")),
        FileKind::Regular | FileKind::Block => {}
        _ => return Err(unsuitable("is neither a regular file nor a block device")),
    }
    let is_writable = flags.contains(OFlags::RDWR);
    SharedRegion::map_untrusted(file.as_fd(), 0, file.bytes(), is_writable)
        .map_err(|error| failed("mmap", io::Error::other(error)))
}
