//! A driver that gives the target anything, for fuzzing: parameters of a device, descriptors, results.

use block_io::{Payload, RegisteredPages, Status};
use dma::{Arena, ArenaConfig, Data, Pool};
use os::UblkDataPath;
use wire_ublk::{
    DeviceInfo, Features, IoDescriptor, IoFlags, IoRequest, NEED_GET_DATA, UblkOperation, UblkParameters,
};

use crate::limits::{IO_BYTES_MAX, RANGE_SECTORS_MAX};
use crate::queue::{DiskQueue, QueueAction};
use crate::shape::{DiskShape, check_served};

/// Steps of one input.
const STEPS_MAX: usize = 1024;
/// Requests in flight at most, few so that tags are used often.
const DEPTH_MAX: u16 = 16;
/// Memory of all buffers: requests of the largest size wait for each other.
const MEMORY_BYTES: usize = 4 << 20;
const ENODEV: i32 = 19;

/// What a fuzz input describes, byte after byte; zeroes follow.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn u8(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.u8())
    }
}

/// A queue, and the driver and the block device at its sides.
struct AnyDriver {
    queue: DiskQueue,
    shape: DiskShape,
    /// What the queue wants to be done.
    actions: Vec<QueueAction>,
    /// Data of reads that were committed, which the driver has not copied yet.
    copying_out: Vec<Data>,
    /// Requests that were delivered and not committed.
    uncommitted: usize,
    /// Requests that the device was sent.
    submitted: usize,
    // Dropped last: buffers belong to it.
    pool: Pool,
}

impl AnyDriver {
    fn new(input: &mut Input<'_>) -> AnyDriver {
        let [flags, form] = input.bytes();
        let bit = |index: u8| flags >> index & 1 != 0;
        let block_size = 512 << (form & 3);
        let shape = DiskShape {
            block_size,
            read_only: bit(0),
            can_flush: bit(1),
            can_unmap: bit(2),
            can_write_zeroes: bit(3),
            write_cache: bit(4),
            reads_undefined: bit(5),
            page_alignment: bit(7).then_some(512),
            physical_block_size: block_size,
            optimal_bytes: block_size,
            write_unit_bytes: block_size.into(),
            bytes: 1 << 30,
        };
        let depth = 1 + u16::from(form >> 2) % DEPTH_MAX;
        let arena =
            Arena::new(ArenaConfig { limit_bytes: MEMORY_BYTES, hugepages: false, ..ArenaConfig::default() });
        let path = if bit(6) { UblkDataPath::GetData } else { UblkDataPath::UserCopy };
        let mut queue = DiskQueue::new(depth, shape, path);
        let mut actions = Vec::new();
        queue.start(&mut actions);
        let copying_out = Vec::new();
        AnyDriver {
            queue,
            shape,
            actions,
            copying_out,
            uncommitted: 0,
            submitted: 0,
            pool: Pool::new(&arena),
        }
    }

    /// A descriptor: any bytes, or a small request of a known operation.
    fn descriptor(input: &mut Input<'_>) -> IoDescriptor {
        let choice = input.u8();
        if choice & 0x80 != 0 {
            let bytes: [u8; IoDescriptor::SIZE] = input.bytes();
            return IoDescriptor::decode(&bytes).expect("the array has the bytes of a descriptor");
        }
        let [start, sectors, flags] = input.bytes();
        IoDescriptor {
            op_flags: u32::from(choice & 7) | u32::from(flags) << 8,
            sectors: u32::from(sectors) << (choice >> 3 & 7),
            start_sector: u64::from(start) << 3,
            address: 0,
        }
    }

    /// Executes one of the outstanding actions, or lets waiting requests try again.
    fn step(&mut self, input: &mut Input<'_>) {
        if self.actions.is_empty() {
            self.copying_out.pop().into_iter().for_each(|data| self.queue.on_copied_out(data));
            self.queue.resume(&self.pool, &mut self.actions);
            return;
        }
        let at = usize::from(input.u8()) % self.actions.len();
        let action = self.actions.swap_remove(at);
        let choice = input.u8();
        // Most of what is done succeeds.
        let failure = (choice & 0x7 == 0x7).then(|| i32::from_le_bytes(input.bytes()));
        match action {
            QueueAction::Command { tag, request, result, data } => {
                let data = self.accept(request, result, data);
                let descriptor = AnyDriver::descriptor(input);
                // An honest driver asks for memory for a write, and has copied to memory that it was given.
                let is_write = descriptor.operation() == UblkOperation::Write as u8;
                let asks = self.queue.path() == UblkDataPath::GetData && is_write && data.is_none();
                let honest = if asks { NEED_GET_DATA } else { 0 };
                self.deliver(tag, failure.unwrap_or(honest), data, descriptor);
            }
            QueueAction::CopyIn { tag, bytes, data } | QueueAction::CopyOut { tag, bytes, data } => {
                assert_eq!(data.len(), bytes as usize, "a copy of tag {tag}");
                let result = failure.unwrap_or(bytes as i32);
                self.queue.on_copied(tag, result, Some(data), &mut self.actions);
            }
            QueueAction::Submit(request) => {
                self.check_request(&request);
                let status = if failure.is_some() { Status::WRITE_FAULT } else { Status::SUCCESS };
                self.queue.on_completed(request.complete(status), &mut self.actions);
            }
        }
        if choice & 0x10 != 0 {
            self.copying_out.pop().into_iter().for_each(|data| self.queue.on_copied_out(data));
        }
        if choice & 0x8 != 0 {
            self.queue.resume(&self.pool, &mut self.actions);
        }
    }

