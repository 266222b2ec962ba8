//! What files do, over a device in memory.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io;

use blobfs::{
    BlobFsError, BlobFsOpenError, BlobFsOptions, BlobFsReply, BlobFsRequest, BlockingBlobFs, BlockingDevice,
    MemoryDevice, NoBlobFs, OpenHow, OpenNumber, STORE_TYPE, format_options,
};
use blobstore::{
    BlobChange, BlobStore, BlobStoreDevice, BlobStoreFormat, ClearMethod, LoadOptions, OpenBlobStore,
    StoreAction, Xattr, load_with,
};
use random::WyRand;

type Files = BlockingBlobFs<MemoryDevice>;

fn format(clusters: usize) -> Files {
    let format = BlobStoreFormat { cluster_bytes: 16 << 10, metadata_pages_percent: 100, ..format_options() };
    BlockingBlobFs::format(&format, MemoryDevice::new(clusters * (16 << 10)), options()).unwrap()
}

fn options() -> BlobFsOptions {
    BlobFsOptions { cache_bytes: 256 << 10, preallocate_bytes: 64 << 10, ..BlobFsOptions::default() }
}

fn reload(files: Files) -> Files {
    BlockingBlobFs::load(files.into_device(), options()).unwrap()
}

fn content(files: &Files, path: &str) -> Vec<u8> {
    let file = files.open(path.as_bytes(), OpenHow::READ).unwrap();
    let content = files.read(file, 0, 1 << 30).unwrap();
    files.close(file).unwrap();
    content
}

fn write(files: &Files, path: &str, data: &[u8]) -> OpenNumber {
    let file = files.open(path.as_bytes(), OpenHow::REPLACE).unwrap();
    files.append(file, data.to_vec()).unwrap();
    file
}

fn names(files: &Files, path: &str) -> Vec<String> {
    let items = files.list(path.as_bytes()).unwrap();
    items.into_iter().map(|item| String::from_utf8(item.name).unwrap()).collect()
}

#[test]
fn a_file_is_there_from_its_first_sync_on() {
    let files = format(64);
    let synced = write(&files, "synced", b"one");
    files.sync(synced).unwrap();
    files.append(synced, b" two".to_vec()).unwrap();
    write(&files, "unsynced", b"three");
    assert_eq!(names(&files, "/"), ["synced", "unsynced"]);
    assert_eq!(content(&files, "synced"), b"one two");
    let files = reload(files);
    assert_eq!(names(&files, "/"), ["synced"]);
    assert_eq!(content(&files, "synced"), b"one");
    let free = files.inspect(|fs| fs.free_bytes());
    files.unlink(b"synced").unwrap();
    assert_eq!(files.inspect(|fs| fs.free_bytes()), free + (16 << 10));
}

#[test]
fn unload_syncs_all_and_a_directory_s_sync_keeps_names() {
    let files = format(64);
    files.make_directory(b"d").unwrap();
    write(&files, "d/empty", b"lost");
    files.request(BlobFsRequest::SyncDirectory { path: b"d".to_vec() }).unwrap();
    let files = reload(files);
    assert_eq!(content(&files, "d/empty"), b"");
    write(&files, "d/late", b"kept");
    files.unload().unwrap();
    assert_eq!(files.status(b"d/late").map(|status| status.size), Ok(4));
    assert_eq!(files.open(b"d/late", OpenHow::WRITE), Err(BlobFsError::Broken));
    let files = reload(files);
    assert_eq!(content(&files, "d/late"), b"kept");
    assert!(files.inspect(|fs| fs.findings().is_empty() && fs.blobs().findings().is_empty()));
}

