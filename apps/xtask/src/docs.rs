//! Checks of the Markdown documents, which tests run over the whole repository: relative links lead to files
//! and headings that exist, prose fits 110 columns, paragraphs of the architecture are short, and every crate
//! is listed.
//!
//! ```text
//! cargo run -p ringbolt-xtask -- docs            # what is wrong
//! cargo run -p ringbolt-xtask -- docs --wrap     # wraps prose that is too wide
//! ```

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

mod links;
mod wrap;

pub(crate) use wrap::wrapped;

/// Columns of prose.
pub(crate) const COLUMNS_MAX: usize = 110;

/// Words of a paragraph or list item in documents about the architecture.
const PARAGRAPH_WORDS_MAX: usize = 120;

/// Documents that programs write, whose lines are as long as they come out.
const GENERATED: [&str; 4] = ["docs/RPC.md", "docs/PARAMETERS.md", "docs/METRICS.md", "docs/FINDINGS.md"];

/// Folders without documents of this repository: build outputs, and what others keep beside it.
const NOT_SEARCHED: [&str; 4] = ["target", "shared", "corpus", "artifacts"];

/// A document of the repository.
pub(crate) struct Document {
    /// Relative to the root.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl Document {
    fn is_generated(&self) -> bool {
        GENERATED.iter().any(|path| self.path == Path::new(path))
    }
}

/// Reads every Markdown file below `root`.
pub(crate) fn read_all(root: &Path) -> io::Result<Vec<Document>> {
    let mut documents = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder))? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let path = folder.join(&*name);
            if entry.file_type()?.is_dir() {
                if !name.starts_with('.') && !NOT_SEARCHED.contains(&&*name) {
                    folders.push(path);
                }
            } else if name.ends_with(".md") {
                documents.push(Document { text: fs::read_to_string(root.join(&path))?, path });
            }
        }
    }
    documents.sort_by(|left, right| left.path.cmp(&right.path));
    Ok(documents)
}

/// Returns one sentence for each thing that is wrong. `folders` are those of the workspace's crates.
pub(crate) fn check(root: &Path, documents: &[Document], folders: &[String]) -> Vec<String> {
    let mut findings = Vec::new();
    for document in documents {
        findings.extend(broken_links(root, document, documents));
        if !document.is_generated() {
            findings.extend(wide_lines(document));
        }
        if document.path == Path::new("ARCHITECTURE.md") || document.path.starts_with("docs/architecture") {
            findings.extend(long_paragraphs(document));
        }
    }
    findings.extend(unlisted_crates(documents, folders));
    findings
}

/// Wraps what is too wide, and returns the paths of the documents that have changed.
pub(crate) fn wrap_all(root: &Path, documents: &[Document]) -> io::Result<Vec<PathBuf>> {
    let mut changed = Vec::new();
    for document in documents.iter().filter(|document| !document.is_generated()) {
        let text = wrapped(&document.text);
        if text != document.text {
            fs::write(root.join(&document.path), text)?;
            changed.push(document.path.clone());
        }
    }
    Ok(changed)
}

fn broken_links(root: &Path, document: &Document, documents: &[Document]) -> Vec<String> {
    let folder = document.path.parent().unwrap_or(Path::new(""));
    let mut findings = Vec::new();
    for (line, target) in links::targets(&document.text) {
        let place = format!("{}:{line}", document.path.display());
        let (file, heading) = target.split_once('#').map_or((target.as_str(), None), |(a, b)| (a, Some(b)));
        let path = if file.is_empty() { Some(document.path.clone()) } else { normalized(&folder.join(file)) };
        let Some(path) = path.filter(|path| root.join(path).exists()) else {
            findings.push(format!("{place}: {target} leads to no file"));
            continue;
        };
        let Some(heading) = heading else { continue };
        let linked = documents.iter().find(|one| one.path == path);
        if !linked.is_some_and(|one| links::anchors(&one.text).contains(heading)) {
            findings.push(format!("{place}: {} has no heading #{heading}", path.display()));
        }
    }
    findings
}

/// Without `.` and `..`; none if it leads out of the repository.
fn normalized(path: &Path) -> Option<PathBuf> {
    let mut result = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir if result.pop() => {}
            Component::Normal(name) => result.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(result)
}

fn wide_lines(document: &Document) -> Vec<String> {
    let is_wide = |(_, line): &(usize, &str)| line.chars().count() > COLUMNS_MAX;
    let wide = wrap::prose(&document.text).into_iter().filter(is_wide);
    // One that wrapping leaves as it is has a link or name that is itself so long.
    let unchanged: BTreeSet<String> = wrapped(&document.text).lines().map(str::to_string).collect();
    let wide = wide.filter(|(_, line)| !unchanged.contains(*line));
    wide.map(|(number, _)| {
        format!("{}:{number}: wider than {COLUMNS_MAX} columns; `docs --wrap`", document.path.display())
    })
    .collect()
}

fn long_paragraphs(document: &Document) -> Vec<String> {
    let mut findings = Vec::new();
    for (line, paragraph) in wrap::paragraphs(&document.text) {
        let words = paragraph.split_whitespace().count();
        if words > PARAGRAPH_WORDS_MAX {
            findings.push(format!(
                "{}:{line}: a paragraph of {words} words; {PARAGRAPH_WORDS_MAX} at most",
                document.path.display()
            ));
        }
    }
    findings
}

/// Crates that docs/architecture/crates.md does not list, and rows of folders that are no crates.
fn unlisted_crates(documents: &[Document], folders: &[String]) -> Vec<String> {
    let path = Path::new("docs/architecture/crates.md");
    let Some(list) = documents.iter().find(|document| document.path == path) else {
        return vec![format!("{} is missing", path.display())];
    };
    let rows: BTreeSet<&str> =
        list.text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let folders: BTreeSet<&str> = folders.iter().map(String::as_str).collect();
    let missing = folders.difference(&rows).map(|name| format!("{}: no row for {name}", path.display()));
    let other = rows.difference(&folders).map(|name| format!("{}: {name} is no crate", path.display()));
    missing.chain(other).collect()
}

#[cfg(test)]
mod tests;
