//! The index from the blobs of a store.
//!
//! A blob says its name itself, so that the index is right whatever the order of writes was. Of two blobs of
//! one name, the one with the larger sequence is the file: a rename over it was cut in two, and the other is
//! removed. Nothing else is: what cannot be where its name says is in `lost+found`.

use std::collections::{BTreeMap, VecDeque};

use blobstore::{Blob, BlobId, BlobParent, BlobStore};

use crate::error::NoBlobFs;
use crate::file::FileNode;
use crate::index::{
    DirectoryNumber, FileIndex, FileNumber, IndexEntry, IndexPlace, ROOT, is_directory_number, is_implied,
};
use crate::record::{FileRecord, NoRecord, STORE_TYPE};

/// The directory of files that cannot be where their names say.
const LOST: &[u8] = b"lost+found";
/// Findings that are listed at most; a store has as many blobs at most as metadata pages.
const FINDINGS_MAX: usize = 1000;

/// Something that is not as in a store that was closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileFinding {
    /// A file that is removed when the store is opened: it was deleted while open, never synced, or replaced
    /// by a rename. A note.
    Removed {
        /// The blob.
        blob: BlobId,
        /// Its name.
        name: String,
    },
    /// A file has clusters that its length does not need, as every file that was being appended to. A note.
    Excess {
        /// The blob.
        blob: BlobId,
        /// Clusters that are freed when the store is opened.
        clusters: u32,
    },
    /// The blob is no file. Damage.
    NoFile {
        /// The blob.
        blob: BlobId,
        /// Why.
        reason: NoRecord,
    },
    /// The file cannot be where its name says, and is in `lost+found`. Damage.
    Lost {
        /// The blob.
        blob: BlobId,
        /// Its name.
        name: String,
        /// Why.
        reason: &'static str,
    },
    /// The length is more than the blob has; the file ends with the blob. Damage.
    Length {
        /// The blob.
        blob: BlobId,
        /// What the blob says.
        length: u64,
        /// What it has.
        bytes: u64,
    },
}

impl FileFinding {
    /// Whether something is damaged. Otherwise it is a note.
    pub fn is_damage(&self) -> bool {
        !matches!(self, FileFinding::Removed { .. } | FileFinding::Excess { .. })
    }
}

impl std::fmt::Display for FileFinding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FileFinding::Removed { blob, name } => {
                write!(f, "blob {blob}, {name}, is removed: it was deleted, replaced or never synced")
            }
            FileFinding::Excess { blob, clusters } => {
                write!(f, "blob {blob} has {clusters} clusters more than its length needs")
            }
            FileFinding::NoFile { blob, reason } => write!(f, "blob {blob} is no file: {reason}"),
            FileFinding::Lost { blob, name, reason } => {
                write!(f, "blob {blob}, {name}, is in lost+found: {reason}")
            }
            FileFinding::Length { blob, length, bytes } => {
                write!(f, "blob {blob} has a length of {length}, but only {bytes} bytes")
            }
        }
    }
}

/// The files of a store.
#[derive(Debug, Default)]
pub(crate) struct LoadedFiles {
    pub(crate) index: FileIndex,
    pub(crate) files: BTreeMap<FileNumber, FileNode>,
    /// Blobs of directories that are in the store.
    pub(crate) directories: BTreeMap<DirectoryNumber, BlobId>,
    /// To be deleted.
    pub(crate) removed: Vec<BlobId>,
    /// To be resized, and to how many clusters.
    pub(crate) excess: Vec<(BlobId, u32)>,
    pub(crate) findings: Vec<FileFinding>,
    pub(crate) next_file: u64,
    pub(crate) next_directory: u64,
    pub(crate) next_sequence: u64,
}

fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// Makes the index.
///
/// # Errors
/// The store is another's.
pub(crate) fn load_files(store: &BlobStore) -> Result<LoadedFiles, NoBlobFs> {
    let store_type = store.super_block().store_type;
    if store_type != STORE_TYPE && store_type != [0; 16] {
        return Err(NoBlobFs::OtherType { found: store.super_block().store_type_text() });
    }
    let is_file = |blob: &&Blob| FileRecord::decode(blob).is_ok();
    if store_type != STORE_TYPE {
        let other = store.blobs().values().find(|blob| !is_file(blob)).map(Blob::id);
        if other.is_some() || store.blobs().is_empty() {
            return Err(NoBlobFs::NoFiles { blob: other });
        }
    }
    let mut loaded = LoadedFiles { next_file: 1, next_directory: 1, next_sequence: 1, ..Default::default() };
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    for blob in store.blobs().values() {
        match FileRecord::decode(blob) {
            Err(reason) => loaded.find(FileFinding::NoFile { blob: blob.id(), reason }),
            Ok(record) => {
                loaded.next_sequence = loaded.next_sequence.max(record.sequence.saturating_add(1));
                let number = record.directory.filter(|number| is_directory_number(*number));
                loaded.next_directory = loaded.next_directory.max(number.map_or(0, |number| number + 1));
                match record.directory {
                    _ if record.is_deleted => loaded.remove(blob.id(), &record),
                    Some(_) => directories.push((blob.id(), record)),
                    None => files.push((blob, record)),
                }
            }
        }
    }
    loaded.place_directories(directories);
    loaded.place_files(store, files);
    Ok(loaded)
}

