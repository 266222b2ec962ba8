//! The index of names: directories and what they have, in one ordered map.
//!
//! The index is in memory alone. It is made of blobs when a store is opened, so that nothing can damage it
//! for longer than that. A look-up costs a search of the map for each component of the path.

use std::collections::BTreeMap;

use crate::error::BlobFsError;
use crate::path::components;

/// Names a file while the store is open. Numbers are not used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FileNumber(pub(crate) u64);

/// Names a directory: that of the store, or one above [`IMPLIED`] for a directory that is only part of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct DirectoryNumber(pub(crate) u64);

/// The root.
pub(crate) const ROOT: DirectoryNumber = DirectoryNumber(0);
/// The numbers of implied directories begin here: names of SPDK's flat layout have slashes.
const IMPLIED: u64 = 1 << 63;

/// What a name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IndexEntry {
    File(FileNumber),
    Directory(DirectoryNumber),
}

/// A directory, and a name in it.
pub(crate) type IndexPlace = (DirectoryNumber, Vec<u8>);

#[derive(Clone, Debug)]
struct IndexDirectory {
    place: IndexPlace,
}

/// The index.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileIndex {
    entries: BTreeMap<IndexPlace, IndexEntry>,
    directories: BTreeMap<DirectoryNumber, IndexDirectory>,
    implied: u64,
}

impl FileIndex {
    /// What a path names.
    pub(crate) fn find(&self, path: &[u8]) -> Result<IndexEntry, BlobFsError> {
        let mut entry = IndexEntry::Directory(ROOT);
        for name in components(path)? {
            let IndexEntry::Directory(directory) = entry else { return Err(BlobFsError::NotDirectory) };
            entry = self.get(&(directory, name.to_vec())).ok_or(BlobFsError::NotFound)?;
        }
        Ok(entry)
    }

    /// Where a path is, or would be: its directory exists.
    pub(crate) fn place(&self, path: &[u8]) -> Result<IndexPlace, BlobFsError> {
        let names = components(path)?;
        let (name, above) = names.split_last().ok_or(BlobFsError::IsDirectory)?;
        match self.find(&above.join(&b'/'))? {
            IndexEntry::Directory(directory) => Ok((directory, name.to_vec())),
            IndexEntry::File(_) => Err(BlobFsError::NotDirectory),
        }
    }

    pub(crate) fn get(&self, place: &IndexPlace) -> Option<IndexEntry> {
        self.entries.get(place).copied()
    }

    /// What a directory has, by name.
    pub(crate) fn list(&self, directory: DirectoryNumber) -> impl Iterator<Item = (&[u8], IndexEntry)> {
        let range = (directory, Vec::new())..(DirectoryNumber(directory.0 + 1), Vec::new());
        self.entries.range(range).map(|((_, name), entry)| (&name[..], *entry))
    }

    pub(crate) fn is_empty(&self, directory: DirectoryNumber) -> bool {
        self.list(directory).next().is_none()
    }

    pub(crate) fn insert(&mut self, place: IndexPlace, entry: IndexEntry) {
        if let IndexEntry::Directory(number) = entry {
            self.directories.insert(number, IndexDirectory { place: place.clone() });
        }
        self.entries.insert(place, entry);
    }

    pub(crate) fn remove(&mut self, place: &IndexPlace) {
        if let Some(IndexEntry::Directory(number)) = self.entries.remove(place) {
            self.directories.remove(&number);
        }
    }

    pub(crate) fn directory_place(&self, directory: DirectoryNumber) -> Option<&IndexPlace> {
        self.directories.get(&directory).map(|directory| &directory.place)
    }

    /// Whether a directory is another, or below it.
    pub(crate) fn is_within(&self, directory: DirectoryNumber, other: DirectoryNumber) -> bool {
        let mut next = Some(directory);
        while let Some(directory) = next.filter(|next| *next != other) {
            next = self.directory_place(directory).map(|(parent, _)| *parent);
        }
        next.is_some()
    }

    /// The parent and the name as a blob has them: implied directories are a part of the name.
    pub(crate) fn stored(&self, place: &IndexPlace) -> (Option<u64>, Vec<u8>) {
        let (mut directory, mut name) = place.clone();
        while is_implied(directory)
            && let Some((parent, above)) = self.directory_place(directory)
        {
            name = [&above[..], b"/", &name].concat();
            directory = *parent;
        }
        ((directory != ROOT).then_some(directory.0), name)
    }

    /// The place of a stored name below a directory. Directories that are part of the name are implied.
    ///
    /// # Errors
    /// The name is no path, or part of it is a file.
    pub(crate) fn resolve(
        &mut self,
        parent: DirectoryNumber,
        stored: &[u8],
    ) -> Result<IndexPlace, BlobFsError> {
        let names = components(stored)?;
        let (name, above) = names.split_last().ok_or(BlobFsError::IsDirectory)?;
        let mut directory = parent;
        for name in above {
            let place = (directory, name.to_vec());
            directory = match self.get(&place) {
                Some(IndexEntry::Directory(number)) => number,
                Some(IndexEntry::File(_)) => return Err(BlobFsError::NotDirectory),
                None => {
                    self.implied += 1;
                    let number = DirectoryNumber(IMPLIED + self.implied);
                    self.insert(place, IndexEntry::Directory(number));
                    number
                }
            };
        }
        Ok((directory, name.to_vec()))
    }
}

/// Whether a directory has no blob: it is a part of names.
pub(crate) fn is_implied(directory: DirectoryNumber) -> bool {
    directory.0 > IMPLIED
}

/// Whether a directory of the store may have this number.
pub(crate) fn is_directory_number(number: u64) -> bool {
    (1..IMPLIED).contains(&number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_slashes_make_directories_that_are_stored_as_names() {
        let mut index = FileIndex::default();
        let place = index.resolve(ROOT, b"/db/000012.sst").unwrap();
        index.insert(place.clone(), IndexEntry::File(FileNumber(7)));
        assert_eq!(index.find(b"db//000012.sst"), Ok(IndexEntry::File(FileNumber(7))));
        assert_eq!(index.stored(&place), (None, b"db/000012.sst".to_vec()));
        assert_eq!(index.place(b"db/000012.sst/x"), Err(BlobFsError::NotDirectory));
        assert_eq!(index.find(b"db/none"), Err(BlobFsError::NotFound));
        let Ok(IndexEntry::Directory(db)) = index.find(b"/db") else { panic!("db is no directory") };
        assert!(is_implied(db) && !index.is_empty(db) && index.is_within(db, ROOT));
    }

    #[test]
    fn a_directory_lists_its_own_names_in_order() {
        let mut index = FileIndex::default();
        index.insert((ROOT, b"d".to_vec()), IndexEntry::Directory(DirectoryNumber(1)));
        index.insert((DirectoryNumber(1), b"b".to_vec()), IndexEntry::File(FileNumber(2)));
        index.insert((DirectoryNumber(1), b"a".to_vec()), IndexEntry::File(FileNumber(3)));
        index.insert((DirectoryNumber(2), b"c".to_vec()), IndexEntry::File(FileNumber(4)));
        let names: Vec<&[u8]> = index.list(DirectoryNumber(1)).map(|(name, _)| name).collect();
        assert_eq!(names, [b"a", b"b"]);
        assert_eq!(index.stored(&(DirectoryNumber(1), b"a".to_vec())), (Some(1), b"a".to_vec()));
    }
}
