//! The part of `cargo metadata` that the checks read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde::Deserialize;

/// A workspace and its dependencies.
#[derive(Deserialize)]
pub(crate) struct CargoMetadata {
    packages: Vec<Package>,
    workspace_members: BTreeSet<String>,
    workspace_root: PathBuf,
    resolve: Resolve,
}

/// A workspace member or a dependency.
#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    manifest_path: PathBuf,
    pub(crate) targets: Vec<BuildTarget>,
}

/// A build target of a package.
#[derive(Deserialize)]
pub(crate) struct BuildTarget {
    pub(crate) kind: Vec<String>,
    pub(crate) src_path: PathBuf,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<ResolveNode>,
}

#[derive(Deserialize)]
struct ResolveNode {
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

impl CargoMetadata {
    /// Runs `cargo metadata` in the current directory.
    pub(crate) fn of_this_workspace() -> anyhow::Result<CargoMetadata> {
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
        serde_json::from_slice(&output.stdout).context("cannot parse the output of cargo metadata")
    }

    /// The packages of this workspace.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| self.workspace_members.contains(&package.id))
    }

    /// The directory of the workspace's manifest.
    pub(crate) fn root(&self) -> &Path {
        &self.workspace_root
    }

    /// A package's directory relative to the workspace root, such as `host/sockets`.
    pub(crate) fn folder<'a>(&self, package: &'a Package) -> &'a Path {
        let folder = package.manifest_path.parent().unwrap_or(Path::new(""));
        folder.strip_prefix(&self.workspace_root).unwrap_or(folder)
    }

    /// The directories of all members, as [`folder`](Self::folder).
    pub(crate) fn folders(&self) -> Vec<String> {
        self.members().map(|package| self.folder(package).display().to_string()).collect()
    }

    /// The normal and build dependencies of each package; not the development dependencies.
    pub(crate) fn dependencies(&self) -> BTreeMap<&str, Vec<&Package>> {
        let by_id: BTreeMap<&str, &Package> =
            self.packages.iter().map(|package| (package.id.as_str(), package)).collect();
        let used = |edge: &&Edge| edge.dep_kinds.iter().any(|k| k.kind.as_deref() != Some("dev"));
        let packages_of = |node: &ResolveNode| {
            node.deps.iter().filter(used).filter_map(|edge| by_id.get(edge.pkg.as_str()).copied()).collect()
        };
        self.resolve.nodes.iter().map(|node| (node.id.as_str(), packages_of(node))).collect()
    }
}
