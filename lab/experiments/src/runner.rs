//! Runs a plan cell by cell, in the order of [`measurement_order`]; the record of each is on the disk before the next
//! one starts.
//!
//! However a run ends (last cell, SIGINT, SIGKILL, a full disk, a removed device), all completed cells are stored,
//! and the machine's settings are restored: by the run itself, or by the next lab command if it was killed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::capabilities::{NetworkTarget, NetworkTargets};
use crate::definition::ExperimentDefinition;
use crate::devices::{Device, DeviceKind};
use crate::fio_output;
use crate::generator::{self, GeneratorEvent, GeneratorExit, GeneratorInput, LoadGenerator};
use crate::host::HostInfo;
use crate::job_file::CellJob;
use crate::journal::Journal;
use crate::locks::DeviceLocks;
use crate::meters::CellMeters;
use crate::order::{PlannedMeasurement, measurement_order};
use crate::processes::RunProcesses;
use crate::record::{
    CellRecord, GeneratorInfo, ParameterValue, PlannedCell, RunDirectory, RunPlan, RunWriter, SchedulerState,
    cell_key,
};
use crate::settings::{SchedulerSetter, SettingsSnapshot};
use crate::steady::{self, PreconditionOutcome, ROUND_S};

/// Consecutive failed cells after which the run ends: the cause is not the cell.
const CONSECUTIVE_FAILURES_MAX: usize = 5;

/// Why a run ended early, in one line.
#[derive(Debug, thiserror::Error)]
pub enum ExperimentError {
    /// A record cannot be stored.
    #[error("{0}; completed cells are stored")]
    Results(#[from] crate::record::RunDirectoryError),
    /// A device was removed.
    #[error("{0} was removed; completed cells are stored, and --resume continues")]
    DeviceRemoved(String),
    /// Several cells in a row failed.
    #[error("{CONSECUTIVE_FAILURES_MAX} cells failed in a row, the last with: {0}")]
    TooManyFailures(String),
    /// A file of the run cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error.
        error: std::io::Error,
    },
}

/// The inputs of a run.
pub struct RunSetup<'a> {
    /// The plan.
    pub plan: &'a RunPlan,
    /// The devices, all of which exist.
    pub devices: &'a [Device],
    /// The generator for kernel APIs.
    pub generator: &'a LoadGenerator,
    /// Its version and cost.
    pub generator_info: GeneratorInfo,
    /// The generator for bdevs.
    pub bdev_generator: &'a LoadGenerator,
    /// The machine.
    pub host: &'a HostInfo,
    /// Keys of the cells that are already measured.
    pub completed: BTreeSet<String>,
    /// NVMe-oF targets.
    pub network: &'a dyn NetworkTargets,
    /// Set by a signal handler to stop the run.
    pub stop: &'a AtomicBool,
}

/// Progress of a run.
#[derive(Debug)]
pub enum ExperimentEvent<'a> {
    /// A cell starts.
    CellStarted {
        /// Number of the cell, from 1.
        number: usize,
        /// Number of cells to run.
        total: usize,
        /// Expected remaining time including this cell, in seconds.
        left_s: f64,
        /// Id of the experiment.
        experiment: &'a str,
        /// The cell.
        cell: &'a PlannedCell,
    },
    /// A cell has finished, and its record is stored.
    CellFinished(&'a CellRecord),
}

/// Counts of a run that ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExperimentSummary {
    /// Cells that were measured.
    pub measured: usize,
    /// Cells that cannot run on this machine.
    pub skipped: usize,
    /// Cells that failed.
    pub failed: usize,
    /// Cells that had been measured before `--resume`.
    pub already_done: usize,
    /// Whether the run was stopped by the user.
    pub stopped: bool,
}

