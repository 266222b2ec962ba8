//! What a request has for itself, and its steps.

use super::fault::FileFault;
use super::task::{Step, Task, TaskLocks};
use super::{
    BUFFER_BYTES_MAX, BlobFs, FileOpener, FileRange, LARGE_APPEND_BYTES, LOG_AHEAD_BYTES, LOG_BLOCK_BYTES,
    REQUEST_BYTES_MAX,
};
use crate::cache::CHUNK_BYTES;
use crate::error::BlobFsError;
use crate::file::FileNode;
use crate::index::{DirectoryNumber, FileNumber, IndexEntry, ROOT, is_implied};
use crate::request::{BlobFsReply, BlobFsRequest, OpenHow, OpenNumber};

impl BlobFs {
    fn opener(&self, open: OpenNumber) -> Result<FileOpener, BlobFsError> {
        self.openers.get(&open).copied().ok_or(BlobFsError::NotOpen)
    }

    fn writer(&self, open: OpenNumber) -> Result<FileOpener, BlobFsError> {
        self.opener(open).and_then(|opener| match opener.can_write && self.store.is_some() {
            true => Ok(opener),
            false => Err(BlobFsError::ReadOnly),
        })
    }

    pub(super) fn node(&self, file: FileNumber) -> Result<&FileNode, BlobFsError> {
        self.files.get(&file).ok_or(BlobFsError::NotFound)
    }

    fn file_at(&self, path: &[u8]) -> Result<FileNumber, BlobFsError> {
        match self.index.find(path)? {
            IndexEntry::File(file) => Ok(file),
            IndexEntry::Directory(_) => Err(BlobFsError::IsDirectory),
        }
    }

    fn directory_at(&self, path: &[u8]) -> Result<DirectoryNumber, BlobFsError> {
        match self.index.find(path)? {
            IndexEntry::Directory(directory) => Ok(directory),
            IndexEntry::File(_) => Err(BlobFsError::NotDirectory),
        }
    }

    /// What a request has for itself. Names are as it finds them.
    pub(super) fn locks(&self, request: &BlobFsRequest) -> Result<TaskLocks, BlobFsError> {
        use BlobFsRequest::*;
        Ok(match request {
            Open { path, how } if how.truncate => TaskLocks::names(self.file_at(path).ok()),
            Open { .. } | Lock { .. } | MakeDirectory { .. } | RemoveDirectory { .. } => {
                TaskLocks::names(None)
            }
            Close { open } => TaskLocks::names([self.opener(*open)?.file]),
            Read { open, .. } => TaskLocks::file(self.opener(*open)?.file, false),
            Write { open, .. } | Append { open, .. } | Truncate { open, .. } => {
                TaskLocks::file(self.writer(*open)?.file, true)
            }
            Allocate { open, .. } | Reserve { open, .. } => TaskLocks::file(self.writer(*open)?.file, true),
            Sync { open } | SyncLog { open } => TaskLocks::file(self.opener(*open)?.file, true),
            Rename { from, to } => {
                let files = [from, to].map(|path| self.file_at(path).ok());
                TaskLocks::names(files.into_iter().flatten())
            }
            Unlink { path } => TaskLocks::names([self.file_at(path)?]),
            RemoveAll { paths } => TaskLocks::names(paths.iter().filter_map(|path| self.file_at(path).ok())),
            SyncDirectory { path } => TaskLocks::names(self.unpublished(self.directory_at(path)?)),
            SyncAll | Unload => TaskLocks::all(),
        })
    }

    /// The files of a directory that would not survive a power failure.
    fn unpublished(&self, directory: DirectoryNumber) -> Vec<FileNumber> {
        let files = self.index.list(directory).filter_map(|(_, entry)| match entry {
            IndexEntry::File(file) => Some(file),
            IndexEntry::Directory(_) => None,
        });
        files.filter(|file| self.files.get(file).is_some_and(|node| !node.is_published)).collect()
    }

