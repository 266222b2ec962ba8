//! Examination: every module looks at each block device that appears.
//!
//! As in SPDK there are two steps. First each module looks at its configuration
//! ([`Module::examine_config`](crate::Module::examine_config)), one device after the other. Then each may
//! read the device ([`Module::examine_disk`](crate::Module::examine_disk)), which takes as long as the device
//! does: many are examined so at a time, and none keeps another, or a method, waiting.
//!
//! A device that a configuration uses is not read while that is applied: a host may have written there what a
//! module would claim the device for, and the use that the operator has configured must not fail by it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::RpcError;
use crate::jobs::{JobHandle, Jobs};
use crate::module::DynModule;

/// The devices that wait to be examined, and the thread that has them examined one after the other.
///
/// A device waits once however often it is reported, so that there are at most as many as devices.
#[derive(Default)]
pub struct Examiner {
    state: Mutex<ExamineState>,
    changed: Condvar,
    jobs: Arc<Jobs>,
}

#[derive(Default)]
struct ExamineState {
    waiting: BTreeMap<String, Reading>,
    /// Names of devices that configurations use which are being applied, and how many do.
    used: BTreeMap<String, usize>,
    /// The device that is being examined by configuration, or whose findings are being applied.
    busy: Option<String>,
    /// Number of [`Examination`]s of a device that have not ended: one a module at most for each time that it
    /// was reported.
    reading: BTreeMap<String, usize>,
    findings: VecDeque<Finding>,
    is_stopped: bool,
}

/// Whether modules read a device that is examined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reading {
    /// A configuration uses it.
    No,
    /// It has appeared.
    Appeared,
    /// An operator has asked for it.
    Requested,
}

/// The devices that a configuration uses, until its drop.
pub(crate) struct UsedBdevs {
    examiner: Arc<Examiner>,
    names: BTreeSet<String>,
}

impl Drop for UsedBdevs {
    fn drop(&mut self) {
        let mut state = self.examiner.lock();
        for name in &self.names {
            if let Some(count) = state.used.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    state.used.remove(name);
                }
            }
        }
    }
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
    Examine(String, Reading),
    Apply(Finding),
}

/// An examination of a device by one module that reads it. It ends with [`finish`](Self::finish) or its drop,
/// on any thread; until then `bdev_wait_for_examine` waits.
pub struct Examination {
    examiner: Arc<Examiner>,
    bdev: String,
    is_requested: bool,
    /// It is listed as one.
    job: Option<JobHandle>,
}

impl Examination {
    fn new(examiner: &Arc<Examiner>, bdev: &str, is_requested: bool) -> Examination {
        *examiner.lock().reading.entry(bdev.to_string()).or_default() += 1;
        Examination { examiner: examiner.clone(), bdev: bdev.to_string(), is_requested, job: None }
    }

    /// Has it listed as a job from now on, because it may take minutes. What is returned takes its progress,
    /// and says when it is cancelled; the job ends with the examination.
    pub fn begin_job(&mut self, what: &'static str) -> JobHandle {
        self.job.get_or_insert_with(|| self.examiner.jobs.begin(what, &self.bdev)).clone()
    }

    /// Ends it without anything found, because of this error, which its job shows.
    pub fn fail(mut self, error: RpcError) {
        if let Some(job) = self.job.take() {
            job.end(Err(error));
        }
    }

    /// Whether an operator has asked for it, by `bdev_examine`.
    pub fn is_requested(&self) -> bool {
        self.is_requested
    }

    /// The examiner, which has another device examined that stands on this one.
    pub fn examiner(&self) -> Arc<Examiner> {
        self.examiner.clone()
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
        if let Some(job) = self.job.take() {
            job.end(job.check().map(|()| Value::Bool(true)));
        }
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
    /// Without devices. Examinations that take long are listed among `jobs`.
    pub(crate) fn new(jobs: &Arc<Jobs>) -> Arc<Examiner> {
        Arc::new(Examiner { state: Mutex::default(), changed: Condvar::new(), jobs: jobs.clone() })
    }

    /// Reports a device that has appeared, with its other names. It is not read if a configuration that is
    /// being applied uses one of them. Does not block.
    pub fn appeared<'a>(&self, bdev: &'a str, other_names: impl IntoIterator<Item = &'a str>) {
        let mut state = self.lock();
        let is_used = !state.used.is_empty()
            && std::iter::once(bdev).chain(other_names).any(|name| state.used.contains_key(name));
        if is_used {
            log::info!(target: "examine", "{bdev} is not read: the configuration uses it");
        }
        self.add(&mut state, bdev, if is_used { Reading::No } else { Reading::Appeared });
    }

    /// Has a device examined because an operator has asked for it. Does not block.
    pub fn request(&self, bdev: &str) {
        self.add(&mut self.lock(), bdev, Reading::Requested);
    }

    fn add(&self, state: &mut ExamineState, bdev: &str, reading: Reading) {
        if !state.is_stopped {
            let waiting = state.waiting.entry(bdev.to_string()).or_insert(reading);
            *waiting = reading.max(*waiting);
            self.changed.notify_all();
        }
    }

    /// While what is returned exists, devices with one of these names are not read when they appear.
    pub(crate) fn use_bdevs(self: &Arc<Self>, names: BTreeSet<String>) -> UsedBdevs {
        // UUIDs are found in any case.
        let names: BTreeSet<String> =
            names.into_iter().flat_map(|name| [name.to_ascii_lowercase(), name]).collect();
        let mut state = self.lock();
        names.iter().for_each(|name| *state.used.entry(name.clone()).or_default() += 1);
        UsedBdevs { examiner: self.clone(), names }
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
                    Step::Examine(bdev, reading) => {
                        let guard = sync::lock(&update_lock);
                        modules.iter().for_each(|module| module.examine_config(&bdev));
                        drop(guard);
                        for module in modules.iter().filter(|_| reading != Reading::No) {
                            let is_requested = reading == Reading::Requested;
                            module.examine_disk(&bdev, Examination::new(&examiner, &bdev, is_requested));
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
            if let Some((bdev, reading)) = state.waiting.pop_first() {
                state.busy = Some(bdev.clone());
                return Some(Step::Examine(bdev, reading));
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
