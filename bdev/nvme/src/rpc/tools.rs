//! RPC methods for tests and tools: controller reset and disable, error injection, passthrough commands,
//! firmware update, transport statistics.

use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE;
use block_io::Status;
use control::json::{Value, json};
use control::{JobHandle, Method, NoParameters, RpcError, files, thread_name};
use nvme::{AdminData, QueueStats};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::{Cqe, Sqe, cqe, sqe};

use super::module::{NO_CONTROLLER, NvmeModule};
use crate::{
    ControllerOperation, ErrorInjection, InitiatorError, PassthroughCommand, PassthroughReply, QueueKind,
};

pub(super) fn methods() -> Vec<Method<NvmeModule>> {
    const OPERATION: &[(i64, &str)] = &[
        NO_CONTROLLER,
        (RpcError::EBUSY, "it is being connected"),
        (RpcError::EIO, "it failed"),
        (RpcError::ETIMEDOUT, "it took too long"),
    ];
    vec![
        Method::query("bdev_nvme_get_transport_statistics", get_transport_statistics)
            .text("Statistics of the I/O queues of each reactor and transport.", "`poll_groups`"),
        Method::job("bdev_nvme_reset_controller", |module, named, job| {
            operate(module, &named, ControllerOperation::Reset, job)
        })
        .text("Resets controllers, one after the other.", "true")
        .errors(OPERATION),
        Method::job("bdev_nvme_disable_controller", |module, named, job| {
            operate(module, &named, ControllerOperation::Disable, job)
        })
        .text("Disconnects controllers, and keeps them configured.", "true")
        .errors(OPERATION),
        Method::job("bdev_nvme_enable_controller", |module, named, job| {
            operate(module, &named, ControllerOperation::Enable, job)
        })
        .text("Connects controllers after a disable.", "true")
        .errors(OPERATION),
        Method::update("bdev_nvme_add_error_injection", add_error_injection)
            .text("Lets commands of one opcode fail.", "true")
            .errors(&[NO_CONTROLLER]),
        Method::update("bdev_nvme_remove_error_injection", remove_error_injection)
            .text("Ends what `bdev_nvme_add_error_injection` started.", "true")
            .errors(&[NO_CONTROLLER]),
        Method::query("bdev_nvme_send_cmd", send_cmd)
            .text("Sends one NVMe command.", "`cpl`, and `data` and `metadata` that were read, as URL-safe base64"),
        Method::job("bdev_nvme_apply_firmware", apply_firmware)
            .text(
                "Downloads a firmware image to the controller of a bdev, commits it and resets the controller. The \
                 download can be cancelled, the commit cannot. Progress is in bytes.",
                "a sentence",
            ),
    ]
}

fn get_transport_statistics(module: &NvmeModule, _params: NoParameters) -> Result<Value, RpcError> {
    let stats = module.initiator.transport_stats();
    let groups = (0..module.reactors).map(|core| {
        let of_core = stats.iter().filter(|one| one.core == core);
        let transports: Vec<_> = of_core.map(|one| transport_json(one.trtype, &one.counts)).collect();
        json!({ "thread": thread_name(core), "transports": transports })
    });
    Ok(json!({ "poll_groups": groups.collect::<Vec<_>>() }))
}

/// Queue statistics under SPDK's names.
fn transport_json(trtype: &str, counts: &QueueStats) -> Value {
    if trtype == "TCP" {
        return json!({
            "trname": trtype,
            "polls": counts.polls,
            "idle_polls": counts.idle_polls,
            "socket_completions": counts.arrivals,
            "nvme_completions": counts.completed,
            "queued_requests": counts.full,
            "submitted_requests": counts.submitted,
        });
    }
    json!({
        "trname": trtype.to_ascii_uppercase(),
        "polls": counts.polls,
        "idle_polls": counts.idle_polls,
        "completions": counts.completed,
        "cq_mmio_doorbell_updates": counts.cq_doorbells,
        "cq_shadow_doorbell_updates": counts.cq_shadows,
        "queued_requests": counts.full,
        "submitted_requests": counts.submitted,
        "sq_mmio_doorbell_updates": counts.sq_doorbells,
        "sq_shadow_doorbell_updates": counts.sq_shadows,
    })
}

control::parameters! {
    struct NamedController {
        /// Controllers
        name: String,
        /// One controller of the name; 0 is all
        cntlid: u16 = 0,
    }
}

fn operate(
    module: &NvmeModule,
    params: &NamedController,
    operation: ControllerOperation,
    job: &JobHandle,
) -> Result<bool, RpcError> {
    let cntlid = Some(params.cntlid).filter(|cntlid| *cntlid != 0);
    module.initiator.operate(&params.name, cntlid, operation, job)?;
    Ok(true)
}

