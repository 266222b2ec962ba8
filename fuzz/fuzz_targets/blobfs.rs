//! Files on a blobstore whose xattrs are the input's: names, lengths, parents and numbers that need not
//! agree. The store is opened, its files are read, and changed by what is left of the input. What it has when
//! it is closed, it has when it is opened again.
#![no_main]

use blobfs::{BlobFsOptions, BlockingBlobFs, DirectoryItem, MemoryDevice, OpenHow, STORE_TYPE};
use blobstore::LoadOptions;
use libfuzzer_sys::fuzz_target;
use wire_blob::{
    BlobClusterRun, BlobFlags, BlobId, MetadataDescriptor, MetadataPage, PAGE_BYTES, PageRange, SuperBlock, Xattr,
};

const PAGES: u32 = 24;
const CLUSTER_BYTES: u32 = 32 << 10;
const CLUSTERS: u32 = 64;
/// The first cluster of data.
const FIRST_CLUSTER: u32 = 4;
/// Bytes of the input for each blob.
const BLOB_BYTES: usize = 24;
const DEPTH_MAX: usize = 64;

type Files = BlockingBlobFs<MemoryDevice>;

/// The first page of a blob. The first byte says which attributes it has, the second how many clusters.
fn blob(page: u32, input: &[u8], next_cluster: &mut u32) -> Option<MetadataPage> {
    let [has, clusters, parent, directory, sequence, low, high, name @ ..] = input else { return None };
    let bit = |bit: u8| has >> bit & 1 == 1;
    let number = |value: u64| value.to_le_bytes()[..if bit(7) { 7 } else { 8 }].to_vec();
    let mut xattrs = Vec::new();
    let mut add = |is_there: bool, key: &[u8], value: Vec<u8>| {
        if is_there {
            xattrs.push(MetadataDescriptor::Xattr(Xattr { name: key.to_vec(), value }));
        }
    };
    add(!bit(0), b"name", name.to_vec());
    add(!bit(1), b"length", u64::from(u16::from_le_bytes([*low, *high])).to_le_bytes().to_vec());
    add(bit(2), b"parent", number((*parent).into()));
    add(bit(3), b"directory", number((*directory).into()));
    add(bit(4), b"sequence", number((*sequence).into()));
    add(bit(5), b"is_deleted", vec![1]);
    let length = u32::from(*clusters % 4);
    let mut descriptors = vec![MetadataDescriptor::Flags(BlobFlags::default())];
    descriptors.extend(xattrs);
    if length > 0 && *next_cluster + length <= CLUSTERS {
        // The last bit: its clusters are another's too.
        let first = if *clusters >= 128 { FIRST_CLUSTER } else { *next_cluster };
        descriptors.push(MetadataDescriptor::ExtentRuns(vec![BlobClusterRun { cluster: first, length }]));
        *next_cluster += length;
    }
    Some(MetadataPage { id: BlobId::from_page(page), sequence: 0, descriptors, next: None })
}

fn device(store_type: [u8; 16], blobs: &[u8]) -> MemoryDevice {
    let range = |start, pages| PageRange { start, pages };
    let super_block = SuperBlock {
        version: 3,
        clean: false,
        super_blob: None,
        cluster_bytes: CLUSTER_BYTES,
        used_pages: range(1, 1),
        used_clusters: range(2, 1),
        used_blob_ids: Some(range(3, 1)),
        metadata: range(4, PAGES),
        store_type,
        size_bytes: None,
        io_unit_bytes: 512,
        metadata_page_bytes: PAGE_BYTES as u32,
    };
    let mut device = MemoryDevice::new((CLUSTERS * CLUSTER_BYTES) as usize);
    let mut write = |page: u32, content: &[u8]| {
        blobfs::BlockingDevice::write(&mut device, u64::from(page) * PAGE_BYTES as u64, content).unwrap();
    };
    write(0, &super_block.encode());
    let mut cluster = FIRST_CLUSTER;
    for (page, input) in (0..PAGES - 4).zip(blobs.chunks(BLOB_BYTES)) {
        if let Some(encoded) = blob(page, input, &mut cluster).and_then(|page| page.encode()) {
            write(4 + page, &encoded);
        }
    }
    device
}

