//! Calls that change an object which an earlier call has created: `save_config` writes one call for all of
//! them.

use serde_json::{Value, json};

use super::calls::{CanonicalCall, RunningCalls};
use super::{State, WantedCall};
use crate::{ControlPlane, MethodInfo, RpcError};

/// How calls of one method change what a call of another one has created.
struct Part {
    creates: &'static str,
    changes: &'static str,
    /// The parameter of both that names the object.
    key: &'static str,
    kind: PartKind,
}

/// What such a call does to the parameters of the creating call.
enum PartKind {
    /// Adds to a list: the list of the same name, or its other parameters as one element.
    Add(&'static str),
    /// Adds to several lists what they lack.
    AddMissing(&'static [&'static str]),
    /// Takes elements from lists.
    Remove(&'static [&'static str]),
    /// Sets these parameters; an absent one to its default.
    Set(&'static [&'static str]),
}

const INITIATORS: PartKind = PartKind::AddMissing(&["initiators", "netmasks"]);
const AUTH: PartKind = PartKind::Set(&["disable_chap", "require_chap", "mutual_chap", "chap_group"]);

const PARTS: [Part; 8] = [
    Part::new("iscsi_create_target_node", "iscsi_target_node_add_lun", "name", PartKind::Add("luns")),
    Part::new(
        "iscsi_create_target_node",
        "iscsi_target_node_add_pg_ig_maps",
        "name",
        PartKind::Add("pg_ig_maps"),
    ),
    Part::new(
        "iscsi_create_target_node",
        "iscsi_target_node_remove_pg_ig_maps",
        "name",
        PartKind::Remove(&["pg_ig_maps"]),
    ),
    Part::new("iscsi_create_target_node", "iscsi_target_node_set_auth", "name", AUTH),
    Part::new("iscsi_create_auth_group", "iscsi_auth_group_add_secret", "tag", PartKind::Add("secrets")),
    Part::new("iscsi_create_initiator_group", "iscsi_initiator_group_add_initiators", "tag", INITIATORS),
    Part::new(
        "iscsi_create_initiator_group",
        "iscsi_initiator_group_remove_initiators",
        "tag",
        PartKind::Remove(&["initiators", "netmasks"]),
    ),
    Part::new(
        "nvmf_create_subsystem",
        "nvmf_subsystem_allow_any_host",
        "nqn",
        PartKind::Set(&["allow_any_host"]),
    ),
];

impl Part {
    const fn new(creates: &'static str, changes: &'static str, key: &'static str, kind: PartKind) -> Part {
        Part { creates, changes, key, kind }
    }

    /// Whether a step changes the object that `call` creates.
    fn is_of(&self, plane: &ControlPlane, call: &WantedCall<'_>, change: &WantedCall<'_>) -> bool {
        if self.creates != call.call.method || self.changes != change.call.method {
            return false;
        }
        // The name, as the creating method understands it.
        let mut named = call.step.params();
        named[self.key] = change.step.params()[self.key].take();
        CanonicalCall::new(plane, self.creates, named)
            .is_ok_and(|named| named.params[self.key] == call.call.params[self.key])
    }

    /// Applies a change to the parameters of the creating call.
    fn apply(&self, params: &mut Value, mut change: Value) {
        if let Value::Object(change) = &mut change {
            change.shift_remove(self.key);
        }
        match self.kind {
            PartKind::Add(list) => {
                let present = list_of(params, list);
                match change.get_mut(list).map(Value::take) {
                    Some(Value::Array(parts)) => present.extend(parts),
                    _ => {
                        if list == "luns" && change["lun_id"].is_null() {
                            // As the method does it.
                            let is_free = |lun: &u64| {
                                present.iter().all(|one| one["lun_id"].as_u64().unwrap_or(0) != *lun)
                            };
                            change["lun_id"] = (0..).find(is_free).into();
                        }
                        present.push(change);
                    }
                }
            }
            PartKind::AddMissing(lists) => {
                for list in lists {
                    let present = list_of(params, list);
                    for one in change[*list].as_array().into_iter().flatten() {
                        if !present.contains(one) {
                            present.push(one.clone());
                        }
                    }
                }
            }
            PartKind::Remove(lists) => {
                for list in lists {
                    let removed = change[*list].as_array().map_or(&[][..], Vec::as_slice);
                    list_of(params, list).retain(|one| !removed.contains(one));
                }
            }
            PartKind::Set(fields) => {
                for field in fields {
                    match change.get_mut(*field).map(Value::take) {
                        Some(value) => params[*field] = value,
                        None => _ = params.as_object_mut().and_then(|params| params.shift_remove(*field)),
                    }
                }
            }
        }
    }
}

