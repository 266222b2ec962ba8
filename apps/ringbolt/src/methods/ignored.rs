//! Options of things that Ringbolt does not have. SPDK's configuration files are full of them; they are
//! accepted, and each says that it does nothing, and why.

use serde_json::Value;

use super::{Method, Stage, Table};
use crate::say::complain;

const IGNORED: [(&str, &str); 18] = [
    ("accel_set_options", "there is no acceleration framework"),
    ("bdev_iscsi_set_options", "there is no iSCSI initiator"),
    ("bdev_nvme_set_hotplug", "PCIe devices are attached by name"),
    ("bdev_raid_set_options", "there is no RAID module"),
    ("bdev_set_options", "the layer sizes itself: requests and buffers come from bounded per-core pools"),
    ("bdev_virtio_blk_set_hotplug", "there is no virtio initiator"),
    ("framework_disable_cpumask_locks", "cores are not locked by files"),
    ("framework_enable_cpumask_locks", "cores are not locked by files"),
    ("framework_set_scheduler", "reactors do not move between cores; --idle chooses how they rest"),
    ("iobuf_set_options", "buffers are limited by --memory"),
    ("iscsi_set_options", "there is no iSCSI target yet"),
    ("keyring_linux_set_options", "there are no keys yet"),
    ("nvmf_set_config", "the target has none of these options"),
    ("nvmf_set_crdt", "commands are not delayed on retry"),
    ("nvmf_set_max_subsystems", "the target has its own limit"),
    ("scheduler_set_options", "reactors do not move between cores"),
    ("sock_impl_set_options", "sockets are the kernel's; there is one implementation"),
    ("sock_set_default_impl", "sockets are the kernel's; there is one implementation"),
];

pub(super) fn add(table: &mut Table) {
    for (name, reason) in IGNORED {
        let handler = move |_: &crate::state::App, _: Value| {
            complain!("{name} is ignored: {reason}");
            Ok(Value::Bool(true))
        };
        let stages = &[Stage::Startup, Stage::Runtime];
        table.insert(name, Method { handler: Box::new(handler), stages, changes: false });
    }
}
