//! The program's modules and its control plane.

use std::path::PathBuf;
use std::sync::Arc;

use accel::AccelModule;
use bdev::Registry;
use bdev::rpc::{BdevModule, MachineModule};
use bdev_crypto::CryptoModule;
use bdev_gpt::GptModule;
use bdev_nvme::rpc::NvmeModule;
use bdev_raid::RaidModule;
use bdev_rbd::RbdModule;
use control::{
    Balancer, Catalog, Compatibility, ConfigFile, ControlPlane, ControlPlaneBuilder, FixedSubsystem,
    FsdevOptions, IobufOptions, Keyring, KeyringModule, ManagedReactor, RpcError, SchedulerModule,
    SocketModule,
};
use device_model::rpc::ModelModule;
use iscsi::IscsiTarget;
use iscsi::rpc::IscsiModule;
use lvol::LvolModule;
use nbd::NbdTarget;
use nbd::rpc::NbdModule;
use nvmf::NvmfTarget;
use nvmf::rpc::NvmfModule;
use reactor::ReactorHandle;
use scsi::ScsiDeviceModule;
use store_client::rpc::ClusterImageModule;
use store_node::node_rpc::NodeModule;
use store_node::rpc::StoreModule;
use ublk::rpc::UblkModule;
use vhost::VhostTarget;
use vhost::rpc::{VhostModule, VhostScsiModule};

/// A running program: the control plane, and the modules that commands use directly.
///
/// At exit: [`drain`](ControlPlane::drain) of the control plane, then stop the reactors, then
/// [`stop`](ControlPlane::stop).
pub(crate) struct App {
    pub(crate) control: Arc<ControlPlane>,
    pub(crate) registry: Registry,
    nvmf: Arc<NvmfModule>,
    nbd: Arc<NbdModule>,
    iscsi: Arc<IscsiModule>,
    vhost: Arc<VhostModule>,
}

/// How the modules are started.
#[derive(Default)]
pub(crate) struct StartOptions {
    /// If given, the program is in the start-up stage, and `framework_start_init` applies this configuration;
    /// otherwise it is in the runtime stage.
    pub(crate) pending: Option<ConfigFile>,
    /// Where the sockets of vhost controllers are; empty for the current directory.
    pub(crate) vhost_socket_dir: PathBuf,
    /// The secrets that methods name.
    pub(crate) keyring: Keyring,
}

/// What modules are made from.
struct ModuleParts {
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    balancer: Arc<Balancer>,
    keyring: Keyring,
    accel: Arc<AccelModule>,
    bdevs: Arc<BdevModule>,
    nvmf: Arc<NvmfModule>,
    nbd: Arc<NbdModule>,
    iscsi: Arc<IscsiModule>,
    vhost: Arc<VhostModule>,
}

/// Names every module once, with how it is made from its parts: the catalog and the program follow from the
/// list.
macro_rules! modules {
    (|$parts:ident| { $($module:ty => $make:expr,)+ }) => {
        /// The methods and metrics of every module.
        pub(crate) fn catalog() -> Catalog {
            Catalog::new()$(.with::<$module>())+
        }

        /// Registers every module.
        fn register(builder: ControlPlaneBuilder, $parts: &ModuleParts) -> ControlPlaneBuilder {
            builder$(.module::<$module>(&$make))+
        }
    };
}

