//! A controller that a tool talks to for a moment, over whatever transport.

use nvme::{AdminData, AdminError, Association, Controller, Options, Uri};
use reactor::{Config, Core, Reactor};
use wire_nvme::Sqe;
use wire_nvme::admin::{GetLogPage, Identify};
use wire_nvme::identify::{Cns, IdentifyController, NamespaceList, SIZE};

use crate::failure::Failure;

/// An attached controller.
pub(super) enum Session {
    Tcp(Box<Association>),
    Direct(Controller),
}

/// Bytes of a log page that are asked for at a time.
const LOG_STEP_BYTES: usize = 4096;

/// Runs a job on a reactor of its own.
pub(super) fn run<R: 'static, F>(shared: bool, job: impl FnOnce(Core) -> F) -> Result<R, Failure>
where
    F: Future<Output = Result<R, Failure>> + 'static,
{
    let arena = memory::Arena::new(memory::Config { shared, limit_bytes: 64 << 20, ..Default::default() });
    let reactor = Reactor::new(&Config { arena, ..Config::default() }).map_err(Failure::machine)?;
    let core = reactor.core();
    reactor.block_on(job(core))
}

/// Attaches the controller of `uri`, runs a job with it and lets go.
pub(super) fn with<R: 'static, F>(uri: &Uri, job: impl FnOnce(Session) -> F + 'static) -> Result<R, Failure>
where
    F: Future<Output = Result<R, Failure>> + 'static,
{
    let (uri, shared) = (uri.clone(), matches!(uri, Uri::VfioUser(_)));
    run(shared, move |core| async move {
        let session = Session::open(&core, &uri).await?;
        job(session).await
    })
}

impl Session {
    pub(super) async fn open(core: &Core, uri: &Uri) -> Result<Session, Failure> {
        let options = Options::default();
        let failed = |error| Failure::work(format!("{}: {error}", uri.controller()));
        match uri {
            Uri::Tcp(tcp) => {
                let association = Association::open(core, tcp, &options, 0).await.map_err(failed)?;
                Ok(Session::Tcp(Box::new(association)))
            }
            Uri::Pcie(_) | Uri::VfioUser(_) => {
                Ok(Session::Direct(Controller::attach(core, uri, &options).await.map_err(failed)?))
            }
        }
    }

    pub(super) fn identity(&self) -> &IdentifyController {
        match self {
            Session::Tcp(association) => association.identity(),
            Session::Direct(controller) => controller.identity(),
        }
    }

    /// Executes a command that returns `length` bytes.
    pub(super) async fn read(&mut self, sqe: Sqe, length: usize) -> Result<Vec<u8>, AdminError> {
        match self {
            Session::Tcp(association) if length == 0 => association.command(sqe).await.map(|_| Vec::new()),
            Session::Tcp(association) => association.read(sqe, length).await.map(|(_, data)| data),
            Session::Direct(controller) => {
                let data = if length == 0 { AdminData::None } else { AdminData::In(length) };
                controller.admin(sqe, data).await.map(|answer| answer.data)
            }
        }
    }

    pub(super) async fn identify(&mut self, cns: Cns, nsid: u32) -> Result<Vec<u8>, Failure> {
        let view = Identify { cns: cns.to_wire(), ..Identify::default() };
        self.read(view.to_sqe(nsid), SIZE).await.map_err(|error| Failure::work(format!("Identify: {error}")))
    }

    /// The first 1024 active namespaces, which is all that one command tells.
    pub(super) async fn namespaces(&mut self) -> Result<Vec<u32>, Failure> {
        let data = self.identify(Cns::ActiveNamespaces, 0).await?;
        let page = data.first_chunk().expect("a page was asked for");
        let list = NamespaceList::decode(page);
        Ok(list.map_err(|error| Failure::work(format!("the list of namespaces makes no sense: {error}")))?.0)
    }

    /// A log page, read in pieces.
    pub(super) async fn log(&mut self, lid: u8, length: usize) -> Result<Vec<u8>, Failure> {
        let mut data = Vec::new();
        while data.len() < length {
            let step = (length - data.len()).min(LOG_STEP_BYTES);
            let view = GetLogPage {
                lid,
                length_bytes: step as u64,
                offset: data.len() as u64,
                // Looking is not to keep whoever waits for the event from hearing it.
                retain_event: true,
                ..GetLogPage::default()
            };
            let part = self.read(view.to_sqe(wire_nvme::NSID_ALL), step).await;
            data.extend(part.map_err(|error| Failure::work(format!("log page {lid:#04x}: {error}")))?);
        }
        Ok(data)
    }

    pub(super) async fn reset(&mut self) -> Result<(), Failure> {
        match self {
            Session::Tcp(_) => Err(Failure::work(
                "over TCP each host has a controller of its own, which this tool's connection just made; \
                 reset a server's with `ringbolt rpc bdev_nvme_reset_controller name=…`",
            )),
            Session::Direct(controller) => controller.reset().await.map_err(Failure::work),
        }
    }
}
