//! Reloading a configuration: the difference between two files, applied to a running program.
//!
//! An object is what the reverse of its creating call names: `bdev_null_create` is undone by `bdev_null_delete`, of
//! which the parameters are those of the same name. So two calls are about the same object if their reverse calls are
//! equal. Removed objects are deleted in reverse order, then new ones are created. A call that has no reverse is undone by
//! the deletion of the object that it names. What cannot be done while the program serves is refused, each with one line,
//! and tried again at the next reload.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::config::{ConfigFile, ConfigStep};
use crate::parameters::Presence;
use crate::{Catalog, ControlPlane};

/// Parts of names of methods that create, and of those that undo them.
const REVERSES: [(&str, &str); 8] = [
    // `vhost_delete_controller` deletes those of every kind.
    ("_create_blk_controller", "_delete_controller"),
    ("_create_scsi_controller", "_delete_controller"),
    ("_create_", "_delete_"),
    ("_create", "_delete"),
    ("_add_", "_remove_"),
    ("_attach_", "_detach_"),
    ("_start_", "_stop_"),
    ("_start", "_stop"),
];

/// A call that undoes another.
#[derive(Clone, Debug, PartialEq)]
struct ReverseCall {
    method: &'static str,
    params: Map<String, Value>,
    /// What names the object besides: the bdev of a namespace or SCSI target whose identifier is assigned.
    object: Value,
}

impl ConfigFile {
    /// Applies the difference between this configuration, which was applied before, and `new`. Returns what is in force
    /// now, for the next reload, and a line for each thing that was done or refused.
    pub fn reload(&self, new: &ConfigFile, plane: &ControlPlane) -> (ConfigFile, Vec<String>) {
        let places: HashMap<String, usize> =
            new.steps.iter().enumerate().map(|(index, step)| (step.key(), index)).collect();
        let mut is_added = vec![true; new.steps.len()];
        let (mut in_force, mut removed) = (Vec::new(), Vec::new());
        for step in &self.steps {
            match places.get(&step.key()) {
                Some(index) if is_added[*index] => {
                    is_added[*index] = false;
                    in_force.push(step.clone());
                }
                _ => removed.push(step),
            }
        }
        let is_new = new.steps.iter().zip(is_added).filter(|(_, is_added)| *is_added);
        let mut added: Vec<&ConfigStep> = is_new.map(|(step, _)| step).collect();
        let mut reload =
            Reload { plane, in_force, lines: Vec::new(), deleted: Vec::new(), remaining: Vec::new() };
        for step in removed.into_iter().rev() {
            reload.remove(step, &mut added);
        }
        reload.end_removal();
        for step in added {
            reload.add(step);
        }
        if reload.lines.is_empty() {
            reload.lines.push("nothing has changed".to_string());
        }
        let Reload { in_force, lines, .. } = reload;
        // In the order of the new file; what was refused to go is first.
        let mut steps = in_force;
        steps.sort_by_cached_key(|step| places.get(&step.key()).copied());
        (ConfigFile { steps, ..new.clone() }, lines)
    }
}

struct Reload<'a> {
    plane: &'a ControlPlane,
    in_force: Vec<ConfigStep>,
    lines: Vec<String>,
    /// The calls that have undone others.
    deleted: Vec<ReverseCall>,
    /// What was not undone by a call of its own, with the place of its line, and why.
    remaining: Vec<(usize, &'a ConfigStep, String)>,
}

impl<'a> Reload<'a> {
    /// Undoes a call that the new file lacks.
    fn remove(&mut self, step: &'a ConfigStep, added: &mut Vec<&ConfigStep>) {
        let reverse = step.reverse(self.plane.catalog());
        let Some(reverse) = reverse else {
            // An option: another value for it is set with the others; its default cannot be.
            let is_replaced = added.iter().any(|other| other.method == step.method && other.sets_same(step));
            if !is_replaced {
                self.postpone(step, "it cannot be undone while the program runs");
            }
            return;
        };
        let changed =
            added.iter().position(|other| other.reverse(self.plane.catalog()).as_ref() == Some(&reverse));
        if let Some(index) = changed {
            added.remove(index);
            return self.refuse(step, "it exists with other parameters, and is in use; delete it first");
        }
        let params = self.completed(step, reverse.params.clone());
        match self.plane.invoke(reverse.method, Value::Object(params)) {
            Ok(_) => {
                self.lines.push(format!("removed: {step}"));
                self.deleted.push(reverse);
            }
            Err(error) => self.postpone(step, &error.to_string()),
        }
    }

