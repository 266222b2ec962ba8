use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use super::*;
use crate::plan::{self, Surroundings, Times};
use crate::record::{Machine, Run, SCHEMA};
use crate::{Catalog, Scale};

/// A folder with a generator that is a script, removed at the end.
struct Place {
    at: PathBuf,
}

/// Copies canned results to where `--output` says, once `$1` (the job file) was looked at by `body`.
const SCRIPT: &str = r#"#!/bin/sh
for word in "$@"; do case $word in --output=*) out=${word#--output=};; esac; done
job=$1
echo run >> "$(dirname "$0")/runs"
BODY
cat > "$out" <<'END'
{"fio version":"fake-1","jobs":[{"jobname":"fg","usr_cpu":10,"sys_cpu":20,"read":{"total_ios":100,"iops":1000,
"bw_bytes":4096000,"lat_ns":{"N":100,"mean":5000.0,"max":9000},"clat_ns":{"N":100,"mean":4000.0,"max":8000,
"percentile":{"99.000000":7000}}}}]}
END
"#;

impl Place {
    fn new(name: &str, body: &str) -> Place {
        let at = std::env::temp_dir().join(format!("ringbolt-runner-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&at);
        fs::create_dir_all(&at).unwrap();
        let script = at.join("generator");
        fs::write(&script, SCRIPT.replace("BODY", body)).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        Place { at }
    }

    fn out(&self) -> PathBuf {
        self.at.join("out")
    }

    fn runs(&self) -> usize {
        fs::read_to_string(self.at.join("runs")).map_or(0, |text| text.lines().count())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.at);
    }
}

fn a_plan(times: Times) -> Plan {
    let catalog = Catalog::built_in();
    let around = Surroundings { cpus: vec![0], devices: 1, kernel_devices: true, ..Surroundings::default() };
    let definitions = [catalog.get("cheops23.fig2").unwrap(), catalog.get("cheops23.fig5a").unwrap()];
    let experiments = plan::make(&definitions, Scale::Quick, times, &around).unwrap();
    Plan { schema: SCHEMA, experiments, cores: vec![0], ..Plan::default() }
}

/// Runs a plan, and says how it went and what is on the disk.
fn go(place: &Place, plan: &Plan, devices: &[Device], stop: &AtomicBool) -> (Result<Summary, RunError>, Run) {
    go_on(&Host::default(), place, plan, devices, stop)
}

/// The same on a machine of the test's own.
fn go_on(
    host: &Host,
    place: &Place,
    plan: &Plan,
    devices: &[Device],
    stop: &AtomicBool,
) -> (Result<Summary, RunError>, Run) {
    let generator = Generator {
        name: "fio".into(),
        program: place.at.join("generator"),
        first: vec![],
        style: Style::JobFile,
    };
    let mut writer = if place.out().exists() {
        RunWriter::append(&place.out()).unwrap()
    } else {
        RunWriter::create(&place.out(), &Machine::default(), plan).unwrap()
    };
    let before = Run::open(&place.out()).unwrap();
    let done = done(&before);
    let setup = Setup {
        plan,
        devices,
        generator: &generator,
        generator_use: GeneratorUse::default(),
        own: &generator,
        host,
        done,
        network: &Vec::<NetworkTarget>::new(),
        stop,
    };
    let mut journal = Journal::begin(&place.at.join("journal")).unwrap();
    let mut locks = DeviceLocks::new(&place.at.join("journal"));
    let result = run(&setup, &mut writer, &mut journal, &mut locks, &mut |_| {});
    assert!(journal.restore().is_empty());
    (result, Run::open(&place.out()).unwrap())
}

fn quickly() -> Times {
    Times { runtime_s: Some(0.05), ramp_s: Some(0.0), repetitions: Some(1) }
}

fn file(place: &Place) -> Device {
    let path = place.at.join("disk");
    fs::write(&path, "x").unwrap();
    Device {
        kind: Kind::File,
        place: path.display().to_string(),
        name: None,
        size_bytes: 1 << 20,
        writable: true,
        described: String::new(),
    }
}

#[test]
fn every_cell_is_measured_or_says_why_not() {
    let place = Place::new("whole", "");
    let plan = a_plan(quickly());
    let stop = AtomicBool::new(false);
    let (result, run) = go(&place, &plan, &[file(&place)], &stop);
    let summary = result.unwrap();
    let cells: usize = plan.experiments.iter().map(|experiment| experiment.cells.len()).sum();
    assert_eq!(summary.measured + summary.skipped, cells, "{summary:?}");
    assert_eq!((summary.failed, run.records.len()), (0, cells));
    let record = run.measured("cheops23.fig2").next().unwrap();
    assert_eq!(record.metric("fg", "iops"), Some(1000.0));
    assert_eq!(record.metric("fg", "clat_p99_us"), Some(7.0));
    assert_eq!(record.generator.version, "fake-1");
    assert!(record.job_file.contains("rw=randread"), "{}", record.job_file);
    assert!(record.commands[0].contains("--output-format=json+"));
    // iou-c cannot poll a file.
    assert!(run.records.iter().any(|r| r.series == "iou-c" && r.skipped.is_some()));
    let again = go(&place, &plan, &[file(&place)], &stop);
    assert_eq!(again.0.unwrap().before, cells, "nothing is left to do");
    assert_eq!(place.runs(), summary.measured);
}

#[test]
fn what_failed_is_recorded_and_tried_again_by_resume() {
    let place =
        Place::new("fails", "if grep -q libaio \"$job\"; then echo 'fio: no such engine' >&2; exit 3; fi");
    let plan = a_plan(quickly());
    let stop = AtomicBool::new(false);
    let (result, run) = go(&place, &plan, &[file(&place)], &stop);
    let summary = result.unwrap();
    assert!(summary.failed > 0 && summary.measured > 0, "{summary:?}");
    let failed = run.records.iter().find(|record| record.failed.is_some()).unwrap();
    assert!(failed.failed.as_ref().unwrap().contains("no such engine"), "{failed:?}");
    let script = fs::read_to_string(place.at.join("generator")).unwrap();
    fs::write(place.at.join("generator"), script.replace("exit 3", ":")).unwrap();
    let (result, run) = go(&place, &plan, &[file(&place)], &stop);
    let second = result.unwrap();
    assert_eq!((second.measured, second.failed), (summary.failed, 0));
    assert_eq!(latest(&run).iter().filter(|record| record.failed.is_some()).count(), 0);
}

#[test]
fn a_run_where_nothing_works_is_given_up() {
    let place = Place::new("nothing", "echo broken >&2; exit 1");
    let (result, run) = go(&place, &a_plan(quickly()), &[file(&place)], &AtomicBool::new(false));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("broken"), "{error}");
    assert_eq!(run.records.iter().filter(|record| record.failed.is_some()).count(), FAILURES_MAX);
}

#[test]
fn a_device_that_leaves_ends_the_run_and_keeps_what_was_measured() {
    let place = Place::new(
        "leaves",
        "test $(wc -l < \"$(dirname \"$0\")/runs\") -lt 3 || { rm \"$(dirname \"$0\")/disk\"; echo EIO >&2; exit 1; }",
    );
    let (result, run) = go(&place, &a_plan(quickly()), &[file(&place)], &AtomicBool::new(false));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("is gone"), "{error}");
    assert_eq!(run.records.iter().filter(|record| record.is_measured()).count(), 2);
}

