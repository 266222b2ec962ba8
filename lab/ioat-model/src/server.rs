//! The server of a model: its socket, and the thread that executes it.

use std::io::{self, ErrorKind, IoSliceMut, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use sockets::{ReceivedDescriptors, UnixListenSocket, Wait, receive_with_descriptors};
use wire_vfio_user::Header;

use crate::IoatModel;
use crate::session::ClientSession;

/// Descriptors that are executed between two looks at the socket.
const STEP_DESCRIPTORS: u32 = 64;
/// Most bytes of a message: a version, or one access to a register.
const PAYLOAD_BYTES_MAX: usize = 64 << 10;
/// Descriptors of one message.
const DESCRIPTORS_MAX: usize = 1;
/// Permission bits of a socket: the model reads and writes the memory of its client.
const SOCKET_MODE: u32 = 0o600;
/// Clients that wait for another one to disconnect.
const BACKLOG: i32 = 16;
/// How long a client may take for the rest of a message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// A model behind a socket, for one client at a time; others wait for it to disconnect. Dropped, it removes
/// the socket.
pub struct IoatServer {
    /// Does not block.
    listener: UnixListener,
    socket: UnixListenSocket,
    model: IoatModel,
    stop: Arc<OwnedFd>,
}

/// Ends [`IoatServer::run`], on another thread.
#[derive(Clone, Debug)]
pub struct StopHandle(Arc<OwnedFd>);

impl StopHandle {
    /// Has it return soon.
    pub fn stop(&self) {
        // An eventfd that cannot be written is signalled already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// Why a client is no longer served.
enum End {
    Stopped,
    Disconnected,
}

impl IoatServer {
    /// Listens at `path`. A socket that a killed process has left there is replaced.
    ///
    /// # Errors
    /// Another process listens there, the file is not a socket, or the kernel's.
    pub fn bind(path: &Path, model: IoatModel) -> io::Result<IoatServer> {
        let socket = UnixListenSocket::bind(path, SOCKET_MODE, BACKLOG)?;
        let listener = UnixListener::from(socket.as_fd().try_clone_to_owned()?);
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(IoatServer { listener, socket, model, stop })
    }

    /// What ends [`run`](Self::run).
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(self.stop.clone())
    }

    /// Serves clients until it is stopped, and returns the model.
    ///
    /// # Errors
    /// The kernel's, if no client can be accepted any more.
    pub fn run(mut self) -> io::Result<IoatModel> {
        loop {
            let [stopped, connects] = wait([self.stop.as_fd(), self.listener.as_fd()], None)?;
            if stopped {
                return Ok(self.model.clone());
            }
            if !connects {
                continue;
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                // It has gone already.
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            };
            match self.serve(&stream) {
                Ok(End::Stopped) => return Ok(self.model.clone()),
                Ok(End::Disconnected) => {}
                Err(error) => log::warn!(target: "ioat-model", "{}: {error}", self.socket.path().display()),
            }
            self.model.power_on();
        }
    }

    fn serve(&mut self, stream: &UnixStream) -> io::Result<End> {
        stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
        let mut session = ClientSession::default();
        loop {
            let is_busy = self.model.step(STEP_DESCRIPTORS, &mut session.memory);
            let timeout = is_busy.then(Timespec::default);
            let [stopped, has_message] = wait([self.stop.as_fd(), stream.as_fd()], timeout.as_ref())?;
            if stopped {
                return Ok(End::Stopped);
            }
            if has_message && !self.answer(stream, &mut session)? {
                return Ok(End::Disconnected);
            }
        }
    }

    /// Handles one message; whether the client is there still.
    fn answer(&mut self, mut stream: &UnixStream, session: &mut ClientSession) -> io::Result<bool> {
        let violation = |reason: &str| io::Error::new(ErrorKind::InvalidData, reason);
        let mut descriptors = ReceivedDescriptors::new(DESCRIPTORS_MAX);
        let mut header = [0; Header::SIZE];
        if !receive(stream, &mut header, &mut descriptors)? {
            return Ok(false);
        }
        let header = Header::decode(&header).map_err(|error| violation(&error.to_string()))?;
        if header.payload_bytes() > PAYLOAD_BYTES_MAX {
            return Err(violation("a message is too long"));
        }
        let mut payload = vec![0; header.payload_bytes()];
        if !receive(stream, &mut payload, &mut descriptors)? {
            return Ok(false);
        }
        let reply = session.handle(&mut self.model, &header, &payload, descriptors.take());
        if let Some(reply) = reply.map_err(violation)? {
            stream.write_all(&reply)?;
        }
        Ok(true)
    }
}

/// Waits until one of the descriptors is readable, or the time is over.
fn wait<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    timeout: Option<&Timespec>,
) -> io::Result<[bool; N]> {
    let mut polled = descriptors.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
    match poll(&mut polled, timeout) {
        Ok(_) => Ok(polled.each_ref().map(|fd| !fd.revents().is_empty())),
        Err(rustix::io::Errno::INTR) => Ok([false; N]),
        Err(error) => Err(error.into()),
    }
}

/// Fills a buffer; whether the client did not disconnect.
fn receive(stream: &UnixStream, into: &mut [u8], descriptors: &mut ReceivedDescriptors) -> io::Result<bool> {
    let mut filled = 0;
    while filled < into.len() {
        let mut part = [IoSliceMut::new(&mut into[filled..])];
        match receive_with_descriptors(stream, &mut part, descriptors, Wait::Yes) {
            Ok(0) => return Ok(false),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_nobody_listens_on_is_replaced() {
        let folder = std::env::temp_dir().join(format!("ioat-model-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("ioat0");
        // As a killed process leaves it.
        drop(UnixListener::bind(&path).unwrap());
        let server = IoatServer::bind(&path, IoatModel::new()).unwrap();
        let error = IoatServer::bind(&path, IoatModel::new()).err().unwrap();
        assert!(error.to_string().contains("another process listens"), "{error}");
        drop(server);
        assert!(!path.exists());
        std::fs::write(&path, "data").unwrap();
        let error = IoatServer::bind(&path, IoatModel::new()).err().unwrap();
        assert!(error.to_string().contains("is not a socket"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
