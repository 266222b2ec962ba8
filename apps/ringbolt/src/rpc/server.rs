//! The RPC server: one thread that accepts, one a connection, none of them a reactor.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde_json::Value;

use super::framing::{FrameError, Framer};
use super::protocol::{self, RpcError};
use super::socket::ListenSocket;
use crate::state::App;

/// Connections at a time: SPDK's limit is 64 too.
const CONNECTIONS_MAX: usize = 64;

/// A server that runs until it is dropped.
pub(crate) struct Server {
    shared: Arc<Shared>,
    path: PathBuf,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    app: Arc<App>,
    stopping: AtomicBool,
    /// The other end of each connection's stream, to end it.
    connections: Mutex<BTreeMap<u64, UnixStream>>,
}

impl Server {
    /// Serves `app` on `socket`.
    pub(crate) fn start(app: Arc<App>, socket: ListenSocket) -> io::Result<Server> {
        let path = socket.path().to_path_buf();
        let connections = Mutex::new(BTreeMap::new());
        let shared = Arc::new(Shared { app, stopping: AtomicBool::new(false), connections });
        let mine = shared.clone();
        let acceptor = std::thread::Builder::new()
            .name("rpc-accept".to_string())
            .spawn(move || accept(&mine, &socket))?;
        Ok(Server { shared, path, acceptor: Some(acceptor) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        for stream in self.shared.lock().values() {
            let _ = stream.shutdown(Shutdown::Read);
        }
        // The acceptor waits for a connection; this is one.
        let _ = UnixStream::connect(&self.path);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, UnixStream>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn accept(shared: &Arc<Shared>, socket: &ListenSocket) {
    for (number, stream) in (0u64..).zip(socket.listener.incoming()) {
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else {
            // Out of descriptors, as a rule; others may close theirs.
            std::thread::sleep(std::time::Duration::from_millis(50));
            continue;
        };
        if shared.lock().len() >= CONNECTIONS_MAX {
            let error =
                RpcError::internal(format!("{CONNECTIONS_MAX} connections are open; try again later"));
            let _ = send(&stream, &protocol::response(Value::Null, Err(error)));
            continue;
        }
        let Ok(other_end) = stream.try_clone() else { continue };
        shared.lock().insert(number, other_end);
        let mine = shared.clone();
        let thread = std::thread::Builder::new().name("rpc".to_string());
        let spawned = thread.spawn(move || {
            // A peer that is gone needs no answer.
            let _ = converse(&mine.app, &stream);
            mine.lock().remove(&number);
        });
        if spawned.is_err() {
            shared.lock().remove(&number);
        }
    }
}

/// Answers calls in order until the peer closes or says what cannot be parsed.
fn converse(app: &App, mut stream: &UnixStream) -> io::Result<()> {
    let mut framer = Framer::default();
    let mut bytes = vec![0; 64 << 10];
    loop {
        let count = match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let broken = framer.push(&bytes[..count]).err();
        while let Some(frame) = framer.next() {
            match protocol::answer(&frame, &mut |method, params| app.invoke(method, params)) {
                Ok(Some(response)) => send(stream, &response)?,
                Ok(None) => {}
                // There is no mark in the stream at which to begin again.
                Err(error) => return send(stream, &protocol::response(Value::Null, Err(error))),
            }
        }
        if let Some(broken) = broken {
            let reason = match broken {
                FrameError::Garbage => "Parse error",
                FrameError::TooLong => "Parse error: the request is too long",
            };
            return send(
                stream,
                &protocol::response(Value::Null, Err(RpcError::new(RpcError::PARSE, reason))),
            );
        }
    }
}

fn send(mut stream: &UnixStream, response: &Value) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(response)?;
    bytes.push(b'\n');
    stream.write_all(&bytes)
}
