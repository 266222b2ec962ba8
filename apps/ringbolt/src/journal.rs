//! What made the devices, so that a configuration can be written that makes them again.

use serde_json::{Value, json};

/// The calls that made the bdevs that are there, oldest first: one that stands on another comes after it.
#[derive(Default)]
pub(crate) struct Journal {
    bdevs: Vec<Entry>,
}

struct Entry {
    name: String,
    method: &'static str,
    params: Value,
}

impl Journal {
    /// Notes what made a bdev.
    pub(crate) fn created(&mut self, name: &str, method: &'static str, params: Value) {
        self.bdevs.retain(|entry| entry.name != name);
        self.bdevs.push(Entry { name: name.to_string(), method, params });
    }

    /// Forgets a bdev.
    pub(crate) fn deleted(&mut self, name: &str) {
        self.bdevs.retain(|entry| entry.name != name);
    }

    /// Notes that a bdev would now be made with another parameter.
    pub(crate) fn changed(&mut self, name: &str, parameter: &str, value: Value) {
        if let Some(entry) = self.bdevs.iter_mut().find(|entry| entry.name == name) {
            entry.params[parameter] = value;
        }
    }

    /// The bdevs, oldest first.
    pub(crate) fn bdev_names(&self) -> Vec<String> {
        self.bdevs.iter().map(|entry| entry.name.clone()).collect()
    }

    /// The calls that make the bdevs of which `exists` is true.
    pub(crate) fn bdev_calls(&self, exists: impl Fn(&str) -> bool) -> Vec<Value> {
        let there = self.bdevs.iter().filter(|entry| exists(&entry.name));
        there.map(|entry| json!({ "method": entry.method, "params": entry.params })).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_come_in_order_and_as_they_would_be_made_now() {
        let mut journal = Journal::default();
        journal.created("a", "bdev_null_create", json!({ "num_blocks": 1 }));
        journal.created("b", "bdev_delay_create", json!({ "base": "a" }));
        journal.created("c", "bdev_null_create", json!({}));
        journal.changed("a", "num_blocks", json!(2));
        journal.deleted("c");
        let calls = journal.bdev_calls(|_| true);
        assert_eq!(calls.len(), 2);
        assert_eq!(calls[0], json!({ "method": "bdev_null_create", "params": { "num_blocks": 2 } }));
        assert_eq!(journal.bdev_calls(|name| name == "b")[0]["method"], "bdev_delay_create");
        assert_eq!(journal.bdev_names(), ["a", "b"]);
    }
}
