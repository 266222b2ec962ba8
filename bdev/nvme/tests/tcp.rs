//! The initiator against our own target, over the kernel's loopback.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bdev::{Access, AsyncChannel, Registry};
use bdev_nvme::{
    Attach, ControllerOperation, DiscoveryConfig, ErrorInjection, Initiator, InitiatorError,
    PassthroughCommand, PathConfig, PathStatus, Policy, QueueKind, ReconnectPolicy, Selector, TransportId,
};
use block_io::{Op, Status};
use control::JobHandle;
use nvme::AdminData;
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, TcpTransportConfig};
use reactor::{IdlePolicy, ReactorConfig, Reactors};
use wire_nvme::Sqe;
use wire_nvme::admin::GetLogPage;
use wire_nvme::io::{Prinfo, ReadWrite};
use wire_nvme::log::AnaState;
use wire_nvme::opcode::NvmOpcode;

mod passthrough;
use passthrough::check_passthrough;

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const SECOND: u64 = 1_000_000_000;

fn reactors() -> Reactors {
    Reactors::start(&ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() }).unwrap()
}

/// A target on its own reactors; its block devices outlive it.
struct TargetSide {
    target: NvmfTarget,
    addresses: Vec<ListenAddress>,
    reactors: Option<Reactors>,
}

impl TargetSide {
    fn start(registry: &Registry, ports: &[String]) -> TargetSide {
        let reactors = reactors();
        let target = NvmfTarget::new(registry.clone(), reactors.handles());
        target.create_transport(TcpTransportConfig::default()).unwrap();
        let any = SubsystemConfig { allow_any_host: true, ana_reporting: true, ..SubsystemConfig::default() };
        target.create_subsystem(NQN, any).unwrap();
        target.add_namespace(NQN, NamespaceConfig::new("Malloc0")).unwrap();
        let listen = |port: &String| target.add_listener(NQN, ListenAddress::tcp("127.0.0.1", port)).unwrap();
        let addresses = ports.iter().map(listen).collect();
        TargetSide { target, addresses, reactors: Some(reactors) }
    }

    fn ports(&self) -> Vec<String> {
        self.addresses.iter().map(|address| address.trsvcid.clone()).collect()
    }

