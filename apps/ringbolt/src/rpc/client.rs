//! The other end: one call, one answer.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::framing::Framer;
use super::protocol::RpcError;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("{}: {source}; is `ringbolt serve` running, with this --rpc-socket?", path.display())]
    Connect { path: std::path::PathBuf, source: io::Error },
    #[error("the server did not answer: {0}")]
    Broken(io::Error),
    #[error("{0}")]
    Refused(RpcError),
}

/// Calls one method and waits for its answer.
pub(crate) fn call(path: &Path, method: &str, params: Value, timeout: Duration) -> Result<Value, CallError> {
    let connect = |source| CallError::Connect { path: path.to_path_buf(), source };
    let mut stream = UnixStream::connect(path).map_err(connect)?;
    let answer = exchange(&mut stream, method, params, timeout).map_err(CallError::Broken)?;
    if let Some(error) = answer.get("error") {
        let code = error.get("code").and_then(Value::as_i64).unwrap_or(RpcError::INTERNAL);
        let message = error.get("message").and_then(Value::as_str).unwrap_or("no message");
        return Err(CallError::Refused(RpcError::new(code, message)));
    }
    Ok(answer.get("result").cloned().unwrap_or(Value::Null))
}

fn exchange(stream: &mut UnixStream, method: &str, params: Value, timeout: Duration) -> io::Result<Value> {
    stream.set_read_timeout(Some(timeout))?;
    let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
    if !params.is_null() {
        request["params"] = params;
    }
    stream.write_all(&serde_json::to_vec(&request)?)?;
    let mut framer = Framer::default();
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