    /// The driver completes a command: a request follows, or the end of the tag.
    fn deliver(&mut self, tag: u16, result: i32, data: Option<Data>, descriptor: IoDescriptor) {
        let asks = result == NEED_GET_DATA && self.queue.path() == UblkDataPath::GetData;
        self.uncommitted += usize::from(result == 0 || asks);
        if result == 0
            && data.is_none()
            && self.shape.page_alignment.is_some()
            && self.queue.path() == UblkDataPath::UserCopy
            && !descriptor.flags().contains(IoFlags::NEED_REGISTRATION)
        {
            let bytes = descriptor.sectors.wrapping_mul(512);
            let pages = RegisteredPages { index: tag, bytes };
            return self.queue.on_pages(tag, pages, &descriptor, &self.pool, &mut self.actions);
        }
        self.queue.on_command(tag, result, data, || descriptor, &self.pool, &mut self.actions);
    }

    /// The driver accepts a command. Returns the memory that it has until it completes it.
    fn accept(&mut self, request: IoRequest, result: i32, data: Option<Data>) -> Option<Data> {
        assert!(result <= IO_BYTES_MAX as i32, "{result} bytes were not asked for");
        if request == IoRequest::Fetch {
            assert_eq!(result, 0, "a fetch completes nothing");
            assert!(data.is_none(), "a fetch has no data");
            return None;
        }
        self.uncommitted -= 1;
        let is_get_data = self.queue.path() == UblkDataPath::GetData;
        assert!(data.is_none() || is_get_data, "the driver copies with user copy");
        match (request, data) {
            (IoRequest::NeedGetData, Some(data)) => {
                assert!(data.single().is_some_and(|slice| slice.len() <= IO_BYTES_MAX as usize));
                Some(data)
            }
            (IoRequest::NeedGetData, None) => panic!("memory is missing"),
            (_, data) => {
                assert!(data.as_ref().is_none_or(|data| data.len() == result as usize));
                self.copying_out.extend(data);
                None
            }
        }
    }

    fn check_request(&mut self, request: &bdev::Request) {
        self.submitted += 1;
        let sectors = u64::from(request.blocks) * u64::from(self.shape.sectors_per_block());
        assert!(sectors <= RANGE_SECTORS_MAX.into(), "{request:?}");
        if let Payload::Data(data) = &request.payload {
            assert_eq!(data.len() as u64, u64::from(request.blocks) * u64::from(self.shape.block_size));
        }
        if let Payload::Registered(pages) = &request.payload {
            assert_eq!(u64::from(pages.bytes), u64::from(request.blocks) * u64::from(self.shape.block_size));
        }
    }

    /// The disk stops: everything outstanding succeeds, and commands end their tags.
    fn stop(&mut self) {
        while !self.queue.has_ended() {
            match self.actions.pop() {
                None => {
                    let copied = self.copying_out.len();
                    self.copying_out.drain(..).for_each(|data| self.queue.on_copied_out(data));
                    self.queue.resume(&self.pool, &mut self.actions);
                    let proceeds = copied > 0 || !self.actions.is_empty();
                    assert!(proceeds, "requests wait for buffers though none is used");
                }
                Some(QueueAction::Command { tag, request, result, data }) => {
                    let data = self.accept(request, result, data);
                    self.deliver(tag, -ENODEV, data, IoDescriptor::default());
                }
                Some(
                    QueueAction::CopyIn { tag, bytes, data } | QueueAction::CopyOut { tag, bytes, data },
                ) => {
                    self.queue.on_copied(tag, bytes as i32, Some(data), &mut self.actions);
                }
                Some(QueueAction::Submit(request)) => {
                    self.check_request(&request);
                    self.queue.on_completed(request.complete(Status::SUCCESS), &mut self.actions);
                }
            }
        }
        assert!(self.actions.is_empty() && !self.queue.is_waiting());
        assert_eq!((self.uncommitted, self.queue.buffered_bytes()), (0, 0));
    }
}

