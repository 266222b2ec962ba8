//! Options for opening controllers, queue pairs and namespaces.

use nvme_auth::{TlsDerivation, TlsKey};
use wire_nvme::fabrics::Nqn;

use crate::host_credentials::HostCredentials;

/// Options for opening a controller, queue pair or namespace.
#[derive(Clone, Debug)]
pub struct Options {
    /// Host NQN; `None` derives the UUID form from `host_id`. Fabrics only.
    pub hostnqn: Option<Nqn>,
    /// Host identifier (128 bits).
    pub host_id: [u8; 16],
    /// How the host authenticates, if the controller demands it; and that the controller has to, if they have
    /// its key. Fabrics only.
    pub authentication: Option<HostCredentials>,
    /// The key with which connections use TLS; `None` for none. Only over TCP.
    pub tls: Option<HostTls>,
    /// Whether the host authenticates with secure channel concatenation, and all that follows uses TLS with
    /// the key that both ends generate. Needs keys to authenticate with, and no `tls`. Only over TCP.
    pub concat: bool,
    /// Commands in flight on the I/O queue, 1 to 1023.
    pub queue_depth: u32,
    /// Keep alive timeout in milliseconds; 0 is off. Fabrics only.
    pub keep_alive_ms: u32,
    /// Timeout of each step of opening and of each admin command, in nanoseconds.
    pub timeout_ns: u64,
    /// How long the controller may not acknowledge what was sent before its connection fails, in
    /// milliseconds; 0 leaves that to the kernel, which gives up after many minutes. Only over TCP
    /// (`TCP_USER_TIMEOUT`).
    pub ack_timeout_ms: u32,
    /// How long a connection may take until the controller has answered its first message, in nanoseconds,
    /// if that is less than `timeout_ns`; 0 is `timeout_ns`. Only over TCP.
    pub connect_timeout_ns: u64,
    /// Type of service of packets, or their traffic class (RFC 2474). Only over TCP.
    pub type_of_service: u8,
    /// Priority of packets on this machine (`SO_PRIORITY`); 0 leaves it to the kernel. Only over TCP.
    pub socket_priority: u32,
    /// Delay after which an Asynchronous Event Request that failed is submitted again, unless the controller
    /// set Do Not Retry, in nanoseconds: a controller that fails each one must not keep the core busy. Only
    /// over TCP.
    pub event_retry_ns: u64,
    /// I/O timeout in nanoseconds, after which the command is aborted; after the same time again the
    /// controller is reset. 0 disables it. Not over TCP.
    pub io_timeout_ns: u64,
    /// Whether [`IoQueue::quiesced_ns`](crate::IoQueue::quiesced_ns) says how long a silent controller may
    /// still execute commands. Only over TCP, and only with a keep alive timeout.
    pub quiesce_wait: bool,
    /// Whether memory that a peer lends, such as a guest's, is mapped for the device as a whole, which pins
    /// it, so that commands need not copy. Only over PCI Express with an IOMMU.
    pub map_lent_memory: bool,
    /// Whether completions raise interrupts. Not over TCP.
    pub interrupts: InterruptMode,
    /// Whether time and instructions of submission and completion are measured. Not over TCP.
    pub count_costs: bool,
}

impl Options {
    /// How long a connection may take until the controller has answered its first message.
    pub(crate) fn handshake_ns(&self) -> u64 {
        match self.connect_timeout_ns {
            0 => self.timeout_ns,
            limit => limit.min(self.timeout_ns),
        }
    }
}

/// The key with which a host uses TLS, and how it is derived for the host and a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTls {
    /// The configured PSK.
    pub key: TlsKey,
    /// As the specification says, or as libnvme did before it was mended.
    pub derivation: TlsDerivation,
}

/// Whether completions raise interrupts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterruptMode {
    /// On, if the core's idle policy is to sleep and the device supports interrupts.
    #[default]
    Auto,
    /// On, if the device supports interrupts: a core with I/O in flight may sleep.
    On,
    /// Off: a core with I/O in flight polls.
    Off,
}

impl Default for Options {
    fn default() -> Self {
        // The process identifier makes two processes on one machine distinct hosts; it is not a stable
        // identity.
        let mut host_id = *b"ringbolt-host\0\0\0";
        host_id[12..].copy_from_slice(&std::process::id().to_be_bytes());
        Options {
            hostnqn: None,
            host_id,
            authentication: None,
            tls: None,
            concat: false,
            queue_depth: 128,
            keep_alive_ms: 15_000,
            timeout_ns: 10_000_000_000,
            connect_timeout_ns: 0,
            type_of_service: 0,
            socket_priority: 0,
            ack_timeout_ms: 0,
            event_retry_ns: 1_000_000_000,
            io_timeout_ns: 30_000_000_000,
            quiesce_wait: true,
            map_lent_memory: true,
            interrupts: InterruptMode::Auto,
            count_costs: false,
        }
    }
}
