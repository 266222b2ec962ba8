//! The interrupt of a queue pair: an event descriptor that ends the core's sleep.

use std::os::fd::AsFd;
use std::sync::Arc;

use reactor::Core;
use sys::{Client, Done, Interest, Watch};

use crate::controller::Handle;

/// A watched vector. What it says is only that polling may be worth it, and the wake-up says that too.
pub(crate) struct Interrupt {
    client: Client,
    watch: Watch,
    handle: Arc<Handle>,
    vector: u16,
    reaped: Vec<Done>,
}

impl Interrupt {
    pub(crate) fn watch(core: &Core, handle: &Arc<Handle>, vector: u16) -> Option<Interrupt> {
        let fd = handle.shared.facts().vectors.get(usize::from(vector))?;
        let client = core.events().client();
        // A core that has no room for another watch polls instead.
        let watch = client.watch(fd.as_fd(), Interest::READABLE, 0).ok()?;
        Some(Interrupt { client, watch, handle: handle.clone(), vector, reaped: Vec::new() })
    }

    /// Takes what was signalled, so that the next signal is news.
    pub(crate) fn drain(&mut self) {
        if self.client.reap(&mut self.reaped) == 0 {
            return;
        }
        self.reaped.clear();
        if let Some(fd) = self.handle.shared.facts().vectors.get(usize::from(self.vector)) {
            // One read empties an event descriptor; it does not block, because it was readable.
            let _ = rustix::io::read(fd, &mut [0; 8]);
        }
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        self.client.unwatch(self.watch);
    }
}
