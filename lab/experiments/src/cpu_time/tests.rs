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
fn cpu_time_is_split_by_thread_class() {
    let proc = Proc::new();
    proc.thread(100, 100, 1, "fio", 1_000_000_000);
    proc.thread(90, 90, 100, "fio", 0);
    proc.thread(90, 91, 100, "iou-wrk-90", 500_000_000);
    proc.thread(7, 7, 2, "kworker/0:1", 1_000_000_000);
    proc.thread(8, 8, 2, "loop3", 0);
    proc.thread(9, 9, 1, "stranger", 5);
    fs::write(proc.0.join("proc/stat"), "cpu  100 0 100 900 50 0 0 0 0 0\n").unwrap();
    let host = HostInfo::with_root(&proc.0);
    let mut sampler = CpuTimeSampler::new(&host, 100);
    assert_eq!(sampler.process_tree().into_iter().collect::<Vec<u32>>(), [90, 100]);
    proc.thread(100, 100, 1, "fio", 3_000_000_000);
    proc.thread(90, 91, 100, "iou-wrk-90", 2_500_000_000);
    proc.thread(7, 7, 2, "kworker/0:1", 1_500_000_000);
    fs::write(proc.0.join("proc/stat"), "cpu  400 0 200 900 50 0 0 0 0 0\n").unwrap();
    sampler.started = Instant::now() - std::time::Duration::from_secs(10);
    sampler.sample();
    let cpu_use = sampler.cpu_use();
    for (found, expected) in [
        (cpu_use.own, 0.2),
        (cpu_use.wrk, 0.2),
        (cpu_use.sqp, 0.0),
        (cpu_use.kworker, 0.05),
        (cpu_use.machine, 0.4),
    ] {
        assert!((found - expected).abs() < 0.01, "{cpu_use:?}");
    }
    assert_eq!(cpu_use.path(), "worker");
    // The time of a worker that ended still counts.
    fs::remove_dir_all(proc.0.join("proc/90")).unwrap();
    sampler.sample();
    assert!(sampler.cpu_use().wrk > 0.15);
}

#[test]
fn submission_paths_follow_from_thread_classes() {
    assert_eq!(CpuUse::default().path(), "inline");
    assert_eq!(CpuUse { sqp: 0.9, wrk: 0.1, ..CpuUse::default() }.path(), "polled-thread");
}
