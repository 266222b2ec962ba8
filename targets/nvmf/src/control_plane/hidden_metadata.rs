//! Namespaces whose hosts do not see the protection information of the block device (`hide_metadata`, and
//! `dif_insert_or_strip` of transports).

use bdev::BdevGeometry;
use block_io::ProtectionFlags;
use sockets::ServerNetwork;

use super::NvmfTarget;
use crate::failure::NvmfTargetError;

/// The checks of the protection information that a device can generate, check and strip for hosts that do not
/// see it: what is all of the metadata (PRACT, NVM 1.0, section 5.2.2). Empty for others.
pub(super) fn hidden_protection(geometry: &BdevGeometry) -> ProtectionFlags {
    let format = geometry.metadata;
    match format.strips(ProtectionFlags::ACTION) {
        true => format.checks(),
        false => ProtectionFlags::empty(),
    }
}

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Whether new namespaces hide the metadata of their devices.
    pub fn hides_metadata(&self) -> bool {
        self.lock_any().hides_metadata
    }

    /// Whether a namespace on this block device hides metadata, if that is `asked` for.
    pub(crate) fn hides_metadata_of(&self, bdev: &str, asked: bool) -> bool {
        let device = self.0.registry().find(bdev);
        match device {
            Some(device) if device.geometry().metadata.bytes == 0 => false,
            _ => asked || self.hides_metadata(),
        }
    }

    /// Checks that a transport may be created of which namespaces hide metadata, or may not.
    ///
    /// # Errors
    /// Another transport has the other value, or a namespace shows metadata already.
    pub(crate) fn check_hides_metadata(&self, hides: bool) -> Result<(), NvmfTargetError> {
        let state = self.lock_any();
        let has_transport = !state.transports.is_empty();
        if has_transport && state.hides_metadata != hides {
            let text = "dif_insert_or_strip: all transports have the same value";
            return Err(NvmfTargetError::Parameter(text.into()));
        }
        let mut namespaces =
            state.subsystems.values().flat_map(|configured| &configured.subsystem.namespaces);
        match namespaces.find(|namespace| hides && namespace.metadata.bytes > 0) {
            Some(shown) => Err(NvmfTargetError::Parameter(format!(
                "dif_insert_or_strip: namespace {} on {} shows metadata already",
                shown.nsid, shown.bdev
            ))),
            None => Ok(()),
        }
    }

    /// New namespaces hide the metadata of their devices from now on, or show it.
    pub(crate) fn set_hides_metadata(&self, hides: bool) {
        self.lock_any().hides_metadata = hides;
    }
}
