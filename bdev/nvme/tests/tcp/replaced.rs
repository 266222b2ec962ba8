//! Namespaces that are replaced by others under their identifier.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bdev::{Access, AsyncChannel, Registry, Uuid};
use bdev_nvme::{Attach, PathStatus};
use block_io::{Op, Request, Status, Tag};
use nvmf::{NamespaceConfig, NvmfTarget};

use crate::sides::{HostSide, NQN, SECOND, TargetSide, reactors, wait_for, wait_for_progress};

const A: Uuid = Uuid::from_u128(0xaaaa_aaaa_aaaa_4aaa_8aaa_aaaa_aaaa_aaaa);
const B: Uuid = Uuid::from_u128(0xbbbb_bbbb_bbbb_4bbb_8bbb_bbbb_bbbb_bbbb);
/// Blocks of 512 bytes.
const BLOCKS: u64 = 1024;

fn add(registry: &Registry, name: &str, uuid: Uuid, block_size: u32) {
    let blocks = BLOCKS * 512 / u64::from(block_size);
    let config = bdev::malloc::MallocConfig::new(name, blocks, block_size);
    bdev::malloc::create(registry, bdev::malloc::MallocConfig { uuid: Some(uuid), ..config }).unwrap();
}

/// Malloc0 and Malloc1, whose UUIDs are A and B.
fn two_media() -> Registry {
    let registry = Registry::new();
    add(&registry, "Malloc0", A, 512);
    add(&registry, "Malloc1", B, 512);
    registry
}

fn put(target: &NvmfTarget, nsid: u32, device: &str) {
    // The claim of a device that was removed ends with its last channel.
    wait_for("the claim", || {
        let config = NamespaceConfig { nsid: Some(nsid), ..NamespaceConfig::new(device) };
        target.add_namespace(NQN, config).is_ok()
    });
}

fn replace(target: &NvmfTarget, nsid: u32, device: &str) {
    target.remove_namespace(NQN, nsid).unwrap();
    put(target, nsid, device);
}

fn uuid_of(host: &HostSide, name: &str) -> Option<Uuid> {
    host.registry.find(name).map(|device| device.uuid())
}

/// Writes blocks of a mark until a write fails.
async fn write_until_it_fails(core: reactor::Core, io: AsyncChannel, mark: u8) -> Status {
    for place in (0..BLOCKS).cycle() {
        let mut buffer = core.pool().take(512).unwrap();
        buffer.as_mut_slice().fill(mark);
        if let Err((status, _)) = io.write(place, buffer).await {
            return status;
        }
    }
    unreachable!("the places are endless")
}

/// Whether a device of a target has a byte of the mark.
fn has_mark(host: &HostSide, medium: &Registry, name: &str, mark: u8) -> bool {
    let found = host.with_device(medium, name, Access::ReadOnly, move |core, io| async move {
        let buffer = core.pool().take(BLOCKS as usize * 512).unwrap();
        let buffer = io.read(0, buffer).await.map_err(|(status, _)| status).unwrap();
        buffer.as_slice().contains(&mark)
    });
    found.recv_timeout(std::time::Duration::from_secs(30)).unwrap()
}

#[test]
fn no_write_reaches_the_namespace_that_has_replaced_another() {
    let medium = two_media();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    for round in 0..8u8 {
        let (new, uuid) = [("Malloc1", B), ("Malloc0", A)][usize::from(round % 2)];
        let before = host.registry.find("Nvme0n1").unwrap();
        let mark = round + 1;
        let writers: Vec<_> =
            (0..4).map(|_| host.with_io(move |core, io| write_until_it_fails(core, io, mark))).collect();
        let old = ["Malloc0", "Malloc1"][usize::from(round % 2)];
        wait_for("a write", || has_mark(&host, &medium, old, mark));
        replace(&side.target, 1, new);
        wait_for("the other device", || uuid_of(&host, "Nvme0n1") == Some(uuid));
        for writer in writers {
            writer.recv_timeout(std::time::Duration::from_secs(30)).expect("the writers end");
        }
        assert!(before.is_removed());
        assert!(!has_mark(&host, &medium, new, mark), "round {round}: data went to another device");
    }
}

