//! The initiator against our own target, over vfio-user.
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::{Duration, Instant};

use bdev::{Access, AsyncChannel, Registry};
use bdev_nvme::{Attach, ControllerOperation, Initiator, PathConfig, PathStatus, TransportId};
use block_io::Status;
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, VfioUserConfig};
use reactor::{ReactorConfig, Reactors};

mod passthrough;
use passthrough::check_passthrough;

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";

#[test]
fn a_namespace_over_vfio_user_is_a_bdev_until_the_server_ends() {
    let directory = std::env::temp_dir().join(format!("ringbolt-bdev-nvme-{}", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    let medium = Registry::new();
    bdev::malloc::create(&medium, bdev::malloc::MallocConfig::new("Malloc0", 16384, 512)).unwrap();
    let target_reactors = Reactors::start(&ReactorConfig::default()).unwrap();
    let target = NvmfTarget::new(medium.clone(), target_reactors.handles());
    target.create_vfio_user(VfioUserConfig::default()).unwrap();
    target
        .create_subsystem(NQN, SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() })
        .unwrap();
    target.add_namespace(NQN, NamespaceConfig::new("Malloc0")).unwrap();
    let address = ListenAddress::vfio_user(directory.to_str().unwrap());
    target.add_listener(NQN, address.clone()).unwrap();

    // The target maps the initiator's buffers: they must be in shared memory.
    let arena = dma::Arena::new(dma::ArenaConfig { shared: true, ..dma::ArenaConfig::default() });
    let reactors = Reactors::start(&ReactorConfig { arena, ..ReactorConfig::default() }).unwrap();
    let registry = Registry::new();
    let initiator = Initiator::new(registry.clone(), reactors.handles());
    let uri = format!("nvme+vfio-user:{}", directory.display()).parse().unwrap();
    let names = initiator.attach(Attach::new("Vm0", PathConfig::new(TransportId(uri)))).unwrap();
    assert_eq!(names, ["Vm0n1"]);
    let descriptor = registry.open("Vm0n1", Access::ReadWrite).unwrap();
    assert_eq!(descriptor.device().geometry().blocks, 16384);
    let (sender, outcome) = std::sync::mpsc::sync_channel(1);
    let work = move |core: &reactor::Core| {
        let (core, io) = (core.clone(), AsyncChannel::new(core, descriptor.channel(core).unwrap()));
        core.clone().spawn(async move {
            let outcome = async {
                // Longer than the maximum transfer of a command.
                let mut buffer = core.pool().take(1 << 20).unwrap();
                for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
                    *byte = (at / 4096 + at) as u8;
                }
                let expected = buffer.as_slice().to_vec();
                io.write(3, buffer).await.map_err(|(status, _)| status)?;
                io.flush().await?;
                let mut buffer = core.pool().take(1 << 20).unwrap();
                buffer.clear();
                let buffer = io.read(3, buffer).await.map_err(|(status, _)| status)?;
                Ok::<bool, Status>(buffer.as_slice() == expected)
            };
            let result = outcome.await;
            drop(descriptor);
            let _ = sender.send(result);
        });
    };
    reactors.handles()[0].post(work).unwrap();
    assert_eq!(outcome.recv_timeout(Duration::from_secs(30)).unwrap(), Ok(true));
    initiator.reset("Vm0").unwrap();
    let job = control::JobHandle::standalone();
    check_passthrough(&initiator, "Vm0");
    initiator.operate("Vm0", None, ControllerOperation::Disable, &job).unwrap();
    assert_eq!(initiator.controllers()[0].paths[0].status, PathStatus::Disabled);
    initiator.operate("Vm0", None, ControllerOperation::Enable, &job).unwrap();
    check_passthrough(&initiator, "Vm0");
    let stats = initiator.transport_stats();
    let [of_core] = stats[..] else { panic!("{stats:?}") };
    let counts = of_core.counts;
    assert_eq!(of_core.trtype, "VFIOUSER");
    assert!(counts.submitted >= 3 && counts.completed == counts.submitted, "{counts:?}");
    assert!(counts.sq_doorbells + counts.sq_shadows > 0 && counts.cq_doorbells + counts.cq_shadows > 0);

    // Another namespace in its place is another device.
    let second =
        bdev::malloc::create(&medium, bdev::malloc::MallocConfig::new("Malloc1", 8192, 512)).unwrap();
    let before = registry.find("Vm0n1").unwrap();
    target.remove_namespace(NQN, 1).unwrap();
    let config = NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new("Malloc1") };
    target.add_namespace(NQN, config).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while registry.find("Vm0n1").is_none_or(|device| device.uuid() != second.uuid()) {
        assert!(Instant::now() < end, "the device was not replaced");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(before.is_removed());
    let descriptor = registry.open("Vm0n1", Access::ReadWrite).unwrap();
    assert_eq!(descriptor.device().geometry().blocks, 8192);
    let (sender, outcome) = std::sync::mpsc::sync_channel(1);
    let read = move |core: &reactor::Core| {
        let (core, io) = (core.clone(), AsyncChannel::new(core, descriptor.channel(core).unwrap()));
        core.clone().spawn(async move {
            let buffer = core.pool().take(4096).unwrap();
            let result = io.read(0, buffer).await.map(drop).map_err(|(status, _)| status);
            drop(descriptor);
            let _ = sender.send(result);
        });
    };
    reactors.handles()[0].post(read).unwrap();
    assert_eq!(outcome.recv_timeout(Duration::from_secs(30)).unwrap(), Ok(()));

    // The server ends: after one reconnection attempt the device is removed.
    target.remove_listener(NQN, address).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while registry.find("Vm0n1").is_some() {
        assert!(Instant::now() < end, "the device was not removed: {:?}", initiator.controllers());
        std::thread::sleep(Duration::from_millis(10));
    }
    initiator.shutdown();
    drop(reactors);
    target.shutdown();
    drop(target_reactors);
    std::fs::remove_dir_all(&directory).unwrap();
}
