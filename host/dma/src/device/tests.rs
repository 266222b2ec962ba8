use std::collections::HashSet;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use super::lent::{REGION_BYTES_MIN, REGIONS_MAX};
use super::*;
use crate::{Arena, ArenaConfig, Buffer, CHUNK_BYTES, ExternalMemory, Pool, SharedRegion};

/// Device addresses are far from host addresses, so that mixing them up fails.
const DEVICE_BASE: u64 = 1 << 60;

/// A device that counts what is mapped for it.
#[derive(Clone, Default)]
struct FakeDevice(Arc<Mutex<FakeState>>);

#[derive(Default)]
struct FakeState {
    /// Host addresses of the chunks that were mapped, in this order.
    chunks: Vec<usize>,
    /// Added to the device address of each chunk.
    skew: u64,
    /// Whether mappings fail.
    refuses: bool,
    /// Host addresses of the regions that are mapped.
    regions: HashSet<usize>,
    /// Calls of `map_region`, and the reserve of the last.
    region_calls: usize,
    reserve_bytes: u64,
    /// When it is there, `map_region` waits for a message.
    gate: Option<Receiver<()>>,
    /// Notified when a region's mapping was undone.
    undone: Option<Sender<usize>>,
}

impl FakeDevice {
    fn state(&self) -> std::sync::MutexGuard<'_, FakeState> {
        sync::lock(&self.0)
    }
}

impl Dma for FakeDevice {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        let mut state = self.state();
        if state.refuses {
            return Err(DmaError::Refused("no mapping is left".into()));
        }
        assert_eq!(chunk.bytes, CHUNK_BYTES);
        state.chunks.push(chunk.start.addr());
        Ok(DEVICE_BASE + chunk.start.addr() as u64 + state.skew)
    }

    fn map_region(
        &self,
        region: &Arc<RegionMapping>,
        reserve_bytes: u64,
    ) -> Result<(u64, Box<dyn Send>), DmaError> {
        let gate = self.state().gate.take();
        if let Some(gate) = gate {
            let _ = gate.recv();
        }
        let mut state = self.state();
        state.region_calls += 1;
        state.reserve_bytes = reserve_bytes;
        if state.refuses {
            return Err(DmaError::Refused("no memory may be pinned".into()));
        }
        state.regions.insert(region.start());
        let undo = FakeMapping { device: Arc::downgrade(&self.0), start: region.start() };
        Ok((DEVICE_BASE + region.start() as u64, Box::new(undo)))
    }
}

struct FakeMapping {
    device: Weak<Mutex<FakeState>>,
    start: usize,
}

impl Drop for FakeMapping {
    fn drop(&mut self) {
        let Some(device) = self.device.upgrade() else { return };
        let mut state = sync::lock(&device);
        state.regions.remove(&self.start);
        if let Some(undone) = &state.undone {
            let _ = undone.send(self.start);
        }
    }
}

fn arena(chunks: usize) -> Arc<Arena> {
    let limit_bytes = chunks * CHUNK_BYTES;
    Arena::new(ArenaConfig { limit_bytes, hugepages: false, ..Default::default() })
}

fn mappings(device: &FakeDevice) -> Arc<DeviceMappings<dyn Dma>> {
    let config = MappingConfig { name: "fake".into(), log_target: "fake", map_lent_memory: true };
    DeviceMappings::new(Box::new(device.clone()), config)
}

/// A device, its mappings, and the pool and addresses of one core.
fn one_core(chunks: usize) -> (FakeDevice, Pool, DeviceAddresses<dyn Dma>) {
    let (device, arena) = (FakeDevice::default(), arena(chunks));
    let addresses = DeviceAddresses::new(&mappings(&device), &arena, 4096);
    (device, Pool::new(&arena), addresses)
}

fn device_address(buffer: &Buffer) -> u64 {
    DEVICE_BASE + buffer.as_ptr().addr() as u64
}

fn lend(pool: &Pool, bytes: u64) -> ExternalMemory {
    pool.attach_external(Rc::new(SharedRegion::new(bytes).unwrap()))
}

/// Waits until the mapper thread has mapped the region of a buffer.
fn wait_located(addresses: &mut DeviceAddresses<dyn Dma>, buffer: &Buffer) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while addresses.locate(buffer).unwrap().is_none() {
        assert!(Instant::now() < deadline, "the region is not mapped");
        std::thread::yield_now();
    }
}

