//! A connection to the RPC socket of a target.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::{Value, json};

/// Longest wait for the answer to a call.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Makes calls one after the other.
pub(super) struct RpcConnection {
    stream: UnixStream,
    last_id: u64,
}

impl RpcConnection {
    pub(super) fn open(socket: &Path) -> anyhow::Result<RpcConnection> {
        let stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        Ok(RpcConnection { stream, last_id: 0 })
    }

    /// Makes a call and returns its result.
    pub(super) fn call(&mut self, method: &str, params: &Value) -> anyhow::Result<Value> {
        self.last_id += 1;
        let request = json!({ "jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params });
        self.stream.write_all(request.to_string().as_bytes())?;
        // Nothing follows an answer before the next call, so that a new reader each time loses nothing.
        let mut answer =
            Value::deserialize(&mut serde_json::Deserializer::from_reader(&self.stream)).context("RPC")?;
        match answer["error"].take() {
            Value::Null => Ok(answer["result"].take()),
            error => bail!("{method}: {error}"),
        }
    }
}
