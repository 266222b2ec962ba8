use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use super::*;
use crate::{Arena, ArenaConfig, CHUNK_BYTES, SharedRegion};

fn arena() -> Arc<Arena> {
    Arena::new(ArenaConfig { limit_bytes: 4 * CHUNK_BYTES, hugepages: false, ..Default::default() })
}

fn filled(pool: &Pool, value: u8) -> Buffer {
    let mut buffer = pool.take(4096).unwrap();
    buffer.as_mut_slice().fill(value);
    buffer
}

#[test]
fn data_is_used_on_another_core_and_comes_home() {
    let arena = arena();
    let pool = Pool::new(&arena);
    let woken = Arc::new(AtomicUsize::new(0));
    let count = woken.clone();
    pool.on_return(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let one = Data::from(filled(&pool, 1));
    let many = Data::gather(vec![filled(&pool, 2), filled(&pool, 3)]).unwrap();
    let addresses: Vec<usize> = many.slices().iter().map(|slice| slice.as_ptr().addr()).collect();
    let (one, many) = (one.into_parcel(), many.into_parcel());
    let other = arena.clone();
    std::thread::spawn(move || {
        let pool = Pool::new(&other);
        let mut one = pool.adopt(one).unwrap();
        assert!(one.slices()[0].chunk_index().is_some(), "its chunk is known in the same arena");
        one.slices_mut()[0].as_mut_slice()[4095] = 9;
        let tail = one.split_off(100);
        drop(one);
        assert_eq!(tail.slices()[0].as_slice()[3995], 9);
        let many = pool.adopt(many).unwrap();
        let found: Vec<usize> = many.slices().iter().map(|slice| slice.as_ptr().addr()).collect();
        assert_eq!(found, addresses, "nothing was copied");
    })
    .join()
    .unwrap();
    assert_eq!(woken.load(Ordering::Relaxed), 1, "one wake-up until the parcels are collected");
    assert_eq!(pool.collect(), 2);
    assert_eq!(pool.collect(), 0);
    drop(pool);
    assert_eq!(arena.allocated_bytes(), 0);
}

#[test]
fn a_shared_write_reaches_several_cores() {
    let arena = arena();
    let pool = Pool::new(&arena);
    let mut data = Data::from(filled(&pool, 5));
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (parcel, arena) = (data.share().into_parcel(), arena.clone());
            std::thread::spawn(move || {
                let data = Pool::new(&arena).adopt(parcel).unwrap();
                assert!(!data.is_writable());
                assert_eq!(data.slices()[0].as_slice(), [5; 4096]);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(!data.make_writable());
    pool.collect();
    assert!(data.make_writable());
}

#[test]
fn a_parcel_that_never_left_is_the_data_itself() {
    let arena = arena();
    let pool = Pool::new(&arena);
    let parcel = Data::from(filled(&pool, 1)).into_parcel();
    let data = pool.adopt(parcel).unwrap();
    assert!(data.slices()[0].capacity() == 4096 && !data.slices()[0].is_adopted());
    drop(data);
    assert_eq!(pool.collect(), 0);
}

#[test]
fn external_memory_stays_external_on_another_core_and_mapped_until_it_is_home() {
    let arena = arena();
    let pool = Pool::new(&arena);
    let region = Rc::new(SharedRegion::new(8192).unwrap());
    let memory = pool.attach_external(region.clone());
    let parcel = Data::from(memory.buffer(0, 8192).unwrap()).into_parcel();
    drop(memory);
    std::thread::spawn(move || {
        let mut data = Pool::new(&arena).adopt(parcel).unwrap();
        assert!(data.is_external() && data.slices()[0].chunk_index().is_none());
        data.copy_from(8000, &[4; 100]);
    })
    .join()
    .unwrap();
    assert_eq!((Rc::strong_count(&region), region.load_u8(8099)), (2, 4));
    pool.collect();
    assert_eq!(Rc::strong_count(&region), 1);
}

#[test]
fn a_pool_collects_before_it_takes_new_memory() {
    let arena = Arena::new(ArenaConfig { limit_bytes: CHUNK_BYTES, hugepages: false, ..Default::default() });
    let pool = Pool::new(&arena);
    let both = [pool.take(1 << 20).unwrap(), pool.take(1 << 20).unwrap()];
    assert!(pool.take(1 << 20).is_none());
    let (send, receive) = mpsc::channel();
    for buffer in both {
        send.send(Data::from(buffer).into_parcel()).unwrap();
    }
    std::thread::spawn(move || drop(receive.recv().unwrap())).join().unwrap();
    assert!(pool.take(1 << 20).is_some());
}
