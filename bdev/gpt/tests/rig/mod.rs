//! A program of the block layer and this module, and disks with recorded images.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bdev::rpc::BdevModule;
use bdev::{Access, AsyncChannel, Registry};
use bdev_gpt::GptModule;
use control::json::{Value, json};
use control::{ControlPlane, RpcError};
use reactor::{ReactorConfig, Reactors};

pub struct Program {
    pub plane: Arc<ControlPlane>,
    pub registry: Registry,
    /// Last, as the plane's modules use it.
    reactors: Reactors,
}

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../wire/gpt/tests/golden").join(name)
}

pub fn image(name: &str) -> Vec<u8> {
    let file = std::fs::File::open(golden(&format!("{name}.zst"))).unwrap();
    let mut image = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
    let mut bytes = Vec::new();
    image.read_to_end(&mut bytes).unwrap();
    bytes
}

impl Program {
    pub fn start() -> Program {
        let reactors = Reactors::start(&ReactorConfig::default()).unwrap();
        let registry = Registry::new();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let gpt = GptModule::new(&bdevs, reactors.handles());
        let plane = builder.module(&bdevs).module(&gpt).start(None).unwrap();
        Program { plane, registry, reactors }
    }

    pub fn try_call(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        self.plane.invoke(method, params)
    }

    pub fn call(&self, method: &str, params: Value) -> Value {
        self.try_call(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    }

    pub fn failure(&self, method: &str, params: Value) -> (i64, String) {
        let error = self.try_call(method, params).unwrap_err();
        (error.code, error.message)
    }

    pub fn malloc(&self, name: &str, blocks: u64, block: usize) {
        let params = json!({ "name": name, "num_blocks": blocks, "block_size": block });
        self.call("bdev_malloc_create", params);
    }

    /// A disk with an image: `NAME` on malloc memory `NAME-medium`, from which it is created again.
    pub fn disk(&self, name: &str, image: &[u8], block: usize) {
        self.malloc(&format!("{name}-medium"), (image.len() / block) as u64, block);
        self.insert(name);
        self.write_image(name, image, block);
        self.examine(name);
    }

    pub fn write_image(&self, name: &str, image: &[u8], block: usize) {
        for (index, piece) in image.chunks(4096).enumerate() {
            if piece.iter().any(|byte| *byte != 0) {
                self.write(name, (index * 4096 / block) as u64, piece);
            }
        }
    }

    pub fn insert(&self, name: &str) {
        let base = format!("{name}-medium");
        self.call("bdev_passthru_create", json!({ "name": name, "base_bdev_name": base }));
        self.wait();
    }

    pub fn pull(&self, name: &str) {
        self.call("bdev_passthru_delete", json!({ "name": name }));
        self.wait();
    }

    pub fn examine(&self, name: &str) {
        self.call("bdev_examine", json!({ "name": name }));
        self.wait();
    }

    pub fn wait(&self) {
        self.call("bdev_wait_for_examine", json!({}));
    }

    pub fn names(&self) -> Vec<String> {
        let is_part = |name: &String| !name.ends_with("-medium");
        self.registry.list().iter().map(|device| device.name().to_string()).filter(is_part).collect()
    }

    pub fn show(&self, name: &str) -> Value {
        self.call("bdev_get_bdevs", json!({ "name": name }))[0].clone()
    }

    pub fn saved(&self) -> Vec<Value> {
        self.call("framework_get_config", json!({ "name": "bdev" })).as_array().unwrap().clone()
    }

    fn on_core<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        run: impl FnOnce(reactor::Core) -> F + Send + 'static,
    ) -> R {
        let (sender, receiver) = mpsc::channel();
        let start = move |core: &reactor::Core| {
            let run = run(core.clone());
            core.spawn(async move { sender.send(run.await).unwrap() });
        };
        self.reactors.handles()[0].post(start).unwrap();
        receiver.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    pub fn write(&self, name: &str, lba: u64, data: &[u8]) {
        let descriptor = self.registry.open(name, Access::ReadWrite).unwrap();
        let data = data.to_vec();
        self.on_core(move |core| async move {
            let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
            let mut buffer = core.pool().take(data.len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(&data);
            io.write(lba, buffer).await.map(drop).map_err(|(status, _)| status).unwrap();
        });
    }

    pub fn read(&self, name: &str, lba: u64, bytes: usize) -> Option<Vec<u8>> {
        let descriptor = self.registry.open(name, Access::ReadOnly).unwrap();
        self.on_core(move |core| async move {
            let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
            let buffer = core.pool().take(bytes).unwrap();
            io.read(lba, buffer).await.ok().map(|buffer| buffer.as_slice().to_vec())
        })
    }

    /// All of a device.
    pub fn contents(&self, name: &str, mut sink: impl FnMut(&[u8])) {
        let geometry = self.registry.find(name).unwrap().geometry();
        let at_once = u64::from((256 << 10) / geometry.block_size);
        let mut lba = 0;
        while lba < geometry.blocks {
            let blocks = at_once.min(geometry.blocks - lba);
            sink(&self.read(name, lba, blocks as usize * geometry.block_size as usize).unwrap());
            lba += blocks;
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.plane.stop();
    }
}
