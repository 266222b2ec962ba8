//! `ringbolt perf` from options to JSON: consistency of the figures of one run.
#![allow(clippy::unwrap_used, missing_docs)]

mod rig;

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rig::{ServerProcess, ringbolt, scratch, text};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

/// Runs a job and returns its object of the JSON document.
fn job(arguments: &[&str]) -> Value {
    let fixed = ["perf", "--output-format=json", "--generator_cost=0", "--eta=never"];
    let output = Command::new(env!("CARGO_BIN_EXE_ringbolt")).args(fixed).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut document: Value = serde_json::from_slice(&output.stdout).unwrap();
    document["jobs"][0].take()
}

/// No I/O starts before its scheduled time, and late ones are caught up. So the duration of the run bounds the
/// number of I/Os, however busy the machine is.
#[test]
fn an_open_loop_keeps_its_rate() {
    const RATE: f64 = 2000.0;
    for engine in ["--ioengine=null", "--filename=null:1g"] {
        for process in ["linear", "poisson"] {
            let process_option = format!("--rate_process={process}");
            let job = job(&[
                engine,
                "--rw=randread",
                "--iodepth=64",
                "--rate_iops=2000",
                &process_option,
                "--time_based",
                "--runtime=1s",
            ]);
            let read = &job["read"];
            let ios = read["total_ios"].as_u64().unwrap() as f64;
            let iops = read["iops"].as_f64().unwrap();
            let seconds = read["runtime"].as_u64().unwrap() as f64 / 1e3;
            let case = format!("{engine} {process}: {ios} I/Os in {seconds} s");
            assert_eq!(job["open_loop"], true, "{case}");
            // The runtime is truncated to milliseconds.
            assert!(seconds >= 0.999, "{case}");
            assert!((iops * seconds / ios - 1.0).abs() < 0.002, "{case}: {iops} IOPS");
            let arrivals = |seconds: f64| RATE * seconds;
            let spread = if process == "poisson" { 5.0 * arrivals(seconds).sqrt() } else { 2.0 };
            assert!(ios <= arrivals(seconds + 0.001) + spread, "{case}");
            // A job that ends while it is late lacks the I/Os still due then. The longest latency bounds how
            // late it was, up to the last poll.
            let late = read["lat_ns"]["max"].as_u64().unwrap() as f64 / 1e9;
            assert!(ios >= arrivals((0.9 - late).max(0.0)) - spread, "{case}, {late} s late");
        }
    }
}

#[test]
fn depth_and_batch_classes_sum_to_100_percent() {
    let options = ["--ioengine=null", "--rw=randread", "--iodepth=16", "--number_ios=160000", "--size=64m"];
    let job = job(&options);
    for name in ["iodepth_level", "iodepth_submit", "iodepth_complete"] {
        let shares = job[name].as_object().unwrap();
        assert_eq!(shares.len(), 7, "{name}");
        let sum: f64 = shares.values().map(|share| share.as_f64().unwrap()).sum();
        assert!((99.9..100.5).contains(&sum), "{name}: {sum}");
    }
    // The null engine completes all I/Os in flight in one poll, so each batch has the full depth.
    assert!(job["iodepth_level"]["16"].as_f64().unwrap() > 99.0, "{}", job["iodepth_level"]);
    assert!(job["iodepth_submit"]["16"].as_f64().unwrap() > 99.0, "{}", job["iodepth_submit"]);
    assert!(job["iodepth_complete"]["16"].as_f64().unwrap() > 99.0, "{}", job["iodepth_complete"]);
}

