//! Methods that attach controllers, one by one or by discovery.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use control::json::{Value, json};
use control::{
    ByName, DecodeLog, JobHandle, Method, NoParameters, ParameterError, ParameterType, RpcError, TextOrNumber,
};
use nvme::Uri;
use nvme_auth::{TlsDerivation, TlsKey};
use wire_nvme::fabrics::Nqn;

use super::module::{NvmeModule, canonical_address, path_key, trid};
use super::options::{LossTimeouts, MultipathOpts, NvmeOptions, reconnect_policy};
use crate::{
    Attach, DiscoveryConfig, DiscoveryInfo, MultipathMode, PathConfig, PathReservation, TransportId,
};

pub(super) fn methods() -> Vec<Method<NvmeModule>> {
    const ATTACH: &[(i64, &str)] = &[
        (RpcError::EALREADY, "the controller or the name is attached already"),
        (RpcError::EINVAL, "the address is invalid, or the time-outs contradict each other"),
        (RpcError::EIO, "the controller cannot be attached"),
        (RpcError::ETIMEDOUT, "not everything was attached in time"),
    ];
    vec![
        Method::job("bdev_nvme_attach_controller", attach)
            .text(
                "Attaches a controller, or adds a path to one, and creates a bdev for each namespace.",
                "names of the bdevs",
            )
            .canonical(|module: &NvmeModule, params: &mut AttachController| {
                params.set_canonical(&module.options())
            })
            .errors(ATTACH),
        Method::job("bdev_nvme_start_discovery", start_discovery)
            .text("Attaches what a discovery controller lists, now and later.", "true")
            .canonical(|module: &NvmeModule, params: &mut StartDiscovery| {
                params.set_canonical(&module.options())
            })
            .errors(ATTACH),
        Method::job("bdev_nvme_stop_discovery", stop_discovery)
            .text(
                "Ends a discovery service and detaches what it attached. Cancelled, it leaves the rest attached.",
                "true",
            )
            .errors(&[(RpcError::ENODEV, "there is no such service")]),
        Method::query("bdev_nvme_get_discovery_info", get_discovery_info)
            .text("Describes the discovery services.", "array of `name`, `trid`, `referrals`"),
    ]
}

/// A subsystem at an IP address or host name and a port.
struct TcpAddress {
    subnqn: Nqn,
    host: String,
    port: u16,
}

/// Parses the address of a controller over TCP or RDMA.
fn tcp_address(
    trtype: &str,
    traddr: &str,
    adrfam: Option<&str>,
    trsvcid: Option<&TextOrNumber>,
    subnqn: Option<&str>,
) -> Result<TcpAddress, RpcError> {
    let invalid = |message: String| RpcError::new(RpcError::EINVAL, message);
    match adrfam.map(str::to_ascii_lowercase).as_deref() {
        None | Some("ipv4" | "ipv6") => {}
        Some(other) => return Err(invalid(format!("Failed to parse adrfam: {other}"))),
    }
    let subnqn = subnqn.ok_or_else(|| invalid(format!("subnqn is required for {trtype}")))?;
    let subnqn =
        Nqn::new(subnqn).map_err(|_| invalid(format!("subnqn {subnqn} is not an NVMe qualified name")))?;
    let port = trsvcid.map_or_else(|| "4420".to_string(), |port| port.0.clone());
    let port = port.parse().ok().filter(|port| *port != 0);
    let port = port.ok_or_else(|| invalid("trsvcid must be a TCP port, 1 to 65535".into()))?;
    let host = nvme::TcpUri::host_of(traddr).filter(|host| host.len() <= 255);
    let host = host.ok_or_else(|| {
        invalid(format!("traddr must be a host name or an address, such as 10.0.0.7 or ::1, not '{traddr}'"))
    })?;
    Ok(TcpAddress { subnqn, host, port })
}

