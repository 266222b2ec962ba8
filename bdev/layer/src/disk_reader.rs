//! Reads of devices that modules examine.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use block_io::{Op, Payload, Status, Tag};
use dma::BUFFER_BYTES_MAX;
use reactor::{Core, ReactorHandle};

use crate::{Access, AsyncChannel, BdevError, Registry, Request};

/// Reads in progress: each has a buffer of the core.
const READS_MAX: usize = 64;
/// Reads that wait for one of them: as many as there are devices and modules that examine them.
const WAITING_MAX: usize = 65_536;
/// How long a read may take. A disk that wakes from sleep takes about ten seconds.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Reads the metadata of devices for [`Module::examine_disk`](control::Module::examine_disk), on one core: 64
/// at a time, each for 30 seconds at most. Cheap to clone; clones share the limit.
///
/// A read that takes longer fails, and the next gets its turn; the device is closed when it has completed the
/// read after all.
#[derive(Clone)]
pub struct DiskReader(Arc<ReaderInner>);

struct ReaderInner {
    registry: Registry,
    reactor: ReactorHandle,
    timeout: Duration,
    queue: Mutex<ReadQueue>,
}

#[derive(Default)]
struct ReadQueue {
    active: usize,
    waiting: VecDeque<DiskRead>,
}

/// Why a device was not read.
#[derive(Debug, thiserror::Error)]
pub enum DiskReadError {
    /// It cannot be opened, or was removed.
    #[error(transparent)]
    Bdev(#[from] BdevError),
    /// The read failed.
    #[error("the read of {bdev} failed: {status}")]
    Failed {
        /// The device.
        bdev: String,
        /// Its error.
        status: Status,
    },
    /// It has not completed in time.
    #[error("{bdev} did not complete a read in {} s", timeout.as_secs_f64())]
    TimedOut {
        /// The device.
        bdev: String,
        /// The time that it had.
        timeout: Duration,
    },
    /// The range is empty, beyond 1 MiB or outside of the device.
    #[error("{blocks} blocks at {lba} of {bdev} cannot be read at once")]
    Range {
        /// The device.
        bdev: String,
        /// First block.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
    },
    /// Too many reads wait, the core has no buffer, or it has stopped.
    #[error("the core that examines has no resources left")]
    Unavailable,
}

/// Blocks, or `None` for zeroes.
type BlocksOrZeroes = Result<Option<Vec<u8>>, DiskReadError>;

type Then = Box<dyn FnOnce(BlocksOrZeroes) + Send>;

/// A read that was asked for. It is answered in any case: by its drop at the latest.
struct DiskRead {
    bdev: String,
    lba: u64,
    blocks: u32,
    skips_zeroes: bool,
    then: Option<Then>,
}

impl Drop for DiskRead {
    fn drop(&mut self) {
        if let Some(then) = self.then.take() {
            then(Err(DiskReadError::Unavailable));
        }
    }
}

impl DiskReader {
    /// Reads devices of `registry` on the core of `reactor`.
    pub fn new(registry: Registry, reactor: ReactorHandle) -> DiskReader {
        DiskReader::with_timeout(registry, reactor, TIMEOUT)
    }

    /// As [`new`](Self::new), with another limit for each read.
    pub fn with_timeout(registry: Registry, reactor: ReactorHandle, timeout: Duration) -> DiskReader {
        DiskReader(Arc::new(ReaderInner { registry, reactor, timeout, queue: Mutex::default() }))
    }

    /// Reads blocks, as they are stored, and calls `then` with them, on the core: it must not block. The
    /// device is opened for reading, whatever claims there are.
    pub fn read(
        &self,
        bdev: &str,
        lba: u64,
        blocks: u32,
        then: impl FnOnce(Result<Vec<u8>, DiskReadError>) + Send + 'static,
    ) {
        let then = move |read: BlocksOrZeroes| then(read.map(Option::unwrap_or_default));
        let (bdev, then) = (bdev.to_string(), Some(Box::new(then) as Then));
        self.begin(DiskRead { bdev, lba, blocks, skips_zeroes: false, then });
    }

    /// As [`read`](Self::read), but `then` is called with `None` for zeroes: where the device says that the
    /// blocks are a hole, which is not read, and where it was read and has nothing else.
    pub fn read_unless_zero(
        &self,
        bdev: &str,
        lba: u64,
        blocks: u32,
        then: impl FnOnce(Result<Option<Vec<u8>>, DiskReadError>) + Send + 'static,
    ) {
        let (bdev, then) = (bdev.to_string(), Some(Box::new(then) as Then));
        self.begin(DiskRead { bdev, lba, blocks, skips_zeroes: true, then });
    }

    fn begin(&self, read: DiskRead) {
        let mut queue = self.lock();
        if queue.active < READS_MAX {
            queue.active += 1;
            drop(queue);
            self.start(read);
        } else if queue.waiting.len() < WAITING_MAX {
            queue.waiting.push_back(read);
        } else {
            // Its drop answers it, which may ask for another.
            drop(queue);
            drop(read);
        }
    }

