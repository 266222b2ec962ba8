//! Pre-shared keys of TLS, in the representation that nvme-cli generates, and the keys that a connection
//! derives.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use secret::Secret;
use wire_nvme::auth::AuthHash;
use zeroize::Zeroizing;

use crate::hash::{HashValue, hmac, is_hash_of_tls};
use crate::key::TEXT_MAX;
use crate::nonces::{NoRandomness, Nonces, SystemNonces};

/// A configured PSK: `NVMeTLSkey-1:HH:BASE64:`, where HH is the hash function that makes the retained PSK of
/// it (01 SHA-256, 02 SHA-384, 00 none), and BASE64 the key of 32 or 48 bytes with its CRC-32 (TCP 1.0,
/// section 3.6.1.5).
///
/// It is not printed, compares in constant time and is wiped with its last clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsKey {
    /// `None`: the configured PSK is the retained one.
    transform: Option<AuthHash>,
    /// The hash function of the TLS PSK, which decides the cipher suite.
    hash: AuthHash,
    configured: Secret,
}

/// Why text is not a configured PSK. No text has a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsKeyError {
    /// Another representation.
    #[error("a key has the form NVMeTLSkey-1:HH:BASE64: with HH 00, 01 or 02; `nvme gen-tls-key` makes one")]
    Format,
    /// Not base64.
    #[error("the key is not in base64")]
    Base64,
    /// Of another length.
    #[error("the key has {0} bytes; 32 are possible with 00 and 01, 48 with 00 and 02")]
    Length(usize),
    /// The CRC-32 does not match: it was copied wrongly.
    #[error("the checksum of the key does not match: it was not copied as a whole")]
    Checksum,
}

/// How keys are derived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsDerivation {
    /// As the specification says: HKDF-Expand-Label of RFC 8446, section 7.1.
    #[default]
    Specified,
    /// As libnvme did until July 2025: the length is in little-endian, and label and context have no byte of
    /// their length before them. Hosts with nvme-cli 2.13 and older derive so.
    Libnvme,
}

/// The version of an identity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsIdentityVersion {
    /// `NVMe0R01 HOSTNQN SUBNQN`.
    Zero,
    /// `NVMe1R01 HOSTNQN SUBNQN DIGEST`, where the digest is one of the retained PSK.
    #[default]
    One,
}

/// What TLS uses of a configured or generated PSK, for one host and one subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPsk {
    /// The identity, as ClientHello has it.
    pub identity: String,
    /// The TLS PSK: as many bytes as the hash function's values.
    pub key: Secret,
    /// The hash function: SHA-256 or SHA-384.
    pub hash: AuthHash,
    /// How it was derived.
    pub derivation: TlsDerivation,
}

impl TlsKey {
    /// A configured PSK of these bytes, of which the retained one is made with a hash function.
    ///
    /// # Errors
    /// They are not 32 or 48, or not as many as the hash function's values have.
    pub fn new(transform: Option<AuthHash>, configured: &[u8]) -> Result<TlsKey, TlsKeyError> {
        let hash = match (configured.len(), transform) {
            (32, None | Some(AuthHash::Sha256)) => AuthHash::Sha256,
            (48, None | Some(AuthHash::Sha384)) => AuthHash::Sha384,
            (length, _) => return Err(TlsKeyError::Length(length)),
        };
        Ok(TlsKey { transform, hash, configured: Secret::new(configured) })
    }

