//! The control plane's handle of the target: exports and listeners.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard};

use bdev::{Access, BlockDevice, Closing, Descriptor, DeviceEvent, Registry};
use control::BalancedTarget;
use reactor::ReactorHandle;
use sockets::StreamAddress;
use target_shell::{
    ConnectionLimits, ConnectionTotals, ControlledTarget, LazyCores, PeerConnections, TargetControl,
    TargetCores,
};
use tls::ServerCredentials;

use crate::connection::NbdCore;
use crate::export::{Export, ExportNames, NbdConfig, write_unit_bytes};
use crate::failure::{NbdTargetError, TlsKeysError};
use crate::limits::{
    CONNECTIONS_DEFAULT, CONNECTIONS_MAX, DESCRIPTION_BYTES_MAX, EXPORTS_MAX, NAME_BYTES_MAX,
    WRITE_UNIT_BYTES_MAX,
};
use crate::tls_keys::TlsFiles;

/// What to export, and where.
#[derive(Clone, Debug)]
pub struct ExportConfig {
    /// Name, alias or UUID of the block device.
    pub bdev_name: String,
    /// Name of the export, unique in the target.
    pub name: String,
    /// A text for humans.
    pub description: String,
    /// Whether writes are rejected.
    pub read_only: bool,
    /// Whether only clients with TLS have it.
    pub require_tls: bool,
    /// Where to listen. Exports with the same address share a listener.
    pub address: StreamAddress,
}

/// An export as it is.
#[derive(Clone, Debug)]
pub struct ExportInfo {
    /// As it was created, with the bdev's own name and the port that the kernel assigned.
    pub config: ExportConfig,
    /// Whether writes are rejected, by configuration or by the device.
    pub read_only: bool,
    /// Size in bytes.
    pub size: u64,
    /// Size of a block in bytes.
    pub block_size: u32,
    /// Open connections, on all cores.
    pub connections: usize,
    /// How many it may have at present.
    pub connections_max: u32,
}

impl ExportInfo {
    /// The address of the export for clients.
    pub fn uri(&self) -> String {
        let name = percent_encode(&self.config.name);
        let scheme = if self.config.require_tls { "nbds" } else { "nbd" };
        match &self.config.address {
            StreamAddress::Tcp(address) => format!("{scheme}://{address}/{name}"),
            StreamAddress::Unix(path) => {
                let path = percent_encode(&path.to_string_lossy()).replace("%2F", "/");
                format!("{scheme}+unix:///{name}?socket={path}")
            }
            // No export has one.
            StreamAddress::Other(address) => format!("{}:{}/{name}", address.transport, address.text),
        }
    }
}

/// The NBD target of a program. Cheap to clone.
///
/// Calls block for up to [`CORE_TIMEOUT`](target_shell::CORE_TIMEOUT) and must not be made on a reactor. The
/// groups of connections start with the first export, so that a program without exports does not pay for
/// them.
#[derive(Clone)]
pub struct NbdTarget(TargetControl<TargetState>);

struct TargetState {
    cores: LazyCores<NbdCore>,
    exports: BTreeMap<String, Exported>,
    ports: Vec<ListenPort>,
    last_portid: u16,
    last_id: u64,
    tls: Option<TargetTls>,
}

/// With what clients may begin TLS, and from where it was read.
struct TargetTls {
    files: TlsFiles,
    credentials: ServerCredentials,
}

#[derive(Clone)]
struct Exported {
    export: Arc<Export>,
    descriptor: Arc<Descriptor>,
    address: StreamAddress,
    read_only: bool,
}

struct ListenPort {
    portid: u16,
    address: StreamAddress,
}

