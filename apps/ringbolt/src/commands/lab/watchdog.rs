//! `lab watchdog`: the process that ends a run's generators when the run was killed.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::command_error::CommandError;

/// Waits for the end of standard input, whatever else happens.
pub(crate) fn run() -> Result<(), CommandError> {
    // A program that ends the run by one of these ends the generators with it.
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))
            .map_err(CommandError::environment)?;
    }
    lab_experiments::processes::watchdog(std::io::stdin().lock());
    Ok(())
}
