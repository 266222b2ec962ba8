//! A run is killed in each of its phases, and the next command leaves nothing of it.

use std::fs;
use std::path::Path;

use rustix::process::Signal;

use super::run::*;

/// A phase in which a run is killed, and what shows that it has begun.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// This generator runs for the first time, to learn its version and cost.
    Probe(&'static str),
    /// The journal has a line with this, which precedes the change that it describes.
    Journal(&'static str),
    /// The devices are filled.
    Precondition,
    /// The first cell runs.
    Cell,
    /// The first record is on the disk.
    BetweenCells,
    /// SIGTERM has arrived: the run restores what it changed.
    Restoring,
}

const PHASES: [Phase; 10] = [
    Phase::Probe("ringbolt"),
    Phase::Probe("fio"),
    Phase::Journal("\"owner\""),
    Phase::Journal("\"file\""),
    Phase::Journal("\"loop\""),
    Phase::Journal("\"queue\""),
    Phase::Precondition,
    Phase::Cell,
    Phase::BetweenCells,
    Phase::Restoring,
];

/// The text of the run's journal; empty if there is none.
fn journal(run: &Lab) -> String {
    let prefix = format!("journal-{}-", run.child.id());
    let entries = fs::read_dir("/run/ringbolt-lab").into_iter().flatten().flatten();
    let found = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    found.filter_map(|entry| fs::read_to_string(entry.path()).ok()).collect()
}

fn has_begun(phase: Phase, run: &Lab, folder: &Path) -> bool {
    let runs = |job: &str| run.processes().iter().any(|(_, command)| command.contains(job));
    match phase {
        Phase::Probe(_) => runs("probe.fio"),
        Phase::Journal(entry) => journal(run).contains(entry),
        Phase::Precondition => folder.join("precondition.fio").exists() && runs(" perf "),
        Phase::Cell | Phase::Restoring => journal(run).contains("\"queue\"") && runs(" perf "),
        Phase::BetweenCells => {
            fs::read_to_string(folder.join("results.jsonl")).is_ok_and(|text| text.contains('\n'))
        }
    }
}

/// The loop devices over files in a directory.
fn attached_below(folder: &Path) -> Vec<String> {
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    let files = devices.filter_map(|one| fs::read_to_string(one.path().join("loop/backing_file")).ok());
    files.filter(|file| file.starts_with(folder.to_str().unwrap())).collect()
}

#[test]
fn a_signal_while_the_generator_is_probed_stops_the_run() {
    let Some(disk) = Disk::new("probe") else { return };
    for generator in generators() {
        let mut run = disk.run(WRITERS, &["--generator", generator]);
        wait_until("the generator is probed", || {
            assert!(run.child.try_wait().unwrap().is_none(), "it ended: {}", run.message());
            has_begun(Phase::Probe("any"), &run, &disk.folder)
        });
        run.signal(Signal::INT);
        let status = run.child.wait().unwrap();
        assert_eq!(status.code(), Some(1), "{}", run.message());
        assert!(run.message().contains("stopped before the first cell"), "{}", run.message());
        assert!(run.processes().is_empty(), "{generator}");
        assert!(!disk.folder.join("out").exists());
    }
}

#[test]
fn a_run_killed_in_any_phase_leaves_nothing() {
    // Its own device is for the settings; the runs that create devices use theirs.
    let Some(disk) = Disk::new("phases") else { return };
    if !disk.offers(&["mq-deadline", "kyber"]) {
        return;
    }
    disk.set("scheduler", "mq-deadline");
    disk.set("iosched/read_expire", "123");
    let before = disk.settings();
    let definition = WRITERS.replace("['none']", "['kyber', 'none', 'mq-deadline']");
    let out = disk.folder.join("out");
    for phase in PHASES {
        let generator = if let Phase::Probe(generator) = phase { generator } else { "ringbolt" };
        if !generators().contains(&generator) {
            continue;
        }
        let runtime = if phase == Phase::BetweenCells { "300ms" } else { "600s" };
        let options = ["--runtime", runtime, "--ramp", "0s", "--generator", generator];
        let makes_devices = matches!(phase, Phase::Journal("\"owner\"" | "\"file\"" | "\"loop\""));
        let mut run = match phase {
            _ if makes_devices => disk.start(&definition, &options),
            Phase::Precondition => disk.run(&definition, &[&options[..], &["--precondition"]].concat()),
            _ => disk.run(&definition, &options),
        };
        wait_until("the phase begins", || {
            assert!(run.child.try_wait().unwrap().is_none(), "{phase:?}: it ended: {}", run.message());
            has_begun(phase, &run, &out)
        });
        if phase == Phase::Restoring {
            run.signal(Signal::TERM);
        }
        run.signal(Signal::KILL);
        run.child.wait().unwrap();
        wait_until("its processes have ended", || run.processes().is_empty());
        let message = restore();
        assert_stopped(&run, &disk);
        assert_eq!(restore().trim(), "nothing to restore", "{phase:?}: {message}");
        assert_eq!(disk.settings(), before, "{phase:?}: {message}");
        assert_eq!(attached_below(&out), [""; 0], "{phase:?}: {message}");
        let files = fs::read_dir(out.join("disks")).map_or(0, Iterator::count);
        assert_eq!((files, journal(&run).as_str()), (0, ""), "{phase:?}: {message}");
        let probe = format!("/run/ringbolt-lab/probe-{}", run.child.id());
        assert!(!Path::new(&probe).exists(), "{phase:?}: {message}");
        let _ = fs::remove_dir_all(&out);
    }
}
