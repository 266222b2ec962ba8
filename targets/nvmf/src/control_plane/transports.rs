//! The transports: their groups on all reactors, and faults that are injected.

use reactor::Core;
use sockets::CoreNetwork;
use target_shell::{ConnectionLimits, GroupLimits, GroupWaker, TargetCores};

use super::{NvmfTarget, TcpTransport, VfioUserTransport};
use crate::address::ListenAddress;
use crate::failure::NvmfTargetError;
use crate::limits::{DRAIN_TIMEOUT_NS, TcpTransportConfig};
use crate::tcp::TcpProtocol;
use crate::vfio_user::{self, Seats, VfioUserConfig, VfioUserFault, VfioUserProtocol};

/// Clients of the vfio-user transport: as many as sockets to listen on.
const VFIO_USER_CLIENTS_MAX: u32 = 1024;
/// Clients that wait for others to leave their endpoints, on all cores together.
const VFIO_USER_WAITING_MAX: u32 = 256;

impl<N: CoreNetwork> NvmfTarget<N> {
    /// Creates the TCP transport, with a poll group on every reactor.
    ///
    /// # Errors
    /// An option is out of range, or the transport exists.
    pub fn create_transport(&self, config: TcpTransportConfig) -> Result<(), NvmfTargetError> {
        let limits = config.limits()?;
        let mut state = self.lock()?;
        if state.transport.is_some() {
            return Err(NvmfTargetError::TransportExists("TCP"));
        }
        let registry = Some(self.0.registry().clone());
        let group_limits = GroupLimits { registry, ..limits.connections.clone() };
        let directory = self.0.shared().clone();
        let protocol = move |_: &Core, waker: &GroupWaker| {
            let waker = waker.clone();
            let notifier = directory.add_notifier(Box::new(move || waker.wake()));
            TcpProtocol::new(limits.clone(), directory.clone(), Some(notifier))
        };
        let cores = TargetCores::start(self.0.reactors(), self.0.publisher(), group_limits, protocol)?;
        state.transport = Some(TcpTransport { config, cores });
        // Each core has just answered; the groups read the latest snapshot in their first poll.
        self.wait_applied(self.0.publisher().generation())
    }

    /// Creates the vfio-user transport, with a poll group on every reactor.
    ///
    /// # Errors
    /// An option is out of range, or the transport exists.
    pub fn create_vfio_user(&self, config: VfioUserConfig) -> Result<(), NvmfTargetError> {
        let limits = config.limits()?;
        let mut state = self.lock()?;
        if state.vfio_user.is_some() {
            return Err(NvmfTargetError::TransportExists("VFIOUSER"));
        }
        let group_limits = GroupLimits {
            connections: ConnectionLimits::new(VFIO_USER_CLIENTS_MAX),
            // Clients that wait until others have gone.
            logins_max: VFIO_USER_WAITING_MAX,
            drain_timeout_ns: DRAIN_TIMEOUT_NS,
            registry: Some(self.0.registry().clone()),
            ..GroupLimits::default()
        };
        let (directory, seats) = (self.0.shared().clone(), Seats::default());
        let protocol = move |_: &Core, waker: &GroupWaker| {
            let woken = waker.clone();
            let notifier = directory.add_notifier(Box::new(move || woken.wake()));
            let (limits, directory) = (limits.clone(), directory.clone());
            VfioUserProtocol::new(limits, directory, notifier, waker.clone(), seats.clone())
        };
        let cores = TargetCores::start(self.0.reactors(), self.0.publisher(), group_limits, protocol)?;
        state.vfio_user = Some(VfioUserTransport { config, cores });
        self.wait_applied(self.0.publisher().generation())
    }

    /// Options of the vfio-user transport; `None` before it is created.
    pub fn vfio_user_config(&self) -> Option<VfioUserConfig> {
        self.lock_any().vfio_user.as_ref().map(|transport| transport.config.clone())
    }

    /// Injects a fault into the controller of the client at a vfio-user listener.
    ///
    /// # Errors
    /// No client is connected at the address.
    pub fn inject(&self, traddr: &str, fault: VfioUserFault) -> Result<(), NvmfTargetError> {
        let address = ListenAddress::vfio_user(traddr).normalized()?;
        let state = self.lock()?;
        let not_connected =
            || NvmfTargetError::Parameter(format!("no client is connected at {}", address.traddr));
        let port = state.ports.iter().find(|port| port.address == address).ok_or_else(not_connected)?;
        let transport = state.vfio_user.as_ref().ok_or(NvmfTargetError::NoTransport("VFIOUSER"))?;
        let portid = port.portid;
        let injected =
            transport.cores.query(move |_, connections| vfio_user::inject(connections, portid, fault))?;
        if injected.contains(&true) { Ok(()) } else { Err(not_connected()) }
    }

    /// Options of the TCP transport; empty before it is created.
    pub fn transports(&self) -> Vec<TcpTransportConfig> {
        let state = self.lock_any();
        state.transport.iter().map(|transport| transport.config.clone()).collect()
    }
}
