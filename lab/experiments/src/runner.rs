//! Running a plan: a cell after the other, each stored before the next one begins.
//!
//! Whatever ends a run (its last cell, Ctrl-C, a kill, a full disk, a device that leaves), what was
//! measured is on the disk, and the machine's settings are put back: by the run itself, or by the next
//! lab command where it was killed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::conditions::{Conditions, Schedulers};
use crate::definition::Definition;
use crate::generator::{self, Ended, Generator, Moment, Style};
use crate::host::Host;
use crate::job::Job;
use crate::journal::Journal;
use crate::locks::DeviceLocks;
use crate::meters::Meters;
use crate::outcome;
use crate::processes::Processes;
use crate::record::{
    CellRecord, GeneratorUse, Plan, PlannedCell, Run, RunWriter, SchedulerState, Value, cell_key,
};
use crate::session::{Network, NetworkTarget};
use crate::steady::{self, Outcome, ROUND_S};
use crate::target::{Device, Kind};

/// Cells that fail one after the other before the run is given up: whatever is wrong is not the cell.
const FAILURES_MAX: usize = 5;

/// Why a run ended early. One line each.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Results cannot be stored.
    #[error("{0}; what was measured until then is kept")]
    Store(#[from] crate::record::Error),
    /// A device left.
    #[error("{0} is gone; what was measured until then is kept, and --resume goes on")]
    DeviceGone(String),
    /// Nothing works.
    #[error("{FAILURES_MAX} cells failed one after the other, the last with: {0}")]
    Failing(String),
    /// A file of the run cannot be written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
}

/// What a run is made of.
pub struct Setup<'a> {
    /// What is to be done.
    pub plan: &'a Plan,
    /// The devices, made.
    pub devices: &'a [Device],
    /// The generator, and its own cost of an I/O in nanoseconds.
    pub generator: &'a Generator,
    /// Its version and what an I/O costs it.
    pub generator_use: GeneratorUse,
    /// Our own program, for what the generator cannot do.
    pub own: &'a Generator,
    /// The machine.
    pub host: &'a Host,
    /// Cells that are done already.
    pub done: BTreeSet<String>,
    /// Targets that are reached over the network.
    pub network: &'a dyn Network,
    /// Set when the user wants it to end.
    pub stop: &'a AtomicBool,
}

/// What happened, for whoever watches.
#[derive(Debug)]
pub enum Event<'a> {
    /// A cell begins.
    Begins {
        /// From 1.
        number: usize,
        /// Of how many.
        total: usize,
        /// What is left, this one included, in seconds.
        left_s: f64,
        /// The experiment.
        experiment: &'a str,
        /// The cell.
        cell: &'a PlannedCell,
    },
    /// A cell ended.
    Ends(&'a CellRecord),
}

/// How a run went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Cells that were measured.
    pub measured: usize,
    /// Cells that cannot run here.
    pub skipped: usize,
    /// Cells that failed.
    pub failed: usize,
    /// Cells that were done before.
    pub before: usize,
    /// Whether it was told to end.
    pub stopped: bool,
}

