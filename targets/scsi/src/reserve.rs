//! PERSISTENT RESERVE IN and OUT, on the reservations of the device.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use reservations::{
    PendingChange, REGISTRANTS_MAX, Registrant, ReservationCommand, ReservationError, ReservationState,
    ReservationType,
};
use wire_scsi::inquiry::ProtocolId;
use wire_scsi::reserve::{
    FullStatus, PersistentType, ReserveCapabilities, ReserveMoveList, ReserveOutList, TransportId, action_in,
    action_out, encode_full_status, encode_keys, encode_reservation, transport_ids,
};
use wire_scsi::{AdditionalSense, ScsiStatus, Sense, SenseKey};

use crate::nexus::{NexusPorts, UnitNexus};
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
                names_ports: nexus.ports().protocol == ProtocolId::Iscsi,
                all_target_ports: true,
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
            let relative_port = ports.and_then(|(_, target)| nexus.unit().ports().relative_of(target));
            let own_port = ports.is_some_and(|(_, target)| target == nexus.ports().target);
            let own_port = own_port.then_some(nexus.ports().relative_port);
            FullStatus {
                key: one.key,
                all_target_ports: false,
                held: held.map(|held| type_to_wire(held.kind)),
                relative_port: own_port.or(relative_port).unwrap_or(0),
                // An NVMe host has no TransportID.
                transport_id: ports.map_or(Vec::new(), |(initiator, target)| transport_id(initiator, target)),
            }
        })
        .collect();
    encode_full_status(state.generation, &registrants)
}

/// The TransportID of an initiator port, of the protocol that the names of the ports are of.
fn transport_id(initiator: &str, target: &str) -> Vec<u8> {
    if target.contains(ISCSI_TARGET_PORT) {
        TransportId::IscsiPort(initiator).encode()
    } else {
        TransportId::SrpPort(srp_identifier(initiator)).encode()
    }
}

/// The identifier of an SRP port that has a name: the name, or its start and a hash if it is longer.
fn srp_identifier(name: &str) -> [u8; 16] {
    let mut identifier = [0; 16];
    let bytes = name.as_bytes();
    if let Some(place) = identifier.get_mut(..bytes.len()) {
        place.copy_from_slice(bytes);
        return identifier;
    }
    // FNV-1a.
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    identifier[..8].copy_from_slice(&bytes[..8]);
    identifier[8..].copy_from_slice(&hash.to_be_bytes());
    identifier
}

/// What the name of an iSCSI target port has between the target's name and the portal group tag.
const ISCSI_TARGET_PORT: &str = ",t,0x";
/// The same of an initiator port.
const ISCSI_INITIATOR_PORT: &str = ",i,0x";

/// The initiator port at the start of a list, as sessions name theirs, and the rest. Devices without a port are refused:
/// registrants are ports.
fn initiator_port(list: &[u8]) -> Result<(String, &[u8]), Failure> {
    let invalid = check(Sense::illegal(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST));
    let (id, rest) = TransportId::decode(list).map_err(|_| invalid)?;
    let TransportId::IscsiPort(name) = id else { return Err(invalid) };
    let (device, isid) = name.split_once(ISCSI_INITIATOR_PORT).ok_or(invalid)?;
    let isid = u64::from_str_radix(isid, 16).ok().filter(|isid| *isid < 1 << 48).ok_or(invalid)?;
    Ok((NexusPorts::iscsi_initiator(device, isid), rest))
}

