//! Stores and images through the control plane, on two cores.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::mpsc;

use bdev::error::{ErrorConfig, FaultAction, FaultInjection};
use bdev::rpc::BdevModule;
use bdev::testing::CrashDisk;
use bdev::{
    Access, AsyncChannel, Bdev, BdevError, BdevGeometry, BoxedChannel, Durability, Registry, Request, error,
    malloc, split,
};
use block_io::{Op, RequestFlags, Status, Tag};
use control::json::{Value, json};
use control::{ControlPlane, JobHandle};
use os::CpuSet;
use reactor::blocking::block_on;
use reactor::{Core, ReactorConfig, Reactors};
use store_node::rpc::StoreModule;
use store_node::{StoreCores, StoreError, StoreNode};

struct Program {
    registry: Registry,
    reactors: Reactors,
    control: Arc<ControlPlane>,
}

impl Program {
    /// Two reactors, and a device of 64 MiB under one that injects errors.
    fn start() -> Program {
        let cpus = CpuSet::new(vec![0, 1]).unwrap();
        let reactors = Reactors::start(&ReactorConfig { cpus, pin: false, ..Default::default() }).unwrap();
        let registry = Registry::new();
        malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 131_072, 512)).unwrap();
        error::create(&registry, ErrorConfig::new("Malloc0")).unwrap();
        let store = StoreModule::new(registry.clone(), reactors.handles());
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let control = builder.module(&bdevs).module(&store).start(None).unwrap();
        Program { registry, reactors, control }
    }

    fn call(&self, method: &str, params: Value) -> Value {
        self.control.invoke(method, params).unwrap_or_else(|error| panic!("{method}: {}", error.message))
    }

    fn refused(&self, method: &str, params: Value) -> String {
        self.control.invoke(method, params).unwrap_err().message
    }

    /// Runs I/O to a bdev on a core, and waits for its end.
    fn io<R: Send + 'static, Fut: Future<Output = R> + 'static>(
        &self,
        core: usize,
        bdev_name: &str,
        work: impl FnOnce(AsyncChannel, Core) -> Fut + Send + 'static,
    ) -> R {
        let descriptor = self.registry.open(bdev_name, Access::ReadWrite).unwrap();
        let (sender, receiver) = mpsc::channel();
        let run = move |core: &Core| {
            let (io, core) = (AsyncChannel::new(core, descriptor.channel(core).unwrap()), core.clone());
            let of_task = core.clone();
            of_task.spawn(async move {
                let _ = sender.send(work(io, core).await);
            });
        };
        self.reactors.handles()[core].post(run).unwrap();
        receiver.recv().unwrap()
    }

    fn write(&self, core: usize, lba: u64, bytes: usize, value: u8) -> Status {
        self.io(core, "s/vol", move |io, core| async move {
            let mut buffer = core.pool().take(bytes).unwrap();
            buffer.as_mut_slice().fill(value);
            io.write(lba, buffer).await.map_or_else(|(status, _)| status, |_| Status::SUCCESS)
        })
    }

    /// A number of the store's partitions, all together.
    fn count(&self, name: &str) -> u64 {
        let stores = self.call("store_get_stores", json!({}));
        let partitions = stores[0]["partitions"].as_array().unwrap().iter();
        partitions.map(|partition| partition[name].as_u64().unwrap()).sum()
    }

    fn read(&self, core: usize, lba: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        self.io(core, "s/vol", move |io, core| async move {
            let buffer = core.pool().take(bytes).unwrap();
            let read = io.read(lba, buffer).await.map_err(|(status, _)| status);
            read.map(|buffer| buffer.as_slice().to_vec())
        })
    }

    fn open(&self) -> Value {
        self.call("store_open", json!({ "bdev_name": "EE_Malloc0", "name": "s" }))
    }

    fn close(&self) {
        self.call("store_close", json!({ "name": "s" }));
    }

    fn format(&self) {
        self.call("store_format", json!({ "bdev_name": "EE_Malloc0", "partitions": 3 }));
    }

    fn stop(self) {
        self.control.drain();
        self.reactors.stop();
        self.control.stop();
    }
}

