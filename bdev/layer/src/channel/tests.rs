//! The channel over a module whose completions the test decides.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ring::{Channel as _, Flags, Op, Status, Tag};

use crate::fair::FLOW_WAITING_MAX;
use crate::{
    Access, Bdev, BdevError, BoxedChannel, Channel, Completion, DeviceEvent, Geometry, Registry, Request,
};

thread_local! {
    /// Where the channel opened last keeps what was submitted to it.
    static LAST: RefCell<Option<Rc<RefCell<VecDeque<Request>>>>> = const { RefCell::new(None) };
}

struct Scripted {
    blocks: AtomicU64,
    depth: u32,
    /// The module itself takes at most so many.
    room: u32,
    resets: bool,
    closed: AtomicU32,
}

struct ScriptedChannel {
    held: Rc<RefCell<VecDeque<Request>>>,
    released: Rc<RefCell<VecDeque<Request>>>,
    room: usize,
}

thread_local! {
    static RELEASED: RefCell<Option<Rc<RefCell<VecDeque<Request>>>>> = const { RefCell::new(None) };
}

impl Scripted {
    fn new(depth: u32) -> Scripted {
        Scripted {
            blocks: AtomicU64::new(1000),
            depth,
            room: u32::MAX,
            resets: false,
            closed: AtomicU32::new(0),
        }
    }
}

impl Bdev for Scripted {
    fn product_name(&self) -> &'static str {
        "Scripted disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry::new(512, self.blocks.load(Ordering::Relaxed))
    }

    fn supports(&self, op: Op) -> bool {
        match op {
            Op::Unmap | Op::WriteUncorrectable | Op::Compare => false,
            Op::Reset => self.resets,
            _ => true,
        }
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let (held, released) = (Rc::default(), Rc::default());
        LAST.set(Some(Rc::clone(&held)));
        RELEASED.set(Some(Rc::clone(&released)));
        Ok(Box::new(ScriptedChannel { held, released, room: self.room as usize }))
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn closed(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }
}

impl ring::Channel for ScriptedChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let mut held = self.held.borrow_mut();
        let room = self.room.saturating_sub(held.len()).min(batch.len());
        held.extend(batch.drain(..room));
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let mut released = self.released.borrow_mut();
        let count = released.len();
        sink.extend(released.drain(..).map(|request| request.complete(Status::SUCCESS)));
        count
    }
}

/// A channel, and what the test does to the module below it.
struct Bench {
    registry: Registry,
    core: reactor::Core,
    _reactor: reactor::Reactor,
    channel: Channel,
    held: Rc<RefCell<VecDeque<Request>>>,
    released: Rc<RefCell<VecDeque<Request>>>,
    module: Arc<Scripted>,
}

impl Bench {
    fn new(scripted: Scripted, access: Access<'_>) -> Bench {
        let reactor = reactor::Reactor::new(&reactor::Config::default()).unwrap();
        let core = reactor.core();
        let registry = Registry::new();
        let module = Arc::new(scripted);
        registry.register("dev", None, &[], module.clone()).unwrap();
        let channel = registry.open("dev", access).unwrap().channel(&core).unwrap();
        let held = LAST.take().unwrap();
        let released = RELEASED.take().unwrap();
        Bench { registry, core, _reactor: reactor, channel, held, released, module }
    }

    fn buffer(&self, blocks: u32) -> memory::Buffer {
        self.core.pool().take((blocks * 512) as usize).unwrap()
    }

    fn read(&self, tag: u64, flow: u16) -> Request {
        Request { flow, ..Request::read(Tag(tag), tag % 900, 8, self.buffer(8)) }
    }

    fn status_of(&mut self, request: Request) -> Status {
        let mut batch = vec![request];
        self.channel.submit(&mut batch);
        assert!(batch.is_empty());
        self.release(usize::MAX);
        let mut sink = Vec::new();
        assert_eq!(self.channel.poll(&mut sink), 1);
        sink[0].status()
    }

    /// The module finishes the oldest `count`.
    fn release(&self, count: usize) {
        let mut held = self.held.borrow_mut();
        let count = count.min(held.len());
        self.released.borrow_mut().extend(held.drain(..count));
    }

    fn poll(&mut self) -> Vec<Completion> {
        let mut sink = Vec::new();
        self.channel.poll(&mut sink);
        sink
    }
}

