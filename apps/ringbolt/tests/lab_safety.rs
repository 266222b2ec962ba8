//! Guarantees of `ringbolt lab`, on loop devices: processes end with the run, settings are restored, and one run at a
//! time uses a device.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lab_experiments::RunDirectory;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal};

/// The variable by which processes of a run are found.
const TAG: &str = "RINGBOLT_LAB_RUN=";
/// Timeout of every wait. A run starts to write after about a second.
const DEADLINE: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 64 << 20;

/// Two writers that run longer than any test.
const WRITERS: &str = "
id = 'test.writers'
title = 'two writers'
x = 'scheduler'
y = 'iops'
series = ['scheduler']
[fixed]
api = 'psync'
rw = 'randwrite'
block_bytes = 4096
devices = 1
jobs = 2
iodepth = 1
cores = 1
[options]
norandommap = 1
[vary]
scheduler = ['none']
";

/// Lets one test at a time run: journals belong to the machine, and every lab command restores killed runs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Creates a folder with a file of [`DISK_BYTES`]; returns both.
fn folder_with_file(name: &str) -> (PathBuf, PathBuf) {
    let folder = std::env::temp_dir().join(format!("ringbolt-lab-safety-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("disk");
    fs::write(&file, vec![0x5a; DISK_BYTES as usize]).unwrap();
    (folder, file)
}

/// A file, removed on drop.
struct FileDisk {
    folder: PathBuf,
    file: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

impl FileDisk {
    fn new(name: &str) -> FileDisk {
        let alone = alone();
        let (folder, file) = folder_with_file(name);
        FileDisk { folder, file, _alone: alone }
    }

    /// Starts `lab run` of a definition on this file, which may be overwritten.
    fn run(&self, definition: &str, options: &[&str]) -> Lab {
        let file = self.file.to_str().unwrap();
        Lab::start(&self.folder, definition, &[&["--file", file, "--destroy-data", file], options].concat())
    }
}

impl Drop for FileDisk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A loop device over a file, both removed on drop.
struct Disk {
    folder: PathBuf,
    node: String,
    _alone: MutexGuard<'static, ()>,
}

impl Disk {
    /// `None` if this machine has no loop devices that the test may use; prints the reason.
    fn new(name: &str) -> Option<Disk> {
        let alone = alone();
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED {name}: only root makes loop devices");
            return None;
        }
        let (folder, file) = folder_with_file(name);
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        let made = match made {
            Ok(made) if made.status.success() => made,
            other => {
                println!("SKIPPED {name}: no loop device can be made: {other:?}");
                fs::remove_dir_all(&folder).unwrap();
                return None;
            }
        };
        let node = String::from_utf8(made.stdout).unwrap().trim().to_string();
        Some(Disk { folder, node, _alone: alone })
    }

    fn name(&self) -> &str {
        self.node.strip_prefix("/dev/").unwrap()
    }

    /// The scheduler and every readable setting of the queue.
    fn settings(&self) -> BTreeMap<String, String> {
        let queue = Path::new("/sys/block").join(self.name()).join("queue");
        let mut settings = BTreeMap::new();
        for folder in [queue.clone(), queue.join("iosched")] {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                if let Ok(text) = fs::read_to_string(entry.path()) {
                    settings.insert(entry.path().display().to_string(), text);
                }
            }
        }
        settings
    }

    fn set(&self, file: &str, value: &str) {
        fs::write(Path::new("/sys/block").join(self.name()).join("queue").join(file), value).unwrap();
    }

    /// Whether the kernel offers these schedulers; prints a missing one.
    fn offers(&self, schedulers: &[&str]) -> bool {
        let path = Path::new("/sys/block").join(self.name()).join("queue/scheduler");
        let offered = fs::read_to_string(path).unwrap_or_default();
        let missing = schedulers.iter().find(|name| !offered.contains(*name));
        missing.iter().for_each(|name| println!("SKIPPED: this kernel has no scheduler {name}"));
        missing.is_none()
    }

    /// Writes that the device completed so far, and requests in flight: `Documentation/block/stat.rst`.
    fn writes(&self) -> (u64, u64) {
        let stat = fs::read_to_string(format!("/sys/block/{}/stat", self.name())).unwrap();
        let fields: Vec<u64> = stat.split_whitespace().map(|word| word.parse().unwrap()).collect();
        (fields[4], fields[8])
    }

    /// Starts `lab run` of a definition on this device, which may be overwritten.
    fn run(&self, definition: &str, options: &[&str]) -> Lab {
        let device = ["--device", &self.node, "--destroy-data", &self.node];
        self.start(definition, &[&device, options].concat())
    }

    /// Starts `lab run` of a definition.
    fn start(&self, definition: &str, options: &[&str]) -> Lab {
        Lab::start(&self.folder, definition, options)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The next device that is attached here starts with defaults.
        let _ = fs::write(format!("/sys/block/{}/queue/scheduler", self.name()), "none");
        let _ = Command::new("losetup").args(["--detach", &self.node]).status();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A `lab run` in the background, killed on drop.
struct Lab {
    child: Child,
    stderr: PathBuf,
}

impl Lab {
    /// Starts `lab run` of a definition, with its results in `folder`.
    fn start(folder: &Path, definition: &str, options: &[&str]) -> Lab {
        let file = folder.join("definition.toml");
        fs::write(&file, definition).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        command.args(["lab", "run", "--definition"]).arg(&file).args(["--repetitions", "1"]).args(options);
        command.arg("--out").arg(folder.join("out"));
        let stderr = fs::File::create(folder.join("complaints")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
        Lab { child, stderr: folder.join("complaints") }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn message(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap()
    }

    /// The processes with the run's tag: pid and command line.
    fn processes(&self) -> Vec<(u32, String)> {
        let tag = format!("{TAG}{}-", self.child.id());
        let tagged = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(tag.as_bytes()))
        };
        all_processes().filter(tagged).map(|pid| (pid, command_line(pid))).collect()
    }

    /// The watchdog of the run.
    fn watchdog(&self) -> Pid {
        let of_ours = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
            parent == Some(&self.child.id().to_string()) && command_line(*pid).contains("lab watchdog")
        };
        Pid::from_raw(all_processes().find(of_ours).unwrap() as i32).unwrap()
    }

    /// Waits until both jobs write.
    fn wait_for_writes(&mut self, disk: &Disk) {
        let (before, _) = disk.writes();
        wait_until("the jobs write", || {
            assert!(self.child.try_wait().unwrap().is_none(), "it ended: {}", self.message());
            disk.writes().0 > before + 100 && self.processes().len() >= 3
        });
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn all_processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn command_line(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Polls until something holds.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < DEADLINE, "not in {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn lab(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringbolt")).arg("lab").args(arguments).output().unwrap()
}

fn restore() -> String {
    let output = lab(&["doctor", "--restore"]);
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The generators that are installed.
fn generators() -> Vec<&'static str> {
    match Command::new("fio").arg("--version").output() {
        Ok(_) => vec!["ringbolt", "fio"],
        Err(error) => {
            println!("SKIPPED fio: {error}");
            vec!["ringbolt"]
        }
    }
}

/// Asserts that no process of the run is left, and that the device stays idle while another lab command runs.
fn assert_stopped(run: &Lab, disk: &Disk) {
    assert_eq!(run.processes(), [], "processes of the run are left");
    wait_until("no request is in flight", || disk.writes().1 == 0);
    let before = disk.writes();
    restore();
    assert_eq!(disk.writes(), before, "writes go on");
}

#[test]
fn a_killed_run_leaves_no_process_that_writes() {
    let Some(disk) = Disk::new("killed") else { return };
    for generator in generators() {
        let mut run = disk.run(WRITERS, &["--generator", generator, "--runtime", "600s", "--ramp", "0s"]);
        run.wait_for_writes(&disk);
        run.signal(Signal::KILL);
        run.child.wait().unwrap();
        wait_until("its processes have ended", || run.processes().is_empty());
        assert_stopped(&run, &disk);
        fs::remove_dir_all(disk.folder.join("out")).unwrap();
    }
}

#[test]
fn restore_kills_the_processes_of_a_run_without_its_watchdog() {
    let Some(disk) = Disk::new("watchdog") else { return };
    for generator in generators() {
        let mut run = disk.run(WRITERS, &["--generator", generator, "--runtime", "600s", "--ramp", "0s"]);
        run.wait_for_writes(&disk);
        rustix::process::kill_process(run.watchdog(), Signal::KILL).unwrap();
        run.signal(Signal::KILL);
        run.child.wait().unwrap();
        if generator == "fio" {
            // Each job of fio starts a session and does not end with fio.
            wait_until("fio itself has ended", || run.processes().len() == 2);
            let (before, _) = disk.writes();
            wait_until("its jobs go on", || disk.writes().0 > before);
            let message = restore();
            assert_eq!(message.matches("fio (process ").count(), 2, "{message}");
        } else {
            wait_until("its processes have ended", || run.processes().is_empty());
        }
        assert_stopped(&run, &disk);
        fs::remove_dir_all(disk.folder.join("out")).unwrap();
    }
}

/// The ways in which a run ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Itself,
    By(Signal),
    TwiceBy(Signal),
    KillAndRestore,
}

#[test]
fn a_scheduler_and_its_settings_are_restored_however_a_run_ends() {
    let Some(disk) = Disk::new("settings") else { return };
    if !disk.offers(&["mq-deadline", "kyber"]) {
        return;
    }
    // A detached loop device keeps its settings; a switch of scheduler resets them.
    disk.set("scheduler", "none");
    disk.set("scheduler", "mq-deadline");
    let defaults = disk.settings();
    disk.set("nr_requests", "61");
    disk.set("iosched/read_expire", "123");
    disk.set("iosched/fifo_batch", "7");
    let before = disk.settings();
    let definition = WRITERS
        .replace("['none']", "['kyber']")
        .replace("iodepth = 1\n", "iodepth = 1\nread_target_us = 100\nwrite_target_us = 1000\n");
    let ends = [
        End::Itself,
        End::By(Signal::INT),
        End::By(Signal::TERM),
        End::By(Signal::HUP),
        End::TwiceBy(Signal::INT),
        End::KillAndRestore,
    ];
    for end in ends {
        let runtime = if end == End::Itself { "300ms" } else { "600s" };
        let mut run = disk.run(&definition, &["--runtime", runtime, "--ramp", "0s"]);
        let kyber = || disk.settings().values().any(|text| text.contains("[kyber]"));
        wait_until("kyber is in use", kyber);
        if end != End::Itself {
            run.wait_for_writes(&disk);
            assert_ne!(disk.settings(), before);
        }
        match end {
            End::Itself => {}
            End::By(signal) => run.signal(signal),
            End::TwiceBy(signal) => {
                run.signal(signal);
                run.signal(signal);
            }
            End::KillAndRestore => run.signal(Signal::KILL),
        }
        let status = run.child.wait().unwrap();
        match end {
            End::Itself => assert!(status.success(), "{}", run.message()),
            End::KillAndRestore => {
                let message = restore();
                assert!(message.contains("scheduler mq-deadline with its settings"), "{message}");
            }
            _ => {
                assert_eq!(status.code(), Some(1), "{end:?}: {}", run.message());
                assert!(run.message().contains("stopped; `ringbolt lab run --resume"), "{}", run.message());
            }
        }
        assert_eq!(disk.settings(), before, "{end:?}");
        assert_ne!(disk.settings(), defaults, "{end:?}");
        assert_eq!(restore().trim(), "nothing to restore", "{end:?}");
        fs::remove_dir_all(disk.folder.join("out")).unwrap();
    }
}

#[test]
fn a_second_run_on_a_device_is_rejected() {
    let Some(disk) = Disk::new("second") else { return };
    let mut run = disk.run(WRITERS, &["--runtime", "600s", "--ramp", "0s"]);
    run.wait_for_writes(&disk);
    let before = disk.settings();
    let link = disk.folder.join("link");
    std::os::unix::fs::symlink(&disk.node, &link).unwrap();
    let uri = format!("uring:{}", disk.node);
    let out = disk.folder.join("second");
    let out = out.to_str().unwrap();
    let measures = ["--quick", "--runtime", "100ms", "--ramp", "0s", "--out", out];
    let file = disk.folder.join("disk");
    let commands = [
        [&["run", "icpe24.fig2", "--device", &disk.node], &measures[..]].concat(),
        [&["run", "icpe24.fig2", "--device", link.to_str().unwrap()], &measures[..]].concat(),
        [&["run", "cheops23.fig5a", "--device", &uri], &measures[..]].concat(),
        [&["run", "cheops23.fig5a", "--file", file.to_str().unwrap()], &measures[..]].concat(),
        vec!["advise", "--device", &disk.node, "--goal", "p99", "--out", out],
    ];
    for command in commands {
        let output = lab(&command);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{command:?}: {message}");
        let owner = format!("in use by process {} (", run.child.id());
        assert!(
            message.contains(&owner) && message.contains("lab run --definition"),
            "{command:?}: {message}"
        );
        assert!(!Path::new(out).exists(), "{command:?} began a run");
    }
    assert_eq!(disk.settings(), before);
    assert!(run.child.try_wait().unwrap().is_none(), "the first run continues");
    // A killed run does not block the next one.
    run.signal(Signal::KILL);
    run.child.wait().unwrap();
    fs::remove_dir_all(disk.folder.join("out")).unwrap();
    let mut next = disk.run(WRITERS, &["--runtime", "100ms", "--ramp", "0s"]);
    assert!(next.child.wait().unwrap().success(), "{}", next.message());
}

#[test]
fn cells_on_bdevs_can_open_the_device_that_the_run_has_locked() {
    let Some(disk) = Disk::new("own") else { return };
    let one_job = WRITERS.replace("jobs = 2", "jobs = 1");
    let apis = one_job
        .replace("api = 'psync'\n", "")
        .replace("scheduler = ['none']", "api = ['psync', 'spdk', 'aio']");
    let target =
        one_job.replace("'psync'", "'nvme-tcp'").replace("scheduler = ['none']", "target = ['ringbolt']");
    for (definition, cells) in
        [(apis.replace("'scheduler'", "'api'"), 3), (target.replace("'scheduler'", "'target'"), 1)]
    {
        let mut run = disk.run(&definition, &["--runtime", "200ms", "--ramp", "0s"]);
        let status = run.child.wait().unwrap();
        let results = RunDirectory::open(&disk.folder.join("out")).unwrap();
        let measured = results.records.iter().filter(|record| record.is_measured()).count();
        assert!(status.success() && measured == cells, "{}: {:?}", run.message(), results.records);
        fs::remove_dir_all(disk.folder.join("out")).unwrap();
    }
}

#[test]
fn a_run_does_not_lock_its_file_against_its_own_processes() {
    let disk = FileDisk::new("file");
    let one_job = WRITERS.replace("jobs = 2", "jobs = 1");
    let apis = one_job.replace("api = 'psync'\n", "").replace("scheduler", "api");
    let apis = apis.replace("['none']", "['psync', 'aio', 'iou', 'spdk']");
    let target = one_job.replace("'psync'", "'nvme-tcp'").replace("scheduler", "target");
    let workloads = one_job.replace("rw = 'randwrite'\n", "").replace("scheduler", "rw");
    let workloads = workloads.replace("['none']", "['randread', 'randwrite', 'randrw', 'read']");
    let mut runs = vec![("ringbolt", apis, 4), ("ringbolt", target.replace("'none'", "'ringbolt'"), 1)];
    runs.extend(generators().into_iter().map(|generator| (generator, workloads.clone(), 4)));
    for (generator, definition, cells) in runs {
        let options = ["--generator", generator, "--runtime", "100ms", "--ramp", "0s"];
        let mut run = disk.run(&definition, &options);
        run.child.wait().unwrap();
        let results = RunDirectory::open(&disk.folder.join("out")).unwrap();
        let measured = results.records.iter().filter(|record| record.is_measured()).count();
        assert_eq!(measured, cells, "{generator}: {}", run.message());
        fs::remove_dir_all(disk.folder.join("out")).unwrap();
    }
}

#[test]
fn no_other_process_can_lock_a_file_while_a_run_measures_it() {
    let disk = FileDisk::new("held-file");
    let cells = WRITERS.replace("rw = 'randwrite'\n", "").replace("scheduler", "rw");
    let cells = cells.replace("['none']", "['randwrite', 'randread', 'write', 'randrw']");
    for generator in generators() {
        let mut run = disk.run(&cells, &["--generator", generator, "--runtime", "100ms", "--ramp", "0s"]);
        let file = fs::File::open(&disk.file).unwrap();
        let lock = || flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        wait_until("the run has the file", || {
            assert!(run.child.try_wait().unwrap().is_none(), "it ended: {}", run.message());
            !lock() || flock(&file, FlockOperation::Unlock).is_err()
        });
        // The whole time, also between a cell's generator and the next one's.
        wait_until("the run has released the file", lock);
        let results = RunDirectory::open(&disk.folder.join("out")).unwrap();
        let measured = results.records.iter().filter(|record| record.is_measured()).count();
        assert_eq!(measured, 4, "{generator}: released early: {}", run.message());
        drop(file);
        run.child.wait().unwrap();
        fs::remove_dir_all(disk.folder.join("out")).unwrap();
    }
}

#[test]
fn a_file_that_another_process_reads_is_refused_and_unchanged() {
    let disk = FileDisk::new("read-file");
    let reader = fs::File::open(&disk.file).unwrap();
    flock(&reader, FlockOperation::LockShared).unwrap();
    let before = fs::read(&disk.file).unwrap();
    for generator in generators() {
        let options = ["--generator", generator, "--runtime", "100ms", "--ramp", "0s", "--precondition"];
        let mut run = disk.run(WRITERS, &options);
        let status = run.child.wait().unwrap();
        let message = run.message();
        assert!(!status.success() && message.contains("in use by process"), "{generator}: {message}");
        assert!(fs::read(&disk.file).unwrap() == before, "{generator} wrote to the file");
        let _ = fs::remove_dir_all(disk.folder.join("out"));
    }
}

#[test]
fn a_killed_run_leaves_no_process_that_writes_its_file() {
    let disk = FileDisk::new("killed-file");
    for generator in generators() {
        let options = ["--generator", generator, "--runtime", "600s", "--ramp", "0s"];
        let mut run = disk.run(WRITERS, &options);
        let modified = || fs::metadata(&disk.file).unwrap().modified().unwrap();
        let before = modified();
        wait_until("the jobs write", || {
            assert!(run.child.try_wait().unwrap().is_none(), "it ended: {}", run.message());
            modified() > before && run.processes().len() >= 3
        });
        run.signal(Signal::KILL);
        run.child.wait().unwrap();
        wait_until("its processes have ended", || run.processes().is_empty());
        let after = modified();
        restore();
        assert_eq!(modified(), after, "{generator}: writes go on");
        fs::remove_dir_all(disk.folder.join("out")).unwrap();
    }
}

#[test]
fn a_killed_run_with_a_target_leaves_no_process() {
    let Some(disk) = Disk::new("target") else { return };
    let definition = WRITERS.replace("'psync'", "'nvme-tcp'").replace("jobs = 2", "jobs = 1");
    let definition = definition
        .replace("scheduler = ['none']", "target = ['ringbolt']")
        .replace("'scheduler'", "'target'");
    let mut run = disk.run(&definition, &["--runtime", "600s", "--ramp", "0s"]);
    let (before, _) = disk.writes();
    wait_until("the target writes", || {
        assert!(run.child.try_wait().unwrap().is_none(), "it ended: {}", run.message());
        let serves = run.processes().iter().any(|(_, command)| command.contains(" serve "));
        serves && disk.writes().0 > before + 100
    });
    run.signal(Signal::KILL);
    run.child.wait().unwrap();
    wait_until("its processes have ended", || run.processes().is_empty());
    assert_stopped(&run, &disk);
}

#[test]
fn a_cell_fails_if_its_scheduler_is_changed() {
    let Some(disk) = Disk::new("changed") else { return };
    if !disk.offers(&["mq-deadline", "kyber"]) {
        return;
    }
    let definition = WRITERS.replace("['none']", "['mq-deadline']");
    for (file, value, expected) in [
        ("scheduler", "kyber", "queue/scheduler: expected mq-deadline, found kyber"),
        ("iosched/fifo_batch", "77", "queue/iosched/fifo_batch: expected 16, found 77"),
        ("nr_requests", "33", "queue/nr_requests: expected "),
    ] {
        let before = disk.settings();
        let mut run = disk.run(&definition, &["--runtime", "3s", "--ramp", "0s"]);
        run.wait_for_writes(&disk);
        disk.set(file, value);
        let status = run.child.wait().unwrap();
        assert_eq!(status.code(), Some(1), "{file}: {}", run.message());
        let results = RunDirectory::open(&disk.folder.join("out")).unwrap();
        let [record] = results.records.as_slice() else { panic!("{:?}", results.records) };
        let message = record.failed.clone().unwrap_or_default();
        assert!(
            message.contains(expected) && message.contains("changed by another process"),
            "{file}: {message}"
        );
        assert_eq!(disk.settings(), before, "{file}");
        fs::remove_dir_all(disk.folder.join("out")).unwrap();
    }
}

#[test]
fn an_open_loop_device_is_reported_until_it_is_detached() {
    let Some(disk) = Disk::new("open") else { return };
    let mut run = disk.start(WRITERS, &["--runtime", "600s", "--ramp", "0s"]);
    let file = disk.folder.join("out/disks/disk0");
    let file = file.to_str().unwrap();
    let made = || {
        let loops = fs::read_dir("/sys/block").unwrap().flatten();
        let backed = |entry: &fs::DirEntry| {
            let backing = fs::read_to_string(entry.path().join("loop/backing_file"));
            backing.is_ok_and(|backing| backing.starts_with(file))
        };
        loops.filter(backed).map(|entry| Path::new("/dev").join(entry.file_name())).next()
    };
    wait_until("its processes are there", || run.processes().len() >= 3 && made().is_some());
    let node = made().unwrap();
    let open = fs::File::open(&node).unwrap();
    run.signal(Signal::KILL);
    run.child.wait().unwrap();
    let failed = lab(&["doctor", "--restore"]);
    let message = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(failed.status.code(), Some(4), "{message}");
    let user = format!("(process {})", std::process::id());
    let shown = node.display();
    assert!(
        message.contains(&format!("{shown} is not detached: it is open in")) && message.contains(&user),
        "{message}"
    );
    assert!(message.contains(&format!("{shown} is attached to {file}, which was removed")), "{message}");
    drop(open);
    wait_until("it is detached", || made().is_none());
    assert!(lab(&["doctor", "--restore"]).status.success());
    assert_eq!(restore().trim(), "nothing to restore");
}
