//! The format of the file that the reservations of a device are saved in: SPDK's JSON, with fields of our own for
//! SCSI registrants. `docs/formats/reservations.md` describes it.

#[cfg(test)]
mod tests;

use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::{
    ActiveReservation, REGISTRANTS_MAX, Registrant, Registration, ReservationState, ReservationType,
};

/// Maximum bytes of a file: a SCSI registrant has two names of at most 256 bytes, of which some are escaped.
pub const FILE_BYTES_MAX: usize = 1024 + REGISTRANTS_MAX * 1280;

const FIELDS: [&str; 7] =
    ["ptpl", "rtype", "crkey", "bdev_uuid", "holder_uuid", "holder_index", "registrants"];

/// Encodes the state of a device. One that is not persistent is encoded without registrants.
pub fn encode_file(state: &ReservationState, device: Uuid) -> Vec<u8> {
    let empty = ReservationState::default();
    let state = if state.persistent { state } else { &empty };
    let holder = state.reservation.as_ref().map(|held| &held.holder);
    let key = holder.and_then(|holder| state.key_of(holder));
    let mut content = json!({
        "ptpl": state.persistent,
        "rtype": state.reservation.as_ref().map_or(0, |held| type_to_number(held.kind)),
        "crkey": key.unwrap_or(0),
        "bdev_uuid": device.to_string(),
        "holder_uuid": holder.and_then(host_uuid).unwrap_or_default(),
        "registrants": state.registrations.iter().map(encode_registration).collect::<Vec<Value>>(),
    });
    if let Some(holder) = holder.filter(|holder| holder.scsi_ports().is_some()) {
        content["holder_index"] = json!(state.registrations.iter().position(|one| one.registrant == *holder));
    }
    let mut bytes = content.to_string().into_bytes();
    bytes.push(b'\n');
    bytes
}

fn encode_registration(registration: &Registration) -> Value {
    let key = registration.key;
    match registration.registrant.scsi_ports() {
        Some((initiator, target)) => {
            json!({ "rkey": key, "initiator_port": initiator, "target_port": target })
        }
        None => json!({ "rkey": key, "host_uuid": host_uuid(&registration.registrant) }),
    }
}

fn host_uuid(registrant: &Registrant) -> Option<String> {
    registrant.nvme_host_id().map(|id| Uuid::from_bytes(id).to_string())
}

/// Decodes a file of a device that [`encode_file`] or SPDK wrote.
///
/// # Errors
/// What is wrong with the content, on one line.
pub fn decode_file(bytes: &[u8], device: Uuid) -> Result<ReservationState, String> {
    if bytes.len() > FILE_BYTES_MAX {
        return Err(format!("it is longer than {FILE_BYTES_MAX} bytes"));
    }
    let content: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let object = content.as_object().ok_or("it is not an object")?;
    if let Some(other) = object.keys().find(|name| !FIELDS.contains(&name.as_str())) {
        return Err(format!("unknown field '{other}'"));
    }
    let file_device = uuid(&content["bdev_uuid"]).ok_or("bdev_uuid is not a UUID")?;
    if file_device != device {
        return Err(format!("they belong to device {file_device}, not to {device}"));
    }
    let list = content["registrants"].as_array().ok_or("registrants is not a list")?;
    match &content["ptpl"] {
        Value::Bool(true) => {}
        Value::Bool(false) | Value::Null => return Ok(ReservationState::default()),
        _ => return Err("ptpl is neither true nor false".into()),
    }
    let registrations = list.iter().map(decode_registration).collect::<Result<Vec<_>, String>>()?;
    let reservation = decode_reservation(object, &registrations)?;
    let state = ReservationState { generation: 0, reservation, registrations, persistent: true };
    if !state.is_valid() {
        return Err("a registrant is listed twice or has no key, or the holder is not a registrant".into());
    }
    Ok(state)
}

fn decode_registration(entry: &Value) -> Result<Registration, String> {
    let key = entry["rkey"].as_u64().ok_or("rkey of a registrant is not a number")?;
    let registrant = match (&entry["initiator_port"], &entry["target_port"]) {
        (Value::Null, Value::Null) => {
            let host = uuid(&entry["host_uuid"]).ok_or("host_uuid of a registrant is not a UUID")?;
            Registrant::nvme_host(*host.as_bytes())
        }
        (initiator, target) => {
            let names = initiator.as_str().zip(target.as_str());
            let (initiator, target) = names.ok_or("a port of a registrant is not a name")?;
            Registrant::scsi_nexus(initiator, target).map_err(|error| error.to_string())?
        }
    };
    Ok(Registration { registrant, key })
}

fn decode_reservation(
    object: &Map<String, Value>,
    registrations: &[Registration],
) -> Result<Option<ActiveReservation>, String> {
    let (number, key) = (number(object, "rtype")?.unwrap_or(0), number(object, "crkey")?.unwrap_or(0));
    if number == 0 {
        return Ok(None);
    }
    let kind = type_from_number(number).ok_or(format!("rtype {number} is not a reservation type"))?;
    let explicit = match self::number(object, "holder_index")? {
        Some(index) => {
            let found = usize::try_from(index).ok().and_then(|index| registrations.get(index));
            Some(found.ok_or("holder_index is not the index of a registrant")?.registrant.clone())
        }
        None => object.get("holder_uuid").and_then(uuid).map(|id| Registrant::nvme_host(*id.as_bytes())),
    };
    // SPDK writes no holder for the types of which every registrant is a holder.
    let first = registrations.first().filter(|_| kind.is_all_registrants()).map(|one| one.registrant.clone());
    let holder = explicit.or(first).ok_or("the reservation has no holder")?;
    if !registrations.iter().any(|one| one.key == key) {
        return Err("crkey is not the key of a registrant".into());
    }
    Ok(Some(ActiveReservation { kind, holder }))
}

/// A number. Fields that are optional in SPDK's format may be absent.
fn number(object: &Map<String, Value>, name: &str) -> Result<Option<u64>, String> {
    match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or(format!("{name} is not a number")),
    }
}

fn uuid(value: &Value) -> Option<Uuid> {
    Uuid::parse_str(value.as_str()?).ok()
}

/// NVMe's number of a type.
fn type_to_number(kind: ReservationType) -> u8 {
    match kind {
        ReservationType::WriteExclusive => 1,
        ReservationType::ExclusiveAccess => 2,
        ReservationType::WriteExclusiveRegistrants => 3,
        ReservationType::ExclusiveAccessRegistrants => 4,
        ReservationType::WriteExclusiveAll => 5,
        ReservationType::ExclusiveAccessAll => 6,
    }
}

fn type_from_number(number: u64) -> Option<ReservationType> {
    ReservationType::ALL.into_iter().find(|kind| u64::from(type_to_number(*kind)) == number)
}
