//! Tests of the channel on a module whose completions are controlled by the test.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use block_io::{Channel as _, Op, Payload, RegisteredPages, RequestFlags, Status, Tag};

use reservations::{ChangeWaker, Registrant, ReservationCommand, ReservationType};

use crate::fair_queue::FLOW_QUEUED_MAX;
use crate::{
    Access, Bdev, BdevChannel, BdevError, BdevGeometry, BoxedChannel, Closing, Completion, DeviceEvent,
    Durability, Registry, Request, ReservationLease,
};

mod scheduling;

thread_local! {
    /// The requests of the scripted channel that was opened last.
    static SUBMITTED: RefCell<Option<Rc<RefCell<VecDeque<Request>>>>> = const { RefCell::new(None) };
}

struct Scripted {
    blocks: AtomicU64,
    depth: u32,
    /// Maximum number of requests that the module accepts.
    room: u32,
    resets: bool,
    takes_registered: bool,
    closed: AtomicU32,
}

struct ScriptedChannel {
    submitted: Rc<RefCell<VecDeque<Request>>>,
    completed: Rc<RefCell<VecDeque<Request>>>,
    room: usize,
}

thread_local! {
    static COMPLETED: RefCell<Option<Rc<RefCell<VecDeque<Request>>>>> = const { RefCell::new(None) };
}

impl Scripted {
    fn new(depth: u32) -> Scripted {
        Scripted {
            blocks: AtomicU64::new(1000),
            depth,
            room: u32::MAX,
            resets: false,
            takes_registered: false,
            closed: AtomicU32::new(0),
        }
    }
}

impl Bdev for Scripted {
    fn product_name(&self) -> &'static str {
        "Scripted disk"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry::new(512, self.blocks.load(Ordering::Relaxed))
    }

    fn durability(&self) -> Durability {
        Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        match op {
            // Compare is the layer's, whatever a module says.
            Op::Read | Op::Write | Op::Flush | Op::WriteZeroes | Op::Compare => true,
            Op::Reset => self.resets,
            _ => false,
        }
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let (submitted, completed) = (Rc::default(), Rc::default());
        SUBMITTED.set(Some(Rc::clone(&submitted)));
        COMPLETED.set(Some(Rc::clone(&completed)));
        Ok(Box::new(ScriptedChannel { submitted, completed, room: self.room as usize }))
    }

    fn registered_page_alignment(&self) -> Option<u32> {
        self.takes_registered.then_some(512)
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn on_closed(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }
}

impl block_io::Channel for ScriptedChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let mut submitted = self.submitted.borrow_mut();
        let room = self.room.saturating_sub(submitted.len()).min(batch.len());
        submitted.extend(batch.drain(..room));
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let mut completed = self.completed.borrow_mut();
        let count = completed.len();
        sink.extend(completed.drain(..).map(|request| request.complete(Status::SUCCESS)));
        count
    }
}

/// A channel, and control of the module below it.
struct ChannelHarness {
    registry: Registry,
    core: reactor::Core,
    _reactor: reactor::Reactor,
    channel: BdevChannel,
    submitted: Rc<RefCell<VecDeque<Request>>>,
    completed: Rc<RefCell<VecDeque<Request>>>,
    module: Arc<Scripted>,
}

impl ChannelHarness {
    fn new(scripted: Scripted, access: Access<'_>) -> ChannelHarness {
        let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).unwrap();
        let core = reactor.core();
        let registry = Registry::new();
        let module = Arc::new(scripted);
        registry.register("dev", None, &[], module.clone()).unwrap();
        let channel = registry.open("dev", access).unwrap().channel(&core).unwrap();
        let submitted = SUBMITTED.take().unwrap();
        let completed = COMPLETED.take().unwrap();
        ChannelHarness { registry, core, _reactor: reactor, channel, submitted, completed, module }
    }

    fn buffer(&self, blocks: u32) -> dma::Buffer {
        self.core.pool().take((blocks * 512) as usize).unwrap()
    }

    fn read(&self, tag: u64, flow: u16) -> Request {
        Request { flow, ..Request::read(Tag(tag), tag % 900, 8, self.buffer(8)) }
    }

    fn status_of(&mut self, request: Request) -> Status {
        let mut batch = vec![request];
        self.channel.submit(&mut batch);
        assert!(batch.is_empty());
        self.complete(usize::MAX);
        let mut sink = Vec::new();
        assert_eq!(self.channel.poll(&mut sink), 1);
        sink[0].status()
    }

    /// Completes the oldest `count` requests of the module.
    fn complete(&self, count: usize) {
        let mut submitted = self.submitted.borrow_mut();
        let count = count.min(submitted.len());
        self.completed.borrow_mut().extend(submitted.drain(..count));
    }

    fn poll(&mut self) -> Vec<Completion> {
        let mut sink = Vec::new();
        self.channel.poll(&mut sink);
        sink
    }
}

