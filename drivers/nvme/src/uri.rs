//! Names of namespaces.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use wire_nvme::fabrics::Nqn;

/// A namespace somewhere: `nvme+tcp://HOST:PORT/SUBNQN?ns=N[&hdgst=1][&ddgst=1]`.
///
/// HOST is a name, an IPv4 address or an IPv6 address in brackets; PORT defaults to 4420.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Name or address of the host, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// The subsystem.
    pub subnqn: Nqn,
    /// The namespace, from 1.
    pub nsid: u32,
    /// Header digests are asked for.
    pub header_digest: bool,
    /// Data digests are asked for.
    pub data_digest: bool,
}

/// Why a text names no namespace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// Another scheme, or none.
    #[error("'{0}' does not start with nvme+tcp://")]
    Scheme(String),
    /// No subsystem.
    #[error("'{0}' names no subsystem; write nvme+tcp://HOST:PORT/SUBNQN?ns=N")]
    NoSubsystem(String),
    /// No host.
    #[error("'{0}' names no host; write nvme+tcp://HOST:PORT/SUBNQN?ns=N")]
    NoHost(String),
    /// A bad port.
    #[error("'{0}' is not a port")]
    Port(String),
    /// A bad subsystem name.
    #[error("'{0}' is not an NVMe qualified name")]
    Nqn(String),
    /// An unknown or bad option.
    #[error("'{0}' is not an option of nvme+tcp; known are ns=N, hdgst=0|1 and ddgst=0|1")]
    Option(String),
    /// The host has no address.
    #[error("'{0}' has no address: {1}")]
    Resolve(String, String),
}

const SCHEME: &str = "nvme+tcp://";
const PORT_DEFAULT: u16 = 4420;

impl Uri {
    /// The host's first address. Asks the resolver where the host is a name, and may wait for it.
    pub fn resolve(&self) -> Result<SocketAddr, UriError> {
        let failed = |why: String| UriError::Resolve(self.host.clone(), why);
        let mut addresses =
            (self.host.as_str(), self.port).to_socket_addrs().map_err(|error| failed(error.to_string()))?;
        addresses.next().ok_or_else(|| failed("the resolver knows none".into()))
    }
}

impl FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Uri, UriError> {
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| UriError::Scheme(text.into()))?;
        let (authority, path) = rest.split_once('/').ok_or_else(|| UriError::NoSubsystem(text.into()))?;
        let (subnqn, query) = path.split_once('?').unwrap_or((path, ""));
        if subnqn.is_empty() || authority.is_empty() {
            return Err(UriError::NoSubsystem(text.into()));
        }
        let (host, port) = split_authority(authority)?;
        let subnqn = Nqn::new(subnqn).map_err(|_| UriError::Nqn(subnqn.into()))?;
        let mut uri = Uri { host, port, subnqn, nsid: 1, header_digest: false, data_digest: false };
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let bad = || UriError::Option(option.into());
            match option.split_once('=').ok_or_else(bad)? {
                ("ns", value) => uri.nsid = value.parse().ok().filter(|nsid| *nsid > 0).ok_or_else(bad)?,
                ("hdgst", value) => uri.header_digest = flag(value).ok_or_else(bad)?,
                ("ddgst", value) => uri.data_digest = flag(value).ok_or_else(bad)?,
                _ => return Err(bad()),
            }
        }
        Ok(uri)
    }
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
    if host.is_empty() {
        return Err(UriError::NoHost(authority.into()));
    }
    let port = match port {
        Some(port) => port.parse().map_err(|_| UriError::Port(port.into()))?,
        None => PORT_DEFAULT,
    };
    Ok((host.to_string(), port))
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
        let Uri { host, port, subnqn, nsid, .. } = self;
        if host.contains(':') {
            write!(f, "{SCHEME}[{host}]:{port}/{subnqn}?ns={nsid}")?;
        } else {
            write!(f, "{SCHEME}{host}:{port}/{subnqn}?ns={nsid}")?;
        }
        for (name, on) in [("hdgst", self.header_digest), ("ddgst", self.data_digest)] {
            if on {
                write!(f, "&{name}=1")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_reads_back_as_it_is_written() {
        for text in [
            "nvme+tcp://127.0.0.1:4420/nqn.2016-06.io.spdk:cnode1?ns=1",
            "nvme+tcp://[::1]:8009/nqn.2016-06.io.spdk:cnode1?ns=7&hdgst=1&ddgst=1",
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        let short: Uri = "nvme+tcp://storage/nqn.2016-06.io.spdk:a".parse().unwrap();
        assert_eq!((short.port, short.nsid), (4420, 1));
    }

    #[test]
    fn what_names_nothing_says_why() {
        let error = |text: &str| text.parse::<Uri>().unwrap_err();
        assert!(matches!(error("tcp://a/b"), UriError::Scheme(_)));
        assert!(matches!(error("nvme+tcp://a"), UriError::NoSubsystem(_)));
        assert!(matches!(error("nvme+tcp:///nqn.2016-06.io.spdk:a"), UriError::NoSubsystem(_)));
        assert!(matches!(error("nvme+tcp://:4420/nqn.2016-06.io.spdk:a"), UriError::NoHost(_)));
        assert!(matches!(error("nvme+tcp://[]:4420/nqn.2016-06.io.spdk:a"), UriError::NoHost(_)));
        assert!(matches!(error("nvme+tcp://a:b/nqn.2016-06.io.spdk:a"), UriError::Port(_)));
        assert!(matches!(error("nvme+tcp://a/n"), UriError::Nqn(_)));
        for option in ["ns=0", "ns=x", "hdgst=yes", "color=red", "ns"] {
            let text = format!("nvme+tcp://a/nqn.2016-06.io.spdk:a?{option}");
            assert_eq!(error(&text), UriError::Option(option.into()));
        }
    }
}
