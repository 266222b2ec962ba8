//! Images of a map in a directory, and who has them attached.
//!
//! What changes by compare-and-swap has a directory, as a group: a file for each version, whose name is its
//! number, made by link(2). The newest counts. An image that was never changed has the file that its creation
//! made, which older programs read and write: it follows the newest version.
//!
//! The directory is that of the volume which is the head. A version that has another head leads to the
//! directory of that one. A program may be killed before it has replaced the file of the image: who reads the
//! file goes from head to head, and who changes the image replaces the file first.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{LocalMap, Publish, failed, image_path, plain_name, sync_directory};
use crate::{ImageEntry, MapError, RemovedImage};

pub(super) fn lock_directory(volume: u64) -> PathBuf {
    Path::new("locks").join(volume.to_string())
}

/// The directory with a directory for each image whose size was changed.
pub(super) const SIZES: &str = "sizes";

fn size_directory(volume: u64) -> PathBuf {
    Path::new(SIZES).join(volume.to_string())
}

fn removed_path(volume: u64) -> PathBuf {
    Path::new("removed-images").join(volume.to_string())
}

/// Most changes of the head of an image of which its file may have none. There is one at most: each change
/// completes the one before it. More are damage, or a cycle.
const HEADS_MAX: usize = 32;

/// An image as it was changed last.
struct FoundImage {
    /// The number of that version in the directory of its head; 0 if there is none.
    number: u64,
    image: ImageEntry,
    /// The head that the file of the image has, and those after it.
    heads: Vec<u64>,
}

impl LocalMap {
    /// Who changes which image has a name, or reads all names, has the lock of the directory of images for as
    /// long: `flock(2)`, which ends with its process.
    pub(super) fn lock_names(&self, how: FlockOperation) -> Result<File, MapError> {
        let path = self.root.join("images");
        let locked = File::open(&path).and_then(|directory| {
            rustix::fs::flock(&directory, how)?;
            Ok(directory)
        });
        locked.map_err(|error| failed(&path, &error))
    }

    fn newest_number(&self, directory: &Path) -> Result<Option<u64>, MapError> {
        Ok(self.names(directory)?.iter().filter_map(|name| name.parse().ok()).max())
    }

    /// The newest version of a record, with its number.
    pub(super) fn newest_version<T: DeserializeOwned>(
        &self,
        directory: &Path,
    ) -> Result<Option<(u64, T)>, MapError> {
        // One that is removed meanwhile has a newer one.
        while let Some(number) = self.newest_number(directory)? {
            if let Some(record) = self.read(&directory.join(number.to_string()))? {
                return Ok(Some((number, record)));
            }
        }
        Ok(None)
    }

    /// Adds a version after one. Returns whether it is the newest.
    fn add_version(&self, directory: &Path, number: u64, value: &impl Serialize) -> Result<bool, MapError> {
        let path = self.root.join(directory);
        fs::create_dir_all(&path).map_err(|error| failed(&path, &error))?;
        if !self.publish(&directory.join(number.to_string()), value, Publish::New)? {
            return Ok(false);
        }
        for old in self.names(directory)? {
            if old.parse().is_ok_and(|old: u64| old < number) {
                let _ = fs::remove_file(path.join(old));
            }
        }
        // A number that others left behind meanwhile, so that its name was free again, is not a new one.
        if self.newest_number(directory)? == Some(number) {
            return Ok(true);
        }
        let _ = fs::remove_file(path.join(number.to_string()));
        Ok(false)
    }

    /// Replaces the newest version if it is still `known`.
    pub(super) fn change_version<T: Serialize + DeserializeOwned + PartialEq>(
        &self,
        directory: &Path,
        known: Option<&T>,
        to: &T,
    ) -> Result<bool, MapError> {
        let newest = self.newest_version::<T>(directory)?;
        if newest.as_ref().map(|(_, record)| record) != known {
            return Ok(false);
        }
        self.add_version(directory, newest.map_or(1, |(number, _)| number + 1), to)
    }

    fn image(&self, pool: &str, name: &str) -> Result<Option<(u64, ImageEntry)>, MapError> {
        let Some(created) = self.read::<ImageEntry>(&image_path(pool, name))? else { return Ok(None) };
        let found = self.found_image(created)?;
        Ok((!self.is_removed(&found)).then_some((found.number, found.image)))
    }

