//! Log pages (Base 2.0, section 5.16.1).

mod ana;
mod discovery;
mod effects;
mod extended_discovery;
mod health;
mod persistent_event;
mod reservation;

pub use ana::{AnaGroup, AnaLog, AnaState};
pub use discovery::{
    AddressFamily, DiscoveryEntry, DiscoveryHeader, SecureChannel, SubsystemType, TransportAddress,
    TransportType,
};
pub use effects::{
    CommandEffects, CommandEffectsLog, FeatureEffects, FeatureEffectsLog, SupportedLogPage, SupportedLogPages,
};
pub use extended_discovery::{ExtendedDiscoveryEntry, discovery_option};
pub use health::{ErrorEntry, FirmwareSlots, HealthLog};
pub use persistent_event::{
    ChangeNamespace, ControllerReset, PersistentEvent, PersistentEventHeader, PersistentEventType,
    SetFeature, event_timestamp, persistent_event_action,
};
pub use reservation::{NotificationType, ReservationNotification};

wire_enum! {
    /// Log page identifiers.
    LogId: u8 {
        /// Supported Log Pages.
        SupportedLogPages = 0x00,
        /// Error Information.
        ErrorInformation = 0x01,
        /// SMART / Health Information.
        Health = 0x02,
        /// Firmware Slot Information.
        FirmwareSlot = 0x03,
        /// Changed Namespace List.
        ChangedNamespaces = 0x04,
        /// Commands Supported and Effects.
        CommandEffects = 0x05,
        /// Device Self-test.
        DeviceSelfTest = 0x06,
        /// Telemetry Host-Initiated.
        TelemetryHost = 0x07,
        /// Telemetry Controller-Initiated.
        TelemetryController = 0x08,
        /// Endurance Group Information.
        EnduranceGroup = 0x09,
        /// Predictable Latency Per NVM Set.
        PredictableLatency = 0x0a,
        /// Predictable Latency Event Aggregate.
        PredictableLatencyEvents = 0x0b,
        /// Asymmetric Namespace Access.
        Ana = 0x0c,
        /// Persistent Event Log.
        PersistentEvents = 0x0d,
        /// LBA Status Information.
        LbaStatus = 0x0e,
        /// Endurance Group Event Aggregate.
        EnduranceGroupEvents = 0x0f,
        /// Feature Identifiers Supported and Effects.
        FeatureEffects = 0x12,
        /// NVMe-MI Commands Supported and Effects.
        MiEffects = 0x13,
        /// Command and Feature Lockdown.
        Lockdown = 0x14,
        /// Boot Partition.
        BootPartition = 0x15,
        /// Discovery.
        Discovery = 0x70,
        /// Reservation Notification.
        ReservationNotification = 0x80,
        /// Sanitize Status.
        SanitizeStatus = 0x81,
    }
}
