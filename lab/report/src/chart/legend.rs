//! Legends below a chart: as many names a row as fit.

use super::plot::truncate_label;
use super::svg::{Anchor, FONT_SLACK, Rect, Svg, text_width};

/// Width of all charts in pixels: what a phone shows without making the text smaller.
pub(super) const WIDTH: f64 = 372.0;
const LABEL_PX: f64 = 11.5;
/// Width of a sample with the space behind it.
const SAMPLE: f64 = 20.0;
const ROW: f64 = 15.5;
/// Space between a name and the next sample.
const GAP: f64 = 14.0;

/// What a legend shows beside a name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LegendSample {
    Line,
    Bar,
}

/// A name of a legend, with the class of its series.
pub(super) struct LegendEntry {
    pub(super) name: String,
    pub(super) class: String,
}

/// A legend whose entries have their places.
pub(super) struct Legend {
    entries: Vec<(LegendEntry, f64, usize)>,
    rows: usize,
}

impl Legend {
    pub(super) fn new(entries: Vec<LegendEntry>) -> Legend {
        let (mut x, mut row) = (2.0, 0);
        let place = |entry: LegendEntry| {
            let width = SAMPLE + text_width(&truncate_label(&entry.name), LABEL_PX) * FONT_SLACK + GAP;
            if x > 2.0 && x + width - GAP > WIDTH {
                (x, row) = (2.0, row + 1);
            }
            let at = x;
            x += width;
            (entry, at, row)
        };
        let entries: Vec<_> = entries.into_iter().map(place).collect();
        let rows = if entries.is_empty() { 0 } else { row + 1 };
        Legend { entries, rows }
    }

    /// Pixels; 0 without entries.
    pub(super) fn height(&self) -> f64 {
        self.rows as f64 * ROW
    }

    pub(super) fn draw(&self, svg: &mut Svg, top: f64, sample: LegendSample) {
        for (LegendEntry { name, class }, x, row) in &self.entries {
            let y = top + *row as f64 * ROW;
            svg.series(class, name);
            match sample {
                LegendSample::Line => svg.path("l", &[(*x, y + 6.0), (x + SAMPLE - 5.0, y + 6.0)]),
                LegendSample::Bar => {
                    let place = Rect { x: x + 3.0, y: y + 1.0, width: 10.0, height: 10.0 };
                    svg.rect("r", place, None, "");
                }
            }
            svg.text("n", x + SAMPLE, y + 10.0, Anchor::Start, &truncate_label(name));
            svg.end();
        }
    }
}

/// Names below columns of a chart, which are `step` pixels wide: in two rows where one has no room, and only every
/// second name, or fewer, where two have none.
pub(super) struct ColumnNames {
    /// Each how many columns one has a name.
    every: usize,
    rows: usize,
}

impl ColumnNames {
    /// Height of a row.
    pub(super) const ROW: f64 = 13.0;

    pub(super) fn new<'a>(names: impl Iterator<Item = &'a str>, step: f64) -> ColumnNames {
        let widest = names.map(|name| text_width(&truncate_label(name), 11.0)).fold(0.0, f64::max);
        let columns = (widest * FONT_SLACK + 6.0) / step;
        if columns <= 1.0 {
            return ColumnNames { every: 1, rows: 1 };
        }
        ColumnNames { every: (columns / 2.0).ceil().max(1.0) as usize, rows: 2 }
    }

    /// The row of a column's name; `None` if it has none.
    pub(super) fn row(&self, column: usize) -> Option<usize> {
        column.is_multiple_of(self.every).then(|| column / self.every % self.rows)
    }
}
