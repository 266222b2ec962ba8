use proptest::prelude::*;

use super::*;
use crate::{Arena, ArenaConfig, CHUNK_BYTES, Pool};

fn pool() -> Pool {
    Pool::new(&Arena::new(ArenaConfig {
        limit_bytes: 2 * CHUNK_BYTES,
        hugepages: false,
        ..Default::default()
    }))
}

fn bytes(data: &Data) -> Vec<u8> {
    let mut out = vec![0; data.len()];
    data.copy_to(0, &mut out);
    out
}

fn numbered(pool: &Pool, lengths: &[usize]) -> Data {
    let buffers = lengths.iter().map(|len| pool.take(*len).unwrap()).collect();
    let mut data = Data::gather(buffers).unwrap();
    let content: Vec<u8> = (0..data.len()).map(|at| (at % 251) as u8).collect();
    data.copy_from(0, &content);
    data
}

#[test]
fn no_buffers_are_no_data_and_one_is_stored_in_place() {
    let pool = pool();
    assert!(Data::gather(Vec::new()).is_none());
    let data = numbered(&pool, &[4096]);
    assert_eq!(data.single().map(Buffer::len), Some(4096));
    assert_eq!(data.slices().len(), 1);
}

#[test]
fn what_was_split_joins_to_one_slice() {
    let pool = pool();
    let mut data = numbered(&pool, &[8192]);
    let before = bytes(&data);
    let tail = data.split_off(100);
    let data = data.join(tail);
    assert!(data.single().is_some_and(|buffer| buffer.capacity() == 8192));
    assert_eq!(bytes(&data), before);
}

#[test]
fn parts_are_the_bytes_of_a_range_slice_by_slice() {
    let mut data = numbered(&pool(), &[4096, 100, 4096]);
    let all = bytes(&data);
    for (offset, length, expected) in [
        (0, 8292, &[4096, 100, 4096][..]),
        (4000, 150, &[96, 54]),
        (4096, 100, &[100]),
        (4150, 1000, &[46, 954]),
        (8000, 9999, &[292]),
        (8292, 1, &[]),
        (5, 0, &[]),
    ] {
        let lengths: Vec<usize> = data.parts(offset, length).map(<[u8]>::len).collect();
        assert_eq!(lengths, expected, "{length} bytes at {offset}");
        assert!(data.parts(offset, length).flatten().eq(all[offset..].iter().take(length)));
        let written: usize = data.parts_mut(offset, length).map(|part| part.len()).sum();
        assert_eq!(written, lengths.iter().sum());
    }
}

#[test]
fn a_byte_is_in_one_slice() {
    let mut data = numbered(&pool(), &[4096, 100, 4096]);
    for (offset, expected) in [
        (0, Some((4096, 0))),
        (4095, Some((4096, 4095))),
        (4096, Some((100, 0))),
        (4195, Some((100, 99))),
        (8291, Some((4096, 4095))),
        (8292, None),
    ] {
        let found = data.slice_at_mut(offset).map(|(slice, at)| (slice.len(), at));
        assert_eq!(found, expected, "byte {offset}");
    }
}

#[test]
fn alignment_is_that_of_every_slice_but_the_end() {
    let pool = pool();
    let mut data = numbered(&pool, &[4096, 4096]);
    assert!(data.is_aligned(4096));
    let tail = data.split_off(5000);
    assert!(data.is_aligned(4096), "the last slice may end anywhere");
    assert!(!tail.is_aligned(512));
    assert!(!data.join(numbered(&pool, &[4096])).is_aligned(512));
}

#[test]
#[should_panic(expected = "not inside")]
fn a_copy_beyond_the_end_is_refused() {
    numbered(&pool(), &[512, 512]).copy_to(1000, &mut [0; 25]);
}

#[test]
fn shared_data_is_writable_again_once_alone() {
    let pool = pool();
    let mut data = numbered(&pool, &[4096, 512]);
    let before = bytes(&data);
    let other = data.share();
    assert!(!data.is_writable() && !data.make_writable());
    assert_eq!(bytes(&other), before);
    drop(other);
    assert!(data.make_writable());
    data.clear();
    assert_eq!(bytes(&data), vec![0; 4608]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 256 }))]
    #[test]
    fn splits_and_joins_keep_the_bytes(
        lengths in prop::collection::vec(1usize..6000, 1..5),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        window in any::<(prop::sample::Index, prop::sample::Index)>(),
    ) {
        let pool = pool();
        let data = numbered(&pool, &lengths);
        let expected = bytes(&data);
        let mut parts = vec![data];
        for cut in cuts {
            let at = parts.iter().position(|part| part.len() > 1);
            let Some(at) = at else { break };
            let middle = 1 + cut.index(parts[at].len() - 1);
            let tail = parts[at].split_off(middle);
            prop_assert_eq!(parts[at].len(), middle);
            parts.insert(at + 1, tail);
        }
        let found: Vec<u8> = parts.iter().flat_map(bytes).collect();
        prop_assert_eq!(&found, &expected);
        let mut parts = parts.into_iter();
        let first = parts.next().unwrap();
        let mut whole = parts.fold(first, Data::join);
        prop_assert_eq!(whole.slices().len(), lengths.len(), "slices that were one are one again");
        prop_assert_eq!(bytes(&whole), expected.clone());
        let (from, length) = (window.0.index(expected.len()), window.1.index(expected.len()));
        let length = length.min(expected.len() - from);
        let mut out = vec![0; length];
        whole.copy_to(from, &mut out);
        prop_assert_eq!(&out[..], &expected[from..from + length]);
        whole.copy_from(from, &vec![0xee; length]);
        let mut expected = expected;
        expected[from..from + length].fill(0xee);
        prop_assert_eq!(bytes(&whole), expected);
        drop(whole);
        let all: Vec<_> = std::iter::from_fn(|| pool.take(1 << 20)).collect();
        prop_assert_eq!(all.len(), 4, "everything came back");
    }
}