impl LoadedFiles {
    fn find(&mut self, finding: FileFinding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    fn remove(&mut self, blob: BlobId, record: &FileRecord) {
        self.removed.push(blob);
        self.find(FileFinding::Removed { blob, name: text(&record.name) });
    }

    /// Where a file or directory goes that cannot be where its name says.
    fn lost(&mut self, blob: BlobId, record: &FileRecord, reason: &'static str) -> IndexPlace {
        self.find(FileFinding::Lost { blob, name: text(&record.name), reason });
        let mut above = LOST.to_vec();
        // A file may have that name.
        while matches!(self.index.get(&(ROOT, above.clone())), Some(IndexEntry::File(_))) {
            above.push(b'+');
        }
        let mut name = format!("blob-{blob}").into_bytes();
        loop {
            match self.index.resolve(ROOT, &[&above[..], b"/", &name].concat()) {
                Ok(place) if self.index.get(&place).is_none() => return place,
                _ => name.push(b'+'),
            }
        }
    }

    /// Places directories from the root on, then those that the root does not lead to.
    fn place_directories(&mut self, directories: Vec<(BlobId, FileRecord)>) {
        let mut below: BTreeMap<u64, Vec<(BlobId, FileRecord)>> = BTreeMap::new();
        for (blob, record) in directories {
            below.entry(record.parent.unwrap_or(ROOT.0)).or_default().push((blob, record));
        }
        let mut parents = VecDeque::from([ROOT]);
        loop {
            while let Some(parent) = parents.pop_front() {
                for (blob, record) in below.remove(&parent.0).into_iter().flatten() {
                    let number = self.place_directory(parent, blob, &record);
                    parents.extend(number);
                }
            }
            // A parent that is not there, or a circle.
            let is_missing = |parent: &u64, below: &BTreeMap<u64, Vec<(BlobId, FileRecord)>>| {
                !below.values().flatten().any(|(_, record)| record.directory == Some(*parent))
            };
            let missing = below.keys().copied().find(|parent| is_missing(parent, &below));
            let Some(parent) = missing.or_else(|| below.keys().next().copied()) else { return };
            let Some(list) = below.get_mut(&parent) else { return };
            let Some((blob, record)) = list.pop() else {
                below.remove(&parent);
                continue;
            };
            let place = self.lost(blob, &record, "its directory is not there");
            parents.extend(self.add_directory(place, blob, &record));
        }
    }

    fn place_directory(
        &mut self,
        parent: DirectoryNumber,
        blob: BlobId,
        record: &FileRecord,
    ) -> Option<DirectoryNumber> {
        let place = match self.index.resolve(parent, &record.name) {
            Ok(place) if self.index.get(&place).is_none() => place,
            Ok(_) => self.lost(blob, record, "another has its name"),
            Err(_) => self.lost(blob, record, "its name is no path"),
        };
        self.add_directory(place, blob, record)
    }

    fn add_directory(
        &mut self,
        place: IndexPlace,
        blob: BlobId,
        record: &FileRecord,
    ) -> Option<DirectoryNumber> {
        let number = record.directory.filter(|number| is_directory_number(*number)).map(DirectoryNumber);
        let number = number.filter(|number| !self.directories.contains_key(number));
        // A second one of a number is a directory, but what is below the number is in the first one.
        let own = number.unwrap_or_else(|| {
            self.next_directory += 1;
            DirectoryNumber(self.next_directory - 1)
        });
        self.index.insert(place, IndexEntry::Directory(own));
        self.directories.insert(own, blob);
        number
    }

    fn place_files(&mut self, store: &BlobStore, mut files: Vec<(&Blob, FileRecord)>) {
        // The newest first, so that what is older steps back.
        files.sort_by_key(|(blob, record)| (std::cmp::Reverse(record.sequence), blob.id()));
        let mut sequences: BTreeMap<FileNumber, (u64, Option<u64>, Vec<u8>)> = BTreeMap::new();
        for (blob, record) in files {
            let parent = DirectoryNumber(record.parent.unwrap_or(ROOT.0));
            let is_there = parent == ROOT || self.directories.contains_key(&parent) && !is_implied(parent);
            let place = match is_there.then(|| self.index.resolve(parent, &record.name)) {
                None => self.lost(blob.id(), &record, "its directory is not there"),
                Some(Err(_)) => self.lost(blob.id(), &record, "its name is no path"),
                Some(Ok(place)) => match self.index.get(&place) {
                    None => place,
                    Some(IndexEntry::File(number))
                        if sequences.get(&number).is_some_and(|(sequence, parent, name)| {
                            *sequence > record.sequence && *parent == record.parent && *name == record.name
                        }) =>
                    {
                        self.remove(blob.id(), &record);
                        continue;
                    }
                    Some(_) => self.lost(blob.id(), &record, "another has its name"),
                },
            };
            let number = FileNumber(self.next_file);
            self.next_file += 1;
            let cluster_bytes = u64::from(store.layout().cluster_bytes);
            let bytes = store.blob_bytes(blob);
            if record.length > bytes {
                self.find(FileFinding::Length { blob: blob.id(), length: record.length, bytes });
            }
            let size = record.length.min(bytes);
            let (has, needs) = (blob.clusters().length(), size.div_ceil(cluster_bytes) as u32);
            let is_read_only = blob.is_read_only()
                || blob.flags().is_metadata_read_only()
                || blob.is_thin()
                || *blob.parent() != BlobParent::None;
            if has > needs && !is_read_only {
                self.excess.push((blob.id(), needs));
                self.find(FileFinding::Excess { blob: blob.id(), clusters: has - needs });
            }
            let mut node = FileNode::new(blob.id(), place.clone());
            (node.size, node.durable, node.flushed) = (size, size, size);
            (node.is_published, node.is_read_only) = (true, is_read_only);
            sequences.insert(number, (record.sequence, record.parent, record.name));
            self.index.insert(place, IndexEntry::File(number));
            self.files.insert(number, node);
        }
    }
}
