//! What an engine is.

use std::ffi::CStr;
use std::time::Duration;

use crate::unit::{FinishedUnit, IoUnit};

/// The I/O of one job of fio, on its thread. Errors are printed for the user.
pub trait FioEngine {
    /// Opens a file of the job.
    ///
    /// # Errors
    /// Why it cannot be opened.
    fn open(&mut self, name: &str) -> Result<(), String>;

    /// Closes a file; none of its I/O is in flight.
    fn close(&mut self, name: &str);

    /// Begins an I/O, or collects it until [`commit`](Self::commit).
    fn queue(&mut self, unit: IoUnit) -> Queued;

    /// Begins what was collected.
    fn commit(&mut self);

    /// Adds finished I/Os to `to`, `max` at most. It returns when there are `min`, or after `limit`.
    fn reap(&mut self, min: usize, max: usize, limit: Option<Duration>, to: &mut Vec<FinishedUnit>);
}

/// What became of an I/O that fio has queued.
#[derive(Debug)]
pub enum Queued {
    /// It is in flight.
    InFlight,
    /// It has ended.
    Completed(FinishedUnit),
    /// The engine does not do such an I/O, which fails. The first reason of a job is printed.
    Refused {
        /// The I/O.
        unit: IoUnit,
        /// The `errno`.
        errno: i32,
        /// What is wrong with it, for the user.
        reason: String,
    },
    /// There is no room: fio reaps others, and queues it again.
    Busy(IoUnit),
}

/// How many options an engine can have.
pub const OPTIONS_MAX: usize = 2;

/// An option of an engine, which has a text.
pub struct EngineOption {
    /// Its name.
    pub name: &'static CStr,
    /// What it does.
    pub help: &'static CStr,
    /// Sets it, before anything else. All jobs of a process have the same.
    pub set: fn(&str) -> Result<(), String>,
}

/// A library's engine.
pub struct EngineDefinition {
    /// Its name.
    pub name: &'static CStr,
    /// Its options, at most [`OPTIONS_MAX`].
    pub options: &'static [EngineOption],
    /// How large a file is, in bytes. Called in the process that starts the jobs, which may be another than
    /// theirs: it must leave no thread behind.
    pub file_bytes: fn(&str) -> Result<u64, String>,
    /// Starts the engine of a job, on its thread.
    pub start: fn() -> Result<Box<dyn FioEngine>, String>,
}

/// Prints a line for the user. fio's own output may be a machine's, on standard output.
pub(crate) fn print_line(engine: &CStr, line: &str) {
    eprintln!("fio: {}: {line}", engine.to_string_lossy());
}
