//! `ringbolt lab list`: lists the experiments.

use std::path::PathBuf;

use clap::Args;
use lab_experiments::{ExperimentDefinition, Scale};
use serde_json::json;

use super::options;
use crate::command_error::CommandError;
use crate::console::stdout_line;

#[derive(Args)]
#[command(
    after_help = "Examples:\n  ringbolt lab list\n  ringbolt lab list --json | jq '.experiments[].id'\n\n\
    Definitions of your own are TOML files in ~/.config/ringbolt/experiments, or are named with --definition; \
    docs/LAB.md shows how to write one."
)]
pub(crate) struct ExperimentListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// File with a definition of your own
    #[arg(long, value_name = "FILE")]
    definition: Vec<PathBuf>,
}

pub(crate) fn run(options: &ExperimentListArgs) -> Result<(), CommandError> {
    options::restore_killed_runs();
    let catalog = options::catalog(&options.definition)?;
    let cells =
        |definition: &ExperimentDefinition| definition.cells(Scale::Paper).map_or(0, |cells| cells.len());
    if options.json {
        let experiments: Vec<_> = catalog
            .definitions()
            .iter()
            .map(|definition| {
                json!({
                    "id": definition.id, "study": definition.study(), "section": definition.section,
                    "title": definition.title, "x": definition.x, "y": definition.y, "series": definition.series,
                    "shape": definition.shape, "cells": cells(definition), "derived_from": definition.derived_from,
                    "traps": definition.traps, "checks": definition.check.len(),
                })
            })
            .collect();
        let groups: serde_json::Map<String, serde_json::Value> =
            catalog.groups().into_iter().map(|(name, members)| (name, json!(members))).collect();
        let document = json!({ "experiments": experiments, "groups": groups });
        stdout_line!("{}", serde_json::to_string_pretty(&document).map_err(CommandError::operation)?);
        return Ok(());
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["EXPERIMENT", "CELLS", "SECTION", "WHAT IT SHOWS"]);
    for definition in catalog.definitions() {
        let count = match definition.derived_from.as_slice() {
            [] => cells(definition).to_string(),
            [source, ..] => {
                format!("of {}", source.split_once('.').map_or(source.as_str(), |(_, name)| name))
            }
        };
        table.add_row([definition.id.as_str(), &count, &definition.section, &definition.title]);
    }
    stdout_line!("{table}\n");
    stdout_line!("Groups:");
    for (name, members) in catalog.groups() {
        stdout_line!("  {name:<10} {} experiments", members.len());
    }
    stdout_line!("\n`ringbolt lab plan NAME` reports what would run here, and for how long.");
    Ok(())
}
