//! The target and Ringbolt's own initiator, over the loopback interface.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use bdev::Registry;
use block_io::{Channel, Completion, Op, Request, RequestFlags, Status, Tag};
use dma::{Buffer, Data};
use nvmf::{
    ListenAddress, NamespaceConfig, NvmfTarget, NvmfTargetError, SubsystemConfig, TcpTransportConfig,
};
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig, Reactors};

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";

struct LoopbackTarget {
    registry: Registry,
    target: NvmfTarget,
    address: ListenAddress,
    reactors: Option<Reactors>,
}

impl Drop for LoopbackTarget {
    fn drop(&mut self) {
        self.target.shutdown();
        drop(self.reactors.take());
    }
}

fn rig(transport: TcpTransportConfig) -> LoopbackTarget {
    let registry = Registry::new();
    bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", 16384, 512)).unwrap();
    let config = ReactorConfig {
        cpus: os::CpuSet::allowed(),
        pin: false,
        idle: IdlePolicy::Sleep,
        ..ReactorConfig::default()
    };
    let reactors = Reactors::start(&config).unwrap();
    let target = NvmfTarget::new(registry.clone(), reactors.handles());
    target.create_transport(transport).unwrap();
    let any = SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() };
    target.create_subsystem(NQN, any).unwrap();
    target.add_namespace(NQN, NamespaceConfig::new("Malloc0")).unwrap();
    let address = target.add_listener(NQN, ListenAddress::tcp("127.0.0.1", "0")).unwrap();
    LoopbackTarget { registry, target, address, reactors: Some(reactors) }
}

impl LoopbackTarget {
    fn uri(&self, options: &str) -> nvme::Uri {
        format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1{options}", self.address.trsvcid).parse().unwrap()
    }
}

fn on_host<R: 'static, F: Future<Output = R> + 'static>(job: impl FnOnce(Core) -> F) -> R {
    let reactor =
        Reactor::new(&ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() }).unwrap();
    let core = reactor.core();
    reactor.block_on(job(core))
}

/// Submits all requests and waits for all completions.
async fn run(
    core: &Core,
    namespace: &mut nvme::Namespace,
    requests: Vec<Request<Data>>,
) -> Vec<Completion<Data>> {
    let (mut batch, count, mut done) = (requests, 0, Vec::new());
    let total = batch.len() + count;
    while done.len() < total {
        namespace.submit(&mut batch);
        if namespace.poll(&mut done) == 0 && namespace.deadline() != Some(0) {
            core.next_event().await;
        }
    }
    done.sort_by_key(Completion::tag);
    done
}

fn patterned_buffer(core: &Core, bytes: usize, seed: u64) -> Buffer {
    let mut buffer = core.pool().take(bytes).unwrap();
    for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
        *byte = (at as u64 * 7 + seed * 13) as u8;
    }
    buffer
}

#[test]
fn written_data_is_read_back_with_and_without_digests() {
    for (transport, options) in [
        (TcpTransportConfig::default(), ""),
        (TcpTransportConfig::default(), "&hdgst=1"),
        (TcpTransportConfig::default(), "&ddgst=1"),
        (TcpTransportConfig::default(), "&hdgst=1&ddgst=1"),
        (TcpTransportConfig { in_capsule_data_size: 0, ..TcpTransportConfig::default() }, "&hdgst=1&ddgst=1"),
        (TcpTransportConfig { max_io_size: 8192, c2h_success: false, ..TcpTransportConfig::default() }, ""),
        (TcpTransportConfig { connection_bytes_max: 1, ..TcpTransportConfig::default() }, ""),
    ] {
        let rig = rig(transport.clone());
        let uri = rig.uri(options);
        on_host(|core| async move {
            let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await.unwrap();
            assert_eq!((namespace.block_size(), namespace.blocks()), (512, 16384));
            let size = namespace.transfer_max_bytes() as usize;
            for bytes in [512, 4096, 8192, 16384, size] {
                let bytes = bytes.min(size);
                let blocks = (bytes / 512) as u32;
                let count = (16384 / blocks).min(300);
                let writes = (0..count).map(|n| {
                    let buffer = patterned_buffer(&core, bytes, n.into());
                    Request::write(Tag(n.into()), u64::from(n * blocks), blocks, buffer)
                });
                let done = run(&core, &mut namespace, writes.collect()).await;
                assert!(
                    done.iter().all(|done| done.status().is_success()),
                    "{bytes} bytes: {:?}",
                    namespace.failure()
                );
                let reads = (0..count).map(|n| {
                    let buffer = core.pool().take(bytes).unwrap();
                    Request::read(Tag(n.into()), u64::from(n * blocks), blocks, buffer)
                });
                for done in run(&core, &mut namespace, reads.collect()).await {
                    assert_eq!(done.status(), Status::SUCCESS);
                    let n = done.tag().0;
                    let read = done.into_request().take_data().unwrap().into_single().unwrap();
                    assert_eq!(
                        read.as_slice(),
                        patterned_buffer(&core, bytes, n).as_slice(),
                        "{bytes} bytes at {n}"
                    );
                }
            }
        });
    }
}

