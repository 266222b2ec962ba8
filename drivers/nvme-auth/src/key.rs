//! Secrets of hosts and controllers, in the representation that nvme-cli generates.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use secret::Secret;
use wire_nvme::auth::AuthHash;
use zeroize::Zeroizing;

use crate::hash::{HashValue, hmac};

/// Most bytes of the representation: 68 bytes in base64, the prefix and the last colon.
pub(crate) const TEXT_MAX: usize = 128;

/// The secret of a host or a controller: `DHHC-1:0T:BASE64:`, where T is the hash function that transforms it (0 for
/// none) and BASE64 the secret and its CRC-32 (Base 2.0, section 8.13.5.9).
///
/// It is not printed, compares in constant time and is wiped with its last clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthKey {
    hash: Option<AuthHash>,
    secret: Secret,
}

/// The keys of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthKeys {
    /// The host proves that it has this.
    pub host: AuthKey,
    /// The controller proves that it has this; `None` if it need not.
    pub controller: Option<AuthKey>,
}

/// Why text is not a key. No text has a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthKeyError {
    /// Another representation.
    #[error("a key has the form DHHC-1:0T:BASE64: with T from 0 to 3; `nvme gen-dhchap-key` makes one")]
    Format,
    /// Not base64.
    #[error("the key is not in base64")]
    Base64,
    /// Of another length.
    #[error(
        "the key has {0} bytes; 32, 48 and 64 are possible, and as many as the values of its hash function have"
    )]
    Length(usize),
    /// The CRC-32 does not match: it was copied wrongly.
    #[error("the checksum of the key does not match: it was not copied as a whole")]
    Checksum,
}

impl AuthKey {
    /// A key of these bytes.
    ///
    /// # Errors
    /// They are not 32, 48 or 64, or not as many as the hash function's values have.
    pub fn new(hash: Option<AuthHash>, secret: &[u8]) -> Result<AuthKey, AuthKeyError> {
        let fits = match hash {
            Some(hash) => hash.bytes() == secret.len(),
            None => matches!(secret.len(), 32 | 48 | 64),
        };
        match fits {
            true => Ok(AuthKey { hash, secret: Secret::new(secret) }),
            false => Err(AuthKeyError::Length(secret.len())),
        }
    }

    /// Parses the representation. White space at the end is ignored: a line end of its file.
    ///
    /// # Errors
    /// [`AuthKeyError`].
    pub fn parse(text: &str) -> Result<AuthKey, AuthKeyError> {
        let text = text.trim_end();
        if text.len() > TEXT_MAX {
            return Err(AuthKeyError::Format);
        }
        let rest = text.strip_prefix("DHHC-1:").ok_or(AuthKeyError::Format)?;
        let (kind, rest) = rest.split_once(':').ok_or(AuthKeyError::Format)?;
        let encoded = rest.strip_suffix(':').ok_or(AuthKeyError::Format)?;
        let hash = match kind {
            "00" => None,
            "01" => Some(AuthHash::Sha256),
            "02" => Some(AuthHash::Sha384),
            "03" => Some(AuthHash::Sha512),
            _ => return Err(AuthKeyError::Format),
        };
        let bytes = Zeroizing::new(STANDARD.decode(encoded).map_err(|_| AuthKeyError::Base64)?);
        let (key, crc) = bytes.split_last_chunk::<4>().ok_or(AuthKeyError::Length(0))?;
        let parsed = AuthKey::new(hash, key)?;
        if codec::crc32(key).to_le_bytes() != *crc {
            return Err(AuthKeyError::Checksum);
        }
        Ok(parsed)
    }

    /// Parses the contents of a file, or of a key of the keyring.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn of_secret(secret: &Secret) -> Result<AuthKey, AuthKeyError> {
        AuthKey::parse(secret.reveal_text().ok_or(AuthKeyError::Format)?)
    }

    /// The representation.
    pub fn to_text(&self) -> Secret {
        let secret = self.secret.reveal();
        let bytes = Zeroizing::new([secret, &codec::crc32(secret).to_le_bytes()].concat());
        let kind = self.hash.map_or(0, AuthHash::to_wire);
        let encoded = Zeroizing::new(STANDARD.encode(&*bytes));
        Secret::new(format!("DHHC-1:{kind:02}:{}:", encoded.as_str()))
    }

    /// The transformed key (Base 2.0, section 8.13.5.9) of the host or subsystem of this name.
    pub(crate) fn transformed(&self, nqn: &str) -> HashValue {
        let secret = self.secret.reveal();
        match self.hash {
            Some(hash) => hmac(hash, secret, &[nqn.as_bytes(), b"NVMe-over-Fabrics"]),
            None => Zeroizing::new(secret.to_vec()),
        }
    }
}
