//! Changes of pools in etcd.

use serde_json::{Value, json};

use super::images::lock_name;
use super::messages::{base64, end_of_prefix, put, put_if, revision_is, version_is};
use super::{ATTEMPTS_MAX, EtcdMap, busy, decode, encode};
use crate::checks::{check_pool_change, check_pool_rename};
use crate::{ImageEntry, ImageLock, MapError, PoolRecord};

impl EtcdMap {
    pub(super) fn change_pool_record(
        &self,
        name: &str,
        known: &PoolRecord,
        to: &PoolRecord,
    ) -> Result<bool, MapError> {
        check_pool_change(name, known, to)?;
        let key = self.key(&format!("pools/{name}"));
        let found = self.client.get(&key)?.ok_or_else(|| MapError::Missing(format!("pool {name}")))?;
        let pool: PoolRecord = decode(name, &found)?;
        if pool != *known {
            return Ok(pool == *to);
        }
        let answer = self.transaction(&put_if(&revision_is(&key, found.mod_revision), &key, &encode(to)))?;
        // Others changed it, or the answer of an attempt was lost.
        let is_there =
            || Ok::<_, MapError>(self.get::<PoolRecord>(&format!("pools/{name}"))?.as_ref() == Some(to));
        Ok(answer.succeeded || is_there()?)
    }

    /// Both names are the same pool until all images have moved, one in a transaction each: what is
    /// interrupted here goes on when it is repeated.
    pub(super) fn rename_pool_record(&self, name: &str, to: &str) -> Result<(), MapError> {
        let pool = check_pool_rename(self, name, to)?;
        let [old, new] = [name, to].map(|pool| self.key(&format!("pools/{pool}")));
        // None if an earlier attempt has put it.
        self.transaction(&put_if(&version_is(&new, 0), &new, &encode(&pool)))?;
        for _ in 0..ATTEMPTS_MAX {
            check_pool_rename(self, name, to)?;
            for (image, entry) in self.list::<ImageEntry>(&format!("images/{name}/"))? {
                self.move_image(&image, &entry, name, to)?;
            }
            let Some(found) = self.client.get(&old)? else { return Ok(()) };
            let images = self.key(&format!("images/{name}/"));
            let locks = self.key(&format!("attached/{name}/"));
            let range =
                |prefix: &str| json!({ "key": base64(prefix), "range_end": base64(end_of_prefix(prefix)) });
            let mut no_images = range(&images);
            no_images["target"] = "VERSION".into();
            no_images["result"] = "EQUAL".into();
            no_images["version"] = "0".into();
            let request = json!({
                "compare": [revision_is(&old, found.mod_revision), no_images],
                "success": [
                    { "request_delete_range": { "key": base64(&old) } },
                    { "request_delete_range": range(&locks) },
                ],
            });
            if self.transaction(&request)?.succeeded {
                return Ok(());
            }
        }
        Err(busy(name))
    }

    /// Moves an image that no client has attached. Who attaches it at the same time finds that it is gone;
    /// its attach epoch goes with it.
    fn move_image(&self, name: &str, entry: &ImageEntry, pool: &str, to: &str) -> Result<(), MapError> {
        let [old, new] = [pool, to].map(|pool| self.key(&format!("images/{pool}/{name}")));
        let [old_lock, new_lock] = [pool, to].map(|pool| self.key(&lock_name(pool, entry.volume)));
        let (Some(image), lock) = (self.client.get(&old)?, self.client.get(&old_lock)?) else {
            return Ok(());
        };
        let mut compare = vec![revision_is(&old, image.mod_revision), version_is(&new, 0)];
        compare.push(match &lock {
            Some(lock) => revision_is(&old_lock, lock.mod_revision),
            None => version_is(&old_lock, 0),
        });
        let mut success: Vec<Value> = vec![
            json!({ "request_delete_range": { "key": base64(&old) } }),
            json!({ "request_put": put(&new, &image.value) }),
        ];
        if let Some(lock) = lock {
            let lock: ImageLock = decode(name, &lock)?;
            // Those that had it are gone: that was checked.
            let lock = ImageLock { holders: Vec::new(), ..lock };
            success.push(json!({ "request_delete_range": { "key": base64(&old_lock) } }));
            success.push(json!({ "request_put": put(&new_lock, &encode(&lock)) }));
        }
        // What changed meanwhile is read again.
        if self.transaction(&json!({ "compare": compare, "success": success }))?.succeeded {
            return Ok(());
        }
        match self.client.get(&new)?.map(|found| decode::<ImageEntry>(name, &found)).transpose()? {
            Some(there) if there.volume != entry.volume => {
                Err(MapError::Exists(format!("image {to}/{name}")))
            }
            _ => Ok(()),
        }
    }
}