/// A server with a read-only device on a file and a run that writes it exclude each other, and each names the other.
#[test]
fn a_file_that_a_server_only_reads_is_not_written_by_a_run() {
    let directory = scratch("perf-lock");
    let disk = directory.join("disk");
    let disk = disk.to_str().unwrap();
    std::fs::write(disk, [0x5a; 1 << 20]).unwrap();
    let server = ServerProcess::start(&directory, "server", &[]);
    let serve = || server.rpc(&["bdev_aio_create", "name=F", &format!("filename={disk}"), "readonly=true"]);
    let served = serve();
    if text(&served.stderr).contains("io_uring") {
        return println!("SKIPPED: {}", text(&served.stderr));
    }
    assert!(served.status.success(), "{}", text(&served.stderr));
    let filename = format!("--filename={disk}");
    let perf = ["perf", filename.as_str(), "--ioengine=psync", "--generator_cost=0", "--eta=never"];
    let run = |more: &[&str]| ringbolt(&[perf.as_slice(), more].concat());
    let holder = format!("locked (flock) by process {} (ringbolt)", server.pid());
    for options in [["--rw=write", "--size=1m"], ["--rw=randrw", "--thread=1"], ["--rw=read", "--size=2m"]] {
        let refused = run(&options);
        let message = text(&refused.stderr);
        assert!(!refused.status.success() && message.contains(&holder), "{options:?}: {message}");
    }
    assert_eq!(std::fs::read(disk).unwrap(), [0x5a; 1 << 20], "nothing was written");
    let read = run(&["--rw=read", "--number_ios=10"]);
    assert!(read.status.success(), "{}", text(&read.stderr));
    server.ok(&["bdev_aio_delete", "name=F"]);

    // Jobs in several processes write one file together.
    let copies = ["--rw=write", "--numjobs=3", "--thread=0", "--time_based", "--runtime=600s"];
    let mut writer = Command::new(env!("CARGO_BIN_EXE_ringbolt"))
        .args([perf.as_slice(), &copies].concat())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while flock(File::open(disk).unwrap(), FlockOperation::NonBlockingLockShared).is_ok() {
        assert!(
            Instant::now() < deadline && writer.try_wait().unwrap().is_none(),
            "it does not lock the file"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let refused = serve();
    let message = text(&refused.stderr);
    let holder = format!("claimed by process {} (ringbolt)", writer.id());
    assert!(!refused.status.success() && message.contains(&holder), "{message}");
    writer.kill().unwrap();
    writer.wait().unwrap();
    let served = serve();
    assert!(served.status.success(), "{}", text(&served.stderr));
    drop(server);
    std::fs::remove_dir_all(directory).unwrap();
}

/// The copies of a job end together, when the sum of their rates is steady: as processes and on a reactor.
#[test]
fn the_steady_state_of_a_group_ends_its_jobs() {
    for engine in ["--ioengine=null", "--filename=null:1g"] {
        let job = job(&[
            engine,
            "--rw=randread",
            "--rate_iops=2000",
            "--numjobs=2",
            "--group_reporting",
            "--steadystate=iops:100%",
            "--steadystate_duration=2",
            "--time_based",
            "--runtime=120s",
        ]);
        assert_eq!((&job["numjobs"], &job["steadystate"]["attained"]), (&2.into(), &1.into()), "{engine}");
        assert_eq!(job["steadystate"]["data"]["iops"].as_array().unwrap().len(), 2, "{engine}");
        assert!(job["read"]["runtime"].as_u64().unwrap() < 100_000, "{engine}: {}", job["read"]["runtime"]);
    }
}

/// Each failed I/O of a job that continues is described, unless `error_dump=0`.
#[test]
fn errors_after_which_a_job_continues_are_described() {
    for (option, lines) in [("--error_dump=1", 4), ("--error_dump=0", 1), ("--continue_on_error=none", 1)] {
        let fixed =
            ["perf", "--generator_cost=0", "--name=full", "--filename=/dev/full", "--rw=write", "--bs=4k"];
        let output = Command::new(env!("CARGO_BIN_EXE_ringbolt"))
            .args(fixed)
            .args(["--size=12k", "--continue_on_error=all", option])
            .output()
            .unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.success(), errors.lines().count()), (false, lines), "{option}: {errors}");
        if lines > 1 {
            assert!(errors.contains("full: /dev/full: write of 4096 bytes at offset 8192: "), "{errors}");
        }
    }
}

/// Jobs on the zones of one file share their write pointers.
#[test]
fn jobs_on_zones_write_them_in_turn() {
    let directory = scratch("zones");
    let file = format!("--filename={}", directory.join("zones").display());
    let zoned = [&file, "--size=8z", "--zonemode=zbd", "--zonesize=64k", "--bs=4k", "--ioengine=libaio"];
    let write = ["--rw=randwrite", "--numjobs=3", "--iodepth=4", "--max_open_zones=2", "--group_reporting"];
    let job = job(&[&zoned[..], &write, &["--io_size=1m"]].concat());
    assert_eq!((&job["error"], &job["write"]["total_ios"]), (&0.into(), &768.into()));
    // Six times the region is written.
    assert!(job["zone_resets"].as_u64().unwrap() >= 30, "{}", job["zone_resets"]);
    std::fs::remove_dir_all(directory).unwrap();
}

/// The output of a program that others wrote; prints why it cannot be run.
fn other_program(command: &mut Command) -> Option<String> {
    match command.output() {
        Ok(output) if output.status.success() => Some(text(&output.stdout).to_string()),
        Ok(output) => {
            println!("SKIPPED: {command:?}: {}", text(&output.stderr).lines().last().unwrap_or_default());
            None
        }
        Err(error) => {
            println!("SKIPPED: {command:?}: {error}");
            None
        }
    }
}

