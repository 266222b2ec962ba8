use std::io;
use std::path::Path;

use serde_json::json;

use super::check;
use crate::metadata::Metadata;

const GOOD: &str = "//! Says what it is.\n#![forbid(unsafe_code)]\n";

/// A made-up workspace. A crate of ours is named by its folder, `layer/name`; another by its name.
/// `uses` lists who depends on whom, and how: "normal", "dev" or "build".
fn workspace(ours: &[&str], others: &[&str], uses: &[(&str, &str, &str)]) -> Metadata {
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
    let all = || ours.iter().chain(others).copied();
    let value = json!({
        "packages": all().map(package).collect::<Vec<_>>(),
        "workspace_members": ours,
        "workspace_root": "/w",
        "resolve": { "nodes": all().map(node).collect::<Vec<_>>() },
    });
    serde_json::from_value(value).expect("the made-up metadata has the right shape")
}

fn good(_: &Path) -> io::Result<String> {
    Ok(GOOD.to_owned())
}

/// What `check` finds when `from` uses `to`.
fn findings(from: &str, to: &str, kind: &str) -> Vec<String> {
    check(&workspace(&[from, to], &[], &[(from, to, kind)]), good)
}

#[test]
fn a_crate_uses_what_stands_above_it_in_the_list() {
    for (from, to) in [
        ("apps/ringbolt", "base/ring"),
        ("targets/nvmf", "bdev/layer"),
        ("lab/workload", "drivers/nvme"),
        ("host/net", "wire/nvme"),
        ("tests/interop", "apps/ringbolt"),
        ("sim/sim", "targets/nvmf"),
    ] {
        assert_eq!(findings(from, to, "normal"), [""; 0], "{from} uses {to}");
    }
}

#[test]
fn a_crate_uses_nothing_that_stands_below_it() {
    for (from, to) in [
        ("base/ring", "wire/nvme"),
        ("drivers/nvme", "bdev/layer"),
        ("bdev/layer", "targets/nvmf"),
        ("lab/workload", "apps/ringbolt"),
        ("host/net", "tests/interop"),
        ("apps/ringbolt", "sim/sim"),
    ] {
        let found = findings(from, to, "normal");
        assert_eq!(found.len(), 1, "{from} uses {to}: {found:?}");
        assert!(found[0].contains("must not use"), "{found:?}");
        assert_eq!(findings(from, to, "build").len(), 1, "a build script is no way around");
    }
}

#[test]
fn tests_use_what_they_like() {
    assert_eq!(findings("drivers/nvme", "targets/controller", "dev"), [""; 0]);
}

#[test]
fn within_a_folder_the_order_is_explicit() {
    for (from, to, allowed) in [
        ("host/net", "host/reactor", true),
        ("host/reactor", "host/memory", true),
        ("host/memory", "host/reactor", false),
        ("drivers/nvme", "drivers/nvme-tcp", true),
        ("drivers/nvme-tcp", "drivers/nvme", false),
        ("host/net", "host/other", false),
        ("base/slots", "base/ring", true),
        ("base/ring", "base/slots", false),
        ("targets/nvmf", "targets/controller", true),
        ("targets/controller", "targets/nvmf", false),
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
fn a_folder_that_is_no_layer_is_reported() {
    assert_eq!(check(&workspace(&["misc/thing"], &[], &[]), good), ["misc-thing: misc/ is no layer"]);
}

#[test]
fn a_runtime_is_found_however_far_behind_a_data_path_crate() {
    let uses = |kind| {
        let uses =
            [("targets/nvmf", "http", "normal"), ("http", "hyper", "normal"), ("hyper", "tokio", kind)];
        check(&workspace(&["targets/nvmf"], &["http", "hyper", "tokio"], &uses), good)
    };
    let found = uses("normal");
    assert_eq!(found.len(), 1);
    assert!(found[0].ends_with("targets-nvmf -> http -> hyper -> tokio"), "{found:?}");
    assert_eq!(uses("dev"), [""; 0], "what tests use is not shipped");
}

#[test]
fn a_runtime_is_allowed_where_no_data_passes() {
    let uses = [("apps/ringbolt", "tokio", "normal")];
    assert_eq!(check(&workspace(&["apps/ringbolt"], &["tokio"], &uses), good), [""; 0]);
}

#[test]
fn a_crate_starts_with_its_documentation_and_forbids_unsafe_code() {
    for (folder, text, expected) in [
        ("base/ring", GOOD, 0),
        ("base/ring", "//! Doc.\n#![forbid(missing_docs, unsafe_code)]\n", 0),
        ("base/ring", "//! Doc.\n// #![forbid(unsafe_code)]\n", 1),
        ("base/ring", "#![forbid(unsafe_code)]\n//! Doc.\n", 1),
        ("targets/nvmf", "//! Doc.\n", 1),
        ("apps/ringbolt", "fn main() {}\n", 2),
        ("host/sys", "//! Doc.\n", 0),
        ("drivers/nvme", "mod x;\n", 1),
        ("lab/engines", "//! Doc.\n", 1),
    ] {
        let found = check(&workspace(&[folder], &[], &[]), |_| Ok(text.to_owned()));
        assert_eq!(found.len(), expected, "{folder}: {text:?}: {found:?}");
    }
}

#[test]
fn a_root_that_cannot_be_read_is_reported() {
    let found = check(&workspace(&["base/ring"], &[], &[]), |_| Err(io::ErrorKind::NotFound.into()));
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("cannot be read"), "{found:?}");
}
