//! One I/O command of any kind, through a queue of its own: for tools, not for data.

use memory::Buffer;
use reactor::Core;
use ring::{Op, Request, Status, Tag};
use sys::clock::now_ns;
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use crate::command::Command;
use crate::controller::Controller;
use crate::error::OpenError;
use crate::options::Options;
use crate::shared::AdminData;
use crate::tcp::Membership;
use crate::wait::first;

/// How an I/O command ended that was passed through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoAnswer {
    /// Its status.
    pub status: Status,
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
    /// Its data, for [`AdminData::In`].
    pub data: Vec<u8>,
    /// Its metadata, likewise.
    pub metadata: Vec<u8>,
}

/// How often an answer is looked for where no event announces it.
const LOOK_NS: u64 = 1_000_000;

const WHAT: &str = "the command";

impl Controller {
    /// Executes one I/O command on a queue pair that is made for it, and waits for it for `timeout_ns` at most.
    ///
    /// The command is executed as it is, but for its identifier, data pointer and metadata pointer; what `data`
    /// and `metadata` hold, 1 MiB each at most, is all that it may move. Half of a fused pair is refused.
    pub async fn execute_io(
        &self,
        core: &Core,
        sqe: Sqe,
        data: &AdminData,
        metadata: &AdminData,
        timeout_ns: u64,
    ) -> Result<IoAnswer, OpenError> {
        let deadline_ns = now_ns().saturating_add(timeout_ns);
        let (buffer, apart) = (buffer_for(core, data)?, buffer_for(core, metadata)?);
        let options = Options { queue_depth: 1, ..self.handle().shared.options.clone() };
        let mut pair = self.qpair(core, &options).await?;
        let (mut batch, mut done) = (vec![Command::raw(Tag(0), unfused(sqe)?, buffer, apart)], Vec::new());
        loop {
            pair.submit_commands(&mut batch);
            pair.poll_commands(&mut done);
            if let Some(executed) = done.pop() {
                let (status, result) = (executed.status(), executed.result());
                let command = executed.into_command();
                let (data, metadata) = (read_back(data, command.data), read_back(metadata, command.metadata));
                return Ok(IoAnswer { status, result, data, metadata });
            }
            let now_ns = now_ns();
            if now_ns >= deadline_ns {
                // The queue keeps the command's memory until the controller has let go of it.
                return Err(OpenError::Timeout(WHAT));
            }
            let event = std::pin::pin!(core.next_event());
            let look = std::pin::pin!(core.sleep_ns(LOOK_NS.min(deadline_ns - now_ns)));
            first(event, look).await;
        }
    }
}

impl Membership {
    /// As [`Controller::execute_io`], over TCP, on an I/O queue that joins the association for it. There is no metadata.
    pub async fn execute_io(
        &self,
        core: &Core,
        sqe: Sqe,
        data: &AdminData,
        timeout_ns: u64,
    ) -> Result<IoAnswer, OpenError> {
        let deadline_ns = now_ns().saturating_add(timeout_ns);
        let mut request = Request::new(Tag(0), Op::Flush, 0, 0);
        request.buffer = buffer_for(core, data)?;
        // Over fabrics there are SGLs alone.
        let sqe = Sqe { flags: Sqe::FLAGS_SGL, ..unfused(sqe)? };
        let finished = self.execute_one(core, WHAT, sqe, request, data, deadline_ns).await?;
        let data = read_back(data, finished.request.buffer);
        Ok(IoAnswer { status: finished.cqe.status, result: finished.cqe.result, data, metadata: Vec::new() })
    }
}

fn unfused(sqe: Sqe) -> Result<Sqe, OpenError> {
    match sqe.fuse() {
        Fuse::Normal => Ok(sqe),
        _ => Err(OpenError::Invalid("half of a fused pair is no command")),
    }
}

/// A buffer for what a command moves. What the controller does not write must not be what lay there.
fn buffer_for(core: &Core, data: &AdminData) -> Result<Option<Buffer>, OpenError> {
    let length = match data {
        AdminData::None => return Ok(None),
        AdminData::In(length) => *length,
        AdminData::Out(bytes) => bytes.len(),
    };
    if length == 0 || length > memory::BUFFER_BYTES_MAX {
        return Err(OpenError::Invalid("a command moves 1 byte to 1 MiB"));
    }
    let mut buffer = core.pool().take(length).ok_or(OpenError::NoMemory)?;
    match data {
        AdminData::Out(bytes) => buffer.as_mut_slice().copy_from_slice(bytes),
        _ => buffer.clear(),
    }
    Ok(Some(buffer))
}

fn read_back(data: &AdminData, buffer: Option<Buffer>) -> Vec<u8> {
    let back = buffer.filter(|_| matches!(data, AdminData::In(_)));
    back.map_or_else(Vec::new, |buffer| buffer.as_slice().to_vec())
}
