//! A store of files on the reactor: a poller that takes requests of any thread, and runs them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bdev::stacking::{BaseBdev, BaseChannel};
use bdev::{Access, DeviceReader, PlanRunner};
use blobfs::{
    BlobFs, BlobFsError, BlobFsOptions, BlobFsReply, BlobFsRequest, BlobFsRequestId, DeviceContent,
    FileExtents, OpenNumber, format_options,
};
use blobstore::LoadError;
use plugin_bdevs::ConfiguredBdevs;
use reactor::{Core, MailboxReceiver, MailboxSender, Period, PollResult, Poller, Shutdown, blocking};
use rocksdb_abi::{ErrorKind, FileError};

use crate::buffers::WriteBuffers;
use crate::call::{Call, CallReply, call};
use crate::load::{self, NotLoaded};
use crate::plan::FsPlan;
use crate::process;
use crate::uri::StoreUri;

/// Messages that wait for the reactor; a thread waits while there are so many.
const MESSAGES_MAX: usize = 4096;
/// Messages that are taken in one turn.
const MESSAGES_A_TURN: usize = 256;
/// Bytes of the largest block of a bdev: a page of metadata.
const BLOCK_BYTES_MAX: u32 = 4096;
/// Who claims the bdev.
const HOLDER: &str = "RocksDB's files";

/// Looks at the files between requests.
type Inspect = Box<dyn FnOnce(&mut BlobFs) + Send>;

enum StoreMessage {
    Request(BlobFsRequest, CallReply<BlobFsReply>),
    /// Look at the files when nothing is in flight.
    InspectIdle(Inspect),
    Inspect(Inspect),
    /// End, when nothing is in flight.
    End(CallReply<()>),
}

/// An open store, for any thread.
pub(crate) struct Store {
    sender: MailboxSender<StoreMessage>,
    is_over: Arc<AtomicBool>,
    base: Arc<BaseBdev>,
    /// Of a bdev that any thread can read.
    reader: Option<DeviceReader>,
    buffers: Arc<WriteBuffers>,
    /// It outlives the store's channels.
    configured: Mutex<Option<Arc<ConfiguredBdevs>>>,
    is_closed: AtomicBool,
    #[cfg(test)]
    before_begin: Mutex<Option<BeforeBegin>>,
}

/// What a test does before a request is begun.
#[cfg(test)]
type BeforeBegin = Box<dyn Fn(&BlobFsRequest) + Send>;

/// Loads the files of a bdev, or makes them. Overwriting is recommended only for a bdev that was read, and
/// has something else on it.
async fn open_files(core: &Core, base: &BaseBdev, create: bool) -> Result<BlobFs, FileError> {
    let device = lvol::blob_store_device(base);
    let name = base.device().name().to_string();
    let failed = |kind, text: String| FileError::new(kind, format!("{name}: {text}"));
    if !BLOCK_BYTES_MAX.is_multiple_of(device.block_bytes) {
        let text = format!("its blocks have {} bytes, and a store needs 512 or 4096", device.block_bytes);
        return Err(failed(ErrorKind::Invalid, text));
    }
    let error = match load::load(core, base).await {
        Ok(store) => {
            return BlobFs::open(store, device, BlobFsOptions::default()).map_err(|error| {
                failed(ErrorKind::Corruption, format!("{error}; `ringbolt blob list` shows what it has"))
            });
        }
        Err(NotLoaded::Device(text)) => return Err(failed(ErrorKind::Io, text)),
        Err(NotLoaded::Store(error)) => error,
    };
    let advice = match error {
        LoadError::SuperBlock(_) => None,
        LoadError::NoSuperBlock { .. } => return Err(failed(ErrorKind::Invalid, error.to_string())),
        LoadError::DeviceTooSmall { .. } => Some("a part of the device is missing, or it is another"),
        _ => Some("`ringbolt blob check` says what is wrong"),
    };
    if let Some(advice) = advice {
        return Err(failed(ErrorKind::Corruption, format!("{error}; {advice}")));
    }
    let content = load::content(core, base).await.map_err(|text| failed(ErrorKind::Io, text))?;
    match content {
        DeviceContent::Blank if create => BlobFs::format(&format_options(), device, BlobFsOptions::default())
            .map_err(|error| failed(ErrorKind::Invalid, error.to_string())),
        DeviceContent::Blank => {
            let how = "create=1 in the URI makes a store of files, or `ringbolt blobfs format`";
            Err(FileError::new(ErrorKind::Invalid, format!("{name} is empty: {how}")))
        }
        DeviceContent::Blobstore => Err(failed(
            ErrorKind::Corruption,
            format!("{error}; a blobstore was there: `ringbolt blob check` says what is wrong"),
        )),
        DeviceContent::Other { at } => Err(failed(
            ErrorKind::Corruption,
            format!(
                "{error}; there is something else on it, from byte {at} on, `ringbolt blobfs format --force` \
                 overwrites it"
            ),
        )),
    }
}

