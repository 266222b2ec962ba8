//! `lab run`: measures, cell by cell.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use lab_experiments::doctor;
use lab_experiments::journal::{self, Journal};
use lab_experiments::locks::DeviceLocks;
use lab_experiments::processes::Processes;
use lab_experiments::runner::{self, Event, RunError, Setup, Summary};
use lab_experiments::session::{Network, NetworkTarget};
use lab_experiments::steady::Outcome;
use lab_experiments::target::{self, Device};
use lab_experiments::{CellRecord, Machine, Plan, Run as RunDirectory, RunWriter, SCHEMA, Scale};

use super::bench::{self, Bench, Found, duration};
use super::doctor::facts;
use super::served::Served;
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

#[derive(Args)]
#[command(after_help = "Examples:\n  ringbolt lab run quick --out results\n  \
    ringbolt lab run icpe24.fig2 --device /dev/nvme0n1\n  \
    ringbolt lab run icpe24 --paper --device /dev/nvme0n1 --destroy-data /dev/nvme0n1 --apply\n  \
    ringbolt lab run --resume results\n\n\
    Without --device and --file, as root, the lab makes loop devices over files of its own and removes them.\n\
    Each cell is stored when it is done; Ctrl-C ends the run and loses the current cell alone. Schedulers and\n\
    settings that were changed are put back, by the next lab command if this one is killed.")]
pub(crate) struct Run {
    #[command(flatten)]
    bench: Bench,
    /// Where the results go; by default a new directory named after the time
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with a run that was ended
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    resume: Option<PathBuf>,
    /// Change what distorts results (as `ringbolt lab doctor` lists it) for the time of the run
    #[arg(long)]
    apply: bool,
    /// Fill the devices and write them over until they are steady; --paper does, where data may be lost
    #[arg(long)]
    precondition: bool,
}

pub(crate) fn run(options: &Run) -> Result<(), CommandError> {
    bench::restore_left_behind();
    let mut found;
    let (folder, plan, done) = match &options.resume {
        Some(folder) => {
            let before = RunDirectory::open(folder).map_err(CommandError::usage)?;
            let mut again = options_of(&before, &options.bench)?;
            again.names = before.plan.selection.clone();
            found = again.find()?;
            let done = runner::done(&before);
            (folder.clone(), before.plan, done)
        }
        None => {
            found = options.bench.find()?;
            let folder = options.out.clone().unwrap_or_else(named_after_now);
            let plan = plan_of(options, &found);
            (folder, plan, BTreeSet::new())
        }
    };
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, stop.clone()).map_err(CommandError::environment)?;
    }
    let directory = journal::default_directory();
    let mut locks = DeviceLocks::new(&directory);
    let mut journal = Journal::begin(&directory)
        .map_err(|error| CommandError::environment(format!("{}: {error}", directory.display())))?;
    bench::guard(&mut journal)?;
    let mut result = measure(options, &mut found, plan, &folder, done, &mut journal, &mut locks, &stop);
    // The records stay locked until everything is as it was.
    locks.close_nodes();
    let problems = journal.restore();
    for problem in &problems {
        stderr_line!("{problem}");
    }
    if result.is_ok() && !problems.is_empty() {
        result = Err(CommandError::environment("not everything could be put back as it was"));
    }
    let disks = options.bench.disks.clone().unwrap_or_else(|| folder.join("disks"));
    // Only where it is empty, and it is nobody's loss where it is not.
    let _ = std::fs::remove_dir(disks);
    result
}

/// The options that a run was begun with, so far as they decide on devices.
fn options_of(before: &RunDirectory, given: &Bench) -> Result<Bench, CommandError> {
    use clap::Parser;
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: Bench,
        #[arg(long)]
        out: Option<PathBuf>,
        #[arg(long)]
        resume: Option<PathBuf>,
        #[arg(long)]
        apply: bool,
        #[arg(long)]
        precondition: bool,
    }
    if !given.names.is_empty() {
        return Err(CommandError::usage(
            "--resume goes on with what the run was begun with; name no experiments",
        ));
    }
    // `ringbolt lab run …`: what follows is ours.
    let words = before.plan.command.iter().skip(2).cloned();
    let line = Line::try_parse_from(words)
        .map_err(|error| CommandError::usage(format!("the run's command: {error}")))?;
    let _ = (line.out, line.resume, line.apply, line.precondition);
    Ok(line.bench)
}

pub(crate) fn named_after_now() -> PathBuf {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    PathBuf::from(format!("lab-{seconds}"))
}

fn plan_of(options: &Run, found: &Found) -> Plan {
    Plan {
        schema: SCHEMA,
        program: concat!("ringbolt ", env!("CARGO_PKG_VERSION")).into(),
        command: std::env::args().collect(),
        selection: options.bench.names.clone(),
        scale: found.scale.name().into(),
        seed: options.bench.seed.into(),
        generator: format!("{} ({})", found.generator.name, found.generator.program.display()),
        cores: found.cpus.clone(),
        targets: found.devices.iter().map(Device::as_target).collect(),
        experiments: found.experiments.clone(),
    }
}

