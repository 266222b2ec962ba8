//! Number formatting for charts and tables.

/// Formats three significant digits with a comma as thousands separator. Values below 1e-4 or from 1e9 use
/// scientific notation; a value that is not finite becomes a dash.
pub fn format_number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "–".to_string();
    }
    if size == 0.0 {
        return "0".to_string();
    }
    if !(1e-4..1e9).contains(&size) {
        return format!("{value:.2e}");
    }
    let digits = size.log10().floor() as i32;
    // Rounding comes before formatting, so that 999.6 becomes 1,000 and not 1000.0.
    let unit = 10f64.powi(2 - digits);
    let rounded = if digits >= 2 { value.round() } else { (value * unit).round() / unit };
    let places = if digits >= 2 { 0 } else { (2 - digits) as usize };
    let text = format!("{rounded:.places$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    thousands(text)
}

/// Formats an integer with a comma as thousands separator.
pub fn format_integer(value: u64) -> String {
    thousands(&value.to_string())
}

/// Inserts a comma before each group of three digits of the integer part.
fn thousands(text: &str) -> String {
    let (whole, fraction) = text.split_once('.').map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut out = sign.to_string();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if let Some(fraction) = fraction {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// Formats an end of an interval: as [`format_number`], with SI suffixes from a million on. What is far below anything
/// that matters has no digits.
pub(crate) fn format_limit(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if size >= 1e9 && value.is_finite() => format!("{}G", format_number(value / 1e9)),
        _ if size >= 1e6 && value.is_finite() => format!("{}M", format_number(value / 1e6)),
        _ if size < 1e-3 && value > 0.0 => "<0.001".to_string(),
        _ => format_number(value),
    }
}

/// Formats a tick label with SI suffixes (k, M, G) and at most three decimals. Powers of two have all digits.
pub(super) fn tick_label(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if size == 0.0 => "0".to_string(),
        _ if size >= 1e9 => format!("{}G", trimmed(value / 1e9)),
        _ if size >= 1e6 => format!("{}M", trimmed(value / 1e6)),
        _ if size >= 1e3 && value % 100.0 == 0.0 => format!("{}k", trimmed(value / 1e3)),
        _ if size < 1e-6 => format!("{value:.0e}"),
        _ if size < 1e-3 => format!("{value:.6}").trim_end_matches('0').to_string(),
        _ => thousands(&trimmed(value)),
    }
}

fn trimmed(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
