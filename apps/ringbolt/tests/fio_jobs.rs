//! `ringbolt perf` runs the kinds of job files that fio's examples are: one file of our own for each family of options,
//! and the examples themselves where they are installed.
#![allow(clippy::unwrap_used, missing_docs)]

mod rig;

use std::path::{Path, PathBuf};
use std::process::Command;

use rig::{scratch, text};
use serde_json::Value;

/// A family of options: a job file that combines them, and the I/Os of all its jobs, if they are known.
///
/// fio only parses the files. Version 3.33 does not run all to their end: `io_submit_mode=offload` hangs at times, `ratemin` fails
/// an assertion of fio, `exec` waits for its `runtime` although the program has ended, and so does `cpuio` if all I/O ended before
/// it began.
struct JobFamily {
    name: &'static str,
    ios: Option<u64>,
    text: &'static str,
}

const fn family(name: &'static str, ios: u64, text: &'static str) -> JobFamily {
    JobFamily { name, ios: Some(ios), text }
}

/// How many I/Os are done depends on the machine.
const fn timed(name: &'static str, text: &'static str) -> JobFamily {
    JobFamily { name, ios: None, text }
}

const FAMILIES: &[JobFamily] = &[
    family(
        "sequential-and-random",
        5 * 256,
        "; comment\n[global]\nname=mixed\nfilename=data\nsize=1m\nbs=4K\nioengine=libaio\niodepth=16\n\
         direct=0\nbuffered=1\ncreate_serialize=0\ngroup_reporting\nruntime=60\nstartdelay=0\n\
         [w]\nrw=write\n[r]\nstonewall\nrw=read\nloops=2\n[rr]\nnew_group\nreadwrite=randread\nnumjobs=2\n\
         norandommap\nrandrepeat=0\n",
    ),
    // As t0017.fio of fio's tests, and the one-liners that measure flushes.
    family(
        "posix-aio",
        256 + 64,
        "[test]\nioengine=posixaio\nfilename=data\nsize=1M\niodepth=16\n\
         [sync]\nstonewall\nioengine=posixaio\nfilename=data\nrw=randwrite\nbs=4k\nsize=256k\nfsync=1\nend_fsync=1\n",
    ),
    family(
        "block-sizes",
        256 + 128,
        "[global]\nfilename=data\nsize=1M\nioengine=psync\nrwmixread=80\ndescription=A mix of sizes\n\
         [range]\nrw=randrw\nbsrange=4k-4k\nblockalign=4k\n\
         [split]\nrw=randrw\nrwmixwrite=40\nblocksize=8k\nbssplit=8k/40:8k/60,8k/100\n",
    ),
    family(
        "steps",
        2 * 256,
        "[global]\nfilename=data\nsize=1m\nbs=4k\nioengine=libaio\niodepth=2\noffset=16k\n\
         [fill]\nrw=write\n[back]\nwait_for=fill\nrw=read:-8k\noffset=0\nthread\n",
    ),
    family(
        "verification",
        // Three of the four are read back.
        7 * 256,
        "[global]\nfilename=data\nsize=1m\nbs=4k\nioengine=libaio\niodepth=8\ndirect=0\nstonewall\n\
         verify_fatal=1\nverify_dump=1\nverify_async=2\n\
         [crc]\nrw=randwrite\nverify=crc32c\nverify_backlog=64\n\
         [intel]\nrw=write\nverify=crc32c-intel\nverify_interval=512\ndo_verify=1\n\
         [pattern]\nrw=write\nverify=pattern\nverify_pattern=0xaa555aa5\ndo_verify=0\n\
         [meta]\nrw=write\nverify=meta\nverify_backlog=1\n",
    ),
    family(
        "contents",
        2 * 128,
        "[global]\nfilename=data\nsize=1m\nbs=8k\nrw=randwrite\nioengine=libaio\niodepth=4\n\
         dedupe_percentage=50\nbuffer_compress_percentage=50\ndedupe_mode=working_set\n\
         dedupe_working_set_percentage=50\nrandom_generator=lfsr\ngtod_reduce=1\n\
         [one]\ndedupe_global=1\n[two]\ndedupe_global=1\nunlink=0\nfallocate=none\n",
    ),
    family(
        "distributions",
        3 * 256,
        "[global]\nfilename=data\nsize=1m\nbs=4k\nrw=randread\nioengine=psync\n\
         [zipf]\nrandom_distribution=zipf:0.5\n[zoned]\nrandom_distribution=zoned:50/5:30/15:20/\n\
         [rest]\nrandom_distribution=zoned:50/5:30/15:20/80\n",
    ),
    timed(
        "flows",
        "[global]\nfilename=data\nsize=1m\nbs=4k\ntime_based\ntimeout=1\nflow_sleep=1000\nflow_id=3\n\
         [some]\nrw=randread\nflow=1\n[more]\nrw=randwrite\nflow=8\n",
    ),
    family(
        "rates",
        4 * 64,
        "[global]\nfilename=data\nsize=256k\nbs=4k\nioengine=libaio\niodepth=4\ntime_based=0\n\
         [bytes]\nrw=write\nrate=1m,1m,1m\nratemin=1024\n\
         [ios]\nrw=randread\nrate_iops=1000\nrate_process=poisson\n\
         [pauses]\nrw=read\nthinktime=200\nio_submit_mode=offload\n\
         [target]\nrw=randread\nlatency_target=5000000\nlatency_window=50000\nlatency_percentile=99.9\n",
    ),
    timed(
        "ends",
        "[global]\nfilename=data\nsize=1m\nbs=4k\nioengine=psync\nthreads=1\n\
         [endless]\nrw=randread\ntime_based\nruntime=60\nthinktime=2000\n\
         [first]\nrw=read\nexitall=1\nexit_what=stonewall\n\
         [next]\nstonewall=1\nnew_group=1\nrw=read\nexitall\n[slow]\nrw=randread\ntime_based\nruntime=60\n\
         thinktime=2000\nexit_what=all\n",
    ),
    // All fail, and none ends the job.
    family(
        "errors",
        0,
        "[full]\nfilename=/dev/full\nsize=64k\nbs=4k\nrw=write\nioengine=psync\ncontinue_on_error=write\n\
         ignore_error=,ENOSPC\nerror_dump=0\n",
    ),
    timed(
        "steady-state",
        "[a]\nfilename=data\nsize=1m\nbs=4k\nrw=randread\nioengine=psync\ntime_based\nruntime=60\n\
         rate_iops=2000\nss=iops:90%\nss_dur=2s\nss_ramp=0\n",
    ),
    family(
        "strided-zones",
        256,
        "[a]\nfilename=data\nsize=1m\nfilesize=4m\nbs=4k\nrw=write\nzonemode=strided\nzonesize=64k\n\
         zoneskip=128k\nwrite_bw_log\nwrite_lat_log=zones\nlog_offset=1\n",
    ),
    family(
        "emulated-zones",
        32 + 64,
        "[global]\nfilename=data\nzonemode=zbd\nzonesize=64k\nioengine=libaio\nbs=4k\n\
         [fill]\nrw=write\nsize=2z\niodepth=1\nmax_open_zones=2\n\
         [again]\nwait_for=fill\nrw=randwrite\nsize=2z\nio_size=256k\niodepth=4\nread_beyond_wp=0\n\
         zone_reset_frequency=0.125\nzone_reset_threshold=0.7\n",
    ),
    family(
        "files",
        6 * 8 + 4,
        "[global]\ndirectory=.\nbs=4k\nfilesize=4k\nnrfiles=8\nopenfiles=1\nfallocate=none\nstonewall\n\
         [create]\nioengine=filecreate\ncreate_on_open=1\n[stat]\nioengine=filestat\n\
         [delete]\nioengine=filedelete\n\
         [mkdir]\nioengine=dircreate\n[dirstat]\nioengine=dirstat\n[rmdir]\nioengine=dirdelete\n\
         [truncate]\nioengine=ftruncate\nfilename=truncated\nnrfiles=1\nfilesize=16k\nrw=write\n",
    ),
    family(
        "allocation",
        16 + 256,
        "[global]\nfilename=allocated\nsize=1m\n\
         [punch]\nioengine=falloc\nrw=randtrim\nbs=64k\n[null]\nstonewall\nioengine=null\nrw=randrw\nbs=4k\n",
    ),
    timed(
        "work",
        "[io]\nfilename=data\nsize=256k\nbs=4k\nrw=read\n\
         [burn]\nioengine=cpuio\ncpuload=50\ncpumode=noop\nruntime=60\nexit_on_io_done=1\n\
         [sort]\nioengine=cpuio\ncpuload=100\ncpumode=qsort\nruntime=1\n\
         [run]\nstonewall\nioengine=exec\nprogram=/bin/true\narguments=%r\nstd_redirect=0\ngrace_time=0\n\
         runtime=10\n",
    ),
    family(
        "priorities",
        3 * 128,
        "[global]\nfilename=data\nsize=1m\nbs=8k\nrw=randread\nioengine=libaio\niodepth=4\nprioclass=2\n\
         write_lat_log=priorities\nlog_prio=1\n\
         [share]\ncmdprio_percentage=20\ncmdprio_class=2\ncmdprio=0\n\
         [sizes]\nbssplit=8k/40:8k/60\ncmdprio_bssplit=8k/25/2/1:8k/75/3/2\n[low]\nprioclass=3\nprio=7\n",
    ),
    family(
        "nodes",
        64,
        "[a]\nfilename=data\nsize=256k\nbs=4k\nrw=read\nnuma_cpu_nodes=0\nnuma_mem_policy=bind:0\n",
    ),
];

