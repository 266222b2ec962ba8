//! Charts as inline SVG.
//!
//! This module replaces a plotting library to meet the requirements of the page: colours as CSS variables, so
//! that one chart works in light mode, dark mode and print; one group per series, which a script can hide;
//! dashes as an attribute instead of many short lines; a label at the end of each line instead of a legend;
//! and a few kilobytes per chart, because a page may hold hundreds.
//!
//! The chart types are [`Plot`] (lines), [`BarChart`] (grouped bars), [`StackedColumns`], [`Heatmap`] and [`OverTime`].
//! `svg()` returns the `<svg>` element with all text escaped, or an empty string for a chart without data.
//!
//! ```
//! use lab_report::chart::{Axis, AxisScale, Plot, Series};
//! let plot = Plot {
//!     title: "Latency over throughput".into(),
//!     x: Axis::new("KIOPS", AxisScale::Linear),
//!     y: Axis::new("mean latency, µs", AxisScale::Log10),
//!     series: vec![Series::new("none", vec![(10.0, 70.0), (300.0, 110.0), (370.0, 400.0)])],
//!     legend: false,
//! };
//! assert!(plot.svg().starts_with("<svg"));
//! ```

mod bars;
mod heatmap;
mod labels;
mod legend;
mod number;
mod over_time;
mod palette;
mod plot;
mod scale;
mod svg;
#[cfg(test)]
mod tests;

pub use bars::{BarChart, BarGroup, ChartBar, StackedColumn, StackedColumns};
pub use heatmap::Heatmap;
pub(crate) use number::format_limit;
pub use number::{format_integer, format_number};
pub use over_time::{HeatCell, OverTime};
pub(crate) use palette::canonical_rank;
pub(crate) use palette::name_rank;
pub use plot::{Axis, Plot, Series};
pub use scale::AxisScale;
pub use svg::escape;
