//! URIs of namespaces.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

use nvme_auth::TlsDerivation;
use wire_nvme::fabrics::Nqn;

/// The URI of a namespace, by transport.
///
/// - `nvme+tcp://HOST:PORT/SUBNQN?ns=N`, and then any of `&hdgst=1`, `&ddgst=1`, `&hostnqn=NQN`,
///   `&source=IP:PORT` and `&psk=FILE` with `&psk_derivation=libnvme`: HOST is a name, an IPv4 address or an
///   IPv6 address in brackets; PORT defaults to 4420; connections come from the source, an address of this
///   machine whose port may be 0; with the key in FILE they use TLS;
/// - `nvme+rdma://HOST:PORT/SUBNQN?ns=N`, and then `&hostnqn=NQN`: HOST is an address of an RDMA device;
/// - `nvme+pcie://DOMAIN:BUS:DEVICE.FUNCTION?ns=N`: a PCI Express function of this machine;
/// - `nvme+vfio-user:DIR?ns=N`: a controller of another process with its socket at `DIR/cntrl`.
///
/// `ns` defaults to 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uri {
    /// NVMe/TCP.
    Tcp(TcpUri),
    /// NVMe/RDMA.
    Rdma(RdmaUri),
    /// PCI Express.
    Pcie(PcieUri),
    /// vfio-user.
    VfioUser(VfioUserUri),
}

/// A namespace of an NVMe/TCP subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpUri {
    /// Host name or address, without brackets.
    pub host: String,
    /// TCP port; default 4420.
    pub port: u16,
    /// NQN of the subsystem.
    pub subnqn: Nqn,
    /// Namespace identifier, from 1.
    pub nsid: u32,
    /// Request header digests.
    pub header_digest: bool,
    /// Request data digests.
    pub data_digest: bool,
    /// The address of this machine that connections come from; port 0 is any.
    pub source: Option<SocketAddr>,
    /// NQN of the host, instead of that in the options.
    pub hostnqn: Option<Nqn>,
    /// File with the key of TLS, instead of that in the options.
    pub psk: Option<PathBuf>,
    /// How that key is derived.
    pub psk_derivation: TlsDerivation,
}

/// A namespace of an NVMe/RDMA subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaUri {
    /// Host name or address, without brackets.
    pub host: String,
    /// Port of RDMA's connection manager; default 4420.
    pub port: u16,
    /// NQN of the subsystem.
    pub subnqn: Nqn,
    /// Namespace identifier, from 1.
    pub nsid: u32,
    /// NQN of the host, instead of that in the options.
    pub hostnqn: Option<Nqn>,
}

/// A namespace of a PCI Express function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcieUri {
    /// PCI domain (segment).
    pub domain: u32,
    /// Bus number, 0 to 255.
    pub bus: u8,
    /// Device, 0 to 31.
    pub device: u8,
    /// Function, 0 to 7.
    pub function: u8,
    /// Namespace identifier, from 1.
    pub nsid: u32,
}

/// A namespace of a controller behind vfio-user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfioUserUri {
    /// Directory of the controller's socket.
    pub directory: PathBuf,
    /// Namespace identifier, from 1.
    pub nsid: u32,
}

/// Why a URI is invalid or its host cannot be resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// Unknown or missing scheme.
    #[error("'{0}' does not start with nvme+tcp://, nvme+rdma://, nvme+pcie:// or nvme+vfio-user:")]
    Scheme(String),
    /// Missing subsystem NQN.
    #[error("'{0}' names no subsystem; write nvme+tcp://HOST:PORT/SUBNQN?ns=N")]
    NoSubsystem(String),
    /// Missing host.
    #[error("'{0}' names no host; write nvme+tcp://HOST:PORT/SUBNQN?ns=N")]
    NoHost(String),
    /// Invalid port.
    #[error("'{0}' is not a port")]
    Port(String),
    /// Invalid subsystem NQN.
    #[error("'{0}' is not an NVMe qualified name")]
    Nqn(String),
    /// Invalid PCI address.
    #[error("'{0}' is not a PCI address; write nvme+pcie://0000:03:00.0?ns=1")]
    Address(String),
    /// Missing directory.
    #[error("'{0}' names no directory; write nvme+vfio-user:/run/controller?ns=1")]
    NoDirectory(String),
    /// Unknown or invalid option.
    #[error(
        "'{0}' is not a valid option; valid are ns=N, for nvme+rdma hostnqn=NQN, and for nvme+tcp hdgst=0|1, \
         ddgst=0|1, hostnqn=NQN, source=IP:PORT, psk=FILE and psk_derivation=specified|libnvme"
    )]
    Option(String),
    /// The host name could not be resolved.
    #[error("'{0}' has no address: {1}")]
    Resolve(String, String),
}