// In the order of their start, as far as they do not depend on each other.
modules! { |parts| {
    SchedulerModule => SchedulerModule::new(parts.balancer.clone()),
    // Before whatever opens connections.
    SocketModule => Arc::new(SocketModule::new()),
    FixedSubsystem<IobufOptions> => Arc::new(FixedSubsystem::new()),
    // Before whatever uses a key.
    KeyringModule => Arc::new(KeyringModule::new(parts.keyring.clone())),
    FixedSubsystem<FsdevOptions> => Arc::new(FixedSubsystem::new()),
    AccelModule => parts.accel,
    BdevModule => parts.bdevs,
    CryptoModule => CryptoModule::new(&parts.bdevs, &parts.accel),
    GptModule => GptModule::new(&parts.bdevs, &parts.reactors),
    RaidModule => RaidModule::new(&parts.bdevs, &parts.reactors),
    NvmeModule => NvmeModule::new(&parts.bdevs, &parts.reactors, parts.keyring.clone()),
    RbdModule => RbdModule::new(&parts.bdevs),
    ModelModule => ModelModule::new(parts.bdevs.clone()),
    LvolModule => LvolModule::new(parts.registry.clone(), &parts.reactors),
    StoreModule => StoreModule::new(parts.registry.clone(), &parts.reactors),
    NodeModule => NodeModule::new(parts.registry.clone(), &parts.reactors),
    ClusterImageModule => ClusterImageModule::new(parts.registry.clone()),
    // What keeps reservations is before what obeys them: those that persist are in force again first.
    NvmfModule => parts.nvmf,
    IscsiModule => parts.iscsi,
    VhostScsiModule => VhostScsiModule::new(&parts.vhost),
    NbdModule => parts.nbd,
    VhostModule => parts.vhost,
    ScsiDeviceModule => Arc::new(ScsiDeviceModule::new(vec![
        parts.iscsi.scsi_devices(),
        parts.vhost.scsi_devices(),
    ])),
    UblkModule => UblkModule::new(parts.registry.clone(), &parts.reactors),
    MachineModule => Arc::new(MachineModule::new(parts.registry.clone(), parts.reactors.clone())),
    Compatibility => Arc::new(Compatibility),
} }

impl App {
    /// Starts the modules, without bdevs.
    pub(crate) fn start(
        registry: Registry,
        reactors: Vec<ManagedReactor>,
        options: StartOptions,
    ) -> Result<App, RpcError> {
        let StartOptions { pending, vhost_socket_dir, keyring } = options;
        let handles: Vec<ReactorHandle> = reactors.iter().map(|reactor| reactor.handle.clone()).collect();
        let builder = ControlPlane::builder(reactors);
        let parts = ModuleParts {
            accel: AccelModule::new(registry.accel().clone(), keyring.clone()),
            bdevs: BdevModule::new(registry.clone(), builder.examiner()),
            nvmf: NvmfModule::new(registry.clone(), &handles, keyring.clone()),
            iscsi: IscsiModule::new(registry.clone(), &handles),
            nbd: NbdModule::new(registry.clone(), &handles),
            vhost: VhostModule::new(registry.clone(), &handles, vhost_socket_dir),
            balancer: builder.balancer(),
            keyring,
            reactors: handles,
            registry,
        };
        let control = register(builder, &parts).start(pending)?;
        let ModuleParts { registry, nvmf, nbd, iscsi, vhost, .. } = parts;
        Ok(App { control, registry, nvmf, nbd, iscsi, vhost })
    }

    /// The NVMe-oF target.
    pub(crate) fn target(&self) -> &NvmfTarget {
        self.nvmf.target()
    }

    /// The NBD target.
    pub(crate) fn nbd(&self) -> &NbdTarget {
        self.nbd.target()
    }

    /// The iSCSI target.
    pub(crate) fn iscsi(&self) -> &IscsiTarget {
        self.iscsi.target()
    }

    /// The vhost-user target.
    pub(crate) fn vhost(&self) -> &VhostTarget {
        self.vhost.target()
    }
}

