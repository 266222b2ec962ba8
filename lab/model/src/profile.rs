//! What a device is like: a TOML file that users can write.
//!
//! docs/MODEL.md describes every key. Unknown keys and values that cannot be are errors that name the
//! key. Times are in microseconds, rates in commands or decimal megabytes a second.

pub(crate) mod check;
#[cfg(test)]
mod tests;

use serde::Deserialize;

use crate::curve::Component;
use crate::faults::Fault;

/// The layout of the file that this program understands.
pub const SCHEMA: u32 = 1;

/// A device: how fast its parts are, and what was published about it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Layout of the file; [`SCHEMA`].
    pub schema: u32,
    /// Its name, as `model:NAME` has it.
    pub name: String,
    /// One line for people.
    pub title: String,
    /// Where the figures come from and what they leave out.
    #[serde(default)]
    pub notes: String,
    /// Size and shape.
    pub device: Shape,
    /// What every command passes first.
    pub front: Front,
    /// What is behind it.
    #[serde(default)]
    pub media: Media,
    /// Reads.
    pub read: ReadPath,
    /// Writes.
    pub write: WritePath,
    /// A part of the flash that takes writes faster, until it is full.
    pub slc: Option<Slc>,
    /// Making space for writes.
    pub gc: Option<Gc>,
    /// Microseconds of a flush, beside what it waits for.
    #[serde(default)]
    pub flush_us: Vec<Component>,
    /// Microseconds of a deallocation.
    #[serde(default)]
    pub deallocate_us: Vec<Component>,
    /// What goes wrong.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// What was published, for [`fit`](crate::fit).
    #[serde(default)]
    pub target: Vec<Target>,
}

/// `[device]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Gigabytes (10^9) that a device has where nobody says otherwise.
    pub capacity_gb: f64,
    /// Bytes of a logical block.
    #[serde(default = "block_bytes")]
    pub block_bytes: u32,
    /// Bytes that one die delivers for one read; larger commands are spread over several dies.
    #[serde(default = "page_bytes")]
    pub page_bytes: u32,
    /// Whether a write survives a power cut once it is acknowledged, so that a flush waits for nothing.
    #[serde(default)]
    pub power_loss_protection: bool,
}

/// `[front]`: the controller and the link to the host.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Front {
    /// Most reads a second.
    pub read_iops: f64,
    /// Most writes a second.
    pub write_iops: f64,
    /// Most megabytes a second to the host.
    pub read_mb_s: f64,
    /// Most megabytes a second from the host.
    pub write_mb_s: f64,
}

/// `[media]`
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Media {
    /// What works at the same time: dies, or the partitions of a die. 0 for a device without such a limit.
    #[serde(default)]
    pub dies: u32,
}

/// `[read]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadPath {
    /// Time in which a die is busy with a page.
    #[serde(default)]
    pub die_us: Vec<Component>,
    /// Time that a command takes beside that, in which the die may serve another.
    pub path_us: Vec<Component>,
    /// Bytes that a die delivers for a part of a command of more than a page; 0 for a page.
    #[serde(default)]
    pub large_page_bytes: u32,
    /// Time in which a die is busy with such a part; empty for that of a page.
    #[serde(default)]
    pub large_die_us: Vec<Component>,
    /// Added to commands of several parts.
    #[serde(default)]
    pub split_us: f64,
    /// Most megabytes a second of commands of several parts; 0 for those of the front end.
    #[serde(default)]
    pub split_mb_s: f64,
    /// Probability that a read interrupts a program or erase; otherwise it waits for its end.
    #[serde(default)]
    pub suspend_probability: f64,
    /// How long interrupting takes.
    #[serde(default)]
    pub suspend_us: f64,
}

/// `[write]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WritePath {
    /// Time from the command to its acknowledgement where there is room in the buffer.
    pub path_us: Vec<Component>,
    /// Without a buffer: time in which a die is busy with a page. Not together with `buffer_kib`.
    #[serde(default)]
    pub die_us: Vec<Component>,
    /// The write buffer; a write is acknowledged once it is in.
    #[serde(default)]
    pub buffer_kib: f64,
    /// What a die programs at a time.
    #[serde(default)]
    pub unit_kib: f64,
    /// How long that takes.
    #[serde(default)]
    pub program_us: f64,
    /// Added to commands of more than a page, without a buffer.
    #[serde(default)]
    pub split_us: f64,
}

/// `[slc]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slc {
    /// Gigabytes of it in a fresh device.
    pub gb: f64,
    /// How long a die programs a unit there.
    pub program_us: f64,
    /// Megabytes a second that are moved out of it while nobody writes.
    #[serde(default)]
    pub refill_mb_s: f64,
}

/// `[gc]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gc {
    /// Flash beyond the capacity, in percent of it.
    pub spare_percent: f64,
    /// What the flash writes for each random write of a full device in the steady state, in time: copies
    /// and erasures counted with the time that they take.
    pub amplification: f64,
    /// Milliseconds for which it takes every die, once that much work has gathered; 0 spreads it evenly.
    #[serde(default)]
    pub burst_ms: f64,
    /// How long an erasure takes, which a read may have to wait for; 0 for as long as a program.
    #[serde(default)]
    pub erase_us: f64,
    /// Part of the time in which a die programs or erases that is spent on erasing, in percent.
    #[serde(default)]
    pub erase_percent: f64,
}

