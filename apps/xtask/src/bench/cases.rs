//! The benchmarks by name.

use anyhow::bail;

use super::examples::Example;
use super::load::{self, Device, Load};
use super::server::Reach;
use super::{Outcome, Setting, fio, idle, instructions, page, scaling};

/// One benchmark.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    kind: Kind,
}

enum Kind {
    /// The load generator alone, on one core.
    Local(Device, Load),
    /// The target on one core, the load generator on another.
    Remote(Reach, Device, Load, &'static str),
    /// Target and load generator share two cores, over 16 connections.
    Shared,
    Idle,
    Startup,
    /// Of the load generator and the null device, at a depth and with more options.
    Instructions(u32, &'static [&'static str]),
    InstructionsTarget,
    InstructionsDriver,
    /// The driver alone, with so many queue pairs on as many cores.
    Scaling(usize),
    /// The load generator and fio.
    Fio(fio::Job),
    /// Processes of the load generator.
    Processes,
    /// A report of the lab.
    Page,
}

const fn case(name: &'static str, about: &'static str, kind: Kind) -> Case {
    Case { name, about, kind }
}

const fn small(rw: &'static str, depth: u32) -> Load {
    Load { rw, block: "4k", depth }
}

const LARGE: Load = Load { rw: "randread", block: "128k", depth: 16 };

use Device::{Malloc, Null};
use Kind::{Instructions, InstructionsDriver, InstructionsTarget, Local};

const fn tcp(device: Device, load: Load, idle: &'static str) -> Kind {
    Kind::Remote(Reach::Tcp, device, load, idle)
}

const fn vfio_user(device: Device, load: Load) -> Kind {
    Kind::Remote(Reach::VfioUser, device, load, "spin")
}

const fn beside_fio(engine: &'static str, depth: u32, file: bool) -> Kind {
    Kind::Fio(fio::Job { engine, depth, file })
}

pub(super) const ALL: &[Case] = &[
    case("null-qd1", "4 KiB reads of the null device, one core, QD 1", Local(Null, small("randread", 1))),
    case("null-qd128", "the same at QD 128", Local(Null, small("randread", 128))),
    case(
        "malloc-read",
        "4 KiB reads of a memory device, one core, QD 128",
        Local(Malloc, small("randread", 128)),
    ),
    case("malloc-write", "4 KiB writes of the same", Local(Malloc, small("randwrite", 128))),
    case(
        "tcp-null-read-qd1",
        "4 KiB reads over TCP, null device, QD 1",
        tcp(Null, small("randread", 1), "spin"),
    ),
    case(
        "tcp-null-read-qd1-adaptive",
        "the same with an adaptive target",
        tcp(Null, small("randread", 1), "adaptive"),
    ),
    case(
        "tcp-null-read-qd32",
        "the same with a spinning one at QD 32",
        tcp(Null, small("randread", 32), "spin"),
    ),
    case("tcp-null-read-qd128", "the same at QD 128", tcp(Null, small("randread", 128), "spin")),
    case(
        "tcp-null-write-qd1",
        "4 KiB writes over TCP, null device, QD 1",
        tcp(Null, small("randwrite", 1), "spin"),
    ),
    case("tcp-null-write-qd32", "the same at QD 32", tcp(Null, small("randwrite", 32), "spin")),
    case("tcp-null-write-qd128", "the same at QD 128", tcp(Null, small("randwrite", 128), "spin")),
    case(
        "tcp-malloc-read",
        "4 KiB reads over TCP, memory device, QD 128",
        tcp(Malloc, small("randread", 128), "spin"),
    ),
    case("tcp-malloc-write", "4 KiB writes of the same", tcp(Malloc, small("randwrite", 128), "spin")),
    case("tcp-null-128k", "128 KiB reads over TCP, null device, QD 16", tcp(Null, LARGE, "spin")),
    case("tcp-malloc-128k", "the same from a memory device", tcp(Malloc, LARGE, "spin")),
    case("tcp-2x16", "4 KiB reads, 16 connections of QD 8, all on the same two cores", Kind::Shared),
    case("idle", "a target with ten namespaces and one host that does nothing", Kind::Idle),
    case("startup", "from exec of the target to the first accepted connection", Kind::Startup),
    case(
        "vfio-user-null-read-qd1",
        "4 KiB reads over vfio-user, our driver, null device, QD 1",
        vfio_user(Null, small("randread", 1)),
    ),
    case("vfio-user-null-read-qd32", "the same at QD 32", vfio_user(Null, small("randread", 32))),
    case("vfio-user-null-read-qd128", "the same at QD 128", vfio_user(Null, small("randread", 128))),
    case(
        "vfio-user-malloc-read-qd32",
        "the same from a memory device at QD 32",
        vfio_user(Malloc, small("randread", 32)),
    ),
    case("driver-qpairs-1", "the driver alone at QD 128, one queue pair on one core", Kind::Scaling(1)),
    case("driver-qpairs-2", "the same with two, a core each", Kind::Scaling(2)),
    case("driver-qpairs-4", "the same with four", Kind::Scaling(4)),
    case("driver-qpairs-8", "the same with eight", Kind::Scaling(8)),
    case("fio-null", "the generator's null engine and fio's, QD 128", beside_fio("null", 128, false)),
    case("fio-psync", "a file in memory read with psync, and by fio", beside_fio("psync", 1, true)),
    case("fio-libaio", "the same with libaio, QD 32", beside_fio("libaio", 32, true)),
    case("fio-io_uring", "the same with io_uring, QD 32", beside_fio("io_uring", 32, true)),
    case("processes-256", "256 processes that do one I/O each, from exec to the last exit", Kind::Processes),
    case("report-10k", "a report of 10,000 cells: made, and opened in a browser", Kind::Page),
    case("instructions-null-qd1", "instructions an I/O of null-qd1", Instructions(1, &[])),
    case("instructions-null-qd128", "instructions an I/O of null-qd128", Instructions(128, &[])),
    case(
        "instructions-null-rate",
        "the same in an open loop that is always late",
        Instructions(128, &["--rate_iops=1000000000"]),
    ),
    case(
        "instructions-null-poisson",
        "the same with a Poisson process",
        Instructions(128, &["--rate_iops=1000000000", "--rate_process=poisson"]),
    ),
    case(
        "instructions-driver",
        "instructions of the driver a 4 KiB read, submit and complete, QD 128",
        InstructionsDriver,
    ),
    case(
        "instructions-target",
        "instructions a 4 KiB read of a target over TCP, memory device",
        InstructionsTarget,
    ),
];