/// Parses a controller's transport ID from SPDK's parameters.
fn transport_id(
    trtype: &str,
    traddr: &str,
    adrfam: Option<&str>,
    trsvcid: Option<&TextOrNumber>,
    subnqn: Option<&str>,
    digests: (bool, bool),
    source: Option<SocketAddr>,
) -> Result<TransportId, RpcError> {
    let invalid = |message: String| RpcError::new(RpcError::EINVAL, message);
    let uri = match trtype.to_ascii_uppercase().as_str() {
        "TCP" => {
            let TcpAddress { subnqn, host, port } = tcp_address("TCP", traddr, adrfam, trsvcid, subnqn)?;
            let (header_digest, data_digest) = digests;
            let uri = nvme::TcpUri::new(subnqn);
            Uri::Tcp(nvme::TcpUri { host, port, header_digest, data_digest, source, ..uri })
        }
        "RDMA" => {
            let TcpAddress { subnqn, host, port } = tcp_address("RDMA", traddr, adrfam, trsvcid, subnqn)?;
            Uri::Rdma(nvme::RdmaUri { host, port, subnqn, nsid: 1, hostnqn: None })
        }
        "PCIE" => format!("nvme+pcie://{traddr}")
            .parse()
            .map_err(|error: nvme::UriError| invalid(error.to_string()))?,
        "VFIOUSER" => Uri::VfioUser(nvme::VfioUserUri { directory: traddr.into(), nsid: 1 }),
        other => {
            return Err(invalid(format!(
                "Failed to parse trtype: {other}; expected PCIe, TCP, RDMA or VFIOUSER"
            )));
        }
    };
    if source.is_some() && !matches!(uri, Uri::Tcp(_)) {
        return Err(invalid("hostaddr: only connections over TCP have an address of this machine".into()));
    }
    Ok(TransportId(uri))
}

/// The address of this machine that connections come from.
pub(super) fn source_of(
    hostaddr: Option<&str>,
    hostsvcid: Option<&TextOrNumber>,
) -> Result<Option<SocketAddr>, RpcError> {
    let invalid = |message: String| RpcError::new(RpcError::EINVAL, message);
    let port = hostsvcid.map(|port| port.0.as_str()).filter(|port| !port.is_empty());
    let Some(host) = hostaddr.filter(|host| !host.is_empty()) else {
        return match port {
            None => Ok(None),
            Some(_) => Err(invalid("hostsvcid needs hostaddr".into())),
        };
    };
    let address = host.parse::<IpAddr>();
    let address = address.map_err(|_| invalid(format!("hostaddr: '{host}' is no IP address")))?;
    let port = port.map_or(Some(0), |port| port.parse().ok());
    let port = port.ok_or_else(|| invalid("hostsvcid must be a TCP port, 0 to 65535".into()))?;
    Ok(Some(SocketAddr::new(address, port)))
}

/// `hostaddr` and `hostsvcid`, as they are saved.
fn saved_source(source: Option<SocketAddr>) -> (Option<String>, Option<TextOrNumber>) {
    let port = source.map(|source| source.port()).filter(|port| *port != 0);
    (source.map(|source| source.ip().to_string()), port.map(|port| TextOrNumber(port.to_string())))
}

/// `trtype`, `traddr`, `adrfam` and `trsvcid` of a controller, as they are saved.
fn saved_address(id: &TransportId) -> (String, String, Option<String>, Option<TextOrNumber>) {
    let (adrfam, port) = id.service().unzip();
    (id.trtype().to_string(), id.traddr(), adrfam.map(str::to_string), port.map(TextOrNumber))
}

control::choices! {
    enum PskDerivation {
        Specified = "specified",
        Libnvme = "libnvme",
    }
}

control::choices! {
    enum MultipathParameter {
        Disable = "disable",
        Failover = "failover",
        Multipath = "multipath",
    }
}

control::choices! {
    enum ReservationParameter {
        WriteExclusive = "write_exclusive",
        ExclusiveAccess = "exclusive_access",
    }
}

impl ReservationParameter {
    fn of_path(self) -> PathReservation {
        match self {
            ReservationParameter::WriteExclusive => PathReservation::WriteExclusive,
            ReservationParameter::ExclusiveAccess => PathReservation::ExclusiveAccess,
        }
    }
}

