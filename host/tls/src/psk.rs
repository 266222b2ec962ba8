//! Pre-shared keys.

use std::collections::HashMap;

use secret::Secret;

/// The hash function of a key, which decides the cipher suite (RFC 8446, section 4.2.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PskHash {
    /// SHA-256: TLS_AES_128_GCM_SHA256.
    Sha256,
    /// SHA-384: TLS_AES_256_GCM_SHA384.
    Sha384,
}

impl PskHash {
    /// Bytes of its values: 32 or 48. Derived keys have as many.
    pub fn bytes(self) -> usize {
        match self {
            PskHash::Sha256 => 32,
            PskHash::Sha384 => 48,
        }
    }

    /// The name of its suite, terminated.
    pub(crate) fn suite(self) -> &'static std::ffi::CStr {
        match self {
            PskHash::Sha256 => c"TLS_AES_128_GCM_SHA256",
            PskHash::Sha384 => c"TLS_AES_256_GCM_SHA384",
        }
    }

    /// The number of its suite (RFC 8446, appendix B.4).
    pub(crate) fn suite_bytes(self) -> [u8; 2] {
        match self {
            PskHash::Sha256 => [0x13, 0x01],
            PskHash::Sha384 => [0x13, 0x02],
        }
    }
}

/// A key that both ends were given, and the identity by which a client names it. Clones share the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Psk {
    identity: String,
    key: Secret,
    hash: PskHash,
}

/// Bytes of a key: a shorter one can be guessed, and none of our protocols has a longer one.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 16..=64;

/// Most bytes of an identity. Two NVMe qualified names and a digest have fewer than 550.
pub(crate) const IDENTITY_MAX: usize = 1024;

impl Psk {
    /// A key. `None` unless it has 16 to 64 bytes, and the identity 1 to 1024.
    pub fn new(identity: impl Into<String>, key: Secret, hash: PskHash) -> Option<Psk> {
        let identity = identity.into();
        let fits = KEY_BYTES.contains(&key.reveal().len()) && (1..=IDENTITY_MAX).contains(&identity.len());
        fits.then_some(Psk { identity, key, hash })
    }

    /// The identity.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The hash function.
    pub fn hash(&self) -> PskHash {
        self.hash
    }

    pub(crate) fn key(&self) -> &[u8] {
        self.key.reveal()
    }
}

/// Where a server looks keys up. Called while a client's first message is processed; it must not block or
/// panic.
pub trait PskSource: Send + Sync + 'static {
    /// The key with this identity.
    fn find(&self, identity: &str) -> Option<Psk>;
}

impl PskSource for HashMap<String, Psk> {
    fn find(&self, identity: &str) -> Option<Psk> {
        self.get(identity).cloned()
    }
}

impl PskSource for Vec<Psk> {
    fn find(&self, identity: &str) -> Option<Psk> {
        self.iter().find(|psk| psk.identity == identity).cloned()
    }
}
