//! `ringbolt lab run`: measures experiments cell by cell.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use lab_experiments::capabilities::{NetworkTarget, NetworkTargets};
use lab_experiments::devices::{self, Device};
use lab_experiments::doctor;
use lab_experiments::journal::{self, Journal};
use lab_experiments::locks::DeviceLocks;
use lab_experiments::processes::RunProcesses;
use lab_experiments::runner::{self, ExperimentError, ExperimentEvent, ExperimentSummary, RunSetup};
use lab_experiments::steady::PreconditionOutcome;
use lab_experiments::{CellRecord, MachineRecord, RunDirectory, RunPlan, RunWriter, SCHEMA, Scale};

use super::doctor::facts;
use super::options::{self, ExperimentArgs, ResolvedRun, duration};
use super::target_process::TargetProcess;
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

#[derive(Args)]
#[command(after_help = "Examples:\n  ringbolt lab run quick --out results\n  \
    ringbolt lab run icpe24.fig2 --device /dev/nvme0n1\n  \
    ringbolt lab run icpe24 --paper --device /dev/nvme0n1 --destroy-data /dev/nvme0n1 --apply\n  \
    ringbolt lab run --self-check --device /dev/nvme0n1\n  \
    ringbolt lab run --resume results\n\n\
    Without --device and --file, as root, the lab creates loop devices over files and removes them. \
    Each cell is stored when it is complete; Ctrl-C ends the run and loses only the current cell. Changed \
    schedulers and settings are restored, by the next lab command if this one is killed.")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    experiments: ExperimentArgs,
    /// Directory for the results; by default a new one, named after the time
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Continue a run that ended early
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    resume: Option<PathBuf>,
    /// Measure everything twice, in alternating blocks, and report how many metrics differ, which none should, and
    /// what difference this machine resolves; without a name, the group `quick`
    #[arg(long)]
    self_check: bool,
    /// Change what distorts results, as listed by `ringbolt lab doctor`, for the duration of the run
    #[arg(long)]
    apply: bool,
    /// Precondition the devices: fill and overwrite them until they are in steady state; --paper implies it if data
    /// may be destroyed
    #[arg(long)]
    precondition: bool,
}

pub(crate) fn run(options: &RunArgs) -> Result<(), CommandError> {
    options::restore_killed_runs();
    // Before the generator is probed, so that no signal ends the run at once and leaves a part of it.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, stop.clone()).map_err(CommandError::environment)?;
    }
    let mut resolved;
    let (folder, plan, completed) = match &options.resume {
        Some(folder) => {
            let previous = RunDirectory::open(folder).map_err(CommandError::usage)?;
            let mut recorded = recorded_options(&previous, &options.experiments)?;
            recorded.names = previous.plan.selection.clone();
            resolved = recorded.resolve()?;
            let completed = runner::completed(&previous);
            (folder.clone(), previous.plan, completed)
        }
        None => {
            resolved = options.experiments.resolve_or(options.self_check.then_some("quick"))?;
            let folder = options.out.clone().unwrap_or_else(default_directory_name);
            let plan = new_plan(options, &resolved);
            (folder, plan, BTreeSet::new())
        }
    };
    if stop.load(Ordering::Relaxed) {
        return Err(CommandError::operation("stopped before the first cell"));
    }
    let directory = journal::default_directory();
    let mut locks = DeviceLocks::new(&directory);
    let mut journal = Journal::begin(&directory)
        .map_err(|error| CommandError::environment(format!("{}: {error}", directory.display())))?;
    options::start_watchdog(&mut journal)?;
    let mut result =
        measure(options, &mut resolved, plan, &folder, completed, &mut journal, &mut locks, &stop);
    // Locks of the devices are released last: nothing else may measure them until they are restored.
    journal.processes().share_locks(Vec::new());
    locks.close_nodes();
    let problems = journal.restore();
    for problem in &problems {
        stderr_line!("{problem}");
    }
    if result.is_ok() && !problems.is_empty() {
        result = Err(CommandError::environment("not everything could be restored"));
    }
    let disks = options.experiments.disks.clone().unwrap_or_else(|| folder.join("disks"));
    // Removed only if it is empty.
    let _ = std::fs::remove_dir(disks);
    result
}

/// The recorded options of a run, from which its devices are found again.
fn recorded_options(previous: &RunDirectory, given: &ExperimentArgs) -> Result<ExperimentArgs, CommandError> {
    use clap::Parser;
    #[derive(Parser)]
    struct RecordedCommand {
        #[command(flatten)]
        experiments: ExperimentArgs,
        #[arg(long)]
        out: Option<PathBuf>,
        #[arg(long)]
        resume: Option<PathBuf>,
        #[arg(long)]
        apply: bool,
        #[arg(long)]
        precondition: bool,
        #[arg(long)]
        self_check: bool,
    }
    if !given.names.is_empty() {
        return Err(CommandError::usage("--resume continues the recorded experiments; name none"));
    }
    // Skip `ringbolt lab`.
    let arguments = previous.plan.command.iter().skip(2).cloned();
    let line = RecordedCommand::try_parse_from(arguments)
        .map_err(|error| CommandError::usage(format!("the run's command: {error}")))?;
    let _ = (line.out, line.resume, line.apply, line.precondition, line.self_check);
    Ok(line.experiments)
}

