//! Configuration files: SPDK's, applied by the methods that RPC has.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::methods;
use crate::rpc::RpcError;
use crate::state::App;

/// A file, checked as far as that needs no machine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Config {
    /// Where it came from, for messages.
    origin: String,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Step {
    /// `subsystems[1].config[0]`.
    position: String,
    method: String,
    params: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    subsystems: Vec<Subsystem>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Subsystem {
    subsystem: String,
    config: Option<Vec<Element>>,
}

/// A call, or a batch of them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Element {
    Call(ConfigCall),
    Batch(Vec<ConfigCall>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigCall {
    method: String,
    #[serde(default)]
    params: Value,
}

impl Config {
    /// Reads a file. Every method must be known; parameters are checked when they are applied.
    pub(crate) fn read(path: &Path) -> Result<Config, Failure> {
        let origin = path.display().to_string();
        let text = std::fs::read(path).map_err(|error| Failure::config(format!("{origin}: {error}")))?;
        Config::parse(&origin, &text)
    }

    pub(crate) fn parse(origin: &str, text: &[u8]) -> Result<Config, Failure> {
        let wrong = |message: String| Failure::config(format!("{origin}: {message}"));
        let file: File = serde_json::from_slice(text).map_err(|error| {
            wrong(format!("{error}; expected {{\"subsystems\":[{{\"subsystem\":…,\"config\":[…]}}]}}"))
        })?;
        let table = methods::table();
        let mut steps = Vec::new();
        for (number, subsystem) in file.subsystems.into_iter().enumerate() {
            for (index, element) in subsystem.config.unwrap_or_default().into_iter().enumerate() {
                let calls = match element {
                    Element::Call(call) => vec![call],
                    Element::Batch(calls) => calls,
                };
                for call in calls {
                    let position = format!("subsystems[{number}].config[{index}] ({})", subsystem.subsystem);
                    if table.get(&call.method).is_none() {
                        let error = methods::not_found(&call.method);
                        return Err(wrong(format!("{position}: {}", error.message)));
                    }
                    steps.push(Step { position, method: call.method, params: call.params });
                }
            }
        }
        Ok(Config { origin: origin.to_string(), steps })
    }

    /// Whether something of it has another process use our buffers.
    pub(crate) fn shares_memory(&self) -> bool {
        self.steps.iter().any(|step| {
            let is_vfio_user = |name: &str| name.eq_ignore_ascii_case("vfiouser");
            step.method == "bdev_nvme_attach_controller"
                && step.params["trtype"].as_str().is_some_and(is_vfio_user)
        })
    }

    /// Makes each call in turn, until one fails.
    pub(crate) fn apply(&self, app: &App) -> Result<(), RpcError> {
        for step in &self.steps {
            app.invoke(&step.method, step.params.clone()).map_err(|error| {
                let Step { position, method, .. } = step;
                RpcError::new(error.code, format!("{}: {position}: {method}: {error}", self.origin))
            })?;
        }
        Ok(())
    }
}

/// The running configuration, as a file that makes it again.
pub(crate) fn save(app: &App) -> Value {
    let subsystem = |name: &str| json!({ "subsystem": name, "config": subsystem_config(app, name) });
    json!({ "subsystems": methods::SUBSYSTEMS.map(|(name, _)| subsystem(name)) })
}

/// The calls that make the bdevs, and the controllers that some of them are behind.
fn bdev_calls(app: &App) -> Vec<Value> {
    // Asked before the state is locked: the initiator is asked outside of it everywhere.
    let kept = app.state().journal.bdev_names();
    let there: Vec<String> = kept
        .into_iter()
        .filter(|name| app.registry.find(name).is_some() || methods::nvme_exists(app, name))
        .collect();
    app.state().journal.bdev_calls(|name| there.iter().any(|other| other == name))
}

/// The calls that make one subsystem as it is now; `None` for a subsystem that is not there.
pub(crate) fn subsystem_config(app: &App, name: &str) -> Option<Vec<Value>> {
    match name {
        "bdev" => Some(bdev_calls(app)),
        "nvmf" => Some(methods::nvmf_calls(app)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Config::parse("a.json", text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn what_a_file_may_hold_is_what_spdk_writes() {
        let text = r#"{"subsystems":[
            {"subsystem":"scsi","config":null},
            {"subsystem":"bdev","config":[
                {"method":"bdev_set_options","params":{"bdev_io_pool_size":65535}},
                {"method":"bdev_malloc_create","params":{"name":"M","num_blocks":8,"block_size":512}},
                [{"method":"bdev_wait_for_examine"}]]}]}"#;
        let config = Config::parse("a.json", text.as_bytes()).unwrap();
        let methods: Vec<&str> = config.steps.iter().map(|step| step.method.as_str()).collect();
        assert_eq!(methods, ["bdev_set_options", "bdev_malloc_create", "bdev_wait_for_examine"]);
    }

    #[test]
    fn errors_name_file_and_place() {
        assert!(error("{").starts_with("a.json: EOF"));
        assert!(error(r#"{"subsystem":[]}"#).contains("unknown field `subsystem`"));
        let unknown = error(r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"bdev_frob"}]}]}"#);
        assert_eq!(unknown, "a.json: subsystems[0].config[0] (bdev): no method is called bdev_frob");
        let known = error(
            r#"{"subsystems":[{"subsystem":"iscsi","config":[{"method":"iscsi_create_portal_group"}]}]}"#,
        );
        assert!(
            known.contains("(iscsi): iscsi_create_portal_group is SPDK's and not in Ringbolt"),
            "{known}"
        );
    }
}
