//! What `lab plan` and `lab run` have in common: which experiments, on what, how long, made by whom.

use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use lab_experiments::generator::{Generator, Style};
use lab_experiments::host::{Host, cpu_list};
use lab_experiments::journal::{self, Journal};
use lab_experiments::plan::{self, Times};
use lab_experiments::session::{self, NetworkTarget};
use lab_experiments::target::{self, Device, Wanted};
use lab_experiments::{Catalog, Definition, GeneratorUse, PlannedExperiment, Scale};

use crate::cli;
use crate::command_error::CommandError;
use crate::console::stderr_line;

/// Experiments, devices, times.
#[derive(Args)]
pub(crate) struct Bench {
    /// Experiments, studies or groups, as `ringbolt lab list` names them
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// A block device, `null_blk`, or a device of our own by URI (null:1g, malloc:64m, model:…); may be repeated
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Vec<String>,
    /// A file; one that is not there is made, and removed at the end
    #[arg(long, value_name = "PATH")]
    pub(crate) file: Option<PathBuf>,
    /// The data of this device or file may be lost; without it nothing is written to it
    #[arg(long, value_name = "DEVICE")]
    pub(crate) destroy_data: Vec<String>,
    /// Few values, a second each
    #[arg(long, conflicts_with = "paper")]
    pub(crate) quick: bool,
    /// All values, as long and as often as published
    #[arg(long)]
    pub(crate) paper: bool,
    /// How long to measure each cell, instead of what the scale says
    #[arg(long, value_parser = cli::parse_time)]
    pub(crate) runtime: Option<u64>,
    /// How long before that, instead of what the scale says
    #[arg(long, value_parser = cli::parse_time)]
    pub(crate) ramp: Option<u64>,
    /// How often, instead of what the scale says
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repetitions: Option<u32>,
    /// What makes the load: ringbolt, fio, or auto for ringbolt where it takes job files and fio otherwise
    #[arg(long, value_name = "PROGRAM", default_value = "auto")]
    pub(crate) generator: String,
    /// Processors that cells may use, as 0-3,5; by default all
    #[arg(long, value_name = "LIST")]
    pub(crate) cores: Option<String>,
    /// Size of each disk that the lab makes
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = cli::parse_size)]
    pub(crate) disk_size: u64,
    /// Where the lab makes its disks; by default beside the results
    #[arg(long, value_name = "DIR")]
    pub(crate) disks: Option<PathBuf>,
    /// The kernel's NVMe/TCP target, set up by you, for what is compared with it: nvme+tcp://HOST:PORT/NQN?ns=1
    #[arg(long, value_name = "URI")]
    pub(crate) nvmet: Option<String>,
    /// A definition of your own
    #[arg(long, value_name = "FILE")]
    pub(crate) definition: Vec<PathBuf>,
    /// Seed of positions
    #[arg(long, default_value_t = 0x8989)]
    pub(crate) seed: u32,
}

/// Everything that was found out from it.
pub(crate) struct Found {
    pub(crate) host: Host,
    pub(crate) devices: Vec<Device>,
    pub(crate) experiments: Vec<PlannedExperiment>,
    pub(crate) scale: Scale,
    pub(crate) cpus: Vec<u32>,
    pub(crate) generator: Generator,
    pub(crate) generator_use: GeneratorUse,
    pub(crate) own: Generator,
}

/// The catalog with the user's definitions.
pub(crate) fn catalog(files: &[PathBuf]) -> Result<Catalog, CommandError> {
    let mut catalog = Catalog::built_in();
    if let Some(folder) = session::definitions_directory() {
        catalog.add_directory(&folder).map_err(CommandError::config)?;
    }
    for file in files {
        catalog.add_file(file).map_err(CommandError::config)?;
    }
    Ok(catalog)
}

/// Ends what a run that was killed has left running, puts back what it has changed, and says so. Every lab command
/// begins with it. Returns how many things were done, and how many could not be.
pub(crate) fn restore_left_behind() -> (usize, usize) {
    let (done, problems) = journal::restore_left_behind(&journal::default_directory());
    if !done.is_empty() {
        stderr_line!("a run before this one was killed; put back: {}", done.join(", "));
    }
    for problem in &problems {
        stderr_line!("a run before this one was killed: {problem}");
    }
    (done.len(), problems.len())
}

/// Starts the process that ends the generators when this one is killed.
pub(crate) fn guard(journal: &mut Journal) -> Result<(), CommandError> {
    let program = std::env::current_exe().map_err(CommandError::environment)?;
    let mut command = Command::new(program);
    let started = journal.processes().guard(command.args(["lab", "watchdog"]));
    started.map_err(|error| CommandError::environment(format!("the watchdog cannot be started: {error}")))
}

impl Bench {
    pub(crate) fn scale(&self) -> Scale {
        match (self.quick, self.paper) {
            (true, _) => Scale::Quick,
            (_, true) => Scale::Paper,
            // The group and the scale go by the same name, and mean the same.
            _ if !self.names.is_empty() && self.names.iter().all(|name| name == "quick") => Scale::Quick,
            _ => Scale::Default,
        }
    }

