//! Snapshots of extents, reads ahead and writes past the cache, on a device whose I/O the test completes.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use blobfs::{
    BlobFs, BlobFsAction, BlobFsError, BlobFsIo, BlobFsOptions, BlobFsReply, BlobFsRequest, BlobFsRequestId,
    FileExtents, OpenHow, OpenNumber, format_options,
};
use blobstore::{BlobStoreDevice, BlobStoreFormat, StoreIoFailed};

const CLUSTER_BYTES: usize = 64 << 10;

struct Rig {
    fs: BlobFs,
    disk: Vec<u8>,
    /// Begun and not completed.
    in_flight: VecDeque<BlobFsIo>,
}

type Outcome = Result<BlobFsReply, BlobFsError>;

impl Rig {
    fn new(clusters: usize, options: BlobFsOptions) -> Rig {
        let bytes = clusters * CLUSTER_BYTES;
        let device = BlobStoreDevice {
            bytes: bytes as u64,
            block_bytes: 4096,
            has_volatile_cache: true,
            atomic_write_bytes: 4096,
        };
        let format = BlobStoreFormat {
            cluster_bytes: CLUSTER_BYTES as u32,
            metadata_pages_percent: 100,
            ..format_options()
        };
        let fs = BlobFs::format(&format, device, options).unwrap();
        let mut rig = Rig { fs, disk: vec![0; bytes], in_flight: VecDeque::new() };
        rig.complete_all();
        rig
    }

    fn take_io(&mut self) {
        self.in_flight.extend(std::iter::from_fn(|| self.fs.next_io()));
    }

    fn complete(&mut self, io: BlobFsIo) {
        let at = |offset: u64, bytes: usize| offset as usize..offset as usize + bytes;
        let result = match io.action {
            BlobFsAction::Read { offset, bytes } => self.disk[at(offset, bytes)].to_vec(),
            BlobFsAction::Write { offset, data, .. } => {
                self.disk[at(offset, data.len())].copy_from_slice(&data);
                Vec::new()
            }
            BlobFsAction::WriteZeroes { offset, bytes } => {
                self.disk[at(offset, bytes as usize)].fill(0);
                Vec::new()
            }
            // What is read afterwards is not promised.
            BlobFsAction::Deallocate { offset, bytes } => {
                self.disk[at(offset, bytes as usize)].fill(0xdd);
                Vec::new()
            }
            BlobFsAction::Flush => Vec::new(),
        };
        self.fs.complete(io.id, Ok(result));
    }

    fn complete_all(&mut self) {
        loop {
            self.take_io();
            let Some(io) = self.in_flight.pop_front() else { return };
            self.complete(io);
        }
    }

    fn replies(&mut self) -> Vec<(BlobFsRequestId, Outcome)> {
        std::iter::from_fn(|| self.fs.next_reply()).collect()
    }

    /// Runs a request to its end; `None` if it waits for something else than I/O.
    fn try_request(&mut self, request: BlobFsRequest) -> Option<Outcome> {
        let id = self.fs.begin(request);
        self.complete_all();
        let replies = self.replies();
        replies.into_iter().find(|(ended, _)| *ended == id).map(|(_, outcome)| outcome)
    }

    fn request(&mut self, request: BlobFsRequest) -> Outcome {
        self.try_request(request).expect("a request that waits for I/O only")
    }

    fn open(&mut self, path: &str, how: OpenHow) -> OpenNumber {
        match self.request(BlobFsRequest::Open { path: path.into(), how }) {
            Ok(BlobFsReply::Opened(open)) => open,
            other => panic!("{path}: {other:?}"),
        }
    }

    fn write_file(&mut self, path: &str, data: &[u8]) {
        let open = self.open(path, OpenHow::REPLACE);
        // In pieces, so that files that are written in turn lie between each other.
        for piece in data.chunks(CLUSTER_BYTES) {
            self.request(BlobFsRequest::Append { open, data: piece.to_vec() }).unwrap();
        }
        self.request(BlobFsRequest::Sync { open }).unwrap();
        self.request(BlobFsRequest::Close { open }).unwrap();
    }

    /// What the blocks of a range have on the device.
    fn read_by(&self, extents: &FileExtents, start: u64, bytes: usize) -> Option<Vec<u8>> {
        let read = extents.begin_read()?;
        let parts = read.parts(start, bytes).map(|part| match part.offset {
            Some(offset) => self.disk[offset as usize..][..part.bytes].to_vec(),
            None => vec![0; part.bytes],
        });
        Some(parts.collect::<Vec<_>>().concat())
    }
}

fn content(bytes: usize, salt: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at / 512 + salt * 37) % 251) as u8).collect()
}