/// All paths, with what they are; each file is read to its end.
fn walk(files: &Files) -> Vec<(Vec<u8>, DirectoryItem)> {
    let (mut found, mut waiting) = (Vec::new(), vec![(b"/".to_vec(), 0)]);
    while let Some((path, depth)) = waiting.pop() {
        assert!(depth < DEPTH_MAX, "directories that contain themselves");
        for item in files.list(&path).expect("it was listed") {
            let child = [&path[..], if path.ends_with(b"/") { b"" } else { b"/" }, &item.name].concat();
            assert_eq!(files.status(&child).as_ref(), Ok(&item.status));
            if item.status.is_directory {
                waiting.push((child.clone(), depth + 1));
            } else {
                let open = files.open(&child, OpenHow::READ).expect("it was listed");
                let data = files.read(open, 0, item.status.size as usize).expect("memory does not fail");
                assert_eq!(data.len() as u64, item.status.size);
                files.close(open).expect("it is open");
            }
            found.push((child, item));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// Each four bytes of the input are a change. Any of them may fail.
fn change(files: &Files, paths: &[Vec<u8>], input: &[u8]) {
    for step in input.chunks_exact(4) {
        let (Some(path), Some(other)) = (
            paths.get(usize::from(step[1]) % paths.len().max(1)),
            paths.get(usize::from(step[2]) % paths.len().max(1)),
        ) else {
            return;
        };
        let new = [&path[..], &[step[3]]].concat();
        let write = |how: OpenHow, path: &[u8]| {
            let Ok(open) = files.open(path, how) else { return };
            _ = files.append(open, vec![step[3]; usize::from(step[2]) * 37]);
            _ = files.write(open, u64::from(step[1]) * 100, vec![step[2]; 700]);
            if step[3] & 1 == 1 {
                _ = files.sync(open);
            }
            if step[3] & 2 == 2 {
                _ = files.truncate(open, u64::from(step[3]) * 60);
            }
            _ = files.close(open);
        };
        match step[0] % 7 {
            0 => _ = files.rename(path, other),
            1 => _ = files.rename(path, &new),
            2 => _ = files.unlink(path),
            3 => _ = files.make_directory(&new),
            4 => _ = files.remove_directory(path),
            5 => write(OpenHow::WRITE, path),
            _ => write(OpenHow::CREATE, &new),
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some(([kind, count], rest)) = bytes.split_first_chunk::<2>() else { return };
    let store_type = match kind % 8 {
        0 => [0; 16],
        1 => *b"other type\0\0\0\0\0\0",
        _ => STORE_TYPE,
    };
    let (blobs, changes) = rest.split_at((usize::from(*count % 24) * BLOB_BYTES).min(rest.len()));
    let device = device(store_type, blobs);
    let options = BlobFsOptions::default;
    if let Ok(files) = BlockingBlobFs::load_read_only(device.clone(), options(), LoadOptions::default()) {
        walk(&files);
        files.inspect(|fs| fs.findings().iter().for_each(|finding| drop(finding.to_string())));
    }
    let Ok(files) = BlockingBlobFs::load(device, options()) else { return };
    let paths: Vec<Vec<u8>> = walk(&files).into_iter().map(|(path, _)| path).collect();
    change(&files, &paths, changes);
    let at_the_end = walk(&files);
    if files.unload().is_err() {
        return;
    }
    let files = BlockingBlobFs::load(files.into_device(), options()).expect("it was closed");
    let again = walk(&files);
    let named = |found: &[(Vec<u8>, DirectoryItem)]| -> Vec<(Vec<u8>, bool, u64)> {
        found.iter().map(|(path, item)| (path.clone(), item.status.is_directory, item.status.size)).collect()
    };
    assert_eq!(named(&at_the_end), named(&again));
});
