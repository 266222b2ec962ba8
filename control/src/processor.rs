//! What the kernel reports about a processor: its NUMA node and its times.

use std::path::Path;

/// Times of a processor since the machine started, in the kernel's clock ticks (`USER_HZ`, mostly 100 a second).
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ProcessorTimes {
    pub(crate) user: u64,
    pub(crate) system: u64,
    pub(crate) interrupts: u64,
}

/// Zeros if the kernel does not say.
pub(crate) fn times(cpu: u32) -> ProcessorTimes {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    parse_times(&text, cpu).unwrap_or_default()
}

/// The line of a processor in /proc/stat is `cpuN user nice system idle iowait irq …` (proc(5)).
fn parse_times(text: &str, cpu: u32) -> Option<ProcessorTimes> {
    let name = format!("cpu{cpu}");
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    let mut words = lines.find_map(|mut words| (words.next() == Some(&name)).then_some(words))?;
    let mut next = || words.next()?.parse::<u64>().ok();
    let [user, _nice, system, _idle, _iowait, interrupts] =
        [next()?, next()?, next()?, next()?, next()?, next()?];
    Some(ProcessorTimes { user, system, interrupts })
}

/// The NUMA node of a processor; -1 if the kernel does not say.
pub(crate) fn numa_node(cpu: u32) -> i32 {
    node_in(&Path::new("/sys/devices/system/cpu").join(format!("cpu{cpu}"))).unwrap_or(-1)
}

/// The directory of a processor has an entry `nodeN`.
fn node_in(directory: &Path) -> Option<i32> {
    let names =
        std::fs::read_dir(directory).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut nodes = names.filter_map(|name| name.strip_prefix("node")?.parse().ok());
    nodes.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_processor() {
        let text =
            "cpu  9 9 9 9 9 9 9\ncpu1 10 11 12 13 14 15 16 0 0 0\ncpu11 1 2 3 4 5 6 7\nintr 5\ncpu2 1 2\n";
        let expected = ProcessorTimes { user: 10, system: 12, interrupts: 15 };
        assert_eq!(parse_times(text, 1), Some(expected));
        assert_eq!(parse_times(text, 11).map(|times| times.interrupts), Some(6));
        for cpu in [0, 2, 3] {
            assert_eq!(parse_times(text, cpu), None, "{cpu}");
        }
    }

    #[test]
    fn the_node_is_named_by_an_entry_of_the_processor() {
        let directory = std::env::temp_dir().join(format!("ringbolt-processor-{}", std::process::id()));
        std::fs::create_dir_all(directory.join("topology")).unwrap();
        assert_eq!(node_in(&directory), None);
        std::fs::create_dir(directory.join("node3")).unwrap();
        assert_eq!(node_in(&directory), Some(3));
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(node_in(&directory), None);
    }
}