#[test]
fn a_chunk_is_mapped_once_for_all_cores_and_found_without_the_lock_afterwards() {
    let (device, arena) = (FakeDevice::default(), arena(4));
    let mappings = mappings(&device);
    let pool = Pool::new(&arena);
    let mut cores = [0, 1].map(|_| DeviceAddresses::new(&mappings, &arena, 4096));
    let (first, mut second) = (pool.take(8192).unwrap(), pool.take(8192).unwrap());
    let tail = second.split_off(4096 + 8);
    for core in &mut cores {
        assert_eq!(core.translate(&first), None, "it is not mapped for this core yet");
        for buffer in [&first, &second, &tail] {
            let found = core.address(buffer).unwrap();
            let offset = buffer.as_ptr().addr() - first.chunk().unwrap().start.addr();
            assert_eq!(found, ChunkAddress { address: device_address(buffer), offset, chunk: 0 });
            assert_eq!(core.translate(buffer), Some(found));
            assert_eq!(core.locate(buffer), Ok(Some(found.address)));
        }
        assert!(core.bytes() > 0);
    }
    assert_eq!(device.state().chunks, [first.chunk().unwrap().start.addr()]);
}

#[test]
fn each_chunk_is_mapped_when_a_buffer_of_it_is_first_used() {
    let (device, pool, mut addresses) = one_core(3);
    let buffers: Vec<Buffer> = (0..6).map(|_| pool.take(CHUNK_BYTES / 2).unwrap()).collect();
    // From the last chunk on: the table has gaps meanwhile.
    for buffer in buffers.iter().rev() {
        assert_eq!(addresses.locate(buffer), Ok(Some(device_address(buffer))));
    }
    assert_eq!(device.state().chunks.len(), 3);
    assert!(buffers.iter().all(|buffer| addresses.translate(buffer).is_some()));
}

#[test]
fn a_mapping_that_fails_is_reported_and_tried_again_with_the_next_use() {
    let (device, pool, mut addresses) = one_core(1);
    let buffer = pool.take(4096).unwrap();
    device.state().refuses = true;
    let refused = DmaError::Refused("no mapping is left".into());
    assert_eq!(addresses.address(&buffer), Err(refused.clone()));
    assert_eq!((addresses.locate(&buffer), addresses.translate(&buffer)), (Err(refused), None));
    device.state().refuses = false;
    assert_eq!(addresses.address(&buffer).unwrap().address, device_address(&buffer));
}

/// A driver derives the device pages of a chunk from its first one.
#[test]
fn a_chunk_that_is_not_aligned_for_the_device_is_never_used() {
    let (device, pool, mut addresses) = one_core(1);
    device.state().skew = 512;
    let buffer = pool.take(4096).unwrap();
    for _ in 0..2 {
        let found = addresses.address(&buffer);
        assert!(matches!(found, Err(DmaError::Misaligned { page_bytes: 4096, .. })), "{found:?}");
        assert_eq!(addresses.translate(&buffer), None);
    }
}

/// The index of an arena's chunk says nothing about another arena.
#[test]
fn buffers_of_another_arena_are_not_taken_for_those_of_the_cores_own() {
    let (device, pool, mut addresses) = one_core(1);
    let (own, other) = (pool.take(4096).unwrap(), Pool::new(&arena(2)));
    // The second is in a chunk with an index that the core's arena does not have.
    let foreign = [4096, CHUNK_BYTES / 2].map(|bytes| other.take(bytes).unwrap());
    assert_eq!((foreign[0].chunk_index(), foreign[1].chunk_index()), (own.chunk_index(), Some(1)));
    for buffer in foreign.iter().chain(&foreign) {
        assert_eq!(addresses.translate(buffer), None);
        assert_eq!(addresses.address(buffer), Err(DmaError::NotPoolMemory));
        assert_eq!(addresses.locate(buffer), Ok(None));
        assert_eq!(addresses.locate(&own), Ok(Some(device_address(&own))));
    }
    assert_eq!(device.state().chunks.len(), 1);
}

