//! The memory that this process can have, and its division between I/O buffers and devices in memory.

use std::path::Path;

use crate::command_error::CommandError;
use crate::options;

/// Bytes of memory that this process can have: the machine's, or the limit of its control group if that is lower.
/// `u64::MAX` where `/proc` is not mounted.
pub(crate) fn total_bytes() -> u64 {
    total_bytes_in(Path::new("/"))
}

/// The size of the I/O buffers: `--memory`, or by default 1 GiB and at most half of the memory.
pub(crate) fn buffer_bytes(option: Option<&str>, total_bytes: u64) -> Result<u64, CommandError> {
    let Some(text) = option else { return Ok(DEFAULT_BYTES.min(total_bytes / 2)) };
    let bytes =
        options::parse_size(text).map_err(|hint| CommandError::usage(format!("--memory={text}: {hint}")))?;
    if bytes > total_bytes {
        let total_mib = total_bytes >> 20;
        let message =
            format!("--memory={text}: this machine, or its control group, has {total_mib} MiB of memory");
        return Err(CommandError::usage(message));
    }
    Ok(bytes)
}

const DEFAULT_BYTES: u64 = 1 << 30;

/// Most levels of control groups that are read; the kernel's own limit is usually lower.
const CGROUP_DEPTH_MAX: usize = 64;

fn total_bytes_in(root: &Path) -> u64 {
    let read = |path: String| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let machine = machine_bytes(&read("proc/meminfo".to_string())).unwrap_or(u64::MAX);
    let mut least = machine;
    for line in read("proc/self/cgroup".to_string()).lines() {
        // cgroups(7): `0::/PATH` of version 2, `ID:CONTROLLER,…:/PATH` of version 1.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mounted, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // The limits of the groups above hold too.
        for group in Path::new(path).ancestors().take(CGROUP_DEPTH_MAX) {
            let group = group.display().to_string();
            // `max` is no limit.
            let limit = read(format!("{mounted}/{}/{file}", group.trim_matches('/'))).trim().parse();
            least = least.min(limit.unwrap_or(u64::MAX));
        }
    }
    least
}

/// The machine's memory, from the text of `/proc/meminfo`.
fn machine_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path and its text.
    type FileText = (&'static str, &'static str);

    /// A root directory with these files.
    struct Root(std::path::PathBuf);

    impl Root {
        fn new(name: &str, files: &[FileText]) -> Root {
            let path = std::env::temp_dir().join(format!("ringbolt-memory-{}-{name}", std::process::id()));
            for (file, text) in files {
                let file = path.join(file);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, text).unwrap();
            }
            Root(path)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const MEMINFO: FileText = ("proc/meminfo", "MemTotal:       24684092 kB\nMemFree: 1 kB\n");
    const MACHINE: u64 = 24_684_092 << 10;

    #[test]
    fn the_memory_is_that_of_the_machine_or_of_a_control_group() {
        let cgroup = "proc/self/cgroup";
        let cases: &[(&str, &[FileText], u64)] = &[
            ("nothing", &[], u64::MAX),
            ("machine", &[MEMINFO], MACHINE),
            ("damaged", &[("proc/meminfo", "MemTotal: x kB"), (cgroup, "0\n0:\n::\n")], u64::MAX),
            ("overflow", &[("proc/meminfo", "MemTotal: 18446744073709551615 kB")], u64::MAX),
            (
                "parent",
                &[
                    MEMINFO,
                    (cgroup, "0::/a/b\n"),
                    ("sys/fs/cgroup/a/b/memory.max", "max\n"),
                    ("sys/fs/cgroup/a/memory.max", "1048576\n"),
                ],
                1 << 20,
            ),
            // In a container the path may be that of the host, and the mount the group's own.
            ("mount", &[MEMINFO, (cgroup, "0::/x/y\n"), ("sys/fs/cgroup/memory.max", "4096\n")], 4096),
            (
                "version 1",
                &[
                    MEMINFO,
                    (cgroup, "5:cpu,memory:/a:b\n3:cpuset:/\n"),
                    ("sys/fs/cgroup/memory/a:b/memory.limit_in_bytes", "8192\n"),
                    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ],
                8192,
            ),
        ];
        for (name, files, bytes) in cases {
            assert_eq!(total_bytes_in(&Root::new(name, files).0), *bytes, "{name}");
        }
    }

    #[test]
    fn buffers_fit_the_machine() {
        assert_eq!(buffer_bytes(None, MACHINE).unwrap(), 1 << 30);
        assert_eq!(buffer_bytes(None, 1 << 30).unwrap(), 1 << 29);
        assert_eq!(buffer_bytes(Some("24m"), 24 << 20).unwrap(), 24 << 20);
        assert_eq!(buffer_bytes(Some("64g"), u64::MAX).unwrap(), 64 << 30);
        let error = |text| buffer_bytes(Some(text), MACHINE).unwrap_err().to_string();
        assert!(error("64g").contains("--memory=64g: this machine, or its control group, has 24105 MiB"));
        assert!(error("much").contains("--memory=much: expected a size"));
    }
}
