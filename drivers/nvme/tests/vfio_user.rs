//! The driver against the vfio-user target of this repository, on other reactors: through a socket and shared memory.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../examples/exercise.rs"]
mod exercise;
mod rig;

use dma::Data;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use block_io::{Channel, Op, Request, Status, Tag};
use nvme::{Controller, Namespace, Uri};
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, VfioUserConfig};
use reactor::{Core, IdlePolicy, Reactor, Reactors};
use rig::{buffer, execute, finish, next_turn, options, status};

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const BLOCKS: u64 = 16384;

/// A target on its own reactors that exports an 8 MiB malloc bdev.
struct TestTarget {
    registry: bdev::Registry,
    target: NvmfTarget,
    directory: PathBuf,
    reactors: Option<Reactors>,
}

impl TestTarget {
    fn new() -> TestTarget {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringbolt-driver-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        let registry = bdev::Registry::new();
        bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", BLOCKS, 512)).unwrap();
        let config =
            reactor::ReactorConfig { idle: IdlePolicy::default(), ..reactor::ReactorConfig::default() };
        let reactors = Reactors::start(&config).unwrap();
        let target = NvmfTarget::new(registry.clone(), reactors.handles());
        target.create_vfio_user(VfioUserConfig::default()).unwrap();
        let any = SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() };
        target.create_subsystem(NQN, any).unwrap();
        target.add_namespace(NQN, NamespaceConfig::new("Malloc0")).unwrap();
        let address = ListenAddress::vfio_user(directory.to_str().unwrap());
        target.add_listener(NQN, address).unwrap();
        TestTarget { registry, target, directory, reactors: Some(reactors) }
    }

    fn uri(&self) -> Uri {
        format!("nvme+vfio-user:{}?ns=1", self.directory.display()).parse().unwrap()
    }
}

impl Drop for TestTarget {
    fn drop(&mut self) {
        self.target.shutdown();
        drop(self.reactors.take());
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}

fn on_host<R: 'static, F: Future<Output = R> + 'static>(idle: IdlePolicy, job: impl FnOnce(Core) -> F) -> R {
    let reactor = Reactor::new(&rig::reactor_config(idle)).unwrap();
    let core = reactor.core();
    reactor.block_on(job(core))
}

#[test]
fn transfers_of_all_sizes_round_trip() {
    let served = TestTarget::new();
    let uri = served.uri();
    on_host(IdlePolicy::Spin, async move |core| {
        let mut namespace = Namespace::open(&core, &uri, &options()).await.unwrap();
        assert_eq!((namespace.block_size(), namespace.blocks()), (512, BLOCKS));
        let bytes_max = namespace.transfer_max_bytes().min(1 << 20);
        for (round, bytes) in [512, 4096, 8192, 12288, 65536, bytes_max].into_iter().enumerate() {
            let fill = |at: usize| (at / 512 + at + round) as u8;
            let mut write = core.pool().take(bytes as usize).unwrap();
            write.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = fill(at));
            let (lba, blocks) = (round as u64, bytes / 512);
            let write = Request::write(Tag(0), lba, blocks, write);
            assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS, "{bytes}");
            let read = Request::read(Tag(0), lba, blocks, buffer(&core, bytes as usize, 0xee));
            let done = finish(&core, &mut namespace, vec![read]).await;
            let data = done[0].request().data().and_then(Data::single).unwrap();
            assert!(data.as_slice().iter().enumerate().all(|(at, byte)| *byte == fill(at)), "{bytes}");
        }
        for op in [Op::Unmap, Op::WriteZeroes, Op::Flush] {
            let done = status(&core, &mut namespace, Request::new(Tag(0), op, 0, 8)).await;
            assert_eq!(done, Status::SUCCESS, "{op:?}");
        }
        let read = Request::read(Tag(0), 0, 8, buffer(&core, 4096, 0xee));
        let done = finish(&core, &mut namespace, vec![read]).await;
        assert!(
            done[0].request().data().and_then(Data::single).unwrap().as_slice().iter().all(|byte| *byte == 0)
        );
        let data = buffer(&core, 512, 1);
        let compare = nvme::Command::compare(
            Tag(9),
            1,
            &wire_nvme::io::ReadWrite { lba: 0, blocks: 1, ..Default::default() },
            data,
        );
        let done = execute(&mut namespace, vec![compare]).await;
        assert!(done[0].status().same_code(Status::COMPARE_FAILURE), "{}", done[0].status());
    });
}

#[test]
fn every_supported_command_passes_the_exercise() {
    let served = TestTarget::new();
    exercise::exercise(&served.uri()).unwrap();
}

