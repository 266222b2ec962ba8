//! A virtqueue whose driver changes it at any step, for fuzzing.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use dma::{Arena, ArenaConfig, Data, Pool};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use wire_vhost_user::inflight::InflightDescription;
use wire_vhost_user::{MemoryRegion, VringAddress};
use wire_virtio::Features;
use wire_virtio::blk::ID_BYTES;

use crate::backend::BlkBackend;
use crate::blk::{self, BlkPlan, BlkStep};
use crate::chain::{self, Chain};
use crate::inflight_region::InflightRegion;
use crate::limits::CHAIN_MAX;
use crate::memory::{GuestMemory, GuestPlace};
use crate::vring::{ChainId, Ring, RingArea, RingSetup};

/// Bytes of guest memory: two regions that touch, and nothing behind them.
const MEMORY_BYTES: u64 = 64 << 10;
const REGION_BYTES: u64 = MEMORY_BYTES / 2;
/// Chains that are not returned yet.
const IN_FLIGHT_MAX: usize = 64;
/// Size of the virtqueue for which the area of requests in flight has room.
const INFLIGHT_SIZE: u16 = 512;
/// Steps of one input.
const STEPS_MAX: usize = 512;

/// What a fuzz input describes, byte after byte; zeroes follow.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    pub(crate) fn u8(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The virtqueue, and the driver's memory.
struct AnyRing {
    memory: GuestMemory,
    address: VringAddress,
    size: u16,
    features: Features,
    ring: Option<Ring>,
    /// The memory, of which a part may be the area of requests in flight.
    file: OwnedFd,
    has_inflight_area: bool,
    chain: Chain,
    in_flight: Vec<ChainId>,
    /// Chains that were fetched.
    fetched: usize,
    // Dropped last: the memory is attached to it.
    pool: Pool,
}

