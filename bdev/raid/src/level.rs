//! Levels: their names, and what they want of their members.

use bdev::BdevError;
use bdev::stacking::PLACES_MAX;
use wire_raid::RaidLevel;

/// The levels that are supported, by SPDK's names; the first of each is the usual one.
const NAMES: [(&str, RaidLevel); 7] = [
    ("raid0", RaidLevel::Raid0),
    ("0", RaidLevel::Raid0),
    ("raid1", RaidLevel::Raid1),
    ("1", RaidLevel::Raid1),
    ("concat", RaidLevel::Concat),
    ("raid5f", RaidLevel::Raid5f),
    ("5f", RaidLevel::Raid5f),
];

/// The level of a name, in any case.
pub(crate) fn parse_level(text: &str) -> Option<RaidLevel> {
    NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text)).map(|(_, level)| *level)
}

/// The usual name of a level.
pub(crate) fn level_name(level: RaidLevel) -> &'static str {
    match level {
        RaidLevel::Raid0 => "raid0",
        RaidLevel::Raid1 => "raid1",
        RaidLevel::Raid5f => "raid5f",
        RaidLevel::Concat => "concat",
    }
}

/// Whether arrays of a level do without a member: they have a superblock that records it, and a bitmap.
pub(crate) fn is_redundant(level: RaidLevel) -> bool {
    matches!(level, RaidLevel::Raid1 | RaidLevel::Raid5f)
}

/// Least members with data that make an array of `members`.
pub(crate) fn members_min(level: RaidLevel, members: usize) -> usize {
    match level {
        RaidLevel::Raid0 | RaidLevel::Concat => members,
        RaidLevel::Raid1 => 1,
        RaidLevel::Raid5f => members.saturating_sub(1),
    }
}

/// Checks what an array is to be: SPDK's rules, and what is supported here.
///
/// # Errors
/// [`BdevError::Invalid`] with the parameter.
pub(crate) fn check_level(level: RaidLevel, strip_size_kb: u32, members: usize) -> Result<(), BdevError> {
    let invalid = |field, reason: String| Err(BdevError::Invalid { field, reason });
    let least = match level {
        RaidLevel::Raid0 | RaidLevel::Concat => 1,
        RaidLevel::Raid1 => 2,
        RaidLevel::Raid5f => 3,
    };
    if level == RaidLevel::Raid1 {
        if strip_size_kb != 0 {
            return invalid("strip_size_kb", "raid1 has no strips".to_string());
        }
    } else if !strip_size_kb.is_power_of_two() || strip_size_kb > STRIP_SIZE_KB_MAX {
        let reason = format!("{strip_size_kb} is not a power of two from 1 to {STRIP_SIZE_KB_MAX}");
        return invalid("strip_size_kb", reason);
    }
    if !(least..=PLACES_MAX).contains(&members) {
        let name = level_name(level);
        return invalid("base_bdevs", format!("{name} has {least} to {PLACES_MAX} members, not {members}"));
    }
    Ok(())
}

/// 1 GiB: the strips of a request are pieces of it, and none is larger.
const STRIP_SIZE_KB_MAX: u32 = 1 << 20;
