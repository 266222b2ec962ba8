//! The description of a job, in fio's terms.

use block_io::{Op, Status};

use crate::arrivals::Rates;
use crate::distribution::Distribution;
use crate::flow::FlowOptions;
use crate::log::LogOptions;
use crate::priorities::CommandPriorities;
use crate::steady::SteadyOptions;
use crate::zoned::{RegionInZones, ZonedOptions};

/// The order and direction of I/O: fio's `rw`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workload {
    /// Sequential reads.
    #[default]
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    RandRead,
    /// Random writes.
    RandWrite,
    /// Sequential mix of reads and writes.
    ReadWrite,
    /// Random mix of reads and writes.
    RandRw,
    /// Sequential deallocation.
    Trim,
    /// Random deallocation.
    RandTrim,
    /// Each block in sequence is deallocated, then written.
    TrimWrite,
    /// Each random block is deallocated, then written.
    RandTrimWrite,
}

impl Workload {
    /// Every workload with fio's names for it; the first name is the one that is printed.
    pub const NAMES: [(Workload, &'static [&'static str]); 10] = [
        (Workload::Read, &["read"]),
        (Workload::Write, &["write"]),
        (Workload::RandRead, &["randread"]),
        (Workload::RandWrite, &["randwrite"]),
        (Workload::ReadWrite, &["rw", "readwrite"]),
        (Workload::RandRw, &["randrw"]),
        (Workload::Trim, &["trim"]),
        (Workload::RandTrim, &["randtrim"]),
        (Workload::TrimWrite, &["trimwrite"]),
        (Workload::RandTrimWrite, &["randtrimwrite"]),
    ];

    /// Parses fio's name.
    pub fn from_name(name: &str) -> Option<Workload> {
        Self::NAMES.iter().find(|(_, names)| names.contains(&name)).map(|(workload, _)| *workload)
    }

    /// fio's name, as printed.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(workload, _)| *workload == self).map_or("read", |(_, names)| names[0])
    }

    /// Whether offsets are random, not sequential.
    pub const fn is_random(self) -> bool {
        use Workload::{RandRead, RandRw, RandTrim, RandTrimWrite, RandWrite};
        matches!(self, RandRead | RandWrite | RandRw | RandTrim | RandTrimWrite)
    }

    /// Whether a write of the same range follows each trim.
    pub const fn writes_what_it_trims(self) -> bool {
        matches!(self, Workload::TrimWrite | Workload::RandTrimWrite)
    }

    /// Whether the workload has reads, writes and trims; `read_percent` applies to mixed workloads.
    pub const fn directions(self, read_percent: u8) -> [bool; 3] {
        match self {
            Workload::Read | Workload::RandRead => [true, false, false],
            Workload::Write | Workload::RandWrite => [false, true, false],
            Workload::Trim | Workload::RandTrim => [false, false, true],
            Workload::TrimWrite | Workload::RandTrimWrite => [false, true, true],
            Workload::ReadWrite | Workload::RandRw => [read_percent > 0, read_percent < 100, false],
        }
    }

    /// Whether the workload changes data: writes or trims.
    pub const fn writes(self) -> bool {
        !matches!(self, Workload::Read | Workload::RandRead)
    }
}

/// I/O sizes of one direction in bytes: fio's `bs`, `bsrange` and `bssplit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockSizes {
    /// One size.
    Fixed(u32),
    /// Uniformly, any multiple of the smallest up to the largest.
    Range {
        /// Smallest size, bytes.
        min: u32,
        /// Largest size, bytes.
        max: u32,
    },
    /// Sizes in bytes, each with its weight.
    Split(Vec<(u32, u32)>),
}

impl BlockSizes {
    /// Largest size, bytes.
    pub fn max(&self) -> u32 {
        match self {
            BlockSizes::Fixed(bytes) => *bytes,
            BlockSizes::Range { max, .. } => *max,
            BlockSizes::Split(parts) => parts.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0),
        }
    }

    /// Smallest size, bytes.
    pub fn min(&self) -> u32 {
        match self {
            BlockSizes::Fixed(bytes) => *bytes,
            BlockSizes::Range { min, .. } => *min,
            BlockSizes::Split(parts) => parts.iter().map(|(bytes, _)| *bytes).min().unwrap_or(0),
        }
    }

    /// The greatest common divisor of all sizes, bytes.
    pub fn unit(&self) -> u32 {
        match self {
            BlockSizes::Fixed(bytes) => *bytes,
            BlockSizes::Range { min, .. } => *min,
            BlockSizes::Split(parts) => parts.iter().fold(0, |unit, (bytes, _)| gcd(unit, *bytes)),
        }
    }
}