#[test]
fn a_rename_replaces_and_readers_of_the_replaced_file_keep_it() {
    let files = format(64);
    let old = write(&files, "CURRENT", b"old");
    files.sync(old).unwrap();
    files.close(old).unwrap();
    let reader = files.open(b"CURRENT", OpenHow::READ).unwrap();
    write(&files, "CURRENT.tmp", b"new");
    files.rename(b"CURRENT.tmp", b"CURRENT").unwrap();
    assert_eq!(content(&files, "CURRENT"), b"new");
    assert_eq!(files.read(reader, 0, 10), Ok(b"old".to_vec()));
    assert_eq!(names(&files, ""), ["CURRENT"]);
    let files = reload(files);
    assert_eq!(
        (content(&files, "CURRENT"), names(&files, "")),
        (b"new".to_vec(), vec!["CURRENT".to_string()])
    );
}

#[test]
fn a_directory_is_renamed_with_all_in_it() {
    let files = format(64);
    for directory in ["a", "a/b", "c"] {
        files.make_directory(directory.as_bytes()).unwrap();
    }
    let file = write(&files, "a/b/f", b"x");
    files.sync(file).unwrap();
    assert_eq!(
        files.rename(b"a", b"a/b/a"),
        Err(BlobFsError::Invalid("a directory cannot be moved into itself"))
    );
    assert_eq!(files.rename(b"a", b"c"), Err(BlobFsError::Exists));
    files.rename(b"a", b"c/z").unwrap();
    for files in [files.into_device()].map(|device| BlockingBlobFs::load(device, options()).unwrap()) {
        assert_eq!(content(&files, "c/z/b/f"), b"x");
        assert_eq!(names(&files, ""), ["c"]);
        assert_eq!(files.remove_directory(b"c/z"), Err(BlobFsError::NotEmpty));
        files.unlink(b"c/z/b/f").unwrap();
        files.remove_directory(b"c/z/b").unwrap();
        assert_eq!(files.status(b"c/z/b"), Err(BlobFsError::NotFound));
    }
}

#[test]
fn one_opener_writes_and_a_lock_is_one() {
    let files = format(64);
    let lock = files.lock(b"LOCK").unwrap();
    assert_eq!(files.lock(b"LOCK"), Err(BlobFsError::Locked));
    assert_eq!(files.open(b"LOCK", OpenHow::WRITE), Err(BlobFsError::Locked));
    let reader = files.open(b"LOCK", OpenHow::READ).unwrap();
    assert_eq!(files.append(reader, vec![1]), Err(BlobFsError::ReadOnly));
    files.close(lock).unwrap();
    assert_eq!(files.close(lock), Err(BlobFsError::NotOpen));
    files.lock(b"LOCK").unwrap();
}

#[test]
fn paths_that_do_not_fit_what_is_there_are_errors() {
    let files = format(64);
    write(&files, "f", b"x");
    files.make_directory(b"d").unwrap();
    let open = |path: &[u8], how| files.open(path, how);
    assert_eq!(open(b"none", OpenHow::READ), Err(BlobFsError::NotFound));
    assert_eq!(open(b"none/f", OpenHow::CREATE), Err(BlobFsError::NotFound));
    assert_eq!(open(b"f/g", OpenHow::CREATE), Err(BlobFsError::NotDirectory));
    assert_eq!(open(b"d", OpenHow::READ), Err(BlobFsError::IsDirectory));
    assert_eq!(open(b"f", OpenHow { only_new: true, ..OpenHow::CREATE }), Err(BlobFsError::Exists));
    assert_eq!(files.make_directory(b"d"), Err(BlobFsError::Exists));
    assert_eq!(files.make_directory(b"/"), Err(BlobFsError::Exists));
    assert_eq!(files.rename(b"f", b"d"), Err(BlobFsError::IsDirectory));
    assert_eq!(files.unlink(b"d"), Err(BlobFsError::IsDirectory));
    assert_eq!(files.remove_directory(b"/"), Err(BlobFsError::Invalid("the root stays")));
    assert_eq!(files.open(&[b'x'; 300], OpenHow::CREATE), Err(BlobFsError::NameTooLong));
}

