//! Persistent reservations (PTPL, Persist Through Power Loss): one JSON file per namespace, in SPDK's format.
//!
//! A file is replaced atomically: the new content is written to a temporary file, synced, and renamed over the
//! old one, so a crash leaves either the old or the new state. A separate thread does this, because the sync
//! would stall a reactor; the command that changed the reservation completes after the write.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};

use bdev::Uuid;
use nvme_controller::reservation::{
    ActiveReservation, PendingGuard, REGISTRANTS_MAX, Registration, ReservationState, ReservationStore,
};
use serde_json::{Value, json};
use wire_nvme::reservation::ReservationType;

/// Maximum bytes of a file: a registrant takes about a hundred.
const BYTES_MAX: u64 = 1024 + REGISTRANTS_MAX as u64 * 256;

/// A file that cannot be used for persistent reservations.
#[derive(Debug, thiserror::Error)]
pub enum PtplError {
    /// It cannot be read or written.
    #[error("{0}: {1}")]
    Io(PathBuf, std::io::Error),
    /// Its content is not a valid reservation state of the namespace's device.
    #[error("{0} does not hold reservations: {1}")]
    Content(PathBuf, String),
}

/// A file to write, and the guard that reports the result to the pending command.
struct PtplWriteJob {
    path: PathBuf,
    bytes: Vec<u8>,
    guard: PendingGuard,
}

/// Handle to the thread that writes the files one at a time. The thread ends when this handle and every
/// [`ReservationStore`] created by it are dropped.
#[derive(Clone)]
pub(crate) struct PtplWriter(Sender<PtplWriteJob>);

#[derive(Debug)]
struct PtplFileStore {
    path: PathBuf,
    device: Uuid,
    jobs: Sender<PtplWriteJob>,
}

impl std::fmt::Debug for PtplWriteJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("path", &self.path).finish_non_exhaustive()
    }
}

impl PtplWriter {
    pub(crate) fn start() -> std::io::Result<PtplWriter> {
        let (sender, jobs) = channel();
        std::thread::Builder::new().name("nvmf-ptpl".into()).spawn(move || run_writer(&jobs))?;
        Ok(PtplWriter(sender))
    }

    /// A store that persists the reservations of a namespace on this device in a file.
    pub(crate) fn store(&self, path: &Path, device: Uuid) -> Box<dyn ReservationStore> {
        Box::new(PtplFileStore { path: path.into(), device, jobs: self.0.clone() })
    }
}

fn run_writer(jobs: &Receiver<PtplWriteJob>) {
    for PtplWriteJob { path, bytes, guard } in jobs {
        match os::replace_file(&path, 0o666, &bytes) {
            Ok(()) => drop(guard),
            Err(error) => {
                log::error!(target: "nvmf", "cannot persist reservations: {}: {error}", path.display());
                guard.fail();
            }
        }
    }
}

impl ReservationStore for PtplFileStore {
    fn save(&self, state: &ReservationState, guard: PendingGuard) {
        let job = PtplWriteJob { path: self.path.clone(), bytes: encode(state, self.device), guard };
        if let Err(unsent) = self.jobs.send(job) {
            unsent.0.guard.fail();
        }
    }
}

pub(crate) fn encode(state: &ReservationState, device: Uuid) -> Vec<u8> {
    let uuid = |host: &[u8; 16]| Uuid::from_bytes(*host).to_string();
    let persisted = if state.persistent { state.clone() } else { ReservationState::default() };
    let key = persisted.reservation.and_then(|reservation| persisted.key_of(&reservation.holder));
    let registrants: Vec<Value> = persisted
        .registrations
        .iter()
        .map(|registration| json!({ "rkey": registration.key, "host_uuid": uuid(&registration.host) }))
        .collect();
    let content = json!({
        "ptpl": persisted.persistent,
        "rtype": persisted.reservation.map_or(0, |reservation| reservation.kind.to_wire()),
        "crkey": key.unwrap_or(0),
        "bdev_uuid": device.to_string(),
        "holder_uuid": persisted.reservation.map(|reservation| uuid(&reservation.holder)).unwrap_or_default(),
        "registrants": registrants,
    });
    let mut bytes = content.to_string().into_bytes();
    bytes.push(b'\n');
    bytes
}

/// Loads the persistent reservations of a namespace on this device; the empty state if there is no file.
pub(crate) fn load(path: &Path, device: Uuid) -> Result<ReservationState, PtplError> {
    let io = |error| PtplError::Io(path.into(), error);
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(ReservationState::default()),
        Err(error) => return Err(io(error)),
    };
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
    decode(&bytes, device).map_err(|what| PtplError::Content(path.into(), what))
}

/// Decodes a file written by [`encode`] or by SPDK.
fn decode(bytes: &[u8], device: Uuid) -> Result<ReservationState, String> {
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!("it is longer than {BYTES_MAX} bytes"));
    }
    let content: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let known = ["ptpl", "rtype", "crkey", "bdev_uuid", "holder_uuid", "registrants"];
    let object = content.as_object().ok_or("it is not an object")?;
    if let Some(other) = object.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(format!("unknown field '{other}'"));
    }
    let file_device = uuid(&content["bdev_uuid"]).ok_or("bdev_uuid is not a UUID")?;
    if file_device != device {
        return Err(format!("they belong to device {file_device}, not to {device}"));
    }
    let list = content["registrants"].as_array().ok_or("registrants is not a list")?;
    // Fields that are optional in SPDK's format default to zero.
    let number = |name: &str| match &content[name] {
        Value::Null => Ok(0),
        value => value.as_u64().ok_or(format!("{name} is not a number")),
    };
    match &content["ptpl"] {
        Value::Bool(true) => {}
        Value::Bool(false) | Value::Null => return Ok(ReservationState::default()),
        _ => return Err("ptpl is neither true nor false".into()),
    }
    let mut registrations = Vec::new();
    for entry in list {
        let host = uuid(&entry["host_uuid"]).ok_or("host_uuid of a registrant is not a UUID")?;
        let key = entry["rkey"].as_u64().ok_or("rkey of a registrant is not a number")?;
        registrations.push(Registration { host: *host.as_bytes(), key });
    }
    let (kind, key) = (number("rtype")?, number("crkey")?);
    let reservation = match u8::try_from(kind).ok().and_then(ReservationType::from_wire) {
        None if kind == 0 => None,
        None => return Err(format!("rtype {kind} is not a reservation type")),
        Some(kind) => {
            let explicit = uuid(&content["holder_uuid"]).map(|uuid| *uuid.as_bytes());
            // SPDK writes no holder for the types of which every registrant is a holder.
            let all_registrants_hold =
                matches!(kind, ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll);
            let first =
                registrations.first().map(|registration| registration.host).filter(|_| all_registrants_hold);
            let holder = explicit.or(first).ok_or("the reservation has no holder")?;
            Some(ActiveReservation { kind, holder })
        }
    };
    let state = ReservationState { generation: 0, reservation, registrations, persistent: true };
    if !state.is_valid() {
        return Err("a registrant is listed twice or has no key, or the holder is not a registrant".into());
    }
    match reservation {
        Some(reservation)
            if state.key_of(&reservation.holder) != Some(key)
                && !state.registrations.iter().any(|registration| registration.key == key) =>
        {
            Err("crkey is not the key of a registrant".into())
        }
        _ => Ok(state),
    }
}

fn uuid(value: &Value) -> Option<Uuid> {
    Uuid::parse_str(value.as_str()?).ok()
}

#[cfg(test)]
mod tests;
