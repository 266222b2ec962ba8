//! What the transport offers and where it stops.

use crate::failure::TargetError;

/// Options of the TCP transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportConfig {
    /// Entries of an I/O queue.
    pub max_queue_depth: u32,
    /// Queues of a controller, the admin queue not counted.
    pub max_io_qpairs_per_ctrlr: u16,
    /// Bytes of data in the capsule of an I/O command.
    pub in_capsule_data_size: u32,
    /// Most bytes of one command (MDTS).
    pub max_io_size: u32,
    /// Entries of an admin queue.
    pub max_aq_depth: u32,
    /// Whether a read's data may say that the read succeeded, where the host allows it.
    pub c2h_success: bool,
    /// Header digests, for hosts that want them.
    pub header_digest: bool,
    /// Data digests, for hosts that want them.
    pub data_digest: bool,
    /// Most connections of the target.
    pub max_connections: u32,
    /// Most bytes of buffers that one connection holds at a time; beyond, it is read no further
    /// until commands have completed. One command always fits.
    pub connection_bytes_max: u32,
    /// Milliseconds for a new connection to send ICReq.
    pub ic_timeout_ms: u32,
    /// Milliseconds after ICReq for Connect to succeed.
    pub connect_timeout_ms: u32,
}

impl Default for TransportConfig {
    fn default() -> Self {
        TransportConfig {
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

/// The same as groups use it.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) controller: controller::Limits,
    pub(crate) c2h_success: bool,
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
    pub(crate) connections_max: u32,
    pub(crate) connection_bytes_max: usize,
    pub(crate) ic_timeout_ns: u64,
    pub(crate) connect_timeout_ns: u64,
}

impl TransportConfig {
    pub(crate) fn limits(&self) -> Result<Limits, TargetError> {
        let range = |name: &str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(TargetError::Parameter(format!("{name} of {value} is not {low} to {high}")))
        };
        // 16 bits of a request's tag name the command.
        range("max_queue_depth", self.max_queue_depth, 2, 4096)?;
        range("max_io_qpairs_per_ctrlr", self.max_io_qpairs_per_ctrlr.into(), 1, 65_534)?;
        range("in_capsule_data_size", self.in_capsule_data_size, 0, 128 << 10)?;
        range("max_io_size", self.max_io_size, 8192, memory::BUFFER_BYTES_MAX as u32)?;
        range("max_aq_depth", self.max_aq_depth, 32, 4096)?;
        range("max_connections", self.max_connections, 2, 16_384)?;
        range("ic_timeout_ms", self.ic_timeout_ms, 1, 600_000)?;
        range("connect_timeout_ms", self.connect_timeout_ms, 1, 600_000)?;
        if !self.max_io_size.is_power_of_two() {
            return Err(TargetError::Parameter(format!(
                "max_io_size of {} is no power of 2",
                self.max_io_size
            )));
        }
        if !self.in_capsule_data_size.is_multiple_of(16) {
            let size = self.in_capsule_data_size;
            return Err(TargetError::Parameter(format!(
                "in_capsule_data_size of {size} is no multiple of 16"
            )));
        }
        let controller = controller::Limits {
            io_queues_max: self.max_io_qpairs_per_ctrlr,
            io_queue_entries_max: self.max_queue_depth,
            admin_queue_entries_max: self.max_aq_depth,
            transfer_max_bytes: self.max_io_size,
            in_capsule_bytes: self.in_capsule_data_size,
            compare_and_write: bdev::can_fuse(),
            ..controller::Limits::default()
        };
        Ok(Limits {
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