#[test]
fn a_full_store_refuses_writes_and_takes_them_again_after_a_deletion() {
    let files = format(32);
    let file = files.open(b"big", OpenHow::CREATE).unwrap();
    let block = vec![7; 10_000];
    let mut written = 0;
    while files.append(file, block.clone()).is_ok() {
        written += block.len();
    }
    assert_eq!(files.append(file, block.clone()), Err(BlobFsError::NoSpace));
    // All that was accepted has its place.
    files.sync(file).unwrap();
    assert!(files.inspect(|fs| fs.free_bytes()) < 16 << 10);
    let other = files.open(b"small", OpenHow::CREATE).unwrap();
    assert_eq!(files.write(other, 5, vec![1]), Err(BlobFsError::NoSpace));
    assert_eq!(files.status(b"small").unwrap().size, 0);
    files.close(file).unwrap();
    let files = reload(files);
    assert_eq!(content(&files, "big"), vec![7; written]);
    files.unlink(b"big").unwrap();
    let other = files.open(b"small", OpenHow::CREATE).unwrap();
    files.append(other, vec![1; written]).unwrap();
}

#[test]
fn reserved_space_is_there_for_what_is_written_later() {
    let files = format(20);
    let file = files.open(b"f", OpenHow::REPLACE).unwrap();
    let reserve = |open, size| files.request(BlobFsRequest::Reserve { open, size });
    let Ok(BlobFsReply::Reserved(bytes)) = reserve(file, 100_000) else { panic!("there is space") };
    assert!((100_000..150_000).contains(&bytes) && bytes % (16 << 10) == 0, "{bytes}");
    assert_eq!(reserve(file, 5), Ok(BlobFsReply::Reserved(bytes)));
    let other = write(&files, "other", b"");
    while files.append(other, vec![1; 8192]).is_ok() {}
    assert_eq!(files.inspect(|fs| fs.free_bytes()), 0);
    assert_eq!(reserve(file, bytes + 1), Err(BlobFsError::NoSpace));
    assert_eq!(files.status(b"f").map(|status| (status.size, status.allocated_bytes)), Ok((0, bytes)));
    files.append(file, vec![2; bytes as usize]).unwrap();
    assert_eq!(files.append(file, vec![2]), Err(BlobFsError::NoSpace));
    let reader = files.open(b"f", OpenHow::READ).unwrap();
    assert_eq!(reserve(reader, 1), Err(BlobFsError::ReadOnly));
}

#[test]
fn appends_write_metadata_seldom() {
    let files = format(400);
    let file = files.open(b"log", OpenHow::CREATE).unwrap();
    let epoch =
        |files: &Files| files.inspect(|fs| fs.blobs().blobs().values().next().unwrap().clusters().length());
    let mut sizes = Vec::new();
    for _ in 0..200 {
        files.append(file, vec![3; 4000]).unwrap();
        sizes.push(epoch(&files));
    }
    sizes.dedup();
    assert!(sizes.len() < 15, "{sizes:?}");
    files.sync(file).unwrap();
    files.close(file).unwrap();
    assert_eq!(files.status(b"log").unwrap().allocated_bytes, 800_000u64.next_multiple_of(16 << 10));
}

#[test]
fn reads_in_order_are_read_ahead_within_the_limit() {
    let files = format(400);
    let file = files.open(b"f", OpenHow::CREATE).unwrap();
    let data: Vec<u8> = (0..3_000_000u32).map(|at| (at * 7 / 5) as u8).collect();
    files.append(file, data.clone()).unwrap();
    let mut at = 0;
    while at < data.len() {
        let read = files.read(file, at as u64, 10_000).unwrap();
        assert_eq!(read, data[at..(at + 10_000).min(data.len())]);
        at += read.len();
        assert!(files.inspect(|fs| fs.cached_bytes()) <= 256 << 10);
    }
    assert!(files.inspect(|fs| fs.cached_bytes()) > 0);
}

fn apply(store: &mut OpenBlobStore, device: &mut MemoryDevice) {
    while let Some(io) = store.next_io() {
        match io.action {
            StoreAction::Write { offset, data } => device.write(offset, &data).unwrap(),
            StoreAction::WriteZeroes { offset, bytes } => device.write_zeroes(offset, bytes).unwrap(),
            _ => {}
        }
        store.complete(io.id, Ok(()));
    }
    while store.next_event().is_some() {}
}

