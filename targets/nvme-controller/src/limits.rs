//! The limits of a controller.

use wire_nvme::log::TransportType;

/// Limits of a transport's controllers. The control plane sets them before the first connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerLimits {
    /// I/O queues of a controller. Linux requests one per core, and more with poll queues.
    pub io_queues_max: u16,
    /// Entries of an I/O queue (CAP.MQES and MAXCMD): the most commands outstanding on it.
    pub io_queue_entries_max: u32,
    /// Entries of an admin queue. Linux uses 32.
    pub admin_queue_entries_max: u32,
    /// Bytes of data of one command (MDTS): a power of two of 4 KiB pages.
    pub transfer_max_bytes: u32,
    /// Bytes of data in the capsule of an I/O command (IOCCSZ), a multiple of 16.
    pub in_capsule_bytes: u32,
    /// Asynchronous Event Requests that may be outstanding (AERL), 1 to 256.
    pub async_events_max: u16,
    /// Entries kept in the error log, 1 to 256.
    pub error_log_entries: u16,
    /// Granularity of keep alive timeouts in milliseconds (KAS), a multiple of 100. Timeouts are rounded up.
    pub keep_alive_granularity_ms: u32,
    /// Milliseconds without commands after which a discovery controller without a keep alive timeout
    /// terminates (Base 2.0, section 3.1.2.3: two minutes).
    pub discovery_idle_ms: u32,
    /// The transport type, which selects the SGL descriptors and is reported in the error log.
    pub transport: TransportType,
    /// A memory-based transport: queues are in host memory, as with PCI Express. PRPs or SGLs describe data,
    /// admin commands create queues, and properties are registers; `transport` and `in_capsule_bytes` are
    /// ignored.
    pub memory_based: bool,
    /// Support Doorbell Buffer Config, for hosts to which a doorbell write costs more than a memory write.
    /// Memory-based transports only.
    pub shadow_doorbells: bool,
    /// Support fused Compare and Write; the transport's block devices must be able to execute it.
    pub compare_and_write: bool,
    /// Bits of ONCS that are off: their commands are rejected with Invalid Command Opcode.
    pub masked_oncs: u16,
    /// Delays before a host that honours them retries a command, in units of 100 ms (CRDT1 to CRDT3). Failed
    /// commands select the first.
    pub retry_delays_100ms: [u16; 3],
    /// A host may have one controller of an NVM subsystem on each listener: while it exists, Connect fails
    /// with Connect Controller Busy.
    pub one_controller_per_listener: bool,
    /// Interrupt vectors for completion queues. Memory-based transports only.
    pub interrupt_vectors: u16,
    /// PCI vendor of the controller and of its subsystem (VID, SSVID); 0 if it is not a PCI function.
    pub pci_vendor: u16,
}

impl Default for ControllerLimits {
    fn default() -> Self {
        ControllerLimits {
            io_queues_max: 127,
            io_queue_entries_max: 128,
            admin_queue_entries_max: 128,
            transfer_max_bytes: 128 << 10,
            in_capsule_bytes: 8192,
            async_events_max: 4,
            error_log_entries: 16,
            keep_alive_granularity_ms: 1000,
            discovery_idle_ms: 120_000,
            transport: TransportType::Tcp,
            memory_based: false,
            shadow_doorbells: false,
            compare_and_write: true,
            masked_oncs: 0,
            retry_delays_100ms: [0; 3],
            one_controller_per_listener: false,
            interrupt_vectors: 0,
            pci_vendor: 0,
        }
    }
}

/// Memory page size as a power of two (CAP.MPSMIN and CAP.MPSMAX).
pub(crate) const PAGE_LOG2: u8 = 12;

impl ControllerLimits {
    /// Asserts that the limits can be encoded for a host.
    ///
    /// # Panics
    /// If a limit is outside the range in its description.
    pub fn check(&self) {
        let transfer = self.transfer_max_bytes;
        assert!(self.io_queues_max >= 1, "no I/O queues");
        assert!((2..=65536).contains(&self.io_queue_entries_max), "{} entries", self.io_queue_entries_max);
        // A discovery log entry and Linux both require at least 32 (Base 2.0, section 5.16.1.23: ASQSZ).
        assert!(
            (32..=4096).contains(&self.admin_queue_entries_max),
            "{} entries",
            self.admin_queue_entries_max
        );
        assert!(transfer.is_power_of_two() && transfer >> PAGE_LOG2 >= 1, "transfers of {transfer} bytes");
        assert!(self.in_capsule_bytes.is_multiple_of(16), "{} bytes in a capsule", self.in_capsule_bytes);
        assert!((1..=256).contains(&self.async_events_max), "{} async events", self.async_events_max);
        assert!((1..=256).contains(&self.error_log_entries), "{} log entries", self.error_log_entries);
        let granularity = self.keep_alive_granularity_ms;
        assert!(
            granularity >= 100 && granularity.is_multiple_of(100) && granularity / 100 <= u16::MAX.into(),
            "keep alive granularity of {granularity} ms"
        );
    }

    /// Whether none of these bits of ONCS is off.
    pub(crate) fn has_optional(&self, oncs: u16) -> bool {
        self.masked_oncs & oncs == 0
    }

    /// MDTS: the largest transfer as a power of two of pages.
    pub(crate) fn mdts(&self) -> u8 {
        (self.transfer_max_bytes.trailing_zeros() as u8).saturating_sub(PAGE_LOG2)
    }

    /// A keep alive timeout, rounded up to the granularity, in nanoseconds.
    pub(crate) fn keep_alive_ns(&self, kato_ms: u32) -> u64 {
        u64::from(kato_ms).next_multiple_of(self.keep_alive_granularity_ms.into()) * 1_000_000
    }
}
