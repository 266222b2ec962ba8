//! JSON-RPC 2.0 as SPDK speaks it: requests in, responses out, error codes.

use std::fmt;

use bdev::BdevError;
use serde::Deserialize;
use serde_json::{Value, json};

/// Why a method failed: what the caller is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RpcError {
    /// JSON-RPC's code, or a negative error number as SPDK gives them.
    pub(crate) code: i64,
    /// What went wrong.
    pub(crate) message: String,
}

impl RpcError {
    pub(crate) const PARSE: i64 = -32700;
    pub(crate) const INVALID_REQUEST: i64 = -32600;
    pub(crate) const METHOD_NOT_FOUND: i64 = -32601;
    pub(crate) const INVALID_PARAMS: i64 = -32602;
    pub(crate) const INTERNAL: i64 = -32603;
    /// The method exists, but not in the present stage of start-up.
    pub(crate) const INVALID_STATE: i64 = -1;
    pub(crate) const EBUSY: i64 = -16;
    pub(crate) const EEXIST: i64 = -17;
    pub(crate) const ENODEV: i64 = -19;
    pub(crate) const EINVAL: i64 = -22;
    pub(crate) const ENOMEM: i64 = -12;
    pub(crate) const EFAULT: i64 = -14;
    pub(crate) const EIO: i64 = -5;
    pub(crate) const ENOTSUP: i64 = -95;

    pub(crate) fn new(code: i64, message: impl Into<String>) -> RpcError {
        RpcError { code, message: message.into() }
    }

    pub(crate) fn invalid_params(message: impl fmt::Display) -> RpcError {
        RpcError::new(Self::INVALID_PARAMS, format!("Invalid parameters: {message}"))
    }

    pub(crate) fn internal(message: impl fmt::Display) -> RpcError {
        RpcError::new(Self::INTERNAL, message.to_string())
    }
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.message, self.code)
    }
}

impl From<BdevError> for RpcError {
    fn from(error: BdevError) -> RpcError {
        let code = match &error {
            BdevError::NotFound { .. } | BdevError::Removed { .. } | BdevError::WrongKind { .. } => {
                RpcError::ENODEV
            }
            BdevError::Exists { .. } => RpcError::EEXIST,
            BdevError::Claimed { .. } => RpcError::EBUSY,
            BdevError::Invalid { .. } => RpcError::EINVAL,
            BdevError::Memory(_) => RpcError::ENOMEM,
            BdevError::NoFileIo => RpcError::ENOTSUP,
            BdevError::File { source, .. } => {
                source.raw_os_error().map_or(RpcError::EIO, |errno| -i64::from(errno))
            }
        };
        RpcError::new(code, error.to_string())
    }
}

impl From<reactor::Gone> for RpcError {
    fn from(error: reactor::Gone) -> RpcError {
        RpcError::internal(error)
    }
}

/// One call, checked.
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

/// Answers one frame, a call or a batch of them, through `invoke`. `None` where nothing is to be said:
/// a call without an id that succeeds is a notification.
pub(crate) fn answer(
    frame: &[u8],
    invoke: &mut dyn FnMut(&str, Value) -> Result<Value, RpcError>,
) -> Result<Option<Value>, RpcError> {
    let value: Value = serde_json::from_slice(frame)
        .map_err(|error| RpcError::new(RpcError::PARSE, format!("Parse error: {error}")))?;
    match value {
        Value::Array(calls) if calls.is_empty() => {
            Ok(Some(response(Value::Null, Err(RpcError::new(RpcError::INVALID_REQUEST, "Invalid request")))))
        }
        Value::Array(calls) => {
            let answers: Vec<Value> = calls.into_iter().filter_map(|call| answer_one(call, invoke)).collect();
            Ok((!answers.is_empty()).then_some(Value::Array(answers)))
        }
        call => Ok(answer_one(call, invoke)),
    }
}

fn answer_one(value: Value, invoke: &mut dyn FnMut(&str, Value) -> Result<Value, RpcError>) -> Option<Value> {
    let call = match Call::from_value(value) {
        Ok(call) => call,
        Err((id, error)) => return Some(response(id, Err(error))),
    };
    let outcome = invoke(&call.method, call.params);
    if call.id.is_null() && outcome.is_ok() {
        return None;
    }
    Some(response(call.id, outcome))
}

/// A response object.
pub(crate) fn response(id: Value, outcome: Result<Value, RpcError>) -> Value {
    match outcome {
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
        match answer(frame.as_bytes(), &mut invoke) {
            Ok(value) => value.map_or(String::new(), |value| value.to_string()),
            Err(error) => error.code.to_string(),
        }
    }

    #[test]
    fn calls_are_answered_as_spdk_answers_them() {
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
            (r#"{"method":}"#, "-32700"),
            (r#"{"method":"echo"]"#, "-32700"),
        ];
        for (frame, expected) in cases {
            let got = exchange(frame);
            let got: Value = serde_json::from_str(&got).unwrap_or(Value::Null);
            let expected: Value = serde_json::from_str(expected).unwrap_or(Value::Null);
            assert_eq!(got, expected, "{frame}");
        }
    }

    #[test]
    fn an_invalid_call_keeps_its_id() {
        assert!(exchange(r#"{"id":9}"#).contains(r#""id":9"#));
    }
}