#[test]
fn invalid_requests_fail_and_never_reach_the_module() {
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    let wrong_length = harness.buffer(7);
    let far = harness.buffer(1);
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
    for (request, expected) in table {
        let text = format!("{request:?}");
        let status = harness.status_of(request);
        assert!(status.same_code(expected) && status.is_do_not_retry(), "{text}: {status}");
        assert!(harness.submitted.borrow().is_empty());
    }
    for valid in [Request::new(Tag(1), Op::Flush, 0, 0), Request::new(Tag(1), Op::WriteZeroes, 999, 1)] {
        assert_eq!(harness.status_of(valid), Status::SUCCESS);
    }
    let stats = harness.channel.device().stats();
    assert_eq!((stats.errors(), stats.op(Op::WriteZeroes).ops, stats.op(Op::Unmap).errors), (8, 1, 1));
}

#[test]
fn registered_pages_reach_a_module_that_takes_them_alone() {
    let request = |op, lba, blocks, bytes| {
        let pages = RegisteredPages { index: 1024, bytes };
        Request::with_payload(Tag(1), op, lba, blocks, Payload::Registered(pages))
    };
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    for op in [Op::Read, Op::Write] {
        let status = harness.status_of(request(op, 0, 8, 4096));
        assert!(status.same_code(Status::DATA_SGL_LENGTH_INVALID), "{status}");
    }
    let taking = Scripted { takes_registered: true, ..Scripted::new(64) };
    let mut harness = ChannelHarness::new(taking, Access::ReadWrite);
    for op in [Op::Read, Op::Write] {
        assert_eq!(harness.status_of(request(op, 992, 8, 4096)), Status::SUCCESS);
    }
    let table = [
        (request(Op::Read, 0, 8, 4095), Status::DATA_SGL_LENGTH_INVALID),
        (request(Op::Write, 0, 8, 8192), Status::DATA_SGL_LENGTH_INVALID),
        (request(Op::Read, 993, 8, 4096), Status::LBA_OUT_OF_RANGE),
        (request(Op::Read, 0, 0, 0), Status::INVALID_FIELD),
        (request(Op::Compare, 0, 8, 4096), Status::DATA_SGL_LENGTH_INVALID),
    ];
    for (request, expected) in table {
        let text = format!("{request:?}");
        let status = harness.status_of(request);
        assert!(status.same_code(expected), "{text}: {status}");
    }
    let mut harness =
        ChannelHarness::new(Scripted { takes_registered: true, ..Scripted::new(64) }, Access::ReadOnly);
    let status = harness.status_of(request(Op::Write, 0, 8, 4096));
    assert!(status.same_code(Status::NAMESPACE_WRITE_PROTECTED), "{status}");
}

#[test]
fn a_compare_is_executed_by_the_layer_even_if_the_module_says_that_it_supports_it() {
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    let expected = harness.buffer(8);
    let compare =
        Request { payload: Payload::Data(expected.into()), ..Request::new(Tag(1), Op::Compare, 0, 8) };
    harness.channel.submit(&mut vec![compare]);
    let ops: Vec<Op> = harness.submitted.borrow().iter().map(|request| request.op).collect();
    assert_eq!(ops, [Op::Read]);
}