/// Job files for devices that a test machine lacks: their options are only read.
const DEVICES: &[&str] = &[
    "[global]\nioengine=io_uring_cmd\ncmd_type=nvme\nfilename=/dev/ng0n1\nsize=1G\niodepth=32\nbs=4K\n\
     thread=1\nstonewall=1\n[a]\nrw=randread\nsqthread_poll=1\nsqthread_poll_cpu=0\nnonvectored=1\n\
     registerfiles=1\n[b]\nrw=randwrite\n",
    "[global]\nioengine=libaio\ndirect=1\nfilename=/dev/sdz\nzonemode=zbd\noffset=524z\nsize=128z\n\
     [fill]\nrw=write\nbs=512K\n[w]\nwait_for=fill\nrw=randwrite\nbs=64k\nmax_open_zones=32\n\
     numa_mem_policy=interleave:0-1\nnuma_cpu_nodes=0-1\n",
    "[global]\ndirect=1\nioengine=io_uring\niodepth=256\nfilename=/dev/sdz\nsize=100%\n\
     [prepare]\nrw=write\nbs=1M\nfill_device=1\n[steady]\nstonewall\nrw=randwrite\nbs=4k\ntime_based\n\
     runtime=5m\nss=bw_slope:1%\nss_dur=30s\nss_ramp=10s\nwrite_bw_log=steady\n",
];