control::parameters! {
    struct AttachController {
        /// Name; namespace 1 becomes the bdev NAMEn1
        name: String,
        /// PCIe, TCP, RDMA or VFIOUSER
        trtype: String,
        /// Address: of a PCI function, an IP address or host name, or the directory of a vfio-user socket
        traddr: String,
        /// IPv4 or IPv6
        adrfam: Option<String>,
        /// TCP port; without, 4420
        trsvcid: Option<TextOrNumber>,
        /// Subsystem; required for TCP and RDMA
        subnqn: Option<String>,
        /// IP address of this machine that connections come from; only over TCP
        hostaddr: Option<String>,
        /// Port that they come from; 0 or without, any
        hostsvcid: Option<TextOrNumber>,
        /// Host; without, the driver's
        hostnqn: Option<HostNqn>,
        /// Header digests
        hdgst: bool = false,
        /// Data digests
        ddgst: bool = false,
        /// Time-out of admin commands; 0 is that of `bdev_nvme_set_options`
        fabrics_connect_timeout_us: Option<u64> ["us"],
        /// What happens if the name is in use
        multipath: MultipathParameter = MultipathParameter::Multipath,
        /// I/O queues at most
        num_io_queues: QueueCount = QueueCount(1024),
        /// When a lost controller is given up; -1 is never, 0 at once
        ctrlr_loss_timeout_sec: Option<i32> ["s"],
        /// Time between attempts to reconnect
        reconnect_delay_sec: Option<u32> ["s"],
        /// When I/O of a lost controller fails
        fast_io_fail_timeout_sec: Option<u32> ["s"],
        /// Accepted, and not needed: any number of bdevs
        max_bdevs: Option<BdevCount>,
        /// Multipath policy
        multipath_opts: Option<MultipathOpts>,
        /// Accepted: command slots bound the queue in either case
        disable_sq_flow_control: Option<bool>,
        /// Key of the keyring with which the host authenticates, if the controller demands it
        dhchap_key: Option<String>,
        /// Key of the keyring with which the controller has to authenticate; needs `dhchap_key`
        dhchap_ctrlr_key: Option<String>,
        /// Key of the keyring with which connections use TLS 1.3; only over TCP, and with a `hostnqn`
        psk: Option<String>,
        /// Authenticate with secure channel concatenation, which generates the key with which all queues use
        /// TLS 1.3; only over TCP, with a `dhchap_key` and without a `psk`
        concat: bool = false,
        /// How the key is derived: as the specification says, or as libnvme did until July 2025
        psk_derivation: Option<PskDerivation>,
        /// Priority of packets on this machine (SO_PRIORITY), 0 to 6, or up to 65535 with CAP_NET_ADMIN; only
        /// over TCP
        priority: Option<SocketPriority>,
        /// Reserve each namespace, so that no other program writes to it, or reads it either; only over TCP
        /// and RDMA
        reservation: Option<ReservationParameter>,
    }
    only("namespaces of unknown command sets are no bdevs") { allow_unrecognized_csi: bool = false }
    one_of("controllers always check what protection information they have") {
        prchk_reftag: bool = [false, true],
        prchk_guard: bool = [false, true]
    }
}

/// A number, as a text in SPDK's calls; an empty text is 0.
struct SocketPriority(u16);

impl ParameterType for SocketPriority {
    fn kind() -> String {
        TextOrNumber::kind()
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let TextOrNumber(text) = TextOrNumber::decode(value, log)?;
        let number = if text.is_empty() { Ok(0) } else { text.parse() };
        let refused = |_| invalid(format!("'{text}' is not a number from 0 to 65535"));
        number.map(SocketPriority).map_err(refused)
    }

    fn encode(&self) -> Value {
        self.0.to_string().into()
    }
}

fn invalid(message: impl Into<String>) -> ParameterError {
    ParameterError::with_code(RpcError::EINVAL, message)
}

/// Implements the parameter types of this file: a kind, and a check with SPDK's error code.
macro_rules! checked {
    ($type:ident($inner:ty), $kind:literal, $check:expr) => {
        #[derive(Clone)]
        pub(super) struct $type($inner);

        impl ParameterType for $type {
            fn kind() -> String {
                $kind.to_string()
            }

            fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
                let check: fn(&$inner) -> Result<(), ParameterError> = $check;
                let inner = <$inner>::decode(value, log)?;
                check(&inner).map(|()| $type(inner))
            }

            fn encode(&self) -> Value {
                self.0.encode()
            }
        }
    };
}

