//! Device profiles: TOML files with the parameters of a device model.
//!
//! docs/MODEL.md describes every key. Unknown keys and invalid values are errors that name the key.
//! Times are in microseconds, rates in commands or decimal megabytes per second.

pub(crate) mod check;
#[cfg(test)]
mod tests;

use serde::Deserialize;

use crate::faults::ModelFault;
use crate::quantile::MixtureComponent;

/// Supported version of the file format.
pub const SCHEMA: u32 = 1;

/// The performance parameters of a device, and the published results that it is fitted to.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// Version of the file format: [`SCHEMA`].
    pub schema: u32,
    /// Profile name, as in `model:NAME`: 1 to 64 letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// One-line description.
    pub title: String,
    /// Sources of the figures and their limits.
    #[serde(default)]
    pub notes: String,
    /// Capacity, block and page size.
    pub device: DeviceGeometry,
    /// Controller and host link.
    pub front: FrontEnd,
    /// Flash dies or 3D XPoint partitions.
    #[serde(default)]
    pub media: Media,
    /// Service times of reads.
    pub read: ReadPath,
    /// Service times of writes and the write buffer.
    pub write: WritePath,
    /// SLC write cache; `None` if the device has none.
    pub slc: Option<SlcCache>,
    /// Garbage collection; `None` for media that are written in place.
    pub gc: Option<GarbageCollection>,
    /// Latency of a flush in microseconds, in addition to draining the write buffer.
    #[serde(default)]
    pub flush_us: Vec<MixtureComponent>,
    /// Latency of a deallocation in microseconds.
    #[serde(default)]
    pub deallocate_us: Vec<MixtureComponent>,
    /// Fault injection rules, at most 64.
    #[serde(default)]
    pub faults: Vec<ModelFault>,
    /// Published results that [`fit`](crate::fit()) compares the model with.
    #[serde(default)]
    pub target: Vec<FitTarget>,
}

/// `[device]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceGeometry {
    /// Default capacity in gigabytes (10^9 bytes).
    pub capacity_gb: f64,
    /// Logical block size in bytes.
    #[serde(default = "block_bytes")]
    pub block_bytes: u32,
    /// Page size in bytes: what one die returns for one read. Larger commands are striped over dies.
    #[serde(default = "page_bytes")]
    pub page_bytes: u32,
    /// Power-loss protection: acknowledged writes survive a power loss, and a flush need not wait.
    #[serde(default)]
    pub power_loss_protection: bool,
}

/// `[front]`: limits of the controller and of the link to the host.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontEnd {
    /// Maximum reads per second.
    pub read_iops: f64,
    /// Maximum writes per second.
    pub write_iops: f64,
    /// Maximum megabytes per second to the host.
    pub read_mb_s: f64,
    /// Maximum megabytes per second from the host.
    pub write_mb_s: f64,
}

/// `[media]`
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Media {
    /// Number of dies, or of partitions of a die, that work in parallel; 0 for no such limit.
    #[serde(default)]
    pub dies: u32,
}

/// `[read]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadPath {
    /// Time in microseconds that a page occupies its die.
    #[serde(default)]
    pub die_us: Vec<MixtureComponent>,
    /// Remaining latency in microseconds, during which the die may serve other commands.
    pub path_us: Vec<MixtureComponent>,
    /// Bytes per die access of a command larger than a page; 0 for the page size.
    #[serde(default)]
    pub large_page_bytes: u32,
    /// Time in microseconds that such an access occupies its die; `die_us` if empty.
    #[serde(default)]
    pub large_die_us: Vec<MixtureComponent>,
    /// Microseconds added to commands that are split over several dies.
    #[serde(default)]
    pub split_us: f64,
    /// Maximum megabytes per second of split commands; 0 for the limit of the front end.
    #[serde(default)]
    pub split_mb_s: f64,
    /// Probability that a read suspends a program or erase; otherwise it waits for its end.
    #[serde(default)]
    pub suspend_probability: f64,
    /// Time in microseconds to suspend a program or erase.
    #[serde(default)]
    pub suspend_us: f64,
}

