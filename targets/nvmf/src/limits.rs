//! Options of the TCP transport, and the limits derived from them.

use crate::failure::NvmfTargetError;

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
    /// Maximum connections of the target, 2 to 16384.
    pub max_connections: u32,
    /// Maximum bytes of data buffers that one connection holds at a time; above it, commands are deferred
    /// until others complete. One command always fits.
    pub connection_bytes_max: u32,
    /// Timeout for ICReq on a new connection, in milliseconds, 1 to 600000.
    pub ic_timeout_ms: u32,
    /// Timeout for a successful Connect after ICReq, in milliseconds, 1 to 600000.
    pub connect_timeout_ms: u32,
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
            max_connections: 1024,
            // A full queue of the largest commands.
            connection_bytes_max: 16 << 20,
            ic_timeout_ms: 5000,
            connect_timeout_ms: 10_000,
        }
    }
}

/// The validated options, in the units that poll groups use.
#[derive(Clone, Debug)]
pub(crate) struct TcpLimits {
    pub(crate) controller: nvme_controller::ControllerLimits,
    pub(crate) c2h_success: bool,
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
    pub(crate) connections_max: u32,
    pub(crate) connection_bytes_max: usize,
    pub(crate) ic_timeout_ns: u64,
    pub(crate) connect_timeout_ns: u64,
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
        range("max_connections", self.max_connections, 2, 16_384)?;
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
            controller,
            c2h_success: self.c2h_success,
            header_digest: self.header_digest,
            data_digest: self.data_digest,
            connections_max: self.max_connections,
            connection_bytes_max: self.connection_bytes_max as usize,
            ic_timeout_ns: u64::from(self.ic_timeout_ms) * 1_000_000,
            connect_timeout_ns: u64::from(self.connect_timeout_ms) * 1_000_000,
        })
    }
}
