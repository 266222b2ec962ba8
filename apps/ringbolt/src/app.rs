//! The program's modules and its control plane.

use std::path::PathBuf;
use std::sync::Arc;

use bdev::Registry;
use bdev::rpc::BdevModule;
use bdev_gpt::GptModule;
use bdev_nvme::rpc::NvmeModule;
use control::{Catalog, ConfigFile, ControlPlane, Keyring, KeyringModule, ManagedReactor, RpcError};
use device_model::rpc::ModelModule;
use iscsi::IscsiTarget;
use iscsi::rpc::IscsiModule;
use lvol::LvolModule;
use nbd::NbdTarget;
use nbd::rpc::NbdModule;
use nvmf::NvmfTarget;
use nvmf::rpc::NvmfModule;
use reactor::ReactorHandle;
use store_client::rpc::ClusterImageModule;
use store_node::node_rpc::NodeModule;
use store_node::rpc::StoreModule;
use ublk::rpc::UblkModule;
use vhost::VhostTarget;
use vhost::rpc::{VhostModule, VhostScsiModule};

use crate::fixed_options::{AccelOptions, FixedSubsystem, FsdevOptions, IobufOptions, SchedulerName};
use crate::machine::MachineModule;
use crate::modules::Compatibility;
use crate::scsi_devices::ScsiDeviceModule;
use crate::sock::SocketModule;

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
    /// If given, the program is in the start-up stage, and `framework_start_init` applies this configuration; otherwise it
    /// is in the runtime stage.
    pub(crate) pending: Option<ConfigFile>,
    /// Where the sockets of vhost controllers are; empty for the current directory.
    pub(crate) vhost_socket_dir: PathBuf,
}

/// The methods of every module.
pub(crate) fn catalog() -> Catalog {
    Catalog::new()
        .with::<FixedSubsystem<SchedulerName>>()
        .with::<SocketModule>()
        .with::<FixedSubsystem<IobufOptions>>()
        .with::<KeyringModule>()
        .with::<FixedSubsystem<FsdevOptions>>()
        .with::<FixedSubsystem<AccelOptions>>()
        .with::<BdevModule>()
        .with::<GptModule>()
        .with::<NvmeModule>()
        .with::<ModelModule>()
        .with::<LvolModule>()
        .with::<StoreModule>()
        .with::<NodeModule>()
        .with::<ClusterImageModule>()
        .with::<NvmfModule>()
        .with::<NbdModule>()
        .with::<IscsiModule>()
        .with::<VhostModule>()
        .with::<VhostScsiModule>()
        .with::<ScsiDeviceModule>()
        .with::<UblkModule>()
        .with::<MachineModule>()
        .with::<Compatibility>()
}

impl App {
    /// Starts the modules, without bdevs.
    pub(crate) fn start(
        registry: Registry,
        reactors: Vec<ManagedReactor>,
        options: StartOptions,
    ) -> Result<App, RpcError> {
        let StartOptions { pending, vhost_socket_dir } = options;
        let handles: Vec<ReactorHandle> = reactors.iter().map(|reactor| reactor.handle.clone()).collect();
        let builder = ControlPlane::builder(reactors);
        let bdevs = BdevModule::new(registry.clone(), builder.examiner());
        let nvmf = NvmfModule::new(registry.clone(), &handles);
        let iscsi = IscsiModule::new(registry.clone(), &handles);
        let nbd = NbdModule::new(registry.clone(), &handles);
        let vhost = VhostModule::new(registry.clone(), &handles, vhost_socket_dir);
        let control = builder
            .module(&Arc::new(FixedSubsystem::<SchedulerName>::new()))
            // Before whatever opens connections.
            .module(&Arc::new(SocketModule::new()))
            .module(&Arc::new(FixedSubsystem::<IobufOptions>::new()))
            // Before whatever uses a key.
            .module(&Arc::new(KeyringModule::new(Keyring::default())))
            .module(&Arc::new(FixedSubsystem::<FsdevOptions>::new()))
            .module(&Arc::new(FixedSubsystem::<AccelOptions>::new()))
            .module(&bdevs)
            .module(&GptModule::new(&bdevs, &handles))
            .module(&NvmeModule::new(&bdevs, &handles))
            .module(&ModelModule::new(bdevs.clone()))
            .module(&LvolModule::new(registry.clone(), &handles))
            .module(&StoreModule::new(registry.clone(), &handles))
            .module(&NodeModule::new(registry.clone(), &handles))
            .module(&ClusterImageModule::new(registry.clone()))
            // What keeps reservations is before what obeys them: those that persist are in force again first.
            .module(&nvmf)
            .module(&iscsi)
            .module(&VhostScsiModule::new(&vhost))
            .module(&nbd)
            .module(&vhost)
            .module(&Arc::new(ScsiDeviceModule::new(iscsi.clone(), vhost.clone())))
            .module(&UblkModule::new(registry.clone(), &handles))
            .module(&Arc::new(MachineModule::new(registry.clone(), handles)))
            .module(&Arc::new(Compatibility))
            .start(pending)?;
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

/// Whether a configuration attaches a vfio-user controller: another process then maps the I/O buffers.
pub(crate) fn needs_shared_memory(config: &ConfigFile) -> bool {
    let is_vfio_user = |name: &str| name.eq_ignore_ascii_case("vfiouser");
    config.calls().any(|(method, params)| {
        method == "bdev_nvme_attach_controller" && params["trtype"].as_str().is_some_and(is_vfio_user)
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
            "framework_get_modules",
            "iscsi_target_node_set_access_state",
            "job_cancel",
            "job_get",
            "load_config",
            "nbd_get_options",
            "nbd_get_peers",
            "nbd_set_options",
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
        assert!(Catalog::not_found("bdev_crypto_create").message.contains("is an SPDK method"));
        assert_eq!(Catalog::not_found("bdev_cryptocreate").message, "no method is called bdev_cryptocreate");
    }

    #[test]
    fn defaults_are_accepted_and_what_is_not_there_is_rejected_by_name() {
        let app = App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap();
        for (method, params, rejected) in [
            ("framework_set_scheduler", json!({ "name": "static" }), None),
            ("framework_set_scheduler", json!({ "name": "dynamic" }), Some("name: \"dynamic\"")),
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
            ("nvmf_set_crdt", json!({ "crdt1": 10 }), Some("crdt1: 10")),
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
    fn the_reference_is_current() {
        let written = include_str!("../../../docs/RPC.md");
        let generated = control::reference::markdown(&catalog());
        let differs = written.lines().zip(generated.lines()).find(|(old, new)| old != new);
        assert!(
            written == generated,
            "docs/RPC.md differs, first at {differs:?}; run `cargo run -p ringbolt -- rpc-reference > docs/RPC.md`"
        );
    }
}

#[cfg(test)]
mod reload_tests;