checked!(HostNqn(String), "NVMe qualified name", |text| match Nqn::new(text) {
    Ok(_) => Ok(()),
    Err(_) => Err(invalid(format!("{text} is not an NVMe qualified name"))),
});
checked!(QueueCount(u32), "integer, 1 to 65535", |count| match *count {
    1..=65535 => Ok(()),
    _ => Err(invalid("num_io_queues out of bounds, min: 1 max: 65535")),
});
checked!(BdevCount(u32), "integer, at least 1", |count| match *count {
    0 => Err(invalid("max_bdevs cannot be zero")),
    _ => Ok(()),
});

impl HostNqn {
    pub(super) fn nqn(&self) -> Option<Nqn> {
        // It was checked when it was decoded.
        Nqn::new(&self.0).ok()
    }
}

impl AttachController {
    fn id(&self) -> Result<TransportId, RpcError> {
        transport_id(
            &self.trtype,
            &self.traddr,
            self.adrfam.as_deref(),
            self.trsvcid.as_ref(),
            self.subnqn.as_deref(),
            (self.hdgst, self.ddgst),
            source_of(self.hostaddr.as_deref(), self.hostsvcid.as_ref())?,
        )
    }

    /// As it is saved, with what `options` are the defaults of.
    fn set_defaults(&mut self, options: &NvmeOptions) -> Result<(TransportId, LossTimeouts), RpcError> {
        let id = self.id()?;
        (self.trtype, self.traddr, self.adrfam, self.trsvcid) = saved_address(&id);
        self.subnqn = id.subnqn().map(str::to_string);
        (self.hostaddr, self.hostsvcid) = saved_source(id.source());
        let loss_timeouts = options.complete(
            &mut self.ctrlr_loss_timeout_sec,
            &mut self.reconnect_delay_sec,
            &mut self.fast_io_fail_timeout_sec,
        );
        let policy = self.multipath_opts.as_ref().map_or(Ok(options.policy), MultipathOpts::policy)?;
        self.multipath_opts = Some(MultipathOpts::of(policy));
        self.fabrics_connect_timeout_us = self.fabrics_connect_timeout_us.filter(|us| *us != 0);
        (self.max_bdevs, self.disable_sq_flow_control) = (None, None);
        self.dhchap_key = self.dhchap_key.take().filter(|key| !key.is_empty());
        self.dhchap_ctrlr_key = self.dhchap_ctrlr_key.take().filter(|key| !key.is_empty());
        self.psk = self.psk.take().filter(|key| !key.is_empty());
        self.psk_derivation = self.psk_derivation.filter(|way| *way != PskDerivation::Specified);
        self.priority = self.priority.take().filter(|priority| priority.0 != 0);
        Ok((id, loss_timeouts))
    }

    /// Whether both ends generate the key of TLS.
    fn concatenates(&self, id: &TransportId) -> Result<bool, RpcError> {
        let refused = |why: &str| Err(RpcError::new(RpcError::EINVAL, format!("concat {why}")));
        match self.concat {
            true if !matches!(id.0, Uri::Tcp(_)) => refused("is possible over TCP only"),
            true if self.dhchap_key.is_none() => refused("needs a dhchap_key"),
            true if self.psk.is_some() => refused("needs no psk: the authentication generates one"),
            concatenates => Ok(concatenates),
        }
    }

    /// The key of TLS, if there is one.
    fn tls(&self, module: &NvmeModule, id: &TransportId) -> Result<Option<nvme::HostTls>, RpcError> {
        let Some(name) = &self.psk else { return Ok(None) };
        if !matches!(id.0, Uri::Tcp(_)) {
            return Err(RpcError::new(RpcError::EINVAL, "psk: only controllers over TCP have TLS"));
        }
        let key = TlsKey::of_secret(&module.keyring.get(name)?)
            .map_err(|error| RpcError::new(RpcError::EINVAL, format!("{name}: {error}")))?;
        let derivation = match self.psk_derivation {
            Some(PskDerivation::Libnvme) => TlsDerivation::Libnvme,
            Some(PskDerivation::Specified) | None => TlsDerivation::Specified,
        };
        Ok(Some(nvme::HostTls { key, derivation }))
    }

