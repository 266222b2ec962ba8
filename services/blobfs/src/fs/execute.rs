//! What each step of a request does.

use blobstore::{BlobChange, ClearMethod, Xattr};

use super::fault::FileFault;
use super::task::{PendingPatch, Step, Task, TaskIo};
use super::{BlobFs, FileOpener};
use crate::error::BlobFsError;
use crate::file::{AppendBuffer, FileNode};
use crate::index::{DirectoryNumber, FileNumber, IndexEntry, IndexPlace};
use crate::record::{
    DIRECTORY, FileRecord, IS_DELETED, LENGTH, PARENT, SEQUENCE, deleted_xattr, name_xattr, number_xattr,
};
use crate::request::{BlobFsAction, BlobFsReply, OpenHow, OpenNumber};

impl BlobFs {
    /// Runs steps of a task until one has to wait, or the task has ended.
    pub(super) fn advance(&mut self, id: u64) {
        let Some(mut task) = self.tasks.remove(&id) else { return };
        loop {
            if task.pending > 0 || task.waits_for_space {
                self.tasks.insert(id, task);
                return;
            }
            let result = match (task.error.take(), task.steps.pop_front()) {
                (Some(error), _) => Err(error),
                (None, None) => Ok(task.reply.take().unwrap_or(BlobFsReply::Done)),
                (None, Some(step)) => {
                    task.error = self.execute(id, &mut task, step).err();
                    continue;
                }
            };
            if let Some(opener) = task.ahead_of.and_then(|open| self.openers.get_mut(&open)) {
                opener.ahead = None;
            }
            if let Some(request) = task.request {
                self.replies.push_back((request, result));
            }
            return;
        }
    }

    fn node_mut(&mut self, file: FileNumber) -> Result<&mut FileNode, BlobFsError> {
        self.files.get_mut(&file).ok_or(BlobFsError::NotFound)
    }

