//! Requests that a module cannot take as they are: split, bounced, copied, aborted, and answered by the layer.
#![allow(clippy::unwrap_used)]

mod rig;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use bdev::{
    Access, Bdev, BdevChannel, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, IoLimits,
    Request,
};
use block_io::{Channel as _, Op, Payload, RequestFlags, Status, Tag};
use dma::{Buffer, Data, SharedRegion};
use proptest::prelude::*;
use rig::Rig;

const BLOCK: usize = 512;
const BLOCKS: u64 = 512;

/// A RAM disk that asserts that requests keep to its limits, and completes them in an order of its own.
struct Picky {
    limits: IoLimits,
    depth: u32,
    disk: Arc<Mutex<Vec<u8>>>,
    /// Reads and writes of this block fail.
    bad_lba: Option<u64>,
    /// Requests that reached it.
    requests: Arc<AtomicU32>,
}

struct PickyChannel {
    limits: IoLimits,
    depth: usize,
    disk: Arc<Mutex<Vec<u8>>>,
    bad_lba: Option<u64>,
    queue: VecDeque<Request>,
    requests: Arc<AtomicU32>,
}

impl Bdev for Picky {
    fn product_name(&self) -> &'static str {
        "Picky disk"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry::new(BLOCK as u32, BLOCKS)
    }

    fn durability(&self) -> Durability {
        Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write | Op::Flush)
    }

    fn io_limits(&self) -> IoLimits {
        self.limits
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(PickyChannel {
            limits: self.limits,
            depth: self.depth as usize,
            disk: self.disk.clone(),
            bad_lba: self.bad_lba,
            queue: VecDeque::new(),
            requests: self.requests.clone(),
        }))
    }
}

impl block_io::Channel for PickyChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        self.requests.fetch_add(batch.len() as u32, Ordering::Relaxed);
        for request in batch.drain(..) {
            if let Some(data) = request.data() {
                assert_eq!(data.len(), request.blocks as usize * BLOCK);
                assert!(data.len() <= self.limits.transfer_bytes_max as usize, "{} bytes", data.len());
                assert!(data.slices().len() <= self.limits.segments_max as usize, "{data:?}");
                assert!(data.is_aligned(self.limits.alignment as usize), "{data:?}");
                let ends = |slice: &Buffer| (slice.as_ptr().addr(), slice.as_ptr().addr() + slice.len());
                for pair in data.slices().windows(2) {
                    let borders = ends(&pair[0]).1 | ends(&pair[1]).0;
                    assert_eq!(borders & (self.limits.virtual_boundary as usize - 1), 0, "{data:?}");
                }
                let part = |lba: u64| lba.checked_div(self.limits.boundary_blocks.into());
                let last = request.lba + u64::from(request.blocks) - 1;
                assert_eq!(part(request.lba), part(last), "crosses a boundary");
            }
            self.queue.push_back(request);
        }
        assert!(self.queue.len() <= self.depth, "more requests than the depth");
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        // The newest first: parts complete out of order.
        let Some(mut request) = self.queue.pop_back() else { return 0 };
        let range = request.lba..request.lba + u64::from(request.blocks);
        if request.op.has_data() && self.bad_lba.is_some_and(|lba| range.contains(&lba)) {
            sink.push(request.complete(Status::UNRECOVERED_READ_ERROR));
            return 1;
        }
        let at = request.lba as usize * BLOCK;
        let mut disk = self.disk.lock().unwrap();
        let op = request.op;
        if let Some(data) = request.data_mut() {
            let end = at + data.len();
            match op {
                Op::Read => data.copy_from(0, &disk[at..end]),
                _ => data.copy_to(0, &mut disk[at..end]),
            }
        }
        sink.push(request.complete(Status::SUCCESS));
        1
    }

    fn deadline(&self) -> Option<u64> {
        (!self.queue.is_empty()).then_some(0)
    }
}

struct Bench {
    rig: Rig,
    channel: BdevChannel,
    disk: Arc<Mutex<Vec<u8>>>,
    requests: Arc<AtomicU32>,
}