/// `[write]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WritePath {
    /// Latency in microseconds of a write that finds space in the buffer.
    pub path_us: Vec<MixtureComponent>,
    /// Without a buffer: time in microseconds that a page occupies its die. Not together with `buffer_kib`.
    #[serde(default)]
    pub die_us: Vec<MixtureComponent>,
    /// Size of the write buffer in KiB; a write completes once it is buffered. 0 for no buffer.
    #[serde(default)]
    pub buffer_kib: f64,
    /// KiB that one program operation writes to a die.
    #[serde(default)]
    pub unit_kib: f64,
    /// Time of a program operation in microseconds.
    #[serde(default)]
    pub program_us: f64,
    /// Microseconds added to commands larger than a page, without a buffer.
    #[serde(default)]
    pub split_us: f64,
}

/// `[slc]`: a part of the flash that is programmed faster, until it is full.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlcCache {
    /// Gigabytes of SLC cache in a fresh device.
    pub gb: f64,
    /// Time in microseconds to program a unit in SLC mode.
    pub program_us: f64,
    /// Megabytes per second that are flushed from the cache while no writes arrive.
    #[serde(default)]
    pub refill_mb_s: f64,
}

/// `[gc]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GarbageCollection {
    /// Overprovisioning in percent of the capacity.
    pub spare_percent: f64,
    /// Write amplification of random writes to a full device in the steady state, in units of program
    /// time: copies and erases count with the time that they take.
    pub amplification: f64,
    /// Length in milliseconds of a garbage collection burst, which occupies every die once that much work
    /// is pending; 0 spreads the work evenly.
    #[serde(default)]
    pub burst_ms: f64,
    /// Time of an erase in microseconds, which a read may have to wait for; 0 for that of a program.
    #[serde(default)]
    pub erase_us: f64,
    /// Share of erases in the program and erase time of a die, in percent.
    #[serde(default)]
    pub erase_percent: f64,
}

/// Preconditioning: what was written before the measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MediaState {
    /// Fresh out of the box: nothing was written since a format.
    Fresh,
    /// Steady state: the whole device was overwritten at random several times, and every write causes
    /// garbage collection.
    #[default]
    Steady,
}

impl MediaState {
    /// Parses `fresh` or `steady`.
    pub fn from_name(name: &str) -> Option<MediaState> {
        match name {
            "fresh" => Some(MediaState::Fresh),
            "steady" => Some(MediaState::Steady),
            _ => None,
        }
    }

    /// The name in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            MediaState::Fresh => "fresh",
            MediaState::Steady => "steady",
        }
    }
}

/// Access pattern and direction of a load: fio's `rw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rw {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    RandRead,
    /// Random writes.
    RandWrite,
}

impl Rw {
    /// Whether the load consists of writes.
    pub const fn writes(self) -> bool {
        matches!(self, Rw::Write | Rw::RandWrite)
    }

    /// Whether offsets are random.
    pub const fn is_random(self) -> bool {
        matches!(self, Rw::RandRead | Rw::RandWrite)
    }

    /// Name in fio and in profiles.
    pub const fn name(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
        }
    }
}

/// The measured quantity of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FitMetric {
    /// Commands per second.
    Iops,
    /// Mean latency in microseconds.
    MeanUs,
    /// Median latency in microseconds.
    P50Us,
    /// 90th percentile of the latency in microseconds.
    P90Us,
    /// 99th percentile of the latency in microseconds.
    P99Us,
    /// 99.9th percentile of the latency in microseconds.
    P999Us,
}

impl FitMetric {
    /// Name in profiles.
    pub const fn name(self) -> &'static str {
        match self {
            FitMetric::Iops => "iops",
            FitMetric::MeanUs => "mean_us",
            FitMetric::P50Us => "p50_us",
            FitMetric::P90Us => "p90_us",
            FitMetric::P99Us => "p99_us",
            FitMetric::P999Us => "p999_us",
        }
    }
}