#[test]
fn a_namespace_of_another_format_is_another_device() {
    let medium = Registry::new();
    add(&medium, "Malloc0", A, 512);
    add(&medium, "Malloc1", B, 4096);
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    // As after Format NVM: its identifiers stay.
    side.target.remove_namespace(NQN, 1).unwrap();
    let formatted = NamespaceConfig { nsid: Some(1), uuid: Some(A), ..NamespaceConfig::new("Malloc1") };
    side.target.add_namespace(NQN, formatted).unwrap();
    wait_for("the format", || {
        let device = host.registry.find("Nvme0n1");
        device.is_some_and(|device| device.geometry().block_size == 4096)
    });
    let device = host.registry.find("Nvme0n1").unwrap();
    assert_eq!((device.uuid(), device.geometry().blocks), (A, BLOCKS / 8));
}

#[test]
fn two_namespaces_that_exchange_their_identifiers_are_exchanged() {
    let medium = two_media();
    let side = TargetSide::start(&medium, &["0".into()]);
    put(&side.target, 2, "Malloc1");
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    let uuids = || [uuid_of(&host, "Nvme0n1"), uuid_of(&host, "Nvme0n2")];
    assert_eq!(uuids(), [Some(A), Some(B)]);
    side.target.remove_namespace(NQN, 1).unwrap();
    side.target.remove_namespace(NQN, 2).unwrap();
    put(&side.target, 1, "Malloc1");
    put(&side.target, 2, "Malloc0");
    wait_for("the exchange", || uuids() == [Some(B), Some(A)]);
}

#[test]
fn a_namespace_that_was_replaced_while_the_target_was_away_is_another_device() {
    let medium = two_media();
    let side = TargetSide::start(&medium, &["0".into()]);
    let ports = side.ports();
    let host = HostSide::start();
    host.attach(&ports[0]);
    let waiting = host.with_io(|core, io| write_until_it_fails(core, io, 0xee));
    drop(side);
    wait_for("the loss", || host.initiator.controllers()[0].paths[0].status == PathStatus::Reconnecting);
    let side = TargetSide::exporting(&medium, "Malloc1", &ports);
    // What waited for the first one fails, and does not wait for ever.
    waiting.recv_timeout(std::time::Duration::from_secs(30)).expect("the I/O ends");
    wait_for("the other device", || uuid_of(&host, "Nvme0n1") == Some(B));
    assert!(!has_mark(&host, &medium, "Malloc1", 0xee));
    // A reset finds a change as well, even if its event was never sent.
    replace(&side.target, 1, "Malloc0");
    let _ = host.initiator.reset("Nvme0");
    wait_for("the first device", || uuid_of(&host, "Nvme0n1") == Some(A));
}

#[test]
fn a_path_on_which_the_namespace_was_replaced_is_not_used_for_the_others() {
    let media = [two_media(), two_media()];
    let sides = media.each_ref().map(|medium| TargetSide::start(medium, &["0".into()]));
    let host = HostSide::start();
    for side in &sides {
        host.attach(&side.ports()[0]);
    }
    let paths = || host.initiator.io_paths(Some("Nvme0n1"));
    let writer = host.with_io(|core, io| write_until_it_fails(core, io, 7));
    wait_for("both paths", || paths().len() == 2 && paths().iter().all(|path| path.connected));
    replace(&sides[0].target, 1, "Malloc1");
    wait_for("the loss of one path", || paths().len() == 1);
    assert_eq!(host.current_port(), Some(sides[1].ports()[0].clone()));
    assert_eq!(uuid_of(&host, "Nvme0n1"), Some(A));
    assert!(writer.try_recv().is_err(), "I/O failed although a path is left");
    replace(&sides[1].target, 1, "Malloc1");
    writer.recv_timeout(std::time::Duration::from_secs(30)).expect("the I/O ends with the last path");
    wait_for("the other device", || uuid_of(&host, "Nvme0n1") == Some(B));
    let probe = host.with_io(|core, io| async move {
        let buffer = core.pool().take(512).unwrap();
        io.read(0, buffer).await.map(drop).map_err(|(status, _)| status)
    });
    assert_eq!(probe.recv_timeout(std::time::Duration::from_secs(30)).unwrap(), Ok(()));
    // The path that was refused beside the old namespace belongs to the new one.
    let controller = || host.initiator.controllers().remove(0);
    wait_for("both paths", || controller().paths.iter().all(|path| path.status == PathStatus::Enabled));
    let shared = || host.initiator.path_stats("Nvme0n1").map_or(0, |stats| stats.len());
    wait_for("both paths of the new device", || shared() == 2);
    assert!(!has_mark(&host, &media[0], "Malloc1", 7) && !has_mark(&host, &media[1], "Malloc1", 7));
}