/// Runs the cells of a plan that are not completed.
///
/// # Errors
/// An error that affects all cells. A cell that fails is recorded instead.
pub fn run(
    setup: &RunSetup<'_>,
    writer: &mut RunWriter,
    journal: &mut Journal,
    locks: &mut DeviceLocks,
    on_event: &mut dyn FnMut(ExperimentEvent<'_>),
) -> Result<ExperimentSummary, ExperimentError> {
    let mut summary = ExperimentSummary::default();
    let mut schedulers = SchedulerSetter::default();
    let pending = pending(setup, &mut summary);
    let total = pending.len();
    let mut left: f64 = pending.iter().map(|run| run.seconds()).sum();
    let mut consecutive_failures = 0;
    for (number, run) in pending.iter().enumerate() {
        if setup.stop.load(Ordering::Relaxed) {
            summary.stopped = true;
            break;
        }
        if run.cell.skipped.is_none() {
            let cell = run.cell;
            on_event(ExperimentEvent::CellStarted {
                number: number + 1,
                total,
                left_s: left,
                experiment: run.experiment,
                cell,
            });
        }
        left -= run.seconds();
        let line = number + setup.completed.len();
        let Some(record) = CellRunner { setup, run, line, folder: writer.path() }.measure(
            journal,
            locks,
            &mut schedulers,
        )?
        else {
            summary.stopped = true;
            break;
        };
        writer.append(&record)?;
        on_event(ExperimentEvent::CellFinished(&record));
        match (&record.skipped, &record.failed) {
            (Some(_), _) => summary.skipped += 1,
            (_, Some(message)) => {
                summary.failed += 1;
                consecutive_failures += 1;
                if let Some(device) = setup.devices.iter().find(|device| !device.exists(setup.host)) {
                    return Err(ExperimentError::DeviceRemoved(device.location.clone()));
                }
                if consecutive_failures >= CONSECUTIVE_FAILURES_MAX {
                    return Err(ExperimentError::TooManyFailures(message.clone()));
                }
            }
            _ => {
                summary.measured += 1;
                consecutive_failures = 0;
            }
        }
    }
    Ok(summary)
}

/// Preconditions the devices as SNIA's specification requires: fills them, then overwrites them at random offsets
/// until they are in steady state.
///
/// # Errors
/// A generator that fails, or a file that cannot be written.
pub fn precondition(
    setup: &RunSetup<'_>,
    folder: &Path,
    processes: &mut RunProcesses,
    on_event: &mut dyn FnMut(String),
) -> Result<PreconditionOutcome, ExperimentError> {
    let count = setup.devices.len();
    on_event(format!(
        "filling {count} device(s), each by a job; then at most {} rounds of {ROUND_S} s of random writes, until the \
         last {} are steady",
        steady::ROUNDS_MAX,
        steady::WINDOW
    ));
    overwrite(setup, folder, processes, "write", "128k", None)?;
    let round = || {
        if setup.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let iops = overwrite(setup, folder, processes, "randwrite", "4k", Some(ROUND_S))?;
        Ok((!setup.stop.load(Ordering::Relaxed)).then_some(iops))
    };
    steady::run_rounds(round, on_event)
}

/// Overwrites all devices, each by a job, once or for `seconds`; returns the total IOPS.
fn overwrite(
    setup: &RunSetup<'_>,
    folder: &Path,
    processes: &mut RunProcesses,
    rw: &str,
    bs: &str,
    seconds: Option<u64>,
) -> Result<f64, ExperimentError> {
    let (file, output) = (folder.join("precondition.fio"), folder.join("precondition.json"));
    let mut text = format!(
        "[global]\nioengine=libaio\ndirect=1\nrw={rw}\nbs={bs}\niodepth=32\nnorandommap=1\ngroup_reporting=1\n"
    );
    if let Some(seconds) = seconds {
        text.push_str(&format!("time_based=1\nruntime={seconds}s\n"));
    }
    for (number, device) in setup.devices.iter().enumerate() {
        text.push_str(&format!("[fill{number}]\nfilename={}\nsize={}\n", device.location, device.size_bytes));
    }
    fs::write(&file, text).map_err(|error| ExperimentError::File { path: file.clone(), error })?;
    let limit = seconds.map_or(86_400.0, |seconds| seconds as f64);
    let command = setup.generator.command(&file, &output);
    let ended = generator::run(processes, &command, limit, setup.stop, &mut |_, _| {});
    match ended.map_err(|error| ExperimentError::File { path: setup.generator.program.clone(), error })? {
        GeneratorExit::Success => {}
        GeneratorExit::Stopped => return Ok(0.0),
        GeneratorExit::Failure(message) => return Err(ExperimentError::TooManyFailures(message)),
    }
    let text =
        fs::read_to_string(&output).map_err(|error| ExperimentError::File { path: output.clone(), error })?;
    let _ = (fs::remove_file(&file), fs::remove_file(&output));
    let (_, groups) = fio_output::parse(&text, |_| 1).map_err(ExperimentError::TooManyFailures)?;
    Ok(groups.iter().filter_map(|group| group.record.metrics.get("iops")).sum())
}

/// Keys of the cells that `--resume` skips: measured, or not possible on this machine.
pub fn completed(run: &RunDirectory) -> BTreeSet<String> {
    run.records.iter().filter(|record| record.failed.is_none()).map(CellRecord::key).collect()
}

/// The last record of each cell and repetition; a repeated cell has several.
pub fn latest_records(run: &RunDirectory) -> Vec<&CellRecord> {
    let mut latest_records: Vec<&CellRecord> = Vec::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for record in &run.records {
        match places.entry(record.key()) {
            Entry::Occupied(location) => latest_records[*location.get()] = record,
            Entry::Vacant(location) => {
                location.insert(latest_records.len());
                latest_records.push(record);
            }
        }
    }
    latest_records
}

/// One repetition of a cell.
struct PlannedRun<'a> {
    experiment: &'a str,
    definition: Rc<ExperimentDefinition>,
    cell: &'a PlannedCell,
    measurement: PlannedMeasurement,
}

