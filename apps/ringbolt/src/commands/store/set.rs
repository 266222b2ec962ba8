//! `ringbolt store set`: how a cluster recovers, changed while it runs.

use clap::Args;
use cluster_map::RecoverySettings;
use serde_json::json;

use super::arguments::ClusterArgs;
use super::layout::ClusterLayout;
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::parse_size;

/// Attempts of a change that others make at the same time.
const ATTEMPTS_MAX: usize = 8;

/// Arguments of `ringbolt store set`.
#[derive(Args)]
pub(crate) struct SetArgs {
    /// noout=on or off: whether a node that is down stays in, whatever the time; recovery-rate=SIZE or off:
    /// bytes a second that a node copies to others at most, at least 1m
    #[arg(required = true, value_name = "SETTING=VALUE", value_parser = parse_setting)]
    settings: Vec<ClusterSetting>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// One setting with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClusterSetting {
    Noout(bool),
    RecoveryRate(Option<u64>),
}

fn parse_setting(text: &str) -> Result<ClusterSetting, String> {
    let known = "expected noout=on, noout=off, recovery-rate=SIZE or recovery-rate=off";
    match text.split_once('=').ok_or(known)? {
        ("noout", "on") => Ok(ClusterSetting::Noout(true)),
        ("noout", "off") => Ok(ClusterSetting::Noout(false)),
        ("noout", _) => Err("expected on or off".to_string()),
        ("recovery-rate", "off") => Ok(ClusterSetting::RecoveryRate(None)),
        ("recovery-rate", rate) => {
            let rate = Some(parse_size(rate)?);
            let checked = RecoverySettings { noout: false, rate }.check();
            checked.map(|()| ClusterSetting::RecoveryRate(rate)).map_err(|error| error.to_string())
        }
        _ => Err(known.to_string()),
    }
}

pub(super) fn run(options: &SetArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    for _ in 0..ATTEMPTS_MAX {
        let known = layout.map.recovery().map_err(CommandError::operation)?;
        let to = options.settings.iter().fold(known, |to, setting| match *setting {
            ClusterSetting::Noout(noout) => RecoverySettings { noout, ..to },
            ClusterSetting::RecoveryRate(rate) => RecoverySettings { rate, ..to },
        });
        if to == known || layout.map.change_recovery(&known, &to).map_err(CommandError::operation)? {
            print(to, options.json);
            return Ok(());
        }
    }
    Err(CommandError::operation("others change the settings all the time"))
}

fn print(RecoverySettings { noout, rate }: RecoverySettings, as_json: bool) {
    if as_json {
        stdout_line!("{:#}", json!({ "noout": noout, "recovery_bytes_per_second": rate }));
        return;
    }
    let rate = rate.map_or("off".to_string(), |rate| rate.to_string());
    stdout_line!("noout={} recovery-rate={rate}", if noout { "on" } else { "off" });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_names_and_values() {
        for (text, expected) in [
            ("noout=on", ClusterSetting::Noout(true)),
            ("noout=off", ClusterSetting::Noout(false)),
            ("recovery-rate=50m", ClusterSetting::RecoveryRate(Some(50 << 20))),
            ("recovery-rate=off", ClusterSetting::RecoveryRate(None)),
        ] {
            assert_eq!(parse_setting(text), Ok(expected));
        }
        for text in ["noout", "noout=", "noout=1", "recovery-rate=", "recovery-rate=fast", "nodown=on", "=on"]
        {
            assert!(parse_setting(text).is_err(), "{text}");
        }
        let low = parse_setting("recovery-rate=4k").unwrap_err();
        assert_eq!(low, "a recovery rate of 4096 bytes a second is too low: at least 1048576");
    }
}
