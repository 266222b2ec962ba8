//! Controller properties: CAP, VS, CC and CSTS (Base 2.0, section 3.1.3).
//!
//! Registers of PCI Express controllers and properties of fabrics controllers have the same layout.

use crate::DecodeError;
use crate::le::bit;

/// Offsets of properties in bytes.
pub mod offset {
    /// Controller Capabilities, 8 bytes.
    pub const CAP: u32 = 0x00;
    /// Version, 4 bytes.
    pub const VS: u32 = 0x08;
    /// Interrupt Mask Set; memory-based transports only.
    pub const INTMS: u32 = 0x0c;
    /// Interrupt Mask Clear; memory-based transports only.
    pub const INTMC: u32 = 0x10;
    /// Controller Configuration, 4 bytes.
    pub const CC: u32 = 0x14;
    /// Controller Status, 4 bytes.
    pub const CSTS: u32 = 0x1c;
    /// NVM Subsystem Reset, 4 bytes.
    pub const NSSR: u32 = 0x20;
    /// Admin Queue Attributes; memory-based transports only.
    pub const AQA: u32 = 0x24;
    /// Admin Submission Queue Base Address; memory-based transports only.
    pub const ASQ: u32 = 0x28;
    /// Admin Completion Queue Base Address; memory-based transports only.
    pub const ACQ: u32 = 0x30;
    /// Controller Ready Timeouts, 4 bytes.
    pub const CRTO: u32 = 0x68;
}

/// The value of NSSR that initiates an NVM Subsystem Reset: "NVMe". Other values have no effect.
pub const SUBSYSTEM_RESET: u32 = 0x4e56_4d65;

/// Controller Capabilities (CAP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerCapabilities {
    /// Maximum entries of an I/O queue, 2 to 65536 (MQES).
    pub queue_entries_max: u32,
    /// I/O queues must be contiguous in memory (CQR); set over fabrics.
    pub contiguous_queues_required: bool,
    /// Arbitration mechanisms besides round robin (AMS): bit 0 weighted, bit 1 vendor's.
    pub arbitration: u8,
    /// Maximum time for CSTS.RDY to change, in units of 500 ms (TO).
    pub ready_timeout_500ms: u8,
    /// Doorbell stride as a power of two of 4 bytes (DSTRD); 0 over fabrics.
    pub doorbell_stride_log2: u8,
    /// NVM subsystem reset is supported (NSSRS).
    pub subsystem_reset: bool,
    /// The NVM command set is supported (CSS bit 0).
    pub nvm_command_set: bool,
    /// Several I/O command sets are supported (CSS bit 6).
    pub io_command_sets: bool,
    /// No I/O command set is supported (CSS bit 7).
    pub no_io_command_set: bool,
    /// Boot partitions are supported (BPS).
    pub boot_partitions: bool,
    /// Smallest memory page, as a power of two in bytes: 12 to 27 (MPSMIN).
    pub page_min_log2: u8,
    /// Largest memory page, as a power of two in bytes: 12 to 27 (MPSMAX).
    pub page_max_log2: u8,
    /// Persistent memory region (PMRS).
    pub persistent_memory: bool,
    /// Controller memory buffer (CMBS).
    pub memory_buffer: bool,
    /// NVM subsystem shutdown (NSSS).
    pub subsystem_shutdown: bool,
    /// Controller ready modes (CRMS): bit 0 with media, bit 1 independent of media.
    pub ready_modes: u8,
}

impl ControllerCapabilities {
    /// Decodes the property; reserved bits are ignored.
    pub const fn decode(value: u64) -> ControllerCapabilities {
        ControllerCapabilities {
            queue_entries_max: (value & 0xffff) as u32 + 1,
            contiguous_queues_required: value >> 16 & 1 != 0,
            arbitration: (value >> 17 & 3) as u8,
            ready_timeout_500ms: (value >> 24) as u8,
            doorbell_stride_log2: (value >> 32 & 0xf) as u8,
            subsystem_reset: value >> 36 & 1 != 0,
            nvm_command_set: value >> 37 & 1 != 0,
            io_command_sets: value >> 43 & 1 != 0,
            no_io_command_set: value >> 44 & 1 != 0,
            boot_partitions: value >> 45 & 1 != 0,
            page_min_log2: (value >> 48 & 0xf) as u8 + 12,
            page_max_log2: (value >> 52 & 0xf) as u8 + 12,
            persistent_memory: value >> 56 & 1 != 0,
            memory_buffer: value >> 57 & 1 != 0,
            subsystem_shutdown: value >> 58 & 1 != 0,
            ready_modes: (value >> 59 & 3) as u8,
        }
    }