    /// A new key of 32 random bytes, of which SHA-256 makes the retained one.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate() -> Result<TlsKey, NoRandomness> {
        let mut bytes = Zeroizing::new([0; 32]);
        SystemNonces.fill(&mut bytes[..])?;
        let configured = Secret::new(&bytes[..]);
        Ok(TlsKey { transform: Some(AuthHash::Sha256), hash: AuthHash::Sha256, configured })
    }

    /// Parses the representation. White space at the end is ignored: a line end of its file.
    ///
    /// # Errors
    /// [`TlsKeyError`].
    pub fn parse(text: &str) -> Result<TlsKey, TlsKeyError> {
        let text = text.trim_end();
        if text.len() > TEXT_MAX {
            return Err(TlsKeyError::Format);
        }
        let rest = text.strip_prefix("NVMeTLSkey-1:").ok_or(TlsKeyError::Format)?;
        let (kind, rest) = rest.split_once(':').ok_or(TlsKeyError::Format)?;
        let encoded = rest.strip_suffix(':').ok_or(TlsKeyError::Format)?;
        let transform = match kind {
            "00" => None,
            "01" => Some(AuthHash::Sha256),
            "02" => Some(AuthHash::Sha384),
            _ => return Err(TlsKeyError::Format),
        };
        let bytes = Zeroizing::new(STANDARD.decode(encoded).map_err(|_| TlsKeyError::Base64)?);
        let (key, crc) = bytes.split_last_chunk::<4>().ok_or(TlsKeyError::Length(0))?;
        let parsed = TlsKey::new(transform, key)?;
        if codec::crc32(key).to_le_bytes() != *crc {
            return Err(TlsKeyError::Checksum);
        }
        Ok(parsed)
    }

    /// Parses the contents of a file, or of a key of the keyring.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn of_secret(secret: &Secret) -> Result<TlsKey, TlsKeyError> {
        TlsKey::parse(secret.reveal_text().ok_or(TlsKeyError::Format)?)
    }

    /// The representation.
    pub fn to_text(&self) -> Secret {
        let key = self.configured.reveal();
        let bytes = Zeroizing::new([key, &codec::crc32(key).to_le_bytes()].concat());
        let kind = self.transform.map_or(0, AuthHash::to_wire);
        let encoded = Zeroizing::new(STANDARD.encode(&*bytes));
        Secret::new(format!("NVMeTLSkey-1:{kind:02}:{}:", encoded.as_str()))
    }

    /// The key and the identity that a host uses for a subsystem (TCP 1.0, sections 3.6.1.3 and 3.6.1.4).
    /// `None` if the identity is of version 0 and has more than 255 bytes, which no context of
    /// HKDF-Expand-Label may have.
    pub fn psk(
        &self,
        hostnqn: &str,
        subnqn: &str,
        version: TlsIdentityVersion,
        derivation: TlsDerivation,
    ) -> Option<TlsPsk> {
        let hash = self.hash;
        let retained = match self.transform {
            Some(transform) => {
                derivation.expand(transform, self.configured.reveal(), "HostNQN", hostnqn.as_bytes())
            }
            None => Zeroizing::new(self.configured.reveal().to_vec()),
        };
        let number = hash.to_wire();
        let (identity, context) = match version {
            TlsIdentityVersion::Zero => {
                let identity = format!("NVMe0R{number:02} {hostnqn} {subnqn}");
                (identity.clone(), identity)
            }
            TlsIdentityVersion::One => {
                let digest = psk_digest(hash, &retained, hostnqn, subnqn);
                let identity = format!("NVMe1R{number:02} {hostnqn} {subnqn} {digest}");
                (identity, format!("{number:02} {digest}"))
            }
        };
        if context.len() > usize::from(u8::MAX) {
            return None;
        }
        let key = derivation.expand(hash, &retained, "nvme-tls-psk", context.as_bytes());
        Some(TlsPsk { identity, key: Secret::new(&key[..]), hash, derivation })
    }
}

impl TlsPsk {
    /// The key and the identity of a generated PSK (Base 2.1, section 8.3.4.5.9; TCP 1.1, sections 3.6.1.3
    /// and 3.6.1.4): `NVMe1G01 HOSTNQN SUBNQN DIGEST`. `None` for SHA-512, which no cipher suite has.
    pub(crate) fn generated(hash: AuthHash, generated: &[u8], hostnqn: &str, subnqn: &str) -> Option<TlsPsk> {
        if !is_hash_of_tls(hash) {
            return None;
        }
        let derivation = TlsDerivation::Specified;
        let (number, digest) = (hash.to_wire(), psk_digest(hash, generated, hostnqn, subnqn));
        let identity = format!("NVMe1G{number:02} {hostnqn} {subnqn} {digest}");
        let context = format!("{number:02} {digest}");
        let key = derivation.expand(hash, generated, "nvme-tls-psk", context.as_bytes());
        Some(TlsPsk { identity, key: Secret::new(&key[..]), hash, derivation })
    }
}

