//! Parsers of fio's option values.

use super::arithmetic::{ExpressionUnits, evaluate};
use crate::spec::{BlockSizes, FileService};
use crate::steady::SteadyCriterion;
use crate::units::{UnitError, parse_bytes_with, parse_time_ns_with};
use crate::{AccessZone, Distribution, ZoneSize};

type ValueResult<T> = Result<T, String>;

/// Bytes; see [`parse_bytes_with`].
pub(super) fn bytes(text: &str, base: u64) -> ValueResult<u64> {
    if let Some(value) = evaluate(text, ExpressionUnits::Bytes) {
        return not_negative(value?.integer);
    }
    not_computed(text)?;
    parse_bytes_with(text, base).map_err(|error| match error {
        UnitError::Syntax => "it is a size, as 512, 4k or 1g".to_string(),
        UnitError::Overflow => "it is too large".to_string(),
    })
}

pub(super) fn bytes_u32(text: &str, base: u64) -> ValueResult<u32> {
    u32::try_from(bytes(text, base)?).map_err(|_| "it is too large".to_string())
}

/// Nanoseconds; see [`parse_time_ns_with`].
pub(super) fn time(text: &str, unit_ns: u64) -> ValueResult<u64> {
    if let Some(value) = evaluate(text, ExpressionUnits::Time) {
        let value = value?;
        // Units are in microseconds; beside one that has a unit, a number without one is in these, as in fio.
        let each_ns = if value.has_units { 1_000 } else { unit_ns };
        return not_negative(value.integer)?.checked_mul(each_ns).ok_or("it is too long".to_string());
    }
    not_computed(text)?;
    parse_time_ns_with(text, unit_ns).map_err(|error| match error {
        UnitError::Syntax => "it is a time, as 10s, 500ms or 2m".to_string(),
        UnitError::Overflow => "it is too long".to_string(),
    })
}

pub(super) fn flag(text: &str) -> ValueResult<bool> {
    match text.trim() {
        "1" | "true" | "" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err("it is 0 or 1".to_string()),
    }
}

pub(super) fn number<T: std::str::FromStr>(text: &str) -> ValueResult<T> {
    let invalid = |_| "it is not a valid number here".to_string();
    if let Some(value) = evaluate(text, ExpressionUnits::Bytes) {
        let value = value?;
        let takes_fractions = "0.5".parse::<T>().is_ok();
        let text = if takes_fractions { value.float.to_string() } else { value.integer.to_string() };
        return text.parse().map_err(|_| format!("{text} is not a valid number here"));
    }
    not_computed(text)?;
    if text.contains(',') && text.split(',').all(|part| part.trim().parse::<f64>().is_ok()) {
        return Err("it is one number, the same for reads, writes and trims".to_string());
    }
    text.trim().parse().map_err(invalid)
}

fn not_negative(value: i64) -> ValueResult<u64> {
    u64::try_from(value).map_err(|_| format!("{value} is negative"))
}

/// Rejects expressions without parentheses: fio takes the number before the operator and drops the rest.
fn not_computed(text: &str) -> ValueResult<()> {
    match text.contains(['*', '^']) {
        true => Err(format!("values are computed in parentheses: ({})", text.trim())),
        false => Ok(()),
    }
}

/// The text before and behind the first of `separators` that is not in parentheses.
pub(super) fn split_outside<'a>(text: &'a str, separators: &[char]) -> Option<(&'a str, &'a str)> {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            c if depth == 0 && separators.contains(&c) => {
                return Some((&text[..at], &text[at + c.len_utf8()..]));
            }
            _ => {}
        }
    }
    None
}

pub(super) fn in_range(text: &str, low: u64, high: u64) -> ValueResult<u64> {
    let value: u64 = number(text)?;
    if (low..=high).contains(&value) { Ok(value) } else { Err(format!("it is between {low} and {high}")) }
}

