//! The thread of a device, for what may wait for the file's metadata and has no form for the core's ring or
//! context: seeks, and with AIO the allocation of ranges.

use std::fs::File;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use os::FileOperation;
use reactor::{MailboxSender, blocking};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::seek::{self, SeekJob};

/// Deallocates or zeroes a range.
pub(super) struct AllocationJob {
    pub(super) file: Arc<File>,
    /// [`FileOperation::Punch`] or [`FileOperation::Zero`].
    pub(super) operation: FileOperation,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) tag: u64,
    pub(super) reply: MailboxSender<AllocationResult>,
}

/// The job's tag, and 0 or a negative error number.
pub(super) type AllocationResult = (u64, i32);

/// What the thread is to do.
pub(super) enum FileJob {
    Seek(SeekJob),
    Allocate(AllocationJob),
}

/// The file of a device, and its thread, which starts with the first job, and ends with the device and its
/// channels.
pub(super) struct FileWorker {
    /// `None` once the device is closed. Threads that read at the same time do not wait for each other.
    file: RwLock<Option<Arc<File>>>,
    /// Every message is a request that a channel admitted, which bounds their number.
    jobs: Mutex<Option<Sender<FileJob>>>,
}

impl FileWorker {
    pub(super) fn new(file: File) -> FileWorker {
        FileWorker { file: RwLock::new(Some(Arc::new(file))), jobs: Mutex::new(None) }
    }

    /// The file; `None` once the device is closed.
    pub(super) fn file(&self) -> Option<Arc<File>> {
        self.file.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn close(&self) {
        let file = self.file.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(file);
    }

    /// Passes a job to the thread. Returns whether there is one.
    pub(super) fn send(&self, job: FileJob) -> bool {
        let mut jobs = sync::lock(&self.jobs);
        if jobs.is_none() {
            let (sender, receiver) = channel();
            if blocking::spawn_worker("file-worker", receiver, execute).is_err() {
                return false;
            }
            *jobs = Some(sender);
        }
        jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }
}

fn execute(job: FileJob) {
    match job {
        FileJob::Seek(job) => seek::execute(job),
        FileJob::Allocate(job) => {
            let how = match job.operation {
                FileOperation::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                _ => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            };
            let result = fallocate(&job.file, how, job.offset, job.bytes);
            let result = result.map_or_else(|error: Errno| -error.raw_os_error(), |()| 0);
            // A channel that is gone needs no answer, and the mailbox of another has space for each of its
            // requests.
            let _ = job.reply.send((job.tag, result));
        }
    }
}
