//! Get Features and Set Features (Base 2.0, sections 5.15 and 5.27).

use block_io::Status;
use wire_nvme::admin::{GetFeatures, SetFeatures};
use wire_nvme::feature::{
    AsyncEventConfiguration, FeatureCapabilities, FeatureId, HOST_BEHAVIOR_SIZE, HostBehavior,
    NumberOfQueues, Select, TemperatureThreshold,
};
use wire_nvme::identify::oncs;
use wire_nvme::{NSID_ALL, Sqe};

use super::log::{COMPOSITE_KELVINS_MAX, TEMPERATURE_KELVINS};
use super::{AdminResponse, AdminResult, Controller};
use crate::{ControllerLimits, INVALID_FIELD, Subsystem, SubsystemKind};

/// The current values of the features that a host can change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    arbitration: u32,
    temperature_over: u16,
    temperature_under: u16,
    error_recovery: u32,
    write_atomicity: u32,
    async_events: AsyncEventConfiguration,
    kato_ms: u32,
    queues: NumberOfQueues,
    host_behavior: HostBehavior,
    interrupt_coalescing: u32,
}

/// Coalescing Disable (Base 2.0, section 5.27.1.9).
const COALESCING_DISABLE: u32 = 1 << 16;

/// Whether a host can change a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Changeable {
    /// The host can set any valid value.
    Yes,
    /// The host can set only the current value.
    No,
}

/// The features that a controller supports (Base 2.0, section 3.1.2: feature support).
pub(super) fn supported_features(subsystem: &Subsystem, limits: &ControllerLimits) -> Vec<FeatureId> {
    let mut features = match subsystem.kind {
        SubsystemKind::Nvm => vec![
            FeatureId::Arbitration,
            FeatureId::PowerManagement,
            FeatureId::TemperatureThreshold,
            FeatureId::ErrorRecovery,
            FeatureId::VolatileWriteCache,
            FeatureId::NumberOfQueues,
            FeatureId::WriteAtomicity,
            FeatureId::AsyncEventConfiguration,
            FeatureId::KeepAliveTimer,
            FeatureId::HostBehavior,
            FeatureId::HostIdentifier,
            FeatureId::ReservationMask,
            FeatureId::ReservationPersistence,
        ],
        SubsystemKind::Discovery => vec![FeatureId::AsyncEventConfiguration, FeatureId::KeepAliveTimer],
    };
    if limits.memory_based {
        features.extend([FeatureId::InterruptCoalescing, FeatureId::InterruptVector]);
    }
    // The first requires a volatile write cache (Base 2.0, section 5.27.1).
    features.retain(|&feature| match feature {
        FeatureId::VolatileWriteCache => subsystem.has_volatile_cache(),
        FeatureId::ReservationMask | FeatureId::ReservationPersistence => {
            limits.has_optional(oncs::RESERVATIONS)
        }
        _ => true,
    });
    features
}

impl Features {
    pub(super) fn new(kato_ms: u32, limits: &ControllerLimits) -> Features {
        Features {
            arbitration: 0,
            temperature_over: COMPOSITE_KELVINS_MAX,
            temperature_under: 0,
            error_recovery: 0,
            write_atomicity: 0,
            async_events: AsyncEventConfiguration::default(),
            kato_ms,
            queues: NumberOfQueues {
                submission: limits.io_queues_max.into(),
                completion: limits.io_queues_max.into(),
            },
            host_behavior: HostBehavior::default(),
            interrupt_coalescing: 0,
        }
    }

    pub(super) fn async_events(&self) -> AsyncEventConfiguration {
        self.async_events
    }

    /// Whether a temperature is at or beyond a threshold (Base 2.0, section 5.27.1).
    pub(super) fn exceeds_threshold(&self, kelvins: u16) -> bool {
        kelvins >= self.temperature_over || kelvins <= self.temperature_under
    }

    pub(super) fn queues(&self) -> NumberOfQueues {
        self.queues
    }

    pub(super) fn kato_ms(&self) -> u32 {
        self.kato_ms
    }

    /// Host Behavior Support data (Base 2.0, section 5.27.1).
    fn host_behavior(&self) -> Vec<u8> {
        let mut data = [0; HOST_BEHAVIOR_SIZE];
        self.host_behavior.encode(&mut data);
        data.to_vec()
    }

