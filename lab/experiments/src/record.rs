//! The files of a run directory: `machine.json`, `plan.toml`, `results.jsonl`.
//!
//! Each file contains the schema's version. Results are appended line by line; an incomplete line, after a kill or on
//! a full disk, is the only one lost.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use machine::MachineRecord;
use serde_json::Value as Json;

mod machine {
    use super::{Deserialize, Json, Serialize};

    /// `machine.json`: properties of the machine when the run began.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct MachineRecord {
        /// Version of the schema.
        pub schema: u32,
        /// When they were read, in milliseconds since 1970-01-01 UTC.
        pub collected_unix_ms: u64,
        /// Name and version of the program that read them.
        pub collected_by: String,
        /// Properties by section (`cpu`, `kernel`, `devices`, `counters`, …), as `lab doctor --json` prints them.
        pub facts: Json,
        /// Properties that distort results, one sentence each.
        pub distortions: Vec<String>,
    }
}

/// The schema that this program writes. It is incremented when the meaning of a field changes. Readers reject a newer
/// schema and ignore unknown fields.
pub const SCHEMA: u32 = 1;

/// Longest line of `results.jsonl` that is read; a record with histograms of many roles is far shorter.
const LINE_BYTES_MAX: usize = 64 << 20;
/// Longest file of a run that is read: a record has about 8 KiB, so these are 100,000 cells.
const FILE_BYTES_MAX: u64 = 1 << 30;

const MACHINE: &str = "machine.json";
const PLAN: &str = "plan.toml";
const RESULTS: &str = "results.jsonl";

/// Why a run directory cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RunDirectoryError {
    /// An error of the file system.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The content of a file is invalid.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file has a newer schema.
    #[error("{}: written in schema {found}; this program reads up to {SCHEMA}", path.display())]
    UnsupportedSchema {
        /// Path of the file.
        path: PathBuf,
        /// Its schema.
        found: u32,
    },
}

/// The value of a cell's parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ParameterValue {
    /// A count, a size in bytes, a time in microseconds.
    Integer(i64),
    /// A fraction.
    Number(f64),
    /// A name, for example of a scheduler.
    Text(String),
}

impl ParameterValue {
    /// The number; `None` for a text.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            ParameterValue::Integer(value) => Some(*value as f64),
            ParameterValue::Number(value) => Some(*value),
            ParameterValue::Text(_) => None,
        }
    }

    /// The text; `None` for a number.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            ParameterValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Whether both values are equal; 4 equals 4.0.
    pub fn same(&self, other: &ParameterValue) -> bool {
        match (self.as_f64(), other.as_f64()) {
            (Some(left), Some(right)) => left == right,
            _ => self == other,
        }
    }
}

impl From<i64> for ParameterValue {
    fn from(value: i64) -> ParameterValue {
        ParameterValue::Integer(value)
    }
}

impl From<&str> for ParameterValue {
    fn from(value: &str) -> ParameterValue {
        ParameterValue::Text(value.to_string())
    }
}

impl fmt::Display for ParameterValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParameterValue::Integer(value) => write!(f, "{value}"),
            ParameterValue::Number(value) => write!(f, "{value}"),
            ParameterValue::Text(value) => f.write_str(value),
        }
    }
}

/// Parameters by name; `docs/LAB-SCHEMA.md` lists the names.
pub type CellParameters = BTreeMap<String, ParameterValue>;

