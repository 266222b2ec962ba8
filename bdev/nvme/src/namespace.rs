//! The block device of an NVMe namespace.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{Bdev, BdevError, BdevGeometry, BoxedChannel, Durability, InfoValue, IoLimits};
use block_io::Op;
use reactor::Core;
use wire_nvme::identify::IdentifyController;
use wire_nvme::protection::MetadataFormat;

use crate::channel::{DEPTH, NvmeBdevChannel};
use crate::scanned::{NamespaceIds, ScannedNamespace};
use crate::shared_namespace::SharedNamespace;

/// The module's object of a namespace (SPDK's `nvme_bdev`).
pub(crate) struct NvmeBdev {
    pub(crate) shared: Arc<SharedNamespace>,
    identity: NamespaceIds,
    metadata: MetadataFormat,
    geometry: BdevGeometry,
    retries_max: u16,
    flush: bool,
    /// Serial number, model and firmware revision of the controller on which it was found first.
    controller: [String; 3],
    subnqn: String,
}

impl NvmeBdev {
    pub(crate) fn new(
        view: &Arc<SharedNamespace>,
        scanned: &ScannedNamespace,
        controller: &IdentifyController,
        subnqn: &str,
        retries_max: u16,
    ) -> NvmeBdev {
        let namespace = &scanned.identify;
        let mut geometry = BdevGeometry::new(scanned.block_size, namespace.nsze);
        geometry.write_cache = controller.vwc & wire_nvme::identify::vwc::PRESENT != 0;
        geometry.optimal_io_boundary_blocks = namespace.noiob.into();
        let physical = u64::from(namespace.preferred_write_blocks) * u64::from(scanned.block_size);
        if physical.is_power_of_two() && physical <= 1 << 20 {
            geometry.physical_block_size = geometry.physical_block_size.max(physical as u32);
        }
        NvmeBdev {
            shared: view.clone(),
            identity: scanned.identity.clone(),
            metadata: scanned.metadata,
            geometry,
            retries_max,
            flush: true,
            controller: [text(&controller.sn), text(&controller.mn), text(&controller.fr)],
            subnqn: subnqn.to_string(),
        }
    }

    /// Why what a path has under this identifier now is another namespace, or has other blocks; `None` if it
    /// is this one.
    ///
    /// A namespace without identifiers is recognised by its size and by the serial and model number of its
    /// controller: one that was resized and one that was replaced cannot be told apart.
    pub(crate) fn difference(
        &self,
        scanned: &ScannedNamespace,
        controller: Option<&IdentifyController>,
    ) -> Option<&'static str> {
        if !self.identity.may_be(&scanned.identity) {
            return Some("its identifiers have changed");
        }
        if self.geometry.block_size != scanned.block_size || self.metadata != scanned.metadata {
            return Some("its format has changed");
        }
        if self.identity.is_known() {
            return None;
        }
        if self.shared.blocks.load(Ordering::Relaxed) != scanned.identify.nsze {
            return Some("it has no identifiers, and its size has changed");
        }
        let [serial, model, _] = &self.controller;
        controller
            .is_some_and(|controller| text(&controller.sn) != *serial || text(&controller.mn) != *model)
            .then_some("it has no identifiers, and its controller is another one")
    }
}

/// A string of Identify Controller, without the spaces that fill it.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_string()
}

