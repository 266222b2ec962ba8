//! Calls in the form in which they are compared: those that ask for the same are equal, however they are
//! written.
//!
//! A [`CanonicalCall`] has the parameters of [`ControlPlane::canonical`], and knows which of them it leaves
//! to the method, such as an NSID or a UUID. What runs is known from what `save_config` writes
//! ([`RunningCalls`]), which has all of these. A call that leaves a parameter to the method is satisfied by
//! whatever was assigned.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use crate::parameters::{Parameter, Presence};
use crate::{Catalog, ControlPlane, MethodInfo, RpcError};

/// Parts of names of methods that create, and of those that undo them.
const REVERSES: [(&str, &str); 12] = [
    ("accel_crypto_key_create", "accel_crypto_key_destroy"),
    // `vhost_delete_controller` deletes those of every kind.
    ("_create_blk_controller", "_delete_controller"),
    ("_create_scsi_controller", "_delete_controller"),
    ("ublk_create_target", "ublk_destroy_target"),
    ("_create_", "_delete_"),
    ("_create", "_delete"),
    ("_register_", "_unregister_"),
    ("_add_", "_remove_"),
    ("_attach_", "_detach_"),
    ("_start_", "_stop_"),
    ("_start", "_stop"),
    ("store_open", "store_close"),
];

/// A call with canonical parameters.
#[derive(Clone, Debug)]
pub(super) struct CanonicalCall {
    pub(super) method: &'static str,
    /// An object, with its keys and those within it in order.
    pub(super) params: Value,
    /// Places of the parameters that it leaves to the method, as `outer.inner` or `list.0.inner`.
    pub(super) left: Vec<String>,
}

/// A call that undoes another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ReverseCall {
    pub(super) method: &'static str,
    pub(super) params: Map<String, Value>,
}

impl CanonicalCall {
    /// The canonical form of a call.
    ///
    /// # Errors
    /// The method does not exist, or would reject the parameters whatever exists.
    pub(super) fn new(plane: &ControlPlane, method: &str, params: Value) -> Result<CanonicalCall, RpcError> {
        let info = plane.catalog().get(method).ok_or_else(|| Catalog::not_found(method))?;
        let params = Value::Object(plane.canonical(method, params)?);
        Ok(CanonicalCall::of(info, params))
    }

    fn of(info: &MethodInfo, mut params: Value) -> CanonicalCall {
        params.sort_all_objects();
        let mut left = Vec::new();
        if !info.assigned.is_empty() {
            let declared = info.parameters();
            for path in info.assigned {
                let (path, sentinel) =
                    path.split_once('=').map_or((*path, None), |(path, value)| (path, Some(value)));
                find_left(&params, &declared, path, sentinel, String::new(), &mut left);
            }
        }
        CanonicalCall { method: info.name, params, left }
    }

    /// Equal for equal calls.
    pub(super) fn text(&self) -> String {
        format!("{} {}", self.method, self.params)
    }

    /// As [`text`](Self::text), without the parameters at `places`.
    fn text_without(&self, places: &[String]) -> String {
        format!("{} {}", self.method, self.without(places))
    }

    fn without(&self, places: &[String]) -> Value {
        let mut params = self.params.clone();
        places.iter().for_each(|place| remove(&mut params, place));
        params
    }

    /// Whether both set the same option of the same object, or of none.
    pub(super) fn sets_same(&self, other: &CanonicalCall) -> bool {
        const NAMES: [&str; 11] = [
            "name",
            "tgt_name",
            "nqn",
            "ctrlr",
            "impl_name",
            "listen_address",
            "delay_bdev_name",
            "anagrpid",
            "nsid",
            "tag",
            "pg_tag",
        ];
        self.method == other.method && NAMES.iter().all(|name| self.params[name] == other.params[name])
    }

    /// Whether both give the same number, of a namespace or a SCSI target, to different devices: what has the
    /// number is replaced then, not changed.
    pub(super) fn replaces(&self, other: &CanonicalCall) -> bool {
        let device = |call: &CanonicalCall| match call.method {
            "nvmf_subsystem_add_ns" => call.params["namespace"]["bdev_name"].clone(),
            "vhost_scsi_controller_add_target" => call.params["bdev_name"].clone(),
            _ => Value::Null,
        };
        device(self) != device(other)
    }