#[test]
fn images_are_created_resized_deleted_and_found_again() {
    let program = Program::start();
    assert!(program.refused("store_open", json!({ "bdev_name": "EE_Malloc0" })).contains("has no store"));
    program.format();
    assert!(program.refused("store_format", json!({ "bdev_name": "EE_Malloc0" })).contains("already"));
    assert_eq!(program.open(), json!([]));
    assert!(
        program.refused("store_format", json!({ "bdev_name": "EE_Malloc0", "force": true })).contains("s")
    );
    let image = |size: u64| json!({ "store": "s", "name": "vol", "size": size });
    assert_eq!(program.call("store_image_create", image(32 << 20)), "s/vol");
    assert!(program.refused("store_image_create", image(1 << 20)).contains("already"));
    assert!(program.refused("store_image_resize", image(1000)).contains("multiple of 512"));
    assert!(
        program.refused("store_image_delete", json!({ "store": "s", "name": "x" })).contains("no image x")
    );
    // Across a border of objects, from both cores, in requests that the layer divides.
    assert_eq!(program.write(0, 8192 - 300, 300 << 10, 7), Status::SUCCESS);
    assert_eq!(program.write(1, 3, 1024, 8), Status::SUCCESS);
    program.close();
    assert!(program.registry.find("s/vol").is_none());
    assert_eq!(program.open(), json!(["s/vol"]));
    for core in [0, 1] {
        assert!(program.read(core, 8192 - 300, 300 << 10).unwrap().iter().all(|byte| *byte == 7));
        let bytes = program.read(core, 0, 4096).unwrap();
        assert!(
            bytes
                .iter()
                .enumerate()
                .all(|(at, byte)| *byte == if at / 512 == 3 || at / 512 == 4 { 8 } else { 0 })
        );
    }
    // What is cut off is gone.
    program.call("store_image_resize", image((4 << 20) + 512));
    assert_eq!(program.read(0, 8192 + 1, 512), Err(Status::LBA_OUT_OF_RANGE.do_not_retry()));
    program.call("store_image_resize", image(64 << 20));
    assert!(program.read(0, 8192, 512).unwrap().iter().all(|byte| *byte == 7));
    assert!(program.read(0, 8192 + 1, 64 << 10).unwrap().iter().all(|byte| *byte == 0));
    program.call("store_image_delete", json!({ "store": "s", "name": "vol" }));
    program.close();
    assert_eq!(program.open(), json!([]));
    let stores = program.call("store_get_stores", json!({}));
    for partition in stores[0]["partitions"].as_array().unwrap() {
        assert_eq!(partition["objects"], 0);
        assert_eq!(partition["free_extents"], partition["extents"]);
    }
    program.stop();
}

#[test]
fn a_device_that_fails_ends_its_partition_and_loses_nothing() {
    let program = Program::start();
    program.format();
    program.open();
    program.call("store_image_create", json!({ "store": "s", "name": "vol", "size": 32 << 20 }));
    assert_eq!(program.write(0, 0, 4096, 1), Status::SUCCESS);
    let failure = FaultInjection::once(Some(Op::Write), FaultAction::Fail(Status::INTERNAL_ERROR));
    error::inject(&program.registry, "EE_Malloc0", failure).unwrap();
    assert_eq!(program.write(0, 0, 4096, 2), Status::INTERNAL_ERROR);
    assert_eq!(program.read(0, 0, 4096), Err(Status::INTERNAL_ERROR));
    let stores = program.call("store_get_stores", json!({ "name": "s" }));
    let states = stores[0]["partitions"].as_array().unwrap().iter();
    assert_eq!(states.filter(|partition| partition["state"] == "failed").count(), 1);
    // Another object's partition goes on.
    assert_eq!(program.write(0, 8192, 4096, 3), Status::SUCCESS);
    program.close();
    program.open();
    let first = program.read(0, 0, 4096).unwrap();
    assert!(first.iter().all(|byte| *byte == first[0]) && [1, 2].contains(&first[0]), "{}", first[0]);
    assert!(program.read(0, 8192, 4096).unwrap().iter().all(|byte| *byte == 3));
    program.stop();
}