#[test]
fn what_cannot_be_is_answered_and_reaches_no_module() {
    let mut bench = Bench::new(Scripted::new(64), Access::ReadWrite);
    let wrong_length = bench.buffer(7);
    let far = bench.buffer(1);
    let table = [
        (Request::read(Tag(1), 0, 8, wrong_length), Status::DATA_SGL_LENGTH_INVALID),
        (Request::new(Tag(1), Op::Read, 0, 8), Status::DATA_SGL_LENGTH_INVALID),
        (Request::new(Tag(1), Op::WriteZeroes, 0, 0), Status::INVALID_FIELD),
        (Request::new(Tag(1), Op::WriteZeroes, 1000, 1), Status::LBA_OUT_OF_RANGE),
        (Request::new(Tag(1), Op::WriteZeroes, 999, 2), Status::LBA_OUT_OF_RANGE),
        (Request::new(Tag(1), Op::WriteZeroes, 0, u32::MAX), Status::LBA_OUT_OF_RANGE),
        (Request::write(Tag(1), u64::MAX, 1, far), Status::LBA_OUT_OF_RANGE),
        (Request::new(Tag(1), Op::Unmap, 0, 8), Status::INVALID_OPCODE),
    ];
    for (request, wanted) in table {
        let text = format!("{request:?}");
        let got = bench.status_of(request);
        assert!(got.same_code(wanted) && got.is_do_not_retry(), "{text}: {got}");
        assert!(bench.held.borrow().is_empty());
    }
    for fine in [Request::new(Tag(1), Op::Flush, 0, 0), Request::new(Tag(1), Op::WriteZeroes, 999, 1)] {
        assert_eq!(bench.status_of(fine), Status::SUCCESS);
    }
    let stats = bench.channel.device().stats();
    assert_eq!((stats.errors(), stats.op(Op::WriteZeroes).ops, stats.op(Op::Unmap).errors), (8, 1, 1));
}

#[test]
fn a_read_only_descriptor_reads_and_flushes() {
    let mut bench = Bench::new(Scripted::new(64), Access::ReadOnly);
    let (write, read) = (bench.buffer(1), bench.buffer(1));
    let refused = bench.status_of(Request::write(Tag(1), 0, 1, write));
    assert!(refused.same_code(Status::NAMESPACE_WRITE_PROTECTED));
    let refused = bench.status_of(Request::new(Tag(1), Op::WriteZeroes, 0, 1));
    assert!(refused.same_code(Status::NAMESPACE_WRITE_PROTECTED));
    assert_eq!(bench.status_of(Request::read(Tag(1), 0, 1, read)), Status::SUCCESS);
    assert_eq!(bench.status_of(Request::new(Tag(1), Op::Flush, 0, 0)), Status::SUCCESS);
}

#[test]
fn a_bad_request_among_good_ones_harms_only_itself() {
    let mut bench = Bench::new(Scripted::new(64), Access::ReadWrite);
    let mut batch: Vec<Request> = (0..10).map(|tag| bench.read(tag, 0)).collect();
    batch[4].lba = 5000;
    bench.channel.submit(&mut batch);
    bench.release(usize::MAX);
    let sink = bench.poll();
    assert_eq!(sink.len(), 10);
    for completion in sink {
        assert_eq!(completion.status().is_success(), completion.tag() != Tag(4), "{completion:?}");
    }
}

#[test]
fn beyond_the_depth_requests_wait_and_beyond_the_fifo_they_stay() {
    let mut bench = Bench::new(Scripted::new(16), Access::ReadWrite);
    let total = 16 + FLOW_WAITING_MAX + 50;
    let mut batch: Vec<Request> = (0..total as u64).map(|tag| bench.read(tag, 3)).collect();
    // All wait first, then 16 are served.
    bench.channel.submit(&mut batch);
    assert_eq!(bench.held.borrow().len(), 16);
    assert_eq!(batch.len(), 66);
    assert_eq!(batch[0].tag, Tag(FLOW_WAITING_MAX as u64), "what stays is in order");
    // Another flow is taken although this one's FIFO is full again.
    bench.channel.submit(&mut batch);
    batch.push(bench.read(9999, 4));
    bench.channel.submit(&mut batch);
    assert!(batch.iter().all(|request| request.flow == 3) && batch.len() == 50);
    let mut seen = Vec::new();
    while seen.len() < total + 1 {
        bench.release(5);
        seen.extend(bench.poll().into_iter().map(|completion| completion.tag()));
        bench.channel.submit(&mut batch);
        assert!(bench.held.borrow().len() <= 16);
    }
    let mut of_flow: Vec<Tag> = seen.iter().copied().filter(|tag| *tag != Tag(9999)).collect();
    assert!(of_flow.is_sorted(), "a flow's requests keep their order");
    of_flow.dedup();
    assert_eq!(of_flow.len(), total);
    assert_eq!(bench.channel.outstanding(), 0);
}

