//! Changes of pools in a directory.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;

use super::{LocalMap, Publish, failed, file_name, image_path, plain_name, sync_directory};
use crate::checks::{check_pool_change, check_pool_rename, check_unattached};
use crate::{ClusterMap, ImageEntry, MapError, PoolRecord};

fn pool_path(name: &str) -> PathBuf {
    Path::new("pools").join(file_name(name))
}

impl LocalMap {
    pub(super) fn change_pool_record(
        &self,
        name: &str,
        known: &PoolRecord,
        to: &PoolRecord,
    ) -> Result<bool, MapError> {
        check_pool_change(name, known, to)?;
        // Of two changes at a time the second one sees the first.
        let _names = self.lock_names(FlockOperation::LockExclusive)?;
        let missing = || MapError::Missing(format!("pool {name}"));
        let found: PoolRecord = self.read(&pool_path(name))?.ok_or_else(missing)?;
        Ok(found == *known && self.publish(&pool_path(name), to, Publish::Replace)?)
    }

    /// While images move, this has the lock of their names: none is made, changed or listed. Who attaches one
    /// at the same time looks for it again afterwards.
    pub(super) fn rename_pool_record(&self, name: &str, to: &str) -> Result<(), MapError> {
        let pool = check_pool_rename(self, name, to)?;
        let _names = self.lock_names(FlockOperation::LockExclusive)?;
        let images = self.images_of(name)?;
        for (image, volume) in &images {
            check_unattached(self, (name, image), *volume)?;
        }
        // Both names are the same pool until the images have moved: what is interrupted here goes on when it
        // is repeated.
        self.publish(&pool_path(to), &pool, Publish::New)?;
        for (image, _) in images {
            let paths = [name, to].map(|pool| image_path(pool, &image));
            paths.iter().try_for_each(|path| self.count_change(path))?;
            let [from, into] = paths.map(|path| self.root.join(path));
            match rustix::fs::renameat_with(CWD, &from, CWD, &into, RenameFlags::NOREPLACE) {
                Ok(()) => {}
                Err(Errno::EXIST) => return Err(MapError::Exists(format!("image {to}/{image}"))),
                Err(error) => return Err(failed(&from, &error.into())),
            }
        }
        sync_directory(&self.root.join("images"))?;
        self.remove(&pool_path(name)).map(drop)
    }

    /// The images of a pool with their volumes.
    fn images_of(&self, pool: &str) -> Result<Vec<(String, u64)>, MapError> {
        let mut images = Vec::new();
        for file in self.names(Path::new("images"))? {
            let Some((of, image)) = file.split_once('.') else { continue };
            if plain_name(of).as_deref() == Some(pool)
                && let Some(image) = plain_name(image)
                && let Some(entry) = self.read::<ImageEntry>(&image_path(pool, &image))?
            {
                images.push((image, self.newest_image(entry)?.volume));
            }
        }
        Ok(images)
    }

    /// Whether a pool has this name, under the lock of names.
    pub(super) fn has_pool(&self, name: &str) -> Result<bool, MapError> {
        Ok(self.pools()?.contains_key(name))
    }
}
