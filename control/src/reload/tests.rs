use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::json;

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
    let option = |name: &str| json!({ "method": "toy_set_options", "params": { "name": name, "level": 3 } });
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
            "refused: toy_create name=c size=2: it exists with other parameters, and is in use; delete it \
             first",
            "removed: toy_create name=b size=1",
            "applied: toy_create name=d size=4",
            "applied: toy_set_options level=7",
        ]
    );
    let sizes = toys.sizes.lock().unwrap().clone();
    let expected = [("a", 1), ("by-rpc", 1), ("c", 1), ("d", 4)].map(|(name, size)| (name.to_string(), size));
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

crate::parameters! {
    struct SetLabel {
        /// Shelf
        name: String,
        /// Label
        label: String,
    }
}

#[derive(Clone)]
struct Shelf {
    on: String,
    place: u32,
    colour: String,
    label: Option<String>,
}

/// Objects that stand on others, go with them, and have what the method assigns.
#[derive(Default)]
struct Shelves {
    floors: Mutex<Vec<String>>,
    shelves: Mutex<BTreeMap<String, Shelf>>,
    calls: Mutex<Vec<String>>,
}

crate::parameters! {
    struct CreateFloor {
        /// Name
        name: String,
    }
}

crate::parameters! {
    struct PutShelf {
        /// Name
        name: String,
        /// Floor
        floor: String,
        /// Place; 0 is the first that is free
        place: u32 = 0,
        /// Colour, in upper or lower case
        colour: String = "white".to_string(),
    }
    only("shelves stand on four legs") { legs: u32 = 4 }
}

impl Module for Shelves {
    const NAME: &'static str = "shelves";
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<Shelves>> {
        let missing = || RpcError::new(RpcError::ENODEV, "there is none");
        vec![
            Method::update("floor_create", |shelves: &Shelves, params: CreateFloor| {
                shelves.called("floor_create");
                shelves.floors.lock().unwrap().push(params.name);
                Ok::<_, RpcError>(true)
            }),
            Method::update("floor_delete", move |shelves: &Shelves, params: CreateFloor| {
                shelves.called("floor_delete");
                let mut floors = shelves.floors.lock().unwrap();
                let at = floors.iter().position(|floor| *floor == params.name).ok_or_else(missing)?;
                floors.remove(at);
                shelves.shelves.lock().unwrap().retain(|_, shelf| shelf.on != params.name);
                Ok(true)
            }),
            // Of another kind, with the same names.
            Method::update("floor_build", |shelves: &Shelves, params: CreateFloor| {
                shelves.called("floor_build");
                shelves.floors.lock().unwrap().push(params.name);
                Ok::<_, RpcError>(true)
            }),
            Method::update("shelf_create", move |shelves: &Shelves, params: PutShelf| {
                shelves.called("shelf_create");
                let floors = shelves.floors.lock().unwrap();
                let mut all = shelves.shelves.lock().unwrap();
                if !floors.contains(&params.floor) {
                    return Err(missing());
                }
                if all.contains_key(&params.name) {
                    return Err(RpcError::new(RpcError::EEXIST, "it exists"));
                }
                let free = |place: &u32| !all.values().any(|shelf| shelf.place == *place);
                let place = if params.place == 0 { (1..).find(free).unwrap_or(0) } else { params.place };
                let colour = params.colour.to_lowercase();
                all.insert(params.name, Shelf { on: params.floor, place, colour, label: None });
                Ok(true)
            })
            .assigns(&["place"])
            .canonical(|_: &Shelves, params: &mut PutShelf| {
                params.colour.make_ascii_lowercase();
                match params.colour.as_str() {
                    "plaid" => Err(RpcError::invalid_params("colour: plaid is none")),
                    _ => Ok(()),
                }
            }),
            Method::update("shelf_delete", move |shelves: &Shelves, params: DeleteToy| {
                shelves.called("shelf_delete");
                let removed = shelves.shelves.lock().unwrap().remove(&params.name);
                removed.map(|_| true).ok_or_else(missing)
            }),
            Method::update("shelf_set_label", move |shelves: &Shelves, params: SetLabel| {
                shelves.called("shelf_set_label");
                let mut all = shelves.shelves.lock().unwrap();
                all.get_mut(&params.name).ok_or_else(missing)?.label = Some(params.label);
                Ok(true)
            }),
            // Saved with the shelf.
            Method::update("shelf_paint", move |shelves: &Shelves, params: SetLabel| {
                shelves.called("shelf_paint");
                let mut all = shelves.shelves.lock().unwrap();
                all.get_mut(&params.name).ok_or_else(missing)?.colour = params.label;
                Ok(true)
            }),
            Method::default_only::<crate::NoParameters>("shelf_noop", "shelves do nothing"),
        ]
    }

