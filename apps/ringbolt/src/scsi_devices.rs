//! SPDK's method about SCSI devices, which are those of all targets that speak SCSI.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use control::json::{Value, json};
use control::{Method, Module, NoParameters, RpcError};
use iscsi::rpc::IscsiModule;
use vhost::VhostBackendInfo;
use vhost::rpc::VhostModule;

/// Lists the SCSI devices: a target node of iSCSI, and a target of a vhost SCSI host, are one each.
pub(crate) struct ScsiDeviceModule {
    iscsi: Arc<IscsiModule>,
    vhost: Arc<VhostModule>,
    numbers: Mutex<ScsiDeviceNumbers>,
}

/// What a SCSI device belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ScsiDeviceOwner {
    TargetNode(String),
    VhostTarget { controller: String, number: u8 },
}

/// The devices by their `id`, as SPDK assigns it: the lowest that is free. A device keeps its own while others come and go.
#[derive(Default)]
struct ScsiDeviceNumbers(Vec<Option<ScsiDeviceOwner>>);

impl ScsiDeviceModule {
    pub(crate) fn new(iscsi: Arc<IscsiModule>, vhost: Arc<VhostModule>) -> ScsiDeviceModule {
        ScsiDeviceModule { iscsi, vhost, numbers: Mutex::default() }
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
    let mut owners: BTreeSet<ScsiDeviceOwner> = module
        .iscsi
        .target()
        .nodes()
        .into_iter()
        .map(|node| ScsiDeviceOwner::TargetNode(node.name))
        .collect();
    for controller in module.vhost.target().configured() {
        if let VhostBackendInfo::Scsi { targets, .. } = controller.backend {
            owners.extend(targets.iter().map(|target| ScsiDeviceOwner::VhostTarget {
                controller: controller.name.clone(),
                number: target.number,
            }));
        }
    }
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

#[cfg(test)]
mod tests {
    use bdev::Registry;

    use super::*;
    use crate::app::{App, StartOptions};

    #[test]
    fn target_nodes_and_targets_of_vhost_hosts_are_devices() {
        let app = App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap();
        let call = |method: &str, params: Value| app.control.invoke(method, params).unwrap();
        for name in ["M0", "M1"] {
            call("bdev_malloc_create", json!({ "name": name, "num_blocks": 64, "block_size": 512 }));
        }
        call("vhost_create_scsi_controller", json!({ "ctrlr": "host", "delay": true }));
        let add = json!({ "ctrlr": "host", "scsi_target_num": 3, "bdev_name": "M0" });
        call("vhost_scsi_controller_add_target", add);
        assert_eq!(call("scsi_get_devices", Value::Null), json!([{ "id": 0, "device_name": "Target 3" }]));
        let node = json!({ "name": "iqn.2026-11.test:disk", "alias_name": "disk", "queue_depth": 64,
            "luns": [{ "bdev_name": "M1", "lun_id": 0 }], "pg_ig_maps": [] });
        call("iscsi_create_target_node", node);
        let both = json!([{ "id": 0, "device_name": "Target 3" },
            { "id": 1, "device_name": "iqn.2026-11.test:disk" }]);
        assert_eq!(call("scsi_get_devices", Value::Null), both);
        let remove = json!({ "ctrlr": "host", "scsi_target_num": 3 });
        call("vhost_scsi_controller_remove_target", remove);
        // Its number is free again, and that of the other does not change.
        let one = json!([{ "id": 1, "device_name": "iqn.2026-11.test:disk" }]);
        assert_eq!(call("scsi_get_devices", Value::Null), one);
    }
}
