//! Parameters of the TCP transport in `nvmf_create_transport`.

use control::json::{Map, Value};
use control::{DecodeLog, ParameterError, Parameters};

use super::limits::TcpTransportConfig;
use crate::transport::TransportParameters;

control::parameters! {
    struct TcpParameters {
        /// Entries of an I/O queue at most
        max_queue_depth: Option<u32>,
        /// I/O queues of a controller at most
        max_io_qpairs_per_ctrlr: Option<u16>,
        /// Data in a command capsule at most
        in_capsule_data_size: Option<u32> ["bytes"],
        /// Data of a command at most
        max_io_size: Option<u32> ["bytes"],
        /// Entries of an admin queue at most
        max_aq_depth: Option<u32>,
        /// Leave out the response capsule of a successful read
        c2h_success: Option<bool>,
    }
}

control::parameters! {
    /// Limits that SPDK does not have.
    struct TcpLimitParameters {
        /// Connections of hosts that have logged in at most; as many as file descriptors allow if not given
        max_connections: Option<u32>,
        /// Of these, from one IP address (IPv6: from one /64 network); half of what others leave, but at
        /// least 16, if not given
        max_connections_per_peer: Option<u32>,
        /// Of these, to one subsystem; three quarters of what others leave, but at least 16, if not given
        max_connections_per_subsystem: Option<u32>,
        /// Connections of hosts that have not logged in at most, never more than a quarter of the file
        /// descriptors; beyond, the oldest is closed
        max_pending_logins: Option<u32>,
        /// Of these, from one IP address (IPv6: from one /64 network)
        max_pending_logins_per_peer: Option<u32>,
        /// Buffers that one connection holds at most
        connection_bytes_max: Option<u32> ["bytes"],
        /// Buffers that all connections of one host hold on one reactor at most; half of the reactor's share
        /// of the memory if not given
        host_bytes_max: Option<u32> ["bytes"],
        /// Time for a host to send requested data or to read an answer
        transfer_timeout_ms: Option<u32> ["ms"],
    }
}

pub(super) fn declaration() -> TransportParameters {
    TransportParameters { shared: TcpParameters::declaration(), own: TcpLimitParameters::declaration() }
}

/// Takes the parameters out of an object.
pub(super) fn decode(
    object: &mut Map<String, Value>,
    log: &mut DecodeLog,
) -> Result<TcpTransportConfig, ParameterError> {
    let (options, limits) =
        (TcpParameters::take_from(object, log)?, TcpLimitParameters::take_from(object, log)?);
    let default = TcpTransportConfig::default();
    Ok(TcpTransportConfig {
        max_queue_depth: options.max_queue_depth.unwrap_or(default.max_queue_depth),
        max_io_qpairs_per_ctrlr: options.max_io_qpairs_per_ctrlr.unwrap_or(default.max_io_qpairs_per_ctrlr),
        in_capsule_data_size: options.in_capsule_data_size.unwrap_or(default.in_capsule_data_size),
        max_io_size: options.max_io_size.unwrap_or(default.max_io_size),
        max_aq_depth: options.max_aq_depth.unwrap_or(default.max_aq_depth),
        c2h_success: options.c2h_success.unwrap_or(default.c2h_success),
        max_connections: limits.max_connections,
        max_connections_per_peer: limits.max_connections_per_peer,
        max_connections_per_subsystem: limits.max_connections_per_subsystem,
        max_pending_logins: limits.max_pending_logins.unwrap_or(default.max_pending_logins),
        max_pending_logins_per_peer: limits
            .max_pending_logins_per_peer
            .unwrap_or(default.max_pending_logins_per_peer),
        connection_bytes_max: limits.connection_bytes_max.unwrap_or(default.connection_bytes_max),
        host_bytes_max: limits.host_bytes_max,
        transfer_timeout_ms: limits.transfer_timeout_ms.unwrap_or(default.transfer_timeout_ms),
        ..default
    })
}

/// All options as parameters.
pub(super) fn to_object(config: &TcpTransportConfig) -> Map<String, Value> {
    let options = TcpParameters {
        max_queue_depth: Some(config.max_queue_depth),
        max_io_qpairs_per_ctrlr: Some(config.max_io_qpairs_per_ctrlr),
        in_capsule_data_size: Some(config.in_capsule_data_size),
        max_io_size: Some(config.max_io_size),
        max_aq_depth: Some(config.max_aq_depth),
        c2h_success: Some(config.c2h_success),
    };
    let limits = TcpLimitParameters {
        max_connections: config.max_connections,
        max_connections_per_peer: config.max_connections_per_peer,
        max_connections_per_subsystem: config.max_connections_per_subsystem,
        max_pending_logins: Some(config.max_pending_logins),
        max_pending_logins_per_peer: Some(config.max_pending_logins_per_peer),
        connection_bytes_max: Some(config.connection_bytes_max),
        host_bytes_max: config.host_bytes_max,
        transfer_timeout_ms: Some(config.transfer_timeout_ms),
    };
    let mut object = options.to_object();
    object.extend(limits.to_object());
    object
}
