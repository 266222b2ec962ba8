//! Guarantees of `ringbolt lab`, on loop devices: processes end with the run, settings are restored, and one run at a
//! time uses a device.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use lab_experiments::RunDirectory;
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

mod phases;
mod run;

use run::*;

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

/// On a machine as noisy as it may be. One self-check of twenty may report a difference by chance, but not three in
/// succession.
#[test]
fn equal_measurements_do_not_differ() {
    let Some(disk) = Disk::new("equal") else { return };
    if !disk.offers(&["mq-deadline"]) {
        return;
    }
    let definition = WRITERS
        .replace("rw = 'randwrite'\n", "")
        .replace("['none']", "['none', 'mq-deadline']\nrw = ['randread', 'randwrite']");
    let file = disk.folder.join("definition.toml");
    fs::write(&file, definition).unwrap();
    let self_check = |attempt: usize| {
        let out = disk.folder.join(format!("out{attempt}"));
        let (file, out) = (file.to_str().unwrap(), out.to_str().unwrap());
        let run = ["run", "--definition", file, "--device", &disk.node, "--destroy-data", &disk.node];
        let options =
            ["--self-check", "--repetitions", "4", "--runtime", "100ms", "--ramp", "0s", "--out", out];
        let output = lab(&[&run[..], &options].concat());
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let mut attempts = vec![self_check(0)];
    while attempts.len() < 3 && attempts.last().unwrap().0 != Some(0) {
        attempts.push(self_check(attempts.len()));
    }
    let (status, text) = attempts.last().unwrap();
    assert_eq!(*status, Some(0), "{attempts:?}");
    // Throughput and two percentiles of each of four cells, and CPU time where it can be told.
    let metrics: usize =
        text.split("Self-check: 0 of ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!((12..=16).contains(&metrics) && text.contains("32 cells measured"), "{text}");
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