/// Whether fio accepts the job file; `None` without fio.
fn fio_accepts(directory: &Path, file: &str) -> Option<bool> {
    let output = Command::new("fio").args(["--parse-only", file]).current_dir(directory).output().ok()?;
    Some(output.status.success())
}

fn perf(directory: &Path, arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
    command.arg("perf").args(arguments).current_dir(directory).output().unwrap()
}

/// Whether fio is the release whose job files these are; others lack options or refuse them.
fn is_fio_3_33() -> bool {
    let version = Command::new("fio").arg("--version").output();
    let found = version.is_ok_and(|output| output.stdout.starts_with(b"fio-3.33"));
    if !found {
        println!("SKIPPED: no fio 3.33 in PATH to read the job files too");
    }
    found
}

#[test]
fn families_of_options_run_together() {
    let has_fio = is_fio_3_33();
    for family in FAMILIES {
        let directory = scratch(&format!("fio-jobs-{}", family.name));
        std::fs::write(directory.join("a.fio"), family.text).unwrap();
        let options = ["--output-format=json", "--output=out.json", "--generator_cost=0", "--eta=never"];
        let run = perf(&directory, &[&options[..], &["a.fio"]].concat());
        assert!(run.status.success(), "{}: {}", family.name, text(&run.stderr));
        let result = std::fs::read(directory.join("out.json")).unwrap();
        let result: Value = serde_json::from_slice(&result).unwrap();
        let ios = |job: &Value| ["read", "write", "trim"].map(|one| job[one]["total_ios"].as_u64().unwrap());
        let total: u64 = result["jobs"].as_array().unwrap().iter().flat_map(ios).sum();
        match family.ios {
            Some(expected) => assert_eq!(total, expected, "{}: {result}", family.name),
            None => assert!(total > 0, "{}: {result}", family.name),
        }
        let accepted = !has_fio || fio_accepts(&directory, "a.fio") == Some(true);
        assert!(accepted, "{}: no job file of fio", family.name);
        std::fs::remove_dir_all(directory).unwrap();
    }
}

