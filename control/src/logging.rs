//! Log lines: the facade is the crate `log`; this is its receiver, with SPDK's levels, flags and methods.
//!
//! Libraries call `log::warn!(target: "nvmf", …)`. The target is SPDK's flag. Errors, warnings and notices
//! (`log::info!`) are written where the level allows; SPDK's INFO (`log::debug!`) and DEBUG (`log::trace!`) also
//! need the flag to be set. Each place in the code writes at most [`LINES_MAX`] lines in [`INTERVAL`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use log::{Log, Metadata, Record};
use serde_json::Value;

use crate::framework::Framework;
use crate::parameters::{DecodeLog, NoParameters, ParameterError, ParameterType};
use crate::{ControlPlane, Method, RpcError};

/// Lines that one place in the code may write in an [`INTERVAL`].
pub const LINES_MAX: u32 = 10;
/// Length of the intervals of the rate limit.
pub const INTERVAL: Duration = Duration::from_secs(1);
/// Limit of places in the code that are counted separately; those beyond it share one count.
const PLACES_MAX: usize = 1024;

crate::choices! {
    /// SPDK's levels, from the one that writes nothing.
    #[derive(Default)]
    pub enum LogLevel {
        /// Nothing is written.
        Disabled = "DISABLED",
        /// Something failed.
        Error = "ERROR",
        /// Something works differently than requested.
        Warning = "WARNING",
        /// Something that an operator wants to know.
        #[default]
        Notice = "NOTICE",
        /// Details of what has its flag set.
        Info = "INFO",
        /// More details of what has its flag set.
        Debug = "DEBUG",
    }
}

impl LogLevel {
    fn of(level: log::Level) -> LogLevel {
        match level {
            log::Level::Error => LogLevel::Error,
            log::Level::Warn => LogLevel::Warning,
            log::Level::Info => LogLevel::Notice,
            log::Level::Debug => LogLevel::Info,
            log::Level::Trace => LogLevel::Debug,
        }
    }

    fn filter(self) -> log::LevelFilter {
        match self {
            LogLevel::Disabled => log::LevelFilter::Off,
            LogLevel::Error => log::LevelFilter::Error,
            LogLevel::Warning => log::LevelFilter::Warn,
            LogLevel::Notice => log::LevelFilter::Info,
            LogLevel::Info => log::LevelFilter::Debug,
            LogLevel::Debug => log::LevelFilter::Trace,
        }
    }

    /// Severity of RFC 5424, section 6.2.1.
    fn severity(self) -> u8 {
        match self {
            LogLevel::Disabled | LogLevel::Error => 3,
            LogLevel::Warning => 4,
            LogLevel::Notice => 5,
            LogLevel::Info => 6,
            LogLevel::Debug => 7,
        }
    }
}

/// The flags of the program: the targets of its log lines.
const FLAGS: [&str; 15] = [
    "bdev",
    "bdev_nvme",
    "bdev_raid",
    "iscsi",
    "lvol",
    "nbd",
    "nvme",
    "nvmf",
    "reactor",
    "rpc",
    "scsi",
    "store_client",
    "store_node",
    "ublk",
    "vhost",
];

struct Logger {
    /// The level of standard error, as an index of [`LEVELS`].
    print_level: AtomicUsize,
    /// The level of the system log.
    log_level: AtomicUsize,
    /// Lines of standard error begin with the time.
    has_timestamps: AtomicBool,
    state: Mutex<LoggerState>,
}

#[derive(Default)]
struct LoggerState {
    flags: BTreeSet<String>,
    limits: RateLimiter,
    /// The connection to the system log.
    syslog: Option<UnixDatagram>,
}

const LEVELS: [LogLevel; 6] = [
    LogLevel::Disabled,
    LogLevel::Error,
    LogLevel::Warning,
    LogLevel::Notice,
    LogLevel::Info,
    LogLevel::Debug,
];

static LOGGER: std::sync::LazyLock<Logger> = std::sync::LazyLock::new(|| Logger {
    print_level: AtomicUsize::new(LogLevel::Notice as usize),
    log_level: AtomicUsize::new(LogLevel::Disabled as usize),
    has_timestamps: AtomicBool::new(false),
    state: Mutex::default(),
});

/// Writes the log lines of this process to standard error from now on. An embedder may install another receiver
/// of the crate `log` instead; without any, nothing is written. No effect from the second call on.
pub fn init() {
    if log::set_logger(&*LOGGER).is_ok() {
        LOGGER.apply_levels();
    }
}