/// The greatest common divisor; `gcd(0, n)` is `n`.
pub(crate) fn gcd(mut one: u32, mut other: u32) -> u32 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

/// How the file of the next I/O is selected: fio's `file_service_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileService {
    /// Round-robin, with this many I/Os per turn.
    RoundRobin(u32),
    /// A random file, with this many I/Os per turn.
    Random(u32),
    /// Each file to its end, then the next.
    Sequential,
}

impl Default for FileService {
    fn default() -> Self {
        FileService::RoundRobin(1)
    }
}

/// How offsets follow each other: what stands behind the colon of fio's `rw`, and `rw_sequencer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetSequence {
    /// Added to the offset after each sequential I/O, bytes. A step beyond the region continues at its other end.
    pub step_bytes: i64,
    /// A random workload has a random offset every this many I/Os; at least 1.
    pub length: u32,
    /// The I/Os between random offsets repeat the offset (`identical`) instead of following it.
    pub repeats: bool,
}

impl Default for OffsetSequence {
    fn default() -> Self {
        OffsetSequence { step_bytes: 0, length: 1, repeats: false }
    }
}

/// Zones of which a job accesses a part each: fio's `zonemode=strided`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedZones {
    /// Length of a zone: `zonerange`.
    pub range_bytes: u64,
    /// I/O in a zone before the next one: `zonesize`.
    pub size_bytes: u64,
    /// From the end of a zone to the start of the next: `zoneskip`.
    pub skip_bytes: u64,
}

/// Content of writes that deduplicate or compress: fio's `dedupe_percentage`, `buffer_compress_percentage` and their
/// like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReducibleContent {
    /// Percentage of writes with the content of an earlier one.
    pub dedupe_percent: u8,
    /// Percentage of the region's blocks that form the set from which repeated content comes; `None` to repeat the last
    /// unique write.
    pub working_set_percent: Option<u8>,
    /// The set is the same for all jobs.
    pub global: bool,
    /// Percentage of each chunk that is not random.
    pub compress_percent: u8,
    /// Length of a chunk; 0 for the whole block.
    pub chunk_bytes: u32,
    /// What fills the part that is not random; empty for zeroes.
    pub pattern: Vec<u8>,
}

/// Pauses between I/Os: fio's `thinktime`. A pause begins when no I/O is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThinkTime {
    /// Length of a pause; 0 for none.
    pub ns: u64,
    /// The part of the pause that is spent busy-waiting: `thinktime_spin`.
    pub spin_ns: u64,
    /// I/Os between pauses: `thinktime_blocks`; 0 for one or, with `interval_ns`, for no number.
    pub blocks: u32,
    /// I/Os are counted when they are issued, not when they complete: `thinktime_blocks_type=issue`.
    pub counts_issued: bool,
    /// Time between the end of a pause and the next one: `thinktime_iotime`; 0 for none.
    pub interval_ns: u64,
}

/// Failed I/Os with details of a job that continues after errors and describes them, and of other jobs.
const FAILURES_DESCRIBED_MAX: usize = 1000;
const FAILURES_STORED_MAX: usize = 16;

/// What follows an I/O error: fio's `continue_on_error` and `ignore_error`, of reads, and of writes and trims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// The job continues, and the error counts.
    pub continues: [bool; 2],
    /// Error numbers of POSIX that are no errors.
    pub ignored: [Vec<i32>; 2],
    /// Errors after which the job continues are not described: `error_dump=0`.
    pub omits_details: bool,
}

impl ErrorPolicy {
    /// Whether the job continues after an error of this operation.
    pub fn continues(&self, op: Op) -> bool {
        self.continues[usize::from(op != Op::Read)]
    }

    /// How many failed I/Os are stored with their details; all are counted.
    pub(crate) fn stored_max(&self) -> usize {
        let describes_all = self.continues != [false, false] && !self.omits_details;
        if describes_all { FAILURES_DESCRIBED_MAX } else { FAILURES_STORED_MAX }
    }

    /// Whether this status is ignored.
    pub fn ignores(&self, op: Op, status: Status) -> bool {
        self.ignored[usize::from(op != Op::Read)].contains(&status.to_errno().0)
    }
}

/// Lowest rates of reads, writes and trims: fio's `rate_min`, `rate_iops_min` and `rate_cycle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateMinima {
    /// Bytes a second; `None` for no limit.
    pub bytes: [Option<u64>; 3],
    /// I/Os a second.
    pub iops: [Option<u64>; 3],
    /// Time over which rates are averaged.
    pub cycle_ns: u64,
}

