//! A program of the block layer, the acceleration framework and this module.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

#[path = "../../../layer/tests/rig/program.rs"]
mod program;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use accel::AccelModule;
use bdev::{Access, AsyncChannel};
use bdev_crypto::CryptoModule;
use control::json::{Value, json};
use control::{Keyring, KeyringModule};
use dma::{Arena, ArenaConfig};
use program::TestProgram;
use reactor::{Core, ReactorConfig};

pub const KEY: &str = "000102030405060708090a0b0c0d0e0f";
pub const KEY2: &str = "6465666768696a6b6c6d6e6f70717273";

pub struct Program {
    program: TestProgram,
    pub keyring: Keyring,
}

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub fn image(name: &str) -> Vec<u8> {
    program::decompress(&golden(&format!("{name}.img.zst")))
}

impl Deref for Program {
    type Target = TestProgram;

    fn deref(&self) -> &TestProgram {
        &self.program
    }
}

impl Program {
    pub fn start() -> Program {
        let config = ArenaConfig { limit_bytes: 256 << 20, hugepages: false, ..ArenaConfig::default() };
        let config = ReactorConfig { arena: Arena::new(config), ..ReactorConfig::default() };
        let keyring = Keyring::default();
        let program = TestProgram::start(&config, |builder, bdevs, registry, _| {
            let accel = AccelModule::new(registry.accel().clone(), keyring.clone());
            let builder = builder.module(&Arc::new(KeyringModule::new(keyring.clone()))).module(&accel);
            builder.module(bdevs).module(&CryptoModule::new(bdevs, &accel))
        });
        Program { program, keyring }
    }

    /// With a malloc device `base` of 512-byte blocks, the key `k`, and `c` on both.
    pub fn with_device(blocks: u64) -> Program {
        let program = Program::start();
        program.malloc("base", blocks, 512);
        program.key("k", KEY, KEY2);
        program.crypto("c", "base", "k");
        program
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

    pub fn saved(&self, subsystem: &str) -> Vec<Value> {
        self.config(subsystem)
    }

    /// Runs a task with a channel of a device.
    pub fn with_channel<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        name: &str,
        run: impl FnOnce(Core, AsyncChannel) -> F + Send + 'static,
    ) -> R {
        self.with_access(name, Access::ReadWrite, run)
    }

    /// Writes, and checks that the caller's buffer comes back unchanged.
    pub fn write(&self, name: &str, lba: u64, data: &[u8]) {
        assert_eq!(self.try_write(name, lba, data).unwrap(), data);
    }

    pub fn read(&self, name: &str, lba: u64, bytes: usize) -> Vec<u8> {
        self.try_read(name, lba, bytes).unwrap()
    }
}