/// Runs what is left of a plan.
///
/// # Errors
/// What makes it pointless to go on. A cell that fails is no such thing: it is recorded.
pub fn run(
    setup: &Setup<'_>,
    writer: &mut RunWriter,
    journal: &mut Journal,
    locks: &mut DeviceLocks,
    tell: &mut dyn FnMut(Event<'_>),
) -> Result<Summary, RunError> {
    let mut summary = Summary::default();
    let mut schedulers = Schedulers::default();
    let work = work(setup, &mut summary);
    let total = work.len();
    let mut left: f64 = work.iter().map(|item| item.seconds()).sum();
    let mut failing = 0;
    for (number, item) in work.iter().enumerate() {
        if setup.stop.load(Ordering::Relaxed) {
            summary.stopped = true;
            break;
        }
        if item.cell.skipped.is_none() {
            let cell = item.cell;
            tell(Event::Begins {
                number: number + 1,
                total,
                left_s: left,
                experiment: item.experiment,
                cell,
            });
        }
        left -= item.seconds();
        let line = number + setup.done.len();
        let Some(record) =
            Bench { setup, item, line, folder: writer.path() }.measure(journal, locks, &mut schedulers)?
        else {
            summary.stopped = true;
            break;
        };
        writer.store(&record)?;
        tell(Event::Ends(&record));
        match (&record.skipped, &record.failed) {
            (Some(_), _) => summary.skipped += 1,
            (_, Some(said)) => {
                summary.failed += 1;
                failing += 1;
                if let Some(device) = setup.devices.iter().find(|device| !device.is_there(setup.host)) {
                    return Err(RunError::DeviceGone(device.place.clone()));
                }
                if failing >= FAILURES_MAX {
                    return Err(RunError::Failing(said.clone()));
                }
            }
            _ => {
                summary.measured += 1;
                failing = 0;
            }
        }
    }
    Ok(summary)
}

/// Fills the devices and writes them over at random, as the specification of the SNIA has it, until the
/// last rounds are alike.
///
/// # Errors
/// A generator that fails, or a file that cannot be written.
pub fn precondition(
    setup: &Setup<'_>,
    folder: &Path,
    processes: &mut Processes,
    tell: &mut dyn FnMut(String),
) -> Result<Outcome, RunError> {
    let count = setup.devices.len();
    tell(format!(
        "filling {count} device(s), each by a job; then at most {} rounds of {ROUND_S} s of random writes, until the \
         last {} are alike",
        steady::ROUNDS_MAX,
        steady::WINDOW
    ));
    write_over(setup, folder, processes, "write", "128k", None)?;
    let round = || {
        if setup.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let iops = write_over(setup, folder, processes, "randwrite", "4k", Some(ROUND_S))?;
        Ok((!setup.stop.load(Ordering::Relaxed)).then_some(iops))
    };
    steady::settle(round, tell)
}

/// Writes all devices over, each by a job, for so many seconds or once; the IOPS of all.
fn write_over(
    setup: &Setup<'_>,
    folder: &Path,
    processes: &mut Processes,
    rw: &str,
    bs: &str,
    seconds: Option<u64>,
) -> Result<f64, RunError> {
    let (file, output) = (folder.join("precondition.fio"), folder.join("precondition.json"));
    let mut text = format!(
        "[global]\nioengine=libaio\ndirect=1\nrw={rw}\nbs={bs}\niodepth=32\nnorandommap=1\ngroup_reporting=1\n"
    );
    if let Some(seconds) = seconds {
        text.push_str(&format!("time_based=1\nruntime={seconds}s\n"));
    }
    for (number, device) in setup.devices.iter().enumerate() {
        text.push_str(&format!("[fill{number}]\nfilename={}\nsize={}\n", device.place, device.size_bytes));
    }
    fs::write(&file, text).map_err(|error| RunError::File { path: file.clone(), error })?;
    let limit = seconds.map_or(86_400.0, |seconds| seconds as f64);
    let command = setup.generator.command(&file, &output);
    let ended = generator::run(processes, &command, limit, setup.stop, &mut |_, _| {});
    match ended.map_err(|error| RunError::File { path: setup.generator.program.clone(), error })? {
        Ended::Well => {}
        Ended::Stopped => return Ok(0.0),
        Ended::Badly(said) => return Err(RunError::Failing(said)),
    }
    let text = fs::read_to_string(&output).map_err(|error| RunError::File { path: output.clone(), error })?;
    let _ = (fs::remove_file(&file), fs::remove_file(&output));
    let (_, groups) = outcome::parse(&text, |_| 1).map_err(RunError::Failing)?;
    Ok(groups.iter().filter_map(|group| group.record.metrics.get("iops")).sum())
}

/// The cells of a run that need not be run again: measured, or not possible here.
pub fn done(run: &Run) -> BTreeSet<String> {
    run.records.iter().filter(|record| record.failed.is_none()).map(CellRecord::key).collect()
}

/// The last record of each cell and repetition: one that failed and was run again stands twice.
pub fn latest(run: &Run) -> Vec<&CellRecord> {
    let mut latest: Vec<&CellRecord> = Vec::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for record in &run.records {
        match places.entry(record.key()) {
            Entry::Occupied(place) => latest[*place.get()] = record,
            Entry::Vacant(place) => {
                place.insert(latest.len());
                latest.push(record);
            }
        }
    }
    latest
}

/// One repetition of a cell.
struct Item<'a> {
    experiment: &'a str,
    definition: std::rc::Rc<Definition>,
    cell: &'a PlannedCell,
    repetition: u32,
}

