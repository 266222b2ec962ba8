use block_io::Status;
use dma::{Arena, ArenaConfig};
use random::WyRand;
use wire_ublk::UblkOperation;

use super::*;

const ENODEV: i32 = 19;

fn pool(chunks: usize) -> Pool {
    Pool::new(&Arena::new(ArenaConfig { limit_bytes: chunks << 21, hugepages: false, ..Default::default() }))
}

fn descriptor(operation: UblkOperation, sectors: u32) -> IoDescriptor {
    IoDescriptor { op_flags: operation as u32, sectors, start_sector: 8, address: 0 }
}

/// A queue, and the driver and the device as a test plays them.
struct Bench {
    queue: DiskQueue,
    pool: Pool,
    actions: Vec<QueueAction>,
}

impl Bench {
    fn new(depth: u16, chunks: usize) -> Bench {
        Bench::with_path(depth, chunks, UblkDataPath::UserCopy)
    }

    fn with_path(depth: u16, chunks: usize, path: UblkDataPath) -> Bench {
        let mut queue = DiskQueue::new(depth, DiskShape::test(512), path);
        let mut actions = Vec::new();
        queue.start(&mut actions);
        let fetches =
            |action: &QueueAction| matches!(action, QueueAction::Command { request: IoRequest::Fetch, .. });
        assert_eq!(actions.iter().filter(|action| fetches(action)).count(), usize::from(depth));
        actions.clear();
        Bench { queue, pool: pool(chunks), actions }
    }

    fn fetched(&mut self, tag: u16, operation: UblkOperation, sectors: u32) {
        self.commanded(tag, 0, None, descriptor(operation, sectors));
    }

    fn commanded(&mut self, tag: u16, result: i32, data: Option<Data>, descriptor: IoDescriptor) {
        self.queue.on_command(tag, result, data, || descriptor, &self.pool, &mut self.actions);
    }

    /// A write for which the driver has been given memory, which holds `sectors` at most.
    fn get_data(&mut self, tag: u16, sectors: u32) -> Data {
        self.commanded(tag, NEED_GET_DATA, None, descriptor(UblkOperation::Write, sectors));
        match self.action() {
            QueueAction::Command { tag: of, request: IoRequest::NeedGetData, data: Some(data), .. } => {
                assert_eq!(of, tag);
                data
            }
            other => panic!("{other:?}"),
        }
    }

    /// The only action.
    fn action(&mut self) -> QueueAction {
        let action = self.actions.pop().unwrap();
        assert!(self.actions.is_empty(), "{:?} beside {action:?}", self.actions);
        action
    }

    fn committed(&mut self) -> (u16, i32) {
        match self.action() {
            QueueAction::Command { tag, request: IoRequest::CommitAndFetch, result, data: None } => {
                (tag, result)
            }
            other => panic!("{other:?}"),
        }
    }

    fn complete(&mut self, status: Status) {
        let QueueAction::Submit(request) = self.action() else { panic!("no request") };
        self.queue.on_completed(request.complete(status), &mut self.actions);
    }
}