impl Store {
    /// Opens the store of a URI.
    ///
    /// # Errors
    /// There is no such bdev, another holds it, or there is no store of files on it.
    pub(crate) fn open(configured: Arc<ConfiguredBdevs>, uri: &StoreUri) -> Result<Store, FileError> {
        let io = |text: String| FileError::new(ErrorKind::Io, text);
        let registry = configured.registry();
        if registry.find(&uri.bdev).is_none() {
            let names: Vec<String> = registry.list().iter().map(|device| device.name().to_string()).collect();
            let there = if names.is_empty() { "no bdevs".to_string() } else { names.join(", ") };
            let text = format!("{} makes no bdev {}; it makes {there}", uri.config.display(), uri.bdev);
            return Err(FileError::new(ErrorKind::Invalid, text));
        }
        let access = Access::Exclusive { by: HOLDER };
        let base = BaseBdev::open(registry, &uri.bdev, access).map_err(|error| io(error.to_string()))?;
        let base = Arc::new(base);
        let is_over = Arc::new(AtomicBool::new(false));
        let (opened, reply) = std::sync::mpsc::sync_channel(1);
        let (of_core, over, create) = (base.clone(), is_over.clone(), uri.create);
        let buffers = Arc::<WriteBuffers>::default();
        let (of_plan, discards) = (buffers.clone(), uri.discard);
        let start = move |core: &Core| {
            let of_task = core.clone();
            let opening = async move {
                let result = open_files(&of_task, &of_core, create).await;
                let result = result.and_then(|fs| {
                    let plan = |flushes| FsPlan::new(&of_task, fs, flushes, discards, of_plan);
                    start_poller(&of_task, &of_core, plan, over)
                });
                // Who opens again after an error finds the bdev unclaimed.
                drop(of_core);
                // The opener has gone only if its thread was killed.
                _ = opened.send(result);
            };
            core.spawn(opening)
        };
        let is_started = configured.reactor().call(start).map_err(|error| io(error.to_string()))?;
        if !is_started {
            return Err(io("the reactor has no room for another task".to_string()));
        }
        let sender = blocking::receive(&reply).map_err(|_| io("the reactor has ended".to_string()))??;
        let configured = Mutex::new(Some(configured));
        let reader = base.reader();
        let store = Store {
            sender,
            is_over,
            base,
            reader,
            buffers,
            configured,
            is_closed: AtomicBool::new(false),
            #[cfg(test)]
            before_begin: Mutex::default(),
        };
        // What a power failure has cut in two is finished first, and a new store is written.
        let (waiting, reply) = call();
        store.send(StoreMessage::InspectIdle(Box::new(move |fs| reply.end(Ok(fs.is_broken())))));
        if store.wait(waiting).map_err(|error| io(error.to_string()))? {
            return Err(io(format!("{}: its metadata cannot be written", uri.bdev)));
        }
        Ok(store)
    }

    fn send(&self, mut message: StoreMessage) {
        if process::is_forked() {
            // Dropped, it fails the call.
            return;
        }
        while let Err(returned) = self.sender.send(message) {
            message = returned;
            if self.is_over() {
                return;
            }
            std::thread::yield_now();
        }
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Begins a request. Those of one thread begin in order.
    pub(crate) fn begin(&self, request: BlobFsRequest) -> Call<BlobFsReply> {
        #[cfg(test)]
        if let Some(before) = &*sync::lock(&self.before_begin) {
            before(&request);
        }
        let (waiting, reply) = call();
        self.send(StoreMessage::Request(request, reply));
        waiting
    }

    #[cfg(test)]
    pub(crate) fn before_begin(&self, before: impl Fn(&BlobFsRequest) + Send + 'static) {
        *sync::lock(&self.before_begin) = Some(Box::new(before));
    }

    /// Waits for what was begun.
    pub(crate) fn wait<T>(&self, call: Call<T>) -> Result<T, BlobFsError> {
        call.wait(|| self.is_over())
    }

    /// Runs a request.
    pub(crate) fn request(&self, request: BlobFsRequest) -> Result<BlobFsReply, BlobFsError> {
        self.wait(self.begin(request))
    }

    /// Runs a function on the files between requests.
    pub(crate) fn inspect<T: Send + 'static>(
        &self,
        with: impl FnOnce(&mut BlobFs) -> T + Send + 'static,
    ) -> Result<T, BlobFsError> {
        let (waiting, reply) = call();
        self.send(StoreMessage::Inspect(Box::new(move |fs| reply.end(Ok(with(fs))))));
        self.wait(waiting)
    }

    /// Memory of large writes.
    pub(crate) fn buffers(&self) -> &WriteBuffers {
        &self.buffers
    }

