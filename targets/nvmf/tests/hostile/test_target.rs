//! A target on real reactors, reached over the loopback interface.

use std::sync::Arc;

use bdev::Registry;
use bdev::delay::DelayConfig;
use bdev::malloc::MallocConfig;
use bdev::rpc::BdevModule;
use control::json::{Value, json};
use control::{ControlPlane, Keyring};
use dma::Arena;
use nvmf::rpc::NvmfModule;
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
    /// The RPC methods with which it was configured, if it was.
    pub(crate) methods: Option<Arc<ControlPlane>>,
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
        TcpTestTarget { registry, target, address, arena, methods: None, reactors: Some(reactors) }
    }

    /// A target that is configured by these calls of RPC methods, with namespace 1 of a subsystem that allows
    /// every host; the call that creates the subsystem has these parameters besides.
    pub(crate) fn configured(calls: &[(&str, Value)], of_subsystem: Value) -> TcpTestTarget {
        let mut cpus = os::CpuSet::allowed().cpus().to_vec();
        cpus.truncate(2);
        let cpus = os::CpuSet::new(cpus).unwrap();
        let config = ReactorConfig { cpus, pin: false, idle: IdlePolicy::Sleep, ..ReactorConfig::default() };
        let arena = config.arena.clone();
        let reactors = Reactors::start(&config).unwrap();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(Registry::new(), builder.examiner());
        let registry = bdevs.registry().clone();
        let module = NvmfModule::new(registry.clone(), reactors.handles(), Keyring::default());
        let methods = builder.module(&module).module(&bdevs).start(None).unwrap();
        let invoke = |method: &str, params: Value| {
            methods.invoke(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
        };
        for (method, params) in calls {
            invoke(method, params.clone());
        }
        if calls.iter().all(|(method, _)| *method != "nvmf_create_transport") {
            invoke("nvmf_create_transport", json!({ "trtype": "TCP" }));
        }
        let mut subsystem = json!({ "nqn": NQN, "allow_any_host": true });
        subsystem.as_object_mut().unwrap().extend(of_subsystem.as_object().unwrap().clone());
        invoke("nvmf_create_subsystem", subsystem);
        invoke("bdev_malloc_create", json!({ "name": "M", "num_blocks": BLOCKS, "block_size": 512 }));
        invoke("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": "M" } }));
        let target = module.target().clone();
        let address = target.add_listener(NQN, ListenAddress::tcp("127.0.0.1", "0")).unwrap();
        let (methods, reactors) = (Some(methods), Some(reactors));
        TcpTestTarget { registry, target, address, arena, methods, reactors }
    }

    /// Calls an RPC method.
    pub(crate) fn invoke(&self, method: &str, params: Value) -> Value {
        let methods = self.methods.as_ref().expect("it was configured by methods");
        methods.invoke(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
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
