//! Reading and writing what members have beside their data.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use bdev::stacking::BaseBdev;
use bdev::{AsyncChannel, BdevError, BlockDevice, DiskReadError, DiskReader};
use block_io::Status;
use reactor::{Core, ReactorHandle};
use wire_raid::{
    DecodeError, INTENT_OFFSETS, INTENT_PAGE_BYTES, IntentPage, MemberState, RaidSuperblock,
    SUPERBLOCK_BYTES_MAX,
};

use crate::level::is_redundant;
use crate::member_age::MemberOnDisk;
use crate::module::RaidError;

/// How long a method waits for superblocks to be written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Both pages of the bitmap, which follow each other.
const PAGES_BYTES: usize = 2 * INTENT_PAGE_BYTES;

/// Why nothing was found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoSuperblock {
    /// It has none, or a broken one.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] DiskReadError),
}

impl NoSuperblock {
    /// Whether the device says nothing of RAID at all.
    pub(crate) fn is_absent(&self) -> bool {
        match self {
            NoSuperblock::Decode(error) => {
                matches!(error, DecodeError::Value { at: 0, .. } | DecodeError::Length { .. })
            }
            NoSuperblock::Read(_) => false,
        }
    }
}

/// Whether a device can have a superblock: its blocks have no metadata.
pub(crate) fn can_have_superblock(device: &BlockDevice) -> bool {
    let geometry = device.geometry();
    geometry.metadata.bytes == 0 && geometry.blocks > 0
}

/// Whether devices with this block size have a bitmap.
pub(crate) fn has_bitmap(block_bytes: u32) -> bool {
    (INTENT_PAGE_BYTES as u32).is_multiple_of(block_bytes)
}

/// Reads the superblock of a device, and the bitmap of a mirror's, and calls `then` on the core of the
/// reader.
pub(crate) fn read_member(
    reader: &DiskReader,
    device: &Arc<BlockDevice>,
    then: impl FnOnce(Result<MemberOnDisk, NoSuperblock>) + Send + 'static,
) {
    let geometry = device.geometry();
    let block_bytes = geometry.block_size;
    let blocks = (SUPERBLOCK_BYTES_MAX as u32).div_ceil(block_bytes);
    let blocks = u64::from(blocks).min(geometry.blocks) as u32;
    let (next, name) = (reader.clone(), device.name().to_string());
    reader.read(device.name(), 0, blocks, move |read| {
        let superblock = match read.map_err(NoSuperblock::from) {
            Ok(bytes) => RaidSuperblock::decode(&bytes).map_err(NoSuperblock::from),
            Err(error) => Err(error),
        };
        let superblock = match superblock {
            Ok(superblock) => superblock,
            Err(error) => return then(Err(error)),
        };
        if !is_redundant(superblock.level) || !has_bitmap(block_bytes) {
            return then(Ok(MemberOnDisk::without_page(superblock)));
        }
        let (lba, blocks) = (INTENT_OFFSETS[0] / u64::from(block_bytes), PAGES_BYTES as u32 / block_bytes);
        next.read(&name, lba, blocks, move |read| {
            // Without it, all is copied.
            then(Ok(match read {
                Ok(pages) => with_pages(superblock, &pages),
                Err(_) => MemberOnDisk::without_page(superblock),
            }));
        });
    });
}

/// A member with the newest valid page of the two.
fn with_pages(superblock: RaidSuperblock, pages: &[u8]) -> MemberOnDisk {
    let pages = INTENT_OFFSETS.iter().zip(pages.chunks(INTENT_PAGE_BYTES));
    let valid = pages.filter_map(|(offset, page)| IntentPage::decode(page, *offset).ok());
    let mut valid: Vec<IntentPage> = valid.collect();
    valid.sort_by_key(|page| page.generation);
    let page = valid.pop();
    let other = valid.pop().filter(|other| page.as_ref().is_some_and(|page| page.array == other.array));
    let generation_before = other.map(|other| other.generation);
    MemberOnDisk { superblock, page, generation_before, is_page_read: true }
}

/// [`read_member`] for a method, which waits: each read ends in time.
pub(crate) fn read_member_now(
    reader: &DiskReader,
    device: &Arc<BlockDevice>,
) -> Result<MemberOnDisk, NoSuperblock> {
    let (sender, receiver) = mpsc::channel();
    read_member(reader, device, move |result| drop(sender.send(result)));
    reactor::blocking::receive(&receiver).unwrap_or(Err(DiskReadError::Unavailable.into()))
}

