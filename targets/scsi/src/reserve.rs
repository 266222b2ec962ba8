//! PERSISTENT RESERVE IN and OUT, on the reservations of the device.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use reservations::{PendingChange, ReservationCommand, ReservationError, ReservationState, ReservationType};
use wire_scsi::reserve::{
    FullStatus, PersistentType, ReserveCapabilities, ReserveOutList, TransportId, action_in, action_out,
    encode_full_status, encode_keys, encode_reservation,
};
use wire_scsi::{AdditionalSense, ScsiStatus, Sense, SenseKey};

use crate::nexus::UnitNexus;
use crate::operation::{Answer, Operation, OperationContext, OperationEvent, Progress, bytes_of};
use crate::response::{Failure, check};

fn type_to_wire(kind: ReservationType) -> PersistentType {
    match kind {
        ReservationType::WriteExclusive => PersistentType::WriteExclusive,
        ReservationType::ExclusiveAccess => PersistentType::ExclusiveAccess,
        ReservationType::WriteExclusiveRegistrants => PersistentType::WriteExclusiveRegistrants,
        ReservationType::ExclusiveAccessRegistrants => PersistentType::ExclusiveAccessRegistrants,
        ReservationType::WriteExclusiveAll => PersistentType::WriteExclusiveAll,
        ReservationType::ExclusiveAccessAll => PersistentType::ExclusiveAccessAll,
    }
}

fn type_from_wire(code: u8) -> Option<ReservationType> {
    let kind = PersistentType::from_wire(code)?;
    ReservationType::ALL.into_iter().find(|one| type_to_wire(*one) == kind)
}

/// Answers PERSISTENT RESERVE IN.
pub(crate) fn read(nexus: &UnitNexus, action: u8, allocation: u32) -> Result<Answer, Failure> {
    if nexus.unit().is_reserved() {
        return Err((ScsiStatus::ReservationConflict, None));
    }
    let reservations = nexus.unit().reservations();
    let state = reservations.state();
    let data = match action {
        action_in::READ_KEYS => {
            encode_keys(state.generation, state.registrations.iter().map(|registration| registration.key))
        }
        action_in::READ_RESERVATION => encode_reservation(state.generation, reservation_of(&state)),
        action_in::REPORT_CAPABILITIES => {
            let capabilities = ReserveCapabilities {
                can_persist: reservations.can_persist(),
                persists: state.persistent,
                ..ReserveCapabilities::default()
            };
            capabilities.encode().to_vec()
        }
        action_in::READ_FULL_STATUS => full_status(nexus, &state),
        _ => return Err(check(Sense::invalid_field(1, Some(4)))),
    };
    Ok(Answer::data(data, allocation))
}

/// The key of the reservation's holder, or 0 if every registrant is one, and the type.
fn reservation_of(state: &ReservationState) -> Option<(u64, PersistentType)> {
    let held = state.reservation.as_ref()?;
    let key = if held.kind.is_all_registrants() { None } else { state.key_of(&held.holder) };
    Some((key.unwrap_or(0), type_to_wire(held.kind)))
}

fn full_status(nexus: &UnitNexus, state: &ReservationState) -> Vec<u8> {
    let registrants: Vec<FullStatus> = state
        .registrations
        .iter()
        .map(|one| {
            let is_holder = state.is_holder(&one.registrant);
            let held = state.reservation.as_ref().filter(|_| is_holder);
            let ports = one.registrant.scsi_ports();
            let own_port = ports.is_some_and(|(_, target)| target == nexus.ports().target);
            FullStatus {
                key: one.key,
                all_target_ports: false,
                held: held.map(|held| type_to_wire(held.kind)),
                relative_port: if own_port { nexus.ports().relative_port } else { 0 },
                // An NVMe host has no TransportID.
                transport_id: ports
                    .map_or(Vec::new(), |(initiator, _)| TransportId::IscsiPort(initiator).encode()),
            }
        })
        .collect();
    encode_full_status(state.generation, &registrants)
}

/// PERSISTENT RESERVE OUT: receives its parameter list, and changes the reservations, which may have to be saved.
#[derive(Debug)]
pub(crate) struct ReserveOut {
    action: u8,
    kind: u8,
    parameter_bytes: u32,
    change: Option<Arc<PendingChange>>,
}

impl ReserveOut {
    pub(crate) fn new(action: u8, scope: u8, kind: u8, parameter_bytes: u32) -> Result<ReserveOut, Failure> {
        if action > action_out::REGISTER_AND_IGNORE_EXISTING_KEY {
            return Err(check(Sense::invalid_field(1, Some(4))));
        }
        let has_type = matches!(
            action,
            action_out::RESERVE | action_out::RELEASE | action_out::PREEMPT | action_out::PREEMPT_AND_ABORT
        );
        if has_type && (scope != 0 || type_from_wire(kind).is_none()) {
            return Err(check(Sense::invalid_field(2, None)));
        }
        Ok(ReserveOut { action, kind, parameter_bytes, change: None })
    }

