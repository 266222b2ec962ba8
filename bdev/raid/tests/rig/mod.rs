//! A program of the block layer and this module, with one reactor, and disks in memory.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bdev::rpc::BdevModule;
use bdev::{Access, AsyncChannel, Registry};
use bdev_raid::RaidModule;
use block_io::Status;
use control::json::{Value, json};
use control::{ControlPlane, RpcError};
use reactor::{Core, ReactorConfig, ReactorHandle, Reactors};

pub const BLOCK: usize = 512;
/// Blocks before the data of members with a superblock.
pub const OFFSET: u64 = (1 << 20) / BLOCK as u64;

pub struct Program {
    pub plane: Arc<ControlPlane>,
    pub registry: Registry,
    /// Last, as the plane's modules use it.
    reactors: Reactors,
}

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../wire/raid/tests/golden").join(name)
}

pub fn image(name: &str) -> Vec<u8> {
    let file = std::fs::File::open(golden(&format!("{name}.img.zst"))).unwrap();
    let mut image = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
    let mut bytes = Vec::new();
    image.read_to_end(&mut bytes).unwrap();
    bytes
}

/// The UUID of a member of tests.
pub fn uuid(index: u64) -> String {
    format!("bbbb0000-0000-4000-8000-{index:012x}")
}

impl Program {
    pub fn start() -> Program {
        let reactors = Reactors::start(&ReactorConfig::default()).unwrap();
        let registry = Registry::new();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let raid = RaidModule::new(&bdevs, reactors.handles());
        let plane = builder.module(&bdevs).module(&raid).start(None).unwrap();
        Program { plane, registry, reactors }
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

    /// A disk in memory, with the UUID of an index.
    pub fn malloc(&self, name: &str, blocks: u64, index: u64) {
        let params = json!({ "name": name, "num_blocks": blocks, "block_size": BLOCK, "uuid": uuid(index) });
        self.call("bdev_malloc_create", params);
        self.wait();
    }

    /// A disk `NAME` with the UUID of an index on memory `NAME-medium`, which survives its removal.
    pub fn medium(&self, name: &str, blocks: u64) {
        let params = json!({ "name": format!("{name}-medium"), "num_blocks": blocks, "block_size": BLOCK });
        self.call("bdev_malloc_create", params);
        self.wait();
    }

    pub fn insert(&self, name: &str, index: u64) {
        self.insert_with(name, &uuid(index));
    }

    pub fn insert_with(&self, name: &str, uuid: &str) {
        let base = format!("{name}-medium");
        let params = json!({ "name": name, "base_bdev_name": base, "uuid": uuid });
        // What has written the medium may not be closed yet.
        self.until("the medium is free", || match self.try_call("bdev_passthru_create", params.clone()) {
            Err(error) if error.code == -16 => false,
            result => result.unwrap() == json!(name),
        });
        self.wait();
    }

    pub fn pull(&self, name: &str) {
        self.call("bdev_passthru_delete", json!({ "name": name }));
        self.wait();
    }

    /// A disk with these contents, which is examined when it has them.
    pub fn disk(&self, name: &str, image: &[u8], index: u64) {
        self.medium(name, (image.len() / BLOCK) as u64);
        self.write_image(&format!("{name}-medium"), image);
        self.insert(name, index);
    }

    pub fn write_image(&self, name: &str, image: &[u8]) {
        for (index, piece) in image.chunks(64 << 10).enumerate() {
            if piece.iter().any(|byte| *byte != 0) {
                self.write(name, (index * (64 << 10) / BLOCK) as u64, piece).unwrap();
            }
        }
    }

    pub fn wait(&self) {
        self.call("bdev_wait_for_examine", json!({}));
    }

    pub fn raids(&self, category: &str) -> Vec<Value> {
        self.call("bdev_raid_get_bdevs", json!({ "category": category })).as_array().unwrap().clone()
    }

    pub fn raid(&self, name: &str) -> Value {
        let raids = self.raids("all");
        raids
            .into_iter()
            .find(|raid| raid["name"] == name)
            .unwrap_or_else(|| panic!("there is no array {name}"))
    }

    /// Names of the members that an array has.
    pub fn members(&self, name: &str) -> Vec<String> {
        let raid = self.raid(name);
        let members = raid["base_bdevs_list"].as_array().unwrap();
        let present = members.iter().filter(|member| member["is_configured"] == true);
        present.map(|member| member["name"].as_str().unwrap().to_string()).collect()
    }

    pub fn show(&self, name: &str) -> Value {
        self.call("bdev_get_bdevs", json!({ "name": name }))[0].clone()
    }

    pub fn saved(&self) -> Vec<Value> {
        self.call("framework_get_config", json!({ "name": "bdev" })).as_array().unwrap().clone()
    }

    /// Waits until something holds.
    pub fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(30), "{what}: {:?}", self.raids("all"));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a mirror has all of its members, and none is copied to.
    pub fn until_in_sync(&self, name: &str) {
        self.until("all members have all data", || {
            let raid = self.raid(name);
            raid["num_base_bdevs_discovered"] == raid["num_base_bdevs"] && raid["process"].is_null()
        });
    }

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

    pub fn write(&self, name: &str, lba: u64, data: &[u8]) -> Result<(), Status> {
        let descriptor = self.registry.open(name, Access::ReadWrite).unwrap();
        let data = data.to_vec();
        self.on_core(move |core| async move {
            let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
            let mut buffer = core.pool().take(data.len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(&data);
            io.write(lba, buffer).await.map(drop).map_err(|(status, _)| status)
        })
    }

    pub fn read(&self, name: &str, lba: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        let descriptor = self.registry.open(name, Access::ReadOnly).unwrap();
        self.on_core(move |core| async move {
            let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
            let buffer = core.pool().take(bytes).unwrap();
            let read = io.read(lba, buffer).await;
            read.map(|buffer| buffer.as_slice().to_vec()).map_err(|(status, _)| status)
        })
    }

    /// Changes a block of a device behind those that have claimed it, as a medium that loses data.
    pub fn write_lost(&self, name: &str, lba: u64) {
        let device = self.registry.find(name).unwrap();
        self.on_core(move |core| async move {
            let mut channel = device.bdev().open(&core).unwrap();
            let mut buffer = core.pool().take(BLOCK).unwrap();
            buffer.as_mut_slice().fill(0xee);
            channel.submit(&mut vec![block_io::Request::write(block_io::Tag(0), lba, 1, buffer)]);
            let mut sink = Vec::new();
            while channel.poll(&mut sink) == 0 {
                core.sleep_ns(1000).await;
            }
        });
    }

    /// All of a device.
    pub fn contents(&self, name: &str) -> Vec<u8> {
        let blocks = self.registry.find(name).unwrap().geometry().blocks;
        let at_once = (256 << 10) / BLOCK as u64;
        let mut contents = Vec::new();
        for lba in (0..blocks).step_by(at_once as usize) {
            let blocks = at_once.min(blocks - lba);
            contents.extend(self.read(name, lba, blocks as usize * BLOCK).unwrap());
        }
        contents
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.plane.stop();
    }
}
