//! Device models: what profiles there are, what is in them, and how well they meet what was published.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table};
use model::{Effort, Profile, Report, fit};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::say::say;

/// The commands about models.
#[derive(Subcommand)]
pub(crate) enum Model {
    /// List the profiles that are shipped
    List,
    /// Print a profile, to start an own one from
    #[command(after_help = "Example:\n  ringbolt model show samsung-980-pro > mine.toml")]
    Show {
        /// Name of a profile
        profile: String,
    },
    /// Run a model under the loads of its targets and compare
    #[command(
        after_help = "Examples:\n  ringbolt model fit samsung-980-pro\n  ringbolt model fit mine.toml --json"
    )]
    Fit(Fit),
    /// Check a file
    Check {
        /// The file
        file: PathBuf,
    },
}

/// What is compared.
#[derive(Args)]
pub(crate) struct Fit {
    /// Name of a profile, or a file
    profile: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Simulate a tenth, for a first look
    #[arg(long)]
    quick: bool,
    /// Decides positions and latencies
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs one of them to its end.
pub(crate) fn run(command: Model) -> Result<(), Failure> {
    match command {
        Model::List => list(),
        Model::Show { profile } => match Profile::shipped_text(&profile) {
            Some(text) => {
                say!("{}", text.trim_end());
                Ok(())
            }
            None => Profile::shipped(&profile).map(drop).map_err(Failure::usage),
        },
        Model::Fit(options) => compare(&options),
        Model::Check { file } => {
            let profile = read(&file.display().to_string())?;
            say!("{}: a profile of {}", file.display(), profile.title);
            Ok(())
        }
    }
}

/// A file where there is a path, otherwise one that is shipped.
fn read(name: &str) -> Result<Profile, Failure> {
    if !name.contains('/') && !name.ends_with(".toml") {
        return Profile::shipped(name).map_err(Failure::usage);
    }
    let wrong = |error: &dyn std::fmt::Display| Failure::config(format!("{name}: {error}"));
    let text = std::fs::read_to_string(name).map_err(|error| wrong(&error))?;
    Profile::parse(&text).map_err(|error| wrong(&error))
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header);
    table
}

fn list() -> Result<(), Failure> {
    let mut table = table(&["name", "capacity", "what it is"]);
    for name in Profile::shipped_names() {
        let profile = Profile::shipped(name).map_err(Failure::work)?;
        let capacity = format!("{} GB", profile.device.capacity_gb);
        table.add_row([name, &capacity, &profile.title]);
    }
    say!("{table}");
    Ok(())
}

fn compare(options: &Fit) -> Result<(), Failure> {
    let profile = read(&options.profile)?;
    let effort = if options.quick { Effort::QUICK } else { Effort::FULL };
    let report = fit(&profile, &effort, options.seed);
    if options.json {
        let text = serde_json::to_string_pretty(&as_json(&report)).map_err(Failure::work)?;
        say!("{text}");
        return Ok(());
    }
    let mut table = table(&["load", "metric", "published", "model", "error", "source"]);
    let mut reasons: Vec<&String> = Vec::new();
    for row in &report.rows {
        let target = &row.target;
        let mark = match &target.excluded {
            Some(reason) => {
                let known = reasons.iter().position(|other| *other == reason);
                let number = known.unwrap_or_else(|| {
                    reasons.push(reason);
                    reasons.len() - 1
                });
                format!(" [{}]", number + 1)
            }
            None if row.is_met() => String::new(),
            None => " !".to_string(),
        };
        table.add_row([
            load(row),
            target.metric.name().to_string(),
            format!("{:.1}", target.value),
            format!("{:.1}", row.model),
            format!("{:+.1} %{mark}", row.error_percent),
            target.source.clone(),
        ]);
    }
    for column in 2..=4 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let (met, all) = (report.met(), report.counted().count());
    let mean = report.mean_error_percent();
    let (name, goal) = (&report.profile, model::GOAL_PERCENT);
    say!("{table}\n\n{name}: {met} of {all} within {goal} %, mean error {mean:.1} %; ! is beyond");
    for (number, reason) in reasons.iter().enumerate() {
        let rows = report.rows.iter().filter(|row| row.target.excluded.as_ref() == Some(*reason)).count();
        say!("[{}] {rows} not counted: {reason}", number + 1);
    }
    Ok(())
}

fn load(row: &model::Row) -> String {
    let target = &row.target;
    let mut text = format!("{} {} qd {}", target.rw.name(), size(target.bs), target.qd);
    if target.devices > 1 {
        text += &format!(" on {} devices", target.devices);
    }
    if let Some(beside) = target.beside {
        text += &format!(" beside {} {} qd {}", beside.rw.name(), size(beside.bs), beside.qd);
    }
    if target.state == model::State::Fresh { text + ", fresh" } else { text }
}

fn size(bytes: u32) -> String {
    if bytes.is_multiple_of(1024) { format!("{}k", bytes / 1024) } else { bytes.to_string() }
}

fn as_json(report: &Report) -> Value {
    let rows = report.rows.iter().map(|row| {
        let target = &row.target;
        let beside = target.beside.map(|b| json!({ "rw": b.rw.name(), "bs": b.bs, "qd": b.qd }));
        json!({
            "rw": target.rw.name(),
            "bs": target.bs,
            "qd": target.qd,
            "devices": target.devices,
            "state": target.state.name(),
            "beside": beside,
            "metric": target.metric.name(),
            "published": target.value,
            "model": row.model,
            "error_percent": row.error_percent,
            "met": row.is_met(),
            "excluded": target.excluded,
            "host_us": target.host_us,
            "wait_us": target.wait_us,
            "source": target.source,
        })
    });
    json!({
        "profile": report.profile,
        "met": report.met(),
        "targets": report.rows.len(),
        "counted": report.counted().count(),
        "mean_error_percent": report.mean_error_percent(),
        "rows": rows.collect::<Vec<Value>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_holds_every_target() {
        let profile = Profile::shipped("intel-p4800x").unwrap();
        let report = as_json(&fit(&profile, &Effort::QUICK, 1));
        assert_eq!(report["rows"].as_array().unwrap().len(), profile.target.len());
        assert_eq!(report["rows"][0]["metric"], "mean_us");
        assert_eq!(report["targets"], profile.target.len());
    }

    #[test]
    fn a_profile_that_is_not_there_is_a_usage_error() {
        let error = read("floppy").unwrap_err().to_string();
        assert!(error.contains("samsung-980-pro"), "{error}");
        let error = read("/nonexistent.toml").unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent.toml: "), "{error}");
    }
}
