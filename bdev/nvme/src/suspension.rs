//! Namespaces of a path to which no I/O is sent while they are identified again.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use reactor::ReactorHandle;

use crate::path::ControllerPath;
use crate::shared_namespace::SharedNamespace;

/// The namespaces of a path that are suspended until they have been identified again.
///
/// The path's task has the event thread [`add`](Self::add) them, waits until they are
/// [quiesced](Self::is_quiesced), and only then identifies them: what is sent afterwards goes to the
/// namespace that was identified.
#[derive(Default)]
pub(crate) struct Suspension {
    namespaces: Mutex<Vec<(Arc<SharedNamespace>, u64)>>,
    /// Reactors that have not made a turn since.
    turns_left: AtomicUsize,
    is_applied: AtomicBool,
}

impl Suspension {
    /// Suspends namespaces on a path, and has each of `reactors` that uses them make a turn.
    pub(crate) fn add(
        self: &Arc<Self>,
        path: &Arc<ControllerPath>,
        namespaces: impl Iterator<Item = Arc<SharedNamespace>>,
        reactors: &[ReactorHandle],
    ) {
        let mut cores = Vec::new();
        for namespace in namespaces {
            let Some(version) = namespace.suspend_path(path.number) else { continue };
            cores.extend(namespace.channel_statuses().iter().map(|status| status.core));
            sync::lock(&self.namespaces).push((namespace, version));
        }
        let used = reactors.iter().filter(|reactor| cores.contains(&reactor.index()));
        for reactor in used {
            self.turns_left.fetch_add(1, Ordering::AcqRel);
            let (suspension, path) = (self.clone(), path.clone());
            // Tasks run after the pollers of the turn. A reactor that does not take the message in time
            // leaves the suspension to its timeout; one that has stopped has no I/O.
            let _ = reactor.post(move |core| {
                core.spawn(async move {
                    suspension.turns_left.fetch_sub(1, Ordering::AcqRel);
                    path.wake();
                });
            });
        }
        self.is_applied.store(true, Ordering::Release);
        path.wake();
    }

    /// Whether the namespaces are suspended, though I/O may be in flight.
    pub(crate) fn is_applied(&self) -> bool {
        self.is_applied.load(Ordering::Acquire)
    }

    /// Whether no I/O to the namespaces is in flight on the path, and none is sent.
    pub(crate) fn is_quiesced(&self, path: &ControllerPath) -> bool {
        self.is_applied()
            && self.turns_left.load(Ordering::Acquire) == 0
            && sync::lock(&self.namespaces)
                .iter()
                .all(|(namespace, version)| namespace.is_quiesced(path.number, *version))
    }
}