impl Bench {
    fn new(limits: IoLimits, depth: u32, bad_lba: Option<u64>) -> Bench {
        let rig = Rig::new();
        let content = (0..BLOCKS as usize * BLOCK).map(|at| (at / BLOCK + at) as u8).collect();
        let disk = Arc::new(Mutex::new(content));
        let requests = Arc::new(AtomicU32::new(0));
        let module = Picky { limits, depth, disk: disk.clone(), bad_lba, requests: requests.clone() };
        rig.registry.register("picky", None, &[], Arc::new(module)).unwrap();
        let descriptor = rig.registry.open("picky", Access::ReadWrite).unwrap();
        let channel = descriptor.channel(&rig.core).unwrap();
        Bench { rig, channel, disk, requests }
    }

    fn run(&mut self, batch: Vec<Request>) -> Vec<Completion> {
        self.rig.run(&mut self.channel, batch)
    }

    fn one(&mut self, request: Request) -> Completion {
        self.rig.one(&mut self.channel, request)
    }

    fn content(&self, lba: u64, blocks: u32) -> Vec<u8> {
        let at = lba as usize * BLOCK;
        self.disk.lock().unwrap()[at..at + blocks as usize * BLOCK].to_vec()
    }
}

fn bytes(data: &Data) -> Vec<u8> {
    let mut out = vec![0; data.len()];
    data.copy_to(0, &mut out);
    out
}

/// Data of slices of these lengths, each at this offset within its allocation.
fn scattered(rig: &Rig, slices: &[(usize, usize)], fill: u8) -> Data {
    let slice = |&(offset, length): &(usize, usize)| {
        let mut buffer = rig.buffer(offset + length, fill);
        if offset > 0 { buffer.split_off(offset) } else { buffer }
    };
    Data::gather(slices.iter().map(slice).collect()).unwrap()
}

const LIMITS: IoLimits = IoLimits {
    transfer_bytes_max: 4096,
    segments_max: 2,
    alignment: 512,
    virtual_boundary: 1,
    boundary_blocks: 16,
};

#[test]
fn a_request_of_any_size_is_split_at_the_limits_and_comes_back_whole() {
    let mut bench = Bench::new(LIMITS, 8, None);
    let slices = [(0, 1 << 16), (0, 1 << 16)];
    let read = Request::read(Tag(1), 5, 256, scattered(&bench.rig, &slices, 0xcc));
    let completion = bench.one(read);
    assert_eq!(completion.status(), Status::SUCCESS);
    let data = completion.into_request().take_data().unwrap();
    assert_eq!(data.slices().len(), 2, "what was split is joined");
    assert_eq!(data.slices()[0].capacity(), 1 << 16, "and whole again");
    assert_eq!(bytes(&data), bench.content(5, 256));
    let write = Request::write(Tag(2), 100, 256, scattered(&bench.rig, &slices, 0x5a));
    assert_eq!(bench.one(write).status(), Status::SUCCESS);
    assert_eq!(bench.content(100, 256), vec![0x5a; 256 * BLOCK]);
    assert_eq!(bench.channel.outstanding(), 0);
}

#[test]
fn slices_that_meet_at_a_virtual_boundary_stay_in_one_request() {
    let limits = IoLimits { virtual_boundary: 4096, ..IoLimits::NONE };
    let mut bench = Bench::new(limits, 8, None);
    for (slices, most) in [
        // A first slice that ends at a page, a page, and the start of one: nothing is divided.
        (&[(3584, 512), (0, 4096), (0, 512)][..], 1),
        (&[(0, 512), (0, 4096), (512, 512)], 3),
    ] {
        bench.one(Request::write(Tag(1), 0, 10, scattered(&bench.rig, slices, 7)));
        assert_eq!(bench.content(0, 10), vec![7; 10 * BLOCK]);
        assert_eq!(bench.requests.swap(0, Ordering::Relaxed), most, "{slices:?}");
    }
}

