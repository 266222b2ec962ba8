//! Checks of this repository that Cargo and Clippy cannot make, and its benchmarks. `./x test` and
//! `./x bench` run them.
//!
//! ```text
//! cargo run -p ringbolt-xtask -- bench --list
//! cargo run -p ringbolt-xtask -- layers
//! ```
#![forbid(unsafe_code)]

mod bench;
mod layers;
mod metadata;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Checks of this repository that Cargo and Clippy cannot make, and its benchmarks.
#[derive(Parser)]
#[command(name = "xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures Ringbolt: I/Os a second, latency, CPU and instructions an I/O, beside SPDK's figures.
    Bench(bench::Bench),
    /// Connects to a namespace and keeps the connection: the idle benchmark's other half.
    #[command(hide = true)]
    IdleHost {
        /// nvme+tcp://HOST:PORT/NQN?ns=N
        uri: String,
    },
    /// Checks that crates depend only on what their folder allows, and start as the house asks.
    Layers,
}

fn main() -> anyhow::Result<ExitCode> {
    match Arguments::parse().command {
        Command::Bench(options) => bench::run(&options),
        Command::IdleHost { uri } => bench::idle_host(&uri).map(|()| ExitCode::SUCCESS),
        Command::Layers => {
            let metadata = metadata::Metadata::of_this_workspace()?;
            let findings = layers::check(&metadata, |path| std::fs::read_to_string(path));
            for finding in &findings {
                eprintln!("{finding}");
            }
            if findings.is_empty() {
                println!("{} crates keep the layers", metadata.members().count());
                return Ok(ExitCode::SUCCESS);
            }
            eprintln!("{} findings; the rules stand in apps/xtask/src/layers.rs", findings.len());
            Ok(ExitCode::FAILURE)
        }
    }
}
