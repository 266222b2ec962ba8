//! The run directory: `machine.json`, `plan.toml`, `results.jsonl`.
//!
//! Each file carries the version of the schema. Results are appended a line at a time, and a line
//! that was cut off, by a kill or a full disk, costs that line only.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use machine::Machine;
use serde_json::Value as Json;

mod machine {
    use super::{Deserialize, Json, Serialize};

    /// What `machine.json` holds: facts of the machine as it was when the run began.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct Machine {
        /// Version of the schema.
        pub schema: u32,
        /// When the facts were collected, milliseconds since 1970-01-01 UTC.
        pub collected_unix_ms: u64,
        /// The program that collected them, with its version.
        pub collected_by: String,
        /// Facts by section (`cpu`, `kernel`, `devices`, `counters`, …), as `lab doctor --json` prints them.
        pub facts: Json,
        /// What was found that distorts results, one sentence each.
        pub distortions: Vec<String>,
    }
}

/// The version that this program writes. It grows when a field changes its meaning; a reader
/// refuses what is newer than itself, and ignores fields that it does not know.
pub const SCHEMA: u32 = 1;

/// Longest line of `results.jsonl` that is read: histograms of many roles stay far below it.
const LINE_BYTES_MAX: usize = 64 << 20;

const MACHINE: &str = "machine.json";
const PLAN: &str = "plan.toml";
const RESULTS: &str = "results.jsonl";

/// Why a run directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A file says what it must not.
    #[error("{}: {said}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        said: String,
    },
    /// A newer program wrote it.
    #[error("{}: written in schema {found}, and this program reads up to {SCHEMA}", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

/// The value of one parameter of a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// A count, a size in bytes, a time in microseconds.
    Integer(i64),
    /// A fraction.
    Number(f64),
    /// A name.
    Text(String),
}

impl Value {
    /// The value as a number, where it is one.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Value::Integer(value) => Some(*value as f64),
            Value::Number(value) => Some(*value),
            Value::Text(_) => None,
        }
    }

    /// The value as a name, where it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Whether both mean the same: 4 and 4.0 do.
    pub fn same(&self, other: &Value) -> bool {
        match (self.as_f64(), other.as_f64()) {
            (Some(left), Some(right)) => left == right,
            _ => self == other,
        }
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Value {
        Value::Integer(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        Value::Text(value.to_string())
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Integer(value) => write!(f, "{value}"),
            Value::Number(value) => write!(f, "{value}"),
            Value::Text(value) => f.write_str(value),
        }
    }
}

/// Parameters by name. The names are listed in `docs/LAB-SCHEMA.md`.
pub type Parameters = BTreeMap<String, Value>;

/// One cell, measured once: one line of `results.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellRecord {
    /// Version of the schema.
    pub schema: u32,
    /// The experiment, as `cheops23.fig5a`.
    pub experiment: String,
    /// The line of the figure that the cell belongs to: an API, a scheduler, or both as `iou/bfq`.
    pub series: String,
    /// What was varied, and what the cell had in common with its neighbours.
    #[serde(default)]
    pub parameters: Parameters,
    /// Which repetition of the same cell, from 0.
    #[serde(default)]
    pub repetition: u32,
    /// When it began, milliseconds since 1970-01-01 UTC.
    #[serde(default)]
    pub started_unix_ms: u64,
    /// How long it took in all, preparation and ramp included, in seconds.
    #[serde(default)]
    pub duration_s: f64,
    /// What was measured, by role: `fg` is the application that the study looks at, `bg` what disturbs
    /// it, `all` the whole machine.
    #[serde(default)]
    pub roles: BTreeMap<String, RoleRecord>,
    /// The program that made the load, and what it cost.
    #[serde(default)]
    pub generator: GeneratorUse,
    /// The exact commands, in order.
    #[serde(default)]
    pub commands: Vec<String>,
    /// The job file that the first command was given.
    #[serde(default)]
    pub job_file: String,
    /// Schedulers as read back while the cell ran.
    #[serde(default)]
    pub schedulers: Vec<SchedulerState>,
    /// How requests reached the device: `inline` from the submitting thread, `worker` by way of a kernel
    /// worker, `polled-thread`, `user-space`, or `unknown`.
    #[serde(default)]
    pub submission_path: Option<String>,
    /// Anything a reader has to know, one sentence each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Why the cell could not run here. Nothing was measured then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Why the cell ran and failed. What it measured until then may be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl CellRecord {
    /// A record without results.
    pub fn new(experiment: impl Into<String>, series: impl Into<String>) -> CellRecord {
        CellRecord {
            schema: SCHEMA,
            experiment: experiment.into(),
            series: series.into(),
            parameters: Parameters::new(),
            repetition: 0,
            started_unix_ms: 0,
            duration_s: 0.0,
            roles: BTreeMap::new(),
            generator: GeneratorUse::default(),
            commands: Vec::new(),
            job_file: String::new(),
            schedulers: Vec::new(),
            submission_path: None,
            notes: Vec::new(),
            skipped: None,
            failed: None,
        }
    }

    /// Whether it holds measurements.
    pub fn is_measured(&self) -> bool {
        self.skipped.is_none() && self.failed.is_none() && !self.roles.is_empty()
    }

    /// A metric of a role, where it was measured.
    pub fn metric(&self, role: &str, metric: &str) -> Option<f64> {
        self.roles.get(role)?.metrics.get(metric).copied()
    }

    /// The role's results, made where there are none.
    pub fn role_mut(&mut self, role: &str) -> &mut RoleRecord {
        self.roles.entry(role.to_string()).or_default()
    }

    /// What tells the cell and the repetition from all others of a run.
    pub fn key(&self) -> String {
        cell_key(&self.experiment, &self.parameters, self.repetition)
    }
}