    /// Decides at the end of the removal: a call is undone by the deletion of the object that it concerns.
    fn postpone(&mut self, step: &'a ConfigStep, reason: &str) {
        self.remaining.push((self.lines.len(), step, reason.to_string()));
        self.lines.push(String::new());
    }

    fn end_removal(&mut self) {
        for (place, step, reason) in std::mem::take(&mut self.remaining) {
            if self.deleted.iter().any(|deleted| deleted.removes(step)) {
                self.lines[place] = format!("removed: {step}");
            } else {
                self.lines[place] = format!("refused: {step}: {reason}");
                self.in_force.push(step.clone());
            }
        }
    }

    fn add(&mut self, step: &ConfigStep) {
        match self.plane.invoke(&step.method, step.params()) {
            Ok(_) => {
                self.lines.push(format!("applied: {step}"));
                self.in_force.push(step.clone());
            }
            Err(error) => self.lines.push(format!("refused: {step}: {error}")),
        }
    }

    /// Keeps a call in force.
    fn refuse(&mut self, step: &ConfigStep, reason: &str) {
        self.lines.push(format!("refused: {step}: {reason}"));
        self.in_force.push(step.clone());
    }

    /// Adds the identifier that the target assigned to a namespace or a SCSI target, if the call did not give one.
    fn completed(&self, step: &ConfigStep, mut params: Map<String, Value>) -> Map<String, Value> {
        if step.has_assigned_scsi_target() {
            let given = step.params();
            let controller = self.plane.invoke("vhost_get_controllers", json!({ "name": given["ctrlr"] }));
            let targets = controller.unwrap_or_default()[0]["backend_specific"]["scsi"].take();
            let is_wanted = |one: &&Value| one["luns"][0]["bdev_name"] == given["bdev_name"];
            if let Some(target) = targets.as_array().into_iter().flatten().find(is_wanted) {
                params.insert("scsi_target_num".to_string(), target["scsi_dev_num"].clone());
            }
        }
        if step.method == "nvmf_subsystem_add_ns" && !params.contains_key("nsid") {
            let given = step.params();
            let subsystem = self.plane.invoke("nvmf_get_subsystems", json!({ "nqn": given["nqn"] }));
            let namespaces = subsystem.unwrap_or_default()[0]["namespaces"].take();
            let wanted = &given["namespace"]["bdev_name"];
            let found = namespaces.as_array().into_iter().flatten().find(|one| one["bdev_name"] == *wanted);
            if let Some(namespace) = found {
                params.insert("nsid".to_string(), namespace["nsid"].clone());
            }
        }
        params
    }
}

impl ReverseCall {
    /// Whether what it deletes took a call with it: one of the same kind that names the same object.
    fn removes(&self, step: &ConfigStep) -> bool {
        let kind = |method: &str| method.split('_').next().map(str::to_string);
        let params = step.params();
        !self.params.is_empty()
            && kind(self.method) == kind(&step.method)
            && self.params.iter().all(|(name, value)| params[name] == *value)
    }
}

impl ConfigStep {
    /// Whether the number of its SCSI target is left to the controller.
    fn has_assigned_scsi_target(&self) -> bool {
        self.method == "vhost_scsi_controller_add_target"
            && self.params()["scsi_target_num"].as_i64().is_some_and(|number| number < 0)
    }

