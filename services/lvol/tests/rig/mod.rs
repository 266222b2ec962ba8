//! A program with logical volumes, and devices with images of stores.
#![allow(dead_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::rpc::BdevModule;
use bdev::{
    Access, AsyncChannel, Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, IoLimits,
    Registry, Request, Uuid,
};
use block_io::{Channel, Op, RequestFlags, Status, Tag};
use control::json::{Value, json};
use control::{ControlPlane, RpcError};
use lvol::LvolModule;
use reactor::{Core, ReactorHandle, Reactors};
use sha2::{Digest, Sha256};

use crate::support::Device;

/// UUID of the external snapshot of the recorded stores.
pub(crate) const ESNAP_UUID: &str = "e5e5e5e5-0000-4000-8000-000000000001";
const WAIT: Duration = Duration::from_secs(60);

/// A disk with the blocks of an image.
struct ImageDisk {
    disk: Disk,
    block_size: u32,
    depth: u32,
    read_only: bool,
}

/// What a test sees of a disk, and changes on it.
#[derive(Clone)]
pub(crate) struct Disk {
    pub(crate) image: Arc<Mutex<Device>>,
    /// Without, requests stay in flight.
    pub(crate) answers: Arc<AtomicBool>,
    /// Reads that are answered from now on; those after them stay in flight.
    pub(crate) reads_left: Arc<AtomicU64>,
    /// Writes of all kinds fail.
    pub(crate) fails: Arc<AtomicBool>,
    /// Flushes so far.
    pub(crate) flushes: Arc<AtomicU64>,
}

impl Disk {
    fn new(image: Device) -> Disk {
        Disk {
            image: Arc::new(Mutex::new(image)),
            answers: Arc::new(AtomicBool::new(true)),
            reads_left: Arc::new(AtomicU64::new(u64::MAX)),
            fails: Arc::default(),
            flushes: Arc::default(),
        }
    }

    /// The content now, as a power failure would leave it.
    pub(crate) fn image(&self) -> Device {
        self.image.lock().unwrap().clone()
    }

    /// Whether a request is answered now.
    fn takes(&self, request: &Request) -> bool {
        let one_less = |left: u64| left.checked_sub(1);
        request.op != Op::Read
            || self.reads_left.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less).is_ok()
    }

    fn run(&self, request: &mut Request, block_size: u64) -> Status {
        let offset = request.lba.wrapping_mul(block_size);
        let mut bytes = vec![0; (u64::from(request.blocks) * block_size) as usize];
        if request.op.is_write() && self.fails.load(Ordering::Acquire) {
            return Status::WRITE_FAULT;
        }
        match request.op {
            Op::Read => {
                self.image.lock().unwrap().read(offset, &mut bytes);
                request.data_mut().unwrap().copy_from(0, &bytes);
            }
            Op::Write => {
                request.data().unwrap().copy_to(0, &mut bytes);
                self.image.lock().unwrap().write(offset, &bytes);
            }
            Op::WriteZeroes | Op::Unmap => self.image.lock().unwrap().write(offset, &bytes),
            Op::Flush => _ = self.flushes.fetch_add(1, Ordering::AcqRel),
            _ => return Status::INVALID_OPCODE,
        }
        Status::SUCCESS
    }
}

impl Bdev for ImageDisk {
    fn product_name(&self) -> &'static str {
        "image disk"
    }

    fn geometry(&self) -> BdevGeometry {
        let bytes = self.disk.image.lock().unwrap().bytes;
        let blocks = bytes / u64::from(self.block_size);
        BdevGeometry { write_cache: true, ..BdevGeometry::new(self.block_size, blocks) }
    }

    fn durability(&self) -> Durability {
        Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write | Op::WriteZeroes | Op::Unmap | Op::Flush)
    }

    fn open(&self, _core: &Core) -> Result<BoxedChannel, BdevError> {
        let disk = self.disk.clone();
        Ok(Box::new(ImageChannel { disk, block_size: self.block_size.into(), requests: Vec::new() }))
    }

    fn io_limits(&self) -> IoLimits {
        // Smaller than what volumes pass on.
        IoLimits { transfer_bytes_max: 256 << 10, ..IoLimits::NONE }
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn read_only(&self) -> bool {
        self.read_only
    }
}

struct ImageChannel {
    disk: Disk,
    block_size: u64,
    requests: Vec<Request>,
}

impl Channel for ImageChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        self.requests.append(batch);
    }

    /// The last one first.
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        if !self.disk.answers.load(Ordering::Acquire) {
            return 0;
        }
        let taken: Vec<Request> = self.requests.extract_if(.., |request| self.disk.takes(request)).collect();
        for mut request in taken.into_iter().rev() {
            let status = self.disk.run(&mut request, self.block_size);
            sink.push(request.complete(status));
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        (!self.requests.is_empty()).then_some(0)
    }
}

pub(crate) struct Program {
    pub(crate) plane: Arc<ControlPlane>,
    pub(crate) registry: Registry,
    /// Last, as the plane's modules use it.
    pub(crate) reactors: Reactors,
}

