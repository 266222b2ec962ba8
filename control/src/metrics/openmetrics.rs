//! OpenMetrics 1.0.0 text, as Prometheus and others scrape it.

use std::fmt::Write;

use super::{Metric, MetricKind, MetricValue};

/// Writing to a string cannot fail.
macro_rules! push {
    ($text:expr, $($line:tt)*) => {{
        let _ = writeln!($text, $($line)*);
    }};
}

type Samples<'a> = &'a [(Vec<String>, MetricValue)];

/// The families, in their order, and the end that the format requires.
pub(super) fn text<'a>(families: impl Iterator<Item = (&'a Metric, Samples<'a>)>) -> String {
    let mut text = String::new();
    for (metric, samples) in families {
        let name = metric.name;
        push!(text, "# TYPE {name} {}", metric.kind.name());
        if let Some(unit) = metric.unit {
            push!(text, "# UNIT {name} {unit}");
        }
        push!(text, "# HELP {name} {}.", escaped(metric.help()));
        for (values, sample) in samples {
            let labels: Vec<(&str, &str)> =
                metric.labels.iter().copied().zip(values.iter().map(String::as_str)).collect();
            let suffix = if metric.kind == MetricKind::counter { "_total" } else { "" };
            match sample {
                MetricValue::Whole(value) => push!(text, "{name}{suffix}{} {value}", set(&labels, None)),
                MetricValue::Number(value) => {
                    push!(text, "{name}{suffix}{} {}", set(&labels, None), number(*value));
                }
                MetricValue::Histogram(value) => {
                    for (bound, count) in &value.buckets {
                        push!(text, "{name}_bucket{} {count}", set(&labels, Some(&number(*bound))));
                    }
                    push!(text, "{name}_bucket{} {}", set(&labels, Some("+Inf")), value.count);
                    push!(text, "{name}_count{} {}", set(&labels, None), value.count);
                    push!(text, "{name}_sum{} {}", set(&labels, None), number(value.sum));
                }
            }
        }
    }
    text.push_str("# EOF\n");
    text
}

/// Labels in braces, with the upper bound of a bucket.
fn set(labels: &[(&str, &str)], bound: Option<&str>) -> String {
    let bound = bound.map(|bound| ("le", bound));
    let pairs = labels.iter().copied().chain(bound);
    let pairs: Vec<String> = pairs.map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
}

/// A label or a help text: names of devices and tenants come from users and peers.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A floating-point number, which has a point in the canonical form.
fn number(value: f64) -> String {
    format!("{value:?}")
}
