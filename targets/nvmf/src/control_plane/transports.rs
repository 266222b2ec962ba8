//! The transports that are created.

use std::any::Any;

use sockets::ServerNetwork;

use super::{NvmfTarget, TargetState};
use crate::address::ListenAddress;
use crate::failure::NvmfTargetError;
use crate::transport::{MaskedCommands, Transport, TransportConfig, TransportKind, TransportParts};
use crate::transports;

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Creates a transport, such as [`TcpTransportConfig`](crate::TcpTransportConfig)'s, with a poll group on
    /// every reactor.
    ///
    /// # Errors
    /// An option is out of range, or the transport exists.
    pub fn create_transport(&self, config: impl TransportConfig<N>) -> Result<(), NvmfTargetError> {
        self.create_transport_with(&config, MaskedCommands::default())
    }

    /// As [`create_transport`](Self::create_transport); its controllers do not have the masked commands.
    pub(crate) fn create_transport_with(
        &self,
        config: &dyn TransportConfig<N>,
        masked: MaskedCommands,
    ) -> Result<(), NvmfTargetError> {
        config.check()?;
        let kind = config.kind();
        let mut state = self.lock()?;
        let position = transports::position(kind);
        if state.transports.contains_key(&position) {
            return Err(NvmfTargetError::TransportExists(kind.name()));
        }
        let parts = TransportParts {
            registry: self.0.registry(),
            reactors: &self.poll_group_reactors(&state),
            masked,
            publisher: self.0.publisher(),
            directory: self.0.shared(),
        };
        let transport = config.start(&parts)?;
        state.transports.insert(position, transport);
        state.masked.insert(position, masked);
        // Each core has just answered; the groups read the latest snapshot in their first poll.
        self.wait_applied(self.0.publisher().generation())
    }

    /// Runs `run` with the transport of a type, if it is created.
    pub(crate) fn with_transport<T: Transport, R>(&self, run: impl FnOnce(&T) -> R) -> Option<R> {
        self.lock_any().transport_of().map(run)
    }

    /// Runs `run` with the transport of a type and the identifier of a port, if a subsystem listens at the
    /// address.
    ///
    /// # Errors
    /// The target is stopping.
    pub(crate) fn at_listener<T: Transport, R>(
        &self,
        address: &ListenAddress,
        run: impl FnOnce(&T, u16) -> R,
    ) -> Result<Option<R>, NvmfTargetError> {
        let state = self.lock()?;
        let port = state.ports.iter().find(|port| port.address == *address);
        Ok(port.zip(state.transport_of()).map(|(port, transport)| run(transport, port.portid)))
    }

    /// The parameters of the transports that are created, each with its `trtype`, and the commands that its
    /// controllers do not have.
    pub(crate) fn transports(&self) -> Vec<(control::json::Value, MaskedCommands)> {
        let state = self.lock_any();
        let options = state.transports.iter().filter_map(|(position, transport)| {
            let mut options = transport.options();
            options.insert("trtype".to_string(), transports::TRANSPORTS.get(*position)?.name().into());
            options.insert("dif_insert_or_strip".to_string(), state.hides_metadata.into());
            Some((options.into(), state.masked.get(position).copied().unwrap_or_default()))
        });
        options.collect()
    }
}

impl TargetState {
    /// The transport of a type, if it is created.
    fn transport_of<T: Transport>(&self) -> Option<&T> {
        let mut created = self.transports.values().map(|transport| &**transport as &dyn Any);
        created.find_map(|transport| transport.downcast_ref())
    }

    /// The transport of a kind.
    ///
    /// # Errors
    /// It is not created.
    pub(super) fn transport(&self, kind: &dyn TransportKind) -> Result<&dyn Transport, NvmfTargetError> {
        let created = self.transports.get(&transports::position(kind));
        created.map(|transport| &**transport).ok_or(NvmfTargetError::NoTransport(kind.name()))
    }
}
