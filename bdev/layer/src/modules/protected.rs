//! Blocks with metadata, for the modules that keep them in memory.
//!
//! Nothing here is on the path of a device without metadata.

use block_io::{Payload, ProtectionFlags, Status};
use dma::Data;
use wire_nvme::protection::{self, GuardFormat, MetadataFormat, Protection, ProtectionType, Tags};

use crate::{BdevError, BdevGeometry, Request};

/// The parameters of SPDK's `bdev_malloc_create` and `bdev_null_create` for metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetadataConfig {
    /// Metadata of a block in bytes: 0, 8, 16, 32, 64 or 128.
    pub md_size: u32,
    /// Metadata follows the data of each block, instead of being transferred separately.
    pub md_interleave: bool,
    /// Type of protection information, 1 to 3; 0 for none.
    pub dif_type: u32,
    /// Protection information is in the first bytes of the metadata, instead of the last.
    pub dif_is_head_of_md: bool,
    /// Guard of the protection information: 0 for 16 bits, 1 for 32 bits, 2 for 64 bits.
    pub dif_pi_format: u32,
}

impl MetadataConfig {
    /// The format.
    ///
    /// # Errors
    /// [`BdevError::Invalid`] with the parameter's name.
    pub(super) fn format(&self) -> Result<MetadataFormat, BdevError> {
        if !matches!(self.md_size, 0 | 8 | 16 | 32 | 64 | 128) {
            let reason = format!("{} is not 0, 8, 16, 32, 64 or 128", self.md_size);
            return Err(BdevError::invalid("md_size", reason));
        }
        let kind = match self.dif_type {
            0 => None,
            1 => Some(ProtectionType::Type1),
            2 => Some(ProtectionType::Type2),
            3 => Some(ProtectionType::Type3),
            other => return Err(BdevError::invalid("dif_type", format!("{other} is not 0 to 3"))),
        };
        let guard = u8::try_from(self.dif_pi_format).ok().and_then(GuardFormat::from_wire);
        let Some(guard) = guard else {
            return Err(BdevError::invalid("dif_pi_format", format!("{} is not 0 to 2", self.dif_pi_format)));
        };
        if kind.is_some() && (self.md_size as usize) < guard.bytes() {
            let reason =
                format!("protection information needs metadata: set md_size to {} at least", guard.bytes());
            return Err(BdevError::invalid("md_size", reason));
        }
        let protection = |kind| Protection::new(kind, self.dif_is_head_of_md).with_guard(guard);
        Ok(MetadataFormat {
            bytes: self.md_size as u16,
            extended: self.md_interleave && self.md_size > 0,
            protection: kind.map(protection),
        })
    }
}

/// Moves the blocks of requests one at a time, with their metadata behind their data.
///
/// Stored protection information is inverted: memory that was never written, or deallocated, is zero and
/// reads as FFh in every byte, which disables checks (NVM 1.0, sections 3.2.3.2.1 and 5.2.1.5).
pub(super) struct ProtectedBlocks {
    format: MetadataFormat,
    data_bytes: usize,
    block: Vec<u8>,
}

impl ProtectedBlocks {
    /// `None` for a device whose blocks need no such treatment: they have no metadata, or interleaved
    /// metadata without protection information.
    pub(super) fn new(geometry: &BdevGeometry) -> Option<ProtectedBlocks> {
        let (format, data_bytes) = (geometry.metadata, geometry.data_block_size() as usize);
        if format.bytes == 0 || (format.extended && format.protection.is_none()) {
            return None;
        }
        Some(ProtectedBlocks { format, data_bytes, block: vec![0; stored_bytes(geometry) as usize] })
    }

    /// Checks and stores the blocks of a write: `store` gets the index and the content of each, once all are
    /// checked.
    pub(super) fn write(&mut self, request: &mut Request, mut store: impl FnMut(u64, &[u8])) -> Status {
        let (flags, tags) = protection_of(request);
        let generates = flags.contains(ProtectionFlags::ACTION);
        if !generates && !flags.is_empty() {
            for index in 0..request.blocks as usize {
                self.gather(&request.payload, index);
                if let Err(status) = self.check(index, &tags, flags) {
                    return status.do_not_retry();
                }
            }
        }
        for index in 0..request.blocks as usize {
            self.gather(&request.payload, index);
            if generates {
                self.generate(index, &tags);
            }
            self.invert();
            store(index as u64, &self.block);
        }
        Status::SUCCESS
    }