/// The initiator ports of a list with SPEC_I_PT.
fn initiator_ports(list: &[u8]) -> Result<Vec<String>, Failure> {
    let cut = |_| check(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
    let mut rest = transport_ids(list).map_err(cut)?;
    let mut ports = Vec::new();
    while !rest.is_empty() {
        let (port, following) = initiator_port(rest)?;
        ports.push(port);
        rest = following;
    }
    Ok(ports)
}

/// A change of reservations, with the nexuses that it concerns beside the one of the command.
type PlannedChange = (ReservationCommand, Vec<Registrant>);

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
        if action > action_out::REGISTER_AND_MOVE {
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
    fn command(&self, list: &[u8], nexus: &UnitNexus) -> Result<Option<PlannedChange>, Failure> {
        // The two kinds of reservations exclude each other (SPC-2, section 5.5.1).
        if nexus.unit().is_reserved() {
            return Err((ScsiStatus::ReservationConflict, None));
        }
        if self.action == action_out::REGISTER_AND_MOVE {
            return move_reservation(nexus, list).map(Some);
        }
        let cut = check(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
        let decoded = ReserveOutList::decode(list).map_err(|_| cut)?;
        if !decoded.names_ports && list.len() != ReserveOutList::BYTES {
            return Err(cut);
        }
        let others = self.others(&decoded, list, nexus)?;
        let ReserveOutList { key, action_key, persists, .. } = decoded;
        let kind = type_from_wire(self.kind).unwrap_or(ReservationType::WriteExclusive);
        let command = match self.action {
            action_out::REGISTER | action_out::REGISTER_AND_IGNORE_EXISTING_KEY => {
                let key = (self.action == action_out::REGISTER).then_some(key);
                let command = register(nexus, key, action_key, persists)?;
                return Ok(command.map(|command| (command, others)));
            }
            action_out::RESERVE => ReservationCommand::Acquire { key, kind },
            action_out::RELEASE => ReservationCommand::Release { key, kind },
            action_out::CLEAR => ReservationCommand::Clear { key },
            _ => {
                let abort = self.action == action_out::PREEMPT_AND_ABORT;
                ReservationCommand::Preempt { key, victim: action_key, kind, abort }
            }
        };
        Ok(Some((command, others)))
    }

    /// The nexuses that a registration concerns beside its own: of the initiator ports that SPEC_I_PT names, at all
    /// target ports with ALL_TG_PT (SPC-4, section 5.13.7).
    fn others(
        &self,
        decoded: &ReserveOutList,
        list: &[u8],
        nexus: &UnitNexus,
    ) -> Result<Vec<Registrant>, Failure> {
        let registers =
            matches!(self.action, action_out::REGISTER | action_out::REGISTER_AND_IGNORE_EXISTING_KEY);
        let own = nexus.ports();
        let mut initiators = vec![own.initiator.clone()];
        if decoded.names_ports {
            let is_registered = nexus.unit().reservations().state().key_of(nexus.registrant()).is_some();
            if self.action != action_out::REGISTER || is_registered || own.protocol != ProtocolId::Iscsi {
                return Err(check(Sense::invalid_parameter(20, Some(3))));
            }
            initiators.extend(initiator_ports(list)?);
        }
        let mut targets = vec![own.target.clone()];
        if decoded.all_target_ports && registers {
            targets.extend(nexus.unit().ports().names());
        }
        if initiators.len() * targets.len() > 2 * REGISTRANTS_MAX {
            return Err(failure_of(ReservationError::TooManyRegistrants));
        }
        let mut others: Vec<Registrant> = Vec::new();
        for (initiator, target) in
            initiators.iter().flat_map(|one| targets.iter().map(move |port| (one, port)))
        {
            let registrant = Registrant::scsi_nexus(initiator, target);
            let registrant = registrant
                .map_err(|_| check(Sense::illegal(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST)))?;
            if registrant != *nexus.registrant() && !others.contains(&registrant) {
                others.push(registrant);
            }
        }
        Ok(others)
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

/// What a REGISTER AND MOVE asks for (SPC-4, section 5.13.8).
fn move_reservation(nexus: &UnitNexus, list: &[u8]) -> Result<PlannedChange, Failure> {
    let cut = check(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
    let ReserveMoveList { key, new_key, unregister, persists, relative_port, transport_id } =
        ReserveMoveList::decode(list).map_err(|_| cut)?;
    if nexus.ports().protocol != ProtocolId::Iscsi {
        return Err(check(Sense::invalid_parameter(24, None)));
    }
    let target = nexus.unit().ports().name_of(relative_port);
    let own = (relative_port == nexus.ports().relative_port).then(|| nexus.ports().target.clone());
    let target = own.or(target).ok_or(check(Sense::invalid_parameter(18, None)))?;
    let (initiator, rest) = initiator_port(transport_id)?;
    if !rest.is_empty() {
        return Err(cut);
    }
    let to = Registrant::scsi_nexus(&initiator, &target);
    let to =
        to.ok().filter(|to| to != nexus.registrant()).ok_or(check(Sense::invalid_parameter(24, None)))?;
    let command = ReservationCommand::Move { key, new_key, unregister, persist: Some(persists) };
    Ok((command, vec![to]))
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
                Ok(Some((command, others))) => {
                    let reservations = context.nexus.unit().reservations();
                    let (registrant, waker) = (context.nexus.registrant(), context.waker.clone());
                    self.change = Some(reservations.execute_with(registrant, others, command, waker));
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
