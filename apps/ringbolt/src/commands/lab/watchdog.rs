//! `ringbolt lab watchdog`: kills a run's generators if the run is killed.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::command_error::CommandError;

/// Waits for end of file on standard input, ignoring signals.
pub(crate) fn run() -> Result<(), CommandError> {
    // A signal to the run's session must not end the watchdog before the generators.
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))
            .map_err(CommandError::environment)?;
    }
    lab_experiments::processes::watchdog(std::io::stdin().lock());
    Ok(())
}
