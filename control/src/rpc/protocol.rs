//! JSON-RPC 2.0 as SPDK speaks it: requests in, responses out, error codes.

use std::io;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::RpcError;
use crate::json_positions::find_duplicate;

/// A valid request.
#[derive(Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) id: Value,
    pub(crate) method: String,
    pub(crate) params: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCall {
    jsonrpc: Option<String>,
    method: String,
    #[serde(default)]
    params: Value,
    #[serde(default)]
    id: Value,
}

impl Call {
    /// From one JSON object. The error carries the id as far as it could be read.
    pub(crate) fn from_value(value: Value) -> Result<Call, (Value, RpcError)> {
        let id = value.get("id").cloned().unwrap_or(Value::Null);
        let id = if matches!(id, Value::String(_) | Value::Number(_)) { id } else { Value::Null };
        let bad = |id: &Value| (id.clone(), RpcError::new(RpcError::INVALID_REQUEST, "Invalid request"));
        let raw: RawCall = serde_json::from_value(value).map_err(|_| bad(&id))?;
        let known_version = raw.jsonrpc.as_deref().is_none_or(|version| version == "2.0");
        let known_id = matches!(raw.id, Value::Null | Value::String(_) | Value::Number(_));
        let params_fit = matches!(raw.params, Value::Null | Value::Array(_) | Value::Object(_));
        if !known_version || !known_id || !params_fit {
            return Err(bad(&id));
        }
        Ok(Call { id, method: raw.method, params: raw.params })
    }
}

/// Executes one frame, a call or a batch, through `invoke`, and passes the text of the response to `send`
/// piece by piece: the responses of a batch may be much longer than the batch. Nothing is sent for a call
/// without an id that succeeds: it is a notification. Returns whether the frame was JSON; if not, an error
/// was sent, and the stream has no delimiter to resynchronize at.
pub(crate) fn handle_frame(
    frame: &[u8],
    invoke: &mut dyn FnMut(&str, Value) -> Result<Value, RpcError>,
    send: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<bool> {
    let parsed: Result<Value, _> = serde_json::from_slice(frame);
    if let Ok(value) = &parsed
        && let Some((key, position)) = find_duplicate(frame)
    {
        let message = format!("Invalid request: {position}: the key `{key}` stands twice");
        let id = value.get("id").filter(|id| id.is_string() || id.is_number());
        let error = RpcError::new(RpcError::INVALID_REQUEST, message);
        send(&line(&response(id.cloned().unwrap_or_default(), Err(error)))?)?;
        return Ok(true);
    }
    let calls = match parsed {
        Err(error) => {
            let error = RpcError::new(RpcError::PARSE, format!("Parse error: {error}"));
            send(&line(&response(Value::Null, Err(error)))?)?;
            return Ok(false);
        }
        Ok(Value::Array(calls)) if !calls.is_empty() => calls,
        // An empty batch is an invalid call.
        Ok(call) => {
            if let Some(response) = handle_call(call, invoke) {
                send(&line(&response)?)?;
            }
            return Ok(true);
        }
    };
    let mut separator = b'[';
    for response in calls.into_iter().filter_map(|call| handle_call(call, invoke)) {
        let mut text = vec![separator];
        serde_json::to_writer(&mut text, &response)?;
        send(&text)?;
        separator = b',';
    }
    if separator == b',' {
        send(b"]\n")?;
    }
    Ok(true)
}

/// A response with the line feed that ends it.
pub(crate) fn line(response: &Value) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(response)?;
    text.push(b'\n');
    Ok(text)
}

fn handle_call(
    value: Value,
    invoke: &mut dyn FnMut(&str, Value) -> Result<Value, RpcError>,
) -> Option<Value> {
    let call = match Call::from_value(value) {
        Ok(call) => call,
        Err((id, error)) => return Some(response(id, Err(error))),
    };
    let result = invoke(&call.method, call.params);
    if call.id.is_null() && result.is_ok() {
        return None;
    }
    Some(response(call.id, result))
}

