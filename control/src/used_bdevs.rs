//! Which block devices the calls of a configuration use.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::ConfigFile;

/// Parameters of exports and stores that name the device that is used.
const DEVICE_PARAMETERS: [&str; 3] = ["bdev_name", "dev_name", "log_bdev_name"];
/// Parameters of bdevs on one other that name this.
const BASE_PARAMETERS: [&str; 2] = ["base_bdev_name", "base_bdev"];

impl ConfigFile {
    /// The names of the block devices that exports, stores and bdevs on one other are to use, as they are
    /// written there. Those that are only read are not among them: others may use them beside.
    pub(crate) fn used_bdevs(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for (method, params) in self.calls() {
            let parameters =
                if method.starts_with("bdev_") { &BASE_PARAMETERS[..] } else { &DEVICE_PARAMETERS[..] };
            collect(&params, parameters, &mut names);
        }
        names
    }
}

fn collect(value: &Value, parameters: &[&str], names: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            let is_read =
                ["read_only", "readonly"].iter().any(|key| object.get(*key) == Some(&Value::Bool(true)));
            for (key, value) in object.iter().filter(|_| !is_read) {
                match value {
                    Value::String(name) if parameters.contains(&key.as_str()) => {
                        _ = names.insert(name.clone())
                    }
                    value => collect(value, parameters, names),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, parameters, names)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn devices_are_found_wherever_a_call_names_them_unless_they_are_only_read() {
        for (parameters, params, expected) in [
            (
                &DEVICE_PARAMETERS[..],
                json!({ "nqn": "n", "namespace": { "bdev_name": "a", "nsid": 1 } }),
                &["a"][..],
            ),
            (
                &DEVICE_PARAMETERS,
                json!({ "luns": [{ "bdev_name": "a" }, { "bdev_name": "b" }] }),
                &["a", "b"],
            ),
            (&DEVICE_PARAMETERS, json!({ "ctrlr": "c", "dev_name": "a" }), &["a"]),
            (&DEVICE_PARAMETERS, json!({ "bdev_name": "a", "name": "b", "read_only": true }), &[]),
            (&DEVICE_PARAMETERS, json!({ "bdev_name": "a", "read_only": false }), &["a"]),
            (&DEVICE_PARAMETERS, json!({ "bdev_name": ["a"], "name": null }), &[]),
            (&BASE_PARAMETERS, json!({ "bdev_name": "a", "base_bdev_name": "b" }), &["b"]),
        ] {
            let mut names = BTreeSet::new();
            collect(&params, parameters, &mut names);
            assert!(names.iter().eq(expected), "{params}: {names:?}");
        }
    }
}