#[test]
fn ctrl_c_ends_the_generator_and_keeps_what_was_measured() {
    let place = Place::new("stop", "test $(wc -l < \"$(dirname \"$0\")/runs\") -lt 2 || { sleep 60; }");
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let (other, folder) = (stop.clone(), place.at.clone());
    let presser = std::thread::spawn(move || {
        let runs = || fs::read_to_string(folder.join("runs")).map_or(0, |text| text.lines().count());
        while runs() < 2 {
            std::thread::sleep(Duration::from_millis(5));
        }
        other.store(true, Ordering::Relaxed);
    });
    let began = Instant::now();
    let (result, run) = go(&place, &a_plan(quickly()), &[file(&place)], &stop);
    presser.join().unwrap();
    assert!(result.unwrap().stopped);
    assert!(began.elapsed() < Duration::from_secs(20), "the sleeping generator was ended");
    assert_eq!(run.records.iter().filter(|record| record.is_measured()).count(), 1);
}

#[test]
fn a_full_disk_is_told_of_and_costs_one_line() {
    let place = Place::new("full", "");
    let plan = a_plan(quickly());
    drop(RunWriter::create(&place.out(), &Machine::default(), &plan).unwrap());
    // A device on which every write says that there is no room.
    fs::remove_file(place.out().join("results.jsonl")).unwrap();
    std::os::unix::fs::symlink("/dev/full", place.out().join("results.jsonl")).unwrap();
    let generator = Generator {
        name: "fio".into(),
        program: place.at.join("generator"),
        first: vec![],
        style: Style::JobFile,
    };
    let mut writer = RunWriter::append(&place.out()).unwrap();
    let mut journal = Journal::begin(&place.at.join("journal")).unwrap();
    let stop = AtomicBool::new(false);
    let devices = [file(&place)];
    let setup = Setup {
        plan: &plan,
        devices: &devices,
        generator: &generator,
        generator_use: GeneratorUse::default(),
        own: &generator,
        host: &Host::default(),
        done: BTreeSet::new(),
        network: &Vec::<NetworkTarget>::new(),
        stop: &stop,
    };
    let mut locks = DeviceLocks::new(&place.at.join("journal"));
    let error = run(&setup, &mut writer, &mut journal, &mut locks, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("No space left") && error.contains("is kept"), "{error}");
}