    fn set_canonical(&mut self, options: &NvmeOptions) -> Result<(), RpcError> {
        self.traddr = canonical_address(&self.traddr);
        self.set_defaults(options).map(drop)
    }
}

fn attach(
    module: &NvmeModule,
    mut params: AttachController,
    job: &JobHandle,
) -> Result<Vec<String>, RpcError> {
    let options = module.options().clone();
    let (id, loss_timeouts) = params.set_defaults(&options)?;
    let mut path = PathConfig::new(id.clone());
    path.options = options.driver_options();
    path.count_io = options.io_path_stat;
    if let Some(us) = params.fabrics_connect_timeout_us {
        path.options.timeout_ns = us.saturating_mul(1000);
    }
    path.options.hostnqn = params.hostnqn.as_ref().and_then(HostNqn::nqn);
    let keys = module.keys(params.dhchap_key.as_deref(), params.dhchap_ctrlr_key.as_deref())?;
    if keys.is_some() && !id.is_fabrics() {
        return Err(RpcError::new(
            RpcError::EINVAL,
            "dhchap_key: only controllers over fabrics authenticate",
        ));
    }
    path.options.authentication = Some(options.credentials(keys));
    path.options.tls = params.tls(module, &id)?;
    path.options.concat = params.concatenates(&id)?;
    if params.priority.is_some() && !matches!(id.0, Uri::Tcp(_)) {
        return Err(RpcError::new(RpcError::EINVAL, "priority: only connections over TCP have one"));
    }
    path.options.socket_priority = params.priority.as_ref().map_or(0, |priority| priority.0.into());
    if let Some(reservation) = params.reservation {
        if !id.is_fabrics() {
            return Err(RpcError::new(
                RpcError::EINVAL,
                "reservation: only controllers over fabrics have one",
            ));
        }
        path.options.host_id = PathReservation::host_id();
        path.reservation = Some(reservation.of_path());
    }
    path.num_io_queues = u16::try_from(params.num_io_queues.0).unwrap_or(u16::MAX);
    path.reconnect = reconnect_policy(loss_timeouts)?;
    let policy = params.multipath_opts.as_ref().map_or(Ok(options.policy), MultipathOpts::policy)?;
    let mut attach = Attach::new(&params.name, path);
    attach.multipath = match params.multipath {
        MultipathParameter::Disable => MultipathMode::Disable,
        MultipathParameter::Failover => MultipathMode::Failover,
        MultipathParameter::Multipath => MultipathMode::Multipath,
    };
    (attach.policy, attach.retries_max) = (policy, options.retries_max());
    let (initiator, name, pending) = (module.initiator.clone(), params.name.clone(), id.clone());
    // Detaching a path that is being connected ends the attempt.
    job.on_cancel(move || {
        // Fails only if the attempt has ended already.
        let _ = initiator.detach(&name, |other| *other == pending, &JobHandle::standalone());
    });
    let place = module.saved.paths.reserve();
    let names = module.initiator.attach(attach)?;
    let key = path_key(&params.name, &id);
    if matches!(id.0, Uri::Pcie(_)) {
        module.hotplug.plan().attached(&id);
    }
    job.update(|| {
        module.saved.paths.record_at(place, &key, "bdev_nvme_attach_controller", &params);
        module.record_hotplug();
    });
    Ok(names)
}

control::parameters! {
    struct StartDiscovery {
        /// Name; what it finds is called NAME0, NAME1, …
        name: String,
        /// TCP or RDMA
        trtype: String,
        /// Address of the discovery controller
        traddr: String,
        /// IPv4 or IPv6
        adrfam: Option<String>,
        /// Port; without, 8009
        trsvcid: Option<TextOrNumber>,
        /// Host; without, the driver's
        hostnqn: Option<HostNqn>,
        /// Answer when all that was found is attached
        wait_for_attach: bool = false,
        /// How long to wait for that; 0 is 30 s
        attach_timeout_ms: Option<u64> ["ms"],
        /// When a lost controller is given up; -1 is never, 0 at once
        ctrlr_loss_timeout_sec: Option<i32> ["s"],
        /// Time between attempts to reconnect
        reconnect_delay_sec: Option<u32> ["s"],
        /// When I/O of a lost controller fails
        fast_io_fail_timeout_sec: Option<u32> ["s"],
    }
}