#[test]
fn a_cancelled_removal_goes_on_when_the_store_is_opened() {
    let program = Program::start();
    program.format();
    let (cores, job) = (StoreCores::Reactors(program.reactors.handles()), JobHandle::standalone());
    let open = || {
        let opened = StoreNode::open(&program.registry, "EE_Malloc0", "s", &cores, &job);
        block_on(opened).unwrap().unwrap()
    };
    let node = open();
    block_on(node.create_image("vol", 32 << 20)).unwrap().unwrap();
    assert_eq!(program.write(0, 8192, 4096, 1), Status::SUCCESS);
    let cancelled = JobHandle::standalone();
    cancelled.cancel().unwrap();
    let removed = block_on(node.remove_image("vol", &cancelled)).unwrap();
    assert!(matches!(removed, Err(StoreError::Cancelled)), "{removed:?}");
    assert!(node.images()[0].removing && program.registry.find("s/vol").is_none());
    assert!(block_on(node.create_image("vol", 1 << 20)).unwrap().is_err(), "its name is still in use");
    block_on(node.close()).unwrap();
    drop(node);
    // Until the cores have released the device, it cannot be claimed.
    while program.registry.claims().iter().any(|(name, _)| name == "EE_Malloc0") {
        std::thread::yield_now();
    }
    let node = open();
    assert_eq!(node.images(), []);
    // Closing puts the removals in place.
    block_on(node.close()).unwrap();
    let status = block_on(node.status()).unwrap().unwrap();
    assert!(status.iter().all(|partition| partition.space.objects == 0));
    drop(node);
    program.stop();
}

/// A device that lacks an operation which formatting uses where it is there.
struct WithoutZeroes(Arc<dyn Bdev>);

impl Bdev for WithoutZeroes {
    fn product_name(&self) -> &'static str {
        "Without zeroes"
    }

    fn geometry(&self) -> BdevGeometry {
        self.0.geometry()
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn supports(&self, op: Op) -> bool {
        op != Op::WriteZeroes && self.0.supports(op)
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        self.0.open(core)
    }
}

#[test]
fn a_device_without_write_zeroes_is_formatted_with_writes() {
    let program = Program::start();
    let below = malloc::create(&Registry::new(), malloc::MallocConfig::new("Malloc1", 32_768, 512)).unwrap();
    program.registry.register("Plain", None, &[], Arc::new(WithoutZeroes(below.bdev().clone()))).unwrap();
    program.call("store_format", json!({ "bdev_name": "Plain" }));
    assert_eq!(program.call("store_open", json!({ "bdev_name": "Plain", "name": "s" })), json!([]));
    program.stop();
}

#[test]
fn a_preallocated_image_has_its_space_before_it_is_written() {
    let program = Program::start();
    program.format();
    program.open();
    let image =
        |name: &str, mib: u64| json!({ "store": "s", "name": name, "size": mib << 20, "preallocate": true });
    let space = || {
        let stores = program.call("store_get_stores", json!({}));
        let partitions = stores[0]["partitions"].as_array().unwrap().clone();
        let sum = |name: &str| partitions.iter().map(|it| it[name].as_u64().unwrap()).sum::<u64>();
        sum("free_extents") * stores[0]["partitions"][0]["extent_bytes"].as_u64().unwrap()
    };
    let before = space();
    program.call("store_image_create", image("vol", 24));
    assert!(program.read(0, 0, 4096).unwrap().iter().all(|byte| *byte == 0));
    // Objects are allocated when their entries go in place, at the latest when the store is closed.
    let reopen = || {
        program.call("store_close", json!({ "name": "s" }));
        program.open();
    };
    reopen();
    let allocated = before - space();
    assert!((24 << 20..30 << 20).contains(&allocated), "{allocated}");
    // Writes, and zeroes that leave the space, need no more; zeroes that do not give it back.
    let blocks = (4 << 20) / 512;
    let zero = |flags: RequestFlags| {
        program.io(0, "s/vol", move |io, _| async move {
            let request = Request::new(Tag(0), Op::WriteZeroes, 0, blocks);
            io.submit(Request { flags, ..request }).await.status()
        })
    };
    for index in 0..64 {
        assert_eq!(program.write(0, index * 640, 4096, 7), Status::SUCCESS);
    }
    assert_eq!(zero(RequestFlags::ALLOCATE), Status::SUCCESS);
    assert!(program.read(0, 0, 4096).unwrap().iter().all(|byte| *byte == 0));
    reopen();
    assert_eq!(before - space(), allocated);
    assert_eq!(zero(RequestFlags::DEALLOCATE), Status::SUCCESS);
    reopen();
    assert_eq!(before - space(), allocated - (4 << 20));
    // One for which there is not enough leaves nothing.
    let refused = program.refused("store_image_create", image("large", 64));
    assert!(refused.contains("allocating an object"), "{refused}");
    reopen();
    assert_eq!(before - space(), allocated - (4 << 20));
    let stores = program.call("store_get_stores", json!({}));
    assert_eq!(stores[0]["images"].as_array().unwrap().len(), 1);
    program.stop();
}

