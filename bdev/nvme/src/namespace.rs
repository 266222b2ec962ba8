//! A namespace as a block device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bdev::{Bdev, BdevError, BoxedChannel, Geometry, Value};
use reactor::Core;
use ring::Op;
use uuid::Uuid;
use wire_nvme::identify::{IdentifyController, IdentifyNamespace};

use crate::channel::{Channel, DEPTH};
use crate::view::View;

/// What tells two namespaces apart (Base 2.0, section 4.7.1).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) nguid: [u8; 16],
    pub(crate) eui64: [u8; 8],
    pub(crate) uuid: Option<Uuid>,
}

/// A namespace as one path tells of it.
#[derive(Clone)]
pub(crate) struct Learned {
    pub(crate) nsid: u32,
    pub(crate) identity: Identity,
    pub(crate) identify: Arc<IdentifyNamespace>,
    pub(crate) block_size: u32,
    pub(crate) transfer_max_bytes: u32,
    pub(crate) unmap: bool,
    pub(crate) write_zeroes: bool,
    pub(crate) write_uncorrectable: bool,
}

/// The module's object.
pub(crate) struct NvmeBdev {
    pub(crate) view: Arc<View>,
    pub(crate) identity: Identity,
    geometry: Geometry,
    retries_max: u16,
    flush: bool,
    /// Serial, model and firmware of the controller that told of it first.
    controller: [String; 3],
    subnqn: String,
    pub(crate) gone: AtomicBool,
}

impl NvmeBdev {
    pub(crate) fn new(
        view: &Arc<View>,
        learned: &Learned,
        controller: &IdentifyController,
        subnqn: &str,
        retries_max: u16,
    ) -> NvmeBdev {
        let namespace = &learned.identify;
        let mut geometry = Geometry::new(learned.block_size, namespace.nsze);
        geometry.write_cache = controller.vwc & wire_nvme::identify::vwc::PRESENT != 0;
        geometry.optimal_io_boundary_blocks = namespace.noiob.into();
        let physical = u64::from(namespace.preferred_write_blocks) * u64::from(learned.block_size);
        if physical.is_power_of_two() && physical <= 1 << 20 {
            geometry.physical_block_size = geometry.physical_block_size.max(physical as u32);
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_string();
        NvmeBdev {
            view: view.clone(),
            identity: learned.identity.clone(),
            geometry,
            retries_max,
            flush: true,
            controller: [text(&controller.sn), text(&controller.mn), text(&controller.fr)],
            subnqn: subnqn.to_string(),
            gone: AtomicBool::new(false),
        }
    }
}

impl Bdev for NvmeBdev {
    fn product_name(&self) -> &'static str {
        "NVMe disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry { blocks: self.view.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn supports(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::Write => true,
            Op::Flush => self.flush,
            Op::Unmap => self.view.unmap.load(Ordering::Relaxed),
            Op::WriteZeroes => self.view.write_zeroes.load(Ordering::Relaxed),
            Op::WriteUncorrectable => self.view.write_uncorrectable.load(Ordering::Relaxed),
            // The layer's own: resetting the controller would harm its other users.
            Op::Reset | Op::Compare => false,
        }
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(Channel::new(core, &self.view, self.geometry.block_size, self.retries_max)))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        let text = |text: &str| Value::Text(text.to_string());
        let paths = self.view.paths();
        let path = |state: &crate::view::PathState| {
            let id = state.path.id();
            let mut trid = vec![("trtype", text(id.trtype())), ("traddr", text(&id.traddr()))];
            if let Some((adrfam, trsvcid)) = id.service() {
                trid.push(("adrfam", text(adrfam)));
                trid.push(("trsvcid", Value::Text(trsvcid)));
                trid.push(("subnqn", text(&self.subnqn)));
            }
            let [serial, model, firmware] = &self.controller;
            let controller = vec![
                ("cntlid", Value::Number(state.path.cntlid().into())),
                ("model_number", text(model)),
                ("serial_number", text(serial)),
                ("firmware_revision", text(firmware)),
                ("subnqn", text(&self.subnqn)),
            ];
            let mut namespace = vec![("id", Value::Number(self.view.nsid.into()))];
            namespace.push(("ana_state", text(crate::ana_name(state.ana))));
            Value::Object(vec![
                ("trid", Value::Object(trid)),
                ("ctrlr_data", Value::Object(controller)),
                ("ns_data", Value::Object(namespace)),
            ])
        };
        let policy = crate::policy_names(self.view.policy());
        let mut all = vec![("nvme", Value::List(paths.iter().map(path).collect()))];
        all.push(("mp_policy", text(policy.0)));
        if let Some(selector) = policy.1 {
            all.push(("selector", text(selector)));
        }
        if let Some(min_io) = policy.2 {
            all.push(("rr_min_io", Value::Number(min_io.into())));
        }
        all
    }

    fn depth(&self) -> u32 {
        DEPTH
    }

    fn removed(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}
