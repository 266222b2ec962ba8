//! Ranges of files as I/O of the device, and what comes back.

use blobstore::{BlobChange, BlobId, BlobSegment, ChangeOutcome, StoreAction, StoreEvent, StoreIoFailed};

use super::task::{Task, TaskIo};
use super::{BlobFs, PendingChange};
use crate::error::BlobFsError;
use crate::index::FileNumber;
use crate::request::{BlobFsAction, BlobFsIo};

impl BlobFs {
    pub(super) fn push_io(&mut self, owner: TaskIo, action: BlobFsAction) {
        if let Some(epoch) = owner.epoch() {
            *self.epochs.entry(epoch).or_default() += 1;
        }
        self.in_flight.insert(self.next_io, owner);
        self.ready.push_back(BlobFsIo { id: self.next_io, action });
        self.next_io += 1;
    }

    fn epoch(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.epoch())
    }

    /// Where a range of a blob is: clusters of the device, and zeroes.
    fn segments(&self, blob: BlobId, start: u64, bytes: u64) -> Result<Vec<BlobSegment>, BlobFsError> {
        let plan = self.blobs().read(blob, start, bytes).map_err(|_| BlobFsError::Io)?;
        plan.map(|segment| segment.map_err(|_| BlobFsError::Io)).collect()
    }

    fn blob_of(&self, file: FileNumber) -> Result<BlobId, BlobFsError> {
        self.files.get(&file).map(|node| node.blob).ok_or(BlobFsError::NotFound)
    }

    /// Reads blocks of a file to the task's data, which has that size.
    pub(super) fn fetch(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        start: u64,
        bytes: usize,
    ) -> Result<(), BlobFsError> {
        let segments = self.segments(self.blob_of(file)?, start, bytes as u64)?;
        task.data = vec![0; bytes];
        let (mut at, epoch) = (0, self.epoch());
        for segment in segments {
            let bytes = segment.length() as usize;
            match segment {
                BlobSegment::Device { offset, .. } => {
                    self.push_io(TaskIo::Fetch { task: id, epoch, at }, BlobFsAction::Read { offset, bytes });
                    task.pending += 1;
                }
                BlobSegment::Zeroes { .. } => {}
                BlobSegment::External { .. } => return Err(BlobFsError::Io),
            }
            at += bytes;
        }
        Ok(())
    }

    /// Reads a block of a file for the patch.
    pub(super) fn fetch_block(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        start: u64,
        at: usize,
    ) -> Result<(), BlobFsError> {
        let (bytes, epoch) = (self.block, self.epoch());
        for segment in self.segments(self.blob_of(file)?, start, bytes)? {
            let BlobSegment::Device { offset, length } = segment else { return Err(BlobFsError::Io) };
            let action = BlobFsAction::Read { offset, bytes: length as usize };
            self.push_io(TaskIo::Block { task: id, epoch, at }, action);
            task.pending += 1;
        }
        Ok(())
    }

    /// Writes blocks of a file, whose clusters are allocated; past the device's cache if `durable`.
    pub(super) fn write_blocks(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        start: u64,
        data: Vec<u8>,
        durable: bool,
    ) -> Result<(), BlobFsError> {
        let segments = self.segments(self.blob_of(file)?, start, data.len() as u64)?;
        if !segments.iter().all(|segment| matches!(segment, BlobSegment::Device { .. })) {
            return Err(BlobFsError::ReadOnly);
        }
        let epoch = self.epoch();
        let mut rest = data;
        for segment in segments {
            let BlobSegment::Device { offset, length } = segment else { continue };
            let after = rest.split_off(length as usize);
            let data = std::mem::replace(&mut rest, after);
            self.push_io(TaskIo::Task { task: id, epoch }, BlobFsAction::Write { offset, data, durable });
            task.pending += 1;
        }
        Ok(())
    }

    /// Writes zeroes to blocks of a file, whose clusters are allocated.
    pub(super) fn zero_blocks(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        start: u64,
        bytes: u64,
    ) -> Result<(), BlobFsError> {
        let epoch = self.epoch();
        for segment in self.segments(self.blob_of(file)?, start, bytes)? {
            let BlobSegment::Device { offset, length: bytes } = segment else {
                return Err(BlobFsError::ReadOnly);
            };
            self.push_io(TaskIo::Task { task: id, epoch }, BlobFsAction::WriteZeroes { offset, bytes });
            task.pending += 1;
        }
        Ok(())
    }

    /// Begins a change of the store that the task waits for.
    pub(super) fn change(
        &mut self,
        id: u64,
        task: &mut Task,
        change: BlobChange,
        may_fail: bool,
    ) -> Result<(), BlobFsError> {
        let store = self.store.as_mut().ok_or(BlobFsError::ReadOnly)?;
        let change = store.begin(change);
        self.changes.insert(change, PendingChange { task: id, may_fail });
        task.pending += 1;
        Ok(())
    }

    pub(super) fn io_completed(&mut self, owner: TaskIo, result: Result<Vec<u8>, StoreIoFailed>) {
        if let Some(epoch) = owner.epoch()
            && let Some(count) = self.epochs.get_mut(&epoch)
        {
            *count -= 1;
            if *count == 0 {
                self.epochs.remove(&epoch);
            }
        }
        let (id, at) = match owner {
            TaskIo::Store(io) => {
                if let Some(store) = &mut self.store {
                    store.complete(io, result.map(drop));
                }
                return;
            }
            TaskIo::Flush { task } => {
                // What a failed flush has lost is not known.
                self.is_broken |= result.is_err();
                (task, 0)
            }
            TaskIo::Task { task, .. } => (task, 0),
            TaskIo::Fetch { task, at, .. } | TaskIo::Block { task, at, .. } => (task, at),
        };
        let Some(task) = self.tasks.get_mut(&id) else { return };
        task.pending -= 1;
        match (owner, result) {
            (_, Err(StoreIoFailed)) => task.error = Some(BlobFsError::Io),
            (TaskIo::Fetch { .. }, Ok(data)) => match task.data.get_mut(at..at + data.len()) {
                Some(to) => to.copy_from_slice(&data),
                None => task.error = Some(BlobFsError::Io),
            },
            (TaskIo::Block { .. }, Ok(data)) => {
                if let Some(patch) = &mut task.patch {
                    patch.fill(at, &data);
                }
            }
            (_, Ok(_)) => {}
        }
        if task.pending == 0 {
            self.advance(id);
        }
    }

    /// Takes I/O and events of the store. Whether there were events.
    pub(super) fn take_store(&mut self) -> bool {
        let mut has_events = false;
        let oldest_read = self.oldest_read();
        while let Some(store) = &mut self.store {
            let in_use = self.epochs.keys().next().copied().into_iter().chain(oldest_read).min();
            let oldest = in_use.unwrap_or(store.epoch());
            if oldest > self.released {
                self.released = oldest;
                store.release(oldest);
            }
            if let Some(io) = store.next_io() {
                let action = match io.action {
                    StoreAction::Write { offset, data } => {
                        BlobFsAction::Write { offset, data, durable: false }
                    }
                    StoreAction::WriteZeroes { offset, bytes } => BlobFsAction::WriteZeroes { offset, bytes },
                    StoreAction::Deallocate { offset, bytes } => BlobFsAction::Deallocate { offset, bytes },
                    StoreAction::Flush => BlobFsAction::Flush,
                    // Only clones copy, and no file is made one.
                    StoreAction::Copy { .. } => {
                        store.complete(io.id, Err(StoreIoFailed));
                        continue;
                    }
                };
                self.push_io(TaskIo::Store(io.id), action);
                continue;
            }
            match store.next_event() {
                Some(StoreEvent::Done { change, result }) => {
                    let Some(PendingChange { task: id, may_fail }) = self.changes.remove(&change) else {
                        continue;
                    };
                    has_events = true;
                    let Some(task) = self.tasks.get_mut(&id) else { continue };
                    task.pending -= 1;
                    match result {
                        Ok(ChangeOutcome::Blob(blob)) => task.blob = Some(blob),
                        Err(error) if !may_fail => task.error = Some(error.into()),
                        _ => {}
                    }
                    if task.pending == 0 {
                        self.advance(id);
                    }
                }
                Some(StoreEvent::Pause { blob }) => store.paused(blob),
                Some(
                    StoreEvent::Published { .. }
                    | StoreEvent::Resume { .. }
                    | StoreEvent::WriteCluster { .. }
                    | StoreEvent::LowSpace { .. },
                ) => {}
                None => break,
            }
        }
        has_events
    }
}