#[test]
fn a_read_only_descriptor_rejects_writes() {
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadOnly);
    let (write, read) = (harness.buffer(1), harness.buffer(1));
    let refused = harness.status_of(Request::write(Tag(1), 0, 1, write));
    assert!(refused.same_code(Status::NAMESPACE_WRITE_PROTECTED));
    let refused = harness.status_of(Request::new(Tag(1), Op::WriteZeroes, 0, 1));
    assert!(refused.same_code(Status::NAMESPACE_WRITE_PROTECTED));
    assert_eq!(harness.status_of(Request::read(Tag(1), 0, 1, read)), Status::SUCCESS);
    assert_eq!(harness.status_of(Request::new(Tag(1), Op::Flush, 0, 0)), Status::SUCCESS);
}

#[derive(Debug)]
struct NoWaker;

impl ChangeWaker for NoWaker {
    fn wake(&self) {}
}

/// Reserves the device for a host, which registers for it.
fn reserve(lease: &ReservationLease, kind: ReservationType) {
    for command in
        [ReservationCommand::Register { key: 1, persist: None }, ReservationCommand::Acquire { key: 1, kind }]
    {
        let holder = Registrant::nvme_host([1; 16]);
        let change = lease.reservations().execute(&holder, command, Arc::new(NoWaker));
        assert_eq!(change.outcome(), Some(Ok(())));
    }
}

#[test]
fn a_reservation_denies_operations_to_those_that_are_no_registrants() {
    let requests = |harness: &ChannelHarness| {
        let data = || Payload::Data(harness.buffer(1).into());
        let request = |op, payload| (op, Request { payload, ..Request::new(Tag(1), op, 0, 1) });
        [
            request(Op::Read, data()),
            request(Op::Compare, data()),
            request(Op::SeekData, Payload::None),
            request(Op::SeekHole, Payload::None),
            request(Op::Write, data()),
            request(Op::WriteZeroes, Payload::None),
            request(Op::Copy, Payload::CopySource(8)),
            request(Op::Flush, Payload::None),
        ]
    };
    // The first four only read.
    for (kind, denied_from) in [(ReservationType::WriteExclusive, 4), (ReservationType::ExclusiveAccess, 0)] {
        let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
        let device = harness.channel.device().clone();
        let lease = harness.registry.open_reservations(&device, None).unwrap();
        let mut registrants = harness
            .registry
            .open_with_reservations("dev", Access::ReadWrite)
            .unwrap()
            .channel(&harness.core)
            .unwrap();
        reserve(&lease, kind);
        for (index, (op, request)) in requests(&harness).into_iter().enumerate() {
            harness.channel.submit(&mut vec![request]);
            let mut statuses = harness.poll().into_iter().map(|completion| completion.status());
            if index >= denied_from {
                let refused = statuses.next().unwrap();
                assert!(refused.same_code(Status::RESERVATION_CONFLICT), "{kind:?} {op:?}: {refused}");
                assert!(refused.is_do_not_retry() && harness.submitted.borrow().is_empty());
            } else {
                assert!(statuses.all(|status| status.is_success()), "{kind:?} {op:?}");
                harness.complete(usize::MAX);
                harness.poll();
            }
        }
        let unsupported = harness.status_of(Request::new(Tag(1), Op::Unmap, 0, 1));
        assert!(unsupported.same_code(Status::INVALID_OPCODE), "{unsupported}");
        // A target that keeps reservations has checked them already.
        for (op, request) in requests(&harness) {
            registrants.submit(&mut vec![request]);
            let mut sink = Vec::new();
            registrants.poll(&mut sink);
            assert!(sink.iter().all(|one| !one.status().same_code(Status::RESERVATION_CONFLICT)), "{op:?}");
        }
        // Without a user that keeps it there is no reservation any more.
        drop(lease);
        for (op, request) in requests(&harness) {
            harness.channel.submit(&mut vec![request]);
            harness.complete(usize::MAX);
            let conflict =
                harness.poll().iter().any(|one| one.status().same_code(Status::RESERVATION_CONFLICT));
            assert!(!conflict, "{op:?}");
            while harness.channel.outstanding() > 0 {
                harness.complete(usize::MAX);
                harness.poll();
            }
        }
    }
}

#[test]
fn a_reservation_concerns_every_operation_that_moves_data() {
    for op in Op::ALL {
        let bit = 1 << op.index();
        let (reads, writes) = (super::OPS_THAT_READ & bit != 0, super::OPS_THAT_WRITE & bit != 0);
        // A compare is a read of the layer; a reset and an abort end requests.
        let is_neither = matches!(op, Op::Compare | Op::Reset | Op::Abort);
        assert_eq!(
            (reads, writes),
            (!is_neither && !op.is_write() && op != Op::Flush, op.is_write() || op == Op::Flush)
        );
    }
}

