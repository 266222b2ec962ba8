//! Circles of files: files of a crate that import each other, so that none of them can be read first.
//!
//! A path in a file (`crate::a::B`, `super::B`, `child::B`) is an edge to the file that defines what it
//! names; names that a file re-exports (`pub use`) are followed to theirs. A re-export itself is no edge, nor
//! are tests'. A circle is a largest set of files that all reach each other.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use crate::metadata::CargoMetadata;

/// The files in circles that crates have, by folder. A crate that is not listed has none. The numbers only
/// fall; one that has fallen is lowered here.
const KNOWN: &[(&str, usize)] = &[
    ("apps/ringbolt", 6),
    ("apps/xtask", 27),
    ("bdev/accel", 3),
    ("bdev/layer", 27),
    ("bdev/nvme", 3),
    ("bdev/raid", 10),
    ("control", 11),
    ("drivers/nvme", 4),
    ("host/dma", 10),
    ("host/sockets", 5),
    ("host/pci", 5),
    ("host/reactor", 2),
    ("host/os", 9),
    ("lab/io-engines", 11),
    ("lab/experiments", 6),
    ("lab/device-model", 5),
    ("lab/report", 10),
    ("lab/workload", 49),
    ("services/blobstore", 13),
    ("services/lvol", 13),
    ("sim", 8),
    ("store/cluster-map", 10),
    ("store/node", 24),
    ("store/objects", 2),
    ("store/replica", 10),
    ("targets/nvme-controller", 18),
    ("targets/iscsi", 10),
    ("targets/nbd", 5),
    ("targets/nvmf", 34),
    ("targets/scsi", 28),
    ("targets/shell", 7),
    ("targets/vhost", 19),
    ("wire/gpt", 2),
    ("wire/nbd", 3),
    ("wire/replica", 5),
];

/// A module's path within its crate; empty is the root.
type ModulePath = Vec<String>;

/// The files of a crate, by their modules.
pub(crate) type CrateFiles = BTreeMap<ModulePath, String>;

/// Returns one sentence for each crate with more files in circles than it had, or fewer.
pub(crate) fn check(metadata: &CargoMetadata) -> io::Result<Vec<String>> {
    let mut findings = Vec::new();
    for package in metadata.members() {
        let folder = metadata.folder(package);
        let found = circles(&read_crate(&metadata.root().join(folder).join("src"))?);
        let files: usize = found.iter().map(Vec::len).sum();
        let folder = folder.display().to_string();
        let known = KNOWN.iter().find(|(known, _)| *known == folder).map_or(0, |(_, files)| *files);
        if files > known {
            let named: Vec<String> = found.iter().map(|circle| describe(circle)).collect();
            findings.push(format!(
                "{folder}: {files} files import each other in circles, and {known} did before: {}",
                named.join("; ")
            ));
        } else if files < known {
            findings.push(format!(
                "{folder}: {files} files are in circles: lower the {known} of apps/xtask/src/circles.rs"
            ));
        }
    }
    Ok(findings)
}

fn describe(circle: &[ModulePath]) -> String {
    let names: Vec<String> = circle.iter().map(|module| name_of(module)).collect();
    names.join(", ")
}

fn name_of(module: &[String]) -> String {
    if module.is_empty() { "the root".to_string() } else { module.join("::") }
}

