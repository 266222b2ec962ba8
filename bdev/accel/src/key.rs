//! A key of encryption: cipher, tweak mode, and what is made of the secret.

use control::KeyError;
use secret::Secret;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::{XTS_BLOCK_BYTES, XtsKey};

/// Data units of the tweak modes that count in 512 bytes.
const SECTOR_BYTES: usize = 512;

control::choices! {
    /// SPDK's ciphers.
    pub enum Cipher {
        /// AES-XTS, with keys of 128 or 256 bits.
        AesXts = "AES_XTS",
        /// AES-CBC, which no engine has.
        AesCbc = "AES_CBC",
    }
}

control::choices! {
    /// How the tweak of a data unit is made, as SPDK's. Its 16 bytes are two words, each little-endian:
    /// SPDK's software has the LBA in the second, which its header writes as the lower. The others are read
    /// in the same way.
    pub enum TweakMode {
        /// 0, and the LBA. A block is one data unit, as in all but the two last.
        SimpleLba = "SIMPLE_LBA",
        /// The complement of the LBA in 63 bits, and the LBA.
        JoinNegLbaWithLba = "JOIN_NEG_LBA_WITH_LBA",
        /// 0, and the number of 512 bytes, which are a data unit, from the device's start.
        Incr512FullLba = "INCR_512_FULL_LBA",
        /// That number, and 0: where the standard has the number of a data unit.
        Incr512UpperLba = "INCR_512_UPPER_LBA",
    }
}

impl TweakMode {
    /// Bytes of a data unit of a device with blocks of `block_bytes`.
    pub const fn unit_bytes(self, block_bytes: usize) -> usize {
        match self {
            TweakMode::SimpleLba | TweakMode::JoinNegLbaWithLba => block_bytes,
            TweakMode::Incr512FullLba | TweakMode::Incr512UpperLba => SECTOR_BYTES,
        }
    }

    /// The tweak of data unit `unit`, counted from the device's start, as a little-endian number.
    pub fn tweak(self, unit: u64) -> u128 {
        let words = |first: u64, second: u64| u128::from(second) << 64 | u128::from(first);
        match self {
            TweakMode::SimpleLba | TweakMode::Incr512FullLba => words(0, unit),
            TweakMode::JoinNegLbaWithLba => words(!unit & (u64::MAX >> 1), unit),
            TweakMode::Incr512UpperLba => words(unit, 0),
        }
    }
}

/// Why there is no such key. No text has a secret.
#[derive(Debug, thiserror::Error)]
pub enum CryptoKeyError {
    /// There is a key of this name.
    #[error("there is a key {0}")]
    Exists(String),
    /// There is none of this name.
    #[error("no key is called {0}")]
    NotFound(String),
    /// Devices use it.
    #[error("the key {name} is in use {users} times: delete the bdevs that use it first")]
    InUse {
        /// The key.
        name: String,
        /// References to it.
        users: usize,
    },
    /// A parameter has an invalid value.
    #[error("{field}: {reason}")]
    Invalid {
        /// Name of the parameter.
        field: &'static str,
        /// Why the value is invalid.
        reason: String,
    },
    /// There are as many keys as there can be.
    #[error("there are {0} keys already")]
    TooMany(usize),
    /// The keyring does not give the secret, or does not keep it.
    #[error(transparent)]
    Keyring(#[from] KeyError),
    /// The file of the secret cannot be used.
    #[error("key_file: {0}")]
    File(KeyError),
    /// The key is another one than the call expects.
    #[error(
        "{source_name} has the key with the check value {found}, and not the one with {wanted}: what was \
         written with that one cannot be read with it"
    )]
    OtherKey {
        /// Where the secret came from.
        source_name: String,
        /// Key check value of the key.
        found: String,
        /// The one that was expected.
        wanted: String,
    },
}

impl CryptoKeyError {
    pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> CryptoKeyError {
        CryptoKeyError::Invalid { field, reason: reason.into() }
    }