#[test]
fn operations_and_errors_map_to_nvme_statuses() {
    let rig = rig(TcpTransportConfig::default());
    let uri = rig.uri("");
    on_host(|core| async move {
        let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await.unwrap();
        let write = Request {
            flags: RequestFlags::FUA,
            ..Request::write(Tag(0), 8, 8, patterned_buffer(&core, 4096, 1))
        };
        let beyond = Request::read(Tag(1), 16384, 1, core.pool().take(512).unwrap());
        let across = Request::read(Tag(2), 16383, 2, core.pool().take(1024).unwrap());
        let flush = Request::new(Tag(3), Op::Flush, 0, 0);
        let reset = Request::new(Tag(4), Op::Reset, 0, 0);
        let short = Request::read(Tag(5), 0, 8, core.pool().take(512).unwrap());
        let statuses: Vec<Status> =
            run(&core, &mut namespace, vec![write, beyond, across, flush, reset, short])
                .await
                .iter()
                .map(Completion::status)
                .collect();
        let expected = [
            Status::SUCCESS,
            Status::LBA_OUT_OF_RANGE,
            Status::LBA_OUT_OF_RANGE,
            Status::SUCCESS,
            Status::INVALID_OPCODE,
            Status::INVALID_FIELD,
        ];
        for (status, expected) in statuses.iter().zip(expected) {
            assert!(status.same_code(expected), "{statuses:?}");
        }
        let unmap = Request::new(Tag(0), Op::Unmap, 8, 4);
        let zeroes = Request::new(Tag(1), Op::WriteZeroes, 12, 2);
        assert!(
            run(&core, &mut namespace, vec![unmap, zeroes])
                .await
                .iter()
                .all(|done| done.status().is_success())
        );
        let read = Request::read(Tag(0), 8, 8, core.pool().take(4096).unwrap());
        let done = run(&core, &mut namespace, vec![read]).await.pop().unwrap();
        let read = done.into_request().take_data().unwrap().into_single().unwrap();
        assert!(read.as_slice()[..6 * 512].iter().all(|byte| *byte == 0));
        assert_eq!(read.as_slice()[6 * 512..], patterned_buffer(&core, 4096, 1).as_slice()[6 * 512..]);
    });
}

#[test]
fn a_removed_namespace_fails_io_and_the_connection_stays() {
    let rig = rig(TcpTransportConfig::default());
    let (uri, target, registry) = (rig.uri(""), rig.target.clone(), rig.registry.clone());
    on_host(|core| async move {
        let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await.unwrap();
        registry.unregister("Malloc0").unwrap();
        let read = |core: &Core| Request::read(Tag(0), 0, 1, core.pool().take(512).unwrap());
        let done = run(&core, &mut namespace, vec![read(&core)]).await;
        assert!(done[0].status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT), "{done:?}");
        assert_eq!(namespace.failure(), None);
        bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc1", 2048, 512)).unwrap();
        assert_eq!(target.add_namespace(NQN, NamespaceConfig::new("Malloc1")).unwrap(), 1);
        // It has the number of the other one, and this host has not identified it.
        let done = run(&core, &mut namespace, vec![read(&core)]).await;
        assert!(done[0].status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT), "{done:?}");
        target.delete_subsystem(NQN).unwrap();
        let done = run(&core, &mut namespace, vec![read(&core)]).await;
        assert!(done[0].status().same_code(Status::HOST_PATHING_ERROR), "{done:?}");
    });
}