#[test]
fn writes_wait_while_much_is_not_in_place() {
    let program = Program::start();
    program
        .call("store_format", json!({ "bdev_name": "EE_Malloc0", "partitions": 1, "log_bytes": 24 << 20 }));
    program.open();
    program.call("store_image_create", json!({ "store": "s", "name": "vol", "size": 4 << 20 }));
    // More than a partition keeps in memory, in flight at once on one object.
    let statuses = program.io(0, "s/vol", |io, core| async move {
        let (sender, receiver) = mpsc::channel();
        for index in 0..256u64 {
            let (io, sender, pool) = (io.clone(), sender.clone(), core.pool().clone());
            core.spawn(async move {
                let mut buffer = pool.take(64 << 10).unwrap();
                buffer.as_mut_slice().fill(index as u8 % 64);
                let written = io.write(index % 64 * 128, buffer).await;
                sender.send(written.map_or_else(|(status, _)| status, |_| Status::SUCCESS)).unwrap();
            });
        }
        drop(sender);
        let mut statuses = Vec::new();
        while statuses.len() < 256 {
            statuses.extend(receiver.try_iter());
            core.sleep_ns(100_000).await;
        }
        statuses
    });
    assert!(statuses.iter().all(|status| status.is_success()));
    for index in 0..64 {
        let bytes = program.read(1, index * 128, 64 << 10).unwrap();
        assert!(bytes.iter().all(|byte| u64::from(*byte) == index), "64 KiB block {index}");
    }
    let stores = program.call("store_get_stores", json!({}));
    let partitions = stores[0]["partitions"].as_array().unwrap().iter();
    let most = partitions.map(|partition| partition["unplaced_bytes_max"].as_u64().unwrap()).max().unwrap();
    assert!((1 << 20..=8 << 20).contains(&most), "{most}");
    program.stop();
}

#[test]
fn flushes_and_reads_are_counted_by_cause() {
    let program = Program::start();
    program.format();
    program.open();
    program.call("store_image_create", json!({ "store": "s", "name": "vol", "size": 32 << 20 }));
    let count = |name: &str| program.count(name);
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let is_late = || assert!(std::time::Instant::now() < end, "not within a minute");
    assert_eq!(program.write(0, 0, 4096, 1), Status::SUCCESS);
    while count("flushes_by_time") == 0 {
        is_late();
    }
    // A part of the block is in the log, unless it went in place before the read.
    while count("reads_overlaid") == 0 {
        is_late();
        assert_eq!(program.write(0, 0, 512, 2), Status::SUCCESS);
        let bytes = program.read(0, 0, 4096).unwrap();
        assert!(bytes[..512].iter().all(|byte| *byte == 2) && bytes[512..].iter().all(|byte| *byte == 1));
    }
    assert_eq!(count("flushes_by_count"), 0);
    program.stop();
}

#[test]
fn prioritized_threads_serve_a_store_and_count_their_wakes() {
    let program = Program::start();
    program.format();
    let params = json!({ "bdev_name": "EE_Malloc0", "name": "s", "threads": "prioritized" });
    program.call("store_open", params.clone());
    program.call("store_image_create", json!({ "store": "s", "name": "vol", "size": 32 << 20 }));
    let saved = program.call("framework_get_config", json!({ "name": "store" }));
    assert_eq!(saved[0]["params"]["threads"], "prioritized");
    for index in 0..200 {
        assert_eq!(program.write(index as usize % 2, index * 129, 64 << 10, index as u8), Status::SUCCESS);
    }
    let threads = || program.call("store_get_stores", json!({}))[0]["threads"].clone();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while program.count("entries_to_place") > 0 {
        assert!(std::time::Instant::now() < end, "not within a minute");
    }
    for index in 0..200 {
        let bytes = program.read(index as usize % 2, index * 129, 64 << 10).unwrap();
        assert!(bytes.iter().all(|byte| u64::from(*byte) == index), "64 KiB from block {}", index * 129);
    }
    let threads = threads();
    assert_eq!(threads["mode"], "prioritized");
    let wakes = threads["wakes"].as_object().unwrap();
    let wakes_of = |cause: &str| wakes[cause].as_u64().unwrap();
    assert!(wakes_of("time") + wakes_of("count") + wakes_of("full_log") > 0, "{threads}");
    assert!(wakes_of("read") > 0, "{threads}");
    let placed = |how: &str| threads[how].as_u64().unwrap();
    let all: u64 = wakes.values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(placed("placed_on_idle_core") + placed("placed_by_kernel"), all, "{threads}");
    // The reactors have two cores.
    let has_others = CpuSet::allowed().cpus().len() > 2;
    assert_eq!(threads["pools_overlap"], !has_others);
    assert_eq!(placed("placed_on_idle_core") > 0, has_others, "{threads}");
    // The device is free, and the other mode finds the same.
    program.close();
    program.open();
    for index in 0..200 {
        let bytes = program.read(0, index * 129, 64 << 10).unwrap();
        assert!(bytes.iter().all(|byte| u64::from(*byte) == index), "64 KiB from block {}", index * 129);
    }
    program.close();
    program.call("store_open", params);
    assert!(program.read(0, 0, 64 << 10).unwrap().iter().all(|byte| *byte == 0));
    program.stop();
}