    fn set(&self, path: usize, state: AnaState) {
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

fn medium() -> Registry {
    let registry = Registry::new();
    bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", 32768, 512)).unwrap();
    registry
}

/// The initiator on its own reactor.
struct HostSide {
    initiator: Initiator,
    registry: Registry,
    reactors: Option<Reactors>,
}

impl HostSide {
    fn start() -> HostSide {
        let registry = Registry::new();
        let reactors = reactors();
        let initiator = Initiator::new(registry.clone(), reactors.handles());
        HostSide { initiator, registry, reactors: Some(reactors) }
    }

    fn path(port: &str) -> PathConfig {
        let uri = format!("nvme+tcp://127.0.0.1:{port}/{NQN}").parse().unwrap();
        let mut path = PathConfig::new(TransportId(uri));
        path.reconnect =
            ReconnectPolicy { loss_timeout_ns: Some(60 * SECOND), delay_ns: SECOND / 10, fast_fail_ns: None };
        path.options.keep_alive_ms = 2000;
        path
    }

    fn attach(&self, port: &str) -> Vec<String> {
        self.initiator.attach(Attach::new("Nvme0", HostSide::path(port))).unwrap()
    }

    /// Runs a job with the device on the reactor; the receiver gets its result.
    fn with_io<R: Send + 'static, F: Future<Output = R> + 'static>(
        &self,
        job: impl FnOnce(reactor::Core, AsyncChannel) -> F + Send + 'static,
    ) -> std::sync::mpsc::Receiver<R> {
        let descriptor = self.registry.open("Nvme0n1", Access::ReadWrite).unwrap();
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

    fn current_port(&self) -> Option<String> {
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

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A verifying load: each step writes the step number to one range and verifies another. Runs until `stop` is set;
/// returns the number of steps, or the step that failed and its status.
async fn load(
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

type LoadResult = std::sync::mpsc::Receiver<Result<u64, (u64, Status)>>;

fn under_load(host: &HostSide) -> (Arc<AtomicBool>, Arc<AtomicU64>, LoadResult) {
    let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (task_stop, task_steps) = (stop.clone(), steps.clone());
    let outcome = host.with_io(move |core, io| load(core, io, task_stop, task_steps));
    (stop, steps, outcome)
}

fn finish(stop: &AtomicBool, outcome: &LoadResult) -> u64 {
    stop.store(true, Ordering::Relaxed);
    outcome.recv_timeout(Duration::from_secs(60)).unwrap().unwrap()
}

/// Waits until the load has made progress.
fn wait_for_progress(steps: &AtomicU64) {
    let before = steps.load(Ordering::Relaxed);
    wait_for("progress", || steps.load(Ordering::Relaxed) > before + 20);
}

#[test]
fn a_namespace_is_a_bdev_and_long_requests_are_split() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    assert_eq!(host.attach(&side.ports()[0]), ["Nvme0n1"]);
    let device = host.registry.find("Nvme0n1").unwrap();
    assert_eq!((device.geometry().blocks, device.geometry().block_size), (32768, 512));
    assert_eq!(device.bdev().product_name(), "NVMe disk");
    assert_eq!(Some(device.uuid()), medium.find("Malloc0").map(|medium| medium.uuid()));
    let done = host.with_io(|core, io| async move {
        // Longer than the target's maximum transfer, and not a multiple of it.
        let bytes = (1 << 20) - 512;
        let mut buffer = core.pool().take(bytes).unwrap();
        for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
            *byte = (at / 512 + at) as u8;
        }
        let expected = buffer.as_slice().to_vec();
        io.write(7, buffer).await.map_err(|(status, _)| status)?;
        io.flush().await?;
        io.unmap(0, 4).await?;
        let mut buffer = core.pool().take(bytes).unwrap();
        buffer.clear();
        let buffer = io.read(7, buffer).await.map_err(|(status, _)| status)?;
        assert!(buffer.as_slice() == expected, "the data that was read differs from the data written");
        let mut buffer = core.pool().take(512).unwrap();
        buffer.clear();
        let beyond = io.read(40000, buffer).await.map_err(|(status, _)| status);
        assert!(beyond.unwrap_err().same_code(Status::LBA_OUT_OF_RANGE));
        Ok::<(), Status>(())
    });
    done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    let refused = host.initiator.attach(Attach::new("Nvme1", HostSide::path(&side.ports()[0])));
    assert!(refused.unwrap_err().to_string().contains("is attached already, as Nvme0"));
    host.initiator.detach("Nvme0", |_| true, &JobHandle::standalone()).unwrap();
    assert!(host.registry.find("Nvme0n1").is_none() && host.initiator.controllers().is_empty());
    wait_for("the target's controller to end", || side.target.controllers(NQN).unwrap().is_empty());
}

#[test]
fn data_of_several_slices_is_sent_and_received_in_place() {
    for digests in [false, true] {
        let medium = medium();
        let side = TargetSide::start(&medium, &["0".into()]);
        let host = HostSide::start();
        let mut path = HostSide::path(&side.ports()[0]);
        if let nvme::Uri::Tcp(uri) = &mut path.id.0 {
            (uri.header_digest, uri.data_digest) = (digests, digests);
        }
        host.initiator.attach(Attach::new("Nvme0", path)).unwrap();
        let before = medium.find("Malloc0").unwrap().stats();
        let done = host.with_io(|core, io| async move {
            // In the capsule, after an R2T, and in many parts; at any address.
            let many = vec![3000; 40];
            for (round, lengths) in
                [&[100, 412][..], &[3000, 5000, 192], &many, &[1, 65536, 511]].iter().enumerate()
            {
                let data = || {
                    let slice = |length: &usize| core.pool().take(length + 1).unwrap().split_off(1);
                    dma::Data::gather(lengths.iter().map(slice).collect()).unwrap()
                };
                let bytes: usize = lengths.iter().sum::<usize>() / 512 * 512;
                let mut write = data();
                if bytes < write.len() {
                    write.split_off(bytes);
                }
                let expected: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 512 + round) as u8).collect();
                write.copy_from(0, &expected);
                let (lba, blocks) = (round as u64 * 300, (bytes / 512) as u32);
                let written = io.submit(bdev::Request::write(block_io::Tag(0), lba, blocks, write)).await;
                if !written.status().is_success() {
                    return Err(written.status());
                }
                let mut read = data();
                read.clear();
                if bytes < read.len() {
                    read.split_off(bytes);
                }
                let read = io.submit(bdev::Request::read(block_io::Tag(0), lba, blocks, read)).await;
                let mut received = vec![0; bytes];
                read.into_request().take_data().unwrap().copy_to(0, &mut received);
                assert!(received == expected, "slices {lengths:?}");
            }
            Ok::<(), Status>(())
        });
        done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
        let after = medium.find("Malloc0").unwrap().stats();
        let commands = |op| after.op(op).ops - before.op(op).ops;
        assert_eq!((commands(Op::Write), commands(Op::Read)), (4, 4), "each request is one command");
    }
}

#[test]
fn protection_information_is_generated_checked_and_stripped_by_the_target() {
    let medium = Registry::new();
    let metadata =
        bdev::MetadataConfig { md_size: 8, md_interleave: true, dif_type: 1, dif_is_head_of_md: false };
    let config =
        bdev::malloc::MallocConfig { metadata, ..bdev::malloc::MallocConfig::new("Malloc0", 4096, 512) };
    bdev::malloc::create(&medium, config).unwrap();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    assert_eq!(host.registry.find("Nvme0n1").unwrap().geometry().block_size, 512);
    let written = host.with_io(|core, io| async move {
        let mut buffer = core.pool().take(64 << 10).unwrap();
        buffer.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 512 + at) as u8);
        let expected = buffer.as_slice().to_vec();
        io.write(9, buffer).await.map_err(|(status, _)| status)?;
        let mut buffer = core.pool().take(64 << 10).unwrap();
        buffer.clear();
        let buffer = io.read(9, buffer).await.map_err(|(status, _)| status)?;
        assert!(buffer.as_slice() == expected);
        io.write_zeroes(20, 2).await?;
        let buffer = core.pool().take(1024).unwrap();
        let buffer = io.read(20, buffer).await.map_err(|(status, _)| status)?;
        assert_eq!(buffer.as_slice(), [0; 1024]);
        Ok::<(), Status>(())
    });
    written.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    // The same blocks by commands that transfer the protection information.
    let command = |opcode: NvmOpcode, prinfo, reference_tag, data| {
        let command = ReadWrite { lba: 9, blocks: 2, prinfo, reference_tag, ..ReadWrite::default() };
        let sqe = Sqe { nsid: 1, ..command.to_sqe(opcode) };
        let queue = QueueKind::Io;
        let command = PassthroughCommand { queue, sqe, data, metadata: AdminData::None, timeout: None };
        host.initiator.pass_through("Nvme0", command).unwrap()
    };
    let checks = Prinfo::CHECK_GUARD | Prinfo::CHECK_REFERENCE_TAG;
    let read = command(NvmOpcode::Read, checks, 9, AdminData::In(1040));
    assert_eq!(read.status, Status::SUCCESS);
    for (index, block) in read.data.chunks(520).enumerate() {
        let guard = nvme::protection::crc16(0, &block[..512]).to_be_bytes();
        assert_eq!(block[512..], [guard[0], guard[1], 0, 0, 0, 0, 0, 9 + index as u8]);
    }
    assert!(command(NvmOpcode::Write, checks, 9, AdminData::Out(read.data.clone())).status.is_success());
    let mut bad = read.data;
    bad[600] ^= 1;
    let refused = command(NvmOpcode::Write, checks, 9, AdminData::Out(bad.clone())).status;
    assert!(refused.same_code(Status::GUARD_CHECK_ERROR), "{refused}");
    let wrong = command(NvmOpcode::Read, checks, 10, AdminData::In(1040)).status;
    assert!(wrong.same_code(Status::INVALID_PROTECTION_INFORMATION), "{wrong}");
    // Stored without a check, it fails the checks of a read.
    assert!(command(NvmOpcode::Write, Prinfo::empty(), 0, AdminData::Out(bad)).status.is_success());
    let failed = host.with_io(|core, io| async move {
        let buffer = core.pool().take(1024).unwrap();
        io.read(9, buffer).await.map_err(|(status, _)| status).unwrap_err()
    });
    let failed = failed.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(failed.same_code(Status::GUARD_CHECK_ERROR), "{failed}");
}

