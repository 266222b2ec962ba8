//! The lab: each of its commands has a file of its own.

mod import;

use clap::Subcommand;

use crate::failure::Failure;

/// The lab's commands.
#[derive(Subcommand)]
pub(crate) enum Lab {
    /// Read what fio wrote, and print one row for each job and direction
    Import(import::Import),
}

/// Runs one of them to its end.
pub(crate) fn run(command: Lab) -> Result<(), Failure> {
    match command {
        Lab::Import(options) => import::run(&options),
    }
}