#[test]
fn a_device_that_fails_under_a_non_priority_thread_ends_its_partition_and_loses_nothing() {
    let program = Program::start();
    program.format();
    let params = json!({ "bdev_name": "EE_Malloc0", "name": "s", "threads": "prioritized" });
    program.call("store_open", params.clone());
    program.call("store_image_create", json!({ "store": "s", "name": "vol", "size": 32 << 20 }));
    assert_eq!(program.write(0, 0, 4096, 1), Status::SUCCESS);
    let reads_from_log = || {
        assert!(program.read(0, 0, 4096).unwrap().iter().all(|byte| *byte == 1));
        program.count("reads_from_log")
    };
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // Until the last one was of what is in place.
    while reads_from_log() != reads_from_log() {
        assert!(std::time::Instant::now() < end, "not within a minute");
    }
    // A read of what is in place fails alone, and a flush of a checkpoint with its partition.
    let failure = FaultInjection::once(Some(Op::Read), FaultAction::Fail(Status::UNRECOVERED_READ_ERROR));
    error::inject(&program.registry, "EE_Malloc0", failure).unwrap();
    assert_eq!(program.read(0, 0, 4096).unwrap_err(), Status::UNRECOVERED_READ_ERROR);
    assert!(program.read(0, 0, 4096).unwrap().iter().all(|byte| *byte == 1));
    let failure = FaultInjection::once(Some(Op::Flush), FaultAction::Fail(Status::INTERNAL_ERROR));
    error::inject(&program.registry, "EE_Malloc0", failure).unwrap();
    program.close();
    program.call("store_open", params);
    assert!(program.read(0, 0, 4096).unwrap().iter().all(|byte| *byte == 1));
    program.stop();
}

/// A closed store with an image whose first two blocks are written.
fn with_data() -> Program {
    let program = Program::start();
    program.format();
    program.open();
    program.call("store_image_create", json!({ "store": "s", "name": "vol", "size": 32 << 20 }));
    assert_eq!(program.write(0, 0, 8192, 0xa5), Status::SUCCESS);
    program.close();
    program
}

#[test]
fn damage_is_found_by_reads_and_by_inspection() {
    let program = with_data();
    let inspect = |program: &Program| {
        let registry = program.registry.clone();
        program.io(0, "EE_Malloc0", move |_, core| async move {
            store_node::inspect(&core, &registry, "EE_Malloc0", true, |_| {}).await.unwrap()
        })
    };
    let sound = inspect(&program);
    assert_eq!((sound.problems.len(), sound.images.len(), sound.images[0].name.as_str()), (0, 1, "vol"));
    assert_eq!(sound.partitions.iter().map(|partition| partition.blocks_checked).sum::<u64>(), 2);
    // The device's block that has the image's first.
    let damaged = program.io(0, "EE_Malloc0", |io, core| async move {
        for lba in (0..131_072).step_by(8) {
            let mut buffer = io.read(lba, core.pool().take(4096).unwrap()).await.unwrap();
            if buffer.as_slice().iter().all(|byte| *byte == 0xa5) {
                buffer.as_mut_slice()[100] = 0;
                io.write(lba, buffer).await.unwrap();
                return lba / 8;
            }
        }
        panic!("the data is not in place");
    });
    let found = inspect(&program);
    assert_eq!(found.problems.len(), 1, "{:?}", found.problems);
    assert!(found.problems[0].starts_with(&format!("block {damaged}: the checksum of block 0 of object 0")));
    program.open();
    assert_eq!(program.read(0, 0, 4096), Err(Status::UNRECOVERED_READ_ERROR));
    assert!(program.read(0, 8, 4096).unwrap().iter().all(|byte| *byte == 0xa5));
    program.stop();
}

