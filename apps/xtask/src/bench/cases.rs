//! The benchmarks by name.

use anyhow::bail;

use super::load::{self, Device, Load};
use super::{Outcome, Setting, idle, instructions};

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
    Tcp(Device, Load, &'static str),
    /// Target and load generator share two cores, over 16 connections.
    Shared,
    Idle,
    Startup,
    /// Of the load generator and the null device.
    Instructions(u32),
    InstructionsTarget,
}

const fn case(name: &'static str, about: &'static str, kind: Kind) -> Case {
    Case { name, about, kind }
}

const fn small(rw: &'static str, depth: u32) -> Load {
    Load { rw, block: "4k", depth }
}

const LARGE: Load = Load { rw: "randread", block: "128k", depth: 16 };

use Device::{Malloc, Null};
use Kind::{Instructions, InstructionsTarget, Local, Tcp};

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
        Tcp(Null, small("randread", 1), "spin"),
    ),
    case(
        "tcp-null-read-qd1-adaptive",
        "the same with an adaptive target",
        Tcp(Null, small("randread", 1), "adaptive"),
    ),
    case(
        "tcp-null-read-qd32",
        "the same with a spinning one at QD 32",
        Tcp(Null, small("randread", 32), "spin"),
    ),
    case("tcp-null-read-qd128", "the same at QD 128", Tcp(Null, small("randread", 128), "spin")),
    case(
        "tcp-null-write-qd1",
        "4 KiB writes over TCP, null device, QD 1",
        Tcp(Null, small("randwrite", 1), "spin"),
    ),
    case("tcp-null-write-qd32", "the same at QD 32", Tcp(Null, small("randwrite", 32), "spin")),
    case("tcp-null-write-qd128", "the same at QD 128", Tcp(Null, small("randwrite", 128), "spin")),
    case(
        "tcp-malloc-read",
        "4 KiB reads over TCP, memory device, QD 128",
        Tcp(Malloc, small("randread", 128), "spin"),
    ),
    case("tcp-malloc-write", "4 KiB writes of the same", Tcp(Malloc, small("randwrite", 128), "spin")),
    case("tcp-null-128k", "128 KiB reads over TCP, null device, QD 16", Tcp(Null, LARGE, "spin")),
    case("tcp-malloc-128k", "the same from a memory device", Tcp(Malloc, LARGE, "spin")),
    case("tcp-2x16", "4 KiB reads, 16 connections of QD 8, all on the same two cores", Kind::Shared),
    case("idle", "a target with ten namespaces and one host that does nothing", Kind::Idle),
    case("startup", "from exec of the target to the first accepted connection", Kind::Startup),
    case("instructions-null-qd1", "instructions an I/O of null-qd1", Instructions(1)),
    case("instructions-null-qd128", "instructions an I/O of null-qd128", Instructions(128)),
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
            Tcp(device, load, idle) => load::tcp(setting, *device, load, idle),
            Kind::Shared => load::shared(setting),
            Kind::Idle => idle::idle(setting),
            Kind::Startup => idle::startup(setting),
            Instructions(depth) => instructions::null(setting, *depth),
            InstructionsTarget => instructions::target(setting),
        }
    }

    /// How often it runs where `runs` are asked for.
    pub(super) fn repeats(&self, runs: u32) -> u32 {
        match self.kind {
            Kind::Startup => runs.max(STARTS_MIN),
            // Counts, not times: they come out the same.
            Instructions(_) | InstructionsTarget => 1,
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
