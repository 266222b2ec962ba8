//! A target on real reactors, reached over the loopback interface.

use std::sync::Arc;

use bdev::Registry;
use bdev::delay::DelayConfig;
use bdev::malloc::MallocConfig;
use dma::Arena;
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, TcpTransportConfig};
use reactor::{IdlePolicy, ReactorConfig, Reactors};

pub(crate) const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
/// Blocks of every device, of 512 bytes each.
pub(crate) const BLOCKS: u64 = 16384;

/// Options of a test target.
pub(crate) struct TestTargetConfig {
    pub(crate) transport: TcpTransportConfig,
    /// Number of namespaces, each on its own malloc device.
    pub(crate) namespaces: usize,
    /// Latency of every device in microseconds.
    pub(crate) latency_us: u64,
    pub(crate) arena_bytes: usize,
    pub(crate) reactors: usize,
    pub(crate) idle: IdlePolicy,
}

impl Default for TestTargetConfig {
    fn default() -> Self {
        TestTargetConfig {
            transport: TcpTransportConfig::default(),
            namespaces: 1,
            latency_us: 0,
            arena_bytes: 256 << 20,
            reactors: 2,
            idle: IdlePolicy::Sleep,
        }
    }
}

pub(crate) struct TcpTestTarget {
    pub(crate) registry: Registry,
    pub(crate) target: NvmfTarget,
    pub(crate) address: ListenAddress,
    pub(crate) arena: Arc<Arena>,
    pub(crate) reactors: Option<Reactors>,
}

impl Drop for TcpTestTarget {
    fn drop(&mut self) {
        self.target.shutdown();
        drop(self.reactors.take());
    }
}

impl TcpTestTarget {
    pub(crate) fn new(parts: TestTargetConfig) -> TcpTestTarget {
        let arena =
            Arena::new(dma::ArenaConfig { limit_bytes: parts.arena_bytes, ..dma::ArenaConfig::default() });
        let mut cpus = os::CpuSet::allowed().cpus().to_vec();
        cpus.truncate(parts.reactors);
        let config = ReactorConfig {
            cpus: os::CpuSet::new(cpus).unwrap(),
            pin: false,
            idle: parts.idle,
            arena: arena.clone(),
            ..ReactorConfig::default()
        };
        let registry = Registry::new();
        let reactors = Reactors::start(&config).unwrap();
        let target = NvmfTarget::new(registry.clone(), reactors.handles());
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
        TcpTestTarget { registry, target, address, arena, reactors: Some(reactors) }
    }

    pub(crate) fn with_transport(transport: TcpTransportConfig) -> TcpTestTarget {
        TcpTestTarget::new(TestTargetConfig { transport, ..TestTargetConfig::default() })
    }

    pub(crate) fn uri(&self) -> nvme::Uri {
        self.uri_text().parse().unwrap()
    }

    pub(crate) fn uri_text(&self) -> String {
        format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", self.address.trsvcid)
    }
}

/// Waits until `condition` holds; panics after a minute.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed().as_secs() < 60, "{what}: not within a minute");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