    fn execute(&mut self, id: u64, task: &mut Task, step: Step) -> Result<(), BlobFsError> {
        match step {
            Step::Fetch { file, start, bytes } => self.fetch(id, task, file, start, bytes),
            Step::Cut { file, fetched, offset, length } => {
                self.cut(task, file, fetched, offset, length);
                Ok(())
            }
            Step::CacheAhead { file, start, end } => {
                let data = std::mem::take(&mut task.data);
                self.cache.insert(file, start, &data[..(end - start) as usize]);
                Ok(())
            }
            Step::LoadEnd { file } => {
                let start = self.node(file)?.size / self.block * self.block;
                self.fetch(id, task, file, start, self.block as usize)
            }
            Step::EndLoaded { file } => {
                let (block, mut data) = (self.block, std::mem::take(&mut task.data));
                let node = self.node_mut(file)?;
                data.truncate((node.size % block) as usize);
                let start = node.size - data.len() as u64;
                node.buffer = Some(AppendBuffer { start, written: data.len(), data });
                Ok(())
            }
            Step::AddEnd { file, data } => self.add_end(file, &data),
            Step::WriteEnd { file, data } => self.write_end(id, task, file, data),
            Step::EndWritten { file, end, rest } => {
                let node = self.node_mut(file)?;
                node.size = end + rest.len() as u64;
                let buffer = AppendBuffer { start: end, data: rest, written: 0 };
                node.buffer = (!buffer.data.is_empty()).then_some(buffer);
                Ok(())
            }
            Step::WriteOut { file, above } => self.write_out(id, task, file, above, u64::MAX, false),
            Step::WriteThrough { file, end } => self.write_out(id, task, file, 0, end, true),
            Step::WrittenOut { file, end } => self.written_out(file, end),
            Step::DropBuffer { file } => {
                self.node_mut(file)?.buffer = None;
                Ok(())
            }
            Step::Grow { file, end, exact } => self.grow(id, task, file, end, exact),
            Step::Patch { file, offset, data } => self.patch(id, task, file, offset, &data),
            Step::WritePatch { file } => {
                let Some(patch) = task.patch.take() else { return Ok(()) };
                if !self.has_fault(FileFault::CacheNotInvalidated) {
                    self.cache.invalidate(file, patch.data.clone());
                }
                self.node_mut(file)?.needs_flush = true;
                self.write_blocks(id, task, file, patch.start, patch.blocks, false)
            }
            Step::Fill { file, end } => {
                let (block, size) = (self.block, self.node(file)?.size);
                let first = size.next_multiple_of(block);
                if end.next_multiple_of(block) > first {
                    let end = end.next_multiple_of(block);
                    task.steps.push_front(Step::Zero { file, start: first, end });
                }
                if first > size {
                    let data = vec![0; (first - size) as usize];
                    task.steps.push_front(Step::WritePatch { file });
                    task.steps.push_front(Step::Patch { file, offset: size, data });
                }
                Ok(())
            }
            Step::Zero { file, start, end } => {
                self.node_mut(file)?.needs_flush = true;
                self.zero_blocks(id, task, file, start, end - start)
            }
            Step::SetSize { file, size } => {
                let node = self.node_mut(file)?;
                let before = std::mem::replace(&mut node.size, size);
                node.flushed = node.flushed.min(size);
                if before != size {
                    self.cache.invalidate(file, before.min(size)..u64::MAX);
                }
                Ok(())
            }
            Step::Flush { files } => {
                let is_needed = files.iter().any(|file| self.files.get(file).is_some_and(|f| f.needs_flush));
                if self.has_volatile_cache && is_needed {
                    self.push_io(TaskIo::Flush { task: id }, BlobFsAction::Flush);
                    task.pending += 1;
                }
                Ok(())
            }
            Step::Flushed { files } => {
                for file in files {
                    let node = self.node_mut(file)?;
                    node.needs_flush = false;
                    let written = |buffer: &AppendBuffer| buffer.start + buffer.written as u64;
                    node.flushed = node.buffer.as_ref().map_or(node.size, written);
                }
                Ok(())
            }
            step => self.execute_metadata(id, task, step),
        }
    }

    /// The buffer's bytes up to one are in the file.
    fn written_out(&mut self, file: FileNumber, end: usize) -> Result<(), BlobFsError> {
        let block = self.block as usize;
        if let Some(buffer) = &mut self.node_mut(file)?.buffer {
            // The last block stays, to be written again with what follows.
            let whole = end / block * block;
            buffer.data.drain(..whole);
            buffer.start += whole as u64;
            buffer.written = end - whole;
        }
        Ok(())
    }