#[test]
fn uncorrectable_blocks_are_unreadable_until_rewritten() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    let done = host.with_io(|core, io| async move {
        let buffer = || core.pool().take(8 * 512).unwrap();
        let read = async |lba| io.read(lba, buffer()).await.map(drop).map_err(|(status, _)| status);
        io.write_uncorrectable(12, 2).await?;
        let unreadable = read(8).await.unwrap_err();
        assert!(unreadable.same_code(Status::UNRECOVERED_READ_ERROR), "{unreadable}");
        read(0).await?;
        read(14).await?;
        let mut new = buffer();
        new.clear();
        io.write(8, new).await.map_err(|(status, _)| status)?;
        read(8).await
    });
    done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
}

#[test]
fn attach_fails_at_once_without_a_target() {
    let host = HostSide::start();
    let error = host.initiator.attach(Attach::new("Nvme0", HostSide::path("1"))).unwrap_err();
    assert!(error.to_string().contains("connect"), "{error}");
    assert!(host.initiator.controllers().is_empty());
}

#[test]
fn io_waits_for_a_lost_target_and_resumes_after_reconnection() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    host.attach(&ports[0]);
    let (stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    drop(side);
    wait_for("the loss", || host.initiator.controllers()[0].paths[0].status == PathStatus::Reconnecting);
    assert!(outcome.try_recv().is_err(), "I/O failed although it should wait");
    let side = TargetSide::start(&medium, &ports);
    wait_for_progress(&steps);
    assert_eq!(host.initiator.controllers()[0].paths[0].status, PathStatus::Enabled);
    assert!(finish(&stop, &outcome) >= 40);
    drop(host);
    drop(side);
}