#[test]
fn an_atomic_write_is_one_request_or_fails() {
    let mut bench = Bench::new(LIMITS, 8, None);
    // More slices than the module takes, and misaligned ones.
    for slices in [&[(0, 1024), (0, 1024), (0, 1024), (0, 1024)][..], &[(3, 4000), (1, 96)]] {
        let mut write = Request::write(Tag(1), 8, 8, scattered(&bench.rig, slices, 6));
        write.flags = RequestFlags::ATOMIC;
        assert_eq!(bench.one(write).status(), Status::SUCCESS);
        assert_eq!(bench.content(8, 8), vec![6; 8 * BLOCK]);
        assert_eq!(bench.requests.swap(0, Ordering::Relaxed), 1, "{slices:?}");
    }
    // Beyond the largest transfer, and across a boundary.
    for (lba, blocks) in [(0, 9), (12, 8)] {
        let mut write = Request::write(Tag(1), lba, blocks, bench.rig.buffer(blocks as usize * BLOCK, 5));
        write.flags = RequestFlags::ATOMIC;
        let status = bench.one(write).status();
        assert!(status.same_code(Status::INVALID_FIELD), "{status}");
    }
    assert_eq!(bench.requests.load(Ordering::Relaxed), 0);
}

#[test]
fn misaligned_slices_and_external_memory_go_through_bounce_buffers() {
    let limits = IoLimits { segments_max: 1, alignment: 4096, ..IoLimits::NONE };
    let mut bench = Bench::new(limits, 8, None);
    // A block in three pieces, a block at an odd address, and whole pages between.
    let slices = [(1, 100), (0, 300), (7, 112), (3, 512), (0, 8192), (9, 1024)];
    let blocks = 3 + 16 + 1;
    let mut write = scattered(&bench.rig, &slices, 0);
    let content: Vec<u8> = (0..blocks as usize * BLOCK).map(|at| (at % 241) as u8).collect();
    write.copy_from(0, &content);
    assert_eq!(bench.one(Request::write(Tag(1), 7, blocks, write)).status(), Status::SUCCESS);
    assert_eq!(bench.content(7, blocks), content);
    let region = std::rc::Rc::new(SharedRegion::new(1 << 16).unwrap());
    let external = bench.rig.core.pool().attach_external(region.clone());
    let data = external.buffer(1000, blocks * BLOCK as u32).unwrap();
    let completion = bench.one(Request::read(Tag(2), 7, blocks, data));
    assert_eq!(completion.status(), Status::SUCCESS);
    let mut found = vec![0; content.len()];
    region.read(1000, &mut found);
    assert!(found == content);
}

#[test]
fn the_first_error_decides_and_the_data_is_returned() {
    let mut bench = Bench::new(LIMITS, 4, Some(60));
    let data = scattered(&bench.rig, &[(0, 1 << 16)], 1);
    let completion = bench.one(Request::read(Tag(3), 0, 128, data));
    assert!(completion.status().same_code(Status::UNRECOVERED_READ_ERROR), "{}", completion.status());
    assert_eq!(completion.into_request().data().map(Data::len), Some(1 << 16));
    // The parts that were never started left nothing behind.
    assert_eq!(bench.channel.outstanding(), 0);
    let data = scattered(&bench.rig, &[(0, 4096)], 1);
    assert_eq!(bench.one(Request::read(Tag(4), 0, 8, data)).status(), Status::SUCCESS);
}

#[test]
fn shared_data_is_written_and_not_read_into() {
    let mut bench = Bench::new(LIMITS, 8, None);
    let mut data = scattered(&bench.rig, &[(0, 8192)], 9);
    let copies = [data.share(), data.share()];
    let writes = copies.into_iter().zip([0, 40]).map(|(copy, lba)| Request::write(Tag(lba), lba, 16, copy));
    let writes: Vec<Request> = writes.collect();
    let done = bench.run(writes);
    assert!(done.iter().all(|completion| completion.status().is_success()));
    assert_eq!((bench.content(0, 16), bench.content(40, 16)), (vec![9; 8192], vec![9; 8192]));
    let refused = bench.one(Request::read(Tag(9), 0, 16, data.share()));
    assert!(refused.status().same_code(Status::INVALID_FIELD), "{}", refused.status());
    drop((refused, done));
    assert!(data.make_writable());
}