/// A bad sector is any bytes; the copy is in the last block of the device.
#[test]
fn a_damaged_superblock_is_read_from_its_copy() {
    let program = with_data();
    let damage = |program: &Program, lba: u64| {
        program.io(0, "EE_Malloc0", move |io, core| async move {
            let mut buffer = core.pool().take(512).unwrap();
            buffer.as_mut_slice().fill(0x5a);
            io.write(lba, buffer).await.map(drop).unwrap();
        });
    };
    // The channel of the damage closes in a later turn of its core.
    let once_free = |method: &str, params: Value| loop {
        match program.control.invoke(method, params.clone()) {
            Err(error) if error.message.contains("is claimed") => std::thread::yield_now(),
            outcome => break outcome,
        }
    };
    let open = json!({ "bdev_name": "EE_Malloc0", "name": "s" });
    damage(&program, 0);
    once_free("store_open", open.clone()).unwrap();
    assert!(program.read(0, 0, 8192).unwrap().iter().all(|byte| *byte == 0xa5));
    program.close();
    // It is a store still, and not formatted without force.
    let refused = program.refused("store_format", json!({ "bdev_name": "EE_Malloc0" }));
    assert!(refused.contains("already"), "{refused}");
    damage(&program, 131_072 - 8);
    let refused = once_free("store_open", open).unwrap_err().message;
    assert!(refused.contains("has no store"), "{refused}");
    program.stop();
}

/// The first block of each partition's checksum table.
fn checksum_tables(program: &Program) -> Vec<u64> {
    let registry = program.registry.clone();
    let superblock = program.io(0, "EE_Malloc0", move |_, core| async move {
        store_node::inspect(&core, &registry, "EE_Malloc0", false, |_| {}).await.unwrap().superblock
    });
    let start = superblock.layout().unwrap().checksums_start;
    (0..superblock.partitions).map(|index| superblock.partition_start(index) + start).collect()
}

/// What happens to all reads of these blocks from now on.
fn disturb_reads(program: &Program, blocks: &[u64], action: FaultAction) {
    for block in blocks {
        let injection = FaultInjection {
            range: Some(block * 8..block * 8 + 8),
            count: None,
            ..FaultInjection::once(Some(Op::Read), action)
        };
        error::inject(&program.registry, "EE_Malloc0", injection).unwrap();
    }
}

#[test]
fn what_the_checksum_table_has_lost_is_damaged_until_it_is_written_again() {
    let program = with_data();
    // Reads of the table return another checksum of the first block.
    disturb_reads(&program, &checksum_tables(&program), FaultAction::Corrupt { offset: 0, xor: 0x5a });
    program.open();
    assert_eq!(program.read(0, 0, 4096), Err(Status::UNRECOVERED_READ_ERROR));
    assert!(program.read(0, 8, 4096).unwrap().iter().all(|byte| *byte == 0xa5));
    assert_eq!(program.write(0, 8, 4096, 7), Status::SUCCESS);
    // What is written to the table is what was read, with what changed.
    program.close();
    error::clear(&program.registry, "EE_Malloc0").unwrap();
    program.open();
    assert_eq!(program.read(0, 0, 4096), Err(Status::UNRECOVERED_READ_ERROR));
    assert!(program.read(0, 8, 4096).unwrap().iter().all(|byte| *byte == 7));
    let counts = ["damaged_blocks", "checksum_hits", "checksum_misses"].map(|name| program.count(name));
    assert_eq!(counts, [1, 1, 1]);
    assert_eq!(program.count("checksum_cache_bytes"), 4096);
    let stores = program.call("store_get_stores", json!({}));
    assert_eq!(stores[0]["checksum_cache_limit_bytes"], 64 << 20);
    assert_eq!(program.write(0, 0, 4096, 9), Status::SUCCESS);
    program.close();
    program.open();
    assert!(program.read(0, 0, 4096).unwrap().iter().all(|byte| *byte == 9));
    program.stop();
}