/// A parcel's memory is in a chunk of another core's pool, and its index in the adopting pool is another one.
#[test]
fn data_of_another_core_has_the_address_of_its_chunk() {
    let (device, arena) = (FakeDevice::default(), arena(4));
    let mut addresses = DeviceAddresses::new(&mappings(&device), &arena, 4096);
    let (pool, other) = (Pool::new(&arena), Pool::new(&arena));
    let own = pool.take(4096).unwrap();
    for _ in 0..2 {
        let parcel = crate::Data::from(other.take(4096).unwrap()).into_parcel();
        let adopted = pool.adopt(parcel).unwrap();
        let buffer = &adopted.slices()[0];
        assert!(buffer.is_adopted() && buffer.chunk_index() != own.chunk_index());
        assert_eq!(addresses.locate(buffer), Ok(Some(device_address(buffer))));
        assert_eq!(Some(addresses.address(buffer).unwrap().chunk), buffer.chunk_index());
        assert_eq!(addresses.locate(&own), Ok(Some(device_address(&own))));
        drop(adopted);
        other.collect();
    }
    assert_eq!(device.state().chunks.len(), 2);
}

#[test]
fn arenas_and_what_is_retained_outlive_the_device() {
    struct Recorder(&'static str, Arc<Mutex<Vec<&'static str>>>, Option<Weak<Arena>>);
    impl Drop for Recorder {
        fn drop(&mut self) {
            assert!(self.2.as_ref().is_none_or(|arena| arena.strong_count() > 0), "the arena went first");
            sync::lock(&self.1).push(self.0);
        }
    }
    impl Dma for Recorder {
        fn map(&self, _chunk: &ChunkMemory) -> Result<u64, DmaError> {
            Err(DmaError::Gone)
        }
    }
    let order = Arc::new(Mutex::default());
    let arena = arena(1);
    let device = Recorder("device", order.clone(), Some(Arc::downgrade(&arena)));
    let config = MappingConfig { name: "fake".into(), log_target: "fake", map_lent_memory: true };
    let mappings = DeviceMappings::new(Box::new(device), config);
    mappings.retain(Box::new(Recorder("retained", order.clone(), None)));
    let addresses = DeviceAddresses::new(&mappings, &arena, 4096);
    drop((mappings, arena));
    assert!(sync::lock(&order).is_empty(), "a core still uses the device");
    drop(addresses);
    assert_eq!(*sync::lock(&order), ["device", "retained"]);
}

#[test]
fn a_lent_region_is_mapped_in_the_background_and_found_by_every_core() {
    let (device, arena) = (FakeDevice::default(), arena(3));
    let mappings = mappings(&device);
    let mut cores = [0, 1].map(|_| DeviceAddresses::new(&mappings, &arena, 4096));
    let pool = Pool::new(&arena);
    let lent = lend(&pool, REGION_BYTES_MIN);
    let parts = [lent.buffer(0, 4096).unwrap(), lent.buffer(REGION_BYTES_MIN - 8, 8).unwrap()];
    let (open, gate) = channel();
    device.state().gate = Some(gate);
    for core in &mut cores {
        assert_eq!(core.locate(&parts[0]), Ok(None), "it is being mapped");
        assert_eq!(core.address(&parts[0]), Err(DmaError::NotPoolMemory));
    }
    open.send(()).unwrap();
    for core in &mut cores {
        wait_located(core, &parts[1]);
        for part in &parts {
            assert_eq!(core.locate(part), Ok(Some(device_address(part))));
        }
    }
    let state = device.state();
    assert_eq!((state.region_calls, state.chunks.len()), (1, 0));
    assert_eq!(state.reserve_bytes, 3 * CHUNK_BYTES as u64, "the pools' buffers come first");
}

