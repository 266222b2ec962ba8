use super::*;
use crate::{Arena, ArenaConfig, CHUNK_BYTES, SharedRegion};

fn pool() -> Pool {
    Pool::new(&Arena::new(ArenaConfig { limit_bytes: CHUNK_BYTES, hugepages: false, ..Default::default() }))
}

/// Whether nothing of the pool's only chunk is in use.
fn is_idle(pool: &Pool) -> bool {
    let both = [pool.take(1 << 20), pool.take(1 << 20)];
    both.iter().all(Option::is_some)
}

#[test]
#[should_panic(expected = "not borrowed")]
fn external_memory_cannot_be_borrowed() {
    let memory = pool().attach_external(Rc::new(SharedRegion::new(4096).unwrap()));
    let _ = memory.buffer(0, 4096).unwrap().as_slice();
}

#[test]
fn a_release_counts_as_a_drop() {
    let pool = pool();
    let memory = pool.attach_external(Rc::new(SharedRegion::new(8192).unwrap()));
    let holders = Rc::strong_count(&pool.0);
    let mut one = memory.buffer(0, 8192).unwrap();
    let other = one.split_off(4096);
    one.release();
    assert_eq!((memory.live_buffers(), Rc::strong_count(&pool.0)), (1, holders + 1));
    let region = Rc::downgrade(memory.region());
    drop(memory);
    assert!(region.upgrade().is_some(), "a buffer of it is held");
    other.release();
    assert!(region.upgrade().is_none(), "unmapped with its last buffer");
}

#[test]
#[should_panic(expected = "goes back to it")]
fn memory_of_the_pool_cannot_be_released() {
    pool().take(4096).unwrap().release();
}

#[test]
fn parts_are_disjoint_and_join_to_the_whole() {
    let pool = pool();
    let mut head = pool.take(8192).unwrap();
    head.as_mut_slice().fill(1);
    let mut tail = head.split_off(5000);
    let mut middle = head.split_off(1000);
    assert_eq!((head.len(), middle.len(), tail.len()), (1000, 4000, 3192));
    middle.as_mut_slice().fill(2);
    tail.as_mut_slice().fill(3);
    assert_eq!((head.as_slice()[999], middle.as_slice()[3999], tail.as_slice()[0]), (1, 2, 3));
    let (head, tail) = head.join(tail).expect_err("the middle lies between them");
    let whole = head.join(middle).unwrap().join(tail).unwrap();
    assert_eq!((whole.len(), whole.capacity()), (8192, 8192));
    assert_eq!((whole.as_slice()[1000], whole.as_slice()[5000]), (2, 3));
    drop(whole);
    assert!(is_idle(&pool));
}

#[test]
fn neighbours_of_two_allocations_do_not_join() {
    let pool = pool();
    let (one, two) = (pool.take(4096).unwrap(), pool.take(4096).unwrap());
    let (mut one, mut two) = if one.as_ptr() < two.as_ptr() { (one, two) } else { (two, one) };
    assert_eq!(one.as_ptr().wrapping_add(4096), two.as_ptr());
    let (before, after) = (one.split_off(1), two.split_off(1));
    let (before, two) = before.join(two).expect_err("each is freed with its own allocation");
    drop((one, before, two, after));
    assert!(is_idle(&pool));
}

#[test]
fn what_is_shared_is_read_only_until_the_others_are_gone() {
    let pool = pool();
    let mut buffer = pool.take(4096).unwrap();
    buffer.as_mut_slice().fill(7);
    let mut other = buffer.share();
    assert!(!buffer.is_writable() && !other.is_writable());
    assert!(!buffer.make_writable());
    assert_eq!(other.as_slice()[4095], 7);
    let tail = other.split_off(4000);
    assert_eq!(tail.as_slice(), [7; 96]);
    drop(buffer);
    assert!(!other.make_writable());
    drop(tail);
    assert!(other.make_writable());
    other.as_mut_slice().fill(8);
    drop(other);
    assert!(is_idle(&pool));
}

#[test]
#[should_panic(expected = "borrowed for writing")]
fn what_is_shared_is_not_borrowed_for_writing() {
    let mut buffer = pool().take(4096).unwrap();
    let _other = buffer.share();
    buffer.as_mut_slice();
}

#[test]
#[should_panic(expected = "read-only memory")]
fn what_is_shared_is_not_copied_to() {
    let mut buffer = pool().take(4096).unwrap();
    let _other = buffer.share();
    buffer.copy_from(0, &[1]);
}

#[test]
#[should_panic(expected = "can't be split")]
fn there_are_no_empty_parts() {
    pool().take(4096).unwrap().split_off(4096);
}
