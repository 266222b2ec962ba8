//! In-band authentication: the place of it in the life of a queue.

use wire_nvme::fabrics::ConnectResponse;

use crate::error::NvmeOpenError;

/// Authenticates the host on a queue whose Connect has succeeded, before any other command (Base 2.0, section
/// 8.13).
///
/// No authentication protocol is implemented. A controller that requires one rejects the commands that
/// follow, with a status that says so, which is the error that the user gets.
///
/// # Errors
/// The controller does not accept the host. None at present.
pub(super) async fn authenticate(qid: u16, connected: &ConnectResponse) -> Result<(), NvmeOpenError> {
    if connected.authentication_required {
        log::warn!(target: "nvme", "the controller requires authentication on queue {qid}, which is not supported");
    }
    Ok(())
}
