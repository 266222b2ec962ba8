//! A run of the lab on a loop device or file of its own, and what it leaves.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// The variable by which processes of a run are found.
pub(crate) const TAG: &str = "RINGBOLT_LAB_RUN=";
/// Timeout of every wait. A run starts to write after about a second.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
pub(crate) const DISK_BYTES: u64 = 64 << 20;

/// Two writers that run longer than any test.
pub(crate) const WRITERS: &str = "
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
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Creates a folder with a file of [`DISK_BYTES`]; returns both.
pub(crate) fn folder_with_file(name: &str) -> (PathBuf, PathBuf) {
    let folder = std::env::temp_dir().join(format!("ringbolt-lab-safety-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("disk");
    fs::write(&file, vec![0x5a; DISK_BYTES as usize]).unwrap();
    (folder, file)
}

/// A file, removed on drop.
pub(crate) struct FileDisk {
    pub(crate) folder: PathBuf,
    pub(crate) file: PathBuf,
    pub(crate) _alone: MutexGuard<'static, ()>,
}

impl FileDisk {
    pub(crate) fn new(name: &str) -> FileDisk {
        let alone = alone();
        let (folder, file) = folder_with_file(name);
        FileDisk { folder, file, _alone: alone }
    }

    /// Starts `lab run` of a definition on this file, which may be overwritten.
    pub(crate) fn run(&self, definition: &str, options: &[&str]) -> Lab {
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
pub(crate) struct Disk {
    pub(crate) folder: PathBuf,
    pub(crate) node: String,
    pub(crate) _alone: MutexGuard<'static, ()>,
}

impl Disk {
    /// `None` if this machine has no loop devices that the test may use; prints the reason.
    pub(crate) fn new(name: &str) -> Option<Disk> {
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

    pub(crate) fn name(&self) -> &str {
        self.node.strip_prefix("/dev/").unwrap()
    }

    /// The scheduler and every readable setting of the queue.
    pub(crate) fn settings(&self) -> BTreeMap<String, String> {
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

    pub(crate) fn set(&self, file: &str, value: &str) {
        fs::write(Path::new("/sys/block").join(self.name()).join("queue").join(file), value).unwrap();
    }

    /// Whether the kernel offers these schedulers; prints a missing one.
    pub(crate) fn offers(&self, schedulers: &[&str]) -> bool {
        let path = Path::new("/sys/block").join(self.name()).join("queue/scheduler");
        let offered = fs::read_to_string(path).unwrap_or_default();
        let missing = schedulers.iter().find(|name| !offered.contains(*name));
        missing.iter().for_each(|name| println!("SKIPPED: this kernel has no scheduler {name}"));
        missing.is_none()
    }

    /// Writes that the device completed so far, and requests in flight: `Documentation/block/stat.rst`.
    pub(crate) fn writes(&self) -> (u64, u64) {
        let stat = fs::read_to_string(format!("/sys/block/{}/stat", self.name())).unwrap();
        let fields: Vec<u64> = stat.split_whitespace().map(|word| word.parse().unwrap()).collect();
        (fields[4], fields[8])
    }

    /// Starts `lab run` of a definition on this device, which may be overwritten.
    pub(crate) fn run(&self, definition: &str, options: &[&str]) -> Lab {
        let device = ["--device", &self.node, "--destroy-data", &self.node];
        self.start(definition, &[&device, options].concat())
    }

    /// Starts `lab run` of a definition.
    pub(crate) fn start(&self, definition: &str, options: &[&str]) -> Lab {
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
pub(crate) struct Lab {
    pub(crate) child: Child,
    pub(crate) stderr: PathBuf,
}

impl Lab {
    /// Starts `lab run` of a definition, with its results in `folder`.
    pub(crate) fn start(folder: &Path, definition: &str, options: &[&str]) -> Lab {
        let file = folder.join("definition.toml");
        fs::write(&file, definition).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        command.args(["lab", "run", "--definition"]).arg(&file).args(["--repetitions", "1"]).args(options);
        command.arg("--out").arg(folder.join("out"));
        let stderr = fs::File::create(folder.join("complaints")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
        Lab { child, stderr: folder.join("complaints") }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn message(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap()
    }

    /// The processes with the run's tag: pid and command line.
    pub(crate) fn processes(&self) -> Vec<(u32, String)> {
        let tag = format!("{TAG}{}-", self.child.id());
        let tagged = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(tag.as_bytes()))
        };
        all_processes().filter(tagged).map(|pid| (pid, command_line(pid))).collect()
    }

    /// The watchdog of the run.
    pub(crate) fn watchdog(&self) -> Pid {
        let of_ours = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
            parent == Some(&self.child.id().to_string()) && command_line(*pid).contains("lab watchdog")
        };
        Pid::from_raw(all_processes().find(of_ours).unwrap() as i32).unwrap()
    }

    /// Waits until both jobs write.
    pub(crate) fn wait_for_writes(&mut self, disk: &Disk) {
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

pub(crate) fn all_processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

pub(crate) fn command_line(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Polls until something holds.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < DEADLINE, "not in {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn lab(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringbolt")).arg("lab").args(arguments).output().unwrap()
}

pub(crate) fn restore() -> String {
    let output = lab(&["doctor", "--restore"]);
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The generators that are installed.
pub(crate) fn generators() -> Vec<&'static str> {
    match Command::new("fio").arg("--version").output() {
        Ok(_) => vec!["ringbolt", "fio"],
        Err(error) => {
            println!("SKIPPED fio: {error}");
            vec!["ringbolt"]
        }
    }
}

/// Asserts that no process of the run is left, and that the device stays idle while another lab command runs.
pub(crate) fn assert_stopped(run: &Lab, disk: &Disk) {
    assert_eq!(run.processes(), [], "processes of the run are left");
    wait_until("no request is in flight", || disk.writes().1 == 0);
    let before = disk.writes();
    restore();
    assert_eq!(disk.writes(), before, "writes go on");
}
