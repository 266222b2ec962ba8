//! The module of the target for the control plane: the methods `nbd_export_*` and those of disks.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use bdev::rpc::{STILL_OPEN, conclude};
use bdev::{Closing, Registry};
use control::json::{Value, json};
use control::{BalancedTarget, ByName, Method, Metric, MetricSamples, Module, NoParameters, RpcError};
use reactor::ReactorHandle;
use sockets::StreamAddress;
use target_shell::ConnectionLimits;
use tls::{CertificateError, CertificateFiles};

use crate::kernel::{self, DiskRequest, KernelDisks};
use crate::limits::CONNECTIONS_DEFAULT;
use crate::{
    ExportConfig, ExportInfo, KernelDisk, KernelDiskError, NbdTarget, NbdTargetError, TlsFiles, TlsKeysError,
};

/// NBD's port.
const PORT: u16 = 10809;

/// The NBD target as a [`Module`].
pub struct NbdModule {
    target: NbdTarget,
    disks: KernelDisks,
}

impl NbdModule {
    /// A target without exports on `reactors`, for the devices of `registry`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Arc<NbdModule> {
        // In this order, so that the target sees the removal of a device before its disks do.
        let target = NbdTarget::new(registry.clone(), reactors);
        Arc::new(NbdModule { target, disks: KernelDisks::new(&registry) })
    }

    /// The target.
    pub fn target(&self) -> &NbdTarget {
        &self.target
    }

    fn default_connections(&self) -> u32 {
        self.target.core_count().clamp(1, 4) as u32
    }
}

const UNRESPONSIVE: (i64, &str) = (RpcError::ETIMEDOUT, "a reactor does not respond; nothing was changed");

