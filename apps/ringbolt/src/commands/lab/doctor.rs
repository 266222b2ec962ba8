//! `lab doctor`: what about this machine distorts results, and the command that changes it.

use std::path::Path;

use clap::Args;
use experiments::doctor::{self, Distortion, Facts};
use experiments::host::Host;
use experiments::journal::{self, Journal};
use serde_json::json;

use super::bench;
use crate::failure::Failure;
use crate::say::say;

#[derive(Args)]
#[command(
    after_help = "Examples:\n  ringbolt lab doctor\n  ringbolt lab doctor --device /dev/nvme0n1 --json\n  \
    ringbolt lab doctor --apply      # changes what distorts, until Ctrl-C\n  ringbolt lab doctor --restore\n\n\
    Without --apply nothing is changed. `ringbolt lab run --apply` changes the same for the time of a run."
)]
pub(crate) struct Doctor {
    /// As JSON
    #[arg(long)]
    json: bool,
    /// The devices that are meant; by default all
    #[arg(long, value_name = "DEVICE")]
    device: Vec<String>,
    /// Change what distorts results, wait for Ctrl-C, and put it back
    #[arg(long, conflicts_with = "restore")]
    apply: bool,
    /// Put back what a run that was killed has left
    #[arg(long)]
    restore: bool,
}

pub(crate) fn run(options: &Doctor) -> Result<(), Failure> {
    let restored = bench::restore_left_behind();
    if options.restore {
        if restored == 0 {
            say!("nothing was left to put back");
        }
        return Ok(());
    }
    let host = Host::default();
    let mut names = Vec::new();
    for device in &options.device {
        let name = host.block_name(Path::new(device));
        names.push(name.ok_or_else(|| {
            Failure::usage(format!("--device {device}: no whole block device of that name"))
        })?);
    }
    let facts = facts(&host, &names);
    let found = doctor::examine(&host, &facts);
    if options.json {
        let document = json!({ "facts": facts.to_json(), "distortions": found });
        say!("{}", serde_json::to_string_pretty(&document).map_err(Failure::work)?);
    } else {
        show(&facts, &found);
    }
    if options.apply { apply(&found) } else { Ok(()) }
}

/// Facts of this machine.
pub(crate) fn facts(host: &Host, names: &[String]) -> Facts {
    let ring =
        match sys::Events::new(&sys::Config { engine: Some(sys::Engine::Uring), ..sys::Config::default() }) {
            Ok(_) => "yes".to_string(),
            Err(error) => error.to_string(),
        };
    Facts::read(host, names, experiments::counting(), ring)
}

fn show(facts: &Facts, found: &[Distortion]) {
    let cpu = &facts.cpu;
    let known = |state: Option<bool>| state.map_or("unknown", |on| if on { "on" } else { "off" });
    say!(
        "Processor  {}, {} online{}",
        cpu.model,
        cpu.cpus.len(),
        if cpu.virtualised { ", virtual" } else { "" }
    );
    say!(
        "           SMT {}, turbo {}, governor {}",
        known(cpu.smt),
        known(cpu.turbo),
        or_dash(&cpu.governors.join(", "))
    );
    say!("Kernel     {}", facts.kernel.release);
    say!("io_uring   {}", facts.io_uring);
    for (name, state) in &facts.counters {
        say!("Counter    {name:<18} {state}");
    }
    for block in &facts.devices {
        say!(
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
    say!("");
    if found.is_empty() {
        say!("Nothing here is known to distort results.");
    }
    for one in found {
        say!("! {}", one.what);
        if let Some(command) = &one.command {
            say!("    {command}");
        }
    }
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

fn apply(found: &[Distortion]) -> Result<(), Failure> {
    let mut signals =
        signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM])
            .map_err(Failure::machine)?;
    let mut journal = Journal::begin(&journal::default_directory()).map_err(Failure::machine)?;
    let mut refused = Vec::new();
    for (path, value) in found.iter().flat_map(|one| &one.settings) {
        if let Err(error) = journal.set(path, value) {
            refused.push(format!("{} = {value}: {error}", path.display()));
        }
    }
    let changes = journal.changes();
    for change in &changes {
        say!("changed {change}");
    }
    for line in &refused {
        say!("could not change {line}");
    }
    if changes.is_empty() {
        say!("nothing was changed");
    } else {
        say!("Ctrl-C puts it back");
        signals.forever().next();
    }
    let problems = journal.restore();
    if problems.is_empty() { Ok(()) } else { Err(Failure::machine(problems.join("; "))) }
}