impl NbdTarget {
    /// A target without exports.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> NbdTarget {
        NbdTarget(TargetControl::new(registry, reactors, (), TargetState::new()))
    }

    /// The name of the block device that `name` finds.
    pub(crate) fn bdev_name(&self, name: &str) -> String {
        self.0.registry().name_of(name)
    }

    /// Exports a block device.
    ///
    /// # Errors
    /// The names are invalid or in use, the device cannot be opened, the address not be listened at, or a
    /// reactor does not respond; nothing has changed then.
    pub fn create(&self, config: ExportConfig) -> Result<ExportInfo, NbdTargetError> {
        check_names(&config)?;
        let mut state = self.lock()?;
        if state.exports.contains_key(&config.name) {
            return Err(NbdTargetError::Exists(config.name));
        }
        if state.exports.len() >= EXPORTS_MAX {
            return Err(NbdTargetError::TooMany(EXPORTS_MAX));
        }
        if config.require_tls && state.tls.is_none() {
            let reason = "require_tls: set the target's keys or certificate first (nbd_set_tls)";
            return Err(NbdTargetError::Invalid(reason.into()));
        }
        let access = if config.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let descriptor = self.0.registry().open(&config.bdev_name, access)?;
        if !config.read_only {
            check_write_unit(descriptor.device())?;
        }
        let (portid, is_new) = self.port(&mut state, &config.address)?;
        let address = state.ports.iter().find(|port| port.portid == portid).map(|port| port.address.clone());
        let key = self.0.assign_key();
        state.last_id += 1;
        let names = ExportNames {
            name: config.name.clone(),
            description: config.description.clone(),
            read_only: config.read_only,
            requires_tls: config.require_tls,
        };
        let export = Arc::new(Export::new(state.last_id, key, portid, names, descriptor.device()));
        let exported = Exported {
            export,
            descriptor: Arc::new(descriptor),
            address: address.unwrap_or(config.address),
            read_only: config.read_only,
        };
        let info = exported.info(0, 0);
        state.exports.insert(config.name.clone(), exported);
        if let Err(error) = self.0.publisher().change(Arc::new(state.config())) {
            state.exports.remove(&config.name);
            self.0.retire_keys([key]);
            if is_new {
                state.close_port(portid);
            }
            return Err(NbdTargetError::NotApplied(error));
        }
        Ok(info)
    }

    /// Deletes an export. Its connections complete what is in flight and are closed. What it returns waits
    /// until the block device is free.
    ///
    /// # Errors
    /// There is none of this name, or a reactor does not respond; nothing has changed then.
    pub fn delete(&self, name: &str) -> Result<Closing, NbdTargetError> {
        let mut state = self.lock()?;
        let exported = state.exports.remove(name).ok_or_else(|| NbdTargetError::NotFound(name.into()))?;
        if let Err(error) = self.0.publisher().change(Arc::new(state.config())) {
            state.exports.insert(name.into(), exported);
            return Err(NbdTargetError::NotApplied(error));
        }
        self.0.retire_keys([exported.export.key]);
        state.close_unused_ports();
        Ok(Closing::of([&*exported.descriptor]))
    }

    /// The exports by name.
    ///
    /// # Errors
    /// A reactor does not respond.
    pub fn exports(&self) -> Result<Vec<ExportInfo>, NbdTargetError> {
        let state = self.lock_any();
        let ids = match state.cores.get() {
            None => Vec::new(),
            Some(cores) => cores.query(|_, connections| {
                connections.open().filter_map(|connection| connection.export_id()).collect::<Vec<u64>>()
            })?,
        };
        let connections = |id| ids.iter().flatten().filter(|of| **of == id).count();
        let connections_max = |id| state.cores.object_connections_max(id);
        let info = |one: &Exported| one.info(connections(one.export.id), connections_max(one.export.id));
        Ok(state.exports.values().map(info).collect())
    }

    /// The exports by name, without their connections.
    pub fn configured(&self) -> Vec<ExportInfo> {
        self.lock_any().exports.values().map(|one| one.info(0, 0)).collect()
    }

    /// The clients that have connected, those with the most connections first.
    pub fn peers(&self) -> Vec<PeerConnections> {
        self.lock_any().cores.peers()
    }

    /// How many connections there may be.
    pub fn limits(&self) -> ConnectionLimits {
        self.lock_any().cores.limits().clone()
    }

    /// Changes how many connections there may be, for clients that come from now on.
    ///
    /// # Errors
    /// A limit is 0 or beyond 16,384, or the target is stopping.
    pub fn set_limits(&self, limits: ConnectionLimits) -> Result<(), NbdTargetError> {
        limits.check(CONNECTIONS_MAX, "export").map_err(NbdTargetError::Invalid)?;
        self.lock()?.cores.set_limits(limits);
        Ok(())
    }

    /// The files of the keys and the certificate, if clients may begin TLS.
    pub fn tls_files(&self) -> Option<TlsFiles> {
        self.lock_any().tls.as_ref().map(|tls| tls.files.clone())
    }

    /// Reads the keys and the certificate with which clients may begin TLS from now on; `None` ends that.
    /// Connections stay as they are.
    ///
    /// # Errors
    /// A file cannot be read; an export needs TLS, and there would be none; or a reactor does not respond.
    /// Nothing has changed then.
    pub fn set_tls(&self, files: Option<TlsFiles>) -> Result<(), NbdTargetError> {
        let read = |files: TlsFiles| Ok::<_, TlsKeysError>(TargetTls { credentials: files.read()?, files });
        let tls = files.map(read).transpose()?;
        let mut state = self.lock()?;
        if let (None, Some(export)) = (&tls, state.exports.values().find(|one| one.export.requires_tls)) {
            let reason = format!("the export {} requires TLS: delete it first", export.export.name);
            return Err(NbdTargetError::Invalid(reason));
        }
        let before = std::mem::replace(&mut state.tls, tls);
        if let Err(error) = self.0.publisher().change(Arc::new(state.config())) {
            state.tls = before;
            return Err(NbdTargetError::NotApplied(error));
        }
        Ok(())
    }

    /// Cores that serve connections.
    pub(crate) fn core_count(&self) -> usize {
        self.0.reactors().len()
    }

    /// Rejects changes, closes the listeners and disconnects the clients, each after its commands in flight
    /// have completed ([`TargetCores::drain`]).
    pub fn shutdown(&self) {
        self.0.stop().cores.drain("nbd");
    }

    /// Closes the devices. The reactors have stopped.
    pub fn close(&self) {
        self.lock_any().exports.clear();
        self.0.publisher().publish(Arc::default());
    }

    /// The listener of an address, and whether it is new.
    fn port(&self, state: &mut TargetState, address: &StreamAddress) -> Result<(u16, bool), NbdTargetError> {
        if let Some(port) = state.ports.iter().find(|port| port.address == *address) {
            return Ok((port.portid, false));
        }
        let portid = state.last_portid.wrapping_add(1).max(1);
        let cores = state.cores.get_or_start(|connections| {
            let limits = self.0.group_limits(connections);
            TargetCores::start(self.0.reactors(), self.0.publisher(), limits, |_, _| NbdCore)
        })?;
        let bound = cores.listen(address, portid)?;
        state.last_portid = portid;
        state.ports.push(ListenPort { portid, address: bound });
        Ok((portid, true))
    }

    fn lock(&self) -> Result<MutexGuard<'_, TargetState>, NbdTargetError> {
        Ok(self.0.lock()?)
    }

    fn lock_any(&self) -> MutexGuard<'_, TargetState> {
        self.0.lock_any()
    }

    /// The target as the balancer sees it; `None` before the first export.
    pub fn balanced(&self) -> Option<Arc<dyn BalancedTarget>> {
        let cores = self.lock_any().cores.get().cloned()?;
        Some(Arc::new(cores))
    }

    /// Connections of clients, on all cores, and how often some have moved.
    pub fn connection_totals(&self) -> ConnectionTotals {
        self.lock_any().cores.totals()
    }
}

