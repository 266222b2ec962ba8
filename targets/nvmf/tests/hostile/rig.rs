//! A target on real reactors, and the kernel's loopback before it.

use std::sync::Arc;

use bdev::Registry;
use bdev::delay::DelayConfig;
use bdev::malloc::MallocConfig;
use memory::Arena;
use nvmf::{ListenAddress, NamespaceConfig, SubsystemConfig, Target, TransportConfig};
use reactor::{Config, IdlePolicy, Reactors};

pub(crate) const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
/// Blocks of every device, of 512 bytes each.
pub(crate) const BLOCKS: u64 = 16384;

/// What a rig is made of.
pub(crate) struct Parts {
    pub(crate) transport: TransportConfig,
    /// Namespaces 1, 2, … each on a memory device of its own.
    pub(crate) namespaces: usize,
    /// Microseconds that every device takes.
    pub(crate) latency_us: u64,
    pub(crate) arena_bytes: usize,
    pub(crate) reactors: usize,
}

impl Default for Parts {
    fn default() -> Self {
        Parts {
            transport: TransportConfig::default(),
            namespaces: 1,
            latency_us: 0,
            arena_bytes: 256 << 20,
            reactors: 2,
        }
    }
}

pub(crate) struct Rig {
    pub(crate) registry: Registry,
    pub(crate) target: Target,
    pub(crate) address: ListenAddress,
    pub(crate) arena: Arc<Arena>,
    reactors: Option<Reactors>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.target.shutdown();
        drop(self.reactors.take());
    }
}

impl Rig {
    pub(crate) fn new(parts: Parts) -> Rig {
        let arena =
            Arena::new(memory::Config { limit_bytes: parts.arena_bytes, ..memory::Config::default() });
        let mut cpus = sys::CpuSet::allowed().cpus().to_vec();
        cpus.truncate(parts.reactors);
        let config = Config {
            cpus: sys::CpuSet::new(cpus).unwrap(),
            pin: false,
            idle: IdlePolicy::Sleep,
            arena: arena.clone(),
            ..Config::default()
        };
        let registry = Registry::new();
        let reactors = Reactors::start(&config).unwrap();
        let target = Target::new(registry.clone(), reactors.remotes());
        target.create_transport(parts.transport).unwrap();
        let any = SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() };
        target.create_subsystem(NQN, any).unwrap();
        for n in 1..=parts.namespaces {
            bdev::malloc::create(&registry, MallocConfig::new(&format!("Malloc{n}"), BLOCKS, 512)).unwrap();
            let mut name = format!("Malloc{n}");
            if parts.latency_us > 0 {
                let base = std::mem::replace(&mut name, format!("Slow{n}"));
                bdev::delay::create(&registry, DelayConfig::new(&base, &name, parts.latency_us)).unwrap();
            }
            target.add_namespace(NQN, NamespaceConfig::new(&name)).unwrap();
        }
        let address = target.add_listener(NQN, ListenAddress::tcp("127.0.0.1", "0")).unwrap();
        Rig { registry, target, address, arena, reactors: Some(reactors) }
    }

    pub(crate) fn with_transport(transport: TransportConfig) -> Rig {
        Rig::new(Parts { transport, ..Parts::default() })
    }

    pub(crate) fn uri(&self) -> nvme::Uri {
        format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", self.address.trsvcid).parse().unwrap()
    }
}

/// Waits until `condition` holds, for ten seconds at most.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed().as_secs() < 10, "{what}: not within ten seconds");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
