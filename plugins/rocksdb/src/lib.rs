//! RocksDB's files on a block device: a `FileSystem` over `blobfs`, as `ringbolt://CONFIG?bdev=NAME`.
//!
//! The library starts one reactor in the process that loads it, makes the bdevs of a configuration file, and
//! opens the store of files on one of them ([`store`]). RocksDB's threads send requests to that reactor and
//! wait ([`call`]); what they append is in memory of the file until there is enough of it ([`tail`]). Where
//! the bdev allows it, they read files that are not written themselves ([`direct`]). `filesystem.cc` beside
//! this crate has RocksDB's C++ classes; docs/ROCKSDB.md says how it is used.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod buffers;
mod call;
mod direct;
mod file;
mod files;
mod load;
mod plan;
mod process;
#[cfg(test)]
mod rig;
mod store;
mod stores;
mod tail;
mod uri;

use rocksdb_abi::FilesDefinition;

/// The files as the shim sees them.
pub static DEFINITION: FilesDefinition = FilesDefinition { open: stores::open, close_all: stores::close_all };

rocksdb_abi::export_files!(DEFINITION);
