//! A program of the block layer and this module, with one reactor, and disks in memory.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

#[path = "../../../layer/tests/rig/program.rs"]
mod program;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bdev_raid::RaidModule;
use block_io::Status;
use control::json::{Value, json};
use program::TestProgram;
use reactor::ReactorConfig;

pub const BLOCK: usize = 512;
/// Blocks before the data of members with a superblock.
pub const OFFSET: u64 = (1 << 20) / BLOCK as u64;

pub struct Program(TestProgram);

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../wire/raid/tests/golden").join(name)
}

pub fn image(name: &str) -> Vec<u8> {
    program::decompress(&golden(&format!("{name}.img.zst")))
}

/// The UUID of a member of tests.
pub fn uuid(index: u64) -> String {
    format!("bbbb0000-0000-4000-8000-{index:012x}")
}

impl Deref for Program {
    type Target = TestProgram;

    fn deref(&self) -> &TestProgram {
        &self.0
    }
}

impl Program {
    pub fn start() -> Program {
        Program(TestProgram::start(&ReactorConfig::default(), |builder, bdevs, _, reactors| {
            builder.module(bdevs).module(&RaidModule::new(bdevs, reactors))
        }))
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

    pub fn saved(&self) -> Vec<Value> {
        self.config("bdev")
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

    pub fn write(&self, name: &str, lba: u64, data: &[u8]) -> Result<(), Status> {
        self.try_write(name, lba, data).map(drop)
    }

    pub fn read(&self, name: &str, lba: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        self.try_read(name, lba, bytes)
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
