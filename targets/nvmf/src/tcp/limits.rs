//! Options of the TCP transport, and the limits derived from them.

use target_shell::{ConnectionLimits, GroupLimits};

use crate::fabrics::FabricsLimits;
use crate::failure::NvmfTargetError;
use crate::queue_report::DRAIN_TIMEOUT_NS;

/// Most connections of a target: the range of a core's slots.
const CONNECTIONS_MAX: u32 = 16_384;
/// File descriptors for everything but connections: block devices, event loops, JSON-RPC clients, pending
/// logins.
const OTHER_DESCRIPTORS: u64 = 1024;

/// As many connections as there are file descriptors for, after those of everything else.
fn default_connections_max() -> u32 {
    let descriptors = os::descriptor_limit();
    let connections = descriptors.saturating_sub(OTHER_DESCRIPTORS).max(descriptors / 4);
    u32::try_from(connections).map_or(CONNECTIONS_MAX, |connections| connections.clamp(2, CONNECTIONS_MAX))
}

/// Options of the TCP transport, by the names of the RPC `nvmf_create_transport`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpTransportConfig {
    /// Entries of an I/O queue, 2 to 4096.
    pub max_queue_depth: u32,
    /// I/O queues of a controller, 1 to 65534.
    pub max_io_qpairs_per_ctrlr: u16,
    /// Bytes of in-capsule data of an I/O command, 0 to 131072, a multiple of 16.
    pub in_capsule_data_size: u32,
    /// Maximum bytes of one command (MDTS), a power of two from 8192.
    pub max_io_size: u32,
    /// Entries of an admin queue, 32 to 4096.
    pub max_aq_depth: u32,
    /// C2HData PDUs may carry the SUCCESS flag in place of a response capsule, if the host disables SQ flow
    /// control.
    pub c2h_success: bool,
    /// Enable header digests for hosts that request them.
    pub header_digest: bool,
    /// Enable data digests for hosts that request them.
    pub data_digest: bool,
    /// Maximum connections of the target after Connect, 2 to 16384. `None` is as many as the process's file
    /// descriptors allow, with 16384 at most.
    pub max_connections: Option<u32>,
    /// Of these, connections from one IP address, or from one /64 network of IPv6, 2 to 16384. `None` is half
    /// of what others leave.
    pub max_connections_per_peer: Option<u32>,
    /// Of these, connections to one subsystem, 2 to 16384. `None` is three quarters of what others leave.
    pub max_connections_per_subsystem: Option<u32>,
    /// Maximum connections of the target before Connect, 1 to 16384; the oldest makes room for the newest.
    pub max_pending_logins: u32,
    /// Of these, connections from one IP address, or from one /64 network of IPv6, 1 to 16384.
    pub max_pending_logins_per_peer: u32,
    /// Maximum bytes of data buffers that one connection holds at a time; above it, commands are deferred
    /// until others complete. One command always fits. A connection starts with less and earns the rest.
    pub connection_bytes_max: u32,
    /// Maximum bytes of data buffers that all connections of one host, by its NQN, hold at a time on one
    /// reactor. One command always fits. `None` is half of the reactor's share of the memory.
    pub host_bytes_max: Option<u32>,
    /// Timeout for ICReq on a new connection, in milliseconds, 1 to 600000.
    pub ic_timeout_ms: u32,
    /// Timeout for a successful Connect after ICReq, in milliseconds, 1 to 600000.
    pub connect_timeout_ms: u32,
    /// Time that a host has to send the data that an R2T requests, or to read an answer, in milliseconds, 100
    /// to
    /// 600000. While memory lacks, it is shorter, two checks of at most a second.
    pub transfer_timeout_ms: u32,
}

impl Default for TcpTransportConfig {
    fn default() -> Self {
        TcpTransportConfig {
            max_queue_depth: 128,
            max_io_qpairs_per_ctrlr: 127,
            in_capsule_data_size: 8192,
            max_io_size: 128 << 10,
            max_aq_depth: 128,
            c2h_success: true,
            header_digest: true,
            data_digest: true,
            max_connections: None,
            max_connections_per_peer: None,
            max_connections_per_subsystem: None,
            // More than a rack of hosts that all reconnect at once.
            max_pending_logins: 512,
            max_pending_logins_per_peer: 256,
            // A full queue of the largest commands.
            connection_bytes_max: 16 << 20,
            host_bytes_max: None,
            ic_timeout_ms: 5000,
            connect_timeout_ms: 10_000,
            transfer_timeout_ms: 10_000,
        }
    }
}