/// What tells one repetition of a cell from all others of a run.
pub(crate) fn cell_key(experiment: &str, parameters: &Parameters, repetition: u32) -> String {
    let mut key = experiment.to_string();
    for (name, value) in parameters {
        key.push_str(&format!(" {name}={value}"));
    }
    key.push_str(&format!(" #{repetition}"));
    key
}

/// What one role measured. The unit of a metric is the end of its name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RoleRecord {
    /// Values by name, as `iops` or `clat_p99_us`.
    pub metrics: BTreeMap<String, f64>,
    /// Latency histograms by name (`clat`, `lat`): pairs of nanoseconds and how many I/Os took so long.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub histograms: BTreeMap<String, Vec<(u64, u64)>>,
}

impl RoleRecord {
    /// Sets a metric. What is not a finite number is not kept: JSON has no word for it.
    pub fn set(&mut self, metric: impl Into<String>, value: f64) {
        if value.is_finite() {
            self.metrics.insert(metric.into(), value);
        }
    }
}

/// The load generator of a cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GeneratorUse {
    /// `ringbolt` or `fio`.
    pub name: String,
    /// Its version, as it says itself.
    pub version: String,
    /// Processor time that one I/O costs the generator by itself, measured against a device that does
    /// nothing, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_ns_per_io: Option<f64>,
}

/// The scheduler of one device while a cell ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SchedulerState {
    /// The device's name, as `nvme0n1` or `loop3`.
    pub device: String,
    /// `none`, `mq-deadline`, `kyber` or `bfq`.
    pub scheduler: String,
    /// The files of `queue/iosched`, with what they said.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
}

/// What `plan.toml` holds: what the run was to do. It is written before the first cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Version of the schema.
    pub schema: u32,
    /// The program, with its version.
    pub program: String,
    /// The command line that began the run.
    pub command: Vec<String>,
    /// What was asked for: experiments, studies.
    pub selection: Vec<String>,
    /// `quick`, `default` or `paper`.
    pub scale: String,
    /// Seed of the cells' order and of the generator's positions.
    pub seed: u64,
    /// `ringbolt` or `fio`, and where the program is.
    pub generator: String,
    /// Cores that the cells may use.
    pub cores: Vec<u32>,
    /// The devices, in the order in which cells take them.
    pub targets: Vec<Target>,
    /// The experiments with their cells.
    pub experiments: Vec<PlannedExperiment>,
}

/// One device of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// `block`, `file`, `loop`, `null_blk` or `model`.
    pub kind: String,
    /// Where it is: `/dev/nvme0n1`, a file, a profile's name.
    pub path: String,
    /// Its usable size.
    pub size_bytes: u64,
    /// What it is, in words: model and firmware of a device, the file system of a file.
    pub described: String,
}

/// One experiment of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedExperiment {
    /// As `icpe24.fig2`.
    pub id: String,
    /// The whole definition as TOML, so that a report needs nothing but the run directory.
    pub definition: String,
    /// What differs from the published method here: fewer cores, devices, seconds.
    #[serde(default)]
    pub scaled: Vec<String>,
    /// The cells, those that cannot run included.
    pub cells: Vec<PlannedCell>,
}

/// One cell of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedCell {
    /// The line of the figure.
    pub series: String,
    /// Its parameters.
    pub parameters: Parameters,
    /// How often it is measured.
    pub repetitions: u32,
    /// How long one repetition takes in all, in seconds.
    pub seconds: f64,
    /// Of that, measuring.
    pub runtime_s: f64,
    /// Of that, before it.
    pub ramp_s: f64,
    /// Why it cannot run here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// What is otherwise than published, because this machine has less: sentences for the record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A run directory as read.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Where it is.
    pub path: PathBuf,
    /// Facts of the machine.
    pub machine: Machine,
    /// What the run was to do.
    pub plan: Plan,
    /// What was measured, in the order in which it was.
    pub records: Vec<CellRecord>,
    /// Lines of `results.jsonl` that were not read, with the reason: a truncated last line, mostly.
    pub dropped: Vec<String>,
}