    /// The same for who changes it, under the lock of names.
    /// A change that was interrupted is completed first.
    fn image_to_change(&self, pool: &str, name: &str) -> Result<(u64, ImageEntry), MapError> {
        let missing = || MapError::Missing(format!("image {pool}/{name}"));
        let (number, image) = self.image(pool, name)?.ok_or_else(missing)?;
        let path = image_path(pool, name);
        if self.read::<ImageEntry>(&path)?.is_some_and(|file| file != image) {
            self.publish(&path, &image, Publish::Replace)?;
        }
        Ok((number, image))
    }

    /// An image as it was changed last.
    ///
    /// # Errors
    /// [`MapError::Record`] if its heads lead to no last one.
    pub(super) fn newest_image(&self, created: ImageEntry) -> Result<ImageEntry, MapError> {
        Ok(self.found_image(created)?.image)
    }

    /// Goes from the head that the file of an image has to the newest one.
    fn found_image(&self, created: ImageEntry) -> Result<FoundImage, MapError> {
        let mut found = FoundImage { number: 0, image: created, heads: Vec::new() };
        loop {
            let volume = found.image.volume;
            found.heads.push(volume);
            let newest = self.newest_version::<ImageEntry>(&size_directory(volume))?;
            match newest.filter(|(_, entry)| entry.uuid == found.image.uuid) {
                Some((_, image)) if image.volume != volume => found.image = image,
                Some((number, image)) => return Ok(FoundImage { number, image, ..found }),
                None => return Ok(found),
            }
            if found.heads.len() == HEADS_MAX {
                let what = self.root.join(size_directory(volume)).display().to_string();
                let reason = format!("the image has more than {HEADS_MAX} heads after each other");
                return Err(MapError::Record { what, reason });
            }
        }
    }

    /// Whether a removal of an image has begun.
    fn is_removed(&self, found: &FoundImage) -> bool {
        found.heads.iter().any(|head| self.root.join(removed_path(*head)).exists())
    }

