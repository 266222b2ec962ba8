//! Options that several commands have, and the values that they take.

use clap::{Args, ValueEnum};

/// The socket of a server that was started without `--rpc-socket`.
pub(crate) const DEFAULT_SOCKET: &str = "/var/tmp/ringbolt.sock";

/// Options of every command that starts reactors.
#[derive(Args)]
pub(crate) struct ReactorOptions {
    /// What an idle reactor does
    #[arg(long, value_enum, default_value = "adaptive")]
    pub(crate) idle: Idle,
    /// Limit of memory for I/O buffers, as 512m or 2g [default: 1g, at most half of the machine's]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// Kernel interface for I/O and events
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) engine: EngineChoice,
}

#[derive(Clone, Copy, Default, ValueEnum)]
pub(crate) enum EngineChoice {
    /// io_uring where it is allowed, otherwise epoll
    #[default]
    Auto,
    /// io_uring; fails where it is not allowed
    Uring,
    /// epoll: sockets only, no bdev_uring
    Epoll,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Idle {
    /// Poll for 100 us, then sleep until an event arrives
    Adaptive,
    /// Always poll: lowest latency, uses a whole core for each reactor
    Spin,
    /// Sleep at once
    Sleep,
}

pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    workload::units::parse_bytes(text).ok_or_else(|| "expected a size, as 512, 4k or 1g".to_string())
}

pub(crate) fn parse_time(text: &str) -> Result<u64, String> {
    workload::units::parse_time_ns(text).ok_or_else(|| "expected a duration, as 10s, 500ms or 2m".to_string())
}

/// Whole milliseconds.
pub(crate) fn parse_ms(text: &str) -> Result<u32, String> {
    let ns = parse_time(text)?;
    u32::try_from(ns / 1_000_000)
        .ok()
        .filter(|ms| u64::from(*ms) * 1_000_000 == ns)
        .ok_or_else(|| "expected whole milliseconds, as 300ms".to_string())
}
