//! Logical volumes: the stores that SPDK's `bdev_lvol_*` methods wrote are found on block devices, and their
//! volumes are block devices that can be read. Nothing is written yet.
//!
//! [`LvolModule`] examines each device that appears. A device with a store is claimed, its metadata is loaded
//! by [`blobstore`], and each volume is registered: by its UUID, with the alias `STORE/VOLUME`. A volume of
//! which data is on an external snapshot is registered while that device is there.
//!
//! ```
//! use control::ControlPlane;
//! let registry = bdev::Registry::new();
//! let builder = ControlPlane::builder(Vec::new());
//! let bdevs = bdev::rpc::BdevModule::new(registry.clone(), builder.examiner());
//! // Devices are read on the first of the reactors; without one, nothing is found.
//! let lvols = lvol::LvolModule::new(registry, &[]);
//! let plane = builder.module(&bdevs).module(&lvols).start(None)?;
//! let stores = plane.invoke("bdev_lvol_get_lvstores", control::json::json!({}))?;
//! assert_eq!(stores, control::json::json!([]));
//! plane.stop();
//! # Ok::<(), control::RpcError>(())
//! ```
//!
//! # State
//! A loaded store is immutable: [`blobstore::BlobStore`] in an `Arc`, shared by the module and the channels
//! of all volumes. A read is divided by it: pieces go to the store's device and to the external snapshot, and
//! what has no data is filled with zeroes. A read of one piece is passed on with another address, and
//! allocates nothing.
//!
//! # Claims
//! The store's device gets a claim of the type read many write none, before its metadata is read: what was
//! read then stays true, as nothing writes the device. Other readers, such as a copy of the whole device, are
//! not excluded, since this is a reader too. External snapshots get the same claim. A device that is open for
//! writing, or has another claim, is left alone.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod channel;
mod describe;
mod load;
mod methods;
mod module;
mod owner;
mod plan;
mod shallow_copy;
mod shared;
mod store;
mod volume;
mod volume_map;

pub use module::LvolModule;