impl Default for RateMinima {
    fn default() -> Self {
        RateMinima { bytes: [None; 3], iops: [None; 3], cycle_ns: 1_000_000_000 }
    }
}

impl RateMinima {
    /// Whether there is a limit.
    pub fn is_on(&self) -> bool {
        self.bytes.iter().chain(&self.iops).any(Option::is_some)
    }
}

/// Tunes the I/O depth to the deepest queue whose latency stays within a target: fio's `latency_target`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyTarget {
    /// Highest latency that meets the target.
    pub target_ns: u64,
    /// Time for which each depth is tried: `latency_window`.
    pub window_ns: u64,
    /// Percentage of I/Os that must meet the target, above 0 up to 100.
    pub percentile: f64,
}

/// Content of write buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BufferContent {
    /// Random bytes, filled once.
    #[default]
    Noise,
    /// New random bytes for every write: `refill_buffers`.
    FreshNoise,
    /// Zeroes: `zero_buffers`.
    Zeroes,
    /// These bytes repeated: `buffer_pattern`.
    Pattern(Vec<u8>),
    /// New bytes for every write, a part of which repeats.
    Reducible(Box<ReducibleContent>),
}

/// How data that is read is verified: fio's `verify`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// No verification.
    #[default]
    Off,
    /// Each logical block has a header of Ringbolt's format that identifies it, with a CRC-32C.
    Crc32c,
    /// Like `Crc32c`, and every byte is compared with what was written.
    Pattern,
    /// Each I/O, or each `verify_interval` of it, has fio's header or none.
    Fio(FioVerify),
}

/// What fio stores to verify a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FioVerify {
    /// A header alone.
    Meta,
    /// A header with the MD5 of the rest.
    Md5,
    /// A header with a CRC-7.
    Crc7,
    /// A header with a CRC-16.
    Crc16,
    /// A header with a CRC-32.
    Crc32,
    /// A header with a CRC-32C.
    Crc32c,
    /// A header with a CRC-64.
    Crc64,
    /// A header with XXH32.
    Xxhash,
    /// A header with SHA-1.
    Sha1,
    /// A header with 64 bytes in which fio collects the input of SHA-256: 8 of them depend on all of it.
    Sha256,
    /// A header with the last 128 bytes of SHA-512's input: fio stores no hash.
    Sha512,
    /// A header with SHA3-224.
    Sha3_224,
    /// A header with SHA3-256.
    Sha3_256,
    /// A header with SHA3-384.
    Sha3_384,
    /// A header with SHA3-512.
    Sha3_512,
    /// No header: every byte is that of `verify_pattern`.
    Pattern,
}

