//! Where sanitize operations are executed.

use std::sync::{Arc, Weak};

use bdev::{AsyncChannel, Descriptor};
use reactor::{Core, ReactorHandle};

use super::{SanitizeJob, SanitizeRun};

/// Buffers of the core come back within a few requests' time.
const MEMORY_RETRY_NS: u64 = 1_000_000;

/// Executes the sanitize operations of a unit. A unit without it has no SANITIZE.
pub trait SanitizeExecutor: Send + Sync + std::fmt::Debug {
    /// Executes a job to its end, with a [`SanitizeRun`]. A job that is dropped has failed.
    fn execute(&self, job: SanitizeJob);
}

/// Executes operations on a reactor, with a channel of their own.
pub struct ReactorSanitizer {
    reactor: ReactorHandle,
    /// The target owns the device: once it is closed there, the operation has failed.
    device: Weak<Descriptor>,
}

impl ReactorSanitizer {
    /// Operations on a device run on one of the reactors, which `number` selects. `None` without reactors.
    pub fn new(
        reactors: &[ReactorHandle],
        number: u64,
        device: &Arc<Descriptor>,
    ) -> Option<Arc<ReactorSanitizer>> {
        let index = number.checked_rem(reactors.len() as u64)? as usize;
        Some(Arc::new(ReactorSanitizer { reactor: reactors[index].clone(), device: Arc::downgrade(device) }))
    }
}

impl std::fmt::Debug for ReactorSanitizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "ReactorSanitizer on reactor {}", self.reactor.index())
    }
}

impl SanitizeExecutor for ReactorSanitizer {
    fn execute(&self, job: SanitizeJob) {
        let device = self.device.clone();
        let begin = move |core: &Core| {
            // A core without room for tasks drops it, so that it fails.
            core.spawn(execute(job, device, core.clone()));
        };
        if self.reactor.post(begin).is_err() {
            log::warn!(target: "scsi", "a sanitize operation has failed: its reactor has stopped");
        }
    }
}

async fn execute(job: SanitizeJob, device: Weak<Descriptor>, core: Core) {
    let opened = device.upgrade().map(|device| (device.channel(&core), device.device().name().to_string()));
    let (io, name) = match opened {
        Some((Ok(channel), name)) => (AsyncChannel::new(&core, channel), name),
        Some((Err(error), name)) => {
            return log::warn!(target: "scsi", "{name}: a sanitize operation has failed: {error}");
        }
        None => return,
    };
    let bytes = job.memory_bytes();
    let mut memory = None;
    while bytes > 0 && memory.is_none() && device.strong_count() > 0 {
        memory = core.pool().take(bytes as usize).map(dma::Data::from);
        if memory.is_none() {
            core.sleep_ns(MEMORY_RETRY_NS).await;
        }
    }
    let mut run = SanitizeRun::new(job, memory);
    while device.strong_count() > 0
        && let Some(request) = run.next_request()
    {
        run.complete(io.submit(request).await);
    }
    if !run.has_finished() {
        log::warn!(target: "scsi", "{name}: a sanitize operation has failed");
    }
}
