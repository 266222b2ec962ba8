//! SPDK's methods that set options of subsystems that Ringbolt lacks, or in which it has no choice. SPDK's
//! configuration files contain many of them: what is so anyway is accepted, other values are rejected by
//! name.

use crate::{Method, Module, NoParameters};

/// SPDK's methods that accept defaults only.
pub struct Compatibility;

impl Module for Compatibility {
    const NAME: &'static str = "compatibility";

    fn methods() -> Vec<Method<Compatibility>> {
        let no_locks = "cores are not locked by files";
        let fixed_cores = "reactors do not move between cores; --idle selects their idle policy";
        let kernel_sockets = "sockets are the kernel's; there is one implementation";
        vec![
            Method::default_only::<IscsiInitiatorOptions>(
                "bdev_iscsi_set_options",
                "there is no iSCSI initiator",
            ),
            Method::default_only::<Hotplug>("bdev_virtio_blk_set_hotplug", "there is no virtio initiator"),
            Method::default_only::<NoParameters>("framework_disable_cpumask_locks", no_locks),
            Method::default_only::<NoParameters>("framework_enable_cpumask_locks", no_locks),
            Method::default_only::<SchedulerOptions>("scheduler_set_options", fixed_cores),
            Method::default_only::<SocketImplementation>("sock_set_default_impl", kernel_sockets),
        ]
    }
}

crate::parameters! {
    struct IscsiInitiatorOptions {}
    ignored("there is no iSCSI initiator") { timeout_sec }
}

crate::parameters! {
    struct Hotplug {}
    only("there is no virtio initiator") { enable: bool = false }
    ignored("devices are not looked for") { period_us }
}

crate::parameters! {
    struct SchedulerOptions {}
    only("reactors do not move between cores") { isolated_core_mask: String = String::new() }
    ignored("the control plane has threads of its own") { scheduling_core }
}

crate::parameters! {
    struct SocketImplementation {}
    one_of("sockets are the kernel's; there is one implementation") {
        impl_name: String = ["posix".to_string(), "uring".to_string()]
    }
}