    /// The same of a secret that was read from where the parameter `source` says.
    pub(crate) fn of_source(self, source: &'static str) -> CryptoKeyError {
        match self {
            CryptoKeyError::Invalid { field: field @ ("key" | "key2"), reason } => {
                CryptoKeyError::invalid(source, format!("{field}: {reason}"))
            }
            CryptoKeyError::Invalid { field: SECRET, reason } => CryptoKeyError::invalid(source, reason),
            other => other,
        }
    }
}

/// Bytes of a key check value.
const CHECK_VALUE_BYTES: usize = 8;
/// Tweak of the block that gives it. No data unit of any tweak mode has it.
const CHECK_VALUE_TWEAK: u128 = u128::MAX;

/// What [`CryptoKey::from_secret`] calls its secret.
const SECRET: &str = "secret";

/// A key that can be used. Its schedule is wiped on drop; `Debug` shows the name alone.
pub struct CryptoKey {
    name: String,
    tweak_mode: TweakMode,
    /// Hexadecimal digits of each half.
    digits: usize,
    xts: XtsKey,
    /// Both halves, to know them again.
    secret: Secret,
}

impl CryptoKey {
    /// A key of two halves as hexadecimal digits: 32 each for AES-128, 64 for AES-256.
    ///
    /// # Errors
    /// [`CryptoKeyError::Invalid`]: no hexadecimal digits, other lengths, equal halves (which are not
    /// secure), or a cipher that no engine has.
    pub fn from_hex(
        name: &str,
        cipher: Cipher,
        tweak_mode: TweakMode,
        key: &[u8],
        key2: Option<&[u8]>,
    ) -> Result<CryptoKey, CryptoKeyError> {
        if cipher != Cipher::AesXts {
            let reason = format!("no engine has {}; there is AES_XTS", cipher.name());
            return Err(CryptoKeyError::invalid("cipher", reason));
        }
        let key2 =
            key2.ok_or_else(|| CryptoKeyError::invalid("key2", "AES_XTS has a second key, for its tweaks"))?;
        let (data, tweak) = (decode_hex("key", key)?, decode_hex("key2", key2)?);
        if data.len() != tweak.len() {
            let reason = format!("it has {} bytes, and key has {}", tweak.len(), data.len());
            return Err(CryptoKeyError::invalid("key2", reason));
        }
        if data.ct_eq(&tweak).into() {
            return Err(CryptoKeyError::invalid("key2", "it is equal to key, which is not secure"));
        }
        let xts = XtsKey::new(&data, &tweak).ok_or_else(|| {
            let reason = format!("AES_XTS has 32 or 64 hexadecimal digits, not {}", key.len());
            CryptoKeyError::invalid("key", reason)
        })?;
        let mut both = Vec::with_capacity(data.len() * 2);
        both.extend_from_slice(&data);
        both.extend_from_slice(&tweak);
        Ok(CryptoKey {
            name: name.to_string(),
            tweak_mode,
            digits: key.len(),
            xts,
            secret: Secret::new(both),
        })
    }

