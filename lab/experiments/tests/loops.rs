//! A small experiment on a loop device under every scheduler, with a real generator: the recorded scheduler is the
//! one that the kernel used, and everything is restored.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use lab_experiments::capabilities;
use lab_experiments::devices::{self, DeviceRequest};
use lab_experiments::generator::LoadGenerator;
use lab_experiments::host::HostInfo;
use lab_experiments::journal::Journal;
use lab_experiments::locks::DeviceLocks;
use lab_experiments::plan::{self, TimeOverrides};
use lab_experiments::runner::{self, RunSetup};
use lab_experiments::{
    ExperimentDefinition, GeneratorInfo, MachineRecord, RunDirectory, RunPlan, RunWriter, SCHEMA, Scale,
};

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

/// Why the test cannot run on this machine.
fn why_skipped(folder: &Path) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root makes loop devices".into());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("the kernel has no loop devices".into());
    }
    LoadGenerator::fio().probe(folder).err().map(|message| format!("fio: {message}"))
}

#[test]
fn every_scheduler_is_set_measured_and_restored() {
    let folder = std::env::temp_dir().join(format!("ringbolt-loops-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    if let Some(reason) = why_skipped(&folder) {
        eprintln!("SKIPPED: {reason}");
        return;
    }
    let host = HostInfo::default();
    // Only Kyber has latency targets.
    let text = TINY.replace("read_target_us = 100\nwrite_target_us = 1000\n", "");
    let text = text.replace("set = { jobs = 2 }", "set = { read_target_us = 100, write_target_us = 1000 }");
    let definition = ExperimentDefinition::parse(&text).unwrap();
    let wanted = DeviceRequest { disk_bytes: 4 << 20, ..DeviceRequest::default() };
    let mut devices = devices::resolve(&wanted, &host, 1, true).unwrap();
    let mut journal = Journal::begin(&folder.join("journal")).unwrap();
    let mut locks = DeviceLocks::new(&folder.join("journal"));
    devices::create(&mut devices, &folder.join("disks"), &mut journal, &mut locks, &host).unwrap();
    let node = devices[0].location.clone();
    let name = devices[0].name.clone().unwrap();
    let before = host.block(&name).scheduler;

    let generator = LoadGenerator::fio();
    let capabilities =
        capabilities::machine_capabilities(&host, &devices, host.cpus(), &generator, &generator, &[]);
    let times = TimeOverrides { runtime_s: Some(0.4), ramp_s: Some(0.2), repetitions: Some(1) };
    let experiments = plan::plan_experiments(&[&definition], Scale::Default, times, &capabilities).unwrap();
    let offered = experiments[0].cells.iter().filter(|cell| cell.skipped.is_none()).count();
    let plan = RunPlan { schema: SCHEMA, experiments, cores: host.cpus(), seed: 1, ..RunPlan::default() };
    let out = folder.join("out");
    let mut writer = RunWriter::create(&out, &MachineRecord::default(), &plan).unwrap();
    let stop = AtomicBool::new(false);
    let setup = RunSetup {
        plan: &plan,
        devices: &devices,
        generator: &generator,
        generator_info: GeneratorInfo::default(),
        bdev_generator: &generator,
        host: &host,
        completed: BTreeSet::new(),
        network: &Vec::<lab_experiments::capabilities::NetworkTarget>::new(),
        stop: &stop,
    };
    let summary = runner::run(&setup, &mut writer, &mut journal, &mut locks, &mut |_| {}).unwrap();
    let run = RunDirectory::open(&out).unwrap();
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
