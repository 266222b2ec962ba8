//! Examination by modules that read: a device that does not answer keeps no other, and no method, waiting.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::rpc::BdevModule;
use bdev::{
    Access, AsyncChannel, Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, DiskReadError, DiskReader,
    Durability, Registry, Request, null,
};
use block_io::{Channel, Op, Status};
use control::json::json;
use control::{ControlPlane, Examination, Method, Module};
use reactor::{Core, Reactors};

const LABEL: &[u8] = b"LABEL";

/// A disk with a label, which answers reads or does not.
struct Disk {
    /// `None` for one that answers at once.
    answers: Option<Arc<AtomicBool>>,
    /// Receives the number of channels opened so far, with each request.
    requests_seen: Option<Mutex<Sender<usize>>>,
    opened: AtomicUsize,
}

impl Disk {
    fn new(answers: Option<Arc<AtomicBool>>) -> Disk {
        Disk { answers, requests_seen: None, opened: AtomicUsize::new(0) }
    }
}

impl Bdev for Disk {
    fn product_name(&self) -> &'static str {
        "test disk"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry::new(512, 64)
    }

    fn durability(&self) -> Durability {
        Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        op == Op::Read
    }

    fn open(&self, _core: &Core) -> Result<BoxedChannel, BdevError> {
        let channels = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        let sender = self.requests_seen.as_ref().map(|sender| sender.lock().unwrap().clone());
        let seen = sender.map(|sender| (sender, channels));
        Ok(Box::new(DiskChannel { answers: self.answers.clone(), requests: Vec::new(), seen }))
    }
}

struct DiskChannel {
    answers: Option<Arc<AtomicBool>>,
    requests: Vec<Request>,
    seen: Option<(Sender<usize>, usize)>,
}

impl Channel for DiskChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        if let Some((sender, channels)) = &self.seen {
            batch.iter().for_each(|_| sender.send(*channels).unwrap());
        }
        self.requests.append(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        if self.answers.as_ref().is_some_and(|answers| !answers.load(Ordering::Acquire)) {
            return 0;
        }
        let before = sink.len();
        for mut request in self.requests.drain(..) {
            request.data_mut().unwrap().copy_from(0, LABEL);
            sink.push(request.complete(Status::SUCCESS));
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        (!self.requests.is_empty()).then_some(0)
    }
}

/// Creates a bdev `NAME-label` for each device with a label.
struct Labels {
    registry: Registry,
    reader: DiskReader,
    failed: Mutex<Sender<DiskReadError>>,
}

impl Module for Labels {
    const NAME: &'static str = "labels";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<Labels>> {
        Vec::new()
    }

    fn examine_disk(&self, bdev: &str, examination: Examination) {
        let (registry, failed) = (self.registry.clone(), self.failed.lock().unwrap().clone());
        self.reader.read(bdev, 0, 1, move |read| match read {
            Ok(block) if block.starts_with(LABEL) => {
                let config = null::NullConfig::new(&format!("{}-label", examination.bdev()), 8, 512);
                // It is there if the device was examined before.
                examination.finish(move || drop(null::create(&registry, config)));
            }
            Ok(_) => {}
            Err(error) => failed.send(error).unwrap(),
        });
    }
}

struct Program {
    plane: Arc<ControlPlane>,
    registry: Registry,
    failed: Receiver<DiskReadError>,
    /// Last, as the plane's modules use it.
    reactors: Reactors,
}

impl Program {
    fn start(timeout: Duration) -> Program {
        let reactors = Reactors::start(&reactor::ReactorConfig::default()).unwrap();
        let registry = Registry::new();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let (sender, failed) = channel();
        let reader = DiskReader::with_timeout(registry.clone(), reactors.handles()[0].clone(), timeout);
        let labels = Labels { registry: registry.clone(), reader, failed: Mutex::new(sender) };
        let plane = builder.module(&bdevs).module(&Arc::new(labels)).start(None).unwrap();
        Program { plane, registry, failed, reactors }
    }