#[test]
fn hosts_that_are_not_allowed_fail_connect() {
    let rig = rig(TcpTransportConfig::default());
    rig.target.allow_any_host(NQN, false).unwrap();
    let open = |uri: nvme::Uri, host: &str| {
        let hostnqn = Some(host.parse().unwrap());
        on_host(|core| async move {
            let options = nvme::Options { hostnqn, ..nvme::Options::default() };
            nvme::Namespace::open(&core, &uri, &options).await.map(|_| ())
        })
    };
    let host = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11";
    let error = open(rig.uri(""), host).unwrap_err();
    assert!(
        matches!(error, nvme::NvmeOpenError::ConnectRejected(status) if status.0.same_code(Status::CONNECT_INVALID_HOST)),
        "{error}"
    );
    assert!(error.to_string().starts_with("Connect failed: Connect Invalid Host (01/84)"), "{error}");
    rig.target.add_host(NQN, host).unwrap();
    open(rig.uri(""), host).unwrap();
    assert!(matches!(rig.target.add_host(NQN, host), Err(NvmfTargetError::HostExists(..))));
}

#[test]
fn a_namespace_serves_the_hosts_that_see_it_only() {
    const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11";
    let rig = rig(TcpTransportConfig::default());
    bdev::malloc::create(&rig.registry, bdev::malloc::MallocConfig::new("Malloc1", 2048, 512)).unwrap();
    let hidden = NamespaceConfig { no_auto_visible: true, ..NamespaceConfig::new("Malloc1") };
    assert_eq!(rig.target.add_namespace(NQN, hidden).unwrap(), 2);
    assert!(matches!(rig.target.add_namespace_host(NQN, 1, HOST), Err(NvmfTargetError::AlwaysVisible(_, 1))));
    let text = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=2", rig.address.trsvcid);
    let open = |core: Core, host: &'static str| {
        let uri: nvme::Uri = text.parse().unwrap();
        let hostnqn = Some(host.parse().unwrap());
        async move {
            let options = nvme::Options { hostnqn, ..nvme::Options::default() };
            nvme::Namespace::open(&core, &uri, &options).await
        }
    };
    assert!(on_host(|core| {
        let open = open(core, HOST);
        async move { open.await.is_err() }
    }));
    rig.target.add_namespace_host(NQN, 2, HOST).unwrap();
    let other = "nqn.2014-08.org.nvmexpress:uuid:00000000-0a52-4d5f-9d0b-7d3a1f7d2c11";
    assert!(on_host(|core| {
        let open = open(core, other);
        async move { open.await.is_err() }
    }));
    let target = rig.target.clone();
    on_host(|core| {
        let open = open(core.clone(), HOST);
        async move {
            let mut namespace = open.await.unwrap();
            let read = || Request::read(Tag(0), 0, 1, core.pool().take(512).unwrap());
            assert!(run(&core, &mut namespace, vec![read()]).await[0].status().is_success());
            target.remove_namespace_host(NQN, 2, HOST).unwrap();
            let done = run(&core, &mut namespace, vec![read()]).await;
            assert!(done[0].status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT), "{done:?}");
            target.add_namespace_host(NQN, 2, HOST).unwrap();
            assert!(run(&core, &mut namespace, vec![read()]).await[0].status().is_success());
        }
    });
}

#[test]
fn keep_alive_holds_a_connection_and_a_silent_host_is_disconnected() {
    let rig = rig(TcpTransportConfig::default());
    let (uri, target) = (rig.uri(""), rig.target.clone());
    on_host(|core| async move {
        let options = nvme::Options { keep_alive_ms: 1000, ..nvme::Options::default() };
        let mut namespace = nvme::Namespace::open(&core, &uri, &options).await.unwrap();
        let start = Instant::now();
        let mut done = Vec::new();
        while start.elapsed() < Duration::from_millis(2500) {
            namespace.poll(&mut done);
            core.sleep_ns(50_000_000).await;
        }
        assert_eq!((namespace.failure(), target.controllers(NQN).unwrap().len()), (None, 1));
        // The host is silent: its reactor is not polled.
        while !target.controllers(NQN).unwrap().is_empty() {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(50));
        }
        while namespace.failure().is_none() {
            namespace.poll(&mut done);
            core.sleep_ns(1_000_000).await;
        }
    });
}