pub(crate) fn default_directory_name() -> PathBuf {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    PathBuf::from(format!("lab-{seconds}"))
}

/// Repetitions of each side of a self-check, at least: with fewer, every interval is so wide that nothing differs.
const SELF_CHECK_REPETITIONS_MIN: u32 = 3;

/// A seed that differs between runs, so that two runs do not share an order by chance of the default.
fn new_order_seed() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u32)
}

fn new_plan(options: &RunArgs, resolved: &ResolvedRun) -> RunPlan {
    let mut experiments = resolved.experiments.clone();
    if options.self_check {
        for cell in experiments.iter_mut().flat_map(|experiment| &mut experiment.cells) {
            cell.repetitions = 2 * cell.repetitions.max(SELF_CHECK_REPETITIONS_MIN);
        }
    }
    RunPlan {
        schema: SCHEMA,
        program: concat!("ringbolt ", env!("CARGO_PKG_VERSION")).into(),
        command: std::env::args().collect(),
        selection: resolved.names.clone(),
        scale: resolved.scale.name().into(),
        seed: options.experiments.seed.into(),
        order_seed: options.experiments.order_seed.unwrap_or_else(new_order_seed).into(),
        generator: format!("{} ({})", resolved.generator.name, resolved.generator.program.display()),
        cores: resolved.cpus.clone(),
        targets: resolved.devices.iter().map(Device::to_planned).collect(),
        self_check: options.self_check,
        experiments,
    }
}

/// Reports the self-check of a completed run.
///
/// # Errors
/// More metrics differ than by chance: what this machine finds cannot be trusted.
fn report_self_check(folder: &Path) -> Result<(), CommandError> {
    let run = RunDirectory::open(folder).map_err(CommandError::operation)?;
    let check = lab_report::compare::self_check(&run);
    stdout_line!("{}", check.text().trim_end());
    if check.passes() {
        return Ok(());
    }
    Err(CommandError::operation(if check.compared == 0 {
        "the self-check compared nothing: no cell was measured on both sides".to_string()
    } else {
        "the self-check failed: equal measurements differ on this machine, so other differences mean little; \
         `ringbolt lab doctor` lists possible causes"
            .to_string()
    }))
}

#[expect(clippy::too_many_arguments, reason = "the parts of a run, which `run` owns and restores")]
fn measure(
    options: &RunArgs,
    resolved: &mut ResolvedRun,
    mut plan: RunPlan,
    folder: &Path,
    completed: BTreeSet<String>,
    journal: &mut Journal,
    locks: &mut DeviceLocks,
    stop: &Arc<AtomicBool>,
) -> Result<(), CommandError> {
    let disks = options.experiments.disks.clone().unwrap_or_else(|| folder.join("disks"));
    devices::create(&mut resolved.devices, &disks, journal, locks, &resolved.host)
        .map_err(CommandError::environment)?;
    plan.targets = resolved.devices.iter().map(Device::to_planned).collect();
    let names: Vec<String> = resolved.devices.iter().filter_map(|device| device.name.clone()).collect();
    let facts = facts(&resolved.host, &names);
    let distortions = doctor::examine(&resolved.host, &facts);
    if options.apply {
        for (path, value) in distortions.iter().flat_map(|one| &one.settings) {
            if let Err(error) = journal.set(path, value) {
                stderr_line!("{} = {value}: {error}", path.display());
            }
        }
    }
    let mut machine = MachineRecord {
        schema: SCHEMA,
        collected_unix_ms: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64),
        collected_by: plan.program.clone(),
        facts: facts.to_json(),
        distortions: distortions.iter().map(|one| one.what.clone()).collect(),
    };
    let mut writer = match options.resume {
        Some(_) => RunWriter::resume(folder),
        None => RunWriter::create(folder, &machine, &plan),
    }
    .map_err(CommandError::operation)?;
    let network = RunTargets {
        user_targets: options.experiments.network_targets(),
        device: resolved.devices.first(),
        folder,
        target_process: RefCell::new(None),
    };
    let setup = RunSetup {
        plan: &plan,
        devices: &resolved.devices,
        generator: &resolved.generator,
        generator_info: resolved.generator_info.clone(),
        bdev_generator: &resolved.bdev_generator,
        host: &resolved.host,
        completed,
        network: &network,
        stop,
    };
    if options.precondition || (resolved.scale == Scale::Paper && are_flash_devices(&resolved.devices)) {
        journal.processes().share_locks(locks.files().map_err(CommandError::environment)?);
        let outcome = precondition(&setup, folder, journal.processes())?;
        machine.facts["preconditioning"] = serde_json::json!({ "outcome": outcome.to_string() });
        if !outcome.is_steady() {
            machine.distortions.push(outcome.to_string());
        }
        writer.update_machine(&machine).map_err(CommandError::operation)?;
    }
    stderr_line!("order seed {}: each block of repetitions measures every cell once", plan.order_seed);
    let is_terminal = std::io::stderr().is_terminal();
    let summary =
        runner::run(&setup, &mut writer, journal, locks, &mut |event| print_event(&event, is_terminal));
    finish(summary, folder)?;
    if plan.self_check { report_self_check(folder) } else { Ok(()) }
}