/// A write of bytes at a block of a member.
#[derive(Clone)]
pub(crate) struct MetadataWrite {
    pub(crate) lba: u64,
    pub(crate) bytes: Vec<u8>,
}

/// The write of a superblock.
pub(crate) fn superblock_write(superblock: &RaidSuperblock) -> MetadataWrite {
    let mut bytes = superblock.encode();
    bytes.resize(bytes.len().next_multiple_of(superblock.block_bytes as usize), 0);
    MetadataWrite { lba: 0, bytes }
}

/// The write of a page of the bitmap, to the place of its generation.
pub(crate) fn page_write(page: &IntentPage, block_bytes: u32) -> MetadataWrite {
    let offset = INTENT_OFFSETS[(page.generation % 2) as usize];
    MetadataWrite { lba: offset / u64::from(block_bytes), bytes: page.encode(offset) }
}

/// What wipes the superblock and the bitmap of a member, as far as the array has them.
pub(crate) fn wipe_writes(superblock: &RaidSuperblock) -> Vec<MetadataWrite> {
    let zeroes = |write: MetadataWrite| MetadataWrite { bytes: vec![0; write.bytes.len()], ..write };
    let mut writes = vec![zeroes(superblock_write(superblock))];
    let block_bytes = superblock.block_bytes;
    if is_redundant(superblock.level) && has_bitmap(block_bytes) {
        writes.push(wipe_pages(block_bytes));
    }
    writes
}

/// What wipes both pages of the bitmap.
pub(crate) fn wipe_pages(block_bytes: u32) -> MetadataWrite {
    let lba = INTENT_OFFSETS[0] / u64::from(block_bytes);
    MetadataWrite { lba, bytes: vec![0; PAGES_BYTES] }
}

/// Writes in order, each durably.
pub(crate) async fn write_durably(
    core: &Core,
    channel: &AsyncChannel,
    writes: &[MetadataWrite],
) -> Result<(), Status> {
    for write in writes {
        let mut buffer = loop {
            match core.pool().take(write.bytes.len()) {
                Some(buffer) => break buffer,
                // One is free when other I/O has completed; no event says so.
                None => core.sleep_ns(BUFFER_RECHECK_NS).await,
            }
        };
        buffer.as_mut_slice().copy_from_slice(&write.bytes);
        channel.write_durable(write.lba, buffer).await.map_err(|(status, _)| status)?;
    }
    Ok(())
}

/// Interval of the attempts to get a buffer.
pub(crate) const BUFFER_RECHECK_NS: u64 = 20_000;

/// Writes to members from a thread of the control plane, all at the same time, and waits.
///
/// # Errors
/// The first that failed; that they did not end in time.
pub(crate) fn write_members_now(
    handle: &ReactorHandle,
    members: Vec<(Arc<BaseBdev>, Vec<MetadataWrite>)>,
) -> Result<(), RaidError> {
    let (sender, receiver) = mpsc::channel();
    let count = members.len();
    let start = move |core: &Core| {
        for (base, writes) in members {
            let (core_of_task, sender) = (core.clone(), sender.clone());
            core.spawn(async move {
                let result = write_member(&core_of_task, &base, &writes).await;
                // The receiver may have given up.
                _ = sender.send(result);
            });
        }
    };
    handle.post(start).map_err(|_| RaidError::Unavailable)?;
    for _ in 0..count {
        let result = reactor::blocking::receive_timeout(&receiver, WRITE_TIMEOUT);
        result.map_err(|_| RaidError::Unavailable)??;
    }
    Ok(())
}

async fn write_member(core: &Core, base: &BaseBdev, writes: &[MetadataWrite]) -> Result<(), RaidError> {
    let channel = AsyncChannel::new(core, base.channel(core)?);
    write_durably(core, &channel, writes).await.map_err(|status| {
        let bdev = base.device().name().to_string();
        RaidError::Write { bdev, status }
    })
}

/// Whether the superblock of a member excludes every present member of the array: then it was used without
/// them, and has a history of its own.
pub(crate) fn excludes_all(superblock: &RaidSuperblock, present: &[wire_raid::Uuid]) -> bool {
    let mut listed = present.iter().filter_map(|uuid| superblock.member(*uuid)).peekable();
    listed.peek().is_some() && listed.all(|member| member.state != MemberState::Configured)
}

/// The error of a member that a claim prevents, or that is gone.
pub(crate) fn is_unavailable(error: &BdevError) -> bool {
    matches!(error, BdevError::NotFound { .. } | BdevError::Removed { .. })
}
