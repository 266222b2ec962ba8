//! Options of `lab plan` and `lab run`: experiments, devices, durations and generator.

use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use lab_experiments::capabilities::{self, NetworkTarget};
use lab_experiments::devices::{self, Device, DeviceRequest};
use lab_experiments::generator::{GeneratorInput, LoadGenerator};
use lab_experiments::host::{HostInfo, cpu_list};
use lab_experiments::journal::{self, Journal};
use lab_experiments::plan::{self, TimeOverrides};
use lab_experiments::{ExperimentCatalog, ExperimentDefinition, GeneratorInfo, PlannedExperiment, Scale};

use crate::command_error::CommandError;
use crate::console::stderr_line;
use crate::options::{parse_size, parse_time};

/// Options that select experiments, devices, durations and the generator.
#[derive(Args)]
pub(crate) struct ExperimentArgs {
    /// Experiments, studies or groups, as `ringbolt lab list` names them
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// A block device, `null_blk`, or a bdev by URI (null:1g, malloc:64m, model:…); may be repeated
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Vec<String>,
    /// A file; if it does not exist, it is created, and removed at the end
    #[arg(long, value_name = "PATH")]
    pub(crate) file: Option<PathBuf>,
    /// Permit destroying the data of this device or file; without it nothing is written to it
    #[arg(long, value_name = "DEVICE")]
    pub(crate) destroy_data: Vec<String>,
    /// Few values, about a second each
    #[arg(long, conflicts_with = "paper")]
    pub(crate) quick: bool,
    /// All values, with the published durations and repetitions
    #[arg(long)]
    pub(crate) paper: bool,
    /// Duration of each measurement, instead of the scale's
    #[arg(long, value_parser = parse_time)]
    pub(crate) runtime: Option<u64>,
    /// Warm-up before it, instead of the scale's
    #[arg(long, value_parser = parse_time)]
    pub(crate) ramp: Option<u64>,
    /// Measurements of each cell, instead of the scale's
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repetitions: Option<u32>,
    /// Load generator: ringbolt, fio, or auto for ringbolt if it works here and fio otherwise
    #[arg(long, value_name = "PROGRAM", default_value = "auto")]
    pub(crate) generator: String,
    /// CPUs that cells may use, for example 0-3,5; by default all
    #[arg(long, value_name = "LIST")]
    pub(crate) cores: Option<String>,
    /// Size of each loop device's file
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = parse_size)]
    pub(crate) disk_size: u64,
    /// Directory of these files; by default in the run directory
    #[arg(long, value_name = "DIR")]
    pub(crate) disks: Option<PathBuf>,
    /// URI of the kernel's NVMe/TCP target, which you set up, for comparison: nvme+tcp://HOST:PORT/NQN?ns=1
    #[arg(long, value_name = "URI")]
    pub(crate) nvmet: Option<String>,
    /// File with a definition of your own
    #[arg(long, value_name = "FILE")]
    pub(crate) definition: Vec<PathBuf>,
    /// Seed of random offsets
    #[arg(long, default_value_t = 0x8989)]
    pub(crate) seed: u32,
    /// Seed of the order in which cells are measured; by default a new one for each run, which is printed
    #[arg(long, value_name = "SEED")]
    pub(crate) order_seed: Option<u32>,
}

/// A plan with the devices, CPUs and generators that it uses.
pub(crate) struct ResolvedRun {
    pub(crate) names: Vec<String>,
    pub(crate) host: HostInfo,
    pub(crate) devices: Vec<Device>,
    pub(crate) experiments: Vec<PlannedExperiment>,
    pub(crate) scale: Scale,
    pub(crate) cpus: Vec<u32>,
    pub(crate) generator: LoadGenerator,
    pub(crate) generator_info: GeneratorInfo,
    pub(crate) bdev_generator: LoadGenerator,
}

