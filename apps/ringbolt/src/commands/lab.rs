//! `ringbolt lab`: one module for each of its commands.

mod advise;
mod compare;
mod doctor;
mod export;
mod files;
mod import;
mod list;
mod options;
mod plan;
mod report;
mod run;
mod target_process;
mod watchdog;

use clap::Subcommand;

use crate::command_error::CommandError;

/// Commands of `ringbolt lab`.
#[derive(Subcommand)]
pub(crate) enum LabCommand {
    /// Report what distorts results on this machine, and how to change it
    Doctor(doctor::DoctorArgs),
    /// List the experiments
    List(list::ExperimentListArgs),
    /// Report what would run on this machine, for how long, and why some cells cannot run
    Plan(Box<plan::PlanArgs>),
    /// Run experiments and store the results
    Run(Box<run::RunArgs>),
    /// Render a run as one HTML page
    Report(report::ReportArgs),
    /// Report the differences between two runs
    Compare(compare::CompareArgs),
    /// Recommend an API and a scheduler, with the evidence
    Advise(advise::AdviseArgs),
    /// Convert a run to CSV or JSON
    Export(export::ExportArgs),
    /// Convert fio's output to one row for each job and direction
    Import(import::ImportArgs),
    /// Kill the processes of a run when it ends; `lab run` starts it
    #[command(hide = true)]
    Watchdog,
}

/// Runs a command.
pub(crate) fn run(command: LabCommand) -> Result<(), CommandError> {
    match command {
        LabCommand::Doctor(options) => doctor::run(&options),
        LabCommand::List(options) => list::run(&options),
        LabCommand::Plan(options) => plan::run(&options),
        LabCommand::Run(options) => run::run(&options),
        LabCommand::Report(options) => report::run(&options),
        LabCommand::Compare(options) => compare::run(&options),
        LabCommand::Advise(options) => advise::run(&options),
        LabCommand::Export(options) => export::run(&options),
        LabCommand::Import(options) => import::run(&options),
        LabCommand::Watchdog => watchdog::run(),
    }
}
