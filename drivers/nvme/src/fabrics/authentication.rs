//! In-band authentication: the exchange on a queue whose Connect has succeeded, before any other command
//! (Base 2.0, section 8.13).

use nvme_auth::{AuthParties, Concatenation, HostAction, HostAuth, Nonces, SystemNonces, TlsPsk};
use wire_nvme::Sqe;
use wire_nvme::auth::{AUTH_MESSAGE_MAX, AuthCommand};
use wire_nvme::fabrics::Nqn;

use super::connect::hostnqn;
use crate::error::NvmeOpenError;
use crate::options::Options;

/// A queue that carries the messages of an exchange.
pub(super) trait AuthQueue {
    /// Executes a command with in-capsule data.
    async fn send(&mut self, sqe: Sqe, message: &[u8]) -> Result<(), NvmeOpenError>;

    /// Executes a command that returns this many bytes.
    async fn receive(&mut self, sqe: Sqe, bytes: usize) -> Result<Vec<u8>, NvmeOpenError>;
}

/// Authenticates the host on a queue if the controller demands it (`is_required`), or if the host wants the
/// controller to prove its identity, or a key of TLS, which is returned.
///
/// # Errors
/// The host has no keys, or one of the ends does not accept the other.
pub(super) async fn authenticate(
    queue: &mut impl AuthQueue,
    qid: u16,
    is_required: bool,
    options: &Options,
    subnqn: &Nqn,
    concatenation: Concatenation,
) -> Result<Option<TlsPsk>, NvmeOpenError> {
    let credentials = options.authentication.as_ref();
    let credentials = credentials.and_then(|one| Some((one.keys()?, one.options())));
    let Some((keys, accepted)) = credentials else {
        return match is_required || concatenation != Concatenation::None {
            true => Err(NvmeOpenError::KeyRequired),
            false => Ok(None),
        };
    };
    if !is_required && keys.controller.is_none() && concatenation == Concatenation::None {
        return Ok(None);
    }
    let nonces = &mut SystemNonces;
    let transaction = nonces.sequence().map_err(|_| NvmeOpenError::NoRandomness)? as u16;
    let parties = AuthParties::new(hostnqn(options).as_str(), subnqn.as_str());
    let (mut host, mut message) =
        HostAuth::concatenating(keys, parties, accepted, transaction, concatenation);
    loop {
        send(queue, &message).await?;
        let command = AuthCommand::new(AUTH_MESSAGE_MAX as u32);
        let answer = queue.receive(command.to_receive(), AUTH_MESSAGE_MAX).await?;
        match host.receive(&answer, nonces) {
            HostAction::Send(next) => message = next,
            HostAction::SendLast(last) => {
                send(queue, &last).await?;
                return Ok(host.take_generated());
            }
            HostAction::Authenticated => return Ok(host.take_generated()),
            HostAction::Failed(error, last) => {
                if let Some(last) = last {
                    // The queue is closed in either case.
                    let _ = send(queue, &last).await;
                }
                log::warn!(target: "nvme", "{subnqn}: authentication on queue {qid} failed: {error}");
                return Err(NvmeOpenError::Authentication(qid, error));
            }
        }
    }
}

async fn send(queue: &mut impl AuthQueue, message: &[u8]) -> Result<(), NvmeOpenError> {
    queue.send(AuthCommand::new(message.len() as u32).to_send(), message).await
}