/// The built-in experiments and the user's.
pub(crate) fn catalog(files: &[PathBuf]) -> Result<ExperimentCatalog, CommandError> {
    let mut catalog = ExperimentCatalog::built_in();
    if let Some(folder) = capabilities::user_definitions_directory() {
        catalog.add_directory(&folder).map_err(CommandError::config)?;
    }
    for file in files {
        catalog.add_file(file).map_err(CommandError::config)?;
    }
    Ok(catalog)
}

/// Restores what killed runs have changed, and reports it. Every lab command that uses devices starts with this.
/// Returns how many changes were restored, and how many could not be.
pub(crate) fn restore_killed_runs() -> (usize, usize) {
    let (done, problems) = journal::restore_killed_runs(&journal::default_directory());
    if !done.is_empty() {
        stderr_line!("an earlier run was killed; restored: {}", done.join(", "));
    }
    for problem in &problems {
        stderr_line!("an earlier run was killed: {problem}");
    }
    (done.len(), problems.len())
}

/// Starts the watchdog, which kills the generators if this process is killed.
pub(crate) fn start_watchdog(journal: &mut Journal) -> Result<(), CommandError> {
    let program = std::env::current_exe().map_err(CommandError::environment)?;
    let mut command = Command::new(program);
    let started = journal.processes().start_watchdog(command.args(["lab", "watchdog"]));
    started.map_err(|error| CommandError::environment(format!("the watchdog cannot be started: {error}")))
}

impl ExperimentArgs {
    fn scale_of(&self, names: &[String]) -> Scale {
        match (self.quick, self.paper) {
            (true, _) => Scale::Quick,
            (_, true) => Scale::Paper,
            // The group `quick` implies the scale of the same name.
            _ if !names.is_empty() && names.iter().all(|name| name == "quick") => Scale::Quick,
            _ => Scale::Default,
        }
    }

    /// Reads the machine and plans the experiments. Changes nothing.
    pub(crate) fn resolve(&self) -> Result<ResolvedRun, CommandError> {
        self.resolve_or(None)
    }

    /// As [`ExperimentArgs::resolve`], with the group to use if no experiment is named.
    pub(crate) fn resolve_or(&self, default: Option<&str>) -> Result<ResolvedRun, CommandError> {
        let catalog = catalog(&self.definition)?;
        let mut names = self.names.clone();
        names.extend(
            default.filter(|_| self.names.is_empty() && self.definition.is_empty()).map(String::from),
        );
        if names.is_empty() {
            for file in &self.definition {
                let mut alone = ExperimentCatalog::built_in();
                names.push(alone.add_file(file).map_err(CommandError::config)?);
            }
        }
        if names.is_empty() {
            return Err(CommandError::usage(
                "name an experiment, a study or a group; `ringbolt lab list` shows them",
            ));
        }
        let definitions = catalog.select(&names).map_err(CommandError::usage)?;
        let scale = self.scale_of(&names);
        let host = HostInfo::default();
        let devices = self.devices(&host, &definitions, scale)?;
        let (generator, generator_info, bdev_generator) = self.generators()?;
        let cpus = self.cpus(&host)?;
        let mut network: Vec<String> = Vec::new();
        if devices.first().is_some_and(|device| !device.location.is_empty() || device.writable) {
            network.push("ringbolt".into());
        }
        network.extend(self.nvmet.as_ref().map(|_| "nvmet".to_string()));
        let capabilities = capabilities::machine_capabilities(
            &host,
            &devices,
            cpus.clone(),
            &generator,
            &bdev_generator,
            &network,
        );
        let seconds = |ns: Option<u64>| ns.map(|ns| ns as f64 / 1e9);
        let times = TimeOverrides {
            runtime_s: seconds(self.runtime),
            ramp_s: seconds(self.ramp),
            repetitions: self.repetitions,
        };
        let experiments = plan::plan_experiments(&definitions, scale, times, &capabilities)
            .map_err(CommandError::config)?;
        Ok(ResolvedRun {
            names,
            host,
            devices,
            experiments,
            scale,
            cpus,
            generator,
            generator_info,
            bdev_generator,
        })
    }

