//! What a job does, in fio's terms.

/// The order and direction of I/O: fio's `rw`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workload {
    /// Sequential reads.
    #[default]
    Read,
    /// Sequential writes.
    Write,
    /// Reads anywhere.
    RandRead,
    /// Writes anywhere.
    RandWrite,
    /// Sequential, reads and writes mixed.
    ReadWrite,
    /// Anywhere, reads and writes mixed.
    RandRw,
    /// Sequential deallocation.
    Trim,
    /// Deallocation anywhere.
    RandTrim,
}

impl Workload {
    /// Every workload and fio's names for it; the first is the one that is printed.
    pub const NAMES: [(Workload, &'static [&'static str]); 8] = [
        (Workload::Read, &["read"]),
        (Workload::Write, &["write"]),
        (Workload::RandRead, &["randread"]),
        (Workload::RandWrite, &["randwrite"]),
        (Workload::ReadWrite, &["rw", "readwrite"]),
        (Workload::RandRw, &["randrw"]),
        (Workload::Trim, &["trim"]),
        (Workload::RandTrim, &["randtrim"]),
    ];

    /// From fio's name.
    pub fn from_name(name: &str) -> Option<Workload> {
        Self::NAMES.iter().find(|(_, names)| names.contains(&name)).map(|(workload, _)| *workload)
    }

    /// fio's name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(workload, _)| *workload == self).map_or("read", |(_, names)| names[0])
    }

    /// Whether positions are drawn, not counted.
    pub const fn is_random(self) -> bool {
        matches!(self, Workload::RandRead | Workload::RandWrite | Workload::RandRw | Workload::RandTrim)
    }

    /// Whether data is overwritten.
    pub const fn writes(self) -> bool {
        !matches!(self, Workload::Read | Workload::RandRead)
    }
}

/// What is checked of the data that is read: fio's `verify`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Nothing.
    #[default]
    Off,
    /// Blocks describe themselves and carry a CRC-32C.
    Crc32c,
    /// As `Crc32c`, and every byte is compared with what was written.
    Pattern,
}

/// One job. Times are in nanoseconds, sizes in bytes; fio's defaults.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// Name in reports.
    pub name: String,
    /// Order and direction.
    pub workload: Workload,
    /// Bytes of one I/O.
    pub block_bytes: u32,
    /// I/Os in flight.
    pub io_depth: u32,
    /// Bytes of the device that are used, from `offset_bytes`; `None` for all.
    pub size_bytes: Option<u64>,
    /// Where the used part begins.
    pub offset_bytes: u64,
    /// Longest time; without `time_based` the job may end sooner, after `size_bytes`.
    pub runtime_ns: Option<u64>,
    /// Whether the job starts over until `runtime_ns` has passed.
    pub time_based: bool,
    /// Time before anything is counted.
    pub ramp_ns: u64,
    /// Number of I/Os after which the job ends.
    pub number_ios: Option<u64>,
    /// Percentage of reads where both are mixed.
    pub read_percent: u8,
    /// What is checked of the data.
    pub verify: Verify,
    /// Seed of positions, mix and data. The job's number is added to it.
    pub seed: u64,
    /// Whether the job goes on after an I/O failed.
    pub continue_on_error: bool,
}

impl Default for JobSpec {
    fn default() -> Self {
        JobSpec {
            name: "job".to_string(),
            workload: Workload::Read,
            block_bytes: 4096,
            io_depth: 1,
            size_bytes: None,
            offset_bytes: 0,
            runtime_ns: None,
            time_based: false,
            ramp_ns: 0,
            number_ios: None,
            read_percent: 50,
            verify: Verify::Off,
            seed: 0x8989,
            continue_on_error: false,
        }
    }
}

impl JobSpec {
    /// Most I/Os that one job keeps in flight.
    pub const IO_DEPTH_MAX: u32 = 65_536;

    /// The same job for the `number`th of `count` threads: its own seed, and with verification its
    /// own part of the device, so that no two jobs disagree about a block.
    pub(crate) fn for_thread(&self, number: u32, count: u32, device_bytes: u64) -> JobSpec {
        let mut spec = self.clone();
        spec.seed = self.seed.wrapping_add(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        if self.verify != Verify::Off && self.workload.writes() && count > 1 {
            let whole = self.size_bytes.unwrap_or(device_bytes.saturating_sub(self.offset_bytes));
            let unit = u64::from(self.block_bytes);
            let part = whole / u64::from(count) / unit * unit;
            spec.offset_bytes = self.offset_bytes + part * u64::from(number);
            spec.size_bytes = Some(part);
        }
        spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_fios_and_round_trip() {
        for (workload, names) in Workload::NAMES {
            assert!(names.iter().all(|name| Workload::from_name(name) == Some(workload)));
            assert_eq!(Workload::from_name(workload.name()), Some(workload));
        }
        assert_eq!(Workload::from_name("randomread"), None);
    }

    #[test]
    fn jobs_that_verify_share_no_block() {
        let spec = JobSpec { workload: Workload::RandRw, verify: Verify::Crc32c, ..JobSpec::default() };
        let parts: Vec<JobSpec> = (0..3).map(|number| spec.for_thread(number, 3, 1 << 20)).collect();
        for pair in parts.windows(2) {
            let end = pair[0].offset_bytes + pair[0].size_bytes.unwrap();
            assert!(end <= pair[1].offset_bytes && end.is_multiple_of(4096));
        }
    }
}