#[test]
fn a_compare_beyond_the_limits_is_divided_too() {
    let mut bench = Bench::new(LIMITS, 8, None);
    let expected = bench.content(3, 64);
    let mut data = scattered(&bench.rig, &[(0, 16384), (0, 16384)], 0);
    data.copy_from(0, &expected);
    let compare = Request { payload: Payload::Data(data), ..Request::new(Tag(1), Op::Compare, 3, 64) };
    let completion = bench.one(compare);
    assert_eq!(completion.status(), Status::SUCCESS);
    let mut request = completion.into_request();
    request.data_mut().unwrap().copy_from(20_000, &[!expected[20_000]]);
    let status = bench.one(request).status();
    assert!(status.same_code(Status::COMPARE_FAILURE), "{status}");
}

#[test]
fn copies_are_exact_where_ranges_overlap() {
    for (source, destination) in [(0, 200), (200, 0), (10, 13), (13, 10), (5, 5)] {
        let mut bench = Bench::new(LIMITS, 8, None);
        let expected = bench.content(source, 256);
        let status = bench.one(Request::copy(Tag(1), source, destination, 256)).status();
        assert_eq!(status, Status::SUCCESS);
        assert!(bench.content(destination, 256) == expected, "{source} to {destination}");
    }
}

#[test]
fn a_copy_from_outside_the_device_is_rejected() {
    let mut bench = Bench::new(LIMITS, 8, None);
    for source in [BLOCKS - 3, BLOCKS, u64::MAX] {
        let status = bench.one(Request::copy(Tag(1), source, 0, 4)).status();
        assert!(status.same_code(Status::LBA_OUT_OF_RANGE), "{status}");
    }
    let status = bench.one(Request::new(Tag(1), Op::Copy, 0, 4)).status();
    assert!(!status.is_success(), "a copy without a source");
}

#[test]
fn an_abort_completes_what_has_not_reached_the_module() {
    let mut bench = Bench::new(IoLimits::NONE, 1, None);
    let read = |bench: &Bench, tag| Request::read(Tag(tag), 0, 1, bench.rig.buffer(BLOCK, 0));
    let batch = vec![read(&bench, 1), read(&bench, 2), read(&bench, 3), Request::abort(Tag(4), Tag(2))];
    let done = bench.run(batch);
    let status = |tag: u64| done.iter().find(|one| one.tag() == Tag(tag)).unwrap().status();
    assert_eq!((status(1), status(3), status(4)), (Status::SUCCESS, Status::SUCCESS, Status::SUCCESS));
    assert!(status(2).same_code(Status::ABORT_REQUESTED), "{}", status(2));
    // There is nothing to abort, which is no error.
    assert_eq!(bench.one(Request::abort(Tag(5), Tag(77))).status(), Status::SUCCESS);
}

#[test]
fn every_block_of_a_module_without_seeks_is_allocated() {
    let mut bench = Bench::new(IoLimits::NONE, 8, None);
    for (op, found) in [(Op::SeekData, Some(30)), (Op::SeekHole, None)] {
        let completion = bench.one(Request::new(Tag(1), op, 30, 100));
        assert_eq!(completion.status(), Status::SUCCESS);
        let Payload::Found(answer) = completion.into_request().payload else { panic!("no answer") };
        assert_eq!(answer, found);
    }
    let status = bench.one(Request::new(Tag(1), Op::SeekData, BLOCKS, 1)).status();
    assert!(status.same_code(Status::LBA_OUT_OF_RANGE), "{status}");
}

#[test]
fn a_removed_device_fails_divided_requests_with_their_data() {
    let mut bench = Bench::new(LIMITS, 2, None);
    let mut batch: Vec<Request> = (0..4)
        .map(|tag| Request::write(Tag(tag), 0, 128, scattered(&bench.rig, &[(0, 1 << 16)], tag as u8)))
        .collect();
    bench.channel.submit(&mut batch);
    bench.rig.registry.unregister("picky").unwrap();
    assert!(batch.is_empty());
    let mut done = Vec::new();
    while done.len() < 4 {
        assert!(bench.channel.deadline().is_some(), "{} of 4 are back, and nothing is due", done.len());
        bench.channel.poll(&mut done);
    }
    for completion in done {
        assert!(!completion.status().is_success());
        assert_eq!(completion.into_request().data().map(Data::len), Some(1 << 16));
    }
    assert_eq!(bench.channel.outstanding(), 0);
}

