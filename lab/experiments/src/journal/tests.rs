use std::fs::OpenOptions;

use super::*;

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-journal-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn settings_are_restored_in_reverse_order() {
    let at = folder("order");
    let (one, two) = (at.join("one"), at.join("two"));
    fs::write(&one, "a\n").unwrap();
    fs::write(&two, "1\n").unwrap();
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    journal.set(&one, "b").unwrap();
    journal.set(&one, "c").unwrap();
    journal.set(&two, "1").unwrap();
    assert_eq!(journal.changes().len(), 1, "what is so already is no change");
    let made = at.join("made");
    journal.record_file(&made).unwrap();
    fs::write(&made, "x").unwrap();
    assert!(journal.restore().is_empty());
    assert_eq!(fs::read_to_string(&one).unwrap(), "a");
    assert!(!made.exists());
    assert_eq!(fs::read_dir(at.join("j")).unwrap().count(), 0);
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn the_next_command_restores_what_a_killed_run_changed() {
    let at = folder("killed");
    let one = at.join("one");
    fs::write(&one, "a").unwrap();
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    journal.set(&one, "b").unwrap();
    // Its owner is alive: the journal is not restored.
    assert_eq!(restore_killed_runs(&at.join("j")), (vec![], vec![]));
    assert_eq!(fs::read_to_string(&one).unwrap(), "b");
    // SIGKILL runs no destructor, the pid may have been reused, and the last line may be incomplete.
    let text = fs::read_to_string(&journal.path).unwrap();
    assert!(journal.restore().is_empty());
    fs::write(&one, "b").unwrap();
    killed(&at, &format!("{text}{{\"setting\":{{\"path\":\"/never"));
    let (done, failed) = restore_killed_runs(&at.join("j"));
    assert_eq!((done.len(), failed.len()), (1, 0));
    assert_eq!(fs::read_to_string(&one).unwrap(), "a");
    assert_eq!(restore_killed_runs(&at.join("j")), (vec![], vec![]));
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn a_scheduler_is_restored_before_the_settings_that_its_switch_resets() {
    let at = folder("queue");
    let queue = at.join("queue");
    fs::create_dir_all(queue.join("iosched")).unwrap();
    let set = |file: &str, value: &str| fs::write(queue.join(file), value).unwrap();
    let get = |file: &str| fs::read_to_string(queue.join(file)).unwrap();
    set("scheduler", "bfq");
    set("nr_requests", "64");
    set("iosched/slice_idle", "3");
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    journal.set(&queue.join("scheduler"), "kyber").unwrap();
    // Change what the kernel changes at a switch.
    set("nr_requests", "256");
    fs::remove_file(queue.join("iosched/slice_idle")).unwrap();
    set("iosched/read_lat_nsec", "2000000");
    journal.set(&queue.join("iosched/read_lat_nsec"), "1000").unwrap();
    // One entry for all settings: they belong to the previous scheduler.
    assert_eq!(journal.changes(), [format!("{} (scheduler was bfq)", queue.display())]);
    let text = fs::read_to_string(&journal.path).unwrap();
    set("iosched/slice_idle", "8");
    assert_eq!(journal.restore(), Vec::<String>::new());
    let all = || ["scheduler", "nr_requests", "iosched/slice_idle"].map(get);
    assert_eq!(all(), ["bfq", "64", "3"]);

    // The same from the journal of a killed run.
    set("scheduler", "none");
    set("nr_requests", "128");
    set("iosched/slice_idle", "8");
    killed(&at, &text);
    assert_eq!(restore_killed_runs(&at.join("j")).1, Vec::<String>::new());
    assert_eq!(all(), ["bfq", "64", "3"]);
    fs::remove_dir_all(at).unwrap();
}

/// Writes the journal of a process that has ended.
fn killed(at: &Path, text: &str) {
    let other = text.replacen(&format!("\"pid\":{}", std::process::id()), "\"pid\":4194304", 1);
    assert_ne!(other, text);
    fs::write(at.join("j/journal-4194304"), other).unwrap();
}

#[test]
fn a_setting_that_cannot_be_restored_does_not_keep_the_journal() {
    use std::os::unix::fs::PermissionsExt;
    let at = folder("lost");
    let (one, two) = (at.join("one"), at.join("two"));
    fs::write(&one, "a").unwrap();
    fs::write(&two, "a").unwrap();
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    journal.set(&one, "b").unwrap();
    journal.set(&two, "b").unwrap();
    fs::set_permissions(&two, fs::Permissions::from_mode(0o444)).unwrap();
    let problems = journal.restore();
    assert_eq!(
        problems,
        [format!("{} is not restored to a: it is read-only; it is not retried", two.display())]
    );
    assert_eq!(fs::read_to_string(&one).unwrap(), "a", "the others are");
    assert_eq!(fs::read_dir(at.join("j")).unwrap().count(), 0);
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn paths_and_values_may_have_any_character() {
    let at = folder("newline");
    let one = at.join("new\nline \"quoted\" \\ é");
    let before = "first\nsecond \"{}\" \u{1f980}";
    fs::write(&one, before).unwrap();
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    journal.set(&one, "b").unwrap();
    let text = fs::read_to_string(&journal.path).unwrap();
    assert_eq!(text.lines().count(), 2, "an entry is a line: {text}");
    assert!(journal.restore().is_empty());
    fs::write(&one, "b").unwrap();
    killed(&at, &text);
    let (done, problems) = restore_killed_runs(&at.join("j"));
    assert_eq!((done.len(), problems.len()), (1, 0), "{done:?} {problems:?}");
    assert_eq!(fs::read_to_string(&one).unwrap(), before);
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn nothing_changes_unless_it_is_recorded_first() {
    let at = folder("full");
    let queue = at.join("queue");
    fs::create_dir_all(&queue).unwrap();
    fs::write(queue.join("scheduler"), "none").unwrap();
    fs::write(at.join("one"), "a").unwrap();
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    journal.set(&at.join("one"), "b").unwrap();
    let good =
        std::mem::replace(&mut journal.file, OpenOptions::new().write(true).open("/dev/full").unwrap());
    let full = |result: io::Result<()>| {
        let errno = result.unwrap_err().raw_os_error();
        assert_eq!(errno, Some(rustix::io::Errno::NOSPC.raw_os_error()));
    };
    let other = at.join("other");
    fs::write(&other, "a").unwrap();
    full(journal.set(&other, "b"));
    full(journal.set(&queue.join("scheduler"), "bfq"));
    full(journal.record_file(&at.join("made")));
    assert_eq!(fs::read_to_string(&other).unwrap(), "a");
    assert_eq!(fs::read_to_string(queue.join("scheduler")).unwrap(), "none");
    // Earlier changes are still restored.
    journal.file = good;
    assert!(journal.restore().is_empty());
    assert_eq!(fs::read_to_string(at.join("one")).unwrap(), "a");
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn a_new_journal_is_not_restored_by_another_command() {
    let at = folder("begun");
    fs::create_dir_all(at.join("j")).unwrap();
    // The state between the file's creation and its first line.
    let path = at.join("j/journal-1-1-1");
    let file = create_locked(&path).unwrap().unwrap();
    assert_eq!(restore_killed_runs(&at.join("j")), (vec![], vec![]));
    assert!(path.exists());
    drop(file);
    assert_eq!(restore_killed_runs(&at.join("j")), (vec![], vec![]));
    assert!(!path.exists());
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn a_removed_device_is_no_error() {
    let at = folder("left");
    let one = at.join("one");
    fs::write(&one, "a").unwrap();
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    journal.set(&one, "b").unwrap();
    fs::remove_file(&one).unwrap();
    assert!(journal.restore().is_empty());
    assert!(!one.exists());
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn the_selected_scheduler_is_the_value() {
    let at = folder("scheduler").join("queue");
    fs::create_dir_all(&at).unwrap();
    let file = at.join("scheduler");
    fs::write(&file, "none [bfq] kyber\n").unwrap();
    assert_eq!(read_setting(&file).unwrap(), "bfq");
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    let error = journal.set(&file, "kyber extra").unwrap_err().to_string();
    assert!(error.contains("read back"), "{error}");
    drop(journal);
    assert_eq!(fs::read_to_string(&file).unwrap(), "bfq");
    fs::remove_dir_all(at.parent().unwrap()).unwrap();
}

#[test]
fn files_of_killed_processes_are_removed_and_those_of_others_stay() {
    let at = folder("stale");
    let own = std::process::id();
    // Above the largest pid of Linux.
    let dead = u32::MAX;
    let stale = [format!("processes-{dead}-1-0.new"), format!("processes-{dead}-1-0")];
    let needed =
        [format!("processes-{own}-1-0.new"), format!("processes-{own}-1-0"), "processes-x".to_string()];
    for name in stale.iter().chain(&needed) {
        fs::write(at.join(name), "[]").unwrap();
    }
    for pid in [own, dead] {
        fs::create_dir(at.join(format!("probe-{pid}"))).unwrap();
        fs::write(at.join(format!("probe-{pid}/probe.fio")), "[fg]").unwrap();
    }
    assert_eq!(restore_killed_runs(&at), (Vec::new(), Vec::new()));
    assert!(stale.iter().all(|name| !at.join(name).exists()));
    assert!(needed.iter().all(|name| at.join(name).exists()));
    assert!(at.join(format!("probe-{own}")).exists() && !at.join(format!("probe-{dead}")).exists());
    fs::remove_dir_all(at).unwrap();
}
