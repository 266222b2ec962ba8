//! Parameters of the RDMA transport in `nvmf_create_transport`.

use control::json::{Map, Value};
use control::{DecodeLog, ParameterError, Parameters};

use super::limits::RdmaTransportConfig;
use crate::transport::TransportParameters;

control::parameters! {
    struct RdmaParameters {
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
        /// Receive buffers of a core and a device, which its connections share
        max_srq_depth: Option<u32>,
        /// Requests to connect that wait to be accepted at each listener and core, at most
        acceptor_backlog: Option<u32>,
        /// Gives each request to the device at once, not those of a turn of the reactor together
        no_wr_batching: bool = false,
    }
    only(
        "the connections of a core share receive buffers, whose number max_srq_depth sets: buffers for each \
         connection would take its whole queue of in-capsule data"
    ) {
        no_srq: bool = false,
    }
}

pub(super) fn declaration() -> TransportParameters {
    TransportParameters { shared: RdmaParameters::declaration(), own: Vec::new() }
}

/// Takes the parameters out of an object.
pub(super) fn decode(
    object: &mut Map<String, Value>,
    log: &mut DecodeLog,
) -> Result<RdmaTransportConfig, ParameterError> {
    let options = RdmaParameters::take_from(object, log)?;
    let default = RdmaTransportConfig::default();
    Ok(RdmaTransportConfig {
        max_queue_depth: options.max_queue_depth.unwrap_or(default.max_queue_depth),
        max_io_qpairs_per_ctrlr: options.max_io_qpairs_per_ctrlr.unwrap_or(default.max_io_qpairs_per_ctrlr),
        in_capsule_data_size: options.in_capsule_data_size.unwrap_or(default.in_capsule_data_size),
        max_io_size: options.max_io_size.unwrap_or(default.max_io_size),
        max_aq_depth: options.max_aq_depth.unwrap_or(default.max_aq_depth),
        max_srq_depth: options.max_srq_depth.unwrap_or(default.max_srq_depth),
        acceptor_backlog: options.acceptor_backlog.unwrap_or(default.acceptor_backlog),
        no_wr_batching: options.no_wr_batching,
    })
}

/// All options as parameters.
pub(super) fn to_object(config: &RdmaTransportConfig) -> Map<String, Value> {
    let options = RdmaParameters {
        max_queue_depth: Some(config.max_queue_depth),
        max_io_qpairs_per_ctrlr: Some(config.max_io_qpairs_per_ctrlr),
        in_capsule_data_size: Some(config.in_capsule_data_size),
        max_io_size: Some(config.max_io_size),
        max_aq_depth: Some(config.max_aq_depth),
        max_srq_depth: Some(config.max_srq_depth),
        acceptor_backlog: Some(config.acceptor_backlog),
        no_wr_batching: config.no_wr_batching,
    };
    options.to_object()
}
