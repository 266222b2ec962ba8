//! RPC client: one call and its response on a connection of its own.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

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

/// Calls a method and waits for the response, for `timeout` at most between two reads.
pub fn call(path: &Path, method: &str, params: Value, timeout: Duration) -> Result<Value, CallError> {
    let connect = |source| CallError::Connect { path: path.to_path_buf(), source };
    let mut stream = UnixStream::connect(path).map_err(connect)?;
    let response = exchange(&mut stream, method, params, timeout).map_err(CallError::Disconnected)?;
    if let Some(error) = response.get("error") {
        let code = error.get("code").and_then(Value::as_i64).unwrap_or(RpcError::INTERNAL);
        let message = error.get("message").and_then(Value::as_str).unwrap_or("no message");
        return Err(CallError::Rejected(RpcError::new(code, message)));
    }
    Ok(response.get("result").cloned().unwrap_or(Value::Null))
}

fn exchange(stream: &mut UnixStream, method: &str, params: Value, timeout: Duration) -> io::Result<Value> {
    stream.set_read_timeout(Some(timeout))?;
    let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
    if !params.is_null() {
        request["params"] = params;
    }
    stream.write_all(&serde_json::to_vec(&request)?)?;
    let mut framer = Framer::new(FrameLimits::RESPONSE);
    let mut bytes = vec![0; 64 << 10];
    loop {
        let count = stream.read(&mut bytes)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        framer.push(&bytes[..count]).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        if let Some(frame) = framer.next() {
            return Ok(serde_json::from_slice(&frame)?);
        }
    }
}
