use super::*;
use crate::rig;
use blobfs::OpenHow;
use plugin_bdevs::ConfiguredBdevs;

fn ram_disk(mib: u64, test: &str) -> Arc<ConfiguredBdevs> {
    rig::bdevs(test, &[rig::ram_disk(mib, 4096)])
}

fn opened(configured: &Arc<ConfiguredBdevs>) -> Arc<Store> {
    Arc::new(rig::open(configured, "M", "&create=1").unwrap())
}

/// A new file, to be written in order.
fn new_file(store: &Arc<Store>, path: &[u8]) -> Arc<Tail> {
    let request = BlobFsRequest::Open { path: path.to_vec(), how: OpenHow::REPLACE };
    let Ok(BlobFsReply::Opened(open)) = store.request(request) else { panic!("it is not open") };
    Arc::new(Tail::new(store.clone(), open, 0, 0, false))
}

#[test]
fn a_reader_that_comes_after_the_writers_end_finds_all_written() {
    let store = opened(&ram_disk(32, "tail-end"));
    let tail = new_file(&store, b"f");
    tail.append(b"data").unwrap();
    // A reader has seen that there is data, and is late.
    tail.close().unwrap();
    assert_eq!(tail.write_collected(), Ok(()));
    assert_eq!(tail.append(b"more"), Err(BlobFsError::NotOpen));
    store.close();
}

#[test]
fn readers_see_that_data_is_collected_until_its_write_has_begun() {
    let store = opened(&ram_disk(32, "tail-begin"));
    let tail = new_file(&store, b"f");
    tail.append(b"data").unwrap();
    let (seen, found) = std::sync::mpsc::channel();
    let of_hook = Arc::downgrade(&tail);
    store.before_begin(move |request| {
        if let (BlobFsRequest::Write { .. }, Some(tail)) = (request, of_hook.upgrade()) {
            seen.send(tail.collected.load(Ordering::Acquire)).unwrap();
        }
    });
    tail.write_out().unwrap();
    assert_eq!(found.try_recv(), Ok(4), "a reader would have passed the write by");
    assert_eq!(tail.collected.load(Ordering::Acquire), 0);
    tail.close().unwrap();
    store.close();
}

/// A byte of a file of the test, by where it is.
fn pattern(file: usize, offset: u64) -> u8 {
    (offset / 97) as u8 ^ (file as u8 * 101)
}

#[test]
fn what_a_full_store_has_accepted_is_there_when_it_is_opened_again() {
    let configured = ram_disk(24, "tail-full");
    let store = opened(&configured);
    let paths = [&b"a.log"[..], b"b.sst", b"c"];
    let tails: Vec<_> = paths.iter().map(|path| new_file(&store, path)).collect();
    let mut accepted = [0; 3];
    // Of a file that is full, the rest: another may have reserved more than it needs.
    for (length, rounds) in [(100_001, 400), (997, 3000)] {
        for round in 0..rounds {
            let file = round % tails.len();
            let data: Vec<u8> = (0..length).map(|at| pattern(file, accepted[file] + at)).collect();
            match tails[file].append(&data) {
                Ok(()) => accepted[file] += length,
                Err(error) => assert_eq!(error, BlobFsError::NoSpace),
            }
        }
    }
    for tail in &tails {
        assert_eq!(tail.append(&vec![0; 4 << 20]), Err(BlobFsError::NoSpace));
        assert_eq!(tail.close(), Ok(()), "what was accepted has space");
    }
    store.close();
    let store = opened(&configured);
    for (file, path) in paths.iter().enumerate() {
        let request = BlobFsRequest::Open { path: path.to_vec(), how: OpenHow::READ };
        let Ok(BlobFsReply::Opened(open)) = store.request(request) else { panic!("it is not there") };
        let read = BlobFsRequest::Read { open, offset: 0, length: 32 << 20 };
        let Ok(BlobFsReply::Data(data)) = store.request(read) else { panic!("it is not read") };
        assert_eq!(data.len() as u64, accepted[file]);
        let is_right = |(at, byte): (usize, &u8)| *byte == pattern(file, at as u64);
        assert!(data.iter().enumerate().all(is_right), "file {file}");
    }
    assert!(accepted.iter().sum::<u64>() > 18 << 20, "{accepted:?}");
    store.close();
}

#[test]
fn a_truncated_file_reserves_again() {
    let store = opened(&ram_disk(16, "tail-truncated"));
    let (tail, other) = (new_file(&store, b"f"), new_file(&store, b"g"));
    tail.append(&vec![1; 12 << 20]).unwrap();
    tail.truncate(100).unwrap();
    other.append(&vec![2; 12 << 20]).unwrap();
    assert_eq!(tail.append(&vec![3; 12 << 20]), Err(BlobFsError::NoSpace));
    // It is as before, and takes data that has space.
    tail.append(&[4; 100]).unwrap();
    assert_eq!(tail.size(), 200);
    assert_eq!((tail.close(), other.close()), (Ok(()), Ok(())));
    store.close();
}
