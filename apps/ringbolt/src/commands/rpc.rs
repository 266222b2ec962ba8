//! `ringbolt rpc`: the JSON-RPC client.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use control::client::{self, CallError};
use serde_json::{Map, Value};

use crate::command_error::{CommandError, ExitStatus};
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
        return print(&names.collect::<Vec<_>>().join("\n"));
    }
    let method = options.method.as_deref().unwrap_or_default();
    let params = parameters(options.json.as_deref(), &options.parameters)?;
    let result = call(&options.rpc_socket, method, params, timeout)?;
    print(&serde_json::to_string_pretty(&result).map_err(CommandError::operation)?)
}

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

/// Prints to standard output. A closed pipe, as with `head`, is not an error.
fn print(text: &str) -> Result<(), CommandError> {
    use std::io::Write;
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CommandError::operation(error)),
        _ => Ok(()),
    }
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
    fn invalid_parameters_have_errors_with_a_hint() {
        for (json, pairs, hint) in [
            (None, ["name"].as_slice(), "KEY=VALUE"),
            (None, &["=x"], "KEY=VALUE"),
            (None, &["a=1", "a.b=2"], "KEY=VALUE"),
            (Some("[1]"), &[], "object"),
            (Some("{"), &[], "EOF"),
        ] {
            let error = parse(json, pairs).unwrap_err();
            assert!(error.contains(hint), "{error}");
        }
    }
}