    fn disk(&self, name: &str, answers: Option<Arc<AtomicBool>>) {
        self.registry.register(name, None, &[], Arc::new(Disk::new(answers))).unwrap();
    }

    fn has(&self, name: &str) -> bool {
        self.registry.find(name).is_some()
    }

    /// `bdev_wait_for_examine` on another thread.
    fn wait(&self) -> Receiver<()> {
        let (sender, ended) = channel();
        let plane = self.plane.clone();
        std::thread::spawn(move || {
            plane.invoke("bdev_wait_for_examine", json!({})).unwrap();
            sender.send(()).unwrap();
        });
        ended
    }
}

#[test]
fn a_device_that_never_answers_keeps_no_other_and_no_method_waiting() {
    let program = Program::start(Duration::from_secs(600));
    let answers = Arc::new(AtomicBool::new(false));
    // More than a core examines at a time would be all that hang.
    for index in 0..8 {
        program.disk(&format!("hangs{index}"), Some(answers.clone()));
    }
    let ended = program.wait();
    for index in 0..20 {
        let name = format!("disk{index}");
        program.disk(&name, None);
        program.plane.invoke("bdev_examine", json!({ "name": name })).unwrap();
        assert!(program.has(&format!("{name}-label")));
        // An update waits for no disk.
        let params = json!({ "name": format!("N{index}"), "num_blocks": 8, "block_size": 512 });
        program.plane.invoke("bdev_null_create", params).unwrap();
    }
    assert!(ended.try_recv().is_err(), "eight devices are not examined");
    answers.store(true, Ordering::Release);
    ended.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!((0..8).all(|index| program.has(&format!("hangs{index}-label"))));
    assert!(program.failed.try_recv().is_err());
    program.plane.stop();
}

#[test]
fn the_examination_of_a_device_that_never_answers_ends_in_time() {
    let program = Program::start(Duration::from_millis(20));
    let answers = Arc::new(AtomicBool::new(false));
    // More than are read at a time.
    for index in 0..70 {
        program.disk(&format!("hangs{index}"), Some(answers.clone()));
    }
    program.disk("disk", None);
    program.wait().recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(program.has("disk-label"));
    let failed: Vec<String> = program.failed.try_iter().map(|error| error.to_string()).collect();
    assert_eq!(failed.len(), 70);
    assert!(failed.contains(&"hangs69 did not complete a read in 0.02 s".to_string()), "{failed:?}");
    // Each is closed once it has answered.
    let device = program.registry.unregister("hangs3").unwrap();
    assert!(!device.wait_closed(Duration::ZERO));
    answers.store(true, Ordering::Release);
    assert!(device.wait_closed(Duration::from_secs(30)));
    program.plane.stop();
}

#[test]
fn what_cannot_be_read_is_reported_and_examined() {
    let program = Program::start(Duration::from_secs(600));
    let (sender, results) = channel();
    program.disk("disk", None);
    let reactor = program.reactors.handles()[0].clone();
    let reader = DiskReader::new(program.registry.clone(), reactor);
    for (name, lba, blocks) in [("gone", 0, 1), ("disk", 63, 2), ("disk", 0, 0), ("disk", u64::MAX, 1)] {
        let sender = sender.clone();
        reader.read(name, lba, blocks, move |read| sender.send(read.unwrap_err().to_string()).unwrap());
        let text = results.recv_timeout(Duration::from_secs(30)).unwrap();
        let expected = match name {
            "gone" => "no bdev is called gone".to_string(),
            _ => format!("{blocks} blocks at {lba} of disk cannot be read at once"),
        };
        assert_eq!(text, expected);
    }
    program.plane.stop();
}