const TCP: &str = "nvme+tcp://";
const RDMA: &str = "nvme+rdma://";
const PCIE: &str = "nvme+pcie://";
const VFIO_USER: &str = "nvme+vfio-user:";
const PORT_DEFAULT: u16 = 4420;

impl Uri {
    /// Namespace identifier, from 1.
    pub fn nsid(&self) -> u32 {
        match self {
            Uri::Tcp(uri) => uri.nsid,
            Uri::Rdma(uri) => uri.nsid,
            Uri::Pcie(uri) => uri.nsid,
            Uri::VfioUser(uri) => uri.nsid,
        }
    }

    /// The URI of the controller: without namespace and options.
    pub fn controller(&self) -> String {
        let text = self.to_string();
        text.split_once('?').map_or(text.clone(), |(controller, _)| controller.to_string())
    }
}

impl TcpUri {
    /// Namespace 1 of a subsystem, without a host, at the port of NVMe/TCP.
    pub fn new(subnqn: Nqn) -> TcpUri {
        TcpUri {
            host: String::new(),
            port: PORT_DEFAULT,
            subnqn,
            nsid: 1,
            header_digest: false,
            data_digest: false,
            source: None,
            hostnqn: None,
            psk: None,
            psk_derivation: TlsDerivation::Specified,
        }
    }

    /// A host as [`host`](Self::host) has it, of a name or an address, with or without brackets: equal
    /// addresses are equal texts. `None` if it is neither.
    pub fn host_of(text: &str) -> Option<String> {
        let bare = match text.strip_prefix('[') {
            // Brackets are for IPv6 addresses (RFC 3986, section 3.2.2).
            Some(rest) => rest.strip_suffix(']').filter(|bare| bare.contains(':'))?,
            None => text,
        };
        // A remaining bracket is valid in no host name or address.
        if bare.is_empty() || bare.contains(['[', ']']) {
            return None;
        }
        Some(bare.parse::<IpAddr>().map_or_else(|_| bare.to_string(), |address| address.to_string()))
    }

    /// Resolves the host to its first address. Blocks on the resolver if the host is a name.
    pub fn resolve(&self) -> Result<SocketAddr, UriError> {
        resolve(&self.host, self.port)
    }
}

impl RdmaUri {
    /// As [`TcpUri::resolve`].
    pub fn resolve(&self) -> Result<SocketAddr, UriError> {
        resolve(&self.host, self.port)
    }
}

fn resolve(host: &str, port: u16) -> Result<SocketAddr, UriError> {
    let failed = |why: String| UriError::Resolve(host.to_string(), why);
    let mut addresses = (host, port).to_socket_addrs().map_err(|error| failed(error.to_string()))?;
    addresses.next().ok_or_else(|| failed("the resolver returned none".into()))
}

impl FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Uri, UriError> {
        if let Some(rest) = text.strip_prefix(TCP) {
            return parse_tcp(text, rest).map(Uri::Tcp);
        }
        if let Some(rest) = text.strip_prefix(RDMA) {
            return parse_rdma(text, rest).map(Uri::Rdma);
        }
        if let Some(rest) = text.strip_prefix(PCIE) {
            return parse_pcie(rest).map(Uri::Pcie);
        }
        let rest = text.strip_prefix(VFIO_USER).ok_or_else(|| UriError::Scheme(text.into()))?;
        let (directory, query) = rest.split_once('?').unwrap_or((rest, ""));
        if directory.is_empty() {
            return Err(UriError::NoDirectory(text.into()));
        }
        Ok(Uri::VfioUser(VfioUserUri { directory: directory.into(), nsid: only_namespace(query)? }))
    }
}

