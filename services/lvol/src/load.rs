//! Reads of the stores' metadata: on a thread of their own, which decodes what the examining core has read.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};

use bdev::stacking::BaseBdev;
use bdev::{Access, BdevError, BlockDevice, ClaimType, DiskReadError, DiskReader, Registry};
use blobstore::{BlobStore, BlobStoreLoader, LoadError, LoadOptions};
use block_io::Op;
use control::{Examination, JobHandle, RpcError};

/// Stores that are loaded at a time. Each has up to 32 reads of 1 MiB in flight; others wait.
const LOADS_MAX: usize = 4;

/// Who claims the device of a store.
pub(crate) const CLAIM_HOLDER: &str = "logical volume store";

/// What was loaded: the device with its claim, and the store.
pub(crate) struct LoadedStore {
    pub(crate) base: Arc<BaseBdev>,
    /// Whether the claim allows writes.
    pub(crate) is_writable: bool,
    pub(crate) blobs: BlobStore,
}

/// What is done with a store when it is loaded, within the examination.
type Adopt = Box<dyn Fn(LoadedStore, Examination) + Send>;

/// What is done with the device of a store that is not loaded, when its claim has ended.
type Refused = Box<dyn Fn(&Arc<BlockDevice>) + Send>;

/// Loads stores, some at a time.
pub(crate) struct StoreLoads {
    sender: Arc<Sender<LoadMessage>>,
    /// Until the start.
    receiver: Mutex<Option<Receiver<LoadMessage>>>,
}

enum LoadMessage {
    Begin(Examination),
    Cancel(u64),
    /// `None` for zeroes.
    Read {
        load: u64,
        read: u64,
        length: usize,
        result: Result<Option<Vec<u8>>, DiskReadError>,
    },
}

impl StoreLoads {
    pub(crate) fn new() -> StoreLoads {
        let (sender, receiver) = channel();
        StoreLoads { sender: Arc::new(sender), receiver: Mutex::new(Some(receiver)) }
    }

    /// Starts the thread; it ends when this is dropped. No effect if it has started.
    pub(crate) fn start(
        &self,
        registry: Registry,
        reader: DiskReader,
        adopt: Adopt,
        refused: Refused,
    ) -> io::Result<()> {
        let Some(receiver) = sync::lock(&self.receiver).take() else { return Ok(()) };
        let mut worker = LoadWorker {
            registry,
            reader,
            adopt,
            refused,
            sender: Arc::downgrade(&self.sender),
            loads: BTreeMap::new(),
            waiting: VecDeque::new(),
            last_load: 0,
        };
        reactor::blocking::spawn_worker("lvol", receiver, move |message| worker.handle(message))
    }

    /// A handle for a core, which has found stores.
    pub(crate) fn queue(&self) -> LoadQueue {
        LoadQueue(self.sender.clone())
    }
}

/// The stores that wait to be loaded: as many as devices are examined at most.
pub(crate) struct LoadQueue(Arc<Sender<LoadMessage>>);

impl LoadQueue {
    /// Loads the store on the device of an examination.
    pub(crate) fn push(&self, examination: Examination) {
        // Without the thread the examination ends here.
        _ = self.0.send(LoadMessage::Begin(examination));
    }
}

/// Claims the device of a store: for writing, unless it is read-only, or has readers that want it to stay as
/// it is.
fn claim(registry: &Registry, name: &str) -> Result<(BaseBdev, bool), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    let is_kept = device.claim().is_some_and(|(kind, _)| kind == ClaimType::ReadManyWriteNone);
    let is_writable = !device.bdev().read_only() && device.supports(Op::Write) && !is_kept;
    let access = match is_writable {
        true => Access::ReadManyWriteOne { by: CLAIM_HOLDER },
        false => Access::ReadManyWriteNone { by: CLAIM_HOLDER },
    };
    Ok((BaseBdev::open(registry, name, access)?, is_writable))
}

fn log_cancelled(bdev: &str) {
    log::info!(
        target: "lvol",
        "the logical volume store on {bdev} is not loaded: that was cancelled; bdev_examine loads it"
    );
}

struct LoadWorker {
    registry: Registry,
    reader: DiskReader,
    adopt: Adopt,
    refused: Refused,
    /// Weak, as the thread ends with the last sender.
    sender: Weak<Sender<LoadMessage>>,
    loads: BTreeMap<u64, Load>,
    waiting: VecDeque<(Examination, JobHandle)>,
    last_load: u64,
}