/// A line of `results.jsonl`: one cell, measured once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellRecord {
    /// Version of the schema.
    pub schema: u32,
    /// Id of the experiment, for example `cheops23.fig5a`.
    pub experiment: String,
    /// The line of the figure: an API, a scheduler, or both as in `iou/bfq`.
    pub series: String,
    /// The parameters of the cell, varied and fixed.
    #[serde(default)]
    pub parameters: CellParameters,
    /// Repetition of the cell, from 0; also the number of the block in which it was measured.
    #[serde(default)]
    pub repetition: u32,
    /// Position in the run's shuffled order, from 0; absent in runs of older versions, which were not shuffled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<u32>,
    /// Start time, in milliseconds since 1970-01-01 UTC.
    #[serde(default)]
    pub started_unix_ms: u64,
    /// Duration including preparation and ramp, in seconds.
    #[serde(default)]
    pub duration_s: f64,
    /// Measurements by role: `fg` is the application under study, `bg` the background load, `all` the whole machine.
    #[serde(default)]
    pub roles: BTreeMap<String, RoleRecord>,
    /// The load generator.
    #[serde(default)]
    pub generator: GeneratorInfo,
    /// The exact commands, in order.
    #[serde(default)]
    pub commands: Vec<String>,
    /// The job file of the first command.
    #[serde(default)]
    pub job_file: String,
    /// Schedulers as read back during the cell.
    #[serde(default)]
    pub schedulers: Vec<SchedulerState>,
    /// How requests reached the device: `inline` from the submitting thread, `worker` through a kernel worker,
    /// `polled-thread`, `user-space`, or `unknown`.
    #[serde(default)]
    pub submission_path: Option<String>,
    /// Remarks for the reader, one sentence each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Why the cell measured something else than the study's cell of the same name; then findings do not use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stand_in: Option<String>,
    /// Why the cell cannot run on this machine; then nothing was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Why the cell failed; the record may contain partial measurements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl CellRecord {
    /// Creates a record without measurements.
    pub fn new(experiment: impl Into<String>, series: impl Into<String>) -> CellRecord {
        CellRecord {
            schema: SCHEMA,
            experiment: experiment.into(),
            series: series.into(),
            parameters: CellParameters::new(),
            repetition: 0,
            position: None,
            started_unix_ms: 0,
            duration_s: 0.0,
            roles: BTreeMap::new(),
            generator: GeneratorInfo::default(),
            commands: Vec::new(),
            job_file: String::new(),
            schedulers: Vec::new(),
            submission_path: None,
            notes: Vec::new(),
            stand_in: None,
            skipped: None,
            failed: None,
        }
    }

    /// Whether the record contains valid measurements.
    pub fn is_measured(&self) -> bool {
        self.skipped.is_none() && self.failed.is_none() && !self.roles.is_empty()
    }

    /// Why the cell measured something else than its name says. Older versions only noted it.
    pub fn stand_in(&self) -> Option<&str> {
        let noted = || self.notes.iter().find(|note| note.contains("not what the study calls SPDK"));
        self.stand_in.as_deref().or_else(|| noted().map(String::as_str))
    }

    /// The value of a metric; `None` if it was not measured.
    pub fn metric(&self, role: &str, metric: &str) -> Option<f64> {
        self.roles.get(role)?.metrics.get(metric).copied()
    }

    /// The measurements of a role, created if there are none.
    pub fn role_mut(&mut self, role: &str) -> &mut RoleRecord {
        self.roles.entry(role.to_string()).or_default()
    }

    /// A key of the cell, the same for all its repetitions.
    pub fn cell_key(&self) -> String {
        parameters_key(&self.experiment, &self.parameters)
    }

    /// A key that is unique for cell and repetition within a run.
    pub fn key(&self) -> String {
        cell_key(&self.experiment, &self.parameters, self.repetition)
    }
}

/// A key that is unique for cell and repetition within a run.
pub(crate) fn cell_key(experiment: &str, parameters: &CellParameters, repetition: u32) -> String {
    let mut key = parameters_key(experiment, parameters);
    key.push_str(&format!(" #{repetition}"));
    key
}

fn parameters_key(experiment: &str, parameters: &CellParameters) -> String {
    let mut key = experiment.to_string();
    for (name, value) in parameters {
        key.push_str(&format!(" {name}={value}"));
    }
    key
}

/// Measurements of one role. The suffix of a metric's name is its unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RoleRecord {
    /// Values by name, for example `iops` or `clat_p99_us`.
    pub metrics: BTreeMap<String, f64>,
    /// Latency histograms by name (`clat`, `lat`): pairs of nanoseconds and number of I/Os.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub histograms: BTreeMap<String, Vec<(u64, u64)>>,
    /// I/Os and completion latencies over the measurement, in order of time; empty if the generator reports none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<TimelineSlice>,
}

/// The I/Os that completed in one interval of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimelineSlice {
    /// End of the interval, in milliseconds from the start of the measurement.
    pub at_ms: f64,
    /// Completed I/Os.
    pub ios: u64,
    /// Completion latencies: pairs of nanoseconds, the highest of a bucket, and number of I/Os.
    pub clat: Vec<(u64, u64)>,
}

impl RoleRecord {
    /// Sets a metric; ignores infinities and NaN, which JSON cannot represent.
    pub fn set(&mut self, metric: impl Into<String>, value: f64) {
        if value.is_finite() {
            self.metrics.insert(metric.into(), value);
        }
    }
}

/// The load generator of a cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GeneratorInfo {
    /// `ringbolt` or `fio`.
    pub name: String,
    /// Version, as the generator reports it.
    pub version: String,
    /// The generator's own CPU time per I/O, in nanoseconds, measured with an engine that performs no I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_ns_per_io: Option<f64>,
}

/// Scheduler of one device during a cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SchedulerState {
    /// Name of the device, for example `nvme0n1` or `loop3`.
    pub device: String,
    /// `none`, `mq-deadline`, `kyber` or `bfq`.
    pub scheduler: String,
    /// Files of `queue/iosched` and their values.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
}