#[test]
fn stacked_devices_keep_their_internal_requests_apart() {
    let mut rig = Rig::new();
    bdev::malloc::create(&rig.registry, bdev::malloc::MallocConfig::new("base", 4096, 512)).unwrap();
    let config =
        bdev::error::ErrorConfig { name: Some("upper".into()), ..bdev::error::ErrorConfig::new("base") };
    bdev::error::create(&rig.registry, config).unwrap();
    let mut channel = rig.registry.open("upper", Access::ReadWrite).unwrap().channel(&rig.core).unwrap();
    assert_eq!(rig.write(&mut channel, 0, 64, 7), Status::SUCCESS);
    let batch = (0..32).map(|tag| Request::copy(Tag(tag), 0, 64 * (tag + 1), 64)).collect();
    assert!(rig.run(&mut channel, batch).iter().all(|completion| completion.status().is_success()));
    assert_eq!(rig.read(&mut channel, 64 * 32, 64).unwrap(), vec![7; 64 * 512]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any requests on any limits leave the disk and their data as an unlimited device would.
    #[test]
    fn divided_requests_agree_with_an_oracle(
        transfer in 1u32..40, segments in 1u32..5, alignment_log2 in 0u32..13, virtual_log2 in 0u32..13,
        boundary in 0u32..20, depth in 1u32..6,
        steps in prop::collection::vec(
            (0u64..BLOCKS, 1u32..100, 0u8..3, 0u64..BLOCKS, prop::collection::vec((0usize..64, 1usize..3000), 1..6)),
            1..12),
    ) {
        let limits = IoLimits {
            transfer_bytes_max: transfer * BLOCK as u32,
            segments_max: segments,
            alignment: 1 << alignment_log2,
            virtual_boundary: 1 << virtual_log2,
            boundary_blocks: boundary,
        };
        let mut bench = Bench::new(limits, depth, None);
        let mut oracle = bench.content(0, BLOCKS as u32);
        for (number, (lba, blocks, kind, source, shape)) in steps.into_iter().enumerate() {
            let blocks = blocks.min((BLOCKS - lba.max(source)) as u32);
            let (at, length) = (lba as usize * BLOCK, blocks as usize * BLOCK);
            if kind == 2 {
                let from = source as usize * BLOCK;
                oracle.copy_within(from..from + length, at);
                prop_assert_eq!(bench.one(Request::copy(Tag(0), source, lba, blocks)).status(), Status::SUCCESS);
                continue;
            }
            // Slices of the drawn shape, and a last one for what is left.
            let mut left = length;
            let mut slices = Vec::new();
            for (offset, slice) in shape {
                if left > 0 {
                    slices.push((offset, slice.min(left)));
                    left -= slice.min(left);
                }
            }
            if left > 0 {
                slices.push((0, left));
            }
            let data = scattered(&bench.rig, &slices, number as u8);
            let op = if kind == 0 { Op::Read } else { Op::Write };
            let request = Request { payload: Payload::Data(data), ..Request::new(Tag(0), op, lba, blocks) };
            let completion = bench.one(request);
            prop_assert_eq!(completion.status(), Status::SUCCESS);
            let data = completion.into_request().take_data().unwrap();
            prop_assert_eq!(data.slices().iter().map(Buffer::len).collect::<Vec<_>>(),
                slices.iter().map(|(_, length)| *length).collect::<Vec<_>>());
            if kind == 0 {
                prop_assert!(bytes(&data) == oracle[at..at + length]);
            } else {
                oracle[at..at + length].fill(number as u8);
            }
        }
        prop_assert!(bench.content(0, BLOCKS as u32) == oracle);
        prop_assert_eq!(bench.channel.outstanding(), 0);
    }
}
