//! The IPv4 addresses of the machine.

use std::net::Ipv4Addr;

/// Addresses that are used at most.
const ADDRESSES_MAX: usize = 16;

/// The IPv4 addresses of the machine's interfaces, in ascending order, at most 16; loopback addresses only if
/// there are no others. Empty if the kernel does not list them.
pub fn local_addresses() -> Vec<Ipv4Addr> {
    std::fs::read_to_string("/proc/net/fib_trie").map(|trie| addresses_in(&trie)).unwrap_or_default()
}

/// The addresses in the kernel's table of routes: a local route to a host is an address of an interface.
fn addresses_in(trie: &str) -> Vec<Ipv4Addr> {
    let (mut found, mut last) = (Vec::new(), None);
    for line in trie.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last.take());
        }
    }
    found.sort();
    found.dedup();
    if found.iter().any(|address| !address.is_loopback()) {
        found.retain(|address| !address.is_loopback());
    }
    found.truncate(ADDRESSES_MAX);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_routes_to_hosts_are_addresses() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     \
                    +-- 127.0.0.0/8 2 0 2\n        |-- 127.0.0.0\n           /8 host LOCAL\n        \
                    |-- 127.0.0.1\n           /32 host LOCAL\nLocal:\n     |-- 192.0.2.7\n        \
                    /32 host LOCAL\n     |-- 192.0.2.255\n        /32 link BROADCAST\n     |-- 192.0.2.7\n        \
                    /32 host LOCAL\n";
        assert_eq!(addresses_in(trie), [Ipv4Addr::new(192, 0, 2, 7)]);
        assert_eq!(addresses_in("|-- 127.0.0.1\n /32 host LOCAL"), [Ipv4Addr::LOCALHOST]);
        assert!(addresses_in("").is_empty());
    }
}