    fn save(&self) -> Vec<Value> {
        let floors = self.floors.lock().unwrap().clone();
        let floors =
            floors.iter().map(|name| json!({ "method": "floor_create", "params": { "name": name } }));
        let shelves = self.shelves.lock().unwrap().clone();
        let shelves = shelves.iter().flat_map(|(name, shelf)| {
            let label = shelf.label.as_ref().map(
                |label| json!({ "method": "shelf_set_label", "params": { "name": name, "label": label } }),
            );
            let create = json!({ "method": "shelf_create", "params":
                { "floor": shelf.on, "colour": shelf.colour, "place": shelf.place, "name": name } });
            [Some(create), label].into_iter().flatten().collect::<Vec<_>>()
        });
        floors.chain(shelves).collect()
    }
}

impl Shelves {
    fn called(&self, method: &str) {
        self.calls.lock().unwrap().push(method.to_string());
    }

    fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

fn call(method: &str, params: Value) -> Value {
    json!({ "method": method, "params": params })
}

fn shelves() -> (Arc<Shelves>, Arc<ControlPlane>) {
    let shelves = Arc::new(Shelves::default());
    let plane = ControlPlane::builder(Vec::new()).module(&shelves).start(None).unwrap();
    (shelves, plane)
}

/// What `save_config` writes, as a file.
fn saved(plane: &ControlPlane) -> ConfigFile {
    ConfigFile::parse("saved.json", plane.save().to_string().as_bytes(), plane.catalog()).unwrap()
}

#[test]
fn another_spelling_of_what_runs_changes_nothing() {
    let (shelves, plane) = shelves();
    let first = config(
        &plane,
        &[
            call("shelf_noop", json!({})),
            call("floor_create", json!({ "name": "f" })),
            call("shelf_create", json!({ "name": "a", "floor": "f", "colour": "red" })),
            call("shelf_create", json!({ "name": "b", "floor": "f" })),
        ],
    );
    first.apply(&plane).unwrap();
    shelves.take_calls();
    let second = [
        call("shelf_create", json!({ "legs": 4, "floor": "f", "name": "b", "place": 2, "colour": "WHITE" })),
        call("floor_create", json!({ "name": "f" })),
        call("shelf_create", json!({ "place": 1, "colour": "Red", "floor": "f", "name": "a", "legs": null })),
        call("floor_create", json!({ "name": "f" })),
    ];
    let mut in_force = first;
    for other in [config(&plane, &second), saved(&plane), in_force.clone(), saved(&plane)] {
        let (now, lines) = in_force.reload(&other, &plane);
        assert_eq!((lines, shelves.take_calls()), (vec!["nothing has changed".to_string()], vec![]));
        assert_eq!(now.steps.len(), other.steps.len());
        in_force = now;
    }
}

#[test]
fn a_value_that_was_assigned_is_not_another_one() {
    let (shelves, plane) = shelves();
    let shelf = |place: u32| call("shelf_create", json!({ "name": "a", "floor": "f", "place": place }));
    let floor = call("floor_create", json!({ "name": "f" }));
    let first = config(&plane, &[floor.clone(), shelf(0)]);
    first.apply(&plane).unwrap();
    shelves.take_calls();
    let (_, lines) = first.reload(&config(&plane, &[floor, shelf(7)]), &plane);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("place=7: it exists with other parameters"), "{lines:?}");
    assert_eq!(shelves.take_calls(), [] as [&str; 0]);
}