    /// Whether both name the same object, or none.
    fn sets_same(&self, other: &ConfigStep) -> bool {
        let named = |step: &ConfigStep| {
            let params = step.params();
            ["name", "nqn", "ctrlr", "impl_name", "listen_address", "delay_bdev_name", "anagrpid"]
                .map(|key| params[key].clone())
        };
        named(self) == named(other)
    }

    /// The call that undoes this one; `None` if there is no such method, or a parameter that it requires is not known.
    fn reverse(&self, catalog: &Catalog) -> Option<ReverseCall> {
        let reverse_name = |(create, delete): &(&str, &str)| {
            let name = self.method.replacen(create, delete, 1);
            catalog.get(&name).filter(|info| info.name != self.method)
        };
        let info = REVERSES.iter().find_map(reverse_name)?;
        let (own, mut params) = (self.params(), Map::new());
        for parameter in info.parameters() {
            let given = match (self.method.as_str(), parameter.name) {
                ("nvmf_subsystem_add_ns", "nsid") => &own["namespace"]["nsid"],
                // An error bdev is named after its base.
                ("bdev_error_create", "name") => &own["base_name"],
                (_, name) => &own[name],
            };
            let prefix = if self.method == "bdev_error_create" { "EE_" } else { "" };
            match given {
                Value::Null if parameter.presence == Presence::Required && parameter.name != "nsid" => {
                    return None;
                }
                Value::Null => {}
                Value::String(text) => {
                    _ = params.insert(parameter.name.to_string(), format!("{prefix}{text}").into())
                }
                given => _ = params.insert(parameter.name.to_string(), given.clone()),
            }
        }
        let is_assigned = self.method == "nvmf_subsystem_add_ns" && !params.contains_key("nsid");
        let object = match is_assigned {
            true => own["namespace"]["bdev_name"].clone(),
            false if self.has_assigned_scsi_target() => own["bdev_name"].clone(),
            false => Value::Null,
        };
        Some(ReverseCall { method: info.name, params, object })
    }
}