impl ControlledTarget for TargetState {
    type Config = NbdConfig;
    type Shared = ();

    /// A device was removed, and its exports with it, or resized: new clients see the new size.
    fn device_event(control: &TargetControl<TargetState>, event: &DeviceEvent) {
        let Ok(mut state) = control.lock() else { return };
        let is_of = |exported: &Exported| Arc::ptr_eq(exported.descriptor.device(), event.device());
        if !state.exports.values().any(is_of) {
            return;
        }
        match event {
            DeviceEvent::Registered(_) => {}
            DeviceEvent::Removed(device) => {
                let keys: Vec<u32> = state
                    .exports
                    .extract_if(.., |_, one| is_of(one))
                    .map(|(_, one)| one.export.key)
                    .collect();
                log::info!(target: "nbd", "{}: removed with its {} export(s)", device.name(), keys.len());
                control.publisher().publish(Arc::new(state.config()));
                control.retire_keys(keys);
                state.close_unused_ports();
            }
            DeviceEvent::Resized(device) => {
                for exported in state.exports.values_mut().filter(|one| is_of(one)) {
                    let size = device.geometry().bytes();
                    exported.export = Arc::new(Export { size, ..(*exported.export).clone() });
                }
                control.publisher().publish(Arc::new(state.config()));
            }
        }
    }
}

impl TargetState {
    fn new() -> TargetState {
        TargetState {
            cores: LazyCores::new(ConnectionLimits::new(CONNECTIONS_DEFAULT)),
            exports: BTreeMap::new(),
            ports: Vec::new(),
            last_portid: 0,
            last_id: 0,
            tls: None,
        }
    }

    fn config(&self) -> NbdConfig {
        NbdConfig {
            exports: self.exports.values().map(|one| one.export.clone()).collect(),
            devices: self.exports.values().map(|one| (one.export.key, one.descriptor.clone())).collect(),
            tls: self.tls.as_ref().map(|tls| tls.credentials.clone()),
        }
    }

    fn close_unused_ports(&mut self) {
        let is_used = |port: &ListenPort| self.exports.values().any(|one| one.export.portid == port.portid);
        let unused: Vec<u16> =
            self.ports.iter().filter(|port| !is_used(port)).map(|port| port.portid).collect();
        unused.into_iter().for_each(|portid| self.close_port(portid));
    }

