//! The devices that a URI can name.

mod pcie;
mod vfio_user;

use reactor::Core;

use crate::device::Device;
use crate::error::OpenError;
use crate::options::Options;
use crate::uri::Uri;

/// Opens the device that a URI names.
pub(crate) fn open(uri: &Uri, core: &Core, options: &Options) -> Result<Box<dyn Device>, OpenError> {
    match uri {
        Uri::Pcie(pcie) => pcie::open(pcie, uri.controller()),
        Uri::VfioUser(vfio_user) => vfio_user::open(vfio_user, uri.controller(), core, options),
        Uri::Tcp(_) => {
            Err(OpenError::Invalid("a controller over TCP has no queues in memory; open its namespaces"))
        }
    }
}