impl std::fmt::Display for ConfigStep {
    /// The method and its parameters that are no objects.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.method)?;
        for (name, value) in self.params().as_object().into_iter().flatten() {
            match value {
                Value::String(text) => write!(formatter, " {name}={text}")?,
                value => write!(formatter, " {name}={value}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{Method, Module, RpcError};

    crate::parameters! {
        struct CreateToy {
            /// Name
            name: String,
            /// Size
            size: u32 = 1,
        }
    }

    crate::parameters! {
        struct DeleteToy {
            /// Name
            name: String,
        }
    }

    crate::parameters! {
        struct SetOptions {
            /// Name
            name: String = String::new(),
            /// Level
            level: u32,
        }
    }

    #[derive(Default)]
    struct Toys {
        sizes: Mutex<BTreeMap<String, u32>>,
        level: Mutex<u32>,
    }

    impl Module for Toys {
        const NAME: &'static str = "toys";

        fn methods() -> Vec<Method<Toys>> {
            vec![
                Method::update("toy_create", |toys: &Toys, params: CreateToy| {
                    match toys.sizes.lock().unwrap().insert(params.name, params.size) {
                        None => Ok(true),
                        Some(_) => Err(RpcError::new(RpcError::EEXIST, "it exists")),
                    }
                }),
                Method::update("toy_delete", |toys: &Toys, params: DeleteToy| {
                    let removed = toys.sizes.lock().unwrap().remove(&params.name);
                    removed.map(|_| true).ok_or_else(|| RpcError::new(RpcError::ENODEV, "there is none"))
                }),
                Method::update("toy_create_blk_controller", |_: &Toys, _: CreateToy| Ok::<_, RpcError>(true)),
                Method::update("toy_delete_controller", |_: &Toys, _: DeleteToy| Ok::<_, RpcError>(true)),
                Method::update("toy_set_options", |toys: &Toys, params: SetOptions| {
                    *toys.level.lock().unwrap() = params.level;
                    Ok::<_, RpcError>(params.name.is_empty())
                }),
            ]
        }
    }

    fn config(plane: &ControlPlane, calls: &[Value]) -> ConfigFile {
        let text = json!({ "subsystems": [{ "subsystem": "toys", "config": calls }] }).to_string();
        ConfigFile::parse("toys.json", text.as_bytes(), plane.catalog()).unwrap()
    }

    fn toy(name: &str, size: u32) -> Value {
        json!({ "method": "toy_create", "params": { "name": name, "size": size } })
    }

    fn level(level: u32) -> Value {
        json!({ "method": "toy_set_options", "params": { "level": level } })
    }

    #[test]
    fn a_controller_is_deleted_by_the_method_of_every_kind() {
        let plane = ControlPlane::builder(Vec::new()).module(&Arc::<Toys>::default()).start(None).unwrap();
        let call = json!({ "method": "toy_create_blk_controller", "params": { "name": "a" } });
        let first = config(&plane, &[call]);
        let (_, lines) = first.reload(&config(&plane, &[]), &plane);
        assert_eq!(lines, ["removed: toy_create_blk_controller name=a"]);
    }

    #[test]
    fn what_has_no_reverse_goes_with_its_object_only() {
        let toys = Arc::new(Toys::default());
        let plane = ControlPlane::builder(Vec::new()).module(&toys).start(None).unwrap();
        let option =
            |name: &str| json!({ "method": "toy_set_options", "params": { "name": name, "level": 3 } });
        let first = config(&plane, &[toy("a", 1), option("a"), toy("b", 1), option("b")]);
        first.apply(&plane).unwrap();
        let (in_force, lines) = first.reload(&config(&plane, &[toy("b", 1)]), &plane);
        assert_eq!(
            lines,
            [
                "refused: toy_set_options name=b level=3: it cannot be undone while the program runs",
                "removed: toy_set_options name=a level=3",
                "removed: toy_create name=a size=1",
            ]
        );
        // So it is applied when the object is created the next time.
        let (_, lines) = in_force.reload(&first, &plane);
        assert_eq!(lines, ["applied: toy_create name=a size=1", "applied: toy_set_options name=a level=3"]);
    }

    #[test]
    fn a_reload_applies_the_difference_and_refuses_the_rest_each_with_a_line() {
        let toys = Arc::new(Toys::default());
        let plane = ControlPlane::builder(Vec::new()).module(&toys).start(None).unwrap();
        let first = config(&plane, &[toy("a", 1), toy("b", 1), toy("c", 1), level(1)]);
        first.apply(&plane).unwrap();
        plane.invoke("toy_create", json!({ "name": "by-rpc" })).unwrap();

        let (_, lines) = first.reload(&first, &plane);
        assert_eq!(lines, ["nothing has changed"]);
        let second = config(&plane, &[toy("a", 1), toy("c", 2), toy("d", 4), level(7)]);
        let (in_force, lines) = first.reload(&second, &plane);
        assert_eq!(
            lines,
            [
                "refused: toy_create name=c size=1: it exists with other parameters, and is in use; delete it first",
                "removed: toy_create name=b size=1",
                "applied: toy_create name=d size=4",
                "applied: toy_set_options level=7",
            ]
        );
        let sizes = toys.sizes.lock().unwrap().clone();
        let expected =
            [("a", 1), ("by-rpc", 1), ("c", 1), ("d", 4)].map(|(name, size)| (name.to_string(), size));
        assert_eq!((sizes, *toys.level.lock().unwrap()), (expected.into(), 7));

        // What was refused is tried again, and succeeds once it can.
        plane.invoke("toy_delete", json!({ "name": "c" })).unwrap();
        let without = config(&plane, &[toy("a", 1), toy("d", 4), toy("by-rpc", 2)]);
        let (in_force, lines) = in_force.reload(&without, &plane);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].starts_with("refused: toy_set_options level=7: it cannot be undone"), "{lines:?}");
        assert!(lines[1].starts_with("refused: toy_create name=c size=1: there is none"), "{lines:?}");
        assert!(lines[2].starts_with("refused: toy_create name=by-rpc size=2: it exists"), "{lines:?}");
        assert_eq!(in_force.steps.len(), 4);
    }
}