    /// Encodes the property.
    ///
    /// # Panics
    /// If queue entries or page sizes are out of the range given in their documentation.
    pub const fn encode(&self) -> u64 {
        assert!(self.queue_entries_max >= 2 && self.queue_entries_max <= 65536);
        assert!(self.page_min_log2 >= 12 && self.page_min_log2 <= 27);
        assert!(self.page_max_log2 >= 12 && self.page_max_log2 <= 27);
        (self.queue_entries_max - 1) as u64
            | (self.contiguous_queues_required as u64) << 16
            | (self.arbitration as u64 & 3) << 17
            | (self.ready_timeout_500ms as u64) << 24
            | (self.doorbell_stride_log2 as u64 & 0xf) << 32
            | (self.subsystem_reset as u64) << 36
            | (self.nvm_command_set as u64) << 37
            | (self.io_command_sets as u64) << 43
            | (self.no_io_command_set as u64) << 44
            | (self.boot_partitions as u64) << 45
            | (self.page_min_log2 as u64 - 12) << 48
            | (self.page_max_log2 as u64 - 12) << 52
            | (self.persistent_memory as u64) << 56
            | (self.memory_buffer as u64) << 57
            | (self.subsystem_shutdown as u64) << 58
            | (self.ready_modes as u64 & 3) << 59
    }
}

/// Version (VS), and the version in Identify Controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NvmeVersion {
    /// Major version.
    pub major: u16,
    /// Minor version.
    pub minor: u8,
    /// Tertiary version.
    pub tertiary: u8,
}

impl NvmeVersion {
    /// A version from its parts.
    pub const fn new(major: u16, minor: u8, tertiary: u8) -> NvmeVersion {
        NvmeVersion { major, minor, tertiary }
    }

    /// Decodes the property.
    pub const fn decode(value: u32) -> NvmeVersion {
        NvmeVersion { major: (value >> 16) as u16, minor: (value >> 8) as u8, tertiary: value as u8 }
    }

    /// Encodes the property.
    pub const fn encode(self) -> u32 {
        (self.major as u32) << 16 | (self.minor as u32) << 8 | self.tertiary as u32
    }
}

wire_enum! {
    /// I/O command sets that CC.CSS selects.
    CommandSets: u8 {
        /// The NVM command set.
        Nvm = 0,
        /// All that are supported.
        All = 6,
        /// None: admin commands only.
        AdminOnly = 7,
    }
}

wire_enum! {
    /// Arbitration mechanism that CC.AMS selects.
    Arbitration: u8 {
        /// Round robin.
        RoundRobin = 0,
        /// Weighted round robin with urgent priority class.
        Weighted = 1,
        /// Vendor specific.
        Vendor = 7,
    }
}

wire_enum! {
    /// Shutdown that CC.SHN requests.
    ShutdownNotification: u8 {
        /// None.
        None = 0,
        /// Normal shutdown.
        Normal = 1,
        /// Abrupt shutdown.
        Abrupt = 2,
    }
}

wire_enum! {
    /// Shutdown progress in CSTS.SHST.
    ShutdownStatus: u8 {
        /// Normal operation.
        Normal = 0,
        /// Shutdown is in progress.
        Occurring = 1,
        /// Shutdown is complete.
        Complete = 2,
    }
}

/// Controller Configuration (CC).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerConfiguration {
    /// Enable (EN).
    pub enable: bool,
    /// I/O command sets selected (CSS).
    pub command_sets: CommandSets,
    /// Memory page size as a power of two in bytes: 12 to 27 (MPS).
    pub page_log2: u8,
    /// Arbitration mechanism selected (AMS).
    pub arbitration: Arbitration,
    /// Shutdown notification (SHN).
    pub shutdown: ShutdownNotification,
    /// I/O submission queue entry size as a power of two in bytes (IOSQES).
    pub sqe_log2: u8,
    /// I/O completion queue entry size as a power of two in bytes (IOCQES).
    pub cqe_log2: u8,
    /// Controller ready independent of media (CRIME).
    pub ready_independent_of_media: bool,
}

