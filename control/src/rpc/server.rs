//! The RPC server: one thread accepts connections, and each connection has a thread. None is a reactor.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::framing::{FrameError, FrameLimits, Framer};
use super::protocol;
use super::socket::ListenSocket;
use crate::{ControlPlane, RpcError};

/// Limit of open connections, as in SPDK. Beyond it, a new one replaces the one that has been idle for longest.
const CONNECTIONS_MAX: usize = 64;
/// How long a client may leave its responses unread.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// A running server. Dropping it ends the connections after their current call and stops listening.
pub struct RpcServer {
    shared: Arc<RpcServerShared>,
    /// A second handle of the listening socket, to shut it down.
    listener: UnixListener,
    acceptor: Option<JoinHandle<()>>,
}

struct RpcServerShared {
    plane: Arc<ControlPlane>,
    stopping: AtomicBool,
    connections: Mutex<BTreeMap<u64, RpcConnection>>,
}

struct RpcConnection {
    /// A second handle of its socket, to shut it down.
    stream: UnixStream,
    /// Since when it has had no call to execute; `None` while it has.
    idle_since: Option<Instant>,
}

impl RpcServer {
    /// Serves the methods of `plane` on `socket`.
    pub fn start(plane: Arc<ControlPlane>, socket: ListenSocket) -> io::Result<RpcServer> {
        let listener = socket.listener.try_clone()?;
        let connections = Mutex::new(BTreeMap::new());
        let shared = Arc::new(RpcServerShared { plane, stopping: AtomicBool::new(false), connections });
        let thread_shared = shared.clone();
        let acceptor = std::thread::Builder::new()
            .name("rpc-accept".to_string())
            .spawn(move || accept(&thread_shared, &socket))?;
        Ok(RpcServer { shared, listener, acceptor: Some(acceptor) })
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        for connection in self.shared.lock().values() {
            let _ = connection.stream.shutdown(Shutdown::Read);
        }
        // Wakes the acceptor, which blocks in accept, also if the socket's file is gone.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

impl RpcServerShared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, RpcConnection>> {
        sync::lock(&self.connections)
    }

    /// Adds a connection; if there are too many, in place of the one that has been idle for longest. Returns
    /// `false` if none is idle.
    fn add(&self, number: u64, stream: UnixStream) -> bool {
        let mut connections = self.lock();
        if connections.len() >= CONNECTIONS_MAX {
            let idle = connections.iter().filter_map(|(number, one)| Some((one.idle_since?, *number)));
            let Some((_, oldest)) = idle.min() else { return false };
            if let Some(replaced) = connections.remove(&oldest) {
                let _ = replaced.stream.shutdown(Shutdown::Both);
            }
        }
        connections.insert(number, RpcConnection { stream, idle_since: Some(Instant::now()) });
        true
    }

    /// Marks a connection as busy or idle. Returns `false` if it was replaced.
    fn set_busy(&self, number: u64, is_busy: bool) -> bool {
        let mut connections = self.lock();
        let Some(connection) = connections.get_mut(&number) else { return false };
        connection.idle_since = (!is_busy).then(Instant::now);
        true
    }
}

fn accept(shared: &Arc<RpcServerShared>, socket: &ListenSocket) {
    for (number, stream) in (0u64..).zip(socket.listener.incoming()) {
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else {
            // Usually out of file descriptors; retried until some are closed.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        let (Ok(handle), Ok(())) = (stream.try_clone(), stream.set_write_timeout(Some(SEND_TIMEOUT))) else {
            continue;
        };
        if !shared.add(number, handle) {
            let error =
                RpcError::internal(format!("{CONNECTIONS_MAX} connections execute calls; try again later"));
            let _ = protocol::line(&protocol::response(Value::Null, Err(error)))
                .and_then(|line| (&stream).write_all(&line));
            continue;
        }
        let thread_shared = shared.clone();
        let thread = std::thread::Builder::new().name("rpc".to_string());
        let spawned = thread.spawn(move || {
            // An error means that the peer has gone.
            let _ = serve_connection(&thread_shared, number, &stream);
            thread_shared.lock().remove(&number);
        });
        if spawned.is_err() {
            shared.lock().remove(&number);
        }
    }
}

/// Executes calls in order until the peer closes the connection or sends what cannot be parsed.
fn serve_connection(shared: &RpcServerShared, number: u64, mut stream: &UnixStream) -> io::Result<()> {
    let mut framer = Framer::new(FrameLimits::REQUEST);
    let mut bytes = vec![0; 64 << 10];
    loop {
        let count = match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let frame_error = framer.push(&bytes[..count]).err();
        while let Some(frame) = framer.next() {
            if !shared.set_busy(number, true) {
                return Ok(());
            }
            let mut invoke = |method: &str, params| shared.plane.invoke(method, params);
            let is_json = protocol::handle_frame(&frame, &mut invoke, &mut |text| stream.write_all(text))?;
            if !is_json || !shared.set_busy(number, false) {
                return Ok(());
            }
        }
        if let Some(frame_error) = frame_error {
            let reason = match frame_error {
                FrameError::Garbage => "Parse error",
                FrameError::TooLong => "Parse error: the request is too long",
                FrameError::TooComplex => "Parse error: the request has too many values",
            };
            let error = RpcError::new(RpcError::PARSE, reason);
            return stream.write_all(&protocol::line(&protocol::response(Value::Null, Err(error)))?);
        }
    }
}
