//! What a transport implements: one queue pair over one connection.

use std::fmt;

use block_io::Request;
use dma::Data;
use nvme_auth::TlsPsk;
use reactor::Core;
use wire_nvme::fabrics::Nqn;
use wire_nvme::{Cqe, Sqe};

use crate::error::{ControllerFailure, NvmeOpenError};
use crate::options::Options;
use crate::shared::AdminData;

/// The names of a namespace that every fabrics transport has.
pub trait FabricsUri: Clone + Send + Sync + 'static {
    /// NQN of the subsystem.
    fn subnqn(&self) -> &Nqn;

    /// Namespace identifier, from 1.
    fn nsid(&self) -> u32;
}

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePurpose {
    /// Admin commands: little data, and idle most of the time.
    Admin,
    /// I/O, on the queue with this identifier.
    Io(u16),
}

/// A request with the completion of its command.
#[derive(Debug)]
pub struct FabricsCompletion {
    /// The request, with its data.
    pub request: Request<Data>,
    /// The completion queue entry.
    pub cqe: Cqe,
}

/// Data transfer of a command: direction and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandData {
    /// No data.
    None,
    /// From the controller.
    In(u32),
    /// To the controller.
    Out(u32),
}

impl CommandData {
    pub(crate) fn of(data: &AdminData) -> CommandData {
        match data {
            AdminData::None => CommandData::None,
            AdminData::In(length) => CommandData::In(*length as u32),
            AdminData::Out(bytes) => CommandData::Out(bytes.len() as u32),
        }
    }
}

/// One queue pair of an association over one connection of a transport, on one core.
///
/// [`connect`](Self::connect) begins the transport's own handshake, whatever it consists of; from when it
/// [`is_ready`](Self::is_ready), commands may be submitted, the first of which is Connect. The user then
/// repeats [`submit`](Self::submit), [`flush`](Self::flush), [`receive`](Self::receive) and takes the
/// [`completions`](Self::completions). After a failure all commands complete with
/// [`Status::HOST_PATHING_ERROR`](block_io::Status::HOST_PATHING_ERROR).
pub trait FabricsQueue: Sized + 'static {
    /// Names a namespace of a controller.
    type Uri: FabricsUri;
    /// Where a controller is, and how to connect to it. Its text names it in pollers and messages.
    type Remote: Clone + Send + Sync + fmt::Display + 'static;

    /// The handshake before Connect, as errors name it.
    const HANDSHAKE: &'static str;
    /// Most entries of a queue.
    const DEPTH_MAX: u32;
    /// What is said of metadata that is separate from the data.
    const NO_METADATA: &'static str;

    /// Finds a controller.
    ///
    /// # Errors
    /// Its name has no address.
    fn resolve(uri: &Self::Uri) -> Result<Self::Remote, NvmeOpenError>;

    /// Begins to connect a queue of `entries` entries; it does not block.
    ///
    /// # Errors
    /// The machine refuses the connection.
    fn connect(
        core: &Core,
        remote: &Self::Remote,
        entries: u32,
        purpose: QueuePurpose,
        options: &Options,
    ) -> Result<Self, NvmeOpenError>;

    /// Has the queues that are connected from now on, also those of clones of `remote`, use TLS with a key.
    ///
    /// # Errors
    /// The transport has no TLS.
    fn use_psk(remote: &mut Self::Remote, psk: TlsPsk) -> Result<(), NvmeOpenError> {
        let _ = (remote, psk);
        Err(NvmeOpenError::InvalidArgument("secure channel concatenation is possible over TCP only"))
    }

    /// A failure before the queue was ready, as the reason why it could not be opened.
    fn connect_error(remote: &Self::Remote, failure: ControllerFailure) -> NvmeOpenError;

    /// Whether commands may be sent.
    fn is_ready(&self) -> bool;

    /// Why the queue can no longer be used, if it has failed.
    fn failure(&self) -> Option<ControllerFailure>;

    /// Fails the queue. The first reason stays.
    fn fail(&mut self, failure: ControllerFailure);

    /// Whether no command can be submitted now.
    fn is_full(&self) -> bool;

    /// Commands that can be submitted now.
    fn free_slots(&self) -> usize;

    /// Sets the most bytes of data that a command capsule may carry, once the controller has said so.
    fn set_in_capsule_max(&mut self, bytes: u32);

    /// Queues a command for `request`; `inline_data` is in-capsule data without a buffer. The queue must not
    /// be full.
    fn submit(&mut self, sqe: Sqe, request: Request<Data>, data: CommandData, inline_data: &[u8]);

    /// Sends what is queued, as far as the transport takes it.
    fn flush(&mut self);

    /// Processes what has arrived. Returns the number of readiness events.
    fn receive(&mut self) -> u64;

    /// Completed requests, for the caller to drain.
    fn completions(&mut self) -> &mut Vec<FabricsCompletion>;

    /// Whether [`receive`](Self::receive) has something to process that no event of the core reports.
    fn is_pending(&self) -> bool;
}
