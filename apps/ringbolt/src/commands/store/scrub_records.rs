//! What the map has of scrubs: when groups are due, and what was found in them.

use std::time::{Duration, UNIX_EPOCH};

use cluster_map::{ClusterMap, GroupId, GroupRecord, GroupScrub, MapError, ScrubDifference, ScrubSettings};
use serde_json::{Value, json};

use crate::command_error::CommandError;

/// Attempts of a change that others make at the same time.
pub(super) const ATTEMPTS_MAX: usize = 8;

/// A group as the map has it.
pub(super) struct ScrubbedGroup {
    pub(super) id: GroupId,
    pub(super) pool: String,
    pub(super) record: GroupRecord,
    /// The last scrub of it that was finished.
    last: Option<GroupScrub>,
}

/// Changes the settings. Of two changes at a time each sees the other.
pub(super) fn change(
    map: &dyn ClusterMap,
    to: impl Fn(ScrubSettings) -> ScrubSettings,
) -> Result<ScrubSettings, CommandError> {
    for _ in 0..ATTEMPTS_MAX {
        let known = map.scrub().map_err(CommandError::operation)?;
        let to = to(known.clone());
        if to == known || map.change_scrub(&known, &to).map_err(CommandError::operation)? {
            return Ok(to);
        }
    }
    Err(CommandError::operation("others change the settings all the time"))
}

/// The groups of all pools.
pub(super) fn groups(map: &dyn ClusterMap) -> Result<Vec<ScrubbedGroup>, MapError> {
    let (mut scrubs, mut all) = (map.group_scrubs()?, Vec::new());
    for (pool, record) in map.pools()? {
        for (id, record) in map.groups(record.first_group..record.first_group + record.groups)? {
            all.push(ScrubbedGroup { id, pool: pool.clone(), record, last: scrubs.remove(&id) });
        }
    }
    Ok(all)
}

/// A time as people read it.
pub(super) fn text_of(seconds: u64) -> Option<String> {
    let time = UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?;
    Some(humantime::format_rfc3339_seconds(time).to_string())
}

/// The settings and the last scrub of each group, for `ringbolt store status` too.
pub(super) fn describe(map: &dyn ClusterMap) -> Result<Value, MapError> {
    let (settings, groups) = (map.scrub()?, groups(map)?);
    let difference = |it: &ScrubDifference| {
        let ScrubDifference { node, volume, index, offset } = *it;
        json!({ "node": node, "volume": volume, "object": index, "offset": offset })
    };
    let group = |of: &ScrubbedGroup| {
        let ScrubbedGroup { id, pool, record, last } = of;
        let is_started = settings.is_started(pool, record.config.primary.0, last.as_ref());
        let last = last.as_ref();
        json!({
            "group": id.0,
            "pool": pool,
            "state": if is_started { "waits" } else if last.is_some() { "done" } else { "never" },
            "ended": last.and_then(|last| text_of(last.ended_s)),
            "took_seconds": last.map(|last| last.took_s),
            "node": last.map(|last| last.node),
            "bytes": last.map(|last| last.bytes),
            "damaged_copies": last.map(|last| last.damaged),
            "repaired_copies": last.map(|last| last.repaired),
            "differing_copies": last.map(|last| last.differing),
            "uncompared_parts": last.map(|last| last.uncompared),
            "differences": last.map(|last| last.differences.iter().map(difference).collect::<Vec<_>>()),
        })
    };
    Ok(json!({
        "every_seconds": Some(settings.every_s).filter(|every_s| *every_s > 0),
        "bytes_per_second": settings.rate,
        "groups": groups.iter().map(group).collect::<Vec<_>>(),
    }))
}

/// What `ringbolt store status` says in a line: how many groups were scrubbed, and what was found.
pub(super) fn summary(scrub: &Value) -> String {
    let groups: Vec<&Value> = scrub["groups"].as_array().into_iter().flatten().collect();
    let ended: Vec<&str> = groups.iter().filter_map(|group| group["ended"].as_str()).collect();
    let sum = |name: &str| groups.iter().filter_map(|group| group[name].as_u64()).sum::<u64>();
    let done = match (ended.len(), ended.iter().min()) {
        (_, None) => "no group yet".to_string(),
        (count, Some(oldest)) if count == groups.len() => format!("all {count} groups since {oldest}"),
        (count, Some(oldest)) => format!("{count} of {} groups since {oldest}", groups.len()),
    };
    let (damaged, differing) = (sum("damaged_copies"), sum("differing_copies"));
    let mut found = Vec::new();
    if damaged > 0 {
        let repaired = sum("repaired_copies");
        found.push(format!("{damaged} damaged copies of blocks, {repaired} of them written again"));
    }
    if differing > 0 {
        found.push(format!("{differing} differing copies: see `ringbolt store scrub status`"));
    }
    let found = match found.is_empty() {
        true if ended.is_empty() => String::new(),
        true => "; nothing found".to_string(),
        false => format!("; {}", found.join(", ")),
    };
    format!("scrub: {done}{found}")
}

/// A time span as `scrub-every` takes it.
pub(super) fn span_of(seconds: u64) -> String {
    let (unit, name) = [(24 * 3600, "d"), (3600, "h"), (60, "m"), (1, "s")]
        .into_iter()
        .find(|(unit, _)| seconds.is_multiple_of(*unit))
        .unwrap_or((1, "s"));
    format!("{}{name}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_was_scrubbed_and_found() {
        let group = |ended: Option<&str>, damaged: u64, differing: u64| {
            let repaired = damaged;
            json!({
                "ended": ended,
                "damaged_copies": damaged,
                "repaired_copies": repaired,
                "differing_copies": differing,
            })
        };
        let (old, new) = (Some("2026-11-01T00:00:00Z"), Some("2026-11-02T00:00:00Z"));
        for (groups, expected) in [
            (vec![group(None, 0, 0)], "scrub: no group yet"),
            (
                vec![group(new, 0, 0), group(old, 0, 0)],
                "scrub: all 2 groups since 2026-11-01T00:00:00Z; nothing found",
            ),
            (
                vec![group(new, 3, 0), group(None, 0, 0)],
                "scrub: 1 of 2 groups since 2026-11-02T00:00:00Z; 3 damaged copies of blocks, 3 of them \
                 written again",
            ),
            (
                vec![group(new, 0, 1)],
                "scrub: all 1 groups since 2026-11-02T00:00:00Z; 1 differing copies: see `ringbolt store \
                 scrub status`",
            ),
        ] {
            assert_eq!(summary(&json!({ "groups": groups })), expected);
        }
    }

    #[test]
    fn spans_have_the_largest_unit_that_is_exact() {
        for (seconds, text) in [(7 * 86_400, "7d"), (36 * 3600, "36h"), (5400, "90m"), (61, "61s")] {
            assert_eq!(span_of(seconds), text);
        }
    }
}