/// Host, port, subsystem and query of a URI over fabrics, of which `rest` is behind the scheme.
fn split_fabrics<'a>(text: &str, rest: &'a str) -> Result<(String, u16, Nqn, &'a str), UriError> {
    let (authority, path) = rest.split_once('/').ok_or_else(|| UriError::NoSubsystem(text.into()))?;
    let (subnqn, query) = path.split_once('?').unwrap_or((path, ""));
    if subnqn.is_empty() || authority.is_empty() {
        return Err(UriError::NoSubsystem(text.into()));
    }
    let (host, port) = split_authority(authority)?;
    let subnqn = Nqn::new(subnqn).map_err(|_| UriError::Nqn(subnqn.into()))?;
    Ok((host, port, subnqn, query))
}

fn parse_rdma(text: &str, rest: &str) -> Result<RdmaUri, UriError> {
    let (host, port, subnqn, query) = split_fabrics(text, rest)?;
    let mut uri = RdmaUri { host, port, subnqn, nsid: 1, hostnqn: None };
    for option in options(query) {
        let bad = || UriError::Option(option.into());
        match option.split_once('=').ok_or_else(bad)? {
            ("ns", value) => uri.nsid = namespace(value).ok_or_else(bad)?,
            ("hostnqn", value) => uri.hostnqn = Some(Nqn::new(value).map_err(|_| bad())?),
            _ => return Err(bad()),
        }
    }
    Ok(uri)
}

fn parse_tcp(text: &str, rest: &str) -> Result<TcpUri, UriError> {
    let (host, port, subnqn, query) = split_fabrics(text, rest)?;
    let mut uri = TcpUri { host, port, ..TcpUri::new(subnqn) };
    for option in options(query) {
        let bad = || UriError::Option(option.into());
        match option.split_once('=').ok_or_else(bad)? {
            ("ns", value) => uri.nsid = namespace(value).ok_or_else(bad)?,
            ("hdgst", value) => uri.header_digest = flag(value).ok_or_else(bad)?,
            ("ddgst", value) => uri.data_digest = flag(value).ok_or_else(bad)?,
            ("hostnqn", value) => uri.hostnqn = Some(Nqn::new(value).map_err(|_| bad())?),
            ("source", value) => uri.source = Some(value.parse().map_err(|_| bad())?),
            ("psk", value) if !value.is_empty() => uri.psk = Some(value.into()),
            ("psk_derivation", "specified") => uri.psk_derivation = TlsDerivation::Specified,
            ("psk_derivation", "libnvme") => uri.psk_derivation = TlsDerivation::Libnvme,
            _ => return Err(bad()),
        }
    }
    Ok(uri)
}

fn parse_pcie(rest: &str) -> Result<PcieUri, UriError> {
    let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
    let nsid = only_namespace(query)?;
    let parse = || {
        let hex = |text: &str, digits: usize| {
            let right =
                (1..=digits).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            right.then(|| u32::from_str_radix(text, 16).ok()).flatten()
        };
        let (bus_device, function) = address.rsplit_once('.')?;
        let (domain_bus, device) = bus_device.rsplit_once(':')?;
        let (domain, bus) = domain_bus.split_once(':').unwrap_or(("0", domain_bus));
        let (device, function) = (hex(device, 2)?, hex(function, 1)?);
        (device < 32 && function < 8).then_some(PcieUri {
            domain: hex(domain, 8)?,
            bus: hex(bus, 2)? as u8,
            device: device as u8,
            function: function as u8,
            nsid,
        })
    };
    parse().ok_or_else(|| UriError::Address(address.into()))
}

fn options(query: &str) -> impl Iterator<Item = &str> {
    query.split('&').filter(|option| !option.is_empty())
}