#[test]
fn what_is_saved_replaces_the_calls_that_made_it() {
    let (shelves, plane) = shelves();
    let first = config(
        &plane,
        &[
            call("floor_create", json!({ "name": "f" })),
            call("shelf_create", json!({ "name": "a", "floor": "f" })),
            call("shelf_paint", json!({ "name": "a", "label": "blue" })),
        ],
    );
    first.apply(&plane).unwrap();
    plane.invoke("floor_create", json!({ "name": "by-rpc" })).unwrap();
    shelves.take_calls();
    let (in_force, lines) = first.reload(&saved(&plane), &plane);
    assert_eq!((lines, shelves.take_calls()), (vec!["nothing has changed".to_string()], vec![]));
    // What was made by a method is the file's now.
    let without = config(
        &plane,
        &[
            call("floor_create", json!({ "name": "f" })),
            call("shelf_create", json!({ "name": "a", "floor": "f", "colour": "blue" })),
        ],
    );
    let (_, lines) = in_force.reload(&without, &plane);
    assert_eq!(lines, ["removed: floor_create name=by-rpc"]);
}

#[test]
fn what_goes_with_a_removed_object_comes_back_if_the_file_has_it() {
    let (shelves, plane) = shelves();
    let on = |floor: &str| {
        [
            call("floor_create", json!({ "name": floor })),
            call("shelf_create", json!({ "name": "a", "floor": "f" })),
            call("shelf_set_label", json!({ "name": "a", "label": "toys" })),
        ]
    };
    let first = config(&plane, &on("f"));
    first.apply(&plane).unwrap();
    plane.invoke("floor_delete", json!({ "name": "f" })).unwrap();
    // Gone by a method is gone: the file says the same as before.
    let (in_force, lines) = first.reload(&config(&plane, &on("f")), &plane);
    assert_eq!(lines, ["nothing has changed"]);

    // A floor of another kind takes its place: the shelf, which stays in the file, is on that one.
    drop(in_force);
    first.apply(&plane).unwrap();
    shelves.take_calls();
    let mut other = on("f").to_vec();
    other[0] = call("floor_build", json!({ "name": "f" }));
    let (in_force, lines) = first.reload(&config(&plane, &other), &plane);
    assert_eq!(
        lines,
        [
            "removed: floor_create name=f",
            "applied: floor_build name=f",
            "restored: shelf_create name=a floor=f",
            "restored: shelf_set_label name=a label=toys",
        ]
    );
    assert_eq!(in_force.steps.len(), 3);
    assert_eq!(shelves.shelves.lock().unwrap()["a"].label.as_deref(), Some("toys"));
}

#[test]
fn a_file_with_a_value_that_is_none_changes_nothing() {
    let (shelves, plane) = shelves();
    let floor = |name: &str| call("floor_create", json!({ "name": name }));
    let first = config(&plane, &[floor("f"), floor("g")]);
    first.apply(&plane).unwrap();
    shelves.take_calls();
    let plaid = call("shelf_create", json!({ "name": "a", "floor": "f", "colour": "plaid" }));
    let (in_force, lines) = first.reload(&config(&plane, &[floor("f"), plaid]), &plane);
    let expected = "nothing is changed: toys.json: subsystems[0].config[1] (toys): shelf_create: Invalid parameters: \
                    colour: plaid is none";
    assert_eq!((lines, shelves.take_calls()), (vec![expected.to_string()], vec![]));
    assert_eq!(in_force.steps.len(), 2);
}