    /// The steps of a request that has its locks.
    pub(super) fn steps(&mut self, request: BlobFsRequest) -> Result<Vec<Step>, BlobFsError> {
        use BlobFsRequest::*;
        let is_read = match &request {
            Open { how, .. } => *how == OpenHow::READ,
            Read { .. } | Close { .. } => true,
            // There is nothing to sync.
            Sync { .. } | SyncLog { .. } | SyncAll | SyncDirectory { .. } | Unload
                if self.store.is_none() =>
            {
                return Ok(Vec::new());
            }
            _ => false,
        };
        if !is_read && self.store.is_none() {
            return Err(BlobFsError::ReadOnly);
        }
        match request {
            Open { path, how } => self.plan_open(&path, how),
            Lock { path } => self.plan_open(&path, OpenHow::CREATE),
            Close { open } => self.plan_close(open),
            Read { open, offset, length } => self.plan_read(open, offset, length),
            Write { open, offset, data } => self.plan_write(open, offset, data),
            Append { open, data } => {
                let file = self.writer(open)?.file;
                self.plan_append(file, data)
            }
            Truncate { open, size } => {
                let file = self.writer(open)?.file;
                self.plan_truncate(file, size)
            }
            Allocate { open, size } => {
                let file = self.writer(open)?.file;
                self.plan_allocate(file, size)
            }
            Reserve { open, size } => {
                let file = self.writer(open)?.file;
                Self::check_length(size, 0)?;
                Ok(vec![Step::Grow { file, end: size, exact: false }, Step::ReplyReserved { file }])
            }
            Sync { open } => {
                let file = self.opener(open)?.file;
                Ok(self.sync_steps(vec![file]))
            }
            SyncLog { open } => {
                let file = self.writer(open)?.file;
                self.plan_sync_log(file)
            }
            Rename { from, to } => self.plan_rename(&from, &to),
            Unlink { path } => {
                let file = self.file_at(&path)?;
                self.plan_unlink(file)
            }
            RemoveAll { paths } => self.plan_remove_all(&paths),
            MakeDirectory { path } => {
                let place = self.index.place(&path).map_err(|error| match error {
                    BlobFsError::IsDirectory => BlobFsError::Exists,
                    error => error,
                })?;
                match self.index.get(&place) {
                    Some(_) => Err(BlobFsError::Exists),
                    None => Ok(vec![Step::CreateDirectory { place }]),
                }
            }
            RemoveDirectory { path } => {
                let number = self.directory_at(&path)?;
                match self.index.is_empty(number) {
                    _ if number == ROOT => Err(BlobFsError::Invalid("the root stays")),
                    false => Err(BlobFsError::NotEmpty),
                    true => Ok(vec![Step::DeleteDirectory { number }]),
                }
            }
            SyncDirectory { path } => {
                let files = self.unpublished(self.directory_at(&path)?);
                Ok(files.into_iter().map(|file| Step::Publish { file }).collect())
            }
            SyncAll => Ok(self.sync_steps(self.unsynced())),
            Unload => Ok(self.plan_unload()),
        }
    }

    fn plan_open(&mut self, path: &[u8], how: OpenHow) -> Result<Vec<Step>, BlobFsError> {
        if !how.write && (how.create || how.truncate || how.only_new) {
            return Err(BlobFsError::Invalid("a file is only created or truncated by a writer"));
        }
        let place = match self.index.find(path) {
            Err(BlobFsError::NotFound) if how.create => self.index.place(path)?,
            Err(error) => return Err(error),
            Ok(IndexEntry::Directory(_)) => return Err(BlobFsError::IsDirectory),
            Ok(IndexEntry::File(_)) if how.only_new => return Err(BlobFsError::Exists),
            Ok(IndexEntry::File(file)) => {
                let node = self.node(file)?;
                if how.write && node.is_read_only {
                    return Err(BlobFsError::ReadOnly);
                }
                if how.write && node.writer.is_some() {
                    return Err(BlobFsError::Locked);
                }
                let is_empty = node.size == 0 && node.durable == 0;
                if how.write {
                    self.revoke_extents(file);
                }
                let mut steps = match how.truncate && !is_empty {
                    true => self.plan_truncate(file, 0)?,
                    false => Vec::new(),
                };
                let open = self.next_open();
                steps.push(Step::AddOpener { file, how, open });
                return Ok(steps);
            }
        };
        let open = self.next_open();
        Ok(vec![Step::CreateFile { place: place.clone() }, Step::FileCreated { place, how, open }])
    }