    /// The steps that change what blobs say, and names.
    fn execute_metadata(&mut self, id: u64, task: &mut Task, step: Step) -> Result<(), BlobFsError> {
        match step {
            Step::WriteLength { file } => {
                let node = self.node(file)?;
                if node.is_unlinked || node.is_published && node.size == node.durable {
                    return Ok(());
                }
                let length = node.size;
                task.steps.push_front(Step::LengthWritten { file, length });
                let length = number_xattr(LENGTH, length);
                self.set_xattrs(id, task, file, vec![length], vec![IS_DELETED.to_vec()])
            }
            Step::ZeroAhead { .. } | Step::WriteAhead { .. } => self.execute_ahead(id, task, step),
            Step::LengthWritten { file, length } => {
                let node = self.node_mut(file)?;
                (node.durable, node.is_published) = (length, true);
                Ok(())
            }
            Step::Publish { file } => {
                let length = self.node(file)?.durable;
                task.steps.push_front(Step::LengthWritten { file, length });
                self.set_xattrs(id, task, file, Vec::new(), vec![IS_DELETED.to_vec()])
            }
            Step::ShortenLength { file, size } => match self.node(file)?.durable > size {
                true => self.set_xattrs(id, task, file, vec![number_xattr(LENGTH, size)], Vec::new()),
                false => Ok(()),
            },
            Step::Shortened { file, size } => {
                let node = self.node_mut(file)?;
                node.durable = node.durable.min(size);
                Ok(())
            }
            Step::Trim { file } => {
                let node = self.node(file)?;
                let clusters = node.size.max(node.durable).div_ceil(self.cluster_bytes()) as u32;
                let (has, blob) = (self.clusters_of(node), node.blob);
                match has > clusters && !node.is_read_only {
                    true => self.change(id, task, BlobChange::Resize { blob, clusters }, true),
                    false => Ok(()),
                }
            }
            Step::RenameFile { file, place } => self.rename_file(id, task, file, place),
            Step::FileRenamed { file, place, length } => self.file_renamed(file, place, length),
            Step::RenameDirectory { number, place } => {
                let blob = *self.directories.get(&number).ok_or(BlobFsError::NotFound)?;
                let (set, remove) = self.name_xattrs(&place);
                self.change(id, task, BlobChange::SetXattrs { blob, set, remove }, false)
            }
            Step::DirectoryRenamed { number, place } => {
                if let Some(before) = self.index.directory_place(number).cloned() {
                    self.index.remove(&before);
                }
                self.index.insert(place, IndexEntry::Directory(number));
                Ok(())
            }
            Step::Unlinked { file } => {
                let node = self.node_mut(file)?;
                node.is_unlinked = true;
                let place = node.place.clone();
                self.index.remove(&place);
                Ok(())
            }
            Step::MarkDeleted { .. } | Step::DeleteFile { .. } | Step::FileDeleted { .. } => {
                self.execute_deletion(id, task, step)
            }
            Step::DeleteBlobs { .. } | Step::DeleteBlob { .. } => self.execute_deletion(id, task, step),
            Step::ResizeBlob { blob, clusters } => {
                self.change(id, task, BlobChange::Resize { blob, clusters }, true)
            }
            Step::Unload => {
                self.revoke_all_extents();
                self.is_unloaded = true;
                self.change(id, task, BlobChange::Unload, false)
            }
            Step::Reply(reply) => {
                task.reply = Some(reply);
                Ok(())
            }
            Step::ReplyReserved { file } => {
                let clusters = u64::from(self.clusters_of(self.node(file)?));
                task.reply = Some(BlobFsReply::Reserved(clusters * self.cluster_bytes()));
                Ok(())
            }
            step => self.execute_new(id, task, step),
        }
    }

    /// The steps of what is deleted.
    fn execute_deletion(&mut self, id: u64, task: &mut Task, step: Step) -> Result<(), BlobFsError> {
        match step {
            Step::MarkDeleted { file } => {
                if !self.node(file)?.is_published || self.has_fault(FileFault::UnlinkedNotMarked) {
                    return Ok(());
                }
                self.set_xattrs(id, task, file, vec![deleted_xattr()], Vec::new())
            }
            Step::DeleteFile { file } => {
                let blob = self.node(file)?.blob;
                self.change(id, task, BlobChange::Delete { blob }, false)
            }
            Step::FileDeleted { file } => {
                self.files.remove(&file);
                self.openers.retain(|_, opener| opener.file != file);
                self.cache.invalidate(file, 0..u64::MAX);
                Ok(())
            }
            Step::DeleteBlobs { blobs } => {
                let mut blobs = blobs.into_iter();
                blobs.try_for_each(|blob| self.change(id, task, BlobChange::Delete { blob }, false))
            }
            Step::DeleteBlob { blob } => self.change(id, task, BlobChange::Delete { blob }, true),
            _ => Ok(()),
        }
    }

