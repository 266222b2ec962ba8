//! The layering of the house, and how each crate must start.
//!
//! Top-level folders are layers: a crate uses those of folders above its own, and its own folder's
//! only in the order that [`ORDER_WITHIN`] gives. Dependencies of tests are free: the driver's
//! tests use the controller that it is never to know.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::metadata::{Metadata, Package};

/// From the ground up.
const LAYERS: [&str; 10] =
    ["base", "wire", "host", "drivers", "bdev", "services", "targets", "store", "lab", "apps"];

/// May use every layer, and is used by none.
const OUTSIDE: [&str; 2] = ["sim", "tests"];

/// In these folders a crate may use those that stand before it here.
const ORDER_WITHIN: [(&str, &[&str]); 8] = [
    ("base", &["units", "ring", "slots"]),
    ("host", &["memory", "sys", "pci", "reactor", "net"]),
    ("drivers", &["nvme-tcp", "vfio-user", "nvme"]),
    ("bdev", &["layer", "*"]),
    ("services", &["blobstore", "blobfs"]),
    ("targets", &["controller", "*"]),
    ("store", &["map", "oplog", "objects", "replica", "node", "client"]),
    ("lab", &["counters", "model", "engines", "workload", "experiments", "report"]),
];

/// Where `unsafe` is allowed, and the attribute that forbids it is not asked for.
const UNSAFE_ALLOWED: [&str; 3] = ["host", "drivers", "tests"];

/// Where no I/O passes, and an asynchronous runtime would harm nobody.
const CONTROL_ONLY: [&str; 4] = ["lab", "apps", "sim", "tests"];

/// A data path that waits for one of these is not a ring.
const RUNTIMES: [&str; 8] =
    ["tokio", "smol", "async-std", "mio", "async-global-executor", "async-io", "glommio", "monoio"];

/// Every rule that does not hold, one sentence each. `read` gives a source file's text.
pub(crate) fn check(metadata: &Metadata, read: impl Fn(&Path) -> io::Result<String>) -> Vec<String> {
    let dependencies = metadata.dependencies();
    let mut findings = Vec::new();
    for package in metadata.members() {
        let of = Place::of(metadata, package);
        if !LAYERS.contains(&of.layer) && !OUTSIDE.contains(&of.layer) {
            findings.push(format!("{}: {}/ is no layer", package.name, of.layer));
            continue;
        }
        for used in dependencies.get(package.id.as_str()).into_iter().flatten() {
            let is_member = metadata.members().any(|member| member.id == used.id);
            if is_member && !may_use(of, Place::of(metadata, used)) {
                findings.push(format!(
                    "{}: {}/ must not use {} of {}/",
                    package.name,
                    of.layer,
                    used.name,
                    Place::of(metadata, used).layer
                ));
            }
        }
        if !CONTROL_ONLY.contains(&of.layer) {
            findings.extend(runtimes_behind(package, &dependencies));
        }
        findings.extend(starts_badly(package, of, &read));
    }
    findings
}

/// Where a crate stands.
#[derive(Clone, Copy)]
struct Place<'a> {
    layer: &'a str,
    name: &'a str,
}

impl<'a> Place<'a> {
    fn of(metadata: &Metadata, package: &'a Package) -> Place<'a> {
        let mut parts = metadata.folder(package).iter().filter_map(|part| part.to_str());
        let layer = parts.next().unwrap_or("");
        Place { layer, name: parts.next_back().unwrap_or(layer) }
    }
}

fn may_use(user: Place<'_>, used: Place<'_>) -> bool {
    if OUTSIDE.contains(&user.layer) {
        return true;
    }
    let height = |layer| LAYERS.iter().position(|name| *name == layer);
    if user.layer != used.layer {
        return height(used.layer).is_some_and(|below| Some(below) < height(user.layer));
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

/// The asynchronous runtimes that a package reaches, each with the way there.
fn runtimes_behind(
    package: &Package,
    dependencies: &std::collections::BTreeMap<&str, Vec<&Package>>,
) -> Vec<String> {
    let mut findings = Vec::new();
    let mut seen = BTreeSet::from([package.id.as_str()]);
    let mut todo = vec![(package, package.name.clone())];
    while let Some((at, way)) = todo.pop() {
        for used in dependencies.get(at.id.as_str()).into_iter().flatten() {
            if !seen.insert(used.id.as_str()) {
                continue;
            }
            let way = format!("{way} -> {}", used.name);
            if RUNTIMES.contains(&used.name.as_str()) {
                findings.push(format!("{}: an asynchronous runtime is behind it: {way}", package.name));
            } else {
                todo.push((used, way));
            }
        }
    }
    findings
}

/// What the first lines of a crate's roots lack.
fn starts_badly(
    package: &Package,
    place: Place<'_>,
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