/// `[[target]]`: one published result and the load under which it was measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FitTarget {
    /// Access pattern and direction.
    pub rw: Rw,
    /// Block size in bytes.
    pub bs: u32,
    /// Queue depth: commands in flight, summed over all devices.
    pub qd: u32,
    /// Number of devices; commands are distributed round robin.
    #[serde(default = "one_device")]
    pub devices: u32,
    /// Preconditioning of the devices.
    #[serde(default)]
    pub state: MediaState,
    /// A second load that runs on the same devices at the same time.
    pub beside: Option<ConcurrentLoad>,
    /// The measured quantity.
    pub metric: FitMetric,
    /// The published value, including host software.
    pub value: f64,
    /// Host CPU time per command in microseconds, serialized on one core.
    #[serde(default)]
    pub host_us: f64,
    /// Further host latency per command in microseconds that occupies no core: interrupts and wake-ups.
    #[serde(default)]
    pub wait_us: f64,
    /// Reason why the target does not count; it is still compared and printed.
    pub excluded: Option<String>,
    /// Source: publication, figure or table.
    pub source: String,
}

/// The concurrent load of a target: its `beside` key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConcurrentLoad {
    /// Access pattern and direction.
    pub rw: Rw,
    /// Block size in bytes.
    pub bs: u32,
    /// Queue depth.
    pub qd: u32,
}

/// Error of loading a profile.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// No built-in profile has this name.
    #[error("no profile is called {name}; there are {known}")]
    Unknown {
        /// The requested name.
        name: String,
        /// Names of the built-in profiles, separated by commas.
        known: String,
    },
    /// Invalid TOML, or unknown or missing keys. The message names line and key.
    #[error("{0}")]
    Syntax(String),
    /// A value that is out of range or inconsistent.
    #[error("{key}: {reason}")]
    Value {
        /// The key, prefixed with its table.
        key: String,
        /// What is wrong with the value.
        reason: String,
    },
}

const SHIPPED: [(&str, &str); 5] = [
    ("ideal", include_str!("../profiles/ideal.toml")),
    ("intel-900p", include_str!("../profiles/intel-900p.toml")),
    ("intel-p3700", include_str!("../profiles/intel-p3700.toml")),
    ("intel-p4800x", include_str!("../profiles/intel-p4800x.toml")),
    ("samsung-980-pro", include_str!("../profiles/samsung-980-pro.toml")),
];

impl DeviceProfile {
    /// Parses and validates the text of a file.
    pub fn parse(text: &str) -> Result<DeviceProfile, ProfileError> {
        let syntax = |error: toml::de::Error| ProfileError::Syntax(error.to_string().trim_end().to_string());
        let profile: DeviceProfile = toml::from_str(text).map_err(syntax)?;
        match profile.check() {
            Err(ProfileError::Value { key, reason }) => {
                let line = check::line_of(text, &key).map_or(String::new(), |line| format!(" (line {line})"));
                Err(ProfileError::Value { key, reason: reason + &line })
            }
            checked => checked.map(|()| profile),
        }
    }

    /// Loads a built-in profile.
    pub fn shipped(name: &str) -> Result<DeviceProfile, ProfileError> {
        match DeviceProfile::shipped_text(name) {
            Some(text) => DeviceProfile::parse(text),
            None => {
                let known = DeviceProfile::shipped_names().collect::<Vec<_>>().join(", ");
                Err(ProfileError::Unknown { name: name.to_string(), known })
            }
        }
    }

    /// The TOML text of a built-in profile, as a template for new ones.
    pub fn shipped_text(name: &str) -> Option<&'static str> {
        SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
    }

    /// Names of the built-in profiles.
    pub fn shipped_names() -> impl Iterator<Item = &'static str> {
        SHIPPED.iter().map(|(name, _)| *name)
    }

    /// Capacity in bytes, rounded down to a multiple of 1 MiB.
    pub fn capacity_bytes(&self) -> u64 {
        (self.device.capacity_gb * 1e9) as u64 >> 20 << 20
    }

    /// Whether the device has a write buffer.
    pub fn is_buffered(&self) -> bool {
        self.write.buffer_kib > 0.0
    }
}

fn block_bytes() -> u32 {
    512
}

fn page_bytes() -> u32 {
    4096
}

fn one_device() -> u32 {
    1
}
