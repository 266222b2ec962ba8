//! Files of persistent reservations (PTPL, Persist Through Power Loss): one for each block device.
//!
//! A file is replaced atomically: the new content is written to a temporary file, synced, and renamed over the
//! old one, so a crash leaves either the old or the new state. A separate thread does this, because the sync
//! would stall a reactor; the command that changed the reservation completes after the write.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};

use bdev::Uuid;
use reservations::{
    FILE_BYTES_MAX, ReservationState, ReservationStore, SaveCompletion, decode_file, encode_file,
};

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

/// A file to write, and the save that it completes.
struct PtplWriteJob {
    path: PathBuf,
    bytes: Vec<u8>,
    completion: SaveCompletion,
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
    for PtplWriteJob { path, bytes, completion } in jobs {
        let written = os::replace_file(&path, 0o666, &bytes);
        if let Err(error) = &written {
            log::error!(target: "nvmf", "cannot persist reservations: {}: {error}", path.display());
        }
        completion.finish(written.is_ok());
    }
}

impl ReservationStore for PtplFileStore {
    fn save(&self, state: &ReservationState, completion: SaveCompletion) {
        let job =
            PtplWriteJob { path: self.path.clone(), bytes: encode_file(state, self.device), completion };
        // A job that is not sent is dropped, which fails the save.
        let _ = self.jobs.send(job);
    }
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
    file.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
    decode_file(&bytes, device).map_err(|what| PtplError::Content(path.into(), what))
}

#[cfg(test)]
mod tests;
