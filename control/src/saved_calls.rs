//! The calls that created the objects of a subsystem: `save_config` writes them to recreate the configuration.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Map, Value, json};

use crate::Parameters;

/// The recorded calls of one subsystem in order of creation, so that what stands on something comes after it.
/// Cheap to clone; modules record through [`CallRecorder`]s.
#[derive(Clone, Default)]
pub struct SavedCalls(Arc<Mutex<CallList>>);

/// Records the calls that create one kind of object. Names of different kinds may be the same.
#[derive(Clone)]
pub struct CallRecorder {
    list: SavedCalls,
    kind: usize,
}

/// A place in the order of creation, from [`CallRecorder::reserve`].
#[derive(Debug)]
pub struct CallPlace(u64);

type Exists = Arc<dyn Fn(&str) -> bool + Send + Sync>;

#[derive(Default)]
struct CallList {
    kinds: Vec<RecordedKind>,
    /// In order of creation, by a number that grows.
    calls: BTreeMap<u64, SavedCall>,
    last: u64,
}

struct RecordedKind {
    /// Whether an object still exists.
    exists: Exists,
    /// The number of each object's call.
    numbers: HashMap<String, u64>,
}

#[derive(Clone)]
struct SavedCall {
    kind: usize,
    name: String,
    method: &'static str,
    params: Value,
}

impl SavedCalls {
    /// A recorder for a kind of object. `exists` says whether an object is still there: some end by themselves.
    /// It is called without a lock of this list.
    pub fn recorder(&self, exists: impl Fn(&str) -> bool + Send + Sync + 'static) -> CallRecorder {
        let mut list = self.lock();
        list.kinds.push(RecordedKind { exists: Arc::new(exists), numbers: HashMap::new() });
        CallRecorder { kind: list.kinds.len() - 1, list: self.clone() }
    }

    /// The calls of the objects that still exist, as elements of a configuration.
    pub fn calls(&self) -> Vec<Value> {
        let list = self.lock();
        let kinds: Vec<Exists> = list.kinds.iter().map(|kind| kind.exists.clone()).collect();
        let calls: Vec<SavedCall> = list.calls.values().cloned().collect();
        drop(list);
        let existing = calls.into_iter().filter(|call| kinds[call.kind](&call.name));
        existing.map(|call| json!({ "method": call.method, "params": call.params })).collect()
    }

    fn lock(&self) -> MutexGuard<'_, CallList> {
        sync::lock(&self.0)
    }
}

impl CallRecorder {
    /// A place for a call that takes long, such as a job: what stands on its object is created, and recorded, before the
    /// call has ended, and comes after it all the same.
    pub fn reserve(&self) -> CallPlace {
        let mut list = self.list.lock();
        list.last += 1;
        CallPlace(list.last)
    }

    /// Records the call that created `name`. Replaces an earlier call of the same name.
    pub fn record(&self, name: &str, method: &'static str, params: &impl Parameters) {
        self.record_at(self.reserve(), name, method, params);
    }

    /// As [`record`](Self::record), at the place that was reserved when the call began.
    pub fn record_at(&self, place: CallPlace, name: &str, method: &'static str, params: &impl Parameters) {
        let mut list = self.list.lock();
        list.remove(self.kind, name);
        let (params, number) = (Value::Object(params.to_object()), place.0);
        list.calls.insert(number, SavedCall { kind: self.kind, name: name.to_string(), method, params });
        list.kinds[self.kind].numbers.insert(name.to_string(), number);
    }

    /// Removes the call of `name`, which was deleted.
    pub fn remove(&self, name: &str) {
        self.list.lock().remove(self.kind, name);
    }

    /// Sets a parameter of the recorded call, after the object was changed.
    pub fn set_parameter(&self, name: &str, parameter: &str, value: impl Into<Value>) {
        let mut list = self.list.lock();
        let number = list.kinds[self.kind].numbers.get(name).copied();
        if let Some(call) = number.and_then(|number| list.calls.get_mut(&number)) {
            call.params[parameter] = value.into();
        }
    }

    /// The parameters of the recorded call.
    pub fn parameters(&self, name: &str) -> Option<Map<String, Value>> {
        let list = self.list.lock();
        let call = list.kinds[self.kind].numbers.get(name).and_then(|number| list.calls.get(number));
        call.and_then(|call| call.params.as_object().cloned())
    }

    /// Names of the recorded objects, oldest first.
    pub fn names(&self) -> Vec<String> {
        let list = self.list.lock();
        list.calls.values().filter(|call| call.kind == self.kind).map(|call| call.name.clone()).collect()
    }
}

impl CallList {
    fn remove(&mut self, kind: usize, name: &str) {
        if let Some(number) = self.kinds[kind].numbers.remove(name) {
            self.calls.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::parameters! {
        struct Created {
            num_blocks: Option<u64>,
        }
    }

    #[test]
    fn calls_are_in_order_of_creation_with_current_parameters() {
        let saved = SavedCalls::default();
        let (bdevs, paths) = (saved.recorder(|name| name != "gone"), saved.recorder(|_| true));
        let created = |num_blocks| Created { num_blocks };
        bdevs.record("a", "bdev_null_create", &created(Some(1)));
        paths.record("a", "attach", &created(None));
        bdevs.record("b", "bdev_delay_create", &created(None));
        bdevs.record("c", "bdev_null_create", &created(None));
        bdevs.record("gone", "bdev_null_create", &created(None));
        bdevs.set_parameter("a", "num_blocks", 2);
        bdevs.remove("c");
        // An attachment that takes long: what it finds, and what stands on that, is recorded first.
        let place = paths.reserve();
        bdevs.record("on-b", "bdev_delay_create", &created(None));
        paths.record_at(place, "b", "attach", &created(None));
        let expected = json!([{ "method": "bdev_null_create", "params": { "num_blocks": 2 } },
            { "method": "attach", "params": {} }, { "method": "bdev_delay_create", "params": {} },
            { "method": "attach", "params": {} }, { "method": "bdev_delay_create", "params": {} }]);
        assert_eq!(Value::Array(saved.calls()), expected);
        assert_eq!(
            (bdevs.names(), paths.names()),
            (vec!["a".into(), "b".into(), "gone".into(), "on-b".into()], vec!["a".into(), "b".into()])
        );
    }
}
