//! Parameters of the vfio-user transport in `nvmf_create_transport`.

use control::json::{Map, Value};
use control::{DecodeLog, ParameterError, Parameters};

use super::limits::VfioUserConfig;
use crate::transport::TransportParameters;

/// Options of other transports that have no meaning here.
const CAPSULES: [&str; 2] = ["in_capsule_data_size", "max_aq_depth"];

control::parameters! {
    struct VfioUserParameters {
        /// Entries of an I/O queue at most
        max_queue_depth: Option<u32>,
        /// I/O queues of a controller at most
        max_io_qpairs_per_ctrlr: Option<u16>,
        /// Data of a command at most
        max_io_size: Option<u32> ["bytes"],
        /// Trap accesses to doorbells
        disable_mappable_bar0: bool = false,
    }
}

pub(super) fn declaration() -> TransportParameters {
    TransportParameters { shared: VfioUserParameters::declaration(), own: Vec::new() }
}

/// Takes the parameters out of an object.
pub(super) fn decode(
    object: &mut Map<String, Value>,
    log: &mut DecodeLog,
) -> Result<VfioUserConfig, ParameterError> {
    for name in CAPSULES {
        if object.get(name).is_some_and(|value| !value.is_null()) {
            log.ignored(name, "queues are in the client's memory");
        }
    }
    let params = VfioUserParameters::take_from(object, log)?;
    let default = VfioUserConfig::default();
    Ok(VfioUserConfig {
        max_queue_depth: params.max_queue_depth.unwrap_or(default.max_queue_depth),
        max_io_qpairs_per_ctrlr: params.max_io_qpairs_per_ctrlr.unwrap_or(default.max_io_qpairs_per_ctrlr),
        max_io_size: params.max_io_size.unwrap_or(default.max_io_size),
        disable_mappable_bar0: params.disable_mappable_bar0,
    })
}

/// All options as parameters.
pub(super) fn to_object(config: &VfioUserConfig) -> Map<String, Value> {
    let params = VfioUserParameters {
        max_queue_depth: Some(config.max_queue_depth),
        max_io_qpairs_per_ctrlr: Some(config.max_io_qpairs_per_ctrlr),
        max_io_size: Some(config.max_io_size),
        disable_mappable_bar0: config.disable_mappable_bar0,
    };
    params.to_object()
}