impl ControllerConfiguration {
    /// The value after a reset.
    pub const RESET: ControllerConfiguration = ControllerConfiguration {
        enable: false,
        command_sets: CommandSets::Nvm,
        page_log2: 12,
        arbitration: Arbitration::RoundRobin,
        shutdown: ShutdownNotification::None,
        sqe_log2: 0,
        cqe_log2: 0,
        ready_independent_of_media: false,
    };

    /// Decodes the property; reserved bits are ignored.
    ///
    /// # Errors
    /// Reserved values of CSS, AMS and SHN.
    pub fn decode(value: u32) -> Result<ControllerConfiguration, DecodeError> {
        let field = |low: u32, width: u32| (value >> low & ((1 << width) - 1)) as u8;
        let error = |what| DecodeError::value(what, offset::CC, value.into());
        Ok(ControllerConfiguration {
            enable: bit(value.into(), 0),
            command_sets: CommandSets::from_wire(field(4, 3)).ok_or(error("CC.CSS"))?,
            page_log2: field(7, 4) + 12,
            arbitration: Arbitration::from_wire(field(11, 3)).ok_or(error("CC.AMS"))?,
            shutdown: ShutdownNotification::from_wire(field(14, 2)).ok_or(error("CC.SHN"))?,
            sqe_log2: field(16, 4),
            cqe_log2: field(20, 4),
            ready_independent_of_media: bit(value.into(), 24),
        })
    }

    /// Encodes the property.
    ///
    /// # Panics
    /// If a size is out of the range given in its documentation.
    pub const fn encode(&self) -> u32 {
        assert!(self.page_log2 >= 12 && self.page_log2 <= 27);
        assert!(self.sqe_log2 <= 15 && self.cqe_log2 <= 15);
        self.enable as u32
            | (self.command_sets as u32) << 4
            | (self.page_log2 as u32 - 12) << 7
            | (self.arbitration as u32) << 11
            | (self.shutdown as u32) << 14
            | (self.sqe_log2 as u32) << 16
            | (self.cqe_log2 as u32) << 20
            | (self.ready_independent_of_media as u32) << 24
    }
}

/// Controller Status (CSTS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerStatus {
    /// Ready (RDY).
    pub ready: bool,
    /// Controller fatal status (CFS).
    pub fatal: bool,
    /// Shutdown status (SHST).
    pub shutdown: ShutdownStatus,
    /// An NVM subsystem reset occurred (NSSRO).
    pub subsystem_reset_occurred: bool,
    /// Processing paused (PP).
    pub paused: bool,
}

impl ControllerStatus {
    /// NVM Subsystem Reset Occurred (NSSRO) in the property, which a host clears by writing it.
    pub const NSSRO: u32 = 1 << 4;

    /// The value after a reset.
    pub const RESET: ControllerStatus = ControllerStatus {
        ready: false,
        fatal: false,
        shutdown: ShutdownStatus::Normal,
        subsystem_reset_occurred: false,
        paused: false,
    };

    /// Decodes the property; reserved bits are ignored.
    ///
    /// # Errors
    /// The reserved value of SHST.
    pub fn decode(value: u32) -> Result<ControllerStatus, DecodeError> {
        let shutdown = ShutdownStatus::from_wire((value >> 2 & 3) as u8);
        Ok(ControllerStatus {
            ready: bit(value.into(), 0),
            fatal: bit(value.into(), 1),
            shutdown: shutdown.ok_or(DecodeError::value("CSTS.SHST", offset::CSTS, value.into()))?,
            subsystem_reset_occurred: bit(value.into(), 4),
            paused: bit(value.into(), 5),
        })
    }

    /// Encodes the property.
    pub const fn encode(&self) -> u32 {
        self.ready as u32
            | (self.fatal as u32) << 1
            | (self.shutdown as u32) << 2
            | (self.subsystem_reset_occurred as u32) << Self::NSSRO.trailing_zeros()
            | (self.paused as u32) << 5
    }
}