#[test]
fn data_of_a_write_comes_from_the_kernel_and_that_of_a_read_goes_to_it() {
    let mut bench = Bench::new(4, 4);
    bench.fetched(2, UblkOperation::Write, 8);
    let QueueAction::CopyIn { tag: 2, bytes: 4096, mut data } = bench.action() else { panic!("no copy") };
    data.copy_from(0, &[7; 4096]);
    bench.queue.on_copied(2, 4096, Some(data), &mut bench.actions);
    let QueueAction::Submit(request) = bench.action() else { panic!("no write") };
    assert_eq!((request.op, request.lba, request.blocks), (Op::Write, 8, 8));
    bench.queue.on_completed(request.complete(Status::SUCCESS), &mut bench.actions);
    assert_eq!(bench.committed(), (2, 4096));

    bench.fetched(2, UblkOperation::Read, 1);
    bench.complete(Status::SUCCESS);
    let QueueAction::CopyOut { tag: 2, bytes: 512, data } = bench.action() else { panic!("no copy") };
    bench.queue.on_copied(2, 512, Some(data), &mut bench.actions);
    assert_eq!(bench.committed(), (2, 512));
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn a_driver_that_copies_is_given_memory_for_a_write_and_the_data_of_a_read() {
    let mut bench = Bench::with_path(4, 4, UblkDataPath::GetData);
    let mut data = bench.get_data(2, 8);
    data.copy_from(0, &[7; 4096]);
    bench.commanded(2, 0, Some(data), descriptor(UblkOperation::Write, 8));
    let QueueAction::Submit(request) = bench.action() else { panic!("no write") };
    assert_eq!((request.op, request.lba, request.blocks), (Op::Write, 8, 8));
    bench.queue.on_completed(request.complete(Status::SUCCESS), &mut bench.actions);
    assert_eq!(bench.committed(), (2, 4096));
    assert_eq!(bench.queue.buffered_bytes, 0);

    bench.fetched(2, UblkOperation::Read, 1);
    bench.complete(Status::SUCCESS);
    let QueueAction::Command { tag: 2, request: IoRequest::CommitAndFetch, result: 512, data: Some(data) } =
        bench.action()
    else {
        panic!("the read is not committed with its data")
    };
    // The next request of the tag may come before the driver's copy is reported.
    bench.fetched(2, UblkOperation::Flush, 0);
    bench.complete(Status::SUCCESS);
    assert_eq!(bench.committed(), (2, 0));
    assert_eq!(bench.queue.buffered_bytes, 512);
    bench.queue.on_copied_out(data);
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn pages_that_the_driver_has_registered_go_to_the_device_as_they_are() {
    let mut bench = Bench::new(2, 4);
    for operation in [UblkOperation::Write, UblkOperation::Read] {
        let pages = RegisteredPages { index: 1025, bytes: 4096 };
        bench.queue.on_pages(1, pages, &descriptor(operation, 8), &bench.pool, &mut bench.actions);
        let QueueAction::Submit(request) = bench.action() else { panic!("no request") };
        let Payload::Registered(of) = request.payload else { panic!("{request:?}") };
        assert_eq!((of, request.blocks, bench.queue.buffered_bytes), (pages, 8, 0));
        bench.queue.on_completed(request.complete(Status::SUCCESS), &mut bench.actions);
        assert_eq!(bench.committed(), (1, 4096));
        bench.queue.on_pages(1, pages, &descriptor(operation, 8), &bench.pool, &mut bench.actions);
        bench.complete(Status::LBA_OUT_OF_RANGE);
        assert_eq!(bench.committed(), (1, -Status::LBA_OUT_OF_RANGE.to_errno().0));
    }
    // A request without data, one that is refused, and pages that are not those of the descriptor.
    let pages = RegisteredPages { index: 1025, bytes: 512 };
    bench.queue.on_pages(1, pages, &descriptor(UblkOperation::Flush, 0), &bench.pool, &mut bench.actions);
    bench.complete(Status::SUCCESS);
    assert_eq!(bench.committed(), (1, 0));
    bench.queue.on_pages(1, pages, &descriptor(UblkOperation::Read, 0), &bench.pool, &mut bench.actions);
    assert_eq!(bench.committed(), (1, -EINVAL));
    bench.queue.on_pages(1, pages, &descriptor(UblkOperation::Write, 8), &bench.pool, &mut bench.actions);
    assert!(matches!(bench.action(), QueueAction::CopyIn { bytes: 4096, .. }));
}

#[test]
fn what_a_reservation_of_another_host_excludes_is_committed_as_the_kernel_says_it() {
    let mut bench = Bench::with_path(1, 4, UblkDataPath::GetData);
    bench.fetched(0, UblkOperation::Read, 1);
    bench.complete(Status::RESERVATION_CONFLICT.do_not_retry());
    // EBADE, which the driver makes a reservation conflict (BLK_STS_RESV_CONFLICT) of.
    assert_eq!(bench.committed(), (0, -52));
}

#[test]
fn a_read_that_fails_is_committed_without_data() {
    let mut bench = Bench::with_path(1, 4, UblkDataPath::GetData);
    bench.fetched(0, UblkOperation::Read, 1);
    bench.complete(Status::LBA_OUT_OF_RANGE);
    assert_eq!(bench.committed(), (0, -Status::LBA_OUT_OF_RANGE.to_errno().0));
    // Refused before there is memory for it.
    bench.fetched(0, UblkOperation::Read, 0);
    assert_eq!(bench.committed(), (0, -EINVAL));
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn a_write_is_refused_after_its_data_was_copied() {
    // The driver accepts no other command while it waits for memory.
    let mut bench = Bench::with_path(1, 4, UblkDataPath::GetData);
    bench.queue.shape.read_only = true;
    let data = bench.get_data(0, 8);
    bench.commanded(0, 0, Some(data), descriptor(UblkOperation::Write, 8));
    assert_eq!(bench.committed(), (0, -crate::plan::EROFS));
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn a_write_of_which_a_part_was_copied_is_written_in_part() {
    let mut bench = Bench::with_path(1, 4, UblkDataPath::GetData);
    let data = bench.get_data(0, 64);
    bench.commanded(0, 0, Some(data), descriptor(UblkOperation::Write, 16));
    assert_eq!(bench.queue.buffered_bytes, 8192);
    let QueueAction::Submit(request) = bench.action() else { panic!("no write") };
    assert_eq!((request.blocks, request.data().unwrap().len()), (16, 8192));
    bench.queue.on_completed(request.complete(Status::SUCCESS), &mut bench.actions);
    assert_eq!(bench.committed(), (0, 8192));
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn a_tag_may_get_another_request_than_the_one_that_memory_was_given_for() {
    // The driver queues a request again of which it could copy nothing; another one may get its tag.
    let mut bench = Bench::with_path(1, 4, UblkDataPath::GetData);
    let data = bench.get_data(0, 8);
    bench.commanded(0, 0, Some(data), descriptor(UblkOperation::Read, 16));
    assert_eq!(bench.queue.buffered_bytes, 8192, "the buffer of the read alone");
    bench.complete(Status::WRITE_FAULT);
    assert!(bench.committed().1 < 0);
    // A larger write has to ask for memory of its own.
    let data = bench.get_data(0, 8);
    bench.commanded(0, NEED_GET_DATA, Some(data), descriptor(UblkOperation::Write, 16));
    let QueueAction::Command { request: IoRequest::NeedGetData, data: Some(data), .. } = bench.action()
    else {
        panic!("no memory")
    };
    assert_eq!((data.len(), bench.queue.buffered_bytes), (8192, 8192));
    bench.commanded(0, -ENODEV, Some(data), IoDescriptor::default());
    assert!(bench.queue.has_ended());
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn writes_wait_for_memory_in_their_order_before_the_driver_copies() {
    let mut bench = Bench::with_path(8, 1, UblkDataPath::GetData);
    let sectors = crate::limits::IO_BYTES_MAX / 512;
    for tag in 0..8 {
        bench.commanded(tag, NEED_GET_DATA, None, descriptor(UblkOperation::Write, sectors));
    }
    let admitted = bench.actions.len();
    assert!((1..8).contains(&admitted) && bench.queue.is_waiting(), "{admitted}");
    let mut order = Vec::new();
    while !bench.actions.is_empty() {
        let QueueAction::Command { tag, request: IoRequest::NeedGetData, data, .. } = bench.actions.remove(0)
        else {
            panic!("no memory")
        };
        order.push(tag);
        bench.commanded(tag, -ENODEV, data, IoDescriptor::default());
        bench.queue.resume(&bench.pool, &mut bench.actions);
    }
    assert_eq!(order, (0..8).collect::<Vec<u16>>());
    assert!(bench.queue.has_ended());
}

#[test]
fn a_queue_ends_when_the_driver_has_copied_the_last_read() {
    let mut bench = Bench::with_path(1, 4, UblkDataPath::GetData);
    bench.fetched(0, UblkOperation::Read, 1);
    bench.complete(Status::SUCCESS);
    let QueueAction::Command { data: Some(data), .. } = bench.action() else { panic!("no data") };
    bench.commanded(0, -ENODEV, None, IoDescriptor::default());
    assert!(!bench.queue.has_ended(), "the driver may use the data");
    bench.queue.on_copied_out(data);
    assert!(bench.queue.has_ended());
}

#[test]
fn errors_of_the_device_and_of_copies_reach_the_kernel() {
    let mut bench = Bench::new(1, 4);
    bench.fetched(0, UblkOperation::Read, 1);
    bench.complete(Status::LBA_OUT_OF_RANGE);
    assert_eq!(bench.committed(), (0, -Status::LBA_OUT_OF_RANGE.to_errno().0));
    bench.fetched(0, UblkOperation::Flush, 0);
    bench.complete(Status::SUCCESS);
    assert_eq!(bench.committed(), (0, 0));
    // A copy that is short, and one that fails.
    for result in [511, -14] {
        bench.fetched(0, UblkOperation::Write, 1);
        let QueueAction::CopyIn { data, .. } = bench.action() else { panic!("no copy") };
        bench.queue.on_copied(0, result, Some(data), &mut bench.actions);
        assert_eq!(bench.committed(), (0, -EIO));
    }
    bench.fetched(0, UblkOperation::WriteSame, 1);
    assert_eq!(bench.committed(), (0, -crate::plan::EOPNOTSUPP));
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn requests_wait_for_buffers_in_their_order() {
    // A chunk has two buffers of this size and more.
    let mut bench = Bench::new(8, 1);
    let sectors = crate::limits::IO_BYTES_MAX / 512;
    for tag in 0..8 {
        bench.fetched(tag, UblkOperation::Write, sectors);
    }
    let copied = |action: &QueueAction| matches!(action, QueueAction::CopyIn { .. });
    let admitted = bench.actions.len();
    assert!((1..8).contains(&admitted) && bench.actions.iter().all(copied), "{admitted}");
    assert!(bench.queue.is_waiting());
    let mut order = Vec::new();
    while !bench.actions.is_empty() {
        let QueueAction::CopyIn { tag, data, .. } = bench.actions.remove(0) else { panic!("no copy") };
        order.push(tag);
        bench.queue.on_copied(tag, -EIO, Some(data), &mut bench.actions);
        bench.queue.resume(&bench.pool, &mut bench.actions);
        bench.actions.retain(copied);
    }
    assert_eq!(order, (0..8).collect::<Vec<u16>>());
    assert!(!bench.queue.is_waiting());
}

#[test]
fn a_queue_has_a_limited_amount_of_buffers() {
    let mut bench = Bench::new(64, 64);
    for tag in 0..64 {
        bench.fetched(tag, UblkOperation::Read, crate::limits::IO_BYTES_MAX / 512);
    }
    assert_eq!(bench.actions.len(), QUEUE_BYTES_MAX / crate::limits::IO_BYTES_MAX as usize);
}

#[test]
fn a_queue_ends_with_its_last_tag() {
    let mut bench = Bench::new(2, 4);
    bench.fetched(0, UblkOperation::Read, 1);
    bench.commanded(1, -ENODEV, None, IoDescriptor::default());
    assert!(!bench.queue.has_ended(), "a request is in flight");
    bench.complete(Status::INVALID_NAMESPACE_OR_FORMAT);
    assert!(bench.committed().1 < 0);
    bench.commanded(0, -ENODEV, None, IoDescriptor::default());
    assert!(bench.queue.has_ended() && bench.actions.is_empty());
}

#[test]
fn every_request_is_committed_once_whatever_happens_to_it() {
    for path in [UblkDataPath::UserCopy, UblkDataPath::GetData] {
        commit_every_request_once(path);
    }
}

fn commit_every_request_once(path: UblkDataPath) {
    let seed = 0x75_62_6c_6b;
    println!("seed {seed}, {path:?}");
    let mut random = WyRand::new(seed);
    let mut bench = Bench::with_path(16, 2, path);
    let (mut fetched, mut committed) = (0_u32, 0_u32);
    let mut idle: Vec<u16> = (0..16).collect();
    let mut copying_out: Vec<Data> = Vec::new();
    let statuses = [Status::SUCCESS, Status::SUCCESS, Status::WRITE_FAULT, Status::INVALID_OPCODE];
    for round in 0.. {
        let is_over = round >= 20_000;
        if is_over && bench.actions.is_empty() && !bench.queue.is_waiting() && copying_out.is_empty() {
            break;
        }
        assert!(round < 40_000, "requests do not end");
        let fetches = !is_over && !idle.is_empty() && random.below(2) == 0;
        if fetches || bench.actions.is_empty() && !idle.is_empty() && !is_over {
            let tag = idle.swap_remove(random.below(idle.len() as u64) as usize);
            let operation = UblkOperation::ALL[random.below(6) as usize];
            let asks = path == UblkDataPath::GetData && operation == UblkOperation::Write;
            let result = if asks { NEED_GET_DATA } else { 0 };
            bench.commanded(tag, result, None, descriptor(operation, random.below(1024) as u32));
            fetched += 1;
            continue;
        }
        if bench.actions.is_empty() {
            copying_out.drain(..).for_each(|data| bench.queue.on_copied_out(data));
            bench.queue.resume(&bench.pool, &mut bench.actions);
            continue;
        }
        let at = random.below(bench.actions.len() as u64) as usize;
        match bench.actions.swap_remove(at) {
            QueueAction::Command { tag, request: IoRequest::NeedGetData, data, .. } => {
                let sectors = data.as_ref().unwrap().len() as u32 / 512;
                bench.commanded(tag, 0, data, descriptor(UblkOperation::Write, sectors));
            }
            QueueAction::Command { tag, request, result, data } => {
                assert_eq!(
                    (request, result <= crate::limits::IO_BYTES_MAX as i32),
                    (IoRequest::CommitAndFetch, true)
                );
                assert!(!idle.contains(&tag));
                idle.push(tag);
                committed += 1;
                copying_out.extend(data);
            }
            QueueAction::CopyIn { tag, bytes, data } | QueueAction::CopyOut { tag, bytes, data } => {
                let result = if random.below(4) == 0 { -EIO } else { bytes as i32 };
                bench.queue.on_copied(tag, result, Some(data), &mut bench.actions);
            }
            QueueAction::Submit(request) => {
                let status = statuses[random.below(4) as usize];
                bench.queue.on_completed(request.complete(status), &mut bench.actions);
            }
        }
    }
    assert_eq!((committed, idle.len(), bench.queue.buffered_bytes), (fetched, 16, 0));
    assert!(fetched > 1000, "{fetched}");
}