#[test]
fn io_fails_after_the_fast_fail_timeout_and_the_bdev_is_removed_after_the_loss_timeout() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    let mut path = HostSide::path(&side.ports()[0]);
    path.reconnect.fast_fail_ns = Some(SECOND / 2);
    path.reconnect.loss_timeout_ns = Some(3 * SECOND);
    host.initiator.attach(Attach::new("Nvme0", path)).unwrap();
    let (_stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    let lost = Instant::now();
    drop(side);
    let failed = outcome.recv_timeout(Duration::from_secs(30)).unwrap().unwrap_err();
    assert_eq!(failed.1, Status::HOST_PATHING_ERROR);
    assert!(lost.elapsed() >= Duration::from_millis(400), "{:?}", lost.elapsed());
    assert!(host.registry.find("Nvme0n1").is_some());
    wait_for("the removal of the device", || host.registry.find("Nvme0n1").is_none());
    assert!(lost.elapsed() >= Duration::from_millis(2500), "{:?}", lost.elapsed());
}

#[test]
fn io_moves_to_the_path_with_the_best_ana_state() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    // The path whose queue connects first becomes the current one: the second is attached only under load.
    host.attach(&ports[0]);
    let (stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    assert_eq!(host.attach(&ports[1]), ["Nvme0n1"]);
    wait_for("both paths", || {
        let paths = host.initiator.io_paths(None);
        paths.len() == 2 && paths.iter().all(|path| path.connected)
    });
    assert_eq!(host.current_port().as_ref(), Some(&ports[0]));
    for turn in 0..6 {
        let (to, from) = ((turn % 2) ^ 1, turn % 2);
        side.set(from, [AnaState::Inaccessible, AnaState::NonOptimized, AnaState::Change][turn / 2]);
        wait_for("the other path", || host.current_port().as_ref() == Some(&ports[to]));
        wait_for_progress(&steps);
        side.set(from, AnaState::Optimized);
        wait_for("the state", || {
            host.initiator.io_paths(None).iter().all(|path| path.ana == AnaState::Optimized)
        });
    }
    // Neither path is usable: I/O waits.
    side.set(0, AnaState::Inaccessible);
    side.set(1, AnaState::Inaccessible);
    wait_for("both states", || {
        host.initiator.io_paths(None).iter().all(|path| path.ana == AnaState::Inaccessible)
    });
    assert!(outcome.try_recv().is_err());
    side.set(1, AnaState::NonOptimized);
    wait_for_progress(&steps);
    assert_eq!(host.current_port().as_ref(), Some(&ports[1]));
    assert!(finish(&stop, &outcome) > 100);
}

