//! Options of the RDMA transport, and the limits derived from them.

use target_shell::{ConnectionLimits, GroupLimits};
use wire_nvme::log::TransportType;

use crate::fabrics::FabricsLimits;
use crate::failure::NvmfTargetError;
use crate::queue_report::DRAIN_TIMEOUT_NS;

/// `trtype` of the transport.
pub(super) const NAME: &str = "RDMA";

/// Connections of hosts that have logged in.
const CONNECTIONS_MAX: u32 = 4096;
/// Connections before Connect.
const LOGINS_MAX: u32 = 256;
/// Time for Connect after the connection was made, as over TCP.
const CONNECT_TIMEOUT_NS: u64 = 10_000_000_000;
/// Time for a host's device to take an answer or to give data, as over TCP.
const TRANSFER_TIMEOUT_NS: u64 = 10_000_000_000;
/// Buffers that one connection holds at most: a full queue of the largest commands.
const CONNECTION_BYTES_MAX: usize = 16 << 20;

/// Options of the RDMA transport, by the names of the RPC `nvmf_create_transport`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaTransportConfig {
    /// Entries of an I/O queue, 2 to 4096.
    pub max_queue_depth: u32,
    /// I/O queues of a controller, 1 to 65534.
    pub max_io_qpairs_per_ctrlr: u16,
    /// Bytes of in-capsule data of an I/O command, 0 to 65536, a multiple of 16. Every receive buffer has
    /// space for them.
    pub in_capsule_data_size: u32,
    /// Maximum bytes of one command (MDTS), a power of two from 8192.
    pub max_io_size: u32,
    /// Entries of an admin queue, 32 to 4096.
    pub max_aq_depth: u32,
    /// Receive buffers of a core and a device, which its connections share, 16 to 16384. With fewer than the
    /// commands that hosts have in flight, their devices repeat the capsules that find none.
    pub max_srq_depth: u32,
    /// Requests to connect that wait to be accepted at each listener and core, 1 to 65535.
    pub acceptor_backlog: u32,
    /// Each request is given to the device at once, not those of a turn of the reactor together.
    pub no_wr_batching: bool,
}

impl Default for RdmaTransportConfig {
    fn default() -> Self {
        RdmaTransportConfig {
            max_queue_depth: 128,
            max_io_qpairs_per_ctrlr: 127,
            in_capsule_data_size: 4096,
            max_io_size: 128 << 10,
            max_aq_depth: 128,
            max_srq_depth: 1024,
            acceptor_backlog: 128,
            no_wr_batching: false,
        }
    }
}

/// The validated options, in the units that poll groups use.
#[derive(Clone, Debug)]
pub(crate) struct RdmaLimits {
    pub(crate) fabrics: FabricsLimits,
    pub(crate) connections: GroupLimits,
    pub(crate) receives: u32,
    pub(crate) backlog: u16,
    pub(crate) batches: bool,
}

impl RdmaTransportConfig {
    pub(crate) fn limits(&self) -> Result<RdmaLimits, NvmfTargetError> {
        let range = |name: &str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(NvmfTargetError::Parameter(format!("{name} of {value} is not {low} to {high}")))
        };
        range("max_queue_depth", self.max_queue_depth, 2, 4096)?;
        range("max_io_qpairs_per_ctrlr", self.max_io_qpairs_per_ctrlr.into(), 1, 65_534)?;
        range("in_capsule_data_size", self.in_capsule_data_size, 0, 64 << 10)?;
        range("max_io_size", self.max_io_size, 8192, dma::BUFFER_BYTES_MAX as u32)?;
        range("max_aq_depth", self.max_aq_depth, 32, 4096)?;
        range("max_srq_depth", self.max_srq_depth, 16, 16_384)?;
        range("acceptor_backlog", self.acceptor_backlog, 1, u16::MAX.into())?;
        if !self.max_io_size.is_power_of_two() {
            let size = self.max_io_size;
            return Err(NvmfTargetError::Parameter(format!("max_io_size of {size} is not a power of 2")));
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
            transport: TransportType::Rdma,
            ..nvme_controller::ControllerLimits::default()
        };
        Ok(RdmaLimits {
            fabrics: FabricsLimits {
                controller,
                connection_bytes_max: CONNECTION_BYTES_MAX,
                host_bytes_max: None,
                connect_timeout_ns: CONNECT_TIMEOUT_NS,
            },
            connections: GroupLimits {
                connections: ConnectionLimits::new(CONNECTIONS_MAX),
                logins_max: LOGINS_MAX,
                drain_timeout_ns: DRAIN_TIMEOUT_NS,
                transfer_timeout_ns: TRANSFER_TIMEOUT_NS,
                ..GroupLimits::default()
            },
            receives: self.max_srq_depth,
            backlog: self.acceptor_backlog as u16,
            batches: !self.no_wr_batching,
        })
    }
}
