//! `ringbolt model`: lists and checks device model profiles, compares models with published figures, and
//! serves the model of a DMA engine.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table};
use device_model::{DeviceProfile, FitEffort, FitReport, fit};
use serde_json::{Value, json};

use crate::command_error::CommandError;
use crate::console::stdout_line;

mod ioat;

/// The subcommands of `ringbolt model`.
#[derive(Subcommand)]
pub(crate) enum ModelCommand {
    /// List the built-in profiles
    List,
    /// Print a built-in profile, as a template for another
    #[command(after_help = "Example:\n  ringbolt model show samsung-980-pro > mine.toml")]
    Show {
        /// Name of a profile
        profile: String,
    },
    /// Simulate the published workloads of a profile and compare the results
    #[command(
        after_help = "Examples:\n  ringbolt model fit samsung-980-pro\n  ringbolt model fit mine.toml --json"
    )]
    Fit(FitArgs),
    /// Serve a software model of Intel's I/OAT DMA engine behind vfio-user
    #[command(after_help = ioat::HELP)]
    Ioat(ioat::IoatArgs),
    /// Check a profile file for errors
    Check {
        /// Profile file
        file: PathBuf,
    },
}

/// Arguments of `ringbolt model fit`.
#[derive(Args)]
pub(crate) struct FitArgs {
    /// Name of a built-in profile, or path of a file
    profile: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Simulate a tenth of the commands, for a quick estimate
    #[arg(long)]
    quick: bool,
    /// Seed of positions and latencies
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs a subcommand of `ringbolt model`.
pub(crate) fn run(command: ModelCommand) -> Result<(), CommandError> {
    match command {
        ModelCommand::List => list(),
        ModelCommand::Show { profile } => match DeviceProfile::shipped_text(&profile) {
            Some(text) => {
                stdout_line!("{}", text.trim_end());
                Ok(())
            }
            None => DeviceProfile::shipped(&profile).map(drop).map_err(CommandError::usage),
        },
        ModelCommand::Fit(options) => compare(&options),
        ModelCommand::Ioat(options) => ioat::run(options),
        ModelCommand::Check { file } => {
            let profile = read(&file.display().to_string())?;
            stdout_line!("{}: a profile of {}", file.display(), profile.title);
            Ok(())
        }
    }
}

/// Reads a profile: a file if `name` has a `/` or ends in `.toml`, otherwise a built-in one.
fn read(name: &str) -> Result<DeviceProfile, CommandError> {
    if !name.contains('/') && !name.ends_with(".toml") {
        return DeviceProfile::shipped(name).map_err(CommandError::usage);
    }
    let invalid = |error: &dyn std::fmt::Display| CommandError::config(format!("{name}: {error}"));
    let text = std::fs::read_to_string(name).map_err(|error| invalid(&error))?;
    DeviceProfile::parse(&text).map_err(|error| invalid(&error))
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header);
    table
}

fn list() -> Result<(), CommandError> {
    let mut table = table(&["name", "capacity", "description"]);
    for name in DeviceProfile::shipped_names() {
        let profile = DeviceProfile::shipped(name).map_err(CommandError::operation)?;
        let capacity = format!("{} GB", profile.device.capacity_gb);
        table.add_row([name, &capacity, &profile.title]);
    }
    stdout_line!("{table}");
    Ok(())
}

fn compare(options: &FitArgs) -> Result<(), CommandError> {
    let profile = read(&options.profile)?;
    let effort = if options.quick { FitEffort::QUICK } else { FitEffort::FULL };
    let report = fit(&profile, &effort, options.seed);
    if options.json {
        let text = serde_json::to_string_pretty(&as_json(&report)).map_err(CommandError::operation)?;
        stdout_line!("{text}");
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
    let (met, all) = (report.met_count(), report.counted().count());
    let mean = report.mean_error_percent();
    let (name, goal) = (&report.profile, device_model::FIT_TOLERANCE_PERCENT);
    stdout_line!(
        "{table}\n\n{name}: {met} of {all} within {goal} %, mean error {mean:.1} %; ! marks the others"
    );
    for (number, reason) in reasons.iter().enumerate() {
        let rows = report.rows.iter().filter(|row| row.target.excluded.as_ref() == Some(*reason)).count();
        stdout_line!("[{}] {rows} not counted: {reason}", number + 1);
    }
    Ok(())
}

fn load(row: &device_model::FitRow) -> String {
    let target = &row.target;
    let mut text = format!("{} {} qd {}", target.rw.name(), size(target.bs), target.qd);
    if target.devices > 1 {
        text += &format!(" on {} devices", target.devices);
    }
    if let Some(beside) = target.beside {
        text += &format!(" beside {} {} qd {}", beside.rw.name(), size(beside.bs), beside.qd);
    }
    if target.state == device_model::MediaState::Fresh { text + ", fresh" } else { text }
}

fn size(bytes: u32) -> String {
    if bytes.is_multiple_of(1024) { format!("{}k", bytes / 1024) } else { bytes.to_string() }
}

fn as_json(report: &FitReport) -> Value {
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
        "met": report.met_count(),
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
        let profile = DeviceProfile::shipped("intel-p4800x").unwrap();
        let report = as_json(&fit(&profile, &FitEffort::QUICK, 1));
        assert_eq!(report["rows"].as_array().unwrap().len(), profile.target.len());
        assert_eq!(report["rows"][0]["metric"], "mean_us");
        assert_eq!(report["targets"], profile.target.len());
    }

    #[test]
    fn a_missing_profile_has_a_helpful_error() {
        let error = read("floppy").unwrap_err().to_string();
        assert!(error.contains("samsung-980-pro"), "{error}");
        let error = read("/nonexistent.toml").unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent.toml: "), "{error}");
    }
}
