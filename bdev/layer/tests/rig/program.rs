//! A program of the block layer and the modules of a test, with one reactor. Crates above the layer include this
//! file in their tests.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::Read;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bdev::rpc::BdevModule;
use bdev::{Access, AsyncChannel, Registry};
use block_io::Status;
use control::json::{Value, json};
use control::{ControlPlane, ControlPlaneBuilder, RpcError};
use reactor::{Core, ReactorConfig, ReactorHandle, Reactors};

pub struct TestProgram {
    pub plane: Arc<ControlPlane>,
    pub registry: Registry,
    /// Last, as the plane's modules use it.
    pub reactors: Reactors,
}

/// The bytes of a recorded file.
pub fn decompress(path: &Path) -> Vec<u8> {
    let file = std::fs::File::open(path).unwrap();
    let mut image = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
    let mut bytes = Vec::new();
    image.read_to_end(&mut bytes).unwrap();
    bytes
}

impl TestProgram {
    /// Starts the block layer, and the modules that `add` adds to it.
    pub fn start(
        config: &ReactorConfig,
        add: impl FnOnce(
            ControlPlaneBuilder,
            &Arc<BdevModule>,
            &Registry,
            &[ReactorHandle],
        ) -> ControlPlaneBuilder,
    ) -> TestProgram {
        let reactors = Reactors::start(config).unwrap();
        let registry = Registry::new();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let plane = add(builder, &bdevs, &registry, reactors.handles()).start(None).unwrap();
        TestProgram { plane, registry, reactors }
    }

    pub fn handle(&self) -> ReactorHandle {
        self.reactors.handles()[0].clone()
    }

    pub fn try_call(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        self.plane.invoke(method, params)
    }

    pub fn call(&self, method: &str, params: Value) -> Value {
        self.try_call(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    }

    pub fn failure(&self, method: &str, params: Value) -> (i64, String) {
        match self.try_call(method, params.clone()) {
            Err(error) => (error.code, error.message),
            Ok(result) => panic!("{method} {params}: {result}"),
        }
    }

    pub fn show(&self, name: &str) -> Value {
        self.call("bdev_get_bdevs", json!({ "name": name }))[0].clone()
    }

    pub fn config(&self, subsystem: &str) -> Vec<Value> {
        self.call("framework_get_config", json!({ "name": subsystem })).as_array().unwrap().clone()
    }

    /// Waits for the examinations that have begun.
    pub fn wait(&self) {
        self.call("bdev_wait_for_examine", json!({}));
    }

    /// Runs a task on the core.
    pub fn on_core<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        run: impl FnOnce(Core) -> F + Send + 'static,
    ) -> R {
        let (sender, receiver) = mpsc::channel();
        let start = move |core: &Core| {
            let run = run(core.clone());
            core.spawn(async move { sender.send(run.await).unwrap() });
        };
        self.handle().post(start).unwrap();
        receiver.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    /// Runs a task with a channel of a device.
    pub fn with_access<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        name: &str,
        access: Access<'_>,
        run: impl FnOnce(Core, AsyncChannel) -> F + Send + 'static,
    ) -> R {
        let descriptor = self.registry.open(name, access).unwrap();
        let result = self.on_core(move |core| async move {
            let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
            run(core, io).await
        });
        // The channel has ended, and with it the device is closed, before another turn begins.
        self.on_core(|_| async {});
        result
    }

    /// Writes; returns the data that came back with the request.
    pub fn try_write(&self, name: &str, lba: u64, data: &[u8]) -> Result<Vec<u8>, Status> {
        let data = data.to_vec();
        self.with_access(name, Access::ReadWrite, move |core, io| async move {
            let mut buffer = core.pool().take(data.len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(&data);
            let written = io.write(lba, buffer).await;
            written.map(|buffer| buffer.as_slice().to_vec()).map_err(|(status, _)| status)
        })
    }

    /// Reads, also what another has claimed.
    pub fn try_read(&self, name: &str, lba: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        self.with_access(name, Access::ReadOnly, move |core, io| async move {
            let buffer = core.pool().take(bytes).unwrap();
            let read = io.read(lba, buffer).await;
            read.map(|buffer| buffer.as_slice().to_vec()).map_err(|(status, _)| status)
        })
    }

    /// Writes the pieces of an image that are not zero.
    pub fn write_image(&self, name: &str, image: &[u8]) {
        const PIECE_BYTES: usize = 64 << 10;
        let block_bytes = self.registry.find(name).unwrap().geometry().block_size as usize;
        for (index, piece) in image.chunks(PIECE_BYTES).enumerate() {
            if piece.iter().any(|byte| *byte != 0) {
                self.try_write(name, (index * PIECE_BYTES / block_bytes) as u64, piece).unwrap();
            }
        }
    }
}

impl Drop for TestProgram {
    fn drop(&mut self) {
        self.plane.stop();
    }
}