#[test]
fn extents_are_where_the_data_of_a_file_is() {
    let mut rig = Rig::new(64, BlobFsOptions { preallocate_bytes: 0, ..BlobFsOptions::default() });
    let data = [content(300_000, 1), content(200_000, 2)];
    // Both grow in turn, so that neither is in one piece.
    let opens = ["a", "b"].map(|path| rig.open(path, OpenHow::CREATE));
    for at in (0..300_000).step_by(60_000) {
        for (open, data) in opens.iter().zip(&data) {
            let piece = data[at.min(data.len())..(at + 60_000).min(data.len())].to_vec();
            rig.request(BlobFsRequest::Append { open: *open, data: piece }).unwrap();
        }
    }
    assert!(rig.fs.extents(opens[0]).is_none(), "it has a writer");
    for open in opens {
        rig.request(BlobFsRequest::Close { open }).unwrap();
    }
    for (path, data) in ["a", "b"].iter().zip(&data) {
        let open = rig.open(path, OpenHow::READ);
        let extents = rig.fs.extents(open).unwrap();
        assert_eq!(extents.size(), data.len() as u64);
        let whole = rig.read_by(&extents, 0, data.len().next_multiple_of(4096)).unwrap();
        assert!(whole[..data.len()] == data[..], "{path}");
        assert!(rig.read_by(&extents, 61_440, 8192).unwrap() == data[61_440..69_632], "{path}");
    }
}

#[test]
fn a_writer_the_last_close_and_the_end_of_the_store_revoke_extents() {
    let mut rig = Rig::new(32, BlobFsOptions::default());
    rig.write_file("a", &content(10_000, 1));
    let reader = rig.open("a", OpenHow::READ);
    let extents = rig.fs.extents(reader).unwrap();
    let writer = rig.open("a", OpenHow::WRITE);
    assert!(extents.begin_read().is_none(), "it has a writer");
    rig.request(BlobFsRequest::Close { open: writer }).unwrap();
    assert!(extents.begin_read().is_none(), "they do not come back");
    let extents = rig.fs.extents(reader).expect("the writer has closed it");
    rig.request(BlobFsRequest::Unlink { path: b"a".to_vec() }).unwrap();
    assert!(extents.begin_read().is_some(), "an open file is there without its name");
    rig.request(BlobFsRequest::Close { open: reader }).unwrap();
    assert!(extents.begin_read().is_none(), "the file is deleted");
    rig.write_file("b", &content(10_000, 2));
    let reader = rig.open("b", OpenHow::READ);
    let extents = rig.fs.extents(reader).unwrap();
    rig.request(BlobFsRequest::Unload).unwrap();
    assert!(extents.begin_read().is_none() && rig.fs.extents(reader).is_none());
}

#[test]
fn a_failed_flush_revokes_all_extents() {
    let mut rig = Rig::new(32, BlobFsOptions::default());
    rig.write_file("a", &content(10_000, 1));
    let reader = rig.open("a", OpenHow::READ);
    let extents = rig.fs.extents(reader).unwrap();
    let writer = rig.open("b", OpenHow::CREATE);
    rig.request(BlobFsRequest::Append { open: writer, data: vec![1; 100] }).unwrap();
    rig.fs.begin(BlobFsRequest::Sync { open: writer });
    loop {
        rig.take_io();
        let io = rig.in_flight.pop_front().expect("a flush");
        if io.action == BlobFsAction::Flush {
            rig.fs.complete(io.id, Err(StoreIoFailed));
            break;
        }
        rig.complete(io);
    }
    assert!(extents.begin_read().is_none() && rig.fs.extents(reader).is_none());
}

#[test]
fn clusters_are_not_allocated_again_while_a_thread_reads_them() {
    let mut rig = Rig::new(32, BlobFsOptions { preallocate_bytes: 0, ..BlobFsOptions::default() });
    let free = rig.fs.free_bytes() as usize;
    let data = content(free / CLUSTER_BYTES * CLUSTER_BYTES, 1);
    rig.write_file("a", &data);
    let reader = rig.open("a", OpenHow::READ);
    let extents = rig.fs.extents(reader).unwrap();
    let reading = extents.begin_read().unwrap();
    let places: Vec<_> = reading.parts(0, data.len()).collect();
    let is_intact = |rig: &Rig| {
        let parts = places.iter().map(|part| &rig.disk[part.offset.unwrap() as usize..][..part.bytes]);
        parts.collect::<Vec<_>>().concat() == data
    };
    // Frees all of it. What needs the space waits for the reader.
    let writer = rig.fs.begin(BlobFsRequest::Open { path: b"a".to_vec(), how: OpenHow::REPLACE });
    rig.complete_all();
    let other = rig.fs.begin(BlobFsRequest::Open { path: b"b".to_vec(), how: OpenHow::CREATE });
    rig.complete_all();
    let mut ended = rig.replies();
    if let Some((_, Ok(BlobFsReply::Opened(open)))) = ended.iter().find(|(id, _)| *id == other) {
        rig.fs.begin(BlobFsRequest::Append { open: *open, data: vec![0xff; data.len() / 2] });
        rig.complete_all();
    }
    assert!(is_intact(&rig), "the clusters were allocated again");
    assert!(extents.is_revoked() && !rig.fs.is_idle(), "something waits for the reader");
    drop(reading);
    rig.fs.reads_ended();
    rig.complete_all();
    assert!(rig.fs.is_idle(), "it goes on");
    ended.extend(rig.replies());
    assert!(ended.iter().any(|(id, outcome)| *id == writer && outcome.is_ok()));
    let open = rig.open("c", OpenHow::CREATE);
    rig.request(BlobFsRequest::Append { open, data: vec![0xff; data.len() / 3] }).unwrap();
    assert!(!is_intact(&rig), "the clusters are free now");
}