/// Whether a configuration opens a device behind vfio-user: another process then maps the I/O buffers.
pub(crate) fn needs_shared_memory(config: &ConfigFile) -> bool {
    let is_vfio_user = |name: &str| name.eq_ignore_ascii_case("vfiouser");
    config.calls().any(|(method, params)| {
        let is_served = |address: &serde_json::Value| {
            address.as_str().is_some_and(|address| address.starts_with("vfio-user:"))
        };
        match method {
            "bdev_nvme_attach_controller" => params["trtype"].as_str().is_some_and(is_vfio_user),
            "ioat_scan_accel_module" => {
                params["addresses"].as_array().is_some_and(|all| all.iter().any(is_served))
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use control::spdk_methods;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn every_method_is_spdks_or_a_known_extension_and_says_what_it_does() {
        let extensions = [
            "bdev_lvol_set_low_space",
            "bdev_raid_start_degraded",
            "framework_get_modules",
            "ioat_get_channels",
            "iscsi_target_node_set_access_state",
            "job_cancel",
            "job_get",
            "load_config",
            "metrics_get",
            "metrics_get_openmetrics",
            "nbd_get_options",
            "nbd_get_peers",
            "nbd_set_options",
            "nbd_set_tls",
            "nvmf_vfio_user_inject",
            "save_config",
            "trace_get_events",
            "vhost_get_options",
            "vhost_get_peers",
            "vhost_set_options",
        ];
        for info in catalog().iter() {
            let name = info.name;
            // SPDK 23.01 has `bdev_pmem_*`, newer versions lack them.
            let prefixes = ["bdev_gpt_", "bdev_model_", "bdev_pmem_", "bdev_store_", "nbd_export_", "store_"];
            let is_extension =
                extensions.contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix));
            assert!(spdk_methods().any(|known| known == name) || is_extension, "{name}");
            let is_described = !info.text.is_empty() && !info.result.is_empty();
            assert!(is_described || info.default_only.is_some(), "{name}");
        }
        assert!(Catalog::not_found("bdev_ftl_create").message.contains("is an SPDK method"));
        assert_eq!(Catalog::not_found("bdev_ftlcreate").message, "no method is called bdev_ftlcreate");
    }

    #[test]
    fn defaults_are_accepted_and_what_is_not_there_is_rejected_by_name() {
        let app = App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap();
        for (method, params, rejected) in [
            ("framework_set_scheduler", json!({ "name": "static" }), None),
            ("framework_set_scheduler", json!({ "name": "gscheduler" }), Some("name: \"gscheduler\"")),
            ("sock_impl_set_options", json!({ "impl_name": "posix", "recv_buf_size": 2 << 20 }), None),
            ("sock_impl_set_options", json!({ "impl_name": "ssl", "send_buf_size": 4096 }), None),
            (
                "sock_impl_set_options",
                json!({ "impl_name": "uring", "enable_zerocopy_send_server": true }),
                None,
            ),
            (
                "sock_impl_set_options",
                json!({ "impl_name": "posix", "recv_buf_size": 4096 }),
                Some("recv_buf_size: 4096 is not supported with posix"),
            ),
            (
                "sock_impl_set_options",
                json!({ "impl_name": "ssl", "send_buf_size": 2 << 20 }),
                Some("send_buf_size: 2097152"),
            ),
            (
                "sock_impl_set_options",
                json!({ "impl_name": "other", "enable_zerocopy_send_client": true }),
                Some("impl_name: \"other\""),
            ),
            (
                "sock_impl_set_options",
                json!({ "impl_name": "posix", "zerocopy_threshold": 1 }),
                Some("zerocopy_threshold: 1"),
            ),
            (
                "sock_impl_set_options",
                json!({ "impl_name": "posix", "enable_ktls": true }),
                Some("enable_ktls: true"),
            ),
            ("nvmf_set_crdt", json!({ "crdt1": 65536 }), Some("crdt1: ")),
            (
                "nvmf_set_config",
                json!({ "admin_cmd_passthru": { "sanitize": true } }),
                Some("admin_cmd_passthru.sanitize: true"),
            ),
            ("accel_set_options", json!({ "whatever": 1 }), Some("whatever: unknown parameter")),
            ("bdev_virtio_blk_set_hotplug", json!({ "enable": true, "period_us": 0 }), Some("enable: true")),
        ] {
            let message = app.control.invoke(method, params.clone()).err().map(|error| error.message);
            match (&message, rejected) {
                (None, None) => {}
                (Some(message), Some(expected)) if message.contains(expected) => {}
                _ => panic!("{method} {params}: {message:?}, expected {rejected:?}"),
            }
        }
    }

    #[test]
    fn subsystems_are_those_of_spdk_and_the_store_in_the_order_of_their_start() {
        let app = App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap();
        let depends_on = ["bdev"];
        let expected = json!([
            { "subsystem": "scheduler", "depends_on": [] },
            { "subsystem": "sock", "depends_on": [] },
            { "subsystem": "iobuf", "depends_on": [] },
            { "subsystem": "keyring", "depends_on": [] },
            { "subsystem": "fsdev", "depends_on": [] },
            { "subsystem": "accel", "depends_on": [] },
            { "subsystem": "bdev", "depends_on": [] },
            { "subsystem": "store", "depends_on": depends_on },
            { "subsystem": "store_node", "depends_on": depends_on },
            { "subsystem": "bdev_store", "depends_on": depends_on },
            { "subsystem": "nvmf", "depends_on": depends_on },
            { "subsystem": "iscsi", "depends_on": depends_on },
            { "subsystem": "vhost_scsi", "depends_on": depends_on },
            { "subsystem": "nbd", "depends_on": depends_on },
            { "subsystem": "vhost_blk", "depends_on": depends_on },
            { "subsystem": "ublk", "depends_on": depends_on },
        ]);
        assert_eq!(app.control.invoke("framework_get_subsystems", Value::Null), Ok(expected));
    }

    #[test]
    fn the_references_are_current() {
        let methods = control::reference::markdown(&catalog());
        let without_effect = control::reference::without_effect(&catalog());
        let metrics = control::metrics::markdown(&catalog());
        for (file, written, generated, command) in [
            ("docs/RPC.md", include_str!("../../../docs/RPC.md"), methods, "rpc-reference"),
            (
                "docs/PARAMETERS.md",
                include_str!("../../../docs/PARAMETERS.md"),
                without_effect,
                "rpc-reference --without-effect",
            ),
            ("docs/METRICS.md", include_str!("../../../docs/METRICS.md"), metrics, "metrics-reference"),
        ] {
            let differs = written.lines().zip(generated.lines()).find(|(old, new)| old != new);
            assert!(
                written == generated,
                "{file} differs, first at {differs:?}; run `cargo run -p ringbolt -- {command} > {file}`"
            );
        }
    }

    #[test]
    fn openmetrics_text_has_the_metrics_of_every_module() {
        let app = App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap();
        let null = json!({ "name": "N", "num_blocks": 8, "block_size": 512 });
        app.control.invoke("bdev_null_create", null).unwrap();
        let text = app.control.invoke("metrics_get_openmetrics", Value::Null).unwrap();
        let text = text.as_str().unwrap();
        for line in [
            "# TYPE ringbolt_bdev_size_bytes gauge",
            "ringbolt_bdev_size_bytes{bdev=\"N\"} 4096",
            "ringbolt_target_accepted_total{target=\"nbd\"} 0",
            "ringbolt_tenant_flows{tenant=\"ringbolt\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} in {text}");
        }
        assert!(text.ends_with("# EOF\n"));
        let declared: Vec<&str> = catalog().metrics().map(|metric| metric.name).collect();
        for family in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let name = family.split(' ').next().unwrap();
            assert!(declared.contains(&name), "{name} is not declared");
        }
        let one = app.control.invoke("metrics_get", json!({ "name": "ringbolt_bdev_size_bytes" })).unwrap();
        assert_eq!(one[0]["samples"], json!([{ "labels": { "bdev": "N" }, "value": 4096 }]));
        let unknown = app.control.invoke("metrics_get", json!({ "name": "ringbolt_nothing" })).unwrap_err();
        assert_eq!(unknown.code, RpcError::INVALID_PARAMS);
    }
}

/// Options of sockets are of the process: tests that set or save them take turns.
#[cfg(test)]
static OPTIONS_OF_PROCESS: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod fixed_options_tests;
#[cfg(test)]
mod machine_tests;
#[cfg(test)]
mod reload_tests;
#[cfg(test)]
mod scsi_device_tests;
#[cfg(test)]
mod sock_tests;