impl Module for NbdModule {
    const NAME: &'static str = "nbd";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<NbdModule>> {
        vec![
            Method::update("nbd_export_create", create)
                .text(
                    "Exports a bdev to NBD clients. Exports with the same address share a listener; if it has one \
                     export, clients may leave out the name. Not an SPDK method.",
                    "the URI of the export",
                )
                .assigns(&["port=0"])
                .canonical(canonical_export)
                .errors(&[
                    (RpcError::INVALID_PARAMS, "a parameter is invalid, or the export exists"),
                    (RpcError::ENODEV, "there is no such bdev"),
                    (RpcError::EBUSY, "the bdev is claimed"),
                    (RpcError::INTERNAL, "the address cannot be listened at, or the target is stopping"),
                    UNRESPONSIVE,
                ]),
            Method::concluded_update("nbd_export_delete", delete, conclude)
                .text(
                    "Deletes an export. Its connections complete what is in flight and are closed. Not an SPDK \
                     method.",
                    "true",
                )
                .errors(&[(RpcError::ENODEV, "there is no such export"), UNRESPONSIVE, STILL_OPEN]),
            Method::query("nbd_export_get", get)
                .text(
                    "Describes exports. Not an SPDK method.",
                    "array of exports with `uri`, `size` in bytes, `block_size`, `connections` and `connections_max`, which \
                     the export may have while others have theirs",
                )
                .errors(&[(RpcError::ENODEV, "there is no such export"), UNRESPONSIVE]),
            Method::update("nbd_set_options", set_options)
                .at_any_stage()
                .text(
                    "Sets how many connections there may be, for clients that come from now on. What is left out is as by \
                     default. Not an SPDK method.",
                    "true",
                )
                .errors(&[(RpcError::INVALID_PARAMS, "a limit is 0 or beyond 16,384")]),
            Method::query("nbd_get_options", |module: &NbdModule, _: NoParameters| {
                Ok::<_, RpcError>(module.target.limits().named("export"))
            })
            .text("Returns the options. Not an SPDK method.", "the parameters of `nbd_set_options` that are set"),
            Method::update("nbd_set_tls", set_tls)
                .text(
                    "Sets with what clients may begin TLS 1.3 (STARTTLS) from now on: keys that they have, a \
                     certificate of this server, or both. The files are read now; a call with the same ones \
                     reads them again. Without parameters there is no TLS any more. Not an SPDK method.",
                    "true",
                )
                .errors(&[
                    (RpcError::INVALID_PARAMS, "a file has something else, or an export requires TLS"),
                    (RpcError::EPERM, "a file with keys is refused: it is not for its owner alone"),
                    UNRESPONSIVE,
                ]),
            Method::query("nbd_get_peers", |module: &NbdModule, _: NoParameters| {
                Ok::<_, RpcError>(module.target.peers())
            })
            .text(
                "Lists the clients that have selected an export, those with the most connections first. Not an SPDK method.",
                "array with `peer` (an IPv4 address, a /64 network of IPv6, or the process at a UNIX socket), `connections`, \
                 and `connections_max`, which it may have while others have theirs",
            ),
            Method::update("nbd_start_disk", start_disk)
                .text(
                    "Makes a bdev a block device of this machine, which the kernel's NBD driver reads and writes \
                     through this process. Needs root and the kernel module nbd. If a killed process left that device, \
                     of a bdev of the same name, it is reconnected.",
                    "path of the block device",
                )
                .assigns(&["nbd_device"])
                .canonical(|module: &NbdModule, params: &mut StartDisk| {
                    params.bdev_name = module.target.bdev_name(&params.bdev_name);
                    params.connections.get_or_insert(module.default_connections());
                    Ok(())
                })
                .errors(&[
                    (RpcError::INVALID_PARAMS, "a parameter is invalid"),
                    (RpcError::ENODEV, "there is no such bdev, or the kernel has no NBD driver"),
                    (RpcError::EPERM, "the process has no CAP_SYS_ADMIN"),
                    (RpcError::EBUSY, "the block device is connected already"),
                    (RpcError::INTERNAL, "the kernel refuses for another reason"),
                    UNRESPONSIVE,
                ]),
            Method::concluded_update("nbd_stop_disk", stop_disk, conclude)
                .text("Disconnects a block device of `nbd_start_disk`. Its users get I/O errors.", "true")
                .errors(&[(RpcError::ENODEV, "there is no such disk"), UNRESPONSIVE, STILL_OPEN]),
            Method::query("nbd_get_disks", get_disks)
                .text(
                    "Lists the block devices of `nbd_start_disk`.",
                    "array of disks with `bdev_name`, `nbd_device`, `connections` and `reconnect_timeout_s`",
                )
                .errors(&[(RpcError::ENODEV, "there is no such disk")]),
        ]
    }

    fn drain(&self) {
        self.disks.stop_all();
        self.target.shutdown();
    }

    fn stop(&self) {
        self.target.close();
    }

    fn save(&self) -> Vec<Value> {
        let call =
            |info: ExportInfo| json!({ "method": "nbd_export_create", "params": params(&info.config) });
        let is_disk =
            |disk: KernelDisk| json!({ "method": "nbd_start_disk", "params": describe_disk(&disk) });
        let exports = self.target.configured().into_iter();
        let exports = exports.filter(|info| !self.disks.owns(&info.config.name)).map(call);
        let limits = self.target.limits();
        let options = (limits != ConnectionLimits::new(CONNECTIONS_DEFAULT))
            .then(|| json!({ "method": "nbd_set_options", "params": limits.named("export") }));
        let tls = self.target.tls_files();
        let tls = tls.map(|files| json!({ "method": "nbd_set_tls", "params": SetTls::of(files) }));
        options
            .into_iter()
            .chain(tls)
            .chain(exports)
            .chain(self.disks.list().into_iter().map(is_disk))
            .collect()
    }

    fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>> {
        self.target.balanced().into_iter().collect()
    }

    fn metrics() -> Vec<&'static Metric> {
        target_shell::connection_metrics()
    }

    fn collect(&self, samples: &mut MetricSamples) {
        target_shell::collect_connections("nbd", self.target.connection_totals(), samples);
    }

    fn report(&self) -> Value {
        let disks = self.disks.list().len();
        json!({ "exports": self.target.configured().len().saturating_sub(disks), "disks": disks })
    }
}

