//! Memory that is not the core's own: lent by a peer, adopted from another core, or of another arena.
#![allow(clippy::unwrap_used)]

mod rig;

use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::mpsc::channel;

use block_io::{Request, Status, Tag};
use dma::{Arena, ArenaConfig, Buffer, Data, ExternalMemory, Pool, SharedRegion};
use nvme::testing::{SimulatedConfig, SimulatedController};
use nvme::{Namespace, Options};
use reactor::Core;
use rig::{on_device, open, options, status, until};

const REGION_BYTES: u64 = 2 << 20;

fn pattern(round: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 512 * 31 + at + round * 7) as u8).collect()
}

/// Memory of a peer, which the device can map too.
fn lend(core: &Core, device: &SimulatedController, bytes: u64) -> ExternalMemory {
    let file = rustix::fs::memfd_create("peer", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    let map = || SharedRegion::map(file.as_fd(), 0, bytes, true).unwrap();
    let region = Rc::new(map());
    device.add_lendable(region.as_ptr().addr(), map());
    core.pool().attach_external(region)
}

fn bounced(namespace: &Namespace) -> u64 {
    namespace.stats().bounced
}

/// Writes `ranges` of lent memory to the device as one request, and reads them back to the same place.
async fn transfer(
    core: &Core,
    device: &SimulatedController,
    namespace: &mut Namespace,
    lent: &ExternalMemory,
    ranges: &[(u64, u32)],
    round: usize,
) {
    let data =
        || Data::gather(ranges.iter().map(|&(at, bytes)| lent.buffer(at, bytes).unwrap()).collect()).unwrap();
    let bytes: u32 = ranges.iter().map(|(_, bytes)| bytes).sum();
    let content = pattern(round, bytes as usize);
    data().copy_from(0, &content);
    let write = Request::write(Tag(0), 8, bytes / 512, data());
    assert_eq!(status(core, namespace, write).await, Status::SUCCESS, "{ranges:?}");
    assert!(device.namespace_data(1)[4096..][..bytes as usize] == content, "{ranges:?}");
    data().clear();
    let read = Request::read(Tag(0), 8, bytes / 512, data());
    assert_eq!(status(core, namespace, read).await, Status::SUCCESS, "{ranges:?}");
    let mut back = vec![0; bytes as usize];
    data().copy_to(0, &mut back);
    assert!(back == content, "{ranges:?}");
}

#[test]
fn lent_memory_is_accessed_in_place_once_it_is_mapped() {
    for sgls in [0, 1, 2] {
        let mut config = SimulatedConfig::new(4096, 512);
        config.identity.sgls = sgls;
        on_device(config, async move |core, device| {
            let mut namespace = open(&core, &device, &options()).await;
            let lent = lend(&core, &device, REGION_BYTES);
            // The first command asks for the mapping. Whether it is there by then or not, the data is right.
            transfer(&core, &device, &mut namespace, &lent, &[(0, 4096)], 1).await;
            until(&core, "the region is mapped", || device.lent_regions() == 1).await;
            transfer(&core, &device, &mut namespace, &lent, &[(0, 4096)], 2).await;
            let before = bounced(&namespace);
            let in_place = [
                &[(4096, 4096)][..],
                &[(512, 512)],
                &[(REGION_BYTES - 512, 512)],
                &[(8192 - 512, 1024)],
                &[(8, 8192)],
                &[(65536, 65536)],
                &[(65536 + 512, 131_072)],
                &[(8192, 4096), (0, 4096)],
                &[(3072, 1024), (16384, 4096), (32768, 512)],
            ];
            for (round, ranges) in in_place.into_iter().enumerate() {
                transfer(&core, &device, &mut namespace, &lent, ranges, round).await;
                assert_eq!(bounced(&namespace), before, "{ranges:?} with SGLS {sgls} was copied");
            }
            // Neither a PRP list nor, at this alignment, every SGL.
            transfer(&core, &device, &mut namespace, &lent, &[(1, 512)], 3).await;
            transfer(&core, &device, &mut namespace, &lent, &[(0, 512), (8192, 512)], 4).await;
            let copied = [4, 0, 2][sgls as usize];
            assert_eq!(bounced(&namespace) - before, copied, "SGLS {sgls}");
        });
    }
}

/// The device must not reach the address when it is other memory, and another region may get its index in the pool.
#[test]
fn a_region_is_unmapped_for_the_device_before_it_goes_and_another_takes_its_place() {
    on_device(SimulatedConfig::new(4096, 512), async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        for round in 0..4 {
            let lent = lend(&core, &device, REGION_BYTES);
            transfer(&core, &device, &mut namespace, &lent, &[(4096, 8192)], round).await;
            until(&core, "the region is mapped", || device.lent_regions() == 1).await;
            transfer(&core, &device, &mut namespace, &lent, &[(4096, 8192)], round + 10).await;
            // In flight, a part keeps all of it.
            let part = lent.buffer(0, 4096).unwrap();
            drop(lent);
            assert_eq!(device.lent_regions(), 1);
            drop(part);
            until(&core, "the region is unmapped", || device.lent_regions() == 0).await;
        }
    });
}