#[test]
fn connections_are_distributed_over_reactors_and_reported() {
    let rig = rig(TcpTransportConfig::default());
    let (uri, target) = (rig.uri(""), rig.target.clone());
    on_host(|core| async move {
        let mut open = Vec::new();
        for n in 0..4 {
            let options = nvme::Options { host_id: [n; 16], ..nvme::Options::default() };
            open.push(nvme::Namespace::open(&core, &uri, &options).await.unwrap());
        }
        let qpairs = target.qpairs(NQN).unwrap();
        assert_eq!(qpairs.len(), 8);
        let groups = target.stats().unwrap().groups;
        assert!(groups.iter().all(|(admin, io, other)| admin + io + other == 8 / groups.len()), "{groups:?}");
        assert_eq!(target.controllers(NQN).unwrap().iter().map(|c| c.num_io_qpairs).sum::<usize>(), 4);
    });
    // What was connected stays counted; each I/O queue has completed at least its Connect.
    let sum = |of: fn(&nvmf::PollGroupTotals) -> u64| {
        rig.target.stats().unwrap().totals.iter().map(of).sum::<u64>()
    };
    assert_eq!((sum(|one| one.admin_queues), sum(|one| one.io_queues)), (4, 4));
    let before = sum(|one| one.completed_commands);
    assert!(before >= 4, "{before}");
    let uri = rig.uri("");
    on_host(|core| async move {
        let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await.unwrap();
        let read = |tag| Request::read(Tag(tag), tag, 1, core.pool().take(512).unwrap());
        let done = run(&core, &mut namespace, (0..100).map(read).collect()).await;
        assert!(done.iter().all(|done| done.status().is_success()));
    });
    assert_eq!((sum(|one| one.admin_queues), sum(|one| one.io_queues)), (5, 5));
    assert_eq!(sum(|one| one.completed_commands), before + 101, "Connect and the reads");
}

#[test]
fn configuration_errors_leave_the_configuration_unchanged() {
    let rig = rig(TcpTransportConfig::default());
    let target = &rig.target;
    assert!(matches!(
        target.create_transport(TcpTransportConfig::default()),
        Err(NvmfTargetError::TransportExists("TCP"))
    ));
    assert!(matches!(
        target.create_subsystem(NQN, SubsystemConfig::default()),
        Err(NvmfTargetError::SubsystemExists(_))
    ));
    assert!(matches!(target.create_subsystem("x", SubsystemConfig::default()), Err(NvmfTargetError::Nqn(_))));
    assert!(matches!(target.add_namespace(NQN, NamespaceConfig::new("none")), Err(NvmfTargetError::Bdev(_))));
    assert!(matches!(
        target.add_namespace(NQN, NamespaceConfig::new("Malloc0")),
        Err(NvmfTargetError::Bdev(_))
    ));
    let taken = NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new("Malloc0") };
    assert!(matches!(target.add_namespace(NQN, taken), Err(NvmfTargetError::Namespace(_, 1, _))));
    assert!(matches!(target.remove_namespace(NQN, 2), Err(NvmfTargetError::NoNamespace(_, 2))));
    assert!(matches!(
        target.add_listener(NQN, rig.address.clone()),
        Err(NvmfTargetError::ListenerExists(..))
    ));
    let other = ListenAddress::tcp("127.0.0.1", "1");
    assert!(matches!(target.remove_listener(NQN, other), Err(NvmfTargetError::NoListener(..))));
    assert_eq!(target.subsystems().len(), 2);
    target.remove_listener(NQN, rig.address.clone()).unwrap();
    let socket = rig.address.socket().unwrap();
    assert!(std::net::TcpStream::connect(socket).is_err(), "the listener is closed");
}

/// A reactor that runs nothing else until this is dropped.
struct BlockedReactor {
    _release: std::sync::mpsc::Sender<()>,
}

impl BlockedReactor {
    fn new(reactor: &reactor::ReactorHandle) -> BlockedReactor {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (blocking, blocked) = std::sync::mpsc::channel();
        reactor
            .post(move |_| {
                blocking.send(()).unwrap();
                // Ends with an error when the sender is dropped.
                let _ = released.recv();
            })
            .unwrap();
        blocked.recv().unwrap();
        BlockedReactor { _release: release }
    }
}

