//! `lab report`, `compare`, `advise` and `export` as a user runs them, on synthetic runs.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lab_experiments::{CellRecord, MachineRecord, ParameterValue, PlannedDevice, RunPlan, RunWriter, SCHEMA};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ringbolt-lab-results-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A run of two schedulers at three depths with three repetitions each; `factor` slows down all of it.
    fn run(&self, name: &str, factor: f64) -> PathBuf {
        self.run_of(name, factor, 3)
    }

    fn run_of(&self, name: &str, factor: f64, repetitions: u32) -> PathBuf {
        let path = self.path(name);
        let plan = RunPlan {
            schema: SCHEMA,
            targets: vec![PlannedDevice {
                kind: "block".into(),
                path: "/dev/ringbolt-absent".into(),
                ..PlannedDevice::default()
            }],
            ..RunPlan::default()
        };
        let mut writer =
            RunWriter::create(&path, &MachineRecord { schema: SCHEMA, ..MachineRecord::default() }, &plan)
                .unwrap();
        for (scheduler, price) in [("none", 1.0), ("bfq", 1.5)] {
            for depth in [1, 8, 64] {
                for repetition in 0..repetitions {
                    let mut record = CellRecord::new("own.depths", scheduler);
                    record.parameters.insert("scheduler".into(), scheduler.into());
                    record.parameters.insert("iodepth".into(), ParameterValue::from(depth));
                    record.repetition = repetition;
                    let noise = 1.0 + 0.004 * f64::from(repetition);
                    let fg = record.role_mut("fg");
                    fg.set("iops", 10_000.0 * depth as f64 / (price * factor * noise));
                    fg.set("clat_p99_us", 100.0 * price * factor * noise);
                    writer.append(&record).unwrap();
                }
            }
        }
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn lab(arguments: &[&str], paths: &[&Path]) -> Output {
    let (name, options) = arguments.split_first().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
    command.args(["lab", name]).args(paths).args(options).output().unwrap()
}

fn stdout_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into()
}

/// The exit status and the single line of error output.
fn failure_of(output: &Output) -> (i32, String) {
    let text = String::from_utf8_lossy(&output.stderr).to_string();
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    (output.status.code().unwrap(), text)
}

#[test]
fn report_writes_a_page_to_the_run_directory() {
    let folder = Folder::new("report");
    let run = folder.run("run", 1.0);
    let output = lab(&["report"], &[&run]);
    assert!(output.status.success(), "{output:?}");
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("own.depths"));
    let other = folder.path("other.html");
    let output = lab(&["report", "--output", other.to_str().unwrap()], &[&run]);
    assert!(output.status.success() && other.exists());
}

#[test]
fn compare_exits_with_1_on_a_regression_above_the_limit() {
    let folder = Folder::new("compare");
    let (fast, slow) = (folder.run("fast", 1.0), folder.run("slow", 1.2));
    let output = lab(&["compare"], &[&fast, &slow]);
    assert!(output.status.success());
    assert!(stdout_of(&output).contains("12 slower"), "{}", stdout_of(&output));
    assert!(stdout_of(&output).contains("between two successive runs"), "{}", stdout_of(&output));
    let (status, line) = failure_of(&lab(&["compare", "--fail-on-regression", "10"], &[&fast, &slow]));
    assert_eq!(status, 1);
    assert!(line.contains("worse by more than 10 %") && line.contains("slow: 12 of 12 rows"), "{line}");
    let once = folder.run_of("once", 1.0, 1);
    let (status, line) = failure_of(&lab(&["compare", "--fail-on-regression", "10"], &[&once, &fast]));
    assert_eq!(status, 6, "{line}");
    assert!(line.contains("too noisy to tell whether a run is worse by more than 10 %"), "{line}");
    assert!(line.contains("12 of 12 rows"), "{line}");
    let more = ["--a-run", slow.to_str().unwrap(), "--b-run", fast.to_str().unwrap()];
    let text = stdout_of(&lab(&[&["compare"], &more[..]].concat(), &[&fast, &slow]));
    assert!(text.contains("as the runs of a side show it") && !text.contains("slower  "), "{text}");
    assert!(lab(&["compare", "--fail-on-regression", "30"], &[&fast, &slow]).status.success());
    assert!(lab(&["compare", "--fail-on-regression", "0"], &[&slow, &fast]).status.success());
    let json = stdout_of(&lab(&["compare", "--output-format=json"], &[&fast, &slow]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), 12);
    assert_eq!(json["rows"][0]["verdict"], "slower");
    let html = stdout_of(&lab(&["compare", "--output-format=html"], &[&fast, &slow]));
    assert!(html.starts_with("<!doctype html>"));
}

