//! Bytes of the store's device, through the `async` interface of a channel.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use bdev::{AsyncChannel, Descriptor};
use block_io::Op;
use dma::Buffer;
use reactor::Core;
use wire_store::{BLOCK_BYTES, LogSector};

use crate::StoreError;

/// Bytes of one request when much is read or written in order.
pub(crate) const STREAM_BYTES: usize = 128 * BLOCK_BYTES;
/// Bytes of one request to write zeroes.
const ZEROES_BYTES: u64 = 1 << 30;
/// How often, and how long each time, a background operation waits for a buffer.
const BUFFER_TRIES: u32 = 5000;
const BUFFER_WAIT_NS: u64 = 1_000_000;

/// The device as background work uses it: offsets and lengths are in bytes, whole blocks of the device.
#[derive(Clone)]
pub(crate) struct StoreDevice {
    io: AsyncChannel,
    core: Core,
    block_bytes: u64,
    bytes: u64,
    sector: LogSector,
    is_volatile: bool,
}

impl StoreDevice {
    /// Opens a channel on this core.
    pub(crate) fn open(core: &Core, descriptor: &Descriptor) -> Result<StoreDevice, StoreError> {
        let geometry = descriptor.device().geometry();
        let block_bytes = geometry.block_size;
        if ![512, 4096].contains(&block_bytes) || geometry.metadata.bytes > 0 {
            let reason = format!(
                "{} has blocks of {block_bytes} bytes, or metadata: a store needs blocks of 512 or 4096 bytes without",
                descriptor.device().name()
            );
            return Err(StoreError::Geometry(reason));
        }
        let small = block_bytes == 512 && geometry.physical_block_size <= 512;
        Ok(StoreDevice {
            io: AsyncChannel::new(core, descriptor.channel(core)?),
            core: core.clone(),
            block_bytes: block_bytes.into(),
            bytes: geometry.bytes(),
            sector: if small { LogSector::Bytes512 } else { LogSector::Bytes4096 },
            is_volatile: false,
        })
    }

