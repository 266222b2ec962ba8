//! The part of `cargo metadata` that the checks read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde::Deserialize;

/// A workspace and everything that it depends on.
#[derive(Deserialize)]
pub(crate) struct Metadata {
    packages: Vec<Package>,
    workspace_members: BTreeSet<String>,
    workspace_root: PathBuf,
    resolve: Resolve,
}

/// A package, ours or not.
#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    manifest_path: PathBuf,
    pub(crate) targets: Vec<Target>,
}

/// Something that a package builds.
#[derive(Deserialize)]
pub(crate) struct Target {
    pub(crate) kind: Vec<String>,
    pub(crate) src_path: PathBuf,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Edge>,
}

#[derive(Deserialize)]
struct Edge {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// None is a normal dependency; the others are "dev" and "build".
    kind: Option<String>,
}

impl Metadata {
    /// Asks Cargo about the workspace of the current folder.
    pub(crate) fn of_this_workspace() -> anyhow::Result<Metadata> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--format-version", "1", "--all-features"])
            .output()
            .context("cargo cannot be started")?;
        ensure!(
            output.status.success(),
            "cargo metadata failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        serde_json::from_slice(&output.stdout).context("cargo metadata is not what was expected")
    }

    /// The packages of this workspace.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| self.workspace_members.contains(&package.id))
    }

    /// A package's folder below the workspace, such as `host/net`.
    pub(crate) fn folder<'a>(&self, package: &'a Package) -> &'a Path {
        let folder = package.manifest_path.parent().unwrap_or(Path::new(""));
        folder.strip_prefix(&self.workspace_root).unwrap_or(folder)
    }

    /// For each package, those that it depends on other than for its tests.
    pub(crate) fn dependencies(&self) -> BTreeMap<&str, Vec<&Package>> {
        let by_id: BTreeMap<&str, &Package> =
            self.packages.iter().map(|package| (package.id.as_str(), package)).collect();
        let used = |edge: &&Edge| edge.dep_kinds.iter().any(|k| k.kind.as_deref() != Some("dev"));
        let of = |node: &Node| {
            node.deps.iter().filter(used).filter_map(|edge| by_id.get(edge.pkg.as_str()).copied()).collect()
        };
        self.resolve.nodes.iter().map(|node| (node.id.as_str(), of(node))).collect()
    }
}