/// Up to three values: reads, writes, trims. As in fio, a single value is for all, the second of two is for
/// trims too, and an empty one leaves the setting unchanged.
pub(super) fn per_direction<T: Clone>(
    text: &str,
    parse: impl Fn(&str) -> ValueResult<T>,
) -> ValueResult<[Option<T>; 3]> {
    let parts: Vec<&str> = text.split(',').collect();
    let value = |part: &str| if part.trim().is_empty() { Ok(None) } else { parse(part).map(Some) };
    match parts.as_slice() {
        [all] => {
            let all = value(all)?;
            Ok([all.clone(), all.clone(), all])
        }
        [reads, others] => {
            let others = value(others)?;
            Ok([value(reads)?, others.clone(), others])
        }
        [reads, writes, trims] => Ok([value(reads)?, value(writes)?, value(trims)?]),
        _ => Err("it has at most three values: reads, writes, trims".to_string()),
    }
}

/// `4k-64k`
pub(super) fn range(text: &str, base: u64) -> ValueResult<BlockSizes> {
    let (min, max) = split_outside(text, &['-', ':']).ok_or("it is a range, as 4k-64k")?;
    let (min, max) = (bytes_u32(min, base)?, bytes_u32(max, base)?);
    let (min, max) = (min.min(max), min.max(max));
    if min == 0 { Err("I/Os have at least one byte".to_string()) } else { Ok(BlockSizes::Range { min, max }) }
}

/// `4k/10:64k/50:32k/40`; sizes without a percentage share the rest equally.
pub(super) fn split(text: &str, base: u64) -> ValueResult<BlockSizes> {
    let mut parts: Vec<(u32, Option<u32>)> = Vec::new();
    for part in text.split(':') {
        let (size, percent) = split_outside(part, &['/']).unwrap_or((part, ""));
        let percent = match percent.trim() {
            "" => None,
            percent => Some(in_range(percent, 0, 100)? as u32),
        };
        let size = bytes_u32(size, base)?;
        if size == 0 {
            return Err("I/Os have at least one byte".to_string());
        }
        parts.push((size, percent));
    }
    let given: u32 = parts.iter().filter_map(|(_, percent)| *percent).sum();
    let unspecified = parts.iter().filter(|(_, percent)| percent.is_none()).count() as u32;
    if given > 100 || (unspecified == 0 && given < 100) {
        return Err(format!("its percentages add up to {given}, not 100"));
    }
    // Weights in hundredths of a percent, so that a third of the rest is nearly exact.
    let each = ((100 - given) * 100).checked_div(unspecified).unwrap_or(0);
    let weighted = parts.into_iter().map(|(size, percent)| (size, percent.map_or(each, |p| p * 100)));
    Ok(BlockSizes::Split(weighted.filter(|(_, weight)| *weight > 0).collect()))
}

/// `zipf:1.2`, `zoned:60/10:40/90`, …
pub(super) fn distribution(text: &str, base: u64) -> ValueResult<Distribution> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let parameter = |default: f64| -> ValueResult<f64> {
        let first = rest.split(',').next().unwrap_or_default();
        let value = if first.is_empty() { default } else { number(first)? };
        if rest.contains(',') {
            return Err("a centre is not supported; hot blocks are scattered over the region".to_string());
        }
        if value.is_finite() && value > 0.0 { Ok(value) } else { Err("its parameter is above 0".to_string()) }
    };
    match name {
        "random" => Ok(Distribution::Uniform),
        "zipf" => Ok(Distribution::Zipf { theta: parameter(1.1)? }),
        "pareto" => {
            let h = parameter(0.2)?;
            if h < 1.0 {
                Ok(Distribution::Pareto { h })
            } else {
                Err("pareto's share is below 1".to_string())
            }
        }
        "normal" | "gauss" => Ok(Distribution::Normal { deviation: parameter(5.0)? }),
        "zoned" | "zoned_abs" => access_zones(rest, name == "zoned_abs", base).map(Distribution::Zoned),
        _ => Err("it is one of random, zipf, pareto, normal, zoned, zoned_abs".to_string()),
    }
}

