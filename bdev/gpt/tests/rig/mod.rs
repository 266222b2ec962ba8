//! A program of the block layer and this module, and disks with recorded images.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

#[path = "../../../layer/tests/rig/program.rs"]
mod program;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bdev_gpt::GptModule;
use control::json::{Value, json};
use program::TestProgram;
use reactor::ReactorConfig;

pub struct Program(TestProgram);

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../wire/gpt/tests/golden").join(name)
}

pub fn image(name: &str) -> Vec<u8> {
    program::decompress(&golden(&format!("{name}.zst")))
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
            builder.module(bdevs).module(&GptModule::new(bdevs, reactors))
        }))
    }

    pub fn malloc(&self, name: &str, blocks: u64, block: usize) {
        let params = json!({ "name": name, "num_blocks": blocks, "block_size": block });
        self.call("bdev_malloc_create", params);
    }

    /// A disk with an image: `NAME` on malloc memory `NAME-medium`, from which it is created again.
    pub fn disk(&self, name: &str, image: &[u8], block: usize) {
        self.malloc(&format!("{name}-medium"), (image.len() / block) as u64, block);
        self.insert(name);
        self.write_image(name, image);
        self.examine(name);
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

    /// Waits until the last bdev on it is closed.
    pub fn wait_unclaimed(&self, name: &str) {
        let device = self.registry.find(name).unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while let Some((_, holders)) = device.claim() {
            assert!(Instant::now() < end, "{name} is claimed by {holders:?}");
            std::thread::yield_now();
        }
    }

    pub fn names(&self) -> Vec<String> {
        let is_part = |name: &String| !name.ends_with("-medium");
        self.registry.list().iter().map(|device| device.name().to_string()).filter(is_part).collect()
    }

    pub fn saved(&self) -> Vec<Value> {
        self.config("bdev")
    }

    pub fn write(&self, name: &str, lba: u64, data: &[u8]) {
        self.try_write(name, lba, data).unwrap();
    }

    pub fn read(&self, name: &str, lba: u64, bytes: usize) -> Option<Vec<u8>> {
        self.try_read(name, lba, bytes).ok()
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
