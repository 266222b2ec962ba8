//! What the program does.

mod demo;
pub(crate) mod lab;
pub(crate) mod model;
pub(crate) mod nvme;
mod perf;
pub(crate) mod rpc;
mod serve;

use clap::CommandFactory;

use crate::cli::{Cli, Command};
use crate::failure::Failure;

/// Runs one command to its end.
pub(crate) fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(options) => serve::run(options),
        Command::Rpc(options) => rpc::run(options),
        Command::Perf(options) => perf::run(&options),
        Command::Demo(options) => demo::run(&options),
        Command::Lab { command } => lab::run(command),
        Command::Model { command } => model::run(command),
        Command::Nvme { command } => nvme::run(command),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "ringbolt", &mut std::io::stdout());
            Ok(())
        }
    }
}
