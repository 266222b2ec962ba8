//! `ringbolt perf` from its options to its document, where the figures of one run bound each other.
#![allow(clippy::unwrap_used, missing_docs)]

use std::process::Command;

use serde_json::Value;

/// The only job of a document.
fn job(arguments: &[&str]) -> Value {
    let fixed = ["perf", "--output-format=json", "--generator_cost=0", "--eta=never"];
    let output = Command::new(env!("CARGO_BIN_EXE_ringbolt")).args(fixed).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut document: Value = serde_json::from_slice(&output.stdout).unwrap();
    document["jobs"][0].take()
}

/// However busy the machine is, no I/O starts before its time, and what is late is caught up: so the run's
/// own duration says how many there were.
#[test]
fn a_rate_is_kept_by_the_runs_own_clock() {
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
            // The runtime is in whole milliseconds, and cut off.
            assert!(seconds >= 0.999, "{case}");
            assert!((iops * seconds / ios - 1.0).abs() < 0.002, "{case}: {iops} IOPS");
            let arrivals = |seconds: f64| RATE * seconds;
            let spread = if process == "poisson" { 5.0 * arrivals(seconds).sqrt() } else { 2.0 };
            assert!(ios <= arrivals(seconds + 0.001) + spread, "{case}");
            // A job that ends while it is behind has done less by what waits then: the longest latency tells
            // for how long, but for what came after the last look.
            let late = read["lat_ns"]["max"].as_u64().unwrap() as f64 / 1e9;
            assert!(ios >= arrivals((0.9 - late).max(0.0)) - spread, "{case}, {late} s late");
        }
    }
}

#[test]
fn depths_and_batches_are_shares_of_a_whole() {
    let options = ["--ioengine=null", "--rw=randread", "--iodepth=16", "--number_ios=160000", "--size=64m"];
    let job = job(&options);
    for name in ["iodepth_level", "iodepth_submit", "iodepth_complete"] {
        let shares = job[name].as_object().unwrap();
        assert_eq!(shares.len(), 7, "{name}");
        let sum: f64 = shares.values().map(|share| share.as_f64().unwrap()).sum();
        assert!((99.9..100.5).contains(&sum), "{name}: {sum}");
    }
    // All that are in flight come back at once, and go out again.
    assert!(job["iodepth_level"]["16"].as_f64().unwrap() > 99.0, "{}", job["iodepth_level"]);
    assert!(job["iodepth_submit"]["16"].as_f64().unwrap() > 99.0, "{}", job["iodepth_submit"]);
    assert!(job["iodepth_complete"]["16"].as_f64().unwrap() > 99.0, "{}", job["iodepth_complete"]);
}
