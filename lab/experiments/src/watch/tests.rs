use super::*;
use std::path::PathBuf;

struct Proc(PathBuf);

impl Proc {
    fn new() -> Proc {
        let root = std::env::temp_dir().join(format!("ringbolt-watch-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        Proc(root)
    }

    fn thread(&self, process: u32, thread: u32, parent: u32, name: &str, ns: u64) {
        let stat = format!("{process} (a ) b) S {parent} 0 0 0 0 0 0 0 0 0 50 50 0 0 20 0 1 0 7");
        for folder in [format!("proc/{process}"), format!("proc/{process}/task/{thread}")] {
            let folder = self.0.join(folder);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("stat"), &stat).unwrap();
            fs::write(folder.join("comm"), format!("{name}\n")).unwrap();
            fs::write(folder.join("schedstat"), format!("{ns} 0 1")).unwrap();
        }
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn time_is_told_apart_by_who_spends_it() {
    let proc = Proc::new();
    proc.thread(100, 100, 1, "fio", 1_000_000_000);
    proc.thread(90, 90, 100, "fio", 0);
    proc.thread(90, 91, 100, "iou-wrk-90", 500_000_000);
    proc.thread(7, 7, 2, "kworker/0:1", 1_000_000_000);
    proc.thread(8, 8, 2, "loop3", 0);
    proc.thread(9, 9, 1, "stranger", 5);
    fs::write(proc.0.join("proc/stat"), "cpu  100 0 100 900 50 0 0 0 0 0\n").unwrap();
    let host = Host::at(&proc.0);
    let mut watch = Watch::new(&host, 100);
    assert_eq!(watch.family().into_iter().collect::<Vec<u32>>(), [90, 100]);
    proc.thread(100, 100, 1, "fio", 3_000_000_000);
    proc.thread(90, 91, 100, "iou-wrk-90", 2_500_000_000);
    proc.thread(7, 7, 2, "kworker/0:1", 1_500_000_000);
    fs::write(proc.0.join("proc/stat"), "cpu  400 0 200 900 50 0 0 0 0 0\n").unwrap();
    watch.began = Instant::now() - std::time::Duration::from_secs(10);
    watch.look();
    let spent = watch.spent();
    for (found, expected) in
        [(spent.own, 0.2), (spent.wrk, 0.2), (spent.sqp, 0.0), (spent.kworker, 0.05), (spent.machine, 0.4)]
    {
        assert!((found - expected).abs() < 0.01, "{spent:?}");
    }
    assert_eq!(spent.path(), "worker");
    // A worker that ended keeps what it spent.
    fs::remove_dir_all(proc.0.join("proc/90")).unwrap();
    watch.look();
    assert!(watch.spent().wrk > 0.15);
}

#[test]
fn paths_are_named_by_their_threads() {
    assert_eq!(Spent::default().path(), "inline");
    assert_eq!(Spent { sqp: 0.9, wrk: 0.1, ..Spent::default() }.path(), "polled-thread");
}