#[test]
fn a_change_that_a_blocked_core_cannot_apply_is_not_made() {
    let rig = rig(TcpTransportConfig::default());
    let (target, handles) = (&rig.target, rig.reactors.as_ref().unwrap().handles());
    let other = "nqn.2016-06.io.spdk:cnode2";
    bdev::malloc::create(&rig.registry, bdev::malloc::MallocConfig::new("Malloc1", 2048, 512)).unwrap();
    let before = format!("{:?}", target.subsystems());
    let core = handles.len() - 1;
    let blocked = BlockedReactor::new(&handles[core]);
    let create = || target.create_subsystem(other, SubsystemConfig::default());
    let add = || target.add_namespace(NQN, NamespaceConfig::new("Malloc1"));
    let error = create().unwrap_err();
    assert!(matches!(error, NvmfTargetError::Unresponsive(n) if n == core), "{error}");
    assert!(matches!(add(), Err(NvmfTargetError::Unresponsive(_))));
    assert!(matches!(target.delete_subsystem(NQN), Err(NvmfTargetError::Unresponsive(_))));
    assert_eq!(format!("{:?}", target.subsystems()), before);
    drop(blocked);
    // The core skips what was undone: a host finds the subsystem as it was, with its first namespace only.
    let uri = |nsid: u32| -> nvme::Uri {
        format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns={nsid}", rig.address.trsvcid).parse().unwrap()
    };
    let (first, second) = (uri(1), uri(2));
    on_host(|core| async move {
        let options = nvme::Options::default();
        assert!(nvme::Namespace::open(&core, &second, &options).await.is_err());
        let mut namespace = nvme::Namespace::open(&core, &first, &options).await.unwrap();
        let read = Request::read(Tag(0), 0, 1, core.pool().take(512).unwrap());
        assert!(run(&core, &mut namespace, vec![read]).await[0].status().is_success());
    });
    // Nothing of the failed changes is left: the names and the device are free.
    create().unwrap();
    assert_eq!(add().unwrap(), 2);
    target.delete_subsystem(NQN).unwrap();
}

#[test]
fn a_transport_is_not_created_while_a_core_is_blocked() {
    let rig = rig(TcpTransportConfig::default());
    let handles = rig.reactors.as_ref().unwrap().handles();
    let blocked = BlockedReactor::new(&handles[handles.len() - 1]);
    let create = || rig.target.create_vfio_user(nvmf::VfioUserConfig::default());
    assert!(matches!(create(), Err(NvmfTargetError::Unresponsive(_))));
    assert_eq!(rig.target.vfio_user_config(), None);
    drop(blocked);
    create().unwrap();
}

#[test]
fn a_listener_that_a_blocked_core_did_not_open_stays_closed() {
    let rig = rig(TcpTransportConfig::default());
    let handle = &rig.reactors.as_ref().unwrap().handles()[0];
    let before = format!("{:?}", rig.target.subsystems());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = ListenAddress::tcp("127.0.0.1", &free.port().to_string());
    let blocked = BlockedReactor::new(handle);
    let error = rig.target.add_listener(NQN, address.clone()).unwrap_err();
    assert!(matches!(error, NvmfTargetError::Unresponsive(0)), "{error}");
    assert_eq!(format!("{:?}", rig.target.subsystems()), before);
    drop(blocked);
    // The core has seen the request when it has answered the next one.
    rig.target.stats().unwrap();
    assert!(std::net::TcpStream::connect(free).is_err(), "the core listens although the answer was an error");
    rig.target.add_listener(NQN, address).unwrap();
}

#[test]
fn a_removed_device_leaves_a_blocked_core_when_it_runs_again() {
    let rig = rig(TcpTransportConfig::default());
    let handles = rig.reactors.as_ref().unwrap().handles();
    let blocked = BlockedReactor::new(&handles[handles.len() - 1]);
    rig.registry.unregister("Malloc0").unwrap();
    let namespaces = || -> usize { rig.target.subsystems().iter().map(|one| one.namespaces.len()).sum() };
    assert_eq!(namespaces(), 0, "the device is gone, whatever a core does");
    drop(blocked);
    bdev::malloc::create(&rig.registry, bdev::malloc::MallocConfig::new("Malloc1", 2048, 512)).unwrap();
    rig.target.add_namespace(NQN, NamespaceConfig::new("Malloc1")).unwrap();
    assert_eq!(namespaces(), 1);
}

#[test]
fn stopped_reactors_leave_the_configuration_unchanged() {
    let mut rig = rig(TcpTransportConfig::default());
    rig.reactors.take().unwrap().stop();
    let before = format!("{:?}", rig.target.subsystems());
    let create = rig.target.create_subsystem("nqn.2016-06.io.spdk:cnode2", SubsystemConfig::default());
    assert!(matches!(create, Err(NvmfTargetError::Stopping)));
    assert!(matches!(rig.target.delete_subsystem(NQN), Err(NvmfTargetError::Stopping)));
    assert_eq!(format!("{:?}", rig.target.subsystems()), before);
}
