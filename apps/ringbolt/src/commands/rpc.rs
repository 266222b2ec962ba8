//! `ringbolt rpc`: the JSON-RPC client.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use control::client::{self, CallError};
use serde_json::{Map, Value};

use crate::command_error::{CommandError, ExitStatus};
use crate::console::stdout_line;
use crate::options::DEFAULT_SOCKET;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt rpc --list\n  \
    ringbolt rpc bdev_malloc_create name=Malloc0 num_blocks=131072 block_size=512\n  \
    ringbolt rpc nvmf_subsystem_add_listener nqn=nqn.2025-01.io.ringbolt:a \\\n      \
        listen_address.trtype=TCP listen_address.traddr=127.0.0.1 listen_address.trsvcid=4420\n  \
    ringbolt rpc bdev_get_iostat --json '{\"names\":[\"Malloc0\"]}'\n\n\
    A value that parses as JSON (5, true, [1,2]) is JSON; any other is a string. Dots make nested objects.")]
pub(crate) struct Rpc {
    /// Method name
    #[arg(required_unless_present = "list")]
    pub(crate) method: Option<String>,
    /// Parameters
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) parameters: Vec<String>,
    /// Parameters as one JSON object; KEY=VALUE overrides its members
    #[arg(long, value_name = "OBJECT")]
    pub(crate) json: Option<String>,
    /// List the methods of the server
    #[arg(long)]
    pub(crate) list: bool,
    /// UNIX socket of the server
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) rpc_socket: PathBuf,
    /// Seconds to wait for the response
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) timeout: u64,
}

pub(crate) fn run(options: Rpc) -> Result<(), CommandError> {
    let timeout = Duration::from_secs(options.timeout.max(1));
    if options.list {
        let names = call(&options.rpc_socket, "rpc_get_methods", Value::Null, timeout)?;
        let names = names.as_array().into_iter().flatten().filter_map(Value::as_str);
        stdout_line!("{}", names.collect::<Vec<_>>().join("\n"));
        return Ok(());
    }
    let method = options.method.as_deref().unwrap_or_default();
    let params = parameters(options.json.as_deref(), &options.parameters)?;
    let result = call(&options.rpc_socket, method, params, timeout);
    let result = result.map_err(|error| with_hint(error, &options.parameters))?;
    stdout_line!("{result:#}");
    Ok(())
}

/// Says how a number is given as a string, where a server wants that.
fn with_hint(error: CommandError, pairs: &[String]) -> CommandError {
    let message = error.to_string();
    let is_value = |pair: &&String| {
        let value = pair.split_once('=').map(|(_, text)| serde_json::from_str(text));
        matches!(value, Some(Ok(Value::Number(_) | Value::Bool(_) | Value::Null)))
    };
    match pairs.iter().find(is_value).and_then(|pair| pair.split_once('=')) {
        Some((key, text)) if message.contains("expected a string") => CommandError::operation(format!(
            "{message}; a string that looks like JSON is quoted: '{key}=\"{text}\"'"
        )),
        _ => error,
    }
}

/// Time for a query of what a server knows, which waits for no device.
pub(crate) const QUERY_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls a method of a server.
pub(crate) fn call(
    socket: &Path,
    method: &str,
    params: Value,
    timeout: Duration,
) -> Result<Value, CommandError> {
    client::call(socket, method, params, timeout).map_err(|error| match error {
        CallError::Connect { .. } => CommandError::new(ExitStatus::NoServer, error),
        CallError::Disconnected(_) => CommandError::new(ExitStatus::NoServer, error),
        CallError::Rejected(_) => CommandError::operation(format!("{method}: {error}")),
    })
}