/// Starts from exec whose median is taken, at least.
const STARTS_MIN: u32 = 10;

impl Case {
    pub(super) fn run(&self, setting: &Setting<'_>) -> anyhow::Result<Outcome> {
        match &self.kind {
            Local(device, load) => load::local(setting, *device, load),
            Kind::Remote(reach, device, load, idle) => load::remote(setting, *reach, *device, load, idle),
            Kind::Shared => load::shared(setting),
            Kind::Idle => idle::idle(setting),
            Kind::Startup => idle::startup(setting),
            Instructions(depth, options) => instructions::null(setting, *depth, options),
            InstructionsTarget => instructions::target(setting),
            InstructionsDriver => instructions::driver(setting),
            Kind::Scaling(pairs) => scaling::driver(setting, *pairs),
            Kind::Fio(job) => fio::beside(setting, job),
            Kind::Processes => fio::processes(setting),
            Kind::Page => page::page(setting),
        }
    }

    /// The example of a crate that it runs.
    pub(super) fn example(&self) -> Option<Example> {
        match self.kind {
            InstructionsDriver => Some(instructions::DRIVER),
            Kind::Scaling(_) => Some(scaling::DRIVER),
            Kind::Page => Some(page::SYNTHETIC),
            _ => None,
        }
    }

    /// Whether it measures the program `ringbolt`, and not an example of this checkout alone.
    pub(super) fn is_of_program(&self) -> bool {
        !matches!(self.kind, InstructionsDriver | Kind::Scaling(_))
    }

    /// How often it runs where `runs` are asked for.
    pub(super) fn repeats(&self, runs: u32) -> u32 {
        match self.kind {
            Kind::Startup => runs.max(STARTS_MIN),
            // Counts, not times: they come out the same.
            Instructions(..) | InstructionsTarget | InstructionsDriver => 1,
            _ => runs,
        }
    }
}

/// The benchmarks that are named, each by its name or by what its name starts with.
pub(super) fn choose(names: &[String]) -> anyhow::Result<Vec<&'static Case>> {
    let matches = |case: &Case, name: &str| {
        let stem = name.trim_end_matches(['*', '-']);
        case.name == stem || case.name.strip_prefix(stem).is_some_and(|rest| rest.starts_with('-'))
    };
    if let Some(name) = names.iter().find(|name| !ALL.iter().any(|case| matches(case, name))) {
        bail!("no benchmark {name}; --list names them");
    }
    Ok(ALL.iter().filter(|case| names.is_empty() || names.iter().any(|name| matches(case, name))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmarks_are_chosen_by_name_or_by_its_first_words() {
        let chosen = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            choose(&names).map(|cases| cases.iter().map(|case| case.name).collect::<Vec<_>>()).ok()
        };
        assert_eq!(chosen(&["null", "idle"]), Some(vec!["null-qd1", "null-qd128", "idle"]));
        assert_eq!(chosen(&["tcp-malloc-*"]).map(|names| names.len()), Some(3));
        assert_eq!(chosen(&["tcp-n"]), None);
        assert_eq!(chosen(&[]).map(|names| names.len()), Some(ALL.len()));
    }
}
