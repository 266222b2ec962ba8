//! Hot plug of controllers of our own target, over vfio-user: a bus of directories stands for that of the
//! machine.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bdev::{Access, AsyncChannel, Registry};
use bdev_nvme::{Attach, Hotplug, HotplugBus, HotplugFunction, Initiator, PathConfig, TransportId};
use nvme::Uri;
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, VfioUserConfig};
use reactor::{ReactorConfig, Reactors};

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const PERIOD: Duration = Duration::from_millis(10);

/// Controllers that the test inserts and removes.
struct TestBus {
    present: Arc<Mutex<Vec<HotplugFunction>>>,
    changes: Receiver<()>,
}

impl HotplugBus for TestBus {
    fn functions(&mut self) -> io::Result<Option<Vec<HotplugFunction>>> {
        Ok(Some(self.present.lock().unwrap().clone()))
    }

    fn has(&self, id: &TransportId) -> bool {
        matches!(id.0, Uri::VfioUser(_))
    }

    fn wait(&mut self, _: BorrowedFd<'_>, timeout: Duration) {
        match self.changes.recv_timeout(timeout.min(Duration::from_secs(1))) {
            Ok(()) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }
}

struct HotplugRig {
    directory: PathBuf,
    target: NvmfTarget,
    target_reactors: Reactors,
    reactors: Reactors,
    registry: Registry,
    initiator: Initiator,
    present: Arc<Mutex<Vec<HotplugFunction>>>,
    changed: Sender<()>,
    changes: Option<Receiver<()>>,
}

impl HotplugRig {
    fn new(name: &str) -> HotplugRig {
        let directory = std::env::temp_dir().join(format!("ringbolt-hotplug-{name}-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let medium = Registry::new();
        let target_reactors = Reactors::start(&ReactorConfig::default()).unwrap();
        bdev::malloc::create(&medium, bdev::malloc::MallocConfig::new("Malloc0", 16384, 512)).unwrap();
        let target = NvmfTarget::new(medium, target_reactors.handles());
        target.create_vfio_user(VfioUserConfig::default()).unwrap();
        let open = SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() };
        target.create_subsystem(NQN, open).unwrap();
        target.add_namespace(NQN, NamespaceConfig::new("Malloc0")).unwrap();
        let arena = dma::Arena::new(dma::ArenaConfig { shared: true, ..dma::ArenaConfig::default() });
        let reactors = Reactors::start(&ReactorConfig { arena, ..ReactorConfig::default() }).unwrap();
        let registry = Registry::new();
        let initiator = Initiator::new(registry.clone(), reactors.handles());
        let (changed, changes) = channel();
        HotplugRig {
            directory,
            target,
            target_reactors,
            reactors,
            registry,
            initiator,
            present: Arc::default(),
            changed,
            changes: Some(changes),
        }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn id(socket: &Path) -> TransportId {
        TransportId(format!("nvme+vfio-user:{}", socket.display()).parse().unwrap())
    }

    /// Makes the bus have the controllers of these sockets; the first may be attached, the others may not.
    fn set_present(&self, ours: &[&str], others: &[&str]) {
        let function =
            |is_ours| move |name: &&str| HotplugFunction { id: Self::id(&self.socket(name)), is_ours };
        let all = ours.iter().map(function(true)).chain(others.iter().map(function(false)));
        *self.present.lock().unwrap() = all.collect();
        _ = self.changed.send(());
    }

    fn listen(&self, name: &str) -> ListenAddress {
        let directory = self.socket(name);
        std::fs::create_dir_all(&directory).unwrap();
        let address = ListenAddress::vfio_user(directory.to_str().unwrap());
        self.target.add_listener(NQN, address.clone()).unwrap();
        address
    }

    fn enable(&mut self, hotplug: &Hotplug) {
        let (present, changes) = (self.present.clone(), self.changes.take());
        let open_bus = || Ok(TestBus { present, changes: changes.unwrap() });
        let attach = |name: &str, id| Attach::new(name, PathConfig::new(id));
        hotplug.set(Some(PERIOD), open_bus, Box::new(attach)).unwrap();
    }

    /// Waits until these are the bdevs.
    fn expect(&self, bdevs: &[&str]) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let mut names: Vec<String> =
                self.registry.list().iter().map(|device| device.name().to_string()).collect();
            names.sort();
            if names == bdevs {
                return;
            }
            assert!(Instant::now() < end, "{names:?}, not {bdevs:?}: {:?}", self.initiator.controllers());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn expect_no_controllers(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        while !self.initiator.controllers().is_empty() {
            assert!(Instant::now() < end, "{:?}", self.initiator.controllers());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(self, hotplug: Hotplug) {
        hotplug.stop();
        self.initiator.shutdown();
        drop(self.reactors);
        self.target.shutdown();
        drop(self.target_reactors);
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}

#[test]
fn a_controller_that_is_inserted_is_attached_and_its_removal_ends_io() {
    let mut rig = HotplugRig::new("insert");
    let hotplug = Hotplug::new(rig.initiator.clone());
    rig.enable(&hotplug);
    rig.expect(&[]);
    let address = rig.listen("one");
    // Not while the driver of the kernel has it.
    rig.set_present(&[], &["one"]);
    rig.expect(&[]);
    rig.set_present(&["one"], &[]);
    rig.expect(&["HotInNvme0n1"]);

    // Removal under load: each request ends, and the bdev goes.
    let descriptor = rig.registry.open("HotInNvme0n1", Access::ReadWrite).unwrap();
    let (began, has_begun) = channel();
    let (sender, outcome) = channel();
    let work = move |core: &reactor::Core| {
        let (core, io) = (core.clone(), AsyncChannel::new(core, descriptor.channel(core).unwrap()));
        core.clone().spawn(async move {
            let mut reads = 0u64;
            loop {
                let buffer = core.pool().take(4096).unwrap();
                if io.read(reads % 1000, buffer).await.is_err() {
                    break;
                }
                reads += 1;
                if reads == 100 {
                    began.send(()).unwrap();
                }
            }
            drop(io);
            drop(descriptor);
            let _ = sender.send(reads);
        });
    };
    rig.reactors.handles()[0].post(work).unwrap();
    has_begun.recv_timeout(Duration::from_secs(30)).unwrap();
    rig.set_present(&[], &[]);
    assert!(outcome.recv_timeout(Duration::from_secs(60)).unwrap() >= 100);
    rig.expect(&[]);
    rig.expect_no_controllers();

    // What is inserted in its place is another one, with another name.
    rig.set_present(&["one"], &[]);
    rig.expect(&["HotInNvme1n1"]);
    // Its driver notices that it is gone, before it is missing from the bus.
    rig.target.remove_listener(NQN, address).unwrap();
    rig.expect(&[]);
    rig.expect_no_controllers();
    rig.end(hotplug);
}

#[test]
fn attempts_are_repeated_and_a_disabled_hotplug_leaves_all_as_it_is() {
    let mut rig = HotplugRig::new("retry");
    let hotplug = Hotplug::new(rig.initiator.clone());
    // Nothing listens yet: it cannot be attached.
    rig.set_present(&["late"], &[]);
    rig.enable(&hotplug);
    rig.expect(&[]);
    rig.listen("late");
    rig.expect(&["HotInNvme0n1"]);
    let off = || -> io::Result<TestBus> { unreachable!("it has a bus") };
    hotplug.set(None, off, Box::new(|_, _| unreachable!("it has a function"))).unwrap();
    // The first look after this change is that of the thread that is enabled again.
    rig.set_present(&[], &[]);
    rig.expect(&["HotInNvme0n1"]);
    hotplug.set(Some(PERIOD), off, Box::new(|_, _| unreachable!("it has a function"))).unwrap();
    rig.expect(&[]);
    rig.end(hotplug);
}