    /// Loads and checks the blocks of a read: `load` fills the content of each.
    pub(super) fn read(&mut self, request: &mut Request, mut load: impl FnMut(u64, &mut [u8])) -> Status {
        let (flags, tags) = protection_of(request);
        for index in 0..request.blocks as usize {
            load(index as u64, &mut self.block);
            self.invert();
            if let Err(status) = self.check(index, &tags, flags) {
                return status.do_not_retry();
            }
            self.scatter(&mut request.payload, index);
        }
        Status::SUCCESS
    }

    /// Gives the blocks of a read valid protection information, for a device that stores nothing.
    pub(super) fn generate_read(&mut self, request: &mut Request) {
        let (_, tags) = protection_of(request);
        if self.format.protection.is_none() {
            return;
        }
        for index in 0..request.blocks as usize {
            self.gather(&request.payload, index);
            self.generate(index, &tags);
            self.scatter(&mut request.payload, index);
        }
    }

    fn check(&self, index: usize, tags: &Tags, flags: ProtectionFlags) -> Result<(), Status> {
        if self.format.protection.is_none() || (flags - ProtectionFlags::ACTION).is_empty() {
            return Ok(());
        }
        let (data, metadata) = self.block.split_at(self.data_bytes);
        protection::check_block(&self.format, data, metadata, index, tags, flags)
    }

    fn generate(&mut self, index: usize, tags: &Tags) {
        let (data, metadata) = self.block.split_at_mut(self.data_bytes);
        protection::generate_block(&self.format, data, metadata, index, tags);
    }

    fn invert(&mut self) {
        if let Some(range) = self.format.protection_range() {
            let metadata = &mut self.block[self.data_bytes..];
            metadata[range].iter_mut().for_each(|byte| *byte = !*byte);
        }
    }

    /// Collects a block of a request. Metadata that the request does not have is zero, and disables checks.
    fn gather(&mut self, payload: &Payload<Data>, index: usize) {
        let (data_bytes, metadata_bytes) = (self.data_bytes, usize::from(self.format.bytes));
        let in_data = self.in_data(payload);
        if in_data == data_bytes {
            let metadata = &mut self.block[data_bytes..];
            metadata.fill(0);
            if let Some(range) = self.format.protection_range() {
                metadata[range].fill(0xff);
            }
        }
        match payload {
            Payload::Data(data) => data.copy_to(index * in_data, &mut self.block[..in_data]),
            Payload::Protected(protected) => {
                protected.data.copy_to(index * in_data, &mut self.block[..in_data]);
                if let Some(metadata) = &protected.metadata {
                    metadata.copy_to(index * metadata_bytes, &mut self.block[data_bytes..]);
                }
            }
            _ => unreachable!("a validated read or write has data"),
        }
    }

    fn scatter(&self, payload: &mut Payload<Data>, index: usize) {
        let in_data = self.in_data(payload);
        match payload {
            Payload::Data(data) => data.copy_from(index * in_data, &self.block[..in_data]),
            Payload::Protected(protected) => {
                protected.data.copy_from(index * in_data, &self.block[..in_data]);
                if let Some(metadata) = &mut protected.metadata {
                    metadata
                        .copy_from(index * usize::from(self.format.bytes), &self.block[self.data_bytes..]);
                }
            }
            _ => unreachable!("a validated read or write has data"),
        }
    }

    /// Bytes of a block in the data of a request.
    fn in_data(&self, payload: &Payload<Data>) -> usize {
        let flags = match payload {
            Payload::Protected(protected) => protected.flags,
            _ => ProtectionFlags::empty(),
        };
        self.format.transfer_bytes(self.data_bytes as u32, flags) as usize
    }
}

/// Bytes of a block with all of its metadata.
pub(super) fn stored_bytes(geometry: &BdevGeometry) -> u32 {
    geometry.data_block_size() + u32::from(geometry.metadata.bytes)
}

fn protection_of(request: &Request) -> (ProtectionFlags, Tags) {
    match &request.payload {
        Payload::Protected(protected) => (protected.flags, protected.tags),
        _ => (ProtectionFlags::empty(), Tags { reference: request.lba, ..Tags::default() }),
    }
}
