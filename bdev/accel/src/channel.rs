//! A core's side of the framework.

use std::sync::Arc;

use wire_nvme::protection::{self, MetadataFormat, Tags};

use crate::engine::AccelInner;
use crate::stats::CoreCounts;
use crate::{AccelOp, CryptoKey, Engine, InjectType, software};

const EIO: i32 = 5;

/// Executes operations on one core.
///
/// Each call is inline: it returns when the result is there. On the engine `software` it costs two counts
/// more than the operation. What works on memory that is not a slice, such as that of a peer, asks with
/// [`begin`](Self::begin) and does the work itself.
pub struct AccelChannel {
    inner: Arc<AccelInner>,
    core: usize,
    counts: Arc<CoreCounts>,
}

/// Why an operation was not executed, or what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccelFailure {
    /// It failed with this Linux error number: no data is what it should be.
    #[error("the engine failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Failed {
        /// Positive.
        errno: i32,
    },
    /// Protection information is wrong.
    #[error("protection information: {0}")]
    Protection(block_io::Status),
}

/// What the engine does with the result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing.
    None,
    /// One bit of it is to be changed.
    Corrupt,
}

impl Effect {
    /// Changes a bit of a result in memory.
    #[inline]
    pub fn apply(self, result: &mut [u8]) {
        if let (Effect::Corrupt, Some(byte)) = (self, result.first_mut()) {
            *byte ^= 1;
        }
    }

    /// Changes a bit of a checksum.
    #[inline]
    fn of_checksum(self, checksum: u32) -> u32 {
        checksum ^ u32::from(self == Effect::Corrupt)
    }
}

impl AccelChannel {
    pub(crate) fn new(inner: Arc<AccelInner>, core: usize, counts: Arc<CoreCounts>) -> AccelChannel {
        AccelChannel { inner, core, counts }
    }

    /// Counts an operation on `bytes` bytes that the caller executes now, on the CPU, and says what is to be
    /// done with its result.
    ///
    /// # Errors
    /// The engine has it fail: the caller does not execute it.
    #[inline]
    pub fn begin(&self, op: AccelOp, bytes: u64) -> Result<Effect, AccelFailure> {
        if self.inner.assigned.is(op, Engine::Software) {
            self.counts.executed(op, bytes);
            return Ok(Effect::None);
        }
        self.begin_on_other_engine(op, bytes)
    }

    #[cold]
    fn begin_on_other_engine(&self, op: AccelOp, bytes: u64) -> Result<Effect, AccelFailure> {
        if self.inner.assigned.is(op, Engine::Ioat) {
            // What its device does not reach, or has failed at.
            self.counts.executed(op, bytes);
            return Ok(Effect::None);
        }
        let hit = sync::lock(&self.inner.injections).hit(op, self.core);
        match hit {
            Some(injection) if injection.kind == InjectType::Failure => {
                self.counts.failed(op);
                let errno = if injection.errno == 0 { EIO } else { injection.errno };
                Err(AccelFailure::Failed { errno })
            }
            hit => {
                self.counts.executed(op, bytes);
                Ok(if hit.is_some() { Effect::Corrupt } else { Effect::None })
            }
        }
    }

    /// Counts an operation on `bytes` bytes that a device has executed.
    #[inline]
    pub fn executed(&self, op: AccelOp, bytes: u64) {
        self.counts.executed(op, bytes);
    }

    /// Counts one that failed, and that the CPU does not repeat.
    #[cold]
    pub fn failed(&self, op: AccelOp) {
        self.counts.failed(op);
    }

