use super::*;
use crate::uri::StoreUri;
use blobfs::OpenHow;
use plugin_bdevs::ConfiguredBdevs;

/// The bdev `M` of a RAM disk.
fn ram_disk(mib: u64, test: &str) -> Arc<ConfiguredBdevs> {
    let path = std::env::temp_dir().join(format!("ringbolt-{test}-{}.json", std::process::id()));
    let params = format!(r#"{{"name":"M","num_blocks":{},"block_size":4096}}"#, mib << 8);
    let malloc = format!(r#"{{"method":"bdev_malloc_create","params":{params}}}"#);
    let config = format!(r#"{{"subsystems":[{{"subsystem":"bdev","config":[{malloc}]}}]}}"#);
    std::fs::write(&path, config).unwrap();
    let configured = Arc::new(ConfiguredBdevs::start(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    configured
}

fn opened(configured: &Arc<ConfiguredBdevs>) -> Arc<Store> {
    let uri = StoreUri::parse("ringbolt://x.json?bdev=M&create=1").unwrap();
    Arc::new(Store::open(configured.clone(), &uri).unwrap())
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