impl PlannedRun<'_> {
    fn seconds(&self) -> f64 {
        if self.cell.skipped.is_some() { 0.0 } else { self.cell.seconds }
    }
}

fn pending<'a>(setup: &RunSetup<'a>, summary: &mut ExperimentSummary) -> Vec<PlannedRun<'a>> {
    let mut pending = Vec::new();
    // A plan that this program cannot parse has no cells it could run.
    let parse = |text: &str| Rc::new(ExperimentDefinition::parse(text).unwrap_or_default());
    let definitions: Vec<Rc<ExperimentDefinition>> =
        setup.plan.experiments.iter().map(|experiment| parse(&experiment.definition)).collect();
    for measurement in measurement_order(setup.plan) {
        let experiment = &setup.plan.experiments[measurement.experiment];
        let cell = &experiment.cells[measurement.cell];
        if setup.completed.contains(&cell_key(&experiment.id, &cell.parameters, measurement.repetition)) {
            summary.already_done += 1;
            continue;
        }
        pending.push(PlannedRun {
            experiment: &experiment.id,
            definition: definitions[measurement.experiment].clone(),
            cell,
            measurement,
        });
    }
    pending
}

/// Runs one repetition of a cell.
struct CellRunner<'a> {
    setup: &'a RunSetup<'a>,
    run: &'a PlannedRun<'a>,
    line: usize,
    folder: &'a Path,
}

