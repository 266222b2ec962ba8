//! The exclusive or of blocks, by the acceleration framework.

use accel::{AccelChannel, AccelFailure};
use bdev::stacking::PLACES_MAX;
use dma::Data;

/// Bytes at a time where memory is in several slices, or may be written by others meanwhile.
const CHUNK_BYTES: usize = 16 << 10;

/// A core's side of the operation `xor`, with memory for what cannot be used in place.
pub(super) struct XorEngine {
    accel: AccelChannel,
    /// Chunks of the sources, and of the result.
    scratch: Vec<u8>,
    result: Vec<u8>,
}

impl XorEngine {
    pub(super) fn new(accel: AccelChannel) -> XorEngine {
        XorEngine { accel, scratch: Vec::new(), result: Vec::new() }
    }

    /// Sets `to` to the exclusive or of the sources, all of the same length, of which there are one at least.
    ///
    /// # Errors
    /// The engine failed, with any data in `to`.
    pub(super) fn xor<'a>(
        &mut self,
        to: &mut Data,
        sources: impl Iterator<Item = &'a Data> + Clone,
    ) -> Result<(), AccelFailure> {
        let is_plain = |data: &Data| data.single().is_some_and(|buffer| !buffer.is_external());
        let mut slices = [&[][..]; PLACES_MAX];
        let mut count = 0;
        if is_plain(to) && sources.clone().all(is_plain) {
            for (slice, source) in slices.iter_mut().zip(sources.clone()) {
                *slice = source.single().map_or(&[][..], |buffer| buffer.as_slice());
                count += 1;
            }
            if let Some(buffer) = to.single_mut() {
                return self.accel.xor(buffer.as_mut_slice(), &slices[..count]);
            }
        }
        self.xor_chunks(to, sources)
    }

    #[cold]
    fn xor_chunks<'a>(
        &mut self,
        to: &mut Data,
        sources: impl Iterator<Item = &'a Data> + Clone,
    ) -> Result<(), AccelFailure> {
        let count = sources.clone().count().min(PLACES_MAX);
        self.scratch.resize(count * CHUNK_BYTES, 0);
        self.result.resize(CHUNK_BYTES, 0);
        let length = to.len();
        for offset in (0..length).step_by(CHUNK_BYTES) {
            let bytes = CHUNK_BYTES.min(length - offset);
            for (chunk, source) in self.scratch.chunks_mut(CHUNK_BYTES).zip(sources.clone()) {
                source.copy_to(offset, &mut chunk[..bytes]);
            }
            let mut slices = [&[][..]; PLACES_MAX];
            for (slice, chunk) in slices.iter_mut().zip(self.scratch.chunks(CHUNK_BYTES)) {
                *slice = &chunk[..bytes];
            }
            self.accel.xor(&mut self.result[..bytes], &slices[..count])?;
            to.copy_from(offset, &self.result[..bytes]);
        }
        Ok(())
    }
}