/// `plan.toml`: everything that a run will do, written before the first cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunPlan {
    /// Version of the schema.
    pub schema: u32,
    /// Name and version of the program.
    pub program: String,
    /// Command line of the run.
    pub command: Vec<String>,
    /// Experiments, studies and groups as given.
    pub selection: Vec<String>,
    /// `quick`, `default` or `paper`.
    pub scale: String,
    /// Seed of random offsets.
    pub seed: u64,
    /// Seed of the order of measurement; see [`measurement_order`](crate::measurement_order).
    #[serde(default)]
    pub order_seed: u64,
    /// Whether the blocks belong alternately to two equal sides; see [`is_second_side`](crate::is_second_side).
    #[serde(default)]
    pub self_check: bool,
    /// `ringbolt` or `fio`, and the path of the program.
    pub generator: String,
    /// CPUs that cells may use.
    pub cores: Vec<u32>,
    /// Devices, in the order in which cells use them.
    pub targets: Vec<PlannedDevice>,
    /// The experiments and their cells.
    pub experiments: Vec<PlannedExperiment>,
}

/// One device of a run, as recorded in the plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedDevice {
    /// `block`, `file`, `loop`, `null_blk` or `uri`.
    pub kind: String,
    /// Device node, file or URI.
    pub path: String,
    /// Size to use; 0 if only the generator knows it.
    pub size_bytes: u64,
    /// Model, firmware and size of a device, or the size of a file.
    pub described: String,
}

/// One experiment of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedExperiment {
    /// For example `icpe24.fig2`.
    pub id: String,
    /// The whole definition as TOML, so that reports need only the run directory.
    pub definition: String,
    /// Deviations from the published method: fewer cores, devices, seconds.
    #[serde(default)]
    pub scaled: Vec<String>,
    /// All cells, including those that cannot run.
    pub cells: Vec<PlannedCell>,
}

/// One cell of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedCell {
    /// The line of the figure.
    pub series: String,
    /// Parameters of the cell.
    pub parameters: CellParameters,
    /// Number of measurements.
    pub repetitions: u32,
    /// Expected duration of one repetition, in seconds.
    pub seconds: f64,
    /// Duration of the measurement, in seconds.
    pub runtime_s: f64,
    /// Warm-up before it, in seconds.
    pub ramp_s: f64,
    /// Why the cell stands in for the study's; see [`CellRecord::stand_in`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stand_in: Option<String>,
    /// Why the cell cannot run on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Deviations from the published cell, because the machine is smaller, as sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A run directory that was read.
#[derive(Clone, Debug, Default)]
pub struct RunDirectory {
    /// Path of the directory.
    pub path: PathBuf,
    /// `machine.json`.
    pub machine: MachineRecord,
    /// `plan.toml`.
    pub plan: RunPlan,
    /// `results.jsonl`, in the order of measurement.
    pub records: Vec<CellRecord>,
    /// Lines of `results.jsonl` that were not read, with the reason: usually a truncated last line.
    pub dropped: Vec<String>,
}

impl RunDirectory {
    /// Reads a run directory.
    ///
    /// # Errors
    /// A file that cannot be read or parsed, or has a newer schema. Invalid lines of results are no error: they are
    /// listed in [`RunDirectory::dropped`].
    pub fn open(path: &Path) -> Result<RunDirectory, RunDirectoryError> {
        let plan_path = path.join(PLAN);
        let plan: RunPlan =
            toml::from_str(&read(&plan_path)?).map_err(|error| malformed(&plan_path, error.message()))?;
        check_schema(&plan_path, plan.schema)?;
        let machine_path = path.join(MACHINE);
        let machine: MachineRecord = serde_json::from_str(&read(&machine_path)?)
            .map_err(|error| malformed(&machine_path, &error.to_string()))?;
        check_schema(&machine_path, machine.schema)?;
        let (records, dropped) = read_results(&path.join(RESULTS))?;
        Ok(RunDirectory { path: path.to_path_buf(), machine, plan, records, dropped })
    }

    /// The records of an experiment that contain valid measurements.
    pub fn measured<'a>(&'a self, experiment: &'a str) -> impl Iterator<Item = &'a CellRecord> {
        self.records.iter().filter(move |record| record.experiment == experiment && record.is_measured())
    }
}

fn read(path: &Path) -> Result<String, RunDirectoryError> {
    let bytes = read_bounded(path, FILE_BYTES_MAX).map_err(|error| io_error(path, error))?;
    String::from_utf8(bytes).map_err(|error| malformed(path, &error.to_string()))
}