    /// Copies a slice to another of the same length.
    ///
    /// # Errors
    /// [`AccelFailure::Failed`], as of all that follow.
    ///
    /// # Panics
    /// If the lengths differ, as all that follow.
    pub fn copy(&self, to: &mut [u8], from: &[u8]) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::Copy, from.len() as u64)?;
        to.copy_from_slice(from);
        effect.apply(to);
        Ok(())
    }

    /// Sets all bytes to `value`.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    pub fn fill(&self, to: &mut [u8], value: u8) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::Fill, to.len() as u64)?;
        to.fill(value);
        effect.apply(to);
        Ok(())
    }

    /// Copies a slice to two others.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    pub fn dualcast(&self, one: &mut [u8], other: &mut [u8], from: &[u8]) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::Dualcast, from.len() as u64)?;
        one.copy_from_slice(from);
        other.copy_from_slice(from);
        effect.apply(one);
        Ok(())
    }

    /// Whether two slices are equal.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    pub fn compare(&self, one: &[u8], other: &[u8]) -> Result<bool, AccelFailure> {
        let effect = self.begin(AccelOp::Compare, one.len() as u64)?;
        Ok((one == other) ^ (effect == Effect::Corrupt))
    }

    /// The CRC32C, with the initial value and the final inversion of RFC 3720.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    pub fn crc32c(&self, data: &[u8]) -> Result<u32, AccelFailure> {
        let effect = self.begin(AccelOp::Crc32c, data.len() as u64)?;
        Ok(effect.of_checksum(codec::crc32c(data)))
    }

    /// Copies a slice, and returns its CRC32C.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    pub fn copy_crc32c(&self, to: &mut [u8], from: &[u8]) -> Result<u32, AccelFailure> {
        let effect = self.begin(AccelOp::CopyCrc32c, from.len() as u64)?;
        to.copy_from_slice(from);
        Ok(effect.of_checksum(codec::crc32c(from)))
    }

    /// The exclusive or of all sources.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    ///
    /// # Panics
    /// If there is no source, or one is not as long as `to`.
    pub fn xor(&self, to: &mut [u8], sources: &[&[u8]]) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::Xor, to.len() as u64)?;
        software::xor(to, sources);
        effect.apply(to);
        Ok(())
    }

    /// Encrypts whole blocks of `block_bytes` each in place; the first is block `lba` of its device.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    ///
    /// # Panics
    /// If the data is not whole blocks that the key [takes](CryptoKey::takes_blocks).
    pub fn encrypt(
        &self,
        key: &CryptoKey,
        data: &mut [u8],
        block_bytes: usize,
        lba: u64,
    ) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::Encrypt, data.len() as u64)?;
        key.encrypt(data, block_bytes, lba);
        effect.apply(data);
        Ok(())
    }

    /// As [`encrypt`](Self::encrypt), to decrypt.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    ///
    /// # Panics
    /// As [`encrypt`](Self::encrypt).
    pub fn decrypt(
        &self,
        key: &CryptoKey,
        data: &mut [u8],
        block_bytes: usize,
        lba: u64,
    ) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::Decrypt, data.len() as u64)?;
        key.decrypt(data, block_bytes, lba);
        effect.apply(data);
        Ok(())
    }

    /// Generates the protection information of blocks that have their metadata interleaved. `data_bytes` is
    /// that of a block, without metadata, here and below.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    ///
    /// # Panics
    /// If the format has no protection information, here and below.
    pub fn dif_generate(
        &self,
        format: &MetadataFormat,
        data_bytes: usize,
        blocks: &mut [u8],
        tags: &Tags,
    ) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::DifGenerate, blocks.len() as u64)?;
        protection::generate_extended(format, data_bytes, blocks, tags);
        effect.apply(blocks);
        Ok(())
    }

    /// Verifies it.
    ///
    /// # Errors
    /// [`AccelFailure::Protection`], which is counted as executed, or as [`copy`](Self::copy).
    pub fn dif_verify(
        &self,
        format: &MetadataFormat,
        data_bytes: usize,
        blocks: &[u8],
        tags: &Tags,
    ) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::DifVerify, blocks.len() as u64)?;
        verdict(effect, protection::check_extended(format, data_bytes, blocks, tags))
    }

    /// Copies the data of blocks to `to`, where each is followed by metadata with its protection information.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    ///
    /// # Panics
    /// If the numbers of blocks differ.
    pub fn dif_generate_copy(
        &self,
        format: &MetadataFormat,
        data_bytes: usize,
        to: &mut [u8],
        from: &[u8],
        tags: &Tags,
    ) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::DifGenerateCopy, from.len() as u64)?;
        software::insert_metadata(to, from, data_bytes, usize::from(format.bytes));
        protection::generate_extended(format, data_bytes, to, tags);
        effect.apply(to);
        Ok(())
    }

    /// Verifies blocks, and copies their data without metadata to `to`.
    ///
    /// # Errors
    /// As [`dif_verify`](Self::dif_verify); nothing is copied then.
    ///
    /// # Panics
    /// If the numbers of blocks differ.
    pub fn dif_verify_copy(
        &self,
        format: &MetadataFormat,
        data_bytes: usize,
        to: &mut [u8],
        from: &[u8],
        tags: &Tags,
    ) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::DifVerifyCopy, from.len() as u64)?;
        verdict(Effect::None, protection::check_extended(format, data_bytes, from, tags))?;
        software::strip_metadata(to, from, data_bytes, usize::from(format.bytes));
        effect.apply(to);
        Ok(())
    }

    /// Generates protection information in separate metadata.
    ///
    /// # Errors
    /// See [`copy`](Self::copy).
    ///
    /// # Panics
    /// If the metadata is not that of as many blocks, here and below.
    pub fn dix_generate(
        &self,
        format: &MetadataFormat,
        data_bytes: usize,
        data: &[u8],
        metadata: &mut [u8],
        tags: &Tags,
    ) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::DixGenerate, data.len() as u64)?;
        protection::generate(format, data_bytes, data, metadata, tags);
        effect.apply(metadata);
        Ok(())
    }

    /// Verifies it.
    ///
    /// # Errors
    /// As [`dif_verify`](Self::dif_verify).
    pub fn dix_verify(
        &self,
        format: &MetadataFormat,
        data_bytes: usize,
        data: &[u8],
        metadata: &[u8],
        tags: &Tags,
    ) -> Result<(), AccelFailure> {
        let effect = self.begin(AccelOp::DixVerify, data.len() as u64)?;
        verdict(effect, protection::check(format, data_bytes, data, metadata, tags))
    }
}

fn verdict(effect: Effect, found: Result<(), block_io::Status>) -> Result<(), AccelFailure> {
    match (effect, found) {
        (Effect::None, Ok(())) => Ok(()),
        (Effect::Corrupt, Ok(())) => Err(AccelFailure::Protection(block_io::Status::GUARD_CHECK_ERROR)),
        (_, Err(status)) => Err(AccelFailure::Protection(status)),
    }
}

#[cfg(test)]
mod tests;