/// Whether all devices can be preconditioned: writable block devices.
fn are_flash_devices(devices: &[Device]) -> bool {
    devices.iter().all(|device| device.kind == devices::DeviceKind::Block && device.writable)
}

fn precondition(
    setup: &RunSetup<'_>,
    folder: &Path,
    processes: &mut RunProcesses,
) -> Result<PreconditionOutcome, CommandError> {
    if let Some(device) = setup.devices.iter().find(|device| !device.writable) {
        let location = &device.location;
        return Err(CommandError::usage(format!(
            "--precondition overwrites {location}: --destroy-data {location} allows it"
        )));
    }
    let outcome = runner::precondition(setup, folder, processes, &mut |line| stderr_line!("{line}"));
    let outcome = outcome.map_err(|error| failure(error, folder))?;
    stderr_line!("{outcome}");
    Ok(outcome)
}

/// NVMe-oF targets: the user's, and one of ours over the first device, which runs only while cells drive it.
struct RunTargets<'a> {
    user_targets: Vec<NetworkTarget>,
    device: Option<&'a Device>,
    folder: &'a Path,
    target_process: RefCell<Option<TargetProcess>>,
}

impl NetworkTargets for RunTargets<'_> {
    fn start(&self, name: &str, processes: &mut RunProcesses) -> Result<Option<NetworkTarget>, String> {
        let (true, Some(device)) = (name == "ringbolt", self.device) else {
            return self.user_targets.start(name, processes);
        };
        let mut target_process = self.target_process.borrow_mut();
        if target_process.is_none() {
            *target_process = Some(
                TargetProcess::start(device, self.folder, processes)
                    .map_err(|failure| failure.to_string())?,
            );
        }
        let target = target_process.as_ref().map(|target_process| NetworkTarget {
            name: name.into(),
            uri: target_process.uri.clone(),
            process: Some(target_process.process()),
        });
        Ok(target)
    }

    fn stop_all(&self) {
        drop(self.target_process.borrow_mut().take());
    }
}

fn print_event(event: &ExperimentEvent<'_>, is_terminal: bool) {
    match event {
        ExperimentEvent::CellStarted { number, total, left_s, experiment, cell } => {
            let varied = |name: &str| cell.parameters.get(name).map(|value| format!(" {name}={value}"));
            let words: String =
                ["devices", "jobs", "iodepth", "background"].iter().filter_map(|name| varied(name)).collect();
            let line =
                format!("[{number}/{total}] {experiment} {}{words}, {} left", cell.series, duration(*left_s));
            if is_terminal {
                // Overwrite the previous line, which may be longer.
                let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("\r\x1b[K{line}"));
            } else {
                stderr_line!("{line}");
            }
        }
        ExperimentEvent::CellFinished(CellRecord { failed: Some(message), experiment, series, .. }) => {
            let clear = if is_terminal { "\r\x1b[K" } else { "" };
            stderr_line!("{clear}{experiment} {series} failed: {message}");
        }
        ExperimentEvent::CellFinished(_) => {}
    }
}

fn failure(error: ExperimentError, folder: &Path) -> CommandError {
    let text = format!("{}: {error}", folder.display());
    match error {
        ExperimentError::Results(_) | ExperimentError::File { .. } | ExperimentError::TooManyFailures(_) => {
            CommandError::operation(text)
        }
        ExperimentError::DeviceRemoved(_) => CommandError::environment(text),
    }
}

fn finish(summary: Result<ExperimentSummary, ExperimentError>, folder: &Path) -> Result<(), CommandError> {
    if std::io::stderr().is_terminal() {
        stderr_line!("");
    }
    let summary = summary.map_err(|error| failure(error, folder))?;
    let previous =
        if summary.already_done > 0 { format!(", {} earlier", summary.already_done) } else { String::new() };
    stdout_line!(
        "{}: {} cells measured{previous}, {} cannot run here, {} failed",
        folder.display(),
        summary.measured,
        summary.skipped,
        summary.failed
    );
    if summary.stopped {
        return Err(CommandError::operation(format!(
            "stopped; `ringbolt lab run --resume {}` continues it",
            folder.display()
        )));
    }
    if summary.failed > 0 {
        return Err(CommandError::operation(format!(
            "{} cells failed; `ringbolt lab run --resume {}` repeats them",
            summary.failed,
            folder.display()
        )));
    }
    stdout_line!("the report: ringbolt lab report {}", folder.display());
    Ok(())
}
