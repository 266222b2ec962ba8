use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use dma::{Arena, ArenaConfig, Pool};
use wire_ublk::{DeviceInfo, Features};

use super::*;
use crate::event_loop::{EventBackend, EventCompletion, EventLoop, EventLoopConfig};
use crate::ublk_queue::UblkQueueFile;

/// Operations of the event loop, of which its wake-up is one.
const OPERATIONS_MAX: u32 = 64;

/// A queue whose device is an ordinary file with a descriptor of 8 sectors for tag 1: it refuses all commands.
struct Bench {
    event_loop: EventLoop,
    client: EventClient,
    file: FileId,
    pool: Pool,
}

fn add_queue(client: &EventClient, features: Features) -> FileId {
    let device =
        std::fs::File::from(rustix::fs::memfd_create("ublk", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    device.set_len(4096).unwrap();
    let descriptor = IoDescriptor { op_flags: 1, sectors: 8, start_sector: 16, address: 0 };
    device.write_all_at(&descriptor.to_bytes(), IoDescriptor::SIZE as u64).unwrap();
    let info = DeviceInfo { queue_depth: 2, queues: 1, features: features.bits(), ..DeviceInfo::default() };
    client.add_ublk_queue(UblkQueueFile::map(device.as_fd(), &info, 0).unwrap()).unwrap()
}

impl Bench {
    /// `None` without io_uring.
    fn new(features: Features) -> Option<Bench> {
        let config = EventLoopConfig { backend: Some(EventBackend::Uring), operations_max: OPERATIONS_MAX };
        let event_loop = match EventLoop::new(&config) {
            Ok(event_loop) => event_loop,
            Err(error) => {
                eprintln!("SKIPPED for io_uring: {error}");
                return None;
            }
        };
        let client = event_loop.client();
        let file = add_queue(&client, features);
        let arena =
            Arena::new(ArenaConfig { limit_bytes: 2 << 20, hugepages: false, ..ArenaConfig::default() });
        Some(Bench { event_loop, client, file, pool: Pool::new(&arena) })
    }

    fn data(&self, bytes: usize) -> Data {
        self.pool.take(bytes).unwrap().into()
    }

    fn submit(&self, request: IoRequest, result: i32, data: Option<Data>) -> Result<(), RejectedOperation> {
        self.client.submit_ublk(self.file, UblkCommand { request, tag: 1, result }, data, 7, 8)
    }

    fn completions(&self, count: usize) -> Vec<EventCompletion> {
        let mut done = Vec::new();
        while done.len() < count {
            self.event_loop.wait(Some(5_000_000_000));
            self.client.reap(&mut done);
        }
        done.sort_by_key(|completion| completion.tag);
        done
    }
}

#[test]
fn a_queue_has_the_descriptors_of_its_device() {
    let Some(bench) = Bench::new(Features::USER_COPY) else { return };
    assert_eq!(bench.client.ublk_request(bench.file, 0), IoDescriptor::default());
    let descriptor = bench.client.ublk_request(bench.file, 1);
    assert_eq!((descriptor.operation(), descriptor.sectors, descriptor.start_sector), (1, 8, 16));
}

#[test]
fn each_tag_of_a_queue_has_a_registered_buffer_while_the_queue_is_there() {
    let registers = Features::USER_COPY | Features::AUTO_BUF_REG;
    let Some(bench) = Bench::new(registers) else { return };
    let client = &bench.client;
    let [first, second] = [0, 1].map(|tag| client.ublk_pages(bench.file, tag).unwrap());
    assert_eq!((second.index - first.index, first.bytes, second.bytes), (1, 0, 4096));
    let more = add_queue(client, registers);
    assert!(client.ublk_pages(more, 0).unwrap().index > second.index);
    client.remove_file(bench.file);
    let again = add_queue(client, registers);
    assert_eq!(client.ublk_pages(again, 1), Some(second));
    let copied = add_queue(client, Features::USER_COPY);
    assert_eq!(client.ublk_pages(copied, 1), None);
}

#[test]
fn memory_for_a_write_comes_back_with_the_result_and_data_of_a_read_by_itself() {
    let Some(bench) = Bench::new(Features::NEED_GET_DATA) else { return };
    bench.submit(IoRequest::NeedGetData, 0, Some(bench.data(4096))).unwrap();
    let done = bench.completions(1);
    assert_eq!((done.len(), done[0].tag, done[0].result < 0), (1, 7, true));
    assert_eq!(done[0].data.as_ref().unwrap().len(), 4096);
    bench.submit(IoRequest::CommitAndFetch, 512, Some(bench.data(512))).unwrap();
    let done = bench.completions(2);
    assert_eq!((done.len(), done[0].tag, done[0].result < 0, done[0].data.is_none()), (2, 7, true, true));
    assert_eq!((done[1].tag, done[1].result), (8, 0));
    assert_eq!(done[1].data.as_ref().unwrap().len(), 512);
}

#[test]
fn a_read_is_committed_when_there_is_room_for_its_data_too() {
    let Some(bench) = Bench::new(Features::NEED_GET_DATA) else { return };
    while bench.submit(IoRequest::Fetch, 0, None).is_ok() {}
    let rejected = bench.submit(IoRequest::CommitAndFetch, 512, Some(bench.data(512))).unwrap_err();
    assert_eq!((rejected.reason, rejected.data.unwrap().len()), (io::ErrorKind::WouldBlock, 512));
    let _ = bench.completions(1);
}

#[test]
fn a_command_gives_the_driver_memory_that_it_may_use() {
    let (user_copy, get_data) = (Features::USER_COPY, Features::NEED_GET_DATA);
    let bytes = |bytes: usize| Some(bytes);
    let table = [
        (user_copy, IoRequest::CommitAndFetch, 512, bytes(512), "user copy"),
        (get_data, IoRequest::CommitAndFetch, 513, bytes(512), "copies 513 bytes"),
        (get_data, IoRequest::CommitAndFetch, -5, bytes(512), "has succeeded"),
        (get_data, IoRequest::NeedGetData, 0, bytes(4095), "copies 4096 bytes"),
        (get_data, IoRequest::NeedGetData, 0, None, "needs memory"),
        (get_data, IoRequest::Fetch, 0, bytes(512), "no data"),
    ];
    for (features, request, result, bytes, expected) in table {
        let Some(bench) = Bench::new(features) else { return };
        let data = bytes.map(|bytes| bench.data(bytes));
        let submit = std::panic::AssertUnwindSafe(|| bench.submit(request, result, data));
        let panic = std::panic::catch_unwind(submit).unwrap_err();
        let message = panic.downcast_ref::<String>().cloned();
        let message = message.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap();
        assert!(message.contains(expected), "{message}");
    }
}