/// fio's own tools, one of which uses pandas, and fio-plot read the results and logs as fio's.
#[test]
fn programs_for_fios_results_read_those_of_perf() {
    let directory = scratch("perf-tools");
    let path = |name: &str| directory.join(name).to_str().unwrap().to_string();
    let base = path("randread-iodepth-4-numjobs-1");
    let run = ringbolt(&[
        "perf",
        "--name=randread",
        &format!("--filename={}", path("disk")),
        "--size=8m",
        "--ioengine=libaio",
        "--iodepth=4",
        "--numjobs=1",
        "--bs=4k",
        "--rw=randread",
        "--time_based",
        "--runtime=1s",
        "--rate_iops=1000",
        &format!("--write_lat_log={base}"),
        &format!("--write_iops_log={base}"),
        &format!("--write_hist_log={base}"),
        "--log_hist_msec=100",
        "--log_avg_msec=100",
        "--generator_cost=0",
        "--eta=never",
        "--output-format=json+",
        &format!("--output={}", path("result.json")),
    ]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let document: Value = serde_json::from_slice(&std::fs::read(path("result.json")).unwrap()).unwrap();
    let ios = document["jobs"][0]["read"]["total_ios"].as_u64().unwrap();

    // The percentiles of an open loop are those of lat.
    if Command::new("fio_jsonplus_clat2csv").arg("--help").output().is_ok() {
        let mut convert = Command::new("fio_jsonplus_clat2csv");
        let converted = convert.arg(path("result.json")).arg(path("latencies.csv")).output().unwrap();
        assert!(converted.status.success(), "{}", text(&converted.stderr));
        let rows = std::fs::read_to_string(path("latencies_job0.csv")).unwrap();
        let mut lines = rows.lines().map(|line| line.split(", ").collect::<Vec<_>>());
        let names = lines.next().unwrap();
        let column = names.iter().position(|name| *name == "read_lat_ns_cumulative").unwrap();
        let last = lines.filter_map(|line| line.get(column)?.trim().parse::<u64>().ok()).next_back();
        assert_eq!(last, Some(ios), "{rows}");
    } else {
        println!("SKIPPED: no fio_jsonplus_clat2csv in PATH");
    }

    let python = std::env::var("RINGBOLT_PANDAS_PYTHON").unwrap_or("python3".to_string());
    let pandas = other_program(Command::new(&python).args(["-c", "import pandas, numpy"]));
    let script = "/usr/share/doc/fio/fiologparser_hist.py.gz";
    let script = pandas.and_then(|_| other_program(Command::new("zcat").arg(script)));
    if let Some(script) = script {
        std::fs::write(path("fiologparser_hist.py"), script).unwrap();
        let mut parse = Command::new(&python);
        parse.arg(path("fiologparser_hist.py")).arg("--noweight");
        let parsed = parse.arg(format!("{base}_clat_hist.1.log")).output().unwrap();
        let rows = text(&parsed.stdout);
        assert!(parsed.status.success() && rows.starts_with("end-time, samples"), "{}", text(&parsed.stderr));
        // It omits the last interval, as of fio's logs.
        let samples = rows.lines().skip(1).filter_map(|row| row.split(", ").nth(1)?.parse::<u64>().ok());
        assert!(samples.sum::<u64>() > 0, "{rows}");
    }

    let plot = std::env::var("RINGBOLT_FIO_PLOT").unwrap_or("fio-plot".to_string());
    if other_program(Command::new(&plot).arg("--help")).is_some() {
        let common = ["-T", "t", "-r", "randread", "-d", "4", "-n", "1"];
        let charts = [(&["-g", "-t", "lat", "iops"][..], "log.png"), (&["-H"], "histogram.png")];
        for (kind, name) in charts {
            let mut draw = Command::new(&plot);
            draw.arg("-i").arg(&directory).args(common).args(kind).arg("-o").arg(path(name));
            let drawn = draw.current_dir(&directory).output().unwrap();
            let image = std::fs::read(path(name)).unwrap_or_default();
            assert!(
                image.starts_with(b"\x89PNG"),
                "{kind:?}: {}{}",
                text(&drawn.stdout),
                text(&drawn.stderr)
            );
        }
    }
    std::fs::remove_dir_all(directory).unwrap();
}

/// Ctrl-C and timeout(1) signal the whole process group: the run, and each job's process.
#[test]
fn a_signal_to_the_process_group_keeps_the_results() {
    let directory = scratch("perf-group");
    let file = format!("--filename={}", directory.join("f").display());
    let arguments = ["--name=a", "--size=1m", "--rw=read", "--numjobs=2", "--time_based", "--runtime=600"];
    for signal in [Signal::INT, Signal::TERM] {
        let mut perf = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        perf.arg("perf").arg(&file).args(arguments);
        perf.args(["--status-interval=100ms", "--generator_cost=0", "--output-format=json"]);
        let mut perf = perf.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(perf.stderr.take().unwrap()).lines().map(Result::unwrap);
        let is_running = |line: &String| line.contains("  2 job(s) of ") && !line.contains(" 0 IOPS");
        assert!(lines.any(|line| is_running(&line)));
        kill_process_group(Pid::from_child(&perf), signal).unwrap();
        let rest: Vec<String> = lines.filter(|line| line.contains("ringbolt: ")).collect();
        let output = perf.wait_with_output().unwrap();
        let result: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{signal:?}: {error}: {rest:?}"));
        let jobs = result["jobs"].as_array().unwrap();
        assert_eq!(jobs.len(), 2, "{signal:?}");
        assert!(jobs.iter().all(|job| job["read"]["total_ios"].as_u64() > Some(0)), "{signal:?}: {result}");
    }
}

/// Runs a shell script in a directory, with `$RINGBOLT` as the program's path; returns what it printed.
fn shell(directory: &std::path::Path, script: &str) -> (String, String, Option<i32>) {
    let mut command = Command::new("bash");
    command.args(["-c", script]).current_dir(directory).env("RINGBOLT", env!("CARGO_BIN_EXE_ringbolt"));
    let output = command.output().unwrap();
    (text(&output.stdout), text(&output.stderr), output.status.code())
}

/// Job files that can be read only once: what was read is passed to the jobs' processes.
#[test]
fn job_files_are_read_once() {
    let directory = scratch("perf-stdin");
    // More than a pipe holds.
    let comment = format!("# {}\n", "x".repeat(100)).repeat(2000);
    let job = format!(
        "{comment}[global]\nioengine=null\nsize=1m\ninclude part\n[a]\nrw=read\nnumjobs=3\n[b]\nstonewall\nrw=write\n"
    );
    std::fs::write(directory.join("job.fio"), &job).unwrap();
    std::fs::write(directory.join("part"), "bs=8k\n").unwrap();
    let change = job.replacen(
        "[a]",
        "[change]\nioengine=exec\nprogram=cp\narguments=part change.fio\n[a]\nstonewall",
        1,
    );
    std::fs::write(directory.join("change.fio"), change).unwrap();
    let perf = "timeout 60 $RINGBOLT perf --output-format=json --generator_cost=0 --eta=never";
    for script in [
        format!("{perf} - < job.fio"),
        format!("cat job.fio | {perf} -"),
        format!("{perf} --name=global --ioengine=null <(sed s,part,$PWD/part, job.fio)"),
        format!("sed s,part,$PWD/part, job.fio | {perf} /dev/stdin"),
        // Its first job overwrites the file before the processes of the others start.
        format!("{perf} change.fio"),
    ] {
        let (stdout, stderr, code) = shell(&directory, &script);
        assert_eq!(code, Some(0), "{script}: {stderr}");
        let document: Value = serde_json::from_str(&stdout).unwrap();
        let ios = |side: &str| -> u64 {
            let jobs = document["jobs"].as_array().unwrap();
            jobs.iter().map(|job| job[side]["total_ios"].as_u64().unwrap()).sum()
        };
        assert_eq!((ios("read"), ios("write")), (3 * 128, 128), "{script}");
    }
    let (_, stderr, code) = shell(&directory, "$RINGBOLT perf - < /dev/null");
    assert!(code == Some(2) && stderr.contains("no job"), "{stderr}");
    std::fs::remove_dir_all(directory).unwrap();
}

/// What scripts for fio read of the document beside the results.
#[test]
fn options_and_the_time_are_where_fio_has_them() {
    let directory = scratch("perf-globals");
    let options = "--ioengine=null --bs=4096 --iodepth=4 --rw=randread --numjobs=1 --runtime=1 --size=1m";
    let run = format!(
        "$RINGBOLT perf {options} --output-format=json --generator_cost=0 --name=vol0 --number_ios=9"
    );
    for (zone, hours) in [("UTC0", 0), ("XYZ-9", 9), ("ABC3", -3)] {
        let (stdout, stderr, _) = shell(&directory, &format!("TZ={zone} {run}"));
        let document: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stderr}"));
        let expected = serde_json::json!({ "ioengine": "null", "bs": "4096", "iodepth": "4", "rw": "randread",
            "numjobs": "1", "runtime": "1", "size": "1m" });
        assert_eq!(document["global options"], expected);
        let own = serde_json::json!({ "name": "vol0", "number_ios": "9" });
        assert_eq!(document["jobs"][0]["job options"], own);
        let seconds = document["timestamp"].as_u64().unwrap() as i64 + hours * 3600;
        let (date, _, _) =
            shell(&directory, &format!("TZ=UTC0 LC_ALL=C date -d @{seconds} '+%a %b %e %H:%M:%S %Y'"));
        assert_eq!(document["time"], date.trim_end(), "{zone}");
    }
    std::fs::remove_dir_all(directory).unwrap();
}
