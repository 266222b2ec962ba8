//! Parsing and formatting of sizes and times in fio's notation.

/// Why a size or a time cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitError {
    /// Not a number with a known unit.
    Syntax,
    /// The value exceeds 64 bits.
    Overflow,
}

/// Parses bytes with fio's default base: [`parse_bytes_with`] 1024.
pub fn parse_bytes(text: &str) -> Option<u64> {
    parse_bytes_with(text, 1024).ok()
}

/// Parses bytes: a decimal number, or a hexadecimal one after `0x`, and a unit in either case. `k`, `m`, `g`, `t` and
/// `p` are powers of `base` (fio's `kb_base`, 1024 or 1000), `ki` to `pi` always of 1024; a `b` may follow. Signs and
/// fractions are errors.
pub fn parse_bytes_with(text: &str, base: u64) -> Result<u64, UnitError> {
    let text = text.trim();
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => (hex, 16),
        None => (text, 10),
    };
    let (number, unit) = split_number(digits, radix)?;
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let (unit, base) = match unit.strip_suffix('i') {
        Some("") => return Err(UnitError::Syntax),
        Some(unit) => (unit, 1024),
        None => (unit, base),
    };
    let power = match unit {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        _ => return Err(UnitError::Syntax),
    };
    number.checked_mul(base.pow(power)).ok_or(UnitError::Overflow)
}

/// Parses a time to nanoseconds; a number without a unit is in seconds: [`parse_time_ns_with`] 10^9.
pub fn parse_time_ns(text: &str) -> Option<u64> {
    parse_time_ns_with(text, 1_000_000_000).ok()
}

/// Parses a time to nanoseconds, such as `500ms` or `2m`. The units are `ns`, `us`, `ms` (also `nsec`, `usec`, `msec`),
/// `s`, `m`, `h` and `d` (also `sec`, `min`, `hour`, `day`), in either case. A number without a unit is a multiple of
/// `unit_ns`.
pub fn parse_time_ns_with(text: &str, unit_ns: u64) -> Result<u64, UnitError> {
    let (number, unit) = split_number(text.trim(), 10)?;
    let unit_ns = match unit.as_str() {
        "" => unit_ns,
        "ns" | "nsec" => 1,
        "us" | "usec" => 1_000,
        "ms" | "msec" => 1_000_000,
        "s" | "sec" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" | "hour" => 3_600_000_000_000,
        "d" | "day" => 86_400_000_000_000,
        _ => return Err(UnitError::Syntax),
    };
    number.checked_mul(unit_ns).ok_or(UnitError::Overflow)
}

/// Splits digits from the unit, which is returned in lower case.
fn split_number(text: &str, radix: u32) -> Result<(u64, String), UnitError> {
    let end = text.find(|c: char| !c.is_digit(radix)).unwrap_or(text.len());
    if end == 0 {
        return Err(UnitError::Syntax);
    }
    // Only digits: what remains is a number of more than 64 bits.
    let number = u64::from_str_radix(&text[..end], radix).map_err(|_| UnitError::Overflow)?;
    Ok((number, text[end..].trim().to_ascii_lowercase()))
}

/// Formats a count: `48.30M`, `950.0k`, `12`.
pub fn format_count(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.2}G", v / 1e9),
        v if v >= 1e6 => format!("{:.2}M", v / 1e6),
        v if v >= 1e4 => format!("{:.1}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// Formats bytes a second: `1.86 GiB/s`.
pub fn format_rate(bytes_per_second: f64) -> String {
    match bytes_per_second {
        v if v >= 1024.0 * 1048576.0 => format!("{:.2} GiB/s", v / 1073741824.0),
        v if v >= 1048576.0 => format!("{:.1} MiB/s", v / 1048576.0),
        v => format!("{:.1} KiB/s", v / 1024.0),
    }
}

/// Formats a time: `870 ns`, `12.3 us`, `4.56 ms`.
pub fn format_ns(ns: f64) -> String {
    match ns {
        v if v >= 1e9 => format!("{:.2} s", v / 1e9),
        v if v >= 1e6 => format!("{:.2} ms", v / 1e6),
        v if v >= 1e3 => format!("{:.1} us", v / 1e3),
        v => format!("{v:.0} ns"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_the_base_or_of_1024() {
        for (text, base, bytes) in [
            ("0", 1024, 0),
            ("512", 1024, 512),
            ("4k", 1024, 4096),
            ("4K", 1000, 4000),
            ("4kb", 1000, 4000),
            ("4ki", 1000, 4096),
            ("1MiB", 1000, 1 << 20),
            ("3g", 1024, 3 << 30),
            (" 0x10k ", 1024, 16 << 10),
            ("0X1b", 1024, 27),
            ("1 t", 1024, 1 << 40),
        ] {
            assert_eq!(parse_bytes_with(text, base), Ok(bytes), "{text}");
        }
        for text in ["", "k", "4x", "-1", "+1", "1.5k", "4bb", "4i", "4ib", "0x", "4kk"] {
            assert_eq!(parse_bytes_with(text, 1024), Err(UnitError::Syntax), "{text}");
        }
        for text in ["99999999999p", "18446744073709551616"] {
            assert_eq!(parse_bytes_with(text, 1024), Err(UnitError::Overflow), "{text}");
        }
        assert_eq!((parse_bytes("4k"), parse_bytes("4x")), (Some(4096), None));
    }

    #[test]
    fn times_have_units_or_the_given_one() {
        for (text, unit_ns, ns) in [
            ("10", 1_000_000_000, 10_000_000_000),
            ("10", 1_000, 10_000),
            ("10s", 1, 10_000_000_000),
            ("10000ms", 1, 10_000_000_000),
            ("7nsec", 1_000, 7),
            ("2M", 1, 120_000_000_000),
            ("1 day", 1, 86_400_000_000_000),
        ] {
            assert_eq!(parse_time_ns_with(text, unit_ns), Ok(ns), "{text}");
        }
        assert_eq!(parse_time_ns_with("fast", 1), Err(UnitError::Syntax));
        assert_eq!(parse_time_ns_with("999999999d", 1), Err(UnitError::Overflow));
        assert_eq!((parse_time_ns("10"), parse_time_ns("fast")), (Some(10_000_000_000), None));
    }

    #[test]
    fn formatted_numbers_have_units() {
        assert_eq!(format_count(48_300_000.0), "48.30M");
        assert_eq!(format_rate(2e9), "1.86 GiB/s");
        assert_eq!(format_ns(12_345.0), "12.3 us");
    }
}