/// A store as SPDK's: flat names with a byte 0, lengths, and no other xattr of ours.
fn flat_store(store_type: [u8; 16], blobs: &[(&str, u64, bool)]) -> MemoryDevice {
    let (mut store, mut device) = open_flat_store(store_type, blobs);
    store.begin(BlobChange::Unload);
    apply(&mut store, &mut device);
    device
}

/// As [`flat_store`], not yet unloaded.
fn open_flat_store(store_type: [u8; 16], blobs: &[(&str, u64, bool)]) -> (OpenBlobStore, MemoryDevice) {
    let mut device = MemoryDevice::new(2 << 20);
    let format = BlobStoreFormat { cluster_bytes: 16 << 10, store_type, ..format_options() };
    let (mut store, _) = OpenBlobStore::format(&format, device.properties()).unwrap();
    apply(&mut store, &mut device);
    for (name, length, is_deleted) in blobs {
        let xattr = |name: &str, value: &[u8]| Xattr { name: name.into(), value: value.to_vec() };
        let mut xattrs =
            vec![xattr("name", format!("{name}\0").as_bytes()), xattr("length", &length.to_le_bytes())];
        xattrs.extend(is_deleted.then(|| xattr("is_deleted", &[1])));
        let clear = ClearMethod::Default;
        store.begin(BlobChange::Create { thin: false, clusters: 2, clear, xattrs });
        apply(&mut store, &mut device);
    }
    let published = store.published().clone();
    for blob in published.blobs().values() {
        let offset = published.layout().cluster_offset(blob.clusters().get(0).unwrap());
        device.write(offset, &vec![blob.id().0 as u8; 16 << 10]).unwrap();
    }
    (store, device)
}

#[test]
fn flat_stores_of_spdk_open_with_their_directories() {
    let blobs =
        [("/db/000012.sst", 5, false), ("/db/LOG", 20_000, false), ("/gone", 3, true), ("top", 1, false)];
    let files = BlockingBlobFs::load(flat_store(STORE_TYPE, &blobs), options()).unwrap();
    assert_eq!(
        (names(&files, "/"), names(&files, "db")),
        (vec!["db".to_string(), "top".to_string()], vec!["000012.sst".to_string(), "LOG".to_string()])
    );
    assert_eq!(content(&files, "db/000012.sst"), [0; 5]);
    assert_eq!(content(&files, "db/LOG").len(), 20_000);
    let file = files.open(b"db/LOG", OpenHow::WRITE).unwrap();
    files.append(file, b"more".to_vec()).unwrap();
    files.sync(file).unwrap();
    write(&files, "db/new", b"x");
    files.rename(b"db/new", b"db/000012.sst").unwrap();
    let implied = BlobFsError::Invalid("the directory is a part of names: rename its files");
    assert_eq!(files.rename(b"db", b"other"), Err(implied));
    let files = reload(files);
    assert_eq!(content(&files, "db/LOG")[20_000..], *b"more");
    assert_eq!(content(&files, "db/000012.sst"), b"x");
    assert_eq!(names(&files, "db"), ["000012.sst", "LOG"]);
}

