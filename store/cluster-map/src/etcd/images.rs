//! Images of a map in etcd, and who has them attached.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::messages::{GrantAnswer, RenewAnswer, StreamLine, base64, put, put_if, revision_is, version_is};
use super::{ATTEMPTS_MAX, EtcdMap, busy, decode, encode};
use crate::{ImageEntry, ImageLock, MapError, RemovedImage};

/// Who has the image of a volume attached. Apart from the image, whose record clients need not write.
pub(super) fn lock_name(pool: &str, volume: u64) -> String {
    format!("attached/{pool}/{volume}")
}

fn removed_name(pool: &str, volume: u64) -> String {
    format!("removed-images/{pool}/{volume}")
}

/// The lease of a process: what etcd says how long it lasts.
#[derive(Serialize, Deserialize)]
struct HolderRecord {
    lease: String,
}

impl EtcdMap {
    pub(super) fn change_image_record(
        &self,
        pool: &str,
        name: &str,
        known: &ImageEntry,
        to: &ImageEntry,
    ) -> Result<bool, MapError> {
        let missing = || MapError::Missing(format!("image {pool}/{name}"));
        let key = self.key(&format!("images/{pool}/{name}"));
        let found = self.client.get(&key)?.ok_or_else(missing)?;
        let image: ImageEntry = decode(name, &found)?;
        if image != *known {
            return Ok(image == *to);
        }
        let answer = self.transaction(&put_if(&revision_is(&key, found.mod_revision), &key, &encode(to)))?;
        if answer.succeeded {
            return Ok(true);
        }
        // Others changed it, or the answer of an attempt was lost.
        let found = answer.into_record().ok_or_else(missing)?;
        Ok(decode::<ImageEntry>(name, &found)? == *to)
    }

    pub(super) fn rename_image_record(
        &self,
        pool: &str,
        name: &str,
        to: &str,
        known: Option<&ImageEntry>,
    ) -> Result<(), MapError> {
        let missing = || MapError::Missing(format!("image {pool}/{name}"));
        let [key, new] = [name, to].map(|name| self.key(&format!("images/{pool}/{name}")));
        let mut found = self.client.get(&key)?.ok_or_else(missing)?;
        for _ in 0..ATTEMPTS_MAX {
            let image: ImageEntry = decode(name, &found)?;
            image.check_known(known, pool, name)?;
            let request = json!({
                "compare": [revision_is(&key, found.mod_revision), version_is(&new, 0)],
                "success": [
                    { "request_delete_range": { "key": base64(&key) } },
                    { "request_put": put(&new, &encode(&image)) },
                ],
                "failure": [{ "request_range": { "key": base64(&key) } }],
            });
            let answer = self.transaction(&request)?;
            if answer.succeeded {
                return Ok(());
            }
            let there = self.client.get(&new)?.map(|found| decode::<ImageEntry>(to, &found)).transpose()?;
            match (answer.into_record(), there) {
                // The answer of an attempt was lost.
                (None, Some(there)) if there.volume == image.volume => return Ok(()),
                (None, _) => return Err(missing()),
                (Some(_), Some(_)) => return Err(MapError::Exists(format!("image {pool}/{to}"))),
                (Some(other), None) => found = other,
            }
        }
        Err(busy(name))
    }

    pub(super) fn remove_image_record(
        &self,
        pool: &str,
        name: &str,
        known: Option<&ImageEntry>,
    ) -> Result<RemovedImage, MapError> {
        let missing = || MapError::Missing(format!("image {pool}/{name}"));
        let key = self.key(&format!("images/{pool}/{name}"));
        let mut found = self.client.get(&key)?.ok_or_else(missing)?;
        for _ in 0..ATTEMPTS_MAX {
            let image: ImageEntry = decode(name, &found)?;
            image.check_known(known, pool, name)?;
            image.check_unprotected(pool, name)?;
            let removed = RemovedImage::new(pool, name, image);
            let to = self.key(&removed_name(pool, removed.image.volume));
            let request = json!({
                "compare": [revision_is(&key, found.mod_revision)],
                "success": [
                    { "request_delete_range": { "key": base64(&key) } },
                    { "request_put": put(&to, &encode(&removed)) },
                ],
                "failure": [{ "request_range": { "key": base64(&key) } }],
            });
            let answer = self.transaction(&request)?;
            if answer.succeeded {
                return Ok(removed);
            }
            match answer.into_record() {
                Some(other) => found = other,
                // It is gone: the answer of an attempt was lost, or others removed it.
                None if self.client.get(&to)?.is_some() => return Ok(removed),
                None => return Err(missing()),
            }
        }
        Err(busy(name))
    }

    pub(super) fn forget_removed(&self, removed: &RemovedImage) -> Result<(), MapError> {
        let volume = removed.image.volume;
        self.delete(&lock_name(&removed.pool, volume))?;
        self.delete(&removed_name(&removed.pool, volume)).map(drop)
    }

    pub(super) fn change_lock(
        &self,
        pool: &str,
        volume: u64,
        known: Option<&ImageLock>,
        to: &ImageLock,
    ) -> Result<bool, MapError> {
        let name = lock_name(pool, volume);
        let key = self.key(&name);
        let found = self.client.get(&key)?;
        let lock = found.as_ref().map(|found| decode::<ImageLock>(&name, found)).transpose()?;
        if lock.as_ref() != known {
            return Ok(lock.as_ref() == Some(to));
        }
        let compare =
            found.map_or_else(|| version_is(&key, 0), |found| revision_is(&key, found.mod_revision));
        let answer = self.transaction(&put_if(&compare, &key, &encode(to)))?;
        if answer.succeeded {
            return Ok(true);
        }
        // Others changed it, or the answer of an attempt was lost.
        let found = answer.into_record().map(|found| decode::<ImageLock>(&name, &found)).transpose()?;
        Ok(found.as_ref() == Some(to))
    }

    pub(super) fn renew_holder_lease(&self, holder: Uuid, seconds: u32) -> Result<(), MapError> {
        let known = sync::lock(&self.holders).get(&holder).copied();
        if let Some(id) = known {
            let request = json!({ "ID": id.to_string() });
            let answer: StreamLine<RenewAnswer> = self.client.post("/v3/lease/keepalive", &request)?;
            if answer.result.is_some_and(|answer| answer.seconds > 0) {
                return Ok(());
            }
        }
        let answer: GrantAnswer =
            self.client.post("/v3/lease/grant", &json!({ "TTL": seconds.to_string() }))?;
        let record = HolderRecord { lease: answer.id.to_string() };
        let mut request = put(&self.key(&format!("image-holders/{holder}")), &encode(&record));
        request["lease"] = answer.id.to_string().into();
        self.client.post::<Value>("/v3/kv/put", &request)?;
        sync::lock(&self.holders).insert(holder, answer.id);
        Ok(())
    }

    pub(super) fn age_of_holder(&self, holder: Uuid) -> Result<Option<Duration>, MapError> {
        let Some(record) = self.get::<HolderRecord>(&format!("image-holders/{holder}"))? else {
            return Ok(None);
        };
        let answer: RenewAnswer = self.client.post("/v3/lease/timetolive", &json!({ "ID": record.lease }))?;
        let left = answer.seconds.max(0);
        let age = answer.granted_seconds.saturating_sub(left);
        Ok((left > 0).then(|| Duration::from_secs(age.try_into().unwrap_or(0))))
    }
}
