//! A short-lived connection of a tool to a controller, over any transport.

use nvme::{AdminData, AdminError, AnyController, Options, Uri};
use reactor::{Core, Reactor, ReactorConfig};
use wire_nvme::Sqe;
use wire_nvme::admin::{GetLogPage, Identify};
use wire_nvme::identify::{Cns, IdentifyController, NamespaceList, SIZE};

use crate::command_error::CommandError;

/// An attached controller.
pub(super) struct ControllerSession(AnyController);

/// Most bytes of one Get Log Page command.
const LOG_CHUNK_BYTES: usize = 4096;

/// Runs a future on a new reactor on this thread. With `shared`, its buffers can be mapped by other processes.
pub(super) fn run_on_reactor<R: 'static, F>(
    shared: bool,
    job: impl FnOnce(Core) -> F,
) -> Result<R, CommandError>
where
    F: Future<Output = Result<R, CommandError>> + 'static,
{
    let arena = dma::Arena::new(dma::ArenaConfig { shared, limit_bytes: 64 << 20, ..Default::default() });
    let reactor = Reactor::new(&ReactorConfig { arena, ..ReactorConfig::default() })
        .map_err(CommandError::environment)?;
    let core = reactor.core();
    reactor.block_on(job(core))
}

/// Attaches the controller of `uri`, runs `job` with it and detaches it.
pub(super) fn with_controller<R: 'static, F>(
    uri: &Uri,
    job: impl FnOnce(ControllerSession) -> F + 'static,
) -> Result<R, CommandError>
where
    F: Future<Output = Result<R, CommandError>> + 'static,
{
    let (uri, shared) = (uri.clone(), matches!(uri, Uri::VfioUser(_)));
    run_on_reactor(shared, move |core| async move {
        let session = ControllerSession::open(&core, &uri).await?;
        job(session).await
    })
}

impl ControllerSession {
    pub(super) async fn open(core: &Core, uri: &Uri) -> Result<ControllerSession, CommandError> {
        let attached = AnyController::attach(core, uri, &Options::default(), 0).await;
        let failed = |error| CommandError::operation(format!("{}: {error}", uri.controller()));
        attached.map(ControllerSession).map_err(failed)
    }

    pub(super) fn identity(&self) -> &IdentifyController {
        self.0.identity()
    }

    /// Executes a command that returns `length` bytes.
    pub(super) async fn read(&mut self, sqe: Sqe, length: usize) -> Result<Vec<u8>, AdminError> {
        let data = if length == 0 { AdminData::None } else { AdminData::In(length) };
        self.0.admin(sqe, data).await.map(|completion| completion.data)
    }

    pub(super) async fn identify(&mut self, cns: Cns, nsid: u32) -> Result<Vec<u8>, CommandError> {
        let command = Identify { cns: cns.to_wire(), ..Identify::default() };
        self.read(command.to_sqe(nsid), SIZE)
            .await
            .map_err(|error| CommandError::operation(format!("Identify: {error}")))
    }

    /// The first 1024 active namespaces: as many as one Identify command returns.
    pub(super) async fn namespaces(&mut self) -> Result<Vec<u32>, CommandError> {
        let data = self.identify(Cns::ActiveNamespaces, 0).await?;
        let page = data.first_chunk().expect("Identify returns SIZE bytes");
        let list = NamespaceList::decode(page);
        Ok(list
            .map_err(|error| CommandError::operation(format!("invalid active namespace list: {error}")))?
            .0)
    }

    /// Reads a log page in chunks.
    pub(super) async fn log(&mut self, lid: u8, length: usize) -> Result<Vec<u8>, CommandError> {
        let mut data = Vec::new();
        while data.len() < length {
            let chunk = (length - data.len()).min(LOG_CHUNK_BYTES);
            let command = GetLogPage {
                lid,
                length_bytes: chunk as u64,
                offset: data.len() as u64,
                // Reading the page must not clear an event that another host waits for.
                retain_event: true,
                ..GetLogPage::default()
            };
            let bytes = self.read(command.to_sqe(wire_nvme::NSID_ALL), chunk).await;
            data.extend(
                bytes.map_err(|error| CommandError::operation(format!("log page {lid:#04x}: {error}")))?,
            );
        }
        Ok(data)
    }

    pub(super) async fn reset(&mut self) -> Result<(), CommandError> {
        match self.0.reset().await {
            Some(outcome) => outcome.map_err(CommandError::operation),
            None => Err(CommandError::operation(
                "over TCP this tool could only reset the controller that its own connection created; \
                 reset the controller of a running server with `ringbolt rpc bdev_nvme_reset_controller name=…`",
            )),
        }
    }
}