#[test]
fn no_io_fails_when_one_of_two_paths_is_lost() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    host.attach(&ports[0]);
    host.attach(&ports[1]);
    host.initiator.set_policy("Nvme0n1", Policy::ActiveActive(Selector::RoundRobin { min_io: 1 })).unwrap();
    let (stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    for lost in [0, 1] {
        side.target.remove_listener(NQN, side.addresses[lost].clone()).unwrap();
        wait_for("the loss", || {
            host.initiator.controllers()[0].paths.iter().any(|path| path.status != PathStatus::Enabled)
        });
        wait_for_progress(&steps);
        side.target.add_listener(NQN, side.addresses[lost].clone()).unwrap();
        wait_for("both paths", || host.initiator.io_paths(None).iter().all(|path| path.connected));
        wait_for_progress(&steps);
    }
    let is_last = |id: &TransportId| id.service().is_some_and(|(_, port)| port == ports[1]);
    host.initiator.detach("Nvme0", is_last, &JobHandle::standalone()).unwrap();
    wait_for_progress(&steps);
    assert_eq!(host.initiator.controllers()[0].paths.len(), 1);
    host.initiator.reset("Nvme0").unwrap();
    wait_for_progress(&steps);
    assert!(finish(&stop, &outcome) > 100);
}

#[test]
fn path_statistics_count_io_of_each_path() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let host = HostSide::start();
    for port in side.ports() {
        let path = PathConfig { count_io: true, ..HostSide::path(&port) };
        host.initiator.attach(Attach::new("Nvme0", path)).unwrap();
    }
    // Three, as the load alternates writes and reads, and each path must get some of both.
    host.initiator.set_policy("Nvme0n1", Policy::ActiveActive(Selector::RoundRobin { min_io: 3 })).unwrap();
    wait_for("both paths", || host.initiator.io_paths(None).iter().all(|path| path.connected));
    let (stop, _, outcome) = under_load(&host);
    let steps = finish(&stop, &outcome);
    let stats = host.initiator.path_stats("Nvme0n1").unwrap();
    assert_eq!(stats.len(), 2);
    for op in [Op::Read, Op::Write] {
        let counts: Vec<_> = stats.iter().map(|(_, stats)| *stats.op(op)).collect();
        assert_eq!(counts.iter().map(|counts| counts.ops).sum::<u64>(), steps, "{counts:?}");
        assert!(
            counts.iter().all(|counts| counts.ops > 0 && counts.bytes == counts.ops * 4096),
            "{counts:?}"
        );
        assert!(counts.iter().all(|counts| counts.latency_min_ticks <= counts.latency_max_ticks));
    }
    assert!(host.initiator.path_stats("Nvme1n1").is_err());
}