#[test]
fn what_comes_after_the_reservation_is_refused_and_what_came_before_is_not() {
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    let device = harness.channel.device().clone();
    let lease = harness.registry.open_reservations(&device, None).unwrap();
    let write = |harness: &ChannelHarness, tag| Request::write(Tag(tag), tag, 1, harness.buffer(1));
    let mut before: Vec<Request> = (0..8).map(|tag| write(&harness, tag)).collect();
    harness.channel.submit(&mut before);
    reserve(&lease, ReservationType::WriteExclusive);
    let mut after: Vec<Request> = (8..16).map(|tag| write(&harness, tag)).collect();
    harness.channel.submit(&mut after);
    assert_eq!(harness.submitted.borrow().len(), 8);
    harness.complete(usize::MAX);
    for completion in harness.poll() {
        let refused = completion.status().same_code(Status::RESERVATION_CONFLICT);
        assert_eq!(refused, completion.tag().0 >= 8, "{completion:?}");
    }
    assert_eq!(harness.channel.outstanding(), 0);
}

#[test]
fn a_device_that_comes_back_with_its_uuid_is_as_reserved_as_before() {
    let harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    let device = harness.channel.device().clone();
    let lease = harness.registry.open_reservations(&device, None).unwrap();
    reserve(&lease, ReservationType::ExclusiveAccess);
    harness.registry.unregister("dev").unwrap();
    harness.registry.register("dev", Some(device.uuid()), &[], Arc::new(Scripted::new(64))).unwrap();
    let mut channel = harness.registry.open("dev", Access::ReadOnly).unwrap().channel(&harness.core).unwrap();
    channel.submit(&mut vec![harness.read(1, 0)]);
    let mut sink = Vec::new();
    channel.poll(&mut sink);
    assert!(sink[0].status().same_code(Status::RESERVATION_CONFLICT));
}

#[test]
fn an_invalid_request_does_not_affect_others_of_its_batch() {
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    let mut batch: Vec<Request> = (0..10).map(|tag| harness.read(tag, 0)).collect();
    batch[4].lba = 5000;
    harness.channel.submit(&mut batch);
    harness.complete(usize::MAX);
    let sink = harness.poll();
    assert_eq!(sink.len(), 10);
    for completion in sink {
        assert_eq!(completion.status().is_success(), completion.tag() != Tag(4), "{completion:?}");
    }
}

#[test]
fn requests_beyond_the_depth_are_queued_and_beyond_the_fifo_stay_in_the_batch() {
    let mut harness = ChannelHarness::new(Scripted::new(16), Access::ReadWrite);
    let total = 16 + FLOW_QUEUED_MAX + 50;
    let mut batch: Vec<Request> = (0..total as u64).map(|tag| harness.read(tag, 3)).collect();
    // All are queued first, then 16 are submitted.
    harness.channel.submit(&mut batch);
    assert_eq!(harness.submitted.borrow().len(), 16);
    assert_eq!(batch.len(), 66);
    assert_eq!(batch[0].tag, Tag(FLOW_QUEUED_MAX as u64), "the rest of the batch is in order");
    // Another flow is accepted although the FIFO of this one is full again.
    harness.channel.submit(&mut batch);
    batch.push(harness.read(9999, 4));
    harness.channel.submit(&mut batch);
    assert!(batch.iter().all(|request| request.flow == 3) && batch.len() == 50);
    let mut seen = Vec::new();
    while seen.len() < total + 1 {
        harness.complete(5);
        seen.extend(harness.poll().into_iter().map(|completion| completion.tag()));
        harness.channel.submit(&mut batch);
        assert!(harness.submitted.borrow().len() <= 16);
    }
    let mut of_flow: Vec<Tag> = seen.iter().copied().filter(|tag| *tag != Tag(9999)).collect();
    assert!(of_flow.is_sorted(), "a flow's requests keep their order");
    of_flow.dedup();
    assert_eq!(of_flow.len(), total);
    assert_eq!(harness.channel.outstanding(), 0);
}

