//! `ringbolt store set`: how a cluster recovers and is scrubbed, changed while it runs.

use clap::Args;
use cluster_map::{RecoverySettings, ScrubSettings};
use serde_json::json;

use super::arguments::ClusterArgs;
use super::layout::ClusterLayout;
use super::scrub_records::{self, ATTEMPTS_MAX, span_of};
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::{parse_size, parse_time};

/// Arguments of `ringbolt store set`.
#[derive(Args)]
pub(crate) struct SetArgs {
    /// noout=on or off: whether a node that is down stays in, whatever the time; recovery-rate=SIZE or off:
    /// bytes a second that a node copies to others at most, at least 1m; scrub-every=TIME or off: how often
    /// each group is scrubbed, at most once an hour [7d]; scrub-rate=SIZE: bytes a second that the primaries
    /// of a node scrub at most, at least 1m [20m]
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
    /// In seconds; 0 for never.
    ScrubEvery(u64),
    ScrubRate(u64),
}

fn parse_setting(text: &str) -> Result<ClusterSetting, String> {
    let known = "expected noout=on, noout=off, recovery-rate=SIZE, recovery-rate=off, scrub-every=TIME, \
                 scrub-every=off or scrub-rate=SIZE";
    let checked = |settings: ScrubSettings, setting| {
        settings.check().map(|()| setting).map_err(|error| error.to_string())
    };
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
        ("scrub-every", "off") => Ok(ClusterSetting::ScrubEvery(0)),
        ("scrub-every", every) => {
            let every_s = (parse_time(every)? / 1_000_000_000).max(1);
            let settings = ScrubSettings { every_s, ..ScrubSettings::default() };
            checked(settings, ClusterSetting::ScrubEvery(every_s))
        }
        ("scrub-rate", rate) => {
            let rate = parse_size(rate)?;
            let settings = ScrubSettings { rate, ..ScrubSettings::default() };
            checked(settings, ClusterSetting::ScrubRate(rate))
        }
        _ => Err(known.to_string()),
    }
}

pub(super) fn run(options: &SetArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let recovery = change_recovery(&layout, &options.settings)?;
    let scrub = scrub_records::change(&*layout.map, |known| {
        options.settings.iter().fold(known, |to, setting| match *setting {
            ClusterSetting::ScrubEvery(every_s) => ScrubSettings { every_s, ..to },
            ClusterSetting::ScrubRate(rate) => ScrubSettings { rate, ..to },
            ClusterSetting::Noout(_) | ClusterSetting::RecoveryRate(_) => to,
        })
    })?;
    print(recovery, &scrub, options.json);
    Ok(())
}

fn change_recovery(
    layout: &ClusterLayout,
    settings: &[ClusterSetting],
) -> Result<RecoverySettings, CommandError> {
    for _ in 0..ATTEMPTS_MAX {
        let known = layout.map.recovery().map_err(CommandError::operation)?;
        let to = settings.iter().fold(known, |to, setting| match *setting {
            ClusterSetting::Noout(noout) => RecoverySettings { noout, ..to },
            ClusterSetting::RecoveryRate(rate) => RecoverySettings { rate, ..to },
            ClusterSetting::ScrubEvery(_) | ClusterSetting::ScrubRate(_) => to,
        });
        if to == known || layout.map.change_recovery(&known, &to).map_err(CommandError::operation)? {
            return Ok(to);
        }
    }
    Err(CommandError::operation("others change the settings all the time"))
}

fn print(RecoverySettings { noout, rate }: RecoverySettings, scrub: &ScrubSettings, as_json: bool) {
    let every_s = Some(scrub.every_s).filter(|every_s| *every_s > 0);
    if as_json {
        let settings = json!({
            "noout": noout,
            "recovery_bytes_per_second": rate,
            "scrub_every_seconds": every_s,
            "scrub_bytes_per_second": scrub.rate,
        });
        return stdout_line!("{settings:#}");
    }
    let off = || "off".to_string();
    let (rate, every) = (rate.map_or_else(off, |rate| rate.to_string()), every_s.map_or_else(off, span_of));
    let noout = if noout { "on" } else { "off" };
    let scrub_rate = scrub.rate;
    stdout_line!("noout={noout} recovery-rate={rate} scrub-every={every} scrub-rate={scrub_rate}");
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
            ("scrub-every=36h", ClusterSetting::ScrubEvery(36 * 3600)),
            ("scrub-every=off", ClusterSetting::ScrubEvery(0)),
            ("scrub-rate=5m", ClusterSetting::ScrubRate(5 << 20)),
        ] {
            assert_eq!(parse_setting(text), Ok(expected));
        }
        for text in ["noout", "noout=", "noout=1", "recovery-rate=", "recovery-rate=fast", "nodown=on", "=on"]
            .into_iter()
            .chain(["scrub-every=1s", "scrub-every=on", "scrub-rate=1k", "scrub-rate=off"])
        {
            assert!(parse_setting(text).is_err(), "{text}");
        }
        let low = parse_setting("recovery-rate=4k").unwrap_err();
        assert_eq!(low, "a recovery rate of 4096 bytes a second is too low: at least 1048576");
    }
}