/// Default timeout of `wait_for_attach`.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(30);
/// The NVMe/TCP discovery port assigned by IANA.
const DISCOVERY_PORT: u16 = 8009;

impl StartDiscovery {
    fn id(&self) -> Result<TransportId, RpcError> {
        let port = self.trsvcid.clone().unwrap_or_else(|| TextOrNumber(DISCOVERY_PORT.to_string()));
        transport_id(
            &self.trtype,
            &self.traddr,
            self.adrfam.as_deref(),
            Some(&port),
            Some(wire_nvme::fabrics::DISCOVERY_NQN),
            (false, false),
            None,
        )
    }

    /// As it is saved, with what `options` are the defaults of.
    fn set_defaults(&mut self, options: &NvmeOptions) -> Result<(TransportId, LossTimeouts), RpcError> {
        let id = self.id()?;
        (self.trtype, self.traddr, self.adrfam, self.trsvcid) = saved_address(&id);
        self.attach_timeout_ms = None;
        let loss_timeouts = options.complete(
            &mut self.ctrlr_loss_timeout_sec,
            &mut self.reconnect_delay_sec,
            &mut self.fast_io_fail_timeout_sec,
        );
        Ok((id, loss_timeouts))
    }

    /// Whether the call waits is not part of what runs.
    fn set_canonical(&mut self, options: &NvmeOptions) -> Result<(), RpcError> {
        self.traddr = canonical_address(&self.traddr);
        self.wait_for_attach = false;
        self.set_defaults(options).map(drop)
    }
}

fn start_discovery(
    module: &NvmeModule,
    mut params: StartDiscovery,
    job: &JobHandle,
) -> Result<bool, RpcError> {
    let wait = params.wait_for_attach;
    let timeout = params.attach_timeout_ms.filter(|ms| *ms != 0).map(Duration::from_millis);
    let wait_for = (wait || timeout.is_some()).then(|| timeout.unwrap_or(DISCOVERY_TIMEOUT));
    let options = module.options().clone();
    let (id, loss_timeouts) = params.set_defaults(&options)?;
    let mut path = PathConfig::new(id);
    path.options = options.driver_options();
    path.count_io = options.io_path_stat;
    path.options.hostnqn = params.hostnqn.as_ref().and_then(HostNqn::nqn);
    path.reconnect = reconnect_policy(loss_timeouts)?;
    let discovery = DiscoveryConfig {
        name: params.name.clone(),
        path,
        retries_max: options.retries_max(),
        policy: options.policy,
    };
    let (initiator, name) = (module.initiator.clone(), params.name.clone());
    job.on_cancel(move || {
        // Fails only if it has ended already.
        let _ = initiator.stop_discovery(&name, &JobHandle::standalone());
    });
    let place = module.saved.discoveries.reserve();
    module.initiator.start_discovery(discovery, wait_for)?;
    let record = || {
        module.saved.discoveries.record_at(place, &params.name, "bdev_nvme_start_discovery", &params);
    };
    job.update(record);
    Ok(true)
}

fn stop_discovery(module: &NvmeModule, params: ByName, job: &JobHandle) -> Result<bool, RpcError> {
    module.initiator.stop_discovery(&params.name, job)?;
    Ok(true)
}

fn get_discovery_info(module: &NvmeModule, _params: NoParameters) -> Result<Vec<Value>, RpcError> {
    let one = |info: DiscoveryInfo| {
        let referrals: Vec<Value> = info.entries.iter().map(|id| json!({ "trid": trid(id) })).collect();
        let mut object = json!({ "name": info.name, "trid": trid(&info.id), "referrals": referrals });
        if let Some(failure) = info.failure {
            object["failure"] = json!(failure);
        }
        object
    };
    Ok(module.initiator.discoveries().into_iter().map(one).collect())
}
