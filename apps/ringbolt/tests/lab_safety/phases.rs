//! A run is killed in each of its phases, and the next command leaves nothing of it.

use std::fs;
use std::path::Path;

use rustix::process::Signal;

use super::run::*;

/// A phase in which a run is killed, and what shows that it has begun.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
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

const PHASES: [Phase; 8] = [
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
        let runtime = if phase == Phase::BetweenCells { "300ms" } else { "600s" };
        let options = ["--runtime", runtime, "--ramp", "0s", "--generator", "ringbolt"];
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
        let _ = fs::remove_dir_all(&out);
    }
}
