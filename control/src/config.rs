//! SPDK JSON configuration files: a list of RPC calls, applied through the method table of the RPC server.

use std::path::Path;

use serde_json::{Map, Value};

use crate::files::{read_limited, read_regular};
use crate::json_positions::{PathStep, find_duplicate, find_key};
use crate::method::MethodInfo;
use crate::parameters::Parameter;
use crate::{Catalog, ControlPlane, RpcError};

/// Longest file: a hundred times that of a thousand devices and subsystems.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// A configuration file that cannot be read, is not JSON of that form, or calls a method that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// A parsed configuration file. Its methods and the names of their parameters are known; values are checked
/// when it is applied.
#[derive(Clone, Debug, Default)]
pub struct ConfigFile {
    /// File name, or name of the RPC method, for error messages.
    pub(crate) origin: String,
    pub(crate) steps: Vec<ConfigStep>,
}

/// A call of a configuration.
#[derive(Clone, Debug)]
pub(crate) struct ConfigStep {
    /// For error messages: `subsystems[1].config[0] (bdev)`.
    pub(crate) position: String,
    pub(crate) method: String,
    /// As JSON text, a tenth of the memory of a parsed value: the configuration stays in memory for the next
    /// reload.
    params: Box<str>,
}

impl ConfigStep {
    pub(crate) fn params(&self) -> Value {
        serde_json::from_str(&self.params).expect("the text was written from a value")
    }
}

impl ConfigFile {
    /// Reads a file. A method or parameter that does not exist and a key that stands twice are errors; values
    /// of parameters are checked by [`apply`](Self::apply).
    pub fn read(path: &Path, catalog: &Catalog) -> Result<ConfigFile, ConfigError> {
        let origin = path.display().to_string();
        let failed = |error| ConfigError(format!("{origin}: {error}"));
        let file = std::fs::File::open(path).map_err(failed)?;
        let text = read_limited(file, FILE_BYTES_MAX).map_err(failed)?;
        ConfigFile::parse(&origin, &text, catalog)
    }

    /// As [`read`](Self::read), of a regular file only: a FIFO, which is read to its end once, would keep a
    /// later reader waiting for ever.
    pub fn read_again(path: &Path, catalog: &Catalog) -> Result<ConfigFile, ConfigError> {
        let origin = path.display().to_string();
        let text = read_regular(path, FILE_BYTES_MAX);
        let text = text.map_err(|error| ConfigError(format!("{origin}: {error}")))?;
        ConfigFile::parse(&origin, &text, catalog)
    }

    /// As [`read`](Self::read), from text; `origin` names it in errors.
    pub fn parse(origin: &str, text: &[u8], catalog: &Catalog) -> Result<ConfigFile, ConfigError> {
        let invalid = |message: String| ConfigError(format!("{origin}: {message}"));
        let document: Value = serde_json::from_slice(text).map_err(|error| {
            invalid(format!("{error}; expected {{\"subsystems\":[{{\"subsystem\":…,\"config\":[…]}}]}}"))
        })?;
        if let Some((key, position)) = find_duplicate(text) {
            return Err(invalid(format!("{position}: the key `{key}` stands twice")));
        }
        let mut parser = ConfigParser { text, catalog, path: Vec::new(), steps: Vec::new() };
        parser.document(document).map_err(invalid)?;
        Ok(ConfigFile { origin: origin.to_string(), steps: parser.steps })
    }

    /// The calls in order: method and parameters.
    pub fn calls(&self) -> impl Iterator<Item = (&str, Value)> {
        self.steps.iter().map(|step| (step.method.as_str(), step.params()))
    }

    /// Makes the calls in order. Stops at the first that fails; those before it stay in effect. Before a call
    /// fails, what disks have is found. Devices that calls use are not read: what a host has written there
    /// must not keep the call from using them.
    pub fn apply(&self, plane: &ControlPlane) -> Result<(), RpcError> {
        let _used = plane.use_bdevs(self.used_bdevs());
        for step in &self.steps {
            plane.invoke_configured(&step.method, step.params()).map_err(|error| {
                let ConfigStep { position, method, .. } = step;
                RpcError::new(error.code, format!("{}: {position}: {method}: {error}", self.origin))
            })?;
        }
        Ok(())
    }
}

