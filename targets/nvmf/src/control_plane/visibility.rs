//! Namespaces that only some hosts see.

use std::collections::BTreeSet;

use sockets::ServerNetwork;
use wire_nvme::fabrics::Nqn;

use super::{NvmfTarget, parse_nqn};
use crate::NvmfTargetError;

/// Most hosts that see one namespace: snapshots are compared and copied with them at every change of the subsystem.
const HOSTS_MAX: usize = 4096;

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Lets a host see a namespace that was added with `no_auto_visible`; it need not be connected. Its controllers report a
    /// changed namespace. Without effect if it sees it already.
    pub fn add_namespace_host(&self, nqn: &str, nsid: u32, host: &str) -> Result<(), NvmfTargetError> {
        self.change_visibility(nqn, nsid, host, |hosts, host| hosts.insert(host))
    }

    /// Hides a namespace from a host: its controllers report a changed namespace, and its commands are rejected from then on;
    /// those in flight complete. Without effect if it does not see it.
    pub fn remove_namespace_host(&self, nqn: &str, nsid: u32, host: &str) -> Result<(), NvmfTargetError> {
        self.change_visibility(nqn, nsid, host, |hosts, host| hosts.remove(&host))
    }

    fn change_visibility(
        &self,
        nqn: &str,
        nsid: u32,
        host: &str,
        change: impl FnOnce(&mut BTreeSet<Nqn>, Nqn) -> bool,
    ) -> Result<(), NvmfTargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        self.change(&nqn, |subsystem| {
            let name = || nqn.as_str().to_string();
            let namespace = subsystem.namespaces.iter_mut().find(|namespace| namespace.nsid == nsid);
            let namespace = namespace.ok_or_else(|| NvmfTargetError::NoNamespace(name(), nsid))?;
            let hosts = namespace.visible_hosts.as_mut();
            let hosts = hosts.ok_or_else(|| NvmfTargetError::AlwaysVisible(name(), nsid))?;
            change(hosts, host);
            if hosts.len() > HOSTS_MAX {
                let reason = format!(
                    "namespace {nsid} of {nqn} is visible to {HOSTS_MAX} hosts, the most that it can be"
                );
                return Err(NvmfTargetError::Parameter(reason));
            }
            Ok(())
        })
    }
}
