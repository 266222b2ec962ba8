//! `ringbolt lab doctor`: reports what distorts results on this machine, and how to change it.

use std::path::Path;

use clap::Args;
use lab_experiments::doctor::{self, Distortion, MachineFacts};
use lab_experiments::host::HostInfo;
use lab_experiments::journal::{self, Journal};
use lab_experiments::loops;
use serde_json::json;

use super::options;
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

#[derive(Args)]
#[command(
    after_help = "Examples:\n  ringbolt lab doctor\n  ringbolt lab doctor --device /dev/nvme0n1 --json\n  \
    ringbolt lab doctor --apply      # change what distorts results, until Ctrl-C\n  ringbolt lab doctor --restore\n\n\
    Without --apply nothing is changed. `ringbolt lab run --apply` changes the same for the time of a run."
)]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Block devices to report; by default all
    #[arg(long, value_name = "DEVICE")]
    device: Vec<String>,
    /// Change what distorts results, wait for Ctrl-C, and restore it
    #[arg(long, conflicts_with = "restore")]
    apply: bool,
    /// Restore what a killed run has changed
    #[arg(long)]
    restore: bool,
}

pub(crate) fn run(options: &DoctorArgs) -> Result<(), CommandError> {
    let (restored, problems) = options::restore_killed_runs();
    if options.restore {
        // Without a journal: left by a run of another user, or by another program.
        loops::on_deleted_files().iter().for_each(|line| stderr_line!("{line}"));
        if problems > 0 {
            return Err(CommandError::environment("not everything could be restored"));
        }
        if restored == 0 {
            stdout_line!("nothing to restore");
        }
        return Ok(());
    }
    let host = HostInfo::default();
    let mut names = Vec::new();
    for device in &options.device {
        let name = host.block_name(Path::new(device));
        names.push(name.ok_or_else(|| {
            CommandError::usage(format!("--device {device}: no whole block device of that name"))
        })?);
    }
    let facts = facts(&host, &names);
    let distortions = doctor::examine(&host, &facts);
    if options.json {
        let document = json!({ "facts": facts.to_json(), "distortions": distortions });
        stdout_line!("{}", serde_json::to_string_pretty(&document).map_err(CommandError::operation)?);
    } else {
        print_report(&facts, &distortions);
    }
    if options.apply { apply(&distortions) } else { Ok(()) }
}

/// Reads the properties of this machine and of these block devices.
pub(crate) fn facts(host: &HostInfo, names: &[String]) -> MachineFacts {
    let ring = match os::EventLoop::new(&os::EventLoopConfig {
        backend: Some(os::EventBackend::Uring),
        ..os::EventLoopConfig::default()
    }) {
        Ok(_) => "yes".to_string(),
        Err(error) => error.to_string(),
    };
    MachineFacts::read(host, names, lab_experiments::available_counters(), ring)
}

fn print_report(facts: &MachineFacts, distortions: &[Distortion]) {
    let cpu = &facts.cpu;
    let known = |state: Option<bool>| state.map_or("unknown", |on| if on { "on" } else { "off" });
    stdout_line!(
        "Processor  {}, {} online{}",
        cpu.model,
        cpu.cpus.len(),
        if cpu.virtualised { ", virtual" } else { "" }
    );
    stdout_line!(
        "           SMT {}, turbo {}, governor {}",
        known(cpu.smt),
        known(cpu.turbo),
        or_dash(&cpu.governors.join(", "))
    );
    stdout_line!("Kernel     {}", facts.kernel.release);
    stdout_line!("io_uring   {}", facts.io_uring);
    for (name, state) in &facts.counters {
        stdout_line!("Counter    {name:<18} {state}");
    }
    for block in &facts.devices {
        stdout_line!(
            "Device     {}: {} {}, {:.1} GiB, {} queues, scheduler {} of {}{}",
            block.name,
            or_dash(&block.model),
            block.firmware,
            block.size_bytes as f64 / f64::from(1 << 30),
            block.queues,
            or_dash(&block.scheduler),
            block.schedulers.join(" "),
            if block.polls { ", polls" } else { "" },
        );
    }
    stdout_line!("");
    if distortions.is_empty() {
        stdout_line!("Nothing here is known to distort results.");
    }
    for one in distortions {
        stdout_line!("! {}", one.what);
        if let Some(command) = &one.command {
            stdout_line!("    {command}");
        }
    }
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

fn apply(distortions: &[Distortion]) -> Result<(), CommandError> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]);
    let mut signals = signals.map_err(CommandError::environment)?;
    let mut journal = Journal::begin(&journal::default_directory()).map_err(CommandError::environment)?;
    let mut refused = Vec::new();
    for (path, value) in distortions.iter().flat_map(|one| &one.settings) {
        if let Err(error) = journal.set(path, value) {
            refused.push(format!("{} = {value}: {error}", path.display()));
        }
    }
    let changes = journal.changes();
    for change in &changes {
        stdout_line!("changed {change}");
    }
    for line in &refused {
        stdout_line!("could not change {line}");
    }
    if changes.is_empty() {
        stdout_line!("nothing was changed");
    } else {
        stdout_line!("Ctrl-C restores it");
        signals.forever().next();
    }
    let problems = journal.restore();
    if problems.is_empty() { Ok(()) } else { Err(CommandError::environment(problems.join("; "))) }
}
