use std::io;
use std::path::Path;

use serde_json::json;

use super::check;
use crate::metadata::CargoMetadata;

const GOOD: &str = "//! Says what it is.\n#![forbid(unsafe_code)]\n";

/// A synthetic workspace. A member is named by its folder, `layer/name`; an external crate by its name.
/// `uses` lists dependencies as (from, to, kind), where kind is "normal", "dev" or "build".
fn workspace(members: &[&str], others: &[&str], uses: &[(&str, &str, &str)]) -> CargoMetadata {
    let package = |name: &str| {
        json!({
            "id": name,
            "name": name.replace('/', "-"),
            "manifest_path": format!("/w/{name}/Cargo.toml"),
            "targets": [{ "kind": ["lib"], "src_path": format!("/w/{name}/src/lib.rs") }],
        })
    };
    let node = |name: &str| {
        let edge = |(_, to, kind): &(&str, &str, &str)| {
            let kind = if *kind == "normal" { json!(null) } else { json!(kind) };
            json!({ "pkg": to, "dep_kinds": [{ "kind": kind }] })
        };
        let deps: Vec<_> = uses.iter().filter(|(from, ..)| *from == name).map(edge).collect();
        json!({ "id": name, "deps": deps })
    };
    let all = || members.iter().chain(others).copied();
    let value = json!({
        "packages": all().map(package).collect::<Vec<_>>(),
        "workspace_members": members,
        "workspace_root": "/w",
        "resolve": { "nodes": all().map(node).collect::<Vec<_>>() },
    });
    serde_json::from_value(value).expect("the synthetic metadata has the fields of cargo metadata")
}

fn good(_: &Path) -> io::Result<String> {
    Ok(GOOD.to_owned())
}

/// The findings when `from` depends on `to`.
fn findings(from: &str, to: &str, kind: &str) -> Vec<String> {
    check(&workspace(&[from, to], &[], &[(from, to, kind)]), good)
}

#[test]
fn dependencies_on_lower_layers_are_allowed() {
    for (from, to) in [
        ("apps/ringbolt", "base/block-io"),
        ("targets/nvmf", "bdev/layer"),
        ("lab/workload", "drivers/nvme"),
        ("bdev/layer", "control"),
        ("control", "host/reactor"),
        ("host/sockets", "wire/nvme"),
        ("tests/interop", "apps/ringbolt"),
        ("sim/sim", "targets/nvmf"),
    ] {
        assert_eq!(findings(from, to, "normal"), [""; 0], "{from} uses {to}");
    }
}

#[test]
fn dependencies_on_higher_layers_are_reported() {
    for (from, to) in [
        ("base/block-io", "wire/nvme"),
        ("drivers/nvme", "bdev/layer"),
        ("drivers/nvme", "control"),
        ("control", "bdev/layer"),
        ("bdev/layer", "targets/nvmf"),
        ("lab/workload", "apps/ringbolt"),
        ("host/sockets", "tests/interop"),
        ("apps/ringbolt", "sim/sim"),
    ] {
        let found = findings(from, to, "normal");
        assert_eq!(found.len(), 1, "{from} uses {to}: {found:?}");
        assert!(found[0].contains("must not use"), "{found:?}");
        assert_eq!(findings(from, to, "build").len(), 1, "build dependencies are checked too");
    }
}

#[test]
fn development_dependencies_are_not_checked() {
    assert_eq!(findings("drivers/nvme", "targets/nvme-controller", "dev"), [""; 0]);
}

#[test]
fn dependencies_within_a_layer_follow_the_listed_order() {
    for (from, to, allowed) in [
        ("host/sockets", "host/reactor", true),
        ("host/reactor", "host/dma", true),
        ("host/dma", "host/reactor", false),
        ("drivers/nvme", "drivers/nvme-tcp", true),
        ("drivers/nvme-tcp", "drivers/nvme", false),
        ("host/sockets", "host/other", false),
        ("base/slots", "base/block-io", true),
        ("base/block-io", "base/slots", false),
        ("targets/nvmf", "targets/nvme-controller", true),
        ("targets/nvme-controller", "targets/nvmf", false),
        ("targets/nvmf", "targets/vhost", false),
        ("bdev/gpt", "bdev/layer", true),
        ("bdev/layer", "bdev/gpt", false),
        ("wire/iscsi", "wire/scsi", false),
        ("apps/ringbolt", "apps/xtask", false),
    ] {
        assert_eq!(findings(from, to, "normal").is_empty(), allowed, "{from} uses {to}");
    }
}

#[test]
fn an_unknown_folder_is_reported() {
    assert_eq!(check(&workspace(&["misc/thing"], &[], &[]), good), ["misc-thing: misc/ is not a layer"]);
}

#[test]
fn a_transitive_runtime_dependency_of_a_data_path_crate_is_reported() {
    let uses = |kind| {
        let uses =
            [("targets/nvmf", "http", "normal"), ("http", "hyper", "normal"), ("hyper", "tokio", kind)];
        check(&workspace(&["targets/nvmf"], &["http", "hyper", "tokio"], &uses), good)
    };
    let found = uses("normal");
    assert_eq!(found.len(), 1);
    assert!(found[0].ends_with("targets-nvmf -> http -> hyper -> tokio"), "{found:?}");
    assert_eq!(uses("dev"), [""; 0], "development dependencies are not shipped");
}

#[test]
fn a_runtime_is_allowed_outside_the_data_path() {
    let uses = [("apps/ringbolt", "tokio", "normal")];
    assert_eq!(check(&workspace(&["apps/ringbolt"], &["tokio"], &uses), good), [""; 0]);
}

#[test]
fn a_crate_root_starts_with_documentation_and_forbids_unsafe_code() {
    for (folder, text, expected) in [
        ("base/block-io", GOOD, 0),
        ("base/block-io", "//! Doc.\n#![forbid(missing_docs, unsafe_code)]\n", 0),
        ("base/block-io", "//! Doc.\n// #![forbid(unsafe_code)]\n", 1),
        ("base/block-io", "#![forbid(unsafe_code)]\n//! Doc.\n", 1),
        ("targets/nvmf", "//! Doc.\n", 1),
        ("apps/ringbolt", "fn main() {}\n", 2),
        ("host/os", "//! Doc.\n", 0),
        ("host/pci", "mod x;\n", 1),
        ("drivers/nvme", "//! Doc.\n", 1),
        ("lab/io-engines", "//! Doc.\n", 1),
        ("plugins/fio", "//! Doc.\n", 1),
        ("plugins/fio", GOOD, 0),
    ] {
        let found = check(&workspace(&[folder], &[], &[]), |_| Ok(text.to_owned()));
        assert_eq!(found.len(), expected, "{folder}: {text:?}: {found:?}");
    }
}

#[test]
fn an_unreadable_crate_root_is_reported() {
    let found = check(&workspace(&["base/block-io"], &[], &[]), |_| Err(io::ErrorKind::NotFound.into()));
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("cannot be read"), "{found:?}");
}