/// Reads the files below a `src` folder, without tests.
fn read_crate(src: &Path) -> io::Result<CrateFiles> {
    let mut files = CrateFiles::new();
    let mut folders = vec![(src.to_path_buf(), ModulePath::new())];
    while let Some((folder, module)) = folders.pop() {
        let mut entries: Vec<PathBuf> = std::fs::read_dir(&folder)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<io::Result<_>>()?;
        entries.sort();
        for path in entries {
            let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else { continue };
            let mut inner = module.clone();
            if path.is_dir() {
                if !matches!(stem, "tests" | "bin") {
                    inner.push(stem.to_string());
                    folders.push((path, inner));
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test(stem) {
                let is_root = module.is_empty() && matches!(stem, "lib" | "main");
                if !is_root && stem != "mod" {
                    inner.push(stem.to_string());
                }
                files.entry(inner).or_default().push_str(&std::fs::read_to_string(path)?);
            }
        }
    }
    Ok(files)
}

fn is_test(stem: &str) -> bool {
    stem == "tests" || stem.ends_with("_tests")
}

/// The circles, each with its modules in order.
pub(crate) fn circles(files: &CrateFiles) -> Vec<Vec<ModulePath>> {
    let paths: BTreeMap<&ModulePath, Vec<NamedPath>> =
        files.iter().map(|(module, text)| (module, paths_of(text))).collect();
    let exports = Exports::new(files, &paths);
    let mut edges: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> = BTreeMap::new();
    for (module, named) in &paths {
        let to = edges.entry(module).or_default();
        let used = named.iter().filter(|path| !path.is_export);
        to.extend(used.filter_map(|path| exports.resolve(module, &path.segments)).filter(|to| to != module));
    }
    strongly_connected(&edges)
}

/// A path, as it is written, and whether it is of a `pub use`.
#[derive(Debug, PartialEq, Eq)]
struct NamedPath {
    segments: Vec<String>,
    is_export: bool,
}

/// What names mean.
struct Exports<'a> {
    files: &'a CrateFiles,
    /// What a module's name stands for: a path as it is written in that module.
    names: BTreeMap<(&'a ModulePath, &'a str), &'a [String]>,
}

impl<'a> Exports<'a> {
    fn new(files: &'a CrateFiles, paths: &'a BTreeMap<&'a ModulePath, Vec<NamedPath>>) -> Exports<'a> {
        let mut names = BTreeMap::new();
        for (module, named) in paths {
            for path in named.iter().filter(|path| path.is_export) {
                if let Some(last) = path.segments.last() {
                    names.insert((*module, last.as_str()), &path.segments[..]);
                }
            }
        }
        Exports { files, names }
    }

    /// The file that a path in `from` leads to; `None` if it leaves the crate.
    fn resolve(&self, from: &ModulePath, segments: &[String]) -> Option<&'a ModulePath> {
        let (mut from, mut segments) = (from.clone(), segments.to_vec());
        // As long as no chain of re-exports is a circle.
        for _ in 0..16 {
            let (module, rest) = self.module(&from, &segments)?;
            let export = rest.first().and_then(|name| self.names.get(&(module, name.as_str())));
            match export {
                Some(path) => {
                    let mut next = path.to_vec();
                    next.extend_from_slice(&rest[1..]);
                    (from, segments) = (module.clone(), next);
                }
                None => return Some(module),
            }
        }
        None
    }

    /// The deepest file on a path, and what follows.
    fn module(&self, from: &ModulePath, segments: &[String]) -> Option<(&'a ModulePath, Vec<String>)> {
        let mut rest = segments;
        let mut at = from.clone();
        match rest.first().map(String::as_str) {
            Some("crate") => (at, rest) = (ModulePath::new(), &rest[1..]),
            Some("self") => rest = &rest[1..],
            Some("super") => {
                while let [first, after @ ..] = rest
                    && first == "super"
                {
                    at.pop();
                    rest = after;
                }
            }
            _ => {
                let mut child = at.clone();
                child.push(rest.first()?.clone());
                if !self.files.contains_key(&child) {
                    return None;
                }
            }
        }
        while let [first, after @ ..] = rest {
            at.push(first.clone());
            if !self.files.contains_key(&at) {
                at.pop();
                break;
            }
            rest = after;
        }
        self.files.get_key_value(&at).map(|(module, _)| (module, rest.to_vec()))
    }
}

/// The paths of a file that may lead to files of its crate. A module of tests ends it.
fn paths_of(text: &str) -> Vec<NamedPath> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    let tokens = tokens(text);
    let mut paths = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let follows = at > 0 && tokens[at - 1] == "::";
        if !follows && is_name(tokens[at]) && tokens.get(at + 1) == Some(&"::") {
            let is_export = is_export(&tokens[..at]);
            at = path(&tokens, at, &mut Vec::new(), is_export, &mut paths);
        } else {
            at += 1;
        }
    }
    paths
}

/// Whether the tokens before a path are those of `pub use`, also `pub(crate) use`.
fn is_export(before: &[&str]) -> bool {
    matches!(
        before,
        [.., "pub", "use"] | [.., "pub", "(", _, ")", "use"] | [.., "pub", "(", "in", _, ")", "use"]
    )
}

/// Reads a path or group of paths from `at`; returns where it ends.
fn path(
    tokens: &[&str],
    at: usize,
    prefix: &mut Vec<String>,
    is_export: bool,
    paths: &mut Vec<NamedPath>,
) -> usize {
    let (mut at, length) = (at, prefix.len());
    let mut is_group = false;
    while at < tokens.len() {
        if tokens[at] == "{" {
            is_group = true;
            at += 1;
            while at < tokens.len() && tokens[at] != "}" {
                if tokens[at] == "," {
                    at += 1;
                } else {
                    let after = path(tokens, at, prefix, is_export, paths);
                    // What is no path, as a pattern's `..`, is passed over.
                    at = after.max(at + 1);
                }
            }
            at += 1;
            break;
        }
        if !is_name(tokens[at]) {
            break;
        }
        prefix.push(tokens[at].to_string());
        at += 1;
        if tokens.get(at) != Some(&"::") {
            break;
        }
        at += 1;
    }
    if !is_group && prefix.len() > length {
        paths.push(NamedPath { segments: prefix.clone(), is_export });
        if tokens.get(at) == Some(&"as") {
            at += 2;
        }
    }
    prefix.truncate(length);
    at
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Names and punctuation, without comments, strings and white space.
fn tokens(text: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if first == '"' {
            string_length(rest)
        } else if rest.starts_with("::") {
            tokens.push("::");
            2
        } else if first.is_alphanumeric() || first == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            tokens.push(&rest[..length]);
            length
        } else {
            if !first.is_whitespace() {
                tokens.push(&rest[..first.len_utf8()]);
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    tokens
}

/// Bytes of a string with its quotes.
fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The strongly connected components of more than one file: those that reach each other.
fn strongly_connected(edges: &BTreeMap<&ModulePath, BTreeSet<&ModulePath>>) -> Vec<Vec<ModulePath>> {
    let reaches: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> =
        edges.keys().map(|module| (*module, reachable(edges, module))).collect();
    let mut circles: BTreeSet<Vec<ModulePath>> = BTreeSet::new();
    for (module, reached) in &reaches {
        if reached.contains(module) {
            let is_mutual =
                |other: &&&ModulePath| reaches.get(**other).is_some_and(|back| back.contains(module));
            circles.insert(reached.iter().filter(is_mutual).map(|other| (*other).clone()).collect());
        }
    }
    circles.into_iter().collect()
}

fn reachable<'a>(
    edges: &BTreeMap<&'a ModulePath, BTreeSet<&'a ModulePath>>,
    from: &ModulePath,
) -> BTreeSet<&'a ModulePath> {
    let mut reached = BTreeSet::new();
    let mut stack: Vec<&ModulePath> = edges.get(from).into_iter().flatten().copied().collect();
    while let Some(module) = stack.pop() {
        if reached.insert(module) {
            stack.extend(edges.get(module).into_iter().flatten());
        }
    }
    reached
}

#[cfg(test)]
mod tests;
