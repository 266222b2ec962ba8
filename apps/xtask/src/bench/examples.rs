//! Measuring programs that are examples of crates.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context;

/// An example of a crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Example {
    pub(super) package: &'static str,
    pub(super) name: &'static str,
}

impl Example {
    fn build(self) -> anyhow::Result<PathBuf> {
        let file = format!("release/examples/{}", self.name);
        let own = super::build(&["-p", self.package, "--example", self.name], &file)?;
        // Examples of several crates have the same name, and cargo puts them into one place.
        let kept = own.with_file_name(format!("bench-{}-{}", self.package, self.name));
        std::fs::copy(&own, &kept).with_context(|| kept.display().to_string())?;
        Ok(kept)
    }
}

/// Examples that were built, and where they are.
#[derive(Default)]
pub(super) struct Built(BTreeMap<Example, PathBuf>);

impl Built {
    /// Builds them, so that nothing is built between measurements.
    pub(super) fn of(examples: impl Iterator<Item = Example>) -> anyhow::Result<Built> {
        let wanted: BTreeSet<Example> = examples.collect();
        wanted
            .into_iter()
            .map(|example| Ok((example, example.build()?)))
            .collect::<anyhow::Result<_>>()
            .map(Built)
    }

    /// The program.
    pub(super) fn path(&self, example: Example) -> anyhow::Result<&Path> {
        self.0.get(&example).map(PathBuf::as_path).with_context(|| format!("{} was not built", example.name))
    }
}