#[test]
fn what_cannot_be_mapped_is_copied() {
    let never = Options { map_lent_memory: false, ..options() };
    // Options, bytes, and whether the device knows the memory.
    for (options, bytes, known) in
        [(options(), 1 << 20, false), (options(), 65536, true), (never, REGION_BYTES, true)]
    {
        on_device(SimulatedConfig::new(4096, 512), async move |core, device| {
            let mut namespace = open(&core, &device, &options).await;
            let lent = match known {
                true => lend(&core, &device, bytes),
                false => core.pool().attach_external(Rc::new(SharedRegion::new(bytes).unwrap())),
            };
            for round in 0..10 {
                transfer(&core, &device, &mut namespace, &lent, &[(4096, 8192)], round).await;
            }
            assert_eq!((bounced(&namespace), device.lent_regions()), (20, 0));
        });
    }
}

/// A parcel's memory is in a chunk of another core's pool, which the device reaches like its own.
#[test]
fn data_of_another_core_is_accessed_in_place() {
    on_device(SimulatedConfig::new(4096, 512), async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        for lengths in [&[4096][..], &[512], &[65536], &[300 * 512], &[4096, 8192], &[512, 512]] {
            let bytes: usize = lengths.iter().sum();
            let content = pattern(lengths.len(), bytes);
            let (arena, sent) = (core.pool().arena().clone(), content.clone());
            let ((parcel, has_parcel), (done, is_done)) = (channel(), channel::<()>());
            let lengths = lengths.to_vec();
            let other = std::thread::spawn(move || {
                let pool = Pool::new(&arena);
                let buffers = lengths.iter().map(|bytes| pool.take(*bytes).unwrap()).collect();
                let mut data = Data::gather(buffers).unwrap();
                data.copy_from(0, &sent);
                parcel.send(data.into_parcel()).unwrap();
                let _ = is_done.recv();
                pool.collect();
            });
            let data = core.pool().adopt(has_parcel.recv().unwrap()).unwrap();
            let write = Request::write(Tag(0), 8, bytes as u32 / 512, data);
            assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS, "{bytes}");
            assert!(device.namespace_data(1)[4096..][..bytes] == content);
            drop(done);
            other.join().unwrap();
        }
        // Two half pages fit neither two PRPs nor, on this device, an SGL.
        assert_eq!(bounced(&namespace), 1);
    });
}

/// The chunks of two arenas have the same indices.
#[test]
fn buffers_of_another_arena_are_copied() {
    on_device(SimulatedConfig::new(4096, 512), async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let config = ArenaConfig { limit_bytes: 2 << 20, hugepages: false, shared: true };
        let foreign = Pool::new(&Arena::new(config));
        for (round, lengths) in [&[4096][..], &[4096, 4096], &[65536]].into_iter().enumerate() {
            let bytes: usize = lengths.iter().sum();
            let content = pattern(round, bytes);
            for (pool, copied) in [(&foreign, 1), (core.pool(), 0)] {
                let buffers = lengths.iter().map(|bytes| pool.take(*bytes).unwrap()).collect();
                let mut data = Data::gather(buffers).unwrap();
                data.copy_from(0, &content);
                let before = bounced(&namespace);
                let write = Request::write(Tag(0), 8, bytes as u32 / 512, data);
                assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS, "{lengths:?}");
                assert!(device.namespace_data(1)[4096..][..bytes] == content, "{lengths:?}");
                assert_eq!(bounced(&namespace) - before, copied, "{lengths:?}");
            }
        }
    });
}

/// Data of several slices has a PRP list of its own, a long buffer needs that of its chunk.
#[test]
fn a_chunk_that_was_first_used_by_slices_gets_its_prp_list() {
    on_device(SimulatedConfig::new(4096, 512), async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let mut chunks = Vec::new();
        for (round, count) in [2, 1, 2].into_iter().enumerate() {
            let buffers: Vec<_> = (0..count).map(|_| core.pool().take(131_072).unwrap()).collect();
            chunks.extend(buffers.iter().map(Buffer::chunk_index));
            let mut data = Data::gather(buffers).unwrap();
            let content = pattern(round, data.len());
            data.copy_from(0, &content);
            let write = Request::write(Tag(0), 8, content.len() as u32 / 512, data);
            assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
            assert!(device.namespace_data(1)[4096..][..content.len()] == content);
        }
        assert!(chunks.iter().all(|chunk| *chunk == chunks[0]), "{chunks:?}");
        assert_eq!(bounced(&namespace), 0);
    });
}