/// What a field of the terse format looks like, whatever was measured.
fn kind_of_field(field: &str) -> String {
    let digits = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_digit());
    match field.split_once("%=") {
        Some((percent, _)) => format!("{percent}%="),
        None => match field.trim_end_matches('%').split_once('.') {
            Some((_, fraction)) if digits(fraction) => {
                format!("{} digits{}", fraction.len(), if field.ends_with('%') { "%" } else { "" })
            }
            None if digits(field) => "number".to_string(),
            _ => field.to_string(),
        },
    }
}

#[test]
fn every_version_of_the_terse_format_has_the_fields_of_fio() {
    if !is_fio_3_33() {
        return println!("SKIPPED: no fio 3.33 in PATH");
    }
    let directory = scratch("fio-terse");
    let options =
        ["--name=one", "--description=a;b", "--ioengine=null", "--size=1m", "--bs=4k", "--rw=randrw"];
    for version in ["2", "3", "4", "5"] {
        let version = format!("--terse-version={version}");
        let arguments = [&options[..], &["--minimal", &version, "--percentile_list=50:99"]].concat();
        let ours = perf(&directory, &[&arguments[..], &["--generator_cost=0"]].concat());
        let fio = Command::new("fio").args(&arguments).current_dir(&directory).output().unwrap();
        let kinds = |text: String| -> Vec<String> {
            let of_program = |field: &str| field.starts_with("fio-") || field.starts_with("ringbolt");
            let kind = |field: &str| if of_program(field) { "program".into() } else { kind_of_field(field) };
            text.split([';', '\n']).map(kind).collect()
        };
        let (ours, fio) = (kinds(text(&ours.stdout)), kinds(text(&fio.stdout)));
        let different = ours.iter().zip(&fio).position(|(one, other)| one != other);
        assert!(
            ours.len() > 100 && different.is_none(),
            "{version}: field {different:?} of {ours:?}, fio {fio:?}"
        );
        assert_eq!(ours.len(), fio.len(), "{version}");
    }
    assert!(
        perf(&directory, &["--minimal", "--terse-version=6", "--parse-only", "--name=a"]).status.code()
            == Some(2)
    );
    std::fs::remove_dir_all(directory).unwrap();
}

