//! The RPC method that creates transports. Its parameters are those of all transports together.

use control::json::{Map, Value};
use control::{DecodeLog, Decoder, Parameter, ParameterError, Parameters, RpcError};

use super::NvmfModule;
use super::parameters::TargetName;
use crate::transport::{TransportConfig, TransportParameters};
use crate::transports::{self, TRANSPORTS};

/// Parameters of `nvmf_create_transport`: which transport, its options, and what all transports have in
/// common.
pub(super) struct CreateTransport(Box<dyn TransportConfig>, CommonOptions);

control::parameters! {
    struct WhichTransport {
        /// One of the transports
        trtype: String,
        tgt_name: TargetName,
    }
}

control::parameters! {
    struct CommonOptions {
        /// Namespaces that are added later hide the protection information of their bdevs, as with
        /// `hide_metadata`; the same for all transports
        dif_insert_or_strip: bool = false,
    }
}

control::parameters! {
    /// Options of SPDK in which there is no choice, unless a transport declares one of them.
    struct FixedOptions {}
    only {
        disable_compare: bool = false,
        masked_oncs: Vec<String> = Vec::new(),
        masked_fuses: Vec<String> = Vec::new(),
    }
    ignored("buffers come from bounded per-core pools") {
        io_unit_size,
        num_shared_buffers,
        buf_cache_size,
        iobuf_small_cache_size,
        iobuf_large_cache_size,
        zcopy,
        control_msg_num,
    }
    ignored("the transports have fixed values") {
        sock_priority,
        acceptor_backlog,
        acceptor_poll_rate,
        ack_timeout,
        abort_timeout_sec,
        kas,
        min_kato,
        disable_command_passthru,
    }
    ignored("neither transport has them") {
        num_cqe,
        max_srq_depth,
        no_srq,
        no_wr_batching,
        data_wr_pool_size,
        disable_adaptive_irq,
        disable_shadow_doorbells,
    }
}

impl Parameters for CreateTransport {
    fn declaration() -> Vec<Parameter> {
        let of_kinds: Vec<(&str, TransportParameters)> =
            TRANSPORTS.iter().map(|kind| (kind.name(), kind.parameters())).collect();
        let mut all = WhichTransport::declaration();
        for parameter in all.iter_mut().filter(|parameter| parameter.name == "trtype") {
            parameter.text = transports::names("or");
        }
        all.extend(merged(of_kinds.iter().map(|(name, parameters)| (*name, &parameters.shared[..]))));
        all.extend(merged(of_kinds.iter().map(|(name, parameters)| (*name, &parameters.own[..]))));
        all.extend(CommonOptions::declaration());
        let mut fixed = FixedOptions::declaration();
        fixed.retain(|parameter| all.iter().all(|declared| declared.name != parameter.name));
        all.extend(fixed);
        all
    }

    fn from_object(mut object: Map<String, Value>, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let WhichTransport { trtype, .. } = WhichTransport::take_from(&mut object, log)?;
        let kind = transports::by_name(&trtype);
        let config = kind.map(|kind| kind.decode(&mut object, log)).transpose()?;
        // What belongs to other transports has no effect, but has to be of the right type.
        for other in TRANSPORTS {
            other.decode(&mut object, &mut DecodeLog::default())?;
        }
        let common = CommonOptions::take_from(&mut object, log)?;
        FixedOptions::take_from(&mut object, log)?;
        let declared: Vec<&str> = Self::declaration().iter().map(|parameter| parameter.name).collect();
        Decoder::new(object, log).finish(&declared)?;
        match config {
            Some(config) => Ok(CreateTransport(config, common)),
            None => {
                let expected = transports::names("or");
                let message = format!("transport {trtype} is not supported; expected {expected}");
                Err(ParameterError::new(message))
            }
        }
    }

    /// All options that the transport has.
    fn to_object(&self) -> Map<String, Value> {
        let mut object = self.0.to_object();
        object.extend(self.1.to_object());
        object.insert("trtype".to_string(), self.0.kind().name().into());
        object
    }
}

/// The parameters of all transports, each once; those that some do not have say which do.
fn merged<'a>(of_kinds: impl Iterator<Item = (&'a str, &'a [Parameter])> + Clone) -> Vec<Parameter> {
    let mut all: Vec<Parameter> = Vec::new();
    for parameter in of_kinds.clone().flat_map(|(_, parameters)| parameters) {
        if all.iter().any(|known| known.name == parameter.name) {
            continue;
        }
        let has = |parameters: &[Parameter]| parameters.iter().any(|other| other.name == parameter.name);
        let with: Vec<&str> =
            of_kinds.clone().filter(|(_, parameters)| has(parameters)).map(|(name, _)| name).collect();
        let mut parameter = parameter.clone();
        if with.len() < TRANSPORTS.len() {
            parameter.text = format!("{}; {} only", parameter.text, with.join(" and "));
        }
        all.push(parameter);
    }
    all
}

pub(super) fn create_transport(module: &NvmfModule, params: CreateTransport) -> Result<bool, RpcError> {
    let CreateTransport(config, CommonOptions { dif_insert_or_strip }) = params;
    module.target.check_hides_metadata(dif_insert_or_strip)?;
    module.target.create_transport_with(&*config)?;
    module.target.set_hides_metadata(dif_insert_or_strip);
    Ok(true)
}
