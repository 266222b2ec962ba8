//! Jobs: method calls and examinations of devices that take long, each with a handle, progress and a way to
//! cancel it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::RpcError;

/// Limit of jobs that run at the same time: each has a thread.
const RUNNING_MAX: usize = 64;
/// Limit of ended jobs that are still listed; the oldest is forgotten first.
const ENDED_MAX: usize = 64;

/// The jobs that run, and those that have ended lately.
#[derive(Default)]
pub struct Jobs {
    table: Mutex<JobTable>,
    /// Held during each update.
    update_lock: Arc<Mutex<()>>,
}

#[derive(Default)]
struct JobTable {
    last_id: u64,
    jobs: VecDeque<Arc<Job>>,
}

struct Job {
    id: u64,
    method: &'static str,
    /// The device that it examines.
    bdev: Option<String>,
    started: Instant,
    done: AtomicU64,
    /// 0 as long as it is not known.
    total: AtomicU64,
    cancelled: AtomicBool,
    state: Mutex<JobState>,
    update_lock: Arc<Mutex<()>>,
}

#[derive(Default)]
struct JobState {
    unit: &'static str,
    /// It has passed the point from which it cannot be cancelled.
    is_committed: bool,
    outcome: Option<Result<Value, RpcError>>,
    /// How long it ran, once it has ended.
    ran: Option<Duration>,
    on_cancel: Option<Box<dyn FnOnce() + Send>>,
}

/// What a running job reports its progress to. Dropping it does nothing; a clone is of the same job.
#[derive(Clone)]
pub struct JobHandle(Arc<Job>);

impl JobHandle {
    /// The handle of a call that is no job: nothing lists it, and only [`cancel`](Self::cancel) cancels it.
    pub fn standalone() -> JobHandle {
        JobHandle(Arc::new(Job::new(0, "the call", None, Arc::default())))
    }

    /// Ends a job that [`Jobs::begin`] has begun.
    pub(crate) fn end(&self, outcome: Result<Value, RpcError>) {
        // What it came to is listed, and its caller has said so already.
        _ = self.0.end(outcome);
    }

    /// Requests the end, as `job_cancel` does. Fails if it is too late.
    pub fn cancel(&self) -> Result<(), RpcError> {
        self.0.cancel()
    }

    /// Whether the job is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }

    /// Says how much there is to do, and in what unit.
    pub fn set_total(&self, total: u64, unit: &'static str) {
        self.0.lock().unit = unit;
        self.0.total.store(total, Ordering::Relaxed);
    }

    /// What was done.
    pub fn done(&self) -> u64 {
        self.0.done.load(Ordering::Relaxed)
    }

    /// Counts what was done.
    pub fn advance(&self, done: u64) {
        self.0.done.fetch_add(done, Ordering::Relaxed);
    }

    /// Fails with [`RpcError::ECANCELED`] once the job is cancelled. For places where it can stop.
    pub fn check(&self) -> Result<(), RpcError> {
        if self.is_cancelled() { Err(cancelled(self.0.method)) } else { Ok(()) }
    }

    /// Has `action` run when the job is cancelled, or now if it was. It ends what the job waits for.
    pub fn on_cancel(&self, action: impl FnOnce() + Send + 'static) {
        let mut state = self.0.lock();
        if self.is_cancelled() {
            drop(state);
            return action();
        }
        state.on_cancel = Some(Box::new(action));
    }

    /// Runs a short part of the job as an update: others wait for it, and it for them. `change` starts no
    /// other.
    pub fn update<R>(&self, change: impl FnOnce() -> R) -> R {
        let _guard = sync::lock(&self.0.update_lock);
        change()
    }

    /// From here the job cannot be cancelled: `job_cancel` fails. Fails itself if the job was cancelled
    /// before.
    pub fn commit(&self) -> Result<(), RpcError> {
        let mut state = self.0.lock();
        self.check()?;
        state.is_committed = true;
        Ok(())
    }
}

fn cancelled(method: &str) -> RpcError {
    RpcError::new(RpcError::ECANCELED, format!("{method} was cancelled"))
}

impl Job {
    fn new(id: u64, method: &'static str, bdev: Option<&str>, update_lock: Arc<Mutex<()>>) -> Job {
        Job {
            id,
            method,
            bdev: bdev.map(str::to_string),
            started: Instant::now(),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            state: Mutex::default(),
            update_lock,
        }
    }