#[test]
fn stores_of_others_are_refused_by_name() {
    let refused = |device| BlockingBlobFs::load(device, options()).err().unwrap();
    let error = refused(flat_store(*b"LVOLSTORE\0\0\0\0\0\0\0", &[("a", 1, false)]));
    assert_eq!(error.to_string(), "the store is of type LVOLSTORE, not BLOBFS");
    let error = refused(flat_store([0; 16], &[]));
    assert!(matches!(error, BlobFsOpenError::NoFiles(NoBlobFs::NoFiles { blob: None })), "{error}");
    // SPDK takes a store without a type for one of files.
    let files = BlockingBlobFs::load(flat_store([0; 16], &[("a", 1, false)]), options()).unwrap();
    assert_eq!(names(&files, ""), ["a"]);
    // It has the type with the first change, and stays a store of files without any.
    files.unlink(b"a").unwrap();
    files.unload().unwrap();
    let files = reload(files);
    assert_eq!(names(&files, ""), [""; 0]);
    files.inspect(|fs| assert_eq!(fs.blobs().super_block().store_type, STORE_TYPE));
    // One that was not unloaded has it once it is open.
    let (_, device) = open_flat_store([0; 16], &[("a", 1, false)]);
    let files = BlockingBlobFs::load(device, options()).unwrap();
    let files = reload(files);
    assert_eq!(names(&files, ""), ["a"]);
    files.inspect(|fs| assert_eq!(fs.blobs().super_block().store_type, STORE_TYPE));
    let error = refused(MemoryDevice::new(1 << 20));
    assert!(error.to_string().starts_with("there is no blobstore"), "{error}");
}

#[test]
fn a_read_only_store_is_not_written() {
    let before = flat_store(STORE_TYPE, &[("a", 5, false), ("b", 5, true)]);
    let load = LoadOptions::default();
    let files = BlockingBlobFs::load_read_only(before.clone(), options(), load).unwrap();
    assert_eq!((names(&files, ""), content(&files, "a").len()), (vec!["a".to_string()], 5));
    assert_eq!(files.open(b"a", OpenHow::WRITE), Err(BlobFsError::ReadOnly));
    assert_eq!(files.unlink(b"a"), Err(BlobFsError::ReadOnly));
    assert_eq!(files.make_directory(b"d"), Err(BlobFsError::ReadOnly));
    files.unload().unwrap();
    let load = |mut device: MemoryDevice| -> BlobStore {
        let bytes = device.properties().bytes;
        let read = |offset, out: &mut [u8]| -> Result<(), BlobFsOpenError> {
            device.read(offset, out).unwrap();
            Ok(())
        };
        load_with(bytes, LoadOptions::default(), read).unwrap()
    };
    assert_eq!(load(files.into_device()).blobs().len(), load(before).blobs().len());
}

/// Damaged names: nothing is deleted, everything can be reached.
#[test]
fn files_that_cannot_be_where_their_names_say_are_found() {
    let blobs = [
        ("same", 1, false),
        ("same", 2, false),
        ("same/below", 3, false),
        ("..", 4, false),
        ("l", 1 << 40, false),
    ];
    let files = BlockingBlobFs::load(flat_store(STORE_TYPE, &blobs), options()).unwrap();
    assert_eq!(names(&files, ""), ["l", "lost+found", "same"]);
    let lost = names(&files, "lost+found");
    assert_eq!(lost.len(), 3, "{lost:?}");
    assert_eq!(files.status(b"l").unwrap().size, 32 << 10);
    let damages = files.inspect(|fs| fs.findings().iter().filter(|finding| finding.is_damage()).count());
    assert_eq!(damages, 4);
    files.rename(format!("lost+found/{}", lost[0]).as_bytes(), b"saved").unwrap();
    let files = reload(files);
    assert_eq!(content(&files, "saved").len(), 2);
}

#[test]
fn threads_share_a_store() {
    let files = format(200);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let files = &files;
            scope.spawn(move || {
                let path = format!("f{thread}");
                for _ in 0..20 {
                    let file = write(files, &path, &[thread; 3000]);
                    files.sync(file).unwrap();
                    files.close(file).unwrap();
                    assert_eq!(content(files, &path), [thread; 3000]);
                }
            });
        }
    });
    assert_eq!(names(&files, ""), ["f0", "f1", "f2", "f3"]);
}