#[test]
fn a_flow_with_one_request_gets_its_share_beside_a_greedy_flow() {
    let mut harness = ChannelHarness::new(Scripted::new(32), Access::ReadWrite);
    let mut greedy: Vec<Request> = (0..1000).map(|tag| harness.read(tag, 1)).collect();
    harness.channel.submit(&mut greedy);
    let (mut modest_done, mut greedy_done) = (0, 0);
    let mut batch = vec![harness.read(5000, 2)];
    for _ in 0..2000 {
        harness.channel.submit(&mut batch);
        harness.complete(1);
        for completion in harness.poll() {
            if completion.request().flow == 2 {
                modest_done += 1;
                batch.push(completion.into_request());
            } else {
                greedy_done += 1;
                greedy.push(completion.into_request());
            }
        }
        harness.channel.submit(&mut greedy);
    }
    // A flow with one I/O waits for the I/Os in flight and at most a quantum of the other: 40 I/Os.
    assert!(modest_done >= 2000 / 42, "{modest_done} of the modest flow, {greedy_done} of the greedy one");
    assert!(greedy_done >= 1800, "{greedy_done}");
}

#[test]
fn requests_that_the_module_did_not_accept_are_submitted_again() {
    let scripted = Scripted { room: 3, ..Scripted::new(64) };
    let mut harness = ChannelHarness::new(scripted, Access::ReadWrite);
    let mut batch: Vec<Request> = (0..20).map(|tag| harness.read(tag, 0)).collect();
    harness.channel.submit(&mut batch);
    assert!(batch.is_empty());
    let mut seen = Vec::new();
    while seen.len() < 20 {
        harness.complete(2);
        seen.extend(harness.poll().into_iter().map(|completion| completion.tag().0));
    }
    assert_eq!(seen, (0..20).collect::<Vec<_>>());
}

#[test]
fn a_resize_reaches_open_channels_and_subscribers() {
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    let events = Arc::new(Mutex::new(Vec::new()));
    let received = events.clone();
    harness.registry.subscribe(Box::new(move |event| {
        if let DeviceEvent::Resized(device) = event {
            received.lock().unwrap().push(device.geometry().blocks);
        }
    }));
    let at_end = Request::new(Tag(1), Op::WriteZeroes, 1500, 1);
    assert!(harness.status_of(at_end).same_code(Status::LBA_OUT_OF_RANGE));
    harness.module.blocks.store(2000, Ordering::Relaxed);
    harness.registry.notify_resized("dev").unwrap();
    harness.registry.notify_resized("dev").unwrap();
    assert_eq!(harness.status_of(Request::new(Tag(1), Op::WriteZeroes, 1500, 1)), Status::SUCCESS);
    harness.module.blocks.store(10, Ordering::Relaxed);
    harness.registry.notify_resized("dev").unwrap();
    let beyond = harness.status_of(Request::new(Tag(1), Op::WriteZeroes, 10, 1));
    assert!(beyond.same_code(Status::LBA_OUT_OF_RANGE));
    assert_eq!(*events.lock().unwrap(), [2000, 10]);
}

#[test]
fn after_removal_everything_completes_once_and_new_io_fails() {
    let mut harness = ChannelHarness::new(Scripted::new(8), Access::ReadWrite);
    let mut batch: Vec<Request> = (0..20).map(|tag| harness.read(tag, 0)).collect();
    harness.channel.submit(&mut batch);
    let device = harness.registry.unregister("dev").unwrap();
    assert!(harness.channel.is_removed() && harness.registry.find("dev").is_none());
    assert!(!device.wait_closed(std::time::Duration::from_millis(1)));
    let mut batch = vec![harness.read(100, 0), Request::new(Tag(101), Op::Flush, 0, 0)];
    batch.push(Request::new(Tag(102), Op::Reset, 0, 0));
    harness.channel.submit(&mut batch);
    assert_eq!(harness.submitted.borrow().len(), 8, "no new request reaches the module");
    let mut sink = harness.poll();
    harness.complete(usize::MAX);
    sink.extend(harness.poll());
    sink.sort_by_key(|completion| completion.tag());
    let tags: Vec<u64> = sink.iter().map(|completion| completion.tag().0).collect();
    assert_eq!(tags, (0..20).chain(100..103).collect::<Vec<_>>());
    for completion in &sink {
        let removed = completion.status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_eq!(removed, completion.tag().0 >= 8, "{completion:?}");
    }
    assert_eq!(harness.module.closed.load(Ordering::Relaxed), 0);
    drop(harness.channel);
    assert!(device.wait_closed(std::time::Duration::ZERO));
    assert_eq!(harness.module.closed.load(Ordering::Relaxed), 1);
}

