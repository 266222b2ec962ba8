//! How namespaces and controllers are opened.

use wire_nvme::fabrics::Nqn;

/// How a namespace is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// The host's name; `None` makes one from the host identifier. Fabrics only.
    pub hostnqn: Option<Nqn>,
    /// The host's identifier.
    pub host_id: [u8; 16],
    /// Commands in flight on the I/O queue, 1 to 1023.
    pub queue_depth: u32,
    /// Keep alive timeout in milliseconds; 0 is off. Fabrics only.
    pub keep_alive_ms: u32,
    /// How long each step may take, in nanoseconds.
    pub timeout_ns: u64,
    /// How long an I/O may take before it is aborted, in nanoseconds; after as long again the controller
    /// is reset. 0 waits for ever. Not over TCP.
    pub io_timeout_ns: u64,
    /// Whether completions raise interrupts. Not over TCP.
    pub interrupts: Interrupts,
    /// Whether time and instructions of submission and completion are counted. Not over TCP.
    pub count_costs: bool,
}

/// Whether completions raise interrupts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interrupts {
    /// Where the core sleeps as soon as it finds nothing to do, if the device has them.
    #[default]
    Auto,
    /// If the device has them: a core with I/O in flight may sleep.
    On,
    /// Never: a core with I/O in flight looks again and again.
    Off,
}

impl Default for Options {
    fn default() -> Self {
        // The process number keeps two programs of one machine apart; it identifies nobody.
        let mut host_id = *b"ringbolt-host\0\0\0";
        host_id[12..].copy_from_slice(&std::process::id().to_be_bytes());
        Options {
            hostnqn: None,
            host_id,
            queue_depth: 128,
            keep_alive_ms: 15_000,
            timeout_ns: 10_000_000_000,
            io_timeout_ns: 30_000_000_000,
            interrupts: Interrupts::Auto,
            count_costs: false,
        }
    }
}
