//! Methods that set options of subsystems that Ringbolt lacks. SPDK's configuration files contain many of
//! them; they succeed without effect, and the log says which and why.

use control::{Method, Module};

/// SPDK's methods without effect.
pub(crate) struct Compatibility;

const IGNORED: [(&str, &str); 18] = [
    ("accel_set_options", "there is no acceleration framework"),
    ("bdev_iscsi_set_options", "there is no iSCSI initiator"),
    ("bdev_nvme_set_hotplug", "PCIe devices are attached by name"),
    ("bdev_raid_set_options", "there is no RAID module"),
    ("bdev_set_options", "requests and buffers come from bounded per-core pools"),
    ("bdev_virtio_blk_set_hotplug", "there is no virtio initiator"),
    ("framework_disable_cpumask_locks", "cores are not locked by files"),
    ("framework_enable_cpumask_locks", "cores are not locked by files"),
    ("framework_set_scheduler", "reactors do not move between cores; --idle selects their idle policy"),
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

impl Module for Compatibility {
    const NAME: &'static str = "compatibility";

    fn methods() -> Vec<Method<Compatibility>> {
        IGNORED.into_iter().map(|(name, reason)| Method::without_effect(name, reason)).collect()
    }
}
