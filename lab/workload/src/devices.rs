//! The block devices under a job's files: their I/O schedulers and kernel counters.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use crate::jobfile::{EngineName, PerfJob};
use crate::kernel;
use crate::run::RunError;

/// A disk in sysfs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Disk {
    /// Kernel name, such as `nvme0n1`.
    pub name: String,
    directory: PathBuf,
}

/// Counters of a disk, or the difference of two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Completed reads and writes.
    pub ios: [u64; 2],
    /// Merged reads and writes.
    pub merges: [u64; 2],
    /// Sum of the times of reads and of writes, in milliseconds.
    pub ticks: [u64; 2],
    /// Milliseconds with I/O in flight.
    pub busy_ms: u64,
    /// Time in queue of all I/Os, in milliseconds (`time_in_queue`).
    pub queue_ms: u64,
}

/// The disks under the files of jobs on kernel engines, without duplicates.
pub fn disks(jobs: &[PerfJob]) -> Vec<Disk> {
    let kernel_jobs = jobs.iter().filter(|job| matches!(job.engine, Some(EngineName::Kernel(_))));
    let mut disks: Vec<Disk> =
        kernel_jobs.flat_map(|job| kernel::paths(job, 0)).filter_map(|path| disk_of(&path)).collect();
    disks.sort();
    disks.dedup();
    disks
}

/// The disk of a block device or partition, or of a file's file system; `None` if there is none in sysfs.
pub fn disk_of(path: &str) -> Option<Disk> {
    let found = std::fs::metadata(path).ok()?;
    let number = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let mut directory = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    if directory.join("partition").exists() {
        directory.pop();
    }
    let name = directory.file_name()?.to_str()?.to_string();
    Some(Disk { name, directory })
}

impl Disk {
    /// The kernel's counters; `None` if they cannot be read.
    pub fn stats(&self) -> Option<DiskStats> {
        parse(&std::fs::read_to_string(self.directory.join("stat")).ok()?)
    }

    /// The current I/O scheduler and the available ones.
    pub fn scheduler(&self) -> std::io::Result<(String, Vec<String>)> {
        let text = std::fs::read_to_string(self.directory.join("queue/scheduler"))?;
        let names = |word: &str| word.trim_matches(['[', ']']).to_string();
        let current = text.split_whitespace().find(|word| word.starts_with('[')).map(names);
        Ok((current.unwrap_or_else(|| "none".to_string()), text.split_whitespace().map(names).collect()))
    }

    /// Sets the I/O scheduler and reads it back; fails if the kernel keeps another.
    pub fn set_scheduler(&self, wanted: &str) -> Result<(), RunError> {
        let failed =
            |error| RunError::Machine { what: format!("ioscheduler={wanted} of {}", self.name), error };
        std::fs::write(self.directory.join("queue/scheduler"), wanted).map_err(failed)?;
        let (current, known) = self.scheduler().map_err(failed)?;
        if current == wanted {
            return Ok(());
        }
        let reason = format!("{} keeps {current}; it knows {}", self.name, known.join(", "));
        Err(RunError::Options(format!("--ioscheduler={wanted}: {reason}")))
    }
}

impl DiskStats {
    /// The difference to an earlier reading.
    pub fn since(self, earlier: DiskStats) -> DiskStats {
        let difference =
            |now: [u64; 2], then: [u64; 2]| [now[0].wrapping_sub(then[0]), now[1].wrapping_sub(then[1])];
        DiskStats {
            ios: difference(self.ios, earlier.ios),
            merges: difference(self.merges, earlier.merges),
            ticks: difference(self.ticks, earlier.ticks),
            busy_ms: self.busy_ms.wrapping_sub(earlier.busy_ms),
            queue_ms: self.queue_ms.wrapping_sub(earlier.queue_ms),
        }
    }
}

/// Parses a disk's `stat` file (the kernel's `Documentation/block/stat.rst`).
fn parse(text: &str) -> Option<DiskStats> {
    let fields: Vec<u64> = text.split_whitespace().map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let at = |index: usize| fields.get(index).copied();
    Some(DiskStats {
        ios: [at(0)?, at(4)?],
        merges: [at(1)?, at(5)?],
        ticks: [at(3)?, at(7)?],
        busy_ms: at(9)?,
        queue_ms: at(10)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_stat_fields_are_parsed() {
        let text = "  11 12 13 14 21 22 23 24 0 31 32 0 0 0 0 0 0\n";
        let stats = parse(text).unwrap();
        assert_eq!((stats.ios, stats.merges, stats.ticks), ([11, 21], [12, 22], [14, 24]));
        assert_eq!((stats.busy_ms, stats.queue_ms), (31, 32));
        assert_eq!(stats.since(stats), DiskStats::default());
        assert_eq!(parse("1 2 3"), None);
    }
}