impl From<NbdTargetError> for RpcError {
    fn from(error: NbdTargetError) -> RpcError {
        let code = match &error {
            NbdTargetError::Bdev(bdev::BdevError::NotFound { .. }) | NbdTargetError::NotFound(_) => {
                RpcError::ENODEV
            }
            NbdTargetError::Bdev(bdev::BdevError::Claimed { .. }) => RpcError::EBUSY,
            NbdTargetError::Exists(_) | NbdTargetError::Invalid(_) => RpcError::INVALID_PARAMS,
            NbdTargetError::TlsKeys(
                TlsKeysError::File { .. } | TlsKeysError::Certificate(CertificateError::KeyFile { .. }),
            ) => RpcError::EPERM,
            NbdTargetError::TlsKeys(_) => RpcError::INVALID_PARAMS,
            NbdTargetError::TooMany(_) => RpcError::ENOSPC,
            NbdTargetError::NotApplied(_)
            | NbdTargetError::Shell(target_shell::ShellError::Unresponsive(_)) => RpcError::ETIMEDOUT,
            _ => RpcError::INTERNAL,
        };
        RpcError::new(code, error.to_string())
    }
}

impl From<KernelDiskError> for RpcError {
    fn from(error: KernelDiskError) -> RpcError {
        use rustix::io::Errno;
        let code = match error {
            KernelDiskError::Target(error) => return error.into(),
            KernelDiskError::Invalid(_) => RpcError::INVALID_PARAMS,
            KernelDiskError::NotFound(_) | KernelDiskError::Kernel(Errno::NOENT, _) => RpcError::ENODEV,
            KernelDiskError::Kernel(Errno::PERM | Errno::ACCESS, _) => RpcError::EPERM,
            KernelDiskError::Kernel(Errno::BUSY, _) => RpcError::EBUSY,
            KernelDiskError::Kernel(..) | KernelDiskError::Io { .. } => RpcError::INTERNAL,
        };
        RpcError::new(code, error.to_string())
    }
}

control::parameters! {
    struct SetOptions {
        /// Connections of all clients that have selected an export
        max_connections: u32 = CONNECTIONS_DEFAULT,
        /// Of these, of one client: an IPv4 address, a /64 network of IPv6, or a process at a UNIX socket;
        /// half of what others leave, but at least 16, if left out. All processes of a user have seven
        /// eighths
        max_connections_per_peer: Option<u32>,
        /// Of these, to one export; three quarters of what others leave, but at least 16, if left out
        max_connections_per_export: Option<u32>,
    }
}

fn set_options(module: &NbdModule, params: SetOptions) -> Result<bool, RpcError> {
    module.target.set_limits(ConnectionLimits {
        max: params.max_connections,
        per_peer_max: params.max_connections_per_peer,
        per_object_max: params.max_connections_per_export,
    })?;
    Ok(true)
}

control::parameters! {
    struct SetTls {
        /// File with the keys of clients, lines `NAME:HEX` as `psktool` writes them; for its owner alone
        psk_file: Option<String>,
        /// File with the certificate of this server, in PEM, and those between it and its authority
        certificate_file: Option<String>,
        /// File with its private key, in PEM without a password; for its owner alone
        private_key_file: Option<String>,
        /// File with the authorities of clients, in PEM: each client needs a certificate of one of them,
        /// unless it has a key of `psk_file`; with neither, every client that reaches the server is served
        client_ca_file: Option<String>,
    }
}