    fn close_port(&mut self, portid: u16) {
        self.ports.retain(|port| port.portid != portid);
        self.cores.unlisten(Some(portid));
    }
}

impl Exported {
    fn info(&self, connections: usize, connections_max: u32) -> ExportInfo {
        let export = &self.export;
        ExportInfo {
            config: ExportConfig {
                bdev_name: self.descriptor.device().name().into(),
                name: export.name.clone(),
                description: export.description.clone(),
                read_only: self.read_only,
                require_tls: export.requires_tls,
                address: self.address.clone(),
            },
            read_only: export.read_only,
            size: export.size,
            block_size: export.block_size,
            connections,
            connections_max,
        }
    }
}

fn check_names(config: &ExportConfig) -> Result<(), NbdTargetError> {
    let (name, description) = (&config.name, &config.description);
    let invalid = |reason: String| Err(NbdTargetError::Invalid(reason));
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        return invalid(format!("name: expected 1 to {NAME_BYTES_MAX} bytes without control characters"));
    }
    if description.len() > DESCRIPTION_BYTES_MAX || description.contains('\0') {
        return invalid(format!("description: expected at most {DESCRIPTION_BYTES_MAX} bytes without NUL"));
    }
    match &config.address {
        StreamAddress::Unix(path) if *path == PathBuf::new() => invalid("path: it is empty".into()),
        StreamAddress::Other(address) => invalid(format!("NBD has no transport {}", address.transport)),
        _ => Ok(()),
    }
}

/// Clients cannot write what a device takes only in larger pieces than this target has.
fn check_write_unit(device: &BlockDevice) -> Result<(), NbdTargetError> {
    let (name, unit_bytes) = (device.name(), write_unit_bytes(&device.geometry()));
    if unit_bytes <= WRITE_UNIT_BYTES_MAX {
        return Ok(());
    }
    Err(NbdTargetError::Invalid(format!(
        "bdev_name: {name} is written in units of {unit_bytes} bytes, more than {WRITE_UNIT_BYTES_MAX}; export it with read_only"
    )))
}

/// Everything but what a URI's path may have as it is.
fn percent_encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_for_an_export_whether_they_were_set_before_it_or_after() {
        let config = reactor::ReactorConfig { pin: false, ..reactor::ReactorConfig::default() };
        let reactors = reactor::Reactors::start(&config).unwrap();
        let registry = Registry::new();
        bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", 8, 512)).unwrap();
        let target = NbdTarget::new(registry, reactors.handles());
        let limits = |max: u32| ConnectionLimits { per_object_max: Some(max), ..ConnectionLimits::new(50) };
        assert_eq!((target.limits(), target.peers()), (ConnectionLimits::new(CONNECTIONS_DEFAULT), vec![]));
        target.set_limits(limits(7)).unwrap();
        assert!(
            target.set_limits(limits(0)).is_err() && target.set_limits(limits(CONNECTIONS_MAX + 1)).is_err()
        );
        let (bdev_name, name, description) = ("Malloc0".into(), "disk".into(), String::new());
        let address = "127.0.0.1:0".parse().unwrap();
        let config =
            ExportConfig { bdev_name, name, description, read_only: false, require_tls: false, address };
        target.create(config).unwrap();
        let connections_max = || target.exports().unwrap()[0].connections_max;
        assert_eq!((connections_max(), target.limits()), (7, limits(7)));
        target.set_limits(limits(9)).unwrap();
        assert_eq!(connections_max(), 9);
        target.shutdown();
        reactors.stop();
    }

    #[test]
    fn uris_are_those_of_the_specification() {
        let uri = |name: &str, address: &str, require_tls: bool| {
            let address = address.parse().unwrap();
            let (bdev_name, description) = (String::new(), String::new());
            let config = ExportConfig {
                bdev_name,
                name: name.into(),
                description,
                read_only: false,
                require_tls,
                address,
            };
            ExportInfo {
                config,
                read_only: false,
                size: 0,
                block_size: 512,
                connections: 0,
                connections_max: 0,
            }
            .uri()
        };
        assert_eq!(uri("disk", "127.0.0.1:10809", false), "nbd://127.0.0.1:10809/disk");
        assert_eq!(uri("a b/c", "[::1]:10809", true), "nbds://[::1]:10809/a%20b%2Fc");
        assert_eq!(uri("disk", "unix:/run/a b.sock", true), "nbds+unix:///disk?socket=/run/a%20b.sock");
    }
}
