//! libblkio's vhost-user driver as the client of the target.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use bdev::{Registry, delay, malloc, null};
use blkio_client::{BlkioCompletion, BlkioDevice, BlkioError, BlkioOptions, BlkioRequest};
use random::WyRand;
use reactor::{ReactorConfig, Reactors};
use vhost::{VhostBlkConfig, VhostTarget};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 64 * MIB;
/// Bytes of a block in the test of data.
const BLOCK: usize = 4096;

/// A target in a directory of its own. It ends with [`stop`](TestTarget::stop), and its devices stay.
struct TestTarget {
    target: VhostTarget,
    directory: PathBuf,
    reactors: Reactors,
}

impl TestTarget {
    /// With the controller `disk` of a device.
    fn start(name: &str, registry: &Registry, bdev: &str) -> TestTarget {
        let directory = std::env::temp_dir().join(format!("blkio-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let reactors = Reactors::start(&ReactorConfig { pin: false, ..Default::default() }).unwrap();
        let target = VhostTarget::new(registry.clone(), reactors.handles(), directory.clone());
        target.create(VhostBlkConfig::new("disk", bdev)).unwrap();
        TestTarget { target, directory, reactors }
    }

    fn socket(&self, controller: &str) -> PathBuf {
        self.directory.join(controller)
    }

    fn open(&self, controller: &str, options: &BlkioOptions) -> BlkioDevice {
        BlkioDevice::open(&self.socket(controller), options).unwrap()
    }

    fn stop(self) {
        self.target.shutdown();
        self.reactors.stop();
        self.target.close();
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}

fn registry() -> Registry {
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("Malloc0", DISK_BYTES / 512, 512)).unwrap();
    registry
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = WyRand::new(seed);
    std::iter::repeat_with(|| random.next_bits().to_le_bytes()).flatten().take(bytes).collect()
}

/// Executes requests on a queue with up to `depth` in flight.
fn run(device: &mut BlkioDevice, queue: usize, depth: usize, requests: &[BlkioRequest]) {
    let (mut submitted, mut completed) = (0, 0);
    while completed < requests.len() {
        while submitted < requests.len() && submitted - completed < depth {
            device.submit(queue, requests[submitted], submitted);
            submitted += 1;
        }
        let check = |completion: BlkioCompletion| {
            assert_eq!(completion.errno, 0, "{:?}", requests[completion.tag]);
        };
        completed += device.reap(queue, 1, check).unwrap();
    }
}

/// Each queue writes its blocks in any order, with many in flight, and reads the other's.
#[test]
fn data_is_written_and_read_over_two_queues() {
    let target = TestTarget::start("data", &registry(), "Malloc0");
    let memory_bytes = 8 * MIB;
    let mut device = target.open("disk", &BlkioOptions { queues: 2, memory_bytes, ..Default::default() });
    let blocks = memory_bytes / BLOCK as u64;
    let expected = pattern(1, memory_bytes as usize);
    device.memory().write(0, &expected);
    let places =
        |queue: u64| (0..blocks / 2).map(move |one| (one * 577 % (blocks / 2) * 2 + queue) * BLOCK as u64);
    for queue in [0, 1] {
        let write = |offset| BlkioRequest::Write { offset, at: offset, bytes: BLOCK };
        run(&mut device, queue, 128, &places(queue as u64).map(write).collect::<Vec<_>>());
    }
    run(&mut device, 1, 1, &[BlkioRequest::Flush]);
    device.memory().zero(0, memory_bytes);
    for queue in [0, 1] {
        let read = |offset| BlkioRequest::Read { offset, at: offset, bytes: BLOCK };
        run(&mut device, queue, 128, &places(1 - queue as u64).map(read).collect::<Vec<_>>());
    }
    let mut found = vec![0; expected.len()];
    device.memory().read(0, &mut found);
    assert!(found == expected, "other data is read than was written");
    drop(device);
    target.stop();
}

/// Requests from one sector to the largest segment, none of them at a multiple of its size.
#[test]
fn requests_have_any_size_up_to_the_segment_limit() {
    let target = TestTarget::start("sizes", &registry(), "Malloc0");
    let mut device = target.open("disk", &BlkioOptions::default());
    let largest = device.property("max-segment-len").unwrap() as usize;
    for (number, bytes) in [512, 1536, 4096, 65536 + 512, largest].into_iter().enumerate() {
        let (offset, data) = (512 * (1 + number as u64 * 4001), pattern(number as u64, bytes));
        device.write(offset, &data).unwrap();
        assert!(device.read(offset, bytes).unwrap() == data, "{bytes} bytes");
    }
    drop(device);
    target.stop();
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zeroes() {
    let target = TestTarget::start("zeroes", &registry(), "Malloc0");
    let mut device = target.open("disk", &BlkioOptions::default());
    let half = MIB / 2;
    let requests = [
        BlkioRequest::Discard { offset: half, bytes: half },
        BlkioRequest::WriteZeroes { offset: half, bytes: half, may_unmap: true },
        BlkioRequest::WriteZeroes { offset: half, bytes: half, may_unmap: false },
    ];
    for request in requests {
        let data = pattern(2, 2 * MIB as usize);
        device.write(0, &data).unwrap();
        device.execute(request).unwrap();
        let mut expected = data;
        expected[half as usize..MIB as usize].fill(0);
        assert!(device.read(0, expected.len()).unwrap() == expected, "{request:?}");
    }
    drop(device);
    target.stop();
}

#[test]
fn the_limits_are_announced_and_enforced() {
    let registry = registry();
    let blocks = DISK_BYTES / 4096;
    malloc::create(&registry, malloc::MallocConfig::new("Malloc4k", blocks, 4096)).unwrap();
    let target = TestTarget::start("limits", &registry, "Malloc0");
    target.target.create(VhostBlkConfig::new("disk4k", "Malloc4k")).unwrap();
    let mut device = target.open("disk", &BlkioOptions::default());
    let expected = [
        ("capacity", DISK_BYTES),
        ("request-alignment", 512),
        ("max-queues", 256),
        ("max-mem-regions", 64),
        ("max-segments", 126),
        ("max-segment-len", 256 << 10),
        ("max-transfer", 126 * (256 << 10)),
        ("max-discard-len", 1 << 30),
        ("max-write-zeroes-len", 1 << 30),
        ("flush-needed", 1),
    ];
    for (name, value) in expected {
        assert_eq!(device.property(name).unwrap(), value, "{name}");
    }
    let at = 0;
    let invalid = [
        BlkioRequest::Read { offset: DISK_BYTES, at, bytes: 512 },
        BlkioRequest::Write { offset: DISK_BYTES - 512, at, bytes: 1024 },
        BlkioRequest::Discard { offset: DISK_BYTES, bytes: 512 },
        BlkioRequest::WriteZeroes { offset: DISK_BYTES - 512, bytes: 1024, may_unmap: true },
        BlkioRequest::Discard { offset: 0, bytes: (1 << 30) + 512 },
        BlkioRequest::WriteZeroes { offset: 0, bytes: (1 << 30) + 512, may_unmap: false },
    ];
    for request in invalid {
        let ended = device.execute(request);
        assert!(matches!(ended, Err(BlkioError::Request(_))), "{request:?}: {ended:?}");
    }
    device.read(0, 512).unwrap();
    let too_many =
        BlkioDevice::open(&target.socket("disk"), &BlkioOptions { queues: 257, ..Default::default() });
    assert!(matches!(too_many, Err(BlkioError::Library(_))));

    let mut device = target.open("disk4k", &BlkioOptions::default());
    assert_eq!(device.property("request-alignment").unwrap(), 4096);
    device.write(4096, &[1; 4096]).unwrap();
    assert!(matches!(device.read(512, 512), Err(BlkioError::Request(_))), "a part of a block");
    drop(device);
    target.stop();
}

#[test]
fn a_read_only_device_is_only_read() {
    let target = TestTarget::start("read-only", &registry(), "Malloc0");
    let config = VhostBlkConfig { read_only: true, ..VhostBlkConfig::new("locked", "Malloc0") };
    target.target.delete("disk").unwrap();
    target.target.create(config).unwrap();
    let rejected = BlkioDevice::open(&target.socket("locked"), &BlkioOptions::default());
    assert!(matches!(rejected, Err(BlkioError::Library(_))), "it announces that it is read-only");
    let mut device = target.open("locked", &BlkioOptions { read_only: true, ..Default::default() });
    assert_eq!(device.read(0, 512).unwrap(), [0; 512]);
    drop(device);
    target.stop();
}

#[test]
fn a_resize_is_seen_and_used() {
    let registry = registry();
    null::create(&registry, null::NullConfig::new("Null0", 4096, 512)).unwrap();
    let target = TestTarget::start("resize", &registry, "Null0");
    let mut device = target.open("disk", &BlkioOptions::default());
    assert!(device.read(4096 * 512, 512).is_err());
    null::resize(&registry, "Null0", 8192).unwrap();
    assert_eq!(device.property("capacity").unwrap(), 8192 * 512);
    device.read(8191 * 512, 512).unwrap();
    drop(device);
    target.stop();
}

/// Data stays when clients disconnect with requests in flight, and when the target is stopped and started.
#[test]
fn a_client_that_comes_back_finds_its_data() {
    let registry = registry();
    let slow = delay::DelayConfig::new("Malloc0", "Slow0", 20_000);
    delay::create(&registry, slow).unwrap();
    let target = TestTarget::start("back", &registry, "Slow0");
    let data = pattern(3, BLOCK);
    for round in 0..4_u64 {
        let mut device = target.open("disk", &BlkioOptions::default());
        if round > 0 {
            assert!(device.read((round - 1) * BLOCK as u64, BLOCK).unwrap() == data, "round {round}");
        }
        device.write(round * BLOCK as u64, &data).unwrap();
        // These are in flight when the connection closes, and keep the memory for as long as they need it.
        for number in 0..32 {
            let offset = MIB + number * BLOCK as u64;
            device.submit(0, BlkioRequest::Write { offset, at: 0, bytes: BLOCK }, 0);
        }
        device.reap(0, 0, |_| {}).unwrap();
    }
    let mut device = target.open("disk", &BlkioOptions::default());
    target.stop();
    device.submit(0, BlkioRequest::Read { offset: 0, at: 0, bytes: BLOCK }, 0);
    device.reap(0, 0, |completion| panic!("a target that has stopped answers: {completion:?}")).unwrap();
    drop(device);
    let target = TestTarget::start("back", &registry, "Slow0");
    let mut device = target.open("disk", &BlkioOptions::default());
    assert!(device.read(3 * BLOCK as u64, BLOCK).unwrap() == data);
    drop(device);
    target.stop();
}
