//! A program of the block layer, the acceleration framework and this module.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use accel::AccelModule;
use bdev::rpc::BdevModule;
use bdev::{Access, AsyncChannel, Registry};
use bdev_crypto::CryptoModule;
use block_io::Status;
use control::json::{Value, json};
use control::{ControlPlane, Keyring, KeyringModule, RpcError};
use dma::{Arena, ArenaConfig};
use reactor::{Core, ReactorConfig, Reactors};

pub const KEY: &str = "000102030405060708090a0b0c0d0e0f";
pub const KEY2: &str = "6465666768696a6b6c6d6e6f70717273";

pub struct Program {
    pub plane: Arc<ControlPlane>,
    pub registry: Registry,
    pub keyring: Keyring,
    /// Last, as the plane's modules use it.
    pub reactors: Reactors,
}

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub fn image(name: &str) -> Vec<u8> {
    let file = std::fs::File::open(golden(&format!("{name}.img.zst"))).unwrap();
    let mut image = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
    let mut bytes = Vec::new();
    image.read_to_end(&mut bytes).unwrap();
    bytes
}

impl Program {
    pub fn start() -> Program {
        let config = ArenaConfig { limit_bytes: 256 << 20, hugepages: false, ..ArenaConfig::default() };
        let config = ReactorConfig { arena: Arena::new(config), ..ReactorConfig::default() };
        let reactors = Reactors::start(&config).unwrap();
        let (registry, keyring) = (Registry::new(), Keyring::default());
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let accel = AccelModule::new(registry.accel().clone(), keyring.clone());
        let builder = builder.module(&Arc::new(KeyringModule::new(keyring.clone()))).module(&accel);
        let plane = builder.module(&bdevs).module(&CryptoModule::new(&bdevs, &accel)).start(None).unwrap();
        Program { plane, registry, keyring, reactors }
    }

    /// With a malloc device `base` of 512-byte blocks, the key `k`, and `c` on both.
    pub fn with_device(blocks: u64) -> Program {
        let program = Program::start();
        program.malloc("base", blocks, 512);
        program.key("k", KEY, KEY2);
        program.crypto("c", "base", "k");
        program
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

    pub fn key(&self, name: &str, key: &str, key2: &str) {
        let params = json!({ "cipher": "AES_XTS", "key": key, "key2": key2, "name": name });
        self.call("accel_crypto_key_create", params);
    }

    pub fn crypto(&self, name: &str, base: &str, key: &str) {
        let params = json!({ "base_bdev_name": base, "name": name, "key_name": key });
        assert_eq!(self.call("bdev_crypto_create", params), json!(name));
    }

    pub fn show(&self, name: &str) -> Value {
        self.call("bdev_get_bdevs", json!({ "name": name }))[0].clone()
    }

    pub fn saved(&self, subsystem: &str) -> Vec<Value> {
        self.call("framework_get_config", json!({ "name": subsystem })).as_array().unwrap().clone()
    }

    pub fn wait(&self) {
        self.call("bdev_wait_for_examine", json!({}));
    }

    /// Runs a task on the first core.
    pub fn on_core<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        run: impl FnOnce(Core) -> F + Send + 'static,
    ) -> R {
        let (sender, receiver) = mpsc::channel();
        let start = move |core: &Core| {
            let run = run(core.clone());
            core.spawn(async move { sender.send(run.await).unwrap() });
        };
        self.reactors.handles()[0].post(start).unwrap();
        receiver.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    /// Runs a task with a channel of a device.
    pub fn with_channel<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        name: &str,
        run: impl FnOnce(Core, AsyncChannel) -> F + Send + 'static,
    ) -> R {
        self.with_access(name, Access::ReadWrite, run)
    }

    fn with_access<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        name: &str,
        access: Access<'_>,
        run: impl FnOnce(Core, AsyncChannel) -> F + Send + 'static,
    ) -> R {
        let descriptor = self.registry.open(name, access).unwrap();
        self.on_core(move |core| async move {
            let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
            run(core, io).await
        })
    }

    pub fn try_write(&self, name: &str, lba: u64, data: &[u8]) -> Result<Vec<u8>, Status> {
        let data = data.to_vec();
        self.with_channel(name, move |core, io| async move {
            let mut buffer = core.pool().take(data.len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(&data);
            let written = io.write(lba, buffer).await;
            written.map(|buffer| buffer.as_slice().to_vec()).map_err(|(status, _)| status)
        })
    }

    /// Writes, and checks that the caller's buffer comes back unchanged.
    pub fn write(&self, name: &str, lba: u64, data: &[u8]) {
        assert_eq!(self.try_write(name, lba, data).unwrap(), data);
    }

    pub fn write_image(&self, name: &str, image: &[u8]) {
        for (index, piece) in image.chunks(4096).enumerate() {
            if piece.iter().any(|byte| *byte != 0) {
                self.write(name, (index * 4096 / 512) as u64, piece);
            }
        }
    }

    pub fn try_read(&self, name: &str, lba: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        // The base of a volume too, which that has claimed.
        self.with_access(name, Access::ReadOnly, move |core, io| async move {
            let buffer = core.pool().take(bytes).unwrap();
            let read = io.read(lba, buffer).await;
            read.map(|buffer| buffer.as_slice().to_vec()).map_err(|(status, _)| status)
        })
    }

    pub fn read(&self, name: &str, lba: u64, bytes: usize) -> Vec<u8> {
        self.try_read(name, lba, bytes).unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.plane.stop();
    }
}