impl CellRunner<'_> {
    fn number(&self, name: &str) -> usize {
        self.run
            .cell
            .parameters
            .get(name)
            .and_then(ParameterValue::as_f64)
            .map_or(0, |value| value.max(0.0) as usize)
    }

    fn text(&self, name: &str) -> &str {
        self.run.cell.parameters.get(name).and_then(ParameterValue::as_str).unwrap_or("")
    }

    /// Returns the record, or `None` if the user stopped the run.
    fn measure(
        &self,
        journal: &mut Journal,
        locks: &mut DeviceLocks,
        schedulers: &mut SchedulerSetter,
    ) -> Result<Option<CellRecord>, ExperimentError> {
        let mut record = CellRecord::new(self.run.experiment, &self.run.cell.series);
        record.parameters = self.run.cell.parameters.clone();
        record.repetition = self.run.measurement.repetition;
        record.position = Some(self.run.measurement.position);
        record.started_unix_ms = now_ms();
        record.skipped = self.run.cell.skipped.clone();
        record.notes = self.run.cell.notes.clone();
        record.stand_in = self.run.cell.stand_in.clone();
        if record.skipped.is_some() {
            return Ok(Some(record));
        }
        let began = Instant::now();
        let devices = self.devices();
        let prepared = self.prepare(&devices, journal, schedulers).and_then(|settings| {
            let network = self.network_target(journal.processes(), locks)?;
            Ok((settings, network))
        });
        let (settings, network) = match prepared {
            Ok(prepared) => prepared,
            Err(message) => {
                record.failed = Some(message);
                return Ok(Some(record));
            }
        };
        let completed = self.generate(&devices, network.as_ref(), journal.processes(), &mut record)?;
        let changes = settings.changes();
        if !changes.is_empty() {
            let also = record.failed.take().map_or(String::new(), |message| format!("; {message}"));
            record.failed =
                Some(format!("{}: changed by another process while the cell ran{also}", changes.join("; ")));
        }
        record.schedulers = self.schedulers(&devices);
        record.duration_s = began.elapsed().as_secs_f64();
        Ok(completed.then_some(record))
    }

    fn devices(&self) -> Vec<Device> {
        let count = self.number("devices").max(1);
        self.setup.devices.iter().take(count).cloned().collect()
    }

    /// Sets scheduler and Kyber's targets. Returns the settings as read back, which must hold during the cell.
    fn prepare(
        &self,
        devices: &[Device],
        journal: &mut Journal,
        schedulers: &mut SchedulerSetter,
    ) -> Result<SettingsSnapshot, String> {
        journal.reapply()?;
        // Without a scheduler, use the studies' default, not what the previous cell set.
        let scheduler = Some(self.text("scheduler")).filter(|name| !name.is_empty()).unwrap_or("none");
        for device in devices {
            let Some(name) = &device.name else { continue };
            let queue = self.setup.host.path(&format!("sys/block/{name}/queue"));
            if !self.setup.host.block(name).schedulers.is_empty() {
                schedulers.switch_to(&queue, scheduler, journal)?;
            }
            for (parameter, file) in
                [("read_target_us", "read_lat_nsec"), ("write_target_us", "write_lat_nsec")]
            {
                if self.run.cell.parameters.contains_key(parameter) {
                    let file = queue.join("iosched").join(file);
                    let ns = (self.number(parameter) * 1000).to_string();
                    journal.set(&file, &ns).map_err(|error| format!("{}: {error}", file.display()))?;
                }
            }
        }
        Ok(SettingsSnapshot::read(self.setup.host, devices, journal))
    }

    fn schedulers(&self, devices: &[Device]) -> Vec<SchedulerState> {
        let state = |device: &Device| {
            let name = device.name.as_ref()?;
            let block = self.setup.host.block(name);
            Some(SchedulerState {
                device: name.clone(),
                scheduler: block.scheduler,
                settings: block.settings,
            })
        };
        devices.iter().filter_map(state).collect()
    }

    /// Runs the generator and stores its results in the record. Returns false if the user stopped the run.
    fn generate(
        &self,
        devices: &[Device],
        network: Option<&NetworkTarget>,
        processes: &mut RunProcesses,
        record: &mut CellRecord,
    ) -> Result<bool, ExperimentError> {
        let api = self.text("api").to_string();
        let uses_bdevs = generator::is_bdev_api(&api);
        let generator = if uses_bdevs { self.setup.bdev_generator } else { self.setup.generator };
        let inputs = self.inputs(devices, network, uses_bdevs);
        let (jobs, raw) = (self.folder.join("jobs"), self.folder.join("raw"));
        let logs = generator.histogram_logs(raw.join(format!("{:05}", self.line)), self.run.cell.runtime_s);
        let job = CellJob { logs: logs.as_ref(), ..self.job(&inputs) };
        let job_text = job.render();
        let file_error = |path: &Path| {
            let path = path.to_path_buf();
            move |error| ExperimentError::File { path, error }
        };
        for folder in [&jobs, &raw] {
            fs::create_dir_all(folder).map_err(file_error(folder))?;
        }
        let job_file = jobs.join(format!("{:05}.fio", self.line));
        let output = raw.join(format!("{:05}.json", self.line));
        fs::write(&job_file, &job_text).map_err(file_error(&job_file))?;
        record.generator = self.setup.generator_info.clone();
        record.generator.name = generator.name.clone();
        let command = match generator.input {
            GeneratorInput::JobFile => generator.cell_command(&job_file, &output, self.run.cell.runtime_s),
            GeneratorInput::Arguments => generator.options_command(&job, &output),
        };
        record.job_file = job_text;
        record.commands.push(command.join(" "));
        let (ramp, seconds) = self.times();
        let mut meters =
            CellMeters::new(self.setup.host, &self.run.definition.measure, &self.setup.plan.cores);
        meters.open();
        let mut measuring = false;
        let mut on_event = |event, at| match event {
            GeneratorEvent::Started(process) => meters.start(process, network),
            GeneratorEvent::Running if !measuring && at >= ramp => {
                measuring = true;
                meters.start_measuring();
            }
            // Sampled while the process is alive: its CPU time cannot be read later.
            GeneratorEvent::Running => meters.sample(),
            GeneratorEvent::Exited => {}
        };
        let ended = generator::run(processes, &command, seconds, self.setup.stop, &mut on_event);
        let ended = ended.map_err(file_error(&generator.program))?;
        match ended {
            GeneratorExit::Stopped => return Ok(false),
            GeneratorExit::Failure(message) => {
                record.failed = Some(message);
                return Ok(true);
            }
            GeneratorExit::Success => {}
        }
        let text = fs::read_to_string(&output).map_err(file_error(&output))?;
        let background = self.number("background").max(1) as u64;
        let foreground = self.number("jobs").max(1) as u64;
        match fio_output::parse(&text, |role| if role == "bg" { background } else { foreground }) {
            Ok((version, mut groups)) => {
                for group in &mut groups {
                    if let Some(logs) = &logs {
                        group.record.timeline = logs.take(&group.name);
                    }
                }
                record.generator.version = version;
                self.store_results(groups, record);
                let bypassed = uses_bdevs && devices.iter().all(|device| device.kind == DeviceKind::Uri);
                meters.finish(record, bypassed);
            }
            Err(message) => record.failed = Some(message),
        }
        self.add_notes(record);
        Ok(true)
    }

    fn store_results(&self, groups: Vec<fio_output::JobGroupResult>, record: &mut CellRecord) {
        let errors: u64 = groups.iter().map(|group| group.errors).sum();
        if errors > 0 {
            record.failed = Some(format!("{errors} I/O errors"));
        } else if groups.iter().any(|group| group.name == "fg" && group.ios == 0.0) {
            record.notes.push("no foreground I/O completed during the measurement".into());
        }
        for group in groups {
            record.roles.insert(group.name, group.record);
        }
    }

    fn add_notes(&self, record: &mut CellRecord) {
        let jobs = self.number("jobs");
        let cores = self.number("cores");
        if jobs > cores && record.parameters.get("iodepth").and_then(ParameterValue::as_f64) != Some(1.0) {
            record.notes.push(format!("{jobs} jobs share {cores} cores"));
        }
    }

    /// Ramp, and ramp plus measurement, in seconds.
    fn times(&self) -> (f64, f64) {
        (self.run.cell.ramp_s, self.run.cell.ramp_s + self.run.cell.runtime_s)
    }

    /// The device names and CPUs of the cell's jobs.
    fn inputs(&self, devices: &[Device], network: Option<&NetworkTarget>, uses_bdevs: bool) -> JobInputs {
        let cpus = &self.setup.plan.cores;
        let cores = self.number("cores").clamp(1, cpus.len().max(1));
        let separate =
            self.run.definition.fixed.get("cores").and_then(ParameterValue::as_str) == Some("apart");
        let cores: Vec<u32> = cpus.iter().copied().take(cores).collect();
        let (foreground, background) = match (separate, cores.split_first()) {
            (true, Some((first, rest))) if !rest.is_empty() => (vec![*first], rest.to_vec()),
            _ => (cores, Vec::new()),
        };
        let filenames = match network {
            Some(target) => vec![target.uri.clone()],
            None if uses_bdevs => devices.iter().map(Device::uri).collect(),
            None => devices.iter().map(|device| device.location.clone()).collect(),
        };
        let size = devices.iter().map(|device| device.size_bytes).filter(|size| *size > 0).min();
        JobInputs { filenames, size_bytes: size.unwrap_or(0), foreground, background }
    }

    /// Starts the target that the cell drives; stops the targets if it drives none.
    ///
    /// The bdev layer locks the device that it opens, in the generator or in the target. For such a cell, the run releases
    /// its own lock; its record keeps other runs away. Other generators share the run's locks of files.
    fn network_target(
        &self,
        processes: &mut RunProcesses,
        locks: &mut DeviceLocks,
    ) -> Result<Option<NetworkTarget>, String> {
        processes.share_locks(Vec::new());
        if self.text("api") == "nvme-tcp" {
            locks.close_nodes();
            let name = self.text("target");
            let target = self.setup.network.start(name, processes)?;
            return target.map(Some).ok_or_else(|| format!("there is no target {name}"));
        }
        self.setup.network.stop_all();
        if generator::is_bdev_api(self.text("api")) {
            locks.close_nodes();
            return Ok(None);
        }
        locks.reopen_nodes(self.setup.devices).map_err(|error| error.to_string())?;
        processes.share_locks(locks.files().map_err(|error| error.to_string())?);
        Ok(None)
    }

    fn job<'b>(&'b self, inputs: &'b JobInputs) -> CellJob<'b> {
        CellJob {
            cell: &self.run.cell.parameters,
            options: &self.run.definition.options,
            background_options: &self.run.definition.background_options,
            filenames: &inputs.filenames,
            size_bytes: inputs.size_bytes,
            cpus: &inputs.foreground,
            background_cpus: &inputs.background,
            runtime_s: self.run.cell.runtime_s,
            ramp_s: self.run.cell.ramp_s,
            seed: self.setup.plan.seed,
            logs: None,
        }
    }
}

/// Device names and CPUs of a cell's jobs.
struct JobInputs {
    filenames: Vec<String>,
    size_bytes: u64,
    foreground: Vec<u32>,
    background: Vec<u32>,
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests;
