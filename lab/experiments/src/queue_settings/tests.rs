use std::path::PathBuf;

use super::*;

/// A `queue` directory with these files, removed on drop.
struct Fake(PathBuf);

impl Fake {
    fn new(name: &str, files: &[(&str, &str)]) -> Fake {
        let at = std::env::temp_dir().join(format!("ringbolt-queue-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&at);
        let fake = Fake(at.join("queue"));
        fs::create_dir_all(fake.0.join("iosched")).unwrap();
        files.iter().for_each(|(file, value)| fake.set(file, value));
        fake
    }

    fn set(&self, file: &str, value: &str) {
        fs::write(self.0.join(file), value).unwrap();
    }

    fn get(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.0.parent().unwrap());
    }
}

#[test]
fn settings_are_in_the_order_of_restoring() {
    let fake = Fake::new(
        "read",
        &[
            ("scheduler", "none [bfq]\n"),
            ("iosched/b", "2\n"),
            ("iosched/a", "1\n"),
            ("wbt_lat_usec", "75000\n"),
            ("nr_requests", "64\n"),
            ("read_ahead_kb", "128\n"),
        ],
    );
    let state = QueueSettings::read(&fake.0);
    assert_eq!(state.scheduler, "bfq");
    let files: Vec<&str> = state.settings.iter().map(|(file, _)| file.as_str()).collect();
    assert_eq!(files, ["nr_requests", "wbt_lat_usec", "iosched/a", "iosched/b"]);
}

#[test]
fn only_existing_settings_that_differ_are_restored() {
    let fake = Fake::new(
        "back",
        &[("scheduler", "bfq"), ("nr_requests", "64"), ("iosched/a", "1"), ("iosched/b", "2")],
    );
    let state = QueueSettings::read(&fake.0);
    fake.set("scheduler", "kyber");
    fake.set("nr_requests", "256");
    fake.set("iosched/a", "9");
    fs::remove_file(fake.0.join("iosched/b")).unwrap();
    assert_eq!(state.restore(&fake.0), []);
    assert_eq!((fake.get("scheduler"), fake.get("nr_requests")), ("bfq".into(), "64".into()));
    assert_eq!(fake.get("iosched/a"), "1");
    assert!(!fake.0.join("iosched/b").exists());
}

#[test]
fn a_rejected_value_is_reported_as_permanent() {
    let fake = Fake::new("lost", &[("scheduler", "bfq"), ("nr_requests", "64"), ("iosched/a", "1")]);
    let state = QueueSettings::read(&fake.0);
    fake.set("nr_requests", "256");
    fake.set("iosched/a", "2");
    let file = fake.0.join("nr_requests");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).unwrap();
    let problems = state.restore(&fake.0);
    assert!(
        matches!(problems.as_slice(), [RestoreError::Permanent(why)] if why.contains("nr_requests is not restored to 64: it is read-only")),
        "{problems:?}"
    );
    assert_eq!(fake.get("iosched/a"), "1", "the others are written");
}

#[test]
fn a_value_that_reads_back_differently_is_reported() {
    // /dev/null accepts every value and reads back empty.
    let fake = Fake::new("volatile", &[("scheduler", "bfq")]);
    std::os::unix::fs::symlink("/dev/null", fake.0.join("iosched/a")).unwrap();
    let state = QueueSettings { scheduler: "bfq".into(), settings: vec![("iosched/a".into(), "1".into())] };
    let problems = state.restore(&fake.0);
    assert!(
        matches!(problems.as_slice(), [RestoreError::Permanent(why)] if why.contains("read back")),
        "{problems:?}"
    );
}

#[test]
fn only_permanent_errors_are_not_retried() {
    use rustix::io::Errno;
    let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
    assert!([Errno::INVAL, Errno::ROFS].into_iter().all(|errno| is_permanent(&error(errno))));
    assert!(![Errno::NOSPC, Errno::BUSY, Errno::INTR].into_iter().any(|errno| is_permanent(&error(errno))));
}

#[test]
fn differences_name_the_file_and_both_values() {
    let state = |scheduler: &str, depth: &str| QueueSettings {
        scheduler: scheduler.into(),
        settings: vec![("nr_requests".into(), depth.into())],
    };
    let queue = Path::new("/sys/block/x/queue");
    let of = |later: &QueueSettings| state("bfq", "64").differences(queue, later);
    assert!(of(&state("bfq", "64")).is_empty());
    assert_eq!(of(&state("kyber", "256")), ["/sys/block/x/queue/scheduler: expected bfq, found kyber"]);
    assert_eq!(of(&state("bfq", "8")), ["/sys/block/x/queue/nr_requests: expected 64, found 8"]);
    let gone = QueueSettings { scheduler: "bfq".into(), settings: vec![] };
    assert_eq!(of(&gone), ["/sys/block/x/queue/nr_requests: expected 64, found nothing"]);
}

#[test]
fn queue_files_are_recognised_by_path() {
    let queue = Path::new("/sys/block/x/queue");
    for file in ["scheduler", "nr_requests", "wbt_lat_usec", "iosched/read_lat_nsec"] {
        assert_eq!(queue_of(&queue.join(file)), Some(queue), "{file}");
    }
    for path in ["/sys/block/x/queue/add_random", "/proc/sys/kernel/x", "/sys/iosched/a", "scheduler"] {
        assert_eq!(queue_of(Path::new(path)), None, "{path}");
    }
}
