//! Layering rules for crates, and rules for the head of each crate root.
//!
//! Top-level folders are layers. A crate may depend on crates of lower layers, and on crates of its own
//! layer only in the order of [`ORDER_WITHIN`]. Development dependencies are not checked: the tests of the
//! driver use the controller, which the driver itself must not depend on.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::metadata::{CargoMetadata, Package};

/// The layers, lowest first.
const LAYERS: [&str; 11] =
    ["base", "wire", "host", "drivers", "control", "bdev", "services", "targets", "store", "lab", "apps"];

/// Folders that may use every layer and that no layer may use. Plugins are shared libraries that programs of
/// others load.
const OUTSIDE: [&str; 3] = ["plugins", "sim", "tests"];

/// The order of crates within a layer: a crate may use those listed before it. `*` is any other crate.
const ORDER_WITHIN: [(&str, &[&str]); 9] = [
    ("base", &["block-io", "slots"]),
    ("wire", &["store", "replica"]),
    (
        "host",
        &[
            "fio-abi",
            "rocksdb-abi",
            "secret",
            "dma",
            "os",
            "file-lock",
            "pci",
            "reactor",
            "sockets",
            "shared-library",
            "rbd",
            "rdma",
            "tls",
        ],
    ),
    ("drivers", &["nvme-auth", "nvme-tcp", "vfio-user", "ioat", "nvme"]),
    ("bdev", &["reservations", "accel", "layer", "*"]),
    ("services", &["blobstore", "lvol", "blobfs"]),
    ("targets", &["shell", "nvme-controller", "scsi", "*"]),
    ("store", &["cluster-map", "oplog", "objects", "replica", "link", "image", "node", "client"]),
    (
        "lab",
        &["perf-counters", "device-model", "ioat-model", "io-engines", "workload", "experiments", "report"],
    ),
];

/// Layers that may use `unsafe` and so need no `#![forbid(unsafe_code)]`.
const UNSAFE_ALLOWED: [&str; 2] = ["host", "tests"];

/// Folders without a data path, where an asynchronous runtime is allowed.
const CONTROL_ONLY: [&str; 4] = ["lab", "apps", "sim", "tests"];

/// Asynchronous runtimes, which a data path must not depend on.
const RUNTIMES: [&str; 8] =
    ["tokio", "smol", "async-std", "mio", "async-global-executor", "async-io", "glommio", "monoio"];

/// Returns one sentence for each violation. `read` returns the text of a source file.
pub(crate) fn check(metadata: &CargoMetadata, read: impl Fn(&Path) -> io::Result<String>) -> Vec<String> {
    let dependencies = metadata.dependencies();
    let mut findings = Vec::new();
    for package in metadata.members() {
        let of = CratePosition::of(metadata, package);
        if !LAYERS.contains(&of.layer) && !OUTSIDE.contains(&of.layer) {
            findings.push(format!("{}: {}/ is not a layer", package.name, of.layer));
            continue;
        }
        for used in dependencies.get(package.id.as_str()).into_iter().flatten() {
            let is_member = metadata.members().any(|member| member.id == used.id);
            if is_member && !may_use(of, CratePosition::of(metadata, used)) {
                findings.push(format!(
                    "{}: {}/ must not use {} of {}/",
                    package.name,
                    of.layer,
                    used.name,
                    CratePosition::of(metadata, used).layer
                ));
            }
        }
        if !CONTROL_ONLY.contains(&of.layer) {
            findings.extend(check_runtimes(package, &dependencies));
        }
        findings.extend(check_root(package, of, &read));
    }
    findings
}

/// The layer of a crate, and its folder within the layer.
#[derive(Clone, Copy)]
struct CratePosition<'a> {
    layer: &'a str,
    name: &'a str,
}

impl<'a> CratePosition<'a> {
    fn of(metadata: &CargoMetadata, package: &'a Package) -> CratePosition<'a> {
        let mut parts = metadata.folder(package).iter().filter_map(|part| part.to_str());
        let layer = parts.next().unwrap_or("");
        CratePosition { layer, name: parts.next_back().unwrap_or(layer) }
    }
}

fn may_use(user: CratePosition<'_>, used: CratePosition<'_>) -> bool {
    if OUTSIDE.contains(&user.layer) {
        return true;
    }
    let rank_of_layer = |layer| LAYERS.iter().position(|name| *name == layer);
    if user.layer != used.layer {
        return rank_of_layer(used.layer).is_some_and(|below| Some(below) < rank_of_layer(user.layer));
    }
    let Some((_, order)) = ORDER_WITHIN.iter().find(|(layer, _)| *layer == user.layer) else {
        return false;
    };
    let rank = |name| {
        let named = order.iter().position(|known| *known == name);
        named.or_else(|| order.iter().position(|known| *known == "*"))
    };
    matches!((rank(used.name), rank(user.name)), (Some(below), Some(above)) if below < above)
}

/// Reports the asynchronous runtimes among a package's transitive dependencies, each with its path.
fn check_runtimes(
    package: &Package,
    dependencies: &std::collections::BTreeMap<&str, Vec<&Package>>,
) -> Vec<String> {
    let mut findings = Vec::new();
    let mut seen = BTreeSet::from([package.id.as_str()]);
    let mut stack = vec![(package, package.name.clone())];
    while let Some((user, path)) = stack.pop() {
        for used in dependencies.get(user.id.as_str()).into_iter().flatten() {
            if !seen.insert(used.id.as_str()) {
                continue;
            }
            let path = format!("{path} -> {}", used.name);
            if RUNTIMES.contains(&used.name.as_str()) {
                findings.push(format!("{}: depends on an asynchronous runtime: {path}", package.name));
            } else {
                stack.push((used, path));
            }
        }
    }
    findings
}

/// Checks the roots of a crate: crate documentation first, and `#![forbid(unsafe_code)]` where required.
fn check_root(
    package: &Package,
    place: CratePosition<'_>,
    read: impl Fn(&Path) -> io::Result<String>,
) -> Vec<String> {
    let mut findings = Vec::new();
    let roots = package.targets.iter().filter(|t| t.kind.iter().any(|kind| kind == "lib" || kind == "bin"));
    for root in roots.map(|target| &target.src_path) {
        let text = match read(root) {
            Ok(text) => text,
            Err(error) => {
                findings.push(format!("{}: {} cannot be read: {error}", package.name, root.display()));
                continue;
            }
        };
        let file = root.file_name().unwrap_or(root.as_os_str()).display();
        if !text.trim_start().starts_with("//!") {
            findings.push(format!("{}: {file} does not start with its documentation (//!)", package.name));
        }
        let forbids = |line: &str| line.trim().starts_with("#![forbid(") && line.contains("unsafe_code");
        if !UNSAFE_ALLOWED.contains(&place.layer) && !text.lines().any(forbids) {
            findings.push(format!("{}: {file} lacks #![forbid(unsafe_code)]", package.name));
        }
    }
    findings
}

#[cfg(test)]
mod tests;
