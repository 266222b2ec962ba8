//! With which keys a host authenticates.

use std::fmt;
use std::sync::{Arc, Mutex};

use nvme_auth::{AuthKeys, AuthOptions};

/// How a host authenticates with DH-HMAC-CHAP, and what it accepts of a controller. Clones share the keys:
/// new ones ([`set_keys`](Self::set_keys)) are used by every queue that is connected from then on.
#[derive(Clone)]
pub struct HostCredentials {
    keys: Arc<Mutex<Option<AuthKeys>>>,
    options: Arc<AuthOptions>,
}

impl HostCredentials {
    /// With these keys, or none for now, and the hash functions and groups of `options`.
    pub fn new(keys: Option<AuthKeys>, options: AuthOptions) -> HostCredentials {
        HostCredentials { keys: Arc::new(Mutex::new(keys)), options: Arc::new(options) }
    }

    /// Replaces the keys, of all clones.
    pub fn set_keys(&self, keys: Option<AuthKeys>) {
        *sync::lock(&self.keys) = keys;
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