#[test]
fn a_disabled_controller_gets_no_io_until_it_is_enabled() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let host = HostSide::start();
    for port in side.ports() {
        host.attach(&port);
    }
    wait_for("both paths", || host.initiator.io_paths(None).iter().all(|path| path.connected));
    let (stop, steps, outcome) = under_load(&host);
    wait_for_progress(&steps);
    let status = |path: usize| host.initiator.controllers()[0].paths[path].status;
    let first = host.initiator.controllers()[0].paths[0].cntlid;
    let operate =
        |cntlid, operation| host.initiator.operate("Nvme0", cntlid, operation, &JobHandle::standalone());
    // The other path is used; disabling twice has no further effect.
    for _ in 0..2 {
        operate(Some(first), ControllerOperation::Disable).unwrap();
        assert_eq!((status(0), status(1)), (PathStatus::Disabled, PathStatus::Enabled));
        assert_eq!(host.current_port().as_ref(), Some(&side.ports()[1]));
    }
    wait_for_progress(&steps);
    operate(Some(first), ControllerOperation::Reset).unwrap();
    assert_eq!(status(0), PathStatus::Disabled, "a reset must not enable it");
    operate(Some(first), ControllerOperation::Enable).unwrap();
    assert_eq!(status(0), PathStatus::Enabled);
    wait_for_progress(&steps);
    assert!(operate(Some(u16::MAX), ControllerOperation::Enable).is_err());
    finish(&stop, &outcome);
    // Without a path that may recover I/O fails at once, whatever the timeouts for lost paths.
    operate(None, ControllerOperation::Disable).unwrap();
    let (_stop, _, outcome) = under_load(&host);
    let failed = outcome.recv_timeout(Duration::from_secs(30)).unwrap().unwrap_err();
    assert_eq!(failed, (1, Status::HOST_PATHING_ERROR));
    assert!(host.registry.find("Nvme0n1").is_some());
    operate(None, ControllerOperation::Enable).unwrap();
    let read = host.with_io(|core, io| async move {
        let outcome = io.read(0, core.pool().take(4096).unwrap()).await;
        outcome.map_or_else(|(status, _)| status, |_| Status::SUCCESS)
    });
    assert_eq!(read.recv_timeout(Duration::from_secs(30)).unwrap(), Status::SUCCESS);
    // A disabled controller can be detached.
    operate(None, ControllerOperation::Disable).unwrap();
    host.initiator.detach("Nvme0", |_| true, &JobHandle::standalone()).unwrap();
    assert!(host.registry.find("Nvme0n1").is_none());
}

