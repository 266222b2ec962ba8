//! Parsing and formatting of sizes and times in fio's notation.

/// Parses bytes: `4096`, `4k`, `1m`, `1GiB`; units are powers of 1024, fio's default.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let unit = text[digits..].trim().to_ascii_lowercase();
    let shift = match unit.trim_end_matches('b').trim_end_matches('i') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

/// Parses a time to nanoseconds: `10` (seconds), `10s`, `500ms`, `2m`, `1h`, `100us`.
pub fn parse_time_ns(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let unit = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "s" | "sec" => 1_000_000_000,
        "us" | "usec" => 1_000,
        "ms" | "msec" => 1_000_000,
        "m" | "min" => 60_000_000_000,
        "h" | "hour" => 3_600_000_000_000,
        "d" | "day" => 86_400_000_000_000,
        _ => return None,
    };
    number.checked_mul(unit)
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
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [("0", 0), ("512", 512), ("4k", 4096), ("4K", 4096), ("1MiB", 1 << 20)] {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
        }
        assert_eq!(parse_bytes("3g"), Some(3 << 30));
        for text in ["", "k", "4x", "-1", "1.5k", "99999999999p"] {
            assert_eq!(parse_bytes(text), None, "{text}");
        }
    }

    #[test]
    fn times_without_a_unit_are_seconds() {
        assert_eq!(parse_time_ns("10"), Some(10_000_000_000));
        assert_eq!(parse_time_ns("10s"), parse_time_ns("10000ms"));
        assert_eq!(parse_time_ns("2m"), Some(120_000_000_000));
        assert_eq!(parse_time_ns("fast"), None);
    }

    #[test]
    fn formatted_numbers_have_units() {
        assert_eq!(format_count(48_300_000.0), "48.30M");
        assert_eq!(format_rate(2e9), "1.86 GiB/s");
        assert_eq!(format_ns(12_345.0), "12.3 us");
    }
}