/// fio computes only if it was built with bison and flex; the values of its parser are in the parser's own tests.
#[test]
fn computed_values_are_those_of_fio() {
    let directory = scratch("fio-arithmetic");
    let value = |json: &[u8]| -> Value {
        let document: Value = serde_json::from_slice(json).unwrap();
        document["jobs"][0]["read"]["io_bytes"].clone()
    };
    let has_arithmetic = Command::new("fio").args(["--parse-only", "--name=a", "--iodepth=(2*8)"]).output();
    let has_arithmetic = is_fio_3_33() && has_arithmetic.is_ok_and(|output| output.status.success());
    for (size, bytes) in
        [("(4*16k)", 65536), ("(1m-(2^4)*4k)", 983040), ("(6/2k)*4", 12288), ("(0x10*256)*5%3", 8192)]
    {
        let size = format!("--size={size}");
        let arguments = [
            "--name=a",
            "--ioengine=null",
            "--bs=(4k*2-4k)",
            "--iodepth=(7%4)",
            &size,
            "--output-format=json",
        ];
        let ours = perf(&directory, &[&arguments[..], &["--generator_cost=0"]].concat());
        assert!(ours.status.success(), "{size}: {}", text(&ours.stderr));
        assert_eq!(value(&ours.stdout), bytes, "{size}");
        if has_arithmetic {
            let fio = Command::new("fio").args(arguments).current_dir(&directory).output().unwrap();
            assert_eq!(value(&fio.stdout), bytes, "{size}");
        }
    }
    if !has_arithmetic {
        println!("SKIPPED: fio 3.33 with arithmetic; the values are those of its parser");
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn jobs_for_other_machines_are_read() {
    let directory = scratch("fio-jobs-devices");
    for job in DEVICES {
        std::fs::write(directory.join("a.fio"), job).unwrap();
        let run = perf(&directory, &["--parse-only", "a.fio"]);
        assert!(run.status.success(), "{job}: {}", text(&run.stderr));
    }
    std::fs::remove_dir_all(directory).unwrap();
}

/// The job files in a directory, sorted.
fn job_files(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|e| e == "fio")).collect();
    files.sort();
    files
}

/// Of fio's own examples at least two thirds are accepted, and docs/PERF.md names the others.
#[test]
fn examples_that_are_refused_are_documented() {
    let directory =
        std::env::var("RINGBOLT_FIO_EXAMPLES").unwrap_or("/usr/share/doc/fio/examples".to_string());
    let (directory, documents) = (Path::new(&directory), include_str!("../../../docs/PERF.md"));
    let (mut by_fio, mut refused, mut unnamed) = (0, 0, Vec::new());
    for file in job_files(directory) {
        let name = file.file_name().unwrap().to_str().unwrap();
        match fio_accepts(directory, name) {
            None => return println!("SKIPPED: no fio in PATH"),
            Some(false) => continue,
            Some(true) => by_fio += 1,
        }
        if !perf(directory, &["--parse-only", name]).status.success() {
            refused += 1;
            let stem = file.file_stem().unwrap().to_str().unwrap();
            unnamed.extend((!documents.contains(&format!("`{stem}`"))).then(|| name.to_string()));
        }
    }
    if by_fio == 0 {
        return println!("SKIPPED: no examples of fio (package fio-examples, or RINGBOLT_FIO_EXAMPLES)");
    }
    assert!(unnamed.is_empty(), "not in docs/PERF.md: {unnamed:?}");
    assert!(refused * 3 <= by_fio, "{refused} of {by_fio} are refused");
    println!("{} of {by_fio} examples are accepted", by_fio - refused);
}

/// A line of a log with offsets.
struct LogLine {
    value: u64,
    direction: usize,
    bytes: u64,
    offset: u64,
}

fn log_lines(path: &Path) -> Vec<LogLine> {
    let log = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let line = |line: &str| {
        let columns: Vec<u64> = line.split(", ").take(5).map(|column| column.parse().unwrap()).collect();
        let [_, value, direction, bytes, offset] = columns[..] else { panic!("{line}") };
        LogLine { value, direction: direction as usize, bytes, offset }
    };
    log.lines().map(line).collect()
}

/// The offsets of each direction, in the order of completion.
fn offsets(log: &[LogLine]) -> [Vec<u64>; 3] {
    [0, 1, 2].map(|direction| {
        log.iter().filter(|line| line.direction == direction).map(|line| line.offset).collect()
    })
}