#[test]
fn a_refused_connection_is_reported_with_its_address() {
    let host = HostSide::start();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    drop(listener);
    let mut path = HostSide::path(&port);
    path.options.timeout_ns = 5 * SECOND;
    let error = host.initiator.attach(Attach::new("Nvme0", path)).unwrap_err().to_string();
    let expected = format!("cannot connect to 127.0.0.1:{port}: connection refused");
    assert_eq!(error.to_lowercase(), expected);
}

/// Writes and reads one block after the other until `stop` is set; returns why the driver gave up, if it did.
async fn drive(
    core: reactor::Core,
    port: String,
    outage_ns_max: u64,
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
) -> Result<(), Option<nvme::ControllerFailure>> {
    let uri = format!("nvme+tcp://127.0.0.1:{port}/{NQN}").parse().unwrap();
    let options = nvme::Options::default();
    let mut namespace =
        nvme::Namespace::open_reconnecting(&core, &uri, &options, outage_ns_max).await.unwrap();
    while !stop.load(Ordering::Relaxed) {
        let step = steps.load(Ordering::Relaxed);
        let mut buffer = core.pool().take(512).unwrap();
        buffer.as_mut_slice().fill(step as u8);
        let mut write = Request::new(Tag(step), Op::Write, step % BLOCKS, 1);
        write.set_data(Some(buffer));
        let written = namespace.run(write).await;
        if !written.status().is_success() {
            return Err(namespace.failure());
        }
        let mut read = Request::new(Tag(step), Op::Read, step % BLOCKS, 1);
        read.set_data(Some(core.pool().take(512).unwrap()));
        let read = namespace.run(read).await;
        if !read.status().is_success() {
            return Err(namespace.failure());
        }
        let data = read.request().data().unwrap().single().unwrap();
        assert!(data.as_slice().iter().all(|byte| *byte == step as u8), "step {step}");
        steps.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// [`drive`] on a reactor.
struct Driver {
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
    outcome: std::sync::mpsc::Receiver<Result<(), Option<nvme::ControllerFailure>>>,
}

impl Driver {
    fn start(reactors: &reactor::Reactors, port: &str, outage_ns_max: u64) -> Driver {
        let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (sender, outcome) = std::sync::mpsc::sync_channel(1);
        let (port, its_stop, its_steps) = (port.to_string(), stop.clone(), steps.clone());
        let job = move |core: &reactor::Core| {
            let core = core.clone();
            core.clone().spawn(async move {
                let _ = sender.send(drive(core, port, outage_ns_max, its_stop, its_steps).await);
            });
        };
        reactors.handles()[0].post(job).unwrap();
        Driver { stop, steps, outcome }
    }
}

#[test]
fn the_drivers_namespace_gives_up_a_target_that_stays_away_for_how_it_was_lost() {
    let medium = two_media();
    let side = TargetSide::start(&medium, &["0".into()]);
    let reactors = reactors();
    let driver = Driver::start(&reactors, &side.ports()[0], 1);
    wait_for_progress(&driver.steps);
    drop(side);
    let ended = driver.outcome.recv_timeout(std::time::Duration::from_secs(30)).unwrap();
    let failure = ended.unwrap_err().expect("it has given up");
    use nvme::ControllerFailure::{Closed, Network};
    assert!(matches!(failure, Closed | Network(_)), "{failure}");
    drop(reactors);
}

#[test]
fn the_drivers_namespace_outlives_its_connections_but_not_its_identity() {
    let medium = two_media();
    let side = TargetSide::start(&medium, &["0".into()]);
    let ports = side.ports();
    let reactors = reactors();
    let Driver { stop, steps, outcome } = Driver::start(&reactors, &ports[0], u64::MAX);
    wait_for_progress(&steps);
    drop(side);
    let side = TargetSide::start(&medium, &ports);
    wait_for_progress(&steps);
    assert!(outcome.try_recv().is_err(), "I/O failed although the target has returned");
    drop(side);
    let side = TargetSide::exporting(&medium, "Malloc1", &ports);
    let ended = outcome.recv_timeout(std::time::Duration::from_secs(30)).unwrap();
    assert_eq!(ended, Err(Some(nvme::ControllerFailure::Replaced)));
    stop.store(true, Ordering::Relaxed);
    drop(reactors);
    drop(side);
}
