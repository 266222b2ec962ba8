//! A target and an initiator, each on its own reactors, and a load that verifies what it reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bdev::{Access, AsyncChannel, Registry};
use bdev_nvme::{Attach, Initiator, PathConfig, ReconnectPolicy, TransportId};
use block_io::Status;
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, TcpTransportConfig};
use reactor::{IdlePolicy, ReactorConfig, Reactors};
use wire_nvme::log::AnaState;

pub(crate) const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
pub(crate) const SECOND: u64 = 1_000_000_000;

pub(crate) fn reactors() -> Reactors {
    Reactors::start(&ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() }).unwrap()
}

/// A target on its own reactors; its block devices outlive it.
pub(crate) struct TargetSide {
    pub(crate) target: NvmfTarget,
    pub(crate) addresses: Vec<ListenAddress>,
    pub(crate) reactors: Option<Reactors>,
}

impl TargetSide {
    pub(crate) fn start(registry: &Registry, ports: &[String]) -> TargetSide {
        TargetSide::exporting(registry, "Malloc0", ports)
    }

    /// With the protection information of the medium hidden.
    pub(crate) fn hiding(registry: &Registry, ports: &[String]) -> TargetSide {
        TargetSide::with_namespace(registry, TargetSide::hidden("Malloc0"), ports)
    }

    pub(crate) fn hidden(device: &str) -> NamespaceConfig {
        NamespaceConfig { hide_metadata: true, ..NamespaceConfig::new(device) }
    }

    pub(crate) fn exporting(registry: &Registry, device: &str, ports: &[String]) -> TargetSide {
        TargetSide::with_namespace(registry, NamespaceConfig::new(device), ports)
    }

    pub(crate) fn with_namespace(
        registry: &Registry,
        namespace: NamespaceConfig,
        ports: &[String],
    ) -> TargetSide {
        let reactors = reactors();
        let target = NvmfTarget::new(registry.clone(), reactors.handles());
        target.create_transport(TcpTransportConfig::default()).unwrap();
        let any = SubsystemConfig { allow_any_host: true, ana_reporting: true, ..SubsystemConfig::default() };
        target.create_subsystem(NQN, any).unwrap();
        target.add_namespace(NQN, namespace).unwrap();
        let listen = |port: &String| target.add_listener(NQN, ListenAddress::tcp("127.0.0.1", port)).unwrap();
        let addresses = ports.iter().map(listen).collect();
        TargetSide { target, addresses, reactors: Some(reactors) }
    }

    pub(crate) fn ports(&self) -> Vec<String> {
        self.addresses.iter().map(|address| address.trsvcid.clone()).collect()
    }

    pub(crate) fn set(&self, path: usize, state: AnaState) {
        self.target.set_ana_state(NQN, self.addresses[path].clone(), None, state).unwrap();
    }
}

impl Drop for TargetSide {
    fn drop(&mut self) {
        for address in self.addresses.drain(..) {
            let _ = self.target.remove_listener(NQN, address);
        }
        let _ = self.target.delete_subsystem(NQN);
        self.target.shutdown();
        drop(self.reactors.take());
    }
}

pub(crate) fn medium() -> Registry {
    let registry = Registry::new();
    bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", 32768, 512)).unwrap();
    registry
}

/// The initiator on its own reactor.
pub(crate) struct HostSide {
    pub(crate) initiator: Initiator,
    pub(crate) registry: Registry,
    reactors: Option<Reactors>,
}

impl HostSide {
    pub(crate) fn start() -> HostSide {
        let registry = Registry::new();
        let reactors = reactors();
        let initiator = Initiator::new(registry.clone(), reactors.handles());
        HostSide { initiator, registry, reactors: Some(reactors) }
    }

    pub(crate) fn path(port: &str) -> PathConfig {
        let uri = format!("nvme+tcp://127.0.0.1:{port}/{NQN}").parse().unwrap();
        let mut path = PathConfig::new(TransportId(uri));
        path.reconnect =
            ReconnectPolicy { loss_timeout_ns: Some(60 * SECOND), delay_ns: SECOND / 10, fast_fail_ns: None };
        path.options.keep_alive_ms = 2000;
        path
    }