    fn next_open(&mut self) -> OpenNumber {
        self.next_open += 1;
        OpenNumber(self.next_open - 1)
    }

    fn plan_close(&mut self, open: OpenNumber) -> Result<Vec<Step>, BlobFsError> {
        let FileOpener { file, can_write, .. } = self.opener(open)?;
        self.openers.remove(&open);
        let Some(node) = self.files.get_mut(&file) else { return Ok(Vec::new()) };
        node.opens -= 1;
        if can_write {
            node.writer = None;
        }
        let (is_last, is_unlinked) = (node.opens == 0, node.is_unlinked);
        if is_last {
            self.revoke_extents(file);
        }
        if is_unlinked {
            let delete = vec![Step::DeleteFile { file }, Step::FileDeleted { file }];
            return Ok(if is_last { delete } else { Vec::new() });
        }
        Ok(match can_write {
            true => {
                let mut steps = self.shorten_log(file);
                steps.extend([
                    Step::WriteOut { file, above: 0 },
                    Step::DropBuffer { file },
                    Step::Trim { file },
                ]);
                steps
            }
            false => Vec::new(),
        })
    }

    fn plan_read(&mut self, open: OpenNumber, offset: u64, length: usize) -> Result<Vec<Step>, BlobFsError> {
        let opener = self.opener(open)?;
        let FileOpener { file, next_offset, mut window, .. } = opener;
        let (block, options) = (self.block, self.options);
        let node = self.files.get(&file).ok_or(BlobFsError::NotFound)?;
        let left = node.size.saturating_sub(offset).min(REQUEST_BYTES_MAX as u64) as usize;
        let length = length.min(left);
        let done = |data| Ok(vec![Step::Reply(BlobFsReply::Data(data))]);
        if length == 0 {
            return done(Vec::new());
        }
        let end = offset + length as u64;
        // What is in the buffer may not be on the device.
        let device_end = node.buffer.as_ref().map_or(node.size, |buffer| buffer.start);
        window = match offset == next_offset {
            true => {
                (window * 2).clamp(CHUNK_BYTES as usize, options.read_ahead_bytes.max(CHUNK_BYTES as usize))
            }
            false => 0,
        };
        if options.read_ahead_bytes == 0 {
            window = 0;
        }
        let opener = self.openers.get_mut(&open).ok_or(BlobFsError::NotOpen)?;
        (opener.next_offset, opener.window) = (end, window);
        let mut data = vec![0; length];
        let from_device = device_end.min(end).saturating_sub(offset) as usize;
        if from_device == 0 || self.cache.read(file, offset, &mut data[..from_device]) {
            self.overlay(file, offset, &mut data);
            self.read_ahead(open, end, device_end);
            return done(data);
        }
        let start = if window > 0 { offset / CHUNK_BYTES * CHUNK_BYTES } else { offset / block * block };
        // Whole chunks, but not what is still in memory.
        let ahead = (end + window as u64).next_multiple_of(CHUNK_BYTES);
        let ahead = if window > 0 { ahead.min(device_end) } else { 0 };
        let bytes = ahead.max(end).next_multiple_of(block) - start;
        let fetched = start;
        if let Some(opener) = self.openers.get_mut(&open) {
            opener.ahead_end = ahead;
        }
        Ok(vec![
            Step::Fetch { file, start, bytes: bytes as usize },
            Step::Cut { file, fetched, offset, length },
        ])
    }

    /// Begins to read ahead for an opener that has read up to `end`, when it has read half of the bytes that
    /// are cached ahead.
    fn read_ahead(&mut self, open: OpenNumber, end: u64, device_end: u64) {
        let Some(opener) = self.openers.get_mut(&open) else { return };
        let (file, window) = (opener.file, opener.window as u64);
        let start = opener.ahead_end.max(end.next_multiple_of(CHUNK_BYTES));
        let is_near = window > 0 && start - end <= window / 2;
        let until = (end + window).next_multiple_of(CHUNK_BYTES).min(device_end);
        if !is_near || opener.ahead.is_some() || !start.is_multiple_of(CHUNK_BYTES) || until <= start {
            return;
        }
        opener.ahead = Some(FileRange { start, end: until });
        opener.ahead_end = until;
        let bytes = (until - start).next_multiple_of(self.block) as usize;
        let steps = [Step::Fetch { file, start, bytes }, Step::CacheAhead { file, start, end: until }];
        let locks = TaskLocks::file(file, false);
        self.add_task(Task { locks, steps: steps.into(), ahead_of: Some(open), ..Task::default() });
    }