control::choices! {
    enum CommandType {
        Admin = "admin",
        Io = "io",
    }
}

impl CommandType {
    fn queue(self) -> QueueKind {
        match self {
            CommandType::Admin => QueueKind::Admin,
            CommandType::Io => QueueKind::Io,
        }
    }
}

control::parameters! {
    struct AddErrorInjection {
        /// Controller
        name: String,
        /// Queue
        cmd_type: CommandType,
        /// Opcode
        opc: u8,
        /// Complete the command without submitting it
        do_not_submit: bool = false,
        /// How long a command that is not submitted takes
        timeout_in_us: u64 ["us"] = 0,
        /// How often
        err_count: u32 = 1,
        /// Status code type, 0 to 7
        sct: u8 = 0,
        /// Status code
        sc: u8 = 0,
    }
}

fn add_error_injection(module: &NvmeModule, params: AddErrorInjection) -> Result<bool, RpcError> {
    if params.sct > 7 {
        return Err(RpcError::invalid_params("sct must be 0 to 7"));
    }
    let injection = ErrorInjection {
        opcode: params.opc,
        count: params.err_count,
        status: Status::new(params.sct, params.sc),
        submit: !params.do_not_submit,
        delay_ns: params.timeout_in_us.saturating_mul(1000),
    };
    module.initiator.inject(&params.name, params.cmd_type.queue(), params.opc, Some(injection))?;
    Ok(true)
}

control::parameters! {
    struct RemoveErrorInjection {
        /// Controller
        name: String,
        /// Queue
        cmd_type: CommandType,
        /// Opcode
        opc: u8,
    }
}

fn remove_error_injection(module: &NvmeModule, params: RemoveErrorInjection) -> Result<bool, RpcError> {
    module.initiator.inject(&params.name, params.cmd_type.queue(), params.opc, None)?;
    Ok(true)
}

control::choices! {
    enum DataDirection {
        C2h = "c2h",
        H2c = "h2c",
    }
}

control::parameters! {
    struct SendCmd {
        /// Controller
        name: String,
        /// Queue
        cmd_type: CommandType,
        /// From the controller or to it
        data_direction: DataDirection,
        /// The 64 bytes of the submission queue entry, as URL-safe base64
        cmdbuf: String,
        /// Data to send, as URL-safe base64
        data: Option<String>,
        /// Metadata to send, as URL-safe base64
        metadata: Option<String>,
        /// Length of the data
        data_len: Option<u32> ["bytes"],
        /// Length of the metadata
        metadata_len: Option<u32> ["bytes"],
        /// Time-out; 0 is the driver's
        timeout_ms: u32 ["ms"] = 0,
    }
}

/// Decodes base64 with the URL-safe alphabet, as in SPDK.
fn decode(name: &str, text: &str) -> Result<Vec<u8>, RpcError> {
    let decoded = URL_SAFE.decode(text);
    decoded.map_err(|error| RpcError::invalid_params(format!("{name} is not URL-safe base64: {error}")))
}

/// The data or metadata buffer of a passthrough command. `length` and the length of `text` must agree.
fn command_data(
    name: &str,
    direction: DataDirection,
    text: Option<&String>,
    length: Option<u32>,
) -> Result<AdminData, RpcError> {
    let bytes = text.map(|text| decode(name, text)).transpose()?;
    let length = length.filter(|length| *length != 0).map(|length| length as usize);
    if let (Some(bytes), Some(length)) = (&bytes, length)
        && bytes.len() != length
    {
        let message = format!("{name} has {} bytes, but {name}_len is {length}", bytes.len());
        return Err(RpcError::invalid_params(message));
    }
    let length = length.or(bytes.as_ref().map(Vec::len)).unwrap_or(0);
    if length > dma::BUFFER_BYTES_MAX {
        let message = format!("a command transfers at most {} bytes", dma::BUFFER_BYTES_MAX);
        return Err(RpcError::invalid_params(message));
    }
    Ok(match direction {
        _ if length == 0 => AdminData::None,
        DataDirection::C2h => AdminData::In(length),
        DataDirection::H2c => AdminData::Out(bytes.unwrap_or_else(|| vec![0; length])),
    })
}