    pub(crate) fn attach(&self, port: &str) -> Vec<String> {
        self.initiator.attach(Attach::new("Nvme0", HostSide::path(port))).unwrap()
    }

    /// Runs a job with the device on the reactor; the receiver gets its result.
    pub(crate) fn with_io<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        job: impl FnOnce(reactor::Core, AsyncChannel) -> F + Send + 'static,
    ) -> std::sync::mpsc::Receiver<R> {
        self.with_device(&self.registry, "Nvme0n1", Access::ReadWrite, job)
    }

    /// As [`with_io`](Self::with_io), with a device of any registry.
    pub(crate) fn with_device<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        registry: &Registry,
        name: &str,
        access: Access<'_>,
        job: impl FnOnce(reactor::Core, AsyncChannel) -> F + Send + 'static,
    ) -> std::sync::mpsc::Receiver<R> {
        let descriptor = registry.open(name, access).unwrap();
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let post = move |core: &reactor::Core| {
            let io = AsyncChannel::new(core, descriptor.channel(core).unwrap());
            let (job, core) = (job(core.clone(), io), core.clone());
            core.clone().spawn(async move {
                let _core = core;
                let result = job.await;
                drop(descriptor);
                let _ = sender.send(result);
            });
        };
        self.reactors.as_ref().unwrap().handles()[0].post(post).unwrap();
        receiver
    }

    pub(crate) fn current_port(&self) -> Option<String> {
        let paths = self.initiator.io_paths(Some("Nvme0n1"));
        let current = paths.into_iter().find(|path| path.current && path.connected)?;
        current.path.config.id.service().map(|(_, port)| port)
    }
}

impl Drop for HostSide {
    fn drop(&mut self) {
        self.initiator.shutdown();
        drop(self.reactors.take());
    }
}

pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A verifying load: each step writes the step number to one range and verifies another. Runs until `stop` is
/// set; returns the number of steps, or the step that failed and its status.
pub(crate) async fn load(
    core: reactor::Core,
    io: AsyncChannel,
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
) -> Result<u64, (u64, Status)> {
    let mut written = [0u64; 64];
    let mut step = 0u64;
    while !stop.load(Ordering::Relaxed) || step < 100 {
        step += 1;
        let place = (step * 37 % 64) as usize;
        let mut buffer = core.pool().take(4096).unwrap();
        buffer
            .as_mut_slice()
            .chunks_exact_mut(8)
            .for_each(|chunk| chunk.copy_from_slice(&step.to_le_bytes()));
        io.write(place as u64 * 8, buffer).await.map_err(|(status, _)| (step, status))?;
        written[place] = step;
        let other = (step * 11 % 64) as usize;
        let mut buffer = core.pool().take(4096).unwrap();
        buffer.clear();
        let buffer = io.read(other as u64 * 8, buffer).await.map_err(|(status, _)| (step, status))?;
        let expected = written[other].to_le_bytes();
        assert!(
            buffer.as_slice().chunks_exact(8).all(|chunk| chunk == expected),
            "step {step}: block run {other}"
        );
        steps.fetch_add(1, Ordering::Relaxed);
    }
    Ok(step)
}

pub(crate) type LoadResult = std::sync::mpsc::Receiver<Result<u64, (u64, Status)>>;

pub(crate) fn under_load(host: &HostSide) -> (Arc<AtomicBool>, Arc<AtomicU64>, LoadResult) {
    let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (task_stop, task_steps) = (stop.clone(), steps.clone());
    let outcome = host.with_io(move |core, io| load(core, io, task_stop, task_steps));
    (stop, steps, outcome)
}

pub(crate) fn finish(stop: &AtomicBool, outcome: &LoadResult) -> u64 {
    stop.store(true, Ordering::Relaxed);
    outcome.recv_timeout(Duration::from_secs(60)).unwrap().unwrap()
}

/// Waits until the load has made progress.
pub(crate) fn wait_for_progress(steps: &AtomicU64) {
    let before = steps.load(Ordering::Relaxed);
    wait_for("progress", || steps.load(Ordering::Relaxed) > before + 20);
}