    /// A key of a secret with both halves, one after the other, as 64 or 128 hexadecimal digits. White space
    /// does not count.
    ///
    /// # Errors
    /// As [`from_hex`](Self::from_hex).
    pub fn from_secret(
        name: &str,
        cipher: Cipher,
        tweak_mode: TweakMode,
        secret: &Secret,
    ) -> Result<CryptoKey, CryptoKeyError> {
        let mut digits = Zeroizing::new(Vec::with_capacity(secret.reveal().len()));
        digits.extend(secret.reveal().iter().filter(|byte| !byte.is_ascii_whitespace()));
        if ![64, 128].contains(&digits.len()) {
            let reason = format!(
                "it has {} digits; both keys together have 64 or 128 hexadecimal digits",
                digits.len()
            );
            return Err(CryptoKeyError::invalid(SECRET, reason));
        }
        let (key, key2) = digits.split_at(digits.len() / 2);
        CryptoKey::from_hex(name, cipher, tweak_mode, key, Some(key2))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its cipher.
    pub fn cipher(&self) -> Cipher {
        Cipher::AesXts
    }

    /// Its tweak mode.
    pub fn tweak_mode(&self) -> TweakMode {
        self.tweak_mode
    }

    /// What stands for each half of the secret: as many asterisks as it has digits.
    pub fn mask(&self) -> String {
        "*".repeat(self.digits)
    }

    /// The key check value, as of ISO 11568: what 16 bytes of zeroes are encrypted to, of which it has the
    /// first 8 bytes, as 16 hexadecimal digits. It tells keys from each other, and is no secret. The tweak is
    /// 2^128 - 1, which no data unit has, so that it is the same in every tweak mode.
    pub fn check_value(&self) -> String {
        let mut block = [0; XTS_BLOCK_BYTES];
        self.xts.encrypt(&mut block, XTS_BLOCK_BYTES, |_| CHECK_VALUE_TWEAK);
        block[..CHECK_VALUE_BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether another key does the same.
    pub fn is_same(&self, other: &CryptoKey) -> bool {
        self.tweak_mode == other.tweak_mode && self.secret == other.secret
    }

    /// Whether it encrypts blocks of this size: one of whole blocks of AES, and of whole data units.
    pub fn takes_blocks(&self, block_bytes: usize) -> bool {
        block_bytes > 0
            && block_bytes.is_multiple_of(XTS_BLOCK_BYTES)
            && block_bytes.is_multiple_of(self.tweak_mode.unit_bytes(block_bytes))
    }

    /// The bytes of a data unit, and the tweaks of those from block `lba` on.
    #[inline]
    fn units(&self, block_bytes: usize, lba: u64) -> (usize, impl Fn(u64) -> u128 + use<>) {
        let (mode, unit_bytes) = (self.tweak_mode, self.tweak_mode.unit_bytes(block_bytes));
        // A device of 2^64 such units has no bytes beyond.
        let first = lba.wrapping_mul((block_bytes / unit_bytes) as u64);
        (unit_bytes, move |unit| mode.tweak(first.wrapping_add(unit)))
    }

    /// Encrypts whole blocks in place; the first is block `lba` of its device. Not counted: see
    /// [`AccelChannel::encrypt`](crate::AccelChannel::encrypt).
    ///
    /// # Panics
    /// If the data is not whole blocks that it [takes](Self::takes_blocks).
    pub fn encrypt(&self, data: &mut [u8], block_bytes: usize, lba: u64) {
        let (unit_bytes, tweak_of) = self.units(block_bytes, lba);
        self.xts.encrypt(data, unit_bytes, tweak_of);
    }

    /// As [`encrypt`](Self::encrypt), to a slice of the same length.
    ///
    /// # Panics
    /// As [`encrypt`](Self::encrypt), and if the lengths differ.
    pub fn encrypt_to(&self, to: &mut [u8], from: &[u8], block_bytes: usize, lba: u64) {
        let (unit_bytes, tweak_of) = self.units(block_bytes, lba);
        self.xts.encrypt_to(to, from, unit_bytes, tweak_of);
    }

    /// As [`encrypt`](Self::encrypt), to decrypt.
    ///
    /// # Panics
    /// As [`encrypt`](Self::encrypt).
    pub fn decrypt(&self, data: &mut [u8], block_bytes: usize, lba: u64) {
        let (unit_bytes, tweak_of) = self.units(block_bytes, lba);
        self.xts.decrypt(data, unit_bytes, tweak_of);
    }
}

impl std::fmt::Debug for CryptoKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("CryptoKey").field(&self.name).finish()
    }
}

fn decode_hex(field: &'static str, digits: &[u8]) -> Result<Zeroizing<Vec<u8>>, CryptoKeyError> {
    let (pairs, rest) = digits.as_chunks::<2>();
    let mut bytes = Zeroizing::new(Vec::with_capacity(pairs.len()));
    for [high, low] in pairs {
        let digit = |byte: &u8| char::from(*byte).to_digit(16);
        match (digit(high), digit(low)) {
            (Some(high), Some(low)) => bytes.push((high << 4 | low) as u8),
            _ => {
                return Err(CryptoKeyError::invalid(
                    field,
                    "it has other characters than hexadecimal digits",
                ));
            }
        }
    }
    if bytes.is_empty() || !rest.is_empty() {
        return Err(CryptoKeyError::invalid(field, format!("{} digits are no whole bytes", digits.len())));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
