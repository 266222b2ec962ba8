//! The RPC method that creates transports. Its parameters are those of all transports together.

use control::json::{Map, Value};
use control::{DecodeLog, Decoder, Parameter, ParameterError, Parameters, RpcError};
use wire_nvme::identify::{fuses, oncs};

use super::parameters::TargetName;
use crate::NvmfTarget;
use crate::module::NvmfModule;
use crate::transport::{MaskedCommands, TransportConfig, TransportParameters};
use crate::transports::{self, TRANSPORTS};

/// Parameters of `nvmf_create_transport`: which transport, its options, and what all transports have in
/// common.
pub(super) struct CreateTransport {
    tgt_name: TargetName,
    config: Box<dyn TransportConfig>,
    common: CommonOptions,
}

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
        /// Commands that controllers do not offer and reject: nvmcmps (Compare), nvmdsmsv (Dataset
        /// Management), nvmwzsv (Write Zeroes), reservs (reservations), nvmcpys (Copy)
        masked_oncs: Vec<OptionalCommand> = Vec::new(),
        /// Fused operations that controllers do not offer and reject: fcws (Compare and Write)
        masked_fuses: Vec<FusedOperation> = Vec::new(),
        /// As nvmcmps and fcws
        disable_compare: bool = false,
    }
}

control::choices! {
    /// SPDK's names of bits of ONCS.
    #[derive(PartialOrd, Ord)]
    enum OptionalCommand {
        Compare = "nvmcmps",
        DatasetManagement = "nvmdsmsv",
        WriteZeroes = "nvmwzsv",
        Reservations = "reservs",
        Copy = "nvmcpys",
    }
}

control::choices! {
    /// SPDK's names of bits of FUSES.
    #[derive(PartialOrd, Ord)]
    enum FusedOperation {
        CompareAndWrite = "fcws",
    }
}

impl OptionalCommand {
    const ALL: [(OptionalCommand, u16); 5] = [
        (OptionalCommand::Compare, oncs::COMPARE),
        (OptionalCommand::DatasetManagement, oncs::DATASET_MANAGEMENT),
        (OptionalCommand::WriteZeroes, oncs::WRITE_ZEROES),
        (OptionalCommand::Reservations, oncs::RESERVATIONS),
        (OptionalCommand::Copy, oncs::COPY),
    ];
}

impl CommonOptions {
    /// Each name once, in order, and no other spelling of two of them.
    fn canonical(mut self) -> CommonOptions {
        if std::mem::take(&mut self.disable_compare) {
            self.masked_oncs.push(OptionalCommand::Compare);
            self.masked_fuses.push(FusedOperation::CompareAndWrite);
        }
        self.masked_oncs.sort_unstable();
        self.masked_oncs.dedup();
        self.masked_fuses.dedup();
        self
    }

    fn masked(&self) -> MaskedCommands {
        let is_masked = |(command, _): &&(OptionalCommand, u16)| self.masked_oncs.contains(command);
        MaskedCommands {
            oncs: OptionalCommand::ALL.iter().filter(is_masked).fold(0, |all, (_, bit)| all | bit),
            fuses: if self.masked_fuses.is_empty() { 0 } else { fuses::COMPARE_AND_WRITE },
        }
    }
}

/// The transports that are created, as parameters that create them again.
pub(super) fn describe(target: &NvmfTarget) -> Vec<Value> {
    let described = target.transports().into_iter().map(|(mut options, masked)| {
        let commands = OptionalCommand::ALL.iter().filter(|(_, bit)| masked.oncs & bit != 0);
        options["masked_oncs"] = commands.map(|(command, _)| command.name()).collect();
        let fused = (masked.fuses & fuses::COMPARE_AND_WRITE != 0).then_some(FusedOperation::CompareAndWrite);
        options["masked_fuses"] = fused.iter().map(|operation| operation.name()).collect();
        options
    });
    described.collect()
}

control::parameters! {
    /// Options of SPDK in which there is no choice, unless a transport declares one of them.
    struct FixedOptions {}
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
        acceptor_poll_rate,
        ack_timeout,
        abort_timeout_sec,
        kas,
        min_kato,
        disable_command_passthru,
    }
    ignored("the queues of RDMA have sizes of their own") {
        num_cqe,
        data_wr_pool_size,
    }
    ignored("no transport has them") {
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
        let WhichTransport { trtype, tgt_name } = WhichTransport::take_from(&mut object, log)?;
        let kind = transports::by_name(&trtype);
        let config = kind.map(|kind| kind.decode(&mut object, log)).transpose()?;
        // What belongs to other transports has no effect, but has to be of the right type.
        for other in TRANSPORTS {
            other.decode(&mut object, &mut DecodeLog::default())?;
        }
        let common = CommonOptions::take_from(&mut object, log)?.canonical();
        FixedOptions::take_from(&mut object, log)?;
        let declared: Vec<&str> = Self::declaration().iter().map(|parameter| parameter.name).collect();
        Decoder::new(object, log).finish(&declared)?;
        match config {
            Some(config) => Ok(CreateTransport { tgt_name, config, common }),
            None => {
                let expected = transports::names("or");
                let message = format!("transport {trtype} is not supported; expected {expected}");
                Err(ParameterError::new(message))
            }
        }
    }

    /// All options that the transport has.
    fn to_object(&self) -> Map<String, Value> {
        let mut object = self.config.to_object();
        object.extend(self.common.to_object());
        object.insert("trtype".to_string(), self.config.kind().name().into());
        object.extend(self.tgt_name.to_member());
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
    let CreateTransport { tgt_name, config, common } = params;
    let target = tgt_name.find(module)?;
    target.check_hides_metadata(common.dif_insert_or_strip)?;
    target.create_transport_with(&*config, common.masked())?;
    target.set_hides_metadata(common.dif_insert_or_strip);
    Ok(true)
}