    fn start(&self, read: DiskRead) {
        let turn = ReadTurn { reader: self.clone(), has_run: false };
        let work = move |core: &Core| {
            let core_of_task = core.clone();
            core.spawn(async move { turn.run(core_of_task, read).await });
        };
        // What is not run is dropped, and so answered.
        _ = self.0.reactor.post(work);
    }

    fn lock(&self) -> MutexGuard<'_, ReadQueue> {
        // Each change is whole before anything can panic.
        sync::lock(&self.0.queue)
    }
}

/// One of the reads in progress. Its drop starts the next; if the core takes no work, it answers all.
struct ReadTurn {
    reader: DiskReader,
    has_run: bool,
}

impl Drop for ReadTurn {
    fn drop(&mut self) {
        let mut queue = self.reader.lock();
        if self.has_run
            && let Some(next) = queue.waiting.pop_front()
        {
            drop(queue);
            return self.reader.start(next);
        }
        queue.active -= 1;
        // One after the other would recurse as deep.
        let refused = if self.has_run { VecDeque::new() } else { std::mem::take(&mut queue.waiting) };
        drop(queue);
        drop(refused);
    }
}

impl ReadTurn {
    async fn run(mut self, core: Core, mut read: DiskRead) {
        self.has_run = true;
        let result = self.read_in_time(&core, &read).await;
        if let Some(then) = read.then.take() {
            then(result);
        }
    }

    async fn read_in_time(&self, core: &Core, read: &DiskRead) -> BlocksOrZeroes {
        let timeout = self.reader.0.timeout;
        let mut blocks = pin!(read_blocks(&self.reader.0.registry, core, read));
        let mut timer = pin!(core.sleep_ns(timeout.as_nanos() as u64));
        poll_fn(|context| {
            if let Poll::Ready(result) = blocks.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            let timed_out = || Err(DiskReadError::TimedOut { bdev: read.bdev.clone(), timeout });
            timer.as_mut().poll(context).map(|()| timed_out())
        })
        .await
    }
}

thread_local! {
    /// The devices that reads of this core have open, by name. Many reads of a device are in flight at a
    /// time, and a channel of each would take more from the kernel than it has: contexts of AIO are few, and
    /// end late.
    static OPEN: RefCell<BTreeMap<String, Weak<AsyncChannel>>> = RefCell::default();
}

/// The channel of a device, which all reads share that are in flight.
fn channel_of(registry: &Registry, core: &Core, bdev: &str) -> Result<Rc<AsyncChannel>, DiskReadError> {
    let open = OPEN.with_borrow(|open| open.get(bdev).and_then(Weak::upgrade));
    // Another device may have the name now, and another registry too.
    let is_same = |channel: &Rc<AsyncChannel>| {
        registry.find(bdev).is_some_and(|device| Arc::ptr_eq(&device, &channel.device()))
    };
    if let Some(channel) = open.filter(is_same) {
        return Ok(channel);
    }
    let channel = registry.open(bdev, Access::ReadOnly)?.channel(core)?;
    let channel = Rc::new(AsyncChannel::new(core, channel));
    OPEN.with_borrow_mut(|open| {
        open.retain(|_, other| other.strong_count() > 0);
        open.insert(bdev.to_string(), Rc::downgrade(&channel));
    });
    Ok(channel)
}

async fn read_blocks(registry: &Registry, core: &Core, read: &DiskRead) -> BlocksOrZeroes {
    let DiskRead { bdev, lba, blocks, .. } = read;
    let channel = channel_of(registry, core, bdev)?;
    let geometry = channel.device().geometry();
    let bytes = u64::from(*blocks) * u64::from(geometry.block_size);
    let is_inside = lba.checked_add((*blocks).into()).is_some_and(|end| end <= geometry.blocks);
    if *blocks == 0 || bytes > BUFFER_BYTES_MAX as u64 || !is_inside {
        return Err(DiskReadError::Range { bdev: bdev.clone(), lba: *lba, blocks: *blocks });
    }
    if read.skips_zeroes && is_hole(&channel, *lba, *blocks).await {
        return Ok(None);
    }
    let mut buffer = core.pool().take(bytes as usize).ok_or(DiskReadError::Unavailable)?;
    if channel.device().bdev().reads_undefined() {
        buffer.clear();
    }
    match channel.read(*lba, buffer).await {
        Ok(buffer) if read.skips_zeroes && block_io::is_zero(buffer.as_slice()) => Ok(None),
        Ok(buffer) => Ok(Some(buffer.as_slice().to_vec())),
        Err((status, _)) => Err(DiskReadError::Failed { bdev: bdev.clone(), status }),
    }
}

/// Whether the device says that a range is a hole. One that fails to say so is read.
async fn is_hole(channel: &AsyncChannel, lba: u64, blocks: u32) -> bool {
    let found = channel.submit(Request::new(Tag(0), Op::SeekData, lba, blocks)).await;
    found.status().is_success() && matches!(found.into_request().payload, Payload::Found(None))
}
