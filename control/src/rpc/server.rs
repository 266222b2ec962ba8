//! The RPC server: one thread accepts connections, each connection has a thread that reads it, and each call
//! that runs has one. None is a reactor.
//!
//! Calls of a connection start in the order in which they arrive. A short one ends before the next starts, so
//! that a client may send calls that depend on each other; one that takes longer keeps none waiting
//! ([`CALL_HEADSTART`]), and its response comes after those of later calls. Ids tell them apart.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::calls::ConnectionCalls;
use super::framing::{FrameError, FrameLimits, Framer};
use super::protocol;
use super::socket::ListenSocket;
use crate::{ControlPlane, RpcError};

/// Limit of open connections, as in SPDK. Beyond it, a new one waits until another ends or has been idle for
/// [`IDLE_MIN`], and replaces that one.
const CONNECTIONS_MAX: usize = 64;
/// How long a connection is safe from replacement after it was accepted, or after its last response: its
/// client is about to read or to call.
const IDLE_MIN: Duration = Duration::from_secs(1);
/// How long a client may leave its responses unread.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// A running server. Dropping it ends the connections after their current calls and stops listening.
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
    /// A connection has ended or become idle.
    changed: Condvar,
}

struct RpcConnection {
    /// A second handle of its socket, to shut it down.
    stream: UnixStream,
    /// It has sent something.
    has_called: bool,
    /// Since when it has had no call to execute; `None` while it has.
    idle_since: Option<Instant>,
}

impl RpcServer {
    /// Serves the methods of `plane` on `socket`.
    pub fn start(plane: Arc<ControlPlane>, socket: ListenSocket) -> io::Result<RpcServer> {
        let listener = socket.listener.try_clone()?;
        let shared = Arc::new(RpcServerShared {
            plane,
            stopping: AtomicBool::new(false),
            connections: Mutex::default(),
            changed: Condvar::new(),
        });
        let thread_shared = shared.clone();
        let acceptor = std::thread::Builder::new()
            .name("rpc-accept".to_string())
            .spawn(move || accept(&thread_shared, &socket))?;
        Ok(RpcServer { shared, listener, acceptor: Some(acceptor) })
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        let connections = self.shared.lock();
        self.shared.stopping.store(true, Ordering::Release);
        for connection in connections.values() {
            let _ = connection.stream.shutdown(Shutdown::Read);
        }
        drop(connections);
        self.shared.changed.notify_all();
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

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Adds a connection, if there are too many when another has ended or is replaced. Meanwhile those behind
    /// it wait in the socket's backlog. Returns `false` when the server stops.
    fn add(&self, number: u64, stream: UnixStream) -> bool {
        let mut connections = self.lock();
        while connections.len() >= CONNECTIONS_MAX {
            if self.is_stopping() {
                return false;
            }
            // The next to be replaced: of those that have never called, or else of all, the one that has been
            // idle for longest. Another is safe even if this one is not replaceable yet.
            let idle = connections
                .iter()
                .filter_map(|(number, one)| Some((one.has_called, one.idle_since?, *number)));
            let next = idle.min();
            let wait = next.map_or(IDLE_MIN, |(_, since, _)| IDLE_MIN.saturating_sub(since.elapsed()));
            if let (Some((.., number)), true) = (next, wait.is_zero()) {
                if let Some(replaced) = connections.remove(&number) {
                    let _ = replaced.stream.shutdown(Shutdown::Both);
                }
                continue;
            }
            connections = sync::wait_timeout(&self.changed, connections, wait);
        }
        let idle_since = Some(Instant::now());
        connections.insert(number, RpcConnection { stream, has_called: false, idle_since });
        !self.is_stopping()
    }

    fn remove(&self, number: u64) {
        self.lock().remove(&number);
        self.changed.notify_all();
    }

    /// Marks a connection as busy or idle. Returns `false` if it was replaced.
    fn set_busy(&self, number: u64, is_busy: bool) -> bool {
        let mut connections = self.lock();
        let Some(connection) = connections.get_mut(&number) else { return false };
        connection.has_called = true;
        connection.idle_since = (!is_busy).then(Instant::now);
        if !is_busy {
            self.changed.notify_all();
        }
        true
    }
}

fn accept(shared: &Arc<RpcServerShared>, socket: &ListenSocket) {
    for (number, stream) in (0u64..).zip(socket.listener.incoming()) {
        if shared.is_stopping() {
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
            return;
        }
        let thread_shared = shared.clone();
        let thread = std::thread::Builder::new().name("rpc".to_string());
        let spawned = thread.spawn(move || {
            // An error means that the peer has gone.
            let _ = serve_connection(&thread_shared, number, stream);
            thread_shared.remove(number);
        });
        if spawned.is_err() {
            shared.remove(number);
        }
    }
}

/// Starts calls in order until the peer closes the connection or sends what cannot be parsed; then waits for
/// those that run.
fn serve_connection(shared: &Arc<RpcServerShared>, number: u64, stream: UnixStream) -> io::Result<()> {
    let (for_calls, of_connection) = (shared.clone(), shared.clone());
    let calls = ConnectionCalls::new(
        stream.try_clone()?,
        Box::new(move |method, params| for_calls.plane.invoke(method, params)),
        Box::new(move |is_busy| of_connection.set_busy(number, is_busy)),
    );
    let result = read_calls(&calls, &stream);
    calls.finish();
    result
}

fn read_calls(calls: &Arc<ConnectionCalls>, mut stream: &UnixStream) -> io::Result<()> {
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
            if !calls.start(frame) {
                return Ok(());
            }
        }
        if let Some(frame_error) = frame_error {
            let reason = match frame_error {
                FrameError::Garbage => "Parse error",
                FrameError::TooLong => "Parse error: the request is longer than 1 MiB",
                FrameError::TooDeep => "Parse error: the request has more than 32 levels",
                FrameError::TooManyValues => "Parse error: the request has more than 131072 values",
            };
            let error = RpcError::new(RpcError::PARSE, reason);
            return calls.send(&protocol::line(&protocol::response(Value::Null, Err(error)))?);
        }
    }
}
