//! Controllers as a whole, and commands to them: what tests and tools ask for.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE;
use bdev_nvme::{ErrorInjection, InitiatorError, Operation, Passed, PassedThrough, Queue};
use nvme::{AdminData, QueueStats};
use ring::Status;
use serde::Deserialize;
use serde_json::{Value, json};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::{Cqe, Sqe, cqe, sqe};

use crate::methods::Table;
use crate::methods::framework::thread_name;
use crate::methods::parameters::Nothing;
use crate::rpc::RpcError;
use crate::state::App;

pub(super) fn add(table: &mut Table) {
    table.read("bdev_nvme_get_transport_statistics", get_transport_statistics);
    table.change("bdev_nvme_reset_controller", |app, named| operate(app, &named, Operation::Reset));
    table.change("bdev_nvme_disable_controller", |app, named| operate(app, &named, Operation::Disable));
    table.change("bdev_nvme_enable_controller", |app, named| operate(app, &named, Operation::Enable));
    table.change("bdev_nvme_add_error_injection", add_error_injection);
    table.change("bdev_nvme_remove_error_injection", remove_error_injection);
    table.read("bdev_nvme_send_cmd", send_cmd);
    table.change("bdev_nvme_apply_firmware", apply_firmware);
}

fn get_transport_statistics(app: &App, _params: Nothing) -> Result<Value, RpcError> {
    let stats = app.initiator.transport_stats();
    let groups = app.reactors.iter().enumerate().map(|(core, _)| {
        let of_core = stats.iter().filter(|one| one.core == core);
        let transports: Vec<_> = of_core.map(|one| transport_json(one.trtype, &one.counts)).collect();
        json!({ "thread": thread_name(core), "transports": transports })
    });
    Ok(json!({ "poll_groups": groups.collect::<Vec<_>>() }))
}

/// What queues did, in SPDK's words.
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedController {
    name: String,
    /// 0, and nothing, are all of them.
    cntlid: Option<u16>,
}