    /// Closes the channel, and returns when that is done: the device may be claimed by others then.
    pub(crate) async fn close(self) {
        let StoreDevice { io, core, .. } = self;
        drop(io);
        // The channel's poller ends in the next turn, and timers of this turn's tasks expire after that.
        core.sleep_ns(BUFFER_WAIT_NS).await;
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the device writes whole or not at all.
    pub(crate) fn sector(&self) -> LogSector {
        self.sector
    }

    /// A buffer; waits for a while if none is free.
    pub(crate) async fn buffer(&self, bytes: usize) -> Result<Buffer, StoreError> {
        for _ in 0..BUFFER_TRIES {
            if let Some(buffer) = self.core.pool().take(bytes) {
                return Ok(buffer);
            }
            self.core.sleep_ns(BUFFER_WAIT_NS).await;
        }
        Err(StoreError::NoBuffers)
    }

    pub(crate) async fn read(&self, offset: u64, bytes: usize) -> Result<Buffer, StoreError> {
        let buffer = self.buffer(bytes).await?;
        let read = self.io.read(offset / self.block_bytes, buffer).await;
        read.map_err(|(status, _)| StoreError::Io { what: "read", offset, status })
    }

    /// Reads one of two places that have the same, or of which the other one will do. What the device cannot
    /// read is logged, and zeroes.
    pub(crate) async fn read_of_two(&self, offset: u64, bytes: usize) -> Result<Buffer, StoreError> {
        match self.read(offset, bytes).await {
            Err(error @ StoreError::Io { .. }) => {
                log::warn!("{error}: the other one of two is used");
                let mut buffer = self.buffer(bytes).await?;
                buffer.clear();
                Ok(buffer)
            }
            read => read,
        }
    }

    /// Reads one block of [`BLOCK_BYTES`].
    pub(crate) async fn read_block(&self, block: u64) -> Result<Box<[u8; BLOCK_BYTES]>, StoreError> {
        let buffer = self.read(block * BLOCK_BYTES as u64, BLOCK_BYTES).await?;
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        bytes.copy_from_slice(buffer.as_slice());
        Ok(bytes)
    }

    pub(crate) async fn write(&self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        let mut buffer = self.buffer(data.len()).await?;
        buffer.as_mut_slice().copy_from_slice(data);
        self.write_buffer(offset, buffer).await
    }

    pub(crate) async fn write_buffer(&self, offset: u64, buffer: Buffer) -> Result<(), StoreError> {
        let written = self.io.write(offset / self.block_bytes, buffer).await;
        written.map(drop).map_err(|(status, _)| StoreError::Io { what: "write", offset, status })
    }

    /// Writes one block of [`BLOCK_BYTES`] that starts with `head`, the rest zero, and is durable on return.
    pub(crate) async fn write_head(&self, block: u64, head: &[u8]) -> Result<(), StoreError> {
        let mut buffer = self.buffer(BLOCK_BYTES).await?;
        let bytes = buffer.as_mut_slice();
        bytes[..head.len()].copy_from_slice(head);
        bytes[head.len()..].fill(0);
        let offset = block * BLOCK_BYTES as u64;
        let written = self.io.write_durable(offset / self.block_bytes, buffer).await;
        written.map(drop).map_err(|(status, _)| StoreError::Io { what: "write", offset, status })
    }

    /// Writes zeroes, as the device does it best.
    pub(crate) async fn write_zeroes(&self, offset: u64, bytes: u64) -> Result<(), StoreError> {
        if !self.io.device().supports(Op::WriteZeroes) {
            return self.write_zero_buffers(offset, bytes).await;
        }
        let (mut lba, mut blocks) = (offset / self.block_bytes, bytes / self.block_bytes);
        while blocks > 0 {
            let count = blocks.min(ZEROES_BYTES / self.block_bytes) as u32;
            let written = self.io.write_zeroes(lba, count).await;
            let offset = lba * self.block_bytes;
            written.map_err(|status| StoreError::Io { what: "write of zeroes", offset, status })?;
            (lba, blocks) = (lba + u64::from(count), blocks - u64::from(count));
        }
        Ok(())
    }

    async fn write_zero_buffers(&self, offset: u64, bytes: u64) -> Result<(), StoreError> {
        let mut at = offset;
        while at < offset + bytes {
            let mut buffer = self.buffer((offset + bytes - at).min(STREAM_BYTES as u64) as usize).await?;
            buffer.clear();
            let length = buffer.len() as u64;
            self.write_buffer(at, buffer).await?;
            at += length;
        }
        Ok(())
    }

    /// What is in the device's cache counts as durable from now on: there is nothing to flush.
    pub(crate) fn set_volatile(&mut self) {
        self.is_volatile = true;
    }

    pub(crate) async fn flush(&self) -> Result<(), StoreError> {
        if self.is_volatile {
            return Ok(());
        }
        let flushed = self.io.flush().await;
        flushed.map_err(|status| StoreError::Io { what: "flush", offset: 0, status })
    }
}

/// Awaits all of these, at most `limit` of them in flight. After an error no further one starts.
pub(crate) async fn join_all<F>(limit: usize, futures: impl IntoIterator<Item = F>) -> Result<(), StoreError>
where
    F: Future<Output = Result<(), StoreError>>,
{
    let mut rest = futures.into_iter();
    let mut running: Vec<Pin<Box<F>>> = Vec::new();
    let mut result = Ok(());
    std::future::poll_fn(move |context| {
        loop {
            while running.len() < limit && result.is_ok() {
                match rest.next() {
                    Some(future) => running.push(Box::pin(future)),
                    None => break,
                }
            }
            let before = running.len();
            running.retain_mut(|future| match future.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(outcome) => {
                    if result.is_ok() {
                        result = outcome;
                    }
                    false
                }
            });
            if running.is_empty() && (before == 0 || result.is_err()) {
                return Poll::Ready(std::mem::replace(&mut result, Ok(())));
            }
            if running.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await
}