impl SetTls {
    /// The files; `None` without any.
    fn files(self) -> Result<Option<TlsFiles>, RpcError> {
        // A saved configuration may be applied in another folder.
        let absolute = |path: Option<String>| {
            let path = path.map(std::path::absolute).transpose();
            path.map_err(|error| RpcError::invalid_params(format!("the path of a file: {error}")))
        };
        let psk_file = absolute(self.psk_file)?;
        let certificate_file = absolute(self.certificate_file)?;
        let private_key_file = absolute(self.private_key_file)?;
        let client_ca_file = absolute(self.client_ca_file)?;
        let certificate = match (certificate_file, private_key_file) {
            (Some(certificate), Some(private_key)) => {
                Some(CertificateFiles { certificate, private_key, client_ca: client_ca_file })
            }
            (None, None) if client_ca_file.is_none() => None,
            (None, None) => {
                let reason = "client_ca_file: it needs certificate_file and private_key_file";
                return Err(RpcError::invalid_params(reason));
            }
            _ => {
                return Err(RpcError::invalid_params("certificate_file, private_key_file: both or none"));
            }
        };
        Ok((psk_file.is_some() || certificate.is_some()).then_some(TlsFiles { psk_file, certificate }))
    }

    /// The parameters for these files.
    fn of(files: TlsFiles) -> Value {
        let TlsFiles { psk_file, certificate } = files;
        let mut params = json!({});
        let mut add = |name: &str, path: Option<&Path>| {
            if let Some(path) = path {
                params[name] = json!(path.to_string_lossy());
            }
        };
        add("psk_file", psk_file.as_deref());
        if let Some(CertificateFiles { certificate, private_key, client_ca }) = &certificate {
            add("certificate_file", Some(certificate));
            add("private_key_file", Some(private_key));
            add("client_ca_file", client_ca.as_deref());
        }
        params
    }
}

fn set_tls(module: &NbdModule, params: SetTls) -> Result<bool, RpcError> {
    module.target.set_tls(params.files()?)?;
    Ok(true)
}

control::parameters! {
    struct StartDisk {
        /// The bdev, by name, alias or UUID
        bdev_name: String,
        /// Path of the block device, /dev/nbdN; the kernel chooses one if left out
        nbd_device: Option<String>,
        /// Connections, each a queue of the kernel; one for each reactor, but at most 4, if left out
        connections: Option<u32>,
        /// Seconds that I/O waits for the next process if this one is killed; 0 lets it fail at once
        reconnect_timeout_s: u32 = 60,
    }
}

control::parameters! {
    struct StopDisk {
        /// Path of the block device
        nbd_device: String,
    }
}

control::parameters! {
    struct GetDisks {
        /// The block device; all if left out
        nbd_device: Option<String>,
    }
}

fn start_disk(module: &NbdModule, params: StartDisk) -> Result<String, RpcError> {
    let index = params.nbd_device.as_deref().map(kernel::device_index).transpose()?;
    let connections = params.connections.unwrap_or(module.default_connections());
    let StartDisk { bdev_name, reconnect_timeout_s, .. } = &params;
    let reconnect_timeout_s = *reconnect_timeout_s;
    let request = DiskRequest { bdev_name, index, connections, reconnect_timeout_s };
    Ok(module.disks.start(&module.target, &request)?.device())
}

fn stop_disk(module: &NbdModule, params: StopDisk) -> Result<Closing, RpcError> {
    Ok(module.disks.stop(&module.target, &params.nbd_device)?)
}

fn get_disks(module: &NbdModule, params: GetDisks) -> Result<Vec<Value>, RpcError> {
    let mut disks = module.disks.list();
    if let Some(device) = params.nbd_device {
        disks.retain(|disk| disk.device() == device);
        if disks.is_empty() {
            return Err(KernelDiskError::NotFound(device).into());
        }
    }
    Ok(disks.iter().map(describe_disk).collect())
}

fn describe_disk(disk: &KernelDisk) -> Value {
    json!({
        "bdev_name": disk.bdev_name,
        "nbd_device": disk.device(),
        "connections": disk.connections,
        "reconnect_timeout_s": disk.reconnect_timeout_s,
    })
}