fn only_namespace(query: &str) -> Result<u32, UriError> {
    let mut nsid = 1;
    for option in options(query) {
        let value = option.strip_prefix("ns=").and_then(namespace);
        nsid = value.ok_or_else(|| UriError::Option(option.into()))?;
    }
    Ok(nsid)
}

fn namespace(value: &str) -> Option<u32> {
    value.parse().ok().filter(|nsid| *nsid > 0)
}

fn split_authority(authority: &str) -> Result<(String, u16), UriError> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, after) =
                rest.split_once(']').ok_or_else(|| UriError::NoSubsystem(authority.into()))?;
            (host, after.strip_prefix(':'))
        }
        None => match authority.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let host = TcpUri::host_of(host).ok_or_else(|| UriError::NoHost(authority.into()))?;
    let port = match port {
        Some(port) => port.parse().map_err(|_| UriError::Port(port.into()))?,
        None => PORT_DEFAULT,
    };
    Ok((host, port))
}

fn flag(value: &str) -> Option<bool> {
    match value {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Uri::Tcp(uri) => uri.fmt(f),
            Uri::Rdma(RdmaUri { host, port, subnqn, nsid, hostnqn }) => {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                write!(f, "{RDMA}{host}:{port}/{subnqn}?ns={nsid}")?;
                hostnqn.iter().try_for_each(|hostnqn| write!(f, "&hostnqn={hostnqn}"))
            }
            Uri::Pcie(PcieUri { domain, bus, device, function, nsid }) => {
                write!(f, "{PCIE}{domain:04x}:{bus:02x}:{device:02x}.{function:x}?ns={nsid}")
            }
            Uri::VfioUser(uri) => write!(f, "{VFIO_USER}{}?ns={}", uri.directory.display(), uri.nsid),
        }
    }
}