/// The parameters: the object `json`, with each `KEY=VALUE` of `pairs` inserted.
fn parameters(json: Option<&str>, pairs: &[String]) -> Result<Value, CommandError> {
    let mut object = match json.map(serde_json::from_str) {
        None if pairs.is_empty() => return Ok(Value::Null),
        None => Map::new(),
        Some(Ok(Value::Object(object))) => object,
        Some(Ok(_)) => {
            return Err(CommandError::usage("--json must be an object, as '{\"name\":\"Malloc0\"}'"));
        }
        Some(Err(error)) => return Err(CommandError::usage(format!("--json: {error}"))),
    };
    if let Some(duplicate) = json.and_then(|text| control::duplicate_key(text.as_bytes())) {
        return Err(CommandError::usage(format!("--json: {duplicate}")));
    }
    for pair in pairs {
        let invalid = || CommandError::usage(format!("'{pair}' is not KEY=VALUE, as name=Malloc0"));
        let (key, text) = pair.split_once('=').ok_or_else(invalid)?;
        let value = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_string()));
        let keys: Vec<&str> = key.split('.').collect();
        if keys.iter().any(|key| key.is_empty()) || !insert(&mut object, &keys, value) {
            return Err(invalid());
        }
    }
    Ok(Value::Object(object))
}

/// Inserts a value at a path of keys, creating objects on the way. Returns `false` if the path leads
/// through a value that is not an object.
fn insert(object: &mut Map<String, Value>, keys: &[&str], value: Value) -> bool {
    match keys {
        [] => false,
        [last] => {
            object.insert((*last).to_string(), value);
            true
        }
        [first, rest @ ..] => {
            let inner = object.entry(*first).or_insert_with(|| Value::Object(Map::new()));
            inner.as_object_mut().is_some_and(|inner| insert(inner, rest, value))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(json: Option<&str>, pairs: &[&str]) -> Result<Value, String> {
        let pairs: Vec<String> = pairs.iter().map(|pair| pair.to_string()).collect();
        parameters(json, &pairs).map_err(|failure| failure.to_string())
    }

    #[test]
    fn values_that_parse_as_json_are_json() {
        let pairs = ["a=5", "b=x", "c=true", "d=[1]", "e=\"5\"", "f=", "g=1=2"];
        let expected = json!({ "a": 5, "b": "x", "c": true, "d": [1], "e": "5", "f": "", "g": "1=2" });
        assert_eq!(parse(None, &pairs), Ok(expected));
        assert_eq!(parse(None, &[]), Ok(Value::Null));
    }

    #[test]
    fn dots_nest_and_pairs_override_json() {
        let json = Some(r#"{"listen_address":{"trtype":"TCP"}}"#);
        let expected = json!({ "listen_address": { "trtype": "TCP", "trsvcid": 4420 }, "nqn": "q" });
        assert_eq!(parse(json, &["listen_address.trsvcid=4420", "nqn=q"]), Ok(expected));
    }

    #[test]
    fn a_number_in_place_of_a_string_has_a_hint() {
        let hint = |message: &str, pairs: &[&str]| {
            let pairs: Vec<String> = pairs.iter().map(|pair| pair.to_string()).collect();
            with_hint(CommandError::operation(message), &pairs).to_string()
        };
        let refused = "m: Invalid parameters: name: invalid type: integer `5`, expected a string";
        assert!(hint(refused, &["size=x", "name=5"]).ends_with("quoted: 'name=\"5\"'"));
        assert_eq!(hint(refused, &["name=x"]), refused);
        assert_eq!(hint("m: no bdev is called 5", &["name=5"]), "m: no bdev is called 5");
    }

    #[test]
    fn invalid_parameters_have_errors_with_a_hint() {
        for (json, pairs, hint) in [
            (None, ["name"].as_slice(), "KEY=VALUE"),
            (None, &["=x"], "KEY=VALUE"),
            (None, &["a=1", "a.b=2"], "KEY=VALUE"),
            (Some("[1]"), &[], "object"),
            (Some("{"), &[], "EOF"),
            (Some(r#"{"a":1,"b":{"c":1,"c":2}}"#), &[], "the key `c` stands twice"),
        ] {
            let error = parse(json, pairs).unwrap_err();
            assert!(error.contains(hint), "{error}");
        }
    }
}