impl Program {
    pub(crate) fn start() -> Program {
        Program::start_on(1)
    }

    /// With this many cores.
    pub(crate) fn start_on(cores: u32) -> Program {
        Program::start_with(cores, LvolModule::new)
    }

    /// On one core, with the time that the end waits for stores.
    pub(crate) fn start_with_unload_timeout(timeout: Duration) -> Program {
        Program::start_with(1, |registry, reactors| {
            LvolModule::with_unload_timeout(registry, reactors, timeout)
        })
    }

    fn start_with(cores: u32, module: impl FnOnce(Registry, &[ReactorHandle]) -> Arc<LvolModule>) -> Program {
        let cpus = os::CpuSet::new((0..cores).collect()).unwrap();
        let config = reactor::ReactorConfig { cpus, pin: false, ..reactor::ReactorConfig::default() };
        let reactors = Reactors::start(&config).unwrap();
        let registry = Registry::new();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let lvols = module(registry.clone(), reactors.handles());
        let plane = builder.module(&bdevs).module(&lvols).start(None).unwrap();
        Program { plane, registry, reactors }
    }

    /// Adds a device and has it examined.
    pub(crate) fn add(&self, name: &str, image: Device, block_size: u32) -> Disk {
        self.add_as(name, None, image, block_size)
    }

    pub(crate) fn add_as(&self, name: &str, uuid: Option<&str>, image: Device, block_size: u32) -> Disk {
        // Less than there are pieces of reads.
        self.add_with(name, uuid, image, block_size, 4, false)
    }

    pub(crate) fn add_read_only(&self, name: &str, image: Device, block_size: u32) -> Disk {
        self.add_with(name, None, image, block_size, 4, true)
    }

    pub(crate) fn add_with(
        &self,
        name: &str,
        uuid: Option<&str>,
        image: Device,
        block_size: u32,
        depth: u32,
        read_only: bool,
    ) -> Disk {
        let uuid = uuid.map(|uuid| Uuid::try_parse(uuid).unwrap());
        let disk = Disk::new(image);
        let bdev = ImageDisk { disk: disk.clone(), block_size, depth, read_only };
        self.registry.register(name, uuid, &[], Arc::new(bdev)).unwrap();
        self.wait();
        disk
    }

    /// Adds an empty disk with a store named `lvs` in clusters of `cluster_bytes`.
    pub(crate) fn add_store(&self, name: &str, mib: u64, cluster_bytes: u64) -> Disk {
        let disk = self.add_with(name, None, Device::new(mib << 20), 512, 64, false);
        let params = json!({ "bdev_name": name, "lvs_name": "lvs", "cluster_sz": cluster_bytes });
        self.call("bdev_lvol_create_lvstore", params);
        disk
    }

    pub(crate) fn add_esnap(&self) {
        self.add_as("esnap", Some(ESNAP_UUID), Device::recorded("esnap"), 512);
    }

    /// Ends as at a signal: stores are unloaded.
    pub(crate) fn end(self) {
        self.plane.drain();
    }

    pub(crate) fn remove(&self, name: &str) {
        let device = self.registry.unregister(name).unwrap();
        self.wait();
        assert!(device.wait_closed(WAIT), "{name} is in use");
    }

    pub(crate) fn wait(&self) {
        // What is registered meanwhile is examined too.
        for _ in 0..2 {
            self.call("bdev_wait_for_examine", json!({}));
        }
    }

    pub(crate) fn call(&self, method: &str, params: Value) -> Value {
        self.try_call(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    }

    pub(crate) fn try_call(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        self.plane.invoke(method, params)
    }

    pub(crate) fn lvols(&self) -> Vec<Value> {
        self.call("bdev_lvol_get_lvols", json!({})).as_array().unwrap().clone()
    }

    pub(crate) fn stores(&self) -> Vec<Value> {
        self.call("bdev_lvol_get_lvstores", json!({})).as_array().unwrap().clone()
    }

    /// The code of the error of a call.
    pub(crate) fn code(&self, method: &str, params: Value) -> i64 {
        match self.try_call(method, params.clone()) {
            Ok(result) => panic!("{method} {params}: {result}"),
            Err(error) => error.code,
        }
    }

    /// Runs `work` with a channel of a device, on the first core, to its end.
    pub(crate) fn with_channel<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(Core, AsyncChannel, u64, usize) -> F + Send + 'static,
    ) -> R {
        self.begin_on(0, name, Access::ReadOnly, work).recv_timeout(WAIT).unwrap()
    }

