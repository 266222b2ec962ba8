//! SPDK JSON configuration files: a list of RPC calls, applied through the method table of the RPC server.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::{Catalog, ControlPlane, RpcError};

/// A configuration file that cannot be read, is not JSON of that form, or calls a method that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// A parsed configuration file. Its method names are known; parameters are checked when it is applied.
#[derive(Clone, Debug, Default)]
pub struct ConfigFile {
    /// File name, or name of the RPC method, for error messages.
    origin: String,
    steps: Vec<ConfigStep>,
}

#[derive(Clone, Debug)]
struct ConfigStep {
    /// For error messages: `subsystems[1].config[0] (bdev)`.
    position: String,
    method: String,
    params: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigDocument {
    subsystems: Vec<SubsystemSection>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SubsystemSection {
    subsystem: String,
    config: Option<Vec<ConfigElement>>,
}

/// A call, or an array of calls.
#[derive(Deserialize)]
#[serde(untagged)]
enum ConfigElement {
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

impl ConfigFile {
    /// Reads a file. A method that does not exist is an error; parameters are checked by [`apply`](Self::apply).
    pub fn read(path: &Path, catalog: &Catalog) -> Result<ConfigFile, ConfigError> {
        let origin = path.display().to_string();
        let text = std::fs::read(path).map_err(|error| ConfigError(format!("{origin}: {error}")))?;
        ConfigFile::parse(&origin, &text, catalog)
    }

    /// As [`read`](Self::read), from text; `origin` names it in errors.
    pub fn parse(origin: &str, text: &[u8], catalog: &Catalog) -> Result<ConfigFile, ConfigError> {
        let invalid = |message: String| ConfigError(format!("{origin}: {message}"));
        let file: ConfigDocument = serde_json::from_slice(text).map_err(|error| {
            invalid(format!("{error}; expected {{\"subsystems\":[{{\"subsystem\":…,\"config\":[…]}}]}}"))
        })?;
        let mut steps = Vec::new();
        for (number, subsystem) in file.subsystems.into_iter().enumerate() {
            for (index, element) in subsystem.config.unwrap_or_default().into_iter().enumerate() {
                let calls = match element {
                    ConfigElement::Call(call) => vec![call],
                    ConfigElement::Batch(calls) => calls,
                };
                for call in calls {
                    let position = format!("subsystems[{number}].config[{index}] ({})", subsystem.subsystem);
                    if catalog.get(&call.method).is_none() {
                        let error = Catalog::not_found(&call.method);
                        return Err(invalid(format!("{position}: {}", error.message)));
                    }
                    steps.push(ConfigStep { position, method: call.method, params: call.params });
                }
            }
        }
        Ok(ConfigFile { origin: origin.to_string(), steps })
    }

    /// The calls in order: method and parameters.
    pub fn calls(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.steps.iter().map(|step| (step.method.as_str(), &step.params))
    }

    /// Makes the calls in order. Stops at the first that fails; those before it stay in effect.
    pub fn apply(&self, plane: &ControlPlane) -> Result<(), RpcError> {
        for step in &self.steps {
            plane.invoke(&step.method, step.params.clone()).map_err(|error| {
                let ConfigStep { position, method, .. } = step;
                RpcError::new(error.code, format!("{}: {position}: {method}: {error}", self.origin))
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Method, Module, NoParameters};

    struct Bdev;

    impl Module for Bdev {
        const NAME: &'static str = "bdev";

        fn methods() -> Vec<Method<Bdev>> {
            ["bdev_set_options", "bdev_malloc_create", "bdev_wait_for_examine"]
                .map(|name| Method::default_only::<NoParameters>(name, "this is a test"))
                .into()
        }
    }

    fn parse(text: &str) -> Result<ConfigFile, ConfigError> {
        ConfigFile::parse("a.json", text.as_bytes(), &Catalog::new().with::<Bdev>())
    }

    fn error(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn files_written_by_spdk_are_parsed() {
        let text = r#"{"subsystems":[
            {"subsystem":"scsi","config":null},
            {"subsystem":"bdev","config":[
                {"method":"bdev_set_options","params":{"bdev_io_pool_size":65535}},
                {"method":"bdev_malloc_create","params":{"name":"M","num_blocks":8,"block_size":512}},
                [{"method":"bdev_wait_for_examine"}]]}]}"#;
        let config = parse(text).unwrap();
        let methods: Vec<&str> = config.calls().map(|(method, _)| method).collect();
        assert_eq!(methods, ["bdev_set_options", "bdev_malloc_create", "bdev_wait_for_examine"]);
    }

    #[test]
    fn errors_name_file_and_position() {
        assert!(error("{").starts_with("a.json: EOF"));
        assert!(error(r#"{"subsystem":[]}"#).contains("unknown field `subsystem`"));
        let unknown = error(r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"bdev_frob"}]}]}"#);
        assert_eq!(unknown, "a.json: subsystems[0].config[0] (bdev): no method is called bdev_frob");
        let known = error(
            r#"{"subsystems":[{"subsystem":"iscsi","config":[{"method":"iscsi_create_portal_group"}]}]}"#,
        );
        assert!(
            known.contains("(iscsi): iscsi_create_portal_group is an SPDK method that Ringbolt lacks"),
            "{known}"
        );
    }
}
