use block_io::Status;
use dma::{Arena, ArenaConfig};
use random::WyRand;
use wire_ublk::Operation;

use super::*;

const ENODEV: i32 = 19;

fn pool(chunks: usize) -> Pool {
    Pool::new(&Arena::new(ArenaConfig { limit_bytes: chunks << 21, hugepages: false, ..Default::default() }))
}

fn descriptor(operation: Operation, sectors: u32) -> IoDescriptor {
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
        let mut queue = DiskQueue::new(depth, DiskShape::test(512));
        let mut actions = Vec::new();
        queue.start(&mut actions);
        let fetches =
            |action: &QueueAction| matches!(action, QueueAction::Command { request: IoRequest::Fetch, .. });
        assert_eq!(actions.iter().filter(|action| fetches(action)).count(), usize::from(depth));
        actions.clear();
        Bench { queue, pool: pool(chunks), actions }
    }

    fn fetched(&mut self, tag: u16, operation: Operation, sectors: u32) {
        let of = || descriptor(operation, sectors);
        self.queue.on_command(tag, 0, of, &self.pool, &mut self.actions);
    }

    /// The only action.
    fn action(&mut self) -> QueueAction {
        let action = self.actions.pop().unwrap();
        assert!(self.actions.is_empty(), "{:?} beside {action:?}", self.actions);
        action
    }

    fn committed(&mut self) -> (u16, i32) {
        match self.action() {
            QueueAction::Command { tag, request: IoRequest::CommitAndFetch, result } => (tag, result),
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
    bench.fetched(2, Operation::Write, 8);
    let QueueAction::CopyIn { tag: 2, bytes: 4096, mut data } = bench.action() else { panic!("no copy") };
    data.copy_from(0, &[7; 4096]);
    bench.queue.on_copied(2, 4096, Some(data), &mut bench.actions);
    let QueueAction::Submit(request) = bench.action() else { panic!("no write") };
    assert_eq!((request.op, request.lba, request.blocks), (Op::Write, 8, 8));
    bench.queue.on_completed(request.complete(Status::SUCCESS), &mut bench.actions);
    assert_eq!(bench.committed(), (2, 4096));

    bench.fetched(2, Operation::Read, 1);
    bench.complete(Status::SUCCESS);
    let QueueAction::CopyOut { tag: 2, bytes: 512, data } = bench.action() else { panic!("no copy") };
    bench.queue.on_copied(2, 512, Some(data), &mut bench.actions);
    assert_eq!(bench.committed(), (2, 512));
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn errors_of_the_device_and_of_copies_reach_the_kernel() {
    let mut bench = Bench::new(1, 4);
    bench.fetched(0, Operation::Read, 1);
    bench.complete(Status::LBA_OUT_OF_RANGE);
    assert_eq!(bench.committed(), (0, -Status::LBA_OUT_OF_RANGE.to_errno().0));
    bench.fetched(0, Operation::Flush, 0);
    bench.complete(Status::SUCCESS);
    assert_eq!(bench.committed(), (0, 0));
    // A copy that is short, and one that fails.
    for result in [511, -14] {
        bench.fetched(0, Operation::Write, 1);
        let QueueAction::CopyIn { data, .. } = bench.action() else { panic!("no copy") };
        bench.queue.on_copied(0, result, Some(data), &mut bench.actions);
        assert_eq!(bench.committed(), (0, -EIO));
    }
    bench.fetched(0, Operation::WriteSame, 1);
    assert_eq!(bench.committed(), (0, -crate::plan::EOPNOTSUPP));
    assert_eq!(bench.queue.buffered_bytes, 0);
}

#[test]
fn requests_wait_for_buffers_in_their_order() {
    // A chunk has two buffers of this size and more.
    let mut bench = Bench::new(8, 1);
    let sectors = crate::limits::IO_BYTES_MAX / 512;
    for tag in 0..8 {
        bench.fetched(tag, Operation::Write, sectors);
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
        bench.fetched(tag, Operation::Read, crate::limits::IO_BYTES_MAX / 512);
    }
    assert_eq!(bench.actions.len(), QUEUE_BYTES_MAX / crate::limits::IO_BYTES_MAX as usize);
}

#[test]
fn a_queue_ends_with_its_last_tag() {
    let mut bench = Bench::new(2, 4);
    bench.fetched(0, Operation::Read, 1);
    bench.queue.on_command(1, -ENODEV, || unreachable!(), &bench.pool, &mut bench.actions);
    assert!(!bench.queue.has_ended(), "a request is in flight");
    bench.complete(Status::INVALID_NAMESPACE_OR_FORMAT);
    assert!(bench.committed().1 < 0);
    bench.queue.on_command(0, -ENODEV, || unreachable!(), &bench.pool, &mut bench.actions);
    assert!(bench.queue.has_ended() && bench.actions.is_empty());
}

#[test]
fn every_request_is_committed_once_whatever_happens_to_it() {
    let seed = 0x75_62_6c_6b;
    println!("seed {seed}");
    let mut random = WyRand::new(seed);
    let mut bench = Bench::new(16, 2);
    let (mut fetched, mut committed) = (0_u32, 0_u32);
    let mut idle: Vec<u16> = (0..16).collect();
    let statuses = [Status::SUCCESS, Status::SUCCESS, Status::WRITE_FAULT, Status::INVALID_OPCODE];
    for round in 0.. {
        let is_over = round >= 20_000;
        if is_over && bench.actions.is_empty() && !bench.queue.is_waiting() {
            break;
        }
        assert!(round < 40_000, "requests do not end");
        let fetches = !is_over && !idle.is_empty() && random.below(2) == 0;
        if fetches || bench.actions.is_empty() && !idle.is_empty() && !is_over {
            let tag = idle.swap_remove(random.below(idle.len() as u64) as usize);
            let operation = Operation::ALL[random.below(6) as usize];
            bench.fetched(tag, operation, random.below(1024) as u32);
            fetched += 1;
            continue;
        }
        if bench.actions.is_empty() {
            bench.queue.resume(&bench.pool, &mut bench.actions);
            continue;
        }
        let at = random.below(bench.actions.len() as u64) as usize;
        match bench.actions.swap_remove(at) {
            QueueAction::Command { tag, request, result } => {
                assert_eq!(
                    (request, result <= crate::limits::IO_BYTES_MAX as i32),
                    (IoRequest::CommitAndFetch, true)
                );
                assert!(!idle.contains(&tag));
                idle.push(tag);
                committed += 1;
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