/// Random requests do what they do to a map of vectors, also after the store was closed and opened.
#[test]
fn files_do_what_a_map_of_vectors_does() {
    for seed in 0..12 {
        let mut random = WyRand::new(seed);
        let mut files = format(200);
        let mut model: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut open: BTreeMap<String, OpenNumber> = BTreeMap::new();
        for step in 0..400 {
            let name = format!("f{}", random.below(6));
            let context = format!("seed {seed} step {step} {name}");
            let position = |random: &mut WyRand| {
                [0, 1, 511, 512, 4096, 16384, 20_000, 50_000][random.index(8)] + random.below(3)
            };
            match random.below(12) {
                0..3 => {
                    let length = position(&mut random) as usize;
                    let data: Vec<u8> = (0..length).map(|_| random.next_bits() as u8 | 1).collect();
                    let file = *open
                        .entry(name.clone())
                        .or_insert_with(|| files.open(name.as_bytes(), OpenHow::CREATE).unwrap());
                    files.append(file, data.clone()).unwrap_or_else(|error| panic!("{context}: {error}"));
                    model.entry(name).or_default().extend(data);
                }
                3..6 => {
                    let Some((file, content)) = open.get(&name).zip(model.get_mut(&name)) else { continue };
                    let (offset, length) = (position(&mut random) as usize, position(&mut random) as usize);
                    let data: Vec<u8> = (0..length).map(|_| random.next_bits() as u8 | 1).collect();
                    files.write(*file, offset as u64, data.clone()).unwrap();
                    if length > 0 {
                        content.resize(content.len().max(offset + length), 0);
                        content[offset..offset + length].copy_from_slice(&data);
                    }
                }
                6 => {
                    let Some((file, content)) = open.get(&name).zip(model.get_mut(&name)) else { continue };
                    let size = position(&mut random);
                    files.truncate(*file, size).unwrap();
                    content.resize(size as usize, 0);
                }
                7 => {
                    let to = format!("f{}", random.below(6));
                    let result = files.rename(name.as_bytes(), to.as_bytes());
                    assert_eq!(result.is_ok(), model.contains_key(&name), "{context} to {to}: {result:?}");
                    if let Some(content) = model.remove(&name) {
                        model.insert(to.clone(), content);
                        if name != to {
                            let moved = open.remove(&name);
                            let replaced = open.remove(&to);
                            replaced.into_iter().for_each(|file| files.close(file).unwrap());
                            open.extend(moved.map(|file| (to, file)));
                        }
                    }
                }
                8 => {
                    assert_eq!(
                        files.unlink(name.as_bytes()).is_ok(),
                        model.remove(&name).is_some(),
                        "{context}"
                    );
                    open.remove(&name).into_iter().for_each(|file| files.close(file).unwrap());
                }
                9 => {
                    if let Some(file) = open.remove(&name) {
                        files.close(file).unwrap();
                    }
                }
                10 if random.happens(200) => {
                    open.clear();
                    files.unload().unwrap();
                    files = reload(files);
                    assert!(files.inspect(|fs| fs.findings().is_empty()), "{context}");
                }
                _ => {
                    let Some(content) = model.get(&name) else { continue };
                    let file = files.open(name.as_bytes(), OpenHow::READ).unwrap();
                    let mut at = position(&mut random) as usize;
                    for _ in 0..3 {
                        let length = position(&mut random) as usize;
                        let read = files.read(file, at as u64, length).unwrap();
                        let expected = content.get(at..).unwrap_or(&[]);
                        assert!(
                            read == expected[..expected.len().min(length)],
                            "{context}: {length} at {at}"
                        );
                        at += read.len();
                    }
                    files.close(file).unwrap();
                }
            }
        }
        for (name, expected) in &model {
            assert!(content(&files, name) == *expected, "seed {seed}: {name}");
        }
        assert_eq!(names(&files, ""), model.keys().cloned().collect::<Vec<_>>());
    }
}

/// A device whose writes fail from some time on.
struct FailingDevice {
    device: MemoryDevice,
    left: usize,
    /// Those that it has done.
    flushes: usize,
}

impl BlockingDevice for FailingDevice {
    fn properties(&self) -> BlobStoreDevice {
        BlobStoreDevice { has_volatile_cache: true, ..self.device.properties() }
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.device.read(offset, out)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.use_one()?;
        self.device.write(offset, data)
    }

