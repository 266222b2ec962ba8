//! Cargo examples that benchmarks run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context;

/// A Cargo example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Example {
    pub(super) package: &'static str,
    pub(super) name: &'static str,
}

impl Example {
    fn build(self) -> anyhow::Result<PathBuf> {
        let file = format!("release/examples/{}", self.name);
        let built = super::build(&["-p", self.package, "--example", self.name], &file)?;
        // Copied, because Cargo puts examples of the same name of several crates into one file.
        let copy = built.with_file_name(format!("bench-{}-{}", self.package, self.name));
        std::fs::copy(&built, &copy).with_context(|| copy.display().to_string())?;
        Ok(copy)
    }
}

/// Paths of the built examples.
#[derive(Default)]
pub(super) struct BuiltExamples(BTreeMap<Example, PathBuf>);

impl BuiltExamples {
    /// Builds all examples, so that nothing is built between measurements.
    pub(super) fn of(examples: impl Iterator<Item = Example>) -> anyhow::Result<BuiltExamples> {
        let wanted: BTreeSet<Example> = examples.collect();
        wanted
            .into_iter()
            .map(|example| Ok((example, example.build()?)))
            .collect::<anyhow::Result<_>>()
            .map(BuiltExamples)
    }

    /// The program of an example.
    pub(super) fn path(&self, example: Example) -> anyhow::Result<&Path> {
        self.0.get(&example).map(PathBuf::as_path).with_context(|| format!("{} was not built", example.name))
    }
}
