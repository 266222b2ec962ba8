//! Metrics, each declared once with [`metrics!`](crate::metrics!): name, kind, unit, labels and help.
//!
//! The declaration is the only place: the results of `metrics_get`, the OpenMetrics text of
//! `metrics_get_openmetrics` and the reference (docs/METRICS.md) follow from it. A [`Module`](crate::Module)
//! lists what it declares in [`metrics`](crate::Module::metrics), and adds the present values in
//! [`collect`](crate::Module::collect).
//!
//! ```
//! control::metrics! {
//!     /// Metrics of a bakery.
//!     static BAKERY {
//!         /// Loaves that were sold
//!         SOLD = "ringbolt_bakery_sold": counter [kind];
//!         /// Flour in store
//!         FLOUR = "ringbolt_bakery_flour_bytes": gauge ("bytes");
//!     }
//! }
//! let mut samples = control::MetricSamples::default();
//! samples.add(&SOLD, &["rye"], 7_u64);
//! samples.add(&FLOUR, &[], 1_000_u64);
//! assert!(samples.openmetrics().contains("ringbolt_bakery_sold_total{kind=\"rye\"} 7\n"));
//! assert_eq!(BAKERY.len(), 2);
//! ```

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value, json};

mod openmetrics;
mod reference;

pub use reference::markdown;

/// What a value of a metric means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "as they are written in a declaration")]
pub enum MetricKind {
    /// Grows from 0 at the start of the program, or of what its labels name.
    counter,
    /// Has any value at any time.
    gauge,
    /// Counts of observations by size, with their number and sum.
    histogram,
}

/// A declared metric: a family of values, one for each combination of its labels.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name: `ringbolt_`, the part of the program, what is measured, and the unit if there is one. In
    /// OpenMetrics the values of a counter end in `_total`.
    pub name: &'static str,
    /// What its values mean.
    pub kind: MetricKind,
    /// A base unit: `seconds`, `bytes` or `ratio`; a mere number has none.
    pub unit: Option<&'static str>,
    /// Names of its labels, in the order of their values.
    pub labels: &'static [&'static str],
    /// What it is, without a full stop.
    help: &'static str,
}

/// A value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricValue {
    /// A whole number.
    Whole(u64),
    /// A number in the metric's unit.
    Number(f64),
    /// Of a histogram.
    Histogram(HistogramSample),
}

/// The observations of a histogram.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistogramSample {
    /// For each upper bound, ascending, the number of observations that do not exceed it.
    pub buckets: Vec<(f64, u64)>,
    /// All observations.
    pub count: u64,
    /// Their sum, in the metric's unit.
    pub sum: f64,
}

/// The values of metrics at a time, collected for one answer.
#[derive(Debug, Default)]
pub struct MetricSamples {
    families: BTreeMap<&'static str, MetricFamily>,
}

#[derive(Debug)]
struct MetricFamily {
    metric: &'static Metric,
    samples: Vec<(Vec<String>, MetricValue)>,
    /// Index into these, by labels.
    by_labels: HashMap<Vec<String>, usize>,
}