    /// The value for dword 0 of the completion. `cdw11` selects the threshold or the interrupt vector.
    fn get(&self, feature: FeatureId, cdw11: u32, volatile_cache: bool) -> Result<u32, Status> {
        Ok(match feature {
            FeatureId::InterruptCoalescing => self.interrupt_coalescing,
            // Coalescing is always disabled for every vector.
            FeatureId::InterruptVector => cdw11 & 0xffff | COALESCING_DISABLE,
            FeatureId::Arbitration => self.arbitration,
            FeatureId::TemperatureThreshold => {
                let which = TemperatureThreshold::from_wire(cdw11).map_err(|_| INVALID_FIELD)?;
                let kelvins = match (which.sensor, which.under) {
                    (0, false) => self.temperature_over,
                    (0, true) => self.temperature_under,
                    // Only the composite temperature exists.
                    _ => return Err(INVALID_FIELD),
                };
                kelvins.into()
            }
            FeatureId::ErrorRecovery => self.error_recovery,
            FeatureId::VolatileWriteCache => volatile_cache.into(),
            FeatureId::NumberOfQueues => self.queues.to_wire(),
            FeatureId::WriteAtomicity => self.write_atomicity,
            FeatureId::AsyncEventConfiguration => self.async_events.bits(),
            FeatureId::KeepAliveTimer => self.kato_ms,
            // The defaults: no notification is masked and reservations do not persist.
            FeatureId::ReservationMask | FeatureId::ReservationPersistence => 0,
            // Power state 0 is the only one.
            FeatureId::PowerManagement => 0,
            _ => return Err(INVALID_FIELD),
        })
    }
}

fn changeable(feature: FeatureId, memory_based: bool) -> Changeable {
    match feature {
        // A memory-based transport has no Keep Alive command: the timer stays at 0.
        FeatureId::KeepAliveTimer if memory_based => Changeable::No,
        FeatureId::VolatileWriteCache => Changeable::No,
        FeatureId::HostIdentifier if !memory_based => Changeable::No,
        _ => Changeable::Yes,
    }
}

/// Whether a feature is namespace specific.
fn is_namespace_specific(feature: FeatureId) -> bool {
    matches!(
        feature,
        FeatureId::ErrorRecovery | FeatureId::ReservationMask | FeatureId::ReservationPersistence
    )
}

impl Controller {
    /// Checks that the interrupt vector exists.
    fn check_vector(&self, value: u32) -> Result<(), Status> {
        if value & 0xffff >= self.limits.interrupt_vectors.into() { Err(INVALID_FIELD) } else { Ok(()) }
    }

    fn supported_feature(&self, fid: u8) -> Result<FeatureId, Status> {
        let feature = FeatureId::from_wire(fid)
            .filter(|feature| supported_features(&self.view, &self.limits).contains(feature));
        feature.ok_or(INVALID_FIELD)
    }

    pub(super) fn get_features(&mut self, sqe: &Sqe) -> AdminResult {
        let command = GetFeatures::from_sqe(sqe);
        let feature = self.supported_feature(command.fid)?;
        let select = Select::from_wire(command.select).ok_or(INVALID_FIELD)?;
        if feature == FeatureId::HostIdentifier && select != Select::Supported {
            return self.respond_with_data(sqe, self.host_id(command.cdw11)?);
        }
        if feature == FeatureId::HostBehavior && select != Select::Supported {
            let is_current = select == Select::Current;
            let features = if is_current { self.features } else { Features::new(0, &self.limits) };
            return self.respond_with_data(sqe, features.host_behavior());
        }
        if feature == FeatureId::InterruptVector && select != Select::Supported {
            self.check_vector(command.cdw11)?;
        }
        if select == Select::Current {
            match feature {
                FeatureId::ReservationMask => {
                    return AdminResponse::with_result(self.reservation_mask(sqe.nsid)?.into());
                }
                FeatureId::ReservationPersistence => {
                    return AdminResponse::with_result(self.reservation_persistence(sqe.nsid)?.into());
                }
                _ => {}
            }
        }
        let cache = self.view.has_volatile_cache();
        let value = match select {
            Select::Current => self.features.get(feature, command.cdw11, cache)?,
            // No feature is saveable: the saved value is the default.
            Select::Default | Select::Saved => {
                Features::new(0, &self.limits).get(feature, command.cdw11, cache)?
            }
            Select::Supported => FeatureCapabilities {
                saveable: false,
                namespace_specific: is_namespace_specific(feature),
                changeable: changeable(feature, self.limits.memory_based) == Changeable::Yes,
            }
            .to_wire(),
        };
        AdminResponse::with_result(value.into())
    }

