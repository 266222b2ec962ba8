use super::*;
use crate::{ArenaConfig, SharedRegion};

fn pool(chunks: usize) -> Pool {
    Pool::new(&Arena::new(ArenaConfig {
        limit_bytes: chunks * CHUNK_BYTES,
        hugepages: false,
        ..Default::default()
    }))
}

#[test]
fn buffers_do_not_overlap_and_come_back() {
    let pool = pool(1);
    // Miri is slow: a chunk of few buffers, and their ends only.
    let bytes = if cfg!(miri) { 262_144 } else { 4096 };
    let mut held: Vec<Buffer> = (0..CHUNK_BYTES / bytes).map(|_| pool.take(bytes).unwrap()).collect();
    for (index, buffer) in held.iter_mut().enumerate() {
        let bytes = buffer.as_mut_slice();
        (bytes[0], bytes[bytes.len() - 1]) = (index as u8, index as u8);
    }
    for (index, buffer) in held.iter().enumerate() {
        let bytes = buffer.as_slice();
        assert_eq!((bytes[0], bytes[bytes.len() - 1]), (index as u8, index as u8));
    }
    assert!(pool.take(bytes).is_none(), "the limit holds");
    held.pop();
    assert!(pool.take(1).is_some());
}

#[test]
fn what_is_handed_out_is_counted_by_size_across_chunks_that_come_and_go() {
    let pool = pool(1);
    let count = |class: usize| {
        let PoolCounts { bytes, taken, refills, failures } = pool.counts()[class];
        assert_eq!(bytes, 4096 << class);
        (taken, refills, failures)
    };
    // The only chunk serves one size, then another.
    drop((pool.take(1 << 20), pool.take(1 << 20)));
    assert_eq!((count(8), count(0)), ((2, 1, 0), (0, 0, 0)));
    let held = pool.take(5000).unwrap();
    assert_eq!((count(8), count(1)), ((2, 1, 0), (1, 1, 0)));
    drop(held);
    // The first and the last half are in use: there is no third.
    let halves = (pool.take(1 << 20).unwrap(), pool.take(1 << 20).unwrap());
    assert!(pool.take(1 << 20).is_none() && pool.take(4096).is_none());
    assert_eq!((count(8), count(1), count(0)), ((4, 2, 1), (1, 1, 0), (0, 0, 1)));
    drop(halves);
    // A larger allocation stands in for a small one.
    let large = pool.take(1 << 20).unwrap();
    let instead = pool.take(4096).unwrap();
    assert_eq!((count(8), count(0)), ((6, 2, 1), (0, 0, 1)));
    drop((large, instead));
    pool.release_idle(0);
    assert_eq!((count(8), count(1)), ((6, 2, 1), (1, 1, 0)));
}

#[test]
fn data_is_taken_in_several_slices_where_no_buffer_is_as_large() {
    let pool = pool(2);
    let data = pool.take_data(300_000).unwrap();
    assert!(data.single().is_some_and(|buffer| buffer.capacity() == 512 << 10), "one slice if there is one");
    drop(data);
    // Every page is in use, then every page but some: never two that are neighbours, and half a megabyte.
    let mut held: Vec<Buffer> = Vec::new();
    held.extend(std::iter::from_fn(|| pool.take(64 << 10)));
    assert_eq!(held.len(), 2 * CHUNK_BYTES / (64 << 10));
    let failures = |pool: &Pool| pool.counts().iter().map(|counts| counts.failures).sum::<u64>();
    let before = failures(&pool);
    assert!(pool.take_data(1).is_none() && pool.take_data(3 << 20).is_none());
    assert_eq!(failures(&pool), before + 2, "a request that gets nothing counts once");
    for index in (0..16).rev().step_by(2) {
        drop(held.remove(index));
    }
    let data = pool.take_data((256 << 10) + 100).unwrap();
    let lengths: Vec<usize> = data.slices().iter().map(Buffer::len).collect();
    assert_eq!(lengths, [64 << 10, 64 << 10, 64 << 10, 64 << 10, 100]);
    assert_eq!(failures(&pool), before + 2);
    assert!(pool.take_data(256 << 10).is_none(), "three are left, which go back");
    assert_eq!(pool.take_data(192 << 10).unwrap().slices().len(), 3);
    drop((held, data));
    // Longer than any buffer.
    let data = pool.take_data(3 << 20).unwrap();
    assert_eq!((data.len(), data.slices().len()), (3 << 20, 3));
    assert!(pool.take_data(0).is_none());
}

