//! The files of a store, as RocksDB calls them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use blobfs::{BlobFsError, BlobFsReply, BlobFsRequest, FileStatus, OpenHow, OpenNumber};
use rocksdb_abi::{FileAttributes, FileError, FileOpen, ListedName, RocksFile, RocksFiles};

use crate::file::{OpenFile, file_error};
use crate::store::Store;
use crate::tail::Tail;

/// The files of a store.
pub(crate) struct Files {
    store: Arc<Store>,
    /// Files that are written in order, by path.
    tails: Mutex<HashMap<Vec<u8>, Weak<Tail>>>,
}

/// A path without what makes no difference.
fn plain(path: &[u8]) -> Vec<u8> {
    let names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".");
    names.collect::<Vec<_>>().join(&b'/')
}

fn status_of(status: &FileStatus) -> FileAttributes {
    FileAttributes { is_directory: status.is_directory, bytes: status.size }
}

/// An error of a rename. RocksDB's text begins with the old name, so what is there at the new one is named.
fn rename_error(error: BlobFsError, to: &[u8]) -> FileError {
    let is_of_new = matches!(error, BlobFsError::IsDirectory | BlobFsError::Exists);
    let error = file_error(error);
    match is_of_new {
        true => FileError::new(error.kind, format!("{}: {}", String::from_utf8_lossy(to), error.text)),
        false => error,
    }
}

impl Files {
    pub(crate) fn new(store: Store) -> Files {
        Files { store: Arc::new(store), tails: Mutex::new(HashMap::new()) }
    }

    /// Writes what is in memory and closes the store. Requests fail from then on.
    pub(crate) fn close(&self) {
        self.write_out();
        self.store.close();
    }

    fn tails(&self) -> Vec<Arc<Tail>> {
        let mut tails = sync::lock(&self.tails);
        tails.retain(|_, tail| tail.strong_count() > 0);
        tails.values().filter_map(Weak::upgrade).collect()
    }

    /// Begins to write what is in memory of all files, so that what follows finds it. An error is that of
    /// the file's next call.
    fn write_out(&self) {
        self.tails().into_iter().for_each(|tail| _ = tail.write_out());
    }

    fn tail_of(&self, path: &[u8]) -> Option<Arc<Tail>> {
        sync::lock(&self.tails).get(&plain(path)).and_then(Weak::upgrade)
    }

    fn done(&self, request: BlobFsRequest) -> Result<(), FileError> {
        self.store.request(request).map(drop).map_err(file_error)
    }

    fn opened(&self, request: BlobFsRequest) -> Result<OpenNumber, FileError> {
        match self.store.request(request).map_err(file_error)? {
            BlobFsReply::Opened(open) => Ok(open),
            _ => Err(file_error(BlobFsError::Broken)),
        }
    }
}

impl RocksFiles for Files {
    fn open(&self, path: &[u8], how: FileOpen) -> Result<Box<dyn RocksFile>, FileError> {
        let as_opened = match how {
            FileOpen::Read => OpenHow::READ,
            FileOpen::Create => OpenHow::REPLACE,
            FileOpen::Reopen => OpenHow::CREATE,
            FileOpen::Reuse | FileOpen::ReadWrite => OpenHow::WRITE,
        };
        let open = self.opened(BlobFsRequest::Open { path: path.to_vec(), how: as_opened })?;
        let mut file = OpenFile::new(self.store.clone(), open);
        match how {
            FileOpen::ReadWrite => {}
            FileOpen::Read => file = file.with_tail(self.tail_of(path), false).for_reading(),
            FileOpen::Create | FileOpen::Reopen | FileOpen::Reuse => {
                let size = if how == FileOpen::Create { 0 } else { file.size() };
                let offset = if how == FileOpen::Reopen { size } else { 0 };
                let is_log = how != FileOpen::Reuse && path.ends_with(b".log");
                let tail = Arc::new(Tail::new(self.store.clone(), open, offset, size, is_log));
                sync::lock(&self.tails).insert(plain(path), Arc::downgrade(&tail));
                file = file.with_tail(Some(tail), true);
            }
        }
        Ok(Box::new(file))
    }

