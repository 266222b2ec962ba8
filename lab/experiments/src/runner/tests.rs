use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use super::*;
use crate::plan::{self, MachineCapabilities, TimeOverrides};
use crate::record::{MachineRecord, RunDirectory, SCHEMA};
use crate::{ExperimentCatalog, Scale};

/// A temporary directory with a generator that is a shell script, removed on drop.
struct TestDirectory {
    at: PathBuf,
}

/// Writes fixed results to the path of `--output`, after `body` has run with the job file as `$1`.
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

impl TestDirectory {
    fn new(name: &str, body: &str) -> TestDirectory {
        let at = std::env::temp_dir().join(format!("ringbolt-runner-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&at);
        fs::create_dir_all(&at).unwrap();
        let script = at.join("generator");
        fs::write(&script, SCRIPT.replace("BODY", body)).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        TestDirectory { at }
    }

    fn out(&self) -> PathBuf {
        self.at.join("out")
    }

    fn runs(&self) -> usize {
        fs::read_to_string(self.at.join("runs")).map_or(0, |text| text.lines().count())
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.at);
    }
}

fn plan_one_cell(times: TimeOverrides) -> RunPlan {
    let catalog = ExperimentCatalog::built_in();
    let capabilities = MachineCapabilities {
        cpus: vec![0],
        devices: 1,
        kernel_devices: true,
        ..MachineCapabilities::default()
    };
    let definitions = [catalog.get("cheops23.fig2").unwrap(), catalog.get("cheops23.fig5a").unwrap()];
    let experiments = plan::plan_experiments(&definitions, Scale::Quick, times, &capabilities).unwrap();
    RunPlan { schema: SCHEMA, experiments, cores: vec![0], ..RunPlan::default() }
}

/// Runs a plan; returns the result and the run directory.
fn run_plan(
    directory: &TestDirectory,
    plan: &RunPlan,
    devices: &[Device],
    stop: &AtomicBool,
) -> (Result<ExperimentSummary, ExperimentError>, RunDirectory) {
    run_plan_on(&HostInfo::default(), directory, plan, devices, stop)
}

/// Like [`run_plan`], on a given machine.
fn run_plan_on(
    host: &HostInfo,
    directory: &TestDirectory,
    plan: &RunPlan,
    devices: &[Device],
    stop: &AtomicBool,
) -> (Result<ExperimentSummary, ExperimentError>, RunDirectory) {
    let generator = LoadGenerator {
        name: "fio".into(),
        program: directory.at.join("generator"),
        arguments: vec![],
        input: GeneratorInput::JobFile,
    };
    let mut writer = if directory.out().exists() {
        RunWriter::resume(&directory.out()).unwrap()
    } else {
        RunWriter::create(&directory.out(), &MachineRecord::default(), plan).unwrap()
    };
    let before = RunDirectory::open(&directory.out()).unwrap();
    let completed = completed(&before);
    let setup = RunSetup {
        plan,
        devices,
        generator: &generator,
        generator_info: GeneratorInfo::default(),
        bdev_generator: &generator,
        host,
        completed,
        network: &Vec::<NetworkTarget>::new(),
        stop,
    };
    let mut journal = Journal::begin(&directory.at.join("journal")).unwrap();
    let mut locks = DeviceLocks::new(&directory.at.join("journal"));
    let result = run(&setup, &mut writer, &mut journal, &mut locks, &mut |_| {});
    assert!(journal.restore().is_empty());
    (result, RunDirectory::open(&directory.out()).unwrap())
}

fn short_times() -> TimeOverrides {
    TimeOverrides { runtime_s: Some(0.05), ramp_s: Some(0.0), repetitions: Some(1) }
}

fn file(directory: &TestDirectory) -> Device {
    let path = directory.at.join("disk");
    fs::write(&path, "x").unwrap();
    Device {
        kind: DeviceKind::File,
        location: path.display().to_string(),
        name: None,
        size_bytes: 1 << 20,
        writable: true,
        described: String::new(),
    }
}

#[test]
fn every_cell_is_measured_or_has_a_reason() {
    let directory = TestDirectory::new("whole", "");
    let plan = plan_one_cell(short_times());
    let stop = AtomicBool::new(false);
    let (result, run) = run_plan(&directory, &plan, &[file(&directory)], &stop);
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
    // A file does not support iou-c.
    assert!(run.records.iter().any(|r| r.series == "iou-c" && r.skipped.is_some()));
    let again = run_plan(&directory, &plan, &[file(&directory)], &stop);
    assert_eq!(again.0.unwrap().already_done, cells, "nothing is left to do");
    assert_eq!(directory.runs(), summary.measured);
}

#[test]
fn cells_of_fio_have_the_timeline_of_its_histogram_logs() {
    let body = r#"log=$(sed -n 's/^write_hist_log=\(.*\.fg\)$/\1/p' "$job")
        echo "10, 0, 4096$(printf ', 2%.0s' $(seq 116))" > "${log}_clat_hist.1.log""#;
    let directory = TestDirectory::new("histogram-logs", body);
    let plan = plan_one_cell(short_times());
    let (_, run) = run_plan(&directory, &plan, &[file(&directory)], &AtomicBool::new(false));
    let record = run.measured("cheops23.fig2").next().unwrap();
    assert!(record.job_file.contains("log_hist_msec=10\nlog_hist_coarseness=4\n"), "{}", record.job_file);
    let timeline = &record.roles["fg"].timeline;
    assert_eq!((timeline.len(), timeline[0].at_ms, timeline[0].ios), (1, 10.0, 232));
    let left: Vec<_> = fs::read_dir(directory.out().join("raw")).unwrap().flatten().collect();
    assert!(left.iter().all(|entry| entry.path().extension().is_some_and(|end| end == "json")), "{left:?}");
}

#[test]
fn repetitions_are_interleaved_and_resume_keeps_the_order() {
    let directory = TestDirectory::new("order", "");
    let times = TimeOverrides { repetitions: Some(3), ..short_times() };
    let plan = RunPlan { order_seed: 11, ..plan_one_cell(times) };
    let planned: Vec<(usize, String)> = measurement_order(&plan)
        .iter()
        .map(|one| {
            let experiment = &plan.experiments[one.experiment];
            let parameters = &experiment.cells[one.cell].parameters;
            (one.position as usize, cell_key(&experiment.id, parameters, one.repetition))
        })
        .collect();
    let of = |run: &RunDirectory| -> Vec<(usize, String)> {
        run.records.iter().map(|record| (record.position.unwrap() as usize, record.key())).collect()
    };
    let (result, run) = run_plan(&directory, &plan, &[file(&directory)], &AtomicBool::new(false));
    assert_eq!(of(&run), planned);
    let summary = result.unwrap();
    let blocks: Vec<u32> =
        run.records.iter().filter(|record| record.is_measured()).map(|record| record.repetition).collect();
    assert!(blocks.is_sorted() && summary.measured.is_multiple_of(3), "{blocks:?}");
    // The run loses its end and some records before: resume measures these at their positions.
    let text = fs::read_to_string(directory.out().join("results.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let left: Vec<&str> =
        lines.iter().copied().enumerate().filter(|(at, _)| at % 3 == 0).map(|at| at.1).collect();
    fs::write(directory.out().join("results.jsonl"), left.join("\n") + "\n").unwrap();
    let (_, run) = run_plan(&directory, &plan, &[file(&directory)], &AtomicBool::new(false));
    let resumed = &of(&run)[left.len()..];
    assert_eq!(resumed.len(), planned.len() - left.len());
    assert!(resumed.is_sorted() && resumed.iter().all(|one| planned.contains(one)), "{resumed:?}");
}

#[test]
fn failed_cells_are_recorded_and_repeated_by_resume() {
    let directory = TestDirectory::new(
        "fails",
        "if grep -q libaio \"$job\"; then echo 'fio: no such engine' >&2; exit 3; fi",
    );
    let plan = plan_one_cell(short_times());
    let stop = AtomicBool::new(false);
    let (result, run) = run_plan(&directory, &plan, &[file(&directory)], &stop);
    let summary = result.unwrap();
    assert!(summary.failed > 0 && summary.measured > 0, "{summary:?}");
    let failed = run.records.iter().find(|record| record.failed.is_some()).unwrap();
    assert!(failed.failed.as_ref().unwrap().contains("no such engine"), "{failed:?}");
    let script = fs::read_to_string(directory.at.join("generator")).unwrap();
    fs::write(directory.at.join("generator"), script.replace("exit 3", ":")).unwrap();
    let (result, run) = run_plan(&directory, &plan, &[file(&directory)], &stop);
    let second = result.unwrap();
    assert_eq!((second.measured, second.failed), (summary.failed, 0));
    assert_eq!(latest_records(&run).iter().filter(|record| record.failed.is_some()).count(), 0);
}

#[test]
fn a_run_in_which_every_cell_fails_ends() {
    let directory = TestDirectory::new("nothing", "echo broken >&2; exit 1");
    let (result, run) =
        run_plan(&directory, &plan_one_cell(short_times()), &[file(&directory)], &AtomicBool::new(false));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("broken"), "{error}");
    assert_eq!(run.records.iter().filter(|record| record.failed.is_some()).count(), CONSECUTIVE_FAILURES_MAX);
}

#[test]
fn a_removed_device_ends_the_run_and_keeps_completed_cells() {
    let directory = TestDirectory::new(
        "leaves",
        "test $(wc -l < \"$(dirname \"$0\")/runs\") -lt 3 || { rm \"$(dirname \"$0\")/disk\"; echo EIO >&2; exit 1; }",
    );
    let (result, run) =
        run_plan(&directory, &plan_one_cell(short_times()), &[file(&directory)], &AtomicBool::new(false));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("was removed"), "{error}");
    assert_eq!(run.records.iter().filter(|record| record.is_measured()).count(), 2);
}

#[test]
fn a_stop_ends_the_generator_and_keeps_completed_cells() {
    let directory =
        TestDirectory::new("stop", "test $(wc -l < \"$(dirname \"$0\")/runs\") -lt 2 || { sleep 60; }");
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let (other, folder) = (stop.clone(), directory.at.clone());
    let presser = std::thread::spawn(move || {
        let runs = || fs::read_to_string(folder.join("runs")).map_or(0, |text| text.lines().count());
        while runs() < 2 {
            std::thread::sleep(Duration::from_millis(5));
        }
        other.store(true, Ordering::Relaxed);
    });
    let began = Instant::now();
    let (result, run) = run_plan(&directory, &plan_one_cell(short_times()), &[file(&directory)], &stop);
    presser.join().unwrap();
    assert!(result.unwrap().stopped);
    assert!(began.elapsed() < Duration::from_secs(20), "the sleeping generator was ended");
    assert_eq!(run.records.iter().filter(|record| record.is_measured()).count(), 1);
}

#[test]
fn a_full_disk_is_reported_and_loses_one_line() {
    let directory = TestDirectory::new("full", "");
    let plan = plan_one_cell(short_times());
    drop(RunWriter::create(&directory.out(), &MachineRecord::default(), &plan).unwrap());
    // /dev/full: every write fails with ENOSPC.
    fs::remove_file(directory.out().join("results.jsonl")).unwrap();
    std::os::unix::fs::symlink("/dev/full", directory.out().join("results.jsonl")).unwrap();
    let generator = LoadGenerator {
        name: "fio".into(),
        program: directory.at.join("generator"),
        arguments: vec![],
        input: GeneratorInput::JobFile,
    };
    let mut writer = RunWriter::resume(&directory.out()).unwrap();
    let mut journal = Journal::begin(&directory.at.join("journal")).unwrap();
    let stop = AtomicBool::new(false);
    let devices = [file(&directory)];
    let setup = RunSetup {
        plan: &plan,
        devices: &devices,
        generator: &generator,
        generator_info: GeneratorInfo::default(),
        bdev_generator: &generator,
        host: &HostInfo::default(),
        completed: BTreeSet::new(),
        network: &Vec::<NetworkTarget>::new(),
        stop: &stop,
    };
    let mut locks = DeviceLocks::new(&directory.at.join("journal"));
    let error = run(&setup, &mut writer, &mut journal, &mut locks, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("No space left") && error.contains("cells are stored"), "{error}");
}

/// A machine with one block device, and a generator that runs `body` during each cell.
fn with_queue(name: &str, body: &str) -> (TestDirectory, HostInfo, Device) {
    let queue = "sys/block/fake0/queue";
    let directory =
        TestDirectory::new(name, &format!("cd \"$(dirname \"$0\")/{queue}\"\n{body}\ncd - > /dev/null"));
    fs::create_dir_all(directory.at.join(queue).join("iosched")).unwrap();
    for (file, text) in [("scheduler", "[none] kyber"), ("nr_requests", "64"), ("iosched/a", "1")] {
        fs::write(directory.at.join(queue).join(file), text).unwrap();
    }
    let device = Device { kind: DeviceKind::Block, name: Some("fake0".into()), ..file(&directory) };
    let host = HostInfo::with_root(&directory.at);
    (directory, host, device)
}

#[test]
fn a_cell_fails_if_another_process_changes_its_settings() {
    for (body, expected) in [
        ("echo kyber > scheduler", "queue/scheduler: expected none, found kyber"),
        ("echo 8 > nr_requests", "queue/nr_requests: expected 64, found 8"),
        ("echo 2 > iosched/a", "queue/iosched/a: expected 1, found 2"),
    ] {
        let (directory, host, device) = with_queue("changed", body);
        let mut plan = plan_one_cell(short_times());
        plan.experiments.truncate(1);
        plan.experiments[0].cells.truncate(2);
        let (result, run) = run_plan_on(&host, &directory, &plan, &[device], &AtomicBool::new(false));
        let measured = run.records.iter().filter(|record| record.skipped.is_none()).count();
        assert!(measured > 0, "{body}");
        assert_eq!(result.unwrap().failed, measured, "{body}");
        for message in run.records.iter().filter_map(|record| record.failed.as_ref()) {
            let ends = message.ends_with(": changed by another process while the cell ran");
            assert!(message.contains(expected) && ends, "{body}: {message}");
        }
        // Settings are restored before each cell and at the end, so the second run fails in the same way.
        let value = |file: &str| fs::read_to_string(host.path("sys/block/fake0/queue").join(file)).unwrap();
        assert_eq!(
            (crate::host::chosen(&value("scheduler")).0, value("nr_requests")),
            ("none".into(), "64".into())
        );
    }
}

#[test]
fn a_cell_with_unchanged_settings_is_measured() {
    let (directory, host, device) = with_queue("stays", "cat scheduler > /dev/null");
    let mut plan = plan_one_cell(short_times());
    plan.experiments.truncate(1);
    let (result, run) = run_plan_on(&host, &directory, &plan, &[device], &AtomicBool::new(false));
    assert_eq!(result.unwrap().failed, 0, "{:?}", run.records);
    assert!(run.records.iter().any(CellRecord::is_measured));
}
