//! Checks of this repository that Cargo and Clippy cannot make. `./x test` runs them.
//!
//! ```text
//! cargo run -p ringbolt-xtask -- layers
//! ```
#![forbid(unsafe_code)]

mod layers;
mod metadata;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Checks of this repository that Cargo and Clippy cannot make.
#[derive(Parser)]
#[command(name = "xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Checks that crates depend only on what their folder allows, and start as the house asks.
    Layers,
}

fn main() -> anyhow::Result<ExitCode> {
    match Arguments::parse().command {
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
