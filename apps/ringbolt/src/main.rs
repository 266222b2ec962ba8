//! The `ringbolt` binary: NVMe-oF target, JSON-RPC client, load generator, NVMe tools and the lab.
//!
//! `serve` is an NVMe-oF target with SPDK's JSON-RPC methods, [`commands::rpc`] a client for them,
//! `perf` a load generator with fio's options, and `demo` runs target and initiator for a few seconds.
//!
//! ```text
//! ringbolt demo --once
//! ringbolt serve -c target.json
//! ringbolt rpc bdev_malloc_create name=Malloc0 num_blocks=131072 block_size=512
//! ringbolt perf --filename=null:1g --rw=randread --iodepth=128 --runtime=5s --time_based
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod app;
mod cli;
mod command_error;
mod commands;
mod console;
mod machine_memory;
mod options;
mod reactor_runtime;

use std::process::ExitCode;

use clap::Parser;

use crate::command_error::CommandError;
use crate::console::stderr_line;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    // A server prints its log, and does not end because its output is closed.
    let is_server = matches!(cli.command, cli::CliCommand::Serve(_));
    let finish = || if is_server { Ok(()) } else { console::finish() };
    exit(cli::run(cli.command).and_then(|()| finish()))
}

fn exit(result: Result<(), CommandError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            stderr_line!("ringbolt: {failure}");
            failure.exit_code()
        }
    }
}

/// Prints help in full, and a usage error as one line.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        console::record(error.print());
        return exit(console::finish());
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return ExitCode::from(2);
    }
    let text = error.to_string();
    let is_message = |line: &&str| !line.is_empty() && !line.starts_with("For more information");
    let lines = text.lines().map(str::trim).filter(is_message);
    let lines: Vec<&str> = lines.take_while(|line| !line.starts_with("Usage:")).collect();
    let message = lines.join(" ").replacen("error: ", "", 1);
    stderr_line!("ringbolt: {message}; see `ringbolt --help`");
    ExitCode::from(2)
}