#[test]
fn a_checksum_table_that_cannot_be_read_fails_reads_and_loses_nothing() {
    let program = with_data();
    let tables = checksum_tables(&program);
    let fail = || disturb_reads(&program, &tables, FaultAction::Fail(Status::UNRECOVERED_READ_ERROR));
    let recover = || error::clear(&program.registry, "EE_Malloc0").unwrap();
    program.open();
    fail();
    assert_eq!(program.read(0, 0, 4096), Err(Status::UNRECOVERED_READ_ERROR));
    // A write of a whole block needs no checksum.
    assert_eq!(program.write(0, 0, 4096, 7), Status::SUCCESS);
    recover();
    assert!(program.read(0, 8, 4096).unwrap().iter().all(|byte| *byte == 0xa5));
    program.close();
    // A checkpoint that cannot read what it changes fails; the log keeps everything.
    program.open();
    fail();
    assert_eq!(program.write(0, 8, 4096, 8), Status::SUCCESS);
    program.close();
    recover();
    program.open();
    for (block, value) in [(0, 7), (1, 8)] {
        assert!(program.read(0, block * 8, 4096).unwrap().iter().all(|byte| *byte == value));
    }
    program.stop();
}

#[test]
fn a_read_that_waits_for_checksums_ends_when_its_partition_fails() {
    let program = with_data();
    let tables = checksum_tables(&program);
    program.open();
    disturb_reads(&program, &tables, FaultAction::Pending);
    let descriptor = program.registry.open("s/vol", Access::ReadWrite).unwrap();
    let (sender, receiver) = mpsc::channel();
    let read = move |core: &Core| {
        let (io, core) = (AsyncChannel::new(core, descriptor.channel(core).unwrap()), core.clone());
        let buffer = core.pool().take(4096).unwrap();
        let task =
            async move { sender.send(io.read(0, buffer).await.map(drop).map_err(|(status, _)| status)) };
        core.spawn(async move { _ = task.await });
    };
    program.reactors.handles()[0].post(read).unwrap();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let count = |name: &str| program.count(name);
    while count("checksum_misses") == 0 {
        assert!(std::time::Instant::now() < end, "not within a minute");
    }
    let fail = FaultAction::Fail(Status::UNRECOVERED_READ_ERROR);
    error::inject(&program.registry, "EE_Malloc0", FaultInjection::once(Some(Op::Write), fail)).unwrap();
    assert_eq!(program.write(0, 8, 4096, 7), Status::INTERNAL_ERROR);
    let read = receiver.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    assert_eq!(read.err(), Some(Status::INTERNAL_ERROR));
    error::clear(&program.registry, "EE_Malloc0").unwrap();
    error::resume_pending(&program.registry, "EE_Malloc0").unwrap();
    program.stop();
}

/// What a store is worth is said by the device below those that are named, and by the weaker one of two.
#[test]
fn durability_is_that_of_the_devices_below() {
    let program = Program::start();
    CrashDisk::create_pmem(&program.registry, "PmemLog", 32_768, 512, 1).unwrap();
    for name in ["Disk", "DiskLog"] {
        CrashDisk::create(&program.registry, name, 131_072, 512, 1).unwrap();
    }
    malloc::create(&program.registry, malloc::MallocConfig::new("Log", 32_768, 512)).unwrap();
    split::create(
        &program.registry,
        &split::SplitConfig { base: "Log".into(), count: 2, part_size: split::PartSize::Even },
    )
    .unwrap();
    let durability = |data: &str, log: Option<&str>| {
        let mut params = json!({ "bdev_name": data, "force": true });
        if let Some(log) = log {
            params["log_bdev_name"] = log.into();
        }
        program.call("store_format", params.clone());
        params.as_object_mut().unwrap().remove("force");
        params["name"] = "s".into();
        program.call("store_open", params);
        program.call("store_image_create", json!({ "store": "s", "name": "vol", "size": 1 << 20 }));
        let stores = program.call("store_get_stores", json!({}));
        let image = program.call("bdev_get_bdevs", json!({ "name": "s/vol" }));
        assert_eq!(image[0]["durability"], stores[0]["durability"]);
        program.close();
        stores[0]["durability"].as_str().unwrap().to_string()
    };
    assert_eq!(durability("Disk", None), "disk");
    assert_eq!(durability("Disk", Some("DiskLog")), "disk");
    assert_eq!(durability("Disk", Some("Logp1")), "memory");
    // What is acknowledged is in the log; it goes to the disk before it leaves that.
    assert_eq!(durability("Disk", Some("PmemLog")), "pmem");
    assert_eq!(durability("EE_Malloc0", Some("PmemLog")), "memory");
    let refused = program.refused("store_format", json!({ "bdev_name": "PmemLog" }));
    assert!(refused.contains("only the logs of a store may be there"), "{refused}");
    assert_eq!(durability("EE_Malloc0", None), "memory");
    assert_eq!(durability("EE_Malloc0", Some("DiskLog")), "memory");
    program.stop();
}

