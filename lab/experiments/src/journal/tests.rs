use super::*;

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-journal-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn settings_are_put_back_in_order() {
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
    journal.makes_file(&made).unwrap();
    fs::write(&made, "x").unwrap();
    assert!(journal.restore().is_empty());
    assert_eq!(fs::read_to_string(&one).unwrap(), "a");
    assert!(!made.exists());
    assert_eq!(fs::read_dir(at.join("j")).unwrap().count(), 0);
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn what_a_killed_run_left_is_put_back_by_the_next() {
    let at = folder("killed");
    let one = at.join("one");
    fs::write(&one, "a").unwrap();
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    journal.set(&one, "b").unwrap();
    // Its owner lives: it is left alone.
    assert_eq!(restore_left_behind(&at.join("j")), (vec![], vec![]));
    assert_eq!(fs::read_to_string(&one).unwrap(), "b");
    // A kill runs no destructor, and the process number may be somebody else's by then.
    let text = fs::read_to_string(&journal.path).unwrap();
    std::mem::forget(journal);
    let (first, rest) = text.split_once('\n').unwrap();
    let other = first.replace(&format!("\"pid\":{}", std::process::id()), "\"pid\":4194304");
    let cut = format!("{other}\n{rest}{{\"setting\":{{\"path\":\"/never");
    fs::write(at.join("j").join(format!("journal-{}", std::process::id())), cut).unwrap();
    let (done, failed) = restore_left_behind(&at.join("j"));
    assert_eq!((done.len(), failed.len()), (1, 0));
    assert_eq!(fs::read_to_string(&one).unwrap(), "a");
    assert_eq!(restore_left_behind(&at.join("j")), (vec![], vec![]));
    fs::remove_dir_all(at).unwrap();
}

#[test]
fn a_process_that_was_killed_is_gone_though_nobody_asked_for_it() {
    let mut child = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    assert!(began(pid).is_some_and(|at| at.parse::<u64>().is_ok()));
    child.kill().unwrap();
    let zombie = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ");
    while !zombie() {
        std::thread::yield_now();
    }
    assert_eq!(began(pid), None);
    child.wait().unwrap();
}

#[test]
fn a_device_that_left_is_no_failure() {
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
fn the_chosen_scheduler_is_what_counts() {
    let at = folder("scheduler").join("queue");
    fs::create_dir_all(&at).unwrap();
    let file = at.join("scheduler");
    fs::write(&file, "none [bfq] kyber\n").unwrap();
    assert_eq!(current(&file).unwrap(), "bfq");
    let mut journal = Journal::begin(&at.join("j")).unwrap();
    let error = journal.set(&file, "kyber extra").unwrap_err().to_string();
    assert!(error.contains("read back"), "{error}");
    drop(journal);
    assert_eq!(fs::read_to_string(&file).unwrap(), "bfq");
    fs::remove_dir_all(at.parent().unwrap()).unwrap();
}