struct Load {
    examination: Examination,
    job: JobHandle,
    base: Arc<BaseBdev>,
    is_writable: bool,
    loader: BlobStoreLoader,
    /// Bytes of a block of the device.
    block_bytes: u64,
    /// Why a read has failed.
    error: Option<DiskReadError>,
}

impl LoadWorker {
    fn handle(&mut self, message: LoadMessage) {
        match message {
            LoadMessage::Begin(mut examination) => {
                let job = examination.begin_job("load of a logical volume store");
                self.waiting.push_back((examination, job));
            }
            LoadMessage::Cancel(id) => {
                // Its device may hang, which is not waited for: one that verifies data stays.
                let Some(Load { examination, .. }) = self.loads.remove(&id) else { return };
                log_cancelled(examination.bdev());
            }
            LoadMessage::Read { load: id, read, length, result } => {
                // A load that has failed does not wait for its other reads.
                let Some(load) = self.loads.get_mut(&id) else { return };
                match result {
                    Ok(None) => {
                        load.job.advance(length as u64);
                        load.loader.complete_zeroes(read);
                    }
                    Ok(Some(content)) if content.len() == length => {
                        load.job.advance(length as u64);
                        load.loader.complete(read, Some(&content));
                    }
                    // Another device has its name now.
                    Ok(_) => load.loader.complete(read, None),
                    Err(error) => {
                        load.error.get_or_insert(error);
                        load.loader.complete(read, None);
                    }
                }
                self.advance(id);
            }
        }
        while self.loads.len() < LOADS_MAX
            && let Some((examination, job)) = self.waiting.pop_front()
        {
            self.begin(examination, job);
        }
    }

    fn begin(&mut self, examination: Examination, job: JobHandle) {
        let name = examination.bdev();
        if job.is_cancelled() {
            return log_cancelled(name);
        }
        // Before it is read: nothing else changes it any more.
        let (base, is_writable) = match claim(&self.registry, name) {
            Ok((base, is_writable)) => (Arc::new(base), is_writable),
            Err(error) => {
                log::warn!(target: "lvol", "the logical volume store on {name} is not used: {error}");
                return examination.fail(RpcError::new(RpcError::EBUSY, error.to_string()));
            }
        };
        let geometry = base.device().geometry();
        let loader = BlobStoreLoader::new(geometry.bytes(), LoadOptions::default());
        let block_bytes = geometry.block_size.into();
        self.last_load += 1;
        let id = self.last_load;
        let sender = self.sender.clone();
        let load =
            Load { examination, job: job.clone(), base, is_writable, loader, block_bytes, error: None };
        self.loads.insert(id, load);
        // Also where a device hangs, which completes no read.
        job.on_cancel(move || {
            let Some(sender) = sender.upgrade() else { return };
            // An error means that the thread has ended.
            _ = sender.send(LoadMessage::Cancel(id));
        });
        self.advance(id);
    }

    /// Begins the reads that the loader wants, and ends a load that is complete.
    fn advance(&mut self, id: u64) {
        let Some(load) = self.loads.get_mut(&id) else { return };
        while let Some(read) = load.loader.next_read() {
            // Without the module, what is loaded has no user.
            let Some(sender) = self.sender.upgrade() else { return };
            let (lba, blocks) = (read.offset / load.block_bytes, read.length as u64 / load.block_bytes);
            self.reader.read_unless_zero(load.examination.bdev(), lba, blocks as u32, move |result| {
                // An error means that the thread has ended.
                _ = sender.send(LoadMessage::Read { load: id, read: read.id, length: read.length, result });
            });
        }
        load.job.set_total(load.job.done() + load.loader.bytes_left(), "bytes");
        let Some(outcome) = load.loader.outcome() else { return };
        let Some(load) = self.loads.remove(&id) else { return };
        let Load { examination, job, base, is_writable, error, .. } = load;
        let device = base.device().clone();
        let name = device.name();
        match outcome {
            Ok(_) if job.commit().is_err() => {
                log_cancelled(name);
                drop(base);
                (self.refused)(&device);
            }
            Ok(blobs) => (self.adopt)(LoadedStore { base, is_writable, blobs }, examination),
            Err(failure) => {
                drop(base);
                (self.refused)(&device);
                let cause = error.map_or(String::new(), |error| format!(": {error}"));
                let what_to_do = match &failure {
                    LoadError::DeviceTooSmall { .. } => {
                        "; extend the device, and its volumes are there again"
                    }
                    _ => "",
                };
                log::warn!(
                    target: "lvol",
                    "the logical volume store on {name} is not used: {failure}{cause}{what_to_do}"
                );
                examination.fail(RpcError::new(RpcError::EIO, format!("{failure}{cause}{what_to_do}")));
            }
        }
    }
}