fn send_cmd(module: &NvmeModule, params: SendCmd) -> Result<Value, RpcError> {
    let command = decode("cmdbuf", &params.cmdbuf)?;
    let command: &[u8; sqe::SIZE] = command.as_slice().try_into().map_err(|_| {
        RpcError::invalid_params(format!("cmdbuf has {} bytes instead of {}", command.len(), sqe::SIZE))
    })?;
    let direction = params.data_direction;
    let data = command_data("data", direction, params.data.as_ref(), params.data_len)?;
    let metadata = command_data("metadata", direction, params.metadata.as_ref(), params.metadata_len)?;
    let returned_length = |data: &AdminData| match data {
        AdminData::In(length) => *length,
        _ => 0,
    };
    let lengths = (returned_length(&data), returned_length(&metadata));
    let passed = PassthroughCommand {
        queue: params.cmd_type.queue(),
        sqe: Sqe::decode(command),
        data,
        metadata,
        timeout: Some(params.timeout_ms).filter(|ms| *ms != 0).map(|ms| Duration::from_millis(ms.into())),
    };
    let PassthroughReply { status, result, mut data, mut metadata, .. } =
        module.initiator.pass_through(&params.name, passed).map_err(|error| match error {
            InitiatorError::NotFound(_) | InitiatorError::Invalid(_) => RpcError::invalid_params(error),
            other => other.into(),
        })?;
    let mut completion = [0; cqe::SIZE];
    Cqe::new(0, status).with_result(result).encode(&mut completion);
    let mut response = json!({ "cpl": URL_SAFE.encode(completion) });
    // A failed command returns no data: its buffers are zero.
    for (name, bytes, length) in [("data", &mut data, lengths.0), ("metadata", &mut metadata, lengths.1)] {
        if length > 0 {
            bytes.resize(length, 0);
            response[name] = json!(URL_SAFE.encode(bytes));
        }
    }
    Ok(response)
}

control::parameters! {
    struct ApplyFirmware {
        /// Image: a regular file of at most 256 MiB
        filename: String,
        /// A bdev of the controller
        bdev_name: String,
    }
}

/// Bytes of one Firmware Image Download command.
const FIRMWARE_CHUNK_BYTES: usize = 4096;
/// Largest firmware image.
const FIRMWARE_BYTES_MAX: u64 = 256 << 20;
/// Firmware Commit, Commit Action 001b: replace the image of a slot and activate it at the next Controller
/// Level Reset (Base 2.0, section 5.11).
const COMMIT_AND_ACTIVATE_AT_RESET: u32 = 1 << 3;

fn apply_firmware(
    module: &NvmeModule,
    params: ApplyFirmware,
    job: &JobHandle,
) -> Result<&'static str, RpcError> {
    let failed = |what: String| RpcError::new(RpcError::INTERNAL, what);
    let controllers = module.initiator.controllers();
    let controller = controllers.into_iter().find(|one| one.bdevs.contains(&params.bdev_name));
    let name = controller
        .map(|controller| controller.name)
        .ok_or_else(|| failed(format!("Controller information for {} were not found.", params.bdev_name)))?;
    let image = files::read_regular(Path::new(&params.filename), FIRMWARE_BYTES_MAX)
        .map_err(|error| failed(format!("{}: {error}", params.filename)))?;
    if image.is_empty() || !image.len().is_multiple_of(4) {
        return Err(failed("Firmware image size is not multiple of 4.".into()));
    }
    job.set_total(image.len() as u64, "bytes");
    let send = |what: &str, opcode: AdminOpcode, cdw10: u32, cdw11: u32, data: AdminData| {
        let sqe = Sqe { cdw10, cdw11, ..Sqe::new(opcode.to_wire()) };
        let passed = PassthroughCommand {
            queue: QueueKind::Admin,
            sqe,
            data,
            metadata: AdminData::None,
            timeout: None,
        };
        let status = module.initiator.pass_through(&name, passed)?.status;
        // "Activation requires a reset" is no failure: the reset follows.
        let needs_reset =
            status.status_code_type() == 1 && matches!(status.status_code(), 0x0b | 0x10 | 0x11);
        if status.is_success() || needs_reset {
            Ok(())
        } else {
            Err(failed(format!("{what} failed: {status}")))
        }
    };
    for (index, chunk) in image.chunks(FIRMWARE_CHUNK_BYTES).enumerate() {
        job.check()?;
        let dwords = (chunk.len() / 4 - 1) as u32;
        let offset = (index * FIRMWARE_CHUNK_BYTES / 4) as u32;
        let data = AdminData::Out(chunk.to_vec());
        send("firmware download", AdminOpcode::FirmwareDownload, dwords, offset, data)?;
        job.advance(chunk.len() as u64);
    }
    // An image that is half committed is of no use to anybody.
    job.commit()?;
    send("firmware commit", AdminOpcode::FirmwareCommit, COMMIT_AND_ACTIVATE_AT_RESET, 0, AdminData::None)?;
    module.initiator.reset(&name)?;
    Ok("firmware commit succeeded. Controller reset in progress.")
}