impl Run {
    /// Reads a run directory.
    ///
    /// # Errors
    /// A file that cannot be read or parsed, or one of a newer schema. Lines of results that are
    /// broken are no error: they are left out and named in [`Run::dropped`].
    pub fn open(path: &Path) -> Result<Run, Error> {
        let plan_path = path.join(PLAN);
        let plan: Plan =
            toml::from_str(&read(&plan_path)?).map_err(|error| malformed(&plan_path, error.message()))?;
        not_newer(&plan_path, plan.schema)?;
        let machine_path = path.join(MACHINE);
        let machine: Machine = serde_json::from_str(&read(&machine_path)?)
            .map_err(|error| malformed(&machine_path, &error.to_string()))?;
        not_newer(&machine_path, machine.schema)?;
        let (records, dropped) = read_results(&path.join(RESULTS))?;
        Ok(Run { path: path.to_path_buf(), machine, plan, records, dropped })
    }

    /// The records of an experiment that hold measurements.
    pub fn measured<'a>(&'a self, experiment: &'a str) -> impl Iterator<Item = &'a CellRecord> {
        self.records.iter().filter(move |record| record.experiment == experiment && record.is_measured())
    }
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|error| failed(path, error))
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error::Io { path: path.to_path_buf(), error }
}

fn malformed(path: &Path, said: &str) -> Error {
    Error::Malformed { path: path.to_path_buf(), said: said.to_string() }
}

fn not_newer(path: &Path, found: u32) -> Result<(), Error> {
    if found > SCHEMA { Err(Error::Newer { path: path.to_path_buf(), found }) } else { Ok(()) }
}

fn read_results(path: &Path) -> Result<(Vec<CellRecord>, Vec<String>), Error> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        // Nothing was measured yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        Err(error) => return Err(failed(path, error)),
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
                not_newer(path, record.schema)?;
                records.push(record);
            }
            Err(error) => dropped.push(format!("line {}: {error}", number + 1)),
        }
    }
    Ok((records, dropped))
}

/// A run directory that is being written.
#[derive(Debug)]
pub struct RunWriter {
    path: PathBuf,
    results: File,
}

fn store(path: &Path, text: &str) -> Result<(), Error> {
    os::replace_file(path, 0o666, text.as_bytes()).map_err(|error| failed(path, error))
}

fn write_machine(path: &Path, machine: &Machine) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(machine).map_err(|error| malformed(path, &error.to_string()))?;
    store(&path.join(MACHINE), &(text + "\n"))
}

impl RunWriter {
    /// Makes the directory and writes what is known before the first cell.
    ///
    /// # Errors
    /// A directory that holds a run already, or a file that cannot be written.
    pub fn create(path: &Path, machine: &Machine, plan: &Plan) -> Result<RunWriter, Error> {
        fs::create_dir_all(path).map_err(|error| failed(path, error))?;
        if path.join(PLAN).exists() {
            return Err(malformed(path, "it holds a run already: --resume goes on with it"));
        }
        write_machine(path, machine)?;
        let text = toml::to_string(plan).map_err(|error| malformed(path, &error.to_string()))?;
        store(&path.join(PLAN), &text)?;
        RunWriter::append(path)
    }

    /// Says more of the machine than was known before the first cell.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn learn(&self, machine: &Machine) -> Result<(), Error> {
        write_machine(&self.path, machine)
    }

    /// Goes on with a run. A last line that was cut off is ended, so that the next one begins anew.
    ///
    /// # Errors
    /// A file that cannot be opened or written.
    pub fn append(path: &Path) -> Result<RunWriter, Error> {
        let name = path.join(RESULTS);
        let cut = ends_inside_a_line(&name).map_err(|error| failed(&name, error))?;
        let options = OpenOptions::new().create(true).append(true).open(&name);
        let mut results = options.map_err(|error| failed(&name, error))?;
        if cut {
            results.write_all(b"\n").map_err(|error| failed(&name, error))?;
        }
        Ok(RunWriter { path: path.to_path_buf(), results })
    }

    /// Appends a record and puts it on the disk.
    ///
    /// # Errors
    /// What the file system says, as that the disk is full. The line may be there in part; a reader
    /// leaves it out.
    pub fn store(&mut self, record: &CellRecord) -> Result<(), Error> {
        let name = self.path.join(RESULTS);
        let mut line = serde_json::to_string(record).map_err(|error| malformed(&name, &error.to_string()))?;
        line.push('\n');
        let written = self.results.write_all(line.as_bytes()).and_then(|()| self.results.sync_data());
        written.map_err(|error| failed(&name, error))
    }

    /// The run directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether a file's last byte is no newline.
fn ends_inside_a_line(path: &Path) -> io::Result<bool> {
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
