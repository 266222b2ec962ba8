//! A target that serves a device in a directory of its own.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use bdev::Registry;
use bdev::delay::DelayConfig;
use bdev::uring::UringConfig;
use memory::Arena;
use nvmf::{ListenAddress, NamespaceConfig, SubsystemConfig, Target, VfioUserConfig};
use reactor::{Config, IdlePolicy, Reactors};

pub(crate) const NQN: &str = "nqn.2016-06.io.spdk:cnode1";

/// Blocks of the namespace, of 512 bytes.
pub(crate) const BLOCKS: u64 = 16384;

pub(crate) struct Rig {
    pub(crate) registry: Registry,
    pub(crate) target: Target,
    pub(crate) directory: PathBuf,
    reactors: Option<Reactors>,
}

impl Rig {
    /// With a device in memory.
    pub(crate) fn new() -> Rig {
        Rig::with(VfioUserConfig::default())
    }

    pub(crate) fn with(transport: VfioUserConfig) -> Rig {
        let config = Config { cpus: sys::CpuSet::allowed(), ..Config::default() };
        Rig::of(transport, config, "Malloc0")
    }

    /// One core with as few buffers as there can be, and a device that keeps them for a while.
    pub(crate) fn starved() -> Rig {
        let one = sys::CpuSet::new(vec![sys::CpuSet::allowed().cpus()[0]]).unwrap();
        let arena = Arena::new(memory::Config { limit_bytes: 1, ..memory::Config::default() });
        Rig::of(VfioUserConfig::default(), Config { cpus: one, arena, ..Config::default() }, "Slow0")
    }

    /// With a device that reads and writes only what is aligned as it likes.
    pub(crate) fn with_file() -> Rig {
        let config = Config { cpus: sys::CpuSet::allowed(), ..Config::default() };
        Rig::of(VfioUserConfig::default(), config, "File0")
    }

    fn of(transport: VfioUserConfig, config: Config, device: &str) -> Rig {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringbolt-endpoint-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        let registry = Registry::new();
        bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", BLOCKS, 512)).unwrap();
        match device {
            "Slow0" => bdev::delay::create(&registry, DelayConfig::new("Malloc0", device, 20_000)).map(drop),
            "File0" => {
                let path = directory.with_extension("disk");
                let file =
                    UringConfig { create_bytes: Some(BLOCKS * 512), ..UringConfig::new(device, &path) };
                let made = bdev::uring::create(&registry, file).map(drop);
                std::fs::remove_file(path).unwrap();
                made
            }
            _ => Ok(()),
        }
        .unwrap();
        let config = Config { pin: false, idle: IdlePolicy::Sleep, ..config };
        let reactors = Reactors::start(&config).unwrap();
        let target = Target::new(registry.clone(), reactors.remotes());
        target.create_vfio_user(transport).unwrap();
        let any = SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() };
        target.create_subsystem(NQN, any).unwrap();
        target.add_namespace(NQN, NamespaceConfig::new(device)).unwrap();
        let rig = Rig { registry, target, directory, reactors: Some(reactors) };
        rig.target.add_listener(NQN, rig.address()).unwrap();
        rig
    }

    pub(crate) fn address(&self) -> ListenAddress {
        ListenAddress::vfio_user(self.directory.to_str().unwrap())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("cntrl")
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.target.shutdown();
        drop(self.reactors.take());
        let left = std::fs::read_dir(&self.directory).unwrap().count();
        std::fs::remove_dir_all(&self.directory).unwrap();
        if !std::thread::panicking() {
            assert_eq!(left, 0, "the socket is removed with the target");
        }
    }
}