#[test]
fn injected_errors_reach_the_user_or_cause_a_failover() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let host = HostSide::start();
    let path = HostSide::path(&side.ports()[0]);
    host.initiator.attach(Attach { retries_max: 0, ..Attach::new("Nvme0", path) }).unwrap();
    let injection =
        |status, submit, count, delay_ns| Some(ErrorInjection { opcode: 2, count, status, submit, delay_ns });
    let inject = |injection| host.initiator.inject("Nvme0", QueueKind::Io, 2, injection).unwrap();
    // It does not apply to queues that are opened later.
    inject(injection(Status::UNRECOVERED_READ_ERROR, true, 1, 0));
    let (command, commands) = std::sync::mpsc::sync_channel(0);
    let (result, results) = std::sync::mpsc::sync_channel(1);
    let done = host.with_io(move |core, io| async move {
        loop {
            match commands.try_recv() {
                Ok(false) => break,
                Ok(true) => {
                    let began = Instant::now();
                    let outcome = io.read(0, core.pool().take(4096).unwrap()).await;
                    let status = outcome.map_or_else(|(status, _)| status, |_| Status::SUCCESS);
                    result.send((status, began.elapsed())).unwrap();
                }
                Err(_) => core.sleep_ns(100_000).await,
            }
        }
    });
    let read = || {
        command.send(true).unwrap();
        results.recv_timeout(Duration::from_secs(30)).unwrap()
    };
    assert_eq!(read().0, Status::SUCCESS);
    inject(injection(Status::UNRECOVERED_READ_ERROR, true, 2, 0));
    let statuses = [read().0, read().0, read().0];
    assert_eq!(statuses, [Status::UNRECOVERED_READ_ERROR, Status::UNRECOVERED_READ_ERROR, Status::SUCCESS]);
    let sent = || {
        let stats = host.initiator.transport_stats();
        let [of_tcp] = stats[..] else { panic!("{stats:?}") };
        assert_eq!((of_tcp.core, of_tcp.trtype), (0, "TCP"));
        assert!(of_tcp.counts.arrivals > 0 && of_tcp.counts.polls >= of_tcp.counts.idle_polls);
        (of_tcp.counts.submitted, of_tcp.counts.completed)
    };
    let before = sent();
    inject(injection(Status::WRITE_FAULT, false, 1, 20_000_000));
    let (status, took) = read();
    assert!(status == Status::WRITE_FAULT && took >= Duration::from_millis(20), "{status} {took:?}");
    assert_eq!(sent(), before, "the command was sent");
    // An injection that is removed before it applies.
    inject(injection(Status::UNRECOVERED_READ_ERROR, true, 9, 0));
    inject(None);
    assert_eq!(read().0, Status::SUCCESS);
    assert_eq!(sent(), (before.0 + 1, before.1 + 1));
    // Delayed forever, until a reset closes its queue: then it is retried.
    inject(injection(Status::SUCCESS, false, 1, u64::MAX));
    command.send(true).unwrap();
    host.initiator.reset("Nvme0").unwrap();
    assert_eq!(results.recv_timeout(Duration::from_secs(30)).unwrap().0, Status::SUCCESS);
    // With a second path, a path related error causes a failover.
    host.attach(&side.ports()[1]);
    wait_for("both paths", || host.initiator.io_paths(None).iter().all(|path| path.connected));
    inject(injection(Status::ANA_INACCESSIBLE, true, 1, 0));
    assert_eq!(read().0, Status::SUCCESS);
    command.send(false).unwrap();
    done.recv_timeout(Duration::from_secs(30)).unwrap();
    // Injections for admin commands apply to the first path too.
    let health = || {
        let view = GetLogPage { lid: 2, length_bytes: 512, ..GetLogPage::default() };
        let sqe = view.to_sqe(wire_nvme::NSID_ALL);
        let (data, metadata) = (AdminData::In(512), AdminData::None);
        let passed = PassthroughCommand { queue: QueueKind::Admin, sqe, data, metadata, timeout: None };
        host.initiator.pass_through("Nvme0", passed).unwrap().status
    };
    for submit in [true, false] {
        let injection = ErrorInjection {
            opcode: 2,
            count: 1,
            status: Status::INTERNAL_ERROR,
            submit,
            delay_ns: 1_000_000,
        };
        host.initiator.inject("Nvme0", QueueKind::Admin, 2, Some(injection)).unwrap();
        assert_eq!((health(), health()), (Status::INTERNAL_ERROR, Status::SUCCESS));
    }
}

#[test]
fn arbitrary_commands_can_be_passed_through() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    check_passthrough(&host.initiator, "Nvme0");
    let metadata = AdminData::Out(vec![0; 8]);
    let sqe = Sqe { nsid: 1, ..Sqe::new(0) };
    let flush =
        PassthroughCommand { queue: QueueKind::Io, sqe, data: AdminData::None, metadata, timeout: None };
    assert!(host.initiator.pass_through("Nvme0", flush).is_err(), "metadata is not supported over TCP");
}