    /// Whether a request reads what is being read ahead.
    pub(super) fn awaits_read_ahead(&self, request: &BlobFsRequest) -> bool {
        let BlobFsRequest::Read { open, offset, length } = request else { return false };
        let ahead = self.openers.get(open).and_then(|opener| opener.ahead);
        ahead.is_some_and(|range| *offset < range.end && offset.saturating_add(*length as u64) > range.start)
    }

    fn check_length(offset: u64, length: usize) -> Result<u64, BlobFsError> {
        let end = offset.checked_add(length as u64).filter(|end| *end <= i64::MAX as u64);
        match length <= REQUEST_BYTES_MAX {
            true => end.ok_or(BlobFsError::Invalid("the file would be too large")),
            false => Err(BlobFsError::Invalid("more than 1 GiB in one write")),
        }
    }

    fn plan_append(&mut self, file: FileNumber, data: Vec<u8>) -> Result<Vec<Step>, BlobFsError> {
        let node = self.node(file)?;
        let end = Self::check_length(node.size, data.len())?;
        let buffered = node.buffer.as_ref().map_or(0, |buffer| buffer.data.len());
        // What is written before its sync may be there behind a gap.
        let is_early = buffered + data.len() >= BUFFER_BYTES_MAX;
        let is_large = data.len() >= LARGE_APPEND_BYTES && (is_early || !node.is_ahead());
        let mut steps = if is_early || is_large { self.shorten_log(file) } else { Vec::new() };
        let node = self.node(file)?;
        if is_large && buffered == 0 && node.size % self.block == 0 {
            steps.extend([Step::Grow { file, end, exact: false }, Step::WriteEnd { file, data }]);
            return Ok(steps);
        }
        if node.buffer.is_none() && node.size % self.block != 0 {
            steps.extend([Step::LoadEnd { file }, Step::EndLoaded { file }]);
        }
        steps.extend([
            Step::Grow { file, end, exact: false },
            Step::AddEnd { file, data },
            Step::WriteOut { file, above: BUFFER_BYTES_MAX },
        ]);
        Ok(steps)
    }

    fn plan_write(&mut self, open: OpenNumber, offset: u64, data: Vec<u8>) -> Result<Vec<Step>, BlobFsError> {
        let file = self.writer(open)?.file;
        let size = self.node(file)?.size;
        let end = Self::check_length(offset, data.len())?;
        if data.is_empty() {
            return Ok(Vec::new());
        }
        if offset == size {
            return self.plan_append(file, data);
        }
        let mut steps = self.shorten_log(file);
        steps.extend([
            Step::WriteOut { file, above: 0 },
            Step::DropBuffer { file },
            Step::Grow { file, end, exact: false },
        ]);
        if offset > size && !self.has_fault(FileFault::HoleNotZeroed) {
            steps.push(Step::Fill { file, end: offset });
        }
        steps.push(Step::Patch { file, offset, data });
        steps.push(Step::WritePatch { file });
        steps.push(Step::SetSize { file, size: size.max(end) });
        Ok(steps)
    }

    fn plan_truncate(&mut self, file: FileNumber, size: u64) -> Result<Vec<Step>, BlobFsError> {
        let before = self.node(file)?.size;
        Self::check_length(size, 0)?;
        let mut steps = self.shorten_log(file);
        if size > 0 {
            steps.push(Step::WriteOut { file, above: 0 });
        }
        steps.push(Step::DropBuffer { file });
        if size > before {
            steps.extend([Step::Grow { file, end: size, exact: true }, Step::Fill { file, end: size }]);
            steps.push(Step::SetSize { file, size });
        } else {
            if !self.has_fault(FileFault::TrimmedNotShortened) {
                steps.extend([Step::ShortenLength { file, size }, Step::Shortened { file, size }]);
            }
            steps.extend([Step::SetSize { file, size }, Step::Trim { file }]);
        }
        Ok(steps)
    }

