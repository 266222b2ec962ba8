use super::*;

/// A temporary directory of files, removed on drop.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str, files: &[(&str, &str)]) -> Tree {
        let root = std::env::temp_dir().join(format!("ringbolt-host-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Tree(root)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn properties_are_read_from_proc_and_sys() {
    let tree = Tree::new(
        "whole",
        &[
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu hypervisor\n"),
            ("proc/self/status", "Name:\tx\nCpus_allowed_list:\t1-3\n"),
            ("sys/devices/system/cpu/online", "0-2\n"),
            ("sys/devices/system/node/node0/cpulist", "0-2\n"),
            ("sys/devices/system/cpu/smt/active", "1\n"),
            ("sys/devices/system/cpu/intel_pstate/no_turbo", "0\n"),
            ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n"),
            ("sys/devices/system/cpu/cpu1/cpuidle/state0/latency", "2\n"),
            ("sys/devices/system/cpu/cpu1/cpuidle/state0/disable", "0\n"),
            ("sys/devices/system/cpu/cpu1/cpuidle/state3/latency", "133\n"),
            ("sys/devices/system/cpu/cpu1/cpuidle/state3/disable", "0\n"),
            ("sys/devices/system/cpu/cpu1/cpuidle/state3/name", "C6\n"),
            ("proc/sys/kernel/osrelease", "6.3.8\n"),
            ("proc/sys/kernel/io_uring_disabled", "1\n"),
            ("boot/config-6.3.8", "CONFIG_HZ=250\n# CONFIG_KASAN is not set\nCONFIG_OTHER=y\n"),
            ("sys/devices/system/cpu/vulnerabilities/meltdown", "Mitigation: PTI\n"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Not affected\n"),
            ("proc/loadavg", "1.50 1.0 1.0 1/100 5\n"),
            ("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:       64 kB\n"),
        ],
    );
    let host = HostInfo::with_root(&tree.0);
    let cpu = host.cpu();
    assert_eq!((cpu.model.as_str(), cpu.cpus.as_slice()), ("Xeon", [1, 2].as_slice()));
    assert_eq!((cpu.smt, cpu.turbo, cpu.virtualised), (Some(true), Some(true), true));
    assert_eq!(
        (cpu.governors, cpu.deep_idle_states),
        (vec!["powersave".to_string()], vec!["C6".to_string()])
    );
    let kernel = host.kernel();
    assert_eq!((kernel.release.as_str(), kernel.io_uring_disabled), ("6.3.8", Some(1)));
    assert_eq!(kernel.options.get("CONFIG_HZ").map(String::as_str), Some("250"));
    assert_eq!((kernel.options.len(), kernel.mitigations.len()), (1, 1));
    assert_eq!(host.load(), SystemLoad { load_average: 1.5, available_memory_bytes: 64 << 10 });
}

#[test]
fn mounts_swap_and_holders_use_a_device() {
    let tree = Tree::new(
        "block",
        &[
            ("sys/block/nvme0n1/size", "2048\n"),
            ("sys/block/nvme0n1/device/model", "SSD 980\n"),
            ("sys/block/nvme0n1/queue/scheduler", "none [mq-deadline] kyber\n"),
            ("sys/block/nvme0n1/queue/iosched/read_expire", "500\n"),
            ("sys/block/nvme0n1/queue/io_poll", "1\n"),
            ("sys/block/nvme0n1/mq/0/cpu_list", "0\n"),
            ("sys/block/nvme0n1/nvme0n1p1/size", "8\n"),
            ("sys/block/nvme0n1/nvme0n1p2/holders/dm-0/x", ""),
            ("sys/block/sda/size", "8\n"),
            ("sys/block/loop0/size", "0\n"),
            ("proc/self/mounts", "/dev/nvme0n1p1 /home ext4 rw 0 0\n/dev/nvme0n10 /other xfs rw 0 0\n"),
            ("proc/swaps", "Filename Type\n/dev/nvme0n1 partition 1 0 -2\n"),
        ],
    );
    let host = HostInfo::with_root(&tree.0);
    let names: Vec<String> = host.blocks().into_iter().map(|block| block.name).collect();
    assert_eq!(names, ["nvme0n1", "sda"]);
    let block = host.block("nvme0n1");
    assert_eq!((block.size_bytes, block.queues, block.polls), (1 << 20, 1, true));
    assert_eq!((block.scheduler.as_str(), block.schedulers.len()), ("mq-deadline", 3));
    assert_eq!(block.settings.get("read_expire").map(String::as_str), Some("500"));
    assert_eq!(block.used_by, ["mounted at /home", "swap on /dev/nvme0n1", "held by dm-0"]);
    assert!(host.block("sda").used_by.is_empty());
}

#[test]
fn kernel_lists_are_parsed() {
    assert_eq!(cpu_list("0-2,5"), [0, 1, 2, 5]);
    assert_eq!(cpu_list(""), Vec::<u32>::new());
    assert_eq!(cpu_list("0-4294967295,x,7"), [7]);
    assert_eq!(chosen("none"), ("none".to_string(), vec!["none".to_string()]));
    assert_eq!(
        chosen("none mq-deadline"),
        (String::new(), vec!["none".to_string(), "mq-deadline".to_string()])
    );
}

#[test]
fn missing_files_are_no_error() {
    let host = HostInfo::with_root("/nowhere");
    assert_eq!(host.cpu().cpus, [0]);
    assert!(host.blocks().is_empty());
    assert_eq!(host.kernel().io_uring_disabled, None);
}