/// Turns a document into steps. Its errors name line and column of the key that they are about.
struct ConfigParser<'a> {
    text: &'a [u8],
    catalog: &'a Catalog,
    path: Vec<PathStep>,
    steps: Vec<ConfigStep>,
}

impl ConfigParser<'_> {
    fn document(&mut self, document: Value) -> Result<(), String> {
        let mut document = self.object(document, &["subsystems"])?;
        let Some(Value::Array(sections)) = document.remove("subsystems") else {
            return Err("expected {\"subsystems\":[{\"subsystem\":…,\"config\":[…]}]}".to_string());
        };
        for (number, section) in sections.into_iter().enumerate() {
            self.path = vec![PathStep::Key("subsystems".to_string()), PathStep::Index(number)];
            self.section(number, section)?;
        }
        Ok(())
    }

    fn section(&mut self, number: usize, section: Value) -> Result<(), String> {
        let at = format!("subsystems[{number}]");
        let mut section = self.object(section, &["subsystem", "config"]).map_err(within(&at))?;
        let Some(Value::String(name)) = section.remove("subsystem") else {
            return Err(format!("{at}: the name `subsystem` is missing"));
        };
        let elements = match section.remove("config") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(elements)) => elements,
            Some(_) => return Err(format!("{at} ({name}): `config` is not an array of calls")),
        };
        self.path.push(PathStep::Key("config".to_string()));
        for (index, element) in elements.into_iter().enumerate() {
            let position = format!("{at}.config[{index}] ({name})");
            self.path.push(PathStep::Index(index));
            if let Value::Array(calls) = element {
                for (index, call) in calls.into_iter().enumerate() {
                    self.path.push(PathStep::Index(index));
                    self.call(&position, call).map_err(within(&position))?;
                    self.path.pop();
                }
            } else {
                self.call(&position, element).map_err(within(&position))?;
            }
            self.path.pop();
        }
        Ok(())
    }

    fn call(&mut self, position: &str, call: Value) -> Result<(), String> {
        let mut call = self.object(call, &["method", "params"])?;
        let Some(Value::String(method)) = call.remove("method") else {
            return Err("the name `method` is missing".to_string());
        };
        let Some(info) = self.catalog.get(&method) else {
            let key = self.place("method");
            return Err(format!("{key}{}", Catalog::not_found(&method).message));
        };
        let params = call.remove("params").unwrap_or_default();
        self.path.push(PathStep::Key("params".to_string()));
        self.parameters(info, &info.parameters(), &params)?;
        self.path.pop();
        let params = params.to_string().into();
        self.steps.push(ConfigStep { position: position.to_string(), method, params });
        Ok(())
    }

    /// Checks the names of a call's parameters, and of those within objects.
    fn parameters(
        &mut self,
        info: &MethodInfo,
        declared: &[Parameter],
        params: &Value,
    ) -> Result<(), String> {
        let Value::Object(params) = params else { return Ok(()) };
        for (key, value) in params {
            let Some(parameter) = declared.iter().find(|parameter| parameter.name == key) else {
                let names: Vec<&str> = declared.iter().map(|parameter| parameter.name).collect();
                let expected = if names.is_empty() { "there are none".to_string() } else { names.join(", ") };
                let place = self.place(key);
                return Err(format!("{place}{}: unknown parameter `{key}`; expected {expected}", info.name));
            };
            if !parameter.members.is_empty() {
                self.path.push(PathStep::Key(key.clone()));
                self.parameters(info, &parameter.members, value)?;
                self.path.pop();
            }
        }
        Ok(())
    }

    /// The members of an object that has no others than those known.
    fn object(&self, value: Value, known: &[&str]) -> Result<Map<String, Value>, String> {
        let Value::Object(object) = value else {
            return Err(format!("expected an object with {}", known.join(", ")));
        };
        match object.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => {
                Err(format!("{}unknown key `{key}`; expected {}", self.place(key), known.join(", ")))
            }
            None => Ok(object),
        }
    }

    /// Line and column of a key of the present object, with a colon.
    fn place(&self, key: &str) -> String {
        let mut path = self.path.clone();
        path.push(PathStep::Key(key.to_string()));
        find_key(self.text, &path).map_or(String::new(), |position| format!("{position}: "))
    }
}