/// A device that was left by another server: what the driver returns about it. Returns whether it would be
/// served.
fn recover(bytes: &[u8], shape: &DiskShape) -> bool {
    let Ok(info) = DeviceInfo::decode(bytes) else { return false };
    assert_eq!(DeviceInfo::decode(&info.to_bytes()).ok(), Some(info));
    let Ok(parameters) = UblkParameters::decode(&bytes[DeviceInfo::SIZE..]) else { return false };
    assert_eq!(UblkParameters::decode(&parameters.to_bytes()).ok(), Some(parameters));
    let features = Features::from_bits_retain(info.features);
    let path = UblkDataPath::of(features);
    assert_eq!(path == Some(UblkDataPath::UserCopy), features.contains(Features::USER_COPY));
    let is_served = check_served(&info).is_ok() && shape.suits(&parameters);
    if is_served {
        // Panics if an offset would be that of another request.
        wire_ublk::data_offset(info.queues - 1, info.queue_depth - 1, 0);
        let bytes = wire_ublk::descriptors_bytes(info.queue_depth, 4096);
        assert!(bytes <= wire_ublk::descriptors_offset(1), "the descriptors of two queues overlap");
        assert!(parameters.basic.sectors_max <= IO_BYTES_MAX / 512);
    }
    is_served
}

/// Serves a queue whose descriptors, results and copies are what the bytes say, in any order, for a device
/// that may fail, and takes the bytes for those of a device to recover.
///
/// # Panics
/// If a request is not committed exactly once, exceeds its maximum, or leaves a buffer in use.
pub fn any_driver(bytes: &[u8]) {
    serve(bytes);
}

/// As [`any_driver`]. Returns the number of requests that the device was sent.
fn serve(bytes: &[u8]) -> usize {
    let mut input = Input(bytes);
    let mut any = AnyDriver::new(&mut input);
    recover(bytes, &any.shape);
    for _ in 0..STEPS_MAX {
        if input.0.is_empty() || any.queue.has_ended() {
            break;
        }
        any.step(&mut input);
    }
    any.stop();
    any.submitted
}

#[cfg(test)]
mod tests {
    use random::WyRand;

    use super::*;

    #[test]
    fn an_honest_driver_is_served() {
        // A disk with everything, one tag: a write, a read, a flush.
        let requests = [[0, 0, 0x01, 8, 8, 0], [0, 0, 0x00, 8, 8, 0], [0, 0, 0x02, 0, 0, 0]];
        let mut bytes = vec![0x1e, 0];
        for request in requests {
            bytes.extend(request);
            // The copy and the device, in either order.
            bytes.extend([0, 0, 0, 0]);
        }
        assert_eq!(serve(&bytes), 3);
    }

    #[test]
    fn an_honest_driver_that_copies_is_served() {
        // As above with addresses: the write asks for memory, and comes again with its data.
        let steps =
            [[0, 0, 0x01, 8, 8, 0], [0, 0, 0x01, 8, 8, 0], [0, 0, 0x00, 8, 8, 0], [0, 0, 0x02, 0, 0, 0]];
        let mut bytes = vec![0x5e, 0];
        for (index, step) in steps.into_iter().enumerate() {
            bytes.extend(step);
            // The device, except for the write without data.
            bytes.extend(if index > 0 { &[0, 0][..] } else { &[] });
        }
        assert_eq!(serve(&bytes), 3);
    }

    #[test]
    fn any_driver_is_survived() {
        let seed = 0x616e_7964;
        println!("seed {seed}");
        let mut random = WyRand::new(seed);
        let mut submitted = 0;
        for _ in 0..2000 {
            let bytes: Vec<u8> = (0..random.below(800)).map(|_| random.below(256) as u8).collect();
            submitted += serve(&bytes);
        }
        assert!(submitted > 2000, "{submitted}");
    }

    #[test]
    fn a_device_of_another_server_is_served_within_limits_only() {
        let any = AnyDriver::new(&mut Input(&[]));
        let good = DeviceInfo { queues: 2, queue_depth: 128, ..DeviceInfo::default() };
        let parameters = any.shape.parameters(IO_BYTES_MAX);
        let is_served = |info: &DeviceInfo, parameters: &UblkParameters| {
            recover(&[&info.to_bytes()[..], &parameters.to_bytes()].concat(), &any.shape)
        };
        assert!(is_served(&good, &parameters));
        for (queues, queue_depth) in [(0, 128), (4097, 128), (2, 0), (2, 1025)] {
            assert!(
                !is_served(&DeviceInfo { queues, queue_depth, ..good }, &parameters),
                "{queues} {queue_depth}"
            );
        }
        let mut larger = parameters;
        larger.basic.sectors_max += 1;
        assert!(!is_served(&good, &larger), "requests would be refused");
        let mut unaligned = parameters;
        unaligned.basic.logical_block_shift += 1;
        assert!(!is_served(&good, &unaligned));
    }
}