/// A response object with a result or an error.
pub(crate) fn response(id: Value, result: Result<Value, RpcError>) -> Value {
    match result {
        Ok(result) => json!({ "jsonrpc": "2.0", "id": id, "result": result }),
        Err(error) => {
            json!({ "jsonrpc": "2.0", "id": id, "error": { "code": error.code, "message": error.message } })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(frame: &str) -> String {
        let mut invoke = |method: &str, params: Value| match method {
            "echo" => Ok(params),
            _ => Err(RpcError::new(RpcError::METHOD_NOT_FOUND, "Method not found")),
        };
        let mut text = Vec::new();
        let mut send = |bytes: &[u8]| {
            text.extend_from_slice(bytes);
            Ok(())
        };
        let is_json = handle_frame(frame.as_bytes(), &mut invoke, &mut send).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(is_json, !text.contains("-32700"), "{text}");
        text
    }

    #[test]
    fn responses_match_spdks() {
        let bad = r#"{"error":{"code":-32600,"message":"Invalid request"},"id":null,"jsonrpc":"2.0"}"#;
        let cases = [
            (r#"{"method":"echo","id":1,"params":[1]}"#, r#"{"id":1,"jsonrpc":"2.0","result":[1]}"#),
            (r#"{"jsonrpc":"2.0","method":"echo","id":"a"}"#, r#"{"id":"a","jsonrpc":"2.0","result":null}"#),
            (r#"{"method":"echo"}"#, ""),
            (r#"{"method":"echo","id":null}"#, ""),
            (
                r#"{"method":"x"}"#,
                r#"{"error":{"code":-32601,"message":"Method not found"},"id":null,"jsonrpc":"2.0"}"#,
            ),
            (r#"{"method":5}"#, bad),
            (r#"{"method":"echo","id":[1]}"#, bad),
            (r#"{"method":"echo","params":7}"#, bad),
            (r#"{"method":"echo","jsonrpc":"1.0"}"#, bad),
            (r#"{"method":"echo","more":1}"#, bad),
            ("[]", bad),
            (
                r#"[{"method":"echo","id":1,"params":{}},{"method":"echo"},{"method":"echo","id":2}]"#,
                r#"[{"id":1,"jsonrpc":"2.0","result":{}},{"id":2,"jsonrpc":"2.0","result":null}]"#,
            ),
            (r#"[{"method":"echo"}]"#, ""),
        ];
        for (frame, expected) in cases {
            let got = exchange(frame);
            let got: Value = serde_json::from_str(&got).unwrap_or(Value::Null);
            let expected: Value = serde_json::from_str(expected).unwrap_or(Value::Null);
            assert_eq!(got, expected, "{frame}");
        }
    }

    #[test]
    fn a_key_that_stands_twice_is_an_error_and_nothing_is_called() {
        for (frame, id) in [
            (r#"{"method":"echo","id":3,"params":{"a":1,"b":{"c":1,"c":2}}}"#, "3"),
            (r#"{"method":"echo","method":"x","id":"a"}"#, r#""a""#),
            (r#"[{"method":"echo","id":1},{"id":2,"method":"echo","id":2}]"#, "null"),
        ] {
            let got = exchange(frame);
            let parts = ["-32600", "stands twice", &format!(r#""id":{id}"#)];
            assert!(parts.iter().all(|part| got.contains(part)) && !got.contains("result"), "{got}");
        }
    }

    #[test]
    fn text_that_is_not_json_ends_the_stream() {
        for frame in [r#"{"method":}"#, r#"{"method":"echo"]"#] {
            assert!(exchange(frame).contains(r#""code":-32700"#), "{frame}");
        }
    }

    #[test]
    fn an_invalid_call_keeps_its_id() {
        assert!(exchange(r#"{"id":9}"#).contains(r#""id":9"#));
    }
}
