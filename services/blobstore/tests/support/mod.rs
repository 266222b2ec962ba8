//! Devices in memory: recorded images, and those that a test makes.
#![allow(dead_code)]

pub(crate) mod made;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;

use blobstore::{BlobSegment, BlobStore, BlobStoreLoader, LoadError, LoadOptions};
use serde_json::Value;

const BLOCK: usize = 4096;

/// A device of which only blocks that are not zero take memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Device {
    pub(crate) bytes: u64,
    blocks: BTreeMap<u64, Box<[u8; BLOCK]>>,
}

impl Device {
    pub(crate) fn new(bytes: u64) -> Device {
        Device { bytes, blocks: BTreeMap::new() }
    }

    /// A recorded image, decompressed.
    pub(crate) fn recorded(name: &str) -> Device {
        let file = std::fs::File::open(path(&format!("{name}.img.zst"))).unwrap();
        let mut image = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
        let mut device = Device::default();
        let mut block = Vec::new();
        loop {
            block.clear();
            image.by_ref().take(BLOCK as u64).read_to_end(&mut block).unwrap();
            if block.is_empty() {
                return device;
            }
            assert_eq!(block.len(), BLOCK, "{name}");
            if block.iter().any(|byte| *byte != 0) {
                device.write(device.bytes, &block);
            }
            device.bytes += BLOCK as u64;
        }
    }

    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) {
        let (mut offset, mut out) = (offset, out);
        while !out.is_empty() {
            let within = offset as usize % BLOCK;
            let (now, rest) = out.split_at_mut((BLOCK - within).min(out.len()));
            match self.blocks.get(&(offset / BLOCK as u64)) {
                Some(block) => now.copy_from_slice(&block[within..within + now.len()]),
                None => now.fill(0),
            }
            offset += now.len() as u64;
            out = rest;
        }
    }

    pub(crate) fn write(&mut self, offset: u64, content: &[u8]) {
        let (mut offset, mut content) = (offset, content);
        while !content.is_empty() {
            let within = offset as usize % BLOCK;
            let (now, rest) = content.split_at((BLOCK - within).min(content.len()));
            let block = self.blocks.entry(offset / BLOCK as u64).or_insert_with(|| Box::new([0; BLOCK]));
            block[within..within + now.len()].copy_from_slice(now);
            offset += now.len() as u64;
            content = rest;
        }
    }

    /// Writes zeroes, which take no memory where nothing was written.
    pub(crate) fn clear(&mut self, offset: u64, zeroes: &[u8]) {
        let blocks = offset / BLOCK as u64..(offset + zeroes.len() as u64).div_ceil(BLOCK as u64);
        if self.blocks.range(blocks).next().is_some() {
            self.write(offset, zeroes);
        }
    }

    /// Loads the store. Reads complete in the order in which a device might: the last one first.
    pub(crate) fn load(&self, scan: bool) -> Result<BlobStore, LoadError> {
        let mut loader = BlobStoreLoader::new(self.bytes, LoadOptions { scan, ..LoadOptions::default() });
        loop {
            let mut reads = Vec::new();
            while let Some(read) = loader.next_read() {
                assert!(read.offset + read.length as u64 <= self.bytes && read.length <= 1 << 20, "{read:?}");
                reads.push(read);
            }
            assert!(reads.len() <= 32);
            if let Some(outcome) = loader.outcome() {
                assert!(reads.is_empty());
                return outcome;
            }
            assert!(!reads.is_empty());
            for read in reads.into_iter().rev() {
                let blocks = read.offset / BLOCK as u64..(read.offset + read.length as u64) / BLOCK as u64;
                // Some devices know their holes.
                if read.id % 2 == 0 && self.blocks.range(blocks).next().is_none() {
                    loader.complete_zeroes(read.id);
                    continue;
                }
                let mut content = vec![0; read.length];
                self.read(read.offset, &mut content);
                loader.complete(read.id, Some(&content));
            }
        }
    }

    /// Passes the data of a piece to `sink`, in pieces of at most 1 MiB; `external` is the external snapshot.
    pub(crate) fn copy(&self, piece: BlobSegment, external: &Device, mut sink: impl FnMut(&[u8])) {
        let mut buffer = vec![0; (piece.length() as usize).min(1 << 20)];
        let mut done = 0;
        while done < piece.length() {
            let length = (piece.length() - done).min(1 << 20) as usize;
            let part = &mut buffer[..length];
            match piece {
                BlobSegment::Device { offset, .. } => self.read(offset + done, part),
                BlobSegment::Zeroes { .. } => part.fill(0),
                // Reads beyond the end of the device are zeroes here too.
                BlobSegment::External { offset, .. } => external.read(offset + done, part),
            }
            sink(part);
            done += length as u64;
        }
    }
}

fn path(name: &str) -> PathBuf {
    // Also for tests of other crates of this folder.
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../blobstore/tests/golden").join(name)
}

/// What SPDK returned about an image.
pub(crate) fn recorded_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(&format!("{name}.json"))).unwrap()).unwrap()
}