/// Sequential mixes of every engine, against fio where it is installed: each direction has a position of its
/// own.
#[test]
fn sequential_mixes_have_the_offsets_of_fio() {
    let has_fio = is_fio_3_33();
    let directory = scratch("fio-streams");
    std::fs::write(directory.join("data"), vec![0; 4 << 20]).unwrap();
    let log = ["--write_lat_log=x", "--log_offset=1", "--bs=4k", "--size=4m", "--name=a"];
    let engines: [&[&str]; 7] = [
        &["--ioengine=null"],
        &["--ioengine=null", "--iodepth=16"],
        &["--ioengine=psync", "--filename=data"],
        &["--ioengine=libaio", "--filename=data", "--iodepth=8"],
        &["--ioengine=io_uring", "--filename=data", "--iodepth=8"],
        &["--filename=malloc:4m", "--iodepth=8"],
        &["--filename=null:4m"],
    ];
    let patterns: [&[&str]; 4] = [
        &["--rw=rw"],
        &["--rw=rw", "--rwmixread=20"],
        &["--rw=randrw", "--percentage_random=0"],
        &["--rw=rw", "--rate_iops=100000,30000"],
    ];
    for (pattern, engine) in patterns.iter().flat_map(|pattern| engines.map(|engine| (*pattern, engine))) {
        let arguments = [pattern, engine, &log].concat();
        let run = perf(&directory, &[&arguments[..], &["--generator_cost=0"]].concat());
        assert!(run.status.success(), "{arguments:?}: {}", text(&run.stderr));
        let ours = offsets(&log_lines(&directory.join("x_lat.1.log")));
        let mut fios = [0, 1].map(|_| (0..1024).map(|block| block * 4096).collect::<Vec<u64>>());
        if has_fio && engine.iter().any(|option| option.starts_with("--ioengine=null")) {
            let fio = Command::new("fio").args(&arguments).current_dir(&directory).output().unwrap();
            assert!(fio.status.success(), "{}", text(&fio.stderr));
            let [reads, writes, _] = offsets(&log_lines(&directory.join("x_lat.1.log")));
            fios = [reads, writes];
        }
        for (mut ours, fios) in ours.into_iter().zip(fios) {
            // At a depth I/Os complete in any order.
            ours.sort_unstable();
            let both = ours.len().min(fios.len());
            assert!(both > 100 && ours[..both] == fios[..both], "{arguments:?}: {ours:?}");
        }
    }
    std::fs::remove_dir_all(directory).unwrap();
}

/// Without `log_avg_msec` the logs of rates have each I/O.
#[test]
fn logs_of_rates_have_each_io_as_those_of_fio() {
    let directory = scratch("fio-rate-logs");
    let arguments = [
        "--name=a",
        "--ioengine=null",
        "--filesize=1m",
        "--rw=randrw",
        "--bssplit=4k/50:8k/50",
        "--write_bw_log=x",
        "--write_iops_log=x",
        "--write_lat_log=x",
        "--log_offset=1",
    ];
    let check = |program: &str| {
        let [bw, iops, clat] =
            ["bw", "iops", "clat"].map(|kind| log_lines(&directory.join(format!("x_{kind}.1.log"))));
        assert!(bw.len() >= 128 && bw.len() == iops.len() && bw.len() == clat.len(), "{program}");
        assert_eq!(bw.iter().map(|line| line.bytes).sum::<u64>(), 1 << 20, "{program}");
        for ((bw, iops), clat) in bw.iter().zip(&iops).zip(&clat) {
            let io = |line: &LogLine| (line.direction, line.bytes, line.offset);
            assert_eq!((io(bw), io(iops), iops.value), (io(clat), io(clat), 1), "{program}");
            let rate = (bw.bytes * 1_000_000).checked_div(clat.value).unwrap_or(0);
            assert_eq!(bw.value, rate, "{program}: {} bytes in {} ns", bw.bytes, clat.value);
        }
    };
    let run = perf(&directory, &[&arguments[..], &["--generator_cost=0"]].concat());
    assert!(run.status.success(), "{}", text(&run.stderr));
    check("ringbolt");
    // Averages of an interval that the end cuts short: latencies only, as with fio.
    let averages = [&arguments[..], &["--log_avg_msec=600000", "--generator_cost=0"]].concat();
    assert!(perf(&directory, &averages).status.success());
    let lines =
        ["bw", "iops", "clat"].map(|kind| log_lines(&directory.join(format!("x_{kind}.1.log"))).len());
    assert_eq!(lines, [0, 0, 2]);
    if is_fio_3_33() {
        assert!(
            Command::new("fio").args(arguments).current_dir(&directory).output().unwrap().status.success()
        );
        check("fio");
    }
    std::fs::remove_dir_all(directory).unwrap();
}