#[test]
fn every_request_of_a_full_queue_completes_once() {
    let served = TestTarget::new();
    let uri = served.uri();
    on_host(IdlePolicy::Spin, async move |core| {
        let mut namespace = Namespace::open(&core, &uri, &options()).await.unwrap();
        let batch: Vec<_> = (0..3000)
            .map(|tag| Request::write(Tag(tag), tag * 5 % BLOCKS, 1, buffer(&core, 512, tag as u8)))
            .collect();
        let done = finish(&core, &mut namespace, batch).await;
        let mut tags: Vec<u64> = done.iter().map(|completion| completion.tag().0).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..3000).collect::<Vec<_>>());
        assert!(done.iter().all(|completion| completion.status().is_success()));
    });
}

#[test]
fn a_target_interrupt_wakes_a_sleeping_core() {
    let served = TestTarget::new();
    let uri = served.uri();
    on_host(IdlePolicy::Sleep, async move |core| {
        let options = nvme::Options { io_timeout_ns: 0, ..options() };
        let mut namespace = Namespace::open(&core, &uri, &options).await.unwrap();
        for round in 0..20 {
            let mut batch = vec![Request::read(Tag(round), 0, 1, buffer(&core, 512, 0))];
            namespace.submit(&mut batch);
            assert_eq!(namespace.deadline(), None, "the core may sleep");
            let mut done = Vec::new();
            while namespace.poll(&mut done) == 0 {
                core.next_event().await;
            }
            assert_eq!(done[0].status(), Status::SUCCESS);
        }
    });
}

#[test]
fn data_and_queue_pairs_survive_a_reset() {
    let served = TestTarget::new();
    let uri = served.uri();
    on_host(IdlePolicy::Spin, async move |core| {
        let mut namespace = Namespace::open(&core, &uri, &options()).await.unwrap();
        let controller = namespace.controller().unwrap().clone();
        for _ in 0..3 {
            let write = Request::write(Tag(0), 7, 1, buffer(&core, 512, 9));
            assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
            controller.reset().await.unwrap();
            let read = Request::read(Tag(0), 7, 1, buffer(&core, 512, 0));
            let done = finish(&core, &mut namespace, vec![read]).await;
            assert_eq!(done[0].status(), Status::SUCCESS);
            assert_eq!(done[0].request().data().and_then(Data::single).unwrap().as_slice()[511], 9);
        }
        assert_eq!(controller.resets(), 3);
    });
}

#[test]
fn namespaces_share_one_attached_controller() {
    let served = TestTarget::new();
    let uri = served.uri();
    on_host(IdlePolicy::Spin, async move |core| {
        let mut one = Namespace::open(&core, &uri, &options()).await.unwrap();
        let mut two = Namespace::open(&core, &uri, &options()).await.unwrap();
        let write = Request::write(Tag(0), 3, 1, buffer(&core, 512, 5));
        assert_eq!(status(&core, &mut one, write).await, Status::SUCCESS);
        let read = Request::read(Tag(0), 3, 1, buffer(&core, 512, 0));
        let done = finish(&core, &mut two, vec![read]).await;
        assert_eq!(done[0].request().data().and_then(Data::single).unwrap().as_slice()[0], 5);
        drop((one, two));
        // Dropping the last handle frees the socket for the next client.
        let again = Controller::attach(&core, &uri, &options()).await.unwrap();
        assert_eq!(again.active_namespaces().await.unwrap(), [1]);
    });
}

#[test]
fn io_to_a_removed_namespace_fails() {
    let served = TestTarget::new();
    let (uri, target) = (served.uri(), served.target.clone());
    on_host(IdlePolicy::Spin, async move |core| {
        let mut namespace = Namespace::open(&core, &uri, &options()).await.unwrap();
        let read = Request::read(Tag(0), 0, 1, buffer(&core, 512, 0));
        assert_eq!(status(&core, &mut namespace, read).await, Status::SUCCESS);
        target.remove_namespace(NQN, 1).unwrap();
        let gone = Status::INVALID_NAMESPACE_OR_FORMAT;
        let deadline_ns = os::clock::now_ns() + 5_000_000_000;
        loop {
            let read = Request::read(Tag(0), 0, 1, buffer(&core, 512, 0));
            if status(&core, &mut namespace, read).await.same_code(gone) {
                break;
            }
            assert!(os::clock::now_ns() < deadline_ns);
            next_turn().await;
        }
    });
    assert!(served.registry.find("Malloc0").is_some());
}
