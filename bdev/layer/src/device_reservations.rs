//! The reservations of registered devices: one state and at most one file a device, whatever exports it.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reactor::blocking;
use reservations::{
    FILE_BYTES_MAX, ReservationState, ReservationStore, Reservations, SaveCompletion, decode_file,
    encode_file,
};
use uuid::Uuid;

use crate::BlockDevice;

/// How long [`Registry::open_reservations`](crate::Registry::open_reservations) waits for a file.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// The reservations of a device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenReservationsError {
    /// The file cannot be read or written.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    /// The file's content is not a valid state of the device.
    #[error("{0} does not hold reservations: {1}")]
    Content(PathBuf, String),
    /// The file is used for another device, or the device is in use with another file or none.
    #[error("{0}")]
    InUse(String),
}

/// The use of a device's [`Reservations`]. The state is dropped with the last lease; what persists is in the
/// file.
#[derive(Debug)]
pub struct ReservationLease {
    reservations: Arc<Reservations>,
    device: Uuid,
    table: Arc<ReservationTable>,
}

/// The first part of [`Registry::prepare_reservations`](crate::Registry::prepare_reservations): the
/// reservations of a device with a file are open already; those of others are opened at the end. The default
/// has no file.
#[derive(Debug, Default)]
pub struct PreparedReservations {
    pub(crate) has_file: bool,
    pub(crate) lease: Option<ReservationLease>,
}

/// The reservations of devices that are in use, by the device's UUID.
///
/// One thread writes all files: a sync would stall a reactor, and an order of reads and writes is what keeps
/// a state that is opened again the one that was written last. The table's lock is not held while a file is
/// accessed.
#[derive(Debug, Default)]
pub(crate) struct ReservationTable(Mutex<TableState>);

#[derive(Debug, Default)]
struct TableState {
    devices: HashMap<Uuid, DeviceEntry>,
    /// Of the thread that accesses files; it ends when this and every store are dropped.
    jobs: Option<Sender<ReservationFileJob>>,
}

#[derive(Debug)]
struct DeviceEntry {
    path: Option<PathBuf>,
    /// `None` while the file is read.
    reservations: Option<Arc<Reservations>>,
    leases: usize,
}

#[derive(Debug)]
enum ReservationFileJob {
    /// Reads a file, or starts with an empty state, and writes it, so that an unusable file is an error now
    /// and not at the first reservation.
    Open(PathBuf, Uuid, SyncSender<Result<ReservationState, OpenReservationsError>>),
    /// Replaces the content of a file.
    Save(PathBuf, Vec<u8>, SaveCompletion),
}

/// The file of a device.
#[derive(Debug)]
struct ReservationFile {
    path: PathBuf,
    device: Uuid,
    jobs: Sender<ReservationFileJob>,
}

impl ReservationStore for ReservationFile {
    fn save(&self, state: &ReservationState, completion: SaveCompletion) {
        // A job that is not sent is dropped, which fails the save.
        let bytes = encode_file(state, self.device);
        let _ = self.jobs.send(ReservationFileJob::Save(self.path.clone(), bytes, completion));
    }
}

impl ReservationLease {
    /// The reservations.
    pub fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    /// UUID of the device.
    pub fn device(&self) -> Uuid {
        self.device
    }
}

impl Drop for ReservationLease {
    fn drop(&mut self) {
        let mut _devices = Vec::new();
        let mut table = sync::lock(&self.table.0);
        if let Some(entry) = table.devices.get_mut(&self.device) {
            entry.leases -= 1;
            if entry.leases == 0 {
                // Before the next user opens the reservations.
                _devices = self.reservations.close();
                table.devices.remove(&self.device);
            }
        }
    }
}

impl ReservationTable {
    /// Has a device that is registered obey reservations that are open for its UUID.
    pub(crate) fn attach(&self, device: &Arc<BlockDevice>) {
        let table = sync::lock(&self.0);
        let open = table.devices.get(&device.uuid()).and_then(|entry| entry.reservations.as_ref());
        if let Some(reservations) = open {
            reservations.attach_device(device);
        }
    }