/// The digest in an identity (TCP 1.0, section 3.6.1.3).
fn psk_digest(hash: AuthHash, psk: &[u8], hostnqn: &str, subnqn: &str) -> String {
    let names = [hostnqn.as_bytes(), b" ", subnqn.as_bytes(), b" NVMe-over-Fabrics"];
    STANDARD.encode(&*hmac(hash, psk, &names))
}

impl TlsKey {
    /// Every key that a host may use for a subsystem: by the specification with identities of both versions,
    /// and as libnvme derived it. Of two with one identity, by the specification.
    pub fn psks(&self, hostnqn: &str, subnqn: &str) -> Vec<TlsPsk> {
        let ways = [
            (TlsIdentityVersion::One, TlsDerivation::Specified),
            (TlsIdentityVersion::One, TlsDerivation::Libnvme),
            (TlsIdentityVersion::Zero, TlsDerivation::Specified),
        ];
        let mut psks: Vec<TlsPsk> = Vec::with_capacity(ways.len());
        for psk in ways.into_iter().filter_map(|(version, way)| self.psk(hostnqn, subnqn, version, way)) {
            if psks.iter().all(|one| one.identity != psk.identity) {
                psks.push(psk);
            }
        }
        psks
    }
}

impl TlsDerivation {
    /// HKDF-Expand-Label(HKDF-Extract(0, key), label, context) with as many bytes as the hash function's
    /// values, so that HKDF-Expand is one HMAC (RFC 5869, section 2.3).
    fn expand(self, hash: AuthHash, key: &[u8], label: &str, context: &[u8]) -> HashValue {
        let extracted = hmac(hash, &vec![0; hash.bytes()], &[key]);
        let length = hash.bytes() as u16;
        let label = [b"tls13 ", label.as_bytes()].concat();
        match self {
            TlsDerivation::Specified => {
                let (label_bytes, context_bytes) = ([label.len() as u8], [context.len() as u8]);
                let info = [&length.to_be_bytes()[..], &label_bytes, &label, &context_bytes, context, &[1]];
                hmac(hash, &extracted, &info)
            }
            TlsDerivation::Libnvme => hmac(hash, &extracted, &[&length.to_le_bytes(), &label, context, &[1]]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
    const SUBSYSTEM: &str = "nqn.2026-11.io.ringbolt:a";

    fn counting(bytes: u8) -> Vec<u8> {
        (0..bytes).collect()
    }

    /// The digest by libnvme is what nvme-cli 2.13 printed for this key.
    #[test]
    fn digests_of_both_derivations_are_those_of_others() {
        let key = TlsKey::new(Some(AuthHash::Sha256), &counting(32)).unwrap();
        for (derivation, digest) in [
            (TlsDerivation::Specified, "ZAY8q/TzFLNAyDS7NAfk2xfbZizkbIWfxDjRGklVp6Q="),
            (TlsDerivation::Libnvme, "F/sT5N5otYLYqxQnMq23sGDNBfe5+jmp67NKdxudA+8="),
        ] {
            let psk = key.psk(HOST, SUBSYSTEM, TlsIdentityVersion::One, derivation).unwrap();
            assert_eq!(psk.identity, format!("NVMe1R01 {HOST} {SUBSYSTEM} {digest}"));
            assert_eq!((psk.hash, psk.key.reveal().len()), (AuthHash::Sha256, 32));
        }
    }

    /// The values of the kernel's tests of its own derivation (drivers/nvme/common/tests/auth_kunit.c), whose
    /// session key and challenges are counted.
    #[test]
    fn generated_psks_are_those_of_the_kernel() {
        let counted =
            |from: u8, bytes: usize| (0..bytes).map(|at| from.wrapping_add(at as u8)).collect::<Vec<_>>();
        for (hash, generated, digest, key) in [
            (
                AuthHash::Sha256,
                "1733c59fa7f48fcf37f5f26fc4ff0268ad4f78e030f4f3b0bfd1d47e7bb1447a",
                "OldoKuTfKddMuyCznAZojkWD7P4D9/AtzDzLimtOxqI=",
                "3c17da628474a04d2247c4cab47968c915388193f7c071bd9489cc3666cd7cc8",
            ),
            (
                AuthHash::Sha384,
                "f14b2dd3234c459694d3bc63f8968bd6b37c2c6de849e22e11874900\
                 1ce4bbe8640b9e3a748cb11ce4b1d71d359cce39",
                "cffMWk8TSS7HOQebjgYEIkrPrjWPV4JE5cdPB8WhEvY4JBW5YynKyv66XscN4A9n",
                "277475323353 7b3fa50eb7d16a8e43457d85f4906c005b223661 6c5d80939d08\
                 98fff15bb8b77119d2be0aac423e7590",
            ),
        ] {
            let bytes = hash.bytes();
            let (session_key, c1) = (counted(b'A', bytes), counted(0, bytes));
            let c2: Vec<u8> = (0..bytes).map(|at| 0xff - at as u8).collect();
            let psk = hmac(hash, &session_key, &[&c1, &c2]);
            let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            assert_eq!(hex(&psk), generated);
            let psk = TlsPsk::generated(hash, &psk, "hostnqn", "subsysnqn").unwrap();
            let number = hash.to_wire();
            assert_eq!(psk.identity, format!("NVMe1G{number:02} hostnqn subsysnqn {digest}"));
            assert_eq!(hex(psk.key.reveal()), key.replace(' ', ""));
        }
        assert_eq!(TlsPsk::generated(AuthHash::Sha512, &[1; 64], "hostnqn", "subsysnqn"), None);
    }

    #[test]
    fn version_zero_has_no_digest_and_an_untransformed_key_depends_on_no_derivation() {
        let key = TlsKey::new(None, &counting(48)).unwrap();
        let psk = |version, derivation| key.psk(HOST, SUBSYSTEM, version, derivation).unwrap();
        let zero = psk(TlsIdentityVersion::Zero, TlsDerivation::Specified);
        assert_eq!(zero.identity, format!("NVMe0R02 {HOST} {SUBSYSTEM}"));
        let [one, other] =
            [TlsDerivation::Specified, TlsDerivation::Libnvme].map(|one| psk(TlsIdentityVersion::One, one));
        assert_eq!(one.identity, other.identity, "the retained key is the configured one");
        assert_ne!(one.key, other.key);
        let long = format!("nqn.2026-11.io.ringbolt:{}", "x".repeat(190));
        assert_eq!(key.psk(&long, &long, TlsIdentityVersion::Zero, TlsDerivation::Specified), None);
        assert!(key.psk(&long, &long, TlsIdentityVersion::One, TlsDerivation::Specified).is_some());
    }

    #[test]
    fn keys_round_trip_and_others_are_rejected() {
        let text = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        let key = TlsKey::new(Some(AuthHash::Sha256), &counting(32)).unwrap();
        assert_eq!(key.to_text().reveal_text(), Some(text));
        assert_eq!(TlsKey::parse(&format!("{text}\n")), Ok(key));
        let error = |text: &str| TlsKey::parse(text).unwrap_err();
        for bad in ["", "NVMeTLSkey-1", "NVMeTLSkey-1:01:", "NVMeTLSkey-1:03:AAAA:", "DHHC-1:01:AAAA:"] {
            assert_eq!(error(bad), TlsKeyError::Format, "{bad}");
        }
        assert_eq!(error(&text[..text.len() - 1]), TlsKeyError::Format);
        assert_eq!(error("NVMeTLSkey-1:01:!:"), TlsKeyError::Base64);
        assert_eq!(error("NVMeTLSkey-1:01:AAAA:"), TlsKeyError::Length(0));
        assert_eq!(error(&text.replace(":01:", ":02:")), TlsKeyError::Length(32));
        assert_eq!(error(&text.replace("AAEC", "AAED")), TlsKeyError::Checksum);
    }
}
