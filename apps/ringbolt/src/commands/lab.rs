//! The lab: each of its commands has a file of its own.

mod advise;
mod bench;
mod compare;
mod doctor;
mod export;
mod files;
mod import;
mod list;
mod plan;
mod report;
mod run;
mod served;
mod watchdog;

use clap::Subcommand;

use crate::command_error::CommandError;

/// The lab's commands.
#[derive(Subcommand)]
pub(crate) enum Lab {
    /// Say what about this machine distorts results, and how to change it
    Doctor(doctor::Doctor),
    /// List the experiments
    List(list::List),
    /// Say what would run here, for how long, and what cannot and why
    Plan(Box<plan::Plan>),
    /// Run experiments and keep what they measure
    Run(Box<run::Run>),
    /// Make one HTML page of a run
    Report(report::Report),
    /// Say what changed between two runs
    Compare(compare::Compare),
    /// Name the API and the scheduler to use, with the evidence
    Advise(advise::Advise),
    /// Write a run as CSV or JSON
    Export(export::Export),
    /// Read what fio wrote, and print one row for each job and direction
    Import(import::Import),
    /// Kill the processes of a run when it has ended; `lab run` starts it
    #[command(hide = true)]
    Watchdog,
}

/// Runs one of them to its end.
pub(crate) fn run(command: Lab) -> Result<(), CommandError> {
    match command {
        Lab::Doctor(options) => doctor::run(&options),
        Lab::List(options) => list::run(&options),
        Lab::Plan(options) => plan::run(&options),
        Lab::Run(options) => run::run(&options),
        Lab::Report(options) => report::run(&options),
        Lab::Compare(options) => compare::run(&options),
        Lab::Advise(options) => advise::run(&options),
        Lab::Export(options) => export::run(&options),
        Lab::Import(options) => import::run(&options),
        Lab::Watchdog => watchdog::run(),
    }
}