control::parameters! {
    struct Create {
        /// The bdev to export, by name, alias or UUID
        bdev_name: String,
        /// Name of the export, unique in the target; that of the bdev if left out
        name: Option<String>,
        /// A text for humans, which clients can list
        description: String = String::new(),
        /// Reject writes
        read_only: bool = false,
        /// Only clients that have begun TLS may use it, or see it: `nbd_set_tls` comes first
        require_tls: bool = false,
        /// IP address to listen at; 127.0.0.1 if left out
        address: Option<String>,
        /// TCP port to listen at, 10809 if left out; 0 for any free one
        port: Option<u16>,
        /// Path of a UNIX socket to listen at, instead of an address
        path: Option<String>,
    }
}

control::parameters! {
    struct Get {
        /// The export; all if left out
        name: Option<String>,
    }
}

impl Create {
    fn listen_address(&self) -> Result<StreamAddress, RpcError> {
        match (&self.path, &self.address, self.port) {
            // Without `//` and `/./`.
            (Some(path), None, None) => Ok(StreamAddress::Unix(Path::new(path).components().collect())),
            (Some(_), ..) => Err(RpcError::invalid_params("path: it excludes address and port")),
            (None, address, port) => {
                let address = address.as_deref().unwrap_or("127.0.0.1");
                let ip = sockets::parse_ip(address).map_err(|error| {
                    RpcError::invalid_params(format!("address: {address} is not an IP address: {error}"))
                })?;
                Ok(StreamAddress::Tcp(SocketAddr::new(ip, port.unwrap_or(PORT))))
            }
        }
    }
}

fn canonical_export(module: &NbdModule, params: &mut Create) -> Result<(), RpcError> {
    match params.listen_address()? {
        StreamAddress::Tcp(address) => {
            (params.address, params.port) = (Some(address.ip().to_string()), Some(address.port()));
        }
        StreamAddress::Unix(path) => params.path = Some(path.to_string_lossy().into_owned()),
        StreamAddress::Other(_) => {}
    }
    params.name.get_or_insert_with(|| params.bdev_name.clone());
    params.bdev_name = module.target.bdev_name(&params.bdev_name);
    Ok(())
}

fn create(module: &NbdModule, params: Create) -> Result<String, RpcError> {
    let address = params.listen_address()?;
    let name = params.name.unwrap_or_else(|| params.bdev_name.clone());
    let Create { bdev_name, description, read_only, require_tls, .. } = params;
    let config = ExportConfig { bdev_name, name, description, read_only, require_tls, address };
    let info = module.target.create(config)?;
    Ok(info.uri())
}

fn delete(module: &NbdModule, params: ByName) -> Result<Closing, RpcError> {
    Ok(module.target.delete(&params.name)?)
}

fn get(module: &NbdModule, params: Get) -> Result<Vec<Value>, RpcError> {
    let mut exports = module.target.exports()?;
    exports.retain(|export| !module.disks.owns(&export.config.name));
    if let Some(name) = params.name {
        exports.retain(|export| export.config.name == name);
        if exports.is_empty() {
            return Err(NbdTargetError::NotFound(name).into());
        }
    }
    let describe = |info: ExportInfo| {
        let mut value = self::params(&info.config);
        value["uri"] = json!(info.uri());
        value["read_only"] = json!(info.read_only);
        value["size"] = json!(info.size);
        value["block_size"] = json!(info.block_size);
        value["connections"] = json!(info.connections);
        value["connections_max"] = json!(info.connections_max);
        value
    };
    Ok(exports.into_iter().map(describe).collect())
}

/// An export as parameters of `nbd_export_create`.
fn params(config: &ExportConfig) -> Value {
    let mut params = json!({
        "bdev_name": config.bdev_name,
        "name": config.name,
        "description": config.description,
        "read_only": config.read_only,
        "require_tls": config.require_tls,
    });
    match &config.address {
        StreamAddress::Tcp(address) => {
            params["address"] = json!(address.ip().to_string());
            params["port"] = json!(address.port());
        }
        StreamAddress::Unix(path) => params["path"] = json!(path.to_string_lossy()),
        StreamAddress::Other(_) => {}
    }
    params
}