#[test]
fn an_open_ends_with_its_last_channel_and_a_removal_with_the_last_open() {
    let harness = ChannelHarness::new(Scripted::new(8), Access::ReadOnly);
    let (registry, timeout) = (&harness.registry, std::time::Duration::from_millis(1));
    let claim = registry.open("dev", Access::Exclusive { by: "a test" }).unwrap();
    let channel = claim.channel(&harness.core).unwrap();
    let closing = || Closing::of([&claim]);
    assert_eq!(closing().wait_for(timeout).unwrap_err().name, "dev");
    let (open, removed) = (closing(), registry.find("dev").unwrap());
    drop(claim);
    assert!(registry.open("dev", Access::ReadWrite).is_err(), "its channel is open");
    drop(channel);
    open.wait_for(timeout).unwrap();
    assert!(registry.open("dev", Access::ReadWrite).is_ok());

    registry.unregister("dev").unwrap();
    let removed = || Closing::removed([removed.clone()]);
    assert!(removed().wait_for(timeout).is_err(), "the harness has it open");
    drop(harness.channel);
    removed().wait_for(timeout).unwrap();
}

#[test]
fn a_reset_waits_for_io_in_flight_and_blocks_later_io() {
    let mut harness = ChannelHarness::new(Scripted::new(8), Access::ReadWrite);
    let mut batch = vec![harness.read(1, 0), harness.read(2, 0)];
    harness.channel.submit(&mut batch);
    let mut batch = vec![Request::new(Tag(3), Op::Reset, 0, 0), harness.read(4, 0)];
    harness.channel.submit(&mut batch);
    assert!(batch.is_empty());
    assert_eq!(harness.submitted.borrow().len(), 2);
    harness.complete(1);
    assert_eq!(harness.poll().len(), 1);
    harness.complete(1);
    let tags: Vec<Tag> = harness.poll().iter().map(|completion| completion.tag()).collect();
    assert_eq!(tags, [Tag(2), Tag(3)]);
    assert_eq!(harness.submitted.borrow().len(), 1, "I/O after the reset is submitted");
}

#[test]
fn a_module_that_supports_reset_gets_it_beyond_its_depth() {
    let scripted = Scripted { resets: true, ..Scripted::new(2) };
    let mut harness = ChannelHarness::new(scripted, Access::ReadWrite);
    let mut batch: Vec<Request> = (0..5).map(|tag| harness.read(tag, 0)).collect();
    harness.channel.submit(&mut batch);
    let mut batch = vec![Request::new(Tag(9), Op::Reset, 0, 0)];
    harness.channel.submit(&mut batch);
    assert_eq!(harness.submitted.borrow().back().map(|request| request.tag), Some(Tag(9)));
}

#[test]
fn statistics_count_operations_bytes_and_latency() {
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    let write = Request { flags: RequestFlags::FUA, ..Request::write(Tag(9), 0, 4, harness.buffer(4)) };
    let mut batch = vec![harness.read(1, 0), harness.read(2, 0), write];
    harness.channel.submit(&mut batch);
    let start = os::clock::ticks();
    while os::clock::ticks_to_ns(os::clock::ticks() - start) < 1_000_000 {}
    harness.complete(usize::MAX);
    harness.poll();
    let stats = harness.channel.device().stats();
    let (read, write) = (stats.op(Op::Read), stats.op(Op::Write));
    assert_eq!((read.ops, read.bytes, write.ops, write.bytes), (2, 8192, 1, 2048));
    assert!(os::clock::ticks_to_ns(read.latency_min_ticks) >= 900_000, "{read:?}");
    assert_eq!(read.latency_ticks, read.latency_min_ticks + read.latency_max_ticks);
    assert_eq!(stats.histogram(Op::Read).count(), 2);
    let percentile = stats.histogram(Op::Read).percentile_ticks(99.0);
    assert!(percentile >= read.latency_max_ticks && percentile <= read.latency_max_ticks * 33 / 32 + 1);
    let device = harness.channel.device().clone();
    assert_eq!(device.channel_stats().len(), 1);
    device.reset_stats(crate::StatsReset::All);
    assert_eq!(device.stats().op(Op::Read).ops, 0);
    drop(harness.channel);
    assert!(device.channel_stats().is_empty());
}