#[test]
fn a_flow_of_a_thousandth_of_the_depth_gets_its_share() {
    let mut bench = Bench::new(Scripted::new(32), Access::ReadWrite);
    let mut greedy: Vec<Request> = (0..1000).map(|tag| bench.read(tag, 1)).collect();
    bench.channel.submit(&mut greedy);
    let (mut modest_done, mut greedy_done) = (0, 0);
    let mut batch = vec![bench.read(5000, 2)];
    for _ in 0..2000 {
        bench.channel.submit(&mut batch);
        bench.release(1);
        for completion in bench.poll() {
            if completion.request().flow == 2 {
                modest_done += 1;
                batch.push(completion.into_request());
            } else {
                greedy_done += 1;
                greedy.push(completion.into_request());
            }
        }
        bench.channel.submit(&mut greedy);
    }
    // At depth 1 a flow waits for the depth in flight and at most a quantum of the other: 40 I/Os.
    assert!(modest_done >= 2000 / 42, "{modest_done} of the modest flow, {greedy_done} of the greedy one");
    assert!(greedy_done >= 1800, "{greedy_done}");
}

#[test]
fn a_module_that_takes_less_than_its_depth_is_asked_again() {
    let scripted = Scripted { room: 3, ..Scripted::new(64) };
    let mut bench = Bench::new(scripted, Access::ReadWrite);
    let mut batch: Vec<Request> = (0..20).map(|tag| bench.read(tag, 0)).collect();
    bench.channel.submit(&mut batch);
    assert!(batch.is_empty());
    let mut seen = Vec::new();
    while seen.len() < 20 {
        bench.release(2);
        seen.extend(bench.poll().into_iter().map(|completion| completion.tag().0));
    }
    assert_eq!(seen, (0..20).collect::<Vec<_>>());
}

#[test]
fn a_resize_is_seen_by_open_channels_and_subscribers() {
    let mut bench = Bench::new(Scripted::new(64), Access::ReadWrite);
    let events = Arc::new(Mutex::new(Vec::new()));
    let heard = events.clone();
    bench.registry.subscribe(Box::new(move |event| {
        if let DeviceEvent::Resized(device) = event {
            heard.lock().unwrap().push(device.geometry().blocks);
        }
    }));
    let at_end = Request::new(Tag(1), Op::WriteZeroes, 1500, 1);
    assert!(bench.status_of(at_end).same_code(Status::LBA_OUT_OF_RANGE));
    bench.module.blocks.store(2000, Ordering::Relaxed);
    bench.registry.notify_resized("dev").unwrap();
    bench.registry.notify_resized("dev").unwrap();
    assert_eq!(bench.status_of(Request::new(Tag(1), Op::WriteZeroes, 1500, 1)), Status::SUCCESS);
    bench.module.blocks.store(10, Ordering::Relaxed);
    bench.registry.notify_resized("dev").unwrap();
    let beyond = bench.status_of(Request::new(Tag(1), Op::WriteZeroes, 10, 1));
    assert!(beyond.same_code(Status::LBA_OUT_OF_RANGE));
    assert_eq!(*events.lock().unwrap(), [2000, 10]);
}

#[test]
fn after_removal_everything_completes_once_and_new_io_fails() {
    let mut bench = Bench::new(Scripted::new(8), Access::ReadWrite);
    let mut batch: Vec<Request> = (0..20).map(|tag| bench.read(tag, 0)).collect();
    bench.channel.submit(&mut batch);
    let device = bench.registry.unregister("dev").unwrap();
    assert!(bench.channel.is_removed() && bench.registry.find("dev").is_none());
    assert!(!device.wait_closed(std::time::Duration::from_millis(1)));
    let mut batch = vec![bench.read(100, 0), Request::new(Tag(101), Op::Flush, 0, 0)];
    batch.push(Request::new(Tag(102), Op::Reset, 0, 0));
    bench.channel.submit(&mut batch);
    assert_eq!(bench.held.borrow().len(), 8, "nothing new reaches the module");
    let mut sink = bench.poll();
    bench.release(usize::MAX);
    sink.extend(bench.poll());
    sink.sort_by_key(|completion| completion.tag());
    let tags: Vec<u64> = sink.iter().map(|completion| completion.tag().0).collect();
    assert_eq!(tags, (0..20).chain(100..103).collect::<Vec<_>>());
    for completion in &sink {
        let gone = completion.status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_eq!(gone, completion.tag().0 >= 8, "{completion:?}");
    }
    assert_eq!(bench.module.closed.load(Ordering::Relaxed), 0);
    drop(bench.channel);
    assert!(device.wait_closed(std::time::Duration::ZERO));
    assert_eq!(bench.module.closed.load(Ordering::Relaxed), 1);
}