    fn write_zeroes(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.device.write_zeroes(offset, bytes)
    }

    fn deallocate(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushes += 1;
        self.use_one()
    }
}

impl FailingDevice {
    fn use_one(&mut self) -> io::Result<()> {
        self.left = self.left.checked_sub(1).ok_or(io::ErrorKind::Other)?;
        Ok(())
    }
}

#[test]
fn what_is_removed_together_shares_flushes() {
    let format = BlobStoreFormat { cluster_bytes: 16 << 10, metadata_pages_percent: 100, ..format_options() };
    let device = |device| FailingDevice { device, left: usize::MAX, flushes: 0 };
    let files = BlockingBlobFs::format(&format, device(MemoryDevice::new(8 << 20)), options()).unwrap();
    files.make_directory(b"d").unwrap();
    let paths: Vec<Vec<u8>> = (0..200).map(|at| format!("d/{at}").into_bytes()).collect();
    for path in &paths[..190] {
        let file = files.open(path, OpenHow::REPLACE).unwrap();
        files.append(file, vec![1; 100]).unwrap();
        files.close(file).unwrap();
    }
    paths[190..].iter().for_each(|path| files.make_directory(path).unwrap());
    let open = files.open(b"d/7", OpenHow::READ).unwrap();
    // Nothing is removed unless all can be.
    for (other, error) in [("d", BlobFsError::NotEmpty), ("none", BlobFsError::NotFound)] {
        let all = [&paths[..], &[other.as_bytes().to_vec()]].concat();
        assert_eq!(files.remove_all(all), Err(error));
    }
    let twice = BlobFsError::Invalid("a path is given twice");
    assert_eq!(files.remove_all(vec![b"d/1".to_vec(), b"/d/1".to_vec()]), Err(twice));
    assert_eq!(files.list(b"d").map(|items| items.len()), Ok(200));
    files.unload().unwrap();
    let load = |files: BlockingBlobFs<FailingDevice>| {
        BlockingBlobFs::load(device(files.into_device().device), options()).unwrap()
    };
    let files = load(files);
    assert!(files.read(open, 0, 1).is_err());
    let open = files.open(b"d/7", OpenHow::READ).unwrap();
    files.remove_all(paths).unwrap();
    assert_eq!(files.list(b"d").map(|items| items.len()), Ok(0));
    assert_eq!(files.read(open, 0, 200), Ok(vec![1; 100]), "an open file stays until it is closed");
    files.remove_all(vec![b"d".to_vec()]).unwrap();
    let device_of_removed = files.into_device();
    assert!(device_of_removed.flushes < 60, "{} flushes for 200 names", device_of_removed.flushes);
    let files = BlockingBlobFs::load(device(device_of_removed.device), options()).unwrap();
    assert_eq!(files.list(b"/").map(|items| items.len()), Ok(0));
    files.unload().unwrap();
}

#[test]
fn a_device_that_fails_ends_every_request_with_an_error() {
    for left in 0..60 {
        let device = FailingDevice { device: MemoryDevice::new(2 << 20), left, flushes: 0 };
        let format =
            BlobStoreFormat { cluster_bytes: 16 << 10, metadata_pages_percent: 100, ..format_options() };
        let Ok(files) = BlockingBlobFs::format(&format, device, options()) else { continue };
        let run = || -> Result<(), BlobFsError> {
            let file = files.open(b"a", OpenHow::CREATE)?;
            files.append(file, vec![1; 30_000])?;
            files.sync(file)?;
            files.rename(b"a", b"b")?;
            files.truncate(file, 100)?;
            files.close(file)?;
            files.unlink(b"b")
        };
        match run() {
            Ok(()) => assert!(left > 20, "{left}"),
            Err(error) => assert!(matches!(error, BlobFsError::Io | BlobFsError::Broken), "{error}"),
        }
        assert!(files.inspect(|fs| fs.is_idle()), "{left}");
    }
}
