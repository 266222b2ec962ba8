//! NVMe controllers of this machine.

mod bind;
mod session;
mod tool;

use clap::Subcommand;

use crate::failure::Failure;

/// What can be done with the controllers.
#[derive(Subcommand)]
pub(crate) enum Nvme {
    /// Take controllers from the kernel for user-space drivers, and give them back
    Bind(bind::Bind),
    /// Show controllers, and the namespaces of those that are named
    List(tool::List),
    /// Show what a controller or a namespace says of itself
    Identify(tool::IdentifyArgs),
    /// Show a log page
    Log(tool::Log),
    /// Format a namespace, which destroys what is on it
    Format(tool::Format),
    /// Reset a controller
    Reset(tool::Reset),
    /// Show what a discovery controller tells of
    Discover(tool::Discover),
}

/// Runs one of them.
pub(crate) fn run(command: Nvme) -> Result<(), Failure> {
    match command {
        Nvme::Bind(options) => bind::run(&options),
        Nvme::List(options) => tool::list(&options),
        Nvme::Identify(options) => tool::identify(&options),
        Nvme::Log(options) => tool::log(&options),
        Nvme::Format(options) => tool::format(&options),
        Nvme::Reset(options) => tool::reset(&options),
        Nvme::Discover(options) => tool::discover(&options),
    }
}
