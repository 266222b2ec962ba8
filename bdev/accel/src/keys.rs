//! The keys of a program, by name.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::{CryptoKey, CryptoKeyError};

/// Most keys: one for each of as many devices as there can be on others.
const KEYS_MAX: usize = 1 << 16;

/// The keys, in the order in which they were added.
///
/// What uses a key has a clone of its `Arc`, which is counted: a key in use is not removed.
#[derive(Default)]
pub struct CryptoKeys(Mutex<Vec<Arc<CryptoKey>>>);

impl CryptoKeys {
    /// Adds a key.
    ///
    /// # Errors
    /// [`CryptoKeyError::Exists`]; [`CryptoKeyError::TooMany`].
    pub fn add(&self, key: CryptoKey) -> Result<Arc<CryptoKey>, CryptoKeyError> {
        let mut keys = self.lock();
        if keys.iter().any(|one| one.name() == key.name()) {
            return Err(CryptoKeyError::Exists(key.name().to_string()));
        }
        if keys.len() >= KEYS_MAX {
            return Err(CryptoKeyError::TooMany(KEYS_MAX));
        }
        let key = Arc::new(key);
        keys.push(key.clone());
        Ok(key)
    }

    /// A key, for as long as something is to use it.
    pub fn get(&self, name: &str) -> Option<Arc<CryptoKey>> {
        self.lock().iter().find(|key| key.name() == name).cloned()
    }

    /// All keys.
    pub fn list(&self) -> Vec<Arc<CryptoKey>> {
        self.lock().clone()
    }

    /// Removes a key, which is wiped.
    ///
    /// # Errors
    /// [`CryptoKeyError::NotFound`]; [`CryptoKeyError::InUse`].
    pub fn remove(&self, name: &str) -> Result<(), CryptoKeyError> {
        let mut keys = self.lock();
        let place = keys.iter().position(|key| key.name() == name);
        let place = place.ok_or_else(|| CryptoKeyError::NotFound(name.to_string()))?;
        // New references come from the list, which is locked.
        match Arc::strong_count(&keys[place]) - 1 {
            0 => drop(keys.remove(place)),
            users => return Err(CryptoKeyError::InUse { name: name.to_string(), users }),
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<CryptoKey>>> {
        sync::lock(&self.0)
    }
}