    /// What the list asks for; `None` for nothing.
    fn command(&self, list: &[u8], nexus: &UnitNexus) -> Result<Option<ReservationCommand>, Failure> {
        // The two kinds of reservations exclude each other (SPC-2, section 5.5.1).
        if nexus.unit().is_reserved() {
            return Err((ScsiStatus::ReservationConflict, None));
        }
        let decoded = ReserveOutList::decode(list);
        let decoded =
            decoded.map_err(|_| check(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR)))?;
        if decoded.names_ports {
            return Err(check(Sense::invalid_parameter(20, Some(3))));
        }
        if decoded.all_target_ports {
            return Err(check(Sense::invalid_parameter(20, Some(2))));
        }
        if list.len() != ReserveOutList::BYTES {
            return Err(check(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR)));
        }
        let ReserveOutList { key, action_key, persists, .. } = decoded;
        let kind = type_from_wire(self.kind).unwrap_or(ReservationType::WriteExclusive);
        Ok(Some(match self.action {
            action_out::REGISTER => return register(nexus, Some(key), action_key, persists),
            action_out::REGISTER_AND_IGNORE_EXISTING_KEY => {
                return register(nexus, None, action_key, persists);
            }
            action_out::RESERVE => ReservationCommand::Acquire { key, kind },
            action_out::RELEASE => ReservationCommand::Release { key, kind },
            action_out::CLEAR => ReservationCommand::Clear { key },
            _ => {
                let abort = self.action == action_out::PREEMPT_AND_ABORT;
                ReservationCommand::Preempt { key, victim: action_key, kind, abort }
            }
        }))
    }

    fn answer(&self) -> Answer {
        Answer { data_out_bytes: self.parameter_bytes.into(), ..Answer::good() }
    }

    fn outcome(&self) -> Progress {
        match self.change.as_ref().map(|change| change.outcome()) {
            Some(None) => Progress::Pending,
            Some(Some(Err(error))) => Progress::Done(Err(failure_of(error))),
            Some(Some(Ok(()))) | None => Progress::Done(Ok(self.answer())),
        }
    }
}

/// What a registration asks for (SPC-4, section 5.13.7, table 53). If another connection of the nexus registers
/// meanwhile, the keys do not match.
fn register(
    nexus: &UnitNexus,
    key: Option<u64>,
    new_key: u64,
    persists: bool,
) -> Result<Option<ReservationCommand>, Failure> {
    let persist = Some(persists);
    let is_registered = nexus.unit().reservations().state().key_of(nexus.registrant()).is_some();
    Ok(Some(match (is_registered, key) {
        (false, Some(key)) if key != 0 => return Err((ScsiStatus::ReservationConflict, None)),
        // It is not registered, and does not want to be.
        (false, _) if new_key == 0 => return Ok(None),
        (false, Some(_)) => ReservationCommand::Register { key: new_key, persist },
        (_, expected) if new_key == 0 => ReservationCommand::Unregister { expected, persist },
        (_, expected) => ReservationCommand::Replace { expected, key: new_key, persist },
    }))
}

fn failure_of(error: ReservationError) -> Failure {
    check(match error {
        ReservationError::Conflict => return (ScsiStatus::ReservationConflict, None),
        ReservationError::Busy => return (ScsiStatus::Busy, None),
        ReservationError::ZeroKey => Sense::invalid_parameter(8, None),
        ReservationError::WrongType => Sense::illegal(AdditionalSense::INVALID_RELEASE),
        ReservationError::TooManyRegistrants => {
            Sense::illegal(AdditionalSense::INSUFFICIENT_REGISTRATION_RESOURCES)
        }
        ReservationError::CannotPersist => Sense::invalid_parameter(20, Some(0)),
        ReservationError::NotSaved => {
            Sense::new(SenseKey::HardwareError, AdditionalSense::INTERNAL_TARGET_FAILURE)
        }
        ReservationError::NotDrained => Sense::new(SenseKey::AbortedCommand, AdditionalSense::NONE),
    })
}

impl Operation for ReserveOut {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => match self.command(&bytes_of(&data), context.nexus) {
                Ok(Some(command)) => {
                    let reservations = context.nexus.unit().reservations();
                    let waker = context.waker.clone();
                    self.change = Some(reservations.execute(context.nexus.registrant(), command, waker));
                    self.outcome()
                }
                Ok(None) => Progress::Done(Ok(self.answer())),
                Err(failure) => Progress::Done(Err(failure)),
            },
            OperationEvent::Start => {
                if self.parameter_bytes < ReserveOutList::BYTES as u32 {
                    let additional = AdditionalSense::PARAMETER_LIST_LENGTH_ERROR;
                    return Progress::Done(Err(check(Sense::illegal(additional))));
                }
                Progress::parameters(self.parameter_bytes, context)
            }
            _ => self.outcome(),
        }
    }
}
