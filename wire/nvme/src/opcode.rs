//! Opcodes by command set.
//!
//! Bits 1:0 of an opcode give the direction of the data transfer (Base 2.0, section 3.3.3.1).

wire_enum! {
    /// Admin commands (Base 2.0, section 5).
    AdminOpcode: u8 {
        /// Delete I/O Submission Queue; memory-based transports only.
        DeleteIoSq = 0x00,
        /// Create I/O Submission Queue; memory-based transports only.
        CreateIoSq = 0x01,
        /// Get Log Page.
        GetLogPage = 0x02,
        /// Delete I/O Completion Queue; memory-based transports only.
        DeleteIoCq = 0x04,
        /// Create I/O Completion Queue; memory-based transports only.
        CreateIoCq = 0x05,
        /// Identify.
        Identify = 0x06,
        /// Abort.
        Abort = 0x08,
        /// Set Features.
        SetFeatures = 0x09,
        /// Get Features.
        GetFeatures = 0x0a,
        /// Asynchronous Event Request.
        AsyncEventRequest = 0x0c,
        /// Namespace Management.
        NamespaceManagement = 0x0d,
        /// Firmware Commit.
        FirmwareCommit = 0x10,
        /// Firmware Image Download.
        FirmwareDownload = 0x11,
        /// Device Self-test.
        DeviceSelfTest = 0x14,
        /// Namespace Attachment.
        NamespaceAttachment = 0x15,
        /// Keep Alive.
        KeepAlive = 0x18,
        /// Directive Send.
        DirectiveSend = 0x19,
        /// Directive Receive.
        DirectiveReceive = 0x1a,
        /// Virtualization Management.
        VirtualizationManagement = 0x1c,
        /// NVMe-MI Send.
        MiSend = 0x1d,
        /// NVMe-MI Receive.
        MiReceive = 0x1e,
        /// Doorbell Buffer Config.
        DoorbellBufferConfig = 0x7c,
        /// Fabrics commands; the type is in byte 4.
        Fabrics = 0x7f,
        /// Format NVM.
        FormatNvm = 0x80,
        /// Security Send.
        SecuritySend = 0x81,
        /// Security Receive.
        SecurityReceive = 0x82,
        /// Sanitize.
        Sanitize = 0x84,
        /// Get LBA Status.
        GetLbaStatus = 0x86,
    }
}

wire_enum! {
    /// I/O commands of the NVM command set (NVM 1.0, section 3; Base 2.0, section 7).
    NvmOpcode: u8 {
        /// Flush.
        Flush = 0x00,
        /// Write.
        Write = 0x01,
        /// Read.
        Read = 0x02,
        /// Write Uncorrectable.
        WriteUncorrectable = 0x04,
        /// Compare.
        Compare = 0x05,
        /// Write Zeroes.
        WriteZeroes = 0x08,
        /// Dataset Management.
        DatasetManagement = 0x09,
        /// Verify.
        Verify = 0x0c,
        /// Reservation Register.
        ReservationRegister = 0x0d,
        /// Reservation Report.
        ReservationReport = 0x0e,
        /// Reservation Acquire.
        ReservationAcquire = 0x11,
        /// Reservation Release.
        ReservationRelease = 0x15,
        /// Copy.
        Copy = 0x19,
        /// Fabrics commands; the type is in byte 4.
        Fabrics = 0x7f,
    }
}

wire_enum! {
    /// I/O commands that the Zoned Namespace command set adds to the NVM command set (ZNS 1.1, section 3).
    ZonedOpcode: u8 {
        /// Zone Management Send.
        ManagementSend = 0x79,
        /// Zone Management Receive.
        ManagementReceive = 0x7a,
        /// Zone Append.
        Append = 0x7d,
    }
}

wire_enum! {
    /// Fabrics command types (Base 2.0, section 6), in byte 4 of a command with opcode 7Fh.
    FabricsType: u8 {
        /// Property Set.
        PropertySet = 0x00,
        /// Connect.
        Connect = 0x01,
        /// Property Get.
        PropertyGet = 0x04,
        /// Authentication Send.
        AuthenticationSend = 0x05,
        /// Authentication Receive.
        AuthenticationReceive = 0x06,
        /// Disconnect.
        Disconnect = 0x08,
    }
}

/// The opcode that all fabrics commands share.
pub const FABRICS: u8 = 0x7f;
