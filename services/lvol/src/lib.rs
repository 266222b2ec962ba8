//! Logical volumes: stores in SPDK's format are created on block devices or found there, and their volumes
//! are block devices. The methods are SPDK's `bdev_lvol_*`.
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
//! A store that can be changed has an owner: a poller on one core with the [`blobstore::OpenBlobStore`],
//! which does all I/O of the metadata. What it publishes, an immutable [`blobstore::BlobStore`], is shared by
//! the module and the channels of all volumes, on all cores: these look for a newer one before each batch. A
//! request is divided by it: pieces go to the store's device and to the external snapshot, and what has no
//! data is filled with zeroes. A request of one piece is passed on with another address, and allocates
//! nothing. A first write to a cluster asks the owner by mailbox.
//!
//! Methods begin changes under the update lock, wait for them without it, and then register, rename or resize
//! block devices. What operates on a volume reserves it: others get EBUSY.
//!
//! # Claims
//! The store's device gets a claim of the type read many write one, before its metadata is read. If it is
//! read-only or is kept as it is by other readers, the claim is read many write none, and the volumes are
//! read-only; so they are if a cluster has two owners. External snapshots get a claim of the type read many
//! write none. A device that is open for writing, or has another claim, is left alone.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod chain_end;
mod channel;
mod checksum_devices;
mod checksums;
mod describe;
mod device;
mod external_end;
mod load;
mod methods;
mod module;
mod nested;
mod owner;
mod plan;
mod shallow_copy;
mod shared;
mod store;
mod unload;
mod volume;
mod volume_map;
mod volume_view;

pub use device::blob_store_device;
pub use module::LvolModule;
