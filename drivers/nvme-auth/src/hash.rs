//! The hash functions, keyed and not.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256, Sha384, Sha512};
use wire_nvme::auth::AuthHash;
use zeroize::Zeroizing;

/// A value of a hash function, which is wiped.
pub(crate) type HashValue = Zeroizing<Vec<u8>>;

/// HMAC of the parts, one behind the other.
pub(crate) fn hmac(hash: AuthHash, key: &[u8], parts: &[&[u8]]) -> HashValue {
    fn of<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> HashValue {
        let mut mac = <M as KeyInit>::new_from_slice(key).expect("HMAC takes keys of any length");
        parts.iter().for_each(|part| mac.update(part));
        Zeroizing::new(mac.finalize().into_bytes().to_vec())
    }
    match hash {
        AuthHash::Sha256 => of::<Hmac<Sha256>>(key, parts),
        AuthHash::Sha384 => of::<Hmac<Sha384>>(key, parts),
        AuthHash::Sha512 => of::<Hmac<Sha512>>(key, parts),
    }
}

/// The value of a hash function.
pub(crate) fn digest(hash: AuthHash, bytes: &[u8]) -> HashValue {
    Zeroizing::new(match hash {
        AuthHash::Sha256 => Sha256::digest(bytes).to_vec(),
        AuthHash::Sha384 => Sha384::digest(bytes).to_vec(),
        AuthHash::Sha512 => Sha512::digest(bytes).to_vec(),
    })
}

/// Whether a hash function can be that of a PSK of TLS: those of the cipher suites alone (TCP 1.0, section
/// 3.6.1.2).
pub(crate) fn is_hash_of_tls(hash: AuthHash) -> bool {
    hash != AuthHash::Sha512
}
