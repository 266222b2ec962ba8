//! What keeps a controller attached.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::shared::{OwnerRequest, SharedController};

/// Keeps a controller attached: its drop requests the shutdown.
pub(crate) struct ControllerHandle {
    pub(crate) shared: Arc<SharedController>,
}

impl Drop for ControllerHandle {
    fn drop(&mut self) {
        self.shared.detach.store(true, Ordering::Release);
        // The flag covers a full mailbox: the owner checks it every turn.
        let _ = self.shared.requests.send(OwnerRequest::Detach);
    }
}
