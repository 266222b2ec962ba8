//! Encrypted bdevs, as SPDK's module `crypto`: [`CryptoModule`] has the methods, [`create`] makes a device.
//!
//! A device has the blocks of its base, encrypted with AES-XTS by the acceleration framework ([`accel`]); the
//! tweak of a block comes from its LBA. Nothing is stored but the blocks: a volume that SPDK has written
//! opens, and the reverse. There is no header, so that another key opens the device as well, and reads noise.
//!
//! A write is encrypted into memory of the module's own, never in the caller's buffer; a read is decrypted in
//! place. Zeroes are written as encrypted zeroes. A block that the base has as zeroes was never written or
//! was unmapped, as no data encrypts to zeroes, and reads as zeroes. [`CryptoBdev`] is the module's object.
//!
//! ```
//! use accel::{Cipher, CryptoKey, TweakMode};
//! use bdev::{Registry, malloc};
//! let registry = Registry::new();
//! malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 512))?;
//! let (key, key2) = ("000102030405060708090a0b0c0d0e0f", "101112131415161718191a1b1c1d1e1f");
//! let key = CryptoKey::from_hex("k", Cipher::AesXts, TweakMode::SimpleLba, key.as_bytes(), Some(key2.as_bytes()));
//! let key = registry.accel().keys().add(key.expect("a key")).expect("the only one");
//! let device = bdev_crypto::create(&registry, "Malloc0", "Crypto0", key)?;
//! assert_eq!((device.geometry().blocks, device.bdev().product_name()), (2048, "crypto"));
//! # Ok::<(), bdev::BdevError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod channel;
mod device;
mod module;
mod runs;

pub use device::{BLOCK_BYTES_MAX, CryptoBdev, create};
pub use module::CryptoModule;