fn within(position: &str) -> impl Fn(String) -> String {
    move |message| format!("{position}: {message}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Method, Module};

    crate::parameters! {
        struct Created {}
        ignored("this is a test") { bdev_io_pool_size, name, num_blocks, block_size }
    }

    struct Bdev;

    impl Module for Bdev {
        const NAME: &'static str = "bdev";

        fn methods() -> Vec<Method<Bdev>> {
            ["bdev_set_options", "bdev_malloc_create", "bdev_wait_for_examine"]
                .map(|name| Method::default_only::<Created>(name, "this is a test"))
                .into()
        }
    }

    fn parse(text: &str) -> Result<ConfigFile, ConfigError> {
        ConfigFile::parse("a.json", text.as_bytes(), &Catalog::new().with::<Bdev>())
    }

    crate::parameters! {
        struct Address {
            /// Address
            traddr: String,
        }
    }

    crate::parameters! {
        struct Listen {
            /// Name
            name: String,
            /// Where
            listen_address: Address,
        }
    }

    #[test]
    fn a_file_without_end_is_refused() {
        let error = ConfigFile::read(Path::new("/dev/zero"), &Catalog::default()).unwrap_err();
        assert_eq!(error.to_string(), "/dev/zero: more than the maximum of 67108864 bytes");
    }

    #[test]
    fn what_is_not_a_regular_file_is_not_read_again() {
        let path = std::env::temp_dir().join(format!("ringbolt-config-{}", std::process::id()));
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = ConfigFile::read_again(&path, &Catalog::default()).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(error.to_string(), format!("{}: not a regular file", path.display()));
        std::fs::write(&path, r#"{"subsystems":[]}"#).unwrap();
        assert!(ConfigFile::read_again(&path, &Catalog::default()).is_ok());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn unknown_and_duplicate_keys_are_named_with_line_and_column() {
        struct Target;
        impl Module for Target {
            const NAME: &'static str = "nvmf";

            fn methods() -> Vec<Method<Target>> {
                vec![Method::query("nvmf_listen", |_: &Target, _: Listen| Ok::<_, RpcError>(true))]
            }
        }
        let catalog = Catalog::new().with::<Target>();
        let parse = |params: &str| {
            let text = format!(
                "{{\"subsystems\": [{{\"subsystem\": \"nvmf\", \"config\": [\n{{\"method\": \"nvmf_listen\", \"params\":\n{params}}}]}}]}}"
            );
            ConfigFile::parse("a.json", text.as_bytes(), &catalog).map_err(|error| error.to_string())
        };
        assert!(parse("{\"name\": \"a\", \"listen_address\": {\"traddr\": \"x\"}}").is_ok());
        for (params, expected) in [
            (
                "{\"nam\": \"a\"}",
                "line 3 column 2: nvmf_listen: unknown parameter `nam`; expected name, listen_address",
            ),
            (
                "{\"listen_address\": {\n  \"addr\": 1}}",
                "line 4 column 3: nvmf_listen: unknown parameter `addr`; expected traddr",
            ),
        ] {
            let expected = format!("a.json: subsystems[0].config[0] (nvmf): {expected}");
            assert_eq!(parse(params).err(), Some(expected));
        }
        let twice = parse("{\"name\": \"a\",\n \"name\": \"b\"}").err();
        assert_eq!(twice.as_deref(), Some("a.json: line 4 column 2: the key `name` stands twice"));
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
        assert_eq!(
            error("{\n \"subsystem\":[]}"),
            "a.json: line 2 column 2: unknown key `subsystem`; expected subsystems"
        );
        let unknown = error(r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"bdev_frob"}]}]}"#);
        assert_eq!(
            unknown,
            "a.json: subsystems[0].config[0] (bdev): line 1 column 47: no method is called bdev_frob"
        );
        let known = error(
            r#"{"subsystems":[{"subsystem":"iscsi","config":[{"method":"iscsi_create_portal_group"}]}]}"#,
        );
        assert!(
            known.contains("column 48: iscsi_create_portal_group is an SPDK method that Ringbolt lacks"),
            "{known}"
        );
    }
}
