//! A program with logical volumes, and devices with images of stores.
#![allow(dead_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::rpc::BdevModule;
use bdev::{
    Access, AsyncChannel, Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, IoLimits,
    Registry, Request, Uuid,
};
use block_io::{Channel, Op, Status};
use control::json::{Value, json};
use control::{ControlPlane, RpcError};
use lvol::LvolModule;
use reactor::{Core, Reactors};
use sha2::{Digest, Sha256};

use crate::support::Device;

/// UUID of the external snapshot of the recorded stores.
pub(crate) const ESNAP_UUID: &str = "e5e5e5e5-0000-4000-8000-000000000001";
const WAIT: Duration = Duration::from_secs(60);

/// A disk with the blocks of an image, which is only read.
struct ImageDisk {
    image: Arc<Mutex<Device>>,
    block_size: u32,
    depth: u32,
    /// Without, requests stay in flight.
    answers: Arc<AtomicBool>,
}

impl Bdev for ImageDisk {
    fn product_name(&self) -> &'static str {
        "image disk"
    }

    fn geometry(&self) -> BdevGeometry {
        let bytes = self.image.lock().unwrap().bytes;
        BdevGeometry::new(self.block_size, bytes / u64::from(self.block_size))
    }

    fn durability(&self) -> Durability {
        Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write)
    }

    fn open(&self, _core: &Core) -> Result<BoxedChannel, BdevError> {
        let (image, answers) = (self.image.clone(), self.answers.clone());
        Ok(Box::new(ImageChannel {
            image,
            answers,
            block_size: self.block_size.into(),
            requests: Vec::new(),
        }))
    }

    fn io_limits(&self) -> IoLimits {
        // Smaller than what volumes pass on.
        IoLimits { transfer_bytes_max: 256 << 10, ..IoLimits::NONE }
    }

    fn depth(&self) -> u32 {
        self.depth
    }
}

struct ImageChannel {
    image: Arc<Mutex<Device>>,
    answers: Arc<AtomicBool>,
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
        if !self.answers.load(Ordering::Acquire) {
            return 0;
        }
        for mut request in self.requests.drain(..).rev() {
            let mut bytes = vec![0; (u64::from(request.blocks) * self.block_size) as usize];
            self.image.lock().unwrap().read(request.lba * self.block_size, &mut bytes);
            request.data_mut().unwrap().copy_from(0, &bytes);
            sink.push(request.complete(Status::SUCCESS));
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
        let reactors = Reactors::start(&reactor::ReactorConfig::default()).unwrap();
        let registry = Registry::new();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let lvols = LvolModule::new(registry.clone(), reactors.handles());
        let plane = builder.module(&bdevs).module(&lvols).start(None).unwrap();
        Program { plane, registry, reactors }
    }

    /// Adds a device and has it examined.
    pub(crate) fn add(&self, name: &str, image: Device, block_size: u32) {
        self.add_as(name, None, image, block_size);
    }

    pub(crate) fn add_as(&self, name: &str, uuid: Option<&str>, image: Device, block_size: u32) {
        // Less than there are pieces of reads.
        self.add_with_depth(name, uuid, image, block_size, 4);
    }

    /// The device answers requests while the flag that it returns is set, as it is at first.
    pub(crate) fn add_with_depth(
        &self,
        name: &str,
        uuid: Option<&str>,
        image: Device,
        block_size: u32,
        depth: u32,
    ) -> Arc<AtomicBool> {
        let uuid = uuid.map(|uuid| Uuid::try_parse(uuid).unwrap());
        let answers = Arc::new(AtomicBool::new(true));
        let image = Arc::new(Mutex::new(image));
        let disk = ImageDisk { image, block_size, depth, answers: answers.clone() };
        self.registry.register(name, uuid, &[], Arc::new(disk)).unwrap();
        self.wait();
        answers
    }

    pub(crate) fn add_esnap(&self) {
        self.add_as("esnap", Some(ESNAP_UUID), Device::recorded("esnap"), 512);
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

    /// Runs `work` with a channel of a device, on the core, to its end.
    pub(crate) fn with_channel<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(Core, AsyncChannel, u64, usize) -> F + Send + 'static,
    ) -> R {
        let descriptor = self.registry.open(name, Access::ReadOnly).unwrap();
        let (sender, result) = channel();
        let start = move |core: &Core| {
            let core = core.clone();
            core.clone().spawn(async move {
                let channel = descriptor.channel(&core).unwrap();
                let (blocks, block_size) = (channel.blocks(), channel.block_size() as usize);
                let io = AsyncChannel::new(&core, channel);
                sender.send(work(core, io, blocks, block_size).await).unwrap();
            });
        };
        self.reactors.handles()[0].post(start).unwrap();
        result.recv_timeout(WAIT).unwrap()
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