/// [`init`] for a program that runs for long: lines have the time, unless they go to systemd's journal, which has it too.
pub fn init_service() {
    init();
    let journal = std::env::var("JOURNAL_STREAM").ok();
    let is_journal = journal.is_some_and(|journal| {
        rustix::fs::fstat(std::io::stderr()).is_ok_and(|it| journal == format!("{}:{}", it.st_dev, it.st_ino))
    });
    LOGGER.has_timestamps.store(!is_journal, Ordering::Relaxed);
}

/// The lines of one place in the code within an interval.
struct Place {
    since: Instant,
    lines: u32,
    suppressed: u64,
}

/// Limits the lines of each place in the code.
#[derive(Default)]
struct RateLimiter {
    places: HashMap<(&'static str, u32), Place>,
}

impl RateLimiter {
    /// Whether a line may be written, and how many of the same place were not since the last one.
    fn admit(&mut self, place: (&'static str, u32), now: Instant) -> Option<u64> {
        let is_known = self.places.contains_key(&place);
        let key = if is_known || self.places.len() < PLACES_MAX { place } else { ("", 0) };
        let place = self.places.entry(key).or_insert(Place { since: now, lines: 0, suppressed: 0 });
        if now.saturating_duration_since(place.since) >= INTERVAL {
            (place.since, place.lines) = (now, 0);
        }
        if place.lines >= LINES_MAX {
            place.suppressed += 1;
            return None;
        }
        place.lines += 1;
        Some(std::mem::take(&mut place.suppressed))
    }
}

impl Logger {
    fn lock(&self) -> MutexGuard<'_, LoggerState> {
        sync::lock(&self.state)
    }

    fn level(of: &AtomicUsize) -> LogLevel {
        LEVELS[of.load(Ordering::Relaxed)]
    }

    /// Lets `log` skip at once what no receiver wants.
    fn apply_levels(&self) {
        let print = Logger::level(&self.print_level).filter();
        log::set_max_level(print.max(Logger::level(&self.log_level).filter()));
    }

    fn syslog(state: &mut LoggerState, level: LogLevel, line: &str) {
        if state.syslog.is_none() {
            let socket = UnixDatagram::unbound().and_then(|socket| {
                socket.set_nonblocking(true)?;
                socket.connect("/dev/log")?;
                Ok(socket)
            });
            // Without a system log there is nothing to write to; the next line tries again.
            state.syslog = socket.ok();
        }
        let Some(socket) = &state.syslog else { return };
        // Facility 3, system daemons (RFC 5424, section 6.2.1).
        let text = format!("<{}>ringbolt[{}]: {line}", 3 * 8 + level.severity(), std::process::id());
        if socket.send(text.as_bytes()).is_err() {
            state.syslog = None;
        }
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = LogLevel::of(record.level());
        let target = record.target().split("::").next().unwrap_or_default();
        let mut state = self.lock();
        let is_detail = record.level() > log::Level::Info;
        if is_detail && !state.flags.contains(target) && !state.flags.contains("all") {
            return;
        }
        let place = (record.file_static().unwrap_or_default(), record.line().unwrap_or_default());
        let Some(suppressed) = state.limits.admit(place, Instant::now()) else { return };
        let mut line = format!("{target}: {}", record.args());
        if suppressed > 0 {
            line.push_str(&format!(" ({suppressed} more like this were not logged)"));
        }
        if level as usize <= self.print_level.load(Ordering::Relaxed) {
            // One write, so that lines of several threads and processes do not mix. A closed pipe is ignored.
            let time = match self.has_timestamps.load(Ordering::Relaxed) {
                true => format!("{} ", humantime::format_rfc3339_millis(SystemTime::now())),
                false => String::new(),
            };
            let text = format!("{time}{}: {line}\n", level.name());
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        if level as usize <= self.log_level.load(Ordering::Relaxed) {
            Logger::syslog(&mut state, level, &line);
        }
    }

    fn flush(&self) {}
}

/// SPDK's methods of the log.
pub(crate) fn methods() -> Vec<Method<Framework>> {
    let method = |method: Method<Framework>, text, result| method.at_any_stage().text(text, result);
    vec![
        method(
            Method::of_plane("log_get_flags", get_flags),
            "Lists the flags of the log.",
            "object of flags, each true or false",
        ),
        method(
            Method::of_plane("log_set_flag", |_, params: Flag| set_flag(params, true)),
            "Logs details (INFO and DEBUG, as the levels allow) of what a flag names.",
            "true",
        ),
        method(
            Method::of_plane("log_clear_flag", |_, params: Flag| set_flag(params, false)),
            "Ends what `log_set_flag` started.",
            "true",
        ),
        method(
            Method::of_plane("log_get_level", |_, params| get_level(params, &LOGGER.log_level)),
            "The level from which lines go to the system log (`/dev/log`). Initially DISABLED, in SPDK NOTICE.",
            "name of the level",
        ),
        method(
            Method::of_plane("log_set_level", |_, params| set_level(params, &LOGGER.log_level)),
            "Sets the level from which lines go to the system log.",
            "true",
        ),
        method(
            Method::of_plane("log_get_print_level", |_, params| get_level(params, &LOGGER.print_level)),
            "The level from which lines go to standard error. Initially NOTICE.",
            "name of the level",
        ),
        method(
            Method::of_plane("log_set_print_level", |_, params| set_level(params, &LOGGER.print_level)),
            "Sets the level from which lines go to standard error.",
            "true",
        ),
        method(
            Method::of_plane("log_enable_timestamps", |_, Timestamps { enabled }| {
                LOGGER.has_timestamps.store(enabled, Ordering::Relaxed);
                Ok(true)
            }),
            "Begins lines on standard error with the time (RFC 3339, UTC, milliseconds), or not. Initially they do, unless they go \
             to systemd's journal.",
            "true",
        ),
    ]
}

crate::parameters! {
    struct Flag {
        /// One of `log_get_flags`, or `all`
        flag: String,
    }
}

/// A level by its name, in upper or lower case.
struct LevelName(LogLevel);

impl ParameterType for LevelName {
    fn kind() -> String {
        LogLevel::kind()
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let value = value.as_str().map_or(Value::Null, |name| name.to_ascii_uppercase().into());
        LogLevel::decode(value, log).map(LevelName)
    }

