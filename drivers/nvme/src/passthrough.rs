//! Passthrough of single I/O commands on a temporary queue pair: for tools, not for the I/O path.

use block_io::{Op, Request, Status, Tag};
use dma::{Buffer, Data};
use reactor::Core;
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use crate::command::Command;
use crate::controller::Controller;
use crate::error::NvmeOpenError;
use crate::fabrics::{AssociationHandle, FabricsQueue};
use crate::options::Options;
use crate::shared::AdminData;
use crate::wait::race;

/// Result of a passthrough I/O command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassthroughOutput {
    /// Completion status.
    pub status: Status,
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
    /// Data returned for [`AdminData::In`]; empty otherwise.
    pub data: Vec<u8>,
    /// Metadata returned for [`AdminData::In`]; empty otherwise.
    pub metadata: Vec<u8>,
}

/// Interval at which completions are polled without an event.
const POLL_INTERVAL_NS: u64 = 1_000_000;

const WHAT: &str = "the command";

impl Controller {
    /// Executes one I/O command on a temporary queue pair and waits at most `timeout_ns` for its completion.
    ///
    /// The driver fills in command identifier, data pointer and metadata pointer only. The command must not transfer
    /// more than `data` and `metadata` hold, 1 MiB each at most. A fused command is rejected.
    pub async fn execute_io(
        &self,
        core: &Core,
        sqe: Sqe,
        data: &AdminData,
        metadata: &AdminData,
        timeout_ns: u64,
    ) -> Result<PassthroughOutput, NvmeOpenError> {
        let deadline_ns = core.now_ns().saturating_add(timeout_ns);
        let (buffer, metadata_buffer) = (take_buffer(core, data)?, take_buffer(core, metadata)?);
        let options = Options { queue_depth: 1, ..self.handle().shared.options.clone() };
        let mut pair = self.qpair(core, &options).await?;
        let (mut batch, mut done) =
            (vec![Command::raw(Tag(0), unfused(sqe)?, buffer, metadata_buffer)], Vec::new());
        loop {
            pair.submit_commands(&mut batch);
            pair.poll_commands(&mut done);
            if let Some(executed) = done.pop() {
                let (status, result) = (executed.status(), executed.result());
                let command = executed.into_command();
                return Ok(PassthroughOutput {
                    status,
                    result,
                    data: data.read_back(command.data.as_ref()),
                    metadata: metadata.read_back(command.metadata.as_ref()),
                });
            }
            let now_ns = core.now_ns();
            if now_ns >= deadline_ns {
                // The dropped queue pair keeps the command's memory until the controller has deleted the queue.
                return Err(NvmeOpenError::Timeout(WHAT));
            }
            let event = std::pin::pin!(core.next_event());
            let timer = std::pin::pin!(core.sleep_ns(POLL_INTERVAL_NS.min(deadline_ns - now_ns)));
            race(event, timer).await;
        }
    }
}

impl<R> AssociationHandle<R> {
    /// [`Controller::execute_io`] over fabrics, on a temporary I/O queue of the association, without
    /// metadata.
    pub async fn execute_io<Q: FabricsQueue<Remote = R>>(
        &self,
        core: &Core,
        sqe: Sqe,
        data: &AdminData,
        timeout_ns: u64,
    ) -> Result<PassthroughOutput, NvmeOpenError> {
        let deadline_ns = core.now_ns().saturating_add(timeout_ns);
        let mut request = Request::new(Tag(0), Op::Flush, 0, 0);
        request.set_data(take_buffer(core, data)?);
        // Fabrics support SGLs only.
        let sqe = Sqe { flags: Sqe::FLAGS_SGL, ..unfused(sqe)? };
        let completed = self.execute_one::<Q>(core, WHAT, sqe, request, data, deadline_ns).await?;
        Ok(PassthroughOutput {
            status: completed.cqe.status,
            result: completed.cqe.result,
            data: data.read_back(completed.request.data().and_then(Data::single)),
            metadata: Vec::new(),
        })
    }
}

fn unfused(sqe: Sqe) -> Result<Sqe, NvmeOpenError> {
    match sqe.fuse() {
        Fuse::Normal => Ok(sqe),
        _ => Err(NvmeOpenError::InvalidArgument("a single fused command cannot be passed through")),
    }
}

fn take_buffer(core: &Core, data: &AdminData) -> Result<Option<Buffer>, NvmeOpenError> {
    data.take_buffer(core.pool()).map_err(|error| error.while_opening(WHAT))
}
