//! `filecreate`, `filestat`, `filedelete`, `dircreate`, `dirstat` and `dirdelete`: one operation on a name
//! per I/O.

use std::io;

use block_io::{Channel, Completion, Op, Request, Status};
use dma::Data;

use crate::IoEngine;
use crate::engine::status_of;

/// What an I/O does to its file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataOperation {
    /// Creates a file, or opens it if it exists, and closes it.
    CreateFile,
    /// `stat` of a file.
    StatFile,
    /// Deletes a file.
    DeleteFile,
    /// Creates a directory.
    CreateDirectory,
    /// `stat` of a directory.
    StatDirectory,
    /// Deletes an empty directory.
    DeleteDirectory,
}

impl MetadataOperation {
    /// Whether it works on directories, not on files.
    pub const fn is_of_directories(self) -> bool {
        use MetadataOperation::*;
        matches!(self, CreateDirectory | StatDirectory | DeleteDirectory)
    }

    /// Whether it creates what it works on; the other operations need what exists.
    pub const fn creates(self) -> bool {
        matches!(self, MetadataOperation::CreateFile | MetadataOperation::CreateDirectory)
    }

    /// Whether it changes the file system.
    pub const fn writes(self) -> bool {
        !matches!(self, MetadataOperation::StatFile | MetadataOperation::StatDirectory)
    }

    fn perform(self, path: &str) -> io::Result<()> {
        match self {
            MetadataOperation::CreateFile => {
                std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path).map(drop)
            }
            MetadataOperation::StatFile | MetadataOperation::StatDirectory => {
                std::fs::metadata(path).map(drop)
            }
            MetadataOperation::DeleteFile => std::fs::remove_file(path),
            MetadataOperation::CreateDirectory => std::fs::create_dir(path),
            MetadataOperation::DeleteDirectory => std::fs::remove_dir(path),
        }
    }
}

/// Performs one operation at a time on the path that the request's `flow` indexes. Range and data of a
/// request have no meaning; a flush is rejected.
pub struct MetadataOperationEngine {
    operation: MetadataOperation,
    paths: Vec<String>,
    /// The completion that is not yet polled; at most one.
    done: Vec<Completion<Data>>,
}

impl MetadataOperationEngine {
    /// An engine over these paths.
    pub fn new(operation: MetadataOperation, paths: Vec<String>) -> MetadataOperationEngine {
        MetadataOperationEngine { operation, paths, done: Vec::with_capacity(1) }
    }
}

impl Channel for MetadataOperationEngine {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        if !self.done.is_empty() || batch.is_empty() {
            return;
        }
        let request = batch.remove(0);
        let status = match self.paths.get(request.flow as usize) {
            Some(path) if request.op != Op::Flush => match self.operation.perform(path) {
                Ok(()) => Status::SUCCESS,
                Err(error) => {
                    let errno = i64::from(error.raw_os_error().unwrap_or(libc::EIO));
                    status_of(request.op, -errno, 0)
                }
            },
            _ => Status::INVALID_OPCODE,
        };
        self.done.push(request.complete(status));
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let count = self.done.len();
        sink.append(&mut self.done);
        count
    }
}

impl IoEngine for MetadataOperationEngine {
    fn wait(&mut self, timeout_ns: u64) {
        if self.done.is_empty() {
            std::thread::sleep(std::time::Duration::from_nanos(timeout_ns));
        }
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}
