//! Examination: every module looks at each block device that appears.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::module::DynModule;

/// The devices that wait to be examined, and the thread that has them examined one after the other.
///
/// A device waits once however often it is reported, so that there are at most as many as devices.
#[derive(Default)]
pub struct Examiner {
    state: Mutex<ExamineState>,
    changed: Condvar,
}

#[derive(Default)]
struct ExamineState {
    waiting: BTreeSet<String>,
    /// A device is being examined.
    is_busy: bool,
    is_stopped: bool,
}

impl Examiner {
    /// Reports a device that has appeared. Does not block.
    pub fn appeared(&self, bdev: &str) {
        let mut state = self.lock();
        if !state.is_stopped && state.waiting.insert(bdev.to_string()) {
            self.changed.notify_all();
        }
    }

    /// Blocks until every device that was reported is examined. Not for updates, for which examinations wait.
    pub fn wait(&self) {
        let mut state = self.lock();
        while !state.is_stopped && (state.is_busy || !state.waiting.is_empty()) {
            state = sync::wait(&self.changed, state);
        }
    }

    /// Starts the thread. An examination is an update: it changes what is configured, and waits for the update that
    /// created the device, which records its call last.
    pub(crate) fn start(
        self: &Arc<Self>,
        modules: &[Arc<dyn DynModule>],
        update_lock: &Arc<Mutex<()>>,
    ) -> io::Result<()> {
        let (examiner, modules, update_lock) = (self.clone(), modules.to_vec(), update_lock.clone());
        let thread = std::thread::Builder::new().name("examine".to_string());
        let run = move || {
            while let Some(bdev) = examiner.next() {
                let _guard = sync::lock(&update_lock);
                modules.iter().for_each(|module| module.examine(&bdev));
            }
        };
        thread.spawn(run).map(drop)
    }

    /// Ends the thread after the current device. Others are not examined any more.
    pub(crate) fn stop(&self) {
        self.lock().is_stopped = true;
        self.changed.notify_all();
    }

    /// Waits for a device to examine; `None` after the stop.
    fn next(&self) -> Option<String> {
        let mut state = self.lock();
        state.is_busy = false;
        self.changed.notify_all();
        loop {
            if state.is_stopped {
                return None;
            }
            if let Some(bdev) = state.waiting.pop_first() {
                state.is_busy = true;
                return Some(bdev);
            }
            state = sync::wait(&self.changed, state);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ExamineState> {
        sync::lock(&self.state)
    }
}