/// One job. Times are in nanoseconds, sizes in bytes; the defaults are fio's.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// Name in reports.
    pub name: String,
    /// Access pattern and direction.
    pub workload: Workload,
    /// Bytes of one I/O; the largest where `sizes` is given.
    pub block_bytes: u32,
    /// I/Os in flight, 1 to [`IO_DEPTH_MAX`](Self::IO_DEPTH_MAX).
    pub io_depth: u32,
    /// Size of the region that is used, from `offset_bytes`; `None` for the rest of the device.
    pub size_bytes: Option<u64>,
    /// Start of the region.
    pub offset_bytes: u64,
    /// Time limit; without `time_based` the job also ends after `size_bytes`.
    pub runtime_ns: Option<u64>,
    /// Whether the job repeats until `runtime_ns` has passed.
    pub time_based: bool,
    /// How long a lost target of `nvme+tcp://` is connected again; `None` is for ever for a job that is
    /// `time_based`, and not at all for others.
    pub reconnect_ns: Option<u64>,
    /// Time before the measurement starts.
    pub ramp_ns: u64,
    /// I/Os after which the job ends.
    pub number_ios: Option<u64>,
    /// Percentage of reads in a mixed workload.
    pub read_percent: u8,
    /// Verification of data.
    pub verify: Verify,
    /// What fio's formats write behind a header, repeated; empty for random bytes.
    pub verify_pattern: Vec<u8>,
    /// Bytes from one header of fio's to the next; `None` for one header an I/O.
    pub verify_interval: Option<u32>,
    /// Whether a job that only writes reads verified data back at the end: `do_verify`.
    pub reads_back: bool,
    /// Seed of offsets, mix and data; each copy of the job derives its own from it.
    pub seed: u64,
    /// Which I/O errors do not end the job, and which are none.
    pub errors: ErrorPolicy,
    /// Whether a write beyond the end of the medium, or of its space, ends the job without an error: `fill_device`.
    pub fills_device: bool,
    /// Its part in a flow, with which it shares I/Os by weight.
    pub flow: Option<FlowOptions>,
    /// Lowest rates, below which the job fails.
    pub rate_minima: RateMinima,
    /// Size of the region in percent of the device, where `size_bytes` is `None`.
    pub size_percent: Option<u8>,
    /// Start of the region in percent of the device, added to `offset_bytes`.
    pub offset_percent: u8,
    /// Added to the start of the region for each further copy of the job.
    pub offset_increment: u64,
    /// The same in percent of the device, added to `offset_increment`.
    pub offset_increment_percent: u8,
    /// Bytes after which the job ends; `None` for the size of the region times `loops`.
    pub io_bytes: Option<u64>,
    /// The same in percent of the region, where `io_bytes` is `None`.
    pub io_percent: Option<u8>,
    /// Number of passes over the region.
    pub loops: u32,
    /// Sizes of reads, writes and trims; `None` if all are `block_bytes`.
    pub sizes: Option<Box<[BlockSizes; 3]>>,
    /// Alignment of random offsets of reads, writes and trims: `blockalign`; `None` for the smallest size of
    /// the direction.
    pub align_bytes: [Option<u64>; 3],
    /// Distribution of random offsets.
    pub distribution: Distribution,
    /// Percentage of reads, writes and trims at random offsets in a random workload; each of the others
    /// follows the last I/O of its direction.
    pub random_percent: [u8; 3],
    /// Zones of which a part each is accessed.
    pub zones: Option<StridedZones>,
    /// Zones with write pointers: `zonemode=zbd`.
    pub zoned: Option<Box<ZonedOptions>>,
    /// Sizes in zones, which replace those in bytes once the size of a zone is known.
    pub in_zones: RegionInZones,
    /// Writes after which those since the last verification are read back: `verify_backlog`; 0 for none until the end.
    pub verify_backlog: u32,
    /// How many of them are read back: `verify_backlog_batch`; 0 for all.
    pub verify_batch: u32,
    /// Steps of sequential and sequences of random offsets.
    pub sequence: OffsetSequence,
    /// Whether uniform random I/O covers every offset once before it repeats any: fio without `norandommap`.
    pub random_map: bool,
    /// How the file of the next I/O is selected.
    pub file_service: FileService,
    /// Rates of an open loop; without any, the loop is closed.
    pub rates: Rates,
    /// Pauses between I/Os.
    pub think: ThinkTime,
    /// Writes between flushes; 0 for no flushes.
    pub flush_every: u32,
    /// Whether the job ends with a flush.
    pub flush_at_end: bool,
    /// Content of write buffers.
    pub content: BufferContent,
    /// Latency target that the I/O depth is tuned to.
    pub latency_target: Option<LatencyTarget>,
    /// Latency above which the job fails: `max_latency`.
    pub latency_max_ns: Option<u64>,
    /// Whether submission latency (`slat`) is measured, with one more clock read per submission.
    pub measure_submission: bool,
    /// Time between samples of IOPS and bandwidth; 0 for none.
    pub sample_ns: u64,
    /// Time between entries of the result's timeline; 0 for none.
    pub timeline_ns: u64,
    /// I/O priority of the job, as a value of `linux/ioprio.h`; 0 for none.
    pub priority: u16,
    /// I/O priorities of single I/Os.
    pub command_priorities: CommandPriorities,
    /// Log files.
    pub log: LogOptions,
    /// When a steady rate ends the job.
    pub steady: Option<SteadyOptions>,
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
            reconnect_ns: None,
            ramp_ns: 0,
            number_ios: None,
            read_percent: 50,
            verify: Verify::Off,
            verify_pattern: Vec::new(),
            verify_interval: None,
            reads_back: true,
            seed: 0x8989,
            errors: ErrorPolicy::default(),
            fills_device: false,
            flow: None,
            rate_minima: RateMinima::default(),
            size_percent: None,
            offset_percent: 0,
            offset_increment: 0,
            offset_increment_percent: 0,
            io_bytes: None,
            io_percent: None,
            loops: 1,
            sizes: None,
            align_bytes: [None; 3],
            distribution: Distribution::Uniform,
            random_percent: [100; 3],
            zones: None,
            zoned: None,
            in_zones: RegionInZones::default(),
            verify_backlog: 0,
            verify_batch: 0,
            sequence: OffsetSequence::default(),
            random_map: false,
            file_service: FileService::default(),
            rates: Rates::default(),
            think: ThinkTime::default(),
            flush_every: 0,
            flush_at_end: false,
            content: BufferContent::Noise,
            latency_target: None,
            latency_max_ns: None,
            measure_submission: true,
            sample_ns: 500_000_000,
            timeline_ns: 0,
            priority: 0,
            command_priorities: CommandPriorities::default(),
            log: LogOptions::default(),
            steady: None,
        }
    }
}