impl Bdev for NvmeBdev {
    fn product_name(&self) -> &'static str {
        "NVMe disk"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry {
            blocks: self.shared.blocks.load(Ordering::Relaxed),
            atomic_write_blocks: self.shared.atomic_blocks.load(Ordering::Relaxed),
            atomic_write_boundary_blocks: self.shared.atomic_boundary.load(Ordering::Relaxed),
            ..self.geometry
        }
    }

    fn durability(&self) -> Durability {
        Durability::Disk
    }

    fn supports(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::Write => true,
            Op::Flush => self.flush,
            Op::Unmap => self.shared.unmap.load(Ordering::Relaxed),
            Op::WriteZeroes => self.shared.write_zeroes.load(Ordering::Relaxed),
            Op::WriteUncorrectable => self.shared.write_uncorrectable.load(Ordering::Relaxed),
            // The layer drains I/O for a reset: a controller reset would affect other users.
            _ => false,
        }
    }

    /// What every path takes in one command. Where a path with lower limits is added later, its channels
    /// split requests and copy data.
    fn io_limits(&self) -> IoLimits {
        IoLimits {
            transfer_bytes_max: self.shared.transfer_max_bytes.load(Ordering::Relaxed),
            segments_max: nvme::DATA_SLICES_MAX,
            alignment: self.shared.alignment.load(Ordering::Relaxed),
            virtual_boundary: self.shared.virtual_boundary.load(Ordering::Relaxed),
            boundary_blocks: 0,
        }
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(NvmeBdevChannel::new(core, &self.shared, self.geometry.block_size, self.retries_max)))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let text = |text: &str| InfoValue::Text(text.to_string());
        let paths = self.shared.paths();
        let path = |state: &crate::shared_namespace::NamespacePath| {
            let id = state.controller_path.id();
            let mut trid = vec![("trtype", text(id.trtype())), ("traddr", text(&id.traddr()))];
            if let Some((adrfam, trsvcid)) = id.service() {
                trid.push(("adrfam", text(adrfam)));
                trid.push(("trsvcid", InfoValue::Text(trsvcid)));
                trid.push(("subnqn", text(&self.subnqn)));
            }
            let [serial, model, firmware] = &self.controller;
            let controller = vec![
                ("cntlid", InfoValue::Number(state.controller_path.cntlid().into())),
                ("model_number", text(model)),
                ("serial_number", text(serial)),
                ("firmware_revision", text(firmware)),
                ("subnqn", text(&self.subnqn)),
            ];
            let mut namespace = vec![("id", InfoValue::Number(self.shared.nsid.into()))];
            namespace.push(("ana_state", text(crate::ana_name(state.ana))));
            InfoValue::Object(vec![
                ("trid", InfoValue::Object(trid)),
                ("ctrlr_data", InfoValue::Object(controller)),
                ("ns_data", InfoValue::Object(namespace)),
            ])
        };
        let policy = crate::policy_names(self.shared.policy());
        let mut all = vec![("nvme", InfoValue::List(paths.iter().map(path).collect()))];
        all.push(("mp_policy", text(policy.0)));
        if let Some(selector) = policy.1 {
            all.push(("selector", text(selector)));
        }
        if let Some(min_io) = policy.2 {
            all.push(("rr_min_io", InfoValue::Number(min_io.into())));
        }
        all
    }

    fn depth(&self) -> u32 {
        DEPTH
    }
}

#[cfg(test)]
mod tests {
    use wire_nvme::identify::IdentifyNamespace;

    use super::*;
    use crate::scanned::AtomicUnit;

    #[test]
    fn a_namespace_without_identifiers_is_recognised_by_its_size_and_controller() {
        let controller =
            |serial: u8| IdentifyController { sn: [serial; 20], ..IdentifyController::default() };
        let scanned = |blocks: u64, block_size: u32, nguid: u8| ScannedNamespace {
            nsid: 1,
            identity: NamespaceIds { nguid: [nguid; 16], ..NamespaceIds::default() },
            identify: Arc::new(IdentifyNamespace { nsze: blocks, ..IdentifyNamespace::default() }),
            block_size,
            metadata: MetadataFormat::NONE,
            transfer_max_bytes: 4096,
            alignment: 1,
            virtual_boundary: 1,
            atomic: AtomicUnit::default(),
            unmap: false,
            write_zeroes: false,
            write_uncorrectable: false,
        };
        let attached = |nguid| {
            let view = SharedNamespace::new(1, crate::Policy::ActivePassive, Arc::default());
            view.blocks.store(8, Ordering::Relaxed);
            NvmeBdev::new(&Arc::new(view), &scanned(8, 512, nguid), &controller(b'1'), "nqn", 0)
        };
        let is_same = |nguid, now: &ScannedNamespace, serial| {
            attached(nguid).difference(now, Some(&controller(serial))).is_none()
        };
        // A namespace with an identifier may grow, and move to another controller.
        assert!(is_same(1, &scanned(16, 512, 1), b'2'));
        assert!(!is_same(1, &scanned(8, 4096, 1), b'1') && !is_same(1, &scanned(8, 512, 2), b'1'));
        assert!(is_same(0, &scanned(8, 512, 0), b'1'));
        assert!(!is_same(0, &scanned(16, 512, 0), b'1') && !is_same(0, &scanned(8, 512, 0), b'2'));
    }
}