    /// See [`Registry::open_reservations`](crate::Registry::open_reservations).
    pub(crate) fn open(
        self: &Arc<Self>,
        device: Uuid,
        path: Option<&Path>,
    ) -> Result<ReservationLease, OpenReservationsError> {
        let jobs = {
            let mut table = sync::lock(&self.0);
            if let Some(entry) = table.devices.get_mut(&device) {
                let reservations = entry.share(device, path)?;
                return Ok(ReservationLease { reservations, device, table: self.clone() });
            }
            let Some(path) = path else {
                let reservations = Arc::<Reservations>::default();
                let entry = DeviceEntry { path: None, reservations: Some(reservations.clone()), leases: 1 };
                table.devices.insert(device, entry);
                return Ok(ReservationLease { reservations, device, table: self.clone() });
            };
            if let Some((other, _)) =
                table.devices.iter().find(|(_, entry)| entry.path.as_deref() == Some(path))
            {
                let message = format!("{} holds the reservations of device {other}", path.display());
                return Err(OpenReservationsError::InUse(message));
            }
            let jobs = table.file_jobs().map_err(|error| OpenReservationsError::Io(path.into(), error))?;
            let entry = DeviceEntry { path: Some(path.into()), reservations: None, leases: 1 };
            table.devices.insert(device, entry);
            jobs
        };
        let path = path.unwrap_or(Path::new(""));
        let opened = open_file(path, device, jobs);
        let mut table = sync::lock(&self.0);
        match (opened, table.devices.get_mut(&device)) {
            (Ok(reservations), Some(entry)) => {
                let reservations = entry.reservations.insert(Arc::new(reservations)).clone();
                Ok(ReservationLease { reservations, device, table: self.clone() })
            }
            (opened, _) => {
                table.devices.remove(&device);
                let gone = || OpenReservationsError::InUse(format!("device {device} was closed meanwhile"));
                Err(opened.err().unwrap_or_else(gone))
            }
        }
    }
}

/// Has the thread open a file, and waits for it.
fn open_file(
    path: &Path,
    device: Uuid,
    jobs: Sender<ReservationFileJob>,
) -> Result<Reservations, OpenReservationsError> {
    let (reply, opened) = sync_channel(1);
    let unavailable = |kind| OpenReservationsError::Io(path.into(), io::Error::from(kind));
    let job = ReservationFileJob::Open(path.into(), device, reply);
    jobs.send(job).map_err(|_| unavailable(io::ErrorKind::BrokenPipe))?;
    let opened = blocking::receive_timeout(&opened, OPEN_TIMEOUT);
    let state = opened.map_err(|_| unavailable(io::ErrorKind::TimedOut))??;
    let file = ReservationFile { path: path.into(), device, jobs };
    Ok(Reservations::new(state, Some(Box::new(file))))
}

impl DeviceEntry {
    /// One more lease.
    fn share(
        &mut self,
        device: Uuid,
        path: Option<&Path>,
    ) -> Result<Arc<Reservations>, OpenReservationsError> {
        let in_use = |message| Err(OpenReservationsError::InUse(message));
        let Some(reservations) = &self.reservations else {
            return in_use(format!("the reservations of device {device} are being opened"));
        };
        match (&self.path, path) {
            (_, None) => {}
            (Some(own), Some(path)) if own == path => {}
            (own, Some(path)) => {
                let own = own.as_deref().map_or("memory".into(), Path::to_string_lossy);
                let path = path.display();
                return in_use(format!("{path}: the reservations of device {device} are in {own}"));
            }
        }
        self.leases += 1;
        Ok(reservations.clone())
    }
}

impl TableState {
    /// The jobs of the thread that accesses files; starts it on first use.
    fn file_jobs(&mut self) -> io::Result<Sender<ReservationFileJob>> {
        if let Some(jobs) = &self.jobs {
            return Ok(jobs.clone());
        }
        let (sender, jobs): (Sender<ReservationFileJob>, Receiver<ReservationFileJob>) = channel();
        blocking::spawn_worker("reservations", jobs, run_job)?;
        Ok(self.jobs.insert(sender).clone())
    }
}

fn run_job(job: ReservationFileJob) {
    match job {
        ReservationFileJob::Open(path, device, reply) => {
            // The requester may have given up.
            let _ = reply.send(read_and_write(&path, device));
        }
        ReservationFileJob::Save(path, bytes, completion) => {
            let written = os::replace_file(&path, 0o666, &bytes);
            if let Err(error) = &written {
                log::error!(target: "bdev", "cannot persist reservations: {}: {error}", path.display());
            }
            completion.finish(written.is_ok());
        }
    }
}

fn read_and_write(path: &Path, device: Uuid) -> Result<ReservationState, OpenReservationsError> {
    let failed = |error| OpenReservationsError::Io(path.into(), error);
    let state = match control::files::read_regular(path, FILE_BYTES_MAX as u64) {
        Ok(bytes) => {
            decode_file(&bytes, device).map_err(|what| OpenReservationsError::Content(path.into(), what))?
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => ReservationState::default(),
        Err(error) => return Err(failed(error)),
    };
    os::replace_file(path, 0o666, &encode_file(&state, device)).map_err(failed)?;
    Ok(state)
}
