//! The interrupt of a queue pair: an eventfd that wakes its core.

use std::os::fd::AsFd;
use std::sync::Arc;

use os::{EventClient, EventCompletion, Interest, WatchId};
use reactor::Core;

use crate::handle::ControllerHandle;

/// The eventfd of an interrupt vector, watched by the core. Its only effect is to wake the core, which then polls.
pub(crate) struct QpairInterrupt {
    client: EventClient,
    watch: WatchId,
    handle: Arc<ControllerHandle>,
    vector: u16,
    reaped: Vec<EventCompletion>,
}

impl QpairInterrupt {
    pub(crate) fn watch(core: &Core, handle: &Arc<ControllerHandle>, vector: u16) -> Option<QpairInterrupt> {
        let fd = handle.shared.params().vectors.get(usize::from(vector))?;
        let client = core.event_loop().client();
        // If the core cannot watch another descriptor, it polls the queue pair instead.
        let watch = client.watch(fd.as_fd(), Interest::READABLE, 0).ok()?;
        Some(QpairInterrupt { client, watch, handle: handle.clone(), vector, reaped: Vec::new() })
    }

    /// Clears the eventfd, so that the next interrupt wakes the core again.
    pub(crate) fn drain(&mut self) {
        if self.client.reap(&mut self.reaped) == 0 {
            return;
        }
        self.reaped.clear();
        if let Some(fd) = self.handle.shared.params().vectors.get(usize::from(self.vector)) {
            // One read clears an eventfd; it does not block, because the descriptor was readable.
            let _ = rustix::io::read(fd, &mut [0; 8]);
        }
    }
}

impl Drop for QpairInterrupt {
    fn drop(&mut self) {
        self.client.unwatch(self.watch);
    }
}