    pub(super) fn set_features(&mut self, sqe: &Sqe, data: &[u8]) -> AdminResult {
        let command = SetFeatures::from_sqe(sqe);
        let feature = self.supported_feature(command.fid)?;
        if command.save {
            return Err(Status::FEATURE_NOT_SAVEABLE.do_not_retry());
        }
        let namespace_specific = is_namespace_specific(feature);
        match sqe.nsid {
            0 | NSID_ALL => {}
            nsid if namespace_specific && self.view.namespace(nsid).is_some() => {}
            _ if namespace_specific => return Err(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry()),
            _ => return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.do_not_retry()),
        }
        let value = command.cdw11;
        match feature {
            FeatureId::Arbitration => self.features.arbitration = value,
            FeatureId::PowerManagement => {
                // Power state 0 is the only one. The workload hint is ignored.
                if value & 0x1f != 0 {
                    return Err(INVALID_FIELD);
                }
            }
            FeatureId::TemperatureThreshold => {
                let threshold = TemperatureThreshold::from_wire(value).map_err(|_| INVALID_FIELD)?;
                match (threshold.sensor, threshold.under) {
                    // 15 selects all sensors, and only the composite temperature exists.
                    (0 | 15, false) => self.features.temperature_over = threshold.kelvins,
                    (0 | 15, true) => self.features.temperature_under = threshold.kelvins,
                    _ => return Err(INVALID_FIELD),
                }
                self.events.set_temperature_exceeded(self.features.exceeds_threshold(TEMPERATURE_KELVINS));
            }
            FeatureId::ErrorRecovery => {
                // DULBE: no namespace reports deallocated blocks (NVM 1.0, section 4.1.3).
                if value & 1 << 16 != 0 {
                    return Err(INVALID_FIELD);
                }
                self.features.error_recovery = value & 0xffff;
            }
            FeatureId::VolatileWriteCache => {
                // The cache belongs to the block device and is always enabled.
                if value & 1 == 0 {
                    return Err(Status::FEATURE_NOT_CHANGEABLE.do_not_retry());
                }
            }
            FeatureId::NumberOfQueues => return self.set_number_of_queues(value),
            // Ignored: the transport already sends one interrupt per batch of completions.
            FeatureId::InterruptCoalescing => self.features.interrupt_coalescing = value & 0xffff,
            FeatureId::InterruptVector => self.check_vector(value)?,
            FeatureId::WriteAtomicity => self.features.write_atomicity = value & 1,
            FeatureId::AsyncEventConfiguration => {
                self.features.async_events = AsyncEventConfiguration::from_bits_retain(value)
            }
            FeatureId::KeepAliveTimer if self.limits.memory_based && value != 0 => {
                return Err(Status::FEATURE_NOT_CHANGEABLE.do_not_retry());
            }
            FeatureId::KeepAliveTimer => {
                self.features.kato_ms = value;
                self.set_kato(value);
            }
            FeatureId::HostBehavior => {
                let data = data.first_chunk::<HOST_BEHAVIOR_SIZE>();
                let data = data.ok_or(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())?;
                let behavior = HostBehavior::decode(data).map_err(|_| INVALID_FIELD)?;
                self.features.host_behavior = behavior;
                self.association().set_extended_formats(behavior.extended_formats);
                let has_delay = self.limits.retry_delays_100ms[0] != 0;
                self.association().set_retry_delay(behavior.command_retry && has_delay);
            }
            FeatureId::ReservationMask => return self.set_reservation_mask(sqe.nsid, value),
            FeatureId::ReservationPersistence => return self.set_reservation_persistence(sqe, value),
            FeatureId::HostIdentifier if self.limits.memory_based => return self.set_host_id(value, data),
            // Over fabrics the Connect command sets it (Base 2.0, section 5.27.1).
            FeatureId::HostIdentifier => return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
            _ => return Err(INVALID_FIELD),
        }
        AdminResponse::empty()
    }

    fn set_number_of_queues(&mut self, value: u32) -> AdminResult {
        let requested = NumberOfQueues::from_wire(value).map_err(|_| INVALID_FIELD)?;
        // The numbers are fixed once an I/O queue exists (Base 2.0, section 5.27.1).
        if !self.association().queues().is_empty() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        let max = self.limits.io_queues_max.into();
        let mut granted = NumberOfQueues {
            submission: requested.submission.min(max),
            completion: requested.completion.min(max),
        };
        if !self.limits.memory_based {
            // A fabrics I/O queue is a submission and a completion queue.
            let pairs = granted.submission.min(granted.completion);
            granted = NumberOfQueues { submission: pairs, completion: pairs };
        }
        self.features.queues = granted;
        self.association().set_queues_max(granted.submission as u16);
        AdminResponse::with_result(granted.to_wire().into())
    }
}
