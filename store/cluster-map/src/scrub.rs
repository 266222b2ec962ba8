//! When the groups of a cluster are scrubbed, and what was found.

use serde::{Deserialize, Serialize};

use crate::MapError;

const DAY_S: u64 = 24 * 3600;

/// When groups are scrubbed, as operators want it. All nodes follow it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubSettings {
    /// Each group is scrubbed once in so many seconds; 0 for only when an operator says so.
    pub every_s: u64,
    /// Bytes in a second that the primaries of a node read at most, all together.
    pub rate: u64,
    /// The number of the last command. Later ones are higher.
    #[serde(default)]
    pub number: u64,
    /// What operators have started, at most [`STARTS_MAX`](Self::STARTS_MAX).
    #[serde(default)]
    pub starts: Vec<ScrubStart>,
    /// When an operator last stopped all scrubs, in seconds since 1970: one that was due then is due again
    /// when its next time has come.
    #[serde(default)]
    pub stopped_s: u64,
}

/// A command to scrub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStart {
    /// Groups whose last scrub began before this command are scrubbed.
    pub number: u64,
    /// Those of this pool; without, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Those whose primary is on this node; without, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
}

/// The last scrub of a group that was finished.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupScrub {
    /// The last command when it began.
    pub number: u64,
    /// When it ended, in seconds since 1970.
    pub ended_s: u64,
    /// How long it took, in seconds.
    pub took_s: u64,
    /// The node of the primary, which compared.
    pub node: u32,
    /// Bytes of the group's objects, of which each member has a copy.
    pub bytes: u64,
    /// Copies of blocks that could not be read.
    pub damaged: u64,
    /// Those of them that were written again.
    pub repaired: u64,
    /// Parts of 128 KiB that were not compared: a member did not answer, or they were written all the time.
    pub uncompared: u64,
    /// Copies of blocks with other data than that of the primary.
    pub differing: u64,
    /// The first of these, at most [`DIFFERENCES_MAX`](Self::DIFFERENCES_MAX).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differences: Vec<ScrubDifference>,
}

/// A block of which two nodes have different data, each with its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubDifference {
    /// The node whose copy is not that of the primary.
    pub node: u32,
    /// The volume of the image, and the index of the object of 4 MiB in it.
    pub volume: u64,
    /// See `volume`.
    pub index: u32,
    /// Offset in the object, in bytes.
    pub offset: u32,
}

impl Default for ScrubSettings {
    fn default() -> ScrubSettings {
        ScrubSettings { every_s: 7 * DAY_S, rate: 20 << 20, number: 0, starts: Vec::new(), stopped_s: 0 }
    }
}

impl ScrubSettings {
    /// The lowest rate: with it 1 TiB takes twelve days.
    pub const RATE_MIN: u64 = 1 << 20;
    /// The shortest interval.
    pub const EVERY_S_MIN: u64 = 3600;
    /// Most commands that are kept; the oldest goes.
    pub const STARTS_MAX: usize = 64;

    /// Refuses what no scrub would end with.
    ///
    /// # Errors
    /// [`MapError::Invalid`].
    pub fn check(&self) -> Result<(), MapError> {
        if self.rate < Self::RATE_MIN {
            let (rate, min) = (self.rate, Self::RATE_MIN);
            let reason = format!("a scrub rate of {rate} bytes a second is too low: at least {min}");
            return Err(MapError::Invalid(reason));
        }
        if (1..Self::EVERY_S_MIN).contains(&self.every_s) {
            let reason = format!("a scrub every {} s is too often: at most once an hour", self.every_s);
            return Err(MapError::Invalid(reason));
        }
        Ok(())
    }

    /// With another command.
    #[must_use]
    pub fn started(mut self, pool: Option<String>, node: Option<u32>) -> ScrubSettings {
        self.number += 1;
        // The new one says it, too.
        self.starts.retain(|start| (&start.pool, start.node) != (&pool, node));
        if self.starts.len() >= Self::STARTS_MAX {
            self.starts.remove(0);
        }
        self.starts.push(ScrubStart { number: self.number, pool, node });
        self
    }

    /// Without any command, at a time in seconds since 1970.
    #[must_use]
    pub fn stopped(mut self, now_s: u64) -> ScrubSettings {
        self.number += 1;
        self.starts.clear();
        self.stopped_s = now_s;
        self
    }