impl fmt::Display for TcpUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TcpUri { host, port, subnqn, nsid, .. } = self;
        if host.contains(':') {
            write!(f, "{TCP}[{host}]:{port}/{subnqn}?ns={nsid}")?;
        } else {
            write!(f, "{TCP}{host}:{port}/{subnqn}?ns={nsid}")?;
        }
        for (name, on) in [("hdgst", self.header_digest), ("ddgst", self.data_digest)] {
            if on {
                write!(f, "&{name}=1")?;
            }
        }
        if let Some(hostnqn) = &self.hostnqn {
            write!(f, "&hostnqn={hostnqn}")?;
        }
        if let Some(source) = &self.source {
            write!(f, "&source={source}")?;
        }
        if let Some(file) = &self.psk {
            write!(f, "&psk={}", file.display())?;
        }
        if self.psk_derivation == TlsDerivation::Libnvme {
            f.write_str("&psk_derivation=libnvme")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_round_trip_through_display() {
        for text in [
            "nvme+tcp://127.0.0.1:4420/nqn.2016-06.io.spdk:cnode1?ns=1",
            "nvme+tcp://[::1]:8009/nqn.2016-06.io.spdk:cnode1?ns=7&hdgst=1&ddgst=1",
            "nvme+tcp://a:1/nqn.2016-06.io.spdk:a?ns=1&hostnqn=nqn.2016-06.io.spdk:h&psk=/k&psk_derivation=libnvme",
            "nvme+tcp://10.0.0.1:4420/nqn.2016-06.io.spdk:a?ns=1&source=10.0.0.9:0",
            "nvme+tcp://[fd00::1]:4420/nqn.2016-06.io.spdk:a?ns=1&source=[fd00::9]:1009",
            "nvme+pcie://0000:03:00.0?ns=1",
            "nvme+pcie://10000:ff:1f.7?ns=4294967295",
            "nvme+vfio-user:/run/a b?ns=2",
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        let short: Uri = "nvme+tcp://storage/nqn.2016-06.io.spdk:a".parse().unwrap();
        assert!(matches!(&short, Uri::Tcp(uri) if uri.port == 4420 && uri.nsid == 1));
        let long: Uri = "nvme+tcp://[0:0::1]:8009/nqn.2016-06.io.spdk:a".parse().unwrap();
        assert_eq!(
            long.to_string(),
            "nvme+tcp://[::1]:8009/nqn.2016-06.io.spdk:a?ns=1",
            "one address, one text"
        );
        let short: Uri = "nvme+pcie://3:0.0".parse().unwrap();
        assert_eq!(short.to_string(), "nvme+pcie://0000:03:00.0?ns=1");
        assert_eq!(short.controller(), "nvme+pcie://0000:03:00.0");
    }

    #[test]
    fn hosts_are_taken_with_and_without_brackets() {
        let host = |text: &str| TcpUri::host_of(text);
        for text in ["::1", "[::1]", "0::1", "[0:0:0:0:0:0:0:1]"] {
            assert_eq!(host(text).as_deref(), Some("::1"), "{text}");
        }
        assert_eq!(host("fe80::1%eth0").as_deref(), Some("fe80::1%eth0"));
        assert_eq!(host("storage.example").as_deref(), Some("storage.example"));
        for text in ["", "[]", "[::1", "::1]", "[[::1]]", "[127.0.0.1]", "[storage]"] {
            assert_eq!(host(text), None, "{text}");
        }
    }

    #[test]
    fn a_uri_of_rdma_is_printed_as_it_is_read() {
        for text in [
            "nvme+rdma://10.0.0.1:4421/nqn.2016-06.io.spdk:a?ns=2&hostnqn=nqn.2016-06.io.spdk:h",
            "nvme+rdma://[fe80::1]:4420/nqn.2016-06.io.spdk:a?ns=1",
        ] {
            let uri: Uri = text.parse().unwrap();
            assert_eq!(uri.to_string(), text);
            assert!(matches!(uri, Uri::Rdma(_)));
        }
    }

    #[test]
    fn invalid_uris_fail_with_their_reason() {
        let error = |text: &str| text.parse::<Uri>().unwrap_err();
        assert!(matches!(error("tcp://a/b"), UriError::Scheme(_)));
        assert!(matches!(error("nvme+tcp://a"), UriError::NoSubsystem(_)));
        assert!(matches!(error("nvme+tcp:///nqn.2016-06.io.spdk:a"), UriError::NoSubsystem(_)));
        assert!(matches!(error("nvme+tcp://:4420/nqn.2016-06.io.spdk:a"), UriError::NoHost(_)));
        assert!(matches!(error("nvme+tcp://[]:4420/nqn.2016-06.io.spdk:a"), UriError::NoHost(_)));
        assert!(matches!(error("nvme+tcp://][1:4::420/nqn.2016-06.io.spdk:a"), UriError::NoHost(_)));
        assert!(matches!(error("nvme+tcp://[[1]:420/nqn.2016-06.io.spdk:a"), UriError::NoHost(_)));
        assert!(matches!(error("nvme+tcp://a:b/nqn.2016-06.io.spdk:a"), UriError::Port(_)));
        assert!(matches!(error("nvme+tcp://a/n"), UriError::Nqn(_)));
        assert!(matches!(error("nvme+vfio-user:?ns=1"), UriError::NoDirectory(_)));
        for address in ["", "0", "03:00", "03:20.0", "03:00.8", "0000:003:00.0", "+3:0.0", "a:b:c:d.0"] {
            let text = format!("nvme+pcie://{address}");
            assert_eq!(error(&text), UriError::Address(address.into()));
        }
        for option in
            ["ns=0", "ns=x", "hdgst=yes", "color=red", "ns", "psk=", "hostnqn=h", "psk_derivation=x"]
        {
            for base in [
                "nvme+tcp://a/nqn.2016-06.io.spdk:a",
                "nvme+rdma://a/nqn.2016-06.io:a",
                "nvme+pcie://3:0.0",
                "nvme+vfio-user:/a",
            ] {
                assert_eq!(error(&format!("{base}?{option}")), UriError::Option(option.into()));
            }
        }
    }
}
