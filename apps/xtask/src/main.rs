//! Benchmarks, and checks of the repository that Cargo and Clippy cannot make. `./x bench` and `./x test`
//! run them.
//!
//! ```text
//! cargo run -p ringbolt-xtask -- bench --list
//! cargo run -p ringbolt-xtask -- layers
//! cargo run -p ringbolt-xtask -- lines
//! cargo run -p ringbolt-xtask -- docs
//! ```
#![forbid(unsafe_code)]

mod bench;
mod circles;
mod docs;
mod layers;
mod lines;
mod metadata;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Benchmarks of Ringbolt, and checks of its repository.
#[derive(Parser)]
#[command(name = "xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    /// Measures Ringbolt (IOPS, latency, CPU time and instructions per I/O) and compares it with SPDK's figures.
    Bench(bench::BenchOptions),
    /// Connects to a namespace and keeps the connection open: the host of the idle benchmark.
    #[command(hide = true)]
    IdleHost {
        /// nvme+tcp://HOST:PORT/NQN?ns=N
        uri: String,
    },
    /// Checks that crates depend only on lower layers, are documented and forbid unsafe code, and that no
    /// more of their files import each other in circles than did.
    Layers,
    /// Counts the code of each crate: lines of src/ without comments, blank lines and tests. sim/, control/ and
    /// targets/shell are summed apart.
    Lines,
    /// Checks the documents: links, columns, paragraphs of the architecture, the list of crates.
    Docs {
        /// Wrap paragraphs and list items with lines that are too wide first.
        #[arg(long)]
        wrap: bool,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    match Arguments::parse().command {
        XtaskCommand::Bench(options) => bench::run(&options),
        XtaskCommand::IdleHost { uri } => bench::idle_host(&uri).map(|()| ExitCode::SUCCESS),
        XtaskCommand::Lines => {
            let metadata = metadata::CargoMetadata::of_this_workspace()?;
            println!("{}", lines::render(&lines::count(&metadata)?));
            Ok(ExitCode::SUCCESS)
        }
        XtaskCommand::Docs { wrap } => {
            let metadata = metadata::CargoMetadata::of_this_workspace()?;
            if wrap {
                for path in docs::wrap_all(metadata.root(), &docs::read_all(metadata.root())?)? {
                    println!("{}: wrapped", path.display());
                }
            }
            let documents = docs::read_all(metadata.root())?;
            let findings = docs::check(metadata.root(), &documents, &metadata.folders());
            findings.iter().for_each(|finding| eprintln!("{finding}"));
            println!("{} documents, {} findings", documents.len(), findings.len());
            Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        XtaskCommand::Layers => {
            let metadata = metadata::CargoMetadata::of_this_workspace()?;
            let mut findings = layers::check(&metadata, |path| std::fs::read_to_string(path));
            findings.extend(circles::check(&metadata)?);
            for finding in &findings {
                eprintln!("{finding}");
            }
            if findings.is_empty() {
                println!("{} crates obey the layering rules", metadata.members().count());
                return Ok(ExitCode::SUCCESS);
            }
            eprintln!(
                "{} findings; the rules are in apps/xtask/src/layers.rs and circles.rs",
                findings.len()
            );
            Ok(ExitCode::FAILURE)
        }
    }
}
