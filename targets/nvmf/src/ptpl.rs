//! Reservations that survive a power loss: a file for each namespace, in the form that SPDK keeps them in.
//!
//! A file is replaced as a whole: the new one is written beside it, synced, and renamed over it, so that whenever
//! the target is killed there is either what was or what is. That is done by a thread, as a reactor would stand
//! still for as long as a medium takes; the command that changed something is answered afterwards.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};

use bdev::Uuid;
use controller::reservation::{Held, Keeper, REGISTRANTS_MAX, Registration, State, Ticket};
use serde_json::{Value, json};
use wire_nvme::reservation::ReservationType;

/// Most bytes of a file: a registrant takes about a hundred.
const BYTES_MAX: u64 = 1024 + REGISTRANTS_MAX as u64 * 256;

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum PtplError {
    /// It cannot be read or written.
    #[error("{0}: {1}")]
    Io(PathBuf, std::io::Error),
    /// It is not what it should be.
    #[error("{0} does not hold reservations: {1}")]
    Content(PathBuf, String),
}

/// A file to write, and whom to tell.
struct Job {
    path: PathBuf,
    bytes: Vec<u8>,
    ticket: Ticket,
}

/// Writes files, one after the other, until it is dropped and with it every [`Keeper`] that it made.
#[derive(Clone)]
pub(crate) struct Writer(Sender<Job>);

#[derive(Debug)]
struct FileKeeper {
    path: PathBuf,
    device: Uuid,
    jobs: Sender<Job>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Writer {
    pub(crate) fn start() -> std::io::Result<Writer> {
        let (jobs, todo) = channel();
        std::thread::Builder::new().name("nvmf-ptpl".into()).spawn(move || write_all(&todo))?;
        Ok(Writer(jobs))
    }

    /// What keeps the reservations of a namespace on this device in a file.
    pub(crate) fn keeper(&self, path: &Path, device: Uuid) -> Box<dyn Keeper> {
        Box::new(FileKeeper { path: path.into(), device, jobs: self.0.clone() })
    }
}

fn write_all(todo: &Receiver<Job>) {
    for Job { path, bytes, ticket } in todo {
        match sys::replace_file(&path, &bytes) {
            Ok(()) => drop(ticket),
            Err(error) => {
                eprintln!("nvmf: reservations are not kept: {}: {error}", path.display());
                ticket.fail();
            }
        }
    }
}

impl Keeper for FileKeeper {
    fn keep(&self, state: &State, ticket: Ticket) {
        let job = Job { path: self.path.clone(), bytes: encode(state, self.device), ticket };
        if let Err(unsent) = self.jobs.send(job) {
            unsent.0.ticket.fail();
        }
    }
}

pub(crate) fn encode(state: &State, device: Uuid) -> Vec<u8> {
    let uuid = |host: &[u8; 16]| Uuid::from_bytes(*host).to_string();
    let kept = if state.persistent { state.clone() } else { State::default() };
    let key = kept.held.and_then(|held| kept.key_of(&held.holder));
    let registrants: Vec<Value> = kept
        .registrations
        .iter()
        .map(|one| json!({ "rkey": one.key, "host_uuid": uuid(&one.host) }))
        .collect();
    let content = json!({
        "ptpl": kept.persistent,
        "rtype": kept.held.map_or(0, |held| held.kind.to_wire()),
        "crkey": key.unwrap_or(0),
        "bdev_uuid": device.to_string(),
        "holder_uuid": kept.held.map(|held| uuid(&held.holder)).unwrap_or_default(),
        "registrants": registrants,
    });
    let mut bytes = content.to_string().into_bytes();
    bytes.push(b'\n');
    bytes
}

/// Reads what was kept of a namespace on this device; nothing where there is no file.
pub(crate) fn load(path: &Path, device: Uuid) -> Result<State, PtplError> {
    let io = |error| PtplError::Io(path.into(), error);
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(State::default()),
        Err(error) => return Err(io(error)),
    };
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
    decode(&bytes, device).map_err(|what| PtplError::Content(path.into(), what))
}

/// Reads what [`encode`] or SPDK wrote.
fn decode(bytes: &[u8], device: Uuid) -> Result<State, String> {
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!("it is longer than {BYTES_MAX} bytes"));
    }
    let content: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let known = ["ptpl", "rtype", "crkey", "bdev_uuid", "holder_uuid", "registrants"];
    let object = content.as_object().ok_or("it is not an object")?;
    if let Some(other) = object.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(format!("'{other}' means nothing"));
    }
    let of = uuid(&content["bdev_uuid"]).ok_or("bdev_uuid is not a UUID")?;
    if of != device {
        return Err(format!("they are those of device {of}, and this is {device}"));
    }
    let list = content["registrants"].as_array().ok_or("registrants is not a list")?;
    // What is optional in SPDK's form counts as zero.
    let number = |name: &str| match &content[name] {
        Value::Null => Ok(0),
        value => value.as_u64().ok_or(format!("{name} is not a number")),
    };
    match &content["ptpl"] {
        Value::Bool(true) => {}
        Value::Bool(false) | Value::Null => return Ok(State::default()),
        _ => return Err("ptpl is neither true nor false".into()),
    }
    let mut registrations = Vec::new();
    for entry in list {
        let host = uuid(&entry["host_uuid"]).ok_or("host_uuid of a registrant is not a UUID")?;
        let key = entry["rkey"].as_u64().ok_or("rkey of a registrant is not a number")?;
        registrations.push(Registration { host: *host.as_bytes(), key });
    }
    let (kind, key) = (number("rtype")?, number("crkey")?);
    let held = match u8::try_from(kind).ok().and_then(ReservationType::from_wire) {
        None if kind == 0 => None,
        None => return Err(format!("there is no type {kind} of reservation")),
        Some(kind) => {
            let named = uuid(&content["holder_uuid"]).map(|uuid| *uuid.as_bytes());
            // SPDK names no holder where every registrant is one.
            let is_for_all =
                matches!(kind, ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll);
            let first = registrations.first().map(|one| one.host).filter(|_| is_for_all);
            let holder = named.or(first).ok_or("nobody holds the reservation")?;
            Some(Held { kind, holder })
        }
    };
    let state = State { generation: 0, held, registrations, persistent: true };
    if !state.is_sound() {
        return Err("a registrant is there twice, has no key, or the holder is none".into());
    }
    match held {
        Some(held)
            if state.key_of(&held.holder) != Some(key)
                && !state.registrations.iter().any(|one| one.key == key) =>
        {
            Err("crkey is nobody's key".into())
        }
        _ => Ok(state),
    }
}

fn uuid(value: &Value) -> Option<Uuid> {
    Uuid::parse_str(value.as_str()?).ok()
}

#[cfg(test)]
mod tests;
