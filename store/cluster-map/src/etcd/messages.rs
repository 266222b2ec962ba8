//! Messages of etcd's JSON gateway (API v3): bytes are base64, 64-bit numbers are strings.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// Bytes as the gateway writes them.
pub(super) fn base64(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

fn from_base64<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    STANDARD.decode(String::deserialize(from)?).map_err(serde::de::Error::custom)
}

/// A 64-bit number: a string, or a number from gateways that are lenient.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Text(String),
        Plain(i64),
    }
    match Number::deserialize(from)? {
        Number::Text(text) => text.parse().map_err(serde::de::Error::custom),
        Number::Plain(number) => Ok(number),
    }
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct ResponseHeader {
    #[serde(default, deserialize_with = "number")]
    pub(super) revision: i64,
}

#[derive(Debug, Deserialize)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "from_base64")]
    pub(super) key: Vec<u8>,
    #[serde(default, deserialize_with = "from_base64")]
    pub(super) value: Vec<u8>,
    #[serde(default, deserialize_with = "number")]
    pub(super) mod_revision: i64,
    #[serde(default, deserialize_with = "number")]
    pub(super) lease: i64,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct RangeAnswer {
    #[serde(default)]
    pub(super) header: ResponseHeader,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
    #[serde(default)]
    pub(super) more: bool,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct DeleteAnswer {
    #[serde(default, deserialize_with = "number")]
    pub(super) deleted: i64,
}

/// Part of the answer to a transaction. Puts have none that matters.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Response {
    pub(super) response_range: Option<RangeAnswer>,
    pub(super) response_txn: Option<TxnAnswer>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct TxnAnswer {
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    pub(super) responses: Vec<Response>,
}

impl TxnAnswer {
    /// The one record of a range in the answer.
    pub(super) fn into_record(self) -> Option<KeyValue> {
        self.responses.into_iter().find_map(|response| response.response_range)?.kvs.into_iter().next()
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct GrantAnswer {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: i64,
}

/// The answer to a renewal; the time to live is missing if the lease is.
#[derive(Debug, Deserialize)]
pub(super) struct RenewAnswer {
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    pub(super) seconds: i64,
    /// What it was when it was renewed, in the answer to what is left of it.
    #[serde(rename = "grantedTTL", default, deserialize_with = "number")]
    pub(super) granted_seconds: i64,
}

/// A line of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct StreamLine<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub(super) struct WatchAnswer {
    #[serde(default)]
    pub(super) header: ResponseHeader,
    #[serde(default)]
    pub(super) created: bool,
    #[serde(default)]
    pub(super) canceled: bool,
    #[serde(default)]
    pub(super) cancel_reason: String,
    /// The first revision that is there, if the watch is canceled because its own is compacted.
    #[serde(default, deserialize_with = "number")]
    pub(super) compact_revision: i64,
    #[serde(default)]
    pub(super) events: Vec<WatchEvent>,
}

#[derive(Debug, Deserialize)]
pub(super) struct WatchEvent {
    /// `PUT`, which is the default and not written, or `DELETE`.
    #[serde(rename = "type", default)]
    pub(super) kind: String,
    pub(super) kv: KeyValue,
}

/// An error of the gateway: of a request, or `{"error":{...}}` of a stream.
#[derive(Debug, Default, Deserialize)]
pub(super) struct GatewayError {
    #[serde(default)]
    message: String,
    #[serde(default)]
    error: ErrorText,
    #[serde(default)]
    code: u32,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ErrorText {
    Text(String),
    OfStream {
        #[serde(default)]
        message: String,
        #[serde(default, alias = "grpc_code")]
        code: u32,
    },
}

impl Default for ErrorText {
    fn default() -> ErrorText {
        ErrorText::Text(String::new())
    }
}

/// Most characters of an error that is no JSON.
const TEXT_MAX: usize = 200;

impl GatewayError {
    /// An error, or what another server in the place of the gateway says.
    pub(super) fn parse(answer: &[u8]) -> GatewayError {
        serde_json::from_slice(answer).unwrap_or_else(|_| {
            let text = String::from_utf8_lossy(answer);
            let line = text.trim().lines().next().unwrap_or_default().chars();
            let message = line.filter(|character| !character.is_control()).take(TEXT_MAX).collect();
            GatewayError { message, ..GatewayError::default() }
        })
    }

    pub(super) fn text(&self) -> &str {
        match &self.error {
            _ if !self.message.is_empty() => &self.message,
            ErrorText::Text(text) | ErrorText::OfStream { message: text, .. } => text,
        }
    }

    /// The code of gRPC; 0 if there is none.
    pub(super) fn code(&self) -> u32 {
        match self.error {
            ErrorText::OfStream { code, .. } if self.code == 0 => code,
            _ => self.code,
        }
    }
}

/// What etcd refuses, by the texts of its errors: several have one code of gRPC
/// (`api/v3rpc/rpctypes/error.go`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The token is missing, has expired, or is older than a change of users and roles.
    Token,
    /// The user has no right to do this.
    Permission,
    /// The user or its password.
    User,
    /// Authentication, because users are disabled.
    NotEnabled,
    /// A client certificate with a name, which etcd's gateway would not use as a user.
    CommonName,
    Other,
}

impl Refusal {
    pub(super) fn of(text: &str) -> Refusal {
        let known = [
            ("invalid auth token", Refusal::Token),
            ("user name is empty", Refusal::Token),
            ("revision of auth store is old", Refusal::Token),
            ("permission denied", Refusal::Permission),
            ("invalid user ID or password", Refusal::User),
            ("authentication is not enabled", Refusal::NotEnabled),
            ("CommonName of client", Refusal::CommonName),
        ];
        known.iter().find(|(part, _)| text.contains(part)).map_or(Refusal::Other, |(_, refusal)| *refusal)
    }
}

/// The answer to an authentication.
#[derive(Deserialize)]
pub(super) struct AuthenticateAnswer {
    #[serde(default)]
    pub(super) token: String,
}

/// The key after all keys that begin with this one.
pub(super) fn end_of_prefix(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // Keys are text, which has no byte 255.
    *end.last_mut().expect("a prefix has a byte") += 1;
    end
}

pub(super) fn put(key: &str, value: &[u8]) -> Value {
    json!({ "key": base64(key), "value": base64(value) })
}

/// A comparison that holds if the key was changed this many times since it was created; 0: it is not there.
pub(super) fn version_is(key: &str, version: u32) -> Value {
    json!({ "key": base64(key), "target": "VERSION", "result": "EQUAL", "version": version.to_string() })
}

/// A comparison that holds if the key has a value.
pub(super) fn value_is(key: &str, value: &[u8]) -> Value {
    json!({ "key": base64(key), "target": "VALUE", "result": "EQUAL", "value": base64(value) })
}

/// A comparison that never holds: no key has this revision.
pub(super) fn never(key: &str) -> Value {
    revision_is(key, -1)
}

/// A comparison that holds if the key was last changed in a revision.
pub(super) fn revision_is(key: &str, revision: i64) -> Value {
    json!({ "key": base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() })
}

/// A transaction that puts a value if a comparison holds, and else reads the key.
pub(super) fn put_if(compare: &Value, key: &str, value: &[u8]) -> Value {
    json!({
        "compare": [compare],
        "success": [{ "request_put": put(key, value) }],
        "failure": [{ "request_range": { "key": base64(key) } }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_requests_and_of_streams_are_read_in_every_shape() {
        let text = "etcdserver: invalid auth token";
        let cases = [
            (json!({ "error": text, "message": text, "code": 16 }), 16, text),
            (json!({ "code": 16, "message": text, "details": [] }), 16, text),
            (json!({ "error": { "grpc_code": 16, "http_code": 401, "message": text } }), 16, text),
            (json!({ "error": { "code": 16, "message": text, "details": [] } }), 16, text),
            (json!({ "error": text }), 0, text),
            (json!({}), 0, ""),
        ];
        for (answer, code, text) in cases {
            let error: GatewayError = serde_json::from_value(answer.clone()).unwrap();
            assert_eq!((error.code(), error.text()), (code, text), "{answer}");
        }
        for answer in ["", "7", "{\"error\":7}", "{\"code\":-1}", "{\"message\":null}"] {
            assert!(serde_json::from_str::<GatewayError>(answer).is_err(), "{answer}");
            assert_eq!(GatewayError::parse(answer.as_bytes()).text(), answer);
        }
        let other = GatewayError::parse(b" \n404 page\x1b[31m not found\xff\r\nmore");
        assert_eq!((other.code(), other.text()), (0, "404 page[31m not found\u{fffd}"));
        assert_eq!(GatewayError::parse(&[b'x'; 1000]).text().len(), TEXT_MAX);
    }

    #[test]
    fn refusals_are_known_by_their_texts() {
        for (text, refusal) in [
            ("etcdserver: invalid auth token", Refusal::Token),
            ("rpc error: code = Unauthenticated desc = etcdserver: invalid auth token", Refusal::Token),
            ("rpc error: code = InvalidArgument desc = etcdserver: user name is empty", Refusal::Token),
            ("etcdserver: revision of auth store is old", Refusal::Token),
            ("etcdserver: permission denied", Refusal::Permission),
            ("etcdserver: authentication failed, invalid user ID or password", Refusal::User),
            ("etcdserver: authentication is not enabled", Refusal::NotEnabled),
            (
                "CommonName of client sending a request against gateway will be ignored and not used as expected",
                Refusal::CommonName,
            ),
            ("etcdserver: too many requests", Refusal::Other),
            ("", Refusal::Other),
        ] {
            assert_eq!(Refusal::of(text), refusal, "{text}");
        }
    }
}