impl AnyRing {
    fn new(input: &mut Input<'_>) -> AnyRing {
        let arena = Arena::new(ArenaConfig { hugepages: false, ..ArenaConfig::default() });
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, MEMORY_BYTES).expect("memory");
        let mut any = AnyRing {
            memory: GuestMemory::default(),
            address: VringAddress { index: 0, flags: 0, descriptors: 0, used: 0, available: 0, log: 0 },
            size: 0,
            features: Features::empty(),
            ring: None,
            file,
            has_inflight_area: false,
            chain: Chain::default(),
            in_flight: Vec::new(),
            fetched: 0,
            pool: Pool::new(&arena),
        };
        for start in [0, REGION_BYTES] {
            let region = MemoryRegion {
                guest_address: start,
                size: REGION_BYTES,
                user_address: start,
                mmap_offset: start,
            };
            any.memory.add(&any.pool, region, &any.file).expect("a region");
        }
        any.configure(input);
        any
    }

    /// Sets features, size and addresses.
    fn configure(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        let known = [Features::RING_PACKED, Features::EVENT_IDX, Features::INDIRECT_DESC];
        let chosen = known.into_iter().enumerate().filter(|(bit, _)| choice >> bit & 1 != 0);
        self.features = chosen.fold(Features::empty(), |all, (_, feature)| all | feature);
        // Most sizes are valid, and small enough for indices to wrap.
        self.size = if choice & 0x80 != 0 { input.u16() } else { 1 << (choice >> 3 & 0x7) };
        if choice & 0x40 != 0 {
            self.address.descriptors = input.u16().into();
            self.address.available = input.u16().into();
            self.address.used = input.u16().into();
        } else {
            (self.address.descriptors, self.address.available, self.address.used) = (0, 0x1000, 0x2000);
        }
    }

    /// Stops the ring and starts it again, as `GET_VRING_BASE` and `SET_VRING_KICK` do.
    fn restart(&mut self, base: Option<u32>) {
        self.in_flight.clear();
        let stopped = self.ring.take().map_or(0, Ring::stop);
        let setup = RingSetup {
            size: self.size,
            base: base.unwrap_or(stopped),
            features: self.features,
            inflight: if self.has_inflight_area { self.inflight_area() } else { None },
        };
        self.ring = Ring::new(&self.memory, &self.address, setup);
    }

    /// Loses the ring as a process that is killed does: what is in flight is only in its area.
    fn crash(&mut self) {
        self.ring = None;
    }

    /// The area of requests in flight: the second region of the memory, which the driver writes too.
    fn inflight_area(&self) -> Option<RingArea> {
        let description = InflightDescription {
            mmap_size: REGION_BYTES,
            mmap_offset: REGION_BYTES,
            queues: 1,
            queue_size: INFLIGHT_SIZE,
        };
        let region = InflightRegion::open(&description, &self.file).expect("a part of the memory");
        region.area(0, self.size, self.features)
    }

    /// A place near the start of an area.
    fn place(&self, choice: u8) -> u64 {
        let VringAddress { descriptors, available, used, .. } = self.address;
        [descriptors, available, available, used][usize::from(choice & 0x3)] + u64::from(choice >> 2 & !1)
    }

    /// The driver writes its memory.
    fn write(&mut self, address: u64, bytes: &[u8]) {
        for (address, byte) in (address..).zip(bytes) {
            if let Some(piece) = self.memory.piece(address, 1) {
                piece.region().store_u8(piece.offset, *byte);
            }
        }
    }

    /// Fetches a chain and uses its buffers as a device does. A driver that violates the specification has it stopped.
    fn fetch(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        if self.in_flight.len() == IN_FLIGHT_MAX {
            return;
        }
        match ring.look().and_then(|()| ring.fetch(&self.memory, &mut self.chain)) {
            Ok(None) => {}
            Err(_) => self.restart(None),
            Ok(Some(id)) => {
                self.in_flight.push(id);
                self.fetched += 1;
                self.use_buffers();
            }
        }
    }

    /// Whether the chain is a usual request of a block device with such blocks: then it is what [`blk::plan`] finds too.
    fn is_transfer(&self, block_size: u32) -> bool {
        let backend = BlkBackend {
            key: 0,
            read_only: false,
            packed_ring: false,
            block_size,
            physical_exponent: 0,
            optimal_io_blocks: 0,
            sectors: 1,
            can_flush: true,
            can_unmap: true,
            can_write_zeroes: true,
            write_cache: true,
            serial: [0; ID_BYTES],
        };
        let Some(found) = blk::transfer(&self.memory, &self.chain, &backend, true) else { return false };
        let planned = blk::plan(&self.memory, &self.chain, &backend, true);
        let Ok(BlkPlan { status, step: BlkStep::Submit(request, written) }) = planned else {
            panic!("a transfer that is none");
        };
        let facts = |request: &bdev::Request, written: u32, status: &GuestPlace| {
            let place = |data: &Data| data.single().map(|buffer| (buffer.as_ptr(), buffer.len()));
            let range = (request.op, request.flags, request.lba, request.blocks);
            (range, request.data().and_then(place), written, Rc::as_ptr(&status.region), status.offset)
        };
        let expected = facts(&request, written, &status);
        assert_eq!(facts(&found.request, found.written, &found.status), expected, "another transfer");
        true
    }

    /// What is written may be the virtqueue itself.
    fn use_buffers(&mut self) {
        for block_size in [512, 4096] {
            self.is_transfer(block_size);
        }
        let (readable, writable) = (self.chain.readable(), self.chain.writable());
        assert!(readable.len() + writable.len() <= CHAIN_MAX, "a chain is too long");
        let header = chain::first_bytes::<16>(&self.memory, readable);
        assert!(header.is_err() || chain::total(readable) >= 16, "a header from nowhere");
        for (ranges, skip) in [(readable, 16), (writable, 0)] {
            let length = chain::total(ranges).saturating_sub(skip).min(MEMORY_BYTES);
            if length > 0
                && let Ok(data) = chain::data(&self.memory, ranges, skip, length)
            {
                let bytes: u64 = data.slices().iter().map(|slice| slice.len() as u64).sum();
                assert_eq!(bytes, length, "the data of a request is not what its chain describes");
            }
        }
        if let Ok(written) = chain::write_bytes(&self.memory, writable, &[0xa5; 24]) {
            assert_eq!(written as u64, chain::total(writable).min(24), "a part is not written");
        }
        if let Some(place) = chain::last_byte(&self.memory, writable) {
            place.region.store_u8(place.offset, 0);
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let action = input.u8();
        match action & 0x7 {
            0 | 1 => {
                let address = if action & 0x1 == 0 { input.u16().into() } else { self.place(input.u8()) };
                let bytes: Vec<u8> = (0..=action >> 3).map(|_| input.u8()).collect();
                self.write(address, &bytes);
            }
            2 | 3 => (0..=action >> 3).for_each(|_| self.fetch()),
            4 => {
                let Some(ring) = &mut self.ring else { return };
                if !self.in_flight.is_empty() {
                    let at = usize::from(action >> 3) % self.in_flight.len();
                    ring.push_used(self.in_flight.swap_remove(at), input.u8().into());
                }
            }
            5 => {
                let Some(ring) = &mut self.ring else { return };
                let old = ring.publish();
                assert!(!ring.publish(), "the driver is notified twice ({old})");
                if action & 0x8 != 0 {
                    ring.enable_notifications();
                } else {
                    ring.disable_notifications();
                }
            }
            6 => {
                if action & 0x20 != 0 {
                    self.crash();
                }
                self.has_inflight_area = action & 0x10 != 0;
                let base = (action & 0x8 != 0).then(|| u32::from(input.u16()) << 16 | u32::from(input.u16()));
                self.restart(base);
            }
            _ => {
                self.configure(input);
                let is_moved = self
                    .ring
                    .as_mut()
                    .is_none_or(|ring| ring.relocate(&self.memory, &self.address).is_some());
                if !is_moved || action & 0x8 != 0 {
                    self.restart(None);
                }
            }
        }
    }
}