    /// The steps of logs, whose length is ahead.
    fn execute_ahead(&mut self, id: u64, task: &mut Task, step: Step) -> Result<(), BlobFsError> {
        match step {
            Step::ZeroAhead { file, end } => {
                let start = self.node(file)?.size.next_multiple_of(self.block);
                if self.has_fault(FileFault::LogNotZeroed) || end <= start {
                    return Ok(());
                }
                self.node_mut(file)?.needs_flush = true;
                // Zeroes as data: blocks that were deallocated would cost more with each write.
                self.write_blocks(id, task, file, start, vec![0; (end - start) as usize], false)
            }
            Step::WriteAhead { file, length } => {
                task.steps.push_front(Step::LengthWritten { file, length });
                let length = number_xattr(LENGTH, length);
                self.set_xattrs(id, task, file, vec![length], vec![IS_DELETED.to_vec()])
            }
            _ => Ok(()),
        }
    }

    /// The steps of new files, directories and openers.
    fn execute_new(&mut self, id: u64, task: &mut Task, step: Step) -> Result<(), BlobFsError> {
        match step {
            Step::CreateFile { place } => {
                let is_deleted = !self.has_fault(FileFault::NewNotMarked);
                self.create(id, task, &place, is_deleted, None)
            }
            Step::FileCreated { place, how, open } => {
                let blob = task.blob.take().ok_or(BlobFsError::Broken)?;
                let file = FileNumber(self.next_file);
                self.next_file += 1;
                self.files.insert(file, FileNode::new(blob, place.clone()));
                self.index.insert(place, IndexEntry::File(file));
                self.add_opener(task, file, how, open)
            }
            Step::AddOpener { file, how, open } => self.add_opener(task, file, how, open),
            Step::CreateDirectory { place } => {
                let number = DirectoryNumber(self.next_directory);
                self.next_directory += 1;
                self.create(id, task, &place, false, Some(number.0))?;
                task.steps.push_front(Step::DirectoryCreated { place, number });
                Ok(())
            }
            Step::DirectoryCreated { place, number } => {
                let blob = task.blob.take().ok_or(BlobFsError::Broken)?;
                self.directories.insert(number, blob);
                self.index.insert(place, IndexEntry::Directory(number));
                Ok(())
            }
            Step::DeleteDirectory { number } => {
                task.steps.push_front(Step::DirectoryDeleted { number });
                match self.directories.get(&number).copied() {
                    Some(blob) => self.change(id, task, BlobChange::Delete { blob }, false),
                    // It is only a part of names.
                    None => Ok(()),
                }
            }
            Step::DirectoryDeleted { number } => {
                self.directories.remove(&number);
                if let Some(place) = self.index.directory_place(number).cloned() {
                    self.index.remove(&place);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn add_opener(
        &mut self,
        task: &mut Task,
        file: FileNumber,
        how: OpenHow,
        open: OpenNumber,
    ) -> Result<(), BlobFsError> {
        let node = self.node_mut(file)?;
        node.opens += 1;
        if how.write {
            node.writer = Some(open.0);
        }
        let opener =
            FileOpener { file, can_write: how.write, next_offset: 0, window: 0, ahead_end: 0, ahead: None };
        self.openers.insert(open, opener);
        task.reply = Some(BlobFsReply::Opened(open));
        Ok(())
    }

    /// Puts what is in the buffer over what was read.
    pub(super) fn overlay(&self, file: FileNumber, offset: u64, data: &mut [u8]) {
        let Some(buffer) = self.files.get(&file).and_then(|node| node.buffer.as_ref()) else { return };
        let end = offset + data.len() as u64;
        let buffer_end = buffer.start + buffer.data.len() as u64;
        let (from, to) = (offset.max(buffer.start), end.min(buffer_end));
        if from < to {
            let source = &buffer.data[(from - buffer.start) as usize..(to - buffer.start) as usize];
            data[(from - offset) as usize..(to - offset) as usize].copy_from_slice(source);
        }
    }

    fn cut(&mut self, task: &mut Task, file: FileNumber, fetched: u64, offset: u64, length: usize) {
        let data = std::mem::take(&mut task.data);
        let start = (offset - fetched) as usize;
        let mut reply = data[start..start + length].to_vec();
        self.overlay(file, offset, &mut reply);
        task.reply = Some(BlobFsReply::Data(reply));
        let Some(node) = self.files.get(&file) else { return };
        let end = node.buffer.as_ref().map_or(node.size, |buffer| buffer.start);
        let valid = end.saturating_sub(fetched).min(data.len() as u64) as usize;
        // More than was asked for was read ahead.
        if valid > start + length && fetched.is_multiple_of(crate::cache::CHUNK_BYTES) {
            self.cache.insert(file, fetched, &data[..valid]);
        }
    }

    fn add_end(&mut self, file: FileNumber, data: &[u8]) -> Result<(), BlobFsError> {
        let node = self.node_mut(file)?;
        let (start, before) = (node.size, node.size);
        let buffer = node.buffer.get_or_insert_with(|| AppendBuffer { start, ..AppendBuffer::default() });
        buffer.data.extend_from_slice(data);
        node.size += data.len() as u64;
        let end = node.size;
        self.cache.invalidate(file, before..end);
        Ok(())
    }

    /// Writes data at the end of a file, whose size is a multiple of a block and of which nothing is in
    /// memory.
    fn write_end(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        mut data: Vec<u8>,
    ) -> Result<(), BlobFsError> {
        let block = self.block as usize;
        let rest = data.split_off(data.len() / block * block);
        let node = self.node_mut(file)?;
        (node.buffer, node.needs_flush) = (None, true);
        let (start, end) = (node.size, node.size + data.len() as u64);
        self.cache.invalidate(file, start..end + rest.len() as u64);
        task.steps.push_front(Step::EndWritten { file, end, rest });
        self.write_blocks(id, task, file, start, data, false)
    }

    fn write_out(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        above: usize,
        until: u64,
        through: bool,
    ) -> Result<(), BlobFsError> {
        let (block, has_cache) = (self.block as usize, self.has_volatile_cache);
        let node = self.node_mut(file)?;
        let Some(buffer) = &node.buffer else { return Ok(()) };
        if !buffer.is_dirty() || buffer.data.len() < above {
            return Ok(());
        }
        let end = if above > 0 { buffer.data.len() / block * block } else { buffer.data.len() };
        let end = end.min(usize::try_from(until.saturating_sub(buffer.start)).unwrap_or(usize::MAX));
        let from = buffer.written / block * block;
        if end <= buffer.written {
            return Ok(());
        }
        let mut data = buffer.data[from..end].to_vec();
        data.resize(data.len().next_multiple_of(block), 0);
        let start = buffer.start + from as u64;
        let durable = through && has_cache && !node.needs_flush;
        node.needs_flush = !durable;
        let durable = durable && !self.has_fault(FileFault::LogInCache);
        task.steps.push_front(Step::WrittenOut { file, end });
        self.write_blocks(id, task, file, start, data, durable)
    }

    fn grow(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        end: u64,
        exact: bool,
    ) -> Result<(), BlobFsError> {
        let cluster_bytes = self.cluster_bytes();
        let node = self.node(file)?;
        let (blob, has) = (node.blob, self.clusters_of(node));
        let store = self.store.as_ref().ok_or(BlobFsError::ReadOnly)?;
        let needs = u32::try_from(end.div_ceil(cluster_bytes)).map_err(|_| BlobFsError::NoSpace)?;
        if needs <= has {
            return Ok(());
        }
        let free = store.free_clusters();
        if needs - has > free {
            // Clusters of deleted files are free some time after the deletion.
            if store.is_idle() || store.is_closed() {
                return Err(BlobFsError::NoSpace);
            }
            task.waits_for_space = true;
            task.steps.push_front(Step::Grow { file, end, exact });
            return Ok(());
        }
        let left = free - (needs - has);
        let more = u64::from(needs).min(self.options.preallocate_bytes / cluster_bytes);
        let more = if exact { 0 } else { (more as u32).min(left / 16) };
        if !exact {
            task.steps.push_front(Step::Grow { file, end, exact: true });
        }
        let clusters = needs.saturating_add(more);
        self.change(id, task, BlobChange::Resize { blob, clusters }, !exact)
    }

    fn patch(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        offset: u64,
        data: &[u8],
    ) -> Result<(), BlobFsError> {
        let (block, valid) = (self.block, self.node(file)?.size);
        let end = offset + data.len() as u64;
        let (start, last) = (offset / block * block, end / block * block);
        let mut blocks = vec![0; (end.next_multiple_of(block) - start) as usize];
        let at = (offset - start) as usize;
        blocks[at..at + data.len()].copy_from_slice(data);
        task.patch = Some(PendingPatch { start, blocks, data: offset..end, valid });
        if self.has_fault(FileFault::PatchWithoutRest) {
            return Ok(());
        }
        let needs_first = offset > start && start < valid;
        if needs_first {
            self.fetch_block(id, task, file, start, 0)?;
        }
        if end > last && end < valid && !(needs_first && last == start) {
            self.fetch_block(id, task, file, last, (last - start) as usize)?;
        }
        Ok(())
    }

    fn set_xattrs(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        set: Vec<Xattr>,
        remove: Vec<Vec<u8>>,
    ) -> Result<(), BlobFsError> {
        let blob = self.node(file)?.blob;
        self.change(id, task, BlobChange::SetXattrs { blob, set, remove }, false)
    }

    fn next_sequence(&mut self) -> u64 {
        self.next_sequence += 1;
        if self.has_fault(FileFault::NotNewer) { 0 } else { self.next_sequence - 1 }
    }

    /// What says that a file or directory is at a place, and newer than what was there.
    fn name_xattrs(&mut self, place: &IndexPlace) -> (Vec<Xattr>, Vec<Vec<u8>>) {
        let (parent, name) = self.index.stored(place);
        let mut set = vec![name_xattr(&name), number_xattr(SEQUENCE, self.next_sequence())];
        let remove = match parent {
            Some(parent) => {
                set.push(number_xattr(PARENT, parent));
                Vec::new()
            }
            None => vec![PARENT.to_vec()],
        };
        (set, remove)
    }

    /// Gives a file the name that it has on the device now. The file that had the name has none.
    fn file_renamed(&mut self, file: FileNumber, place: IndexPlace, length: u64) -> Result<(), BlobFsError> {
        let before = self.node(file)?.place.clone();
        if let Some(IndexEntry::File(replaced)) = self.index.get(&place)
            && let Some(replaced) = self.files.get_mut(&replaced)
        {
            replaced.is_unlinked = true;
        }
        self.index.remove(&before);
        self.index.insert(place.clone(), IndexEntry::File(file));
        let node = self.node_mut(file)?;
        (node.place, node.durable, node.is_published) = (place, length, true);
        Ok(())
    }

    fn rename_file(
        &mut self,
        id: u64,
        task: &mut Task,
        file: FileNumber,
        place: IndexPlace,
    ) -> Result<(), BlobFsError> {
        let length = self.node(file)?.size;
        let (mut set, mut remove) = self.name_xattrs(&place);
        set.push(number_xattr(LENGTH, length));
        remove.push(IS_DELETED.to_vec());
        task.steps.push_front(Step::FileRenamed { file, place, length });
        self.set_xattrs(id, task, file, set, remove)
    }

    fn create(
        &mut self,
        id: u64,
        task: &mut Task,
        place: &IndexPlace,
        is_deleted: bool,
        directory: Option<u64>,
    ) -> Result<(), BlobFsError> {
        let (parent, name) = self.index.stored(place);
        let sequence = self.next_sequence();
        let record = FileRecord { name, length: 0, is_deleted, parent, directory, sequence };
        debug_assert!(directory.is_none() || record.encode().iter().any(|xattr| xattr.name == DIRECTORY));
        let (xattrs, clear) = (record.encode(), ClearMethod::Default);
        self.change(id, task, BlobChange::Create { thin: false, clusters: 0, clear, xattrs }, false)
    }
}
