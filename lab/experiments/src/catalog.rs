//! The experiments: the built-in ones and the user's own.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::check::Finding;
use crate::definition::ExperimentDefinition;

/// Largest file of a user's definition, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

macro_rules! built_in {
    ($($name:literal)*) => {
        /// Name and text of the built-in definitions.
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
const FINDINGS: [&str; 3] = [
    include_str!("../findings/cheops23.toml"),
    include_str!("../findings/icpe24.toml"),
    include_str!("../findings/spdk17.toml"),
];

/// The experiments of the group `quick`: under three minutes at the scale of the same name.
const QUICK: [&str; 6] =
    ["cheops23.fig2", "cheops23.fig5a", "cheops23.table2", "icpe24.fig2", "icpe24.fig11d", "spdk17.fig5"];

/// Why an experiment cannot be selected or loaded.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// No experiment, study or group has this name.
    #[error(
        "no experiment, study or group {name:?}; `ringbolt lab list` shows them{}",
        suggestion_text(suggestion)
    )]
    Unknown {
        /// The name as given.
        name: String,
        /// A known name within three edits of it.
        suggestion: Option<String>,
    },
    /// A definition is invalid.
    #[error("{file}: {reason}")]
    Invalid {
        /// Path of the definition.
        file: String,
        /// What is wrong, with the line.
        reason: String,
    },
}

fn suggestion_text(suggestion: &Option<String>) -> String {
    suggestion.as_ref().map_or(String::new(), |name| format!(" (perhaps {name}?)"))
}

/// Experiments and findings by name.
#[derive(Clone, Debug)]
pub struct ExperimentCatalog {
    definitions: Vec<ExperimentDefinition>,
    findings: Vec<Finding>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FindingsFile {
    finding: Vec<Finding>,
}

impl ExperimentCatalog {
    /// The built-in experiments and findings.
    pub fn built_in() -> ExperimentCatalog {
        let definitions = BUILT_IN.iter().map(|(name, text)| {
            ExperimentDefinition::parse(text)
                .unwrap_or_else(|error| panic!("{name} comes with the program: {error}"))
        });
        let findings = FINDINGS.iter().flat_map(|text| {
            let read: FindingsFile = toml::from_str(text)
                .unwrap_or_else(|error| panic!("findings come with the program: {error}"));
            read.finding
        });
        ExperimentCatalog { definitions: definitions.collect(), findings: findings.collect() }
    }

    /// Adds every `*.toml` of a directory; a definition replaces one with the same id. Returns how many were added: 0
    /// if there is no such directory.
    ///
    /// # Errors
    /// A file that cannot be read or is invalid.
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

    /// Adds one definition and returns its id.
    ///
    /// # Errors
    /// A file that cannot be read or is invalid.
    pub fn add_file(&mut self, path: &Path) -> Result<String, CatalogError> {
        let invalid = |reason: String| CatalogError::Invalid { file: path.display().to_string(), reason };
        let size = fs::metadata(path).map_err(|error| invalid(error.to_string()))?.len();
        if size > FILE_BYTES_MAX {
            return Err(invalid(format!("{size} bytes are too many for a definition")));
        }
        let text = fs::read_to_string(path).map_err(|error| invalid(error.to_string()))?;
        let definition =
            ExperimentDefinition::parse(&text).map_err(|reason| invalid(reason.trim_end().to_string()))?;
        let id = definition.id.clone();
        self.definitions.retain(|known| known.id != id);
        self.definitions.push(definition);
        Ok(id)
    }

    /// All experiments, in the order of the papers.
    pub fn definitions(&self) -> &[ExperimentDefinition] {
        &self.definitions
    }

    /// The findings of all studies.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The findings of one study.
    pub fn study_findings<'a>(&'a self, study: &'a str) -> impl Iterator<Item = &'a Finding> {
        self.findings.iter().filter(move |finding| finding.id.split('.').next() == Some(study))
    }

    /// The experiment with this id.
    pub fn get(&self, id: &str) -> Option<&ExperimentDefinition> {
        self.definitions.iter().find(|definition| definition.id == id)
    }

    /// The names that select several experiments: the studies, and `quick`.
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

    /// The selected experiments, each once, after the experiments from which they are derived.
    ///
    /// # Errors
    /// A name that is neither an experiment nor a group.
    pub fn select(&self, names: &[String]) -> Result<Vec<&ExperimentDefinition>, CatalogError> {
        let groups = self.groups();
        let mut selected: Vec<&ExperimentDefinition> = Vec::new();
        for name in names {
            let members = match groups.iter().find(|(group, _)| group == name) {
                Some((_, members)) if self.get(name).is_none() => members.clone(),
                _ => vec![name.clone()],
            };
            for member in members {
                let definition = self.get(&member).ok_or_else(|| self.unknown(&member))?;
                for source in &definition.derived_from {
                    let source = self.get(source).ok_or_else(|| self.unknown(source))?;
                    add_once(&mut selected, source);
                }
                add_once(&mut selected, definition);
            }
        }
        Ok(selected)
    }

    fn unknown(&self, name: &str) -> CatalogError {
        let groups = self.groups();
        let names =
            self.definitions.iter().map(|d| d.id.as_str()).chain(groups.iter().map(|(g, _)| g.as_str()));
        let suggestion = names.map(|known| (edit_distance(known, name), known)).min();
        let suggestion = suggestion.filter(|(apart, _)| *apart <= 3).map(|(_, known)| known.to_string());
        CatalogError::Unknown { name: name.to_string(), suggestion }
    }
}

fn add_once<'a>(selected: &mut Vec<&'a ExperimentDefinition>, definition: &'a ExperimentDefinition) {
    if !selected.iter().any(|known| known.id == definition.id) {
        selected.push(definition);
    }
}

/// Levenshtein distance: insertions, deletions and substitutions of letters.
fn edit_distance(left: &str, right: &str) -> usize {
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