/// Reads a file of at most `bytes_max`. Devices and pipes have no length in advance, or no end.
fn read_bounded(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if File::open(path)?.take(bytes_max + 1).read_to_end(&mut bytes)? as u64 > bytes_max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {bytes_max} bytes")));
    }
    Ok(bytes)
}

fn io_error(path: &Path, error: io::Error) -> RunDirectoryError {
    RunDirectoryError::Io { path: path.to_path_buf(), error }
}

fn malformed(path: &Path, reason: &str) -> RunDirectoryError {
    RunDirectoryError::Malformed { path: path.to_path_buf(), reason: reason.to_string() }
}

fn check_schema(path: &Path, found: u32) -> Result<(), RunDirectoryError> {
    if found > SCHEMA {
        Err(RunDirectoryError::UnsupportedSchema { path: path.to_path_buf(), found })
    } else {
        Ok(())
    }
}

fn read_results(path: &Path) -> Result<(Vec<CellRecord>, Vec<String>), RunDirectoryError> {
    let bytes = match read_bounded(path, FILE_BYTES_MAX) {
        Ok(bytes) => bytes,
        // No cell was measured yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        Err(error) => return Err(io_error(path, error)),
    };
    let (mut records, mut dropped) = (Vec::new(), Vec::new());
    for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        if line.len() > LINE_BYTES_MAX {
            dropped.push(format!("line {}: longer than {LINE_BYTES_MAX} bytes", number + 1));
            continue;
        }
        match serde_json::from_slice::<CellRecord>(line) {
            Ok(record) => {
                check_schema(path, record.schema)?;
                records.push(record);
            }
            Err(error) => dropped.push(format!("line {}: {error}", number + 1)),
        }
    }
    Ok((records, dropped))
}

/// Writes a run directory. [`RunWriter::create`] or [`RunWriter::resume`] comes first; each [`RunWriter::append`]
/// costs an fsync.
#[derive(Debug)]
pub struct RunWriter {
    path: PathBuf,
    results: File,
}

fn write_file(path: &Path, text: &str) -> Result<(), RunDirectoryError> {
    os::replace_file(path, 0o666, text.as_bytes()).map_err(|error| io_error(path, error))
}

fn write_machine(path: &Path, machine: &MachineRecord) -> Result<(), RunDirectoryError> {
    let text = serde_json::to_string_pretty(machine).map_err(|error| malformed(path, &error.to_string()))?;
    write_file(&path.join(MACHINE), &(text + "\n"))
}

impl RunWriter {
    /// Creates the directory and writes machine and plan.
    ///
    /// # Errors
    /// The directory contains a run already, or a file cannot be written.
    pub fn create(
        path: &Path,
        machine: &MachineRecord,
        plan: &RunPlan,
    ) -> Result<RunWriter, RunDirectoryError> {
        fs::create_dir_all(path).map_err(|error| io_error(path, error))?;
        if path.join(PLAN).exists() {
            return Err(malformed(path, "it contains a run already; --resume continues it"));
        }
        write_machine(path, machine)?;
        let text = toml::to_string(plan).map_err(|error| malformed(path, &error.to_string()))?;
        write_file(&path.join(PLAN), &text)?;
        RunWriter::resume(path)
    }

    /// Replaces `machine.json`, for properties that are found later.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn update_machine(&self, machine: &MachineRecord) -> Result<(), RunDirectoryError> {
        write_machine(&self.path, machine)
    }

    /// Continues an existing run; terminates an incomplete last line.
    ///
    /// # Errors
    /// The file cannot be opened or written.
    pub fn resume(path: &Path) -> Result<RunWriter, RunDirectoryError> {
        let name = path.join(RESULTS);
        let cut = has_incomplete_last_line(&name).map_err(|error| io_error(&name, error))?;
        let options = OpenOptions::new().create(true).append(true).open(&name);
        let mut results = options.map_err(|error| io_error(&name, error))?;
        if cut {
            results.write_all(b"\n").map_err(|error| io_error(&name, error))?;
        }
        Ok(RunWriter { path: path.to_path_buf(), results })
    }

    /// Appends a record and syncs it to disk.
    ///
    /// # Errors
    /// An error of the file system, for example that the disk is full. Part of the line may have been written;
    /// readers ignore it.
    pub fn append(&mut self, record: &CellRecord) -> Result<(), RunDirectoryError> {
        let name = self.path.join(RESULTS);
        let mut line = serde_json::to_string(record).map_err(|error| malformed(&name, &error.to_string()))?;
        line.push('\n');
        let written = self.results.write_all(line.as_bytes()).and_then(|()| self.results.sync_data());
        written.map_err(|error| io_error(&name, error))
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether the file's last byte is not a newline.
fn has_incomplete_last_line(path: &Path) -> io::Result<bool> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Ok(false);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

#[cfg(test)]
mod tests;