    /// The call that undoes this one; `None` if there is no such method, or a parameter that it requires is
    /// not known.
    pub(super) fn reverse(&self, catalog: &Catalog) -> Option<ReverseCall> {
        let reverse_name = |(create, delete): &(&str, &str)| {
            let name = self.method.replacen(create, delete, 1);
            catalog.get(&name).filter(|info| info.name != self.method)
        };
        let info = REVERSES.iter().find_map(reverse_name)?;
        let (own, mut params) = (self.without(&self.left), Map::new());
        for parameter in info.parameters() {
            let given = match (self.method, parameter.name) {
                ("nvmf_subsystem_add_ns", "nsid") => &own["namespace"]["nsid"],
                // An error bdev is named after its base.
                ("bdev_error_create", "name") => &own["base_name"],
                ("accel_crypto_key_create", "key_name") => &own["name"],
                (_, name) => &own[name],
            };
            let prefix = if self.method == "bdev_error_create" { "EE_" } else { "" };
            match given {
                Value::Null if parameter.presence == Presence::Required => return None,
                Value::Null => {}
                Value::String(text) => {
                    _ = params.insert(parameter.name.to_string(), format!("{prefix}{text}").into())
                }
                given => _ = params.insert(parameter.name.to_string(), given.clone()),
            }
        }
        Some(ReverseCall { method: info.name, params })
    }

    /// The [`reverse`](Self::reverse), if nothing in it is left to the method: it names the object.
    pub(super) fn object(&self, catalog: &Catalog) -> Option<ReverseCall> {
        let reverse = self.reverse(catalog)?;
        let is_left = |name: &String| self.left.iter().any(|place| place.split('.').next() == Some(name));
        (!reverse.params.keys().any(is_left)).then_some(reverse)
    }
}

impl ReverseCall {
    /// Whether what it deletes takes a call with it: one of the same kind that names the same object.
    pub(super) fn removes(&self, call: &CanonicalCall) -> bool {
        let kind = |method: &str| method.split('_').next().map(str::to_string);
        !self.params.is_empty()
            && kind(self.method) == kind(call.method)
            && self.params.iter().all(|(name, value)| call.params[name] == *value)
    }

    fn text(&self) -> String {
        let mut params = Value::Object(self.params.clone());
        params.sort_all_objects();
        format!("{} {params}", self.method)
    }
}

/// The calls that recreate what runs, which `save_config` writes.
pub(super) struct RunningCalls {
    pub(super) calls: Vec<CanonicalCall>,
    by_text: HashMap<String, usize>,
    by_object: HashMap<String, usize>,
}

