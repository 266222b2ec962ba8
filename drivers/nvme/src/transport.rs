//! Memory-based transports: opens the device that a URI names.

mod pcie;
mod vfio_user;

use reactor::Core;

use crate::device::NvmeDevice;
use crate::error::NvmeOpenError;
use crate::options::Options;
use crate::uri::Uri;

/// Opens the device that a URI names.
pub(crate) fn open(uri: &Uri, core: &Core, options: &Options) -> Result<Box<dyn NvmeDevice>, NvmeOpenError> {
    match uri {
        Uri::Pcie(pcie) => pcie::open(pcie, uri.controller()),
        Uri::VfioUser(vfio_user) => vfio_user::open(vfio_user, uri.controller(), core, options),
        Uri::Tcp(_) | Uri::Rdma(_) => Err(NvmeOpenError::InvalidArgument(
            "a controller over fabrics has no queues in host memory; open its namespaces instead",
        )),
    }
}