#[test]
fn external_memory_is_released_with_the_last_part_of_it() {
    let pool = pool(1);
    let region = Rc::new(SharedRegion::new(16 << 10).unwrap());
    let memory = pool.attach_external(region.clone());
    let mut part = memory.buffer(4096, 512).unwrap();
    assert!(part.is_external() && part.chunk().is_none());
    part.copy_from(0, &[7; 512]);
    assert_eq!(region.load_u8(4096 + 511), 7);
    for (offset, len) in [(0, 0), (16 << 10, 1), (1, 16 << 10), (u64::MAX, 1)] {
        assert!(memory.buffer(offset, len).is_none(), "{len} bytes at {offset}");
    }
    drop(memory);
    assert_eq!(Rc::strong_count(&region), 2);
    let tail = part.split_off(256);
    drop(part);
    assert_eq!(Rc::strong_count(&region), 2);
    drop(tail);
    assert_eq!(Rc::strong_count(&region), 1);
    let _again = pool.attach_external(region);
    assert_eq!(pool.0.state.borrow().external.len(), 1, "the entry is used again");
}

#[test]
fn sizes_round_up_to_a_class() {
    let pool = pool(CLASSES);
    for len in [1, 4095, 4096, 4097, 65536, 131_072, 131_073, BUFFER_BYTES_MAX] {
        let mut buffer = pool.take(len).unwrap();
        assert_eq!(buffer.len(), len);
        assert_eq!(buffer.as_ptr() as usize % 4096, 0);
        let capacity = buffer.capacity();
        buffer.resize(capacity);
        buffer.clear();
    }
    assert!(pool.take(0).is_none() && pool.take(BUFFER_BYTES_MAX + 1).is_none());
}

#[test]
fn a_pool_may_go_before_its_buffers() {
    let pool = pool(1);
    let mut buffer = pool.take(8192).unwrap();
    drop(pool);
    buffer.as_mut_slice().fill(1);
    assert_eq!(buffer.chunk().unwrap().bytes, CHUNK_BYTES);
}

#[test]
fn an_idle_chunk_serves_another_size() {
    let pool = pool(1);
    let small: Vec<Buffer> = (0..CHUNK_BYTES / 4096).map(|_| pool.take(4096).unwrap()).collect();
    assert!(pool.take(131_072).is_none());
    drop(small);
    let large: Vec<Buffer> = (0..CHUNK_BYTES / 131_072).map(|_| pool.take(131_072).unwrap()).collect();
    assert!(pool.take(4096).is_none());
    drop(large);
    assert!(pool.take(4096).is_some());
}

#[test]
fn a_part_keeps_its_allocation_and_its_chunk() {
    let pool = pool(1);
    let mut buffer = pool.take(8192).unwrap();
    let tail = buffer.split_off(4096);
    drop(buffer);
    assert!(pool.take(1 << 20).is_none(), "the chunk is in use while a part is held");
    drop(tail);
    assert!(pool.take(1 << 20).is_some());
}

#[test]
fn a_larger_buffer_serves_when_nothing_else_is_left() {
    let pool = pool(1);
    let one = pool.take(131_072).unwrap();
    let mut small = pool.take(512).unwrap();
    assert_eq!((small.len(), small.capacity()), (512, 131_072));
    small.as_mut_slice().fill(1);
    drop((one, small));
    assert!(pool.take(131_072).is_some());
}

#[test]
fn every_pool_gets_a_chunk_and_gives_it_back_at_its_end() {
    let arena =
        Arena::new(ArenaConfig { limit_bytes: 2 * CHUNK_BYTES, hugepages: false, ..Default::default() });
    let (greedy, modest) = (Pool::new(&arena), Pool::new(&arena));
    let held: Vec<Buffer> = std::iter::from_fn(|| greedy.take(BUFFER_BYTES_MAX)).collect();
    assert_eq!(held.len(), 2, "one chunk is kept for the other");
    assert!(modest.take(4096).is_some());
    drop(modest);
    assert!(greedy.take(4096).is_some(), "a pool that is gone needs no chunk");
    drop((held, greedy));
    assert_eq!(arena.allocated_bytes(), 0);
    assert!(Pool::new(&arena).take(4096).is_some());
}

#[test]
fn idle_chunks_go_back_to_the_arena() {
    let arena =
        Arena::new(ArenaConfig { limit_bytes: 8 * CHUNK_BYTES, hugepages: false, ..Default::default() });
    let (pool, other) = (Pool::new(&arena), Pool::new(&arena));
    let mut held: Vec<Buffer> = (0..14).map(|_| pool.take(BUFFER_BYTES_MAX).unwrap()).collect();
    held[0].as_mut_slice()[4096] = 7;
    assert_eq!((arena.allocated_bytes(), pool.release_idle(1)), (7 * CHUNK_BYTES, 0));
    // Two buffers in one chunk stay.
    held.truncate(2);
    assert_eq!((pool.release_idle(4), arena.allocated_bytes()), (3, 4 * CHUNK_BYTES));
    assert_eq!((pool.release_idle(0), arena.allocated_bytes()), (3, CHUNK_BYTES));
    assert_eq!(held[0].as_slice()[4096], 7);
    let others: Vec<Buffer> = std::iter::from_fn(|| other.take(BUFFER_BYTES_MAX)).collect();
    assert_eq!(others.len(), 14, "all but the chunk in use");
    drop(held);
    assert!(pool.take(4096).is_some(), "the last chunk is kept");
    assert_eq!(pool.release_idle(0), 0);
}
