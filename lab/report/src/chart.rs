//! Charts as inline SVG.
//!
//! Drawn here rather than by a plotting library, because of what the page asks for: colours that are CSS
//! variables, so that one drawing serves light, dark and paper; a group per series, so that a script can
//! hide it; dashes that are an attribute instead of hundreds of short lines; a label at the end of each
//! line instead of a legend; and a few kilobytes a chart, since a page may hold hundreds.
//!
//! A chart is a value: [`Plot`] (lines over an axis: J-curves, scaling, distributions), [`Bars`] (grouped
//! or stacked) or [`Heat`] (a table of colours). `svg()` gives the element, all text escaped. A chart with
//! nothing to show gives an empty string.
//!
//! ```
//! use report::chart::{Axis, Plot, Scale, Series};
//! let plot = Plot {
//!     title: "Latency over throughput".into(),
//!     x: Axis::new("KIOPS", Scale::Linear),
//!     y: Axis::new("mean latency, us", Scale::Log10),
//!     series: vec![Series::new("none", vec![(10.0, 70.0), (300.0, 110.0), (370.0, 400.0)])],
//!     listed: false,
//! };
//! assert!(plot.svg().starts_with("<svg"));
//! ```

mod bars;
mod heat;
mod labels;
mod number;
mod palette;
mod plot;
mod scale;
mod svg;
#[cfg(test)]
mod tests;

pub use bars::{Bar, Bars, Column, Group, Stack};
pub use heat::Heat;
pub use number::{grouped, short};
pub use plot::{Axis, Plot, Series};
pub use scale::Scale;
pub use svg::escape;