    fn lock(&self) -> MutexGuard<'_, JobState> {
        sync::lock(&self.state)
    }

    fn cancel(&self) -> Result<(), RpcError> {
        let mut state = self.lock();
        if state.outcome.is_some() {
            return Err(RpcError::new(RpcError::EALREADY, format!("job {} has ended", self.id)));
        }
        if state.is_committed {
            let message = format!("job {} ({}) cannot be cancelled any more", self.id, self.method);
            return Err(RpcError::new(RpcError::EBUSY, message));
        }
        self.cancelled.store(true, Ordering::Release);
        let action = state.on_cancel.take();
        drop(state);
        if let Some(action) = action {
            action();
        }
        Ok(())
    }

    fn end(&self, outcome: Result<Value, RpcError>) -> Result<Value, RpcError> {
        let mut state = self.lock();
        // What it waited for was ended by the cancellation, with an error of its own.
        let outcome = match outcome {
            Err(_) if self.cancelled.load(Ordering::Acquire) => Err(cancelled(self.method)),
            outcome => outcome,
        };
        state.outcome = Some(outcome.clone());
        state.ran = Some(self.started.elapsed());
        state.on_cancel = None;
        outcome
    }

    fn describe(&self) -> Value {
        let state = self.lock();
        let name = match &state.outcome {
            None => "running",
            Some(Ok(_)) => "done",
            Some(Err(error)) if error.code == RpcError::ECANCELED => "cancelled",
            Some(Err(_)) => "failed",
        };
        let mut described = json!({
            "job": self.id,
            "method": self.method,
            "state": name,
            "seconds": state.ran.unwrap_or_else(|| self.started.elapsed()).as_secs(),
            "done": self.done.load(Ordering::Relaxed),
        });
        if let Some(bdev) = &self.bdev {
            described["bdev"] = json!(bdev);
        }
        let total = self.total.load(Ordering::Relaxed);
        if total > 0 {
            described["total"] = json!(total);
        }
        if !state.unit.is_empty() {
            described["unit"] = json!(state.unit);
        }
        match &state.outcome {
            Some(Ok(result)) => described["result"] = result.clone(),
            Some(Err(error)) => described["error"] = json!({ "code": error.code, "message": error.message }),
            None => {}
        }
        described
    }
}

impl Jobs {
    /// No jobs yet. `update_lock` is held during each update.
    pub(crate) fn new(update_lock: &Arc<Mutex<()>>) -> Arc<Jobs> {
        Arc::new(Jobs { table: Mutex::default(), update_lock: update_lock.clone() })
    }

    fn add(&self, method: &'static str, bdev: Option<&str>) -> Result<Arc<Job>, RpcError> {
        let mut table = self.lock();
        let is_running = |job: &Arc<Job>| job.lock().outcome.is_none();
        let running = table.jobs.iter().filter(|job| is_running(job)).count();
        if running >= RUNNING_MAX {
            let message = format!("{RUNNING_MAX} jobs run already; see job_get");
            return Err(RpcError::new(RpcError::EBUSY, message));
        }
        if table.jobs.len() - running >= ENDED_MAX {
            let oldest = table.jobs.iter().position(|job| !is_running(job));
            oldest.map(|index| table.jobs.remove(index));
        }
        table.last_id += 1;
        let job = Arc::new(Job::new(table.last_id, method, bdev, self.update_lock.clone()));
        table.jobs.push_back(job.clone());
        Ok(job)
    }

    /// Begins a job of the examination of a device, which [`JobHandle::end`] ends. Beyond the limit of jobs
    /// it is not listed.
    pub(crate) fn begin(&self, method: &'static str, bdev: &str) -> JobHandle {
        self.add(method, Some(bdev)).map_or_else(|_| JobHandle::standalone(), JobHandle)
    }

    /// Runs a job on this thread, and returns its outcome.
    pub(crate) fn run(
        &self,
        method: &'static str,
        run: impl FnOnce(&JobHandle) -> Result<Value, RpcError>,
    ) -> Result<Value, RpcError> {
        let job = self.add(method, None)?;
        let outcome = run(&JobHandle(job.clone()));
        job.end(outcome)
    }

    /// Runs a job on a thread of its own, and returns its handle.
    pub(crate) fn spawn(
        &self,
        method: &'static str,
        run: impl FnOnce(&JobHandle) -> Result<Value, RpcError> + Send + 'static,
    ) -> Result<u64, RpcError> {
        let job = self.add(method, None)?;
        let id = job.id;
        let own = job.clone();
        let thread = std::thread::Builder::new().name("job".to_string());
        let spawned = thread.spawn(move || {
            let outcome = run(&JobHandle(own.clone()));
            own.end(outcome)
        });
        match spawned {
            Ok(_) => Ok(id),
            Err(error) => job.end(Err(RpcError::internal(error))).map(|_| id),
        }
    }

    /// Requests the end of a job. It ends at the next place where it can.
    pub(crate) fn cancel(&self, id: u64) -> Result<(), RpcError> {
        self.find(id)?.cancel()
    }

    /// Requests the end of every job.
    pub(crate) fn cancel_all(&self) {
        let jobs: Vec<Arc<Job>> = self.lock().jobs.iter().cloned().collect();
        for job in jobs {
            // An error means that it has ended, or is about to.
            let _ = job.cancel();
        }
    }

    /// One job, or all, oldest first.
    pub(crate) fn describe(&self, id: Option<u64>) -> Result<Vec<Value>, RpcError> {
        match id {
            Some(id) => Ok(vec![self.find(id)?.describe()]),
            None => Ok(self.lock().jobs.iter().map(|job| job.describe()).collect()),
        }
    }

    fn find(&self, id: u64) -> Result<Arc<Job>, RpcError> {
        let found = self.lock().jobs.iter().find(|job| job.id == id).cloned();
        found.ok_or_else(|| RpcError::new(RpcError::ENODEV, format!("there is no job {id}")))
    }

    fn lock(&self) -> MutexGuard<'_, JobTable> {
        sync::lock(&self.table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_has_ended_grows_no_older() {
        let job = Job::new(1, "test", None, Arc::default());
        _ = job.end(Ok(Value::Null));
        let ended = job.lock().ran;
        assert!(ended.is_some());
        let job =
            Job { started: job.started.checked_sub(Duration::from_secs(90)).unwrap_or(job.started), ..job };
        assert_eq!(job.describe()["seconds"], 0);
        assert_eq!(job.lock().ran, ended);
    }
}