#[test]
fn a_reset_waits_for_what_is_in_flight_and_holds_what_follows() {
    let mut bench = Bench::new(Scripted::new(8), Access::ReadWrite);
    let mut batch = vec![bench.read(1, 0), bench.read(2, 0)];
    bench.channel.submit(&mut batch);
    let mut batch = vec![Request::new(Tag(3), Op::Reset, 0, 0), bench.read(4, 0)];
    bench.channel.submit(&mut batch);
    assert!(batch.is_empty());
    assert_eq!(bench.held.borrow().len(), 2);
    bench.release(1);
    assert_eq!(bench.poll().len(), 1);
    bench.release(1);
    let tags: Vec<Tag> = bench.poll().iter().map(|completion| completion.tag()).collect();
    assert_eq!(tags, [Tag(2), Tag(3)]);
    assert_eq!(bench.held.borrow().len(), 1, "what followed the reset goes on");
}

#[test]
fn a_module_that_resets_itself_gets_it_although_it_is_full() {
    let scripted = Scripted { resets: true, ..Scripted::new(2) };
    let mut bench = Bench::new(scripted, Access::ReadWrite);
    let mut batch: Vec<Request> = (0..5).map(|tag| bench.read(tag, 0)).collect();
    bench.channel.submit(&mut batch);
    let mut batch = vec![Request::new(Tag(9), Op::Reset, 0, 0)];
    bench.channel.submit(&mut batch);
    assert_eq!(bench.held.borrow().back().map(|request| request.tag), Some(Tag(9)));
}

#[test]
fn statistics_count_operations_bytes_and_latency() {
    let mut bench = Bench::new(Scripted::new(64), Access::ReadWrite);
    let write = Request { flags: Flags::FUA, ..Request::write(Tag(9), 0, 4, bench.buffer(4)) };
    let mut batch = vec![bench.read(1, 0), bench.read(2, 0), write];
    bench.channel.submit(&mut batch);
    let start = sys::clock::ticks();
    while sys::clock::ticks_to_ns(sys::clock::ticks() - start) < 1_000_000 {}
    bench.release(usize::MAX);
    bench.poll();
    let stats = bench.channel.device().stats();
    let (read, write) = (stats.op(Op::Read), stats.op(Op::Write));
    assert_eq!((read.ops, read.bytes, write.ops, write.bytes), (2, 8192, 1, 2048));
    assert!(sys::clock::ticks_to_ns(read.latency_min_ticks) >= 900_000, "{read:?}");
    assert_eq!(read.latency_ticks, read.latency_min_ticks + read.latency_max_ticks);
    assert_eq!(stats.histogram(Op::Read).count(), 2);
    let percentile = stats.histogram(Op::Read).percentile_ticks(99.0);
    assert!(percentile >= read.latency_max_ticks && percentile <= read.latency_max_ticks * 33 / 32 + 1);
    let device = bench.channel.device().clone();
    assert_eq!(device.channel_stats().len(), 1);
    device.reset_stats();
    assert_eq!(device.stats().op(Op::Read).ops, 0);
    drop(bench.channel);
    assert!(device.channel_stats().is_empty());
}

#[test]
fn refused_requests_are_bounded_too() {
    let mut bench = Bench::new(Scripted::new(8), Access::ReadWrite);
    let mut batch: Vec<Request> = (0..3000).map(|tag| Request::new(Tag(tag), Op::Unmap, 0, 1)).collect();
    bench.channel.submit(&mut batch);
    assert_eq!(batch.len(), 3000 - super::REFUSED_MAX);
    let mut seen = 0;
    while seen < 3000 {
        seen += bench.poll().len();
        bench.channel.submit(&mut batch);
    }
    assert_eq!(bench.channel.outstanding(), 0);
}

#[test]
fn resets_under_way_are_bounded() {
    let scripted = Scripted { resets: true, ..Scripted::new(2) };
    let mut bench = Bench::new(scripted, Access::ReadWrite);
    let mut batch: Vec<Request> = (0..40).map(|tag| Request::new(Tag(tag), Op::Reset, 0, 0)).collect();
    let mut seen = 0;
    while seen < 40 {
        bench.channel.submit(&mut batch);
        bench.channel.submit(&mut batch);
        assert!(bench.held.borrow().len() <= super::RESETS_MAX);
        bench.release(3);
        seen += bench.poll().len();
    }
    assert!(batch.is_empty());
}