/// Every wrong pair of devices is refused by name, and nothing of them is changed.
#[test]
fn logs_on_a_device_of_their_own_are_found_and_no_others() {
    let program = Program::start();
    for (name, blocks) in [("Log0", 16_384), ("Log1", 16_384), ("Small", 64)] {
        malloc::create(&program.registry, malloc::MallocConfig::new(name, blocks, 512)).unwrap();
    }
    let on = |log: Option<&str>| {
        let mut params = json!({ "bdev_name": "EE_Malloc0", "name": "s" });
        if let Some(log) = log {
            params["log_bdev_name"] = log.into();
        }
        params
    };
    let formatted = |log: &str, force: bool| json!({ "bdev_name": "EE_Malloc0", "log_bdev_name": log, "partitions": 3, "force": force });
    let refused = |log: &str| program.refused("store_format", formatted(log, false));
    assert!(refused("Small").contains("too few for 3 logs"), "{}", refused("Small"));
    assert!(refused("EE_Malloc0").contains("name another one"), "{}", refused("EE_Malloc0"));
    // Another store, whose logs are on Log1.
    program.call("store_format", formatted("Log1", false));
    program.call("store_format", json!({ "bdev_name": "EE_Malloc0", "partitions": 3, "force": true }));
    assert!(program.refused("store_open", on(Some("Log1"))).contains("on its own device: name none"));
    let result = program.call("store_format", formatted("Log0", true));
    assert_eq!(result["log_bytes"], json!(((16_384 / 8 - 2) / 3 - 2) * 4096));

    assert_eq!(program.call("store_open", on(Some("Log0"))), json!([]));
    program.call("store_image_create", json!({ "store": "s", "name": "vol", "size": 16 << 20 }));
    assert_eq!(program.write(0, 8192 - 300, 300 << 10, 7), Status::SUCCESS);
    assert_eq!(program.write(1, 3, 1024, 8), Status::SUCCESS);
    let described = program.call("store_get_stores", json!({}));
    // The log is in memory, although nothing is known of the other device.
    assert_eq!((&described[0]["log_bdev"], &described[0]["durability"]), (&json!("Log0"), &json!("memory")));
    let saved = program.control.save_subsystem("store").unwrap();
    assert_eq!(saved[0]["params"]["log_bdev_name"], "Log0", "{saved:?}");
    program.close();

    let wanted = |log: Option<&str>| program.refused("store_open", on(log));
    assert!(wanted(None).contains("has its logs on another device"), "{}", wanted(None));
    assert!(wanted(Some("Log1")).contains("those of another store"), "{}", wanted(Some("Log1")));
    assert!(wanted(Some("Small")).contains("has none"), "{}", wanted(Some("Small")));
    let log_alone = program.refused("store_open", json!({ "bdev_name": "Log0" }));
    assert!(log_alone.contains("has the logs of the store on device"), "{log_alone}");
    // Neither is formatted without force.
    assert!(refused("Log1").contains("already"));
    for (data, log) in [("Log0", None), ("Small", Some("Log0"))] {
        let params = json!({ "bdev_name": data, "log_bdev_name": log });
        let params = if log.is_none() { json!({ "bdev_name": data }) } else { params };
        let error = program.refused("store_format", params);
        assert!(error.contains("already") || error.contains("too few"), "{error}");
    }

    assert_eq!(program.call("store_open", on(Some("Log0"))), json!(["s/vol"]));
    assert!(program.read(1, 8192 - 300, 300 << 10).unwrap().iter().all(|byte| *byte == 7));
    assert!(program.read(0, 3, 1024).unwrap().iter().all(|byte| *byte == 8));
    program.stop();
}
