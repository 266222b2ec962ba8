//! A client of vhost-user block devices that is not ours: libblkio, for tests and benchmarks of the target.
//!
//! A [`BlkioDevice`] is a connection with its virtqueues and one region of shared memory. A [`BlkioRequest`] is submitted
//! to a queue, with data in that memory; [`BlkioDevice::reap`] returns [`BlkioCompletion`]s. What is not tested or
//! measured is a call away: [`read`](BlkioDevice::read), [`write`](BlkioDevice::write), [`execute`](BlkioDevice::execute).
//!
//! ```no_run
//! use blkio_client::{BlkioDevice, BlkioOptions};
//! let mut device = BlkioDevice::open("/run/vhost/disk0".as_ref(), &BlkioOptions::default())?;
//! device.write(0, &[7; 4096])?;
//! assert_eq!(device.read(0, 4096)?, [7; 4096]);
//! # Ok::<(), blkio_client::BlkioError>(())
//! ```

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use dma::{RegionError, SharedRegion};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Time that a completion may take. It is waited for in a test; a device that does not answer has failed it.
const COMPLETION_MAX: Duration = Duration::from_secs(30);

/// How a device is opened.
#[derive(Clone, Debug)]
pub struct BlkioOptions {
    /// Number of virtqueues.
    pub queues: usize,
    /// Descriptors of each, a power of two.
    pub queue_size: u16,
    /// Expect a device that rejects writes; another one is opened too, but not written.
    pub read_only: bool,
    /// Bytes of the memory for data.
    pub memory_bytes: u64,
}

/// A request. `at` is the offset of its data in the [memory](BlkioDevice::memory); other numbers are bytes of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the same in each")]
pub enum BlkioRequest {
    Read { offset: u64, at: u64, bytes: usize },
    Write { offset: u64, at: u64, bytes: usize },
    Discard { offset: u64, bytes: u64 },
    WriteZeroes { offset: u64, bytes: u64, may_unmap: bool },
    Flush,
}

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkioCompletion {
    /// What it was submitted with.
    pub tag: usize,
    /// 0, or an error number.
    pub errno: i32,
}

/// An operation that has failed.
#[derive(Debug, thiserror::Error)]
pub enum BlkioError {
    /// A request ended with this error number.
    #[error("the request failed: {}", std::io::Error::from_raw_os_error(*.0))]
    Request(i32),
    /// libblkio failed: the connection, or a parameter.
    #[error("libblkio: {}", .0.message())]
    Library(blkio::Error),
    /// There is no memory.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// There is no file for the memory.
    #[error("a file in memory cannot be created: {0}")]
    File(#[from] rustix::io::Errno),
}

/// A vhost-user block device.
pub struct BlkioDevice {
    queues: Vec<Blkioq>,
    device: Blkio,
    memory: SharedRegion,
    completions: Vec<MaybeUninit<Completion>>,
    _file: OwnedFd,
}

impl Default for BlkioOptions {
    fn default() -> BlkioOptions {
        BlkioOptions { queues: 1, queue_size: 256, read_only: false, memory_bytes: 4 << 20 }
    }
}

impl From<blkio::Error> for BlkioError {
    fn from(error: blkio::Error) -> BlkioError {
        BlkioError::Library(error)
    }
}

impl BlkioDevice {
    /// Connects to a socket, starts the virtqueues and shares the memory.
    ///
    /// # Errors
    /// The target does not listen or rejects a message, or there is no memory.
    pub fn open(socket: &Path, options: &BlkioOptions) -> Result<BlkioDevice, BlkioError> {
        let mut device = Blkio::new("virtio-blk-vhost-user")?;
        device.set_str("path", &socket.to_string_lossy())?;
        device.set_bool("read-only", options.read_only)?;
        device.connect()?;
        device.set_i32("num-queues", options.queues as i32)?;
        device.set_i32("queue-size", options.queue_size.into())?;
        let queues = device.start()?.queues;
        let file = memfd_create("blkio", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, options.memory_bytes)?;
        let memory = SharedRegion::map(file.as_fd(), 0, options.memory_bytes, true)?;
        device.map_mem_region(&MemoryRegion {
            addr: memory.as_ptr() as usize,
            iova: 0,
            len: options.memory_bytes as usize,
            fd: file.as_raw_fd(),
            fd_offset: 0,
            flags: 0,
        })?;
        let completions = (0..options.queue_size).map(|_| MaybeUninit::uninit()).collect();
        Ok(BlkioDevice { queues, device, memory, completions, _file: file })
    }