fn access_zones(text: &str, absolute: bool, base: u64) -> ValueResult<Vec<AccessZone>> {
    if text.contains(',') {
        return Err("zones are the same for reads, writes and trims here".to_string());
    }
    let mut zones = Vec::new();
    // Zones without a size share the rest equally, as in fio; each with its number.
    let mut unsized_zones = Vec::new();
    for part in text.split(':') {
        let (access, size) = split_outside(part, &['/']).ok_or("a zone is ACCESS/SIZE, as 60/10")?;
        let access_percent: f64 = number(access)?;
        let size = if !absolute && size.trim().is_empty() {
            unsized_zones.push(zones.len());
            ZoneSize::Percent(0.0)
        } else if absolute {
            ZoneSize::Bytes(bytes(size, base)?)
        } else {
            ZoneSize::Percent(number::<f64>(size.trim().trim_end_matches('%'))?)
        };
        let is_valid = |percent: f64| (0.0..=100.0).contains(&percent);
        if !is_valid(access_percent) || matches!(size, ZoneSize::Percent(percent) if !is_valid(percent)) {
            return Err("percentages are between 0 and 100".to_string());
        }
        zones.push(AccessZone { access_percent, size });
    }
    let access: f64 = zones.iter().map(|zone| zone.access_percent).sum();
    let percent_of = |zone: &AccessZone| if let ZoneSize::Percent(size) = zone.size { size } else { 0.0 };
    let rest = (100.0 - zones.iter().map(percent_of).sum::<f64>()).max(0.0);
    for index in &unsized_zones {
        zones[*index].size = ZoneSize::Percent(rest / unsized_zones.len() as f64);
    }
    let size: f64 = zones.iter().map(percent_of).sum();
    if (access - 100.0).abs() > 0.01 || (!absolute && (size - 100.0).abs() > 0.01) {
        return Err(format!("access adds up to {access} % and sizes to {size} %, not 100"));
    }
    Ok(zones)
}

pub(super) fn file_service(text: &str) -> ValueResult<FileService> {
    let (name, ios_per_turn) = text.split_once(':').unwrap_or((text, "1"));
    let ios_per_turn = in_range(ios_per_turn, 1, u64::from(u32::MAX))? as u32;
    match name {
        "roundrobin" => Ok(FileService::RoundRobin(ios_per_turn)),
        "random" => Ok(FileService::Random(ios_per_turn)),
        "sequential" => Ok(FileService::Sequential),
        _ => Err("it is one of roundrobin, random, sequential".to_string()),
    }
}

/// Cores as in `0-3,5`, or a mask such as `0x2f`; at most 4096 cores.
pub(super) fn cpus(text: &str) -> ValueResult<Vec<u32>> {
    text.parse::<os::CpuSet>().map(|set| set.cpus().to_vec()).map_err(|error| error.to_string())
}

/// The bytes of `"text"`, `0xdeadbeef` or a number (little-endian).
pub(super) fn pattern(text: &str) -> ValueResult<Vec<u8>> {
    let hint = || "it is \"TEXT\", a number, or hexadecimal as 0xdeadbeef".to_string();
    let text = text.trim();
    let found = if let Some(quoted) = text.strip_prefix('"') {
        quoted.strip_suffix('"').ok_or_else(hint)?.as_bytes().to_vec()
    } else if let Some(hex) = text.strip_prefix("0x") {
        let even = if hex.len() % 2 == 0 { hex.to_string() } else { format!("0{hex}") };
        if !even.is_ascii() {
            return Err(hint());
        }
        let byte = |at: usize| u8::from_str_radix(&even[at..at + 2], 16).map_err(|_| hint());
        (0..even.len()).step_by(2).map(byte).collect::<ValueResult<Vec<u8>>>()?
    } else {
        let value: u64 = number(text).map_err(|_| hint())?;
        let bytes = value.to_le_bytes();
        let used = (8 - value.leading_zeros() as usize / 8).max(1);
        bytes[..used].to_vec()
    };
    if (1..=4096).contains(&found.len()) { Ok(found) } else { Err("it has 1 to 4096 bytes".to_string()) }
}

