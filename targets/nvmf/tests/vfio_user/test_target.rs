//! A target with one vfio-user endpoint in its own temporary directory.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use bdev::Registry;
use bdev::delay::DelayConfig;
use bdev::uring::UringConfig;
use dma::Arena;
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, VfioUserConfig};
use reactor::{IdlePolicy, ReactorConfig, ReactorHandle, Reactors};

pub(crate) const NQN: &str = "nqn.2016-06.io.spdk:cnode1";

/// Blocks of the namespace, 512 bytes each.
pub(crate) const BLOCKS: u64 = 16384;

pub(crate) struct VfioUserTestTarget {
    pub(crate) registry: Registry,
    pub(crate) target: NvmfTarget,
    pub(crate) directory: PathBuf,
    reactors: Option<Reactors>,
}

impl VfioUserTestTarget {
    /// With a malloc device.
    pub(crate) fn new() -> VfioUserTestTarget {
        VfioUserTestTarget::with(VfioUserConfig::default())
    }

    pub(crate) fn with(transport: VfioUserConfig) -> VfioUserTestTarget {
        let config = ReactorConfig { cpus: os::CpuSet::allowed(), ..ReactorConfig::default() };
        VfioUserTestTarget::of(transport, config, "Malloc0")
    }

    /// With one core.
    pub(crate) fn on_one_core() -> VfioUserTestTarget {
        let one = os::CpuSet::new(vec![os::CpuSet::allowed().cpus()[0]]).unwrap();
        let config = ReactorConfig { cpus: one, ..ReactorConfig::default() };
        VfioUserTestTarget::of(VfioUserConfig::default(), config, "Malloc0")
    }

    /// With one core, the minimum number of buffers, and a device with 20 ms of latency.
    pub(crate) fn with_few_buffers() -> VfioUserTestTarget {
        let one = os::CpuSet::new(vec![os::CpuSet::allowed().cpus()[0]]).unwrap();
        let arena = Arena::new(dma::ArenaConfig { limit_bytes: 1, ..dma::ArenaConfig::default() });
        VfioUserTestTarget::of(
            VfioUserConfig::default(),
            ReactorConfig { cpus: one, arena, ..ReactorConfig::default() },
            "Slow0",
        )
    }

    /// With a file device that requires aligned buffers.
    pub(crate) fn with_file() -> VfioUserTestTarget {
        let config = ReactorConfig { cpus: os::CpuSet::allowed(), ..ReactorConfig::default() };
        VfioUserTestTarget::of(VfioUserConfig::default(), config, "File0")
    }

    fn of(transport: VfioUserConfig, config: ReactorConfig, device: &str) -> VfioUserTestTarget {
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
        let config = ReactorConfig { pin: false, idle: IdlePolicy::Sleep, ..config };
        let reactors = Reactors::start(&config).unwrap();
        let target = NvmfTarget::new(registry.clone(), reactors.handles());
        target.create_vfio_user(transport).unwrap();
        let any = SubsystemConfig { allow_any_host: true, enable_nssr: true, ..SubsystemConfig::default() };
        target.create_subsystem(NQN, any).unwrap();
        target.add_namespace(NQN, NamespaceConfig::new(device)).unwrap();
        let rig = VfioUserTestTarget { registry, target, directory, reactors: Some(reactors) };
        rig.target.add_listener(NQN, rig.address()).unwrap();
        rig
    }

    /// The first core.
    pub(crate) fn core(&self) -> &ReactorHandle {
        &self.reactors.as_ref().unwrap().handles()[0]
    }

    pub(crate) fn address(&self) -> ListenAddress {
        ListenAddress::vfio_user(self.directory.to_str().unwrap())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("cntrl")
    }
}

impl Drop for VfioUserTestTarget {
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