/// The validated options, in the units that poll groups use.
#[derive(Clone, Debug)]
pub(crate) struct TcpLimits {
    pub(crate) fabrics: FabricsLimits,
    pub(crate) c2h_success: bool,
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
    pub(crate) connections: GroupLimits,
    pub(crate) ic_timeout_ns: u64,
}

impl TcpTransportConfig {
    pub(crate) fn limits(&self) -> Result<TcpLimits, NvmfTargetError> {
        let range = |name: &str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(NvmfTargetError::Parameter(format!("{name} of {value} is not {low} to {high}")))
        };
        // A request's tag has 16 bits for the command.
        range("max_queue_depth", self.max_queue_depth, 2, 4096)?;
        range("max_io_qpairs_per_ctrlr", self.max_io_qpairs_per_ctrlr.into(), 1, 65_534)?;
        range("in_capsule_data_size", self.in_capsule_data_size, 0, 128 << 10)?;
        range("max_io_size", self.max_io_size, 8192, dma::BUFFER_BYTES_MAX as u32)?;
        range("max_aq_depth", self.max_aq_depth, 32, 4096)?;
        let limits = [
            ("max_connections", self.max_connections),
            ("max_connections_per_peer", self.max_connections_per_peer),
            ("max_connections_per_subsystem", self.max_connections_per_subsystem),
        ];
        for (name, connections) in limits {
            range(name, connections.unwrap_or(2), 2, CONNECTIONS_MAX)?;
        }
        range("max_pending_logins", self.max_pending_logins, 1, CONNECTIONS_MAX)?;
        range("max_pending_logins_per_peer", self.max_pending_logins_per_peer, 1, CONNECTIONS_MAX)?;
        range("transfer_timeout_ms", self.transfer_timeout_ms, 100, 600_000)?;
        range("ic_timeout_ms", self.ic_timeout_ms, 1, 600_000)?;
        range("connect_timeout_ms", self.connect_timeout_ms, 1, 600_000)?;
        if !self.max_io_size.is_power_of_two() {
            return Err(NvmfTargetError::Parameter(format!(
                "max_io_size of {} is not a power of 2",
                self.max_io_size
            )));
        }
        if !self.in_capsule_data_size.is_multiple_of(16) {
            let size = self.in_capsule_data_size;
            return Err(NvmfTargetError::Parameter(format!(
                "in_capsule_data_size of {size} is not a multiple of 16"
            )));
        }
        let controller = nvme_controller::ControllerLimits {
            io_queues_max: self.max_io_qpairs_per_ctrlr,
            io_queue_entries_max: self.max_queue_depth,
            admin_queue_entries_max: self.max_aq_depth,
            transfer_max_bytes: self.max_io_size,
            in_capsule_bytes: self.in_capsule_data_size,
            compare_and_write: bdev::supports_fused(),
            ..nvme_controller::ControllerLimits::default()
        };
        Ok(TcpLimits {
            fabrics: FabricsLimits {
                controller,
                connection_bytes_max: self.connection_bytes_max as usize,
                host_bytes_max: self.host_bytes_max.map(|bytes| bytes as usize),
                connect_timeout_ns: u64::from(self.connect_timeout_ms) * 1_000_000,
            },
            c2h_success: self.c2h_success,
            header_digest: self.header_digest,
            data_digest: self.data_digest,
            connections: GroupLimits {
                connections: ConnectionLimits {
                    max: self.max_connections.unwrap_or_else(default_connections_max),
                    per_peer_max: self.max_connections_per_peer,
                    per_object_max: self.max_connections_per_subsystem,
                },
                logins_max: self.max_pending_logins,
                logins_per_peer_max: self.max_pending_logins_per_peer,
                drain_timeout_ns: DRAIN_TIMEOUT_NS,
                transfer_timeout_ns: u64::from(self.transfer_timeout_ms) * 1_000_000,
                registry: None,
            },
            ic_timeout_ns: u64::from(self.ic_timeout_ms) * 1_000_000,
        })
    }
}