#[test]
fn a_sync_of_a_log_is_one_durable_write() {
    let mut rig = Rig::new(64, BlobFsOptions::default());
    let open = rig.open("1.log", OpenHow::CREATE);
    // The first sync writes the length, ahead.
    for _ in 0..2 {
        rig.request(BlobFsRequest::Append { open, data: vec![7; 3000] }).unwrap();
        rig.request(BlobFsRequest::SyncLog { open }).unwrap();
    }
    rig.request(BlobFsRequest::Append { open, data: vec![7; 3000] }).unwrap();
    let id = rig.fs.begin(BlobFsRequest::SyncLog { open });
    rig.take_io();
    let io = rig.in_flight.pop_front().unwrap();
    assert!(rig.in_flight.is_empty());
    assert!(matches!(&io.action, BlobFsAction::Write { durable: true, .. }), "{:?}", io.action);
    rig.complete(io);
    assert_eq!(rig.fs.next_io(), None, "neither a flush nor metadata");
    assert_eq!(rig.replies(), [(id, Ok(BlobFsReply::Done))]);
}

#[test]
fn what_is_read_in_order_is_read_ahead_while_the_reader_goes_on() {
    let options = BlobFsOptions { read_ahead_bytes: 256 << 10, ..BlobFsOptions::default() };
    let mut rig = Rig::new(128, options);
    let data = content(4 << 20, 3);
    rig.write_file("a", &data);
    let open = rig.open("a", OpenHow::READ);
    let length = 16 << 10;
    let (mut ahead, mut fetched) = (0, 0);
    for offset in (0..data.len()).step_by(length) {
        let id = rig.fs.begin(BlobFsRequest::Read { open, offset: offset as u64, length });
        let (mut replies, mut waits) = (rig.replies(), 0);
        rig.take_io();
        ahead += usize::from(!replies.is_empty() && !rig.in_flight.is_empty());
        // The device completes reads ahead as late as it can.
        while replies.is_empty() {
            waits += 1;
            let io = rig.in_flight.pop_front().expect("a read that is waited for");
            let BlobFsAction::Read { bytes, .. } = io.action else { panic!("{:?}", io.action) };
            fetched += bytes;
            rig.complete(io);
            replies = rig.replies();
            rig.take_io();
        }
        assert!(waits <= 8, "{waits}");
        let expected = data[offset..offset + length].to_vec();
        assert_eq!(replies, [(id, Ok(BlobFsReply::Data(expected)))]);
    }
    assert!(ahead >= 8, "{ahead} reads were answered while the next were read");
    rig.complete_all();
    assert!(fetched <= data.len() + (512 << 10), "{fetched} bytes were read of {}", data.len());
}

#[test]
fn a_file_that_was_allocated_grows_without_metadata_and_returns_what_it_does_not_use() {
    let mut rig = Rig::new(128, BlobFsOptions::default());
    let free = rig.fs.free_bytes();
    let open = rig.open("a", OpenHow::CREATE);
    let size = 40 * CLUSTER_BYTES as u64;
    rig.request(BlobFsRequest::Allocate { open, size }).unwrap();
    assert_eq!(rig.fs.free_bytes(), free - size);
    for _ in 0..30 {
        let id = rig.fs.begin(BlobFsRequest::Append { open, data: vec![1; CLUSTER_BYTES] });
        rig.take_io();
        let io = rig.in_flight.pop_front().unwrap();
        assert!(matches!(&io.action, BlobFsAction::Write { data, .. } if data.len() == CLUSTER_BYTES));
        rig.complete(io);
        assert_eq!(rig.fs.next_io(), None, "neither a flush nor metadata");
        assert_eq!(rig.replies(), [(id, Ok(BlobFsReply::Done))]);
    }
    // What would leave no space for others is not allocated, and is no error.
    let before = rig.fs.free_bytes();
    rig.request(BlobFsRequest::Allocate { open, size: size + before }).unwrap();
    assert_eq!(rig.fs.free_bytes(), before);
    rig.request(BlobFsRequest::Close { open }).unwrap();
    assert_eq!(rig.fs.free_bytes(), free - 30 * CLUSTER_BYTES as u64);
}
