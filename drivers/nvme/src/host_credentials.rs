//! With which keys a host authenticates.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nvme_auth::{AuthKeys, AuthOptions};

/// How a host authenticates with DH-HMAC-CHAP, and what it accepts of a controller. Clones share the keys:
/// new ones ([`set_keys`](Self::set_keys)) are used by every queue that is connected from then on, and by
/// those that authenticate anew.
#[derive(Clone)]
pub struct HostCredentials {
    keys: Arc<Mutex<Option<AuthKeys>>>,
    /// Changes with the keys.
    generation: Arc<AtomicU64>,
    options: Arc<AuthOptions>,
}

impl HostCredentials {
    /// With these keys, or none for now, and the hash functions and groups of `options`.
    pub fn new(keys: Option<AuthKeys>, options: AuthOptions) -> HostCredentials {
        let (keys, generation) = (Arc::new(Mutex::new(keys)), Arc::default());
        HostCredentials { keys, generation, options: Arc::new(options) }
    }

    /// Replaces the keys, of all clones. Queues that are connected authenticate anew after
    /// [`Association::reauthenticate`](crate::fabrics::Association::reauthenticate), and stay as they are
    /// without.
    pub fn set_keys(&self, keys: Option<AuthKeys>) {
        let mut current = sync::lock(&self.keys);
        *current = keys;
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Another number after each change of the keys. Who reads it before the keys has at least the keys of
    /// this number.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The keys of now.
    pub(crate) fn keys(&self) -> Option<AuthKeys> {
        sync::lock(&self.keys).clone()
    }

    /// The hash functions and groups that are accepted.
    pub(crate) fn options(&self) -> &AuthOptions {
        &self.options
    }
}

impl fmt::Debug for HostCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("HostCredentials")
    }
}