/// The list of a parameter, which may be absent.
fn list_of<'a>(params: &'a mut Value, name: &str) -> &'a mut Vec<Value> {
    if !params[name].is_array() {
        params[name] = Value::Array(Vec::new());
    }
    params[name].as_array_mut().expect("it is a list")
}

/// Whether objects of a method's calls are changed by others.
pub(super) fn has_lists(method: &str) -> bool {
    PARTS.iter().any(|part| part.creates == method && matches!(part.kind, PartKind::Add(_)))
}

/// Finds what runs for calls that create an object, together with those after them that change it, all or the
/// first of them.
pub(super) fn find_with_parts(plane: &ControlPlane, before: &RunningCalls, calls: &mut [WantedCall<'_>]) {
    for index in 0..calls.len() {
        let parts = parts_of(plane, calls, index);
        if calls[index].running.is_some() || parts.is_empty() {
            continue;
        }
        let mut params = calls[index].step.params();
        let mut found = None;
        for (count, (later, part)) in parts.iter().enumerate() {
            part.apply(&mut params, calls[*later].step.params());
            let whole = CanonicalCall::new(plane, calls[index].call.method, params.clone()).ok();
            let running = whole.and_then(|whole| before.find([&whole].into_iter(), plane.catalog())[0]);
            found = running.map(|running| (count, running)).or(found);
        }
        if let Some((last, running)) = found {
            calls[index].running = Some(running);
            parts[..=last].iter().for_each(|(part, _)| calls[*part].part_of = Some(running));
        }
    }
}

/// The calls after one that change what it creates.
fn parts_of(plane: &ControlPlane, calls: &[WantedCall<'_>], index: usize) -> Vec<(usize, &'static Part)> {
    if PARTS.iter().all(|part| part.creates != calls[index].call.method) {
        return Vec::new();
    }
    let later = calls.iter().enumerate().skip(index + 1);
    let part = |change| PARTS.iter().find(|part| part.is_of(plane, &calls[index], change));
    later.filter_map(|(at, change)| Some((at, part(change)?))).collect()
}

/// Refuses the changes of an object that exists with other parameters than those of its creating call: they
/// were meant for what that call describes. Returns them.
pub(super) fn refuse_parts(plane: &ControlPlane, calls: &mut [WantedCall<'_>], created: usize) -> Vec<usize> {
    let parts = parts_of(plane, calls, created).into_iter().map(|(part, _)| part);
    let changed: Vec<usize> = parts.filter(|part| calls[*part].state == State::Changed).collect();
    changed.iter().for_each(|part| calls[*part].state = State::Refused);
    changed
}

/// Adds what the lists of an object lack.
pub(super) fn restore_lists(
    plane: &ControlPlane,
    method: &str,
    params: &Value,
    exists: &CanonicalCall,
) -> Result<(), RpcError> {
    for part in PARTS.iter().filter(|part| part.creates == method) {
        let PartKind::Add(list) = part.kind else { continue };
        let present = exists.params[list].as_array().map_or(&[][..], Vec::as_slice);
        let wanted = params[list].as_array().into_iter().flatten();
        for one in wanted.filter(|one| !present.contains(one)) {
            let is_list = plane.catalog().get(part.changes).is_some_and(|info| has_parameter(info, list));
            let mut call = if is_list { json!({ list: [one] }) } else { one.clone() };
            call[part.key] = params[part.key].clone();
            plane.invoke(part.changes, call)?;
        }
    }
    Ok(())
}

fn has_parameter(info: &MethodInfo, name: &str) -> bool {
    info.parameters().iter().any(|parameter| parameter.name == name)
}