#[expect(clippy::too_many_arguments, reason = "the parts of a run, which `run` owns and restores")]
fn measure(
    options: &Run,
    found: &mut Found,
    mut plan: Plan,
    folder: &Path,
    done: BTreeSet<String>,
    journal: &mut Journal,
    locks: &mut DeviceLocks,
    stop: &Arc<AtomicBool>,
) -> Result<(), CommandError> {
    let disks = options.bench.disks.clone().unwrap_or_else(|| folder.join("disks"));
    target::make(&mut found.devices, &disks, journal, locks, &found.host)
        .map_err(CommandError::environment)?;
    plan.targets = found.devices.iter().map(Device::as_target).collect();
    let names: Vec<String> = found.devices.iter().filter_map(|device| device.name.clone()).collect();
    let facts = facts(&found.host, &names);
    let distortions = doctor::examine(&found.host, &facts);
    if options.apply {
        for (path, value) in distortions.iter().flat_map(|one| &one.settings) {
            if let Err(error) = journal.set(path, value) {
                stderr_line!("{} = {value}: {error}", path.display());
            }
        }
    }
    let mut machine = Machine {
        schema: SCHEMA,
        collected_unix_ms: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64),
        collected_by: plan.program.clone(),
        facts: facts.to_json(),
        distortions: distortions.iter().map(|one| one.what.clone()).collect(),
    };
    let mut writer = match options.resume {
        Some(_) => RunWriter::append(folder),
        None => RunWriter::create(folder, &machine, &plan),
    }
    .map_err(CommandError::operation)?;
    let network = Targets {
        there: options.bench.network_targets(),
        device: found.devices.first(),
        folder,
        served: RefCell::new(None),
    };
    let setup = Setup {
        plan: &plan,
        devices: &found.devices,
        generator: &found.generator,
        generator_use: found.generator_use.clone(),
        own: &found.own,
        host: &found.host,
        done,
        network: &network,
        stop,
    };
    if options.precondition || (found.scale == Scale::Paper && real(&found.devices)) {
        let outcome = precondition(&setup, folder, journal.processes())?;
        machine.facts["preconditioning"] = serde_json::json!({ "outcome": outcome.to_string() });
        if !outcome.is_steady() {
            machine.distortions.push(outcome.to_string());
        }
        writer.learn(&machine).map_err(CommandError::operation)?;
    }
    let shown = std::io::stderr().is_terminal();
    let summary = runner::run(&setup, &mut writer, journal, locks, &mut |event| tell(&event, shown));
    finish(summary, folder)
}

/// Whether there is flash behind them that has a state worth preparing.
fn real(devices: &[Device]) -> bool {
    devices.iter().all(|device| device.kind == target::Kind::Block && device.writable)
}

fn precondition(
    setup: &Setup<'_>,
    folder: &Path,
    processes: &mut Processes,
) -> Result<Outcome, CommandError> {
    if let Some(device) = setup.devices.iter().find(|device| !device.writable) {
        let place = &device.place;
        return Err(CommandError::usage(format!(
            "--precondition writes over {place}: --destroy-data {place} allows it"
        )));
    }
    let outcome = runner::precondition(setup, folder, processes, &mut |line| stderr_line!("{line}"));
    let outcome = outcome.map_err(|error| failure(error, folder))?;
    stderr_line!("{outcome}");
    Ok(outcome)
}

/// Targets over the network: the user's, and our own over the first device, for as long as cells drive it.
struct Targets<'a> {
    there: Vec<NetworkTarget>,
    device: Option<&'a Device>,
    folder: &'a Path,
    served: RefCell<Option<Served>>,
}

impl Network for Targets<'_> {
    fn reach(&self, name: &str, processes: &mut Processes) -> Result<Option<NetworkTarget>, String> {
        let (true, Some(device)) = (name == "ringbolt", self.device) else {
            return self.there.reach(name, processes);
        };
        let mut served = self.served.borrow_mut();
        if served.is_none() {
            *served =
                Some(Served::start(device, self.folder, processes).map_err(|failure| failure.to_string())?);
        }
        let target = served.as_ref().map(|served| NetworkTarget {
            name: name.into(),
            uri: served.uri.clone(),
            process: Some(served.process()),
        });
        Ok(target)
    }

    fn leave(&self) {
        drop(self.served.borrow_mut().take());
    }
}

fn tell(event: &Event<'_>, shown: bool) {
    match event {
        Event::Begins { number, total, left_s, experiment, cell } => {
            let varied = |name: &str| cell.parameters.get(name).map(|value| format!(" {name}={value}"));
            let words: String =
                ["devices", "jobs", "iodepth", "background"].iter().filter_map(|name| varied(name)).collect();
            let line =
                format!("[{number}/{total}] {experiment} {}{words}, {} left", cell.series, duration(*left_s));
            if shown {
                // Over the line before, which was perhaps longer.
                let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("\r\x1b[K{line}"));
            } else {
                stderr_line!("{line}");
            }
        }
        Event::Ends(CellRecord { failed: Some(said), experiment, series, .. }) => {
            let clear = if shown { "\r\x1b[K" } else { "" };
            stderr_line!("{clear}{experiment} {series} failed: {said}");
        }
        Event::Ends(_) => {}
    }
}

fn failure(error: RunError, folder: &Path) -> CommandError {
    let text = format!("{}: {error}", folder.display());
    match error {
        RunError::Store(_) | RunError::File { .. } | RunError::Failing(_) => CommandError::operation(text),
        RunError::DeviceGone(_) => CommandError::environment(text),
    }
}

fn finish(summary: Result<Summary, RunError>, folder: &Path) -> Result<(), CommandError> {
    if std::io::stderr().is_terminal() {
        stderr_line!("");
    }
    let summary = summary.map_err(|error| failure(error, folder))?;
    let before = if summary.before > 0 { format!(", {} before", summary.before) } else { String::new() };
    stdout_line!(
        "{}: {} cells measured{before}, {} cannot run here, {} failed",
        folder.display(),
        summary.measured,
        summary.skipped,
        summary.failed
    );
    if summary.stopped {
        return Err(CommandError::operation(format!(
            "stopped; `ringbolt lab run --resume {}` goes on",
            folder.display()
        )));
    }
    if summary.failed > 0 {
        return Err(CommandError::operation(format!(
            "{} cells failed; `ringbolt lab run --resume {}` tries them again",
            summary.failed,
            folder.display()
        )));
    }
    Ok(())
}