impl JobSpec {
    /// How long a lost target is connected again; 0 for not at all.
    pub(crate) fn reconnects_for_ns(&self) -> u64 {
        self.reconnect_ns.unwrap_or(if self.time_based { u64::MAX } else { 0 })
    }

    /// Largest I/O depth of one job.
    pub const IO_DEPTH_MAX: u32 = 65_536;

    /// Converts sizes in zones to bytes; `None` if one is too large.
    pub(crate) fn resolve_zones(&mut self, zone_bytes: u64) -> Option<()> {
        let RegionInZones { size, offset, io_size, increment } = std::mem::take(&mut self.in_zones);
        if let Some(zones) = size {
            (self.size_bytes, self.size_percent) = (Some(zones.checked_mul(zone_bytes)?), None);
        }
        if let Some(zones) = offset {
            (self.offset_bytes, self.offset_percent) = (zones.checked_mul(zone_bytes)?, 0);
        }
        if let Some(zones) = io_size {
            self.io_bytes = Some(zones.checked_mul(zone_bytes)?);
        }
        if let Some(zones) = increment {
            self.offset_increment = zones.checked_mul(zone_bytes)?;
        }
        Some(())
    }

    /// The job for copy `number` of `count`: its own seed and, where it writes and verifies, its own part of
    /// the region, so that no two copies write the same block.
    pub(crate) fn for_thread(&self, number: u32, count: u32, device_bytes: u64) -> JobSpec {
        let mut spec = self.clone();
        let unit = u64::from(self.block_bytes);
        let share = (u128::from(device_bytes) * u128::from(self.offset_increment_percent) / 100) as u64;
        let increment = self.offset_increment.saturating_add(share / unit * unit);
        spec.offset_bytes = self.offset_bytes.saturating_add(increment.saturating_mul(u64::from(number)));
        spec.seed = self.seed.wrapping_add(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        if self.verify != Verify::Off && self.workload.writes() && count > 1 {
            let whole = self.size_bytes.unwrap_or(device_bytes.saturating_sub(self.offset_bytes));
            if increment > 0 {
                // The copies have offsets of their own; their regions must not reach into each other's.
                let rest = self.size_bytes.unwrap_or(device_bytes.saturating_sub(spec.offset_bytes));
                spec.size_bytes = Some(rest.min(increment) / unit * unit);
                return spec;
            }
            let part = whole / u64::from(count) / unit * unit;
            spec.offset_bytes = spec.offset_bytes.saturating_add(part * u64::from(number));
            spec.size_bytes = Some(part);
        }
        spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workload_names_round_trip() {
        for (workload, names) in Workload::NAMES {
            assert!(names.iter().all(|name| Workload::from_name(name) == Some(workload)));
            assert_eq!(Workload::from_name(workload.name()), Some(workload));
        }
        assert_eq!(Workload::from_name("randomread"), None);
    }

    #[test]
    fn verifying_jobs_get_disjoint_regions() {
        let spec = JobSpec { workload: Workload::RandRw, verify: Verify::Crc32c, ..JobSpec::default() };
        let parts: Vec<JobSpec> = (0..3).map(|number| spec.for_thread(number, 3, 1 << 20)).collect();
        let own = JobSpec { offset_increment: 1 << 16, offset_bytes: 512, ..spec.clone() };
        let parts_of_their_own: Vec<JobSpec> =
            (0..3).map(|number| own.for_thread(number, 3, 1 << 20)).collect();
        let shares = JobSpec { offset_increment_percent: 30, offset_bytes: 4096, ..spec.clone() };
        let shares: Vec<JobSpec> = (0..3).map(|number| shares.for_thread(number, 3, 1 << 20)).collect();
        assert_eq!(shares[2].offset_bytes, 4096 + 2 * (((1 << 20) * 30 / 100) / 4096 * 4096));
        let far = JobSpec { offset_increment: u64::MAX, offset_bytes: u64::MAX, ..spec.clone() };
        assert_eq!(far.for_thread(1, 3, 1 << 20).offset_bytes, u64::MAX);
        for pair in parts.windows(2).chain(parts_of_their_own.windows(2)).chain(shares.windows(2)) {
            let end = pair[0].offset_bytes + pair[0].size_bytes.unwrap();
            assert!(end <= pair[1].offset_bytes && pair[0].size_bytes.unwrap().is_multiple_of(4096));
        }
    }
}
