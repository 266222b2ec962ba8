//! Asynchronous events: results of Asynchronous Event Request.

wire_enum! {
    /// Asynchronous event types (Base 2.0, section 5.2.1).
    EventType: u8 {
        /// Error status.
        Error = 0,
        /// SMART and health status.
        Health = 1,
        /// Notice.
        Notice = 2,
        /// Immediate: a normal NVM subsystem shutdown.
        Immediate = 3,
        /// I/O command set specific status.
        IoCommandSet = 6,
        /// Vendor specific.
        Vendor = 7,
    }
}

/// Result of an Asynchronous Event Request (Base 2.0, section 5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// Asynchronous Event Type.
    pub kind: EventType,
    /// Asynchronous Event Information: the event within its type.
    pub information: u8,
    /// Log Page Identifier of the associated log page; reading it clears the event.
    pub log_page: u8,
}

impl AsyncEvent {
    /// Write to Invalid Doorbell Register (error 00h); Error Information.
    pub const INVALID_DOORBELL: AsyncEvent =
        AsyncEvent { kind: EventType::Error, information: 0x00, log_page: 0x01 };
    /// Invalid Doorbell Write Value (error 01h); Error Information.
    pub const INVALID_DOORBELL_VALUE: AsyncEvent =
        AsyncEvent { kind: EventType::Error, information: 0x01, log_page: 0x01 };
    /// The composite temperature crossed a threshold (SMART and health 01h); SMART / Health Information.
    pub const TEMPERATURE: AsyncEvent =
        AsyncEvent { kind: EventType::Health, information: 0x01, log_page: 0x02 };
    /// Attached namespaces or their Identify data changed (notice 00h); Changed Namespace List.
    pub const NAMESPACE_CHANGED: AsyncEvent =
        AsyncEvent { kind: EventType::Notice, information: 0x00, log_page: 0x04 };
    /// An ANA group changed (notice 03h); Asymmetric Namespace Access.
    pub const ANA_CHANGED: AsyncEvent =
        AsyncEvent { kind: EventType::Notice, information: 0x03, log_page: 0x0c };
    /// The discovery log page changed (notice F0h); Discovery.
    pub const DISCOVERY_CHANGED: AsyncEvent =
        AsyncEvent { kind: EventType::Notice, information: 0xf0, log_page: 0x70 };

    /// Reservation Log Page Available (I/O command set 00h); Reservation Notification.
    pub const RESERVATION_LOG: AsyncEvent =
        AsyncEvent { kind: EventType::IoCommandSet, information: 0x00, log_page: 0x80 };

    /// The completion's result: dword 0.
    pub const fn to_result(self) -> u64 {
        self.kind as u64 | (self.information as u64) << 8 | (self.log_page as u64) << 16
    }

    /// Decodes the result of a completion; `None` for a reserved type.
    pub const fn from_result(result: u64) -> Option<AsyncEvent> {
        match EventType::from_wire((result & 7) as u8) {
            Some(kind) => {
                Some(AsyncEvent { kind, information: (result >> 8) as u8, log_page: (result >> 16) as u8 })
            }
            None => None,
        }
    }
}
