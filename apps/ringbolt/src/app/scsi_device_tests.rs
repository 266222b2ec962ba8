//! Tests of the list of SCSI devices.

use bdev::Registry;

use control::json::{Value, json};

use super::{App, StartOptions};

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