/// A machine with one block device, whose cells are run by a generator that does `body` while it runs.
fn with_queue(name: &str, body: &str) -> (Place, Host, Device) {
    let queue = "sys/block/fake0/queue";
    let place = Place::new(name, &format!("cd \"$(dirname \"$0\")/{queue}\"\n{body}\ncd - > /dev/null"));
    fs::create_dir_all(place.at.join(queue).join("iosched")).unwrap();
    for (file, text) in [("scheduler", "[none] kyber"), ("nr_requests", "64"), ("iosched/a", "1")] {
        fs::write(place.at.join(queue).join(file), text).unwrap();
    }
    let device = Device { kind: Kind::Block, name: Some("fake0".into()), ..file(&place) };
    let host = Host::at(&place.at);
    (place, host, device)
}

#[test]
fn a_cell_has_failed_where_another_process_changed_what_it_was_measured_under() {
    for (body, expected) in [
        ("echo kyber > scheduler", "queue/scheduler: expected none, found kyber"),
        ("echo 8 > nr_requests", "queue/nr_requests: expected 64, found 8"),
        ("echo 2 > iosched/a", "queue/iosched/a: expected 1, found 2"),
    ] {
        let (place, host, device) = with_queue("changed", body);
        let mut plan = a_plan(quickly());
        plan.experiments.truncate(1);
        plan.experiments[0].cells.truncate(2);
        let (result, run) = go_on(&host, &place, &plan, &[device], &AtomicBool::new(false));
        let measured = run.records.iter().filter(|record| record.skipped.is_none()).count();
        assert!(measured > 0, "{body}");
        assert_eq!(result.unwrap().failed, measured, "{body}");
        for said in run.records.iter().filter_map(|record| record.failed.as_ref()) {
            let ends = said.ends_with(": changed by another process while the cell ran");
            assert!(said.contains(expected) && ends, "{body}: {said}");
        }
        // Put back for each cell, and at the end: so the second one says the same.
        let value = |file: &str| fs::read_to_string(host.path("sys/block/fake0/queue").join(file)).unwrap();
        assert_eq!(
            (crate::host::chosen(&value("scheduler")).0, value("nr_requests")),
            ("none".into(), "64".into())
        );
    }
}

#[test]
fn a_cell_whose_settings_stay_has_not_failed() {
    let (place, host, device) = with_queue("stays", "cat scheduler > /dev/null");
    let mut plan = a_plan(quickly());
    plan.experiments.truncate(1);
    let (result, run) = go_on(&host, &place, &plan, &[device], &AtomicBool::new(false));
    assert_eq!(result.unwrap().failed, 0, "{:?}", run.records);
    assert!(run.records.iter().any(CellRecord::is_measured));
}