    fn encode(&self) -> Value {
        self.0.encode()
    }
}

crate::parameters! {
    struct Level {
        /// The level, in upper or lower case
        level: LevelName,
    }
}

crate::parameters! {
    struct Timestamps {
        /// Whether lines begin with the time
        enabled: bool,
    }
}

fn get_flags(_: &ControlPlane, _: NoParameters) -> Result<BTreeMap<&'static str, bool>, RpcError> {
    let state = LOGGER.lock();
    let all = state.flags.contains("all");
    Ok(FLAGS.iter().map(|flag| (*flag, all || state.flags.contains(*flag))).collect())
}

fn set_flag(params: Flag, is_set: bool) -> Result<bool, RpcError> {
    if params.flag != "all" && !FLAGS.contains(&params.flag.as_str()) {
        return Err(RpcError::invalid_params(format!("flag: expected all, {}", FLAGS.join(", "))));
    }
    let mut state = LOGGER.lock();
    match (params.flag.as_str(), is_set) {
        ("all", false) => state.flags.clear(),
        (_, true) => drop(state.flags.insert(params.flag)),
        (_, false) => {
            if state.flags.remove("all") {
                state.flags.extend(FLAGS.map(str::to_string));
            }
            state.flags.remove(&params.flag);
        }
    }
    Ok(true)
}

fn get_level(_: NoParameters, level: &AtomicUsize) -> Result<Value, RpcError> {
    Ok(Logger::level(level).name().into())
}

fn set_level(params: Level, level: &AtomicUsize) -> Result<bool, RpcError> {
    level.store(params.level.0 as usize, Ordering::Relaxed);
    LOGGER.apply_levels();
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_logs_too_much_is_limited_and_says_how_much_is_missing() {
        let mut limiter = RateLimiter::default();
        let start = Instant::now();
        let noisy = ("a.rs", 1);
        let admitted = (0..25).filter(|_| limiter.admit(noisy, start).is_some()).count();
        assert_eq!(admitted, LINES_MAX as usize);
        assert_eq!(limiter.admit(("b.rs", 1), start), Some(0), "another place is not affected");
        assert_eq!(limiter.admit(noisy, start + INTERVAL), Some(25 - u64::from(LINES_MAX)));
        assert_eq!(limiter.admit(noisy, start + INTERVAL), Some(0));
        for line in 0..2 * PLACES_MAX as u32 {
            limiter.admit(("c.rs", line), start);
        }
        assert!(limiter.places.len() <= PLACES_MAX + 1);
    }

    #[test]
    fn levels_have_spdks_names_and_order() {
        let all = LEVELS.map(LogLevel::name);
        assert_eq!(all, ["DISABLED", "ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]);
        assert!(LEVELS.iter().enumerate().all(|(index, level)| *level as usize == index));
        assert_eq!(LogLevel::of(log::Level::Info).filter(), log::LevelFilter::Info);
    }
}
