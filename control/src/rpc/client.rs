//! RPC client: one call and its response on a connection of its own.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};

use super::framing::{FrameLimits, Framer};
use crate::RpcError;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nothing accepts connections at the path.
    #[error("{}: {source}; is `ringbolt serve` running, with this --rpc-socket?", path.display())]
    Connect {
        /// The socket.
        path: std::path::PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection ended or timed out before the response.
    #[error("no response from the server: {0}")]
    Disconnected(io::Error),
    /// The method failed.
    #[error("{0}")]
    Rejected(RpcError),
}

/// Calls a method and waits for the response, for `timeout` at most between two reads, and for the server to take the connection.
pub fn call(path: &Path, method: &str, params: Value, timeout: Duration) -> Result<Value, CallError> {
    let connect = |source| CallError::Connect { path: path.to_path_buf(), source };
    let mut stream = open(path, timeout).map_err(connect)?;
    let response = exchange(&mut stream, method, params, timeout).map_err(CallError::Disconnected)?;
    if let Some(error) = response.get("error") {
        let code = error.get("code").and_then(Value::as_i64).unwrap_or(RpcError::INTERNAL);
        let message = error.get("message").and_then(Value::as_str).unwrap_or("no message");
        return Err(CallError::Rejected(RpcError::new(code, message)));
    }
    Ok(response.get("result").cloned().unwrap_or(Value::Null))
}

/// Connects, where [`UnixStream::connect`] waits without a limit once the backlog of a server that is stopped is full.
fn open(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).map_err(|error| timed_out(error.into()))?;
    Ok(UnixStream::from(socket))
}

/// A time-out of a socket is EAGAIN, "resource temporarily unavailable".
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "timed out"),
        _ => error,
    }
}

fn exchange(stream: &mut UnixStream, method: &str, params: Value, timeout: Duration) -> io::Result<Value> {
    stream.set_read_timeout(Some(timeout))?;
    let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
    if !params.is_null() {
        request["params"] = params;
    }
    stream.write_all(&serde_json::to_vec(&request)?).map_err(timed_out)?;
    let mut framer = Framer::new(FrameLimits::RESPONSE);
    let mut bytes = vec![0; 64 << 10];
    loop {
        let count = stream.read(&mut bytes).map_err(timed_out)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        framer.push(&bytes[..count]).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        if let Some(frame) = framer.next() {
            return Ok(serde_json::from_slice(&frame)?);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// As one that is stopped: its backlog takes connections until it is full.
    #[test]
    fn a_server_that_does_not_answer_is_an_error_in_bounded_time() {
        let path = std::env::temp_dir().join(format!("ringbolt-rpc-silent-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let call = || call(&path, "method", Value::Null, Duration::from_millis(20)).unwrap_err().to_string();
        assert_eq!(call(), "no response from the server: timed out");
        let errors: Vec<String> = (0..3).map(|_| call()).collect();
        std::fs::remove_file(&path).unwrap();
        assert!(errors[2].contains(": timed out; is `ringbolt serve` running"), "{errors:?}");
    }
}
