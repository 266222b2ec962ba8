//! Examination: every module looks at each block device that appears.
//!
//! As in SPDK there are two steps. First each module looks at its configuration
//! ([`Module::examine_config`](crate::Module::examine_config)), one device after the other. Then each may
//! read the device ([`Module::examine_disk`](crate::Module::examine_disk)), which takes as long as the device
//! does: many are examined so at a time, and none keeps another, or a method, waiting.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

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
    /// The device that is being examined by configuration, or whose findings are being applied.
    busy: Option<String>,
    /// Number of [`Examination`]s of a device that have not ended: one a module at most for each time that it
    /// was reported.
    reading: BTreeMap<String, usize>,
    findings: VecDeque<Finding>,
    is_stopped: bool,
}

/// What an examination has found, to be applied.
struct Finding {
    apply: Box<dyn FnOnce() + Send>,
    examination: Examination,
}

/// Ends the waits for a thread that has ended.
struct StopAtEnd(Arc<Examiner>);

impl Drop for StopAtEnd {
    fn drop(&mut self) {
        self.0.stop();
    }
}

enum Step {
    Examine(String),
    Apply(Finding),
}

/// An examination of a device by one module that reads it. It ends with [`finish`](Self::finish) or its drop,
/// on any thread; until then `bdev_wait_for_examine` waits.
pub struct Examination {
    examiner: Arc<Examiner>,
    bdev: String,
}

impl Examination {
    fn new(examiner: &Arc<Examiner>, bdev: &str) -> Examination {
        *examiner.lock().reading.entry(bdev.to_string()).or_default() += 1;
        Examination { examiner: examiner.clone(), bdev: bdev.to_string() }
    }

    /// Name of the device.
    pub fn bdev(&self) -> &str {
        &self.bdev
    }

    /// Ends it with what was found: `apply` claims the device or creates others from it. It runs as an
    /// update, when no other does, and not at all once the program stops. The device may be gone by then.
    pub fn finish(self, apply: impl FnOnce() + Send + 'static) {
        let examiner = self.examiner.clone();
        let mut state = examiner.lock();
        let finding = Finding { apply: Box::new(apply), examination: self };
        if state.is_stopped {
            // Its drop takes the lock.
            drop(state);
            return drop(finding);
        }
        state.findings.push_back(finding);
        examiner.changed.notify_all();
    }
}

impl Drop for Examination {
    fn drop(&mut self) {
        let mut state = self.examiner.lock();
        if let Some(count) = state.reading.get_mut(&self.bdev) {
            *count -= 1;
            if *count == 0 {
                state.reading.remove(&self.bdev);
            }
        }
        self.examiner.changed.notify_all();
    }
}

impl Examiner {
    /// Reports a device that has appeared. Does not block.
    pub fn appeared(&self, bdev: &str) {
        let mut state = self.lock();
        if !state.is_stopped && state.waiting.insert(bdev.to_string()) {
            self.changed.notify_all();
        }
    }

    /// Blocks until every device that was reported is examined, also by those that read it. Not for updates.
    pub fn wait(&self) {
        self.wait_until(|state| !state.is_examining());
    }

    /// [`wait`](Self::wait), for `timeout` at most. Whether all are examined.
    pub(crate) fn wait_within(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut state = self.lock();
        while !state.is_stopped && state.is_examining() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = sync::wait_timeout(&self.changed, state, left);
        }
        true
    }

    /// Whether a device that was reported is not examined yet.
    pub(crate) fn is_examining(&self) -> bool {
        self.lock().is_examining()
    }

    /// Blocks until a device is examined, also by those that read it, whatever is read of others. Not for
    /// updates.
    pub fn wait_for(&self, bdev: &str) {
        self.wait_until(|state| state.is_idle() && !state.reading.contains_key(bdev));
    }

    /// Blocks until every device that was reported is examined by configuration, and what reads have found is
    /// applied. Examinations that still read are not waited for. Not for updates, for which examinations
    /// wait.
    pub(crate) fn wait_configured(&self) {
        self.wait_until(ExamineState::is_idle);
    }

    fn wait_until(&self, is_done: impl Fn(&ExamineState) -> bool) {
        let mut state = self.lock();
        while !state.is_stopped && !is_done(&state) {
            state = sync::wait(&self.changed, state);
        }
    }

    /// Starts the thread. An examination is an update: it changes what is configured, and waits for the
    /// update that created the device, which records its call last.
    pub(crate) fn start(
        self: &Arc<Self>,
        modules: &[Arc<dyn DynModule>],
        update_lock: &Arc<Mutex<()>>,
    ) -> io::Result<()> {
        let (examiner, modules, update_lock) = (self.clone(), modules.to_vec(), update_lock.clone());
        let thread = std::thread::Builder::new().name("examine".to_string());
        let run = move || {
            // Also after a panic of a module, which is reported: methods must not wait for what has ended.
            let _stop = StopAtEnd(examiner.clone());
            while let Some(step) = examiner.next() {
                match step {
                    Step::Examine(bdev) => {
                        let guard = sync::lock(&update_lock);
                        modules.iter().for_each(|module| module.examine_config(&bdev));
                        drop(guard);
                        for module in &modules {
                            module.examine_disk(&bdev, Examination::new(&examiner, &bdev));
                        }
                    }
                    Step::Apply(Finding { apply, examination }) => {
                        let _guard = sync::lock(&update_lock);
                        apply();
                        drop(examination);
                    }
                }
            }
        };
        thread.spawn(run).map(drop)
    }

    /// Ends the thread after the current device. Others are not examined any more.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.is_stopped = true;
        let findings = std::mem::take(&mut state.findings);
        self.changed.notify_all();
        // Their drop takes the lock.
        drop(state);
        drop(findings);
    }

    /// Waits for a device to examine or a finding to apply; `None` after the stop.
    fn next(&self) -> Option<Step> {
        let mut state = self.lock();
        state.busy = None;
        self.changed.notify_all();
        loop {
            if state.is_stopped {
                return None;
            }
            if let Some(finding) = state.findings.pop_front() {
                state.busy = Some(finding.examination.bdev.clone());
                return Some(Step::Apply(finding));
            }
            if let Some(bdev) = state.waiting.pop_first() {
                state.busy = Some(bdev.clone());
                return Some(Step::Examine(bdev));
            }
            state = sync::wait(&self.changed, state);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ExamineState> {
        sync::lock(&self.state)
    }
}

impl ExamineState {
    fn is_idle(&self) -> bool {
        self.busy.is_none() && self.waiting.is_empty() && self.findings.is_empty()
    }

    fn is_examining(&self) -> bool {
        !self.is_idle() || !self.reading.is_empty()
    }
}
