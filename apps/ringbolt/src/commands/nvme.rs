//! NVMe controllers of this machine.

mod bind;

use clap::Subcommand;

use crate::failure::Failure;

/// What can be done with the controllers.
#[derive(Subcommand)]
pub(crate) enum Nvme {
    /// Take controllers from the kernel for user-space drivers, and give them back
    Bind(bind::Bind),
}

/// Runs one of them.
pub(crate) fn run(command: Nvme) -> Result<(), Failure> {
    match command {
        Nvme::Bind(options) => bind::run(&options),
    }
}