    /// Looks at the machine and plans. Changes nothing.
    pub(crate) fn find(&self) -> Result<Found, CommandError> {
        let catalog = catalog(&self.definition)?;
        let mut names = self.names.clone();
        if names.is_empty() {
            for file in &self.definition {
                let mut alone = Catalog::built_in();
                names.push(alone.add_file(file).map_err(CommandError::config)?);
            }
        }
        if names.is_empty() {
            return Err(CommandError::usage(
                "name an experiment, a study or a group; `ringbolt lab list` shows them",
            ));
        }
        let definitions = catalog.select(&names).map_err(CommandError::usage)?;
        let scale = self.scale();
        let host = Host::default();
        let devices = self.devices(&host, &definitions, scale)?;
        let (generator, generator_use, own) = self.generators()?;
        let cpus = self.cpus(&host)?;
        let mut network: Vec<String> = Vec::new();
        if devices.first().is_some_and(|device| !device.place.is_empty() || device.writable) {
            network.push("ringbolt".into());
        }
        network.extend(self.nvmet.as_ref().map(|_| "nvmet".to_string()));
        let around = session::surroundings(&host, &devices, cpus.clone(), &generator, &own, &network);
        let seconds = |ns: Option<u64>| ns.map(|ns| ns as f64 / 1e9);
        let times = Times {
            runtime_s: seconds(self.runtime),
            ramp_s: seconds(self.ramp),
            repetitions: self.repetitions,
        };
        let experiments = plan::make(&definitions, scale, times, &around).map_err(CommandError::config)?;
        Ok(Found { host, devices, experiments, scale, cpus, generator, generator_use, own })
    }

    fn devices(
        &self,
        host: &Host,
        definitions: &[&Definition],
        scale: Scale,
    ) -> Result<Vec<Device>, CommandError> {
        let cells = definitions.iter().flat_map(|definition| definition.cells(scale).unwrap_or_default());
        let most = cells.filter_map(|cell| cell.get("devices")?.as_f64()).fold(1.0, f64::max);
        let wanted = Wanted {
            devices: self.device.clone(),
            file: self.file.clone(),
            destroy: self.destroy_data.clone(),
            disk_bytes: self.disk_size.max(1 << 20),
        };
        let root = rustix::process::geteuid().is_root();
        target::find(&wanted, host, most as usize, root).map_err(|error| match self.device.is_empty() {
            true if self.file.is_none() => CommandError::environment(error),
            _ => CommandError::usage(error),
        })
    }

    fn cpus(&self, host: &Host) -> Result<Vec<u32>, CommandError> {
        let there = host.cpus();
        let Some(text) = &self.cores else { return Ok(there) };
        let asked = cpu_list(text);
        if asked.is_empty() {
            return Err(CommandError::usage(format!("--cores={text}: it is a list, as 0-3,5")));
        }
        match asked.iter().find(|cpu| !there.contains(cpu)) {
            Some(cpu) => {
                Err(CommandError::usage(format!("--cores={text}: processor {cpu} is not there or not ours")))
            }
            None => Ok(asked),
        }
    }

    /// What drives the kernel's APIs, with its cost, and what drives block devices of our own.
    fn generators(&self) -> Result<(Generator, GeneratorUse, Generator), CommandError> {
        let program = std::env::current_exe().map_err(CommandError::environment)?;
        let mut own = Generator::ringbolt(program);
        let folder = std::env::temp_dir().join(format!("ringbolt-probe-{}", std::process::id()));
        let probe = |generator: &Generator| {
            let found = generator.probe(&folder);
            let _ = std::fs::remove_dir(&folder);
            found.map(|(version, cost)| GeneratorUse {
                name: generator.name.clone(),
                version,
                cost_ns_per_io: cost,
            })
        };
        let ours = if self.generator == "fio" { Err("not asked for".to_string()) } else { probe(&own) };
        let without = |own: &mut Generator| own.style = Style::Options;
        match (self.generator.as_str(), ours) {
            ("auto" | "ringbolt", Ok(used)) => Ok((own.clone(), used, own)),
            ("ringbolt", Err(said)) => {
                Err(CommandError::environment(format!("--generator ringbolt: {said}")))
            }
            ("auto" | "fio", ours) => {
                if ours.is_err() {
                    without(&mut own);
                }
                let fio = Generator::fio();
                let used = probe(&fio).map_err(|said| {
                    CommandError::environment(format!(
                        "no generator works here; fio: {said} (apt install fio)"
                    ))
                })?;
                Ok((fio, used, own))
            }
            (other, _) => {
                Err(CommandError::usage(format!("--generator {other}: it is auto, ringbolt or fio")))
            }
        }
    }

    /// The targets that are there already.
    pub(crate) fn network_targets(&self) -> Vec<NetworkTarget> {
        let of = |uri: &String| NetworkTarget { name: "nvmet".into(), uri: uri.clone(), process: None };
        self.nvmet.iter().map(of).collect()
    }
}

/// Minutes and seconds, for people.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..=99 => format!("{whole} s"),
        100..=5999 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}