    /// Starts `work` with a channel of a device on a core, and returns where its result comes.
    pub(crate) fn begin_on<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        core: usize,
        name: &str,
        access: Access<'_>,
        work: impl FnOnce(Core, AsyncChannel, u64, usize) -> F + Send + 'static,
    ) -> Receiver<R> {
        let descriptor = self.registry.open(name, access).unwrap();
        let (sender, result) = channel();
        let start = move |core: &Core| {
            let core = core.clone();
            core.clone().spawn(async move {
                let channel = descriptor.channel(&core).unwrap();
                let (blocks, block_size) = (channel.blocks(), channel.block_size() as usize);
                let io = AsyncChannel::new(&core, channel);
                let outcome = work(core, io, blocks, block_size).await;
                // The device is closed when the test sees the outcome, or soon after.
                drop(descriptor);
                _ = sender.send(outcome);
            });
        };
        self.reactors.handles()[core].post(start).unwrap();
        result
    }

    /// Runs one request on a core.
    pub(crate) fn request_on(
        &self,
        core: usize,
        name: &str,
        op: Op,
        offset: u64,
        data: Result<Vec<u8>, u64>,
        flags: RequestFlags,
    ) -> (Status, Vec<u8>) {
        let work = move |core: Core, io: AsyncChannel, _: u64, block_size: usize| async move {
            let bytes = data.as_ref().map_or_else(|bytes| *bytes, |data| data.len() as u64);
            let block = block_size as u64;
            let mut request = Request::new(Tag(0), op, offset / block, (bytes / block) as u32);
            request.flags = flags;
            if op.has_data() {
                let mut buffer = core.pool().take_data(bytes as usize).unwrap();
                match &data {
                    Ok(data) => buffer.copy_from(0, data),
                    Err(_) => buffer.copy_from(0, &vec![0xa5; bytes as usize]),
                }
                request.set_data(Some(buffer));
            }
            let completion = io.submit(request).await;
            let status = completion.status();
            let mut content = Vec::new();
            if let Some(data) = completion.into_data() {
                content.resize(data.len(), 0);
                data.copy_to(0, &mut content);
            }
            (status, content)
        };
        let access = if op.is_write() { Access::ReadWrite } else { Access::ReadOnly };
        self.begin_on(core, name, access, work).recv_timeout(WAIT).unwrap()
    }

    pub(crate) fn write(&self, name: &str, offset: u64, data: Vec<u8>) -> Result<(), Status> {
        match self.request_on(0, name, Op::Write, offset, Ok(data), RequestFlags::NONE) {
            (status, _) if status.is_success() => Ok(()),
            (status, _) => Err(status),
        }
    }

    pub(crate) fn range(&self, name: &str, op: Op, offset: u64, bytes: u64) -> Result<(), Status> {
        match self.request_on(0, name, op, offset, Err(bytes), RequestFlags::NONE) {
            (status, _) if status.is_success() => Ok(()),
            (status, _) => Err(status),
        }
    }

    pub(crate) fn read(&self, name: &str, offset: u64, bytes: u64) -> Vec<u8> {
        let (status, data) = self.request_on(0, name, Op::Read, offset, Err(bytes), RequestFlags::NONE);
        assert!(status.is_success(), "{name}: {status}");
        data
    }

    /// Waits until the channels of requests that have completed are closed.
    pub(crate) fn wait_unused(&self, name: &str) {
        let device = self.registry.find(name).unwrap();
        let end = std::time::Instant::now() + WAIT;
        while device.open_count() > 0 {
            assert!(std::time::Instant::now() < end, "{name} is open");
            std::thread::yield_now();
        }
    }

    /// The object of `bdev_lvol_get_lvols` for a volume.
    pub(crate) fn lvol(&self, name: &str) -> Value {
        let is_it = |lvol: &Value| lvol["name"] == name;
        self.lvols().into_iter().find(is_it).unwrap_or_else(|| panic!("no volume {name}"))
    }

    pub(crate) fn free_clusters(&self) -> u64 {
        self.stores()[0]["free_clusters"].as_u64().unwrap()
    }

    /// Creates a volume in the store `lvs`.
    pub(crate) fn create(&self, name: &str, mib: u64, thin: bool) -> String {
        let params =
            json!({ "lvol_name": name, "size_in_mib": mib, "thin_provision": thin, "lvs_name": "lvs" });
        self.call("bdev_lvol_create", params).as_str().unwrap().to_string()
    }

    /// The contents of a device, read in pieces that are no multiple of a cluster.
    pub(crate) fn content(&self, name: &str) -> Result<Vec<u8>, Status> {
        self.with_channel(name, |core, io, blocks, block_size| async move {
            let step = ((700 << 10) / block_size) as u64;
            let (mut lba, mut content) = (0, Vec::new());
            while lba < blocks {
                let count = step.min(blocks - lba);
                let mut buffer = core.pool().take(count as usize * block_size).unwrap();
                buffer.as_mut_slice().fill(0xa5);
                let buffer = io.read(lba, buffer).await.map_err(|(status, _)| status)?;
                content.extend_from_slice(buffer.as_slice());
                lba += count;
            }
            Ok(content)
        })
    }

    pub(crate) fn sha256(&self, name: &str) -> String {
        let hash = Sha256::digest(self.content(name).unwrap());
        hash.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.plane.stop();
    }
}
