//! SPDK's method about SCSI devices, which are those of all targets that speak SCSI.

use std::collections::BTreeSet;
use std::sync::Mutex;

use control::json::{Value, json};
use control::{Method, Module, NoParameters, RpcError};

/// Lists the SCSI devices: a target node of iSCSI, and a target of a vhost SCSI host, are one each.
pub struct ScsiDeviceModule {
    sources: Vec<ScsiDeviceSource>,
    numbers: Mutex<ScsiDeviceNumbers>,
}

/// Lists the SCSI devices of a target at present.
pub type ScsiDeviceSource = Box<dyn Fn() -> Vec<ScsiDeviceOwner> + Send + Sync>;

/// What a SCSI device belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScsiDeviceOwner {
    /// A target node of iSCSI, by its name.
    TargetNode(String),
    /// A target of a vhost SCSI host.
    VhostTarget {
        /// Name of the controller.
        controller: String,
        /// Number of the target.
        number: u8,
    },
}

/// The devices by their `id`, as SPDK assigns it: the lowest that is free. A device keeps its own while
/// others come and go.
#[derive(Default)]
struct ScsiDeviceNumbers(Vec<Option<ScsiDeviceOwner>>);

impl ScsiDeviceModule {
    /// Of the targets with these devices.
    pub fn new(sources: Vec<ScsiDeviceSource>) -> ScsiDeviceModule {
        ScsiDeviceModule { sources, numbers: Mutex::default() }
    }
}

impl Module for ScsiDeviceModule {
    const NAME: &'static str = "scsi_devices";

    fn methods() -> Vec<Method<ScsiDeviceModule>> {
        vec![Method::query("scsi_get_devices", devices).text(
            "Lists the SCSI devices: one for each iSCSI target node, and for each target of a vhost SCSI host.",
            "array of devices with `id` and `device_name`",
        )]
    }
}

fn devices(module: &ScsiDeviceModule, _: NoParameters) -> Result<Vec<Value>, RpcError> {
    // Before the targets are asked, so that a later answer never undoes the numbers of an earlier one.
    let mut numbers = sync::lock(&module.numbers);
    let owners: BTreeSet<ScsiDeviceOwner> = module.sources.iter().flat_map(|source| source()).collect();
    numbers.update(owners);
    Ok(numbers.describe())
}

impl ScsiDeviceNumbers {
    fn update(&mut self, mut owners: BTreeSet<ScsiDeviceOwner>) {
        for slot in &mut self.0 {
            // Out of the set if it has a number already; out of its slot if it is gone.
            let is_there = slot.as_ref().is_some_and(|owner| owners.remove(owner));
            if !is_there {
                *slot = None;
            }
        }
        for owner in owners {
            match self.0.iter_mut().find(|slot| slot.is_none()) {
                Some(free) => *free = Some(owner),
                None => self.0.push(Some(owner)),
            }
        }
    }

    fn describe(&self) -> Vec<Value> {
        let name = |owner: &ScsiDeviceOwner| match owner {
            ScsiDeviceOwner::TargetNode(name) => name.clone(),
            // As SPDK's, which does not name the controller.
            ScsiDeviceOwner::VhostTarget { number, .. } => format!("Target {number}"),
        };
        let used = self.0.iter().enumerate().filter_map(|(id, slot)| Some((id, slot.as_ref()?)));
        used.map(|(id, owner)| json!({ "id": id, "device_name": name(owner) })).collect()
    }
}