/// `iops:5%`, `bw_slope:1m`
pub(super) fn steady_criterion(text: &str, base: u64) -> ValueResult<SteadyCriterion> {
    let hint = || "it is iops, iops_slope, bw or bw_slope with a limit: iops:5%".to_string();
    let (metric, limit) = text.split_once(':').ok_or_else(hint)?;
    let (of_bandwidth, of_slope) = match metric.trim() {
        "iops" => (false, false),
        "iops_slope" => (false, true),
        "bw" => (true, false),
        "bw_slope" => (true, true),
        _ => return Err(hint()),
    };
    let percent = limit.trim().strip_suffix('%');
    let value = match percent {
        None if of_bandwidth => bytes(limit, base)? as f64,
        _ => number(percent.unwrap_or(limit))?,
    };
    if !(value > 0.0 && value.is_finite()) {
        return Err("the limit is above 0".to_string());
    }
    Ok(SteadyCriterion { of_bandwidth, of_slope, limit: value, in_percent: percent.is_some() })
}

/// `50:99:99.9`
pub(super) fn percentiles(text: &str) -> ValueResult<Vec<f64>> {
    // fio's lists may end with a separator.
    let list = text.trim_end_matches(':').split(':').map(number::<f64>).collect::<ValueResult<Vec<f64>>>()?;
    let is_valid = list.iter().all(|percent| *percent > 0.0 && *percent <= 100.0);
    if is_valid && list.len() <= 20 {
        Ok(list)
    } else {
        Err("it has up to 20 numbers above 0 and up to 100".to_string())
    }
}

/// A size in bytes or in percent.
pub(super) fn bytes_or_percent(text: &str, base: u64) -> ValueResult<(Option<u64>, Option<u8>)> {
    match text.trim().strip_suffix('%') {
        Some(percent) => Ok((None, Some(in_range(percent, 0, 100)? as u8))),
        None => Ok((Some(bytes(text, base)?), None)),
    }
}

/// A number of zones, as `8z`; `None` for other sizes.
pub(super) fn zones(text: &str) -> ValueResult<Option<u64>> {
    match text.trim().strip_suffix('z') {
        Some(count) => number(count).map(Some),
        None => Ok(None),
    }
}

/// A number from 0 to 1.
pub(super) fn share(text: &str) -> ValueResult<f64> {
    let value: f64 = number(text)?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("it is between 0 and 1".to_string()) }
}

/// Names of error numbers of POSIX that I/Os end with.
const ERRORS: [(&str, i32); 14] = [
    ("EPERM", 1),
    ("EIO", 5),
    ("ENXIO", 6),
    ("EAGAIN", 11),
    ("ENOMEM", 12),
    ("EBUSY", 16),
    ("EINVAL", 22),
    ("EFBIG", 27),
    ("ENOSPC", 28),
    ("EROFS", 30),
    ("ENODATA", 61),
    ("EILSEQ", 84),
    ("EOPNOTSUPP", 95),
    ("ETIMEDOUT", 110),
];

/// `ENOSPC:5`
pub(super) fn errors(text: &str) -> ValueResult<Vec<i32>> {
    let error = |part: &str| {
        let part = part.trim();
        let named = ERRORS.iter().find(|(name, _)| *name == part).map(|(_, number)| *number);
        let numbered = || part.parse::<i32>().ok().filter(|number| (1..4096).contains(number));
        named.or_else(numbered).ok_or_else(|| {
            format!("{part} is none of {} and no number", ERRORS.map(|(name, _)| name).join(", "))
        })
    };
    text.split(':').filter(|part| !part.trim().is_empty()).map(error).collect()
}