    fn devices(
        &self,
        host: &HostInfo,
        definitions: &[&ExperimentDefinition],
        scale: Scale,
    ) -> Result<Vec<Device>, CommandError> {
        let cells = definitions.iter().flat_map(|definition| definition.cells(scale).unwrap_or_default());
        let devices_max = cells.filter_map(|cell| cell.get("devices")?.as_f64()).fold(1.0, f64::max);
        let wanted = DeviceRequest {
            devices: self.device.clone(),
            file: self.file.clone(),
            destroy: self.destroy_data.clone(),
            disk_bytes: self.disk_size.max(1 << 20),
        };
        let root = rustix::process::geteuid().is_root();
        devices::resolve(&wanted, host, devices_max as usize, root).map_err(|error| {
            match self.device.is_empty() {
                true if self.file.is_none() => CommandError::environment(error),
                _ => CommandError::usage(error),
            }
        })
    }

    fn cpus(&self, host: &HostInfo) -> Result<Vec<u32>, CommandError> {
        let available = host.cpus();
        let Some(text) = &self.cores else { return Ok(available) };
        let requested = cpu_list(text);
        if requested.is_empty() {
            return Err(CommandError::usage(format!("--cores={text}: not a list such as 0-3,5")));
        }
        match requested.iter().find(|cpu| !available.contains(cpu)) {
            Some(cpu) => {
                Err(CommandError::usage(format!("--cores={text}: CPU {cpu} is offline or not allowed")))
            }
            None => Ok(requested),
        }
    }

    /// The generator for kernel APIs with its cost, and the generator for bdevs.
    fn generators(&self) -> Result<(LoadGenerator, GeneratorInfo, LoadGenerator), CommandError> {
        let program = std::env::current_exe().map_err(CommandError::environment)?;
        let mut bdev_generator = LoadGenerator::ringbolt(program);
        let folder = journal::probe_directory(std::process::id());
        let probe = |generator: &LoadGenerator| {
            let found = generator.probe(&folder);
            let _ = std::fs::remove_dir(&folder);
            found.map(|(version, cost)| GeneratorInfo {
                name: generator.name.clone(),
                version,
                cost_ns_per_io: cost,
            })
        };
        let ringbolt =
            if self.generator == "fio" { Err("not requested".to_string()) } else { probe(&bdev_generator) };
        let use_options =
            |bdev_generator: &mut LoadGenerator| bdev_generator.input = GeneratorInput::Arguments;
        match (self.generator.as_str(), ringbolt) {
            ("auto" | "ringbolt", Ok(used)) => Ok((bdev_generator.clone(), used, bdev_generator)),
            ("ringbolt", Err(message)) => {
                Err(CommandError::environment(format!("--generator ringbolt: {message}")))
            }
            ("auto" | "fio", ringbolt) => {
                if ringbolt.is_err() {
                    use_options(&mut bdev_generator);
                }
                let fio = LoadGenerator::fio();
                let used = probe(&fio).map_err(|message| {
                    CommandError::environment(format!(
                        "no generator works here; fio: {message} (apt install fio)"
                    ))
                })?;
                Ok((fio, used, bdev_generator))
            }
            (other, _) => {
                Err(CommandError::usage(format!("--generator {other}: it is auto, ringbolt or fio")))
            }
        }
    }

    /// The targets that exist already.
    pub(crate) fn network_targets(&self) -> Vec<NetworkTarget> {
        let of = |uri: &String| NetworkTarget { name: "nvmet".into(), uri: uri.clone(), process: None };
        self.nvmet.iter().map(of).collect()
    }
}

/// Formats a duration: `42 s`, `3 min 05 s`, `2 h 10 min`.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..=99 => format!("{whole} s"),
        100..=5999 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}