impl Item<'_> {
    fn seconds(&self) -> f64 {
        if self.cell.skipped.is_some() { 0.0 } else { self.cell.seconds }
    }
}

fn work<'a>(setup: &Setup<'a>, summary: &mut Summary) -> Vec<Item<'a>> {
    let mut work = Vec::new();
    for experiment in &setup.plan.experiments {
        // It was written by this program: what it does not understand has no cells either.
        let definition = std::rc::Rc::new(Definition::parse(&experiment.definition).unwrap_or_default());
        for cell in &experiment.cells {
            let repetitions = if cell.skipped.is_some() { 1 } else { cell.repetitions };
            for repetition in 0..repetitions {
                if setup.done.contains(&cell_key(&experiment.id, &cell.parameters, repetition)) {
                    summary.before += 1;
                    continue;
                }
                work.push(Item {
                    experiment: &experiment.id,
                    definition: definition.clone(),
                    cell,
                    repetition,
                });
            }
        }
    }
    work
}

/// One cell on the bench.
struct Bench<'a> {
    setup: &'a Setup<'a>,
    item: &'a Item<'a>,
    line: usize,
    folder: &'a Path,
}

impl Bench<'_> {
    fn number(&self, name: &str) -> usize {
        self.item.cell.parameters.get(name).and_then(Value::as_f64).map_or(0, |value| value.max(0.0) as usize)
    }

    fn text(&self, name: &str) -> &str {
        self.item.cell.parameters.get(name).and_then(Value::as_str).unwrap_or("")
    }

    /// The record, or none where the user wants an end.
    fn measure(
        &self,
        journal: &mut Journal,
        locks: &mut DeviceLocks,
        schedulers: &mut Schedulers,
    ) -> Result<Option<CellRecord>, RunError> {
        let mut record = CellRecord::new(self.item.experiment, &self.item.cell.series);
        record.parameters = self.item.cell.parameters.clone();
        record.repetition = self.item.repetition;
        record.started_unix_ms = now_ms();
        record.skipped = self.item.cell.skipped.clone();
        record.notes = self.item.cell.notes.clone();
        if record.skipped.is_some() {
            return Ok(Some(record));
        }
        let began = Instant::now();
        let devices = self.devices();
        let ready = self.prepare(&devices, journal, schedulers).and_then(|conditions| {
            let network = self.network_target(journal.processes(), locks)?;
            Ok((conditions, network))
        });
        let (conditions, network) = match ready {
            Ok(ready) => ready,
            Err(said) => {
                record.failed = Some(said);
                return Ok(Some(record));
            }
        };
        let going = self.generate(&devices, network.as_ref(), journal.processes(), &mut record)?;
        let changes = conditions.changes();
        if !changes.is_empty() {
            let also = record.failed.take().map_or(String::new(), |said| format!("; {said}"));
            record.failed =
                Some(format!("{}: changed by another process while the cell ran{also}", changes.join("; ")));
        }
        record.schedulers = self.schedulers(&devices);
        record.duration_s = began.elapsed().as_secs_f64();
        Ok(going.then_some(record))
    }

    fn devices(&self) -> Vec<Device> {
        let count = self.number("devices").max(1);
        self.setup.devices.iter().take(count).cloned().collect()
    }

    /// Sets the scheduler and its targets. Returns what was read back: the cell is measured under that.
    fn prepare(
        &self,
        devices: &[Device],
        journal: &mut Journal,
        schedulers: &mut Schedulers,
    ) -> Result<Conditions, String> {
        journal.set_again()?;
        // A cell that names none is the studies' default, and not what the cell before it left.
        let scheduler = Some(self.text("scheduler")).filter(|name| !name.is_empty()).unwrap_or("none");
        for device in devices {
            let Some(name) = &device.name else { continue };
            let queue = self.setup.host.path(&format!("sys/block/{name}/queue"));
            if !self.setup.host.block(name).schedulers.is_empty() {
                schedulers.set(&queue, scheduler, journal)?;
            }
            for (parameter, file) in
                [("read_target_us", "read_lat_nsec"), ("write_target_us", "write_lat_nsec")]
            {
                if self.item.cell.parameters.contains_key(parameter) {
                    let file = queue.join("iosched").join(file);
                    let ns = (self.number(parameter) * 1000).to_string();
                    journal.set(&file, &ns).map_err(|error| format!("{}: {error}", file.display()))?;
                }
            }
        }
        Ok(Conditions::read(self.setup.host, devices, journal))
    }

    fn schedulers(&self, devices: &[Device]) -> Vec<SchedulerState> {
        let of = |device: &Device| {
            let name = device.name.as_ref()?;
            let block = self.setup.host.block(name);
            Some(SchedulerState {
                device: name.clone(),
                scheduler: block.scheduler,
                settings: block.settings,
            })
        };
        devices.iter().filter_map(of).collect()
    }

    /// Runs the generator and takes its results over. Says whether to go on.
    fn generate(
        &self,
        devices: &[Device],
        network: Option<&NetworkTarget>,
        processes: &mut Processes,
        record: &mut CellRecord,
    ) -> Result<bool, RunError> {
        let api = self.text("api").to_string();
        let own = generator::is_own(&api);
        let generator = if own { self.setup.own } else { self.setup.generator };
        let inputs = self.inputs(devices, network, own);
        let job = self.job(&inputs);
        let job_text = job.render();
        let (jobs, raw) = (self.folder.join("jobs"), self.folder.join("raw"));
        let file_error = |path: &Path| {
            let path = path.to_path_buf();
            move |error| RunError::File { path, error }
        };
        for folder in [&jobs, &raw] {
            fs::create_dir_all(folder).map_err(file_error(folder))?;
        }
        let job_file = jobs.join(format!("{:05}.fio", self.line));
        let output = raw.join(format!("{:05}.json", self.line));
        fs::write(&job_file, &job_text).map_err(file_error(&job_file))?;
        record.generator = self.setup.generator_use.clone();
        record.generator.name = generator.name.clone();
        let command = match generator.style {
            Style::JobFile => generator.command(&job_file, &output),
            Style::Options => generator.command_of(&job, &output),
        };
        record.job_file = job_text;
        record.commands.push(command.join(" "));
        let (ramp, seconds) = self.times();
        let mut meters = Meters::new(self.setup.host, &self.item.definition.measure, &self.setup.plan.cores);
        meters.open();
        let mut measuring = false;
        let mut look = |moment, at| match moment {
            Moment::Began(process) => meters.start(process, network),
            Moment::Runs if !measuring && at >= ramp => {
                measuring = true;
                meters.begin();
            }
            // The last look is not later than the jobs' end, where the processes still tell their time.
            Moment::Runs => meters.look(),
            Moment::Ended => {}
        };
        let ended = generator::run(processes, &command, seconds, self.setup.stop, &mut look);
        let ended = ended.map_err(file_error(&generator.program))?;
        match ended {
            Ended::Stopped => return Ok(false),
            Ended::Badly(said) => {
                record.failed = Some(said);
                return Ok(true);
            }
            Ended::Well => {}
        }
        let text = fs::read_to_string(&output).map_err(file_error(&output))?;
        let background = self.number("background").max(1) as u64;
        let foreground = self.number("jobs").max(1) as u64;
        match outcome::parse(&text, |role| if role == "bg" { background } else { foreground }) {
            Ok((version, groups)) => {
                record.generator.version = version;
                self.take_over(groups, record);
                let bypassed = own && devices.iter().all(|device| device.kind == Kind::Uri);
                meters.finish(record, bypassed);
            }
            Err(said) => record.failed = Some(said),
        }
        self.remark(&api, devices, record);
        Ok(true)
    }

    fn take_over(&self, groups: Vec<outcome::Group>, record: &mut CellRecord) {
        let errors: u64 = groups.iter().map(|group| group.errors).sum();
        if errors > 0 {
            record.failed = Some(format!("{errors} I/O errors"));
        } else if groups.iter().any(|group| group.name == "fg" && group.ios == 0.0) {
            record.notes.push("no I/O of the foreground ended while it was measured".into());
        }
        for group in groups {
            record.roles.insert(group.name, group.record);
        }
    }

    fn remark(&self, api: &str, devices: &[Device], record: &mut CellRecord) {
        let kernel = devices.iter().any(|device| device.kind != Kind::Uri);
        if generator::is_own(api) && kernel && api != "nvme-tcp" {
            record.notes.push(
                "through our block layer and io_uring: no user-space driver reaches this device, so this is not what \
                 the study calls SPDK"
                    .into(),
            );
        }
        let jobs = self.number("jobs");
        let cores = self.number("cores");
        if jobs > cores && record.parameters.get("iodepth").and_then(Value::as_f64) != Some(1.0) {
            record.notes.push(format!("{jobs} jobs share {cores} cores"));
        }
    }

    /// Seconds before measuring, and in all.
    fn times(&self) -> (f64, f64) {
        (self.item.cell.ramp_s, self.item.cell.ramp_s + self.item.cell.runtime_s)
    }

    /// What the cell drives, and from where.
    fn inputs(&self, devices: &[Device], network: Option<&NetworkTarget>, own: bool) -> Inputs {
        let cpus = &self.setup.plan.cores;
        let cores = self.number("cores").clamp(1, cpus.len().max(1));
        let apart = self.item.definition.fixed.get("cores").and_then(Value::as_str) == Some("apart");
        let mine: Vec<u32> = cpus.iter().copied().take(cores).collect();
        let (foreground, background) = match (apart, mine.split_first()) {
            (true, Some((first, rest))) if !rest.is_empty() => (vec![*first], rest.to_vec()),
            _ => (mine, Vec::new()),
        };
        let filenames = match network {
            Some(target) => vec![target.uri.clone()],
            None if own => devices.iter().map(Device::uri).collect(),
            None => devices.iter().map(|device| device.place.clone()).collect(),
        };
        let size = devices.iter().map(|device| device.size_bytes).filter(|size| *size > 0).min();
        Inputs { filenames, size_bytes: size.unwrap_or(0), foreground, background }
    }

    /// The target that the cell drives. Without one there, others are ended first.
    ///
    /// Our block layer locks the device that it opens, in the generator or in the target, so that this run's lock on
    /// the node is released for such a cell; its record keeps other runs away.
    fn network_target(
        &self,
        processes: &mut Processes,
        locks: &mut DeviceLocks,
    ) -> Result<Option<NetworkTarget>, String> {
        if self.text("api") != "nvme-tcp" {
            self.setup.network.leave();
            if generator::is_own(self.text("api")) {
                locks.close_nodes();
                return Ok(None);
            }
            return locks.reopen_nodes(self.setup.devices).map(|()| None).map_err(|error| error.to_string());
        }
        locks.close_nodes();
        let name = self.text("target");
        match self.setup.network.reach(name, processes)? {
            Some(target) => Ok(Some(target)),
            None => Err(format!("there is no target {name}")),
        }
    }

    fn job<'b>(&'b self, inputs: &'b Inputs) -> Job<'b> {
        Job {
            cell: &self.item.cell.parameters,
            options: &self.item.definition.options,
            background_options: &self.item.definition.background_options,
            filenames: &inputs.filenames,
            size_bytes: inputs.size_bytes,
            cpus: &inputs.foreground,
            background_cpus: &inputs.background,
            runtime_s: self.item.cell.runtime_s,
            ramp_s: self.item.cell.ramp_s,
            seed: self.setup.plan.seed,
        }
    }
}

/// What a cell drives, and from where.
struct Inputs {
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
