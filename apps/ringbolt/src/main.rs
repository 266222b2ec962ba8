//! The one binary: the target, the RPC client, the load generator and the demonstration.
//!
//! `serve` is an NVMe/TCP target that SPDK's tools drive, [`commands::rpc`] one of those tools, `perf`
//! measures any device or target with fio's options, and `demo` shows all of it in a few seconds.
//!
//! ```text
//! ringbolt demo --once
//! ringbolt serve -c target.json
//! ringbolt rpc bdev_malloc_create name=Malloc0 num_blocks=131072 block_size=512
//! ringbolt perf --filename=null:1g --rw=randread --iodepth=128 --runtime=5s --time_based
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod cli;
mod commands;
mod config;
mod failure;
mod journal;
mod machine;
mod methods;
mod rpc;
mod say;
mod state;

use std::process::ExitCode;

use clap::Parser;

use crate::say::complain;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    match commands::run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            complain!("ringbolt: {failure}");
            failure.exit_code()
        }
    }
}

/// Help goes out whole; an error is one line, as everywhere.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // Nothing can be done where standard output is gone.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return ExitCode::from(2);
    }
    let text = error.to_string();
    let said = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let said: Vec<&str> = said.take_while(|line| !line.starts_with("Usage:")).collect();
    let said = said.join(" ").replacen("error: ", "", 1);
    complain!("ringbolt: {said}; `ringbolt --help` shows how");
    ExitCode::from(2)
}