    fn plan_allocate(&self, file: FileNumber, size: u64) -> Result<Vec<Step>, BlobFsError> {
        Self::check_length(size, 0)?;
        let has = u64::from(self.clusters_of(self.node(file)?)) * self.cluster_bytes();
        Ok(match size.saturating_sub(has) <= self.free_bytes() / 2 {
            true => vec![Step::Grow { file, end: size, exact: true }],
            false => Vec::new(),
        })
    }

    /// Data, then a flush for all, then lengths and names.
    fn sync_steps(&self, files: Vec<FileNumber>) -> Vec<Step> {
        let mut steps: Vec<Step> = files.iter().flat_map(|file| self.shorten_log(*file)).collect();
        let data = files.iter().map(|file| Step::WriteOut { file: *file, above: 0 });
        let lengths = files.iter().map(|file| Step::WriteLength { file: *file });
        if self.has_fault(FileFault::LengthBeforeData) {
            steps.extend(lengths.clone());
        }
        steps.extend(data);
        if !self.has_fault(FileFault::FlushLeftOut) {
            steps.push(Step::Flush { files: files.clone() });
        }
        steps.push(Step::Flushed { files: files.clone() });
        if !self.has_fault(FileFault::LengthLeftOut) {
            steps.extend(lengths);
        }
        steps
    }

    /// Gives a log the length that was flushed, before something is written that would be there behind a gap.
    fn shorten_log(&self, file: FileNumber) -> Vec<Step> {
        match self.files.get(&file) {
            Some(node) if node.is_ahead() && !self.has_fault(FileFault::LogNotShortened) => {
                let size = node.flushed;
                vec![Step::ShortenLength { file, size }, Step::Shortened { file, size }]
            }
            _ => Vec::new(),
        }
    }

    /// Block by block if the length is ahead, each flushed before the next is written; else a sync that also
    /// writes zeroes, and a length that is ahead.
    fn plan_sync_log(&self, file: FileNumber) -> Result<Vec<Step>, BlobFsError> {
        let node = self.node(file)?;
        let files = vec![file];
        let flush = || [Step::Flush { files: files.clone() }, Step::Flushed { files: files.clone() }];
        let write_out = Step::WriteOut { file, above: 0 };
        let dirty = node.flushed / LOG_BLOCK_BYTES..node.size.div_ceil(LOG_BLOCK_BYTES);
        if node.is_published && node.durable >= node.size && dirty.end - dirty.start.min(dirty.end) <= 2 {
            let mut steps = Vec::new();
            // A write past the device's cache needs no flush: one I/O instead of two.
            if dirty.end > dirty.start + 1 && !self.has_fault(FileFault::LogBlocksUnordered) {
                steps.push(Step::WriteThrough { file, end: (dirty.start + 1) * LOG_BLOCK_BYTES });
                steps.extend(flush());
            }
            steps.push(Step::WriteThrough { file, end: u64::MAX });
            steps.extend(flush());
            return Ok(steps);
        }
        let allocated = u64::from(self.clusters_of(node)) * self.cluster_bytes();
        let ahead = allocated.min(node.size + LOG_AHEAD_BYTES) / self.block * self.block;
        // The last block has zeroes behind the end only if it is written now.
        if node.is_unlinked || !node.is_dirty() || ahead < node.size + LOG_BLOCK_BYTES {
            return Ok(self.sync_steps(files));
        }
        let mut steps = self.shorten_log(file);
        steps.extend([write_out, Step::ZeroAhead { file, end: ahead }]);
        steps.extend(flush());
        steps.push(Step::WriteAhead { file, length: ahead });
        Ok(steps)
    }

    fn unsynced(&self) -> Vec<FileNumber> {
        let files = self.files.iter().filter(|(_, node)| !node.is_unlinked && node.needs_sync());
        files.map(|(file, _)| *file).collect()
    }