    fn lock(&self, path: &[u8]) -> Result<Box<dyn RocksFile>, FileError> {
        let open = self.opened(BlobFsRequest::Lock { path: path.to_vec() })?;
        Ok(Box::new(OpenFile::new(self.store.clone(), open)))
    }

    fn status(&self, path: &[u8]) -> Result<FileAttributes, FileError> {
        let name = path.to_vec();
        let found = self.store.inspect(move |fs| fs.status(&name)).and_then(|status| status);
        let mut status = status_of(&found.map_err(file_error)?);
        if let Some(tail) = self.tail_of(path) {
            status.bytes = tail.size();
        }
        Ok(status)
    }

    fn list(&self, path: &[u8]) -> Result<Vec<ListedName>, FileError> {
        let name = path.to_vec();
        let found = self.store.inspect(move |fs| fs.list(&name)).and_then(|items| items);
        let mut items: Vec<ListedName> = found
            .map_err(file_error)?
            .into_iter()
            .map(|item| ListedName { status: status_of(&item.status), name: item.name })
            .collect();
        for item in &mut items {
            if let Some(tail) = self.tail_of(&[path, b"/", &item.name].concat()) {
                item.status.bytes = tail.size();
            }
        }
        Ok(items)
    }

    fn unlink(&self, path: &[u8]) -> Result<(), FileError> {
        self.done(BlobFsRequest::Unlink { path: path.to_vec() })?;
        sync::lock(&self.tails).remove(&plain(path));
        Ok(())
    }

    fn make_directory(&self, path: &[u8]) -> Result<(), FileError> {
        self.done(BlobFsRequest::MakeDirectory { path: path.to_vec() })
    }

    fn remove_directory(&self, path: &[u8]) -> Result<(), FileError> {
        self.done(BlobFsRequest::RemoveDirectory { path: path.to_vec() })
    }

    fn rename(&self, from: &[u8], to: &[u8]) -> Result<(), FileError> {
        // A rename makes the data of a file durable, so it has to be there.
        self.write_out();
        let request = BlobFsRequest::Rename { from: from.to_vec(), to: to.to_vec() };
        self.store.request(request).map_err(|error| rename_error(error, to))?;
        let mut tails = sync::lock(&self.tails);
        let to = plain(to);
        tails.remove(&to);
        if let Some(tail) = tails.remove(&plain(from)) {
            tails.insert(to, tail);
        }
        Ok(())
    }

    fn sync_directory(&self, path: &[u8]) -> Result<(), FileError> {
        self.done(BlobFsRequest::SyncDirectory { path: path.to_vec() })
    }

    fn free_bytes(&self) -> Result<u64, FileError> {
        self.store.inspect(|fs| fs.free_bytes()).map_err(file_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig;

    #[test]
    fn a_rename_onto_a_directory_names_that() {
        let configured = rig::bdevs("files-rename", &[rig::ram_disk(16, 4096)]);
        let files = Files::new(rig::open(&configured, "M", "&create=1").unwrap());
        for directory in [&b"/d"[..], b"/e"] {
            files.make_directory(directory).unwrap();
        }
        files.open(b"/f", FileOpen::Create).unwrap().close().unwrap();
        let text = |from: &[u8], to: &[u8]| files.rename(from, to).unwrap_err().text;
        assert_eq!(text(b"/f", b"/d"), "/d: it is a directory");
        assert_eq!(text(b"/d", b"/e"), "/e: there is a file or directory of that name");
        assert_eq!(text(b"/none", b"/e"), "there is no such file or directory");
        files.close();
    }

    #[test]
    fn slashes_make_no_other_path() {
        assert_eq!(plain(b"/db//./LOG"), b"db/LOG");
        assert_eq!(plain(b"db/LOG"), plain(b"/db/LOG/"));
    }
}
