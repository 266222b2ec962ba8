//! The functions of the table. None of them unwinds into fio.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::time::Duration;

use crate::engine::{FioEngine, Queued, print_line};
use crate::loaded::{LoadedEngine, loaded};
use crate::unit::{self, FinishedUnit, IoUnit};

/// fio's `fio_q_status`.
const COMPLETED: c_int = 0;
const IN_FLIGHT: c_int = 1;
const BUSY: c_int = 2;

/// The engine of the job on this thread.
struct JobEngine {
    engine: Box<dyn FioEngine>,
    finished: Vec<FinishedUnit>,
    /// The reason of an I/O that was refused is printed already.
    has_refused: bool,
}

impl JobEngine {
    /// Queues an I/O; what is refused has completed.
    fn queue(&mut self, unit: IoUnit) -> Queued {
        match self.engine.queue(unit) {
            Queued::Refused { unit, errno, reason } => {
                if !std::mem::replace(&mut self.has_refused, true) {
                    report(&reason);
                }
                Queued::Completed(unit.finish(Err(errno)))
            }
            queued => queued,
        }
    }
}

thread_local! {
    /// `None` before the start, after the end, and after a panic.
    static JOB: RefCell<Option<JobEngine>> = const { RefCell::new(None) };
}

/// Runs a call of this job's engine; `None` if there is none, or if it panics.
///
/// After a panic the engine is leaked: a device may still write to its memory.
fn with_job<R>(call: impl FnOnce(&mut JobEngine) -> R) -> Option<R> {
    let run = |cell: &RefCell<Option<JobEngine>>| {
        let mut job = cell.try_borrow_mut().ok()?;
        let engine = job.as_mut()?;
        let outcome = catch_unwind(AssertUnwindSafe(|| call(engine)));
        if outcome.is_err() {
            std::mem::forget(job.take());
            report("it has failed, and this job's I/O fails from now on; please report the lines above");
        }
        outcome.ok()
    };
    JOB.try_with(run).ok().flatten()
}

/// Runs a call that is no job's.
fn guarded<R>(call: impl FnOnce(&'static LoadedEngine) -> Result<R, String>) -> Option<R> {
    let outcome = catch_unwind(AssertUnwindSafe(|| loaded().map(call)));
    match outcome {
        Ok(Some(Ok(value))) => Some(value),
        Ok(Some(Err(reason))) => {
            report(&reason);
            None
        }
        // The panic has printed its own line.
        Ok(None) | Err(_) => None,
    }
}

fn report(line: &str) {
    if let Some(loaded) = loaded() {
        print_line(loaded.definition.name, line);
    }
}

fn status(ok: Option<()>) -> c_int {
    if ok.is_some() { 0 } else { 1 }
}

/// Sets the option with this index: fio does not say which one it calls for.
pub(crate) extern "C" fn set_option<const INDEX: usize>(_options: *mut c_void, text: *const c_char) -> c_int {
    status(guarded(|loaded| {
        if text.is_null() {
            return Ok(());
        }
        // SAFETY: fio's texts have a terminator.
        let text = unsafe { CStr::from_ptr(text) };
        match loaded.definition.options.get(INDEX) {
            Some(option) => (option.set)(&text.to_string_lossy()),
            None => Ok(()),
        }
    }))
}

pub(crate) extern "C" fn init(_thread: *mut c_void) -> c_int {
    status(guarded(|loaded| {
        let engine = (loaded.definition.start)()?;
        JOB.with(|cell| {
            *cell.borrow_mut() = Some(JobEngine { engine, finished: Vec::new(), has_refused: false })
        });
        Ok(())
    }))
}

pub(crate) extern "C" fn cleanup(_thread: *mut c_void) {
    // An error means that there is nothing to clean up.
    let job = JOB.try_with(|cell| cell.try_borrow_mut().ok().and_then(|mut job| job.take()));
    if let Ok(Some(job)) = job {
        // A panic here has printed its line, and the job is over.
        _ = catch_unwind(AssertUnwindSafe(|| drop(job)));
    }
}

/// The name of a `fio_file`.
fn name_of(file: *mut c_void) -> Option<String> {
    // SAFETY: fio passes one of its files.
    NonNull::new(file).and_then(|file| unsafe { unit::file_name(file) })
}

pub(crate) extern "C" fn get_file_size(_thread: *mut c_void, file: *mut c_void) -> c_int {
    status(guarded(|loaded| {
        let (Some(at), Some(name)) = (NonNull::new(file), name_of(file)) else {
            return Err("a file without a name: give --filename=URI".to_string());
        };
        let bytes = (loaded.definition.file_bytes)(&name)?;
        // SAFETY: fio is setting this file up.
        unsafe { unit::set_file_bytes(at, bytes) };
        Ok(())
    }))
}

pub(crate) extern "C" fn open_file(_thread: *mut c_void, file: *mut c_void) -> c_int {
    let Some(name) = name_of(file) else { return 1 };
    match with_job(|job| job.engine.open(&name)) {
        Some(Ok(())) => 0,
        Some(Err(reason)) => {
            report(&reason);
            1
        }
        None => 1,
    }
}

pub(crate) extern "C" fn close_file(_thread: *mut c_void, file: *mut c_void) -> c_int {
    if let Some(name) = name_of(file) {
        // Without an engine nothing is open.
        _ = with_job(|job| job.engine.close(&name));
    }
    0
}

pub(crate) extern "C" fn invalidate(_thread: *mut c_void, _file: *mut c_void) -> c_int {
    // Nothing is cached.
    0
}

pub(crate) extern "C" fn queue(_thread: *mut c_void, io_u: *mut c_void) -> c_int {
    let (Some(at), Some(loaded)) = (NonNull::new(io_u), loaded()) else { return BUSY };
    let offset_at = loaded.version.unit_offset_at;
    // SAFETY: fio queues it now, and takes it back by a completion only.
    let unit = || unsafe { IoUnit::new(at, offset_at) };
    match with_job(|job| job.queue(unit())) {
        Some(Queued::InFlight) => IN_FLIGHT,
        Some(Queued::Completed(_) | Queued::Refused { .. }) => COMPLETED,
        Some(Queued::Busy(_)) => BUSY,
        None => {
            _ = unit().finish(Err(libc::EIO));
            COMPLETED
        }
    }
}

pub(crate) extern "C" fn commit(_thread: *mut c_void) -> c_int {
    if with_job(|job| job.engine.commit()).is_some() { 0 } else { -libc::EIO }
}

pub(crate) extern "C" fn getevents(
    _thread: *mut c_void,
    min: c_uint,
    max: c_uint,
    limit: *const libc::timespec,
) -> c_int {
    // SAFETY: fio passes null or a time.
    let limit = unsafe { limit.as_ref() }.map(|limit| {
        Duration::new(limit.tv_sec.try_into().unwrap_or(0), limit.tv_nsec.try_into().unwrap_or(0))
    });
    let reaped = with_job(|job| {
        job.finished.clear();
        job.engine.reap(min as usize, max as usize, limit, &mut job.finished);
        c_int::try_from(job.finished.len()).unwrap_or(c_int::MAX)
    });
    reaped.unwrap_or(-libc::EIO)
}

pub(crate) extern "C" fn event(_thread: *mut c_void, index: c_int) -> *mut c_void {
    // Called for each I/O; nothing here panics.
    let found = JOB.try_with(|cell| {
        let job = cell.try_borrow().ok()?;
        let finished = job.as_ref()?.finished.get(usize::try_from(index).ok()?)?;
        Some(finished.0.as_ptr())
    });
    found.ok().flatten().unwrap_or(std::ptr::null_mut())
}