    fn plan_rename(&mut self, from: &[u8], to: &[u8]) -> Result<Vec<Step>, BlobFsError> {
        let entry = self.index.find(from)?;
        let from_place = self.index.place(from)?;
        let place = self.index.place(to)?;
        if from_place == place {
            return Ok(Vec::new());
        }
        let replaced = self.index.get(&place);
        match entry {
            IndexEntry::Directory(number) => {
                if replaced.is_some() {
                    return Err(BlobFsError::Exists);
                }
                if is_implied(number) {
                    return Err(BlobFsError::Invalid("the directory is a part of names: rename its files"));
                }
                if self.index.is_within(place.0, number) {
                    return Err(BlobFsError::Invalid("a directory cannot be moved into itself"));
                }
                let renamed = Step::DirectoryRenamed { number, place: place.clone() };
                Ok(vec![Step::RenameDirectory { number, place }, renamed])
            }
            IndexEntry::File(file) => {
                let replaced = match replaced {
                    Some(IndexEntry::Directory(_)) => return Err(BlobFsError::IsDirectory),
                    Some(IndexEntry::File(replaced)) => Some(replaced),
                    None => None,
                };
                if self.node(file)?.is_read_only {
                    return Err(BlobFsError::ReadOnly);
                }
                let mut steps = Vec::new();
                if !self.has_fault(FileFault::RenamedWithoutData) {
                    let files = vec![file];
                    steps.push(Step::WriteOut { file, above: 0 });
                    steps.extend([Step::Flush { files: files.clone() }, Step::Flushed { files }]);
                }
                steps.push(Step::RenameFile { file, place });
                if let Some(replaced) = replaced {
                    let is_first = self.has_fault(FileFault::ReplacedDeletedFirst);
                    let at = if is_first { 0 } else { steps.len() };
                    let removal = match self.node(replaced)?.opens {
                        0 => vec![Step::DeleteFile { file: replaced }, Step::FileDeleted { file: replaced }],
                        _ => vec![Step::MarkDeleted { file: replaced }],
                    };
                    steps.splice(at..at, removal);
                }
                Ok(steps)
            }
        }
    }

    fn plan_unlink(&mut self, file: FileNumber) -> Result<Vec<Step>, BlobFsError> {
        Ok(match self.node(file)?.opens {
            0 => vec![Step::DeleteFile { file }, Step::Unlinked { file }, Step::FileDeleted { file }],
            _ => vec![Step::MarkDeleted { file }, Step::Unlinked { file }],
        })
    }

    fn plan_remove_all(&self, paths: &[Vec<u8>]) -> Result<Vec<Step>, BlobFsError> {
        let (mut blobs, mut steps) = (Vec::new(), Vec::new());
        for path in paths {
            match self.index.find(path)? {
                IndexEntry::Directory(ROOT) => return Err(BlobFsError::Invalid("the root stays")),
                IndexEntry::Directory(number) if !self.index.is_empty(number) => {
                    return Err(BlobFsError::NotEmpty);
                }
                IndexEntry::Directory(number) => {
                    blobs.extend(self.directories.get(&number));
                    steps.push(Step::DirectoryDeleted { number });
                }
                IndexEntry::File(file) => match self.node(file)? {
                    node if node.opens == 0 => {
                        blobs.push(node.blob);
                        steps.extend([Step::Unlinked { file }, Step::FileDeleted { file }]);
                    }
                    _ => steps.extend([Step::MarkDeleted { file }, Step::Unlinked { file }]),
                },
            }
        }
        let count = blobs.len();
        blobs.sort_unstable();
        blobs.dedup();
        if blobs.len() < count {
            return Err(BlobFsError::Invalid("a path is given twice"));
        }
        steps.insert(0, Step::DeleteBlobs { blobs });
        Ok(steps)
    }

    fn plan_unload(&mut self) -> Vec<Step> {
        let mut steps = self.sync_steps(self.unsynced());
        for (file, node) in &self.files {
            let file = *file;
            match node.is_unlinked {
                true => steps.extend([Step::DeleteFile { file }, Step::FileDeleted { file }]),
                false if node.writer.is_some() => steps.push(Step::Trim { file }),
                false => {}
            }
        }
        steps.push(Step::Unload);
        steps
    }
}
