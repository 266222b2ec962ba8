//! A tiny experiment on a loop device under every scheduler, with a real generator: the scheduler that a
//! record names is the one that the kernel had, and nothing is left behind.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use lab_experiments::generator::Generator;
use lab_experiments::host::Host;
use lab_experiments::journal::Journal;
use lab_experiments::locks::DeviceLocks;
use lab_experiments::plan::{self, Times};
use lab_experiments::runner::{self, Setup};
use lab_experiments::session;
use lab_experiments::target::{self, Wanted};
use lab_experiments::{Definition, GeneratorUse, Machine, Plan, Run, RunWriter, SCHEMA, Scale};

const TINY: &str = "
id = 'test.loop'
title = 'one reader under every scheduler'
x = 'scheduler'
y = 'iops'
series = ['scheduler']
measure = ['counters', 'profile', 'tokens']
[fixed]
api = 'aio'
rw = 'randread'
block_bytes = 4096
devices = 1
jobs = 1
iodepth = 4
cores = 1
read_target_us = 100
write_target_us = 1000
[vary]
scheduler = ['none', 'mq-deadline', 'kyber', 'bfq']
[[rule]]
where = { scheduler = 'kyber' }
set = { jobs = 2 }
";

/// Why it cannot be run here.
fn missing(folder: &Path) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root makes loop devices".into());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("the kernel has no loop devices".into());
    }
    Generator::fio().probe(folder).err().map(|said| format!("fio: {said}"))
}

#[test]
fn every_scheduler_is_set_measured_and_put_back() {
    let folder = std::env::temp_dir().join(format!("ringbolt-loops-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    if let Some(reason) = missing(&folder) {
        eprintln!("SKIPPED: {reason}");
        return;
    }
    let host = Host::default();
    // Kyber's targets are set for Kyber alone.
    let text = TINY.replace("read_target_us = 100\nwrite_target_us = 1000\n", "");
    let text = text.replace("set = { jobs = 2 }", "set = { read_target_us = 100, write_target_us = 1000 }");
    let definition = Definition::parse(&text).unwrap();
    let wanted = Wanted { disk_bytes: 4 << 20, ..Wanted::default() };
    let mut devices = target::find(&wanted, &host, 1, true).unwrap();
    let mut journal = Journal::begin(&folder.join("journal")).unwrap();
    let mut locks = DeviceLocks::new(&folder.join("journal"));
    target::make(&mut devices, &folder.join("disks"), &mut journal, &mut locks, &host).unwrap();
    let node = devices[0].place.clone();
    let name = devices[0].name.clone().unwrap();
    let before = host.block(&name).scheduler;

    let generator = Generator::fio();
    let around = session::surroundings(&host, &devices, host.cpus(), &generator, &generator, &[]);
    let times = Times { runtime_s: Some(0.4), ramp_s: Some(0.2), repetitions: Some(1) };
    let experiments = plan::make(&[&definition], Scale::Default, times, &around).unwrap();
    let offered = experiments[0].cells.iter().filter(|cell| cell.skipped.is_none()).count();
    let plan = Plan { schema: SCHEMA, experiments, cores: host.cpus(), seed: 1, ..Plan::default() };
    let out = folder.join("out");
    let mut writer = RunWriter::create(&out, &Machine::default(), &plan).unwrap();
    let stop = AtomicBool::new(false);
    let setup = Setup {
        plan: &plan,
        devices: &devices,
        generator: &generator,
        generator_use: GeneratorUse::default(),
        own: &generator,
        host: &host,
        done: BTreeSet::new(),
        network: &Vec::<lab_experiments::session::NetworkTarget>::new(),
        stop: &stop,
    };
    let summary = runner::run(&setup, &mut writer, &mut journal, &mut locks, &mut |_| {}).unwrap();
    let run = Run::open(&out).unwrap();
    let failed: Vec<_> = run.records.iter().filter_map(|record| record.failed.clone()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(summary.measured, offered);
    assert!(offered >= 1, "the kernel offers at least none");
    for record in run.records.iter().filter(|record| record.is_measured()) {
        assert!(record.metric("fg", "iops").unwrap() > 0.0, "{record:?}");
        assert!(record.metric("fg", "clat_p99_us").unwrap() > 0.0);
        assert_eq!(record.schedulers[0].scheduler, record.series);
        assert!(!record.roles["fg"].histograms["clat"].is_empty());
        if record.series == "kyber" {
            assert_eq!(record.schedulers[0].settings["read_lat_nsec"], "100000");
        }
        eprintln!("{}: {:.0} IOPS, {:?}", record.series, record.metric("fg", "iops").unwrap(), record.notes);
    }
    locks.close_nodes();
    assert_eq!(journal.restore(), Vec::<String>::new());
    assert_eq!(host.block(&name).scheduler, before, "the scheduler of {node} is as it was");
    assert!(!folder.join("disks/disk0").exists());
    std::fs::remove_dir_all(folder).unwrap();
}
