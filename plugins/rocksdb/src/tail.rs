//! The end of a file that is written: data in memory of the process, until there is enough for a request.
//!
//! Two requests of a file are in flight while the next is collected: the second begins without its thread
//! when the first has ended. After one that failed the file takes no data any more: what follows would leave
//! a gap.
//!
//! Data is accepted only with clusters reserved for it: a full store is an error of the append, never of what
//! writes it later. As a file grows, more is reserved than it needs, so that few appends wait for that.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use blobfs::{BlobFsError, BlobFsReply, BlobFsRequest, OpenNumber};

use crate::buffers::BUFFER_BYTES;
use crate::call::Call;
use crate::store::Store;

/// Bytes that are collected: a device has several writes of this length in flight.
const TAIL_BYTES_MAX: usize = BUFFER_BYTES;
/// Bytes beyond which a file gets a buffer for all that can be collected, instead of twice as much as before.
const TAIL_BYTES_SMALL: usize = 64 << 10;
/// Requests of a file in flight.
const REQUESTS_MAX: usize = 2;

/// The end of a file.
pub(crate) struct Tail {
    store: Arc<Store>,
    open: OpenNumber,
    /// A log of RocksDB, which skips zeroes at the end of one: a sync needs one flush.
    is_log: bool,
    state: Mutex<TailState>,
    /// Bytes that are collected, for readers that would else take the lock.
    collected: AtomicUsize,
    /// The writer has closed the file.
    is_closed: AtomicBool,
}

struct TailState {
    data: Vec<u8>,
    /// Where it begins in the file.
    offset: u64,
    /// Bytes of the file.
    size: u64,
    /// Bytes of the file that have clusters, at least.
    reserved: u64,
    in_flight: VecDeque<Call<BlobFsReply>>,
    error: Option<BlobFsError>,
    is_closed: bool,
}

impl Tail {
    /// The end of a file of `size` bytes, written from `offset` on.
    pub(crate) fn new(store: Arc<Store>, open: OpenNumber, offset: u64, size: u64, is_log: bool) -> Tail {
        let state = TailState {
            data: Vec::new(),
            offset,
            size,
            reserved: size,
            in_flight: VecDeque::new(),
            error: None,
            is_closed: false,
        };
        Tail {
            store,
            open,
            is_log,
            state: Mutex::new(state),
            collected: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        sync::lock(&self.state).size
    }

    /// Whether the file has no writer any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Adds data: all of it or, if there is no space for it, none.
    pub(crate) fn append(&self, mut data: &[u8]) -> Result<(), BlobFsError> {
        let mut state = self.usable()?;
        self.reserve(&mut state, data.len())?;
        while !data.is_empty() {
            let (part, rest) = data.split_at(data.len().min(TAIL_BYTES_MAX - state.data.len()));
            let bytes = state.data.len() + part.len();
            if bytes > TAIL_BYTES_SMALL && state.data.capacity() < TAIL_BYTES_MAX {
                let mut buffer = self.store.buffers().take();
                buffer.extend_from_slice(&state.data);
                state.data = buffer;
            }
            state.data.extend_from_slice(part);
            state.size = state.size.max(state.offset + state.data.len() as u64);
            self.collected.store(state.data.len(), Ordering::Release);
            data = rest;
            if state.data.len() == TAIL_BYTES_MAX {
                self.send(&mut state)?;
            }
        }
        Ok(())
    }

    /// Has clusters allocated for data that follows what is collected.
    fn reserve(&self, state: &mut TailState, bytes: usize) -> Result<(), BlobFsError> {
        let end = state.offset.saturating_add((state.data.len() + bytes) as u64);
        if end <= state.reserved {
            return Ok(());
        }
        match self.store.request(BlobFsRequest::Reserve { open: self.open, size: end })? {
            BlobFsReply::Reserved(bytes) => state.reserved = bytes,
            _ => return Err(BlobFsError::Broken),
        }
        Ok(())
    }

    fn usable(&self) -> Result<MutexGuard<'_, TailState>, BlobFsError> {
        let state = sync::lock(&self.state);
        match &state.error {
            Some(error) => Err(error.clone()),
            None if state.is_closed => Err(BlobFsError::NotOpen),
            None => Ok(state),
        }
    }

    /// Waits until at most this many requests are in flight.
    fn wait_for(&self, state: &mut TailState, in_flight_max: usize) -> Result<(), BlobFsError> {
        while state.in_flight.len() > in_flight_max
            && let Some(call) = state.in_flight.pop_front()
        {
            if let Err(error) = self.store.wait(call) {
                state.error.get_or_insert(error);
            }
        }
        state.error.clone().map_or(Ok(()), Err)
    }

    /// Begins a request with what is collected.
    fn send(&self, state: &mut TailState) -> Result<(), BlobFsError> {
        self.wait_for(state, REQUESTS_MAX - 1)?;
        if !state.data.is_empty() {
            let data = std::mem::take(&mut state.data);
            let offset = state.offset;
            state.offset += data.len() as u64;
            let request = BlobFsRequest::Write { open: self.open, offset, data };
            state.in_flight.push_back(self.store.begin(request));
            // A reader that sees 0 does not take the lock: its read has to come after the write.
            self.collected.store(0, Ordering::Release);
        }
        Ok(())
    }

    /// Begins to write what is collected. A read that begins afterwards finds it.
    pub(crate) fn write_out(&self) -> Result<(), BlobFsError> {
        if self.collected.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        self.write_collected()
    }

    fn write_collected(&self) -> Result<(), BlobFsError> {
        let mut state = sync::lock(&self.state);
        match &state.error {
            Some(error) => Err(error.clone()),
            // A reader has seen data, and then the writer has closed the file: that has written all.
            None if state.is_closed => Ok(()),
            None => self.send(&mut state),
        }
    }

    /// Makes all durable.
    pub(crate) fn sync(&self) -> Result<(), BlobFsError> {
        let mut state = self.usable()?;
        self.send(&mut state)?;
        let syncing = self.store.begin(match self.is_log {
            true => BlobFsRequest::SyncLog { open: self.open },
            false => BlobFsRequest::Sync { open: self.open },
        });
        // One wait for both: the request that was begun first has ended then.
        let synced = self.store.wait(syncing).map(drop);
        self.wait_for(&mut state, 0)?;
        synced
    }

    /// Sets the size; what follows is written there.
    pub(crate) fn truncate(&self, size: u64) -> Result<(), BlobFsError> {
        let mut state = self.usable()?;
        self.send(&mut state)?;
        self.wait_for(&mut state, 0)?;
        self.store.request(BlobFsRequest::Truncate { open: self.open, size })?;
        (state.offset, state.size, state.reserved) = (size, size, size);
        Ok(())
    }

    /// Writes what is collected and closes the file. Closed again, it does nothing.
    pub(crate) fn close(&self) -> Result<(), BlobFsError> {
        let mut state = sync::lock(&self.state);
        if std::mem::replace(&mut state.is_closed, true) {
            return Ok(());
        }
        let written = match state.error.clone() {
            Some(error) => Err(error),
            None => self.send(&mut state).and_then(|()| self.wait_for(&mut state, 0)),
        };
        let closed = self.store.request(BlobFsRequest::Close { open: self.open }).map(drop);
        self.is_closed.store(true, Ordering::Release);
        written.and(closed)
    }
}

#[cfg(test)]
mod tests;