#[test]
fn zeroes_are_no_blocks() {
    let program = Program::start(Duration::from_secs(600));
    let params = json!({ "name": "memory", "num_blocks": 64, "block_size": 512 });
    program.plane.invoke("bdev_malloc_create", params).unwrap();
    program.disk("disk", None);
    let core = program.reactors.handles()[0].clone();
    let device = program.registry.open("memory", Access::ReadWrite).unwrap();
    let (sender, written) = channel();
    let write = move |core: &Core| {
        let io = AsyncChannel::new(core, device.channel(core).unwrap());
        let mut buffer = core.pool().take(512).unwrap();
        buffer.as_mut_slice().fill(7);
        core.spawn(async move { sender.send(io.write(20, buffer).await.is_ok()).unwrap() });
    };
    core.post(write).unwrap();
    assert!(written.recv_timeout(Duration::from_secs(30)).unwrap());
    let reader = DiskReader::new(program.registry.clone(), core);
    let (sender, results) = channel();
    // Memory knows its pages of 4 KiB, the disk knows nothing.
    let expected = [
        ("memory", 0, None),
        ("memory", 16, None),
        ("memory", 18, Some(0)),
        ("memory", 20, Some(7)),
        ("memory", 24, None),
        ("disk", 0, Some(LABEL[0])),
    ];
    for (name, lba, first) in expected {
        let sender = sender.clone();
        reader.read_unless_zero(name, lba, 4, move |read| sender.send(read.unwrap()).unwrap());
        let read = results.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(read.map(|blocks| blocks[0]), first, "{name} at {lba}");
    }
    program.plane.stop();
}

/// A store that is scanned has hundreds of reads, and the kernel has few contexts of AIO, which end late.
#[test]
fn reads_of_a_device_in_flight_share_a_channel() {
    let program = Program::start(Duration::from_secs(600));
    let answers = Arc::new(AtomicBool::new(false));
    let (seen, requests) = channel();
    let disk = Disk { requests_seen: Some(Mutex::new(seen)), ..Disk::new(Some(answers.clone())) };
    program.registry.register("disk", None, &[], Arc::new(disk)).unwrap();
    // The examination's own read.
    assert_eq!(requests.recv_timeout(Duration::from_secs(30)).unwrap(), 1);
    let reader = DiskReader::new(program.registry.clone(), program.reactors.handles()[0].clone());
    let (sender, results) = channel();
    for _ in 0..40 {
        let sender = sender.clone();
        reader.read("disk", 0, 1, move |read| sender.send(read.unwrap().starts_with(LABEL)).unwrap());
    }
    for _ in 0..40 {
        assert_eq!(requests.recv_timeout(Duration::from_secs(30)).unwrap(), 1);
    }
    answers.store(true, Ordering::Release);
    for _ in 0..40 {
        assert!(results.recv_timeout(Duration::from_secs(30)).unwrap());
    }
    program.plane.stop();
}

#[test]
fn reads_are_answered_when_the_core_stops() {
    let reactors = Reactors::start(&reactor::ReactorConfig::default()).unwrap();
    let core = reactors.handles()[0].clone();
    let (registry, answers) = (Registry::new(), Arc::new(AtomicBool::new(false)));
    registry.register("hangs", None, &[], Arc::new(Disk::new(Some(answers.clone())))).unwrap();
    let reader = DiskReader::new(registry, core.clone());
    let (sender, results) = channel();
    let read = || {
        let sender = sender.clone();
        reader.read("hangs", 0, 1, move |read| sender.send(read.map_err(|error| error.to_string())).unwrap());
    };
    (0..1000).for_each(|_| read());
    // So that all that can begin have begun.
    core.call(|_| ()).unwrap();
    let stop = std::thread::spawn(move || reactors.stop());
    while core.post(|_| ()).is_ok() {
        std::thread::yield_now();
    }
    read();
    answers.store(true, Ordering::Release);
    stop.join().unwrap();
    let results: Vec<_> = results.try_iter().collect();
    let unavailable = Err("the core that examines has no resources left".to_string());
    assert_eq!(results.len(), 1001);
    assert!(results.iter().all(|result| result.is_ok() || *result == unavailable), "{results:?}");
    assert!(results.iter().filter(|result| **result == unavailable).count() >= 1001 - 64);
}