/// What was written before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Nothing since it was formatted.
    Fresh,
    /// Everything, several times, at random: every write makes garbage collection work.
    #[default]
    Steady,
}

impl State {
    /// From its name.
    pub fn from_name(name: &str) -> Option<State> {
        match name {
            "fresh" => Some(State::Fresh),
            "steady" => Some(State::Steady),
            _ => None,
        }
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            State::Fresh => "fresh",
            State::Steady => "steady",
        }
    }
}

/// Order and direction of a load: fio's `rw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rw {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Reads anywhere.
    RandRead,
    /// Writes anywhere.
    RandWrite,
}

impl Rw {
    /// Whether it writes.
    pub const fn writes(self) -> bool {
        matches!(self, Rw::Write | Rw::RandWrite)
    }

    /// Whether positions are drawn, not counted.
    pub const fn is_random(self) -> bool {
        matches!(self, Rw::RandRead | Rw::RandWrite)
    }

    /// fio's name.
    pub const fn name(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
        }
    }
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Commands a second.
    Iops,
    /// Mean latency.
    MeanUs,
    /// Median latency.
    P50Us,
    /// 90th percentile of the latency.
    P90Us,
    /// 99th percentile of the latency.
    P99Us,
    /// 99.9th percentile of the latency.
    P999Us,
}

impl Metric {
    /// Its name, as files have it.
    pub const fn name(self) -> &'static str {
        match self {
            Metric::Iops => "iops",
            Metric::MeanUs => "mean_us",
            Metric::P50Us => "p50_us",
            Metric::P90Us => "p90_us",
            Metric::P99Us => "p99_us",
            Metric::P999Us => "p999_us",
        }
    }
}

/// `[[target]]`: one published figure, and the load under which it was measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Order and direction.
    pub rw: Rw,
    /// Bytes of a command.
    pub bs: u32,
    /// Commands in flight, over all devices.
    pub qd: u32,
    /// Devices that the commands go to in turn.
    #[serde(default = "one_device")]
    pub devices: u32,
    /// What was written to them before.
    #[serde(default)]
    pub state: State,
    /// Another load on the same devices at the same time.
    pub beside: Option<Beside>,
    /// What was measured.
    pub metric: Metric,
    /// The published figure, host software included.
    pub value: f64,
    /// Processor time that the host spends on each command, one after the other on one core.
    #[serde(default)]
    pub host_us: f64,
    /// Further time of a command on the host that keeps no core busy: interrupts and wake-ups.
    #[serde(default)]
    pub wait_us: f64,
    /// Why the figure is not counted: it is compared and printed all the same.
    pub excluded: Option<String>,
    /// Where the figure stands.
    pub source: String,
}

/// The load beside a target's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Beside {
    /// Order and direction.
    pub rw: Rw,
    /// Bytes of a command.
    pub bs: u32,
    /// Commands in flight.
    pub qd: u32,
}

/// Why a profile cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// None that is shipped has this name.
    #[error("no profile is called {name}; there are {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// Not TOML, or not these keys. The message names line and key.
    #[error("{0}")]
    Syntax(String),
    /// A value that cannot be.
    #[error("{key}: {reason}")]
    Value {
        /// The key, with its table.
        key: String,
        /// What is wrong with it.
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

impl Profile {
    /// From the text of a file.
    pub fn parse(text: &str) -> Result<Profile, ProfileError> {
        let syntax = |error: toml::de::Error| ProfileError::Syntax(error.to_string().trim_end().to_string());
        let profile: Profile = toml::from_str(text).map_err(syntax)?;
        match profile.check() {
            Err(ProfileError::Value { key, reason }) => {
                let line = check::line_of(text, &key).map_or(String::new(), |line| format!(" (line {line})"));
                Err(ProfileError::Value { key, reason: reason + &line })
            }
            checked => checked.map(|()| profile),
        }
    }

    /// One that is shipped.
    pub fn shipped(name: &str) -> Result<Profile, ProfileError> {
        match Profile::shipped_text(name) {
            Some(text) => Profile::parse(text),
            None => {
                let known = Profile::shipped_names().collect::<Vec<_>>().join(", ");
                Err(ProfileError::Unknown { name: name.to_string(), known })
            }
        }
    }

    /// The file of one that is shipped, to start an own one from.
    pub fn shipped_text(name: &str) -> Option<&'static str> {
        SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
    }

    /// Names of those that are shipped.
    pub fn shipped_names() -> impl Iterator<Item = &'static str> {
        SHIPPED.iter().map(|(name, _)| *name)
    }

    /// Capacity in bytes, a multiple of a mebibyte.
    pub fn capacity_bytes(&self) -> u64 {
        (self.device.capacity_gb * 1e9) as u64 >> 20 << 20
    }

    /// Whether writes go through a buffer.
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