    /// The files of images count as they are: what was changed since they were made is forgotten.
    pub(super) fn forget_sizes(&self) -> Result<(), MapError> {
        for volume in self.names(Path::new(SIZES))? {
            self.count_change(Path::new(SIZES))?;
            let path = self.root.join(SIZES).join(volume);
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(&path, &error)),
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn all_images(&self) -> Result<BTreeMap<(String, String), ImageEntry>, MapError> {
        // One that gets another name meanwhile has one of the two.
        let _names = self.lock_names(FlockOperation::LockShared)?;
        let mut images = BTreeMap::new();
        for file in self.names(Path::new("images"))? {
            let Some((pool, name)) = file.split_once('.') else { continue };
            if let (Some(pool), Some(name)) = (plain_name(pool), plain_name(name))
                && let Some((_, image)) = self.image(&pool, &name)?
            {
                images.insert((pool, name), image);
            }
        }
        Ok(images)
    }

    pub(super) fn change_image_record(
        &self,
        pool: &str,
        name: &str,
        known: &ImageEntry,
        to: &ImageEntry,
    ) -> Result<bool, MapError> {
        let _names = self.lock_names(FlockOperation::LockExclusive)?;
        let missing = || MapError::Missing(format!("image {pool}/{name}"));
        let (number, image) = self.image_to_change(pool, name)?;
        if image != *known || !self.add_version(&size_directory(image.volume), number + 1, to)? {
            return Ok(false);
        }
        self.publish(&image_path(pool, name), to, Publish::Replace)?;
        if self.root.join(removed_path(image.volume)).exists() {
            // A program of an older release removed it meanwhile: the file is back.
            self.remove(&image_path(pool, name))?;
            return Err(missing());
        }
        Ok(true)
    }

    pub(super) fn rename_image_record(
        &self,
        pool: &str,
        name: &str,
        to: &str,
        known: Option<&ImageEntry>,
    ) -> Result<(), MapError> {
        let _names = self.lock_names(FlockOperation::LockExclusive)?;
        let missing = || MapError::Missing(format!("image {pool}/{name}"));
        let (_, image) = self.image_to_change(pool, name)?;
        image.check_known(known, pool, name)?;
        self.free_removed_name(pool, to)?;
        let paths = [name, to].map(|name| image_path(pool, name));
        paths.iter().try_for_each(|path| self.count_change(path))?;
        let [from, to_path] = paths.map(|path| self.root.join(path));
        match rustix::fs::renameat_with(CWD, &from, CWD, &to_path, RenameFlags::NOREPLACE) {
            Ok(()) => sync_directory(from.parent().unwrap_or(&self.root)),
            Err(Errno::EXIST) => Err(MapError::Exists(format!("image {pool}/{to}"))),
            Err(Errno::NOENT) => Err(missing()),
            Err(error) => Err(failed(&from, &error.into())),
        }
    }

    pub(super) fn remove_image_record(
        &self,
        pool: &str,
        name: &str,
        known: Option<&ImageEntry>,
    ) -> Result<RemovedImage, MapError> {
        let _names = self.lock_names(FlockOperation::LockExclusive)?;
        let missing = || MapError::Missing(format!("image {pool}/{name}"));
        let (_, image) = self.image_to_change(pool, name)?;
        image.check_known(known, pool, name)?;
        image.check_unprotected(pool, name)?;
        let volume = image.volume;
        let removed = RemovedImage::new(pool, name, image);
        // From here on there is no such image.
        if !self.publish(&removed_path(volume), &removed, Publish::New)? {
            return Err(missing());
        }
        self.remove(&image_path(pool, name))?;
        Ok(removed)
    }

    /// A removal that was interrupted keeps its name from no other image.
    pub(super) fn free_removed_name(&self, pool: &str, name: &str) -> Result<(), MapError> {
        let path = image_path(pool, name);
        if let Some(image) = self.read::<ImageEntry>(&path)?
            && self.is_removed(&self.found_image(image)?)
        {
            self.remove(&path)?;
        }
        Ok(())
    }

    pub(super) fn all_removed(&self) -> Result<BTreeMap<u64, RemovedImage>, MapError> {
        let mut removed = BTreeMap::new();
        for name in self.names(Path::new("removed-images"))? {
            if let Ok(volume) = name.parse()
                && let Some(record) = self.read(&removed_path(volume))?
            {
                removed.insert(volume, record);
            }
        }
        Ok(removed)
    }

    pub(super) fn forget_removed(&self, removed: &RemovedImage) -> Result<(), MapError> {
        let _names = self.lock_names(FlockOperation::LockExclusive)?;
        let volume = removed.image.volume;
        let path = image_path(&removed.pool, &removed.name);
        // A removal that was interrupted has left it. It may be that of a later image.
        if let Some(image) = self.read::<ImageEntry>(&path)?
            && self.found_image(image)?.heads.contains(&volume)
        {
            self.remove(&path)?;
        }
        self.complete_changes(volume)?;
        for directory in [size_directory(volume), lock_directory(volume)] {
            let path = self.root.join(directory);
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(&path, &error)),
                _ => {}
            }
        }
        self.remove(&removed_path(volume)).map(drop)
    }

    /// Replaces the file of an image that leads to its newest head through this volume, under the lock of
    /// names. Without the directory of the volume the image would be as it was before.
    fn complete_changes(&self, volume: u64) -> Result<(), MapError> {
        if !self.root.join(size_directory(volume)).exists() {
            return Ok(());
        }
        for file in self.names(Path::new("images"))?.iter().filter(|file| file.contains('.')) {
            let path = Path::new("images").join(file);
            let Some(created) = self.read::<ImageEntry>(&path)? else { continue };
            let found = self.found_image(created)?;
            if found.image.volume != volume && found.heads.contains(&volume) {
                self.publish(&path, &found.image, Publish::Replace)?;
            }
        }
        Ok(())
    }

    /// Renews a lease: the time of its file is now.
    pub(super) fn renew_file(&self, name: &Path, seconds: u32) -> Result<(), MapError> {
        let path = self.root.join(name);
        let renewed = File::options().write(true).open(&path);
        match renewed.and_then(|file| file.set_modified(SystemTime::now())) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.publish(name, &seconds, Publish::Replace).map(drop)
            }
            renewed => renewed.map_err(|error| failed(&path, &error)),
        }
    }

    /// When a lease was renewed; `None` if it has ended.
    pub(super) fn age_of(&self, name: &Path) -> Result<Option<Duration>, MapError> {
        let Some(seconds) = self.read::<u32>(name)? else { return Ok(None) };
        let renewed = fs::metadata(self.root.join(name)).and_then(|file| file.modified());
        // A time in the future is a clock that was set.
        let age = renewed.map(|renewed| renewed.elapsed().unwrap_or_default()).ok();
        Ok(age.filter(|age| age.as_secs() < seconds.into()))
    }
}
