//! The subcommands.

pub(crate) mod blob;
pub(crate) mod blobfs;
mod demo;
pub(crate) mod image;
pub(crate) mod lab;
pub(crate) mod lvol;
pub(crate) mod model;
pub(crate) mod nvme;
pub(crate) mod objects;
mod perf;
pub(crate) mod rpc;
mod serve;
pub(crate) mod store;
pub(crate) mod trace;

use clap::CommandFactory;

use crate::cli::{Cli, CliCommand};
use crate::command_error::CommandError;

/// Runs a subcommand until it exits.
pub(crate) fn run(command: CliCommand) -> Result<(), CommandError> {
    match command {
        CliCommand::Serve(options) => serve::run(options),
        CliCommand::Rpc(options) => rpc::run(options),
        CliCommand::Perf(options) => perf::run(&options),
        CliCommand::Demo(options) => demo::run(&options),
        CliCommand::Lab { command } => lab::run(command),
        CliCommand::Lvol { command } => lvol::run(command),
        CliCommand::Model { command } => model::run(command),
        CliCommand::Blob { command } => blob::run(command),
        CliCommand::Blobfs { command } => blobfs::run(command),
        CliCommand::Objects { command } => objects::run(command),
        CliCommand::Image { command } => image::run(command),
        CliCommand::Store { command } => store::run(command),
        CliCommand::Nvme { command } => nvme::run(command),
        CliCommand::Trace(options) => trace::run(options),
        CliCommand::RpcReference { without_effect } => {
            let catalog = crate::app::catalog();
            let page = match without_effect {
                true => control::reference::without_effect(&catalog),
                false => control::reference::markdown(&catalog),
            };
            print!("{page}");
            Ok(())
        }
        CliCommand::MetricsReference => {
            print!("{}", control::metrics::markdown(&crate::app::catalog()));
            Ok(())
        }
        CliCommand::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "ringbolt", &mut std::io::stdout());
            Ok(())
        }
    }
}