    /// Whether an operator has started a scrub of a group of a pool, whose primary is on a node, since the
    /// group was scrubbed last.
    pub fn is_started(&self, pool: &str, node: u32, last: Option<&GroupScrub>) -> bool {
        let is_for = |start: &&ScrubStart| {
            start.pool.as_ref().is_none_or(|of| of == pool) && start.node.is_none_or(|of| of == node)
        };
        let number = last.map_or(0, |last| last.number);
        self.starts.iter().filter(is_for).any(|start| start.number > number)
    }

    /// When a group is to be scrubbed by itself, in seconds since 1970, for a node that runs since `since_s`;
    /// `None` for never. Each group has a time of its own in the interval, so that their scrubs are spread
    /// over it. A group that was never scrubbed waits for its next time after the start of the node.
    pub fn due_s(&self, group: u32, since_s: u64, last: Option<&GroupScrub>) -> Option<u64> {
        if self.every_s == 0 {
            return None;
        }
        let after_s = last.map_or(since_s, |last| last.ended_s).max(self.stopped_s);
        let phase_s = (u64::from(group.wrapping_mul(0x9e37_79b9)) * self.every_s) >> 32;
        let periods = after_s.saturating_sub(phase_s) / self.every_s;
        let due_s = periods * self.every_s + phase_s;
        Some(if due_s > after_s { due_s } else { due_s + self.every_s })
    }
}

impl GroupScrub {
    /// Most differences that are kept.
    pub const DIFFERENCES_MAX: usize = 16;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_counts_for_what_was_scrubbed_before_it() {
        let last = |number| Some(GroupScrub { number, ..GroupScrub::default() });
        let settings = ScrubSettings::default();
        assert!(!settings.is_started("pool", 1, None));
        let settings = settings.started(Some("pool".to_string()), None).started(None, Some(2));
        for (pool, node, done, expected) in [
            ("pool", 1, None, true),
            ("pool", 1, last(1), false),
            ("pool", 2, last(1), true),
            ("pool", 2, last(2), false),
            ("other", 1, None, false),
            ("other", 2, None, true),
        ] {
            assert_eq!(settings.is_started(pool, node, done.as_ref()), expected, "{pool} {node} {done:?}");
        }
        let again = settings.clone().started(None, Some(2));
        assert_eq!((again.starts.len(), again.number), (2, 3));
        let stopped = again.stopped(5);
        assert!(!stopped.is_started("pool", 2, None));
        let many = (0..100).fold(settings, |settings, node| settings.started(None, Some(node)));
        assert_eq!(many.starts.len(), ScrubSettings::STARTS_MAX);
    }

    #[test]
    fn each_group_has_a_time_of_its_own_in_the_interval() {
        let settings = ScrubSettings::default();
        let (since_s, every_s) = (1_800_000_000, settings.every_s);
        let due = |group| settings.due_s(group, since_s, None).unwrap();
        let mut quarters = [0; 4];
        for group in 0..400 {
            let due_s = due(group);
            assert!((since_s + 1..=since_s + every_s).contains(&due_s), "{group} {due_s}");
            quarters[((due_s - since_s - 1) * 4 / every_s) as usize] += 1;
            // One that ends late is due at its next time, and what was missed at once.
            let late = GroupScrub { ended_s: due_s + every_s / 3, ..GroupScrub::default() };
            assert_eq!(settings.due_s(group, since_s, Some(&late)), Some(due_s + every_s));
            let missed = GroupScrub { ended_s: due_s - 2 * every_s + 1, ..GroupScrub::default() };
            assert_eq!(settings.due_s(group, since_s, Some(&missed)), Some(due_s - every_s));
            let stopped = settings.clone().stopped(due_s + 5);
            assert_eq!(stopped.due_s(group, since_s, Some(&missed)), Some(due_s + every_s));
        }
        assert!(quarters.iter().all(|count| (80..120).contains(count)), "{quarters:?}");
        let never = ScrubSettings { every_s: 0, ..settings };
        assert_eq!(never.due_s(3, since_s, None), None);
    }

    #[test]
    fn what_no_scrub_would_end_with_is_refused() {
        let settings = ScrubSettings::default();
        settings.check().unwrap();
        ScrubSettings { every_s: 0, ..settings.clone() }.check().unwrap();
        let slow = ScrubSettings { rate: 1 << 19, ..settings.clone() }.check().unwrap_err().to_string();
        assert!(
            slow.contains("a scrub rate of 524288 bytes a second is too low: at least 1048576"),
            "{slow}"
        );
        let often = ScrubSettings { every_s: 60, ..settings }.check().unwrap_err().to_string();
        assert!(often.contains("a scrub every 60 s is too often"), "{often}");
    }
}