/// The address may be other memory afterwards, and another region gets the same entry of the pool.
#[test]
fn no_mapping_is_used_after_its_region_ended() {
    let (device, pool, mut addresses) = one_core(1);
    let (undone, is_undone) = channel();
    device.state().undone = Some(undone);
    let mut entry = None;
    for _ in 0..3 {
        let lent = lend(&pool, REGION_BYTES_MIN);
        let part = lent.buffer(4096, 4096).unwrap();
        assert_eq!(*entry.get_or_insert(part.backing_index()), part.backing_index(), "entries are reused");
        let (open, gate) = channel();
        device.state().gate = Some(gate);
        assert_eq!(addresses.locate(&part), Ok(None), "the mapping of an earlier region is not this one's");
        open.send(()).unwrap();
        wait_located(&mut addresses, &part);
        assert_eq!(addresses.locate(&part), Ok(Some(device_address(&part))));
        let start = lent.region().as_ptr().addr();
        // A part keeps all of it.
        drop(lent);
        assert!(device.state().regions.contains(&start));
        drop(part);
        assert_eq!(is_undone.recv_timeout(Duration::from_secs(30)), Ok(start));
        assert!(device.state().regions.is_empty());
    }
    if cfg!(miri) {
        return;
    }
    // The table of the device has forgotten them: there is place for as many as it takes.
    let lent: Vec<_> = (0..REGIONS_MAX).map(|_| lend(&pool, REGION_BYTES_MIN)).collect();
    for region in &lent {
        let _ = addresses.locate(&region.buffer(0, 8).unwrap());
    }
    wait_located(&mut addresses, &lent[REGIONS_MAX - 1].buffer(0, 8).unwrap());
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not implement file mappings")]
fn regions_that_are_small_read_only_or_not_wanted_are_never_mapped() {
    use std::os::fd::AsFd;
    let (device, pool, mut addresses) = one_core(1);
    let file = rustix::fs::memfd_create("lent", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, REGION_BYTES_MIN).unwrap();
    let read_only = SharedRegion::map(file.as_fd(), 0, REGION_BYTES_MIN, false).unwrap();
    let never = [lend(&pool, REGION_BYTES_MIN - 4096), pool.attach_external(Rc::new(read_only))];
    let buffers = never.each_ref().map(|lent| lent.buffer(0, 512).unwrap());
    let config = MappingConfig { name: "fake".into(), log_target: "fake", map_lent_memory: false };
    let mappings = DeviceMappings::new(Box::new(device.clone()), config);
    let mut off = DeviceAddresses::new(&mappings, &arena(1), 4096);
    let large = lend(&pool, REGION_BYTES_MIN);
    let large = large.buffer(0, 512).unwrap();
    for _ in 0..2 {
        assert!(buffers.iter().all(|buffer| addresses.locate(buffer) == Ok(None)));
        assert_eq!(off.locate(&large), Ok(None));
    }
    // What comes later in the mapper's queue is mapped: these never were in it.
    wait_located(&mut addresses, &large);
    assert_eq!(device.state().region_calls, 1);
}

#[test]
#[cfg_attr(miri, ignore = "Miri is slow with so much memory")]
fn regions_beyond_the_limit_are_copied_and_those_that_end_make_place() {
    let (device, pool, mut addresses) = one_core(1);
    let (undone, is_undone) = channel();
    device.state().undone = Some(undone);
    let mut lent: Vec<_> = (0..=REGIONS_MAX).map(|_| lend(&pool, REGION_BYTES_MIN)).collect();
    let mut buffers: Vec<_> = lent.iter().map(|region| region.buffer(0, 8).unwrap()).collect();
    for buffer in &buffers {
        assert_eq!(addresses.locate(buffer), Ok(None));
    }
    buffers[..REGIONS_MAX].iter().for_each(|buffer| wait_located(&mut addresses, buffer));
    assert_eq!(addresses.locate(&buffers[REGIONS_MAX]), Ok(None));
    assert_eq!(device.state().region_calls, REGIONS_MAX);
    let first = lent[0].region().as_ptr().addr();
    buffers.remove(0);
    lent.remove(0);
    assert_eq!(is_undone.recv_timeout(Duration::from_secs(30)), Ok(first));
    let next = lend(&pool, REGION_BYTES_MIN);
    wait_located(&mut addresses, &next.buffer(0, 8).unwrap());
}

#[test]
fn a_region_that_the_device_refuses_is_copied_and_not_tried_again() {
    let (device, pool, mut addresses) = one_core(1);
    device.state().refuses = true;
    let (refused, other) = (lend(&pool, REGION_BYTES_MIN), lend(&pool, REGION_BYTES_MIN));
    let (refused, other) = (refused.buffer(0, 8).unwrap(), other.buffer(0, 8).unwrap());
    assert_eq!(addresses.locate(&refused), Ok(None));
    while device.state().region_calls == 0 {
        std::thread::yield_now();
    }
    device.state().refuses = false;
    wait_located(&mut addresses, &other);
    for _ in 0..10 {
        assert_eq!(addresses.locate(&refused), Ok(None));
    }
    assert_eq!(device.state().region_calls, 2);
}
