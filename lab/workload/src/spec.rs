//! What a job does, in fio's terms.

use crate::distribution::Distribution;
use crate::log::LogOptions;
use crate::pace::Rates;

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

    /// Whether there are reads, writes and trims, of a mix with so many percent of reads.
    pub const fn directions(self, read_percent: u8) -> [bool; 3] {
        match self {
            Workload::Read | Workload::RandRead => [true, false, false],
            Workload::Write | Workload::RandWrite => [false, true, false],
            Workload::Trim | Workload::RandTrim => [false, false, true],
            Workload::ReadWrite | Workload::RandRw => [read_percent > 0, read_percent < 100, false],
        }
    }

    /// Whether data is overwritten.
    pub const fn writes(self) -> bool {
        !matches!(self, Workload::Read | Workload::RandRead)
    }
}

/// Bytes of the I/Os of one direction: fio's `bs`, `bsrange` and `bssplit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All the same.
    Fixed(u32),
    /// Any multiple of the smallest up to the largest.
    Range {
        /// The smallest.
        min: u32,
        /// The largest.
        max: u32,
    },
    /// Each so many bytes with a weight.
    Split(Vec<(u32, u32)>),
}

impl Sizes {
    /// The largest.
    pub fn max(&self) -> u32 {
        match self {
            Sizes::Fixed(bytes) => *bytes,
            Sizes::Range { max, .. } => *max,
            Sizes::Split(parts) => parts.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0),
        }
    }

    /// The smallest.
    pub fn min(&self) -> u32 {
        match self {
            Sizes::Fixed(bytes) => *bytes,
            Sizes::Range { min, .. } => *min,
            Sizes::Split(parts) => parts.iter().map(|(bytes, _)| *bytes).min().unwrap_or(0),
        }
    }

    /// Every size that may come is a multiple of what this gives.
    pub fn unit(&self) -> u32 {
        match self {
            Sizes::Fixed(bytes) => *bytes,
            Sizes::Range { min, .. } => *min,
            Sizes::Split(parts) => parts.iter().fold(0, |unit, (bytes, _)| greatest_divisor(unit, *bytes)),
        }
    }
}

/// The greatest common divisor; 0 divides nothing and leaves the other.
pub(crate) fn greatest_divisor(mut one: u32, mut other: u32) -> u32 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

/// Which of several files is next: fio's `file_service_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileService {
    /// One after the other, so many I/Os each time.
    RoundRobin(u32),
    /// Any, so many I/Os each time.
    Random(u32),
    /// One until it is done, then the next.
    Sequential,
}

impl Default for FileService {
    fn default() -> Self {
        FileService::RoundRobin(1)
    }
}

/// Pauses: fio's `thinktime`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Think {
    /// How long; 0 for never.
    pub ns: u64,
    /// The part of it that is spent busy.
    pub spin_ns: u64,
    /// After how many I/Os.
    pub blocks: u32,
}

/// The deepest queue whose latency stays below a target: fio's `latency_target`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyTarget {
    /// Longest latency.
    pub target_ns: u64,
    /// Time over which it is judged.
    pub window_ns: u64,
    /// Percentage of I/Os that keep it.
    pub percentile: f64,
}

/// What buffers hold when they are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// Noise, the same each time.
    #[default]
    Noise,
    /// New noise for every write: `refill_buffers`.
    FreshNoise,
    /// Zeroes: `zero_buffers`.
    Zeroes,
    /// These bytes again and again: `buffer_pattern`.
    Pattern(Vec<u8>),
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
    /// Percentage of the device that is used, where `size_bytes` is `None`.
    pub size_percent: Option<u8>,
    /// Percentage of the device where the used part begins, beside `offset_bytes`.
    pub offset_percent: u8,
    /// By how much each further job begins later.
    pub offset_increment: u64,
    /// Bytes after which the job ends, where they are not those of the used part.
    pub io_bytes: Option<u64>,
    /// How often the used part is gone through.
    pub loops: u32,
    /// Bytes of reads, writes and trims where they are not all `block_bytes`, which is the largest then.
    pub sizes: Option<Box<[Sizes; 3]>>,
    /// What random positions are multiples of; `None` for the smallest I/O.
    pub align_bytes: Option<u64>,
    /// Where random I/O goes.
    pub distribution: Distribution,
    /// Percentage of I/Os that go anywhere, of a workload that is random.
    pub random_percent: u8,
    /// Whether evenly distributed random I/O comes to every place once before it comes again.
    pub each_once: bool,
    /// Which of several files is next.
    pub service: FileService,
    /// Rates; without any, the next I/O starts when one has ended.
    pub rates: Rates,
    /// Pauses.
    pub think: Think,
    /// Writes after which a flush is issued; 0 for never.
    pub flush_every: u32,
    /// Whether the job ends with a flush.
    pub flush_at_end: bool,
    /// What is written.
    pub content: Content,
    /// The depth is chosen so that this is kept.
    pub latency_target: Option<LatencyTarget>,
    /// Latency above which the job fails.
    pub latency_max_ns: Option<u64>,
    /// Whether the time of submission is taken apart.
    pub measure_submission: bool,
    /// Time between samples of IOPS and bandwidth; 0 for none.
    pub sample_ns: u64,
    /// What is written down while it runs.
    pub log: LogOptions,
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
            size_percent: None,
            offset_percent: 0,
            offset_increment: 0,
            io_bytes: None,
            loops: 1,
            sizes: None,
            align_bytes: None,
            distribution: Distribution::Uniform,
            random_percent: 100,
            each_once: false,
            service: FileService::default(),
            rates: Rates::default(),
            think: Think::default(),
            flush_every: 0,
            flush_at_end: false,
            content: Content::Noise,
            latency_target: None,
            latency_max_ns: None,
            measure_submission: true,
            sample_ns: 500_000_000,
            log: LogOptions::default(),
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
        spec.offset_bytes = self.offset_bytes + self.offset_increment.saturating_mul(u64::from(number));
        spec.seed = self.seed.wrapping_add(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        if self.verify != Verify::Off && self.workload.writes() && count > 1 {
            let whole = self.size_bytes.unwrap_or(device_bytes.saturating_sub(self.offset_bytes));
            let unit = u64::from(self.block_bytes);
            let part = whole / u64::from(count) / unit * unit;
            spec.offset_bytes += part * u64::from(number);
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