fn operate(app: &App, params: &NamedController, operation: Operation) -> Result<bool, RpcError> {
    let cntlid = params.cntlid.filter(|cntlid| *cntlid != 0);
    app.initiator.operate(&params.name, cntlid, operation)?;
    Ok(true)
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum CommandType {
    Admin,
    Io,
}

impl CommandType {
    fn queue(self) -> Queue {
        match self {
            CommandType::Admin => Queue::Admin,
            CommandType::Io => Queue::Io,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddErrorInjection {
    name: String,
    cmd_type: CommandType,
    opc: u8,
    #[serde(default)]
    do_not_submit: bool,
    #[serde(default)]
    timeout_in_us: u64,
    err_count: Option<u32>,
    #[serde(default)]
    sct: u8,
    #[serde(default)]
    sc: u8,
}

fn add_error_injection(app: &App, params: AddErrorInjection) -> Result<bool, RpcError> {
    if params.sct > 7 {
        return Err(RpcError::invalid_params("sct has three bits"));
    }
    let injection = ErrorInjection {
        opcode: params.opc,
        count: params.err_count.unwrap_or(1),
        status: Status::new(params.sct, params.sc),
        submit: !params.do_not_submit,
        delay_ns: params.timeout_in_us.saturating_mul(1000),
    };
    app.initiator.inject(&params.name, params.cmd_type.queue(), params.opc, Some(injection))?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveErrorInjection {
    name: String,
    cmd_type: CommandType,
    opc: u8,
}

fn remove_error_injection(app: &App, params: RemoveErrorInjection) -> Result<bool, RpcError> {
    app.initiator.inject(&params.name, params.cmd_type.queue(), params.opc, None)?;
    Ok(true)
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Direction {
    C2h,
    H2c,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SendCmd {
    name: String,
    cmd_type: CommandType,
    data_direction: Direction,
    cmdbuf: String,
    data: Option<String>,
    metadata: Option<String>,
    data_len: Option<u32>,
    metadata_len: Option<u32>,
    timeout_ms: Option<u32>,
}

/// Bytes that were sent as text, by SPDK's alphabet: base64 for URLs.
fn decode(name: &str, text: &str) -> Result<Vec<u8>, RpcError> {
    let decoded = URL_SAFE.decode(text);
    decoded.map_err(|error| RpcError::invalid_params(format!("{name} is no base64 for URLs: {error}")))
}

/// What a command moves: so many bytes, or these.
fn moved(
    name: &str,
    direction: Direction,
    text: Option<&String>,
    length: Option<u32>,
) -> Result<AdminData, RpcError> {
    let bytes = text.map(|text| decode(name, text)).transpose()?;
    let length = length.filter(|length| *length != 0).map(|length| length as usize);
    if let (Some(bytes), Some(length)) = (&bytes, length)
        && bytes.len() != length
    {
        let message = format!("{name} has {} bytes, and {name}_len says {length}", bytes.len());
        return Err(RpcError::invalid_params(message));
    }
    let length = length.or(bytes.as_ref().map(Vec::len)).unwrap_or(0);
    if length > memory::BUFFER_BYTES_MAX {
        let message = format!("a command moves {} bytes at most", memory::BUFFER_BYTES_MAX);
        return Err(RpcError::invalid_params(message));
    }
    Ok(match direction {
        _ if length == 0 => AdminData::None,
        Direction::C2h => AdminData::In(length),
        Direction::H2c => AdminData::Out(bytes.unwrap_or_else(|| vec![0; length])),
    })
}

fn send_cmd(app: &App, params: SendCmd) -> Result<Value, RpcError> {
    let command = decode("cmdbuf", &params.cmdbuf)?;
    let command: &[u8; sqe::SIZE] = command.as_slice().try_into().map_err(|_| {
        RpcError::invalid_params(format!("cmdbuf has {} bytes, and not {}", command.len(), sqe::SIZE))
    })?;
    let direction = params.data_direction;
    let data = moved("data", direction, params.data.as_ref(), params.data_len)?;
    let metadata = moved("metadata", direction, params.metadata.as_ref(), params.metadata_len)?;
    let returned = |data: &AdminData| match data {
        AdminData::In(length) => *length,
        _ => 0,
    };
    let lengths = (returned(&data), returned(&metadata));
    let passed = Passed {
        queue: params.cmd_type.queue(),
        sqe: Sqe::decode(command),
        data,
        metadata,
        timeout: params.timeout_ms.filter(|ms| *ms != 0).map(|ms| Duration::from_millis(ms.into())),
    };
    let PassedThrough { status, result, mut data, mut metadata, .. } =
        app.initiator.pass_through(&params.name, passed).map_err(|error| match error {
            InitiatorError::NotFound(_) | InitiatorError::Invalid(_) => RpcError::invalid_params(error),
            other => other.into(),
        })?;
    let mut completion = [0; cqe::SIZE];
    Cqe::new(0, status).with_result(result).encode(&mut completion);
    let mut answer = json!({ "cpl": URL_SAFE.encode(completion) });
    // A command that failed returned nothing: what was there for it is zero.
    for (name, bytes, length) in [("data", &mut data, lengths.0), ("metadata", &mut metadata, lengths.1)] {
        if length > 0 {
            bytes.resize(length, 0);
            answer[name] = json!(URL_SAFE.encode(bytes));
        }
    }
    Ok(answer)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ApplyFirmware {
    filename: String,
    bdev_name: String,
}

/// Bytes of an image that are sent at a time.
const FIRMWARE_PIECE_BYTES: usize = 4096;
/// Longest image.
const FIRMWARE_BYTES_MAX: u64 = 256 << 20;
/// Firmware Commit: replaces the image of a slot, which is used from the next reset on (Base 2.0, section 5.11).
const COMMIT_AND_USE_AT_RESET: u32 = 1 << 3;

fn apply_firmware(app: &App, params: ApplyFirmware) -> Result<&'static str, RpcError> {
    let failed = |what: String| RpcError::new(RpcError::INTERNAL, what);
    let controllers = app.initiator.controllers();
    let controller = controllers.into_iter().find(|one| one.bdevs.contains(&params.bdev_name));
    let name = controller
        .map(|controller| controller.name)
        .ok_or_else(|| failed(format!("Controller information for {} were not found.", params.bdev_name)))?;
    let unreadable = |error: std::io::Error| failed(format!("{}: {error}", params.filename));
    let length = std::fs::metadata(&params.filename).map_err(unreadable)?.len();
    if length == 0 || !length.is_multiple_of(4) {
        return Err(failed("Firmware image size is not multiple of 4.".into()));
    }
    if length > FIRMWARE_BYTES_MAX {
        return Err(failed(format!("{} has more than {FIRMWARE_BYTES_MAX} bytes", params.filename)));
    }
    let image = std::fs::read(&params.filename).map_err(unreadable)?;
    let send = |what: &str, opcode: AdminOpcode, cdw10: u32, cdw11: u32, data: AdminData| {
        let sqe = Sqe { cdw10, cdw11, ..Sqe::new(opcode.to_wire()) };
        let passed = Passed { queue: Queue::Admin, sqe, data, metadata: AdminData::None, timeout: None };
        let status = app.initiator.pass_through(&name, passed)?.status;
        // That a reset is needed is no failure: it comes next.
        let needs_reset =
            status.status_code_type() == 1 && matches!(status.status_code(), 0x0b | 0x10 | 0x11);
        if status.is_success() || needs_reset {
            Ok(())
        } else {
            Err(failed(format!("{what} failed: {status}")))
        }
    };
    for (index, piece) in image.chunks(FIRMWARE_PIECE_BYTES).enumerate() {
        let dwords = (piece.len() / 4 - 1) as u32;
        let offset = (index * FIRMWARE_PIECE_BYTES / 4) as u32;
        let data = AdminData::Out(piece.to_vec());
        send("firmware download", AdminOpcode::FirmwareDownload, dwords, offset, data)?;
    }
    send("firmware commit", AdminOpcode::FirmwareCommit, COMMIT_AND_USE_AT_RESET, 0, AdminData::None)?;
    app.initiator.operate(&name, None, Operation::Reset)?;
    Ok("firmware commit succeeded. Controller reset in progress.")
}