#[test]
fn advise_names_the_best_scheduler_and_how_to_set_it() {
    let folder = Folder::new("advise");
    let run = folder.run("run", 1.0);
    let text = stdout_of(&lab(&["advise", "--goal", "p99"], &[&run]));
    assert!(text.contains("scheduler: use none"), "{text}");
    // The device of this run does not exist.
    assert!(text.contains("note: No commands for /dev/ringbolt-absent: not on this machine."), "{text}");
    assert!(!text.contains("echo none"), "{text}");
    let json = stdout_of(&lab(&["advise", "--output-format=json"], &[&run]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 3);
    assert_eq!(json[0]["scheduler"]["choice"]["wins"], "none");
    let (status, _) = failure_of(&lab(&["advise"], &[]));
    assert_eq!(status, 2, "neither a run nor a device");
}

#[test]
fn export_writes_csv_rows_and_json_objects() {
    let folder = Folder::new("export");
    let run = folder.run("run", 1.0);
    let csv = stdout_of(&lab(&["export"], &[&run]));
    assert_eq!(csv.lines().count(), 1 + 18);
    assert!(csv.starts_with("experiment,series,repetition,role,"));
    let json: serde_json::Value =
        serde_json::from_str(&stdout_of(&lab(&["export", "--output-format=json"], &[&run]))).unwrap();
    assert_eq!(json["records"].as_array().unwrap().len(), 18);
}

#[test]
fn an_invalid_run_directory_fails_with_one_line() {
    let folder = Folder::new("foreign");
    let run = folder.run("run", 1.0);
    fs::create_dir_all(folder.path("foreign")).unwrap();
    for command in ["report", "advise", "export"] {
        let (status, line) = failure_of(&lab(&[command], &[&folder.path("none")]));
        assert_eq!(status, 4);
        assert!(line.contains("no such directory"), "{line}");
        let (status, line) = failure_of(&lab(&[command], &[&folder.path("foreign")]));
        assert_eq!(status, 4);
        assert!(line.contains("no plan.toml"), "{line}");
    }
    // A truncated plan, and one of a newer schema.
    let plan = run.join("plan.toml");
    let whole = fs::read_to_string(&plan).unwrap();
    fs::write(&plan, &whole[..whole.len() / 2]).unwrap();
    let (status, line) = failure_of(&lab(&["report"], &[&run]));
    assert!(status == 1 && line.contains("plan.toml"), "{line}");
    fs::write(&plan, whole.replace("schema = 1", "schema = 99")).unwrap();
    let (status, line) = failure_of(&lab(&["compare"], &[&run, &run]));
    assert!(status == 1 && line.contains("written in schema 99"), "{line}");
}

#[test]
fn a_truncated_result_file_loses_one_record_and_says_so() {
    let folder = Folder::new("truncated");
    let results = folder.run("run", 1.0).join("results.jsonl");
    let whole = fs::read_to_string(&results).unwrap();
    fs::write(&results, &whole[..whole.len() - 40]).unwrap();
    for command in ["report", "export", "advise"] {
        let output = lab(&[command], &[&folder.path("run")]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && errors.lines().count() == 1, "{command}: {errors}");
        assert!(errors.contains("1 line(s) cannot be read, the first: line 18: "), "{errors}");
        assert!(errors.contains("the other 17 are used"), "{errors}");
    }
}
