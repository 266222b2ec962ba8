//! Where nodes listen: the addresses of `--listen`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener};

use cluster_map::{NodeId, NodeRecord};

use crate::command_error::CommandError;

/// An address with a port, or with port 0, which selects any one.
pub(super) fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let without_port = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 0));
    let parsed = without_port.or_else(|_| text.parse::<SocketAddr>());
    parsed.map_err(|_| {
        "expected IP or IP:PORT in digits, as 10.0.0.2, 10.0.0.2:7001 or [fd00::2]:7001".to_string()
    })
}

/// The port of a node of those that are made together: each has the one after that of the node before, if a
/// port was given. `None` if there is none so high.
pub(super) fn port_of(listen: SocketAddr, index: u32) -> Option<u16> {
    match listen.port() {
        0 => Some(0),
        first => u16::try_from(u32::from(first).checked_add(index)?).ok(),
    }
}

/// Refuses ports that this many new nodes cannot listen on, before anything is made.
pub(super) fn check_ports(listen: SocketAddr, nodes: u32) -> Result<(), CommandError> {
    for index in 0..nodes {
        let port = port_of(listen, index).ok_or_else(|| {
            CommandError::usage(format!("--listen {listen}: {nodes} nodes need as many ports from there on"))
        })?;
        check_free(SocketAddr::new(listen.ip(), port))?;
    }
    Ok(())
}

/// Refuses an address with a port that is in use, or is no address of this machine. Another process may take
/// it before the node does: then the node reports the same.
fn check_free(listen: SocketAddr) -> Result<(), CommandError> {
    if listen.port() == 0 {
        return Ok(());
    }
    let bound = TcpListener::bind(listen).map(drop);
    bound.map_err(|error| CommandError::operation(format!("--listen {listen}: {error}")))
}

/// Refuses the address of another one of the nodes of this machine, which may be stopped, and one that is in
/// use.
pub(super) fn check_address(
    records: &BTreeMap<NodeId, NodeRecord>,
    local: &[u32],
    node: Option<u32>,
    listen: SocketAddr,
) -> Result<(), CommandError> {
    if listen.port() == 0 {
        return Ok(());
    }
    let has_it = |other: &&u32| {
        let record = records.get(&NodeId(**other));
        let is_same = |address: &String| address.parse::<SocketAddr>() == Ok(listen);
        Some(**other) != node && record.is_some_and(|record| record.addresses.iter().any(is_same))
    };
    if let Some(other) = local.iter().find(has_it) {
        return Err(CommandError::operation(format!("--listen {listen}: node {other} has this address")));
    }
    check_free(listen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_have_a_port() {
        for (text, expected) in [
            ("127.0.0.1", "127.0.0.1:0"),
            ("10.0.0.2:7001", "10.0.0.2:7001"),
            ("::1", "[::1]:0"),
            ("[fd00::2]:7001", "[fd00::2]:7001"),
        ] {
            assert_eq!(parse_listen(text).map(|listen| listen.to_string()), Ok(expected.to_string()));
        }
        for text in ["", "localhost", "host:7001", "10.0.0.2:", "10.0.0.2:70000", ":7001", "10.0.0.2:7001 "] {
            assert!(parse_listen(text).is_err(), "{text}");
        }
    }

    #[test]
    fn nodes_that_are_made_together_have_ports_one_after_the_other() {
        let first: SocketAddr = "127.0.0.1:65534".parse().unwrap();
        assert_eq!([0, 1, 2].map(|index| port_of(first, index)), [Some(65_534), Some(65_535), None]);
        assert_eq!(port_of("127.0.0.1:0".parse().unwrap(), 7), Some(0));
        let refused = check_ports(first, 3).unwrap_err().to_string();
        assert!(refused.contains("3 nodes need as many ports") || refused.contains("in use"), "{refused}");
    }

    #[test]
    fn a_port_that_is_in_use_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let refused = check_ports(address, 1).unwrap_err().to_string();
        assert!(refused.starts_with(&format!("--listen {address}: ")), "{refused}");
    }
}