#[test]
fn discovery_attaches_and_detaches_as_the_log_page_changes() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    let mut path = HostSide::path(&ports[0]);
    let uri = format!("nvme+tcp://127.0.0.1:{}/nqn.2014-08.org.nvmexpress.discovery", ports[0]);
    path.id = TransportId(uri.parse().unwrap());
    let discovery =
        DiscoveryConfig { name: "Found".into(), path, retries_max: 3, policy: Policy::ActivePassive };
    host.initiator.start_discovery(discovery.clone(), Some(Duration::from_secs(30))).unwrap();
    let paths = || host.initiator.controllers().first().map_or(0, |controller| controller.paths.len());
    assert_eq!((paths(), host.initiator.discoveries()[0].entries.len()), (2, 2));
    assert!(host.registry.find("Found0n1").is_some());
    assert!(host.initiator.start_discovery(discovery.clone(), None).is_err());
    side.target.remove_listener(NQN, side.addresses[1].clone()).unwrap();
    wait_for("the path to be detached", || paths() == 1);
    side.target.add_listener(NQN, side.addresses[1].clone()).unwrap();
    wait_for("the path", || paths() == 2);
    host.initiator.stop_discovery("Found", &JobHandle::standalone()).unwrap();
    assert!(paths() == 0 && host.registry.find("Found0n1").is_none());
    // A cancelled stop ends the service, and leaves what it has not detached.
    host.initiator.start_discovery(discovery, Some(Duration::from_secs(30))).unwrap();
    let outcome = host.initiator.stop_discovery("Found", &cancelled_job());
    assert_eq!((outcome, paths()), (Err(InitiatorError::Cancelled), 2));
    assert!(host.initiator.discoveries().is_empty());
    host.initiator.detach("Found0", |_| true, &JobHandle::standalone()).unwrap();
    assert_eq!(paths(), 0);
}

fn cancelled_job() -> JobHandle {
    let job = JobHandle::standalone();
    job.cancel().unwrap();
    job
}

#[test]
fn a_cancelled_operation_leaves_the_remaining_paths() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let host = HostSide::start();
    for port in side.ports() {
        host.attach(&port);
    }
    let initiator = &host.initiator;
    let statuses =
        || initiator.controllers()[0].paths.iter().map(|path| path.status).collect::<Vec<PathStatus>>();
    assert_eq!(initiator.detach("Nvme0", |_| true, &cancelled_job()), Err(InitiatorError::Cancelled));
    let outcome = initiator.operate("Nvme0", None, ControllerOperation::Disable, &cancelled_job());
    assert_eq!(outcome, Err(InitiatorError::Cancelled));
    assert_eq!(statuses(), [PathStatus::Enabled, PathStatus::Enabled]);
    // The target's reactors are blocked: connections are accepted and not answered.
    let block = |reactor: &reactor::ReactorHandle| {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let wait = move |_: &reactor::Core| {
            let _ = released.recv();
        };
        reactor.post(wait).unwrap();
        release
    };
    let releases: Vec<_> = side.reactors.as_ref().unwrap().handles().iter().map(block).collect();
    let job = JobHandle::standalone();
    std::thread::scope(|threads| {
        let reset = threads.spawn(|| initiator.operate("Nvme0", None, ControllerOperation::Reset, &job));
        wait_for("the reset", || statuses()[0] == PathStatus::Reconnecting);
        let began = Instant::now();
        job.cancel().unwrap();
        assert_eq!(reset.join().unwrap(), Err(InitiatorError::Cancelled));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
    drop(releases);
    // The reset in progress goes on.
    wait_for("both paths", || statuses() == [PathStatus::Enabled, PathStatus::Enabled]);
}
