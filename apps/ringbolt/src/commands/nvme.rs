//! `ringbolt nvme`: tools for NVMe controllers.

mod admin;
mod bind;
mod session;

use clap::Subcommand;

use crate::command_error::CommandError;

/// The subcommands of `ringbolt nvme`.
#[derive(Subcommand)]
pub(crate) enum NvmeCommand {
    /// Bind controllers to user-space drivers, and return them to the kernel
    Bind(bind::BindArgs),
    /// List PCI controllers, and controllers given by URI with their namespaces
    List(admin::ListArgs),
    /// Show the Identify data of a controller or namespace
    Identify(admin::IdentifyArgs),
    /// Show a log page
    Log(admin::LogArgs),
    /// Format a namespace (destroys its data)
    Format(admin::FormatArgs),
    /// Reset a controller
    Reset(admin::ResetArgs),
    /// Show the records of a discovery controller
    Discover(admin::DiscoverArgs),
}

/// Runs a subcommand of `ringbolt nvme`.
pub(crate) fn run(command: NvmeCommand) -> Result<(), CommandError> {
    match command {
        NvmeCommand::Bind(options) => bind::run(&options),
        NvmeCommand::List(options) => admin::list(&options),
        NvmeCommand::Identify(options) => admin::identify(&options),
        NvmeCommand::Log(options) => admin::log(&options),
        NvmeCommand::Format(options) => admin::format(&options),
        NvmeCommand::Reset(options) => admin::reset(&options),
        NvmeCommand::Discover(options) => admin::discover(&options),
    }
}