    /// A property of the device, by libblkio's name: a number, or 0 or 1 for a truth value.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn property(&self, name: &str) -> Result<u64, BlkioError> {
        let number =
            self.device.get_u64(name).or_else(|_| self.device.get_i32(name).map(|value| value as u64));
        Ok(number.or_else(|_| self.device.get_bool(name).map(u64::from))?)
    }

    /// The memory for data.
    pub fn memory(&self) -> &SharedRegion {
        &self.memory
    }

    /// Has completions of a queue notified by an eventfd, or not: then [`reap`](Self::reap) looks.
    pub fn set_notified(&mut self, queue: usize, is_notified: bool) {
        self.queues[queue].set_completion_fd_enabled(is_notified);
    }

    /// Submits a request with the next [`reap`](Self::reap) of the queue, which returns the tag.
    ///
    /// # Panics
    /// If its data is not inside the memory.
    pub fn submit(&mut self, queue: usize, request: BlkioRequest, tag: usize) {
        let place = |at: u64, bytes: usize| {
            let end = at.checked_add(bytes as u64);
            assert!(end.is_some_and(|end| end <= self.memory.len()), "{bytes} bytes at {at}: no such memory");
            self.memory.as_ptr().wrapping_add(at as usize)
        };
        let (queue, none) = (&mut self.queues[queue], ReqFlags::empty());
        match request {
            BlkioRequest::Read { offset, at, bytes } => {
                queue.read(offset, place(at, bytes), bytes, tag, none)
            }
            BlkioRequest::Write { offset, at, bytes } => {
                queue.write(offset, place(at, bytes), bytes, tag, none)
            }
            BlkioRequest::Discard { offset, bytes } => queue.discard(offset, bytes, tag, none),
            BlkioRequest::WriteZeroes { offset, bytes, may_unmap } => {
                let flags = if may_unmap { none } else { ReqFlags::NO_UNMAP };
                queue.write_zeroes(offset, bytes, tag, flags);
            }
            BlkioRequest::Flush => queue.flush(tag, none),
        }
    }

    /// Submits what was added to a queue, waits until `least` requests have completed, and calls `each` for all that have.
    /// Returns their number.
    ///
    /// # Errors
    /// They have not after 30 seconds.
    #[inline]
    pub fn reap(
        &mut self,
        queue: usize,
        least: usize,
        mut each: impl FnMut(BlkioCompletion),
    ) -> Result<usize, BlkioError> {
        let mut time = COMPLETION_MAX;
        // A time-out costs system calls, and without waiting there is none.
        let time = (least > 0).then_some(&mut time);
        let count = self.queues[queue].do_io(&mut self.completions, least, time, None)?;
        for completion in &self.completions[..count] {
            // SAFETY: libblkio has written as many completions as it has returned.
            let completion = unsafe { completion.assume_init_ref() };
            each(BlkioCompletion { tag: completion.user_data, errno: -completion.ret });
        }
        Ok(count)
    }

    /// Executes a request on the first queue, where nothing else is in flight.
    ///
    /// # Errors
    /// It has failed, or does not complete.
    pub fn execute(&mut self, request: BlkioRequest) -> Result<(), BlkioError> {
        self.submit(0, request, 0);
        let mut errno = 0;
        self.reap(0, 1, |completion| errno = completion.errno)?;
        if errno == 0 { Ok(()) } else { Err(BlkioError::Request(errno)) }
    }

    /// Reads bytes, through the start of the memory.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn read(&mut self, offset: u64, bytes: usize) -> Result<Vec<u8>, BlkioError> {
        self.execute(BlkioRequest::Read { offset, at: 0, bytes })?;
        let mut data = vec![0; bytes];
        self.memory.read(0, &mut data);
        Ok(data)
    }

    /// Writes bytes, through the start of the memory.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), BlkioError> {
        self.memory.write(0, data);
        self.execute(BlkioRequest::Write { offset, at: 0, bytes: data.len() })
    }
}
