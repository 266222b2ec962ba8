//! Counts the code of each crate: lines of `src` without comments, blank lines and tests.
//!
//! Tests are items with `#[cfg(test)]` and the files of such modules. Examples, integration tests and benches are
//! outside `src` and not counted. `sim/`, `control/` and `targets/shell` are summed apart from the other crates.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::Context;
use comfy_table::CellAlignment;

use crate::metadata::CargoMetadata;

mod source;

pub(crate) use source::SourceCount;

/// Folders whose crates are summed apart.
const APART: [&str; 3] = ["sim", "control", "targets/shell"];

/// The count of one crate.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CrateLines {
    /// Relative to the workspace root, such as `host/sockets`.
    pub(crate) folder: String,
    pub(crate) files: usize,
    pub(crate) code: usize,
}

/// Counts every member of the workspace, in the order of folders.
pub(crate) fn count(metadata: &CargoMetadata) -> anyhow::Result<Vec<CrateLines>> {
    let mut crates = Vec::new();
    for package in metadata.members() {
        let folder = metadata.folder(package).display().to_string();
        let source = metadata.root().join(&folder).join("src");
        let (files, code) = count_directory(&source).with_context(|| source.display().to_string())?;
        crates.push(CrateLines { folder, files, code });
    }
    crates.sort_by(|left, right| left.folder.cmp(&right.folder));
    Ok(crates)
}

/// Renders a table with the sums of the crates that are counted together and of those that are counted apart.
pub(crate) fn render(crates: &[CrateLines]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["CRATE", "FILES", "CODE"]);
    let mut add = |name: &str, lines: &[&CrateLines]| {
        let (files, code) =
            lines.iter().fold((0, 0), |(files, code), one| (files + one.files, code + one.code));
        table.add_row([name.to_string(), files.to_string(), code.to_string()]);
    };
    let (apart, together): (Vec<&CrateLines>, Vec<&CrateLines>) =
        crates.iter().partition(|one| is_apart(&one.folder));
    together.iter().for_each(|one| add(&one.folder, &[one]));
    add("total", &together);
    apart.iter().for_each(|one| add(&one.folder, &[one]));
    add("total of sim, control and targets/shell", &apart);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

fn is_apart(folder: &str) -> bool {
    APART.iter().any(|apart| Path::new(folder).starts_with(apart))
}

/// Files and lines of code below a directory.
fn count_directory(source: &Path) -> io::Result<(usize, usize)> {
    let mut paths = Vec::new();
    rust_files(source, &mut paths)?;
    let mut counts = Vec::new();
    let mut tests = BTreeSet::new();
    for path in paths {
        let count = SourceCount::of(&fs::read_to_string(&path)?);
        let children = module_directory(&path);
        tests.extend(count.test_modules.iter().map(|name| children.join(name)));
        counts.push((path, count.code));
    }
    // A module `name` is `name.rs`, or `name/mod.rs`, and the files below `name/`.
    let is_test = |path: &Path| path.with_extension("").ancestors().any(|part| tests.contains(part));
    let counted = counts.iter().filter(|(path, code)| *code > 0 && !is_test(path));
    Ok(counted.fold((0, 0), |(files, sum), (_, code)| (files + 1, sum + code)))
}

fn rust_files(directory: &Path, paths: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            rust_files(&entry.path(), paths)?;
        } else if entry.path().extension().is_some_and(|extension| extension == "rs") {
            paths.push(entry.path());
        }
    }
    Ok(())
}

/// The directory of a file's submodules.
fn module_directory(path: &Path) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default();
    match stem.to_str() {
        Some("lib" | "main" | "mod") => path.parent().unwrap_or(Path::new("")).to_path_buf(),
        _ => path.with_extension(""),
    }
}

#[cfg(test)]
mod tests;
