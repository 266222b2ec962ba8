//! The cores of a target that start with its first listener.

use sockets::{ServerNetwork, Sockets};

use crate::admissions::{ConnectionLimits, PeerConnections};
use crate::cores::TargetCores;
use crate::group::ConnectionTotals;
use crate::protocol::Protocol;

/// The [cores](TargetCores) of a target, once it has something to serve: a target without listeners does not
/// pay for them.
///
/// It also has the limits on connections, which may be set before there are cores, and those of
/// [`TargetCores`] that are about nothing until then.
#[derive(Debug)]
pub struct LazyCores<P: Protocol, N: ServerNetwork = Sockets> {
    cores: Option<TargetCores<P, N>>,
    limits: ConnectionLimits,
}

impl<P: Protocol, N: ServerNetwork> LazyCores<P, N> {
    /// No cores yet; those that start have these limits.
    pub fn new(limits: ConnectionLimits) -> LazyCores<P, N> {
        LazyCores { cores: None, limits }
    }

    /// The cores, if they have started.
    pub fn get(&self) -> Option<&TargetCores<P, N>> {
        self.cores.as_ref()
    }

    /// The cores, which `start` starts with the limits if they have not started.
    ///
    /// # Errors
    /// That of `start`.
    pub fn get_or_start<E>(
        &mut self,
        start: impl FnOnce(ConnectionLimits) -> Result<TargetCores<P, N>, E>,
    ) -> Result<&TargetCores<P, N>, E> {
        let cores = match self.cores.take() {
            Some(cores) => cores,
            None => start(self.limits.clone())?,
        };
        Ok(self.cores.insert(cores))
    }

    /// How many connections there may be.
    pub fn limits(&self) -> &ConnectionLimits {
        &self.limits
    }

    /// Changes how many connections there may be, for those that log in from now on.
    pub fn set_limits(&mut self, limits: ConnectionLimits) {
        if let Some(cores) = &self.cores {
            cores.set_limits(limits.clone());
        }
        self.limits = limits;
    }

    /// See [`TargetCores::peers`].
    pub fn peers(&self) -> Vec<PeerConnections> {
        self.cores.as_ref().map(TargetCores::peers).unwrap_or_default()
    }

    /// See [`TargetCores::totals`].
    pub fn totals(&self) -> ConnectionTotals {
        self.cores.as_ref().map(TargetCores::totals).unwrap_or_default()
    }

    /// See [`TargetCores::object_connections_max`]; 0 before there are cores.
    pub fn object_connections_max(&self, object: u64) -> u32 {
        self.cores.as_ref().map_or(0, |cores| cores.object_connections_max(object))
    }

    /// See [`TargetCores::drain`]. The log, as `target`, says if it has failed.
    pub fn drain(&self, target: &str) {
        if let Some(Err(error)) = self.cores.as_ref().map(TargetCores::drain) {
            log::warn!(target: target, "connections are left at the end: {error}");
        }
    }

    /// Closes the listeners of a port, or all. A core that does not respond closes them when it runs again.
    pub fn unlisten(&self, portid: Option<u16>) {
        if let Some(cores) = &self.cores {
            // Without reactors nothing listens.
            _ = cores.unlisten(portid);
        }
    }
}