/// Declares metrics as statics, and a slice of all of them.
#[macro_export]
macro_rules! metrics {
    (
        $(#[$attribute:meta])*
        $visibility:vis static $all:ident {
            $(
                $(#[doc = $help:literal])+
                $metric:ident = $name:literal : $kind:ident $(($unit:literal))? $([$($label:ident),+ $(,)?])? ;
            )+
        }
    ) => {
        $(
            $(#[doc = $help])+
            $visibility static $metric: $crate::Metric = $crate::Metric::declare(
                $name,
                $crate::MetricKind::$kind,
                &[$($unit)?],
                &[$($(stringify!($label)),+)?],
                concat!($($help),+),
            );
        )+
        $(#[$attribute])*
        $visibility static $all: &[&$crate::Metric] = &[$(&$metric),+];
    };
}

impl Metric {
    /// For [`metrics!`](crate::metrics!). A name that does not follow the rules does not compile.
    pub const fn declare(
        name: &'static str,
        kind: MetricKind,
        unit: &'static [&'static str],
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Metric {
        assert!(starts_with(name.as_bytes(), b"ringbolt_"), "a metric's name begins with ringbolt_");
        assert!(!ends_with(name.as_bytes(), b"_total"), "_total is added where it belongs");
        let unit = match unit {
            [unit] => {
                let bytes = name.as_bytes();
                let separator = bytes.len() - unit.len() - 1;
                assert!(ends_with(bytes, unit.as_bytes()), "a metric's name ends with its unit");
                assert!(bytes[separator] == b'_', "a metric's name ends with its unit");
                Some(*unit)
            }
            _ => None,
        };
        Metric { name, kind, unit, labels, help }
    }

    /// What it is, without a full stop.
    pub fn help(&self) -> &'static str {
        // As a comment it begins with a space.
        self.help.trim()
    }
}

const fn starts_with(text: &[u8], start: &[u8]) -> bool {
    let mut index = 0;
    while index < start.len() {
        if index >= text.len() || text[index] != start[index] {
            return false;
        }
        index += 1;
    }
    true
}

const fn ends_with(text: &[u8], end: &[u8]) -> bool {
    text.len() > end.len() && starts_with(text.split_at(text.len() - end.len()).1, end)
}

impl MetricKind {
    /// As in a declaration, in OpenMetrics and in `metrics_get`.
    pub const fn name(self) -> &'static str {
        match self {
            MetricKind::counter => "counter",
            MetricKind::gauge => "gauge",
            MetricKind::histogram => "histogram",
        }
    }
}

impl MetricSamples {
    /// Adds a value, with a value of each label. One of the same labels that is there already is added up, as
    /// of the parts of one thing. Our own declarations: panics if labels or kind are not those of the metric.
    pub fn add(&mut self, metric: &'static Metric, labels: &[&str], value: impl Into<MetricValue>) {
        let value = value.into();
        assert_eq!(labels.len(), metric.labels.len(), "{} has the labels {:?}", metric.name, metric.labels);
        let is_histogram = matches!(value, MetricValue::Histogram(_));
        assert_eq!(is_histogram, metric.kind == MetricKind::histogram, "the kind of {}", metric.name);
        let new = || MetricFamily { metric, samples: Vec::new(), by_labels: HashMap::new() };
        let family = self.families.entry(metric.name).or_insert_with(new);
        let labels: Vec<String> = labels.iter().map(|label| label.to_string()).collect();
        if let Some(index) = family.by_labels.get(&labels) {
            return family.samples[*index].1.add(value);
        }
        family.by_labels.insert(labels.clone(), family.samples.len());
        family.samples.push((labels, value));
    }

    /// The value with these labels; `None` if there is none.
    pub fn get(&self, metric: &Metric, labels: &[&str]) -> Option<&MetricValue> {
        let family = self.families.get(metric.name)?;
        let labels: Vec<String> = labels.iter().map(|label| label.to_string()).collect();
        family.by_labels.get(&labels).map(|index| &family.samples[*index].1)
    }

    /// The values as JSON, by name: the result of `metrics_get`. Without a name, all.
    pub fn to_json(&self, name: Option<&str>) -> Vec<Value> {
        let selected =
            self.families.values().filter(|family| name.is_none_or(|name| family.metric.name == name));
        selected.map(MetricFamily::to_json).collect()
    }

    /// The values as OpenMetrics text, version 1.0.0.
    pub fn openmetrics(&self) -> String {
        openmetrics::text(self.families.values().map(|family| (family.metric, family.samples.as_slice())))
    }
}

impl MetricFamily {
    fn to_json(&self) -> Value {
        let metric = self.metric;
        let samples = self.samples.iter().map(|(labels, value)| {
            let labels = metric.labels.iter().zip(labels);
            let labels: Map<String, Value> =
                labels.map(|(name, label)| (name.to_string(), json!(label))).collect();
            let mut sample = json!({ "labels": labels });
            match value {
                MetricValue::Whole(value) => sample["value"] = json!(value),
                MetricValue::Number(value) => sample["value"] = json!(value),
                MetricValue::Histogram(value) => {
                    let bucket = |(bound, count): &(f64, u64)| json!({ "le": bound, "count": count });
                    sample["buckets"] = value.buckets.iter().map(bucket).collect();
                    sample["count"] = json!(value.count);
                    sample["sum"] = json!(value.sum);
                }
            }
            sample
        });
        json!({
            "name": metric.name,
            "kind": metric.kind.name(),
            "unit": metric.unit,
            "help": metric.help(),
            "samples": samples.collect::<Vec<_>>(),
        })
    }
}

impl MetricValue {
    fn add(&mut self, other: MetricValue) {
        *self = match (std::mem::replace(self, MetricValue::Whole(0)), other) {
            (MetricValue::Histogram(one), MetricValue::Histogram(other)) => {
                MetricValue::Histogram(one.with(other))
            }
            (MetricValue::Whole(one), MetricValue::Whole(other)) => MetricValue::Whole(one + other),
            (one, other) => MetricValue::Number(one.number() + other.number()),
        };
    }

    fn number(&self) -> f64 {
        match self {
            MetricValue::Whole(value) => *value as f64,
            MetricValue::Number(value) => *value,
            MetricValue::Histogram(value) => value.sum,
        }
    }
}

impl HistogramSample {
    /// Both together. The bounds of one metric are the same everywhere.
    fn with(mut self, other: HistogramSample) -> HistogramSample {
        for (bound, count) in other.buckets {
            match self.buckets.iter_mut().find(|(known, _)| *known == bound) {
                Some((_, known)) => *known += count,
                None => self.buckets.push((bound, count)),
            }
        }
        (self.count, self.sum) = (self.count + other.count, self.sum + other.sum);
        self
    }
}

impl From<u64> for MetricValue {
    fn from(value: u64) -> MetricValue {
        MetricValue::Whole(value)
    }
}

impl From<usize> for MetricValue {
    fn from(value: usize) -> MetricValue {
        MetricValue::Whole(value as u64)
    }
}

impl From<u32> for MetricValue {
    fn from(value: u32) -> MetricValue {
        MetricValue::Whole(value.into())
    }
}

impl From<f64> for MetricValue {
    fn from(value: f64) -> MetricValue {
        MetricValue::Number(value)
    }
}

impl From<HistogramSample> for MetricValue {
    fn from(value: HistogramSample) -> MetricValue {
        MetricValue::Histogram(value)
    }
}

#[cfg(test)]
mod tests;
