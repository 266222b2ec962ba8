//! Which experiments there are: those that come with the program, and the user's own.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::check::Finding;
use crate::definition::Definition;

/// Most bytes of a user's definition.
const FILE_BYTES_MAX: u64 = 1 << 20;

macro_rules! built_in {
    ($($name:literal)*) => {
        /// The definitions that come with the program: name and text.
        const BUILT_IN: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../experiments/", $name, ".toml")))),*];
    };
}

built_in! {
    "cheops23.fig2" "cheops23.fig3a" "cheops23.fig3b" "cheops23.fig3c" "cheops23.fig4"
    "cheops23.fig5a" "cheops23.fig5b" "cheops23.fig5c" "cheops23.fig6"
    "cheops23.fig7a" "cheops23.fig7b" "cheops23.fig7c" "cheops23.table2" "cheops23.fig8"
    "icpe24.fig1a" "icpe24.fig1b" "icpe24.fig1c" "icpe24.fig2" "icpe24.fig3"
    "icpe24.fig4a" "icpe24.fig4b" "icpe24.fig5a" "icpe24.fig5b"
    "icpe24.fig6a" "icpe24.fig6b" "icpe24.fig6c" "icpe24.fig7a" "icpe24.fig7b"
    "icpe24.fig8a" "icpe24.fig8b" "icpe24.fig9" "icpe24.fig10" "icpe24.t64k"
    "icpe24.fig11a" "icpe24.fig11b" "icpe24.fig11c" "icpe24.fig11d" "icpe24.fig12a" "icpe24.fig12b"
    "icpe24.table2" "icpe24.table3" "icpe24.table4"
    "spdk17.fig4" "spdk17.fig5" "spdk17.fig6" "spdk17.fig8" "spdk17.fig9" "spdk17.fig10"
}

/// The findings of the studies.
const FINDINGS: [&str; 2] =
    [include_str!("../findings/cheops23.toml"), include_str!("../findings/icpe24.toml")];

/// What `quick` runs: under three minutes at the scale of the same name, and some of everything.
const QUICK: [&str; 6] =
    ["cheops23.fig2", "cheops23.fig5a", "cheops23.table2", "icpe24.fig2", "icpe24.fig11d", "spdk17.fig5"];

/// Why an experiment cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// A name that means nothing.
    #[error("no experiment, study or group {name:?}; `ringbolt lab list` shows them{}", near(suggestion))]
    Unknown {
        /// What was asked for.
        name: String,
        /// A name that is close to it.
        suggestion: Option<String>,
    },
    /// A definition that is wrong.
    #[error("{place}: {said}")]
    Wrong {
        /// The file.
        place: String,
        /// What is wrong.
        said: String,
    },
}

fn near(suggestion: &Option<String>) -> String {
    suggestion.as_ref().map_or(String::new(), |name| format!(" (perhaps {name}?)"))
}

/// Experiments by name, and the findings that rest on them.
#[derive(Clone, Debug)]
pub struct Catalog {
    definitions: Vec<Definition>,
    findings: Vec<Finding>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Findings {
    finding: Vec<Finding>,
}

impl Catalog {
    /// What comes with the program.
    pub fn built_in() -> Catalog {
        let definitions = BUILT_IN.iter().map(|(name, text)| {
            Definition::parse(text).unwrap_or_else(|error| panic!("{name} comes with the program: {error}"))
        });
        let findings = FINDINGS.iter().flat_map(|text| {
            let read: Findings = toml::from_str(text)
                .unwrap_or_else(|error| panic!("findings come with the program: {error}"));
            read.finding
        });
        Catalog { definitions: definitions.collect(), findings: findings.collect() }
    }

    /// Adds every `*.toml` of a directory. One of a known name takes its place. A directory that is not
    /// there holds none.
    ///
    /// # Errors
    /// A file that cannot be read or is wrong.
    pub fn add_directory(&mut self, path: &Path) -> Result<usize, CatalogError> {
        let Ok(entries) = fs::read_dir(path) else { return Ok(0) };
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        files.retain(|file| file.extension().is_some_and(|end| end == "toml"));
        files.sort();
        for file in &files {
            self.add_file(file)?;
        }
        Ok(files.len())
    }

    /// Adds one definition and gives its name.
    ///
    /// # Errors
    /// A file that cannot be read or is wrong.
    pub fn add_file(&mut self, path: &Path) -> Result<String, CatalogError> {
        let wrong = |said: String| CatalogError::Wrong { place: path.display().to_string(), said };
        let size = fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
        if size > FILE_BYTES_MAX {
            return Err(wrong(format!("{size} bytes are too many for a definition")));
        }
        let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let definition = Definition::parse(&text).map_err(|said| wrong(said.trim_end().to_string()))?;
        let id = definition.id.clone();
        self.definitions.retain(|known| known.id != id);
        self.definitions.push(definition);
        Ok(id)
    }

    /// All experiments, in the order of the papers.
    pub fn definitions(&self) -> &[Definition] {
        &self.definitions
    }

    /// What the studies found.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The findings of a study.
    pub fn findings_of<'a>(&'a self, study: &'a str) -> impl Iterator<Item = &'a Finding> {
        self.findings.iter().filter(move |finding| finding.id.split('.').next() == Some(study))
    }

    /// One experiment.
    pub fn get(&self, id: &str) -> Option<&Definition> {
        self.definitions.iter().find(|definition| definition.id == id)
    }

    /// Names that stand for several: studies, and `quick`.
    pub fn groups(&self) -> Vec<(String, Vec<String>)> {
        let mut groups: Vec<(String, Vec<String>)> = Vec::new();
        for definition in &self.definitions {
            let study = definition.study();
            match groups.iter_mut().find(|(name, _)| name == study) {
                Some((_, members)) => members.push(definition.id.clone()),
                None => groups.push((study.to_string(), vec![definition.id.clone()])),
            }
        }
        groups.push(("quick".to_string(), QUICK.map(String::from).to_vec()));
        groups
    }

    /// The experiments that names stand for, those included that they are derived from, each once.
    ///
    /// # Errors
    /// A name that is neither an experiment nor a group.
    pub fn select(&self, names: &[String]) -> Result<Vec<&Definition>, CatalogError> {
        let groups = self.groups();
        let mut chosen: Vec<&Definition> = Vec::new();
        for name in names {
            let members = match groups.iter().find(|(group, _)| group == name) {
                Some((_, members)) if self.get(name).is_none() => members.clone(),
                _ => vec![name.clone()],
            };
            for member in members {
                let definition = self.get(&member).ok_or_else(|| self.unknown(&member))?;
                for source in &definition.derived_from {
                    let source = self.get(source).ok_or_else(|| self.unknown(source))?;
                    add_once(&mut chosen, source);
                }
                add_once(&mut chosen, definition);
            }
        }
        Ok(chosen)
    }

    fn unknown(&self, name: &str) -> CatalogError {
        let groups = self.groups();
        let names =
            self.definitions.iter().map(|d| d.id.as_str()).chain(groups.iter().map(|(g, _)| g.as_str()));
        let suggestion = names.map(|known| (distance(known, name), known)).min();
        let suggestion = suggestion.filter(|(apart, _)| *apart <= 3).map(|(_, known)| known.to_string());
        CatalogError::Unknown { name: name.to_string(), suggestion }
    }
}

fn add_once<'a>(chosen: &mut Vec<&'a Definition>, definition: &'a Definition) {
    if !chosen.iter().any(|known| known.id == definition.id) {
        chosen.push(definition);
    }
}

/// How many letters must change to make one word of the other.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, from) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in right.iter().enumerate() {
            let cost = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests;