/// Serves a virtqueue whose size, place, descriptors, indices and area of requests in flight are what the bytes say, and
/// change between any two steps. It may lose its state at any of them.
///
/// # Panics
/// If a chain exceeds its maximum, data does not have the length that its chain describes, a request of a block device is
/// another one when it is found by its shape, or a driver is notified of nothing.
pub fn any_ring(bytes: &[u8]) {
    serve(bytes);
}

/// As [`any_ring`]. Returns the number of chains that were fetched.
fn serve(bytes: &[u8]) -> usize {
    let mut input = Input(bytes);
    let mut any = AnyRing::new(&mut input);
    any.restart(None);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        any.step(&mut input);
    }
    any.fetched
}

#[cfg(test)]
mod tests {
    use random::WyRand;
    use wire_virtio::blk::RequestHeader;
    use wire_virtio::split::Descriptor;

    use super::{AnyRing, Input};

    /// A driver that polls works on some while the device returns others, and is notified once.
    #[test]
    fn used_chains_are_visible_before_the_last_one_is_returned() {
        // A split virtqueue of 128 descriptors, without features.
        let mut any = AnyRing::new(&mut Input(&[7 << 3]));
        for head in 0..10_u16 {
            let [low, high] = head.to_le_bytes();
            any.write(16 * u64::from(head), &[0, 0x30, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
            any.write(0x1004 + 2 * u64::from(head), &[low, high]);
        }
        any.write(0x1002, &[10]);
        any.restart(None);
        (0..10).for_each(|_| any.fetch());
        let mut seen = Vec::new();
        for id in std::mem::take(&mut any.in_flight) {
            any.ring.as_mut().unwrap().push_used(id, 1);
            seen.push(any.memory.piece(0x2002, 2).unwrap().region().load_u16(0x2002));
        }
        assert_eq!(seen, [0, 0, 0, 0, 0, 0, 0, 8, 8, 8]);
        assert_eq!([(); 2].map(|()| any.ring.as_mut().unwrap().publish()), [true, false]);
        assert_eq!(any.memory.piece(0x2002, 2).unwrap().region().load_u16(0x2002), 10);
    }

    /// Reads and writes of drivers, and what differs from them in one respect. Those that are found are compared.
    #[test]
    fn usual_requests_are_found_by_their_shape() {
        // Kind, sector, bytes of header and status, whether the device writes the data, their address and bytes.
        let read = (0, 8, [16, 1], true, 0x4000, 4096);
        let write = (1, 8, [16, 1], false, 0x4000, 8192);
        let table = [
            (read, [true, true]),
            (write, [true, true]),
            ((0, 7, [16, 1], true, 0x4000, 4096), [true, false]),
            ((0, 8, [16, 1], true, 0x4000, 512), [true, false]),
            ((0, 8, [16, 1], true, 0x4001, 4096), [true, true]),
            // At the border of the regions, and beyond the last one.
            ((0, 8, [16, 1], true, 0x7000, 4096), [true, true]),
            ((0, 8, [16, 1], true, 0x7001, 4096), [false, false]),
            ((0, 8, [16, 1], true, 0xf001, 4096), [false, false]),
            ((0, 8, [16, 1], true, 0x4000, 0), [false, false]),
            ((0, 8, [16, 1], true, 0x4000, 100), [false, false]),
            ((0, 8, [17, 1], true, 0x4000, 4096), [false, false]),
            ((0, 8, [15, 1], true, 0x4000, 4096), [false, false]),
            ((0, 8, [16, 2], true, 0x4000, 4096), [false, false]),
            // A kind that does not go with the buffers, and one without data.
            ((1, 8, [16, 1], true, 0x4000, 4096), [false, false]),
            ((0, 8, [16, 1], false, 0x4000, 4096), [false, false]),
            ((4, 0, [16, 1], true, 0x4000, 4096), [false, false]),
        ];
        for ((kind, sector, [header, status], writes, address, bytes), expected) in table {
            let mut any = AnyRing::new(&mut Input(&[3 << 3]));
            let chain =
                [(0x3001, header, 1), (address, bytes, if writes { 3 } else { 1 }), (0x3411, status, 2)];
            for (index, (address, length, flags)) in (0_u16..).zip(chain) {
                let descriptor = Descriptor { address, length, flags, next: index + 1 };
                any.write(16 * u64::from(index), &descriptor.to_bytes());
            }
            let request = RequestHeader { kind, priority: 0, sector };
            any.write(0x3001, &request.to_bytes());
            any.write(0x1002, &[1]);
            any.restart(None);
            any.fetch();
            assert_eq!(any.fetched, 1);
            assert_eq!([512, 4096].map(|size| any.is_transfer(size)), expected, "{request:?} {chain:?}");
        }
    }

    /// Steps that write a place.
    fn write(address: u16, bytes: &[u8]) -> Vec<u8> {
        let [low, high] = address.to_le_bytes();
        [&[(bytes.len() as u8 - 1) << 3, low, high][..], bytes].concat()
    }

    /// Descriptors of a request: address, length, and two words of the format.
    fn descriptors(words: [[u16; 2]; 3]) -> Vec<u8> {
        let places = [(0x3000, 16), (0x7f00, 512), (0x3400, 1)];
        let steps =
            places.into_iter().zip(words).enumerate().map(|(index, ((address, length), [third, fourth]))| {
                let words = [u64::to_le_bytes(address).as_slice(), &u32::to_le_bytes(length)].concat();
                write(16 * index as u16, &[&words[..], &third.to_le_bytes(), &fourth.to_le_bytes()].concat())
            });
        steps.flatten().collect()
    }

    /// A driver with one request in a virtqueue of eight descriptors, which is fetched, returned and published.
    fn driver(packed: bool) -> Vec<u8> {
        let finish = [2, 4, 1, 5, 2];
        if packed {
            let table = descriptors([[7, 0x81], [7, 0x83], [7, 0x82]]);
            return [&[3 << 3 | 1], &table[..], &[14, 0, 0x80, 0, 0x80], &finish].concat();
        }
        let table = descriptors([[1, 1], [3, 2], [2, 0]]);
        [&[3 << 3], &table[..], &write(0x1000, &[0, 0, 1, 0, 0, 0]), &finish].concat()
    }

    #[test]
    fn an_honest_driver_is_served() {
        assert_eq!([true, false].map(|packed| super::serve(&driver(packed))), [1, 1]);
    }

    /// As [`driver`], with an area of requests in flight. The process is lost when the request was fetched.
    fn crashing_driver(packed: bool) -> Vec<u8> {
        let base: &[u8] = if packed { &[0, 0x80, 0, 0x80] } else { &[0, 0, 0, 0] };
        let table = match packed {
            true => descriptors([[7, 0x81], [7, 0x83], [7, 0x82]]),
            false => [descriptors([[1, 1], [3, 2], [2, 0]]), write(0x1000, &[0, 0, 1, 0, 0, 0])].concat(),
        };
        let start = [&[0x1e], base].concat();
        let lost = [&[2, 0x3e], base, &[2, 4, 1, 5, 2]].concat();
        [&[3 << 3 | u8::from(packed)][..], &start, &table, &lost].concat()
    }

    #[test]
    fn what_was_in_flight_in_a_lost_process_is_fetched_again_once() {
        assert_eq!([true, false].map(|packed| super::serve(&crashing_driver(packed))), [2, 2]);
    }

    #[test]
    fn any_driver_is_survived() {
        let mut random = WyRand::new(1);
        let mut next = || random.next_bits() as u8;
        let mut fetched = 0;
        for round in 0..3000 {
            let packed = round % 2 == 0;
            let mut bytes = if round % 4 < 2 { driver(packed) } else { crashing_driver(packed) };
            bytes.extend((0..100).map(|_| next()));
            for _ in 0..round % 5 {
                let at = usize::from(next()) % bytes.len();
                bytes[at] = next();
            }
            fetched += super::serve(&bytes);
        }
        assert!(fetched > 1000, "{fetched} chains are too few");
    }
}