#[test]
fn rejected_requests_are_bounded() {
    let mut harness = ChannelHarness::new(Scripted::new(8), Access::ReadWrite);
    let mut batch: Vec<Request> = (0..3000).map(|tag| Request::new(Tag(tag), Op::Unmap, 0, 1)).collect();
    harness.channel.submit(&mut batch);
    assert_eq!(batch.len(), 3000 - super::dispatch::REJECTED_MAX);
    let mut seen = 0;
    while seen < 3000 {
        seen += harness.poll().len();
        harness.channel.submit(&mut batch);
    }
    assert_eq!(harness.channel.outstanding(), 0);
}

#[test]
fn resets_in_flight_are_bounded() {
    let scripted = Scripted { resets: true, ..Scripted::new(2) };
    let mut harness = ChannelHarness::new(scripted, Access::ReadWrite);
    let mut batch: Vec<Request> = (0..40).map(|tag| Request::new(Tag(tag), Op::Reset, 0, 0)).collect();
    let mut seen = 0;
    while seen < 40 {
        harness.channel.submit(&mut batch);
        harness.channel.submit(&mut batch);
        assert!(harness.submitted.borrow().len() <= super::RESETS_MAX);
        harness.complete(3);
        seen += harness.poll().len();
    }
    assert!(batch.is_empty());
}

#[test]
fn each_start_in_the_trace_has_an_end_even_if_queues_are_full() {
    let mut harness = ChannelHarness::new(Scripted::new(1), Access::ReadWrite);
    harness.registry.set_trace_mask(crate::TraceGroup::Bdev, u64::MAX);
    let count = FLOW_QUEUED_MAX as u64 + 5;
    let mut batch: Vec<Request> = (0..count).map(|tag| harness.read(tag, 0)).collect();
    let mut done = 0;
    while done < count {
        harness.channel.submit(&mut batch);
        harness.complete(usize::MAX);
        done += harness.poll().len() as u64;
    }
    let mut counts = [0; 5];
    let mut open = std::collections::BTreeSet::new();
    for event in harness.registry.trace_events(None, usize::MAX) {
        counts[event.point as usize] += 1;
        let Some(io) = event.io else { continue };
        let changed = match event.point {
            crate::TracePoint::IoStart => open.insert(io.tag),
            _ => open.remove(&io.tag),
        };
        assert!(changed, "{:?} of {}", event.point, io.tag);
    }
    let [started, ended, created, destroyed, returned] = counts;
    assert!(open.is_empty() && returned > 0, "{counts:?}");
    assert_eq!((ended, created, destroyed, started), (count, 0, 0, count + returned));
}

/// The layer knows its own requests by a flag and bits of the tag, and an error bdev gives requests tags of
/// its own.
#[test]
fn an_error_bdev_sends_no_request_as_one_of_the_layer() {
    let mut harness = ChannelHarness::new(Scripted::new(64), Access::ReadOnly);
    crate::error::create(&harness.registry, crate::error::ErrorConfig::new("dev")).unwrap();
    let above = harness.registry.open("EE_dev", Access::ReadOnly).unwrap();
    harness.channel = above.channel(&harness.core).unwrap();
    (harness.submitted, harness.completed) = (SUBMITTED.take().unwrap(), COMPLETED.take().unwrap());
    let mut request = harness.read(77, 0);
    request.flags = RequestFlags::INTERNAL;
    harness.channel.submit(&mut vec![request]);
    assert_eq!(harness.submitted.borrow()[0].flags, RequestFlags::NONE);
    harness.complete(1);
    let done = harness.poll().pop().unwrap().into_request();
    assert_eq!((done.tag, done.flags), (Tag(77), RequestFlags::INTERNAL));
}
