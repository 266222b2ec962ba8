//! Options of Ceph as a parameter: an object of strings.

use std::collections::BTreeMap;

use control::json::Value;
use control::{DecodeLog, ParameterError, ParameterType};

/// Options by name, as of a section of Ceph's configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CephOptions(pub(crate) BTreeMap<String, String>);

impl ParameterType for CephOptions {
    fn kind() -> String {
        "object of strings".to_string()
    }

    fn decode(value: Value, _log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let Value::Object(members) = value else { return Err(ParameterError::new("expected an object")) };
        // Not with the value: it may be a key.
        let text = |(name, value)| match value {
            Value::String(text) => Ok((name, text)),
            _ => Err(ParameterError::new(format!("{name}: expected a string"))),
        };
        members.into_iter().map(text).collect::<Result<_, _>>().map(CephOptions)
    }

    fn encode(&self) -> Value {
        self.0.iter().map(|(name, value)| (name.clone(), Value::from(value.as_str()))).collect()
    }
}

impl CephOptions {
    pub(crate) fn pairs(&self) -> Vec<(String, String)> {
        self.0.iter().map(|(name, value)| (name.clone(), value.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use control::RpcError;
    use control::json::json;

    use super::*;

    #[test]
    fn options_are_strings_and_an_error_does_not_show_the_value() {
        let mut log = DecodeLog::default();
        let given = json!({ "mon_host": "h", "key": "k" });
        let options = CephOptions::decode(given.clone(), &mut log).unwrap();
        assert_eq!(options.encode(), given);
        let error = CephOptions::decode(json!({ "key": 12345 }), &mut log).unwrap_err();
        let message = RpcError::from(error).message;
        assert!(message.contains("key: expected a string") && !message.contains("12345"), "{message}");
        assert!(CephOptions::decode(json!([]), &mut log).is_err());
    }
}
