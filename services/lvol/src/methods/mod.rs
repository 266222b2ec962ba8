//! The methods: SPDK's `bdev_lvol_*`.
//!
//! Codes are SPDK's: a negated errno where the method itself refuses a call, and -32602 where the store does.
//! A message begins with the text of the errno, which tools compare, and goes on with what is wrong.

use std::fmt::Display;
use std::sync::Arc;

use bdev::{BlockDevice, Uuid};
use blobstore::{Blob, ChangeError};
use control::json::Value;
use control::{Method, Parameters, RpcError};

use crate::LvolModule;
use crate::store::{LvolStore, NoOperation, Volume};
use crate::volume::LvolBdev;

mod relations;
mod shallow;
mod stores;
mod volumes;

pub(crate) fn methods() -> Vec<Method<LvolModule>> {
    let mut methods = stores::methods();
    methods.extend(volumes::methods());
    methods.extend(relations::methods());
    methods.extend(shallow::methods());
    methods
}

/// The last part of a method: waits for the change that the first part has begun, and applies it.
type Conclusion = Box<dyn FnOnce(&LvolModule) -> Result<Value, RpcError>>;

/// A method that begins a change with the update lock, and waits for it without.
fn concluded<P: Parameters + 'static>(
    name: &'static str,
    run: fn(&LvolModule, P) -> Result<Conclusion, RpcError>,
) -> Method<LvolModule> {
    Method::concluded_update(name, run, |module: &LvolModule, conclude: Conclusion| conclude(module))
}

/// A conclusion without a change.
fn at_once(value: impl Into<Value>) -> Result<Conclusion, RpcError> {
    let value = value.into();
    Ok(Box::new(move |_| Ok(value)))
}

/// An errno of Linux, negated, with its text in the C library.
#[derive(Clone, Copy)]
struct Errno(i64, &'static str);

const EPERM: Errno = Errno(RpcError::EPERM, "Operation not permitted");
const ENOENT: Errno = Errno(-2, "No such file or directory");
const EIO: Errno = Errno(RpcError::EIO, "Input/output error");
const ENOMEM: Errno = Errno(RpcError::ENOMEM, "Cannot allocate memory");
const EBUSY: Errno = Errno(RpcError::EBUSY, "Device or resource busy");
const EEXIST: Errno = Errno(RpcError::EEXIST, "File exists");
const ENODEV: Errno = Errno(RpcError::ENODEV, "No such device");
const EINVAL: Errno = Errno(RpcError::EINVAL, "Invalid argument");
const ENOSPC: Errno = Errno(RpcError::ENOSPC, "No space left on device");
const ECANCELED: Errno = Errno(RpcError::ECANCELED, "Operation canceled");

const NO_STORE: (i64, &str) = (RpcError::ENODEV, "there is no such store");
const NO_VOLUME: (i64, &str) = (RpcError::ENODEV, "there is no such volume");
const ONE_STORE: (i64, &str) = (RpcError::EINVAL, "both UUID and name are given, or none");
const NOT_MADE: (i64, &str) = (RpcError::INVALID_PARAMS, "the store refused it; the message says why");

/// A call that the method itself refuses.
fn refused(errno: Errno, detail: impl Display) -> RpcError {
    RpcError::new(errno.0, format!("{}: {detail}", errno.1))
}

/// A call that the store refuses.
fn failed(errno: Errno, detail: impl Display) -> RpcError {
    RpcError::new(RpcError::INVALID_PARAMS, format!("{}: {detail}", errno.1))
}

/// The errno of a change that has failed.
fn errno_of(error: &ChangeError) -> Errno {
    match error {
        ChangeError::NoBlob(_) => ENOENT,
        ChangeError::Exists => EEXIST,
        ChangeError::NoClusters { .. } => ENOSPC,
        ChangeError::NoPages => ENOMEM,
        ChangeError::ReadOnly(_) | ChangeError::HasClones(_) => EPERM,
        ChangeError::Invalid(_) | ChangeError::NotReleased => EINVAL,
        ChangeError::Cancelled => ECANCELED,
        ChangeError::Io | ChangeError::Broken => EIO,
    }
}

/// The error of a change that has failed.
fn change_failed(error: ChangeError) -> RpcError {
    failed(errno_of(&error), error)
}

/// The errno of an operation that cannot begin, and why.
fn why_no_operation(no: NoOperation) -> (Errno, &'static str) {
    match no {
        NoOperation::Removing => (ENODEV, "the store is being removed"),
        NoOperation::Busy => (EBUSY, "another operation on the volume is under way"),
        NoOperation::ReadOnly => {
            (EPERM, "the store is read-only here, as its device is, or as it is damaged")
        }
        NoOperation::NameInUse => (EEXIST, "the store has a volume of that name, or a bdev has it"),
        NoOperation::Name => (EINVAL, "a name has 1 to 63 bytes, and no control characters"),
    }
}

/// The error of an operation that cannot begin.
fn no_operation(no: NoOperation) -> RpcError {
    let (errno, why) = why_no_operation(no);
    failed(errno, why)
}

/// A volume that a method names, with its block device.
struct FoundVolume {
    store: Arc<LvolStore>,
    volume: Arc<Volume>,
    device: Arc<BlockDevice>,
}

impl FoundVolume {
    /// What `of` returns for the blob.
    fn blob<R>(&self, of: impl FnOnce(&Blob) -> R) -> Result<R, RpcError> {
        let published = self.store.shared.published();
        let gone = || refused(ENODEV, format!("the logical volume {} is gone", self.volume.name));
        published.blob(self.volume.blob).map(of).ok_or_else(gone)
    }
}

/// The volume with this name, UUID or alias of its block device.
fn volume(module: &LvolModule, name: &str) -> Result<FoundVolume, RpcError> {
    let found = module.stores.registry.find(name).and_then(|device| {
        let lvol = device.module::<LvolBdev>()?;
        Some(FoundVolume { store: lvol.store().clone(), volume: lvol.volume()?, device: device.clone() })
    });
    found.ok_or_else(|| refused(ENODEV, format!("no logical volume is called {name}")))
}

/// The store with a UUID or a name, or all.
fn selected(
    module: &LvolModule,
    parameter: &str,
    uuid: Option<String>,
    name: Option<String>,
) -> Result<Vec<Arc<LvolStore>>, RpcError> {
    let mut stores = module.stores.all();
    let selector = match (uuid, name) {
        (None, None) => return Ok(stores),
        (Some(_), Some(_)) => {
            return Err(refused(EINVAL, format!("give either {parameter} or lvs_name, not both")));
        }
        (Some(uuid), None) => {
            let wanted = Uuid::try_parse(&uuid).ok();
            stores.retain(|store| Some(store.uuid) == wanted);
            uuid
        }
        (None, Some(name)) => {
            stores.retain(|store| store.name() == name);
            name
        }
    };
    if stores.is_empty() {
        return Err(refused(ENODEV, format!("no logical volume store is called {selector}")));
    }
    Ok(stores)
}

/// The store with a UUID or a name, of which one is given.
fn one_store(
    module: &LvolModule,
    uuid: Option<String>,
    name: Option<String>,
) -> Result<Arc<LvolStore>, RpcError> {
    if uuid.is_none() && name.is_none() {
        return Err(refused(EINVAL, "give uuid or lvs_name"));
    }
    let mut stores = selected(module, "uuid", uuid, name)?;
    match stores.pop() {
        Some(store) if !store.is_removing() => Ok(store),
        _ => Err(refused(ENODEV, "the store is being removed")),
    }
}