/// The running calls of a method, by their text without the parameters that other calls leave to it.
type ByLeft = HashMap<(&'static str, Vec<String>), HashMap<String, Vec<usize>>>;

impl RunningCalls {
    pub(super) fn of(plane: &ControlPlane) -> RunningCalls {
        RunningCalls::from_saved(plane, &plane.save())
    }

    /// The calls of what `save_config` writes.
    pub(super) fn from_saved(plane: &ControlPlane, saved: &Value) -> RunningCalls {
        let sections = saved["subsystems"].as_array().into_iter().flatten();
        let calls = sections.flat_map(|section| section["config"].as_array().into_iter().flatten());
        let canonical = |call: &Value| {
            let method = call["method"].as_str()?;
            // What is saved is accepted: the test that goes over every method checks it.
            CanonicalCall::new(plane, method, call["params"].clone()).ok()
        };
        let calls: Vec<CanonicalCall> = calls.filter_map(canonical).collect();
        let by_text = calls.iter().enumerate().map(|(index, call)| (call.text(), index)).collect();
        let objects = calls.iter().enumerate();
        let by_object =
            objects.filter_map(|(index, call)| Some((call.object(plane.catalog())?.text(), index))).collect();
        RunningCalls { calls, by_text, by_object }
    }

    /// The running call of each of these calls. Two of them have the same only if they ask for the same.
    pub(super) fn find<'a>(
        &self,
        wanted: impl Iterator<Item = &'a CanonicalCall> + Clone,
        catalog: &Catalog,
    ) -> Vec<Option<usize>> {
        let mut found: Vec<Option<usize>> =
            wanted.clone().map(|call| self.by_text.get(&call.text()).copied()).collect();
        let mut taken: HashSet<usize> = found.iter().flatten().copied().collect();
        let mut indices = ByLeft::new();
        for (call, place) in wanted.zip(&mut found) {
            if place.is_some() || call.left.is_empty() {
                continue;
            }
            let index = indices
                .entry((call.method, call.left.clone()))
                .or_insert_with(|| self.index_without(call.method, &call.left));
            let satisfying = index.get(&call.text_without(&call.left)).map_or(&[][..], Vec::as_slice);
            let free = satisfying.iter().find(|one| !taken.contains(one));
            // A call that stands twice and names its object is about the same one.
            let same = satisfying.first().filter(|_| call.object(catalog).is_some());
            *place = free.or(same).copied();
            taken.extend(*place);
        }
        found
    }

    fn index_without(&self, method: &str, left: &[String]) -> HashMap<String, Vec<usize>> {
        let mut index: HashMap<String, Vec<usize>> = HashMap::new();
        for (place, call) in self.calls.iter().enumerate().filter(|(_, call)| call.method == method) {
            index.entry(call.text_without(left)).or_default().push(place);
        }
        index
    }

    /// Whether a call is one of those that run.
    pub(super) fn contains(&self, call: &CanonicalCall) -> bool {
        self.by_text.contains_key(&call.text())
    }

    /// The running call about the object that a call undoes.
    pub(super) fn of_object(&self, object: &ReverseCall) -> Option<usize> {
        self.by_object.get(&object.text()).copied()
    }
}

/// Collects the places of a parameter at which a call leaves it to the method: it is absent, has its default,
/// or is the `sentinel`, a JSON text. A list has one for each element.
fn find_left(
    value: &Value,
    declared: &[Parameter],
    path: &str,
    sentinel: Option<&str>,
    outer: String,
    left: &mut Vec<String>,
) {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let parameter = declared.iter().find(|parameter| parameter.name == name);
    let place = if outer.is_empty() { name.to_string() } else { format!("{outer}.{name}") };
    let value = &value[name];
    let Some(rest) = rest else {
        let default = parameter.map(|parameter| &parameter.presence);
        let is_default = matches!(default, Some(Presence::Default(default)) if default == value);
        let is_sentinel = sentinel
            .is_some_and(|text| serde_json::from_str(text).is_ok_and(|sentinel: Value| sentinel == *value));
        if value.is_null() || is_default || is_sentinel {
            left.push(place);
        }
        return;
    };
    let members = parameter.map_or(&[][..], |parameter| &parameter.members);
    match value {
        Value::Array(list) => {
            for (index, element) in list.iter().enumerate() {
                find_left(element, members, rest, sentinel, format!("{place}.{index}"), left);
            }
        }
        value => find_left(value, members, rest, sentinel, place, left),
    }
}

/// Removes the value at a place of [`find_left`].
fn remove(value: &mut Value, place: &str) {
    match (place.split_once('.'), value) {
        (Some((index, rest)), Value::Array(list)) => {
            if let Some(element) = index.parse().ok().and_then(|index: usize| list.get_mut(index)) {
                remove(element, rest);
            }
        }
        (Some((name, rest)), Value::Object(object)) => {
            if let Some(value) = object.get_mut(name) {
                remove(value, rest);
            }
        }
        // In order still: the texts of values are compared.
        (None, Value::Object(object)) => _ = object.shift_remove(place),
        _ => {}
    }
}

/// The parameters of a call that ran, without the identifiers that `wanted` leaves to the method: an object
/// that is made again on another device is not the same, but keeps its number and port.
pub(super) fn without_identity(running: &CanonicalCall, wanted: &CanonicalCall) -> Value {
    let is_identity = |place: &&String| matches!(place.rsplit('.').next(), Some("uuid" | "nguid"));
    let identities: Vec<String> = wanted.left.iter().filter(is_identity).cloned().collect();
    running.without(&identities)
}