    /// What reads the bdev on any thread, if it can be read so.
    pub(crate) fn reader(&self) -> Option<&DeviceReader> {
        // The extents of a fork would not be revoked.
        self.reader.as_ref().filter(|_| !process::is_forked())
    }

    /// Where an open file is on the bdev. `None` while it is written.
    pub(crate) fn extents(&self, open: OpenNumber) -> Option<FileExtents> {
        self.inspect(move |fs| fs.extents(open)).ok().flatten()
    }

    /// A thread has read by extents that were revoked meanwhile.
    pub(crate) fn reads_ended(&self) {
        self.send(StoreMessage::Inspect(Box::new(BlobFs::reads_ended)));
    }

    /// Syncs all files and closes the store; requests fail from then on. It does nothing if it was closed.
    pub(crate) fn close(&self) {
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = self.request(BlobFsRequest::Unload) {
            log::warn!(target: "rocksdb", "{} is not closed properly: {error}", self.base.device().name());
        }
        let (waiting, reply) = call();
        self.send(StoreMessage::End(reply));
        // Without a reactor it has ended.
        _ = self.wait(waiting);
        self.base.release();
        drop(sync::lock(&self.configured).take());
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

fn start_poller(
    core: &Core,
    base: &Arc<BaseBdev>,
    plan: impl FnOnce(BaseChannel) -> FsPlan,
    is_over: Arc<AtomicBool>,
) -> Result<MailboxSender<StoreMessage>, FileError> {
    let failed = |error: bdev::BdevError| FileError::new(ErrorKind::Io, error.to_string());
    let runner = PlanRunner::new(core, base.channel(core).map_err(failed)?);
    let flushes = BaseChannel::new(base.channel(core).map_err(failed)?);
    let (sender, messages) = core.mailbox(MESSAGES_MAX);
    let plan = plan(flushes);
    let end = PollerEnd { is_over, reply: None };
    let poller = StorePoller {
        plan,
        runner,
        messages,
        calls: HashMap::new(),
        inspections: Vec::new(),
        inspections_idle: Vec::new(),
        end,
    };
    core.add_poller(Box::new(poller), Period::EveryTurn);
    Ok(sender)
}

/// Dropped last, it says that no request is answered any more, and that the channels are closed.
struct PollerEnd {
    is_over: Arc<AtomicBool>,
    reply: Option<CallReply<()>>,
}

impl Drop for PollerEnd {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(reply) = self.reply.take() {
            reply.end(Ok(()));
        }
    }
}

struct StorePoller {
    plan: FsPlan,
    runner: PlanRunner,
    messages: MailboxReceiver<StoreMessage>,
    calls: HashMap<BlobFsRequestId, CallReply<BlobFsReply>>,
    inspections: Vec<Inspect>,
    inspections_idle: Vec<Inspect>,
    /// After the channels.
    end: PollerEnd,
}

impl StorePoller {
    fn take_messages(&mut self) -> usize {
        let mut count = 0;
        while count < MESSAGES_A_TURN
            && let Some(message) = self.messages.receive()
        {
            count += 1;
            match message {
                StoreMessage::Request(request, reply) => {
                    let id = self.plan.fs.begin(request);
                    self.calls.insert(id, reply);
                }
                StoreMessage::Inspect(inspect) => self.inspections.push(inspect),
                StoreMessage::InspectIdle(inspect) => self.inspections_idle.push(inspect),
                StoreMessage::End(reply) => self.end.reply = Some(reply),
            }
        }
        count
    }

    fn reply(&mut self) -> usize {
        let mut count = 0;
        while let Some((id, result)) = self.plan.fs.next_reply() {
            count += 1;
            if let Some(reply) = self.calls.remove(&id) {
                reply.end(result);
            }
        }
        count
    }
}

impl Poller for StorePoller {
    fn name(&self) -> &str {
        "rocksdb files"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let mut count = self.take_messages();
        count += self.plan.turn();
        count += self.runner.turn(&mut self.plan);
        while self.plan.has_more() {
            count += self.runner.turn(&mut self.plan);
        }
        count += self.reply();
        for inspect in self.inspections.drain(..) {
            inspect(&mut self.plan.fs);
        }
        let is_idle = !(self.inspections_idle.is_empty() && self.end.reply.is_none())
            && self.plan.is_idle()
            && self.runner.is_idle();
        if is_idle {
            self.inspections_idle.drain(..).for_each(|inspect| inspect(&mut self.plan.fs));
            if self.end.reply.is_some() {
                return PollResult::Finished;
            }
        }
        PollResult::from_count(count)
    }

    fn deadline(&self) -> Option<u64> {
        if !self.messages.is_empty() {
            return Some(0);
        }
        [self.runner.deadline(), self.plan.deadline()].into_iter().flatten().min()
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        match self.plan.is_idle() && self.runner.is_idle() {
            true => Shutdown::Done,
            false => Shutdown::Draining,
        }
    }
}

#[cfg(test)]
mod tests;
